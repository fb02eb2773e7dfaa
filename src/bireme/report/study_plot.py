"""The results of a study (`bireme study`) as one picture: bars of where a step goes, or a line by delay."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from bireme.environment import UNSHAPED
from bireme.report.colours import ACCENT, COMPUTE, TRANSFER, WAIT
from bireme.report.figure import part_legend, picture, plain, stack
from bireme.text import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_Object = dict[str, Any]

_HIDDEN = "#B5E3D5"  # a pale TRANSFER: bytes that nobody waits for
_FORMULA = "#EBCFDF"  # a pale ACCENT: bytes that a formula expects


def plot_study(results: _Object, path: Path) -> None:
    """Write the picture to `path` (PNG), whole or not at all. `results` has at least one finished cell. OSError."""
    done = [each for each in results["cells"] if each["status"] == "finished"]
    draw, width, height = {
        "ranks": (_ranks, 12, 5.2),
        "straggler": (_straggler, 12, 5.2),
        "links": (_links, max(13, 1.4 * len(done)), 9),
        "layouts": (_layouts, max(11, 0.8 * len(done)), 12),
    }[results["name"]]
    with picture(path, width, height) as figure:
        draw(figure, results, done)
        figure.suptitle("\n".join(wrap(plain(_title(results, done)), 100)), x=0.01, ha="left", weight="bold")


def _title(results: _Object, done: Sequence[_Object]) -> str:
    settings = results["settings"]
    links = sorted({each["link"] for each in done if each["axes"]["nodes"] > 1})
    shown = results["name"] in ("links", "layouts") and links != [UNSHAPED]  # below the bars
    link = f", {' and '.join(links)}" if links and not shown else ""
    nodes = f"{count(settings['nodes'], 'emulated node')} of {count(settings['cores_per_node'], 'core')}{link}"
    batch = count(settings["batch_per_rank"], "sequence")
    model = f"{settings['preset']}{' ' if settings['model'] else ''}{settings['model'].replace(',', ' ')}"
    return f"Study of {results['name']}: {nodes}, model {model}, {batch} a rank"


# --- bars ---------------------------------------------------------------------------------------------------------


def _parts_ms(entry: _Object) -> list[float]:
    """Milliseconds a step of each of PARTS; they add up to the mean step."""
    split = entry["communication_ms"]
    known = (entry["compute_ms"], entry["contention_ms"], split["transfer"], split["wait"], entry["other_ms"])
    return [max(0.0, value or 0.0) for value in known]


def _axes(axes: "Axes", title: str, x: Sequence[float], labels: Sequence[str], y_label: str) -> None:
    axes.set_title(title, loc="left")
    axes.set_xticks(list(x), [plain(label) for label in labels])
    axes.set_xlim(min(x) - 0.8, max(x) + 0.8)
    axes.set_ylabel(y_label)
    axes.yaxis.grid(True, color="0.9")
    axes.set_axisbelow(True)


def _step_bars(axes: "Axes", x: Sequence[float], entries: Sequence[_Object]) -> None:
    """Where the mean step goes, with its length above."""
    highest = max(max(sum(_parts_ms(each)), each.get("bound_ms") or 0.0) for each in entries)
    for place, entry in zip(x, entries, strict=True):
        bottom = stack(axes, place, _parts_ms(entry), 0.8)
        top = max(bottom, entry.get("bound_ms") or 0.0)
        axes.text(place, top + highest / 80, f"{bottom:.0f}", ha="center", va="bottom", fontsize=9)
    axes.set_ylim(0, highest * 1.1)


def _value_bars(axes: "Axes", x: Sequence[float], values: Sequence[float | None], text: str) -> None:
    highest = max((value or 0.0 for value in values), default=0.0) or 1.0
    for place, value in zip(x, values, strict=True):
        axes.bar(place, value or 0.0, 0.8, color=ACCENT, edgecolor="white")
        label = "n/a" if value is None else text.format(value)
        axes.text(place, (value or 0.0) + highest / 80, label, ha="center", va="bottom", fontsize=9)
    axes.set_ylim(0, highest * 1.1)


# --- the studies --------------------------------------------------------------------------------------------------


def _ranks(figure: "Figure", results: _Object, done: Sequence[_Object]) -> None:
    steps, efficiency = figure.subplots(1, 2)
    x = list(range(len(done)))
    labels = [f"{each['axes']['nodes']} x {each['axes']['ranks_per_node']}" for each in done]
    _step_bars(steps, x, done)
    _axes(steps, "Where a step's time goes", x, labels, "mean step, mean over ranks (ms)")
    shares = [None if each["efficiency"] is None else 100 * each["efficiency"] for each in done]
    _value_bars(efficiency, x, shares, "{:.0f} %")
    _axes(efficiency, "Efficiency: tokens/s/rank, of one rank's alone", x, labels, "efficiency (%)")
    for axes in (steps, efficiency):
        axes.set_xlabel("nodes x ranks on each; the batch grows with the ranks")
    part_legend(figure)


def _straggler(figure: "Figure", results: _Object, done: Sequence[_Object]) -> None:
    steps, found = figure.subplots(1, 2)
    sweep = results["sweep"]
    if sweep is None or sweep["delays"] is None:
        for axes in (steps, found):
            axes.set_axis_off()
        steps.text(0.5, 0.5, "fewer than two delays were recorded", ha="center", transform=steps.transAxes)
        return
    x = [each["delay_ms"] for each in sweep["delays"]]
    place = f"{sweep['found']['phase']}/{sweep['found']['state']}"
    _line(steps, x, [each["step_ms"] for each in sweep["delays"]], "step (median)", COMPUTE, sweep["step_fit"])
    if sweep["wait_fit"] is not None:
        waits = [each["punctual_wait_ms"] for each in sweep["delays"]]
        _line(steps, x, waits, "wait of the other ranks (mean)", WAIT, sweep["wait_fit"])
    steps.set_title("What the others wait for", loc="left")
    steps.legend(loc="upper left", frameon=False, fontsize=9)
    found.plot([x[0], x[-1]], [x[0], x[-1]], color="0.7", linestyle="--", label="what was planted")
    measured = [each["slow_found_ms"] for each in sweep["delays"]]
    found.plot(x, measured, "o", color=ACCENT, markersize=7, label=f"rank {sweep['rank']}, {place} (mean)")
    found.set_title("Where the ledger finds the delay", loc="left")
    found.legend(loc="upper left", frameon=False, fontsize=9)
    for axes in (steps, found):
        axes.set_xlabel(f"delay planted in {plain(str(sweep['phase']))} of rank {sweep['rank']} (ms)")
        axes.set_ylabel("a step (ms)")
        axes.set_xticks(x, [f"{delay:g}" for delay in x])
        axes.set_ylim(0, axes.get_ylim()[1] * 1.3)  # room for the legend above the lines
        axes.grid(True, color="0.9")
        axes.set_axisbelow(True)


def _line(axes: "Axes", x: Sequence[float], y: Sequence[float], name: str, colour: str, fit: _Object) -> None:
    fitted = [fit["intercept_ms"] + fit["slope"] * each for each in x]
    axes.plot(x, fitted, color=colour, linewidth=1.5, alpha=0.7)
    label = f"{name}\nslope {fit['slope']:.2f}, $R^2$ {fit['r_squared']:.3f}"
    axes.plot(x, y, "o", color=colour, markersize=7, label=label)


def _links(figure: "Figure", results: _Object, done: Sequence[_Object]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    panels = figure.subplot_mosaic([["steps", "steps"], ["communication", "rates"]])
    steps, communication, rates = panels["steps"], panels["communication"], panels["rates"]
    x = _places([_link_of(each) for each in done])
    _step_bars(steps, x, done)
    for place, entry in zip(x, done, strict=True):
        if entry.get("bound_ms") is not None:
            steps.hlines(entry["bound_ms"], place - 0.46, place + 0.46, color="black", linewidth=2)
    _link_axes(steps, "Where a step's time goes, and its bound", x, done, "mean step, mean over ranks (ms)")

    shared = [(place, each) for place, each in zip(x, done, strict=True) if each["axes"]["nodes"] > 1]
    if shared:
        for place, entry in shared:
            split = entry["communication_ms"]
            bottom = 0.0
            for name, colour in (("transfer", TRANSFER), ("wait", WAIT), ("hidden", _HIDDEN)):
                value = split[name] or 0.0
                communication.bar(place, value, 0.8, bottom=bottom, color=colour, edgecolor="white", linewidth=0.8)
                bottom += value
            if split["transfer"] is None:
                communication.text(place, 0, "n/a", ha="center", va="bottom", fontsize=9)
        title = "Communication: exposed (transfer + wait) and hidden"
        places, entries = [place for place, _ in shared], [entry for _, entry in shared]
        _link_axes(communication, title, places, entries, "communication a step (ms)")
    else:
        communication.set_axis_off()

    _value_bars(rates, x, [(each["tokens_per_s_global"] or 0.0) / 1e3 or None for each in done], "{:.1f}")
    _link_axes(rates, "Training rate", x, done, "tokens/s (global), thousands")
    bound = Line2D([], [], color="black", linewidth=2, label="bound: max(compute of one node alone, bytes / rate)")
    part_legend(figure, [Patch(facecolor=_HIDDEN, label="hidden communication"), bound])


def _link_of(entry: _Object) -> str:
    return "alone" if entry["axes"]["nodes"] == 1 else str(entry["link"])


def _places(groups: Sequence[str]) -> list[float]:
    """Where each bar stands: those of one group side by side, groups apart."""
    x: list[float] = []
    for index, group in enumerate(groups):
        if index:
            x.append(x[-1] + (0.9 if group == groups[index - 1] else 1.4))
        else:
            x.append(0.0)
    return x


def _link_axes(axes: "Axes", title: str, x: Sequence[float], entries: Sequence[_Object], y_label: str) -> None:
    """Below each bar its reduction, and below those of one link the link."""
    groups = [_link_of(each) for each in entries]
    names = [
        "one node" if group == "alone" else each["axes"]["reduction"]
        for group, each in zip(groups, entries, strict=True)
    ]
    _grouped_axes(axes, title, x, names, groups, y_label)
    axes.set_xlabel("when gradients are reduced, and the rate of each node's link")


def _grouped_axes(
    axes: "Axes", title: str, x: Sequence[float], names: Sequence[str], groups: Sequence[str], y_label: str
) -> None:
    """Below each bar its name, and below the bars of one group the group's."""
    _axes(axes, title, x, names, y_label)
    members: dict[str, list[float]] = {}
    for place, group in zip(x, groups, strict=True):
        members.setdefault(group, []).append(place)
    centres = [sum(places) / len(places) for places in members.values()]
    below = "\n" * max(1 + name.count("\n") for name in names)
    axes.set_xticks(centres, [f"{below}{plain(group)}" for group in members], minor=True)
    axes.xaxis.remove_overlapping_locs = False  # a group of one bar has its name below that bar's
    axes.tick_params(axis="x", which="minor", length=0, pad=8)
    axes.tick_params(axis="x", labelsize=9, which="both")


def _layouts(figure: "Figure", results: _Object, done: Sequence[_Object]) -> None:
    from matplotlib.patches import Patch

    steps, traffic, memory = figure.subplots(3, 1)
    names = [each["axes"]["layout"].replace(",", ",\n") for each in done]
    groups = [f"{each['axes']['nodes']} x {each['axes']['ranks_per_node']}, {each['link']}" for each in done]
    x = _places(groups)
    _step_bars(steps, x, done)
    _grouped_axes(steps, "Where a step's time goes", x, names, groups, "mean step, mean over ranks (ms)")

    pairs = [(each["counted_link_bytes"], each["formula_link_bytes"]) for each in done]
    highest = max((value or 0.0 for pair in pairs for value in pair), default=0.0) / 1e6 or 1.0
    for place, pair in zip(x, pairs, strict=True):
        for offset, value, colour in zip((-0.2, 0.2), pair, (ACCENT, _FORMULA), strict=True):
            size = (value or 0.0) / 1e6
            traffic.bar(place + offset, size, 0.4, color=colour, edgecolor="white", linewidth=0.8)
            label = "n/a" if value is None else f"{size:.3g}"
            traffic.text(place + offset, size + highest / 80, label, ha="center", va="bottom", fontsize=8)
    title = "Bytes over a node's link, one direction: counted at the interface, and by the layout's formula"
    traffic.set_ylim(0, highest * 1.1)
    _grouped_axes(traffic, title, x, names, groups, "MB a step")

    largest = [each["memory_bytes"]["max"] / 1e6 if each["memory_bytes"] else None for each in done]
    _value_bars(memory, x, largest, "{:.0f}")
    _grouped_axes(memory, "Memory of the largest rank, above what it had before the model", x, names, groups, "MB")
    memory.set_xlabel("layout; nodes x ranks on each, and the rate of each node's link")
    counted = [Patch(facecolor=ACCENT, label="bytes counted"), Patch(facecolor=_FORMULA, label="bytes by formula")]
    part_legend(figure, counted)
