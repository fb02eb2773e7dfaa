"""The numbers that verdicts rest on: what every rank did in every step, as arrays."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bireme.ledger import BLOCKED, PHASES, RUNNABLE, RUNNING, STATES, TRANSFER, WAIT
from bireme.links import checked_link_rate
from bireme.run_reader import is_number
from bireme.text import count, name_ranks

N_CELLS = len(PHASES) * len(STATES)
LEAST_STEPS = 8  # fewer say nothing about what persists

Array = NDArray[np.float64]
_OWN = [phase * len(STATES) + state for phase in range(len(PHASES)) for state in (RUNNING, RUNNABLE, BLOCKED)]


_CROWDED = 0.1  # of a step; healthy runs of two ranks on two cores have 5 to 15 % in stretches (docs/accuracy.md)


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
    throttled_ms: Array  # (T, R) held back by a CPU quota
    steal_ms: Array  # (T, R) taken by the hypervisor
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
    crowded: NDArray[np.bool_] | None = None  # (R,) on a machine whose training threads leave no core free

    # --- what follows from them ---

    @cached_property
    def own_ms(self) -> Array:
        """(T, R) self time: the step without what the rank was exposed to others.

        Where no core is left for the backend's own threads, which rank has to share its core with them is chance: up
        to a tenth of what the quickest rank takes is what such a machine has anyway without a core, and nobody's.
        """
        if self.collectives_known:
            own = self.wall_ms - self._sum(TRANSFER) - self._sum(WAIT)
        else:  # `blocked` holds the waiting for others too
            own = self._sum(RUNNING) + self._sum(RUNNABLE)
        if self.crowded is not None and self.crowded.any():
            quickest_ms = float(np.median(own.min(axis=1)))
            usual = np.minimum(self._sum(RUNNABLE), _CROWDED * quickest_ms)
            own = own - np.where(self.crowded, usual, 0.0)
        return own

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


@dataclass(frozen=True, slots=True)
class Row:
    """One step of the record, as small as arrays are; times in milliseconds, NaN where a rank did not record it."""

    step: int
    tokens: int | None
    wall_ms: Array  # (ranks,)
    cells_ms: NDArray[np.float32]  # (ranks, phases x states)
    gc_ms: Array  # (ranks,)
    uses: dict[tuple[int, str], tuple[float, float, float]]  # count, bytes, transfer in ms: medians over members


def row_of(line: Mapping[str, Any]) -> Row:
    """From a line of steps.jsonl that the reader has checked."""
    starts, ends, cells, collectives = (line[name] for name in ("start_ns", "end_ns", "cells_ns", "collectives"))
    size = len(starts)
    gc_ns = line.get("gc_ns") or [0] * size
    here = [rank for rank, start in enumerate(starts) if start is not None]
    wall_ms, gc_ms = np.full(size, np.nan), np.zeros(size)
    cells_ms = np.full((size, N_CELLS), np.nan, dtype=np.float32)
    if here:
        # Whole nanoseconds of a clock that may have run for months do not fit a float: subtracted before.
        wall_ms[here] = [(ends[rank] - starts[rank]) / 1e6 for rank in here]
        cells_ms[here] = np.array([cells[rank] for rank in here], dtype=np.float32) / np.float32(1e6)
        gc_ms[here] = [(gc_ns[rank] or 0) / 1e6 for rank in here]
    said: dict[tuple[int, str], list[tuple[float, float, float]]] = {}
    for rank in here:
        for group, operation, calls, num_bytes, transfer_ns, _ in collectives[rank]:
            said.setdefault((group, operation), []).append((calls, num_bytes, transfer_ns / 1e6))
    uses = {}
    for key, each in said.items():
        calls_of, bytes_of, transfer_of = zip(*each, strict=True)
        uses[key] = (median(calls_of), median(bytes_of), median(transfer_of))
    return Row(line["step"], line["tokens"], wall_ms, cells_ms, gc_ms, uses)


def from_lines(
    lines: Iterable[Mapping[str, Any]], facts: Mapping[str, Any], events: Sequence[Mapping[str, Any]] = ()
) -> Evidence:
    """From lines of steps.jsonl (in order, checked by the reader) and the facts of run.json; skipped steps are left
    out. Raises NotEnough."""
    return from_rows([row_of(line) for line in lines if line["skipped"] is None], facts, events)


def from_rows(rows: Sequence[Row], facts: Mapping[str, Any], events: Sequence[Mapping[str, Any]] = ()) -> Evidence:
    """As `from_lines`, of steps that count."""
    size = int(facts["world_size"])
    missing: list[str] = []
    present = np.array([~np.isnan(row.wall_ms) for row in rows], dtype=bool).reshape(len(rows), size)
    kept = present.sum(axis=0) * 2 >= len(rows)
    if not kept.all():
        absent = name_ranks([rank for rank in range(size) if not kept[rank]])
        missing.append(f"left out, with less than half of the steps recorded: {absent}")
    whole = present[:, kept].all(axis=1) & kept.any()
    if not whole.all():
        missing.append(f"left out, as a rank did not record them: {count(int((~whole).sum()), 'step')}")
    rows = [row for row, good in zip(rows, whole, strict=True) if good]
    if len(rows) < LEAST_STEPS:
        there = f"{count(len(rows), 'complete measured step')} {'is' if len(rows) == 1 else 'are'}"
        raise NotEnough(f"{there} too few for a verdict: {LEAST_STEPS} are needed")
    ranks = np.flatnonzero(kept)
    steps = np.array([row.step for row in rows], dtype=np.int64)
    tokens = [row.tokens for row in rows]
    nodes, node_names = _nodes(facts, ranks)
    stages, roles = _roles(facts, ranks)
    throttled_ms, steal_ms = _taken(events, facts, ranks, steps)
    return Evidence(
        steps=steps,
        ranks=ranks,
        wall_ms=np.stack([row.wall_ms[ranks] for row in rows]),
        cells_ms=np.stack([row.cells_ms[ranks] for row in rows]),
        gc_ms=np.stack([row.gc_ms[ranks] for row in rows]),
        throttled_ms=throttled_ms,
        steal_ms=steal_ms,
        tokens=np.array(tokens, dtype=np.float64) if all(tokens) else None,
        node_of=nodes,
        node_names=node_names,
        stage_of=stages,
        role_of=roles,
        collectives_known="collectives" not in (facts.get("missing") or {}),
        uses=_uses(rows),
        groups=tuple((group["name"], tuple(group["ranks"])) for group in facts["groups"]),
        workers=_whole((facts.get("config") or {}).get("workers")),
        link_bytes_per_s=_link(facts),
        write_s=_write_s(events, size),
        missing=tuple(missing),
        crowded=_crowded(facts, ranks),
    )


def _crowded(facts: Mapping[str, Any], ranks: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which of these ranks are on a node whose ranks have as many threads as there are cores for them, or more."""
    described = facts.get("ranks")
    described = described if isinstance(described, list) else []
    full: set[int] = set()
    for node in facts["nodes"]:
        members = [described[rank] for rank in node["ranks"] if rank < len(described)]
        cores: set[Any] = set()
        threads = 0
        for each in members:
            known = each.get("cores") if isinstance(each, dict) else None
            if not isinstance(known, list) or not known:
                break
            cores.update(core for core in known if type(core) is int)
            threads += _whole(each.get("threads")) or 1
        else:
            if members and threads >= len(cores):
                full.update(node["ranks"])
    return np.array([int(rank) in full for rank in ranks], dtype=bool)


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
    members = Counter(places)
    # Where a tensor-parallel place has one rank, it has no equal: all ranks of that stage are held against each other.
    alone = {stage for (stage, _), number in members.items() if number == 1}
    known: dict[tuple[int, int], int] = {}
    roles = [known.setdefault((stage, -1 if stage in alone else place), len(known)) for stage, place in places]
    return np.array([stage for stage, _ in places]), np.array(roles)


def _uses(rows: Sequence[Row]) -> tuple[Use, ...]:
    # An operation that is not in every step says little about a link.
    every = [key for key in sorted(rows[0].uses) if all(key in row.uses for row in rows)]
    return tuple(Use(*key, *np.array([row.uses[key] for row in rows], dtype=np.float64).T) for key in every)


def _taken(
    events: Sequence[Mapping[str, Any]], facts: Mapping[str, Any], ranks: NDArray[np.int64], steps: NDArray[np.int64]
) -> tuple[Array, Array]:
    """What a CPU quota and the hypervisor took from a rank, spread evenly over the steps of each `host` event."""
    taken = np.zeros((2, len(steps), len(ranks)))
    place_of = {int(rank): place for place, rank in enumerate(ranks)}
    for event in events:
        place = place_of.get(event.get("rank")) if event.get("event") == "host" else None  # type: ignore[arg-type]
        first, last = event.get("first_step"), event.get("last_step")
        if place is None or type(first) is not int or type(last) is not int or last < first:
            continue
        rows = (steps >= first) & (steps <= last)
        for which, name in enumerate(("throttled_ms", "steal_ms")):
            if is_number(event.get(name)):
                # Stolen from all the cores that the rank may use, of which it uses one.
                cores = 1 if name == "throttled_ms" else _cores(facts, int(ranks[place]))
                taken[which, rows, place] += min(1e12, max(0.0, event[name])) / (last - first + 1) / cores
    return taken[0], taken[1]


def _cores(facts: Mapping[str, Any], rank: int) -> int:
    described = facts.get("ranks")
    each = described[rank] if isinstance(described, list) and rank < len(described) else None
    cores = each.get("cores") if isinstance(each, dict) else None
    return max(1, len(cores)) if isinstance(cores, list) else 1


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
        and all(is_number(each) and 0 <= each < 1e7 for each in event["write_s"])
    ]
    return tuple(sum(column) / len(written) for column in zip(*written, strict=True)) if written else ()
