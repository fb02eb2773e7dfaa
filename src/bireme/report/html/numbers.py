"""From a run and its summary to the one dict that its page draws. Pure: what is in it is text, numbers and lists."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bireme.ledger import PHASES, STATES, bus_bandwidth_factor
from bireme.links import LinkTable
from bireme.report.colours import ACCENT, STATE_COLOURS
from bireme.report.html import bars as bars_module
from bireme.report.html.arrays import StepArrays, step_arrays
from bireme.report.html.heat import heat_map
from bireme.report.html.sentence import as_text, sentence
from bireme.report.html.timeline import loss_of, over_time
from bireme.report.html.worth import mfu_rows, worth_rows
from bireme.report.terminal import ms, percent, scaled
from bireme.report.verdicts import verdict_lines
from bireme.run_reader import Run
from bireme.text import count, rank_list, short
from bireme.verdict.kinds import HEALTHY, ONE_OFF

Page = dict[str, Any]

_PARAMETERS = {"": 1.0, "thousand": 1e3, "million": 1e6, "billion": 1e9}
_COLLECTIVES = 24  # rows of their table; with more, groups that are alike share one
_KINDS = {
    HEALTHY: "healthy",
    "one_off": "one-off",
    "rank": "rank",
    "node": "node",
    "link": "link",
    "stage_imbalance": "stage imbalance",
    "data_imbalance": "data imbalance",
    "drift": "drift",
}


def run_page(run: Run, summary: Page, links: LinkTable | None = None) -> Page:
    """All that the page of one run shows. `summary` is what `summarise` made of `run`; `links`: the measured table that
    its transfers are held against."""
    arrays = step_arrays(run)
    culprits = culprits_of(summary)
    rows = bars_module.typical_rows(arrays)
    ledgers = bars_module.ledgers_of(run, summary, arrays, rows)
    bars = bars_module.bars_of(run, summary, ledgers, culprits)
    said = sentence(
        {rank: cells for rank, cells in enumerate(ledgers["typical"]) if cells is not None},
        summary["verdicts"],
        sentence_facts(run, summary),
    )
    return {
        "kind": "run",
        "title": str(run.directory.resolve().name) or "run",
        "what": what_ran_parts(summary, run),
        "sentence": said,
        "sentence_text": as_text(said),
        "figures": figures(run, summary, arrays),
        **common_part(),
        "bars": bars,
        "scale_ms": bars_module.longest_ms(bars),
        "how_chosen": bars_module.how_chosen(arrays, rows),
        "ledgers": ledgers,
        "rank_names": {str(rank): node["name"] for node in run.facts["nodes"] for rank in node["ranks"]},
        "ledger_reason": summary.get("ledger_ms_reason"),
        "heat": heat_map(run, arrays, culprits),
        "time": over_time(run, summary, arrays),
        "loss": loss_of(run, summary),
        "communication": communication(summary, links),
        "verdicts": verdict_cards(summary),
        "verdicts_reason": summary.get("verdicts_reason"),
        "mfu": mfu_rows(run, summary),
        "worth": worth_rows(summary),
        "facts": facts(run, summary),
        "notes": summary["notes"],
    }


def common_part() -> Page:
    """What every page needs to draw a ledger: the names and colours of its parts."""
    return {"phases": list(PHASES), "states": list(STATES), "colours": {**STATE_COLOURS, "accent": ACCENT}}


def sentence_facts(run: Run, summary: Page) -> Page:
    unknown = [f"{name} could not be observed ({why})" for name, why in sorted(run.missing.items())]
    return {
        "ranks": run.world_size,
        "mean_ms": summary["step_ms"]["mean"],
        "median_ms": summary["step_ms"]["median"],
        "measured": summary["steps"]["measured"],
        "verdicts_reason": summary.get("verdicts_reason"),
        "unknown": [
            text.replace("collectives could", "transfer and waiting are part of what is blocked: collectives could")
            for text in unknown
        ],
    }


def culprits_of(summary: Page) -> list[int]:
    """Ranks that verdicts name, the most expensive verdict first; not those of verdicts on all or nearly all ranks."""
    ranks: dict[int, None] = {}
    for verdict in summary["verdicts"] or []:
        if verdict["kind"] in ("rank", "node", "drift") and len(verdict["ranks"]) * 2 <= max(2, summary["world_size"]):
            ranks |= dict.fromkeys(verdict["ranks"])
    return list(ranks)


# --- the head ----------------------------------------------------------------------------------------------------


def what_ran_parts(summary: Page, run: Run) -> list[str]:
    """Ranks and nodes, layout, model, steps, how it ended."""
    facts = run.facts
    parts = [f"{count(summary['world_size'], 'rank')} on {count(len(summary['nodes']), 'node')}"]
    link = (facts.get("network") or {}).get("link")
    parts += [f"links {link}"] if link else []
    layout = [str(facts[name]) for name in ("layout", "reduction") if facts.get(name)]
    parts += [", ".join(layout)] if layout else []
    model = facts.get("model") or {}
    if model:
        size = f", {scaled(model['parameters'], _PARAMETERS)} parameters" if model.get("parameters") else ""
        parts.append(f"{model.get('preset') or 'model'}{size}")
    steps = summary["steps"]
    parts.append(f"{count(steps['measured'], 'step')} measured, {steps['skipped']} skipped")
    return [*parts, str(facts["status"])]


def job_rate(arrays: StepArrays) -> float | None:
    """Tokens of all recorded steps over all their time on the slowest rank: warm-up, evaluation and checkpoints too."""
    counted = np.isfinite(arrays.tokens)
    wall_s = float(np.nansum(arrays.wall_ms, axis=0).max()) / 1e3
    return float(arrays.tokens[counted].sum()) / wall_s if counted.any() and wall_s > 0 else None


def rank_rates(arrays: StepArrays) -> tuple[float, float, float] | None:
    """(least, median, most) over ranks of tokens/s/rank: a rank's part of the measured tokens over its own time."""
    rows = arrays.measured & np.isfinite(arrays.tokens)
    present = arrays.present[rows]
    wall_s = np.nansum(arrays.wall_ms[rows], axis=0) / 1e3
    tokens = (np.where(present, arrays.tokens[rows, None], 0.0)).sum(axis=0) / arrays.wall_ms.shape[1]
    rates = tokens[wall_s > 0] / wall_s[wall_s > 0]
    if not len(rates) or not rates.max() > 0:
        return None
    return float(rates.min()), float(np.median(rates)), float(rates.max())


def figures(run: Run, summary: Page, arrays: StepArrays) -> list[Page]:
    """The row of numbers below the bar: `label`, `value`, `detail`."""
    step, rate = summary["step_ms"], summary["tokens_per_s_global"]
    no_rate = summary.get("tokens_per_s_global_reason")
    rates = rank_rates(arrays) if rate is not None else None
    job = job_rate(arrays)
    mfu, split = summary["mfu"], summary["communication_ms"]
    exposed = summary["communication_share"]
    skipped = summary["steps"]["skipped"]
    return [
        figure(
            "step (median)",
            f"{ms(step['median'])} ms",
            f"p10 {ms(step['p10'])}, p90 {ms(step['p90'])}, mean {ms(step['mean'])}",
        ),
        figure("tokens/s (global)", _rate(rate), no_rate or f"{count(summary['steps']['measured'], 'measured step')}"),
        figure(
            "tokens/s/rank (median)",
            "n/a" if rates is None else _rate(rates[1]),
            (no_rate or "n/a") if rates is None else f"min {_rate(rates[0])}, max {_rate(rates[2])} over ranks",
        ),
        figure(
            "tokens/s of the job (global)",
            _rate(job),
            no_rate if job is None else f"all steps, {skipped} skipped ones and what is beside training included",
        ),
        figure(
            "MFU",
            percent(mfu["value"]),
            mfu.get("value_reason")
            or "full attention"
            + (f"; {percent(mfu['value_causal'])} causal" if mfu["value_causal"] is not None else ""),
        ),
        figure(
            "exposed communication",
            percent(exposed),
            split.get("transfer_reason")
            or f"transfer {ms(split['transfer'])} ms + wait {ms(split['wait'])} ms; hidden {ms(split['hidden'])} ms",
        ),
    ]


def figure(label: str, value: str, detail: str | None) -> Page:
    return {"label": label, "value": value, "detail": detail or ""}


def _rate(value: float | None) -> str:
    if value is None:
        return "n/a"
    return f"{value:,.0f}" if value >= 100 else short(value)


# --- communication -----------------------------------------------------------------------------------------------


def communication(summary: Page, links: LinkTable | None) -> Page:
    """`parts`: hidden against exposed, milliseconds a step, and `collectives`: rows of text."""
    split = summary["communication_ms"]
    if split["transfer"] is None:
        return {"reason": split["transfer_reason"], "parts": [], "collectives": [], "links": links is not None}
    hidden_rest = max(0.0, split["hidden"] - split["hidden_transfer"])
    parts = [
        {"label": "exposed transfer", "state": "transfer", "hidden": False, "ms": round(split["transfer"], 3)},
        {"label": "exposed wait", "state": "wait", "hidden": False, "ms": round(split["wait"], 3)},
        {"label": "hidden transfer", "state": "transfer", "hidden": True, "ms": round(split["hidden_transfer"], 3)},
        {"label": "hidden, waiting for a rank", "state": "wait", "hidden": True, "ms": round(hidden_rest, 3)},
    ]
    rows = [_collective(each, links) for each in _alike(summary["collectives"] or [])]
    return {"reason": None, "parts": parts, "collectives": rows, "links": links is not None}


def _alike(uses: Sequence[Page]) -> list[Page]:
    """With many groups: those of as many ranks with the same operation as one row of means, and the slowest of them."""
    if len(uses) <= _COLLECTIVES:
        return list(uses)
    kinds: dict[tuple[str, int], list[Page]] = {}
    for use in uses:
        kinds.setdefault((use["operation"], len(use["ranks"])), []).append(use)
    rows: list[Page] = []
    for (operation, ranks), members in kinds.items():
        if len(members) == 1:
            rows += members
            continue
        means = {
            name: sum(use[name] for use in members) / len(members)
            for name in ("count", "bytes", "transfer_ms", "wait_ms")
        }
        known = [rate for use in members if (rate := use["bus_bandwidth_bytes_per_s"]) is not None]
        rate = sum(known) / len(known) if known else None
        name = f"{len(members)} groups of {count(ranks, 'rank')}, means"
        rows.append({"group": name, "ranks": [], "operation": operation, **means, "bus_bandwidth_bytes_per_s": rate})
        slowest = max(members, key=lambda use: float(use["transfer_ms"]))
        rows.append({**slowest, "group": f"the slowest of them: {slowest['group']}"})
    return rows


def _collective(use: Page, links: LinkTable | None) -> Page:
    rate = use["bus_bandwidth_bytes_per_s"]
    measured, reason = _measured_rate(use, links)
    return {
        "group": use["group"],
        "ranks": rank_list(use["ranks"]),
        "operation": use["operation"],
        "count": f"{use['count']:.4g}",
        "bytes": scaled(use["bytes"]),
        "transfer": ms(use["transfer_ms"]),
        "wait": ms(use["wait_ms"]),
        "rate": "n/a" if rate is None else f"{scaled(rate)}/s",
        "rate_reason": use.get("bus_bandwidth_bytes_per_s_reason") or "",
        "measured": "n/a" if measured is None else f"{scaled(measured)}/s",
        "measured_reason": reason,
        "of_link": None if rate is None or not measured else round(rate / measured, 4),
        "of_link_text": "n/a" if rate is None or not measured else percent(rate / measured),
    }


def _measured_rate(use: Page, links: LinkTable | None) -> tuple[float | None, str]:
    """The bus bandwidth that `bireme links` measured of this operation, size and group; or None, and why."""
    from bireme.errors import UserError

    if links is None:
        return None, "no --links FILE"
    if use["bus_bandwidth_bytes_per_s"] is None or not use["count"]:
        return None, use.get("bus_bandwidth_bytes_per_s_reason") or "never called"
    members = tuple(sorted(use["ranks"]))
    for group in links.groups:
        if members in {tuple(sorted(each)) for each in group.members}:
            size = use["bytes"] / use["count"]
            try:
                seconds = links.time_s(use["operation"], size, group.name)
            except UserError as error:
                return None, str(error)
            return bus_bandwidth_factor(use["operation"], len(members)) * size / seconds, ""
    return None, "this group was not measured"


# --- verdicts ----------------------------------------------------------------------------------------------------


def verdict_cards(summary: Page) -> list[Page]:
    """Each with its sentence, `lines` of (name, text), where and when it is, and the step now and without it."""
    cards = []
    for verdict, (_, below) in zip(summary["verdicts"] or [], verdict_lines(summary), strict=False):
        lines = []
        for line in below:
            name, colon, text = line.partition(": ")
            named = colon and name in ("worth", "evidence", "advice")
            lines.append({"name": name if named else "", "text": text if named else line})
        worth = verdict["what_if"]
        shown = worth is not None and verdict["kind"] != ONE_OFF
        sentence_text = verdict["sentence"]
        cards.append(
            {
                "kind": _KINDS.get(verdict["kind"], verdict["kind"]),
                "healthy": verdict["kind"] == HEALTHY,
                "sentence": sentence_text[:1].upper() + sentence_text[1:],
                "where": "" if verdict["phase"] is None else f"{verdict['phase']} / {verdict['state']}",
                "state": verdict["state"],
                "steps": _steps_named(verdict["first_step"], verdict["last_step"]),
                "confidence": f"confidence {verdict['confidence']:.2f}",
                "lines": lines,
                "now_ms": round(summary["step_ms"]["median"], 3) if shown else None,
                "without_ms": worth["step_ms"] if shown else None,
                "now_text": f"{ms(summary['step_ms']['median'])} ms",
                "without_text": f"{ms(worth['step_ms'])} ms" if shown else "",
            }
        )
    return cards


def _steps_named(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


# --- facts -------------------------------------------------------------------------------------------------------


def facts(run: Run, summary: Page) -> list[list[str]]:
    """[name, text] of what there is to know about the run and its measuring."""
    from bireme.report.terminal import host_lines, resource_lines

    written, overhead = run.facts, summary["overhead"]
    versions = written.get("versions") or {}
    nodes = summary["nodes"]
    shown = [f"{node['name']} ({rank_list(node['ranks'])})" for node in nodes[:12]]
    rows: list[tuple[str, Any]] = [
        ("directory", str(run.directory)),
        ("command", _command(written.get("command"))),
        ("status", f"{written['status']}" + (f": {written['status_reason']}" if written.get("status_reason") else "")),
        ("started, ended", " to ".join(str(written.get(name) or "?") for name in ("started_utc", "ended_utc"))),
        ("versions", ", ".join(f"{name} {value}" for name, value in versions.items())),
        ("layout", ", ".join(str(written[name]) for name in ("layout", "reduction") if written.get(name))),
        ("nodes", "; ".join(shown) + (f"; and {len(nodes) - 12} more" if len(nodes) > 12 else "")),
        ("attempt", written.get("attempt")),
        (
            "cost of measuring",
            f"{overhead['ms_per_step']:.3f} ms a step ({percent(overhead['share'])}): "
            f"{overhead['training_thread_ms']:.3f} on the training thread, "
            f"{overhead['background_ms']:.3f} in the background",
        ),
        ("closure", _closure(summary)),
    ]
    rows += [("resources", text) for text in resource_lines(summary)]
    hosts = host_lines(summary)
    rows += [("host", text) for text in hosts] or [("host", "no CPU quota and no steal of 1 % or more was seen")]
    return [[name, _plain(str(text))] for name, text in rows if text not in (None, "")]


def _command(command: Any) -> str:
    import shlex

    if not isinstance(command, list) or not all(isinstance(each, str) for each in command):
        return ""
    return shlex.join(command)


def _closure(summary: Page) -> str:
    if summary["closure_error_ns"]:
        return (
            f"error {summary['closure_error_ns']} ns: the ledger does NOT add up to the wall time: please report this"
        )
    text = f"error 0 ns: the ledger adds up to the wall time; clamped {summary['clamped_ms']:.3f} ms a step"
    if summary["unlocated_ms"] is not None:
        text += f", unlocated {summary['unlocated_ms']:+.3f} ms"
    return text + (f", {summary['unmatched']} collectives unmatched" if summary["unmatched"] else "")


def _plain(text: str) -> str:
    """Undoes what `safe` escaped for the terminal, and keeps the length of a page sane."""
    return text.replace("\\[", "[")[:2000]
