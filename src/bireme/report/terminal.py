"""The report of one run as text: 80 columns are enough, and colour adds nothing that the words do not say."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from bireme.environment import UNSHAPED
from bireme.ledger import PHASES, STATES, own_states
from bireme.report.colours import STATE_COLOURS
from bireme.report.verdicts import verdict_lines
from bireme.run_reader import Run
from bireme.text import count, rank_list

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

RANKS_SHOWN = 8  # with more ranks: one table a node, and one for the fastest and the slowest rank

_Ledger = dict[str, dict[str, float | None]]  # phase: state: milliseconds, None where not known

_BYTES = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_FLOPS = {"MFLOP/s": 1e6, "GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15}
_PARAMETERS = {"": 1.0, "thousand": 1e3, "million": 1e6, "billion": 1e9}


def render(summary: dict[str, Any], run: Run, console: "Console") -> None:
    """Print the report of a run. `summary` is what `summarise` made of `run`."""

    def line(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=False)

    step_ms, mean_ms = summary["step_ms"], summary["step_ms"]["mean"]
    line(f"[bold]{what_ran(summary, run)}[/bold]")
    line(
        f"[bold]step {ms(step_ms['median'])} ms[/bold] median, {ms(mean_ms)} mean, "
        f"p10 {ms(step_ms['p10'])}, p90 {ms(step_ms['p90'])}"
    )
    if summary["tokens_per_s_global"] is not None:
        line(f"tokens/s (global): {summary['tokens_per_s_global']:,.0f}")
    if summary["loss"] is not None:
        first, last = (
            summary["loss"].get(f"{name}_reason") or f"{summary['loss'][name]:.4f}" for name in ("first", "last")
        )
        line(f"loss: {safe(first)} at first, {safe(last)} at last")
    for sentence, below in verdict_lines(summary):
        line(f"[bold]{safe(sentence)}[/bold]")
        for text in below:
            line(f"  {safe(text)}")
    line("")
    for title, ledger in _ledgers(summary):
        console.print(_ledger_table(title, ledger))
        line("")
    line(
        f"compute: {ms(summary['compute_ms'])} ms a step running in forward, backward and optimizer; "
        + _contention(summary)
    )
    line(_communication(summary))
    if summary["collectives"]:
        line("")
        console.print(_collectives_table(summary["collectives"]))
        line("")
    line(_mfu(summary["mfu"]))
    overhead = summary["overhead"]
    line(
        f"cost of measuring: {overhead['ms_per_step']:.3f} ms a step ({percent(overhead['share'])}): "
        f"{overhead['training_thread_ms']:.3f} on the training thread, "
        f"{overhead['background_ms']:.3f} in the background"
    )
    line(_closure(summary))
    for text in (*resource_lines(summary), *host_lines(summary)):
        line(text)
    for note in summary["notes"]:
        line(f"note: {safe(note)}")


def safe(text: Any) -> str:
    """Text from a file, so that neither markup nor control characters in it reach the terminal."""
    from rich.markup import escape

    return escape("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text)))


def ms(value: float | None) -> str:
    """Milliseconds in at most six characters; `n/a` when not known."""
    if value is None:
        return "n/a"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 1000 else f"{value:.0f}"


def percent(share: float | None) -> str:
    """A fraction as a percentage; `n/a` when not known."""
    if share is None:
        return "n/a"
    return f"{100 * share:.0f} %" if share >= 0.1 or share == 0 else f"{100 * share:.1f} %"


def scaled(value: float, units: dict[str, float] = _BYTES) -> str:
    """A number with the largest unit that leaves it above 1: `4.3 MB`."""
    unit, size = next(((u, s) for u, s in reversed(units.items()) if abs(value) >= s), next(iter(units.items())))
    return f"{value / size:.3g} {unit}".strip()


def what_ran(summary: dict[str, Any], run: Run) -> str:
    """One line: how many ranks and nodes, how the work was laid out, which model, how many steps, how it ended."""
    facts = run.facts
    parts = [f"{count(summary['world_size'], 'rank')} on {count(len(summary['nodes']), 'node')}"]
    link = (facts.get("network") or {}).get("link")
    if link:
        parts.append("unshaped: nodes are processes on loopback" if link == UNSHAPED else f"links {safe(link)}")
    layout = [safe(facts[name]) for name in ("layout", "reduction") if facts.get(name)]
    parts += [", ".join(layout)] if layout else []
    model = facts.get("model") or {}
    if model:
        name = safe(model.get("preset") or "model")
        size = scaled(model["parameters"], _PARAMETERS) if model.get("parameters") else "?"
        parts.append(f"{name}, {size} parameters")
    parts.append(f"{count(summary['steps']['measured'], 'step')} measured, {summary['steps']['skipped']} skipped")
    parts.append(safe(facts["status"]))
    return " | ".join(parts)


def self_time_ms(ledger: _Ledger) -> float:
    """The rank's own part of the step (`own_states`)."""
    own = own_states(all(cells["wait"] is not None for cells in ledger.values()))
    return sum(cells[STATES[state]] or 0.0 for cells in ledger.values() for state in own)


def mean_ledger(ledgers: Sequence[_Ledger]) -> _Ledger:
    """The mean of the ranks' ledgers, cell by cell; None where no rank knows."""

    def mean(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None

    return {phase: {state: mean(each[phase][state] for each in ledgers) for state in STATES} for phase in PHASES}


def _role(role: dict[str, int] | None) -> str:
    """A rank's place in the mesh, where it has several dimensions or a pipeline's stages."""
    return f" ({', '.join(f'{name} {place}' for name, place in role.items())})" if role else ""


def _ledgers(summary: dict[str, Any]) -> list[tuple[str, _Ledger]]:
    """The ledgers to show, with their titles."""
    ranks: dict[str, _Ledger] = {
        rank: ledger
        for rank, ledger in summary["ledger_ms"].items()
        if any(value is not None for cells in ledger.values() for value in cells.values())
    }
    shown = []
    for node in summary["nodes"]:
        members = [ranks[str(rank)] for rank in node["ranks"] if str(rank) in ranks]
        if len(members) > 1:
            shown.append((f"node {safe(node['name'])}, mean of {len(members)} ranks", mean_ledger(members)))
    node_of = {str(rank): node["name"] for node in summary["nodes"] for rank in node["ranks"]}
    titles = {rank: f"rank {rank} on {safe(node_of[rank])}{_role(summary['roles'].get(rank))}" for rank in ranks}
    if len(ranks) > RANKS_SHOWN:
        by_self_time = sorted(ranks, key=lambda rank: self_time_ms(ranks[rank]))
        titles = {
            rank: f"{titles[rank]}, the {word} ({ms(self_time_ms(ranks[rank]))} ms a step of its own)"
            for rank, word in ((by_self_time[0], "fastest"), (by_self_time[-1], "slowest"))
        }
    return shown + [(title, ranks[rank]) for rank, title in titles.items()]


def _new_table() -> "Table":
    from rich.table import Table

    return Table(box=None, padding=(0, 0, 0, 2), pad_edge=False, header_style="bold", show_edge=False)


def _ledger_table(title: str, ledger: _Ledger) -> "Table":
    total_ms = sum(value or 0.0 for cells in ledger.values() for value in cells.values())

    def cell(values: Iterable[float | None]) -> str:
        known = [value for value in values if value is not None]
        if not known:
            return "n/a"
        value = sum(known)
        if value == 0:
            return "-"
        return f"{ms(value)} {100 * value / total_ms:3.0f}%" if total_ms else ms(value)

    table = _new_table()
    table.title, table.title_justify, table.title_style = title, "left", "bold"
    table.add_column("ms (%)", no_wrap=True)
    for state in STATES:
        table.add_column(state, justify="right", no_wrap=True, header_style=f"bold {STATE_COLOURS[state]}")
    table.add_column("sum", justify="right", no_wrap=True)
    for phase, cells in ledger.items():
        if any(cells.values()):
            table.add_row(phase, *(cell([cells[state]]) for state in STATES), cell(cells.values()))
    columns = [cell(cells[state] for cells in ledger.values()) for state in STATES]
    table.add_row("step", *columns, cell(v for cells in ledger.values() for v in cells.values()), style="bold")
    return table


def _contention(summary: dict[str, Any]) -> str:
    if summary["contention_ms"] is None:
        return f"contention n/a ({safe(summary['contention_ms_reason'])})"
    return f"contention: {ms(summary['contention_ms'])} ms ready to run without a core"


def _communication(summary: dict[str, Any]) -> str:
    parts = summary["communication_ms"]
    if parts["transfer"] is None:
        return f"communication: transfer and wait n/a ({safe(parts['transfer_reason'])})"
    return (
        f"communication: transfer {ms(parts['transfer'])} ms + wait {ms(parts['wait'])} ms = "
        f"{percent(summary['communication_share'])} of the step; hidden {ms(parts['hidden'])} ms, "
        f"{ms(parts['hidden_transfer'])} of it transfer"
    )


def _collectives_table(collectives: list[dict[str, Any]]) -> "Table":
    table = _new_table()
    table.title, table.title_justify, table.title_style = (
        "collectives, per rank and step, hidden ones too",
        "left",
        "bold",
    )
    for name in ("group", "ranks"):
        table.add_column(name, overflow="ellipsis", no_wrap=True, max_width=18)
    table.add_column("operation", overflow="ellipsis", no_wrap=True, max_width=18)
    for name in ("count", "bytes", "transfer", "wait", "bus bandwidth"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in collectives:
        rate = each["bus_bandwidth_bytes_per_s"]
        table.add_row(
            safe(each["group"]),
            rank_list(each["ranks"]),
            safe(each["operation"]),
            f"{each['count']:.4g}",
            scaled(each["bytes"]),
            f"{ms(each['transfer_ms'])} ms",
            f"{ms(each['wait_ms'])} ms",
            "n/a" if rate is None else f"{scaled(rate)}/s",
        )
    return table


def _mfu(mfu: dict[str, Any]) -> str:
    if mfu["value"] is None:
        return f"MFU: n/a ({safe(mfu['value_reason'])})"
    causal = (
        "" if mfu["value_causal"] is None else f"; {percent(mfu['value_causal'])} counting causal attention by half"
    )
    peak = f"{scaled(mfu['peak_flops_per_s'], _FLOPS)}"
    source = safe(mfu["peak_source"] or "source not recorded")
    return f"MFU: {percent(mfu['value'])} of {peak} over all ranks ({source}); {mfu['convention']}{causal}"


def _closure(summary: dict[str, Any]) -> str:
    error_ns = summary["closure_error_ns"]
    if error_ns:
        return (
            f"[bold]closure error {error_ns} ns: the ledger does NOT add up to the wall time: please report this[/bold]"
        )
    text = f"closure error 0 ns: the ledger adds up to the wall time; clamped {summary['clamped_ms']:.3f} ms a step"
    if summary["unlocated_ms"] is not None:
        text += f", unlocated {summary['unlocated_ms']:+.3f} ms"
    return text + (f", {summary['unmatched']} collectives unmatched" if summary["unmatched"] else "")


def resource_lines(summary: dict[str, Any]) -> list[str]:
    """What crossed the busiest node's link, counted and by formula, and the most memory that a rank had."""
    lines = []
    traffic, memory = summary["link_traffic"], summary["memory"]
    if traffic["formula_link_bytes"]:
        text = f"bytes over a node's link: {scaled(traffic['formula_link_bytes'])} a step by the layout's formula"
        if traffic["counted_link_bytes"] is not None:
            share = percent(traffic["counted_over_formula"])
            text += f", {scaled(traffic['counted_link_bytes'])} counted by its interface ({share})"
        lines.append(text)
    if memory["peak_rss_bytes"] is not None:
        peaks = memory["peak_rss_bytes"]["per_rank"]
        text = f"memory: peak {scaled(max(peaks))} a rank" + (f", least {scaled(min(peaks))}" if len(peaks) > 1 else "")
        if memory["memory_bytes"] is not None:
            most = scaled(memory["memory_bytes"]["max"])
            text += f"; {most} on the GPU" if memory["on_device"] else f"; {most} more than before the model was built"
        lines.append(text)
    return lines


def host_lines(summary: dict[str, Any]) -> list[str]:
    """What took time from the ranks that no rank can be blamed for, named by its node."""
    lines = []
    for host in summary["host"]:
        name = safe(host["node"])
        if host["throttled_share"]:
            lines.append(f"cgroup CPU quota held node {name} back for {percent(host['throttled_share'])} of the time")
        if host["steal_share"]:
            lines.append(f"the hypervisor took {percent(host['steal_share'])} of node {name}'s core time (steal)")
    return lines
