"""The CPU time that control groups allow: container engines, Slurm and systemd limit it without hiding cores."""

from pathlib import Path


def quota_cores(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """How many cores' worth of time this process may use; None: no limit. The tightest of its group and all above."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    limits = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounts = [controllers, "cpu", "cpu,cpuacct"] if controllers else ["", "unified"]
        for mount in dict.fromkeys(mounts):
            # In a container the path may name the host's tree: what exists of it counts, and the mount's root always.
            group = root / mount / path.lstrip("/")
            for folder in (group, *group.parents):
                limits += [each for each in (_limit_v2(folder), _limit_v1(folder)) if each is not None]
                if folder == root / mount:
                    break
    return min(limits) if limits else None


def _limit_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _limit_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
        return quota / period if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
