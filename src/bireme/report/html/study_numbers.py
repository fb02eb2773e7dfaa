"""From the folder of a study to the dict that its page draws: tables, what was measured against its bound, and where
its runs are. Pure but for looking which files are there."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from bireme.errors import UserError
from bireme.report.html.numbers import Page, common_part
from bireme.report.terminal import ms, percent, scaled
from bireme.run_reader import RUN_FILE
from bireme.study.store import FORMAT, STUDY_FILE, VERSION
from bireme.text import count, shell

# What bars of a study are stacked of, by the state whose colour it has (report/figure.py's PARTS).
_PARTS = (
    ("running", "compute"),
    ("runnable", "contention"),
    ("transfer", "transfer"),
    ("wait", "wait"),
    ("blocked", "other"),
)
_RUN = re.compile(r"cells/[A-Za-z0-9._-]+")


def is_study(path: Path) -> bool:
    return (path / STUDY_FILE).is_file() and not (path / RUN_FILE).exists()


def study_page(directory: Path) -> Page:
    """UserError, in one line, for what is no whole study of this version, or has no finished cell yet."""
    results = _read(directory / STUDY_FILE)
    try:
        done = [each for each in results["cells"] if each["status"] == "finished"]
        if not done:
            raise UserError(f"the study in {directory} has no finished cell yet: run `bireme study {results['name']}`")
        return _page(directory, results, done)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        what = f"field {error} is absent" if isinstance(error, KeyError) else "a field has another type"
        raise UserError(f"{directory / STUDY_FILE} is damaged, or not written by bireme: {what}") from None


def _read(path: Path) -> Page:
    try:
        results = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise UserError(f"{path} is damaged: {error}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    if not isinstance(results, dict) or results.get("format") != FORMAT:
        raise UserError(f'{path} is not a study of bireme: it lacks "format": "{FORMAT}"')
    version = results.get("version")
    if type(version) is not int or version > VERSION:
        raise UserError(f"{path} has version {version}, this bireme reads up to {VERSION}: install a newer bireme")
    if results.get("name") not in _STUDIES:
        raise UserError(f"{path} is of a study {results.get('name')!r}, which this bireme does not know")
    return results


def _page(directory: Path, results: Page, done: Sequence[Page]) -> Page:
    make = _STUDIES[results["name"]]
    bars = [_bar(each) for each in done]
    parts: Page = {"answer": "", "tables": [], "values": [], "sweep": None, **make(results, done)}
    return {
        "kind": "study",
        "title": f"study of {results['name']}",
        "directory": str(directory),
        "status": str(results["status"]),
        "conditions": _conditions(results),
        **common_part(),
        "bars": bars,
        "scale_ms": max(max(sum(bar["parts"]), bar["bound_ms"] or 0.0) for bar in bars),
        **parts,
        "cells": [_cell(directory, each) for each in results["cells"]],
        "left_out": [[each["layout"], each["place"], each["reason"]] for each in results.get("left_out") or []],
    }


def _conditions(results: Page) -> list[str]:
    settings = results["settings"]
    cores = settings["cores_per_node"]
    model = f" {settings['model']}" if settings["model"] else ""
    return [
        count(settings["nodes"], "emulated node"),
        f"{count(cores, 'core')} each" if isinstance(cores, int) else "",
        f"{settings['preset']}{model}",
        f"{count(settings['batch_per_rank'], 'sequence')} a rank",
        str(results["status"]),
    ]


def _label(entry: Page) -> str:
    axes = entry["axes"]
    place = f"{axes['nodes']} x {axes['ranks_per_node']}"
    how = axes["reduction"] if axes["layout"] == "ddp" else axes["layout"]
    return place if axes["nodes"] == 1 else f"{place}, {entry['link']}, {how}"


def _bar(entry: Page) -> Page:
    split = entry["communication_ms"]
    known = (entry["compute_ms"], entry["contention_ms"], split["transfer"], split["wait"], entry["other_ms"])
    bound = entry.get("bound_ms")
    over = entry.get("step_over_bound")
    return {
        "label": _label(entry),
        "detail": "" if over is None else f"{over:.2f} x its bound",
        "parts": [round(max(0.0, value or 0.0), 3) for value in known],
        "names": [name for _, name in _PARTS],
        "states": [state for state, _ in _PARTS],
        "bound_ms": None if bound is None else round(float(bound), 3),
        "mean_ms": round(float(entry["step_ms"]["mean"]), 3),
    }


def _cell(directory: Path, entry: Page) -> Page:
    run = entry.get("run")
    known = isinstance(run, str) and _RUN.fullmatch(run) is not None and ".." not in run
    there = known and (directory / str(run) / "report.html").is_file()
    axes = entry["axes"]
    label = f"{axes['nodes']} x {axes['ranks_per_node']}, {axes['link']}, {axes['reduction']}, {axes['layout']}"
    return {
        "label": label,
        "status": str(entry["status"]),
        "reason": str(entry.get("reason") or ""),
        "link": f"{run}/report.html" if there else None,
        "command": f"bireme report {shell(str(directory / str(run)))} --html" if known else "",
    }


# --- the studies --------------------------------------------------------------------------------------------------


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> Page:
    return {"title": title, "columns": list(columns), "rows": [list(row) for row in rows], "note": note}


def _times(entry: Page) -> list[str]:
    split = entry["communication_ms"]
    return [
        _label(entry),
        *(ms(entry["step_ms"][name]) for name in ("median", "p10", "p90")),
        ms(entry["compute_ms"]),
        ms(entry["contention_ms"]),
        ms(split["transfer"]),
        ms(split["wait"]),
        ms(split["hidden"]),
        percent(entry["communication_share"]),
        "n/a" if entry["tokens_per_s_global"] is None else f"{entry['tokens_per_s_global']:,.0f}",
    ]


_TIMES = (
    *("nodes x ranks", "step", "p10", "p90", "compute", "contention", "transfer", "wait", "hidden", "exposed"),
    "tokens/s (global)",
)
_TIMES_NOTE = (
    "Milliseconds a step, means over ranks and measured steps; step: the median, p10 and p90 over steps. "
    "Exposed: transfer + wait, of the step."
)


def _values(title: str, unit: str, rows: Sequence[tuple[str, Any, str, Any]], mark: str = "", note: str = "") -> Page:
    """Bars of one number each: (label, value, its text, what it is held against)."""
    return {
        "title": title,
        "unit": unit,
        "mark": mark,
        "note": note,
        "rows": [
            {"label": label, "value": value, "text": text, "mark": held_against}
            for label, value, text, held_against in rows
        ],
    }


def _ranks(results: Page, done: Sequence[Page]) -> Page:
    rows = [
        (_label(each), each["efficiency"], percent(each["efficiency"]), 1.0)
        for each in done
        if each["efficiency"] is not None
    ]
    answer = "No cell of one rank alone to compare with."
    if rows:
        most = max(done, key=lambda each: each["axes"]["nodes"] * each["axes"]["ranks_per_node"])
        number = most["axes"]["nodes"] * most["axes"]["ranks_per_node"]
        if most["efficiency"] is not None:
            answer = (
                f"{count(number, 'rank')} train {most['efficiency'] * number:.2f} times as fast as one alone: "
                f"{percent(most['efficiency'])} of what they could."
            )
    return {
        "answer": answer,
        "tables": [_table("The cells", _TIMES, [_times(each) for each in done], _TIMES_NOTE)],
        "values": [
            _values(
                "Efficiency: tokens/s/rank, of those of one rank alone",
                "share",
                rows,
                "one rank alone",
                "The batch grows with the ranks.",
            )
        ],
    }


def _links(results: Page, done: Sequence[Page]) -> Page:
    held = [each for each in done if each.get("step_over_bound") is not None]
    answer = "No cell has a bound to be held against."
    if held:
        slow, fast = max(held, key=_median_ms), min(held, key=_median_ms)
        ratios = [each["step_over_bound"] for each in held]
        answer = f"A step takes {ms(_median_ms(slow))} ms with {slow['link']} and {slow['axes']['reduction']}"
        if _median_ms(fast) < _median_ms(slow):
            answer += f", {ms(_median_ms(fast))} ms with {fast['link']} and {fast['axes']['reduction']}"
        answer += f"; measured steps are {min(ratios):.2f} to {max(ratios):.2f} times their bound."
    traffic = [
        [
            _label(each),
            "n/a" if each["link_bytes"] is None else scaled(each["link_bytes"]),
            "n/a" if each.get("link_bit_per_s") is None else f"{each['link_bit_per_s'] / 1e6:,.0f}",
            percent(each.get("link_share")),
            ms(each.get("bound_ms")),
            "n/a" if each.get("step_over_bound") is None else f"{each['step_over_bound']:.2f}",
        ]
        for each in done
        if each["axes"]["nodes"] > 1
    ]
    columns = ("cell", "bytes a step", "rate Mbit/s", "of the link", "bound ms", "step / bound")
    note = "bound: the larger of what one node alone computes and the time that the bytes need on the link."
    return {
        "answer": answer,
        "tables": [
            _table("The cells", _TIMES, [_times(each) for each in done], _TIMES_NOTE),
            _table("Traffic and bound", columns, traffic, note),
        ],
    }


def _median_ms(entry: Page) -> float:
    return float(entry["step_ms"]["median"])


def _layouts(results: Page, done: Sequence[Page]) -> Page:
    fastest = results["fastest"]
    said = [
        f"{each['layout']} with {each['nodes']} x {each['ranks_per_node']} at {each['link']} ({ms(each['step_ms'])} ms)"
        for each in fastest
    ]
    answer = f"The fastest: {'; '.join(said)}." if said else "No layout was measured."
    traffic = [
        (
            _label(each),
            each["counted_link_bytes"] or 0.0,
            _bytes(each["counted_link_bytes"]),
            each["formula_link_bytes"],
        )
        for each in done
    ]
    memory = [
        (_label(each), held["max"], scaled(held["max"]), None)
        for each in done
        if (held := each["memory_bytes"]) is not None
    ]
    return {
        "answer": answer,
        "tables": [_table("The cells", _TIMES, [_times(each) for each in done], _TIMES_NOTE)],
        "values": [
            _values(
                "Bytes over the busiest node's link, a step",
                "bytes",
                traffic,
                "by the layout's formula",
                "Counted by its interface, in the busier direction.",
            ),
            _values("Memory of the largest rank, above what it had before the model", "bytes", memory),
        ],
    }


def _bytes(value: float | None) -> str:
    return "n/a" if value is None else scaled(value)


def _straggler(results: Page, done: Sequence[Page]) -> Page:
    sweep = results["sweep"]
    tables = [_table("The run", _TIMES, [_times(each) for each in done], _TIMES_NOTE)]
    if sweep is None or sweep["delays"] is None:
        why = results["sweep_reason"] if sweep is None else sweep["delays_reason"]
        return {"answer": f"The sweep is n/a: {why}.", "tables": tables}
    found = sweep["found"]
    place, rank, fit = f"{found['phase']}/{found['state']}", sweep["rank"], sweep["step_fit"]
    answer = (
        f"Of every millisecond that rank {rank} sleeps in {sweep['phase']} a step takes {fit['slope']:.2f} ms longer; "
        f"the ledger finds {ms(found['growth_ms'])} of {found['planted_ms']:g} ms planted in {place}."
    )
    rows = [
        [
            f"{each['delay_ms']:g}",
            ms(each["step_ms"]),
            ms(each["punctual_wait_ms"]),
            ms(each["slow_found_ms"]),
            ms(each["slow_wait_ms"]),
            str(each["steps"]),
        ]
        for each in sweep["delays"]
    ]
    columns = ("delay ms", "step", "the others' wait", f"rank {rank}: {place}", f"rank {rank}: wait", "steps")
    lines = [
        _line("step (median)", "accent", [each["step_ms"] for each in sweep["delays"]], fit),
        _line("wait of the others", "wait", [each["punctual_wait_ms"] for each in sweep["delays"]], sweep["wait_fit"]),
        _line(f"rank {rank}, {place}", found["state"], [each["slow_found_ms"] for each in sweep["delays"]], None),
    ]
    shown = {"x": [each["delay_ms"] for each in sweep["delays"]], "lines": lines, "rank": rank, "phase": sweep["phase"]}
    return {
        "answer": answer,
        "sweep": shown,
        "tables": [
            _table("By delay", columns, rows, "Milliseconds a step, means over steps; step: the median."),
            *tables,
        ],
    }


def _line(name: str, state: str, values: list[Any], fit: Page | None) -> Page:
    words = (
        "" if fit is None else f"{fit['slope']:.3f} x delay + {fit['intercept_ms']:.1f} ms, R2 {fit['r_squared']:.4f}"
    )
    slope = None if fit is None else [float(fit["slope"]), float(fit["intercept_ms"])]
    return {"name": name, "state": state, "y": values, "fit": slope, "words": words}


_STUDIES = {"ranks": _ranks, "straggler": _straggler, "links": _links, "layouts": _layouts}
