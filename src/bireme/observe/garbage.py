"""Garbage-collection pauses of this process, seen through `gc.callbacks`."""

import gc
import os
import time
from collections.abc import Callable


class GarbageObserver:
    """Calls `pause(start_ns, end_ns, generation)` after every collection, until closed.

    A collection holds the interpreter's lock: whichever thread it runs in, every Python thread stands still.
    """

    def __init__(self, pause: Callable[[int, int, int], None]):
        self._pause = pause
        self._start_ns = 0
        self._process = os.getpid()
        gc.callbacks.append(self._callback)

    def _callback(self, event: str, details: dict[str, int]) -> None:
        # Never raises: an exception here would be printed into the user's output at some random place.
        if event == "start":
            self._start_ns = time.perf_counter_ns()
        elif self._start_ns and os.getpid() == self._process:  # a forked worker has the callback, too
            self._pause(self._start_ns, time.perf_counter_ns(), details.get("generation", -1))

    def close(self) -> None:
        if self._callback in gc.callbacks:
            gc.callbacks.remove(self._callback)
