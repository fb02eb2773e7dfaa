"""How a model is spread over the ranks: the four dimensions of the mesh, who is where in it, and what must divide.

Pure: no torch. A layout is read and checked before any process waits for another.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bireme.errors import UserError, nearest
from bireme.text import count, name_ranks

DIMENSIONS = ("pp", "replicate", "shard", "tp")
"""Outer to inner: neighbours in the innermost dimension are neighbouring ranks."""

MODEL, TIED = "model", "tied"
"""Groups beside the dimensions': all ranks of one replica; the two ends of a pipeline that share an embedding."""

LAYOUTS = ("ddp", "fsdp", "hsdp", "tp", "pp")
SCHEDULES = ("gpipe", "1f1b", "interleaved")

_DIMENSION_OF = {"ddp": "replicate", "fsdp": "shard", "tp": "tp", "pp": "pp"}
_EXAMPLE = "pp=2,replicate=2"
_MOST = 1_000_000


class Shape(Protocol):
    """What the checks need of a model's shape (`bireme.model.ModelConfig`)."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def embedding_dim(self) -> int: ...
    @property
    def feed_forward_dim(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the mesh's dimensions. `dp_replicate` x `dp_shard` ranks see different samples; `tp` ranks share every
    layer, `pp` ranks have different layers."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1

    @property
    def size(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.tp

    @property
    def data_parallel_size(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def sizes(self) -> dict[str, int]:
        """By dimension, outer to inner."""
        return {"pp": self.pp, "replicate": self.dp_replicate, "shard": self.dp_shard, "tp": self.tp}

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """The dimensions that have more than one rank; a world of one keeps `replicate`."""
        return {name: size for name, size in self.sizes.items() if size > 1} or {"replicate": 1}

    def __str__(self) -> str:
        several = self.mesh_sizes
        if set(several) <= {"replicate"}:
            return "ddp"
        if set(several) == {"shard"}:
            return "fsdp"
        if set(several) == {"replicate", "shard"}:
            return f"hsdp {self.dp_replicate}x{self.dp_shard}"
        return ",".join(f"{name}={size}" for name, size in several.items())

    def coordinates(self, position: int) -> dict[str, int]:
        """Where the rank at this position of the mesh is, in every dimension."""
        where = {}
        for name, size in reversed(self.sizes.items()):
            position, where[name] = divmod(position, size)
        return {name: where[name] for name in DIMENSIONS}

    def data_parallel_rank(self, where: Mapping[str, int]) -> int:
        """Which share of the global batch: the same for all ranks of a pipeline and of a tensor-parallel group."""
        return where["replicate"] * self.dp_shard + where["shard"]

    def groups(self, *dimensions: str) -> list[list[int]]:
        """The positions that differ in these dimensions only."""
        found: dict[tuple[int, ...], list[int]] = {}
        for position in range(self.size):
            where = self.coordinates(position)
            found.setdefault(tuple(where[name] for name in DIMENSIONS if name not in dimensions), []).append(position)
        return list(found.values())

    def tied_groups(self) -> list[list[int]]:
        """The two ends of every pipeline: of a tied model one has the embedding, the other the head."""
        return [[group[0], group[-1]] for group in self.groups("pp")]


# --- reading -----------------------------------------------------------------------------------------------------


def parse_layout(text: str, nodes: Sequence[Sequence[int]]) -> Layout:
    """`ddp`, `fsdp`, `hsdp`, `tp`, `pp`, or sizes: `pp=2,replicate=2,shard=2,tp=2` (what is left out is 1).

    `nodes`: the ranks of each node. `hsdp` shards inside a node and replicates across nodes. UserError for a name that
    is none, for sizes that do not parse, and when their product is not the number of ranks.
    """
    ranks = sum(len(node) for node in nodes)
    name = check_layout_text(text)
    if name in _DIMENSION_OF:
        return _layout(**{_DIMENSION_OF[name]: ranks})
    if name == "hsdp":
        per_node = {len(node) for node in nodes}
        if len(per_node) > 1:
            sizes = ", ".join(str(len(node)) for node in nodes)
            raise UserError(
                f"layout hsdp needs nodes with equally many ranks, these have {sizes}: say it with numbers, as in "
                f"replicate=...,shard=... with a product of {ranks}, or use fsdp"
            )
        if len(nodes) == 1 and ranks > 1:
            known = [f"replicate={ranks // size},shard={size}" for size in range(2, ranks) if ranks % size == 0]
            raise UserError(
                f"layout hsdp shards inside a node and replicates across nodes, but all {ranks} ranks are on one node: "
                f"use {' or '.join([*known[:2], 'fsdp'])}"
            )
        if len(nodes[0]) == 1 and ranks > 1:
            raise UserError("layout hsdp shards inside a node, but every node has one rank: that is ddp; or use fsdp")
        return _layout(shard=len(nodes[0]), replicate=len(nodes))
    layout = _layout(**_sizes(name))
    if layout.size != ranks:
        raise UserError(
            f"layout {text!r} is for {count(layout.size, 'rank')}, but there {'is' if ranks == 1 else 'are'} {ranks}: "
            f"{' or '.join(fitting(layout, ranks))} would fit"
        )
    return layout


def check_layout_text(text: str) -> str:
    """The layout's text, normalised; UserError for one that no number of ranks can make right."""
    name = text.strip().lower().replace(" ", "")
    if name in LAYOUTS:
        return name
    if "=" not in name:
        known = nearest(name, LAYOUTS) if name else ""
        raise UserError(f"layout is {text[:60]!r}: choose {', '.join(LAYOUTS)}, or sizes such as {_EXAMPLE}{known}")
    _sizes(name)
    return name


def _sizes(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        name = name.removeprefix("dp_")
        if name not in DIMENSIONS:
            raise UserError(
                f"layout {text!r}: {name!r} is no dimension{nearest(name, DIMENSIONS)}; they are "
                f"{', '.join(DIMENSIONS)}, as in {_EXAMPLE}"
            )
        if name in sizes:
            raise UserError(f"layout {text!r}: {name} is there twice")
        if not value.isascii() or not value.isdigit() or len(value) > 7 or not 1 <= int(value) <= _MOST:
            raise UserError(f"layout {text[:60]!r}: {name}={value[:20]!r} is not a number of ranks from 1 to {_MOST}")
        sizes[name] = int(value)
    return sizes


def _layout(pp: int = 1, replicate: int = 1, shard: int = 1, tp: int = 1) -> Layout:
    return Layout(pp=pp, dp_replicate=replicate, dp_shard=shard, tp=tp)


def fitting(layout: Layout, ranks: int, most: int = 3) -> list[str]:
    """Layouts of `ranks` ranks that are nearest to the given one: as few dimensions as possible changed, and little."""
    wanted = layout.sizes
    found = []
    for sizes in _products(ranks, len(DIMENSIONS)):
        candidate = _layout(**dict(zip(DIMENSIONS, sizes, strict=True)))
        changed = [max(size, wanted[name]) / min(size, wanted[name]) for name, size in candidate.sizes.items()]
        new = sum(size > 1 and wanted[name] == 1 for name, size in candidate.sizes.items())
        cost = (sum(each > 1 for each in changed), new, max(changed))
        # Adding data parallelism is what people mean who forget a dimension.
        found.append((cost, -candidate.data_parallel_size, candidate))
    best = [candidate for *_, candidate in sorted(found, key=lambda each: each[:2])[:most]]
    return [",".join(f"{name}={size}" for name, size in each.mesh_sizes.items()) for each in best]


def _products(number: int, factors: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as a product of that many factors."""
    if factors == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _products(number // first, factors - 1):
                yield (first, *rest)


# --- what must divide --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """How a pipeline works: its schedule, its stages on every rank, and how many micro-batches a step has."""

    schedule: str
    stages_per_rank: int
    micro_batches: int


def stages_per_rank(layout: Layout, schedule: str, wanted: int | None, num_layers: int) -> int:
    """How many stages each rank of a pipeline has: one, and with the interleaved schedule two or what is wanted.
    UserError when the layers do not divide."""
    if layout.pp == 1:
        if wanted not in (None, 1):
            raise UserError(f"pipeline_stages_per_rank is {wanted}, but layout {layout} has no pipeline: leave it out")
        return 1
    several = schedule == "interleaved"
    if not several and wanted not in (None, 1):
        raise UserError(
            f"pipeline_stages_per_rank is {wanted}: schedule {schedule} has one stage on a rank; use interleaved"
        )
    if several and wanted == 1:
        raise UserError("pipeline_stages_per_rank is 1: the interleaved schedule needs at least 2; or use 1f1b")
    number = (wanted or 2) if several else 1
    stages = layout.pp * number
    described = f"{stages} stages ({layout.pp} ranks x {number})" if number > 1 else f"{stages} pipeline stages"
    if num_layers < stages:
        raise UserError(f"num_layers is {num_layers}, fewer than {described}: every stage needs a layer")
    if num_layers % stages:
        raise UserError(
            f"num_layers {num_layers} does not divide over {described}: "
            f"{num_layers // stages * stages} or {(num_layers // stages + 1) * stages} layers would"
        )
    return number


def stage_layers(num_layers: int, stages: int, stage: int) -> range:
    """The layers of one stage."""
    each = num_layers // stages
    return range(stage * each, (stage + 1) * each)


def check_pipeline(layout: Layout, pipeline: Pipeline, micro_batch_size: int) -> None:
    """UserError when a step has too few micro-batches for its schedule, or a number that it cannot order."""
    if layout.pp == 1:
        return
    micro_batches = pipeline.micro_batches
    wanted = layout.data_parallel_size * micro_batch_size
    if pipeline.schedule != "gpipe" and micro_batches < layout.pp:
        raise UserError(
            f"schedule {pipeline.schedule} with {layout.pp} pipeline ranks needs at least {layout.pp} micro-batches a "
            f"step, there {'is' if micro_batches == 1 else 'are'} {micro_batches}: make micro_batch_size smaller, or "
            f"global_batch_size at least {layout.pp * wanted}"
        )
    if pipeline.schedule == "interleaved" and micro_batches % layout.pp:
        raise UserError(
            f"schedule interleaved needs a multiple of {layout.pp} micro-batches a step, there are {micro_batches}: "
            f"choose a micro_batch_size or global_batch_size for {micro_batches // layout.pp * layout.pp} or "
            f"{(micro_batches // layout.pp + 1) * layout.pp}"
        )


def check_model(layout: Layout, model: Shape, length: int) -> None:
    """UserError when the model does not divide over the ranks of a tensor-parallel group."""
    if layout.tp == 1:
        return
    wanted = {
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
        "vocab_size": model.vocab_size,
        "feed_forward_dim": model.feed_forward_dim,
        "sequence_length": length,
    }
    for name, size in wanted.items():
        below = size // layout.tp * layout.tp
        if size % layout.tp:
            near = " or ".join(str(each) for each in (below, below + layout.tp) if each)
            raise UserError(
                f"{name} {size} does not divide over {layout.tp} tensor-parallel ranks: {near} would, or "
                f"{' or '.join(f'tp={each}' for each in _common_divisors(wanted.values(), layout.tp))}"
            )


def check_compile(layout: Layout, compiled: bool) -> None:
    """UserError for what torch.compile cannot run."""
    if compiled and (layout.tp > 1 or layout.pp > 1):
        raise UserError(
            f"compile is for ddp, fsdp and hsdp: layout {layout} moves tensors inside the blocks; set compile to false"
        )


def _common_divisors(sizes: Any, limit: int) -> list[int]:
    fitting_ranks = [each for each in range(1, limit) if all(size % each == 0 for size in sizes)]
    return fitting_ranks[-2:]


# --- who is where ------------------------------------------------------------------------------------------------


def arrange(layout: Layout, nodes: Sequence[Sequence[int]]) -> list[int]:
    """The rank at each position of the mesh: node by node, so that inner dimensions stay inside nodes where they can.

    By rank where that would put the ranks of a group out of order: a process group numbers its members by rank, and
    position and number must agree.
    """
    order = [rank for node in nodes for rank in sorted(node)]
    for name in layout.mesh_sizes:
        for group in layout.groups(name):
            ranks = [order[position] for position in group]
            if ranks != sorted(ranks):
                return sorted(order)
    return order


def crossing(layout: Layout, order: Sequence[int], nodes: Sequence[Sequence[int]]) -> dict[str, bool]:
    """Which dimensions have a group on more than one node."""
    node_of = {rank: index for index, node in enumerate(nodes) for rank in node}
    return {
        name: any(len({node_of[order[position]] for position in group}) > 1 for group in layout.groups(name))
        for name in layout.mesh_sizes
    }


def describe_groups(layout: Layout, order: Sequence[int], nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each dimension with more than one rank: its groups, and the nodes on which they are."""
    node_of = {rank: str(node["name"]) for node in nodes for rank in node["ranks"]}
    lines = []
    for name, size in layout.mesh_sizes.items():
        shown = []
        groups = layout.groups(name)
        for group in groups[:4]:
            ranks = [order[position] for position in group]
            where = list(dict.fromkeys(node_of[rank] for rank in ranks))
            shown.append(f"{name_ranks(ranks)} on {' and '.join(where[:3])}{' ...' if len(where) > 3 else ''}")
        more = f"; and {len(groups) - 4} more" if len(groups) > 4 else ""
        lines.append(f"{name} {size}: {'; '.join(shown)}{more}")
    return lines
