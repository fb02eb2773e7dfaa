"""Measured links as text of 80 columns and as a picture: time and bus bandwidth by size, and node by node."""

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from bireme.environment import UNSHAPED
from bireme.link_pairs import blame
from bireme.links import OPERATIONS, WORLD, Group, LinkTable, Measurement, Timing
from bireme.report.colours import ACCENT, COMPUTE, CONTENTION, OTHER, TRANSFER, WAIT
from bireme.report.figure import picture
from bireme.report.terminal import percent, safe
from bireme.text import count, rank_list

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MATRIX_NODES = 6  # more do not fit into 80 columns: then the slowest pairs are listed
_FEW_REPETITIONS = 3  # with less, a spread says nothing
_HEADS = ("all-\nreduce", "all-\ngather", "reduce-\nscatter", "all-to-\nall", "broad-\ncast", "send/\nreceive")
_COLOURS = (COMPUTE, TRANSFER, WAIT, CONTENTION, ACCENT, OTHER)
_MARKERS = "os^Dv*"


def rate(bit_per_s: float) -> str:
    """`385 Mbit/s` or `1.23 Gbit/s`, and the same in bytes: `385 Mbit/s (0.0481 GB/s)`."""
    return f"{bits(bit_per_s)} ({bit_per_s / 8e9:.3g} GB/s)"


def bits(bit_per_s: float) -> str:
    if bit_per_s >= 1e9:
        return f"{bit_per_s / 1e9:.3g} Gbit/s"
    return f"{_number(bit_per_s / 1e6)} Mbit/s"


def size_text(bytes: int) -> str:
    """`64 KiB` where it is a whole number of them."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if bytes >= size:
            return f"{_number(bytes / size)} {unit}"
    return f"{bytes} B"


def _number(value: float) -> str:
    """Three digits, and never an exponent in what is usual."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def what_was_measured(table: LinkTable) -> str:
    """One line that stands above every table and picture; it says so when there was no link to measure."""
    facts = table.facts
    link = "" if table.link is None else f", link {table.link}"
    if table.link == UNSHAPED:
        link = ", unshaped: nodes are processes on loopback"
    ranks = f"{count(len(table.ranks), 'rank')} on {count(len(table.nodes), 'node')}"
    return f"{ranks}, {facts['backend']} on {facts['device']}{link}"


def _new_table() -> "Table":
    from rich.table import Table

    return Table(box=None, padding=(0, 0, 0, 2), pad_edge=False, header_style="bold")


def render(table: LinkTable, console: "Console") -> None:
    """Print a measured table."""

    def line(text: str = "") -> None:
        console.print(text, highlight=False)

    facts = table.facts
    line(f"[bold]links: {safe(what_was_measured(table))}[/bold]")
    line(
        f"measured {safe(facts['measured_utc'])} in {facts['elapsed_s']:.3g} s (of {facts['seconds']:g} s), "
        f"torch {safe(facts['torch'])}; sizes and rates are defined in docs/links.md"
    )
    for group in table.groups:
        line()
        _render_group(table, group, console)
    line()
    _render_pairs(table, console)


def render_brief(table: LinkTable, console: "Console") -> None:
    """Print what a training run needs to know of the links: the largest all-reduce, and whether a pair is slow."""
    console.print(f"[bold]links: {safe(what_was_measured(table))}[/bold]", highlight=False)
    console.print(_largest(_cells(table, WORLD)), highlight=False)
    slow = table.slow()
    for sentence in blame(table.pairs, slow) if slow else ():
        console.print(f"[bold]{safe(sentence)}[/bold]", highlight=False)
    for source, target in sorted(slow):
        console.print(f"slow: {safe(source)} to {safe(target)}, {safe(slow[source, target])}", highlight=False)


def _cells(table: LinkTable, group: str) -> dict[tuple[int, str], Measurement]:
    return {(each.nominal_bytes, each.operation): each for each in table.measurements if each.group == group}


def _render_group(table: LinkTable, group: Group, console: "Console") -> None:
    def line(text: str) -> None:
        console.print(text, highlight=False)

    if group.reason is not None:
        line(f"[bold]group {group.name}[/bold]: n/a ({safe(group.reason)})")
        return
    if group.same_as is not None:
        line(f"[bold]group {group.name}[/bold]: the same ranks as group {group.same_as}")
        return
    members = " and ".join(rank_list(each) for each in group.members)
    cells = _cells(table, group.name)
    timings = [each.timing for each in cells.values() if each.timing is not None]
    note = ", all nodes at the same time, the slowest shown" if len(group.members) > 1 else ""
    title = f"group {group.name} (ranks {safe(members)}{note})"
    if timings:
        busses = [each.timing.bandwidths(each.operation)[1] * 8 for each in cells.values() if each.timing]
        unit, per_s = ("Gbit/s", 1e9) if max(busses) >= 1e10 else ("Mbit/s", 1e6)
        link = ", unshaped" if table.link == UNSHAPED else ""
        line(f"[bold]{title}{link}: median time, ms[/bold]")
        console.print(_grid(cells, lambda each, _: each.median_s * 1e3))
        line(f"[bold]bus bandwidth, {unit}{link}[/bold]")
        console.print(_grid(cells, lambda each, name: each.bandwidths(name)[1] * 8 / per_s))
        line(_largest(cells))
        line(_spread(cells))
        _render_nodes(cells, line)
        line(_fits(table, group.name))
    else:
        line(f"[bold]{title}[/bold]: n/a")
    for reason in dict.fromkeys(each.reason for each in cells.values() if each.reason is not None):
        smallest: dict[str, int] = {}
        for (size, name), each in sorted(cells.items()):
            if each.reason == reason:
                smallest.setdefault(name.replace("_", "-"), size)
        by_size = {size: [name for name, first in smallest.items() if first == size] for size in smallest.values()}
        what = [
            f"{'every operation' if len(names) == len(OPERATIONS) else ', '.join(names)} from {size_text(size)}"
            for size, names in by_size.items()
        ]
        line(f"n/a: {'; '.join(what)}: {safe(reason)}")


def _grid(cells: dict[tuple[int, str], Measurement], value: Callable[[Timing, str], float]) -> "Table":
    grid = _new_table()
    grid.add_column("size", justify="right", no_wrap=True)
    for head in _HEADS:
        grid.add_column(head, justify="right", min_width=8)
    for size in dict.fromkeys(size for size, _ in cells):
        row = []
        for name in OPERATIONS:
            cell = cells.get((size, name))
            row.append("n/a" if cell is None or cell.timing is None else _number(value(cell.timing, name)))
        grid.add_row(size_text(size), *row)
    return grid


def _largest(cells: dict[tuple[int, str], Measurement]) -> str:
    """The largest all-reduce in words: what a training run's gradients may hope for."""
    known = [each.timing for (_, name), each in cells.items() if name == "all_reduce" and each.timing is not None]
    if not known:
        return "all-reduce: n/a"
    timing = max(known, key=lambda timing: timing.bytes)
    bus = timing.bandwidths("all_reduce")[1] * 8
    return f"all-reduce of {size_text(timing.bytes)}: {timing.median_s * 1e3:.4g} ms, bus bandwidth {rate(bus)}"


def _spread(cells: dict[tuple[int, str], Measurement]) -> str:
    timings = [(each.timing, size, name) for (size, name), each in cells.items() if each.timing is not None]
    numbers = [timing.repetitions for timing, _, _ in timings]
    spreads = [(t.p90_s / t.p10_s, size, name) for t, size, name in timings if t.repetitions >= _FEW_REPETITIONS]
    text = f"repetitions: {min(numbers)} to {max(numbers)}; spread (p90 / p10) "
    if not spreads:
        return text + f"n/a: less than {_FEW_REPETITIONS} repetitions"
    worst, size, name = max(spreads)
    return text + (
        f"{median(each for each, _, _ in spreads):.2f} at the median, {worst:.2f} at most "
        f"({name.replace('_', '-')} of {size_text(size)})"
    )


def _render_nodes(cells: dict[tuple[int, str], Measurement], line: Callable[[str], None]) -> None:
    """Each node's own group, at the largest all-reduce that was reached."""
    known = [(size, each) for (size, name), each in cells.items() if name == "all_reduce" and len(each.by_node) > 1]
    if known:
        size, each = max(known, key=lambda pair: pair[0])
        nodes = ", ".join(f"{safe(timing.node or '?')} {timing.median_s * 1e3:.3g} ms" for timing in each.by_node)
        line(f"all-reduce of {size_text(size)} by node: {nodes}")


def _fits(table: LinkTable, group: str) -> str:
    fits = [curve.fit for (name, _), curve in table.curves.items() if name == group and curve.fit is not None]
    if not fits:
        return "extrapolation: n/a (less than two sizes)"
    return (
        "between sizes times are interpolated; beyond them alpha + beta x bytes is off by "
        f"{percent(median(fit.median_relative_error for fit in fits))} at the median, "
        f"{percent(max(fit.max_relative_error for fit in fits))} at most (over the measured sizes)"
    )


# --- pairs of nodes ----------------------------------------------------------------------------------------------


def _render_pairs(table: LinkTable, console: "Console") -> None:
    def line(text: str) -> None:
        console.print(text, highlight=False)

    if len(table.nodes) < 2:
        line("[bold]pairs of nodes[/bold]: n/a (all ranks are on one node)")
        return
    slow = table.slow()
    rates = {(pair.source, pair.target): pair.rate_bit_per_s for pair in table.pairs if pair.rate_bit_per_s is not None}
    link = ", unshaped" if table.link == UNSHAPED else ""
    names = [str(node["name"]) for node in table.nodes]
    if rates and len(names) <= MATRIX_NODES:
        line(f"[bold]pairs of nodes, one message at a time, Mbit/s{link}[/bold]")
        grid = _new_table()
        grid.add_column("from \\ to", max_width=12, overflow="ellipsis", no_wrap=True)
        for name in names:
            grid.add_column(safe(name), justify="right", max_width=10, overflow="ellipsis", no_wrap=True)
        for source in names:
            row = []
            for target in names:
                value = rates.get((source, target))
                text = "-" if source == target else "n/a" if value is None else _number(value / 1e6)
                row.append(f"[bold red]{text} SLOW[/bold red]" if (source, target) in slow else text)
            grid.add_row(safe(source), *row)
        console.print(grid)
    elif rates:
        line(f"[bold]pairs of nodes, one message at a time{link}[/bold]: {len(rates)} directions measured")
    if rates:
        line(f"slowest {rate(min(rates.values()))}, median {rate(median(rates.values()))}")
    for (source, target), why in sorted(slow.items(), key=lambda each: rates[each[0]])[:10]:
        line(f"[bold red]slow[/bold red]: {safe(source)} to {safe(target)}, {bits(rates[source, target])}, {safe(why)}")
    if len(slow) > 10:
        line(f"and {len(slow) - 10} more slow directions")
    for sentence in blame(table.pairs, slow):
        line(f"[bold]{safe(sentence)}[/bold]")
    if rates and not slow:
        line("no pair of nodes is slow compared with the others")
    for reason in dict.fromkeys(pair.reason for pair in table.pairs if pair.reason is not None):
        number = sum(pair.reason == reason for pair in table.pairs)
        line(f"n/a: {count(number, 'direction')} between nodes: {safe(reason)}")


# --- picture -----------------------------------------------------------------------------------------------------


def draw(table: LinkTable, path: Path) -> None:
    """Bus bandwidth over size, one panel for each group that was measured (PNG, whole or not at all). OSError."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    names = list(dict.fromkeys(each.group for each in table.measurements)) or [WORLD]
    with picture(path, 1.5 + 5 * len(names), 4.8) as figure:
        title = "".join(each if each.isprintable() else " " for each in what_was_measured(table))
        figure.suptitle(title, parse_math=False)
        panels = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
        for axes, name in zip(panels, names, strict=True):
            for operation, colour, marker in zip(OPERATIONS, _COLOURS, _MARKERS, strict=True):
                points = [
                    (each.timing.bytes, each.timing.bandwidths(operation)[1] * 8)
                    for each in table.measurements
                    if each.timing is not None and each.group == name and each.operation == operation
                ]
                if points:
                    label = operation.replace("_", "-") if operation != "send" else "send/receive"
                    axes.loglog(*zip(*points, strict=True), color=colour, marker=marker, markersize=5, label=label)
            axes.set_title(f"group {name}", loc="left", weight="bold")
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size_text(max(1, round(value)))))
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: bits(value)))
            axes.set_xlabel("size")
            axes.grid(True, color="0.9")
            axes.set_axisbelow(True)
        panels[0].set_ylabel("bus bandwidth")
        if panels[0].lines:
            panels[0].legend(frameon=False, fontsize=9)
