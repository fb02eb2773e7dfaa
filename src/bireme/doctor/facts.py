"""What a node's doctor knows of its node, as JSON between nodes: what a peer sends is checked field by field."""

import types
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Union, get_args, get_origin, get_type_hints

from bireme.errors import UserError
from bireme.text import printable

DEFAULT_PORT = 29500  # torchrun's static rendezvous, and MASTER_PORT by custom
RENDEZVOUS_PORT = 29400  # torchrun's c10d
HANDED_OUT_FROM = 32768  # ports from here on are given to outgoing connections
LONGEST_TEXT = 400
MOST_ENTRIES = 4096


@dataclass(slots=True)
class Card:
    """A network interface."""

    name: str
    addresses: list[str]  # 10.0.0.1/24, fd00::2/64
    up: bool
    mtu_bytes: int


@dataclass(slots=True)
class Port:
    """A port that training will want."""

    port: int
    free: bool
    owner: str | None  # as in "python (pid 12: python train.py)"; None when it cannot be seen
    ours: bool  # held by this process's own launcher, as it should be


@dataclass(slots=True)
class Name:
    """What a name means on the node that looked it up."""

    name: str
    addresses: list[str]
    error: str | None = None


@dataclass(slots=True)
class Reach:
    """Whether a connection to the ephemeral port of a peer came through."""

    to: int  # index of the peer
    address: str
    local_address: str | None  # the address that the kernel used here
    error: str | None = None


@dataclass(slots=True)
class Clock:
    """This node's clock minus node 0's: the truth is at most `bound_s` away from `offset_s`."""

    offset_s: float
    bound_s: float


@dataclass(slots=True)
class Facts:
    """Everything that one node says; `reaches`, `peer_names` and `clock` come from meeting the others."""

    index: int
    name: str
    machine: str  # equal on two nodes that are one machine (one kernel, one network)
    launcher: str
    nodes: int
    world_size: int | None  # what the launcher says
    host: Name  # the host name and what it means here
    full_name: Name  # socket.getfqdn(): what torchrun's c10d announces
    master: Name | None  # MASTER_ADDR, or the first of --peers; None alone
    master_port: int
    address: str | None  # what this node advertises
    interface: str | None
    interface_error: str | None
    interface_warnings: list[str]
    cards: list[Card]
    variables: dict[str, str]  # those of the environment that matter here
    contradictions: list[str]
    hints: list[str]  # what looks odd in the environment, but contradicts nothing
    ports: list[Port]
    free_port: int  # one that nobody holds, for a command to copy
    versions: dict[str, str]  # python, torch, bireme
    cores: float  # usable: the smaller of the two below
    affinity_cores: int
    quota_cores: float | None
    ranks: int
    ranks_from: str
    threads: int
    threads_from: str
    workers: int
    shm_bytes: int | None
    shm_free_bytes: int | None
    schedstat: bool
    namespaces_error: str | None  # why `bireme nodes` cannot make real nodes here; None: it can
    open_files: int | None
    gpus: int
    link: str | None  # BIREME_LINK
    listens: dict[str, int] = field(default_factory=dict)  # address: port on which this node can be reached now
    pretended: list[str] = field(default_factory=list)
    clock: Clock | None = None
    reaches: list[Reach] = field(default_factory=list)
    peer_names: list[Name] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class Seen:
    """What a node learns from meeting the others."""

    reaches: list[Reach]
    peer_names: list[Name]


# What is divided by, or is a place in a list. Other whole numbers are not negative either.
_LEAST = {"ranks": 1, "threads": 1, "affinity_cores": 1, "nodes": 1}


def seen_from_json(value: Any) -> Seen:
    seen: Seen = _decode(Seen, value, "connections")
    return seen


def facts_from_json(value: Any) -> Facts:
    """UserError where a peer sent anything else than facts."""
    facts: Facts = _decode(Facts, value, "facts")
    return facts


def _decode(kind: Any, value: Any, where: str) -> Any:
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        inner = [each for each in get_args(kind) if each is not type(None)]
        return None if value is None else _decode(inner[0], value, where)
    if hasattr(kind, "__dataclass_fields__"):
        if not isinstance(value, dict):
            raise UserError(f"a peer's {where} is not an object")
        hints = get_type_hints(kind)
        names = [each.name for each in fields(kind)]
        if set(value) != set(names):
            odd = sorted(map(str, set(value) ^ set(names)))
            raise UserError(f"a peer's {where} has other fields than ours ({printable(', '.join(odd)[:100])})")
        return kind(**{name: _decode(hints[name], value[name], name) for name in names})
    if origin is list:
        if not isinstance(value, list) or len(value) > MOST_ENTRIES:
            raise UserError(f"a peer's {where} is not a list of at most {MOST_ENTRIES}")
        return [_decode(get_args(kind)[0], each, where) for each in value]
    if origin is dict:
        if not isinstance(value, dict) or len(value) > MOST_ENTRIES:
            raise UserError(f"a peer's {where} is not a table of at most {MOST_ENTRIES}")
        return {_decode(str, name, where): _decode(get_args(kind)[1], each, where) for name, each in value.items()}
    if kind is str:
        if not isinstance(value, str):
            raise UserError(f"a peer's {where} is not text")
        return printable(value[:LONGEST_TEXT])
    if kind is bool:
        fits = isinstance(value, bool)
    elif kind is int:
        fits = isinstance(value, int) and not isinstance(value, bool) and value >= _LEAST.get(where, 0)
    else:
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e18
        fits = fits and (where != "cores" or value > 0)
    if not fits:
        raise UserError(f"a peer's {where} is not {'true or false' if kind is bool else 'a number'}")
    return value
