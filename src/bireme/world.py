"""Joins the ranks of a job: who am I, where is everybody, which group do we train on; and leaves again."""

import logging
import os
import platform
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bireme.advertise import Place, agree, explain
from bireme.channel import COLLECTIVE_TIMEOUT_S, Channel, set_group_timeout
from bireme.cores import usable_cores
from bireme.environment import Launch, forgotten_launcher
from bireme.errors import UserError
from bireme.meeting import Meeting
from bireme.neighbours import Neighbours
from bireme.network import answers, boot_id, network_stack
from bireme.text import listed, printable

log = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 30.0


@dataclass(slots=True)
class World:
    """This process's place among all ranks. `ranks` and `nodes` are known to every rank."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    channel: Channel
    ranks: list[dict[str, Any]]  # by rank: node, local_rank, host, pid, cores, device, address, interface
    nodes: list[dict[str, Any]]  # name, ranks
    meeting: Meeting | None = None  # rank 0 keeps the store open with it
    neighbours: Neighbours = field(init=False)

    def __post_init__(self) -> None:
        self.neighbours = Neighbours(self.ranks, self.rank)

    @property
    def node(self) -> str:
        return str(self.ranks[self.rank]["node"])

    @property
    def first_on_node(self) -> bool:
        """Whether this rank does what one rank a node has to do."""
        return all(other["rank"] >= self.rank for other in self.ranks if other["node"] == self.node)

    @property
    def local_size(self) -> int:
        return sum(other["node"] == self.node for other in self.ranks)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is wrong on one rank in this block is raised on every rank, with the ranks it comes from.

        Nobody waits for a rank that has given up, and the user reads each problem once.
        """
        problem: str | None = None
        try:
            yield
        except UserError as error:
            problem = str(error)
        self.raise_together(problem)

    def raise_together(self, problem: str | None) -> None:
        self.channel.raise_together(problem)

    def agree(self, values: Mapping[str, Any]) -> None:
        """SharedError naming the first of these settings (what JSON can hold) that is another on some rank: the ranks
        would wait for each other's next collective, or train something else. Collective."""
        self.channel.agree(values)

    def set_timeout(self, timeout_s: float) -> None:
        """How long a collective, or a message on the channel, may take from now on; new groups need it said again."""
        self.channel.timeout_s = timeout_s
        if self.size > 1:
            set_group_timeout(timeout_s)

    def leave(self) -> None:
        """Destroys the process groups. Never raises: at the end there is nobody left to help."""
        if dist.is_initialized():
            try:
                dist.destroy_process_group()
            except Exception as error:
                log.debug("the process group did not end cleanly: %s", error)


# How gloo says that the other end of a connection is gone.
_LOST_PEER = re.compile("closed by peer|reset by peer|broken pipe", re.IGNORECASE)
# gloo has two words for its timeout: "Timed out waiting ..." for what was waited for, and "Application timeout caused
# pair closure" for what was queued behind it, whichever of the two threads reports first.
_SILENT_PEER = re.compile("no answer from the other ranks|timed out|timeout caused", re.IGNORECASE)


class PeerLost(UserError):
    """Training ended because another rank did; that rank says why."""

    exit_code = 1


@contextmanager
def peer_lost_in_one_line(
    world: World, check_for_stop: Callable[[], None] = lambda: None, hint: str = "see the run's logs/rank-*.log"
) -> Iterator[None]:
    """Turns the backend's error about a closed connection into PeerLost, or into the stop that both were asked for;
    and what does not fit into memory into a UserError."""
    try:
        yield
    except MemoryError as error:
        raise UserError(f"not enough memory for these sizes: {error}") from None
    except RuntimeError as error:
        if "not enough memory" in str(error) or "can't allocate memory" in str(error):
            raise UserError(f"not enough memory for these sizes: {str(error).splitlines()[0]}") from None
        check_for_stop()
        if _SILENT_PEER.search(str(error)):
            raise PeerLost(
                f"rank {world.rank} on {world.node} stopped: no answer from the other ranks; {_who_is_silent(world)} "
                f"({hint})"
            ) from error
        if _LOST_PEER.search(str(error)):
            who = world.neighbours.gone() or "another rank has left"
            raise PeerLost(f"rank {world.rank} on {world.node} stopped: {who} ({hint})") from error
        raise


def _who_is_silent(world: World) -> str:
    """Which nodes' networks do not answer: a machine that runs refuses a connection at once."""
    others = {rank["node"]: rank.get("address") for rank in world.ranks if rank["node"] != world.node}
    silent = listed([f"{node} ({address})" for node, address in others.items() if address and not answers(address)])
    if silent:
        return f"{silent} cannot be reached: is the machine up, its cable plugged in, and no firewall between?"
    return "every node's network answers, so a process hangs or was stopped"


def join(device: str = "cpu") -> World:
    """Makes the process group: gloo on CPU, NCCL beside it on GPUs. Also for one process without a launcher.

    UserError, naming the address and the missing ranks, when the ranks do not find each other in time (30 seconds,
    or BIREME_JOIN_TIMEOUT_S).
    """
    launch = Launch.from_environment(os.environ)
    timeout_s = join_timeout_s(os.environ)
    forgotten = forgotten_launcher(os.environ)
    if forgotten:
        log.warning("%s", forgotten)
    chosen = torch.device(f"cuda:{launch.local_rank}" if device == "cuda" else device)
    if chosen.type == "cuda" and launch.local_rank >= torch.cuda.device_count():
        raise UserError(
            f"local rank {launch.local_rank} has no GPU: there are {torch.cuda.device_count()} here; "
            "start fewer ranks on this node, or use --device cpu"
        )
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)  # before anything else touches a GPU: it would land on GPU 0
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    if not launch.master_address:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return here(launch.local_rank, chosen)
    meeting = Meeting(launch, timeout_s, f"process {os.getpid()} on node {node_name()}")
    places = agree(meeting, node_name(), network_stack()) if launch.size > 1 else []
    _init_process_group(backend, meeting, places)
    try:
        world = here(launch.local_rank, chosen, places[launch.rank] if places else None, _connect_s(meeting))
    except RuntimeError as error:  # somebody was lost in between
        raise UserError(explain(error, launch.rank, places)) from None
    world.meeting = meeting
    return world


def join_timeout_s(environ: Mapping[str, str]) -> float:
    """How long ranks wait for each other before training."""
    given = environ.get("BIREME_JOIN_TIMEOUT_S")
    return positive_seconds("BIREME_JOIN_TIMEOUT_S", given) if given else JOIN_TIMEOUT_S


def positive_seconds(name: str, given: str) -> float:
    """The number that a variable gives. UserError for what is none, or no time that anybody waits."""
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 1e6:
        raise UserError(f"{name}={given!r} is not a number of seconds above 0")
    return seconds


def _connect_s(meeting: Meeting) -> float:
    """gloo waits up to five times as long for a peer that does not come."""
    return max(5.0 + 0.02 * meeting.launch.size, meeting.left_s() / 5)


def _init_process_group(backend: str, meeting: Meeting, places: list[Place]) -> None:
    """With a short timeout while the ranks connect, and the usual one for what they do then."""
    launch = meeting.launch
    connect = timedelta(seconds=_connect_s(meeting))
    meeting.store.set_timeout(connect)
    try:
        dist.init_process_group(backend, store=meeting.store, rank=launch.rank, world_size=launch.size, timeout=connect)
    except RuntimeError as error:
        log.debug("the process group could not be made: %s", error)
        raise UserError(explain(error, launch.rank, places)) from None
    meeting.store.set_timeout(timedelta(seconds=COLLECTIVE_TIMEOUT_S))
    set_group_timeout(COLLECTIVE_TIMEOUT_S)


def here(local_rank: int, device: torch.device, place: Place | None = None, connect_s: float | None = None) -> World:
    """The world of a process group that is there already."""
    channel = Channel(connect_s=connect_s)
    ranks, nodes = introduce(channel, local_rank, device, place)
    return World(channel.rank, channel.size, local_rank, device, channel, ranks, nodes)


def introduce(
    channel: Channel,
    local_rank: int | None = None,
    device: torch.device | None = None,
    place: Place | None = None,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Every rank says who and where it is; collective. Returns ranks and nodes, the same everywhere."""
    if local_rank is None:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return topology(channel.all_gather(_identity(local_rank, device or torch.device("cpu"), place)))


def node_name() -> str:
    """This machine's name; what cannot be shown and stored is escaped."""
    return printable(os.environ.get("BIREME_NODE") or socket.gethostname())


def _identity(local_rank: int, device: torch.device, place: Place | None = None) -> dict[str, Any]:
    return {
        "node": node_name(),
        "host": socket.gethostname(),
        "boot_id": boot_id(),
        "local_rank": local_rank,
        "pid": os.getpid(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "address": place.address if place else None,
        "interface": place.interface if place else None,
    }


def topology(identities: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Ranks and nodes from what every rank says of itself (pure). Two machines of one name are told apart."""
    nodes: dict[tuple[str, str, str], dict[str, Any]] = {}
    names: set[str] = set()
    ranks = []
    for rank, identity in enumerate(identities):
        key = (identity["node"], identity["host"], identity["boot_id"])
        if key not in nodes:
            name, number = identity["node"], 1
            while name in names:
                number += 1
                name = f"{identity['node']}-{number}"
            names.add(name)
            nodes[key] = {"name": name, "ranks": []}
        nodes[key]["ranks"].append(rank)
        described = {name: value for name, value in identity.items() if name != "boot_id"}
        ranks.append({"rank": rank, **described, "node": nodes[key]["name"]})
    return ranks, list(nodes.values())
