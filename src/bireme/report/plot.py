"""The experiments of `bireme.study.rows` as one picture with three panels."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bireme.report.colours import ACCENT, COMPUTE
from bireme.report.figure import part_legend, picture, plain, stack
from bireme.study.rows import (
    RANK_COMMANDS,
    STRAGGLER_COMMAND,
    SWEEP_COMMAND,
    Row,
    balanced_rows,
    fit_line,
    nothing_to_show,
    straggler_pair,
    sweep_rows,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CORES_NOTE = (
    "On cores shared by more ranks than cores, the slope\n"
    "of the step lies anywhere between 0 and 1:\n"
    "other ranks use the sleeper's core."
)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Write the picture to `path` (PNG), whole or not at all. Raises UserError without rows, OSError."""
    if not rows:
        raise nothing_to_show(path.parent)
    with picture(path, 15, 5.4) as figure:
        shares, pair, sweep = figure.subplots(1, 3, width_ratios=(1.15, 1, 1.15))
        _shares(shares, rows)
        _pair(pair, rows)
        _sweep(sweep, rows)
        part_legend(figure)


def _parts_ms(row: Row) -> list[float]:
    """Milliseconds a step of each of PARTS; they add up to the mean step."""
    known = (row.compute_ms, row.contention_ms, row.transfer_ms, row.wait_ms, row.other_ms)
    return [max(0.0, value or 0.0) for value in known]


def _stacked(axes: "Axes", labels: Sequence[str], bars: Sequence[Sequence[float]], text: str, smallest: float) -> None:
    """Stacked bars, every part of at least `smallest` labelled with its size (`text` formats it)."""
    for index, parts in enumerate(bars):
        stack(axes, index, parts, 0.62, text, smallest)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_xlim(-0.6, max(len(labels), 2) - 0.4)
    axes.yaxis.grid(True, color="0.9")
    axes.set_axisbelow(True)


def _empty(axes: "Axes", what: str, commands: Sequence[str]) -> None:
    from textwrap import fill

    text = f"{what}\n\nrun\n" + "\n".join(fill(command, 44, subsequent_indent="    ") for command in commands)
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, fontsize=9, family="monospace")
    axes.set_axis_off()


def _shares(axes: "Axes", rows: Sequence[Row]) -> None:
    axes.set_title("Where a step's time goes, balanced ranks", loc="left", weight="bold")
    balanced = balanced_rows(rows)
    if not balanced:
        _empty(axes, "no balanced run yet", RANK_COMMANDS)
        return
    models = [row.model for row in balanced]
    model = max(sorted(set(models)), key=models.count)
    balanced = [row for row in balanced if row.model == model]
    reductions = {row.reduction for row in balanced}
    labels = []
    for row in balanced:
        ranks = f"{row.ranks} rank" + ("s" if row.ranks > 1 else "")
        reduction = f"\n{plain(row.reduction)}" if len(reductions) > 1 else ""
        labels.append(f"{ranks}{reduction}\n{row.step_ms:.0f} ms")
    totals = [sum(_parts_ms(row)) or 1.0 for row in balanced]
    bars = [[100 * part / total for part in _parts_ms(row)] for row, total in zip(balanced, totals, strict=True)]
    _stacked(axes, labels, bars, "{:.0f} %", 5.0)
    axes.set_ylim(0, 100)
    axes.set_ylabel("share of the step, mean over ranks (%)")
    axes.set_xlabel(f"model {plain(model)}; below the ranks: median step")


def _pair(axes: "Axes", rows: Sequence[Row]) -> None:
    axes.set_title("Balanced against a straggler", loc="left", weight="bold")
    balanced, delayed = straggler_pair(rows)
    if delayed is None:
        _empty(axes, "no run with a straggler yet", [STRAGGLER_COMMAND])
        return
    if balanced is None:
        command = f"torchrun --nproc_per_node={delayed.ranks} multinode.py"
        _empty(axes, f"no balanced run with {delayed.ranks} ranks yet", [command])
        return
    rank = "" if delayed.straggler_rank is None else f" on rank {delayed.straggler_rank}"
    labels = ["balanced", f"{delayed.straggler_ms:g} ms{rank}"]
    bars = [_parts_ms(balanced), _parts_ms(delayed)]
    highest = max(map(sum, bars))
    _stacked(axes, labels, bars, "{:.0f}", highest / 25)
    for index, parts in enumerate(bars):
        axes.text(index, sum(parts) + highest / 80, f"{sum(parts):.0f} ms", ha="center", va="bottom", weight="bold")
    axes.set_ylim(0, highest * 1.1)
    axes.set_ylabel("mean step, mean over ranks (ms)")
    axes.set_xlabel(f"{delayed.ranks} ranks, {plain(delayed.reduction)}, model {plain(delayed.model)}")


def _sweep(axes: "Axes", rows: Sequence[Row]) -> None:
    axes.set_title("Step time against the straggler's delay", loc="left", weight="bold")
    sweep = sweep_rows(rows)
    if not sweep:
        _empty(axes, "no run with several delays yet", [SWEEP_COMMAND])
        return
    delays = [row.straggler_ms for row in sweep]
    series = [("step", COMPUTE, "o", [row.step_ms for row in sweep])]
    idle = [row.step_minus_busy_ms for row in sweep if row.step_minus_busy_ms is not None]
    if len(idle) == len(sweep):
        series.append(("step less the slow rank's busy time", ACCENT, "s", idle))
    for name, colour, marker, values in series:
        slope, intercept, r_squared = fit_line(delays, values)
        label = f"{name}\nslope {slope:.2f}, $R^2$ {r_squared:.3f}"
        axes.plot(delays, [intercept + slope * delay for delay in delays], color=colour, linewidth=1.5, alpha=0.7)
        axes.plot(delays, values, marker, color=colour, markersize=7, label=label)
    highest = max(max(values) for *_, values in series)
    axes.set_ylim(0, highest * 1.45)  # room for the legend above the lines
    axes.set_xticks(delays, [f"{delay:g}" for delay in delays])
    axes.grid(True, color="0.9")
    axes.set_axisbelow(True)
    axes.legend(loc="upper left", frameon=False, fontsize=9)
    axes.set_ylabel("median over steps (ms)")
    first = sweep[0]
    rank = "" if first.straggler_rank is None else f" on rank {first.straggler_rank}"
    axes.set_xlabel(f"delay planted{rank} of {first.ranks} (ms)\n{_CORES_NOTE}")
