"""Collects Python's garbage on all ranks at the same step, so that no rank waits for another's collection."""

import contextlib
import gc
import logging
import os
from pathlib import Path
from types import TracebackType
from typing import Self

log = logging.getLogger(__name__)

GROWTH = 1.5
"""By which factor resident memory may grow after the freeze before a warning says so, once."""

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class SameStepCollection:
    """`with` block around the loop, in which Python collects by itself no more; `after(step)` is called at the end of
    each step.

    After step `freeze_after` everything that is there (modules, the model, the data) is frozen: no later collection
    looks at it. From then on there is one after every so many steps, on every rank after the same ones. With `every` 0
    nothing is changed.
    """

    def __init__(self, every: int, freeze_after: int):
        self.every = every
        self._freeze_after = freeze_after
        self._frozen = False
        self._was_enabled = False
        self._resident_bytes = 0
        self._warned = False

    def __enter__(self) -> Self:
        self._was_enabled = gc.isenabled()
        if self.every:
            gc.disable()
        return self

    def after(self, step: int) -> None:
        if not self.every or step < self._freeze_after:
            return
        if not self._frozen:
            self._frozen = True
            gc.collect()
            gc.freeze()
            self._resident_bytes = resident_bytes()
        elif step % self.every == 0:
            self._watch(resident_bytes())  # before: what the steps since the last collection have left is seen, too
            gc.collect()

    def _watch(self, now_bytes: int) -> None:
        before = self._resident_bytes
        if self._warned or not before or now_bytes <= GROWTH * before:
            return
        self._warned = True
        log.warning(
            "resident memory grew from %.2f to %.2f GB since garbage is collected every %d steps only: if it goes on, "
            "take a smaller --gc-every, or 0",
            *(before / 1e9, now_bytes / 1e9, self.every),
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._frozen:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()


def resident_bytes() -> int:
    """What this process has in memory; 0 where the system does not say so cheaply."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    return 0
