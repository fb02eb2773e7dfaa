from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bireme.model import GPT, preset
from bireme.observe.collectives import CollectiveObserver, hooks_missing
from bireme.replicas import Flat, Overlapped, replicate

torch.set_num_threads(1)

Ranks = Callable[..., list[Any]]

needs_hooks = pytest.mark.skipif(hooks_missing() is not None, reason=str(hooks_missing()))

SEQUENCES = 16
BUCKET_MB = 0.02
both = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "flat"])
accumulations = pytest.mark.parametrize("accumulation", [1, 4])


def model_of(seed: int = 3) -> GPT:
    model = GPT(preset("toy", sequence_length=8, num_layers=2, embedding_dim=32, feed_forward_dim=48))
    model.reset_parameters(seed)
    return model


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 256, (SEQUENCES, 9), generator=torch.Generator().manual_seed(5))
    return tokens[:, :-1], tokens[:, 1:]


def gradients_of(model: GPT) -> dict[str, Tensor]:
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def backward(rank: int, size: int, model: GPT, replicas: Any, accumulation: int) -> None:
    inputs, targets = (each.chunk(size)[rank].chunk(accumulation) for each in batch())
    for index in range(accumulation):
        with replicas.accumulating(index == accumulation - 1):
            loss = replicas.model(inputs[index], targets[index])
            (loss / accumulation).backward()
    replicas.reduce()


def train_step(
    rank: int, size: int, overlap: bool, accumulation: int
) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    """The gradients of the first step and of a second one of the same batch, and whether ranks agree bit for bit."""
    model = model_of(seed=rank)  # rank 0's weights are the truth
    replicas = replicate(model, overlap, BUCKET_MB)
    backward(rank, size, model, replicas, accumulation)
    first = gradients_of(model)
    replicas.zero()
    backward(rank, size, model, replicas, accumulation)
    second = gradients_of(model)
    flat = torch.cat([each.flatten() for each in second.values()])
    everybodys = [torch.empty_like(flat) for _ in range(size)]
    dist.all_gather(everybodys, flat)
    return first, second, all(torch.equal(each, flat) for each in everybodys)


@pytest.fixture(scope="module")
def alone() -> dict[str, Tensor]:
    """The gradients of one process that has the whole batch."""
    model = model_of(seed=0)
    model(*batch()).backward()
    return gradients_of(model)


@both
@accumulations
def test_gradients_are_those_of_one_process(
    overlap: bool, accumulation: int, ranks: Ranks, alone: dict[str, Tensor]
) -> None:
    norm = torch.cat([each.flatten() for each in alone.values()]).norm()
    for first, second, agree in ranks(2, train_step, overlap, accumulation):
        assert agree
        for gradients in (first, second):
            assert gradients.keys() == alone.keys()
            for name, expected in alone.items():
                error = (gradients[name] - expected).abs().max()
                assert error <= 1e-6 * expected.abs().max() + 1e-6 * norm, name


@both
def test_four_ranks(overlap: bool, ranks: Ranks, alone: dict[str, Tensor]) -> None:
    norm = torch.cat([each.flatten() for each in alone.values()]).norm()
    for _, second, agree in ranks(4, train_step, overlap, 1):
        assert agree
        for name, expected in alone.items():
            assert (second[name] - expected).abs().max() <= 1e-6 * expected.abs().max() + 1e-6 * norm, name


def count_reductions(rank: int, size: int, overlap: bool, accumulation: int) -> tuple[list[list[int]], int, int]:
    """The bytes of each reduction, step by step; the number of buckets; the bytes of all gradients."""
    model = model_of()
    replicas = replicate(model, overlap, BUCKET_MB)
    steps = []
    for _ in range(4):
        observer = CollectiveObserver({0: dist.distributed_c10d._get_default_group()})
        backward(rank, size, model, replicas, accumulation)
        replicas.zero()
        steps.append([span.bytes for span in observer.take() if span.operation == "all_reduce"])
        observer.close()
        assert observer.failure is None, observer.failure
    buckets = 1
    if isinstance(replicas, Overlapped):
        logged: Any = replicas.model._get_ddp_logging_data()
        buckets = len(str(logged["rebuilt_bucket_sizes"]).split(","))
    return steps, buckets, sum(each.numel() * 4 for each in model.parameters())


@needs_hooks
@accumulations
def test_flat_reduces_once_per_optimizer_step(accumulation: int, ranks: Ranks) -> None:
    for steps, _, gradient_bytes in ranks(2, count_reductions, False, accumulation):
        assert steps == [[gradient_bytes]] * 4


@needs_hooks
@accumulations
def test_overlapped_reduces_each_bucket_once_per_optimizer_step(accumulation: int, ranks: Ranks) -> None:
    for steps, buckets, gradient_bytes in ranks(2, count_reductions, True, accumulation):
        assert buckets > 1
        # The first step finds out in which order gradients come; the buckets are settled after it.
        assert [len(step) for step in steps[1:]] == [buckets] * 3
        assert [sum(step) for step in steps] == [gradient_bytes] * 4


def train_with_adamw(rank: int, size: int, overlap: bool) -> list[float]:
    model = model_of(seed=rank)
    replicas = replicate(model, overlap, None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, targets = (each.chunk(size)[rank] for each in batch())
    losses = []
    for _ in range(5):
        loss = replicas.model(inputs, targets)
        loss.backward()
        replicas.reduce()
        optimizer.step()
        replicas.zero()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / size)
    return losses


def test_both_ways_train_alike(ranks: Ranks) -> None:
    overlapped, flat = (ranks(2, train_with_adamw, overlap) for overlap in (True, False))
    assert overlapped[0] == overlapped[1] and flat[0] == flat[1]
    assert overlapped[0] == pytest.approx(flat[0], rel=1e-5)
    assert flat[0][-1] < flat[0][0]


def sizes_of_buckets(rank: int, size: int) -> tuple[float, float]:
    small = replicate(model_of(), True, None)
    large = GPT(preset("toy", sequence_length=8, num_layers=8, embedding_dim=128, feed_forward_dim=512))
    replicas = replicate(large, True, None)
    assert isinstance(small, Overlapped) and isinstance(replicas, Overlapped)
    size_mb = sum(each.numel() for each in large.parameters()) * 4 / 2**20
    return small.bucket_mb, size_mb / replicas.bucket_mb


def test_about_eight_buckets_unless_they_get_too_small(ranks: Ranks) -> None:
    for smallest_mb, buckets in ranks(2, sizes_of_buckets):
        assert smallest_mb == 0.25
        assert buckets == pytest.approx(8)


def keep_views(rank: int, size: int) -> bool:
    model = model_of()
    replicas = replicate(model, False, None)
    assert isinstance(replicas, Flat)
    places = [each.grad.data_ptr() for each in model.parameters() if each.grad is not None]
    for _ in range(2):
        backward(rank, size, model, replicas, 1)
        replicas.zero()
    assert all(each.grad is not None and not each.grad.any() for each in model.parameters())
    return places == [each.grad.data_ptr() for each in model.parameters() if each.grad is not None]


def test_flat_gradients_stay_in_one_buffer(ranks: Ranks) -> None:
    assert ranks(2, keep_views) == [True, True]
