"""What crosses the network in one training step: the collectives of a layout, and the bytes they send between nodes.

Pure: no torch. `uses` is derived from how `bireme.parallel` divides, shards and reduces, and equals what the hooks of
`bireme.observe.collectives` see; `node_bytes` adds how the backend moves a collective's bytes from rank to rank.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from bireme.layout import MODEL, TIED, Layout, Pipeline, stage_layers

_FULL_BYTES = 4  # gradients and losses are fp32
# Of a loss that is divided over the vocabulary: largest logit, sum of exponentials, target's logit.
_LOSS_REDUCTIONS = 3


class ModelShape(Protocol):
    """What is needed of a model's shape (`bireme.model.ModelConfig`)."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def sequence_length(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def embedding_dim(self) -> int: ...
    @property
    def feed_forward_dim(self) -> int: ...
    @property
    def norm(self) -> str: ...
    @property
    def position(self) -> str: ...
    @property
    def activation(self) -> str: ...
    @property
    def bias(self) -> bool: ...
    @property
    def tied_embedding(self) -> bool: ...


class Planned(Protocol):
    """What is needed of a plan (`bireme.parallel.Plan`). `pipeline.micro_batches`: of a step, also without pipeline."""

    @property
    def layout(self) -> Layout: ...
    @property
    def order(self) -> Sequence[int]: ...
    @property
    def model(self) -> ModelShape: ...
    @property
    def length(self) -> int: ...
    @property
    def micro_batch_size(self) -> int: ...
    @property
    def pipeline(self) -> Pipeline: ...
    @property
    def activation_checkpointing(self) -> str: ...
    @property
    def reshard_after_forward(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Use:
    """`count` equal collectives that one rank takes part in during a step."""

    dimension: str
    """Whose group: `pp`, `replicate`, `shard`, `tp`, `model` (the gradient norm's) or `tied` (embedding and head)."""
    operation: str
    """As in the run's record: all_reduce, all_gather, reduce_scatter, send, receive."""
    count: int
    bytes: int
    """Of each: the whole gathered or unreduced tensor, or the tensor sent, as `bireme.ledger.Span.bytes`."""
    peer: int = -1
    """Of a send or receive: the other end's place in the pipeline."""

    @property
    def total_bytes(self) -> int:
        return self.count * self.bytes


# --- parameters --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Parameter:
    """What one rank of a tensor-parallel group has of a parameter, before it is sharded."""

    rows: int
    columns: int = 1
    partial: bool = False  # each rank has the gradient of its part of the sequence: these are added up

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    def padded(self, shard: int) -> int:
        """Elements when the rows are filled up to a multiple of the ranks, as `fully_shard` does."""
        return -(-self.rows // shard) * shard * self.columns


def _norm(model: ModelShape) -> list[_Parameter]:
    scale = _Parameter(model.embedding_dim, partial=True)
    return [scale, scale] if model.norm == "layernorm" and model.bias else [scale]


def _layer(model: ModelShape, tp: int) -> list[_Parameter]:
    """A block: the matrices into attention and feed-forward are divided by rows, those out of them by columns."""
    width = model.embedding_dim
    key_value = model.num_kv_heads * model.head_dim
    into = [width, key_value, key_value, *[model.feed_forward_dim] * (2 if model.activation == "swiglu" else 1)]
    out = [width, model.feed_forward_dim]
    parameters = [*_norm(model), *_norm(model)]
    parameters += [_Parameter(rows // tp, width) for rows in into]
    parameters += [_Parameter(width, columns // tp) for columns in out]
    if model.bias:
        parameters += [_Parameter(rows // tp) for rows in into]
        parameters += [_Parameter(width) for _ in out]
    return parameters


@dataclass(frozen=True, slots=True)
class _Unit:
    """What `fully_shard` gathers at once: the parameters of a layer, or a stage's embeddings and head."""

    parameters: list[_Parameter]
    number: int = 1  # of such units in the stage
    ends: bool = False

    @property
    def elements(self) -> int:
        return self.number * sum(each.elements for each in self.parameters)


def _units(plan: Planned, stage: int) -> list[_Unit]:
    """All that a stage has."""
    model, tp, stages = plan.model, plan.layout.tp, _stages(plan)
    table = _Parameter(model.vocab_size // tp, model.embedding_dim)
    ends = []
    if stage == 0:
        ends.append(table)
        if model.position == "learned":
            ends.append(_Parameter(model.sequence_length, model.embedding_dim, partial=True))
    if stage == stages - 1:
        ends += _norm(model)
        if stages > 1 or not model.tied_embedding:
            ends.append(table)
    layers = len(stage_layers(model.num_layers, stages, stage))
    return [_Unit(ends, ends=True), _Unit(_layer(model, tp), layers)]


def _stages(plan: Planned) -> int:
    return plan.layout.pp * plan.pipeline.stages_per_rank if plan.layout.pp > 1 else 1


# --- collectives -------------------------------------------------------------------------------------------------


def uses(plan: Planned, where: Mapping[str, int], bytes_per_element: int = 4) -> list[Use]:
    """The collectives of one training step, gradient norm included, of the rank at these coordinates of the mesh.

    `bytes_per_element`: of gathered parameters and of activations; 2 where they are bfloat16. DDP's buckets count as
    one all-reduce: how it fills them is its own affair, their sum is not. The first step's extras (DDP and pipelines
    send a few bytes to agree) are not counted.
    """
    mine = range(where["pp"], _stages(plan), plan.layout.pp)
    units = [unit for stage in mine for unit in _units(plan, stage)]
    return [
        use
        for use in chain(
            _pipeline(plan, mine, bytes_per_element),
            _tensor_parallel(plan, mine, units, bytes_per_element),
            _sharded(plan, units, bytes_per_element),
            _at_the_end(plan, where, units),
        )
        if use.count
    ]


def _hidden_bytes(plan: Planned, bytes_per_element: int) -> int:
    return plan.micro_batch_size * plan.length * plan.model.embedding_dim * bytes_per_element


def _pipeline(plan: Planned, mine: range, bytes_per_element: int) -> Iterator[Use]:
    """Activations forward and gradients backward, for each micro-batch at each border of a stage."""
    layout, micro_batches = plan.layout, plan.pipeline.micro_batches
    num_bytes = _hidden_bytes(plan, bytes_per_element) // layout.tp
    for stage in mine:
        for other in (stage - 1, stage + 1):
            if 0 <= other < _stages(plan):
                yield Use("pp", "send", micro_batches, num_bytes, other % layout.pp)
                yield Use("pp", "receive", micro_batches, num_bytes, other % layout.pp)


def _tensor_parallel(plan: Planned, mine: range, units: list[_Unit], bytes_per_element: int) -> Iterator[Use]:
    """Around attention and around feed-forward the sequence is gathered, then the partial sums are scattered along it;
    backward each turns into the other."""
    layout, micro_batches = plan.layout, plan.pipeline.micro_batches
    if layout.tp == 1:
        return
    layers = len(mine) * plan.model.num_layers // _stages(plan)
    first, last = 0 in mine, _stages(plan) - 1 in mine
    gathers = scatters = 4 * layers + first + last
    if plan.activation_checkpointing == "full":
        # Computed once more in backward, up to the last tensor that it needs: a block's last scatter is not.
        gathers += 2 * layers
        scatters += layers
    num_bytes = _hidden_bytes(plan, bytes_per_element)
    yield Use("tp", "all_gather", micro_batches * gathers, num_bytes)
    yield Use("tp", "reduce_scatter", micro_batches * scatters, num_bytes)
    if last:
        loss_bytes = plan.micro_batch_size * plan.length * _FULL_BYTES
        yield Use("tp", "all_reduce", micro_batches * _LOSS_REDUCTIONS, loss_bytes)
    partial: Counter[int] = Counter()  # how many by their bytes
    for unit in units:
        for each in unit.parameters:
            if each.partial:
                partial[each.elements * _FULL_BYTES] += unit.number
    if layout.dp_shard > 1:  # `fully_shard` adds them up one by one, Parallel.reduce all at once
        yield from (Use("tp", "all_reduce", number, size) for size, number in partial.items())
    elif partial:
        yield Use("tp", "all_reduce", 1, sum(size * number for size, number in partial.items()))


def _sharded(plan: Planned, units: list[_Unit], bytes_per_element: int) -> Iterator[Use]:
    """FSDP and HSDP: parameters are gathered for every use, gradients reduced once a step."""
    layout, micro_batches = plan.layout, plan.pipeline.micro_batches
    if layout.dp_shard == 1:
        return
    # A pipeline leaves parameters gathered between a backward pass and whatever follows it. So each is gathered for
    # the first pass and where the pass before was forward: once more than there are micro-batches in any schedule.
    once, again = (1, micro_batches + 1) if layout.pp > 1 else (micro_batches, 2 * micro_batches)
    for unit in units:
        elements = sum(each.padded(layout.dp_shard) for each in unit.parameters)
        if elements:  # a stage between the ends has none of theirs
            gathers = again if plan.reshard_after_forward and not unit.ends else once
            yield Use("shard", "all_gather", unit.number * gathers, elements * bytes_per_element)
            yield Use("shard", "reduce_scatter", unit.number, elements * _FULL_BYTES)
            if layout.dp_replicate > 1:
                yield Use("replicate", "all_reduce", unit.number, elements // layout.dp_shard * _FULL_BYTES)


def _at_the_end(plan: Planned, where: Mapping[str, int], units: list[_Unit]) -> Iterator[Use]:
    """After the last backward pass: replicas, tied weights, the norm."""
    layout, model = plan.layout, plan.model
    if layout.dp_shard == 1 and "replicate" in layout.mesh_sizes:
        yield Use("replicate", "all_reduce", 1, sum(unit.elements for unit in units) * _FULL_BYTES)
    if model.tied_embedding and layout.pp > 1 and where["pp"] in (0, layout.pp - 1):
        rows = model.vocab_size // layout.tp
        each_has = -(-rows // layout.dp_shard)
        here = min(each_has, max(0, rows - where["shard"] * each_has))
        yield Use(TIED, "all_reduce", 1, here * model.embedding_dim * _FULL_BYTES)
    if layout.pp * layout.dp_shard * layout.tp > 1:
        yield Use(MODEL, "all_reduce", 1, _FULL_BYTES)


# --- nodes -------------------------------------------------------------------------------------------------------


def node_bytes(
    plan: Planned, nodes: Sequence[Sequence[int]], backend: str = "gloo", bytes_per_element: int = 4
) -> dict[int, int]:
    """The payload that each node (by its index in `nodes`, lists of ranks) sends to other nodes in one step; it
    receives as much. Headers and acknowledgements come on top: an interface of emulated nodes counted 0.2 to 0.8 % more
    in every layout, the cable itself carries some 6 % more (the kernel counts before it cuts segments).

    `backend` "gloo" or "nccl". Collectives go round a ring of the group's ranks in their order. Of N bytes each of n
    ranks sends (n-1)/n N for an all-gather and twice that for an all-reduce; for a reduce-scatter NCCL as much as for
    an all-gather, gloo as much as for an all-reduce, because it makes one and throws the rest away. Bytes between ranks
    of one node do not count.
    """
    sent = dict.fromkeys(range(len(nodes)), 0)
    for (node, _), num_bytes in _sent(plan, nodes, backend, bytes_per_element).items():
        sent[node] += num_bytes
    return sent


def crossing_bytes(
    plan: Planned, nodes: Sequence[Sequence[int]], backend: str = "gloo", bytes_per_element: int = 4
) -> dict[str, int]:
    """By dimension, the payload in one step over the link of the node that sends most of it; only dimensions that
    cross nodes. As `node_bytes`."""
    most: dict[str, int] = {}
    for (_, dimension), num_bytes in _sent(plan, nodes, backend, bytes_per_element).items():
        most[dimension] = max(most.get(dimension, 0), num_bytes)
    return most


def _sent(
    plan: Planned, nodes: Sequence[Sequence[int]], backend: str, bytes_per_element: int
) -> dict[tuple[int, str], int]:
    """Bytes to other nodes by (node, dimension)."""
    layout = plan.layout
    node_of_rank = {rank: index for index, node in enumerate(nodes) for rank in node}
    node_of = [node_of_rank[rank] for rank in plan.order]  # by position
    group_of = {
        dimension: {position: group for group in groups for position in group}
        for dimension, groups in _groups(layout).items()
    }
    sent: Counter[tuple[int, str]] = Counter()
    for position in range(layout.size):
        for use in uses(plan, layout.coordinates(position), bytes_per_element):
            group = group_of[use.dimension][position]
            index = use.peer if use.peer >= 0 else (group.index(position) + 1) % len(group)
            if node_of[group[index]] != node_of[position]:
                sent[node_of[position], use.dimension] += use.count * _bytes_on(use, len(group), backend)
    return {key: num_bytes for key, num_bytes in sent.items() if num_bytes}


def _groups(layout: Layout) -> dict[str, list[list[int]]]:
    """The groups of positions of everything that a Use can be of."""
    return {
        **{name: layout.groups(name) for name in layout.sizes},
        MODEL: layout.groups("pp", "shard", "tp"),
        TIED: layout.tied_groups(),
    }


def _bytes_on(use: Use, size: int, backend: str) -> int:
    """What each rank of a group of this size sends on for one collective."""
    if use.operation in ("send", "receive"):
        return use.bytes if use.operation == "send" else 0
    twice = use.operation == "all_reduce" or (use.operation == "reduce_scatter" and backend == "gloo")
    return (2 if twice else 1) * (size - 1) * use.bytes // size
