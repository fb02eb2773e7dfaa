"""Joins the ranks of a job: who am I, where is everybody, which group do we train on; and leaves again."""

import logging
import os
import platform
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bireme.channel import Channel
from bireme.errors import SharedError, UserError

log = logging.getLogger(__name__)

_SAY_AFTER_S = 5.0
JOIN_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Launch:
    """What the launcher's environment says: which rank of how many, and where they meet."""

    rank: int
    size: int
    local_rank: int
    master_address: str  # empty: one process, no meeting point
    master_port: int
    agent_store: bool  # torchrun's agent already hosts the store

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "Launch":
        """UserError, naming both sides, where the variables contradict each other."""
        if "RANK" not in environ and "NODE_RANK" in environ and "NNODES" in environ:
            rank, size = _integer(environ, "NODE_RANK"), _integer(environ, "NNODES")
            names = ("NODE_RANK", "NNODES")
            local_rank = 0
        elif "RANK" in environ or "WORLD_SIZE" in environ:
            for present, absent in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
                if absent not in environ:
                    raise UserError(
                        f"{present}={environ[present]} is set but {absent} is not: "
                        f"start with torchrun, or unset {present}"
                    )
            rank, size = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
            names = ("RANK", "WORLD_SIZE")
            local_rank = _integer(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else rank
        else:
            return cls(0, 1, 0, "", 0, False)
        if not 0 <= rank < size:
            raise UserError(f"{names[0]}={rank} does not fit {names[1]}={size}: ranks count from 0 to {size - 1}")
        local_size = _integer(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else size
        if not 0 <= local_rank < local_size <= size:
            raise UserError(
                f"LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={local_size} and {names[1]}={size} contradict each other"
            )
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not environ.get(name):
                raise UserError(f"{names[0]}={rank} is set but {name} is not: start with torchrun, or set {name}")
        port = _integer(environ, "MASTER_PORT")
        if not 0 < port < 65536:
            raise UserError(f"MASTER_PORT={port} is not a port: choose one from 1024 to 65535")
        agent_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(rank, size, local_rank, environ["MASTER_ADDR"], port, agent_store)


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise UserError(f"{name}={environ[name]!r} is not a whole number") from None


@dataclass(slots=True)
class World:
    """This process's place among all ranks. `ranks` and `nodes` are known to every rank."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    channel: Channel
    ranks: list[dict[str, Any]]  # by rank: node, local_rank, host, pid, cores, threads, device
    nodes: list[dict[str, Any]]  # name, ranks

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
        problems = self.channel.all_gather(problem)
        said = []
        for message in dict.fromkeys(each for each in problems if each is not None):
            ranks = [rank for rank, each in enumerate(problems) if each == message]
            said.append(message if len(ranks) == self.size else f"{name_ranks(ranks)}: {message}")
        if said:
            raise SharedError("; ".join(said))

    def leave(self) -> None:
        """Destroys the process groups. Never raises: at the end there is nobody left to help."""
        if dist.is_initialized():
            try:
                dist.destroy_process_group()
            except Exception as error:
                log.debug("the process group did not end cleanly: %s", error)


def name_ranks(ranks: list[int]) -> str:
    """``rank 3`` or ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def usable_cores() -> list[int]:
    """The core numbers that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def join(device: str = "cpu") -> World:
    """Makes the process group: gloo on CPU, NCCL beside it on GPUs. Also for one process without a launcher.

    UserError, naming the address and the missing ranks, when the ranks do not find each other in JOIN_TIMEOUT_S.
    """
    launch = Launch.from_environment(os.environ)
    chosen = torch.device(f"cuda:{launch.local_rank}" if device == "cuda" else device)
    if chosen.type == "cuda" and launch.local_rank >= torch.cuda.device_count():
        raise UserError(
            f"local rank {launch.local_rank} has no GPU: there are {torch.cuda.device_count()} here; "
            "start fewer ranks on this node, or use --device cpu"
        )
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)  # before anything else touches a GPU: it would land on GPU 0
    store = _meet(launch, JOIN_TIMEOUT_S)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo", store=store, rank=launch.rank, world_size=launch.size
    )
    return here(launch.local_rank, chosen)


def here(local_rank: int, device: torch.device) -> World:
    """The world of a process group that is there already."""
    channel = Channel()
    ranks, nodes = introduce(channel, local_rank, device)
    return World(channel.rank, channel.size, local_rank, device, channel, ranks, nodes)


def introduce(
    channel: Channel, local_rank: int | None = None, device: torch.device | None = None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Every rank says who and where it is; collective. Returns ranks and nodes, the same everywhere."""
    if local_rank is None:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return topology(channel.all_gather(_identity(local_rank, device or torch.device("cpu"))))


def _meet(launch: Launch, timeout_s: float) -> Any:
    """The store where all ranks are present."""
    if not launch.master_address:
        return dist.HashStore()
    deadline = time.monotonic() + timeout_s
    where = f"{launch.master_address}:{launch.master_port}"
    hosts_store = launch.rank == 0 and not launch.agent_store
    if not hosts_store:
        _await_listener(launch, where, deadline, timeout_s)
    try:
        socket.getaddrinfo(launch.master_address, launch.master_port)
    except OSError as error:
        raise UserError(f"MASTER_ADDR={launch.master_address} cannot be resolved: {error}") from None
    try:
        store = dist.TCPStore(
            launch.master_address,
            launch.master_port,
            launch.size,
            is_master=hosts_store,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, ValueError) as error:
        if "EADDRINUSE" in str(error) or "in use" in str(error):
            raise UserError(
                f"port {launch.master_port} on {launch.master_address} is in use: choose another MASTER_PORT"
            ) from None
        raise UserError(f"rank {launch.rank} cannot meet the others at {where}: {str(error).splitlines()[0]}") from None
    # One attempt of a restarted job must not see the keys of the one before.
    prefixed = dist.PrefixStore(f"bireme/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    _roll_call(prefixed, launch, where, deadline, timeout_s)
    prefixed.set_timeout(timedelta(seconds=1800))
    return prefixed


def _await_listener(launch: Launch, where: str, deadline: float, timeout_s: float) -> None:
    """Waits until somebody listens at the meeting point. (The store's own client retries with pages of C++ frames.)"""
    say_at = time.monotonic() + _SAY_AFTER_S
    while True:
        try:
            socket.create_connection((launch.master_address, launch.master_port), timeout=_SAY_AFTER_S).close()
            return
        except OSError as error:
            now = time.monotonic()
            if now > deadline:
                raise UserError(
                    f"rank {launch.rank} cannot reach rank 0 at {where} in {timeout_s:.0f} s ({error}): "
                    "check MASTER_ADDR and MASTER_PORT, and that rank 0 was started"
                ) from None
            if now > say_at:
                say_at = now + _SAY_AFTER_S
                print(f"rank {launch.rank} waits for rank 0 at {where} ({error})", file=sys.stderr)
        time.sleep(0.1)


def _roll_call(store: Any, launch: Launch, where: str, deadline: float, timeout_s: float) -> None:
    """Waits until every rank has come: by a counter, so that only a missing rank costs a question for each rank."""
    store.set(f"here/{launch.rank}", "")
    arrived = store.add("arrived", 1)
    say_at = time.monotonic() + _SAY_AFTER_S
    pause_s = 0.01
    while arrived < launch.size:
        now = time.monotonic()
        if now > min(deadline, say_at):
            missing = name_ranks([rank for rank in range(launch.size) if not store.check([f"here/{rank}"])])
            if now > deadline:
                raise UserError(
                    f"{missing} of {launch.size} did not come to {where} in {timeout_s:.0f} s: "
                    "was every rank started with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT?"
                )
            say_at = now + _SAY_AFTER_S
            print(f"rank {launch.rank} waits for {missing} at {where}", file=sys.stderr)
        time.sleep(pause_s)
        pause_s = min(0.5, pause_s * 1.3)
        arrived = store.add("arrived", 0)


def printable(text: str) -> str:
    """Text without control characters or bytes that are not UTF-8: they are written as escapes."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _identity(local_rank: int, device: torch.device) -> dict[str, Any]:
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot_id = platform.node()
    return {
        # The name is shown and stored: whatever cannot be is escaped.
        "node": printable(os.environ.get("BIREME_NODE") or socket.gethostname()),
        "host": socket.gethostname(),
        "boot_id": boot_id,
        "local_rank": local_rank,
        "pid": os.getpid(),
        "cores": usable_cores(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
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
