"""Processes beside a rank that make it slow from outside: one that keeps its core busy, one that stops it over and
over. They end with their rank, however it ends: each reads a pipe that the rank holds."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

_TASKS = Path("/proc/self/task")
_END_WITHIN_S = 5.0

# A byte turns it on or off; the end of the pipe is the end of the rank. What a scheduler or Ctrl-C sends to the whole
# group is not for it: it would leave a rank stopped.
_COMMON = """
import os, select, signal, sys, time
for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
    signal.signal(getattr(signal, name), signal.SIG_IGN)

def told(on, within_s):
    if select.select([0], [], [], within_s if on else None)[0]:
        word = os.read(0, 4096)
        if not word:
            return None
        return word[-1:] == b"1"
    return on
"""
BUSY = (
    _COMMON
    + """
if len(sys.argv) > 1 and hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {int(sys.argv[1])})
on = False
while on is not None:
    end = time.perf_counter() + 0.005
    while on and time.perf_counter() < end:
        pass
    on = told(on, 0)
"""
)
PAUSE = (
    _COMMON
    + """
rank, stopped_s, period_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])

def send(number):
    if os.getppid() == rank:  # it is still our rank, and not another process of its number
        os.kill(rank, number)

on = False
while on is not None:
    if on:
        send(signal.SIGSTOP)
        try:
            time.sleep(stopped_s)
        finally:
            send(signal.SIGCONT)
    on = told(on, period_s - stopped_s)
"""
)


class Helper:
    """One such process; off until it is turned on."""

    def __init__(self, program: str, *arguments: str):
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def turn(self, on: bool) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # somebody has killed it
            os.write(self._process.stdin.fileno(), b"1" if on else b"0")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Pin:
    """Keeps all threads of this process on one core, for a time."""

    def __init__(self, core: int):
        self._core = core
        self._before: dict[int, set[int]] = {}
        self._whole: set[int] = set()

    def set(self) -> None:
        if not hasattr(os, "sched_setaffinity") or not _TASKS.is_dir():
            return
        self._whole = os.sched_getaffinity(0)
        for thread in _threads():
            with contextlib.suppress(OSError):  # it has just ended
                self._before[thread] = os.sched_getaffinity(thread)
                os.sched_setaffinity(thread, {self._core})

    def release(self) -> None:
        if not self._whole:
            return
        for thread in _threads():  # those that began meanwhile were born on the one core
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, self._before.get(thread, self._whole))
        self._before, self._whole = {}, set()


def _threads() -> list[int]:
    return [int(each.name) for each in _TASKS.iterdir()]
