"""What every exported trace must be: the format's rules, and the ledger's numbers."""

from collections import defaultdict
from itertools import pairwise
from typing import Any

from bireme.ledger import PHASES, STATES
from bireme.run_reader import Run

Event = dict[str, Any]

REQUIRED = {
    "M": {"name", "pid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur"},
    "i": {"name", "cat", "pid", "tid", "ts", "s"},
    "s": {"name", "cat", "pid", "tid", "ts", "id"},
    "f": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
}


def ns(microseconds: float) -> int:
    """As viewers read it: some round and some cut, and both must give the same."""
    assert int(microseconds * 1000.0) == round(microseconds * 1000.0)
    return round(microseconds * 1000.0)


def slices(trace: Event, category: str | None = None) -> list[Event]:
    return [each for each in trace["traceEvents"] if each["ph"] == "X" and category in (None, each["cat"])]


def check_schema(trace: Event) -> None:
    """The object form, required keys by kind, times from 0, slices that nest in their track, and arrows in pairs that
    lead from inside one slice forward into another."""
    assert trace["displayTimeUnit"] == "ms" and isinstance(trace["otherData"], dict)
    tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    arrows: dict[int, list[Event]] = defaultdict(list)
    named = set()
    for event in trace["traceEvents"]:
        assert REQUIRED[event["ph"]] <= set(event), event
        assert type(event["pid"]) is int and type(event["tid"]) is int and type(event["name"]) is str
        if event["ph"] == "M":
            if event["name"] == "thread_name":
                assert (event["pid"], event["tid"]) not in named
                named.add((event["pid"], event["tid"]))
            continue
        assert ns(event["ts"]) >= 0
        if event["ph"] == "X":
            assert ns(event["dur"]) >= 0
            tracks[event["pid"], event["tid"]].append(event)
        elif event["ph"] in "sf":
            arrows[event["id"]].append(event)
    assert min(ns(event["ts"]) for event in trace["traceEvents"] if "ts" in event) == 0
    assert set(tracks) <= named
    for track in tracks.values():
        open_until: list[int] = []
        for event in sorted(track, key=lambda event: (ns(event["ts"]), -ns(event["dur"]))):
            start, end = ns(event["ts"]), ns(event["ts"]) + ns(event["dur"])
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1], f"overlaps: {event}"
            open_until.append(end)
    for pair in arrows.values():
        assert [event["ph"] for event in pair] == ["s", "f"]
        assert ns(pair[0]["ts"]) <= ns(pair[1]["ts"])
        for event in pair:
            around = [
                each
                for each in tracks[event["pid"], event["tid"]]
                if ns(each["ts"]) <= ns(event["ts"]) <= max(ns(each["ts"]), ns(each["ts"]) + ns(each["dur"]) - 1)
            ]
            assert len(around) == 1 and around[0]["name"] == event["name"]


def sums_ns(trace: Event) -> dict[tuple[int, int, str, str], int]:
    """By rank, step, phase and state."""
    sums: dict[tuple[int, int, str, str], int] = defaultdict(int)
    for each in slices(trace, "state"):
        sums[each["pid"], each["args"]["step"], each["args"]["phase"], each["name"]] += ns(each["dur"])
    return sums


def check_sums(sums: dict[tuple[int, int, str, str], int], run: Run, steps: list[int]) -> None:
    """The cells of the record, to the nanosecond, for every rank, step, phase and state."""
    lines = {line["step"]: line for line in run.steps}
    expected = {}
    for step in steps:
        for rank, cells_ns in enumerate(lines[step]["cells_ns"]):
            for index, cell_ns in enumerate(cells_ns):
                if cell_ns:
                    expected[rank, step, PHASES[index // len(STATES)], STATES[index % len(STATES)]] = cell_ns
    assert expected and {key: value for key, value in sums.items() if value} == expected


def check_tiling(trace: Event) -> None:
    """States follow each other without a gap inside a step, and so do phases, as long as the step."""
    for step in slices(trace, "step"):
        for category in ("state", "phase"):
            inside = [
                each
                for each in slices(trace, category)
                if each["pid"] == step["pid"] and each["args"]["step"] == step["args"]["step"]
            ]
            inside.sort(key=lambda each: ns(each["ts"]))
            assert ns(inside[0]["ts"]) == ns(step["ts"])
            for before, after in pairwise(inside):
                assert ns(before["ts"]) + ns(before["dur"]) == ns(after["ts"])
            assert ns(inside[-1]["ts"]) + ns(inside[-1]["dur"]) == ns(step["ts"]) + ns(step["dur"])
