"""Ends monitors before the process groups that they talk over are destroyed."""

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from bireme.channel import SIDE_GROUP

End = Callable[[BaseException | None], None]

_ends: list[End] = []
_original: Any = None


def before_destroy(end: End) -> None:
    """`end(error)` is called before `torch.distributed.destroy_process_group()` destroys all groups: a loop that never
    closes its monitor keeps its last steps. `error`: what is being handled, as in a `finally` block, or None."""
    global _original
    _ends.append(end)
    if _original is None and dist.is_available() and "shutdown" in vars(dist.ProcessGroup):
        # Whoever destroys all groups shuts Bireme's down among them, however he has imported the function for it.
        _original = vars(dist.ProcessGroup)["shutdown"]  # with what binds it to a group
        dist.ProcessGroup.shutdown = _shutdown  # type: ignore[method-assign, assignment]


def forget(end: End) -> None:
    """It has ended already."""
    global _original
    if end in _ends:
        _ends.remove(end)
    if not _ends and _original is not None and dist.ProcessGroup.shutdown is _shutdown:
        dist.ProcessGroup.shutdown = _original  # type: ignore[method-assign]
        _original = None


def _shutdown(group: Any, *args: Any, **kwargs: Any) -> Any:
    original = _original.__get__(group)
    if getattr(group, "group_desc", None) == SIDE_GROUP:
        error = sys.exc_info()[1]
        while _ends:
            with suppress(Exception):  # the group is to be shut down, whatever happens here
                _ends.pop()(error)
    return original(*args, **kwargs)
