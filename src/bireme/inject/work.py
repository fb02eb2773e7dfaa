"""Real extra work, of a given length: multiplications of matrices that are nobody else's, so no result changes."""

import time
from collections.abc import Callable

import torch

_SIZE = 128  # a tenth of a millisecond on a core: work ends on time
_SIZE_ON_GPU = 2048
_TRIAL = 50


class Work:
    """`work(ms)` keeps this thread computing for so long, measured by its own CPU clock; on a GPU it launches as many
    kernels as take so long there."""

    def __init__(self, device: torch.device):
        self._device = device
        size = _SIZE_ON_GPU if device.type == "cuda" else _SIZE
        # No random numbers: their generator is part of the training's state.
        self._a = torch.full((size, size), 0.5, device=device)
        self._b = torch.full((size, size), 0.25, device=device)
        self._out = torch.empty((size, size), device=device)
        self._kernel_ms = self._time_kernel() if device.type == "cuda" else 0.0
        self.ms = self._on_gpu if device.type == "cuda" else self._on_cpu

    ms: Callable[[float], None]

    @torch.no_grad()
    def _on_cpu(self, ms: float) -> None:
        end_ns = time.thread_time_ns() + int(ms * 1e6)
        while time.thread_time_ns() < end_ns:
            torch.mm(self._a, self._b, out=self._out)

    @torch.no_grad()
    def _on_gpu(self, ms: float) -> None:
        for _ in range(round(ms / self._kernel_ms)):
            torch.mm(self._a, self._b, out=self._out)

    @torch.no_grad()
    def _time_kernel(self) -> float:
        """Before training: here the device may be waited for."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(_TRIAL):
            torch.mm(self._a, self._b, out=self._out)
        begin.record()
        for _ in range(_TRIAL):
            torch.mm(self._a, self._b, out=self._out)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / _TRIAL
