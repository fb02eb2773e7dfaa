"""The heat map of ranks and steps, aggregated beyond what a screen can show. Pure."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bireme.ledger import PHASES, STATES, WAIT, unobserved_states
from bireme.report.html.arrays import StepArrays, bucket_edges, significant
from bireme.run_reader import Run
from bireme.text import count

RANK_ROWS = 64  # so many ranks have a row each
MEAN_ROWS = 48  # rows of means where there are more
EXTREMES = 12  # ranks that keep a row of their own then
_CELLS = 16_000  # of one picture; more are slow to draw, and no screen shows them
_MOST_COLUMNS = 1000
_CLIPPED = 0.995  # the quantile at which the colours end


def heat_map(run: Run, arrays: StepArrays, culprits: Sequence[int]) -> dict[str, Any]:
    """`columns` (labels), `quantities`: each with its rows (`labels`, `z`) and the ends of its colours, and `text`:
    what a row and a column is. Measured steps only."""
    rows = np.flatnonzero(arrays.measured)
    groups, of_rank = _groups(run)
    row_count = len(groups) + (EXTREMES if len(groups) < run.world_size else 0)
    most = min(_MOST_COLUMNS, max(60, _CELLS // row_count))
    edges, size = bucket_edges(len(rows), most)
    starts = [first for first, _ in edges]
    numbers = arrays.steps[rows]
    columns = [str(numbers[a]) if b - a == 1 else f"{numbers[a]}-{numbers[b - 1]}" for a, b in edges]
    present = arrays.present[rows]
    counts = np.add.reduceat(present, starts, axis=0, dtype=np.float64)

    def bucketed(values: NDArray[Any]) -> NDArray[np.float64]:
        """(steps, R) -> (R, columns): means over the steps that the rank recorded."""
        sums = np.add.reduceat(np.where(present, values, 0.0), starts, axis=0, dtype=np.float64)
        with np.errstate(invalid="ignore"):
            return np.asarray((sums / counts).T)

    quantities = []
    for name, label, state, values in _quantities(run, arrays, rows):
        by_rank = bucketed(values)
        if name not in ("wait", "own", "step") and not np.nanmax(by_rank, initial=0.0) > 0:
            continue  # a cell that is 0 everywhere says nothing
        labels, z = _rows_of(by_rank, groups, of_rank, culprits, run)
        known = z[np.isfinite(z)]
        lowest = float(known.min()) if len(known) and name in ("own", "step") else 0.0
        highest = float(np.quantile(known, _CLIPPED)) if len(known) else 1.0
        largest = float(known.max()) if len(known) else 1.0
        if highest <= lowest or largest < 1.3 * highest:  # nothing sticks out: no clipping
            highest = max(largest, lowest + 1e-6)
        clipped = int((known > highest).sum())
        quantities.append(
            {
                "name": name,
                "label": label,
                "state": state,
                "rows": labels,
                "z": [[None if np.isnan(v) else v for v in row] for row in significant(z).tolist()],
                "from_ms": lowest,
                "to_ms": highest,
                "clipped": clipped,
                "largest_ms": largest,
            }
        )
    return {"columns": columns, "quantities": quantities, "text": _text(run, groups, size, arrays)}


def _quantities(
    run: Run, arrays: StepArrays, rows: NDArray[np.intp]
) -> Sequence[tuple[str, str, str | None, NDArray[Any]]]:
    """(name, label, state whose colour it has, (steps, R) values)."""
    unknown = unobserved_states(run.missing)
    found: list[tuple[str, str, str | None, NDArray[Any]]] = []
    if "wait" not in unknown:
        found.append(("wait", "wait (all phases)", "wait", arrays.state_ms(WAIT)[rows]))
    found.append(("own", "self time", None, arrays.own_ms("wait" not in unknown)[rows]))
    found.append(("step", "step time", None, arrays.wall_ms[rows]))
    for p, phase in enumerate(PHASES):
        for s, state in enumerate(STATES):
            if state not in unknown:
                cell = arrays.cells_ms[rows, :, p * len(STATES) + s]
                found.append((f"{phase}/{state}", f"{phase} / {state}", state, cell))
    return found


def _groups(run: Run) -> tuple[list[tuple[str, list[int]]], bool]:
    """(label, ranks) of each row; and whether a row is one rank. Many ranks: a row a node, or several nodes."""
    nodes = [(node["name"], list(node["ranks"])) for node in run.facts["nodes"]]
    if run.world_size <= RANK_ROWS:
        node_of = {rank: name for name, ranks in nodes for rank in ranks}
        several = len(nodes) > 1
        return [
            (f"rank {rank}" + (f", {node_of[rank]}" if several else ""), [rank]) for rank in range(run.world_size)
        ], True
    if len(nodes) <= MEAN_ROWS and len(nodes) > 1:
        return nodes, False
    if len(nodes) == 1:
        edges, _ = bucket_edges(run.world_size, MEAN_ROWS)
        return [(f"ranks {a}-{b - 1}", list(range(a, b))) for a, b in edges], False
    edges, _ = bucket_edges(len(nodes), MEAN_ROWS)
    return [
        (
            nodes[a][0] if b - a == 1 else f"{nodes[a][0]} to {nodes[b - 1][0]}",
            [rank for _, ranks in nodes[a:b] for rank in ranks],
        )
        for a, b in edges
    ], False


def _rows_of(
    by_rank: NDArray[np.float64],
    groups: list[tuple[str, list[int]]],
    of_rank: bool,
    culprits: Sequence[int],
    run: Run,
) -> tuple[list[str], NDArray[np.float64]]:
    if of_rank:
        return [label for label, _ in groups], by_rank
    node_of = {rank: node["name"] for node in run.facts["nodes"] for rank in node["ranks"]}
    typical = np.nanmedian(by_rank, axis=0)
    away = np.nan_to_num(np.abs(by_rank - typical)).max(axis=1)
    furthest = [int(rank) for rank in np.argsort(-away, kind="stable")]
    extremes = sorted(list(dict.fromkeys([*culprits[: EXTREMES // 2], *furthest]))[:EXTREMES])
    means = np.full((len(groups), by_rank.shape[1]), np.nan)
    for row, (_, ranks) in enumerate(groups):
        chosen = by_rank[ranks]
        known = np.isfinite(chosen).any(axis=0)
        means[row, known] = np.nanmean(chosen[:, known], axis=0)
    labels = [f"rank {rank}, {node_of[rank]}" for rank in extremes]
    return labels + [f"{label} ({count(len(ranks), 'rank')})" for label, ranks in groups], np.concatenate(
        [by_rank[extremes], means]
    )


def _text(run: Run, groups: list[tuple[str, list[int]]], size: int, arrays: StepArrays) -> str:
    if len(groups) == run.world_size:
        row = "Each row: a rank."
    else:
        ranks = len(groups[0][1])
        row = (
            f"Each row below the first {EXTREMES}: the mean of about {ranks} ranks. The first {EXTREMES} rows: the "
            "ranks furthest from the median in some column, and those that verdicts name."
        )
    column = "Each column: a step." if size == 1 else f"Each column: the mean of {size} measured steps."
    skipped = int((~arrays.measured).sum())
    left_out = f" {count(skipped, 'skipped step')} left out." if skipped else ""
    return f"{row} {column}{left_out}"
