"""What every picture shares: its style, how it is saved, and the parts that a step's bar is stacked of."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bireme.files import written_whole
from bireme.report.colours import COMPUTE, CONTENTION, OTHER, TRANSFER, WAIT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Label, colour, colour of text on it.
PARTS: tuple[tuple[str, str, str], ...] = (
    ("compute (running)", COMPUTE, "white"),
    ("contention (runnable)", CONTENTION, "black"),
    ("transfer", TRANSFER, "white"),
    ("wait", WAIT, "white"),
    ("other (blocked, input)", OTHER, "black"),
)


@contextmanager
def picture(path: Path, width: float, height: float) -> Iterator["Figure"]:
    """A figure (inches) to draw on; saved to `path` (PNG) afterwards, whole or not at all. OSError."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no pyplot: no display, no state left behind
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    style: Any = {"font.size": 10, "axes.titlesize": 11, "axes.spines.top": False, "axes.spines.right": False}
    with rc_context(style):
        figure = Figure(figsize=(width, height), dpi=120, layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12))
        FigureCanvasAgg(figure)
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as file:
            figure.savefig(file, format="png")


def plain(name: str) -> str:
    """A name from a file: matplotlib would read mathematics between two dollar signs."""
    return name.replace("$", r"\$")


def ledger_parts_ms(ledger: dict[str, dict[str, float | None]]) -> list[float]:
    """Of one rank's mean ledger (phase x state): milliseconds of each of PARTS; they add up to its mean step."""
    busy = [ledger[phase]["running"] or 0.0 for phase in ("forward", "backward", "optimizer")]
    states = {
        state: sum(cells[state] or 0.0 for cells in ledger.values()) for state in ("runnable", "transfer", "wait")
    }
    whole = sum(value or 0.0 for cells in ledger.values() for value in cells.values())
    known = [sum(busy), *states.values()]
    return [*known, max(0.0, whole - sum(known))]


def stack(axes: "Axes", x: float, parts: Sequence[float], width: float, text: str = "", smallest: float = 0.0) -> float:
    """One bar of PARTS; with `text` (a format) every part of at least `smallest` says its size. Returns its height."""
    bottom = 0.0
    for (_, colour, ink), value in zip(PARTS, parts, strict=True):
        axes.bar(x, value, width, bottom=bottom, color=colour, edgecolor="white", linewidth=0.8)
        if text and value >= smallest:
            label = text.format(value)
            axes.text(x, bottom + value / 2, label, ha="center", va="center", color=ink, fontsize=9)
        bottom += value
    return bottom


def part_legend(figure: "Figure", more: Sequence[Any] = ()) -> None:
    """What the colours of PARTS mean, below the panels."""
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(facecolor=colour, label=label) for label, colour, _ in PARTS]
    handles += more
    figure.legend(handles=handles, loc="outside lower left", ncols=min(5, len(handles)), frameon=False, fontsize=9)
