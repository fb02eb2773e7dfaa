"""Why a thread was ready without a core although cores were idle: a cgroup CPU quota, or the hypervisor's steal."""

import os
from pathlib import Path


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
