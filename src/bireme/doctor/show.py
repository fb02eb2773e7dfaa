"""The report on a terminal, in two lines, or as JSON. What other machines said is shown as text, never as markup."""

from collections import Counter
from typing import Any

import orjson
from rich.console import Console
from rich.text import Text

from bireme.doctor.checks import passed
from bireme.doctor.cluster import Check, Cluster
from bireme.doctor.recipe import Recipe
from bireme.text import count, listed, printable

_STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red"}
_NAME_WIDTH = 15
_COMMANDS_SHOWN = 16


def as_json(cluster: Cluster, checks: list[Check], recipes: list[Recipe]) -> str:
    report: dict[str, Any] = {
        "passed": passed(checks),
        "checks": [check.to_json() for check in checks],
        "nodes": [facts.to_json() for _, facts in cluster.each()],
        "commands": [{"node": each.node, "command": each.command, "c10d": each.c10d} for each in recipes],
    }
    return orjson.dumps(report, option=orjson.OPT_INDENT_2).decode()


def show_report(cluster: Cluster, checks: list[Check], recipes: list[Recipe], console: Console) -> None:
    """Everything: a line a check, its fix below it, and the commands that start the cluster."""

    def line(text: str, style: str = "") -> None:
        console.print(Text(printable(text), style=style), soft_wrap=True)

    for check in checks:
        shown = Text(f"{check.status}  ", style=_STYLES[check.status])
        shown.append(f"{check.name:<{_NAME_WIDTH}} ", style="bold")
        shown.append(printable(check.message), style="")
        console.print(shown, soft_wrap=True)
        if check.fix and check.status != "pass":
            line(f"      fix: {check.fix}", "cyan")
    line("")
    line(verdict(checks), _STYLES["pass" if passed(checks) else "fail"])
    if not recipes:
        return
    line("")
    line("to start training:" if passed(checks) else "to start training, once what failed is mended:")
    for recipe in recipes[:_COMMANDS_SHOWN]:
        line(f"  on {recipe.node}:")
        line(f"    {recipe.command}")
    if len(recipes) > _COMMANDS_SHOWN:
        line(f"  and so on, up to --node-rank={cluster.size - 1} (all are in --json)")
    missing = [cluster.label(index) for index in range(cluster.size) if index not in cluster.facts]
    if missing:
        line(f"  {listed(missing)}: not known before its doctor answers")
    first = recipes[0]
    if first.c10d:
        line("  or with the elastic rendezvous (c10d); is_host=false and its own --local-addr on every other node:")
        line(f"    {first.c10d}")


def show_brief(cluster: Cluster, checks: list[Check], console: Console) -> None:
    """Two lines: the verdict, and what the cluster is."""
    faults = [check for check in checks if check.status == "fail"]
    text = verdict(checks) + "".join(f"; {check.name}: {check.message}" for check in faults)
    console.print(Text(printable(text), style=_STYLES["fail" if faults else "pass"]), soft_wrap=True)
    versions = Counter(
        " ".join(f"{package} {version}" for package, version in facts.versions.items()) for _, facts in cluster.each()
    )
    clocks = [abs(facts.clock.offset_s) + facts.clock.bound_s for _, facts in cluster.each() if facts.clock]
    parts = [
        listed([label for label, _ in cluster.each()]),
        listed(list(versions)),
        f"clocks within {max(clocks) * 1e3:.2f} ms" if clocks else "",
        "cores " + listed([f"{facts.cores:g}" for _, facts in cluster.each()]),
        listed(sorted({f"link {facts.link}" for _, facts in cluster.each() if facts.link})),
    ]
    console.print(Text(printable(" | ".join(part for part in parts if part))), soft_wrap=True)


def verdict(checks: list[Check]) -> str:
    """``doctor: 16 passed, 1 warning, no failure``"""
    counted = Counter(check.status for check in checks)
    failures = count(counted["fail"], "failure") if counted["fail"] else "no failure"
    return f"doctor: {counted['pass']} passed, {count(counted['warn'], 'warning')}, {failures}"
