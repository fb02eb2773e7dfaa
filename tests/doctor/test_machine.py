import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bireme.doctor import machine
from bireme.doctor.checks import examine
from bireme.doctor.checks_network import announced_name, own_name
from bireme.doctor.cluster import Cluster
from bireme.doctor.facts import Facts, facts_from_json
from bireme.doctor.machine import advertise, gather, look_up, within
from bireme.network import free_port

Make = Callable[..., Cluster]


def gathered(environ: dict[str, str] | None = None, **changes: Any) -> Facts:
    arguments: dict[str, Any] = {
        "index": 0,
        "nodes": 1,
        "launcher": "none",
        "world_size": None,
        "master": None,
        "master_port": free_port(),
        "store_held": False,
        "contradictions": [],
        "hints": [],
        "ranks_per_node": None,
        "workers": 0,
    }
    return gather(environ or {}, **{**arguments, **changes})


def test_this_machine() -> None:
    facts = gathered({"BIREME_NODE": "here", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "x\x1b"})
    assert facts_from_json(facts.to_json()) == facts
    assert (facts.name, facts.threads, facts.ranks) == ("here", 1, max(1, facts.gpus))
    assert facts.affinity_cores == len(machine.usable_cores()) and 0 < facts.cores <= facts.affinity_cores
    assert facts.variables["GLOO_SOCKET_IFNAME"] == "x\\x1b"
    assert any(card.name.startswith("lo") for card in facts.cards)
    assert facts.versions["torch"].startswith("2.")
    advertise(facts, machine.outward_address())
    assert {check.name for check in examine(Cluster(1, 0, {0: facts}))} >= {"own name", "ports", "cores"}


def test_ranks_and_threads() -> None:
    assert gathered({"LOCAL_WORLD_SIZE": "3"}).ranks == 3
    assert gathered({"LOCAL_WORLD_SIZE": "3"}, ranks_per_node=5).ranks == 5
    assert gathered({"OMP_NUM_THREADS": "4,2"}).threads == 4
    cores = len(machine.usable_cores())
    assert gathered({"OMP_NUM_THREADS": "many"}, ranks_per_node=1).threads == cores
    assert gathered(ranks_per_node=1000).threads == 1


def test_a_held_port_names_its_holder() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        first = gathered(master_port=port).ports[0]
        assert (first.port, first.free) == (port, False)
        assert first.owner is None or f"pid {os.getpid()}" in first.owner
        assert not first.ours
        assert gathered(master_port=port, store_held=True).ports[0].ours
    assert gathered(master_port=port).ports[0].free


@pytest.mark.parametrize(
    ("hosts", "full_name", "own", "announced"),
    [
        ({"node0": ["10.0.0.1"], "node0.cluster": ["10.0.0.1"]}, "node0.cluster", "pass", "pass"),
        ({"node0": ["127.0.1.1"], "node0.cluster": ["127.0.1.1"]}, "node0.cluster", "fail", "warn"),  # Debian
        ({"node0": ["127.0.1.1"]}, "localhost", "fail", "warn"),
        ({}, "node0.lan", "fail", "warn"),  # no name server at all
        ({"node0": ["10.0.0.1"]}, "host-10-0-0-1.isp.net", "pass", "warn"),  # a reverse name without a forward one
        ({"node0": ["10.8.0.1"], "node0.vpn": ["10.8.0.1"]}, "node0.vpn", "fail", "warn"),  # a network that is down
    ],
)
def test_what_torchrun_would_announce(
    hosts: dict[str, list[str]],
    full_name: str,
    own: str,
    announced: str,
    make_cluster: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B01 and B02: the verdicts over what getfqdn and getaddrinfo say, here the same on both nodes."""

    def resolver(name: str, *_: Any, **__: Any) -> list[Any]:
        if name == "localhost":
            hosts.setdefault("localhost", ["127.0.0.1"])
        if name not in hosts:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in hosts[name]]

    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    monkeypatch.setattr(socket, "gethostname", lambda: "node0")
    monkeypatch.setattr(socket, "getfqdn", lambda: full_name)
    here = gathered()
    cluster = make_cluster(2, n0_host=here.host, n0_full_name=here.full_name, n1_peer_names=[look_up(full_name)])
    assert next(own_name(cluster)).status == own
    assert next(announced_name(cluster)).status == announced


def test_a_silent_name_server_does_not_hold_up() -> None:
    stop = threading.Event()
    assert within(0.05, lambda: stop.wait(60), otherwise=False) is False
    stop.set()
    assert within(30, lambda: 7, otherwise=0) == 7


def test_a_name_that_is_none() -> None:
    for name in ("no.such.host.invalid", "a" * 70, "\udcff"):
        found = look_up(name)
        assert found.addresses == [] and found.error


def test_advertise(make_cluster: Make) -> None:
    facts = make_cluster(2).facts[0]
    advertise(facts, "192.168.7.1")
    assert (facts.interface, facts.address, facts.interface_error) == ("eth1", "192.168.7.1", None)
    advertise(facts, "203.0.113.9")
    assert facts.interface_error is not None and "203.0.113.9" in facts.interface_error


def test_one_kernel_and_one_network_are_one_machine() -> None:
    assert machine._machine() == machine._machine()
    if Path("/proc/self/ns/net").exists():
        assert "net:[" in machine._machine()


def test_gathering_is_quick_enough() -> None:
    started_s = time.monotonic()
    gathered()
    assert time.monotonic() - started_s < 60
