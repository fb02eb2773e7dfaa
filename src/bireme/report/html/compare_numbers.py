"""From two runs and their comparison to the dict that the page of both draws: bars side by side, and which differences
exceed the noise. Pure."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bireme.ledger import COMPUTE_PHASES, PHASES, RUNNABLE, RUNNING, STATES, TRANSFER, WAIT, unobserved_states
from bireme.report.html.arrays import StepArrays, step_arrays
from bireme.report.html.bars import bars_of, how_chosen, ledgers_of, longest_ms, typical_rows
from bireme.report.html.numbers import Page, common_part, culprits_of, sentence_facts, what_ran_parts
from bireme.report.html.sentence import as_text, sentence
from bireme.report.html.timeline import loss_of, series
from bireme.report.terminal import ms, percent
from bireme.run_reader import Run

Series = NDArray[np.float64]

LEAST_STEPS = 8  # fewer say nothing about the noise
ERRORS = 3.0  # standard errors that a difference must exceed
_MEDIAN_ERROR = 1.2533  # standard error of a median / that of a mean, for normal noise
_MAD = 1.4826  # median absolute deviation to standard deviation
RULE = (
    f"A difference is beyond the noise where the medians over measured steps differ by more than {ERRORS:g} standard "
    f"errors: each run's is {_MEDIAN_ERROR} x {_MAD} x MAD / sqrt(steps), MAD the median absolute deviation from step "
    "to step, and both are added as squares. Steps are taken as independent: what changes slowly (another load on the "
    "machine, heat) is not in it, and only repeated runs show it."
)
_TEXT = 300


def compare_page(a: Run, b: Run, comparison: Page) -> Page:
    """All that the page shows. `comparison` is what `compare` made of the runs."""
    sides = [_side(run, comparison[name]) for name, run in (("a", a), ("b", b))]
    per_step = [side.pop("per_step") for side in sides]
    differences = comparison["differences"]
    rows = [
        _metric(row, per_step[0].get(row["metric"]), per_step[1].get(row["metric"]))
        for row in differences["metrics"]
        if row["a"] or row["b"]  # a cell that is 0 or unknown in both says nothing
    ]
    return {
        "kind": "compare",
        "title": f"{sides[0]['name']} and {sides[1]['name']}",
        **common_part(),
        "sides": sides,
        "scale_ms": max(side["longest_ms"] for side in sides),
        "verdict": _in_a_sentence(comparison, rows),
        "metrics": rows,
        "rule": RULE,
        "facts": [[row["field"], _short(row["a"]), _short(row["b"])] for row in differences["facts"]],
    }


def _side(run: Run, summary: Page) -> Page:
    arrays = step_arrays(run)
    rows = typical_rows(arrays)
    ledgers = ledgers_of(run, summary, arrays, rows)
    bars = bars_of(run, summary, ledgers, culprits_of(summary))
    said = sentence(
        {rank: cells for rank, cells in enumerate(ledgers["typical"]) if cells is not None},
        summary["verdicts"],
        sentence_facts(run, summary),
    )
    measured = arrays.measured
    return {
        "name": run.directory.resolve().name or "run",
        "directory": str(run.directory),
        "what": what_ran_parts(summary, run),
        "sentence": said,
        "sentence_text": as_text(said),
        "bars": bars,
        "longest_ms": longest_ms(bars),
        "how_chosen": how_chosen(arrays, rows),
        "step_ms": series(arrays.steps[measured], arrays.step_ms[measured]),
        "loss": loss_of(run, summary).get("training"),
        "notes": summary["notes"],
        "per_step": metric_series(run, summary, arrays),
    }


def metric_series(run: Run, summary: Page, arrays: StepArrays) -> dict[str, Series]:
    """By the metric's name in `compare`: its value in every measured step; what has none is absent."""
    rows = arrays.measured
    with np.errstate(invalid="ignore", divide="ignore"):
        cells = np.asarray(np.nanmean(arrays.cells_ms[rows], axis=1, dtype=np.float64))  # (T, cells)
        rate = arrays.tokens[rows] / (arrays.slowest_ms[rows] / 1e3)
    step_ms = arrays.step_ms[rows]
    unknown = unobserved_states(run.missing)
    width = len(STATES)
    found: dict[str, Series] = {"step, median": step_ms}
    if np.isfinite(rate).all():
        found["tokens/s (global)"] = rate
        mfu, per_s = summary["mfu"]["value"], summary["tokens_per_s_global"]
        if mfu is not None and per_s:
            found["MFU"] = rate * mfu / per_s
    found["compute"] = cells[:, [PHASES.index(phase) * width + RUNNING for phase in COMPUTE_PHASES]].sum(axis=1)
    for name, place in (("contention", RUNNABLE), ("transfer", TRANSFER), ("wait", WAIT)):
        if STATES[place] not in unknown:
            found[name] = cells[:, place::width].sum(axis=1)
    if "transfer" in found and (step_ms > 0).all():
        found["communication share"] = (found["transfer"] + found["wait"]) / step_ms
        numbers = set(arrays.steps[rows].tolist())
        for field in ("hidden_ns", "hidden_transfer_ns"):
            values = [_mean_known(line[field]) / 1e6 for line in run.steps if line["step"] in numbers]
            found[field.removesuffix("_ns").replace("_", " ")] = np.array(values)
    for p, phase in enumerate(PHASES):
        for s, state in enumerate(STATES):
            if state not in unknown:
                found[f"{phase}/{state}"] = cells[:, p * width + s]
    return found


def beyond_noise(a: Series, b: Series) -> Page:
    """Whether the medians of two series of steps differ by more than their noise: `change`, `error` (of the change),
    `beyond`; or None each with a `reason`."""
    if min(len(a), len(b)) < LEAST_STEPS:
        return {"change": None, "error": None, "beyond": None, "reason": f"fewer than {LEAST_STEPS} measured steps"}
    change = float(np.median(b) - np.median(a))
    error = math.hypot(_median_error(a), _median_error(b))
    return {"change": change, "error": error, "beyond": abs(change) > ERRORS * error and change != 0, "reason": ""}


def _median_error(values: Series) -> float:
    mad = float(np.median(np.abs(values - np.median(values))))
    return _MEDIAN_ERROR * _MAD * mad / math.sqrt(len(values))


def _mean_known(values: Sequence[int | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0


def _metric(row: Page, a: Series | None, b: Series | None) -> Page:
    unit = row["unit"]
    noise: Page = {"change": None, "error": None, "beyond": None, "reason": "not a number of single steps"}
    if a is not None and b is not None:
        noise = beyond_noise(a, b)
    if noise["beyond"] is None:
        text = "n/a"
    else:
        times = abs(noise["change"]) / noise["error"] if noise["error"] else math.inf
        many = "" if math.isinf(times) or not noise["change"] else f" ({min(times, 9999):.1f} errors)"
        text = ("yes" if noise["beyond"] else "no") + many
    change = row["change"]
    return {
        "metric": f"{row['metric']} (ms)" if unit == "ms" else row["metric"],
        "a": _value(row["a"], unit),
        "b": _value(row["b"], unit),
        "change": "n/a" if change is None else ("-" if change < 0 else "+") + _value(abs(change), unit),
        "ratio": "n/a" if row["ratio"] is None else f"{row['ratio']:.2f}",
        "noise": text,
        "beyond": noise["beyond"],
        "why": noise["reason"]
        or f"medians differ by {_value(noise['change'], unit)}, standard error {_value(noise['error'], unit)}",
    }


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return "n/a"
    if unit == "%":
        return percent(value)
    return f"{value:,.0f}" if unit == "1/s" else f"{value:.4f}" if not unit else ms(value)


def _in_a_sentence(comparison: Page, rows: Sequence[Page]) -> str:
    a, b = (comparison[name]["step_ms"]["median"] for name in ("a", "b"))
    step = next((row for row in rows if row["metric"] == "step, median (ms)"), None)
    if step is None or not a:
        return "The steps of A took no time."
    if step["beyond"] is None:
        return f"A step takes {ms(a)} ms in A and {ms(b)} ms in B; whether that is more than noise is not known."
    if not step["beyond"]:
        return f"A step takes {ms(a)} ms in A and {ms(b)} ms in B: the difference is within the noise."
    changed = [
        row
        for row in comparison["differences"]["metrics"]
        if "/" in row["metric"] and row["unit"] == "ms" and row["change"]
    ]
    longer = b > a
    text = f"A step of B takes {ms(abs(b - a))} ms {'longer' if longer else 'less'}: {ms(b)} ms instead of {ms(a)} ms"
    text += f" ({percent(abs(b - a) / a)})"
    same = [row for row in changed if (row["change"] > 0) == longer]
    if same:
        largest = max(same, key=lambda row: abs(row["change"]))
        size = abs(largest["change"])
        text += (
            f"; the ledger cell that {'grew' if longer else 'shrank'} the most is {largest['metric']}, by {ms(size)} ms"
        )
    return text + "."


def _short(value: Any) -> str:
    text = "n/a" if value is None else str(value)
    return text if len(text) <= _TEXT else text[: _TEXT - 3] + "..."
