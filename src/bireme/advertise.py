"""By which address each rank lets the others reach it: chosen, told to gloo and NCCL, and tried beforehand."""

import logging
import os
import re
import secrets
import socket
import threading
from collections.abc import Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from bireme.errors import UserError
from bireme.meeting import Meeting
from bireme.network import (
    Choice,
    Endpoint,
    Interface,
    advertised_address,
    choose,
    interface_variables,
    interfaces,
    is_loopback,
    local_address_towards,
    named,
    resolve,
)
from bireme.text import name_ranks

log = logging.getLogger(__name__)

_CONNECT_S = 5.0
_MOST_CONNECTIONS = 32  # at once
_SHOWN_FAILURES = 3


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is, and how the others reach it. `host` is the same for ranks of one network stack."""

    node: str
    host: str
    address: str
    interface: str


def agree(meeting: Meeting, node: str, host: str, environ: MutableMapping[str, str] = os.environ) -> list[Place]:
    """Chooses this rank's interface, tries that the nodes reach each other, and sets the variables by which gloo,
    NCCL and TensorPipe take it. Collective; returns every rank's place. What is wrong is raised on every rank."""
    rank = meeting.launch.rank
    choice, problem = _attempt(lambda: _first_choice(meeting.launch.master_address, environ))
    shared = meeting.share("candidates", {"problem": problem, **asdict(_place(node, host, choice))}, _problems)
    places = [_read_place(each) for each in shared]
    firsts = {place.host: rank for rank, place in reversed(list(enumerate(places)))}  # one rank a host
    if len(firsts) > 1:
        if choice is not None and is_loopback(choice.address) and not environ.get("GLOO_SOCKET_IFNAME"):
            # The master's own name or address leads to this machine itself here: the others have a better one.
            others = [each.address for each in places if each.host != host and not is_loopback(each.address)]
            if others:
                choice, problem = _attempt(lambda: choose(interfaces(), local_address_towards(others[0])))
        places = _try(meeting, _place(node, host, choice), problem, firsts)
    assert choice is not None, "share would have raised its problem"
    for name, value in interface_variables(choice).items():
        environ[name] = environ.get(name) or value
    for warning in choice.warnings:
        log.warning("%s", warning)
    log.info("rank %d on node %s advertises address %s via interface %s", rank, node, choice.address, choice.interface)
    return places


def _attempt(function: Callable[[], Choice]) -> tuple[Choice | None, str | None]:
    try:
        return function(), None
    except UserError as error:
        return None, str(error)


def _first_choice(master_address: str, environ: MutableMapping[str, str]) -> Choice:
    """The user's interface, or the one by which this machine reaches the master."""
    here = interfaces()
    given = environ.get("GLOO_SOCKET_IFNAME")
    if given:
        found: list[Interface] = [named(here, each) for each in given.split(",")]
        return Choice(given, advertised_address(found[0]), ())
    try:
        routes = (local_address_towards(each) for each in resolve(master_address))
        return choose(here, next((each for each in routes if each), None))
    except OSError as error:
        raise UserError(f"MASTER_ADDR={master_address} cannot be resolved any more: {error}") from None


def _place(node: str, host: str, choice: Choice | None) -> Place:
    return Place(node, host, choice.address if choice else "", choice.interface if choice else "")


def _read_place(shared: dict[str, Any]) -> Place:
    return Place(shared["node"], shared["host"], shared["address"], shared["interface"])


def _problems(shared: list[dict[str, Any]]) -> str | None:
    """The problems of all ranks in one line, each once, with whose they are."""
    said = []
    for problem, node in dict.fromkeys((each["problem"], each["node"]) for each in shared if each["problem"]):
        ranks = [rank for rank, each in enumerate(shared) if (each["problem"], each["node"]) == (problem, node)]
        said.append(f"{name_ranks(ranks)} on node {node}: {problem}")
    return "; ".join(said) or None


# --- trying ------------------------------------------------------------------------------------------------------


def _try(meeting: Meeting, mine: Place, problem: str | None, firsts: dict[str, int]) -> list[Place]:
    """One rank a host connects to one rank on every other: both directions, on the ports that gloo would use."""
    rank = meeting.launch.rank
    first = firsts[mine.host] == rank
    listener: _Listener | None = None
    if first and problem is None:
        try:
            listener = _Listener(mine.address)
        except OSError as error:
            problem = f"cannot listen on {mine.address} (interface {mine.interface}): {error}"
    try:
        answer = {"problem": problem, **asdict(mine), "port": 0, "token": ""}
        if listener is not None:
            answer |= {"port": listener.port, "token": listener.token}
        shared = meeting.share("addresses", answer, _problems)
        failures: list[str] = []
        if first:
            targets = [(other, shared[other]) for host, other in firsts.items() if host != mine.host]
            with ThreadPoolExecutor(min(_MOST_CONNECTIONS, len(targets))) as threads:
                reasons = list(threads.map(lambda target: _reach(target[1], meeting.left_s()), targets))
            failures = [
                _blocked(mine.node, rank, other, place, reason)
                for (other, place), reason in zip(targets, reasons, strict=True)
                if reason
            ]
        meeting.share("tried", failures, lambda all_failures: _conclude([each for one in all_failures for each in one]))
    finally:
        if listener is not None:
            listener.close()
    return [_read_place(each) for each in shared]


class _Listener:
    """Answers every connection with a token, so that a caller knows whom it has reached."""

    def __init__(self, address: str):
        self.token = secrets.token_hex(8)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=1024)
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._serve, name="bireme-connect-back", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            with connection:
                try:
                    connection.sendall(self.token.encode())
                except OSError:
                    continue

    def close(self) -> None:
        # Closing alone would leave the thread in accept.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _reach(target: dict[str, Any], left_s: float) -> str | None:
    """Why the target cannot be reached; None when it can."""
    try:
        with socket.create_connection((target["address"], target["port"]), timeout=min(_CONNECT_S, left_s)) as there:
            said = b""
            while len(said) < len(target["token"]) and (more := there.recv(64)):
                said += more
    except OSError as error:
        return str(error)
    return None if said.decode(errors="replace") == target["token"] else "another program answers there"


def _blocked(node: str, rank: int, other: int, place: dict[str, Any], reason: str) -> str:
    where = Endpoint(place["address"], place["port"])
    hint = ", which only that node itself reaches" if is_loopback(place["address"]) else ""
    return (
        f"node {node} (rank {rank}) cannot connect to node {place['node']} (rank {other}) at {where}, "
        f"interface {place['interface']}{hint}: {reason}"
    )


def _conclude(failures: list[str]) -> str | None:
    if not failures:
        return None
    more = f"; and {len(failures) - _SHOWN_FAILURES} more" if len(failures) > _SHOWN_FAILURES else ""
    return (
        f"{'; '.join(failures[:_SHOWN_FAILURES])}{more}. Let the nodes open connections to each other on all ports "
        "(firewall), or set GLOO_SOCKET_IFNAME on each node to the interface that the others reach; `bireme doctor` "
        "tells which"
    )


def explain(error: Exception, rank: int, places: list[Place]) -> str:
    """One line for gloo's error while it connects the ranks: who, at which address, and what to try."""
    text = re.sub(r"\[/[^\]]*\] |Gloo connectFullMesh failed with ", "", str(error))  # a path in gloo's source
    reason = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)[:300]
    remotes = dict.fromkeys(re.findall(r"remote=\[(?:::ffff:)?([0-9A-Fa-f.:]+)\]:\d+", text))
    whom = []
    for address in remotes:
        owners = [owner for owner, place in enumerate(places) if place.address == address]
        node = f" on node {places[owners[0]].node}" if owners else ""
        whom.append(f"{name_ranks(owners)}{node} at {address}" if owners else address)
    mine = f"rank {rank} on node {places[rank].node}" if rank < len(places) else f"rank {rank}"
    to = f" to {', '.join(whom)}" if whom else " to the others"
    return (
        f"{mine} cannot connect{to} ({reason}): check the firewall between the nodes, set GLOO_SOCKET_IFNAME on each "
        "node to the interface that the others reach, and run `bireme doctor`"
    )
