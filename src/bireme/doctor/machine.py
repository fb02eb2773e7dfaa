"""What this machine says about itself: names, network cards, ports, versions, cores, memory, kernel."""

import errno
import os
import platform
import queue
import re
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import psutil

from bireme import __version__
from bireme.cores import usable_cores
from bireme.doctor.facts import DEFAULT_PORT, HANDED_OUT_FROM, LONGEST_TEXT, RENDEZVOUS_PORT, Card, Facts, Name, Port
from bireme.doctor.quota import quota_cores
from bireme.environment import UNSHAPED
from bireme.errors import UserError
from bireme.network import (
    Interface,
    choose,
    interfaces,
    is_loopback,
    local_address_towards,
    port_owner,
    resolve,
)
from bireme.text import printable

T = TypeVar("T")

_LOOK_UP_S = 2.0
VARIABLES = (
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "TP_SOCKET_IFNAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
)
# Reserved for documentation, routed like any other machine far away: asking for the route sends nothing.
_FAR_AWAY = ("192.0.2.1", "2001:db8::1")


def look_up(name: str) -> Name:
    """What a name means here. A name server that does not answer costs no more than a few seconds."""

    def ask() -> Name:
        try:
            return Name(name, resolve(name))
        except (OSError, UnicodeError) as error:
            return Name(name, [], str(getattr(error, "strerror", None) or error))

    return within(_LOOK_UP_S, ask, Name(name, [], f"no answer from the name server in {_LOOK_UP_S:.0f} s"))


def look_up_all(names: list[str]) -> dict[str, Name]:
    """All names at once: many that are not answered cost no more time than one."""
    with ThreadPoolExecutor(max(1, min(32, len(names)))) as pool:
        return dict(zip(names, pool.map(look_up, names), strict=True))


def within(limit_s: float, function: Callable[[], T], otherwise: T) -> T:
    """The function's result; `otherwise` when it takes longer (it is left alone: nothing can stop a resolver)."""
    results: queue.SimpleQueue[T] = queue.SimpleQueue()
    threading.Thread(target=lambda: results.put(function()), daemon=True).start()
    try:
        return results.get(timeout=limit_s)
    except queue.Empty:
        return otherwise


def outward_address() -> str | None:
    """The address from which this machine talks to the rest of the world."""
    for address in _FAR_AWAY:
        found = local_address_towards(address)
        if found is not None and not is_loopback(found):
            return found
    return next(iter(card_addresses()), None)


def card_addresses() -> list[str]:
    """The addresses of this machine's real cards."""
    cards = [each for each in interfaces() if each.up and not each.is_loopback and not each.is_virtual]
    numbers = [address.partition("/")[0] for card in cards for address in card.addresses]
    return [each for each in numbers if not each.startswith("fe80")]


def own_addresses() -> set[str]:
    return {address.partition("/")[0] for card in interfaces() for address in card.addresses}


def is_mine(address: str) -> bool:
    """Whether a connection to a numeric address ends on this machine."""
    return is_loopback(address) or address in own_addresses()


def gather(
    environ: Mapping[str, str],
    *,
    index: int,
    nodes: int,
    launcher: str,
    world_size: int | None,
    master: str | None,
    master_port: int,
    store_held: bool,
    contradictions: list[str],
    hints: list[str],
    ranks_per_node: int | None,
    workers: int,
) -> Facts:
    """Everything that one machine can know alone. `store_held`: the launcher itself listens at the meeting point."""
    host = socket.gethostname()
    full_name = within(_LOOK_UP_S, socket.getfqdn, host)
    names = look_up_all(list({host, full_name, master or host}))
    gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*"))) if Path("/proc/driver/nvidia/gpus").is_dir() else 0
    ranks, ranks_from = _ranks(environ, ranks_per_node, gpus)
    affinity = len(usable_cores())
    quota = quota_cores()
    threads, threads_from = _threads(environ, affinity, ranks)
    shm_bytes, shm_free_bytes = _shared_memory()
    ports = list(dict.fromkeys((master_port, RENDEZVOUS_PORT)))
    return Facts(
        index=index,
        name=printable(environ.get("BIREME_NODE") or host),
        machine=_machine(),
        launcher=launcher,
        nodes=nodes,
        world_size=world_size,
        host=names[host],
        full_name=names[full_name],
        master=names[master] if master else None,
        master_port=master_port,
        address=None,
        interface=None,
        interface_error=None,
        interface_warnings=[],
        cards=_cards(),
        variables={name: printable(environ[name][:LONGEST_TEXT]) for name in VARIABLES if name in environ},
        contradictions=contradictions,
        hints=hints,
        ports=[_port(port, launcher, store_held) for port in ports],
        free_port=_free_port(master_port, store_held),
        versions=_versions(),
        cores=min(float(affinity), quota or float(affinity)),
        affinity_cores=affinity,
        quota_cores=quota,
        ranks=ranks,
        ranks_from=ranks_from,
        threads=threads,
        threads_from=threads_from,
        workers=workers,
        shm_bytes=shm_bytes,
        shm_free_bytes=shm_free_bytes,
        schedstat=Path("/proc/self/schedstat").is_file(),
        namespaces_error=_namespaces_error(environ),
        open_files=_open_files(),
        gpus=gpus,
        link=printable(environ["BIREME_LINK"][:40]) if environ.get("BIREME_LINK") else None,
    )


def advertise(facts: Facts, address: str | None) -> None:
    """Settles by which address and card this node takes part; `address`: the one that the route to the others uses."""
    facts.address = address
    try:
        choice = choose([_interface(card) for card in facts.cards], address)
    except UserError as error:
        facts.interface_error = str(error)
        return
    facts.interface, facts.interface_warnings = choice.interface, list(choice.warnings)
    if facts.address is None:
        facts.address = choice.address


def _interface(card: Card) -> Interface:
    return Interface(card.name, tuple(card.addresses), card.up)


def _cards() -> list[Card]:
    stats = psutil.net_if_stats()
    return [
        Card(each.name, list(each.addresses), each.up, stats[each.name].mtu if each.name in stats else 0)
        for each in interfaces()
    ]


def _machine() -> str:
    """One kernel and one network: emulated nodes share the first, not the second."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = Path("/proc/self/ns/net").readlink()
    except OSError:
        return platform.node()
    return f"{boot} {network}"


def _ranks(environ: Mapping[str, str], ranks_per_node: int | None, gpus: int) -> tuple[int, str]:
    if ranks_per_node is not None:
        return ranks_per_node, "--ranks-per-node"
    text = environ.get("LOCAL_WORLD_SIZE", "")
    if text.isascii() and text.isdigit() and 0 < int(text) < 10_000:
        return int(text), "LOCAL_WORLD_SIZE"
    return (gpus, "one for each GPU") if gpus else (1, "assumed; say otherwise with --ranks-per-node")


def _threads(environ: Mapping[str, str], cores: int, ranks: int) -> tuple[int, str]:
    text = environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if text.isascii() and text.isdigit() and 0 < int(text) < 100_000:
        return int(text), "OMP_NUM_THREADS"
    return max(1, cores // ranks), "what bireme train takes"


def _port(port: int, launcher: str, store_held: bool) -> Port:
    if _can_bind(port):
        return Port(port, True, None, False)
    owner = port_owner(port)
    process = re.search(r"pid (\d+)", owner or "")
    agent = launcher == "torchrun" and process is not None and int(process[1]) in (each.pid for each in _parents())
    ours = agent or (store_held and port != RENDEZVOUS_PORT)
    return Port(port, False, printable(owner) if owner else None, ours)


def _parents() -> list[psutil.Process]:
    try:
        return psutil.Process().parents()
    except psutil.Error:
        return []


def _free_port(wanted: int, store_held: bool) -> int:
    """The wanted port or the next free one; for a random one of torchrun's, the customary port. 0: none."""
    first = DEFAULT_PORT if store_held and wanted >= HANDED_OUT_FROM else wanted
    return next((port for port in range(first, min(65536, first + 50)) if _can_bind(port)), 0)


def _can_bind(port: int) -> bool:
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            probe = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue  # a machine without IPv6
        with probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind((address, port))
                probe.listen(1)
            except OSError as error:
                if family == socket.AF_INET or error.errno == errno.EADDRINUSE:
                    return False
    return True


def _versions() -> dict[str, str]:
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "none"
    return {"python": platform.python_version(), "torch": torch, "bireme": __version__}


def _shared_memory() -> tuple[int | None, int | None]:
    try:
        state = os.statvfs("/dev/shm")
    except OSError:
        return None, None
    return state.f_blocks * state.f_frsize, state.f_bavail * state.f_frsize


def _open_files() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def _namespaces_error(environ: Mapping[str, str]) -> str | None:
    """Why `bireme nodes` cannot make real nodes here: it is tried."""
    if sys.platform != "linux":
        return "only Linux has network namespaces"
    if environ.get("BIREME_LINK") not in (None, "", UNSHAPED):
        return None  # this is a node of an emulated cluster
    from bireme.nodes import why_unshaped

    try:
        return why_unshaped()
    except Exception as error:  # a doctor lists what is wrong; it does not stop there
        return f"{type(error).__name__}: {error}"
