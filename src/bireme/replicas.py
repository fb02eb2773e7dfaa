"""Replicas of a whole model, and how their gradients are averaged: one reduction per optimizer step."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_BUCKETS = 8
_SMALLEST_BUCKET_MB = 0.25
_MIB = 1024 * 1024


class Replicas(Protocol):
    """A model of which every rank holds a replica, and the way its gradients are averaged."""

    @property
    def model(self) -> nn.Module:
        """Call this one: its backward pass may reduce."""

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward *and* backward of each micro-batch: only the last one reduces."""

    def reduce(self) -> None:
        """Called after the last backward pass; when it returns, gradients are averages over all ranks."""

    def zero(self) -> None:
        """Forgets the gradients."""


class Overlapped:
    """DDP: each bucket's all-reduce runs while the backward pass goes on."""

    def __init__(self, model: nn.Module, bucket_mb: float | None = None):
        size_mb = sum(each.numel() * each.element_size() for each in model.parameters()) / _MIB
        self.bucket_mb = bucket_mb or max(_SMALLEST_BUCKET_MB, size_mb / _BUCKETS)
        # The only buffers are tables that every rank computes alike: nothing to broadcast before each forward pass.
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            model, [name for name, _ in model.named_buffers()]
        )
        self.model: DistributedDataParallel = DistributedDataParallel(
            model,
            bucket_cap_mb=self.bucket_mb,  # annotated as int, used as a float
            gradient_as_bucket_view=True,
        )

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.model.no_sync()

    def reduce(self) -> None:
        """Nothing left to do: DDP ends the backward pass when the last bucket has arrived."""

    def zero(self) -> None:
        self.model.zero_grad(set_to_none=True)


class Flat:
    """One all-reduce of all gradients after the backward pass: nothing is hidden, everything is easy to see."""

    def __init__(self, model: nn.Module):
        self.model = model
        parameters = list(model.parameters())
        # Gradients are views into one buffer, so that reducing copies nothing. zero_grad must keep them.
        self._flat = torch.zeros(sum(each.numel() for each in parameters), device=parameters[0].device)
        offset = 0
        for parameter in parameters:
            dist.broadcast(parameter.data, src=0)  # as DDP does: one truth about the initial weights
            parameter.grad = self._flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def reduce(self) -> None:
        # Divided first, as DDP does, so that both ways round alike.
        self._flat.div_(dist.get_world_size())
        dist.all_reduce(self._flat)

    def zero(self) -> None:
        self._flat.zero_()


def replicate(model: nn.Module, overlap: bool, bucket_mb: float | None) -> Replicas:
    """The model, the same on every rank, with gradients averaged over all of them."""
    return Overlapped(model, bucket_mb) if overlap else Flat(model)
