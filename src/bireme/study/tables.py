"""The results of a study as tables that fit 80 columns."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bireme.environment import UNSHAPED
from bireme.report.colours import STATE_COLOURS
from bireme.report.terminal import ms, percent, safe, scaled
from bireme.text import count

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod
    from rich.table import Table

_Object = dict[str, Any]
_NAMES = ("link", "reduction", "layout", "nodes x\nranks")


def show(results: _Object, console: "Console") -> None:
    """Prints the tables of a study, and what they come to."""
    done = [each for each in results["cells"] if each["status"] == "finished"]
    if done:
        {"ranks": _ranks, "straggler": _straggler, "links": _links, "layouts": _layouts}[results["name"]](
            results, done, console
        )


def _table(*columns: tuple[str, str]) -> "Table":
    """Columns as (heading, state whose colour it has); names are on the left."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 0, 0, 2))
    for heading, state in columns:
        justify: JustifyMethod = "left" if heading in _NAMES else "right"
        table.add_column(heading, justify=justify, style=STATE_COLOURS.get(state, ""))
    return table


def _conditions(results: _Object, done: Sequence[_Object]) -> str:
    """Nodes, cores and model of the study, in one line."""
    axes = results["settings"]
    cores = f"{count(axes['cores_per_node'], 'core')} a node"
    links = sorted({each["link"] for each in done if each["axes"]["nodes"] > 1})
    parts = [f"{count(axes['nodes'], 'node')}, {cores}"]
    if results["name"] not in ("links", "layouts") and links:
        parts.append(f"link {' and '.join(links)}")
    elif links == [UNSHAPED]:
        parts.append("all unshaped")
    if axes["sequence_length"] is not None:
        parts.append(f"{axes['preset']}, {axes['batch_per_rank']} x {axes['sequence_length']} tokens a rank")
    else:
        parts.append(f"{axes['preset']}, {count(axes['batch_per_rank'], 'sequence')} a rank")
    return ", ".join(parts)


def _print(console: "Console", *lines: str) -> None:
    for line in lines:
        console.print(safe(line), highlight=False)


def _per_s(value: float | None) -> str:
    return "n/a" if value is None else f"{value:,.0f}"


# --- ranks --------------------------------------------------------------------------------------------------------


def _ranks(results: _Object, done: Sequence[_Object], console: "Console") -> None:
    table = _table(
        ("nodes x\nranks", ""),
        ("step", ""),
        ("compute", "running"),
        ("conten-\ntion", "runnable"),
        ("transfer\n+ wait", "transfer"),
        ("comm\nshare", ""),
        ("tokens/s\n(global)", ""),
        ("effi-\nciency", ""),
    )
    for each in done:
        split = each["communication_ms"]
        table.add_row(
            f"{each['axes']['nodes']} x {each['axes']['ranks_per_node']}",
            ms(each["step_ms"]["median"]),
            ms(each["compute_ms"]),
            ms(each["contention_ms"]),
            "n/a" if split["transfer"] is None else f"{ms(split['transfer'])} + {ms(split['wait'])}",
            percent(each["communication_share"]),
            _per_s(each["tokens_per_s_global"]),
            percent(each["efficiency"]),
        )
    _print(console, f"ranks: {_conditions(results, done)}")
    console.print(table)
    _print(
        console,
        "ms a step, mean over ranks; step: median. The batch grows with the ranks;",
        "efficiency: tokens/s/rank, of those of one rank alone.",
    )


# --- straggler ----------------------------------------------------------------------------------------------------


def _straggler(results: _Object, done: Sequence[_Object], console: "Console") -> None:
    sweep = results["sweep"]
    if sweep is None or sweep["delays"] is None:
        why = results["sweep_reason"] if sweep is None else sweep["delays_reason"]
        _print(console, f"straggler: n/a: {why}")
        return
    found = sweep["found"]
    place = f"{found['phase']}/{found['state']}"
    table = _table(
        ("delay", ""),
        ("step", ""),
        ("the others'\nwait", "wait"),
        (f"rank {sweep['rank']}:\n{place}", found["state"]),
        (f"rank {sweep['rank']}:\nwait", "wait"),
        ("steps", ""),
    )
    for each in sweep["delays"]:
        times = (each["step_ms"], each["punctual_wait_ms"], each["slow_found_ms"], each["slow_wait_ms"])
        table.add_row(f"{each['delay_ms']:g}", *map(ms, times), str(each["steps"]))
    _print(console, f"straggler: {_conditions(results, done)}", f"rank {sweep['rank']} sleeps in {sweep['phase']}:")
    console.print(table)
    lines = ["ms a step, means over steps; step: median.", f"step = {_line(sweep['step_fit'])}"]
    if sweep["wait_fit"] is not None:
        lines.append(f"the others' wait = {_line(sweep['wait_fit'])}")
    lines.append(
        f"found in {place} of rank {sweep['rank']}: {ms(found['growth_ms'])} of the {found['planted_ms']:g} ms planted"
    )
    _print(console, *lines)


def _line(fit: _Object) -> str:
    return f"{fit['slope']:.3f} x delay + {fit['intercept_ms']:.1f} ms, R2 = {fit['r_squared']:.4f}"


# --- links --------------------------------------------------------------------------------------------------------


def _links(results: _Object, done: Sequence[_Object], console: "Console") -> None:
    times = _table(
        ("link", ""),
        ("reduction", ""),
        ("step", ""),
        ("p10", ""),
        ("p90", ""),
        ("bound", ""),
        ("step /\nbound", ""),
        ("tokens/s\n(global)", ""),
    )
    traffic = _table(
        ("link", ""),
        ("reduction", ""),
        ("exposed", "transfer"),
        ("hidden", ""),
        ("contention", "runnable"),
        ("bytes\na step", ""),
        ("rate\nMbit/s", ""),
        ("of the\nlink", ""),
    )
    for each in done:
        step, split = each["step_ms"], each["communication_ms"]
        alone = each["axes"]["nodes"] == 1
        names = ("one node", "alone") if alone else (safe(each["link"]), safe(each["axes"]["reduction"]))
        ratio = each.get("step_over_bound")
        times.add_row(
            *names,
            *(ms(step[name]) for name in ("median", "p10", "p90")),
            ms(each["bound_ms"]) if each.get("bound_ms") is not None else "-",
            f"{ratio:.2f}" if ratio is not None else "-",
            _per_s(each["tokens_per_s_global"]),
        )
        if alone:
            continue
        rate = each["link_bit_per_s"]
        traffic.add_row(
            *names,
            "n/a" if split["transfer"] is None else ms(split["transfer"] + split["wait"]),
            ms(split["hidden"]),
            ms(each["contention_ms"]),
            "n/a" if each["link_bytes"] is None else scaled(each["link_bytes"]),
            "n/a" if rate is None else f"{rate / 1e6:,.0f}",
            percent(each["link_share"]) if each["link_share"] is not None else "-",
        )
    _print(console, f"links: {_conditions(results, done)}")
    console.print(times)
    _print(
        console,
        "ms a step; step: median. bound: the larger of what one node alone computes and",
        "the time that the bytes need on the link.",
        "",
    )
    console.print(traffic)
    _print(
        console,
        "ms a step, mean over ranks; exposed: transfer + wait. bytes: over a node's link",
        "in each direction; rate: bytes / (transfer + hidden transfer).",
    )


# --- layouts ------------------------------------------------------------------------------------------------------


def _layouts(results: _Object, done: Sequence[_Object], console: "Console") -> None:
    _print(console, f"layouts: {_conditions(results, done)}")
    if results["settings"]["model"]:
        _print(console, f"model: {results['settings']['preset']} with {results['settings']['model']}")
    by_ranks: dict[int, list[_Object]] = {}
    for each in done:
        by_ranks.setdefault(each["axes"]["ranks_per_node"], []).append(each)
    for ranks, entries in by_ranks.items():
        where = f"{count(results['settings']['nodes'], 'node')} x {count(ranks, 'rank')}"
        times = _table(
            ("link", ""),
            ("layout", ""),
            ("step", ""),
            ("p10", ""),
            ("p90", ""),
            ("exposed", "transfer"),
            ("hidden", ""),
            ("conten-\ntion", "runnable"),
        )
        costs = _table(
            ("link", ""),
            ("layout", ""),
            ("bytes\ncounted", ""),
            ("bytes\nformula", ""),
            ("counted /\nformula", ""),
            ("memory\na rank", ""),
            ("tokens/s\n(global)", ""),
        )
        for each in entries:
            step, split, ratio = each["step_ms"], each["communication_ms"], each["counted_over_formula"]
            names = (safe(each["link"]), safe(each["axes"]["layout"]))
            times.add_row(
                *names,
                *(ms(step[name]) for name in ("median", "p10", "p90")),
                "n/a" if split["transfer"] is None else ms(split["transfer"] + split["wait"]),
                ms(split["hidden"]),
                ms(each["contention_ms"]),
            )
            costs.add_row(
                *names,
                *(_bytes(each[name]) for name in ("counted_link_bytes", "formula_link_bytes")),
                "n/a" if ratio is None else f"{ratio:.3f}",
                _bytes((each["memory_bytes"] or {}).get("max")),
                _per_s(each["tokens_per_s_global"]),
            )
        _print(console, "", f"{where}:")
        console.print(times)
        _print(console, "")
        console.print(costs)
    _print(
        console,
        "",
        "step: median; exposed (transfer + wait), hidden, contention: mean over ranks.",
        "bytes: a step, over the link of the busiest node in one direction; memory: the",
        "largest rank's peak above what it had before the model was built, with freed",
        "memory that the C library keeps (most in fsdp and hsdp: docs/studies.md).",
        *_what_layouts_come_to(results),
    )


def _bytes(value: float | None) -> str:
    return "n/a" if value is None else scaled(value)


def _what_layouts_come_to(results: _Object) -> list[str]:
    lines = [f"fastest at {_place(each)}: {each['layout']}, {ms(each['step_ms'])} ms" for each in results["fastest"]]
    for each in results["hsdp_over_fsdp"]:
        counted, formula = each["counted_link_bytes"], each["formula_link_bytes"]
        carried = "n/a" if counted is None else f"{counted:.3f}"
        expected = "" if formula is None else f" (formula {formula:.3f})"
        lines.append(f"hsdp / fsdp at {_place(each)}: bytes {carried}{expected}, step {each['step']:.2f}")
    ratio = results["counted_over_formula"]
    if ratio is None:
        lines.append(f"counted / formula: n/a: {results['counted_over_formula_reason']}")
    else:
        lines.append(f"counted / formula: {ratio['min']:.3f} to {ratio['max']:.3f} in {count(ratio['cells'], 'cell')}")
    return lines


def _place(each: _Object) -> str:
    return f"{each['nodes']} x {each['ranks_per_node']}, {each['link']}"
