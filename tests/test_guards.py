"""The start-up checks pass where all is well, and each planted mistake is found by one of them."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from bireme import guards, parallel
from bireme.data import Corpus, open_tokens, prepare
from bireme.data.loader import Share
from bireme.errors import SharedError
from bireme.guards import check_gradients, check_reductions, check_replicas, check_samples, check_start
from bireme.layout import Layout, Pipeline
from bireme.mesh import Mesh, local
from bireme.model import preset
from bireme.parallel import Parallel, Plan, parallelise
from bireme.world import World, here

torch.set_num_threads(1)

Ranks = Callable[..., list[Any]]

FSDP = Layout(dp_shard=2)
DDP = Layout(dp_replicate=2)
HSDP = Layout(dp_replicate=2, dp_shard=2)


def plan_of(layout: Layout, shape: str = "toy", **fields: Any) -> Plan:
    model = preset(shape, sequence_length=8, num_layers=2, embedding_dim=32, feed_forward_dim=48, vocab_size=64)
    pipeline = Pipeline(schedule="1f1b", stages_per_rank=1, micro_batches=2)
    return replace(
        Plan(
            layout=layout,
            order=list(range(layout.size)),
            model=model,
            seed=3,
            length=8,
            micro_batch_size=1,
            pipeline=pipeline,
        ),
        **fields,
    )


def world_of() -> World:
    return here(dist.get_rank(), torch.device("cpu"))


def start(plan: Plan) -> tuple[Parallel, World]:
    return parallelise(plan, torch.device("cpu")), world_of()


# --- samples -----------------------------------------------------------------------------------------------------


def samples_said(rank: int, size: int, text: Path, shares: list[dict[str, Any]]) -> list[str | None]:
    """What is said of each division of the samples; `rank` and `ranks` may be a function of this rank."""
    os.environ["BIREME_CACHE"] = str(text.parent / "cache")
    corpus = Corpus(open_tokens(prepare(str(text))), 16, 256)
    said: list[str | None] = []
    for fields in shares:
        place = fields.get("place", [0, 1])
        standard = {"seed": 0, "global_batch_size": 32, "micro_batches": 1, "ranks": 2}
        given = {name: value for name, value in fields.items() if name not in ("place", "before_border")}
        if "before_border" in fields:
            given["first_sample"] = corpus.num_train_samples - fields["before_border"]
        share = Share(**{**standard, "corpus": corpus, "rank": place[rank], **given})
        try:
            check_samples(share, world_of())
            said.append(None)
        except SharedError as error:
            said.append(str(error))
    return said


def test_samples_that_are_not_divided_are_found(ranks: Ranks, tmp_path: Path) -> None:
    """B34."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} squared is {n * n};\n" for n in range(150)))
    cases: list[dict[str, Any]] = [
        {},
        {"place": [0, 0]},  # two ranks of one replica
        {"before_border": 32},
        *({"before_border": size} for size in (1, 8, 16, 31)),  # a batch of two epochs may have a sample twice
        {"ranks": 1, "place": [0, 0], "global_batch_size": 1_000_000},
    ]
    for said in ranks(2, samples_said, text, cases):
        assert said == [None] * len(cases)
    wrong = ranks(2, samples_undivided, text)
    assert wrong[0] == wrong[1]
    assert "ranks 0-1 would both train on sample" in wrong[0] and "not divided over the ranks" in wrong[0]
    wrong = ranks(2, samples_torn, text)
    assert "ranks 0-1 compute one replica's step together, but read different samples" in wrong[0]


def samples_undivided(rank: int, size: int, text: Path) -> str:
    with patch("bireme.data.loader.rank_share", lambda batch, rank, ranks: slice(0, batch // ranks)):
        return str(samples_said(rank, size, text, [{}])[0])


def samples_torn(rank: int, size: int, text: Path) -> str:
    return str(samples_said(rank, size, text, [{"place": [0, 0], "seed": rank}])[0])


# --- all is well -------------------------------------------------------------------------------------------------


def check_well(rank: int, size: int, plans: list[Plan]) -> list[dict[str, Any]]:
    found = []
    for plan in plans:
        model, world = start(plan)
        found.append(check_start(model, world).as_dict())
    return found


@pytest.mark.parametrize("shape", ["toy", "toy-llama"])
def test_right_layouts_pass(ranks: Ranks, shape: str) -> None:
    """Tied and untied; every kind of parallelism alone, on two ranks."""
    layouts = [DDP, FSDP, Layout(pp=2), Layout(tp=2)]
    plans = [plan_of(layout, shape) for layout in layouts] + [plan_of(DDP, shape, overlap=False)]
    for rank_found in ranks(2, check_well, plans, timeout_s=120):
        assert [each["corrected"] for each in rank_found] == [[]] * len(plans)
        assert [each["groups"] for each in rank_found[:2]] == [["replicate"], ["shard", "model"]]


def test_combined_layouts_pass(ranks: Ranks) -> None:
    plans = [plan_of(HSDP), plan_of(Layout(pp=2, dp_replicate=2)), plan_of(Layout(pp=2, dp_shard=2), "toy-llama")]
    found = ranks(4, check_well, plans, timeout_s=180)
    assert found[0][0]["groups"] == ["replicate", "shard", "model"]


# --- mistakes ----------------------------------------------------------------------------------------------------


@contextmanager
def averages_are_sums() -> Iterator[None]:
    """A backend that adds where it should average."""

    def mistaken(call: Any) -> Any:
        def reduce(*args: Any, **kwargs: Any) -> Any:
            args = tuple(
                each if isinstance(each, torch.Tensor) or each != dist.ReduceOp.AVG else dist.ReduceOp.SUM
                for each in args
            )
            if kwargs.get("op") == dist.ReduceOp.AVG:
                kwargs["op"] = dist.ReduceOp.SUM
            return call(*args, **kwargs)

        return reduce

    names = [name for name in ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_single") if hasattr(dist, name)]
    patches = [patch.object(dist, name, mistaken(getattr(dist, name))) for name in names]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def said(check: Callable[[], Any]) -> str:
    """What a check raises; every rank must."""
    try:
        check()
    except SharedError as error:
        return str(error)
    return "nothing"


def with_sums_for_averages(rank: int, size: int) -> tuple[list[str], str, list[str]]:
    with averages_are_sums():
        model, world = start(plan_of(FSDP))
        wrong = check_reductions(model.mesh, world)
        uncorrected = said(lambda: check_gradients(model.plan, model.mesh, world))
        return wrong, uncorrected, check_start(model, world).corrected


def test_a_backend_that_sums_instead_of_averaging_is_corrected(ranks: Ranks) -> None:
    """B19: no error anywhere, gradients twice as large."""
    for wrong, uncorrected, corrected in ranks(2, with_sums_for_averages):
        assert wrong == ["shard"]
        assert "layout fsdp computes wrong gradients here" in uncorrected and "off by 100%" in uncorrected
        assert corrected == ["shard"]


def with_wrong_sums(rank: int, size: int) -> str:
    model, world = start(plan_of(DDP))
    original = dist.all_reduce

    def wrong(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(tensor, *args, **kwargs)
        tensor[0] += 1
        return result

    with patch.object(guards.dist, "all_reduce", wrong):
        return said(lambda: check_reductions(model.mesh, world))


def test_a_backend_whose_sums_are_wrong_is_refused(ranks: Ranks) -> None:
    for text in ranks(2, with_wrong_sums):
        assert text.startswith("the all-reduce sum over the replicate group of ranks 0-1 came out wrong: backend gloo")


def without_division(rank: int, size: int) -> str:
    def summed(tensors: Any, group: Any, before: Any = None) -> None:
        original(tensors, group)

    original = parallel._all_reduce_flat
    with patch.object(parallel, "_all_reduce_flat", summed):
        # Replicas of pipelines are reduced by that function.
        model, world = start(plan_of(Layout(pp=2, dp_replicate=2)))
        return said(lambda: check_start(model, world))


def test_sums_instead_of_means_are_found(ranks: Ranks) -> None:
    for text in ranks(4, without_division):
        assert "computes wrong gradients here: of a small model" in text and "off by 100%" in text


def without_replica_reduction(rank: int, size: int) -> tuple[str, str]:
    model, world = start(plan_of(HSDP))
    original = Parallel.accumulating

    def forgetful(self: Parallel, last: bool) -> Any:
        context = original(self, last)
        _forget_replicas(self)
        return context

    with patch.object(Parallel, "accumulating", forgetful):
        at_start = said(lambda: check_start(model, world))
    for _, each in model.named_parameters():  # as unreduced gradients would be: other ones on each replica
        each.grad = torch.full_like(each, float(model.mesh.where["replicate"]))
    torch.optim.SGD([each for _, each in model.named_parameters()], lr=0.1).step()
    return at_start, said(lambda: check_replicas(model, torch.device("cpu"), "after step 1"))


def _forget_replicas(made: Parallel) -> None:
    for module in made.model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_all_reduce(False)


def test_a_replica_reduction_that_is_left_out_is_found(ranks: Ranks) -> None:
    for at_start, after_step in ranks(4, without_replica_reduction):
        assert "layout hsdp 2x2 computes wrong gradients" in at_start and "is missing" in at_start
        assert after_step.startswith(
            "after step 1, ranks 0, 2 should hold the same weights and do not: token_embedding"
        )


def with_seeds_of_their_own(rank: int, size: int, layout: Layout) -> tuple[str, str, str]:
    model, world = start(plan_of(layout, seed=rank))
    settings = said(lambda: check_start(model, world))
    # As if the setting were right and only the initialisation wrong.
    model.plan = replace(model.plan, seed=0)
    replicas = said(lambda: check_replicas(model, world.device, "before the first step"))
    return settings, said(lambda: guards.check_parameters(model, world)), replicas


@pytest.mark.parametrize("layout", [Layout(dp_replicate=2, tp=2), HSDP], ids=str)
def test_another_seed_on_each_rank_is_found(ranks: Ranks, layout: Layout) -> None:
    """B24: each replica, or each shard, starts from other weights."""
    for settings, parameters, replicas in ranks(4, with_seeds_of_their_own, layout):
        assert settings == ("the ranks were started with different settings: seed is 0 on rank 0, but 1 on ranks 1-3")
        assert (
            "rank 1: " in parameters
            and "rank 0" not in parameters
            and "does not start from the weights that one process has" in parameters
        )
        assert replicas.startswith("before the first step, ranks ") and "should hold the same weights" in replicas


def with_an_untied_pipeline(rank: int, size: int) -> tuple[str, str]:
    """The two ends of a tied embedding, without their reduction; and then really apart."""
    model, world = start(plan_of(Layout(pp=2)))
    model.mesh.tied = None
    gradients = said(lambda: check_gradients(model.plan, model.mesh, world))
    if rank == 1:
        with torch.no_grad():
            local(dict(model.named_parameters())["output.weight"])[0] += 1
    return gradients, said(lambda: check_replicas(model, world.device, "after step 1"))


def test_a_tied_embedding_that_comes_apart_is_found(ranks: Ranks) -> None:
    for gradients, replicas in ranks(2, with_an_untied_pipeline):
        assert "computes wrong gradients" in gradients and ("token_embedding" in gradients or "output" in gradients)
        assert "ranks 0-1 should hold the same weights and do not: the embedding, or the head" in replicas


def with_a_norm_of_its_own(rank: int, size: int) -> str:
    model, world = start(plan_of(Layout(tp=2)))

    def local_norm(self: Parallel) -> Any:
        mesh, self.mesh = self.mesh, Mesh(self.mesh.layout, [], self.mesh.where, None, {})
        try:
            return original(self)
        finally:
            self.mesh = mesh

    original = Parallel.gradient_norm
    with patch.object(Parallel, "gradient_norm", local_norm):
        return said(lambda: check_start(model, world))


def test_a_norm_of_this_ranks_part_only_is_found(ranks: Ranks) -> None:
    """B25: clipping would be too weak, and another on each rank."""
    for text in ranks(2, with_a_norm_of_its_own):
        assert "computes a wrong gradient norm here" in text and "wrong on rank" in text


def with_another_norm_weight(rank: int, size: int) -> str:
    model, world = start(plan_of(Layout(tp=2)))
    if rank == 1:
        with torch.no_grad():
            local(dict(model.named_parameters())["norm.weight"])[0] += 1
    return said(lambda: check_replicas(model, world.device, "after step 1"))


def test_what_tensor_parallel_ranks_share_is_told_from_what_they_divide(ranks: Ranks) -> None:
    for text in ranks(2, with_another_norm_weight):
        assert "ranks 0-1 should hold the same weights and do not: norm.weight;" in text


def with_a_small_memory(rank: int, size: int) -> int:
    """The most elements of whole blocks that were there at once, while the model was built."""
    largest, sharded = 0, parallel.fully_shard

    def spy(module: Any, **options: Any) -> Any:
        nonlocal largest
        whole = sum(
            each.numel()
            for part in built
            for each in part.layers.parameters()
            if each.device.type != "meta" and not hasattr(each, "placements")
        )
        largest = max(largest, whole)
        return sharded(module, **options)

    built: list[Any] = []
    with patch.object(parallel, "fully_shard", spy):
        parallelise(plan_of(FSDP), torch.device("cpu"), tune=built.append)
    return largest


def test_never_more_than_one_whole_block_is_in_memory(ranks: Ranks) -> None:
    a_block = sum(each.numel() for each in parallel.GPT(plan_of(FSDP).model).layers["0"].parameters())
    assert ranks(2, with_a_small_memory) == [a_block, a_block]
