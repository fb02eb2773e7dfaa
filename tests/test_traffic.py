"""What a layout is said to send, against what the hooks see it send; and what of that crosses nodes, by hand."""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from bireme.layout import SCHEDULES, Layout, Pipeline, arrange
from bireme.model import PRESETS, ModelConfig, num_parameters, preset
from bireme.observe.collectives import CollectiveObserver, hooks_missing, process_groups
from bireme.parallel import Plan, parallelise
from bireme.traffic import crossing_bytes, node_bytes, uses

torch.set_num_threads(1)

Ranks = Callable[..., list[Any]]
Seen = Counter[tuple[tuple[int, ...], str, int]]  # how many, by (members, operation, bytes of each)

needs_hooks = pytest.mark.skipif(hooks_missing() is not None, reason=str(hooks_missing()))

SAMPLES, LENGTH = 16, 16


def model(base: str, num_layers: int, tp: int = 1, tied: bool | None = None) -> ModelConfig:
    """A tiny model whose sizes divide over the tensor-parallel ranks, but not over shards."""
    return preset(
        base,
        sequence_length=20,  # longer than the samples
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=4 if base == "toy" else 2,
        embedding_dim=40,
        feed_forward_dim=tp * 25,
        vocab_size=tp * 33 if tp > 1 else 65,
        tied_embedding=(base == "toy") if tied is None else tied,
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    layout: Layout
    micro_batches: int = 1
    schedule: str = "1f1b"
    base: str = "toy"
    tied: bool | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def plan(self) -> Plan:
        return Plan(
            layout=self.layout,
            order=range(self.layout.size),
            model=model(self.base, 4 if self.layout.pp > 1 else 2, self.layout.tp, self.tied),
            seed=7,
            length=LENGTH,
            micro_batch_size=SAMPLES // self.layout.data_parallel_size // self.micro_batches,
            pipeline=Pipeline(
                schedule=self.schedule,
                stages_per_rank=2 if self.schedule == "interleaved" else 1,
                micro_batches=self.micro_batches,
            ),
            **self.options,
        )


def one_step(plan: Plan, parallel: Any, optimizer: torch.optim.Optimizer) -> None:
    micro_batches = plan.pipeline.micro_batches
    tokens = torch.zeros(plan.micro_batch_size, plan.length, dtype=torch.int64)
    with parallel.computing():
        if parallel.pipeline is not None:
            parallel.pipeline.step([(tokens, tokens)] * micro_batches)
        else:
            for index in range(micro_batches):
                with parallel.accumulating(index == micro_batches - 1):
                    (parallel.model(tokens, tokens) / micro_batches).backward()
    parallel.reduce()
    parallel.clip(1.0)
    optimizer.step()
    parallel.zero()


def observe(rank: int, size: int, cases: list[Case]) -> list[Seen]:
    """The collectives of each case's last step: in the first two DDP agrees on its buckets, pipelines in the first."""
    found = []
    for case in cases:
        # DTensor remembers meshes by their value, and with them groups of meshes before, which may be gone.
        _clear_sharding_prop_cache()
        plan = case.plan
        parallel = parallelise(plan, torch.device("cpu"))
        optimizer = torch.optim.SGD([each for _, each in parallel.named_parameters()], lr=1e-3)
        groups = dict(enumerate(process_groups()))
        observer = CollectiveObserver(groups)
        for _ in range(3 if plan.layout.dp_replicate == size else 2):
            observer.take()
            one_step(plan, parallel, optimizer)
        spans = observer.take()
        observer.close()
        assert observer.failure is None, observer.failure
        found.append(
            Counter(
                (tuple(dist.get_process_group_ranks(groups[span.group])), span.operation, span.bytes) for span in spans
            )
        )
    return found


def members(layout: Layout, position: int, dimension: str) -> tuple[int, ...]:
    """The group that a use is of."""
    names = {"model": ("pp", "shard", "tp"), "tied": ("pp",)}.get(dimension, (dimension,))
    (group,) = (group for group in layout.groups(*names) if position in group)
    return (group[0], group[-1]) if dimension == "tied" else tuple(group)


def said(case: Case, position: int) -> Seen:
    plan, found = case.plan, Seen()
    for use in uses(plan, plan.layout.coordinates(position)):
        found[members(plan.layout, position, use.dimension), use.operation, use.bytes] += use.count
    return found


def totals(seen: Seen) -> Counter[tuple[tuple[int, ...], str]]:
    found: Counter[tuple[tuple[int, ...], str]] = Counter()
    for (group, operation, num_bytes), number in seen.items():
        found[group, operation] += number * num_bytes
    return found


def hold_against_hooks(ranks: Ranks, cases: list[Case]) -> None:
    by_rank = ranks(cases[0].layout.size, observe, cases, timeout_s=120.0)
    for rank, found in enumerate(by_rank):
        for case, seen in zip(cases, found, strict=True):
            expected = said(case, rank)
            assert totals(seen) == totals(expected), (case, rank)
            if case.layout.size != case.layout.dp_replicate:  # DDP's buckets are its own affair
                assert seen == expected, (case, rank)


BASES = ("toy", "toy-llama")


def both_models(**fixed: Any) -> list[Case]:
    """GPT-2's shape, tied and with biases, and Llama's, untied and without."""
    return [Case(base=base, **fixed) for base in BASES]


def both_models_otherwise(**fixed: Any) -> list[Case]:
    """The first untied, the second tied."""
    return [Case(base=base, tied=base != "toy", **fixed) for base in BASES]


# The suite takes one model of each kind; all of them are for `make test-all`.
every_model = pytest.mark.parametrize(
    "thorough", [pytest.param(False, id="some"), pytest.param(True, id="all", marks=pytest.mark.slow)]
)


def several(layout: Layout, thorough: bool) -> list[Case]:
    """Without a pipeline: with and without accumulation, and with recomputation."""
    cases = [
        *both_models(layout=layout),
        *both_models_otherwise(layout=layout, micro_batches=4),
        *both_models(layout=layout, micro_batches=2, options={"activation_checkpointing": "full"}),
    ]
    return cases if thorough else [cases[0], cases[2 if layout.tp == 1 else 5]]


@needs_hooks
@every_model
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ddp_and_its_flat_counterpart(size: int, ranks: Ranks, thorough: bool) -> None:
    layout = Layout(dp_replicate=size)
    flat = Case(layout=layout, micro_batches=4, options={"overlap": False})
    small_buckets = Case(layout=layout, options={"bucket_mb": 0.02})
    hold_against_hooks(ranks, [*several(layout, thorough), flat, small_buckets])


@needs_hooks
@every_model
@pytest.mark.parametrize("shards", [2, 3, 4])
def test_fsdp(shards: int, ranks: Ranks, thorough: bool) -> None:
    layout = Layout(dp_shard=shards)
    kept = [
        Case(layout=layout, micro_batches=each, base=base, options={"reshard_after_forward": False})
        for each, base in zip((1, 4), BASES, strict=True)
    ]
    hold_against_hooks(ranks, [*several(layout, thorough), *kept[0 if thorough else 1 :]])


@needs_hooks
@every_model
def test_hsdp(ranks: Ranks, thorough: bool) -> None:
    layout = Layout(dp_replicate=2, dp_shard=2)
    kept = Case(layout=layout, micro_batches=2, options={"reshard_after_forward": False})
    hold_against_hooks(ranks, [*several(layout, thorough), kept])


@needs_hooks
@every_model
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(dp_replicate=2, tp=2), Layout(dp_shard=2, tp=2)], ids=str)
def test_tensor_parallel(layout: Layout, ranks: Ranks, thorough: bool) -> None:
    hold_against_hooks(ranks, several(layout, thorough))


@needs_hooks
@pytest.mark.slow
def test_tensor_parallel_over_all_ranks(ranks: Ranks) -> None:
    hold_against_hooks(ranks, [Case(layout=Layout(tp=4), micro_batches=each, tied=each == 1) for each in (1, 4)])


PIPELINES = [
    Layout(pp=2),
    Layout(pp=4),
    Layout(pp=2, dp_replicate=2),
    Layout(pp=2, dp_shard=2),
    Layout(pp=2, tp=2),
]


@needs_hooks
@every_model
@pytest.mark.parametrize("layout", PIPELINES, ids=str)
def test_pipeline(layout: Layout, ranks: Ranks, thorough: bool) -> None:
    if not thorough:
        several_ranks = (
            [] if layout.pp > 2 else [Case(layout=layout, base="toy-llama", micro_batches=2, schedule="interleaved")]
        )
        hold_against_hooks(ranks, [Case(layout=layout, micro_batches=4), *several_ranks])
        return
    cases = [
        *both_models(layout=layout, micro_batches=4, schedule="gpipe"),
        *both_models_otherwise(layout=layout, micro_batches=4, schedule="1f1b"),
        Case(layout=layout, micro_batches=1, schedule="gpipe"),
        Case(layout=layout, micro_batches=4, options={"activation_checkpointing": "full"}),
    ]
    if layout.pp == 2:
        cases += both_models(layout=layout, micro_batches=4, schedule="interleaved")
    if layout.dp_shard > 1:
        cases += [
            Case(layout=layout, micro_batches=4, schedule=each, options={"reshard_after_forward": False})
            for each in SCHEDULES
        ]
    hold_against_hooks(ranks, cases)


# --- by arithmetic -----------------------------------------------------------------------------------------------


def total(plan: Plan, position: int, dimension: str, operation: str, bytes_per_element: int = 4) -> int:
    found = uses(plan, plan.layout.coordinates(position), bytes_per_element)
    return sum(use.total_bytes for use in found if (use.dimension, use.operation) == (dimension, operation))


def whole(config: ModelConfig, layout: Layout, micro_batches: int = 1, schedule: str = "1f1b") -> Plan:
    return Plan(
        layout=layout,
        order=range(layout.size),
        model=config,
        seed=0,
        length=config.sequence_length,
        micro_batch_size=1,
        pipeline=Pipeline(schedule=schedule, stages_per_rank=1, micro_batches=micro_batches),
    )


@pytest.mark.parametrize("name", PRESETS)
def test_a_published_models_gradients(name: str) -> None:
    config = PRESETS[name]
    num_bytes = 4 * num_parameters(config)
    assert total(whole(config, Layout(dp_replicate=2)), 0, "replicate", "all_reduce") == num_bytes
    # With as many shards as one, nothing is padded that is a power of two.
    padding = 4 * config.embedding_dim * (config.vocab_size % 2)
    assert total(whole(config, Layout(dp_shard=2)), 0, "shard", "reduce_scatter") == num_bytes + padding


def test_half_precision_is_gathered_and_sent_but_full_precision_reduced() -> None:
    plan = whole(PRESETS["toy"], Layout(pp=2, dp_shard=2, tp=2), micro_batches=2)
    halved = {("shard", "all_gather"), ("pp", "send"), ("tp", "all_gather"), ("tp", "reduce_scatter")}
    kept = {("shard", "reduce_scatter"), ("tp", "all_reduce"), ("tied", "all_reduce"), ("model", "all_reduce")}
    for position in range(8):
        for kind in halved | kept:
            factor = 2 if kind in halved else 1
            assert total(plan, position, *kind) == factor * total(plan, position, *kind, bytes_per_element=2) > 0


def test_whom_a_stage_sends_to() -> None:
    plan = whole(PRESETS["toy"], Layout(pp=4), micro_batches=5)
    sends = [
        [
            (use.peer, use.count)
            for use in uses(plan, {"pp": stage, "replicate": 0, "shard": 0, "tp": 0})
            if use.operation == "send"
        ]
        for stage in range(4)
    ]
    assert sends == [[(1, 5)], [(0, 5), (2, 5)], [(1, 5), (3, 5)], [(2, 5)]]


# --- between nodes -----------------------------------------------------------------------------------------------

TOY = PRESETS["toy"]
GRADIENTS = 4 * num_parameters(TOY)


def test_data_parallel_over_two_nodes() -> None:
    """A ring: each border of nodes carries 2 (n - 1) / n of the gradients, each way."""
    for per_node, factor in ((1, 1.0), (2, 1.5), (4, 1.75)):
        nodes = [list(range(per_node)), list(range(per_node, 2 * per_node))]
        plan = whole(TOY, Layout(dp_replicate=2 * per_node))
        expected = int(factor * GRADIENTS)
        assert node_bytes(plan, nodes) == node_bytes(plan, nodes, "nccl") == {0: expected, 1: expected}
        assert crossing_bytes(plan, nodes) == {"replicate": expected}


def test_one_node_sends_nothing() -> None:
    for layout in (Layout(), Layout(dp_replicate=4), Layout(pp=2, tp=2), Layout(dp_shard=4)):
        plan = whole(TOY, layout)
        assert node_bytes(plan, [range(layout.size)]) == {0: 0}
        assert crossing_bytes(plan, [range(layout.size)]) == {}


def test_ranks_dealt_out_in_turn_send_every_hop_over_the_network() -> None:
    plan = whole(TOY, Layout(dp_replicate=4))
    assert node_bytes(plan, [[0, 2], [1, 3]]) == {0: 2 * 1.5 * GRADIENTS, 1: 2 * 1.5 * GRADIENTS}


def test_gloo_scatters_by_reducing_everything() -> None:
    plan = whole(TOY, Layout(dp_shard=2))
    layers = 4 * num_parameters(TOY) - 4 * (TOY.vocab_size + TOY.sequence_length + 2) * TOY.embedding_dim
    gathers = GRADIENTS + layers  # layers once more for backward
    norm = 4
    nodes = [[0], [1]]
    assert node_bytes(plan, nodes, "nccl") == dict.fromkeys((0, 1), gathers // 2 + GRADIENTS // 2 + norm)
    assert node_bytes(plan, nodes, "gloo") == dict.fromkeys((0, 1), gathers // 2 + GRADIENTS + norm)
    assert crossing_bytes(plan, nodes) == {"shard": gathers // 2 + GRADIENTS, "model": norm}


def test_hsdp_sends_only_gradients_between_nodes() -> None:
    """Each of two ranks a node reduces its half with the other node's."""
    plan = whole(TOY, Layout(dp_replicate=2, dp_shard=2))
    nodes = [[0, 1], [2, 3]]
    assert crossing_bytes(plan, nodes) == {"replicate": GRADIENTS}
    assert sum(node_bytes(plan, nodes).values()) == 2 * GRADIENTS
    sharded_over_nodes = node_bytes(whole(TOY, Layout(dp_shard=4)), nodes)[0]
    assert sharded_over_nodes > 2.5 * GRADIENTS


def test_a_pipeline_sends_activations_between_nodes() -> None:
    plan = whole(TOY, Layout(pp=2, tp=2), micro_batches=3)
    nodes = [[0, 1], [2, 3]]
    activations = 4 * TOY.sequence_length * TOY.embedding_dim  # both halves of the sequence
    crossing = crossing_bytes(plan, nodes)
    assert crossing == {"pp": 3 * activations, "tied": 4 * TOY.vocab_size * TOY.embedding_dim, "model": 6}
    assert node_bytes(plan, nodes) == dict.fromkeys((0, 1), sum(crossing.values()))


def test_a_middle_node_sends_both_ways() -> None:
    plan = whole(PRESETS["toy-llama"], Layout(pp=4), micro_batches=3)
    activations = 3 * 4 * TOY.sequence_length * TOY.embedding_dim
    norm = 6
    sent = node_bytes(plan, [[0], [1], [2], [3]])
    assert sent == {0: activations + norm, 1: 2 * activations + norm, 2: 2 * activations + norm, 3: activations + norm}
    assert crossing_bytes(plan, [[0], [1], [2], [3]]) == {"pp": 2 * activations, "model": norm}


def test_the_order_of_the_mesh_decides_what_crosses() -> None:
    """Ranks were dealt out in turn, the mesh goes node by node: tensor-parallel groups stay inside."""
    nodes = [[0, 2], [1, 3]]
    layout = Layout(dp_replicate=2, tp=2)
    by_node = Plan(**{**vars_of(whole(TOY, layout)), "order": arrange(layout, nodes)})
    assert set(crossing_bytes(by_node, nodes)) == {"replicate"}
    assert set(crossing_bytes(whole(TOY, layout), nodes)) == {"tp", "model"}


def vars_of(plan: Plan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in Plan.__slots__}


def test_it_needs_no_torch() -> None:
    code = "import sys, bireme.traffic; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
