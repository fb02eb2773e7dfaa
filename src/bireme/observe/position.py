"""Where a rank is, in a block of memory that another process reads: step, phase, what it waits in, last collectives."""

import mmap
import os
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

MOST_GROUPS = 32
RECENT = 16  # collectives remembered of each group

_MAGIC = 0x62697265_0001
_HEADER = struct.Struct("<6q")  # magic, process, thread, thread's name for faulthandler, first step, groups
_STEP = struct.Struct("<q")
_PHASE = struct.Struct("<2q")  # index, when it was entered (monotonic)
_NUMBER = struct.Struct("<q")
_WAIT = struct.Struct("<3q")  # operation, group, the other side; operation -1: in no wait
_SLOT = struct.Struct("<4q")  # sequence + 1, operation, bytes, sequence + 1 once finished
_SLOT_ISSUED = struct.Struct("<3q")

_AT_STEP = 64
_AT_PHASE = 72
_AT_ALIVE = 88
_AT_WAIT = 96
_AT_GROUPS = 128
_GROUP_BYTES = RECENT * _SLOT.size
BLOCK_BYTES = _AT_GROUPS + MOST_GROUPS * _GROUP_BYTES

NOT_BEGUN = -1


def anonymous_file(name: str) -> int:
    """The descriptor of a file without a place, which ends with the last process that holds it."""
    if hasattr(os, "memfd_create"):
        with suppress(OSError):
            return os.memfd_create(name, os.MFD_CLOEXEC)
    import tempfile  # slow to import, and hardly ever needed

    descriptor, path = tempfile.mkstemp(prefix=f"{name}-")
    os.unlink(path)  # noqa: PTH108
    return descriptor


class Position:
    """Written by the thread that trains, about half a microsecond a call; nothing is locked or synchronised.

    A reader may see a write half done: a moment later it reads the rest, and a collective that is half written looks
    like one that was not issued yet. Groups beyond the first 32 are left out.
    """

    def __init__(self, first_step: int, groups: int = 0):
        self.descriptor = anonymous_file("bireme-position")
        os.ftruncate(self.descriptor, BLOCK_BYTES)
        self._block = mmap.mmap(self.descriptor, BLOCK_BYTES)
        ident = threading.get_ident() - (1 << 64 if threading.get_ident() >= 1 << 63 else 0)
        where = threading.get_native_id(), ident
        _HEADER.pack_into(self._block, 0, _MAGIC, os.getpid(), *where, first_step, min(groups, MOST_GROUPS))
        _STEP.pack_into(self._block, _AT_STEP, first_step)
        _PHASE.pack_into(self._block, _AT_PHASE, NOT_BEGUN, time.monotonic_ns())
        self.no_wait()
        self._alive = 0

    def begin_step(self, step: int) -> None:
        _STEP.pack_into(self._block, _AT_STEP, step)

    def enter(self, phase: int) -> None:
        _PHASE.pack_into(self._block, _AT_PHASE, phase, time.monotonic_ns())

    def alive(self) -> None:
        """Says that a long stretch of one phase goes on."""
        self._alive += 1
        _NUMBER.pack_into(self._block, _AT_ALIVE, self._alive)

    def issued(self, group: int, sequence: int, operation: int, num_bytes: int) -> None:
        if group < MOST_GROUPS:
            at = _AT_GROUPS + group * _GROUP_BYTES + sequence % RECENT * _SLOT.size
            _SLOT_ISSUED.pack_into(self._block, at, sequence + 1, operation, num_bytes)

    def finished(self, group: int, sequence: int) -> None:
        if group < MOST_GROUPS:
            at = _AT_GROUPS + group * _GROUP_BYTES + sequence % RECENT * _SLOT.size + _SLOT_ISSUED.size
            _NUMBER.pack_into(self._block, at, sequence + 1)

    def waits(self, operation: int, group: int, side: int) -> None:
        """The thread blocks in Python for an operation; `side`: the member that a send or receive is with."""
        _WAIT.pack_into(self._block, _AT_WAIT, operation, group, side)

    def no_wait(self) -> None:
        _WAIT.pack_into(self._block, _AT_WAIT, -1, -1, -1)

    def close(self) -> None:
        """Nobody may write any more."""
        self._block.close()
        os.close(self.descriptor)


class PositionReader:
    """The other process's side of a Position."""

    def __init__(self, descriptor: int, phases: Sequence[str], operations: Sequence[str]):
        self._block = mmap.mmap(descriptor, BLOCK_BYTES, access=mmap.ACCESS_READ)
        self._phases = phases
        self._operations = operations
        magic, self.process, self.thread, ident, self.first_step, self._groups = _HEADER.unpack_from(self._block, 0)
        if magic != _MAGIC:
            raise ValueError("not a position block")
        self.thread_name = f"0x{ident & (1 << 64) - 1:016x}"  # as faulthandler writes it
        self._before = b""

    def moved(self) -> bool:
        """Whether anything was written since the last call."""
        now = self._block[:]
        moved, self._before = now != self._before, now
        return moved

    def read(self) -> dict[str, Any]:
        """``step``, ``phase`` (None before the first step), ``in_phase_s``, ``wait`` and ``groups``."""
        (step,) = _STEP.unpack_from(self._block, _AT_STEP)
        phase, entered_ns = _PHASE.unpack_from(self._block, _AT_PHASE)
        operation, group, side = _WAIT.unpack_from(self._block, _AT_WAIT)
        wait = [self._named(operation), group, side] if operation >= 0 else None
        return {
            "step": step,
            "phase": self._phases[phase] if 0 <= phase < len(self._phases) else None,
            "in_phase_s": max(0.0, (time.monotonic_ns() - entered_ns) / 1e9),
            "wait": wait,
            "groups": {str(group): recent for group in range(self._groups) if (recent := self._recent(group))},
        }

    def _recent(self, group: int) -> list[list[Any]]:
        """``[sequence, operation, bytes, finished]`` of the last collectives, in order."""
        slots = (
            _SLOT.unpack_from(self._block, _AT_GROUPS + group * _GROUP_BYTES + slot * _SLOT.size)
            for slot in range(RECENT)
        )
        return sorted(
            [number - 1, self._named(operation), num_bytes, finished == number]
            for number, operation, num_bytes, finished in slots
            if number > 0
        )

    def _named(self, operation: int) -> str:
        return self._operations[operation] if 0 <= operation < len(self._operations) else "?"

    def close(self) -> None:
        self._block.close()
