"""Runs side by side, a bar for each node: where its step goes."""

from collections.abc import Sequence
from pathlib import Path

from bireme.report.figure import ledger_parts_ms, part_legend, picture, plain, stack
from bireme.report.summary import summarise
from bireme.run_reader import Run


def plot_runs(runs: Sequence[tuple[str, Run]], path: Path) -> None:
    """Draw (label, run) pairs as bars of milliseconds a step (PNG, whole or not at all). UserError, OSError."""
    summaries = [(label, summarise(run)) for label, run in runs]
    bars: list[tuple[float, str, list[float]]] = []
    centres: list[tuple[float, str]] = []
    x = 0.0
    for label, summary in summaries:
        first = x
        for node in summary["nodes"]:
            ranks = [ledger_parts_ms(summary["ledger_ms"][str(rank)]) for rank in node["ranks"]]
            bars.append((x, node["name"], [sum(values) / len(values) for values in zip(*ranks, strict=True)]))
            x += 1
        centres.append(((first + x - 1) / 2, label))
        x += 0.6
    with picture(path, max(6.0, 1.3 * x + 2), 5.2) as figure:
        axes = figure.subplots()
        highest = max(sum(parts) for _, _, parts in bars)
        for place, _, parts in bars:
            height = stack(axes, place, parts, 0.8, "{:.0f}", highest / 25)
            axes.text(place, height + highest / 80, f"{height:.0f} ms", ha="center", va="bottom", weight="bold")
        axes.set_xticks([place for place, _, _ in bars], [plain(name) for _, name, _ in bars])
        axes.set_xticks([centre for centre, _ in centres], [f"\n{plain(label)}" for _, label in centres], minor=True)
        axes.xaxis.remove_overlapping_locs = False  # a run of one node has its label below that node's
        axes.tick_params(axis="x", which="minor", length=0, pad=8)
        axes.set_xlim(-0.7, x - 0.9)
        axes.set_ylim(0, highest * 1.1)
        axes.set_ylabel("mean step, mean over the node's ranks (ms)")
        axes.set_title("Where a step's time goes on each node", loc="left", weight="bold")
        axes.yaxis.grid(True, color="0.9")
        axes.set_axisbelow(True)
        part_legend(figure)
