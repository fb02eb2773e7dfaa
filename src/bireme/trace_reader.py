"""Reading the trace of chosen steps (docs/trace.md), checked as the rest of the run directory is. No torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bireme.errors import UserError
from bireme.ledger import PHASES, Segment, Span
from bireme.run_reader import (
    MOST,
    NONE,
    TRACE_FILE,
    Kinds,
    earlier_run_file,
    is_ints,
    number_of,
    read_facts,
    read_lines,
)


@dataclass(frozen=True, slots=True)
class TracedStep:
    """What one rank saw of one step, in nanoseconds of its own clock. `spans`: all that its ledger was made of;
    `pauses`: (start, end, generation) of garbage collections."""

    step: int
    rank: int
    start_ns: int
    end_ns: int
    segments: list[Segment]
    spans: list[Span]
    pauses: list[tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class Trace:
    """The traced steps of one attempt, by step and rank. `clocks`: after which step the clocks were compared, and by
    rank (its clock, how far that is ahead of rank 0's, by how much that may be wrong), in nanoseconds."""

    directory: Path
    facts: dict[str, Any]
    steps: list[TracedStep]
    clocks: list[tuple[int, dict[int, tuple[int, int, int]]]]
    damaged_lines: int


def _is_row(value: Any, *kinds: Kinds) -> bool:
    """Whether it is a list of values of these types; whole numbers are of a size to compute with."""
    return (
        type(value) is list
        and len(value) == len(kinds)
        and all(type(each) in kind for each, kind in zip(value, kinds, strict=True))
        and all(-MOST < each < MOST for each in value if type(each) is int)
    )


_INT: Kinds = (int,)
_INT_OR_NONE: Kinds = (int, NONE)
_SPAN_ROW = (_INT, _INT, (str,), _INT, _INT, *(_INT_OR_NONE,) * 3, (list,), (str,), _INT, _INT)


def _span(row: Any) -> Span:
    if not _is_row(row, *_SPAN_ROW):
        raise ValueError
    group, sequence, operation, num_bytes, issue_ns, finish_ns, duration_ns, transfer_ns, waits, *rest = row
    known = finish_ns is not None and duration_ns is not None
    if group < 0 or (duration_ns or 0) < 0 or (transfer_ns is not None and not (known and transfer_ns >= 0)):
        raise ValueError
    if not all(_is_row(wait, _INT, _INT) for wait in waits):
        raise ValueError
    origin, side, step = rest
    return Span(
        *(group, sequence, operation, num_bytes, issue_ns, finish_ns, origin, side, step),
        waits=[(start_ns, end_ns) for start_ns, end_ns in waits],
        duration_ns=duration_ns,
        transfer_ns=transfer_ns,
    )


def _segments(rows: list[Any], start_ns: int, end_ns: int) -> list[Segment]:
    segments = []
    boundary_ns = start_ns
    for row in rows:
        if not _is_row(row, _INT, _INT, _INT, _INT_OR_NONE, _INT):
            raise ValueError
        segment = Segment(*row)
        if not (0 <= segment.phase < len(PHASES) and boundary_ns == segment.start_ns <= segment.end_ns):
            raise ValueError
        if min(segment.cpu_ns or 0, segment.run_delay_ns) < 0:
            raise ValueError
        boundary_ns = segment.end_ns
        segments.append(segment)
    if boundary_ns != end_ns:
        raise ValueError
    return segments


def _traced_step(line: dict[str, Any], world_size: int) -> TracedStep:
    """A step's line of trace.jsonl; ValueError for one that is damaged."""
    numbers = [line.get(name) for name in ("step", "rank", "start_ns", "end_ns")]
    lists = [line.get(name) for name in ("segments", "spans", "pauses")]
    if not (is_ints(numbers, 4) and all(type(each) is list for each in lists)):
        raise ValueError
    step, rank, start_ns, end_ns = (int(each or 0) for each in numbers)
    segments, spans, pauses = (each or [] for each in lists)
    if not 0 <= rank < world_size or not all(_is_row(each, _INT, _INT, _INT) and each[0] <= each[1] for each in pauses):
        raise ValueError
    return TracedStep(
        *(step, rank, start_ns, end_ns),
        segments=_segments(segments, start_ns, end_ns),
        spans=[_span(row) for row in spans],
        pauses=[(first_ns, last_ns, generation) for first_ns, last_ns, generation in pauses],
    )


def _clock_readings(line: dict[str, Any], world_size: int) -> tuple[int, dict[int, tuple[int, int, int]]]:
    rows = line["clocks"]
    if not (_is_row([line.get("step")], _INT) and type(rows) is list):
        raise ValueError
    if not all(_is_row(row, *(_INT,) * 4) and 0 <= row[0] < world_size and row[3] >= 0 for row in rows):
        raise ValueError
    return line["step"], {rank: (at_ns, offset_ns, bound_ns) for rank, at_ns, offset_ns, bound_ns in rows}


def read_trace(directory: Path) -> Trace:
    """The trace of a run's newest attempt that has one, finished or still growing. Raises UserError, in one line, for
    what is no run, has no traced step, or cannot be read."""
    facts = read_facts(directory)
    try:
        lines, damaged = read_lines(directory / TRACE_FILE)
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from None
    by_attempt: dict[int, list[dict[str, Any]]] = {}
    for line in lines:
        if isinstance(line, dict) and type(line.get("attempt")) is int:
            by_attempt.setdefault(line["attempt"], []).append(line)
        else:
            damaged += 1
    newest = number_of(facts, "attempt")
    for attempt in sorted(by_attempt, reverse=True):
        if attempt > newest or not any("segments" in line for line in by_attempt[attempt]):
            continue
        if attempt != newest:
            facts = read_facts(directory, earlier_run_file(attempt))
        steps: dict[tuple[int, int], TracedStep] = {}
        clocks = []
        for line in by_attempt[attempt]:
            try:
                if "clocks" in line:
                    clocks.append(_clock_readings(line, facts["world_size"]))
                else:
                    traced = _traced_step(line, facts["world_size"])
                    steps[traced.step, traced.rank] = traced
            except ValueError:
                damaged += 1
        if steps:
            return Trace(directory, facts, [steps[key] for key in sorted(steps)], clocks, damaged)
    if damaged:
        raise UserError(f"{directory / TRACE_FILE} has no usable line ({damaged} are damaged)")
    raise UserError(f"run {directory} has no traced steps: train with --trace-steps 20:22")
