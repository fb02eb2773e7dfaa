"""The step as bars: a typical step and the mean one, overall, by node and by rank. Pure."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from bireme.ledger import PHASES, STATES, WAIT, own_states, unobserved_states
from bireme.report.html.arrays import StepArrays, rounded
from bireme.report.html.losses import Cells, mean_cells, total_ms
from bireme.report.terminal import ms
from bireme.run_reader import Run
from bireme.text import count, name_ranks

RANKS_SHOWN = 32  # with more, only what stands out has a bar of its own
NODES_SHOWN = 16
OUTLIERS = 8
_NEAREST = 0.1  # of the measured steps are typical ones
_LEAST_NEAREST = 5

Bar = dict[str, Any]
Ledgers = dict[str, list[list[float | None] | None]]  # "typical" and "mean": by rank, 30 cells or None


def typical_rows(arrays: StepArrays) -> np.ndarray:
    """Which rows are typical: the tenth of the measured steps (five at least) that are nearest their median time."""
    rows = np.flatnonzero(arrays.measured)
    walls = arrays.step_ms[rows]
    wanted = min(len(rows), max(_LEAST_NEAREST, math.ceil(_NEAREST * len(rows))))
    nearest = np.argsort(np.abs(walls - np.median(walls)), kind="stable")[:wanted]
    return np.asarray(np.sort(rows[nearest]))


def ledgers_of(run: Run, summary: dict[str, Any], arrays: StepArrays, rows: np.ndarray) -> Ledgers:
    """By rank the mean ledger of the typical steps, and that of the report."""
    unknown = unobserved_states(run.missing)
    states = STATES * len(PHASES)
    typical: list[list[float | None] | None] = []
    for rank in range(run.world_size):
        here = rows[arrays.present[rows, rank]]
        if not len(here):
            typical.append(None)
            continue
        means = rounded(arrays.cells_ms[here, rank].mean(axis=0, dtype=np.float64))
        typical.append([None if state in unknown else mean for state, mean in zip(states, means, strict=True)])
    mean: list[list[float | None] | None] = []
    for ledger in summary["ledger_ms"].values():
        cells = [value for each in ledger.values() for value in each.values()]
        known = any(value is not None for value in cells)
        mean.append([None if value is None else round(value, 3) for value in cells] if known else None)
    return {"typical": typical, "mean": mean}


def bars_of(run: Run, summary: dict[str, Any], ledgers: Ledgers, culprits: Sequence[int]) -> dict[str, Any]:
    """`overall`, `nodes` and `ranks`: lists of bars (`label`, `detail`, `typical` and `mean` cells, `accused`), and in
    words what is not shown. `culprits`: ranks that verdicts name, the most expensive first."""
    node_of = {rank: node["name"] for node in run.facts["nodes"] for rank in node["ranks"]}
    present = [rank for rank in range(run.world_size) if ledgers["mean"][rank] is not None]

    def bar(label: str, ranks: Sequence[int], detail: str = "", accused: bool = False) -> Bar:
        made: Bar = {"label": label, "detail": detail, "accused": accused}
        for which in ("typical", "mean"):
            known = [cells for rank in ranks if (cells := ledgers[which][rank]) is not None]
            made[which] = _rounded_cells(mean_cells(known)) if known else None
        return made

    def rank_bar(rank: int) -> Bar:
        role = summary["roles"].get(str(rank)) or {}
        detail = ", ".join([node_of[rank], *(f"{name} {place}" for name, place in role.items())])
        return bar(f"rank {rank}", [rank], detail, rank in culprits)

    overall = bar("all ranks", present, f"mean of {count(len(present), 'rank')}" if len(present) > 1 else "")
    result: dict[str, Any] = {"overall": overall, "ranks": [], "ranks_text": "", "nodes": [], "nodes_text": ""}
    if len(present) > 1:
        shown = present
        if len(present) > RANKS_SHOWN:
            shown = _outliers({rank: _own_ms(ledgers, rank) for rank in present}, culprits)
        result["ranks"] = [rank_bar(rank) for rank in shown]
        rest = [rank for rank in present if rank not in set(shown)]
        if rest:
            result["ranks"].append(bar(f"the other {len(rest)} ranks", rest, "mean"))
            result["ranks_text"] = (
                f"The {count(len(shown), 'rank')} whose own time is furthest from the median, or that a verdict names; "
                f"{len(rest)} ranks are not shown one by one: pick any below."
            )
    absent = [rank for rank in range(run.world_size) if rank not in present]
    if absent:
        result["ranks_text"] += f" {name_ranks(absent).capitalize()} recorded no measured step."
    result["nodes"], result["nodes_text"] = _node_bars(run, bar, present, ledgers, culprits)
    return result


def how_chosen(arrays: StepArrays, rows: np.ndarray) -> dict[str, str]:
    """What the two kinds of step are, in words."""
    measured = int(arrays.measured.sum())
    median = float(np.median(arrays.step_ms[arrays.measured]))
    of = f"of {count(measured, 'measured step')}"
    return {
        "typical": f"mean of the {count(len(rows), 'step')} {of} nearest the median step time ({ms(median)} ms)",
        "mean": f"mean {of}",
    }


def _node_bars(
    run: Run, bar: Any, present: Sequence[int], ledgers: Ledgers, culprits: Sequence[int]
) -> tuple[list[Bar], str]:
    here = set(present)
    members = {node["name"]: [r for r in node["ranks"] if r in here] for node in run.facts["nodes"]}
    members = {name: ranks for name, ranks in members.items() if ranks}
    if len(members) < 2:
        return [], ""
    names = list(members)
    accused = {index for index, ranks in enumerate(members.values()) if set(ranks) <= set(culprits)}
    shown = list(range(len(names)))
    text = ""
    if len(names) > NODES_SHOWN:
        own = {
            index: float(np.mean([_own_ms(ledgers, rank) for rank in ranks]))
            for index, ranks in enumerate(members.values())
        }
        with_culprit = [index for index, ranks in enumerate(members.values()) if set(ranks) & set(culprits)]
        shown = _outliers(own, with_culprit)
        text = (
            f"The {count(len(shown), 'node')} whose own time is furthest from the median, or that hold a rank named by "
            f"a verdict; the other {len(names) - len(shown)} in one bar."
        )
    bars = [
        bar(names[i], members[names[i]], f"mean of {count(len(members[names[i]]), 'rank')}", i in accused)
        for i in shown
    ]
    rest = [rank for i, name in enumerate(names) if i not in set(shown) for rank in members[name]]
    if rest:
        bars.append(bar(f"the other {len(names) - len(shown)} nodes", rest, f"mean of {count(len(rest), 'rank')}"))
    return bars, text


def _own_ms(ledgers: Ledgers, rank: int) -> float:
    """Self time of the mean ledger."""
    cells = ledgers["mean"][rank] or []
    own = own_states(None not in cells[WAIT :: len(STATES)])
    return sum(cell or 0.0 for state in own for cell in cells[state :: len(STATES)])


def _outliers(own_ms: dict[int, float], first: Sequence[int]) -> list[int]:
    """The keys in `first`, then those furthest from the median; OUTLIERS in all, in order."""
    median = float(np.median(list(own_ms.values())))
    furthest = sorted(own_ms, key=lambda key: -abs(own_ms[key] - median))
    return sorted(list(dict.fromkeys([*(key for key in first if key in own_ms), *furthest]))[:OUTLIERS])


def _rounded_cells(cells: Cells) -> list[float | None]:
    return [None if value is None else round(value, 3) for value in cells]


def longest_ms(bars: dict[str, Any]) -> float:
    """Of all bars: what their common scale must reach."""
    every = [bars["overall"], *bars["nodes"], *bars["ranks"]]
    return max((total_ms(each[which]) for each in every for which in ("typical", "mean") if each[which]), default=0.0)
