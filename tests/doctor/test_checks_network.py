from collections.abc import Callable
from typing import Any

import pytest

from bireme.doctor import checks_network
from bireme.doctor.cluster import Check, Cluster
from bireme.doctor.facts import Card, Clock, Name, Port, Reach

Make = Callable[..., Cluster]


def verdicts(examination: Any, cluster: Cluster) -> list[tuple[str, str]]:
    return [(check.status, check.message) for check in examination(cluster)]


def only(examination: Any, cluster: Cluster) -> Check:
    checks = list(examination(cluster))
    assert len(checks) == 1, checks
    result: Check = checks[0]
    return result


@pytest.mark.parametrize(
    ("host", "alone", "together"),
    [
        (Name("node0", ["10.0.0.1"]), "pass", "pass"),
        (Name("node0", ["10.0.0.1", "127.0.1.1"]), "pass", "pass"),
        (Name("node0", ["127.0.1.1"]), "warn", "fail"),  # Debian
        (Name("node0", ["127.0.1.1", "10.0.0.1"]), "warn", "fail"),  # gloo takes the first
        (Name("node0", ["::1"]), "warn", "fail"),
        (Name("node0", [], "Name or service not known"), "warn", "fail"),
        (Name("node0", ["10.9.9.9"]), "warn", "fail"),  # a name server that remembers an old address
        (Name("node0", ["192.168.7.1"]), "pass", "pass"),
    ],
)
def test_own_name(host: Name, alone: str, together: str, make_cluster: Make) -> None:
    assert only(checks_network.own_name, make_cluster(1, n0_host=host)).status == alone
    check = next(checks_network.own_name(make_cluster(2, n0_host=host)))
    assert check.status == together
    if together == "fail":
        assert "/etc/hosts" in check.fix and check.fix.endswith("10.0.0.1 node0")


def test_own_name_on_one_machine_may_be_loopback(make_cluster: Make) -> None:
    loopback = Name("laptop", ["127.0.1.1"])
    cluster = make_cluster(2, n0_host=loopback, n1_host=loopback, n0_machine="laptop", n1_machine="laptop")
    assert only(checks_network.own_name, cluster).status == "pass"


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0", "TP_SOCKET_IFNAME": "eth0"}, None),
        ({"NCCL_SOCKET_IFNAME": "eth"}, None),  # a prefix
        ({"NCCL_SOCKET_IFNAME": "^lo,eth1"}, None),
        ({"GLOO_SOCKET_IFNAME": "eth0,eth1"}, None),
        ({"GLOO_SOCKET_IFNAME": "eth7"}, "names no network interface"),
        ({"GLOO_SOCKET_IFNAME": "eth"}, "names no network interface"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, "loopback"),
        ({"GLOO_SOCKET_IFNAME": "eth1"}, "the way to the other nodes is eth0"),
        ({"GLOO_SOCKET_IFNAME": "eth2"}, "is down"),
        ({"NCCL_SOCKET_IFNAME": "^eth"}, "loopback"),  # B10: what is left is lo
        ({"NCCL_SOCKET_IFNAME": "=eth"}, "names no network interface"),
        ({"NCCL_SOCKET_IFNAME": "eth1"}, "the way to the other nodes is eth0"),
        ({"TP_SOCKET_IFNAME": "lo"}, "loopback"),
    ],
)
def test_interface_variables(variables: dict[str, str], problem: str | None, make_cluster: Make) -> None:
    check = only(checks_network.interface, make_cluster(2, n1_variables=variables))
    if problem is None:
        assert check.status == "pass" and "node1 10.0.0.2 via eth0" in check.message
        return
    (variable,) = variables
    assert check.status == "fail" and problem in check.message and check.nodes == ("node1",)
    right = "=eth0" if variable.startswith("NCCL") else "eth0"
    assert check.fix == f"on node1: export {variable}={right}"


def test_interface_errors_and_warnings(make_cluster: Make) -> None:
    error = "no network interface has the address 10.0.0.2"
    check = only(checks_network.interface, make_cluster(2, n1_interface=None, n1_interface_error=error))
    assert check.status == "fail" and error in check.message
    check = only(checks_network.interface, make_cluster(2, n0_interface_warnings=["eth0 and eth3 are in one subnet"]))
    assert check.status == "warn" and check.nodes == ("node0",)
    assert only(checks_network.interface, make_cluster(1, n0_interface_error=error)).status == "pass"
    wrong = make_cluster(1, n0_variables={"GLOO_SOCKET_IFNAME": "eth7"})
    assert only(checks_network.interface, wrong).status == "fail", "gloo fails alone, too"


def test_a_blocked_direction_is_named(make_cluster: Make) -> None:
    reaches = [Reach(1, "10.0.0.2", None, "no answer"), Reach(2, "10.0.0.3", "10.0.0.1")]
    check = only(checks_network.connections, make_cluster(3, n0_reaches=reaches))
    assert check.status == "fail"
    assert check.message.startswith("node0 -> node1 (10.0.0.2")
    assert check.message.endswith("node1 -> node0 works")
    assert check.nodes == ("node0", "node1")
    assert check.fix == "on node1: sudo ufw allow from 10.0.0.1"


def test_a_node_that_nobody_reaches_is_one_fault(make_cluster: Make) -> None:
    size = 40
    blocked = Reach(7, "10.0.0.8", None, "no answer")
    changes = {f"n{index}_reaches": [blocked] for index in range(size) if index != 7}
    check = only(checks_network.connections, make_cluster(size, **changes))
    assert "and 33 more -> node7" in check.message and len(check.message) < 400


@pytest.mark.parametrize(
    ("port", "status"),
    [
        (Port(29500, True, None, False), "pass"),
        (Port(29500, False, "python (pid 7: torchrun)", True), "pass"),
        (Port(29500, False, "python (pid 7: other.py)", False), "fail"),
        (Port(29500, False, None, False), "fail"),
        (Port(29400, False, "python (pid 7: other.py)", False), "warn"),
    ],
)
def test_ports(port: Port, status: str, make_cluster: Make) -> None:
    check = only(checks_network.ports, make_cluster(2, n0_ports=[port], n0_free_port=29501))
    assert check.status == status
    if status != "pass":
        assert (port.owner or "only root can see") in check.message and "29501" in check.fix
    busy_elsewhere = make_cluster(2, n1_ports=[port])
    assert only(checks_network.ports, busy_elsewhere).status == "pass", "only node 0's ports are wanted"


@pytest.mark.parametrize(
    ("master", "status"),
    [
        (Name("node0", ["10.0.0.1"]), "pass"),
        (Name("node0", ["192.168.7.1"]), "pass"),  # another card of node 0
        (Name("node0", [], "Name or service not known"), "fail"),
        (Name("node0", ["127.0.1.1"]), "fail"),
        (Name("node0", ["10.0.0.77"]), "fail"),
    ],
)
def test_the_masters_name_on_the_other_nodes(master: Name, status: str, make_cluster: Make) -> None:
    check = only(checks_network.announced_name, make_cluster(2, n1_master=master, n1_clock=None))
    assert check.status == status
    if status == "fail":
        assert check.fix == "on node1, /etc/hosts: 10.0.0.1 node0"


def test_a_master_behind_address_translation_was_met_all_the_same(make_cluster: Make) -> None:
    elsewhere = Name("node0", ["203.0.113.5"])
    assert only(checks_network.announced_name, make_cluster(2, n1_master=elsewhere)).status == "warn"
    assert only(checks_network.announced_name, make_cluster(2, n1_master=elsewhere, by_agent=True)).status == "fail"


@pytest.mark.parametrize("addresses", [[], ["127.0.0.1"], ["10.5.5.5"]])
def test_the_name_that_c10d_would_announce(addresses: list[str], make_cluster: Make) -> None:
    error = None if addresses else "Name or service not known"
    cluster = make_cluster(2, n1_peer_names=[Name("node0.cluster", addresses, error)])
    check = only(checks_network.announced_name, cluster)
    assert check.status == "warn" and "node0.cluster" in check.message
    assert "--local-addr=10.0.0.1" in check.fix


@pytest.mark.parametrize(
    ("text", "right"),
    [("fd00::1", None), ("node0", None), ("[fd00::1]", "fd00::1"), ("node0:29500", "node0"), ("[::1]:9", "::1")],
)
def test_master_addr(text: str, right: str | None, make_cluster: Make) -> None:
    check = only(checks_network.ipv6, make_cluster(2, n0_variables={"MASTER_ADDR": text}))
    if right is None:
        assert check.status == "pass"
    else:
        assert check.status == "fail" and check.fix == f"on node0: export MASTER_ADDR={right}"


def test_addresses_of_different_kinds(make_cluster: Make) -> None:
    assert only(checks_network.ipv6, make_cluster(2, n1_address="fd00::2")).status == "fail"
    both = only(checks_network.ipv6, make_cluster(2, n0_address="fd00::1", n1_address="fd00::2"))
    assert both.status == "pass" and "brackets" in both.message
    garbage = only(checks_network.ipv6, make_cluster(2, n0_variables={"MASTER_ADDR": "no de"}))
    assert garbage.status == "fail"


def test_packet_sizes(make_cluster: Make) -> None:
    cards = [Card("eth0", ["10.0.0.2/24"], True, 9000)]
    check = only(checks_network.packet_size, make_cluster(2, n1_cards=cards))
    assert check.status == "warn" and check.fix == "on node1: sudo ip link set eth0 mtu 1500"
    assert list(checks_network.packet_size(make_cluster(1))) == []


def test_silent_nodes(make_cluster: Make) -> None:
    cluster = make_cluster(3, silent={2: "did not come to 10.0.0.1 port 29500"}, labels={2: "spare"})
    del cluster.facts[2]
    check = only(checks_network.peers, cluster)
    assert check.status == "fail" and check.nodes == ("spare",) and "did not come" in check.message

    cluster = make_cluster(2, own=1, trouble="node0 was not met: node1 -> node0: no answer", silent={0: "no answer"})
    del cluster.facts[0]
    check = only(checks_network.peers, cluster)
    assert check.status == "fail" and check.nodes == ("node1",)
    assert check.fix.startswith("nc -vz 10.0.0.1 29500 (from node1") and "ufw allow from 10.0.0.2" in check.fix


def test_twins_are_told_apart(make_cluster: Make) -> None:
    cluster = make_cluster(2, n1_name="node0", n1_clock=Clock(0.0, 0.0))
    assert [cluster.label(index) for index in range(2)] == ["node0 (node 0)", "node0 (node 1)"]
