"""The numbers that verdicts rest on: what every rank did in every step, as arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bireme.ledger import BLOCKED, PHASES, RUNNABLE, RUNNING, STATES, TRANSFER, WAIT
from bireme.links import checked_link_rate

LEAST_STEPS = 8  # fewer say nothing about what persists

Array = NDArray[np.float64]
_OWN = [phase * len(STATES) + state for phase in range(len(PHASES)) for state in (RUNNING, RUNNABLE, BLOCKED)]


class NotEnough(Exception):
    """Too little was recorded for any verdict; the text says what is there."""


@dataclass(frozen=True, slots=True)
class Use:
    """What one kind of collective on one group took in every step: (steps,) arrays, medians over its members."""

    group: int
    operation: str
    count: Array
    bytes: Array  # of all of them
    transfer_ms: Array


@dataclass(frozen=True)
class Evidence:
    """Measured steps of the ranks that recorded them. Times in milliseconds; T steps, R ranks.

    Ranks that recorded less than half of the steps are left out, and steps that one of the others did not record; both
    are said in `missing`. `ranks` gives the number of each column.
    """

    steps: NDArray[np.int64]  # (T,) their numbers
    ranks: NDArray[np.int64]  # (R,)
    wall_ms: Array  # (T, R)
    cells_ms: NDArray[np.float32]  # (T, R, phases x states)
    gc_ms: Array  # (T, R) garbage collection, wherever in the ledger it is
    tokens: Array | None  # (T,) distinct ones
    node_of: NDArray[np.int64]  # (R,) index into node_names
    node_names: tuple[str, ...]
    stage_of: NDArray[np.int64]  # (R,) of the pipeline
    role_of: NDArray[np.int64]  # (R,) ranks of one number do the same work
    collectives_known: bool
    uses: tuple[Use, ...] = ()
    groups: tuple[tuple[str, tuple[int, ...]], ...] = ()  # name and ranks
    workers: int = 0  # processes of each rank that read data
    link_bytes_per_s: float | None = None  # of the card of an emulated node
    write_s: tuple[float, ...] = ()  # by rank: the mean time to write a checkpoint
    missing: tuple[str, ...] = ()

    # --- what follows from them ---

    @cached_property
    def own_ms(self) -> Array:
        """(T, R) self time: the step without what the rank was exposed to others."""
        if self.collectives_known:
            return self.wall_ms - self._sum(TRANSFER) - self._sum(WAIT)
        # `blocked` holds the waiting for others too.
        return self._sum(RUNNING) + self._sum(RUNNABLE)

    @cached_property
    def peers_ms(self) -> Array:
        """(T, R) the median self time of each rank's peers: the others of its role; its own where it has none."""
        return self.median_of_peers(self.own_ms)

    @cached_property
    def excess_ms(self) -> Array:
        """(T, R) by how much a rank's self time exceeds its peers'."""
        return self.own_ms - self.peers_ms

    def median_of_peers(self, values: Array) -> Array:
        """(T, R) the median of (T, R) `values` over each rank's peers."""
        result = values.copy()
        for role in np.unique(self.role_of):
            columns = np.flatnonzero(self.role_of == role)
            if len(columns) > 1:
                result[:, columns] = median_of_others(values[:, columns])
        return result

    @cached_property
    def wait_ms(self) -> Array:
        return self._sum(WAIT)

    @cached_property
    def step_ms(self) -> Array:
        """(T,) the step's time, over all ranks."""
        return np.asarray(self.wall_ms.mean(axis=1))

    @cached_property
    def typical_ms(self) -> float:
        return float(np.median(self.step_ms))

    def _sum(self, state: int) -> Array:
        return np.asarray(self.cells_ms[:, :, state :: len(STATES)].sum(axis=2, dtype=np.float64))

    def phase_ms(self, phase: int) -> Array:
        """(T, R) own time in a phase."""
        first = phase * len(STATES)
        cells = [first + state for state in (RUNNING, RUNNABLE, BLOCKED)]
        return np.asarray(self.cells_ms[:, :, cells].sum(axis=2, dtype=np.float64))

    def columns(self, ranks: Sequence[int]) -> list[int]:
        return [int(np.flatnonzero(self.ranks == rank)[0]) for rank in ranks]

    @property
    def own_cells(self) -> list[int]:
        """Which cells are self time."""
        return _OWN if self.collectives_known else [cell for cell in _OWN if cell % len(STATES) != BLOCKED]


def median_of_others(own_ms: Array) -> Array:
    """(T, n) -> (T, n): for every column the median of all other columns. n is at least 2."""
    n = own_ms.shape[1]
    order = np.argsort(own_ms, axis=1, kind="stable")
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.arange(n)[None, :], axis=1)
    ordered = np.take_along_axis(own_ms, order, axis=1)

    def without_itself(k: int) -> Array:
        """The k-th smallest of the others."""
        return np.where(place > k, ordered[:, k : k + 1], ordered[:, k + 1 : k + 2])

    others = n - 1
    if others % 2:
        return without_itself(others // 2)
    return (without_itself(others // 2 - 1) + without_itself(others // 2)) / 2


def from_lines(
    lines: Sequence[Mapping[str, Any]], facts: Mapping[str, Any], events: Sequence[Mapping[str, Any]] = ()
) -> Evidence:
    """From measured lines of steps.jsonl (in order, checked by the reader) and the facts of run.json.

    Raises NotEnough.
    """
    size = int(facts["world_size"])
    missing: list[str] = []
    lines = [line for line in lines if line["skipped"] is None]
    present = np.array([[each is not None for each in line["start_ns"]] for line in lines], dtype=bool)
    present = present.reshape(len(lines), size)
    kept = present.sum(axis=0) * 2 >= len(lines)
    if not kept.all():
        absent = [rank for rank in range(size) if not kept[rank]]
        missing.append(f"left out, as they recorded less than half of the steps: ranks {_few(absent)}")
    whole = present[:, kept].all(axis=1) & kept.any()
    if not whole.all():
        missing.append(f"{int((~whole).sum())} steps that a rank did not record are left out")
    lines = [line for line, good in zip(lines, whole, strict=True) if good]
    if len(lines) < LEAST_STEPS:
        raise NotEnough(f"{len(lines)} complete measured steps are too few for a verdict: {LEAST_STEPS} are needed")
    ranks = np.flatnonzero(kept)

    def table(name: str, dtype: Any = np.float64) -> NDArray[Any]:
        if kept.all():
            return np.array([line[name] for line in lines], dtype=dtype)
        return np.array([[line[name][rank] for rank in ranks] for line in lines], dtype=dtype)

    # Whole nanoseconds of a clock that may have run for months do not fit a float: subtracted before.
    wall_ms = (table("end_ns", np.int64) - table("start_ns", np.int64)) / 1e6
    cells_ms = table("cells_ns", np.float32)
    cells_ms /= np.float32(1e6)
    has_gc = all(isinstance(line.get("gc_ns"), list) and len(line["gc_ns"]) == size for line in lines)
    gc_ms = table("gc_ns") / 1e6 if has_gc else np.zeros_like(wall_ms)
    tokens = [line["tokens"] for line in lines]
    nodes, node_names = _nodes(facts, ranks)
    stages, roles = _roles(facts, ranks)
    return Evidence(
        steps=np.array([line["step"] for line in lines], dtype=np.int64),
        ranks=ranks,
        wall_ms=wall_ms,
        cells_ms=cells_ms,
        gc_ms=np.nan_to_num(gc_ms),
        tokens=np.array(tokens, dtype=np.float64) if all(tokens) else None,
        node_of=nodes,
        node_names=node_names,
        stage_of=stages,
        role_of=roles,
        collectives_known="collectives" not in (facts.get("missing") or {}),
        uses=_uses(lines, ranks),
        groups=tuple((group["name"], tuple(group["ranks"])) for group in facts["groups"]),
        workers=_whole((facts.get("config") or {}).get("workers")),
        link_bytes_per_s=_link(facts),
        write_s=_write_s(events, size),
        missing=tuple(missing),
    )


def _few(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _whole(value: Any) -> int:
    return value if type(value) is int else 0


def _nodes(facts: Mapping[str, Any], ranks: NDArray[np.int64]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    node_of = {rank: index for index, node in enumerate(facts["nodes"]) for rank in node["ranks"]}
    return np.array([node_of[int(rank)] for rank in ranks]), tuple(node["name"] for node in facts["nodes"])


def _roles(facts: Mapping[str, Any], ranks: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Each rank's stage, and a number that ranks of the same stage and tensor-parallel place share."""
    places = []
    described = facts.get("ranks")
    for rank in ranks:
        each = described[rank] if isinstance(described, list) and rank < len(described) else None
        role = each.get("role") if isinstance(each, dict) else None
        role = role if isinstance(role, dict) else {}
        places.append((_whole(role.get("pp")), _whole(role.get("tp"))))
    members = {place: places.count(place) for place in places}
    # Who has no equal in its tensor-parallel place is compared with the others of its stage.
    known: dict[tuple[int, int], int] = {}
    roles = []
    for stage, place in places:
        key = (stage, place) if members[stage, place] > 1 else (stage, -1)
        roles.append(known.setdefault(key, len(known)))
    return np.array([stage for stage, _ in places]), np.array(roles)


def _uses(lines: Sequence[Mapping[str, Any]], ranks: NDArray[np.int64]) -> tuple[Use, ...]:
    """Per group and operation, the median of what its members say."""
    taken: dict[tuple[int, str], tuple[list[list[float]], ...]] = {}
    for place, line in enumerate(lines):
        for rank in ranks:
            for group, operation, count, size, transfer_ns, _ in line["collectives"][rank]:
                key = (group, operation)
                if key not in taken:
                    taken[key] = tuple([[] for _ in lines] for _ in range(3))
                for column, value in zip(taken[key], (count, size, transfer_ns / 1e6), strict=True):
                    column[place].append(value)
    uses = []
    for (group, operation), columns in sorted(taken.items()):
        if all(columns[0]):  # an operation that is not in every step says little about a link
            uses.append(Use(group, operation, *map(_medians, columns)))
    return tuple(uses)


def _medians(column: list[list[float]]) -> Array:
    if len({len(each) for each in column}) == 1:
        return np.asarray(np.median(np.array(column, dtype=np.float64), axis=1))
    return np.array([np.median(each) for each in column])


def _link(facts: Mapping[str, Any]) -> float | None:
    network = facts.get("network")
    rate = checked_link_rate(network.get("link")) if isinstance(network, dict) else None
    return rate / 8 if rate else None


def _write_s(events: Sequence[Mapping[str, Any]], size: int) -> tuple[float, ...]:
    written = [
        event["write_s"]
        for event in events
        if event.get("event") == "checkpoint"
        and isinstance(event.get("write_s"), list)
        and len(event["write_s"]) == size
        and all(isinstance(each, (int, float)) for each in event["write_s"])
    ]
    return tuple(sum(column) / len(written) for column in zip(*written, strict=True)) if written else ()
