import json
import socket
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme import network
from bireme.errors import UserError
from bireme.network import (
    Choice,
    Endpoint,
    Interface,
    answers,
    choose,
    free_port,
    interface_variables,
    interfaces,
    is_loopback,
    local_address_towards,
    named,
    port_owner,
    resolve,
)

# --- endpoints ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "host", "port", "written"),
    [
        ("::1", "::1", 29500, "[::1]:29500"),
        ("[::1]", "::1", 29500, "[::1]:29500"),
        ("[::1]:1", "::1", 1, "[::1]:1"),
        ("h:1", "h", 1, "h:1"),
        ("10.0.0.1", "10.0.0.1", 29500, "10.0.0.1:29500"),
        ("10.0.0.1:65535", "10.0.0.1", 65535, "10.0.0.1:65535"),
        (" node-3.cluster.local:400 ", "node-3.cluster.local", 400, "node-3.cluster.local:400"),
        ("fd00::2", "fd00::2", 29500, "[fd00::2]:29500"),
    ],
)
def test_an_endpoint_goes_round(text: str, host: str, port: int, written: str) -> None:
    endpoint = Endpoint.parse(text, 29500)
    assert (endpoint.host, endpoint.port, str(endpoint)) == (host, port, written)
    assert Endpoint.parse(written) == endpoint


@given(st.ip_addresses(), st.integers(1, 65535))
def test_every_numeric_endpoint_goes_round(address: Any, port: int) -> None:
    endpoint = Endpoint(str(address), port)
    assert Endpoint.parse(str(endpoint)) == endpoint


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h", "has no port: write h:29500"),
        ("::1", r"has no port: write \[::1\]:29500"),
        ("h:0", "'0' in 'h:0' is not a port"),
        ("h:65536", "not a port"),
        ("h:http", "'http' in 'h:http' is not a port"),
        ("h:", "not a port"),
        ("h:-1", "not a port"),
        ("h:²", "not a port"),
        ("", "not an endpoint"),
        (":1", "not an endpoint"),
        ("[::1", "not an endpoint"),
        ("[::1]1", "not an endpoint"),
        ("[h]:1", "not an endpoint"),
        ("::1:x:1", "not an endpoint"),
        ("tcp://h:1", "not an endpoint"),
        ("a b:1", "not an endpoint"),
    ],
)
def test_what_is_no_endpoint(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Endpoint.parse(text)


@pytest.mark.parametrize(
    ("address", "loops"),
    [
        ("127.0.0.1", True),
        ("127.0.1.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:10.0.0.1", False),
        ("10.0.0.1", False),
        ("fd00::2", False),
        ("localhost", False),  # not a numeric address
    ],
)
def test_loopback(address: str, loops: bool) -> None:
    assert is_loopback(address) is loops


def test_ipv4_is_resolved_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*_: Any, **__: Any) -> list[Any]:
        six = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", (each, 0, 0, 0)) for each in ("fd00::2", "fd00::1")]
        four = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in ("10.0.0.2", "10.0.0.2", "10.0.0.1")]
        return six + four

    monkeypatch.setattr(network.socket, "getaddrinfo", answer)
    assert resolve("node0") == ["10.0.0.2", "10.0.0.1", "fd00::2", "fd00::1"]


def test_an_unknown_host() -> None:
    with pytest.raises(OSError):
        resolve("no-such-host.invalid")


def test_the_way_to_this_machine_is_loopback() -> None:
    assert local_address_towards("127.0.0.1") == "127.0.0.1"
    assert local_address_towards("not numeric") is None


# --- interfaces --------------------------------------------------------------------------------------------------


def machine(text: str) -> list[Interface]:
    """Interfaces from what `ip -j addr` prints."""
    return [
        Interface(
            each["ifname"],
            tuple(f"{info['local']}/{info['prefixlen']}" for info in each["addr_info"]),
            "UP" in each["flags"],
        )
        for each in json.loads(text)
    ]


def link(name: str, *addresses: str, flags: tuple[str, ...] = ("BROADCAST", "MULTICAST", "UP", "LOWER_UP")) -> Any:
    found = []
    for address in addresses:
        local, _, prefix = address.partition("/")
        family = "inet6" if ":" in local else "inet"
        found.append({"family": family, "local": local, "prefixlen": int(prefix), "scope": "global", "label": name})
    return {"ifname": name, "flags": list(flags), "mtu": 1500, "operstate": "UP", "addr_info": found}


LO = link("lo", "127.0.0.1/8", "::1/128", flags=("LOOPBACK", "UP", "LOWER_UP"))
DOCKER = link("docker0", "172.17.0.1/16")
BONDS = json.dumps([LO, DOCKER, link("bond0", "10.1.0.5/24"), link("bond0.2093", "10.20.93.5/24")])
DOCKER_ONLY = json.dumps([LO, DOCKER, link("veth1a2b", "fe80::1/64"), link("virbr0", "192.168.122.1/24")])
TWINS = json.dumps([LO, link("ens1", "10.0.1.5/20"), link("ens2", "10.0.2.5/20"), link("ens3", "10.9.0.5/20")])
DOWN = json.dumps([LO, link("eth0", "10.0.0.5/24", flags=("BROADCAST",)), link("eth1", "10.0.1.5/24")])


def test_the_interface_is_the_one_that_routes_there_by_its_exact_name() -> None:
    for address, name in (("10.1.0.5", "bond0"), ("10.20.93.5", "bond0.2093")):
        choice = choose(machine(BONDS), address)
        assert choice == Choice(name, address, ())
        assert interface_variables(choice) == {
            "GLOO_SOCKET_IFNAME": name,
            "NCCL_SOCKET_IFNAME": f"={name}",  # bond0 alone would be a prefix, of bond0.2093 too
            "TP_SOCKET_IFNAME": name,
        }


def test_bridges_and_loopback_only_where_the_route_uses_them() -> None:
    with pytest.raises(UserError, match=r"no route to the other nodes.*none that other machines.*GLOO_SOCKET_IFNAME"):
        choose(machine(DOCKER_ONLY), None)
    choice = choose(machine(DOCKER_ONLY), "172.17.0.1")
    assert choice.interface == "docker0"
    assert "bridge inside this machine" in choice.warnings[0]
    assert choose(machine(DOCKER_ONLY), "127.0.0.1") == Choice("lo", "127.0.0.1", ())
    assert choose(machine(DOCKER_ONLY), "127.0.1.1") == Choice("lo", "127.0.0.1", ())


def test_without_a_route_only_a_single_card_is_chosen() -> None:
    assert choose(machine(DOWN), None).interface == "eth1"
    with pytest.raises(UserError, match=r"no single network interface to choose \(ens1, ens2, ens3\)"):
        choose(machine(TWINS), None)


def test_two_cards_in_one_subnet_are_warned_of() -> None:
    choice = choose(machine(TWINS), "10.0.2.5")
    assert (choice.interface, choice.address) == ("ens2", "10.0.2.5")
    assert choice.warnings == (
        "interfaces ens2 and ens1 are in one subnet 10.0.0.0/20: answers may take the other one; using ens2",
    )
    assert choose(machine(TWINS), "10.9.0.5").warnings == ()


def test_an_interface_that_is_down_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"eth0 with the address 10\.0\.0\.5 is down: `ip link set eth0 up`"):
        choose(machine(DOWN), "10.0.0.5")


def test_an_address_that_nobody_has() -> None:
    with pytest.raises(UserError, match=r"has the address 10\.7\.7\.7 \(there are eth1 \(10\.0\.1\.5\), eth0 \(down\)"):
        choose(machine(DOWN), "10.7.7.7")


def test_gloo_advertises_the_first_address_of_an_interface() -> None:
    several = machine(json.dumps([LO, link("eth0", "10.0.0.5/24", "10.8.0.5/24", "fd00::5/64")]))
    choice = choose(several, "10.8.0.5")
    assert choice.address == "10.0.0.5"
    assert "gloo advertises 10.0.0.5, the route to the others uses 10.8.0.5" in choice.warnings[0]
    assert choose(several, "10.0.0.5").warnings == choose(several, "fd00::5").warnings == ()


def test_a_named_interface() -> None:
    assert named(machine(DOWN), "eth1").addresses == ("10.0.1.5/24",)
    with pytest.raises(UserError, match=r"GLOO_SOCKET_IFNAME=eth0: this network interface is down"):
        named(machine(DOWN), "eth0")
    with pytest.raises(UserError, match=r"=nosuch0: this node has no such .* eth1 \(10\.0\.1\.5\), eth0 \(down\), lo"):
        named(machine(DOWN), "nosuch0")
    with pytest.raises(UserError, match="has no address"):
        named([Interface("ib0", (), True)], "ib0")


def test_the_interfaces_of_this_machine() -> None:
    found = interfaces()
    (loopback,) = (each for each in found if each.is_loopback)
    assert loopback.up
    assert "127.0.0.1/8" in loopback.addresses
    assert choose(found, local_address_towards("127.0.0.1")).interface == loopback.name


# --- ports -------------------------------------------------------------------------------------------------------


def test_the_owner_of_a_port_is_named() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        owner = port_owner(holder.getsockname()[1])
    assert owner is not None
    assert f"(pid {psutil.Process().pid}: " in owner
    assert port_owner(free_port()) is None


def test_an_owner_that_nobody_may_see(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_kind: str) -> Any:
        raise psutil.AccessDenied

    monkeypatch.setattr(network.psutil, "net_connections", refuse)
    assert port_owner(1) is None


def test_a_free_port_can_be_taken() -> None:
    for address in ("", "127.0.0.1"):
        with socket.socket() as taker:
            taker.bind((address, free_port(address)))


def test_a_machine_answers_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answers("127.0.0.1", 5.0)  # refused is an answer
    with socket.create_server(("127.0.0.1", 0)):
        assert answers("127.0.0.1", 5.0)

    def silence(*_: object, **__: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", silence)
    assert not answers("10.0.0.1")
