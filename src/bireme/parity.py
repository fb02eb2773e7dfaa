"""Does a layout compute what one process computes? The same steps on both, and the differences of loss and gradients.

What a layout is held against has no communication in it: every rank computes it alone. The parts of it that this rank
must hold are worked out from the mesh (`mesh.local_part`), not from what PyTorch did.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from bireme.config import TrainConfig
from bireme.layout import Layout, arrange
from bireme.mesh import local, local_part
from bireme.model import EMBEDDING, GPT, HEAD, ModelConfig
from bireme.observe.collectives import CollectiveObserver, hooks_missing, process_groups
from bireme.parallel import Parallel, Plan, parallelise
from bireme.parity_cases import Case, Variant, batch_size, model_of, pipeline_of, sequence_length
from bireme.world import World

TOLERANCE = 1e-5
"""Largest error of a loss, a gradient and a gradient norm. Right layouts stay below a third of it (docs/parity.md)."""

LOSS, NORM = "loss", "gradient norm"  # what is compared besides tensors

_FLOOR = 1e-6  # of the global norm: what a gradient of (nearly) zero is held against
_TRAINER = TrainConfig()

Batch = tuple[Tensor, Tensor]
"""Inputs and targets, int64, each (sequences, length)."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What one process gets in a step: the mean loss of the global batch in nats, the gradient of every parameter
    before clipping (a tied head's too, under its own name), and the norm of all of them together."""

    loss: float
    gradients: dict[str, Tensor]
    norm: float


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The trainer's AdamW with its default settings, and a larger epsilon.

    AdamW divides an element's gradient by its size: where a gradient is nearly zero, rounding alone decides whether
    that weight goes up or down by the learning rate. Such a weight is off by far more than rounding one step later
    (gradients differed by up to 6e-4 of their largest element between two ways to add up one batch), and nothing can
    be told from it. With an epsilon of 1e-5 instead of 1e-8 rounding stays rounding.
    """
    all_parameters = list(parameters)
    groups = [
        {"params": [each for each in all_parameters if each.dim() >= 2], "weight_decay": _TRAINER.weight_decay},
        {"params": [each for each in all_parameters if each.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=_TRAINER.lr, betas=(_TRAINER.beta1, _TRAINER.beta2), eps=1e-5, fused=True)


def one_process(config: ModelConfig, seed: int, batches: Sequence[Batch]) -> list[Expected]:
    """Trains the whole model in this process, a step for each global batch; no communication.

    Gradients of a step: 4 bytes a parameter, kept for every step.
    """
    model = GPT(config)
    model.reset_parameters(seed)
    model.to(batches[0][0].device)
    optimizer = make_optimizer(model.parameters())
    expected = []
    for inputs, targets in batches:
        loss = model(inputs, targets)
        loss.backward()
        gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
        if config.tied_embedding:
            gradients[HEAD] = gradients[EMBEDDING]
        norm = nn.utils.clip_grad_norm_(model.parameters(), _TRAINER.gradient_clip_norm)
        expected.append(Expected(loss.item(), gradients, norm.item()))
        optimizer.step()
        optimizer.zero_grad()
    return expected


def largest_error(parallel: Parallel, expected: Expected) -> tuple[float, str]:
    """The largest error among the gradients that this rank holds, and its parameter's name ("" when it holds none).

    To be called after `parallel.reduce()` and before clipping. A gradient's error: the largest difference, divided by
    the largest element of the whole expected gradient plus 1e-6 of the global norm. Infinite where a gradient is
    missing, has another shape, or is not finite.

    The floor is for gradients that are zero in exact arithmetic, `attention.wk.bias` above all: the same vector added
    to every key leaves the softmax as it is. What is computed for it is rounding, about 1e-12 of the global norm in
    models as small as those here, and grows with the width.
    """
    worst = 0.0, ""
    for name, parameter in parallel.named_parameters():
        whole = expected.gradients[name]
        part = local_part(whole, parameter)
        if part.numel():
            error = _error(parameter.grad, part, whole.abs().max().item() + _FLOOR * expected.norm)
            worst = max(worst, (error, name))
    return worst


def _error(gradient: Tensor | None, part: Tensor, scale: float) -> float:
    held = None if gradient is None else local(gradient)
    if held is None or held.shape != part.shape:
        return math.inf
    return _finite((held - part.to(held.device)).abs().max().item() / scale)


def _finite(error: float) -> float:
    """The error, infinite for what is no number: so that it is never taken for a small one."""
    return error if error < math.inf else math.inf


# --- running -----------------------------------------------------------------------------------------------------


def make_batches(layout: Layout, shape: str, steps: int) -> list[Batch]:
    """The global batch of every step; the same for all layouts whose models have the same vocabulary.

    Like those of a text, a few tokens are frequent and most are rare: that makes gradients that do not cancel out.
    """
    vocab_size = model_of(layout, shape).vocab_size
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(steps):
        uniform = torch.rand(batch_size(layout.size), sequence_length(layout) + 1, generator=generator)
        tokens = (uniform**4 * vocab_size).long()
        batches.append((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
    return batches


@dataclass(slots=True)
class Outcome:
    """A variant on all ranks. Errors are per step; a gradient's is the largest over the ranks, with its tensor."""

    variant: Variant
    losses: list[float]
    norms: list[float]
    loss_errors: list[float]
    gradient_errors: list[tuple[float, str]]
    norm_errors: list[float]
    reductions: float | None  # a step; None where the process groups cannot be observed

    def worst(self) -> tuple[float, int, str]:
        """The largest error of all, its step (from 1), and the tensor (or "loss", "gradient norm")."""
        errors = [(error, tensor) for error, tensor in self.gradient_errors]
        found = []
        for name, each in ((LOSS, self.loss_errors), (NORM, self.norm_errors)):
            found += [(error, -step, name) for step, error in enumerate(each, 1)]
        found += [(error, -step, tensor) for step, (error, tensor) in enumerate(errors, 1)]
        error, step, tensor = max(found)
        return error, -step, tensor

    @property
    def passed(self) -> bool:
        return self.worst()[0] <= TOLERANCE


@dataclass(slots=True)
class _Seen:
    """What one rank saw of a variant, a value for each step."""

    losses: list[float] = field(default_factory=list)  # none where no loss is computed
    errors: list[tuple[float, str]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    reductions: float | None = None


class References:
    """What one process computes, each model once. `seed`: of the initial weights."""

    def __init__(self, steps: int, seed: int = 0):
        self.steps = steps
        self.seed = seed
        self._known: dict[ModelConfig, list[Expected]] = {}

    def of(self, layout: Layout, shape: str) -> list[Expected]:
        config = model_of(layout, shape)
        if config not in self._known:
            self._known[config] = one_process(config, self.seed, make_batches(layout, shape, self.steps))
        return self._known[config]


def run_variant(
    case: Case,
    variant: Variant,
    references: References,
    world: World,
    check_for_stop: Callable[[], None] = lambda: None,
) -> Outcome:
    """Trains under the layout, compares every step with one process; collective, the same result on every rank.

    Always fp32 on the CPU. The process groups made for it are gone afterwards.
    """
    expected = references.of(case.layout, variant.shape)
    with _own_groups(world):
        seen = _train(case, variant, references, expected, world, check_for_stop)
        message = [
            [_sent(each) for each in seen.losses],
            [[_sent(error), tensor] for error, tensor in seen.errors],
            [_sent(each) for each in seen.norms],
            seen.reductions,
        ]
        gathered = [
            _Seen(
                [_received(each) for each in losses],
                [(_received(error), tensor) for error, tensor in errors],
                [_received(each) for each in norms],
                reductions,
            )
            for losses, errors, norms, reductions in world.channel.all_gather(message)
        ]
    return assemble(variant, gathered, expected)


def _sent(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


def _received(value: float | None) -> float:
    return math.inf if value is None else value


def assemble(variant: Variant, seen: Sequence[_Seen], expected: Sequence[Expected]) -> Outcome:
    """The outcome of a variant from what every rank saw (pure). The ranks that compute a loss have equal shares of the
    global batch (or the same one): its loss is their mean."""
    losses = [sum(each) / len(each) for each in zip(*(rank.losses for rank in seen if rank.losses), strict=True)]
    loss_errors = [
        _finite(abs(loss - each.loss) / max(1.0, abs(each.loss))) for loss, each in zip(losses, expected, strict=True)
    ]
    norm_errors = [
        max(_finite(abs(norm - each.norm) / each.norm) for norm in norms)
        for norms, each in zip(zip(*(rank.norms for rank in seen), strict=True), expected, strict=True)
    ]
    gradient_errors = [max(each) for each in zip(*(rank.errors for rank in seen), strict=True)]
    reductions = [rank.reductions for rank in seen if rank.reductions is not None]
    return Outcome(
        variant,
        losses,
        seen[0].norms,
        loss_errors,
        gradient_errors,
        norm_errors,
        max(reductions, key=lambda each: abs(each - 1)) if reductions else None,
    )


@contextmanager
def _own_groups(world: World) -> Iterator[None]:
    """Destroys at the end the process groups that were made inside."""
    before = process_groups()
    yield
    world.channel.all_gather(None)
    for group in process_groups():
        if group not in before:
            dist.destroy_process_group(group)
    # DTensor remembers results with the mesh that they were for, and takes that for the next mesh of the same ranks.
    _clear_sharding_prop_cache()


def _train(
    case: Case,
    variant: Variant,
    references: References,
    expected: Sequence[Expected],
    world: World,
    check_for_stop: Callable[[], None],
) -> _Seen:
    layout, length = case.layout, sequence_length(case.layout)
    sequences = batch_size(layout.size) // layout.data_parallel_size
    plan = Plan(
        layout=layout,
        order=arrange(layout, [node["ranks"] for node in world.nodes]),
        model=model_of(layout, variant.shape),
        seed=references.seed,
        length=length,
        micro_batch_size=sequences // variant.micro_batches,
        pipeline=pipeline_of(case, variant),
        activation_checkpointing="full" if variant.checkpointing else "none",
        overlap=variant.overlap,
        reshard_after_forward=variant.reshard,
    )
    parallel = parallelise(plan, torch.device("cpu"))
    optimizer = make_optimizer(parameter for _, parameter in parallel.named_parameters())
    start = parallel.mesh.data_parallel_rank * sequences
    seen = _Seen()
    with _counted_reductions(parallel) as count:
        for (inputs, targets), wanted in zip(
            make_batches(layout, variant.shape, references.steps), expected, strict=True
        ):
            check_for_stop()
            mine = [each[start : start + sequences].split(plan.micro_batch_size) for each in (inputs, targets)]
            with count():
                losses = parallel.gradients(list(zip(*mine, strict=True)))
            if losses:
                seen.losses.append(torch.stack([local(each) for each in losses]).mean().item())
            seen.errors.append(largest_error(parallel, wanted))
            seen.norms.append(parallel.clip(_TRAINER.gradient_clip_norm).item())
            optimizer.step()
            parallel.zero()
        seen.reductions = count.reductions_per_step()
    return seen


# --- counting reductions -----------------------------------------------------------------------------------------


class _Count:
    """How often a step's gradients are reduced over the data-parallel ranks: the bytes that all-reduces and
    reduce-scatters move, over the bytes that one reduction of this rank's gradients moves."""

    def __init__(self, parallel: Parallel):
        layout = parallel.mesh.layout
        sizes = {"replicate": layout.dp_replicate, "shard": layout.dp_shard}
        self._dimensions = [name for name, size in sizes.items() if size > 1]
        self._bytes_of_one = dict(zip(sizes, _bytes_of_one_reduction(parallel), strict=True))
        # DDP and its flat counterpart reduce over the group of all ranks.
        alone = layout.dp_replicate == layout.size
        groups = {
            index: dist.group.WORLD if alone else parallel.mesh.groups[name]
            for index, name in enumerate(self._dimensions)
        }
        self._moved_bytes = dict.fromkeys(self._dimensions, 0)
        self._steps = 0
        self._observer = CollectiveObserver(groups) if hooks_missing() is None else None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Around what computes a step's gradients."""
        if self._observer is not None:
            self._observer.take()
        yield
        self._steps += 1
        for span in self._observer.take() if self._observer is not None else []:
            if span.operation in ("all_reduce", "reduce_scatter"):
                self._moved_bytes[self._dimensions[span.group]] += span.bytes

    def reductions_per_step(self) -> float | None:
        """Of the dimension where it is farthest from one; 0 without data parallelism."""
        if self._observer is None or not self._steps:
            return None
        counts = [moved / self._bytes_of_one[name] / self._steps for name, moved in self._moved_bytes.items()]
        return max(counts, key=lambda each: abs(each - 1), default=0.0)

    def close(self) -> None:
        if self._observer is not None:
            self._observer.close()


@contextmanager
def _counted_reductions(parallel: Parallel) -> Iterator[_Count]:
    count = _Count(parallel)
    try:
        yield count
    finally:
        count.close()


def _bytes_of_one_reduction(parallel: Parallel) -> tuple[int, int]:
    """What one reduction over the replicas and one over the shards moves, as they are counted: the whole tensor."""
    shards = parallel.mesh.layout.dp_shard
    parameters = [each for _, each in parallel.named_parameters()]
    if shards == 1:
        return sum(local(each).nbytes for each in parameters), 0
    # `fully_shard` pads the part of every rank to the size of the first one's.
    part_bytes = 0
    for each in parameters:
        row_bytes = math.prod(local(each).shape[1:]) * each.element_size()
        part_bytes += -(-_rows(each) // shards) * row_bytes
    return part_bytes, part_bytes * shards


def _rows(parameter: Tensor) -> int:
    """How many rows of a parameter the shards of one tensor-parallel rank have together."""
    rows = parameter.shape[0]
    if isinstance(parameter, DTensor):
        mesh, names = parameter.device_mesh, parameter.device_mesh.mesh_dim_names or ()
        if "tp" in names and parameter.placements[names.index("tp")].is_shard(0):
            rows //= mesh.size(names.index("tp"))
    return rows
