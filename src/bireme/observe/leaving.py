"""Closes monitors before the process groups that they talk over are destroyed."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_NAME = "destroy_process_group"
_closers: list[Callable[[], None]] = []
_original: Any = None
_ours: Any = None


def before_destroy(close: Callable[[], None]) -> None:
    """`close()` is called before `torch.distributed.destroy_process_group()` destroys all groups: a loop that never
    closes its monitor keeps its last steps."""
    global _original, _ours
    _closers.append(close)
    if _ours is None and dist.is_available():
        _original = dist.destroy_process_group
        _ours = functools.wraps(_original)(_destroy)
        _replace(_original, _ours)


def forget(close: Callable[[], None]) -> None:
    """It is closed already."""
    global _ours
    if close in _closers:
        _closers.remove(close)
    if not _closers and _ours is not None:
        _replace(_ours, _original)
        _ours = None


def _replace(old: Any, new: Any) -> None:
    """Also where somebody has imported the name from there."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict) and names.get(_NAME) is old:
            names[_NAME] = new


def _destroy(group: Any = None) -> None:
    original = _original
    if group is None or group is dist.group.WORLD:
        for close in _closers:
            close()
    original(group)
