from collections.abc import Callable

import pytest

from bireme.doctor.checks import examine, passed
from bireme.doctor.cluster import Cluster


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_healthy_cluster_passes_every_check(size: int, make_cluster: Callable[..., Cluster]) -> None:
    checks = examine(make_cluster(size))
    assert {check.status for check in checks} == {"pass"}
    assert passed(checks)
    names = [check.name for check in checks]
    assert len(set(names)) == len(names), "one line a check"
    expected = {
        "own name",
        "interface",
        "ports",
        "versions",
        "cores",
        "shared memory",
        "hooks",
        "schedstat",
        "launcher",
    }
    assert expected <= set(names)
    if size > 1:
        assert {"peers", "connections", "announced name", "clock", "packet size"} <= set(names)


def test_every_node_makes_the_same_report(make_cluster: Callable[..., Cluster]) -> None:
    changes = {"n1_threads": 8, "n2_versions": {"python": "3.12.1", "torch": "2.13.0", "bireme": "0.1.0"}}
    reports = [examine(make_cluster(3, own=own, **changes)) for own in range(3)]
    assert reports[0] == reports[1] == reports[2]


def test_a_fault_has_a_fix_and_names_its_node(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(
        2,
        n1_threads=8,
        n1_workers=600,
        n1_open_files=100,
        n1_contradictions=["RANK=3 does not fit WORLD_SIZE=2"],
        n1_variables={"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "[::1]"},
    )
    faults = [check for check in examine(cluster) if check.status != "pass"]
    assert {each.name for each in faults} == {"interface", "IPv6", "cores", "shared memory", "launcher", "open files"}
    for each in faults:
        assert each.nodes == ("node1",)
        assert each.fix.startswith("on node1: ")
        assert "node1" in each.message
