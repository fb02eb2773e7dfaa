"""`make demo`: two emulated machines train a GPT; one is slowed on purpose, then the link; where the time goes.

Takes two to three minutes on two cores. What it leaves is under runs/, and the corpus's tokens in ~/.cache/bireme.
Where network namespaces are refused the machines are plain processes, and no link can be made slow.
"""

import os
import re
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bireme.environment import UNSHAPED
from bireme.report.figure import ledger_parts_ms
from bireme.report.runs_plot import plot_runs
from bireme.report.summary import summarise
from bireme.report.terminal import ms, percent
from bireme.run_reader import Run, read_run

REPOSITORY = Path(__file__).resolve().parent.parent
STEPS = 30
DELAY_MS = 100
SLOW_LINK = "100mbit"
# Scrolls by and is in the run directory; and what a shell would do with the lines of every node.
QUIET = re.compile(r"node\d+ \| (step +\d+/\d+ |run directory: |rank \d+ on node)")
NOTHING: Mapping[str, str] = {}
BIREME = (sys.executable, "-m", "bireme")
console = Console(highlight=False)


def run(*command: str, may_fail: bool = False, environment: Mapping[str, str] = NOTHING) -> None:
    """Runs a command as a user would type it; ends the demo where it fails, unless that `may` be."""
    typed = " ".join([f"{name}={value}" for name, value in environment.items()] + [shlex.join(command)])
    print(f"\n$ {typed.replace(f'{sys.executable} -m bireme', 'bireme')}", flush=True)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("STRAGGLER_")}
    settings = {**inherited, "OMP_NUM_THREADS": "1", **environment}
    with subprocess.Popen(command, cwd=REPOSITORY, env=settings, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not QUIET.match(line):
                print(line, end="", flush=True)
    if process.returncode and not may_fail:
        sys.exit(f"the demo stopped: that command ended with exit code {process.returncode}")


def on_nodes(link: str, *command: str, may_fail: bool = False, environment: Mapping[str, str] = NOTHING) -> None:
    nodes = (*BIREME, "nodes", "--nodes", "2", "--cores-per-node", "1", "--link", link)
    run(*nodes, *command, may_fail=may_fail, environment=environment)


def train(directory: Path, link: str, environment: Mapping[str, str] = NOTHING) -> Run:
    options = ("--preset", "toy", "--steps", str(STEPS), "--no-overlap", "--evaluate-every", "0")
    command = ("--torchrun", "1", "--", "-m", "bireme", "train", *options, "--run-dir", str(directory))
    on_nodes(link, *command, environment=environment)
    return read_run(REPOSITORY / directory)


def show_nodes(title: str, run: Run) -> dict[str, Any]:
    """The ledger of each node, a line each; returns the run's summary."""
    summary = summarise(run)
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for name in ("node", "compute", "contention", "transfer", "wait", "other", "step (ms)"):
        table.add_column(name, justify="left" if name == "node" else "right")
    for node in summary["nodes"]:
        parts = [ledger_parts_ms(summary["ledger_ms"][str(rank)]) for rank in node["ranks"]]
        means = [sum(values) / len(values) for values in zip(*parts, strict=True)]
        table.add_row(node["name"], *map(ms, means), ms(sum(means)))
    console.print()
    console.print(table)
    return summary


def verdict_on(summary: dict[str, Any]) -> str:
    """What `bireme report` says of the run, and what it takes the cure to be worth."""
    if not summary["verdicts"]:
        return f"No verdict: {summary['verdicts_reason']}."
    verdict = summary["verdicts"][0]
    worth = verdict["what_if"]
    predicted = f"; cured, a step would take {worth['step_ms']:.0f} ms" if worth else ""
    return f"The verdict: {verdict['sentence']}{predicted}."


def exposed_ms(summary: dict[str, Any]) -> float:
    return float(summary["communication_ms"]["transfer"] + summary["communication_ms"]["wait"])


def main() -> None:
    started = time.monotonic()
    folder = Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"
    (REPOSITORY / folder).mkdir(parents=True)
    on_nodes("1gbit", "--", *BIREME, "doctor", "--brief", may_fail=True)
    links = folder / "links.json"
    on_nodes("1gbit", "--", *BIREME, "links", "--max-bytes", "4MiB", "--seconds", "5", "--brief", "--out", str(links))

    fast_run = train(folder / "1gbit", "1gbit")
    shaped = (fast_run.facts.get("network") or {}).get("link") != UNSHAPED
    fast_link = "1 Gbit/s" if shaped else "loopback, unshaped"
    fast = show_nodes(f"ms a step on each node, {fast_link}", fast_run)
    delay = {"STRAGGLER_MS": str(DELAY_MS), "STRAGGLER_RANK": "1"}
    slow_run = train(folder / "straggler", "1gbit", delay)
    slow = show_nodes(f"node1 slowed by {DELAY_MS} ms a step", slow_run)
    bars = [(fast_link, fast_run), (f"node1 slowed\nby {DELAY_MS} ms", slow_run)]
    if shaped:
        narrow_run = train(folder / SLOW_LINK, SLOW_LINK)
        narrow = show_nodes("the same at 100 Mbit/s", narrow_run)
        bars.append(("100 Mbit/s", narrow_run))
    picture = folder / "demo.png"
    plot_runs(bars, REPOSITORY / picture)

    fast_ms, slow_ms = fast["step_ms"]["median"], slow["step_ms"]["median"]
    waits = [sum(cells["wait"] or 0.0 for cells in slow["ledger_ms"][rank].values()) for rank in ("0", "1")]
    phase, cells = max(slow["ledger_ms"]["1"].items(), key=lambda item: float(item[1]["blocked"] or 0.0))
    print(
        f"\n1. On two machines of one core ({fast_link}) a step takes {fast_ms:.0f} ms: {fast['compute_ms']:.0f} ms "
        f"are computing and {exposed_ms(fast):.0f} ms communication that nothing hides "
        f"({percent(fast['communication_share'])})."
        f"\n2. With node1 {DELAY_MS} ms late a step takes {slow_ms:.0f} ms: rank 0 on node0 waits {waits[0]:.0f} ms a "
        f"step for rank 1 on node1, which waits {waits[1]:.0f} ms and was itself held up in {phase}/blocked for "
        f"{cells['blocked']:.0f} ms. {verdict_on(slow)} Without the delay a step took {fast_ms:.0f} ms."
    )
    if shaped:
        narrow_ms = narrow["step_ms"]["median"]
        moved = sum(each["bytes"] for each in narrow["collectives"]) / 1e6
        print(
            f"3. At 100 Mbit/s the same step takes {narrow_ms:.0f} ms, {narrow_ms / fast_ms:.1f} times as long: "
            f"the {moved:.1f} MB of gradients alone need {moved * 8e6 / 100e6 * 1e3:.0f} ms of the link, and "
            f"{exposed_ms(narrow):.0f} ms of every step ({percent(narrow['communication_share'])}) are communication."
        )
    else:
        print("3. Links could not be limited here, so what a slow network costs is not shown (see the first lines).")
    print(f"\nThe demo took {time.monotonic() - started:.0f} s. Run directories and pictures are in {folder}/")
    print(f"Pictures: {picture}, {links.with_suffix('.png')}. Try next:")
    print(f"  {Path(sys.executable).parent / 'bireme'} report {folder}/1gbit {folder}/straggler")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
