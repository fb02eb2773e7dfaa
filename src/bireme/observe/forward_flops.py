"""Counts, once, the FLOPs of the forward passes of one step."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

log = logging.getLogger(__name__)


class ForwardFlops:
    """Follows the models' forward passes with gradients until `take`, by the formulas of PyTorch's FlopCounterMode.
    What they do not know counts nothing; a model without anything that they know comes out as None, with a warning."""

    def __init__(self, models: Sequence[torch.nn.Module]):
        self._counted = 0
        self._failed = False
        if any(hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) for model in models):
            # Under a counter compiled code runs as if it were not, or fails.
            log.warning("FLOPs of a compiled model are not counted: give flops_per_token as a number")
            models = []
            self._failed = True
        self._open: list[_Counter | None] = []
        self._handles = [
            handle
            for model in models
            for handle in (
                model.register_forward_pre_hook(self._begin, prepend=True),
                model.register_forward_hook(self._end, always_call=True),
            )
        ]

    def begin(self) -> None:
        """The first step begins: what was counted before is not of it."""
        self._counted = 0

    def take(self) -> int | None:
        """The FLOPs since the start; nothing is counted any more."""
        for handle in self._handles:
            handle.remove()
        if not self._counted and not self._failed:
            log.warning("the FLOPs of the first step could not be counted: MFU is n/a")
        return self._counted or None

    def _begin(self, _module: Any, _inputs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        mode = None
        if torch.is_grad_enabled() and not any(self._open):
            try:
                mode = _Counter()
                mode.__enter__()
            except Exception:
                log.debug("no FLOPs are counted", exc_info=True)
                mode = None
        self._open.append(mode)

    def _end(self, _module: Any, _inputs: Any, _output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        mode = self._open.pop() if self._open else None
        if mode is not None:
            mode.__exit__(None, None, None)
            self._counted += mode.flops


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


_FORMULAS: Mapping[Any, Any] = {
    **flop_registry,
    # The CPU's fused attention, which PyTorch's table leaves out: nearly all FLOPs of a long context.
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
}


class _Counter(TorchDispatchMode):
    """FlopCounterMode raises into the model where a formula fails; this one counts nothing then."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(each.__name__ == "DTensor" for each in types):  # its module may not be loaded
            return NotImplemented  # its own part of the work comes here later
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = _FORMULAS.get(func._overloadpacket)
        if formula is not None:
            try:
                self.flops += int(formula(*args, **kwargs, out_val=out))
            except Exception:
                log.debug("no FLOPs of %s", func, exc_info=True)
        return out
