"""Start-up checks: does every group reduce as arithmetic says, does the model give the gradients of one process,
do all replicas start from the same weights, and are they still equal after the first step?

Each of these goes wrong somewhere without an error: a backend that adds where it should average, replicas that start
from other weights, a reduction that is left out. A model trains on, only worse.
"""

import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from bireme.data.loader import Share
from bireme.errors import SharedError
from bireme.layout import MODEL, TIED, Layout
from bireme.mesh import Mesh, local, local_part, replicated
from bireme.model import ModelConfig, initial_parameter
from bireme.parallel import TIED_PARAMETERS, Parallel, Plan, parallelise, parameter_names
from bireme.parity import largest_error, one_process
from bireme.text import listed, name_ranks
from bireme.world import World

_ELEMENTS = 64  # per rank in the reductions that are checked
_SMALL_HEAD_DIM = 8
_SAMPLES = 64  # of each rank's share of the first step
_RECOMPUTED_ELEMENTS = 4_000_000  # of each rank's initial weights: a second's work on one core at most
# A factor is at least 2 when a sum is taken for a mean, and different samples have different gradients; rounding is
# 1e-5 in fp32, and some percent in the bf16 of GPUs.
_TOLERANCE = {"cpu": 1e-2, "cuda": 0.2}
_MISSING = 1e9  # an error that stands for a gradient that is not there


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What the start-up checks found."""

    seconds: float
    groups: list[str]  # whose reductions were held against arithmetic
    corrected: list[str]  # groups whose backend does not average: summed and divided instead

    def __str__(self) -> str:
        corrected = ""
        if self.corrected:
            corrected = f"; averages over {' and '.join(self.corrected)} are wrong here and are summed and divided"
        return (
            f"start-up checks passed in {self.seconds:.1f} s: reductions over {', '.join(self.groups)}, gradients of a "
            f"small model against one process, initial weights, replicas{corrected}"
        )

    def as_dict(self) -> dict[str, Any]:
        return {"seconds": round(self.seconds, 3), "groups": self.groups, "corrected": self.corrected}


def check_start(parallel: Parallel, world: World) -> Checked:
    """All start-up checks; collective. SharedError names the group, the tensor and the ranks of what is wrong."""
    started = time.perf_counter()
    world.agree(asdict(parallel.plan))
    corrected = check_reductions(parallel.mesh, world)
    if corrected:
        sum_instead_of_average(parallel)
    check_gradients(parallel.plan, parallel.mesh, world, bool(corrected))
    check_parameters(parallel, world)
    check_replicas(parallel, world.device, "before the first step")
    groups = [*parallel.mesh.groups, *([MODEL] if parallel.mesh.model is not None else [])]
    return Checked(seconds=time.perf_counter() - started, groups=groups, corrected=corrected)


# --- reductions --------------------------------------------------------------------------------------------------


def check_reductions(mesh: Mesh, world: World) -> list[str]:
    """Holds the sums and averages of every group against arithmetic; returns the dimensions whose averages are wrong
    (they can be summed and divided instead). SharedError when a sum is wrong."""
    problem, wrong_averages = None, []
    for name, group in [*mesh.groups.items(), (MODEL, mesh.model), (TIED, mesh.tied)]:
        if group is None:
            continue
        wrong = _wrong_reductions(group, world.device)
        sums = [each for each in wrong if "sum" in each]
        if sums:
            ranks = dist.get_process_group_ranks(group)
            problem = (
                f"{' and '.join(sums)} over the {name} group of {name_ranks(ranks)} came out wrong: backend "
                f"{dist.get_backend(group)} cannot be trusted"
            )
        elif wrong and name in ("replicate", "shard"):  # nobody averages over the others
            wrong_averages.append(name)
    world.raise_together(problem)
    everybodys = world.channel.all_gather(wrong_averages)
    return sorted({name for each in everybodys for name in each})


def _wrong_reductions(group: Any, device: torch.device) -> list[str]:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    # Small whole numbers: sums are exact, and every rank's part is another.
    mine = torch.arange(size * _ELEMENTS, dtype=torch.float32, device=device) + 100 * rank
    total = torch.arange(size * _ELEMENTS, dtype=torch.float32, device=device) * size + 50 * size * (size - 1)
    wrong = []
    for word, operation, expected in (("sum", dist.ReduceOp.SUM, total), ("average", dist.ReduceOp.AVG, total / size)):
        reduced = mine.clone()
        part = torch.empty(_ELEMENTS, device=device)
        try:
            dist.all_reduce(reduced, operation, group=group)
            _reduce_scatter(part, mine.clone(), operation, group)
        except RuntimeError:  # an operation that the backend says it does not have
            wrong.append(f"the {word}")
            continue
        if not torch.allclose(reduced, expected):
            wrong.append(f"the all-reduce {word}")
        if not torch.allclose(part, expected[rank * _ELEMENTS : (rank + 1) * _ELEMENTS]):
            wrong.append(f"the reduce-scatter {word}")
    return wrong


def _reduce_scatter(output: Tensor, tensor: Tensor, operation: Any, group: Any) -> None:
    """As FSDP calls it, by its name since torch 2.13 or the one before."""
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    call(output, tensor, op=operation, group=group)


def sum_instead_of_average(parallel: Parallel) -> None:
    """Makes `fully_shard` divide by itself, where the backend's averages are wrong."""
    for part in parallel.parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


# --- gradients ---------------------------------------------------------------------------------------------------


def small_model(model: ModelConfig, layout: Layout, stages_per_rank: int) -> ModelConfig:
    """The smallest model of the same kind that the layout can hold: wrapped in the same way, computed in no time."""
    heads = 2 * layout.tp
    layers = layout.pp * stages_per_rank
    return replace(
        model,
        vocab_size=8 * layout.tp,
        sequence_length=4 * layout.tp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=layout.tp if model.num_kv_heads < model.num_heads else heads,
        embedding_dim=heads * _SMALL_HEAD_DIM,
        feed_forward_dim=heads * _SMALL_HEAD_DIM,
    )


def check_gradients(plan: Plan, mesh: Mesh, world: World, sum_instead: bool = False) -> None:
    """Wraps a small model exactly as the real one and holds its gradients, and their norm, against one process's.

    The one check that sees through every layer: a factor, a reduction left out, a shard in the wrong place.
    SharedError names the worst tensor.
    """
    layout = plan.layout
    model = small_model(plan.model, layout, plan.pipeline.stages_per_rank)
    micro_batches = plan.pipeline.micro_batches if layout.pp > 1 else min(2, plan.pipeline.micro_batches)
    pipeline = replace(plan.pipeline, micro_batches=micro_batches)
    small = replace(
        plan, model=model, length=model.sequence_length, micro_batch_size=1, pipeline=pipeline, compile=False
    )
    tokens = torch.randint(
        model.vocab_size,
        (layout.data_parallel_size * micro_batches, model.sequence_length + 1),
        generator=torch.Generator().manual_seed(plan.seed),
    )
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    (expected,) = one_process(model, plan.seed, [(inputs, targets)])
    parallel = parallelise(small, world.device, mesh=mesh)
    if sum_instead:
        sum_instead_of_average(parallel)
    first = mesh.data_parallel_rank * micro_batches
    mine = [
        (inputs[row : row + 1].to(world.device), targets[row : row + 1].to(world.device))
        for row in range(first, first + micro_batches)
    ]
    parallel.gradients(mine)
    error, tensor = largest_error(parallel, expected)
    norm = float(parallel.gradient_norm())
    norm_error = abs(norm - expected.norm) / expected.norm
    error, norm_error = (each if each < _MISSING else _MISSING for each in (error, norm_error))  # also for NaN
    everybodys = world.channel.all_gather([error, tensor, norm_error])
    tolerance = _TOLERANCE[world.device.type]
    worst, tensor, _ = max(everybodys)
    if worst > tolerance:
        ranks = [rank for rank, each in enumerate(everybodys) if each[0] > tolerance]
        how = f"off by {worst:.0%}" if worst < _MISSING else "missing or not a number"
        raise SharedError(
            f"layout {layout} computes wrong gradients here: of a small model, {tensor} is {how} against one process "
            f"(wrong on {name_ranks(ranks)}); do not train with it (bireme parity shows more)"
        )
    ranks = [rank for rank, each in enumerate(everybodys) if each[2] > tolerance]
    if ranks:
        raise SharedError(
            f"layout {layout} computes a wrong gradient norm here: of a small model, it is off by "
            f"{max(each[2] for each in everybodys):.0%} against one process (wrong on {name_ranks(ranks)}); do not "
            "train with it (bireme parity shows more)"
        )


# --- parameters --------------------------------------------------------------------------------------------------


@torch.no_grad()
def check_parameters(parallel: Parallel, world: World) -> None:
    """Holds this rank's part of the initial weights against those of one process, computed anew.

    Of a large model each rank takes a part, beginning at another parameter. SharedError names the first that differs.
    """
    plan = parallel.plan
    named = list(parallel.named_parameters())
    first = parallel.mesh.data_parallel_rank * len(named) // parallel.mesh.layout.data_parallel_size
    recomputed, problem = 0, None
    for name, parameter in [*named[first:], *named[:first]]:
        if recomputed and recomputed + parameter.numel() > _RECOMPUTED_ELEMENTS:
            break
        recomputed += parameter.numel()
        expected = local_part(initial_parameter(name, parameter.shape, plan.model, plan.seed), parameter)
        if not torch.equal(local(parameter).cpu(), expected):
            problem = f"{name} does not start from the weights that one process has with seed {plan.seed}"
            break
    world.raise_together(problem)


def check_replicas(parallel: Parallel, device: torch.device, when: str) -> None:
    """Compares what several ranks hold of the same parameters: replicas, norms of a tensor-parallel group, the two ends
    of a tied embedding. Collective, on the training groups. SharedError names the parameter and the ranks."""
    if parallel.mesh.layout.size == 1:
        return
    named = list(parallel.named_parameters())
    sums = torch.tensor([_checksum(each) for _, each in named], dtype=torch.int64)
    kinds = _held_twice(parallel, named)
    # One number for each kind of copy; every rank can say of every other what it must be equal to.
    digests = torch.stack([_digest(sums[torch.tensor(members, dtype=torch.int64)]) for _, members in kinds])
    gathered = _all_gather(digests, device)
    for (kind, members), column in zip(kinds, gathered.T.tolist(), strict=True):
        for ranks in _copies(parallel.mesh, kind):
            if len({column[rank] for rank in ranks}) > 1:  # every rank sees this, and comes here
                most = int(_all_gather(torch.tensor([len(sums)]), device).max())
                padded = torch.zeros(most, dtype=torch.int64)
                padded[members] = sums[members]  # what these ranks do not share has every right to differ
                raise _difference(parallel, kind, ranks, _all_gather(padded, device), when)


def _held_twice(parallel: Parallel, named: Sequence[tuple[str, nn.Parameter]]) -> list[tuple[str, list[int]]]:
    """For each kind of copy, which parameters (by index) it concerns."""
    return [
        ("replicate", list(range(len(named)))),
        ("tp", [index for index, (_, each) in enumerate(named) if replicated(each, "tp")]),
        (TIED, [index for index, (name, _) in enumerate(named) if name in TIED_PARAMETERS]),
    ]


def _copies(mesh: Mesh, kind: str) -> list[list[int]]:
    """The ranks that hold the same, in lists."""
    layout = mesh.layout
    if kind == TIED:
        # Without a pipeline both are one parameter; untied ones never meet.
        groups = layout.tied_groups() if mesh.ties else []
    else:
        groups = layout.groups(kind)
    return [[mesh.order[position] for position in group] for group in groups]


def _difference(parallel: Parallel, kind: str, ranks: list[int], table: Tensor, when: str) -> SharedError:
    """`table`: the checksums of every rank's parameters, (ranks, most parameters of any)."""
    names = ["the embedding, or the head that is tied to it"]
    if kind != TIED:  # these ranks are of one stage: their parameters have the same names, which any rank can tell
        stage = parallel.mesh.layout.coordinates(parallel.mesh.order.index(ranks[0]))["pp"]
        rows = table[torch.tensor(ranks)].T.tolist()
        names = [
            name for name, row in zip(parameter_names(parallel.plan, stage), rows, strict=False) if len(set(row)) > 1
        ]
    return SharedError(
        f"{when}, {name_ranks(ranks)} should hold the same weights and do not: {listed(names, 2)}; was a reduction "
        "left out, or did a rank start from another seed?"
    )


def _checksum(parameter: Tensor) -> int:
    """Of the bits that this rank holds."""
    held = local(parameter.detach()).contiguous().cpu()
    return zlib.crc32(held.view(torch.uint8).numpy().data) if held.numel() else 0


def _digest(sums: Tensor) -> Tensor:
    return torch.tensor(zlib.crc32(sums.numpy().data) if len(sums) else 0, dtype=torch.int64)


def _all_gather(row: Tensor, device: torch.device) -> Tensor:
    """(ranks, len(row)): everybody's row, on the CPU."""
    row = row.to(device)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return torch.stack(rows).cpu()


def check_samples(share: Share, world: World) -> None:
    """SharedError when, in the first step, two ranks would train on the same samples, or ranks that compute one
    replica's step together on different ones. Collective."""
    epoch = share.corpus.num_train_samples
    if world.size == 1 or share.first_sample % epoch + share.global_batch_size > epoch:
        return  # a batch that reaches into the next epoch may have a sample twice
    first = share.ids(share.first_step)[:_SAMPLES].tolist()
    holders: dict[int, int] = {}  # sample: the rank that has it first
    leaders: dict[int, int] = {}  # data-parallel rank: the first of its ranks
    everybodys = world.channel.all_gather((share.rank, first))
    for rank, (place, ids) in enumerate(everybodys):
        leader = leaders.setdefault(place, rank)
        if ids != everybodys[leader][1]:
            raise SharedError(
                f"{name_ranks([leader, rank])} compute one replica's step together, but read different samples"
            )
        for sample in ids:
            holder = holders.setdefault(sample, leader)
            if holder != leader:
                raise SharedError(
                    f"{name_ranks([holder, rank])} would both train on sample {sample} in step {share.first_step}: "
                    "the data are not divided over the ranks"
                )
