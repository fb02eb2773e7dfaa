from pathlib import Path

import pytest

from bireme.doctor.quota import quota_cores


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/job\n", {"job/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b/c\n", {"a/cpu.max": "200000 100000", "a/b/c/cpu.max": "max 100000"}, 2.0),  # an ancestor's
        ("0::/a/b\n", {"a/cpu.max": "100000 100000", "a/b/cpu.max": "400000 100000"}, 1.0),  # the tightest
        ("0::/host/path\n", {"cpu.max": "50000 100000"}, 0.5),  # in a container the path is the host's
        (
            "4:cpu,cpuacct:/job\n",
            {"cpu,cpuacct/job/cpu.cfs_quota_us": "300000", "cpu,cpuacct/job/cpu.cfs_period_us": "100000"},
            3.0,
        ),
        ("1:cpu:/\n0::/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("1:cpu:/x\n", {"cpu/cpu.cfs_quota_us": "25000", "cpu/cpu.cfs_period_us": "100000"}, 0.25),
        ("3:cpuset:/x\n", {"cpuset/x/cpu.max": "100 100000"}, None),
        ("0::/\n", {"cpu.max": "nonsense"}, None),
        ("0::/\n", {"cpu.max": "100000 0"}, None),
        ("garbage\n\n", {}, None),
    ],
)
def test_quota(membership: str, files: dict[str, str], cores: float | None, tmp_path: Path) -> None:
    root = tree(tmp_path / "cgroup", files)
    root.mkdir(exist_ok=True)
    path = tmp_path / "membership"
    path.write_text(membership)
    assert quota_cores(root, path) == cores


def test_no_control_groups(tmp_path: Path) -> None:
    assert quota_cores(tmp_path, tmp_path / "missing") is None


def test_here() -> None:
    found = quota_cores()
    assert found is None or found > 0
