"""Pipeline parallelism: the stages that a rank has, and the schedule that runs them and accounts for their phases."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from bireme.layout import Pipeline
from bireme.mesh import Mesh
from bireme.model import GPT, ModelConfig, token_loss

_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}

PhaseOf = Callable[[str], AbstractContextManager[Any]]


class _Phases:
    """Turns the schedule's steps, which alternate, into phases."""

    def __init__(self) -> None:
        self.phase_of: PhaseOf | None = None
        self._name = ""
        self._open: AbstractContextManager[Any] | None = None

    def enter(self, name: str) -> None:
        if self.phase_of is not None and name != self._name:
            self.leave()
            self._open = self.phase_of(name)
            self._open.__enter__()
            self._name = name

    def leave(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
        self._open, self._name = None, ""


class _Stage(PipelineStage):
    """A stage that says when it turns to forward and to backward: waiting for an activation is forward's, waiting for
    a gradient backward's."""

    phases: _Phases
    before_forward: Callable[[], None]
    autocast: AbstractContextManager[Any]

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self.phases.enter("forward")
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self.phases.enter("backward")
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self.phases.enter("forward")
        self.before_forward()
        with self.autocast:
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self.phases.enter("backward")
        return super().backward_one_chunk(*args, **kwargs)


class PipelineRunner:
    """Runs the micro-batches of a step through the stages of all ranks of a pipeline.

    `parts`: this rank's stages as plain modules, in the order of their layers; `wrapped`: what is to be called.
    """

    def __init__(
        self,
        parts: Sequence[GPT],
        wrapped: Sequence[nn.Module],
        config: ModelConfig,
        mesh: Mesh,
        pipeline: Pipeline,
        micro_batch_size: int,
        length: int,
        hidden_dtype: torch.dtype = torch.float32,
        autocast: AbstractContextManager[Any] | None = None,
    ):
        self._parts = parts
        self._wrapped = wrapped
        self._mesh = mesh
        self._group = mesh.groups["pp"]
        self._num_stages = pipeline.stages_per_rank * mesh.layout.pp
        self._device = next(parts[0].parameters()).device
        self._dtype = hidden_dtype
        # Between stages the sequence stays divided over the tensor-parallel ranks.
        self._hidden = (length // mesh.layout.tp, config.embedding_dim)
        self._phases = _Phases()
        self.last = any(part.last for part in parts)
        tokens = torch.empty(micro_batch_size, length, dtype=torch.int64, device="meta")
        hidden, logits = (
            torch.empty(shape, dtype=hidden_dtype, device="meta", requires_grad=True)
            for shape in ((micro_batch_size, *self._hidden), (micro_batch_size, length, config.vocab_size))
        )
        self._stages = []
        for index, (part, module) in enumerate(zip(parts, wrapped, strict=True)):
            # With the shapes given, the first step need not find them out by sending pickles around.
            stage = _Stage(
                module,
                index * mesh.layout.pp + mesh.where["pp"],
                self._num_stages,
                self._device,
                input_args=tokens if part.first else hidden,
                output_args=logits if part.last else hidden,
                group=self._group,
            )
            stage.phases = self._phases
            stage.before_forward = lambda: None
            stage.autocast = autocast or nullcontext()
            self._stages.append(stage)
        schedule = _SCHEDULES[pipeline.schedule]
        several = pipeline.schedule == "interleaved"
        self._schedule = schedule(
            self._stages if several else self._stages[0], n_microbatches=pipeline.micro_batches, loss_fn=token_loss
        )

    def step(
        self,
        micro_batches: Sequence[tuple[Tensor, Tensor]],
        phase_of: PhaseOf | None = None,
        before_forward: Callable[[], None] = lambda: None,
    ) -> list[Tensor]:
        """Forward and backward of all micro-batches; the losses of each where the last stage is, elsewhere none."""
        losses: list[Tensor] = []
        self._phases.phase_of = phase_of
        for stage in self._stages:
            stage.before_forward = before_forward
        inputs = [torch.cat([each[0] for each in micro_batches])] if self._parts[0].first else []
        targets = torch.cat([each[1] for each in micro_batches]) if self.last else None
        try:
            self._schedule.step(*inputs, target=targets, losses=losses, return_outputs=False)
        finally:
            self._phases.leave()
        return [loss.detach() for loss in losses]

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """The loss of each micro-batch (of any size) where the last stage is, elsewhere none; no schedule is needed
        for forward alone, each rank goes on to the next micro-batch as soon as it has sent what it has."""
        rank, ranks = self._mesh.where["pp"], self._mesh.layout.pp
        losses: list[Tensor] = []
        sent: list[Any] = []
        for inputs, targets in micro_batches:
            for part, module in zip(self._parts, self._wrapped, strict=True):
                x = inputs
                if not part.first:
                    x = torch.empty(inputs.shape[0], *self._hidden, dtype=self._dtype, device=self._device)
                    dist.recv(x, group=self._group, group_src=(rank - 1) % ranks)
                x = module(x)
                if part.last:
                    losses.append(token_loss(x, targets))
                else:
                    x = x.contiguous()
                    sent.append((x, dist.isend(x, group=self._group, group_dst=(rank + 1) % ranks)))
        for _, work in sent:
            work.wait()
        return losses
