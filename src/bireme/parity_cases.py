"""What `bireme parity` runs: every layout of the ranks, each in several ways, on a model that just divides over it."""

from dataclasses import dataclass
from itertools import product

from bireme.layout import DIMENSIONS, SCHEDULES, Layout, Pipeline, check_model, stages_per_rank
from bireme.model import ModelConfig, preset

LENGTH = 16  # tokens of a sequence, or a little more: a multiple of the tensor-parallel ranks
_MICRO_BATCHES = 4


@dataclass(frozen=True, slots=True)
class Case:
    """A row of the table: a layout, and with pipeline parallelism its schedule."""

    layout: Layout
    schedule: str | None = None

    def __str__(self) -> str:
        return str(self.layout) if self.schedule is None else f"{self.layout} {self.schedule}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to run a case."""

    shape: str
    """"gpt2": tied head, learned positions, biases; "llama": untied, rotary, grouped queries."""
    micro_batches: int
    checkpointing: bool = False
    overlap: bool = True
    reshard: bool = True

    def __str__(self) -> str:
        words = [self.shape, f"K={self.micro_batches}"]
        words += ["checkpointing"] if self.checkpointing else []
        words += [] if self.overlap else ["flat"]
        words += [] if self.reshard else ["no reshard"]
        return " ".join(words)


def every_layout(ranks: int) -> list[Layout]:
    """All ways to divide the ranks over the four dimensions: first the layouts with a name, then their combinations."""
    divisors = [size for size in range(1, ranks + 1) if ranks % size == 0]
    found = [
        Layout(pp=pp, dp_replicate=replicate, dp_shard=shard, tp=tp)
        for pp, replicate, shard, tp in product(divisors, repeat=len(DIMENSIONS))
        if pp * replicate * shard * tp == ranks
    ]
    return sorted(found, key=_order)


def _order(layout: Layout) -> tuple[int, list[str]]:
    kind = tuple(layout.mesh_sizes)
    return (_NAMED.index(kind) if kind in _NAMED else len(_NAMED) + len(kind)), [str(layout)]


_NAMED = [("replicate",), ("shard",), ("replicate", "shard"), ("tp",), ("pp",)]


def not_run(ranks: int) -> list[tuple[Layout, str]]:
    """The smallest layout of each kind that these ranks cannot be divided into, and why."""
    possible = {tuple(layout.mesh_sizes) for layout in every_layout(ranks)}
    found = []
    for several in product((1, 2), repeat=len(DIMENSIONS)):
        pp, replicate, shard, tp = several
        layout = Layout(pp=pp, dp_replicate=replicate, dp_shard=shard, tp=tp)
        if layout.size > 1 and tuple(layout.mesh_sizes) not in possible:
            reason = f"needs at least {layout.size} ranks"
            if ranks >= layout.size:
                reason = f"needs {layout.size} ranks, or another number that divides over {several.count(2)} dimensions"
            found.append((layout, reason))
    return sorted(found, key=lambda each: _order(each[0]))


def cases_of(layout: Layout) -> list[Case]:
    """A case, or with pipeline parallelism one for each schedule."""
    return [Case(layout, schedule) for schedule in SCHEDULES] if layout.pp > 1 else [Case(layout)]


def quick_leaves_out(case: Case) -> bool:
    """Whether `--quick` does without a case: where a pipeline is combined with more, one schedule has to do."""
    return case.layout.pp not in (1, case.layout.size) and case.schedule != "1f1b"


def variants_of(case: Case, quick: bool) -> list[Variant]:
    """The ways to run a case; the first is the one whose losses are shown.

    Together they have both shapes (tied and untied), few micro-batches and several, checkpointing and none; a sharded
    layout also without resharding, replicas also with a flat reduction. DTensor takes its time on a CPU: with tensor
    parallelism there are fewer variants, and fewer micro-batches where it is combined or `quick` is asked for.
    """
    layout = case.layout
    divided, combined_pipeline = layout.tp > 1, layout.pp not in (1, layout.size)
    several = _multiple(2 if divided and (quick or layout.tp < layout.size) else _MICRO_BATCHES, layout.pp)
    few = 1 if case.schedule in (None, "gpipe") else layout.pp
    variants = [Variant(shape="gpt2", micro_batches=several)]
    if not (quick and divided):
        variants.append(Variant(shape="llama", micro_batches=few, checkpointing=True))
    if quick:
        return variants
    if not divided and not combined_pipeline:
        variants.append(Variant(shape="llama", micro_batches=several))
        variants.append(Variant(shape="gpt2", micro_batches=few, checkpointing=True))
    if layout.dp_shard > 1:
        variants.append(Variant(shape="llama", micro_batches=several, reshard=False))
    if layout.dp_replicate == layout.size:
        variants.append(Variant(shape="gpt2", micro_batches=several, overlap=False))
        variants.append(Variant(shape="llama", micro_batches=few, overlap=False))
    return variants


def pipeline_of(case: Case, variant: Variant) -> Pipeline:
    schedule = case.schedule or SCHEDULES[0]
    stages = stages_per_rank(case.layout, schedule, None, model_of(case.layout, variant.shape).num_layers)
    return Pipeline(schedule=schedule, stages_per_rank=stages, micro_batches=variant.micro_batches)


def _multiple(least: int, of: int) -> int:
    return -(-least // of) * of


def model_of(layout: Layout, shape: str) -> ModelConfig:
    """The smallest model that divides over the layout: a layer for each of two stages on every rank of a pipeline, a
    key-value head for every tensor-parallel rank. Its context is longer than what it is given."""
    tp = layout.tp
    length = sequence_length(layout)
    sizes = {
        "sequence_length": length + LENGTH,
        "num_layers": 2 * layout.pp,
        "vocab_size": _multiple(64, tp),
        "feed_forward_dim": _multiple(48, tp),
    }
    key_value_heads = _multiple(4 if shape == "gpt2" else 2, tp)
    heads = key_value_heads if shape == "gpt2" else 2 * key_value_heads
    heads_and_width = {"num_heads": heads, "num_kv_heads": key_value_heads, "embedding_dim": 4 * heads}
    config = preset({"gpt2": "toy", "llama": "toy-llama"}[shape], **sizes, **heads_and_width)
    check_model(layout, config, length)
    return config


def sequence_length(layout: Layout) -> int:
    return _multiple(LENGTH, layout.tp)


def batch_size(ranks: int) -> int:
    """Sequences of a global batch: they divide over the data-parallel ranks and micro-batches of any layout."""
    return _multiple(32, _MICRO_BATCHES * ranks)
