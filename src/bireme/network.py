"""What this machine's network looks like: addresses, interfaces, ports, and which interface a job should use."""

import ipaddress
import platform
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from bireme.errors import UserError

# Made by container engines and hypervisors: other machines have the same ones, with the same addresses.
_VIRTUAL = ("docker", "virbr", "veth", "br-", "cni", "flannel", "cali", "vmnet", "vboxnet", "podman", "lxcbr", "lxdbr")
_COMMAND_CHARACTERS = 80


# --- endpoints ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host (name or number) and a port, as people write them: ``h:1``, ``[::1]:1``."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, default_port: int | None = None) -> "Endpoint":
        """UserError for what is no endpoint. IPv6 numbers with a port stand in brackets."""
        text = text.strip()
        host, port = text, ""
        if text.startswith("["):
            host, bracket, rest = text[1:].partition("]")
            if not bracket or (rest and not rest.startswith(":")) or not _is_ipv6(host):
                raise UserError(f"{text!r} is not an endpoint: an IPv6 address is written [fd00::1]:29500")
            port = rest
        elif text.count(":") == 1:
            host, colon, number = text.partition(":")
            port = colon + number
        elif ":" in text and not _is_ipv6(text):
            raise UserError(f"{text!r} is not an endpoint: write host:port, or [fd00::1]:29500")
        if not host or any(each.isspace() or each in "/[]" for each in host):
            raise UserError(f"{text!r} is not an endpoint: write host:port, for example 10.0.0.1:29500")
        if not port:
            if default_port is None:
                raise UserError(f"{text!r} has no port: write {cls(host, 29500)}, for example")
            return cls(host, default_port)
        digits = port[1:]
        if not (digits.isascii() and digits.isdigit()) or not 1 <= int(digits) <= 65535:
            raise UserError(f"{digits!r} in {text!r} is not a port: choose one from 1024 to 65535")
        return cls(host, int(digits))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def resolve(host: str) -> list[str]:
    """The numeric addresses of a host, IPv4 first; OSError when nobody knows it."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    found.sort(key=lambda each: each[0] != socket.AF_INET)  # stable: the resolver's order otherwise
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def is_loopback(address: str) -> bool:
    """Whether a numeric address never leaves this machine."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return bool((mapped or parsed).is_loopback)


def local_address_towards(address: str) -> str | None:
    """The address that this machine would send from to reach a numeric address; None: there is no route.

    Connecting a UDP socket only asks the kernel's routing table; nothing is sent.
    """
    try:
        family, kind, _, _, destination = socket.getaddrinfo(
            address, 9, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(destination)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def boot_id() -> str:
    """The same for whatever runs on one machine until it restarts."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def network_stack() -> str:
    """The same for processes that reach each other over loopback. Containers and emulated nodes of one machine share
    its boot, but not its network."""
    try:
        namespace = str(Path("/proc/self/ns/net").stat().st_ino)
    except OSError:
        namespace = ""
    return "/".join((boot_id(), socket.gethostname(), namespace))


# --- interfaces --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Interface:
    """One network interface: its addresses with their prefix lengths, in the order that gloo and NCCL see them."""

    name: str
    addresses: tuple[str, ...]  # "10.0.0.1/24", "fd00::2/64"
    up: bool

    @property
    def is_loopback(self) -> bool:
        return bool(self.addresses) and all(is_loopback(_number(each)) for each in self.addresses)

    @property
    def is_virtual(self) -> bool:
        """Whether it looks like a bridge inside this machine."""
        return self.name.startswith(_VIRTUAL)


def interfaces() -> list[Interface]:
    """The interfaces of this machine (of this network namespace)."""
    states = psutil.net_if_stats()
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        numbers = [
            f"{each.address.partition('%')[0]}/{_prefix_length(each.netmask, each.family)}"
            for each in addresses
            if each.family in (socket.AF_INET, socket.AF_INET6)
        ]
        found.append(Interface(name, tuple(numbers), name in states and states[name].isup))
    return found


def _prefix_length(netmask: str | None, family: int) -> int:
    if netmask is None:  # a point-to-point link
        return 32 if family == socket.AF_INET else 128
    return int(ipaddress.ip_address(netmask)).bit_count()


def _number(address: str) -> str:
    """The address of "10.0.0.1/24"."""
    return address.partition("/")[0]


@dataclass(frozen=True, slots=True)
class Choice:
    """The interface for a job's traffic, and the address by which gloo lets others reach it."""

    interface: str
    address: str
    warnings: tuple[str, ...]


def choose(interfaces: list[Interface], local_address: str | None) -> Choice:
    """The interface that holds `local_address`, the address from which the kernel reaches the others (pure).

    None: no route is known, so the only real network card is meant. Loopback and bridges inside the machine are
    chosen only where the route says so. UserError when there is nothing to choose.
    """
    if local_address is None:
        candidates = [
            each for each in interfaces if each.up and each.addresses and not each.is_loopback and not each.is_virtual
        ]
        if len(candidates) != 1:
            found = ", ".join(each.name for each in candidates) or "none that other machines could reach"
            raise UserError(
                f"no route to the other nodes, and no single network interface to choose ({found}): "
                "set GLOO_SOCKET_IFNAME on this node"
            )
        chosen = candidates[0]
    else:
        local_address = local_address.partition("%")[0]
        holders = [each for each in interfaces if local_address in map(_number, each.addresses)]
        if not holders and is_loopback(local_address):
            holders = [each for each in interfaces if each.is_loopback]
        if not holders:
            raise UserError(
                f"no network interface has the address {local_address} "
                f"(there are {describe(interfaces)}): set GLOO_SOCKET_IFNAME on this node"
            )
        up = [each for each in holders if each.up]
        if not up:
            raise UserError(
                f"network interface {holders[0].name} with the address {local_address} is down: "
                f"`ip link set {holders[0].name} up`, or set GLOO_SOCKET_IFNAME to another on this node"
            )
        chosen = up[0]
    return Choice(chosen.name, advertised_address(chosen), tuple(_warnings(interfaces, chosen, local_address)))


def advertised_address(interface: Interface) -> str:
    """The address that gloo tells the others when it is given this interface: the first one."""
    return _number(interface.addresses[0])


def _warnings(interfaces: list[Interface], chosen: Interface, local_address: str | None) -> list[str]:
    said = []
    advertised = advertised_address(chosen)
    if (
        local_address is not None
        and local_address != advertised
        and not is_loopback(local_address)
        and _is_ipv6(local_address) == _is_ipv6(advertised)
    ):
        said.append(
            f"interface {chosen.name} has several addresses: gloo advertises {advertised}, "
            f"the route to the others uses {local_address}"
        )
    if chosen.is_virtual:
        said.append(f"interface {chosen.name} looks like a bridge inside this machine, but the route uses it")
    network = ipaddress.ip_interface(chosen.addresses[0]).network
    if not chosen.is_loopback and not network.is_link_local:
        twins = [
            each.name
            for each in interfaces
            if each.name != chosen.name
            and each.up
            and any(ipaddress.ip_interface(address).network == network for address in each.addresses)
        ]
        if twins:
            said.append(
                f"interfaces {chosen.name} and {', '.join(twins)} are in one subnet {network}: answers may take the "
                f"other one; using {chosen.name}"
            )
    return said


def named(interfaces: list[Interface], name: str, variable: str = "GLOO_SOCKET_IFNAME") -> Interface:
    """The interface that a user has named; UserError, with the ones there are, when it cannot be used."""
    for each in interfaces:
        if each.name == name:
            if not each.up:
                raise UserError(f"{variable}={name}: this network interface is down ({describe(interfaces)})")
            if not each.addresses:
                raise UserError(f"{variable}={name}: this network interface has no address ({describe(interfaces)})")
            return each
    raise UserError(f"{variable}={name}: this node has no such network interface; there are {describe(interfaces)}")


def describe(interfaces: list[Interface]) -> str:
    """``eth0 (10.0.0.1), eth1 (down), lo (127.0.0.1)``."""
    parts = []
    for each in sorted(interfaces, key=lambda one: (one.is_loopback, not one.up, one.name)):
        state = "down" if not each.up else ", ".join(map(_number, each.addresses)) or "no address"
        parts.append(f"{each.name} ({state})")
    return ", ".join(parts) or "none"


def interface_variables(choice: Choice) -> dict[str, str]:
    """The environment variables by which gloo, NCCL and TensorPipe take this interface.

    NCCL reads a bare name as a prefix (bond0 is also bond0.2093): the equals sign makes it exact.
    """
    name = choice.interface
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}", "TP_SOCKET_IFNAME": name}


# --- ports -------------------------------------------------------------------------------------------------------


def port_owner(port: int) -> str | None:
    """Who listens on a TCP port of this machine: ``python (pid 123: python -m ...)``; None: not visible to us."""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:
        return None
    for each in connections:
        if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port and each.pid:
            try:
                process = psutil.Process(each.pid)
                command = " ".join(process.cmdline())
                if len(command) > _COMMAND_CHARACTERS:
                    command = command[:_COMMAND_CHARACTERS] + "..."
                return f"{process.name()} (pid {each.pid}: {command})" if command else f"{process.name()} ({each.pid})"
            except psutil.Error:
                return f"pid {each.pid}"
    return None


def free_port(address: str = "") -> int:
    """A TCP port that nobody uses now, on an address of this machine or on all."""
    with socket.socket(socket.AF_INET6 if _is_ipv6(address) else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def answers(address: str, timeout_s: float = 2.0) -> bool:
    """Whether a machine answers at an address: a refused connection is an answer, silence and no route are none."""
    try:
        socket.create_connection((address, 9), timeout=timeout_s).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True
