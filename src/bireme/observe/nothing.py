"""`observe_nothing`: a region of the loop that monitors leave alone."""

import os
import threading
from contextlib import ContextDecorator
from types import TracebackType
from typing import Protocol, Self


class Excludes(Protocol):
    """A monitor: told when the thread that it follows enters such a region, and when it leaves it."""

    def exclude(self) -> None: ...
    def include(self) -> None: ...
    def replaced(self) -> None: ...


_monitors: dict[int, list[Excludes]] = {}  # by thread
os.register_at_fork(after_in_child=_monitors.clear)


def follow(monitor: Excludes) -> None:
    """The monitor is told of regions of the calling thread from now on."""
    _monitors.setdefault(threading.get_ident(), []).append(monitor)


def end_others() -> None:
    """Another monitor is about to follow the calling thread: one that was never closed has nothing left to see."""
    for monitor in list(_monitors.get(threading.get_ident(), ())):
        monitor.replaced()


def unfollow(monitor: Excludes) -> None:
    for thread, monitors in list(_monitors.items()):
        _monitors[thread] = [each for each in monitors if each is not monitor]


class observe_nothing(ContextDecorator):
    """A `with` block whose collectives, phases and steps are not observed; its time is `other`.

    For evaluation, sampling, or another training loop inside this one. Also a decorator of a function. Without a
    Monitor on this thread it does nothing.
    """

    def __init__(self) -> None:
        self._told: list[list[Excludes]] = []  # a decorated function may call itself

    def __enter__(self) -> Self:
        told = list(_monitors.get(threading.get_ident(), ()))
        self._told.append(told)
        for monitor in told:
            monitor.exclude()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for monitor in self._told.pop():
            monitor.include()
