"""From a layout to a wrapped model on one mesh: the one place that knows how to divide, shard and replicate a model."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.utils import get_total_norm

from bireme.layout import Layout, Pipeline, stage_layers
from bireme.mesh import Mesh, local, make_mesh, replicated
from bireme.model import GPT, HEAD, ModelConfig, compile_blocks, initialise, rotary_tables, share_tables
from bireme.pipeline import PhaseOf, PipelineRunner
from bireme.replicas import Overlapped, Replicas, replicate


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that decides how the model is built and wrapped; the same on every rank."""

    layout: Layout
    order: Sequence[int]  # the rank at each position of the mesh
    model: ModelConfig
    seed: int
    length: int
    micro_batch_size: int
    pipeline: Pipeline
    activation_checkpointing: str = "none"
    overlap: bool = True
    bucket_mb: float | None = None
    reshard_after_forward: bool = True
    compile: bool = False


class Parallel:
    """This rank's part of the model, and how its gradients come about: `gradients`, `clip`, the optimizer's step,
    `zero`. `autocast` is around the forward pass."""

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        parts: list[GPT],
        wrapped: list[nn.Module],
        replicas: Replicas | None,
        autocast: AbstractContextManager[Any],
    ):
        self.plan = plan
        self.mesh = mesh
        self.parts = parts
        self.pipeline: PipelineRunner | None = None
        self._autocast = autocast
        self._wrapped = wrapped
        self.replicas = replicas  # DDP, or its flat counterpart: only without any other kind of parallelism
        self._sharded = mesh.layout.dp_shard > 1
        self._named = {name: each for part in parts for name, each in part.named_parameters()}

    @property
    def model(self) -> nn.Module:
        return self.replicas.model if self.replicas is not None else self._wrapped[0]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters by their names in the whole model, each once."""
        yield from self._named.items()

    @property
    def reduction(self) -> str:
        """How gradients are averaged over the data-parallel ranks."""
        if self._sharded:
            return "sharded"
        if isinstance(self.replicas, Overlapped):
            return "overlap"
        return "flat" if self.replicas is not None or self.mesh.layout.dp_replicate > 1 else "none"

    def gradients(
        self,
        micro_batches: Sequence[tuple[Tensor, Tensor]],
        phase_of: PhaseOf = lambda name: nullcontext(),
        before_forward: Callable[[], None] = lambda: None,
    ) -> list[Tensor]:
        """Forward and backward of a step's micro-batches, (inputs, targets) each; every gradient is then the mean over
        the global batch. Returns the loss of each micro-batch, on ranks that compute one (of a pipeline the last
        stage's). `phase_of` gives the `with` blocks of forward and backward."""
        with self.computing():
            if self.pipeline is not None:
                losses = self.pipeline.step(micro_batches, phase_of, before_forward)
                with phase_of("backward"):
                    self.reduce()
                return losses
            losses = []
            for index, (inputs, targets) in enumerate(micro_batches):
                last = index == len(micro_batches) - 1
                with self.accumulating(last):
                    with phase_of("forward"):
                        before_forward()
                        with self._autocast:
                            loss = self.model(inputs, targets)
                    with phase_of("backward"):
                        (loss / len(micro_batches) if len(micro_batches) > 1 else loss).backward()
                        if last:
                            self.reduce()
                losses.append(local(loss.detach()))
            return losses

    def computing(self) -> AbstractContextManager[Any]:
        """Around forward and backward: with tensor parallelism the loss stays divided over the vocabulary."""
        return loss_parallel() if self.mesh.layout.tp > 1 else nullcontext()

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward *and* backward of each micro-batch: only the last one reduces."""
        if self.replicas is not None:
            return self.replicas.accumulating(last)
        for module in self._wrapped:
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(last)
                module.set_is_last_backward(last)
        return nullcontext()

    def reduce(self) -> None:
        """Makes the gradients, where no wrapper has done so, the same on all ranks that hold the same parameter."""
        if self.replicas is not None:
            self.replicas.reduce()
            return
        gradients = [each for each in self._named.values() if each.grad is not None]
        if not self._sharded:
            if self.mesh.layout.tp > 1:
                _settle(gradients, self.mesh.groups["tp"])
            if self.mesh.layout.dp_replicate > 1:
                parts = [local(each.grad) for each in gradients if each.grad is not None]
                size = self.mesh.layout.dp_replicate
                # Divided first, as DDP does.
                _all_reduce_flat(parts, self.mesh.groups["replicate"], lambda flat: flat.div_(size))
        if self.mesh.tied is not None:
            ends = [each for name, each in self._named.items() if name in TIED_PARAMETERS and each.grad is not None]
            _all_reduce_flat([local(each.grad) for each in ends if each.grad is not None], self.mesh.tied)

    def zero(self) -> None:
        """Forgets the gradients."""
        if self.replicas is not None:
            self.replicas.zero()
        else:
            for each in self._named.values():
                each.grad = None

    def _counted(self) -> list[Tensor]:
        """Local gradients such that over the ranks of one replica every element is there once."""
        tied_elsewhere = self.plan.model.tied_embedding and not any(part.first for part in self.parts)
        return [
            local(each.grad)
            for name, each in self._named.items()
            if each.grad is not None
            and not (tied_elsewhere and name == HEAD)
            and (self.mesh.where["tp"] == 0 or not replicated(each, "tp"))
        ]

    def gradient_norm(self) -> Tensor:
        """The norm of the whole gradient, the same on every rank: over shards, tensor-parallel ranks and stages."""
        mine = get_total_norm(self._counted())
        if self.mesh.model is None:
            return mine
        square = mine.square()
        dist.all_reduce(square, group=self.mesh.model)
        return square.sqrt()

    def clip(self, max_norm: float) -> Tensor:
        """Scales the gradients down to `max_norm` where their norm is larger; returns the norm before."""
        norm = self.gradient_norm()
        gradients = [local(each.grad) for each in self._named.values() if each.grad is not None]
        torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    @torch.no_grad()
    def evaluate(self, batches: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """The mean loss of each batch, forward only; no losses on ranks that compute none."""
        for part in self.parts:
            part.eval()
        try:
            with self.computing():
                if self.pipeline is not None:
                    return self.pipeline.evaluate(batches)
                # Not through DDP: there is nothing to reduce.
                model = self.parts[0] if self.replicas is not None else self._wrapped[0]
                return [model(inputs, targets) for inputs, targets in batches]
        finally:
            for part in self.parts:
                part.train()

    @torch.no_grad()
    def whole_weights(self) -> dict[str, Tensor]:
        """Every parameter of the whole model, on rank 0's CPU (elsewhere nothing); collective. Tied weights once."""
        # Two gathers instead of one, of what is both sharded and divided: no reason to warn anybody.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        weights: dict[str, Tensor] = {}
        pp = self.mesh.layout.pp
        # One pipeline hands over to its first stage, which is rank 0; the other ranks only help to gather.
        keeps = self.mesh.data_parallel_rank == 0 and self.mesh.where["tp"] == 0
        for name, parameter in self._named.items():
            if self.plan.model.tied_embedding and name == HEAD:
                continue
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            if keeps:
                weights[name] = whole.detach().cpu()
        if pp > 1:
            mine = [[name, list(each.shape)] for name, each in weights.items()]
            gathered: list[Any] = [None] * pp
            dist.all_gather_object(gathered, mine, group=self.mesh.groups["pp"])
            if keeps:
                for stage, described in enumerate(gathered[1:], 1):
                    for name, shape in described:
                        if self.mesh.where["pp"] == 0:
                            weights[name] = torch.empty(shape)
                            dist.recv(weights[name], group=self.mesh.groups["pp"], group_src=stage)
                        elif self.mesh.where["pp"] == stage:
                            dist.send(weights[name].contiguous(), group=self.mesh.groups["pp"], group_dst=0)
        return weights if keeps and self.mesh.where["pp"] == 0 else {}


TIED_PARAMETERS = ("token_embedding.weight", HEAD)


# --- gradients ---------------------------------------------------------------------------------------------------


def _all_reduce_flat(tensors: list[Tensor], group: Any, before: Callable[[Tensor], Any] = lambda flat: None) -> None:
    """One all-reduce (sum) of all these tensors, in place."""
    if not tensors:
        return
    flat = torch.cat([each.flatten() for each in tensors])
    before(flat)
    dist.all_reduce(flat, group=group)
    offset = 0
    for each in tensors:
        each.copy_(flat[offset : offset + each.numel()].view_as(each))
        offset += each.numel()


def _settle(parameters: list[nn.Parameter], group: Any) -> None:
    """Gives the gradients of tensor-parallel parameters the placement of their parameter.

    Of norms and biases each rank has a part, computed from its part of the sequence: these are added up, in one
    all-reduce instead of one for each. An untied embedding's gradient is whole on every rank: each keeps its rows.
    """
    partial = []
    for each in parameters:
        gradient = each.grad
        if isinstance(gradient, DTensor) and isinstance(each, DTensor) and gradient.placements != each.placements:
            if isinstance(gradient.placements[0], Partial) and isinstance(each.placements[0], Replicate):
                partial.append(each)
            else:
                each.grad = gradient.redistribute(placements=each.placements)
    _all_reduce_flat([local(each.grad) for each in partial if each.grad is not None], group)
    for each in partial:
        assert isinstance(each.grad, DTensor)
        each.grad = DTensor.from_local(each.grad.to_local(), each.grad.device_mesh, [Replicate()], run_check=False)


# --- wrapping ----------------------------------------------------------------------------------------------------


def parallelise(
    plan: Plan,
    device: torch.device,
    tune: Callable[[GPT], None] = lambda part: None,
    autocast: AbstractContextManager[Any] | None = None,
    mesh: Mesh | None = None,
    timeout_s: float | None = None,
) -> Parallel:
    """Builds, initialises and wraps this rank's part of the model; collective. `tune` may plant hooks in each part
    before it is wrapped; `autocast` is around the forward pass; `mesh`: of the same layout, to be used again;
    `timeout_s`: how long a stage of a pipeline may wait for another (None: PyTorch's 30 minutes)."""
    layout = plan.layout
    rank = dist.get_rank() if dist.is_initialized() else 0
    mesh = mesh or make_mesh(layout, list(plan.order), rank, device.type, plan.model.tied_embedding, timeout_s)
    only_replicas = layout.data_parallel_size == layout.dp_replicate == layout.size
    stages = layout.pp * plan.pipeline.stages_per_rank
    parts: list[GPT] = []
    wrapped: list[nn.Module] = []
    for index in range(plan.pipeline.stages_per_rank):
        stage = index * layout.pp + mesh.where["pp"]
        with torch.device("meta"):
            part = GPT(plan.model, plan.activation_checkpointing, stage_layers(plan.model.num_layers, stages, stage))
        _build(part, plan, mesh, device, tune)
        parts.append(part)
        wrapped.append(part)
    replicas: Replicas | None = None
    if only_replicas:
        replicas = replicate(parts[0], plan.overlap, plan.bucket_mb)
    result = Parallel(plan, mesh, parts, wrapped, replicas, autocast or nullcontext())
    if layout.pp > 1:
        dtype = torch.bfloat16 if device.type == "cuda" and layout.dp_shard > 1 else torch.float32
        result.pipeline = PipelineRunner(
            parts, wrapped, plan.model, mesh, plan.pipeline, plan.micro_batch_size, plan.length, dtype, autocast
        )
    return result


def parameter_names(plan: Plan, stage_rank: int) -> list[str]:
    """The names of what a rank at this place of a pipeline holds, in the order of its `named_parameters`."""
    stages = plan.layout.pp * plan.pipeline.stages_per_rank
    layers = [
        stage_layers(plan.model.num_layers, stages, index * plan.layout.pp + stage_rank)
        for index in range(plan.pipeline.stages_per_rank)
    ]
    with torch.device("meta"):
        return [name for each in layers for name, _ in GPT(plan.model, layers=each).named_parameters()]


def _build(part: GPT, plan: Plan, mesh: Mesh, device: torch.device, tune: Callable[[GPT], None]) -> None:
    """Gives a part on the meta device its values, divides and shards it: block by block, so that never more than one
    whole block is in memory besides what stays."""
    tp, shard = mesh.sub("tp"), mesh.sub("replicate", "shard") if mesh.layout.dp_shard > 1 else None
    policy = MixedPrecisionPolicy()
    if device.type == "cuda":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    tune(part)
    if plan.compile:
        # Blocks are compiled one by one: there is nothing for dynamo's own DDP splitting to do, and it refuses
        # buckets below a megabyte.
        torch._dynamo.config.optimize_ddp = False
        compile_blocks(part)
    tables = [each.to(device) for each in rotary_tables(plan.model)] if plan.model.position == "rotary" else None
    for name, layer in part.layers.items():
        _materialise(layer, f"layers.{name}.", plan, device)
        if tables is not None:
            share_tables(layer, *tables)
        if tp is not None:
            _divide(layer, tp, _layer_plan(layer))
        if shard is not None:
            fully_shard(layer, mesh=shard, mp_policy=policy, reshard_after_forward=plan.reshard_after_forward)
    for name, child in part.named_children():
        if name != "layers":
            _materialise(child, f"{name}.", plan, device)
    part.tie()
    if tp is not None:
        if part.position_embedding is not None:
            here = mesh.where["tp"]
            part.position_embedding.register_forward_pre_hook(
                lambda _, inputs: (inputs[0].chunk(mesh.layout.tp)[here],)  # the vectors of this rank's positions
            )
        _divide(part, tp, _ends_plan(part))
        part.tie()
    if shard is not None:
        # What is left, embeddings and head, is one unit: a tied weight must not be in two.
        fully_shard(part, mesh=shard, mp_policy=policy, reshard_after_forward=False)


def _materialise(module: nn.Module, prefix: str, plan: Plan, device: torch.device) -> None:
    module.to_empty(device=device)
    initialise(module, prefix, plan.model, plan.seed)


def _divide(module: nn.Module, mesh: DeviceMesh, styles: dict[str, ParallelStyle]) -> None:
    # Every rank has the same values already: none are sent.
    parallelize_module(module, mesh, styles, src_data_rank=None)


def _layer_plan(layer: nn.Module) -> dict[str, ParallelStyle]:
    """Megatron's division of a block (Shoeybi et al. 2019), with sequence parallelism (Korthikanti et al. 2022):
    between the divided matrices the sequence is divided, so norms and residuals are not computed twice."""
    styles: dict[str, ParallelStyle] = {}
    for norm, block, into, out in (
        ("attention_norm", "attention", ("wq", "wk", "wv"), "wo"),
        ("feed_forward_norm", "feed_forward", ("w1", "w3"), "w2"),
    ):
        styles[norm] = SequenceParallel()
        styles[block] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        parallel = layer.get_submodule(block)
        styles |= {f"{block}.{name}": ColwiseParallel() for name in into if getattr(parallel, name, None) is not None}
        styles[f"{block}.{out}"] = RowwiseParallel(output_layouts=Shard(1))
    return styles


def _ends_plan(part: GPT) -> dict[str, ParallelStyle]:
    styles: dict[str, ParallelStyle] = {
        "token_embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "position_embedding": SequenceParallel(sequence_dim=0, use_local_output=True),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    return {name: style for name, style in styles.items() if getattr(part, name) is not None}
