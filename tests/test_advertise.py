"""Ranks as threads; their nodes' network cards are addresses of this machine's loopback."""

import itertools
import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from bireme import advertise, meeting
from bireme.advertise import Place, agree, explain
from bireme.environment import Launch
from bireme.errors import UserError
from bireme.meeting import Meeting
from bireme.network import Interface, free_port

LO = Interface("lo", ("127.0.0.1/8",), True)


@dataclass
class Machine:
    """A rank's machine: its cards, and from which address it reaches others."""

    name: str
    address: str
    interface: str = "eth0"
    master_is_here: bool = False  # and its name leads to loopback, as Debian's hosts file has it
    environ: dict[str, str] = field(default_factory=dict)

    def interfaces(self) -> list[Interface]:
        return [LO, Interface(self.interface, (f"{self.address}/24",), True)]

    def towards(self, address: str) -> str:
        return "127.0.0.1" if self.master_is_here and address == "127.0.0.1" else self.address


@pytest.fixture(autouse=True)
def cards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    try:
        socket.create_server(("127.0.0.11", 0)).close()
    except OSError:
        pytest.skip("this machine's loopback has a single address")
    monkeypatch.setattr(meeting, "_joins", itertools.repeat(0))
    monkeypatch.setattr(meeting, "_LAST_WORD_S", 1.0)
    monkeypatch.setattr(advertise, "is_loopback", lambda address: address == "127.0.0.1")
    monkeypatch.setattr(advertise, "interfaces", lambda: here.machine.interfaces())
    monkeypatch.setattr(advertise, "local_address_towards", lambda address: here.machine.towards(address))
    yield


class Here(threading.local):
    machine: Machine


here = Here()


def on(machines: list[Machine], hosts: list[str] | None = None) -> list[Any]:
    """What each rank learns, or the UserError that it ends with."""
    port = free_port()

    def one(rank: int) -> Any:
        here.machine = machines[rank]
        launch = Launch(rank, len(machines), 0, 1, 0, 1, "127.0.0.1", port, False, "environment")
        met = Meeting(launch, 20.0, f"process {rank}", {})
        try:
            host = hosts[rank] if hosts else machines[rank].name
            return agree(met, machines[rank].name, host, machines[rank].environ), met
        except UserError as error:
            return error, met

    with ThreadPoolExecutor(len(machines)) as threads:
        answers = list(threads.map(one, range(len(machines))))  # whole: with the first meeting the store would end
    return [result for result, _ in answers]


def test_every_node_advertises_the_card_that_routes_to_the_master(caplog: pytest.LogCaptureFixture) -> None:
    machines = [Machine("a", "127.0.0.11", "ens3"), Machine("b", "127.0.0.12", "bond0.7")]
    with caplog.at_level(logging.INFO, "bireme"):
        answers = on(machines)
    places = [Place("a", "a", "127.0.0.11", "ens3"), Place("b", "b", "127.0.0.12", "bond0.7")]
    assert answers == [places, places]
    assert machines[1].environ == {
        "GLOO_SOCKET_IFNAME": "bond0.7",
        "NCCL_SOCKET_IFNAME": "=bond0.7",
        "TP_SOCKET_IFNAME": "bond0.7",
    }
    assert machines[0].environ["GLOO_SOCKET_IFNAME"] == "ens3"
    assert "rank 1 on node b advertises address 127.0.0.12 via interface bond0.7" in caplog.messages


def test_the_masters_node_does_not_advertise_its_loopback() -> None:
    machines = [Machine("a", "127.0.0.11", master_is_here=True), Machine("b", "127.0.0.12")]
    machines.append(Machine("a", "127.0.0.11", master_is_here=True))
    for places in on(machines):
        assert [place.address for place in places] == ["127.0.0.11", "127.0.0.12", "127.0.0.11"]
    assert {machine.environ["GLOO_SOCKET_IFNAME"] for machine in machines} == {"eth0"}


def test_ranks_of_one_machine_use_its_loopback() -> None:
    machines = [Machine("a", "127.0.0.11", master_is_here=True) for _ in range(3)]
    assert on(machines) == [[Place("a", "a", "127.0.0.1", "lo")] * 3] * 3


def test_emulated_nodes_on_one_network_stack_too() -> None:
    machines = [Machine(f"oar{node}", "127.0.0.11", master_is_here=True) for node in range(2)]
    (places, _) = on(machines, hosts=["laptop", "laptop"])
    assert [(place.node, place.interface) for place in places] == [("oar0", "lo"), ("oar1", "lo")]


def test_the_users_interface_stays() -> None:
    machines = [Machine("a", "127.0.0.11"), Machine("b", "127.0.0.12")]
    machines[1].environ = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "ib0"}
    (places, _) = on(machines)
    assert places[1] == Place("b", "b", "127.0.0.12", "eth0")
    assert machines[1].environ == {
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "ib0",
        "TP_SOCKET_IFNAME": "eth0",
    }


def test_an_interface_that_is_not_there_is_said_on_every_rank() -> None:
    machines = [Machine("a", "127.0.0.11"), Machine("b", "127.0.0.12"), Machine("b", "127.0.0.12")]
    for machine in machines[1:]:
        machine.environ = {"GLOO_SOCKET_IFNAME": "nosuch0"}
    errors = on(machines)
    assert len(set(map(str, errors))) == 1
    assert str(errors[0]) == (
        "ranks 1-2 on node b: GLOO_SOCKET_IFNAME=nosuch0: this node has no such network interface; "
        "there are eth0 (127.0.0.12), lo (127.0.0.1)"
    )


def test_a_blocked_direction_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    reach = advertise._reach
    monkeypatch.setattr(
        advertise,
        "_reach",
        lambda target, left_s: "timed out" if here_name() == "a" and target["node"] == "b" else reach(target, left_s),
    )
    # The connections are made by threads of their own.
    monkeypatch.setattr(advertise, "ThreadPoolExecutor", Inline)
    errors = on([Machine("a", "127.0.0.11"), Machine("b", "127.0.0.12"), Machine("b", "127.0.0.12")])
    assert len(set(map(str, errors))) == 1
    message = str(errors[0])
    assert message.startswith("node a (rank 0) cannot connect to node b (rank 1) at 127.0.0.12:")
    assert "interface eth0: timed out. " in message
    assert "node b (rank 1) cannot" not in message
    assert "firewall" in message
    assert "GLOO_SOCKET_IFNAME" in message
    assert "bireme doctor" in message


def here_name() -> str:
    return here.machine.name


class Inline:
    """A thread pool without threads."""

    def __init__(self, *_: Any):
        pass

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    map = staticmethod(map)


def test_two_machines_with_the_same_address_do_not_reach_each_other() -> None:
    """As with docker0, which every machine has: whoever connects there reaches himself."""
    listeners = [advertise._Listener("127.0.0.11") for _ in range(2)]
    try:
        other, mine = ({"address": "127.0.0.11", "port": each.port, "token": each.token} for each in listeners)
        assert advertise._reach(other, 5.0) is None
        assert advertise._reach({**other, "port": mine["port"]}, 5.0) == "another program answers there"
    finally:
        for each in listeners:
            each.close()
    assert "refused" in str(advertise._reach(other, 5.0))


def test_what_cannot_be_reached_by_others_is_said() -> None:
    target = {"node": "b", "address": "127.0.0.1", "port": 7, "interface": "lo"}
    assert advertise._blocked("a", 0, 1, target, "refused") == (
        "node a (rank 0) cannot connect to node b (rank 1) at 127.0.0.1:7, interface lo, "
        "which only that node itself reaches: refused"
    )


def test_many_failures_are_counted() -> None:
    said = advertise._conclude([f"failure {number}" for number in range(9)])
    assert said is not None
    assert said.startswith("failure 0; failure 1; failure 2; and 6 more. Let the nodes")
    assert advertise._conclude([]) is None


PLACES = [Place("a", "a", "10.0.0.1", "eth0"), *[Place("b", "b", "10.0.0.2", "eth1")] * 2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:152] timed out "
            "connecting: SO_ERROR: Connection refused, remote=[10.0.0.2]:48519$1\nframe #0",
            "rank 0 on node a cannot connect to ranks 1-2 on node b at 10.0.0.2 (timed out connecting: SO_ERROR: "
            "Connection refused, remote=[10.0.0.2]:48519$1): check the firewall",
        ),
        ("SO_ERROR: refused, remote=[::ffff:127.0.1.1]:5", "rank 0 on node a cannot connect to 127.0.1.1 (SO_ERROR"),
        (
            "Gloo connectFullMesh failed with [/a/pair.h:311] Connect timeout [none]",
            "rank 0 on node a cannot connect to the others (Connect timeout [none]): check the firewall",
        ),
        ("", "rank 0 on node a cannot connect to the others (RuntimeError): "),
    ],
)
def test_gloos_error_is_explained_in_one_line(text: str, said: str) -> None:
    explained = explain(RuntimeError(text), 0, PLACES)
    assert explained.startswith(said)
    assert "bireme doctor" in explained
    assert "\n" not in explained
