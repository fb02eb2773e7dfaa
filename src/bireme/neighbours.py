"""Which ranks of this machine have ended without a word, and whether the kernel killed them for lack of memory."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PROC = Path("/proc")
_WITHIN_S = 1.0  # the connections of a process that was killed close a little before it is gone


class Neighbours:
    """The processes of the other ranks on a rank's node, as they were at the start; those not visible from here (in a
    container of their own) are left out."""

    def __init__(self, ranks: list[dict[str, Any]], rank: int):
        self._node = next((each["node"] for each in ranks if each["rank"] == rank), "")
        others = [each for each in ranks if each["node"] == self._node and each["rank"] != rank and "pid" in each]
        self._started = {
            (each["rank"], each["pid"]): started for each in others if (started := _start_time(each["pid"])) is not None
        }
        self._out_of_memory = out_of_memory_kills()

    def gone(self) -> str | None:
        """``rank 1 on node0 (pid 4242) is gone``, with the likely cause; None when all of them are there."""
        deadline = time.monotonic() + _WITHIN_S
        while True:
            lost = [key for key, started in self._started.items() if _start_time(key[1]) != started]
            if lost or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        if not lost:
            return None
        named = ", ".join(f"rank {rank} on {self._node} (pid {pid})" for rank, pid in lost)
        text = f"{named} {'is' if len(lost) == 1 else 'are'} gone"
        killed = out_of_memory_kills() - self._out_of_memory
        if killed > 0:
            text += (
                f", probably killed for lack of memory: the kernel has killed {killed} process"
                f"{'es' if killed > 1 else ''} for that since the start; take a smaller model or micro-batch, shard "
                "the model, or start fewer ranks"
            )
        return text


def _start_time(pid: int) -> str | None:
    """When a process was started, in the kernel's ticks; None when it is gone, or dead and not yet buried."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if fields[0] in ("Z", "X") else fields[19]


def out_of_memory_kills() -> int:
    """Processes that were killed for lack of memory, on this machine or within this cgroup's limit."""
    return max(_counter(_PROC / "vmstat", "oom_kill"), *(_counter(path, "oom_kill") for path in _cgroup_events()))


def _cgroup_events() -> list[Path]:
    root = Path("/sys/fs/cgroup")
    try:
        lines = (_PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return [root / "memory.events"]
    paths = [line.split(":", 2)[2].lstrip("/") for line in lines if line.startswith("0::")]
    return [root / path / "memory.events" for path in (*paths, "")]


def _counter(path: Path, name: str) -> int:
    try:
        counters: Mapping[str, str] = dict(
            line.split(" ", 1) for line in path.read_text().splitlines() if line.count(" ") == 1
        )
        return int(counters.get(name, "0"))
    except (OSError, ValueError):
        return 0
