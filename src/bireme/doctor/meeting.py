"""Who takes part and where they meet: from --peers, or from what a launcher put into the environment."""

import hashlib
import ipaddress
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import psutil

from bireme import environment
from bireme.doctor.board import PORTS_TRIED, Meeting
from bireme.doctor.facts import DEFAULT_PORT
from bireme.doctor.machine import card_addresses, is_mine, look_up_all, outward_address
from bireme.errors import UserError
from bireme.network import Endpoint, is_loopback


@dataclass(frozen=True, slots=True)
class Plan:
    """One doctor's part. `how`: "alone", "peers" (by hand), "environment" (a launcher says where) or "agent" (torchrun
    holds a store at the meeting point, through which the board is found)."""

    how: str
    meeting: Meeting
    master: str | None  # host of the meeting point, as the user or the launcher wrote it, without brackets
    master_port: int  # what training will use
    board_ports: list[int]
    launcher: str
    world_size: int | None
    speaks: bool  # one doctor a node is enough: the other ranks of a node are silent
    peers: list[str] = field(default_factory=list)  # names by node, where the user gave them
    entries: list[Endpoint] = field(default_factory=list)  # the same as endpoints
    contradictions: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)

    def label(self, index: int) -> str:
        return self.peers[index] if index < len(self.peers) else f"node {index}"


def make_plan(environ: Mapping[str, str], peers: str | None, port: int | None) -> Plan:
    """UserError for options that are no peers or no port, or when it cannot be told which of them this machine is."""
    if port is not None and not 0 < port < 65536:
        raise UserError(f"--port {port} is not a port: choose one from 1024 to 65535")
    contradictions = environment.contradictions(environ)
    hint = environment.forgotten_launcher(environ)
    hints = [hint] if hint else []
    if peers is not None:
        return _by_hand(environ, peers, port, contradictions, hints)
    given_port = _port_of(environ)
    training_port = port or given_port or DEFAULT_PORT
    launch, run_id = _launch(environ)
    if launch is None or launch.num_nodes < 2:
        meeting = Meeting(0, 1, "")
        launcher = launch.launcher if launch else "none"
        world_size = launch.size if launch and launch.launcher != "none" else None
        speaks = launch is None or launch.local_rank == 0
        return Plan(
            "alone", meeting, None, training_port, [], launcher, world_size, speaks, [], [], contradictions, hints
        )
    master = host_of(launch.master_address)
    job = _job(f"{launch.num_nodes} {launch.master_port} {run_id}")
    return Plan(
        how="agent" if launch.agent_store else "environment",
        meeting=Meeting(launch.node_rank, launch.num_nodes, job),
        master=master,
        master_port=port or launch.master_port,
        board_ports=[0] if launch.agent_store else _tried(launch.master_port),
        launcher=launch.launcher,
        world_size=launch.size if "WORLD_SIZE" in environ or launch.launcher == "slurm" else None,
        speaks=launch.local_rank == 0,
        contradictions=contradictions,
        hints=hints,
    )


def _launch(environ: Mapping[str, str]) -> tuple[environment.Launch | None, str]:
    """Where the launcher lets us meet, and the job's id. What Slurm contradicts still counts: the others should hear
    of the contradiction."""
    without_slurm = {name: value for name, value in environ.items() if not name.startswith("SLURM_")}
    for each in (environ, without_slurm):
        try:
            return environment.Launch.from_environment(each), environment.run_id(each)
        except UserError:
            pass  # it is in `contradictions` already
    return None, ""


def _by_hand(
    environ: Mapping[str, str], peers: str, port: int | None, contradictions: list[str], hints: list[str]
) -> Plan:
    words = [each.strip() for each in peers.split(",") if each.strip()]
    default_port = port or _port_of(environ) or DEFAULT_PORT
    endpoints = [Endpoint.parse(word, default_port) for word in words]
    if len(endpoints) < 2:
        raise UserError(f"--peers {peers!r} names fewer than two nodes: name all of them, this one too")
    if len(set(endpoints)) < len(endpoints):
        raise UserError(f"--peers {peers!r} names a node twice")
    index = which_am_i(environ, [each.host for each in endpoints])
    job = _job(" ".join(map(str, endpoints)))
    first = endpoints[0]
    return Plan(
        how="peers",
        meeting=Meeting(index, len(endpoints), job),
        master=first.host,
        master_port=first.port,
        board_ports=_tried(first.port),
        launcher="none",
        world_size=None,
        speaks=True,
        peers=[each.host if _same_host_once(each, endpoints) else str(each) for each in endpoints],
        entries=endpoints,
        contradictions=contradictions,
        hints=hints,
    )


def which_am_i(environ: Mapping[str, str], hosts: list[str]) -> int:
    """The place of this machine among the peers: by address, or by its host name; NODE_RANK settles what is unclear."""
    own_name = socket.gethostname()
    known = look_up_all(list(dict.fromkeys(hosts)))
    mine = [
        index
        for index, host in enumerate(hosts)
        if host.casefold() == own_name.casefold() or any(is_mine(address) for address in known[host].addresses)
    ]
    by_name = [index for index in mine if hosts[index].casefold() == own_name.casefold()]
    if len(mine) > 1 and len(by_name) == 1:
        return by_name[0]
    given = environ.get("NODE_RANK", "")
    if given.isascii() and given.isdigit() and (int(given) in mine or (not mine and int(given) < len(hosts))):
        return int(given)
    if len(mine) == 1:
        return mine[0]
    if mine:
        found = " and ".join(hosts[index] for index in mine)
        raise UserError(f"--peers: {found} are both this machine: say which one this is with NODE_RANK={mine[0]}")
    unknown = [f"{name.name} ({name.error})" for name in known.values() if name.error]
    also = f"; not known here: {', '.join(unknown)}" if unknown else ""
    raise UserError(
        f"--peers: none of {', '.join(hosts)} is this machine ({own_name}, {outward_address() or 'no address'}){also}: "
        "say which one it is with NODE_RANK=0, or correct the list"
    )


def host_of(text: str) -> str:
    """The host of a MASTER_ADDR, also where brackets or a port are stuck to it (a check says that)."""
    try:
        return Endpoint.parse(text, 1).host
    except UserError:
        return text


def addresses_to_listen_on(plan: Plan, master_addresses: list[str]) -> list[str]:
    """Where node 0 can be reached: at the meeting point, and where that is a name, at all its cards: the name may
    mean another of them to the others (a hosts file, a VPN)."""
    mine = [each for each in master_addresses if is_mine(each)]
    if not _numeric_loopback(plan) and not _is_number(plan.master or ""):
        others = [outward_address(), *card_addresses()]
        mine += [each for each in dict.fromkeys(others) if each is not None and each not in mine]
    return mine


def _is_number(host: str) -> bool:
    try:
        return not is_loopback(str(ipaddress.ip_address(host)))
    except ValueError:
        return False


def _numeric_loopback(plan: Plan) -> bool:
    return all(is_loopback(host) or host == "localhost" for host in (plan.peers or [plan.master or ""]))


def _same_host_once(endpoint: Endpoint, endpoints: list[Endpoint]) -> bool:
    return sum(each.host == endpoint.host for each in endpoints) == 1


def _port_of(environ: Mapping[str, str]) -> int | None:
    text = environ.get("MASTER_PORT", "")
    return int(text) if text.isascii() and text.isdigit() and 0 < int(text) < 65536 else None


def _tried(port: int) -> list[int]:
    return [each for each in range(port, port + PORTS_TRIED) if each < 65536]


def _job(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def process_age_s() -> float:
    """How long this process has been running: the promise of an end in time counts from its start."""
    try:
        return min(max(0.0, time.time() - psutil.Process(os.getpid()).create_time()), 8.0)
    except psutil.Error:
        return 0.0
