"""Lays traced steps out as Chrome trace events (docs/trace.md): phases, states, collectives, arrows. Pure.

Events are dicts as the format has them, but with `ts` and `dur` in whole nanoseconds of the timeline.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bireme.ledger import (
    BLOCKED,
    PHASES,
    RUNNABLE,
    RUNNING,
    STATES,
    TRANSFER,
    WAIT,
    Division,
    Interval,
    Segment,
    Span,
    bus_bandwidth_factor,
    difference,
    divide,
    length,
)
from bireme.report.trace_clock import Key, Place
from bireme.text import printable
from bireme.trace_reader import TracedStep

Event = dict[str, Any]

PHASES_TRACK, STATES_TRACK, GARBAGE_TRACK, FIRST_COLLECTIVES_TRACK = 1, 2, 3, 10

_SOMEWHERE = {"position": "not known inside the phase"}
_SHORTENED = {"position": "shortened: the kernel says that the thread was blocked for less"}


@dataclass(frozen=True, slots=True)
class Member:
    """One rank's part in a collective, where it is on the timeline."""

    rank: int
    span: Span
    start_ns: int
    finish_ns: int
    error_bound_ns: int | None


def events_of(
    steps: Sequence[TracedStep], places: Mapping[Key, Place], groups: Sequence[Mapping[str, Any]], nodes: Iterable[Any]
) -> tuple[list[Event], int]:
    """The trace events of these steps, and how many arrows were left out since they would lead back in time."""
    events: list[Event] = []
    by_rank: dict[int, list[TracedStep]] = {}
    for step in steps:
        by_rank.setdefault(step.rank, []).append(step)
    node_of = {rank: str(node["name"]) for node in nodes for rank in node["ranks"]}
    collectives: dict[tuple[int, int, str, int], list[Member]] = {}
    everyones: list[Member] = []
    for rank, own in sorted(by_rank.items()):
        aligned = all(places[rank, step.step].error_bound_ns is not None for step in own)
        name = f"rank {rank} on {printable(node_of.get(rank, 'unknown'))}" + ("" if aligned else " (clock not aligned)")
        events += [_about("process_name", rank, 0, name=name), _about("process_sort_index", rank, 0, sort_index=rank)]
        for step in own:
            place = places[rank, step.step]
            events += _phases(step, place)
            events += _states(step, place)
            events += _pauses(step, place)
        members = list(_members(own, places))
        everyones += members
        for member in members:
            span = member.span
            if span.sequence >= 0 and span.transfer_ns is not None:
                collectives.setdefault((span.group, span.sequence, span.operation, span.bytes), []).append(member)
        used = [PHASES_TRACK, STATES_TRACK, *([GARBAGE_TRACK] if any(step.pauses for step in own) else [])]
        events += _tracks(rank, [(track, _TRACK_NAMES[track]) for track in used])
    arrivals = {key: _last_arriver(members, _ranks(groups, key[0])) for key, members in collectives.items()}
    tracks = _lanes(everyones)
    names: dict[tuple[int, int], str] = {}
    for member, (track, lane) in zip(everyones, tracks, strict=True):
        span = member.span
        name = printable(str(groups[span.group]["name"])) if span.group < len(groups) else str(span.group)
        names[member.rank, track] = f"collectives: {name}" + (f" ({lane + 1})" if lane else "")
        last = arrivals.get((span.group, span.sequence, span.operation, span.bytes))
        events.append(_collective(member, track, len(_ranks(groups, span.group)), last))
    for (rank, track), name in sorted(names.items()):
        events += _tracks(rank, [(track, name)])
    track_of = {id(member): track for member, (track, _) in zip(everyones, tracks, strict=True)}
    arrows, left_out = _arrows(collectives, track_of)
    return events + arrows, left_out


def _about(what: str, rank: int, track: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": rank, "tid": track, "args": args}


_TRACK_NAMES = {PHASES_TRACK: "phases", STATES_TRACK: "states", GARBAGE_TRACK: "garbage collection"}


def _tracks(rank: int, tracks: Iterable[tuple[int, str]]) -> Iterator[Event]:
    for track, name in tracks:
        yield _about("thread_name", rank, track, name=name)
        yield _about("thread_sort_index", rank, track, sort_index=track)


def _slice(category: str, name: str, rank: int, track: int, start_ns: int, end_ns: int, args: Event) -> Event:
    where = {"pid": rank, "tid": track, "ts": start_ns, "dur": end_ns - start_ns}
    return {"ph": "X", "cat": category, "name": name, **where, "args": args}


# --- phases and states -------------------------------------------------------------------------------------------


def _phases(step: TracedStep, place: Place) -> Iterator[Event]:
    shift_ns = place.shift_ns
    bound_ms = None if place.error_bound_ns is None else place.error_bound_ns / 1e6
    args = {"step": step.step, "clock_error_bound_ms": bound_ms}
    name = f"step {step.step}"
    yield _slice("step", name, step.rank, PHASES_TRACK, step.start_ns + shift_ns, step.end_ns + shift_ns, args)
    for segment in step.segments:
        if segment.end_ns > segment.start_ns:
            bounds = segment.start_ns + shift_ns, segment.end_ns + shift_ns
            yield _slice("phase", PHASES[segment.phase], step.rank, PHASES_TRACK, *bounds, {"step": step.step})


def _pauses(step: TracedStep, place: Place) -> Iterator[Event]:
    for start_ns, end_ns, generation in step.pauses:
        bounds = start_ns + place.shift_ns, end_ns + place.shift_ns
        args = {"step": step.step, "generation": generation}
        yield _slice("gc", "garbage collection", step.rank, GARBAGE_TRACK, *bounds, args)


def _states(step: TracedStep, place: Place) -> Iterator[Event]:
    for segment, division in zip(step.segments, divide(step.segments, step.spans), strict=True):
        for state, (start_ns, end_ns), position in state_intervals(segment, division):
            bounds = start_ns + place.shift_ns, end_ns + place.shift_ns
            args = {"step": step.step, "phase": PHASES[segment.phase], **position}
            yield _slice("state", STATES[state], step.rank, STATES_TRACK, *bounds, args)


def state_intervals(segment: Segment, division: Division) -> list[tuple[int, Interval, dict[str, str]]]:
    """(state, interval, what to say of its position), sorted; they tile the segment, and the lengths of each state add
    up to the ledger's. Transfer and wait are where they were; of the other states only the totals are known: they fill
    what is left, one after the other."""
    states_ns = division.states_ns
    waiting = difference(division.located, division.transfer)
    kinds = ((TRANSFER, division.transfer), (WAIT, waiting))
    cut = sum(states_ns[state] for state, _ in kinds) < length(division.located)
    laid = [
        (state, interval, _SHORTENED if cut else {})
        for state, intervals in kinds
        for interval in _shortened(intervals, states_ns[state])
    ]
    rest = [(state, states_ns[state]) for state in (RUNNING, RUNNABLE, BLOCKED) if states_ns[state]]
    said = _SOMEWHERE if len(rest) > 1 or cut else {}
    for start_ns, end_ns in difference([(segment.start_ns, segment.end_ns)], sorted(each[1] for each in laid)):
        while start_ns < end_ns:
            state, left_ns = rest.pop(0)
            until_ns = min(end_ns, start_ns + left_ns)
            laid.append((state, (start_ns, until_ns), said))
            if left_ns > until_ns - start_ns:
                rest.insert(0, (state, left_ns - (until_ns - start_ns)))
            start_ns = until_ns
    return sorted(laid, key=lambda each: each[1])


def _shortened(intervals: Sequence[Interval], total_ns: int) -> list[Interval]:
    """The intervals in proportion, `total_ns` in all. What is certain of a wait is its end: it stays."""
    whole_ns = length(intervals)
    result = []
    done_ns = given_ns = 0
    for start_ns, end_ns in intervals:
        done_ns += end_ns - start_ns
        upto_ns = done_ns * total_ns // whole_ns
        if upto_ns > given_ns:
            result.append((end_ns - (upto_ns - given_ns), end_ns))
        given_ns = upto_ns
    return result


# --- collectives -------------------------------------------------------------------------------------------------


def _members(steps: Iterable[TracedStep], places: Mapping[Key, Place]) -> Iterator[Member]:
    """The collectives of one rank; one that outlasts its step is in the next step's list again."""
    seen = set()
    for step in steps:
        for span in step.spans:
            key = (span.group, span.sequence, span.operation, span.issue_ns)
            if key in seen:
                continue
            seen.add(key)
            place = places.get((step.rank, span.step)) or places[step.rank, step.step]
            finish_ns = span.issue_ns if span.finish_ns is None else span.finish_ns
            start_ns = finish_ns - (span.duration_ns or 0)
            moved = start_ns + place.shift_ns, finish_ns + place.shift_ns
            yield Member(step.rank, span, *moved, place.error_bound_ns)


def _lanes(members: Sequence[Member]) -> list[tuple[int, int]]:
    """For each member its track, and which of its group's it is: what overlaps is on different ones, as the slices of
    one track may only nest."""
    found: dict[int, tuple[int, int]] = {}
    by_rank: dict[int, dict[int, list[Member]]] = {}
    for member in members:
        by_rank.setdefault(member.rank, {}).setdefault(member.span.group, []).append(member)
    for by_group in by_rank.values():
        track = FIRST_COLLECTIVES_TRACK
        for _, own in sorted(by_group.items()):
            free_ns: list[int] = []  # by lane
            for member in sorted(own, key=lambda each: (each.start_ns, each.finish_ns)):
                lane = next((lane for lane, end_ns in enumerate(free_ns) if end_ns <= member.start_ns), len(free_ns))
                # One nanosecond more: two that begin at once would share a lane if the first took no time.
                free_ns[lane : lane + 1] = [max(member.finish_ns, member.start_ns + 1)]
                found[id(member)] = track + lane, lane
            track += len(free_ns)
    return [found[id(member)] for member in members]


def _ranks(groups: Sequence[Mapping[str, Any]], group: int) -> list[int]:
    return list(groups[group]["ranks"]) if group < len(groups) else []


def _last_arriver(members: Sequence[Member], ranks: Sequence[int]) -> str:
    """Who came last, in words: nothing is claimed that the clocks cannot tell."""
    if {member.rank for member in members} != set(ranks):
        return "n/a: not all members are in this trace"
    if len(members) < 2:
        return "n/a: the only member"
    last = max(members, key=lambda member: member.start_ns)
    for member in members:
        if last.error_bound_ns is None or member.error_bound_ns is None:
            return "n/a: the clocks of some members were not compared"
        apart_ns = last.start_ns - member.start_ns
        if member is not last and apart_ns <= last.error_bound_ns + member.error_bound_ns:
            return "n/a: closer to others than the clocks can tell"
    return f"rank {last.rank}"


def _collective(member: Member, track: int, ranks: int, last_arriver: str | None) -> Event:
    span = member.span
    args: Event = {"step": span.step, "sequence": span.sequence, "bytes": span.bytes}
    if span.side >= 0:
        args["root_or_peer_rank"] = span.side
    if span.duration_ns is None or span.finish_ns is None:
        where = {"pid": member.rank, "tid": track, "ts": member.start_ns, "s": "t"}
        name = f"{printable(span.operation)} issued, its finish was not seen"
        return {"ph": "i", "cat": "collective", "name": name, **where, "args": args}
    args["issued_ms_before_start"] = max(0, span.finish_ns - span.duration_ns - span.issue_ns) / 1e6
    if span.transfer_ns is None:
        args["transfer_ms"] = args["wait_ms"] = "n/a: unmatched (members disagree, or a finish was not seen)"
    else:
        args["transfer_ms"] = span.transfer_ns / 1e6
        args["wait_ms"] = max(0, span.duration_ns - span.transfer_ns) / 1e6
        if span.transfer_ns > 0 and ranks > 0:
            factor = bus_bandwidth_factor(span.operation, ranks)
            args["bus_bandwidth_bytes_per_s"] = round(factor * span.bytes * 1e9 / span.transfer_ns)
    if last_arriver is not None:
        args["last_arriver"] = last_arriver
    bounds = member.start_ns, member.finish_ns
    return _slice("collective", printable(span.operation), member.rank, track, *bounds, args)


def _arrows(
    collectives: Mapping[tuple[int, int, str, int], Sequence[Member]], track_of: Mapping[int, int]
) -> tuple[list[Event], int]:
    """From the start of the member that came last to every other's finish."""
    events: list[Event] = []
    left_out = number = 0
    for (_, _, operation, _), members in sorted(collectives.items()):
        last = max(members, key=lambda member: member.start_ns)
        for member in members:
            if member is last:
                continue
            # A slice's last nanosecond: at its very end a viewer would take the next one.
            lands_ns = max(member.start_ns, member.finish_ns - 1)
            if lands_ns < last.start_ns:
                left_out += 1
                continue
            number += 1
            about = {"cat": "collective", "name": printable(operation), "id": number}
            source = {"pid": last.rank, "tid": track_of[id(last)], "ts": last.start_ns}
            target = {"pid": member.rank, "tid": track_of[id(member)], "ts": lands_ns}
            events += [{"ph": "s", **about, **source}, {"ph": "f", "bp": "e", **about, **target}]
    return events, left_out
