"""Two runs side by side: what they were asked to do differently, and what came of it."""

from typing import TYPE_CHECKING, Any

from bireme.ledger import STATES
from bireme.links import LinkTable
from bireme.report.summary import summarise
from bireme.report.terminal import mean_ledger, ms, percent, safe, what_ran
from bireme.run_reader import Run
from bireme.text import rank_list

if TYPE_CHECKING:
    from rich.console import Console

# Of a run's facts, what makes runs comparable or not; times, process ids and paths always differ.
_FACTS = (
    "world_size",
    "network",
    "layout",
    "reduction",
    "skip_steps",
    "missing",
    "model",
    "data",
    "config",
    "versions",
)
_IGNORED = frozenset({"config.run", "model.flops_per_token"})


def compare(a: Run, b: Run, links: LinkTable | None = None) -> dict[str, Any]:
    """`{a, b, differences}`: both summaries, and what differs.

    `differences` is `{facts: [{field, a, b}], metrics: [{metric, unit, a, b, change, ratio}]}`: `change` is b - a,
    `ratio` b / a; both are None where they cannot be computed. Raises UserError as `summarise` does.
    """
    summary_a, summary_b = summarise(a, links=links), summarise(b, links=links)
    facts_a, facts_b = _facts(a), _facts(b)
    absent = object()
    differing = [name for name in {**facts_a, **facts_b} if facts_a.get(name, absent) != facts_b.get(name, absent)]
    metrics_a, metrics_b = _metrics(summary_a), _metrics(summary_b)
    return {
        "a": {"run": str(a.directory), **summary_a},
        "b": {"run": str(b.directory), **summary_b},
        "differences": {
            "facts": [{"field": name, "a": facts_a.get(name), "b": facts_b.get(name)} for name in differing],
            "metrics": [
                {
                    "metric": metric,
                    "unit": unit,
                    "a": value,
                    "b": other,
                    "change": None if value is None or other is None else other - value,
                    "ratio": other / value if value and other is not None else None,
                }
                for ((metric, unit), value), other in zip(metrics_a.items(), metrics_b.values(), strict=True)
            ],
        },
    }


def _facts(run: Run) -> dict[str, Any]:
    """The facts worth comparing, flat: `{"config.seed": 1}`."""
    flat: dict[str, Any] = {}

    def flatten(name: str, value: Any) -> None:
        if name in _IGNORED:
            return
        if isinstance(value, dict):
            for key, item in value.items():
                flatten(f"{name}.{key}", item)
        else:
            flat[name] = value

    for name in _FACTS:
        flatten(name, run.facts.get(name))
    flat["nodes"] = [rank_list(node["ranks"]) for node in run.facts["nodes"]]
    ranks = [rank for rank in run.facts.get("ranks") or [] if isinstance(rank, dict)]
    for name in ("threads", "cores", "device"):
        values = [rank.get(name) for rank in ranks]
        if any(value != values[0] for value in values):
            flat[f"{name} of each rank"] = values
        elif values:
            flat[f"{name} of every rank"] = values[0]
    flat["injections"] = [
        {name: value for name, value in event.items() if name not in ("time_utc", "event")}
        for event in run.events
        if event["event"] == "injection"
    ]
    return flat


def _metrics(summary: dict[str, Any]) -> dict[tuple[str, str], float | None]:
    """(metric, unit): value."""
    communication, ledger = summary["communication_ms"], mean_ledger(list(summary["ledger_ms"].values()))
    metrics: dict[tuple[str, str], float | None] = {
        (f"step, {name}", "ms"): summary["step_ms"][name] for name in ("median", "mean", "p10", "p90")
    }
    metrics["tokens/s (global)", "1/s"] = summary["tokens_per_s_global"]
    metrics["MFU", "%"] = summary["mfu"]["value"]
    metrics["compute", "ms"] = summary["compute_ms"]
    metrics["contention", "ms"] = summary["contention_ms"]
    for name in ("transfer", "wait", "hidden", "hidden_transfer"):
        metrics[name.replace("_", " "), "ms"] = communication[name]
    metrics["communication share", "%"] = summary["communication_share"]
    for phase, cells in ledger.items():
        for state in STATES:
            metrics[f"{phase}/{state}", "ms"] = cells[state]
    metrics["last loss", ""] = None if summary["loss"] is None else summary["loss"]["last"]
    metrics["cost of measuring", "ms"] = summary["overhead"]["ms_per_step"]
    return metrics


def render_comparison(comparison: dict[str, Any], a: Run, b: Run, console: "Console") -> None:
    """Print what `compare` made of the runs: 80 columns are enough."""
    from rich.table import Table

    for name, run in (("a", a), ("b", b)):
        what = what_ran(comparison[name], run)
        console.print(f"[bold]{name.upper()}[/bold] {safe(run.directory)}: {what}", highlight=False)
    differences = comparison["differences"]
    console.print()
    if differences["facts"]:
        table = Table(box=None, pad_edge=False, title="what differs", title_justify="left", title_style="bold")
        for column in ("field", "A", "B"):
            table.add_column(column, overflow="fold")
        for row in differences["facts"]:
            table.add_row(safe(row["field"]), safe(_short(row["a"])), safe(_short(row["b"])))
        console.print(table)
    else:
        console.print("configuration, model, data and versions: the same")
    console.print()

    table = Table(box=None, pad_edge=False)
    table.add_column("metric", no_wrap=True)
    for column in ("A", "B", "B - A", "B / A"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in differences["metrics"]:
        if row["a"] or row["b"]:  # a cell of the ledger that is 0 or unknown in both says nothing
            unit = row["unit"]
            change = "n/a" if row["change"] is None else _sign(row["change"]) + _value(abs(row["change"]), unit)
            ratio = "n/a" if row["ratio"] is None else f"{row['ratio']:.2f}"
            label = f"{row['metric']} (ms)" if unit == "ms" else row["metric"]
            table.add_row(safe(label), _value(row["a"], unit), _value(row["b"], unit), change, ratio)
    console.print(table)
    for name in ("a", "b"):
        for note in comparison[name]["notes"]:
            console.print(f"note on {name.upper()}: {safe(note)}", highlight=False)


def _sign(value: float) -> str:
    return "-" if value < 0 else "+"


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return "n/a"
    return (
        percent(value)
        if unit == "%"
        else f"{value:,.0f}"
        if unit == "1/s"
        else f"{value:.4f}"
        if not unit
        else ms(value)
    )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else text[:197] + "..."
