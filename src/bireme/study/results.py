"""From the runs of a study's cells to its results: numbers, and the bound they are held against. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bireme.environment import UNSHAPED
from bireme.ledger import PHASES, STATES, bus_bandwidth_factor
from bireme.nodes import parse_rate
from bireme.report.resources import formula_link_bytes, unknown
from bireme.report.summary import summarise
from bireme.run_reader import Run
from bireme.study.grid import Cell, Study
from bireme.study.layouts import compare_layouts
from bireme.study.rows import fit_line, rows_from_run

_Object = dict[str, Any]

_FROM_SUMMARY = (
    "step_ms",
    "compute_ms",
    "contention_ms",
    "communication_ms",
    "communication_share",
    "tokens_per_s_global",
)


def study_results(
    study: Study, finished: Mapping[Cell, tuple[_Object, Run]], failed: Mapping[Cell, str], status: str
) -> _Object:
    """The one object of `bireme study NAME --json` (docs/studies.md), but for what says which study it is."""
    cells = []
    for cell in study.cells:
        entry: _Object = {"key": cell.key, "axes": cell.as_dict(), "status": "not run"}
        if cell in finished:
            conditions, run = finished[cell]
            entry |= {"status": "finished", "run": f"cells/{cell.key}", **conditions, **cell_numbers(cell, run)}
            if study.name == "layouts":
                summary = summarise(run)
                entry |= summary["link_traffic"] | summary["memory"]
        elif cell in failed:
            entry |= {"status": "failed", "reason": failed[cell], "log": f"cells/{cell.key}.log"}
        cells.append(entry)
    results: _Object = {"status": status, "cells": cells}
    if study.name == "ranks":
        _add_efficiency(cells)
    elif study.name == "straggler":
        results["sweep"] = None
        for cell in study.cells:
            if cell in finished:
                results["sweep"] = straggler_sweep(finished[cell][1])
        if results["sweep"] is None:
            results["sweep_reason"] = "the run is not finished"
    elif study.name == "layouts":
        results["left_out"] = [asdict(each) for each in study.left_out]
        results |= compare_layouts(cells)
    else:
        _add_bound(cells)
    return results


def cell_numbers(cell: Cell, run: Run) -> _Object:
    """What every study shows of a cell: the run's summary, and what its links carried."""
    summary = summarise(run)
    numbers: _Object = {}
    for name in _FROM_SUMMARY:
        numbers |= {each: summary[each] for each in (name, f"{name}_reason") if each in summary}
    named = (summary["compute_ms"], summary["contention_ms"], *_split(summary))
    numbers["other_ms"] = summary["step_ms"]["mean"] - sum(value or 0.0 for value in named)
    return numbers | link_numbers(summary, cell, formula_link_bytes(run))


def _split(summary: _Object) -> tuple[float | None, float | None]:
    return summary["communication_ms"]["transfer"], summary["communication_ms"]["wait"]


# --- the link -----------------------------------------------------------------------------------------------------


def link_bytes(collectives: Sequence[_Object], nodes: Sequence[_Object]) -> float:
    """Bytes a step that the busiest node's link must carry in each direction.

    The ranks of a collective form a ring in which a node's ranks are neighbours. An all-reduce of N bytes over n ranks
    sends 2(n-1)/n N from each rank to the next; of the pairs of neighbours only the last rank of a node and the first
    of the next lie on two nodes, so every node's link carries 2(n-1)/n N out and as much in, however many ranks the
    node has: N with two nodes of one rank, 2(2g-1)/(2g) N with two nodes of g. The factor is that of the bus bandwidth,
    which holds for what a ring runs: all-reduce, all-gather, reduce-scatter (DDP uses all-reduce alone).
    Collectives inside a node cross no link; those of several groups add up.
    """
    most = 0.0
    for node in nodes:
        here = set(node["ranks"])
        carried = 0.0
        for use in collectives:
            members = set(use["ranks"])
            if members & here and members - here:
                carried += bus_bandwidth_factor(use["operation"], len(members)) * use["bytes"]
        most = max(most, carried)
    return most


def bound_ms(compute_alone_ms: float, carried_bytes: float, bit_per_s: float | None) -> float:
    """No step can be shorter than what one node alone computes (running in forward, backward and optimizer: without
    what it waited for a core), or than its bytes take on the link."""
    return max(compute_alone_ms, 8e3 * carried_bytes / bit_per_s if bit_per_s else 0.0)


def link_rate(link: str) -> int | None:
    """Bits per second; None where nothing limits it."""
    return None if link == UNSHAPED else parse_rate(link)


def link_numbers(summary: _Object, cell: Cell, carried: float | None) -> _Object:
    """Bytes over a node's link, the rate at which they went, and its share of the link's. `carried`: the bytes by the
    trainer's formula; a run of before there was one says what it observed, in which only DDP's ring is understood."""
    names = ("link_bytes", "link_bit_per_s", "link_share")
    split = summary["communication_ms"]
    if carried is None:
        if cell.layout != "ddp":
            return unknown(names, "the run does not say what its layout sends")
        if summary["collectives"] is None:
            return unknown(names, summary["collectives_reason"])
        carried = link_bytes(summary["collectives"], summary["nodes"])
    numbers: _Object = {"link_bytes": carried}
    if not carried:
        return numbers | unknown(names[1:], "nothing crosses a link")
    if split["transfer"] is None:
        return numbers | unknown(names[1:], split["transfer_reason"])
    busy_ms = split["transfer"] + split["hidden_transfer"]
    if busy_ms <= 0:
        return numbers | unknown(names[1:], "no transfer time is known")
    numbers["link_bit_per_s"] = 8e3 * carried / busy_ms
    rate = link_rate(cell.link)
    if rate is None:
        return numbers | unknown(names[2:], f"the link is {cell.link}")
    return numbers | {"link_share": numbers["link_bit_per_s"] / rate}


def _add_bound(cells: Sequence[_Object]) -> None:
    alone = next((each for each in cells if each["axes"]["nodes"] == 1 and each["status"] == "finished"), None)
    for entry in cells:
        if entry["status"] != "finished" or entry is alone:
            continue
        names = ("bound_ms", "step_over_bound")
        if alone is None:
            entry |= unknown(names, "one node alone was not measured")
        elif entry["link_bytes"] is None:
            entry |= unknown(names, entry["link_bytes_reason"])
        else:
            least = bound_ms(alone["compute_ms"], entry["link_bytes"], link_rate(entry["axes"]["link"]))
            entry |= {"bound_ms": least, "step_over_bound": entry["step_ms"]["median"] / least}


# --- weak scaling -------------------------------------------------------------------------------------------------


def _add_efficiency(cells: Sequence[_Object]) -> None:
    """`efficiency`: tokens/s/rank against those of one rank alone, which has the same batch."""
    done = [each for each in cells if each["status"] == "finished"]
    ranks = [each["axes"]["nodes"] * each["axes"]["ranks_per_node"] for each in done]
    alone = next((each["tokens_per_s_global"] for each, count in zip(done, ranks, strict=True) if count == 1), None)
    for entry, count in zip(done, ranks, strict=True):
        if alone and entry["tokens_per_s_global"]:
            entry["efficiency"] = entry["tokens_per_s_global"] / count / alone
        else:
            entry |= unknown(["efficiency"], "one rank alone, or this run, has no tokens/s")


# --- a straggler --------------------------------------------------------------------------------------------------


def straggler_sweep(run: Run) -> _Object:
    """By delay: step, the punctual ranks' wait, and the slow rank's cell of the ledger that grew the most."""
    rows = rows_from_run(run)
    slow = rows[0].straggler_rank
    names = ("delays", "step_fit", "wait_fit", "found", "rank", "phase")
    if slow is None or len(rows) < 2:
        return unknown(names, "the run recorded fewer than two delays")
    ledgers: list[_Object] = [_ledger_at(run, row.straggler_ms) for row in rows]
    phase, state, growth_ms = largest_growth(ledgers[0][str(slow)], ledgers[-1][str(slow)])
    delays = []
    for row, ledger in zip(rows, ledgers, strict=True):
        punctual = [_wait_ms(cells) for rank, cells in ledger.items() if rank != str(slow)]
        known = [wait for wait in punctual if wait is not None]
        delays.append(
            {
                "delay_ms": row.straggler_ms,
                "steps": row.steps,
                "step_ms": row.step_ms,
                "punctual_wait_ms": sum(known) / len(known) if known else None,
                **({} if known else {"punctual_wait_ms_reason": "collectives were not observed"}),
                "slow_wait_ms": _wait_ms(ledger[str(slow)]),
                "slow_found_ms": ledger[str(slow)][phase][state],
            }
        )
    x = [each["delay_ms"] for each in delays]
    waits = [each["punctual_wait_ms"] for each in delays if each["punctual_wait_ms"] is not None]
    result: _Object = {
        "rank": slow,
        "phase": rows[0].straggler_phase,
        "delays": delays,
        "found": {"phase": phase, "state": state, "growth_ms": growth_ms, "planted_ms": x[-1] - x[0]},
        "step_fit": _fit(x, [each["step_ms"] for each in delays]),
    }
    if len(waits) < len(x):
        return result | unknown(["wait_fit"], "collectives were not observed")
    return result | {"wait_fit": _fit(x, waits)}


def _fit(x: Sequence[float], y: Sequence[float]) -> _Object:
    return dict(zip(("slope", "intercept_ms", "r_squared"), fit_line(x, y), strict=True))


def _ledger_at(run: Run, delay_ms: float) -> _Object:
    ledger: _Object = summarise(run, lambda step: float(step.get("injected_ms") or 0.0) == delay_ms)["ledger_ms"]
    return ledger


def _wait_ms(cells: Mapping[str, Mapping[str, float | None]]) -> float | None:
    waits = [states["wait"] for states in cells.values()]
    known = [wait for wait in waits if wait is not None]
    return sum(known) if len(known) == len(waits) else None


def largest_growth(
    before: Mapping[str, Mapping[str, float | None]], after: Mapping[str, Mapping[str, float | None]]
) -> tuple[str, str, float]:
    """(phase, state, milliseconds) of the cell that grew the most."""
    growth = {
        (phase, state): (after[phase][state] or 0.0) - (before[phase][state] or 0.0)
        for phase in PHASES
        for state in STATES
    }
    (phase, state), most = max(growth.items(), key=lambda each: each[1])
    return phase, state, most
