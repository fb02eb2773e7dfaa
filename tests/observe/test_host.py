import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bireme.observe import host
from bireme.observe.host import HostClock

Tree = Callable[[dict[str, str]], None]

TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    """tree({"/proc/stat": text}): files that HostClock finds in place of the machine's own."""
    monkeypatch.setattr(host, "Path", lambda path: Path(f"{tmp_path}{path}"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2}, raising=False)

    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            path = Path(f"{tmp_path}{name}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return write


def v2(throttled_us: int) -> str:
    return f"usage_usec 100\nuser_usec 60\nnr_periods 5\nnr_throttled 2\nthrottled_usec {throttled_us}\n"


def stat(*steal: int) -> str:
    lines = [f"cpu{core} 10 20 30 40 50 60 70 {ticks} 0 0" for core, ticks in enumerate(steal)]
    return "\n".join([f"cpu  1 2 3 4 5 6 7 {sum(steal)} 0 0", *lines, "intr 1 2 3", ""])


def test_version_2(tree: Tree) -> None:
    tree({"/proc/self/cgroup": "0::/user/job\n", "/sys/fs/cgroup/user/job/cpu.stat": v2(1000)})
    clock = HostClock()
    assert clock.taken_ns() == (0, 0)
    tree({"/sys/fs/cgroup/user/job/cpu.stat": v2(1250)})
    assert clock.taken_ns() == (250_000, 0)
    assert clock.taken_ns() == (0, 0)


def test_version_2_in_a_container_whose_own_root_is_mounted(tree: Tree) -> None:
    tree({"/proc/self/cgroup": "0::/docker/4c3\n", "/sys/fs/cgroup/cpu.stat": v2(5)})
    clock = HostClock()
    tree({"/sys/fs/cgroup/cpu.stat": v2(8)})
    assert clock.taken_ns()[0] == 3000


@pytest.mark.parametrize("mounted", ["/sys/fs/cgroup/cpu,cpuacct/job", "/sys/fs/cgroup/cpu/job", "/sys/fs/cgroup/cpu"])
def test_version_1_counts_nanoseconds(mounted: str, tree: Tree) -> None:
    lines = "7:memory:/job\n3:cpu,cpuacct:/job\n2:cpuset:/job\n"
    tree({"/proc/self/cgroup": lines, f"{mounted}/cpu.stat": "nr_periods 1\nthrottled_time 700\n"})
    clock = HostClock()
    tree({f"{mounted}/cpu.stat": "nr_periods 2\nthrottled_time 1900\n"})
    assert clock.taken_ns() == (1200, 0)


def test_both_versions_mounted(tree: Tree) -> None:
    tree(
        {
            "/proc/self/cgroup": "4:cpu,cpuacct:/job\n0::/job\n",
            "/sys/fs/cgroup/cpu,cpuacct/job/cpu.stat": "throttled_time 7\n",
            "/sys/fs/cgroup/unified/job/cgroup.procs": "",
        }
    )
    clock = HostClock()
    tree({"/sys/fs/cgroup/cpu,cpuacct/job/cpu.stat": "throttled_time 9\n"})
    assert clock.taken_ns()[0] == 2


def test_steal_is_of_the_usable_cores_alone(tree: Tree) -> None:
    tree({"/proc/stat": stat(5, 50, 7)})
    clock = HostClock()
    tree({"/proc/stat": stat(6, 90, 10)})
    assert clock.taken_ns() == (0, 4 * TICK_NS)


def test_a_machine_that_tells_nothing_takes_nothing(tree: Tree) -> None:
    assert HostClock().taken_ns() == (0, 0)


def test_unexpected_text_takes_nothing(tree: Tree) -> None:
    tree(
        {
            "/proc/self/cgroup": "0::/\n",
            "/sys/fs/cgroup/cpu.stat": "throttled_usec many\n",
            "/proc/stat": "cpu0 1 2 3\ncpu2 1 2 3 4 5 6 7 x\n",
        }
    )
    clock = HostClock()
    assert clock.taken_ns() == (0, 0)
    tree({"/sys/fs/cgroup/cpu.stat": v2(10)})  # it is not asked again
    assert clock.taken_ns() == (0, 0)


def test_a_group_that_vanishes(tree: Tree, tmp_path: Path) -> None:
    tree({"/proc/self/cgroup": "0::/job\n", "/sys/fs/cgroup/job/cpu.stat": v2(1000)})
    clock = HostClock()
    Path(f"{tmp_path}/sys/fs/cgroup/job/cpu.stat").unlink()
    throttled_ns, _ = clock.taken_ns()
    assert throttled_ns >= 0
    assert clock.taken_ns() == (0, 0)


def test_this_machine() -> None:
    throttled_ns, steal_ns = HostClock().taken_ns()
    assert throttled_ns >= 0 and steal_ns >= 0
