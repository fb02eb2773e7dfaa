"""`bireme export trace`: traced steps as one JSON file for ui.perfetto.dev and chrome://tracing (docs/trace.md)."""

import gzip
import math
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import orjson

from bireme.errors import UserError
from bireme.files import not_a_link, written_whole
from bireme.observe.trace_steps import parse_steps, stretches
from bireme.report.trace_clock import Key, Place, places
from bireme.report.trace_layout import Event, events_of
from bireme.text import count
from bireme.trace_reader import Trace, read_trace

OUT_FILE = "trace.json"
_ORDER = {"M": 0, "X": 1, "i": 2, "s": 3, "f": 4}  # of events at the same time: an arrow needs its slices first


def trace_command(run: Path, steps: str | None, out: Path | None) -> Path:
    """`bireme export trace RUN [--steps 20:21] [--out FILE]`: writes the trace (RUN/trace.json; gzip where the name
    ends in .gz), whole or not at all, says how exact its clocks are, and returns the file's path.

    Raises UserError for what is no run or has no traced steps, for steps that are not traced, and for a file that
    cannot be written.
    """
    wanted = None if steps is None else parse_steps(steps, "--steps")
    trace = read_trace(run)
    content = trace_of(trace, wanted)
    path = out if out is not None else not_a_link(run / OUT_FILE)
    try:
        with written_whole(path) as file:
            _write(file, content, path.suffix == ".gz")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None
    for line in _said(trace, content):
        print(line)
    return path


def trace_of(trace: Trace, wanted: list[int] | None = None) -> dict[str, Any]:
    """The Chrome trace object of these steps (all that are traced, if none are given). UserError for steps that are
    not traced."""
    traced = sorted({step.step for step in trace.steps})
    unknown = [step for step in wanted or [] if step not in set(traced)]
    if unknown or (wanted is not None and not wanted):
        which = f"{'step' if len(unknown) == 1 else 'steps'} {_step_list(unknown)}" if unknown else "no step"
        raise UserError(f"run {trace.directory} did not trace {which}: it traced {_step_list(traced)}")
    chosen = set(traced if wanted is None else wanted)
    steps = [step for step in trace.steps if step.step in chosen]
    placed = places(trace)
    events, left_out = events_of(steps, placed, trace.facts["groups"], trace.facts["nodes"])
    begins_ns = min(event["ts"] for event in events if "ts" in event)
    events.sort(key=lambda event: (event.get("ts", begins_ns - 1), _ORDER[event["ph"]], -event.get("dur", 0)))
    clocks = _clocks([(step.rank, step.step) for step in steps], placed)
    bounds_ns = [clock["error_bound_ns"] for clock in clocks if clock["error_bound_ns"] is not None]
    ranks = {step.rank for step in steps}
    return {
        "traceEvents": [_in_microseconds(event, begins_ns) for event in events],
        "displayTimeUnit": "ms",
        "otherData": {
            "run": trace.directory.resolve().name.encode("utf-8", "replace").decode(),
            "steps": _step_list(sorted(chosen)),
            "clock": "rank 0's, at the rate of the fastest rank's; 0 is the beginning of the first event",
            "clock_error_bound_ns": max(bounds_ns, default=None),
            "clocks": clocks,
            "ranks_not_aligned": sorted({clock["rank"] for clock in clocks if clock["error_bound_ns"] is None}),
            "ranks_absent": sorted(set(range(trace.facts["world_size"])) - ranks),
            "arrows_left_out": left_out,
        },
    }


def _clocks(keys: Iterable[Key], placed: dict[Key, Place]) -> list[dict[str, Any]]:
    """What is known of each rank's clock, for each stretch of steps: the widest bound in it counts."""
    by_rank: dict[int, list[int]] = {}
    for rank, step in keys:
        by_rank.setdefault(rank, []).append(step)
    clocks = []
    for rank, steps in sorted(by_rank.items()):
        for first, last in stretches(sorted(steps)):
            here = [placed[rank, step] for step in range(first, last + 1)]
            bounds_ns = [place.error_bound_ns for place in here if place.error_bound_ns is not None]
            clock: dict[str, Any] = {"rank": rank, "first_step": first, "last_step": last}
            if len(bounds_ns) < len(here):
                reason = "this rank's clock was not compared: its first step begins where another rank's does"
                clocks.append({**clock, "offset_ns": None, "error_bound_ns": None, "error_bound_ns_reason": reason})
                continue
            place = here[0]
            clock |= {"offset_ns": place.offset_ns, "drift_ppm": round(place.drift * 1e6, 3)}
            clocks.append({**clock, "error_bound_ns": max(bounds_ns)})
    return clocks


def _in_microseconds(event: Event, begins_ns: int) -> Event:
    if "ts" in event:
        event = {**event, "ts": microseconds(event["ts"] - begins_ns)}
    if "dur" in event:
        event["dur"] = microseconds(event["dur"])
    return event


def microseconds(ns: int) -> float:
    """The number that viewers read back as exactly `ns`, whether they round or cut: Perfetto did the one and the
    other."""
    value = ns / 1000
    return value if int(value * 1000.0) == ns else math.nextafter(value, math.inf)


def _write(file: IO[bytes], content: dict[str, Any], compress: bool) -> None:
    data = orjson.dumps(content, option=orjson.OPT_APPEND_NEWLINE)
    if compress:
        with gzip.GzipFile(fileobj=file, mode="wb", filename="", mtime=0, compresslevel=6) as packed:
            packed.write(data)
    else:
        file.write(data)


def _said(trace: Trace, content: dict[str, Any]) -> list[str]:
    """Lines about the trace, for people."""
    about = content["otherData"]
    ranks = sorted({clock["rank"] for clock in about["clocks"]})
    steps = f"{'steps' if {',', '-'} & set(about['steps']) else 'step'} {about['steps']} of {count(len(ranks), 'rank')}"
    known = [clock for clock in about["clocks"] if clock["error_bound_ns"] is not None]
    if len(ranks) == 1:
        lines = [f"{steps}: one clock"]
    elif len({clock["rank"] for clock in known}) > 1:
        worst = max(known, key=lambda clock: clock["error_bound_ns"])
        bound_ms = worst["error_bound_ns"] / 1e6
        lines = [f"{steps}; clocks aligned to rank 0's within {bound_ms:.3f} ms (the worst: rank {worst['rank']})"]
    else:
        lines = [f"{steps}; how exactly their clocks are aligned: n/a, they were not compared"]
    if about["ranks_not_aligned"] and len(known) > 1:
        lines.append(f"clocks that were not compared: {count(len(about['ranks_not_aligned']), 'rank')}")
    if about["ranks_absent"]:
        lines.append(f"absent from this trace: {count(len(about['ranks_absent']), 'rank')}")
    if trace.damaged_lines:
        lines.append(f"{count(trace.damaged_lines, 'damaged line')} of its record could not be used")
    return lines


def _step_list(steps: list[int]) -> str:
    """``20-22, 30``: the stretches, shortened."""
    found = [str(first) if first == last else f"{first}-{last}" for first, last in stretches(steps)]
    return ", ".join(found[:8]) + (f" and {len(found) - 8} more stretches" if len(found) > 8 else "")
