import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

import bireme.parallel
from bireme import parity
from bireme.layout import Layout
from bireme.mesh import Mesh, local
from bireme.observe.collectives import hooks_missing, process_groups
from bireme.parallel import Parallel, Plan
from bireme.parity import (
    TOLERANCE,
    Expected,
    Outcome,
    References,
    assemble,
    largest_error,
    make_batches,
    one_process,
    run_variant,
)
from bireme.parity_cases import Case, Variant, model_of
from bireme.replicas import Flat, Overlapped
from bireme.world import here

if TYPE_CHECKING:
    from tests.pool import RankPool
else:
    RankPool = Any

DDP, FSDP, HSDP = Layout(dp_replicate=4), Layout(dp_shard=4), Layout(dp_replicate=2, dp_shard=2)
GPT2_K4, LLAMA_K4 = Variant(shape="gpt2", micro_batches=4), Variant(shape="llama", micro_batches=4)
TIED = Case(Layout(pp=2, dp_replicate=2), "1f1b")
STEPS = 2  # what is wrong shows in the first


# --- one process -------------------------------------------------------------------------------------------------


def test_one_process_takes_steps_with_the_gradients_it_returns() -> None:
    config = model_of(Layout(), "gpt2")
    batches = make_batches(Layout(), "gpt2", 3)
    found = one_process(config, 5, batches)
    again = one_process(config, 5, [batches[0], batches[0], batches[2]])
    assert found[0].loss == again[0].loss != one_process(config, 6, batches[:1])[0].loss
    assert found[1].loss != again[1].loss, "every step has its own batch"
    assert again[1].loss < again[0].loss, "a step goes down the gradient"
    for each in found:
        every = torch.cat([value.flatten() for name, value in each.gradients.items() if name != "output.weight"])
        assert each.norm == pytest.approx(float(every.norm()), rel=1e-5), "the tied weight counts once"
        assert each.norm > 1.0, "clipping has something to do, and the gradients are those before it"
    assert torch.equal(found[0].gradients["output.weight"], found[0].gradients["token_embedding.weight"])


def fake(**gradients: torch.Tensor | None) -> Any:
    """Something with parameters that have these gradients."""
    parameters = {}
    for name, gradient in gradients.items():
        parameters[name] = nn.Parameter(torch.zeros(2, 2) if gradient is None else torch.zeros_like(gradient))
        parameters[name].grad = gradient
    return SimpleNamespace(named_parameters=parameters.items)


def test_an_error_is_relative_to_the_tensors_largest_gradient() -> None:
    whole = torch.tensor([[4.0, 1.0], [0.0, -8.0]])
    expected = Expected(1.0, {"a": whole, "b": whole / 100}, 10.0)
    assert largest_error(fake(a=whole.clone(), b=whole / 100), expected)[0] == 0.0
    off = whole.clone()
    off[1, 0] += 0.08
    error, name = largest_error(fake(a=whole.clone(), b=off / 100), expected)
    assert name == "b" and error == pytest.approx(0.01, rel=1e-3)


def test_a_gradient_of_zero_is_held_against_the_global_norm() -> None:
    expected = Expected(1.0, {"a": torch.zeros(2, 2)}, 10.0)
    error, _ = largest_error(fake(a=torch.full((2, 2), 1e-11)), expected)
    assert error == pytest.approx(1e-6, rel=1e-3)


@pytest.mark.parametrize(
    "gradient", [None, torch.full((2, 2), math.nan), torch.full((2, 2), math.inf), torch.ones(3, 2)]
)
def test_what_is_no_gradient_is_infinitely_wrong(gradient: torch.Tensor | None) -> None:
    expected = Expected(1.0, {"a": torch.ones(2, 2), "b": torch.ones(2, 2)}, 2.0)
    for order in ({"a": gradient, "b": torch.ones(2, 2)}, {"b": torch.ones(2, 2), "a": gradient}):
        assert largest_error(fake(**order), expected) == (math.inf, "a")


# --- all ranks together ------------------------------------------------------------------------------------------


def seen(losses: list[float], error: float = 0.0, norm: float = 2.0, reductions: float | None = 1.0) -> Any:
    return parity._Seen(losses, [(error, "a")], [norm], reductions)


def test_the_worst_of_all_ranks_counts() -> None:
    expected = [Expected(4.0, {}, 2.0)]
    outcome = assemble(GPT2_K4, [seen([3.0]), seen([], error=0.5, norm=2.5), seen([5.5], reductions=4.0)], expected)
    assert outcome.losses == [4.25] and outcome.loss_errors == [0.0625]
    assert outcome.gradient_errors == [(0.5, "a")] and outcome.norm_errors == [0.25] and outcome.reductions == 4.0
    assert outcome.worst() == (0.5, 1, "a") and not outcome.passed
    assert assemble(GPT2_K4, [seen([4.0]), seen([], norm=2.5)], expected).worst() == (0.25, 1, "gradient norm")
    assert assemble(GPT2_K4, [seen([math.inf])], expected).worst() == (math.inf, 1, "loss")
    assert assemble(GPT2_K4, [seen([4.0], norm=math.nan)], expected).worst()[2] == "gradient norm"
    assert assemble(GPT2_K4, [seen([4.0]), seen([], reductions=0.0)], expected).reductions == 0.0
    assert assemble(GPT2_K4, [seen([4.0], reductions=None)], expected).reductions is None
    assert assemble(GPT2_K4, [seen([4.0])], expected).passed


# --- right layouts, and wrong ones -------------------------------------------------------------------------------

Change = Callable[[], AbstractContextManager[Any]]


def built(change: Callable[[Parallel], None], plan_of: Callable[[Plan], Plan] = lambda plan: plan) -> Any:
    """Changes the plan before and the wrapped model after it is built."""
    right = parity.parallelise

    def wrong(plan: Plan, device: torch.device) -> Parallel:
        parallel = right(plan_of(plan), device)
        change(parallel)
        return parallel

    return patch.object(parity, "parallelise", wrong)


def sums_flat() -> Any:
    return patch.object(Flat, "reduce", lambda self: dist.all_reduce(self._flat))


def sums_replicas_of_pipelines() -> Any:
    right = bireme.parallel._all_reduce_flat
    return patch.object(bireme.parallel, "_all_reduce_flat", lambda tensors, group, before=None: right(tensors, group))


def sums_shards() -> Any:
    def change(parallel: Parallel) -> None:
        for module in parallel._wrapped[0].modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)

    return built(change)


def leaves_out_the_replicas() -> Any:
    right = Mesh.sub
    return patch.object(Mesh, "sub", lambda self, *names: right(self, *(name for name in names if name != "replicate")))


def has_a_wrong_seed_on_one_rank() -> Any:
    return built(lambda parallel: None, lambda plan: replace(plan, seed=plan.seed + (dist.get_rank() == 1)))


def leaves_out_the_tied_weights() -> Any:
    def change(parallel: Parallel) -> None:
        parallel.mesh.tied = None

    return built(change)


def counts_shared_gradients_twice() -> Any:
    def all_of_them(self: Parallel) -> list[torch.Tensor]:
        return [local(each.grad) for each in self._named.values() if each.grad is not None]

    return patch.object(Parallel, "_counted", all_of_them)


def loses_a_micro_batch() -> Any:
    right = Overlapped.accumulating
    return patch.object(Overlapped, "accumulating", lambda self, last: right(self, not last))


def scales_one_bias() -> Any:
    right = Parallel.reduce

    def wrong(self: Parallel) -> None:
        right(self)
        dict(self.named_parameters())["layers.1.attention.wq.bias"].grad.mul_(1.01)  # type: ignore[union-attr]

    return patch.object(Parallel, "reduce", wrong)


def reduces_every_micro_batch() -> Any:
    """Right, and dear: the one fault that only counting shows."""
    return patch.object(Parallel, "accumulating", lambda self, last: nullcontext())


@contextmanager
def learns_faster_on_one_rank() -> Iterator[None]:
    right = parity.make_optimizer

    def wrong(parameters: Any) -> torch.optim.Optimizer:
        optimizer = right(parameters)
        for group in optimizer.param_groups:
            group["lr"] *= 1.01 if dist.get_rank() == 1 else 1.0
        return optimizer

    with patch.object(parity, "make_optimizer", wrong):
        yield


WRONG: dict[str, tuple[Change, Case, Variant, str]] = {
    "sums, flat": (sums_flat, Case(DDP), replace(GPT2_K4, overlap=False), ""),
    "sums, replicas of a pipeline": (sums_replicas_of_pipelines, TIED, GPT2_K4, ""),
    "sums, shards": (sums_shards, Case(FSDP), GPT2_K4, ""),
    "leaves out the replica reduction of hsdp": (leaves_out_the_replicas, Case(HSDP), GPT2_K4, ""),
    "wrong seed on one rank": (has_a_wrong_seed_on_one_rank, Case(FSDP), LLAMA_K4, ""),
    "leaves out the tied embedding": (leaves_out_the_tied_weights, TIED, GPT2_K4, "weight"),
    "counts a norm twice": (
        counts_shared_gradients_twice,
        Case(Layout(dp_replicate=2, tp=2)),
        Variant(shape="gpt2", micro_batches=1),
        "gradient norm",
    ),
    "loses a micro-batch": (loses_a_micro_batch, Case(DDP), GPT2_K4, ""),
    "one bias off by 1 %": (scales_one_bias, Case(DDP), GPT2_K4, "layers.1.attention.wq.bias"),
    "learns faster on one rank": (learns_faster_on_one_rank, Case(FSDP), GPT2_K4, ""),
}

RIGHT: list[tuple[Case, Variant, float]] = [
    (Case(DDP), GPT2_K4, 1.0),
    (Case(DDP), replace(LLAMA_K4, overlap=False), 1.0),
    (Case(FSDP), replace(GPT2_K4, reshard=False), 1.0),
    (Case(HSDP), replace(LLAMA_K4, checkpointing=True), 1.0),
    (Case(Layout(pp=4), "gpipe"), Variant(shape="gpt2", micro_batches=1), 0.0),
    (Case(Layout(pp=2, dp_shard=2), "interleaved"), LLAMA_K4, 1.0),
    (TIED, GPT2_K4, 1.0),
    (Case(Layout(pp=2, tp=2), "1f1b"), Variant(shape="llama", micro_batches=2, checkpointing=True), 0.0),
]


def run_all(rank: int, size: int) -> tuple[list[Outcome], dict[str, Outcome], Outcome, int]:
    world = here(rank, torch.device("cpu"))
    seeds = [References(5, seed=0), References(5, seed=1)]
    right = [run_variant(case, variant, seeds[index % 2], world) for index, (case, variant, _) in enumerate(RIGHT)]
    references = References(STEPS)
    wrong = {}
    for name, (change, case, variant, _) in WRONG.items():
        with change():
            wrong[name] = run_variant(case, variant, references, world)
    with reduces_every_micro_batch():
        dear = run_variant(Case(FSDP), GPT2_K4, references, world)
    return right, wrong, dear, len(process_groups())


@pytest.fixture(scope="module")
def four(ranks: RankPool) -> tuple[list[Outcome], dict[str, Outcome], Outcome, int]:
    results = ranks(4, run_all, timeout_s=400.0)
    assert all(repr(each) == repr(results[0]) for each in results), "every rank knows the same result"
    return results[0]  # type: ignore[no-any-return]


def test_right_layouts_pass_with_room_to_spare(four: Any) -> None:
    right, _, _, _ = four
    for (case, variant, _), outcome in zip(RIGHT, right, strict=True):
        error, step, tensor = outcome.worst()
        assert error <= TOLERANCE / 2, f"{case}, {variant}, step {step}: {tensor} is off by {error}"
        assert outcome.passed and len(outcome.losses) == 5
        assert outcome.losses[-1] < outcome.losses[0]


@pytest.mark.skipif(hooks_missing() is not None, reason="reductions cannot be counted")
def test_gradients_are_reduced_once_a_step(four: Any) -> None:
    """B20: with four micro-batches too, and four reductions show."""
    right, wrong, dear, _ = four
    for (case, variant, reductions), outcome in zip(RIGHT, right, strict=True):
        assert outcome.reductions == pytest.approx(reductions), f"{case}, {variant}"
    assert wrong["leaves out the replica reduction of hsdp"].reductions == 0.0
    assert dear.passed and dear.reductions == pytest.approx(4.0)


@pytest.mark.parametrize("name", list(WRONG))
def test_a_wrong_layout_fails(four: Any, name: str) -> None:
    _, wrong, _, _ = four
    error, step, tensor = wrong[name].worst()
    assert not wrong[name].passed and error > 100 * TOLERANCE
    assert tensor.endswith(WRONG[name][3]), f"{tensor} in step {step}"


def test_the_first_step_is_where_a_wrong_gradient_is_found(four: Any) -> None:
    _, wrong, _, _ = four
    assert wrong["one bias off by 1 %"].gradient_errors[0][0] == pytest.approx(0.01, rel=0.2)
    assert wrong["sums, flat"].gradient_errors[0][0] == pytest.approx(3.0, rel=0.01)
    learning = wrong["learns faster on one rank"]
    assert learning.gradient_errors[0][0] <= TOLERANCE < learning.gradient_errors[1][0]
    norm = wrong["counts a norm twice"]
    assert norm.gradient_errors[0][0] <= TOLERANCE, "only the norm is wrong"


def test_its_process_groups_are_gone_afterwards(four: Any) -> None:
    assert four[3] == 1
