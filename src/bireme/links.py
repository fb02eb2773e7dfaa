"""What a measured link is: a table of times by group, operation and size; saved, and checked when read. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from bireme.environment import UNSHAPED
from bireme.errors import UserError, nearest
from bireme.ledger import bus_bandwidth_factor
from bireme.link_curve import Curve, Fit
from bireme.link_pairs import Pair, blame, slow_pairs
from bireme.record import write_json_atomic
from bireme.run_reader import is_number

FORMAT = "bireme-links"
VERSION = 1
_MOST_BYTES = 64 << 20
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
WORLD, INTRA_NODE, INTER_NODE = GROUPS = ("world", "intra-node", "inter-node")
SMALLEST_BYTES = 1024

# What is called a time or a size in a file, so that nothing computed from it overflows.
_TIMES_S = (1e-9, 1e7)
_BYTES = (1, 1 << 60)
# Above this rate gloo on one core is the limit, not the link: nothing can be concluded from falling short of it.
_CHECKED_LINK_BIT_PER_S = 1e9


@dataclass(frozen=True, slots=True)
class Timing:
    """What one operation of one size took on one group: over repetitions, each the maximum over the ranks."""

    ranks: int
    bytes: int
    repetitions: int
    median_s: float
    p10_s: float
    p90_s: float
    node: str | None = None  # whose group it was, where every node has one

    def bandwidths(self, operation: str) -> tuple[float, float]:
        """Algorithm and bus bandwidth in bytes per second."""
        algorithm = self.bytes / self.median_s
        return algorithm, algorithm * bus_bandwidth_factor(operation, self.ranks)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One cell of the table. Where several nodes measured their own group, `timing` is the slowest node's."""

    group: str
    operation: str
    nominal_bytes: int  # the size asked for; `timing.bytes` is the next that the ranks can share evenly
    timing: Timing | None  # None: not measured, and `reason` says why
    reason: str | None = None
    by_node: tuple[Timing, ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """Which ranks were measured together. Groups of the same ranks as another are measured once: `same_as`."""

    name: str
    members: tuple[tuple[int, ...], ...]
    same_as: str | None = None
    reason: str | None = None  # why there is no such group here


@dataclass(frozen=True)
class LinkTable:
    """Everything that one `bireme links` measured. `facts`: versions, backend, device, link, budget."""

    facts: dict[str, Any]
    nodes: list[dict[str, Any]]
    ranks: list[dict[str, Any]]
    groups: list[Group]
    measurements: list[Measurement]
    pairs: list[Pair]
    curves: dict[tuple[str, str], Curve] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        points: dict[tuple[str, str], list[tuple[int, float]]] = {}
        for each in self.measurements:
            if each.timing is not None:
                points.setdefault((each.group, each.operation), []).append((each.timing.bytes, each.timing.median_s))
        object.__setattr__(self, "curves", {key: Curve(values) for key, values in points.items()})

    def curve(self, operation: str, group: str = WORLD) -> Curve:
        """UserError, naming what there is, where it was not measured."""
        for name, known, what in ((operation, OPERATIONS, "operation"), (group, GROUPS, "group")):
            if name not in known:
                raise UserError(f"links have no {what} {name!r}{nearest(name, known)}: {', '.join(known)}")
        found = next((each for each in self.groups if each.name == group), None)
        measured_as = found.same_as or group if found else group
        curve = self.curves.get((measured_as, operation))
        if curve is None:
            why = found.reason if found and found.reason else "it was not reached in the time given"
            raise UserError(f"{operation} on group {group} was not measured: {why}")
        return curve

    def time_s(self, operation: str, bytes: float, group: str = WORLD) -> float:
        """Seconds that the operation takes; the size is counted as in docs/links.md."""
        return self.curve(operation, group).time_s(bytes)

    @property
    def link(self) -> str | None:
        return self.facts.get("link")

    def slow(self) -> dict[tuple[str, str], str]:
        """Slow directions between nodes, and against what."""
        if self.link == UNSHAPED:  # there is no link: processes on loopback differ by chance
            return {}
        return slow_pairs(self.pairs, checked_link_rate(self.link))

    def as_dict(self) -> dict[str, Any]:
        """The content of links.json (docs/links.md)."""
        slow = self.slow()
        return {
            "format": FORMAT,
            "version": VERSION,
            **self.facts,
            "nodes": self.nodes,
            "ranks": self.ranks,
            "groups": [
                {"name": g.name, "members": g.members, "same_as": g.same_as, "reason": g.reason} for g in self.groups
            ],
            "measurements": [_measurement_dict(each) for each in self.measurements],
            "pairs": [
                {
                    "from": pair.source,
                    "to": pair.target,
                    "bytes": pair.bytes,
                    "repetitions": pair.repetitions,
                    "median_s": pair.median_s,
                    "rate_bit_per_s": pair.rate_bit_per_s,
                    "previous_bit_per_s": pair.previous_bit_per_s,
                    "slow": slow.get((pair.source, pair.target)),
                    "reason": pair.reason,
                }
                for pair in self.pairs
            ],
            "slow_because": blame(self.pairs, slow),
            "fit": {
                group: {
                    operation: _fit_dict(curve.fit)
                    for (other, operation), curve in self.curves.items()
                    if other == group
                }
                for group in dict.fromkeys(group for group, _ in self.curves)
            },
        }

    def save(self, path: Path) -> None:
        """Raises OSError. A file that is there is replaced, as a whole."""
        write_json_atomic(path, self.as_dict())

    @classmethod
    def load(cls, path: Path) -> "LinkTable":
        """UserError, in one line, for what is not a whole and sound links.json of this version or an earlier one."""
        try:
            if path.exists() and not path.is_file():
                raise UserError(f"{path} is not a file: give one that `bireme links` wrote")
            if path.exists() and path.stat().st_size > _MOST_BYTES:
                raise UserError(f"{path} is larger than {_MOST_BYTES >> 20} MiB: it was not written by `bireme links`")
            content = orjson.loads(path.read_bytes())
        except FileNotFoundError:
            raise UserError(f"{path} does not exist: `bireme links` measures and writes it") from None
        except orjson.JSONDecodeError as error:
            raise UserError(f"{path} is damaged: {error}") from None
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise UserError(f'{path} was not written by `bireme links`: it lacks "format": "{FORMAT}"')
        version = content.get("version")
        if type(version) is not int or version < 1:
            raise UserError(f"{path}: field 'version' is not a version number")
        if version > VERSION:
            raise UserError(f"{path} has version {version}, this bireme reads up to {VERSION}: install a newer bireme")
        try:
            return _table(content)
        except _Wrong as wrong:
            raise UserError(f"{path}: {wrong}; not written by `bireme links`, or damaged") from None


def checked_link_rate(link: Any) -> float | None:
    """The rate in bit/s that an emulated link is said to have, where a measurement can be held against it."""
    if not isinstance(link, str):
        return None
    from bireme.nodes import parse_rate

    try:
        rate = parse_rate(link)
    except (UserError, OverflowError):  # `unshaped`, or a file from elsewhere
        return None
    return None if rate is None or rate > _CHECKED_LINK_BIT_PER_S else float(rate)


def _fit_dict(fit: Fit | None) -> dict[str, Any]:
    if fit is None:
        return {"alpha_s": None, "beta_s_per_byte": None, "reason": "less than two sizes were measured"}
    return {
        "alpha_s": fit.alpha_s,
        "beta_s_per_byte": fit.beta_s_per_byte,
        "max_relative_error": fit.max_relative_error,
        "median_relative_error": fit.median_relative_error,
    }


def _timing_dict(timing: Timing, operation: str) -> dict[str, Any]:
    algorithm, bus = timing.bandwidths(operation)
    return {
        "ranks": timing.ranks,
        "bytes": timing.bytes,
        "repetitions": timing.repetitions,
        "median_s": timing.median_s,
        "p10_s": timing.p10_s,
        "p90_s": timing.p90_s,
        "algorithm_bandwidth_bytes_per_s": algorithm,
        "bus_bandwidth_bytes_per_s": bus,
        "node": timing.node,
    }


_NO_TIMING: dict[str, Any] = dict.fromkeys(_timing_dict(Timing(2, 1, 1, 1.0, 1.0, 1.0), OPERATIONS[0]))


def _measurement_dict(each: Measurement) -> dict[str, Any]:
    return {
        "group": each.group,
        "operation": each.operation,
        "nominal_bytes": each.nominal_bytes,
        **(_NO_TIMING if each.timing is None else _timing_dict(each.timing, each.operation)),
        "reason": each.reason,
        "by_node": [_timing_dict(timing, each.operation) for timing in each.by_node],
    }


# --- reading: nothing in a file is trusted, and what can be computed is computed anew --------------------------------


class _Wrong(Exception):
    """What is wrong with a file's content."""


_TEXT_FACTS = ("bireme", "torch", "backend", "device", "link", "measured_utc")
_NUMBER_FACTS = ("seconds", "max_bytes", "elapsed_s")


def _table(content: dict[str, Any]) -> LinkTable:
    facts: dict[str, Any] = {name: _text(content, name, name, optional=name == "link") for name in _TEXT_FACTS}
    facts |= {name: _number(content, name, name, 0.0, 1e18) for name in _NUMBER_FACTS}
    ranks = [dict(entry) for _, entry in _entries(content, "ranks")]
    nodes = []
    for where, entry in _entries(content, "nodes"):
        members = _ranks(entry.get("ranks"), f"{where}.ranks", len(ranks))
        nodes.append({"name": _text(entry, "name", f"{where}.name"), "ranks": members})
    names = [str(node["name"]) for node in nodes]
    if len(set(names)) < len(names) or sorted(r for node in nodes for r in node["ranks"]) != list(range(len(ranks))):
        raise _Wrong("field 'nodes' does not hold every rank exactly once, under a name of its own")
    groups = [_group(entry, where, len(ranks)) for where, entry in _entries(content, "groups")]
    measurements = [_measurement(entry, where, names) for where, entry in _entries(content, "measurements")]
    pairs = [_pair(entry, where, names) for where, entry in _entries(content, "pairs")]
    keys: list[Any] = [(each.group, each.operation, each.nominal_bytes) for each in measurements]
    keys += [(each.group, each.operation, "bytes", each.timing.bytes) for each in measurements if each.timing]
    keys += [(each.source, each.target) for each in pairs] + [each.name for each in groups]
    if len(set(keys)) < len(keys):
        raise _Wrong("the same thing is measured twice in it")
    return LinkTable(facts, nodes, ranks, groups, measurements, pairs)


def _entries(content: dict[str, Any], name: str) -> list[tuple[str, dict[str, Any]]]:
    entries = content.get(name)
    if type(entries) is not list or not all(type(entry) is dict for entry in entries):
        raise _Wrong(f"field {name!r} is not a list of objects")
    return [(f"{name}[{index}]", entry) for index, entry in enumerate(entries)]


def _text(entry: dict[str, Any], name: str, where: str, optional: bool = False) -> Any:
    value = entry.get(name)
    if type(value) is not str and not (optional and value is None):
        raise _Wrong(f"field {where!r} is not a text")
    return value


def _choice(entry: dict[str, Any], name: str, where: str, known: Sequence[str]) -> str:
    value = str(_text(entry, name, where))
    if value not in known:
        raise _Wrong(f"field {where!r} is {value[:40]!r}, which is none of {', '.join(known[:8])}")
    return value


def _number(entry: dict[str, Any], name: str, where: str, low: float, high: float) -> float:
    value = entry.get(name)
    if not is_number(value) or not low <= value <= high:  # type: ignore[operator]
        raise _Wrong(f"field {where!r} is not a number from {low:g} to {high:g}")
    return value  # type: ignore[return-value]


def _whole(entry: dict[str, Any], name: str, where: str, low: int, high: int) -> int:
    value = _number(entry, name, where, low, high)
    if type(value) is not int:
        raise _Wrong(f"field {where!r} is not a whole number")
    return value


def _ranks(value: Any, where: str, world_size: int) -> list[int]:
    if type(value) is not list or not value or not all(type(r) is int and 0 <= r < world_size for r in value):
        raise _Wrong(f"field {where!r} is not a list of ranks in 0 ... {world_size - 1}")
    if len(set(value)) < len(value):
        raise _Wrong(f"field {where!r} names a rank twice")
    return value


def _group(entry: dict[str, Any], where: str, world_size: int) -> Group:
    members = entry.get("members")
    if type(members) is not list:
        raise _Wrong(f"field '{where}.members' is not a list")
    same_as = entry.get("same_as")
    return Group(
        name=_choice(entry, "name", f"{where}.name", GROUPS),
        members=tuple(tuple(_ranks(each, f"{where}.members", world_size)) for each in members),
        same_as=None if same_as is None else _choice(entry, "same_as", f"{where}.same_as", GROUPS),
        reason=_text(entry, "reason", f"{where}.reason", optional=True),
    )


def _timing(entry: dict[str, Any], where: str, names: Sequence[str]) -> Timing:
    p10_s, median_s, p90_s = (
        _number(entry, name, f"{where}.{name}", *_TIMES_S) for name in ("p10_s", "median_s", "p90_s")
    )
    if not p10_s <= median_s <= p90_s:
        raise _Wrong(f"field '{where}.median_s' is not between p10_s and p90_s")
    return Timing(
        ranks=_whole(entry, "ranks", f"{where}.ranks", 2, 1 << 30),
        bytes=_whole(entry, "bytes", f"{where}.bytes", *_BYTES),
        repetitions=_whole(entry, "repetitions", f"{where}.repetitions", 1, 1 << 60),
        median_s=median_s,
        p10_s=p10_s,
        p90_s=p90_s,
        node=None if entry.get("node") is None else _choice(entry, "node", f"{where}.node", names),
    )


def _measurement(entry: dict[str, Any], where: str, names: Sequence[str]) -> Measurement:
    reason = _text(entry, "reason", f"{where}.reason", optional=True)
    return Measurement(
        group=_choice(entry, "group", f"{where}.group", GROUPS),
        operation=_choice(entry, "operation", f"{where}.operation", OPERATIONS),
        nominal_bytes=_whole(entry, "nominal_bytes", f"{where}.nominal_bytes", *_BYTES),
        timing=None if reason is not None else _timing(entry, where, names),
        reason=reason,
        by_node=tuple(_timing(each, f"{where}.{inner}", names) for inner, each in _entries(entry, "by_node")),
    )


def _pair(entry: dict[str, Any], where: str, names: Sequence[str]) -> Pair:
    source, target = (_choice(entry, name, f"{where}.{name}", names) for name in ("from", "to"))
    if source == target:
        raise _Wrong(f"field '{where}' is a pair of one node")
    reason = _text(entry, "reason", f"{where}.reason", optional=True)
    previous = entry.get("previous_bit_per_s")
    if previous is not None:
        previous = _number(entry, "previous_bit_per_s", f"{where}.previous_bit_per_s", 1e-12, 1e30)
    return Pair(
        source,
        target,
        bytes=_whole(entry, "bytes", f"{where}.bytes", int(reason is None), _BYTES[1]),
        repetitions=_whole(entry, "repetitions", f"{where}.repetitions", int(reason is None), 1 << 60),
        median_s=None if reason is not None else _number(entry, "median_s", f"{where}.median_s", *_TIMES_S),
        reason=reason,
        previous_bit_per_s=previous,
    )
