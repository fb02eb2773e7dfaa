from collections.abc import Callable
from typing import Any

import pytest

from bireme.doctor import checks_machine
from bireme.doctor.cluster import Check, Cluster
from bireme.doctor.facts import Clock

Make = Callable[..., Cluster]


def only(examination: Any, cluster: Cluster) -> Check:
    checks = list(examination(cluster))
    assert len(checks) == 1, checks
    result: Check = checks[0]
    return result


@pytest.mark.parametrize(
    ("package", "version", "status"),
    [
        ("torch", "2.14.1", "pass"),
        ("torch", "2.14.1+cpu", "warn"),
        ("torch", "2.13.0", "fail"),
        ("torch", "none", "fail"),
        ("python", "3.11.9", "warn"),
        ("python", "3.12.7", "fail"),
        ("bireme", "0.0.9", "fail"),
    ],
)
def test_versions(package: str, version: str, status: str, make_cluster: Make) -> None:
    cluster = make_cluster(2)
    cluster.facts[1].versions[package] = version
    check = next(iter(checks_machine.versions(cluster)))
    assert check.status == status
    if status != "pass":
        assert f"{package} {version}" in check.message and check.nodes == ("node1",)
    if package == "torch" and status != "pass":
        assert check.fix == "on node1: python -m pip install torch==2.14.1"


@pytest.mark.parametrize(
    ("clock", "status"),
    [
        (Clock(0.4, 0.001), "pass"),
        (Clock(3.0, 0.001), "warn"),
        (Clock(-3.0, 0.001), "warn"),
        (Clock(1.5, 0.6), "pass"),  # it may be less than a second: not sure is not said
        (None, "warn"),
    ],
)
def test_clock(clock: Clock | None, status: str, make_cluster: Make) -> None:
    check = only(checks_machine.clock, make_cluster(2, n1_clock=clock))
    assert check.status == status
    if clock is not None and status == "warn":
        assert f"3.000 s {'ahead of' if clock.offset_s > 0 else 'behind'} node0's (± 1.00 ms)" in check.message
    assert list(checks_machine.clock(make_cluster(1))) == []


@pytest.mark.parametrize(
    ("changes", "status", "fix"),
    [
        ({}, "pass", ""),
        ({"n1_threads": 3}, "warn", "export OMP_NUM_THREADS=2"),
        ({"n1_threads": 8}, "fail", "export OMP_NUM_THREADS=2"),
        ({"n1_threads": 8, "n1_ranks": 1, "n1_cores": 1.0, "n1_affinity_cores": 1}, "fail", "OMP_NUM_THREADS=1"),
        ({"n1_cores": 1.5, "n1_quota_cores": 1.5}, "warn", "--nproc-per-node=1"),
        ({"n1_cores": 0.5, "n1_quota_cores": 0.5}, "fail", "--nproc-per-node=1"),
    ],
)
def test_cores(changes: dict[str, Any], status: str, fix: str, make_cluster: Make) -> None:
    check = only(checks_machine.cores, make_cluster(2, **changes))
    assert check.status == status
    assert fix in check.fix
    if "n1_quota_cores" in changes:
        assert "a CPU quota; 4 cores visible" in check.message


@pytest.mark.parametrize(
    ("workers", "total", "free", "status"),
    [
        (0, 64 << 20, 64 << 20, "pass"),
        (1, 64 << 20, 64 << 20, "warn"),  # 2 x 1 x 2 x 8 MiB = 32 MiB: it fits, barely
        (4, 64 << 20, 64 << 20, "fail"),
        (4, 8 << 30, 8 << 30, "pass"),
        (4, 8 << 30, 100 << 20, "fail"),  # full of something else
        (4, None, None, "pass"),
    ],
)
def test_shared_memory(workers: int, total: int | None, free: int | None, status: str, make_cluster: Make) -> None:
    cluster = make_cluster(2, n1_workers=workers, n1_shm_bytes=total, n1_shm_free_bytes=free)
    check = only(checks_machine.shared_memory, cluster)
    assert check.status == status
    if status != "pass":
        assert "if a batch is 8 MiB" in check.message and "--shm-size=1g" in check.fix


def test_what_can_be_observed(make_cluster: Make) -> None:
    cluster = make_cluster(2, n1_schedstat=False, n1_namespaces_error="Operation not permitted")
    cluster.facts[1].versions["torch"] = "2.13.0"
    checks = {check.name: check for check in checks_machine.observation(cluster)}
    assert {name: check.status for name, check in checks.items()} == dict.fromkeys(
        ("hooks", "schedstat", "namespaces"), "warn"
    )
    assert "Operation not permitted" in checks["namespaces"].message
    assert all(check.nodes == ("node1",) for check in checks.values())


def test_launcher(make_cluster: Make) -> None:
    assert only(checks_machine.launcher, make_cluster(2, n1_contradictions=["RANK=1 but ..."])).status == "fail"
    assert only(checks_machine.launcher, make_cluster(1, n0_hints=["8 tasks, alone"])).status == "warn"
    check = only(checks_machine.launcher, make_cluster(2, n0_nodes=3))
    assert check.status == "fail" and "node0 3 nodes, node1 2 nodes" in check.message
    assert only(checks_machine.launcher, make_cluster(2, n0_world_size=4, n1_world_size=2)).status == "fail"


def test_open_files(make_cluster: Make) -> None:
    assert only(checks_machine.open_files, make_cluster(2, n1_open_files=None)).status == "pass"
    assert only(checks_machine.open_files, make_cluster(2, n1_open_files=256)).status == "warn"
    assert only(checks_machine.open_files, make_cluster(2, n1_open_files=1024, n1_world_size=2048)).status == "warn"


def test_emulated_and_pretended(make_cluster: Make) -> None:
    assert list(checks_machine.emulation(make_cluster(2))) == []
    assert only(checks_machine.emulation, make_cluster(2, n0_link="1gbit", n1_link="1gbit")).status == "pass"
    assert only(checks_machine.emulation, make_cluster(2, n1_link="unshaped")).status == "warn"
    check = only(checks_machine.emulation, make_cluster(2, n1_pretended=["clock=+3s", "torch=2.13.0"]))
    assert check.status == "warn" and "clock=+3s,torch=2.13.0 on node1" in check.message
