"""Turns what was observed in one step on one rank into the ledger: phase x state, in integer nanoseconds.

Pure functions: no torch, no files, no clocks. The rules are those of the design (section 3):

* the kernel says how long the thread ran, was ready without a core, and was blocked (`Segment`);
* the collectives say where it was blocked on the network (`Span`), and only that *located* time is divided;
* what the pure-transfer windows of the collectives in flight cover is `transfer`, the rest of the located time is
  `wait`, and all other blocked time stays `blocked`;
* always unions of intervals, never sums of durations; the cells of a step add up to its wall time exactly.
"""

import heapq
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

PHASES = ("input", "forward", "backward", "optimizer", "checkpoint", "other")
STATES = ("running", "runnable", "transfer", "wait", "blocked")
COMPUTE_PHASES = ("forward", "backward", "optimizer")
RUNNING, RUNNABLE, TRANSFER, WAIT, BLOCKED = range(5)

# By which capability a state is told from `blocked` (run.json's `missing` names those that a run lacked).
SEEN_BY = {"runnable": "run_delay", "transfer": "collectives", "wait": "collectives"}

# Members of these leave together, so the shortest duration among the members is pure transfer.
LEAVE_TOGETHER = frozenset({"all_reduce", "all_gather", "reduce_scatter", "barrier"})

# Who waits for a collective decides where the thread was blocked on it.
EAGER = "eager"  # the caller, in Python: the waits themselves were seen
REDUCER = "reducer"  # DDP's reducer, in C++ at the end of backward: last bucket issued to last finished
IN_PLACE = "in_place"  # a functional collective: where it was waited for, or unseen in C++: issued to finished

Interval = tuple[int, int]


@dataclass(slots=True)
class Segment:
    """One uninterrupted stretch of one phase, as the kernel accounted it for the training thread (nanoseconds).

    On a GPU the timeline is the compute stream's and nobody accounts for it: `cpu_ns` is None there.
    """

    phase: int  # index into PHASES
    start_ns: int
    end_ns: int
    cpu_ns: int | None  # on a core
    run_delay_ns: int = 0  # ready to run, but no core was free


@dataclass(slots=True)
class Span:
    """One collective as one rank saw it. `finish_ns` is None while unknown; `transfer_ns` is None when unmatched."""

    group: int  # index into the run's table of groups
    sequence: int  # number of the collective in its group; -1 for send and receive, which not every member sees
    operation: str
    bytes: int  # payload, as the field counts it: the whole (gathered or unreduced) tensor, on every member
    issue_ns: int
    finish_ns: int | None = None
    origin: str = EAGER
    side: int = -1  # root or peer rank of an operation that has one: its sides take different times
    step: int = 0  # the step it was issued in
    seen: bool = True  # False: its finish will never be known
    waits: list[Interval] = field(default_factory=list)  # when the training thread waited for it in Python
    duration_ns: int | None = None  # own duration, see QueueClock
    transfer_ns: int | None = None


@dataclass(slots=True)
class GroupUse:
    """What one kind of collective on one group took in one step on one rank (interval unions, nanoseconds)."""

    group: int
    operation: str
    count: int
    bytes: int
    transfer_ns: int
    wait_ns: int


@dataclass(slots=True)
class Division:
    """One segment divided into states. `states_ns` add up to its length exactly.

    `located` is where in it the thread was blocked on collectives, `transfer` the part of that where bytes were moving
    (unions of intervals); they are longer than their states where the kernel has less blocked time in all.
    """

    states_ns: list[int]
    located: list[Interval]
    transfer: list[Interval]
    clamped_ns: int
    unlocated_ns: int


@dataclass(slots=True)
class StepLedger:
    """The ledger of one rank and step. `cells[phase][state]` in nanoseconds add up to `end_ns - start_ns` exactly."""

    start_ns: int
    end_ns: int
    cells: list[list[int]]
    hidden_ns: int  # collectives in flight while the thread was not blocked on them
    hidden_transfer_ns: int
    clamped_ns: int  # by how much the kernel's clocks exceeded the wall clock, and were cut
    unlocated_ns: int  # kernel's blocked minus located, where collectives were waited for; negative: located was cut
    unmatched: int  # collectives whose split is unknown: they are left out, their time stays `blocked`
    uses: list[GroupUse]

    @property
    def wall_ns(self) -> int:
        return self.end_ns - self.start_ns


def unobserved_states(missing: Container[str] | None) -> frozenset[str]:
    """The states that could not be told from `blocked`, without these capabilities."""
    return frozenset(state for state, capability in SEEN_BY.items() if capability in (missing or ()))


def own_states(collectives_known: bool) -> tuple[int, ...]:
    """The states of a rank's self time: its own part of the step, without what it was exposed to others. Where
    collectives were not observed `blocked` holds the waiting for others, too, and does not count."""
    return (RUNNING, RUNNABLE, BLOCKED) if collectives_known else (RUNNING, RUNNABLE)


# --- intervals ---------------------------------------------------------------------------------------------------


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The intervals merged where they touch or overlap, sorted; empty ones are dropped."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def clip(intervals: Iterable[Interval], start: int, end: int) -> list[Interval]:
    """The parts of the intervals inside [start, end]."""
    return [(max(a, start), min(b, end)) for a, b in intervals if a < end and b > start]


def length(intervals: Iterable[Interval]) -> int:
    """Sum of the lengths; of a union, the measure of the set."""
    return sum(b - a for a, b in intervals)


def intersection(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """The intersection of two unions."""
    result: list[Interval] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            result.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return result


def difference(a: Iterable[Interval], b: Sequence[Interval]) -> list[Interval]:
    """What the union `a` has and the union `b` has not."""
    result: list[Interval] = []
    for start, end in a:
        for hole_start, hole_end in clip(b, start, end):
            if hole_start > start:
                result.append((start, hole_start))
            start = hole_end
        if end > start:
            result.append((start, end))
    return result


# --- collectives -------------------------------------------------------------------------------------------------


class QueueClock:
    """Own durations of one group's collectives on one rank, in sequence order.

    A group's collectives are served first in, first out: by two worker threads in gloo, by one stream in NCCL. A
    collective starts when it was issued or when the earliest of the workers got free, whichever is later. (Starting
    it at the previous finish gave negative durations in 15 % of the collectives: two workers finish out of order.)
    """

    def __init__(self, workers: int = 2):
        self._free_ns = [0] * workers
        heapq.heapify(self._free_ns)

    def duration_ns(self, issue_ns: int, finish_ns: int) -> int:
        start_ns = max(issue_ns, self._free_ns[0])
        heapq.heapreplace(self._free_ns, finish_ns)
        return max(0, finish_ns - start_ns)


def match_key(span: Span) -> int:
    """A positive 56-bit number that members of the same collective share and others do not."""
    identity = f"{span.sequence}|{span.operation}|{span.bytes}".encode()
    return int.from_bytes(blake2b(identity, digest_size=7).digest(), "big")


class ShortestSeen:
    """The shortest duration so far of each kind of operation that does not leave together: its best known transfer."""

    def __init__(self) -> None:
        self._shortest: dict[tuple[int, str, int, int], int] = {}

    def transfer_ns(self, span: Span, duration_ns: int) -> int:
        kind = (span.group, span.operation, span.bytes, span.side)
        shortest = min(duration_ns, self._shortest.get(kind, duration_ns))
        self._shortest[kind] = shortest
        return shortest


def _window(span: Span) -> Interval:
    assert span.finish_ns is not None and span.transfer_ns is not None
    return span.finish_ns - span.transfer_ns, span.finish_ns


def _flight(span: Span) -> Interval:
    assert span.finish_ns is not None
    return span.issue_ns, span.finish_ns


def _located(segments: Sequence[Segment], spans: Sequence[Span]) -> list[Interval]:
    """Where the training thread was blocked on collectives whose split is known."""
    located: list[Interval] = []
    for span in spans:
        if span.transfer_ns is None:
            continue
        if span.waits:
            located.extend(span.waits)
        elif span.origin == IN_PLACE:
            located.append(_flight(span))
    for segment in segments:
        # DDP waits once, after the last bucket, for all buckets: one unmatched bucket and the tail cannot be divided.
        buckets = [
            span for span in spans if span.origin == REDUCER and segment.start_ns <= span.issue_ns < segment.end_ns
        ]
        if buckets and all(span.transfer_ns is not None for span in buckets):
            last_issue = max(span.issue_ns for span in buckets)
            last_finish = max(_flight(span)[1] for span in buckets)
            located.extend(clip([(last_issue, last_finish)], segment.start_ns, segment.end_ns))
    return union(located)


def _uses(spans: Iterable[Span]) -> list[GroupUse]:
    by_kind: dict[tuple[int, str], list[Span]] = {}
    for span in spans:
        by_kind.setdefault((span.group, span.operation), []).append(span)
    uses = []
    for (group, operation), members in sorted(by_kind.items()):
        known = [span for span in members if span.transfer_ns is not None]
        windows = union(_window(span) for span in known)
        active = union((_flight(span)[1] - (span.duration_ns or 0), _flight(span)[1]) for span in known)
        transfer_ns = length(windows)
        uses.append(
            GroupUse(
                group=group,
                operation=operation,
                count=len(members),
                bytes=sum(span.bytes for span in members),
                transfer_ns=transfer_ns,
                wait_ns=length(union([*windows, *active])) - transfer_ns,
            )
        )
    return uses


# --- the ledger --------------------------------------------------------------------------------------------------


def divide(segments: Sequence[Segment], spans: Sequence[Span]) -> list[Division]:
    """Each segment divided into states. `spans` are all collectives that overlap the step that `segments` tile."""
    located = _located(segments, spans)
    windows = union(_window(span) for span in spans if span.transfer_ns is not None)
    divisions = []
    for segment in segments:
        wall_ns = segment.end_ns - segment.start_ns
        here = clip(located, segment.start_ns, segment.end_ns)
        located_ns = length(here)
        cpu_ns = segment.cpu_ns
        if cpu_ns is None:  # a compute stream: busy unless it waited for a collective, idle where it computes nothing
            cpu_ns = wall_ns - located_ns if PHASES[segment.phase] in COMPUTE_PHASES else 0
        running_ns = min(cpu_ns, wall_ns)
        runnable_ns = min(segment.run_delay_ns, wall_ns - running_ns)
        blocked_ns = wall_ns - running_ns - runnable_ns
        clamped_ns = cpu_ns - running_ns + segment.run_delay_ns - runnable_ns

        moving = intersection(here, windows)
        transfer_ns = length(moving)
        wait_ns = located_ns - transfer_ns
        unlocated_ns = blocked_ns - located_ns if located_ns else 0
        if located_ns > blocked_ns:  # the kernel knows better how long it was; the collectives only how to divide it
            transfer_ns = transfer_ns * blocked_ns // located_ns
            wait_ns = blocked_ns - transfer_ns
        states_ns = [running_ns, runnable_ns, transfer_ns, wait_ns, blocked_ns - transfer_ns - wait_ns]
        divisions.append(Division(states_ns, here, moving, clamped_ns, unlocated_ns))
    return divisions


def account(
    start_ns: int, end_ns: int, segments: Sequence[Segment], spans: Sequence[Span], step: int | None = None
) -> StepLedger:
    """The ledger of the step [start_ns, end_ns] on one rank.

    `segments` tile the step without gap or overlap. `spans` are all collectives that overlap it; those issued in an
    earlier step count towards time, but only those with `span.step == step` (or all, without a step) are listed in
    `uses`. Raises ValueError when the segments do not tile the step: the ledger could not close.
    """
    boundary_ns = start_ns
    for segment in segments:
        if segment.start_ns != boundary_ns or segment.end_ns < segment.start_ns:
            raise ValueError(f"the segments leave a gap at {boundary_ns} ns")
        boundary_ns = segment.end_ns
    if boundary_ns != end_ns:
        raise ValueError(f"the segments end at {boundary_ns} ns, the step at {end_ns} ns")

    cells = [[0] * len(STATES) for _ in PHASES]
    clamped_ns = unlocated_ns = exposed_ns = exposed_transfer_ns = 0
    for segment, division in zip(segments, divide(segments, spans), strict=True):
        row = cells[segment.phase]
        for state, state_ns in enumerate(division.states_ns):
            row[state] += state_ns
        clamped_ns += division.clamped_ns
        unlocated_ns += division.unlocated_ns
        exposed_ns += division.states_ns[TRANSFER] + division.states_ns[WAIT]
        exposed_transfer_ns += division.states_ns[TRANSFER]

    matched = [span for span in spans if span.transfer_ns is not None]
    windows = union(_window(span) for span in matched)
    issued = [span for span in spans if step is None or span.step == step]
    in_flight_ns = length(clip(union(_flight(span) for span in matched), start_ns, end_ns))
    return StepLedger(
        start_ns=start_ns,
        end_ns=end_ns,
        cells=cells,
        hidden_ns=max(0, in_flight_ns - exposed_ns),
        hidden_transfer_ns=max(0, length(clip(windows, start_ns, end_ns)) - exposed_transfer_ns),
        clamped_ns=clamped_ns,
        unlocated_ns=unlocated_ns,
        unmatched=sum(span.transfer_ns is None for span in issued),
        uses=_uses(issued),
    )


def bus_bandwidth_factor(operation: str, ranks: int) -> float:
    """Bus bandwidth / (bytes / time), as NCCL's tests define it: what an ideal link would have to carry per rank."""
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if operation in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) / ranks
    return 1.0
