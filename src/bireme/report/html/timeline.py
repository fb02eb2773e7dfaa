"""Step time, rate, loss and what happened, step by step; beyond what a screen shows, by buckets. Pure."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bireme.report.html.arrays import StepArrays, bucket_edges, rounded
from bireme.report.terminal import ms
from bireme.run_reader import Run, is_number
from bireme.text import count, name_ranks
from bireme.verdict.kinds import HEALTHY

POINTS = 2000  # more are drawn as buckets
_BUCKETS = 500
_MOST_MARKS = 400  # of one kind
_TEXT = 300  # characters of a message

# In this order from the top.
LANES = ("injection", "verdict", "resumed", "checkpoint", "evaluation", "GC pause")


def series(steps: Sequence[int] | NDArray[np.int64], values: NDArray[np.float64], digits: int = 3) -> dict[str, Any]:
    """`x` and `y`; with more than POINTS values `size` of them make a bucket: `y` its median, `low` and `high` its 10th
    and 90th percentile, `x` the step in its middle."""
    if len(values) <= POINTS:
        return {"x": [int(step) for step in steps], "y": rounded(values, digits), "size": 1}
    edges, size = bucket_edges(len(values), _BUCKETS)
    kept: dict[str, Any] = {"x": [], "y": [], "low": [], "high": [], "size": size}
    for a, b in edges:
        known = values[a:b][np.isfinite(values[a:b])]
        low, middle, high = np.quantile(known, (0.1, 0.5, 0.9)) if len(known) else (np.nan,) * 3
        kept["x"].append(int(steps[(a + b - 1) // 2]))
        for name, value in (("y", middle), ("low", low), ("high", high)):
            kept[name].extend(rounded([value], digits))
    return kept


def over_time(run: Run, summary: dict[str, Any], arrays: StepArrays) -> dict[str, Any]:
    """`step_ms` and `tokens_per_s` of the measured steps, `skipped` ones apart, `lanes` of what happened."""
    measured, slowest = arrays.measured, arrays.slowest_ms
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = arrays.tokens / (slowest / 1e3)
    reasons = {line["step"]: line["skipped"] for line in run.steps}
    left_out = np.flatnonzero(~measured)[:POINTS]
    skipped = {
        "x": [int(each) for each in arrays.steps[left_out]],
        "step_ms": rounded(arrays.step_ms[left_out]),
        "tokens_per_s": rounded(rate[left_out], 1),
        "text": [str(reasons[int(each)])[:_TEXT] for each in arrays.steps[left_out]],
    }
    numbers = arrays.steps[measured]
    result: dict[str, Any] = {
        "step_ms": series(numbers, arrays.step_ms[measured]),
        "tokens_per_s": series(numbers, rate[measured], 1) if np.isfinite(rate[measured]).any() else None,
        "tokens_reason": summary.get("tokens_per_s_global_reason"),
        "skipped": skipped,
        "first": int(arrays.steps[0]),
        "last": int(arrays.steps[-1]),
        "lanes": lanes(run, summary["verdicts"] or [], int(arrays.steps[0]), int(arrays.steps[-1])),
    }
    size = result["step_ms"]["size"]
    result["text"] = (
        "Each point: a step." if size == 1 else f"Each point: the median of {size} steps; the band: their p10 to p90."
    )
    return result


def lanes(run: Run, verdicts: Sequence[dict[str, Any]], first: int, last: int) -> list[dict[str, Any]]:
    """For each kind of event that there was: `name`, `spans` [from, to, text], `marks` [step, text]."""
    found: dict[str, dict[str, Any]] = {name: {"name": name, "spans": [], "marks": []} for name in LANES}

    def step_of(value: Any) -> int | None:
        return value if type(value) is int and first <= value <= last else None

    for verdict in verdicts:
        if verdict["kind"] != HEALTHY:
            span = [verdict["first_step"], verdict["last_step"], verdict["sentence"]]
            (found["verdict"]["spans"] if span[0] < span[1] else found["verdict"]["marks"]).append(
                span if span[0] < span[1] else [span[0], span[2]]
            )
    pauses: dict[int, list[tuple[float, Any]]] = {}
    for event in run.events:
        name, step = event["event"], step_of(event.get("step"))
        if name == "injection":
            begin, end = event.get("first_step"), event.get("last_step")
            begin = max(first, begin) if type(begin) is int else first
            end = min(last, end) if type(end) is int else last
            if begin <= end:
                found["injection"]["spans"].append([begin, end, _injection(event)])
        elif name == "gc_pause" and step is not None and is_number(event.get("ms")):
            pauses.setdefault(step, []).append((event["ms"], event.get("rank")))
        elif name == "verdict" and step is not None:
            seen = f"seen while training ({event.get('change')}): {event.get('message')}"
            found["verdict"]["marks"].append([step, seen])
        elif name == "checkpoint" and step is not None:
            took = f", {event['seconds']:.2f} s in the background" if is_number(event.get("seconds")) else ""
            found["checkpoint"]["marks"].append([step, f"checkpoint of step {step}{took}"])
        elif name == "checkpoint_failed" and step is not None:
            found["checkpoint"]["marks"].append([step, f"checkpoint failed: {event.get('reason')}"])
        elif name == "evaluation" and step is not None:
            loss = f": loss {event['loss']:.4f}" if is_number(event.get("loss")) else ""
            found["evaluation"]["marks"].append([step, f"evaluation{loss}"])
        elif name == "resumed":
            found["resumed"]["marks"].append([first, f"resumed: attempt {event.get('attempt')}"])
    for step, each in sorted(pauses.items()):
        longest, rank = max(each, key=lambda pause: pause[0])
        text = f"{count(len(each), 'GC pause')} in step {step}, the longest {ms(longest)} ms on rank {rank}"
        found["GC pause"]["marks"].append([step, text])
    for lane in found.values():
        lane["spans"] = [[a, b, text[:_TEXT]] for a, b, text in lane["spans"][:_MOST_MARKS]]
        lane["marks"], lane["text"] = _thinned([[step, text[:_TEXT]] for step, text in lane["marks"]])
    return [lane for lane in found.values() if lane["spans"] or lane["marks"]]


def _injection(event: dict[str, Any]) -> str:
    text = event.get("text")
    if isinstance(text, str) and text:
        return f"injected: {text}"
    ranks = event.get("ranks") if isinstance(event.get("ranks"), list) else [event.get("rank")]
    known = [rank for rank in ranks or [] if type(rank) is int]
    delays = event.get("delays_ms")
    size = f" of {', '.join(map(str, delays))} ms" if isinstance(delays, list) else ""
    where = f" in {event['phase']}" if isinstance(event.get("phase"), str) else ""
    return f"injected: {event.get('kind', 'sleep')}{size}{where}" + (f", {name_ranks(known)}" if known else "")


def _thinned(marks: list[list[Any]]) -> tuple[list[list[Any]], str]:
    if len(marks) <= _MOST_MARKS:
        return marks, ""
    every = math.ceil(len(marks) / _MOST_MARKS)
    return marks[::every], f"every {every}th of {len(marks)} is drawn"


def loss_of(run: Run, summary: dict[str, Any]) -> dict[str, Any]:
    """Training and evaluation loss of all attempts; `not_numbers`: [step, what it was]."""
    if summary["loss"] is None:
        return {"reason": summary["loss_reason"]}
    numbers: dict[int, float] = {}
    not_numbers: dict[int, str] = {}
    for line in [*run.earlier_steps, *run.steps]:
        step = line.get("step") if isinstance(line, dict) else None
        if type(step) is not int or abs(step) >= 1 << 53:
            continue
        if is_number(line.get("loss")):
            numbers[step] = float(line["loss"])
            not_numbers.pop(step, None)
        elif "loss_reason" in line:
            not_numbers[step] = str(line["loss_reason"])[:_TEXT]
            numbers.pop(step, None)
    evaluated = {
        event["step"]: float(event["loss"])
        for event in [*run.earlier_events, *run.events]
        if event["event"] == "evaluation" and type(event.get("step")) is int and is_number(event.get("loss"))
    }
    kept = series(list(numbers), np.array(list(numbers.values()), dtype=np.float64), 5)
    size = kept["size"]
    return {
        "reason": None,
        "training": kept,
        "evaluation": {"x": list(evaluated), "y": rounded(list(evaluated.values()), 5)},
        "not_numbers": [[step, text] for step, text in not_numbers.items()][:_MOST_MARKS],
        "not_numbers_total": len(not_numbers),
        "text": "" if size == 1 else f"Each point: the median of {size} steps; the band: their p10 to p90.",
    }
