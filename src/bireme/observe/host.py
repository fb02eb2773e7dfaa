"""What only the machine knows: why a thread was ready without a core although cores were idle (a cgroup CPU quota, the
hypervisor's steal), the bytes that its network interface carried, and the memory that this process had."""

import os
import resource
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

# Of this process's own network; what /sys shows may be that of the machine around the container or emulated node.
_INTERFACES = "/proc/self/net/dev"
_LOOPBACK = "lo"


def _cgroup_cpu_stat() -> Path | None:
    """The `cpu.stat` of this process's cgroup (version 2, or version 1's cpu controller); None where there is none."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        roots = {"": ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]}.get(controllers)
        if roots is None and "cpu" in controllers.split(","):
            roots = [f"/sys/fs/cgroup/{controllers}", "/sys/fs/cgroup/cpu"]
        for root in roots or []:
            # Inside a container the path in /proc names the host's tree; the container's own root is mounted instead.
            for candidate in (Path(root + path) / "cpu.stat", Path(root) / "cpu.stat"):
                if candidate.is_file():
                    return candidate
    return None


def _throttled_ns(path: Path) -> int:
    for line in path.read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == "throttled_usec":
            return int(value) * 1000
        if name == "throttled_time":  # version 1: nanoseconds
            return int(value)
    return 0


class HostClock:
    """Time taken from this process's machine since the last reading, in nanoseconds."""

    def __init__(self) -> None:
        self._cpu_stat = _cgroup_cpu_stat()
        self._cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self._last = self._totals()

    def _totals(self) -> tuple[int, int]:
        throttled_ns = steal_ticks = 0
        try:
            if self._cpu_stat is not None:
                throttled_ns = _throttled_ns(self._cpu_stat)
        except (OSError, ValueError):
            self._cpu_stat = None
        try:
            wanted = {f"cpu{core}" for core in self._cores}
            for line in Path("/proc/stat").read_text().splitlines():
                fields = line.split()
                if fields and fields[0] in wanted and len(fields) > 8:
                    steal_ticks += int(fields[8])
        except (OSError, ValueError):
            pass  # not Linux: nothing to report, and nothing is claimed
        return throttled_ns, steal_ticks * (1_000_000_000 // os.sysconf("SC_CLK_TCK"))

    def taken_ns(self) -> tuple[int, int]:
        """(held back by a CPU quota, stolen by the hypervisor from all usable cores) since the last call."""
        now = self._totals()
        taken = max(0, now[0] - self._last[0]), max(0, now[1] - self._last[1])
        self._last = now
        return taken


# --- network -----------------------------------------------------------------------------------------------------


def _carried_bytes(interface: str) -> tuple[int, int] | None:
    """Bytes sent and received since the interface was made; None for one that is not there, or not on Linux."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path(_INTERFACES).read_text().splitlines():
            name, _, counters = line.partition(":")
            if name.strip() == interface:
                fields = counters.split()
                return int(fields[8]), int(fields[0])
    return None


class TrafficCounter:
    """Bytes that a network interface carried between one step and another: of all processes, headers included, each
    way as the kernel counts them."""

    def __init__(self, node: str, interface: str):
        self._node, self._interface = node, interface
        self._marked: tuple[int, int, int] | None = None  # step, bytes sent and received
        self._taken: tuple[int, int, int] | None = None

    def mark(self, step: int) -> None:
        """This step has just ended here; 0: the first one begins."""
        carried = _carried_bytes(self._interface)
        self._marked = None if carried is None else (step, *carried)  # gone: it may come back

    def take(self) -> dict[str, Any] | None:
        """A `traffic` event of the steps up to the last mark since the one before that was taken; None where nothing
        is known of them."""
        before, now = self._taken, self._marked
        if now is None or (before is not None and now[0] <= before[0]):
            return None
        self._taken = now
        if before is None or now[1] < before[1] or now[2] < before[2]:  # another interface of the same name
            return None
        return {
            "event": "traffic",
            "node": self._node,
            "interface": self._interface,
            "first_step": before[0] + 1,
            "last_step": now[0],
            "sent_bytes": now[1] - before[1],
            "received_bytes": now[2] - before[2],
        }


def traffic_counter(ranks: Sequence[dict[str, Any]], rank: int) -> TrafficCounter | None:
    """The counter of this rank's node, if that is the rank to read it: the node's first, and only where there is
    another node and a real interface between. `ranks`: as in run.json, `rank` of them."""
    here = ranks[rank]
    on_node = [index for index, other in enumerate(ranks) if other["node"] == here["node"]]
    interface = here.get("interface")
    if not interface or interface == _LOOPBACK or rank != on_node[0] or len(on_node) == len(ranks):
        return None
    return TrafficCounter(here["node"], interface)


# --- memory ------------------------------------------------------------------------------------------------------


def peak_rss_bytes() -> int:
    """The most memory that this process had resident at once."""
    # Not getrusage where there is another way: its number outlives exec, so it may be that of whoever started us.
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
