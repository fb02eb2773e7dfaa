"""`bireme parity`: chooses the layouts, runs them on all ranks, and shows on rank 0 what came out."""

import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson
from rich.console import Console
from rich.table import Table

from bireme.environment import Launch
from bireme.errors import UserError
from bireme.layout import check_layout_text, parse_layout
from bireme.text import count

if TYPE_CHECKING:
    from bireme.parity import Outcome
    from bireme.parity_cases import Case
    from bireme.shutdown import StopRequest
    from bireme.world import World

_MOST_STEPS = 1000


@dataclass(slots=True)
class Row:
    """A case and what its variants gave; the first variant is the one whose losses are shown."""

    case: "Case"
    outcomes: "list[Outcome]"

    @property
    def passed(self) -> bool:
        return all(each.passed for each in self.outcomes)

    @property
    def worst(self) -> "tuple[Outcome, float, int, str]":
        """The outcome with the largest error; that error, its step and its tensor (or "loss", "gradient norm")."""
        outcome = max(self.outcomes, key=lambda each: each.worst()[0])
        return outcome, *outcome.worst()

    @property
    def reductions_per_step(self) -> float | None:
        """Of the variant where it is farthest from one."""
        known = [each.reductions for each in self.outcomes if each.reductions is not None]
        return max(known, key=lambda each: abs(each - 1)) if known else None

    def failure(self, tolerance: float) -> str | None:
        """What went wrong first of all, in one sentence."""
        if self.passed:
            return None
        outcome, error, step, tensor = self.worst
        what = tensor if tensor in ("loss", "gradient norm") else f"the gradient of {tensor}"
        size = (
            f"is off by {error:.1e} (at most {tolerance:.0e})" if math.isfinite(error) else "is missing or not finite"
        )
        return f"{outcome.variant}, step {step}: {what} {size}"


@dataclass(slots=True)
class Report:
    """All rows, and what was not run, with the reason."""

    ranks: int
    steps: int
    tolerance: float
    rows: list[Row]
    not_run: list[tuple[str, str]]
    uncounted: str | None  # why reductions could not be counted

    @property
    def passed(self) -> bool:
        return all(each.passed for each in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """The one JSON object of `--json` (docs/parity.md)."""
        return {
            "passed": self.passed,
            "ranks": self.ranks,
            "steps": self.steps,
            "tolerance": self.tolerance,
            "layouts": [self._row_as_dict(each) for each in self.rows],
            "not_run": [{"layout": layout, "reason": reason} for layout, reason in self.not_run],
        }

    def _row_as_dict(self, row: Row) -> dict[str, Any]:
        outcome, _, step, tensor = row.worst
        first = row.outcomes[0]
        described: dict[str, Any] = {
            "layout": str(row.case),
            "passed": row.passed,
            "max_loss_error": _number(max(max(each.loss_errors) for each in row.outcomes)),
            "max_gradient_error": _number(max(max(each.gradient_errors)[0] for each in row.outcomes)),
            "max_norm_error": _number(max(max(each.norm_errors) for each in row.outcomes)),
            "gradient_norm": _number(first.norms[-1]),
            "loss": [_number(each) for each in first.losses],
            "reductions_per_step": row.reductions_per_step,
            "variants": [str(each.variant) for each in row.outcomes],
            "worst": {"variant": str(outcome.variant), "step": step, "tensor": tensor},
        }
        if row.reductions_per_step is None:
            described["reductions_per_step_reason"] = self.uncounted
        failure = row.failure(self.tolerance)
        if failure is not None:
            described["reason"] = failure
        return described


def _number(value: float) -> float | None:
    """JSON has no infinity: null where something is missing or not finite (`reason` says what)."""
    return value if math.isfinite(value) else None


# --- running -----------------------------------------------------------------------------------------------------


def parity_command(layouts: Sequence[str] | None, steps: int, quick: bool, json: bool) -> int:
    """Compares on every rank and shows on rank 0; the exit code, the same on every rank: 0, or 1 where a layout
    failed. `layouts`: names or sizes; None: all that the ranks allow. UserError for options that cannot be."""
    problem: str | None = None
    try:
        if layouts is not None and not layouts:
            raise UserError("--layout needs a layout: ddp, fsdp, hsdp, tp, pp, or sizes such as pp=2,replicate=2")
        if not 1 <= steps <= _MOST_STEPS:
            raise UserError(f"--steps {steps} is no number of steps from 1 to {_MOST_STEPS}")
        for text in layouts or ():
            check_layout_text(text)
    except UserError as error:
        problem = str(error)
        if Launch.from_environment(os.environ).size == 1:
            raise
    rank, report = _run(problem, layouts or (), steps, quick)
    if rank == 0:
        _print_json(report) if json else render(report, Console())
    return 0 if report.passed else 1


def _run(problem: str | None, layouts: Sequence[str], steps: int, quick: bool) -> tuple[int, Report]:
    import torch

    from bireme.shutdown import Interrupted, StopRequest
    from bireme.world import join, peer_lost_in_one_line

    torch.set_num_threads(1)  # the models are tiny, and sums are added up in the same order on any machine
    world = join("cpu")

    def say_stopped(reason: str) -> None:
        if world.rank == 0:
            print(f"\nbireme: stopped by {reason}; nothing is known of the layouts", file=sys.stderr, flush=True)

    try:
        with StopRequest() as stop, peer_lost_in_one_line(world, stop.check, "nothing is known of the layouts"):
            stop.on_stuck = say_stopped
            world.raise_together(problem)
            world.agree({"layout": list(layouts), "steps": steps, "quick": quick})
            with world.together():
                cases = choose([node["ranks"] for node in world.nodes], layouts)
            return world.rank, _report(world, cases, steps, quick, stop, listed=not layouts)
    except Interrupted as stopped:
        say_stopped(str(stopped))
        raise
    finally:
        world.leave()


def choose(nodes: Sequence[Sequence[int]], layouts: Sequence[str]) -> "list[Case]":
    """The cases of the layouts that were asked for, each once; none asked for: every layout of these ranks.

    UserError for one that cannot be.
    """
    from bireme.parity_cases import cases_of, every_layout

    ranks = sum(len(node) for node in nodes)
    chosen = [] if layouts else every_layout(ranks)
    for text in layouts:
        name = check_layout_text(text)
        if name == "hsdp":  # here it need not follow the nodes: what is compared is arithmetic
            found = [each for each in every_layout(ranks) if tuple(each.mesh_sizes) == ("replicate", "shard")]
            if not found:
                raise UserError(
                    f"layout hsdp needs 4 ranks, or another product of two sizes; there {_are(ranks)}: "
                    "torchrun --nproc-per-node 4 -m bireme parity"
                )
            chosen += found
            continue
        if ranks == 1 and name in ("fsdp", "tp", "pp"):
            raise UserError(
                f"layout {name} needs at least 2 ranks, there is 1: torchrun --nproc-per-node 2 -m bireme parity"
            )
        chosen.append(parse_layout(text, nodes))
    return [case for layout in dict.fromkeys(chosen) for case in cases_of(layout)]


def _are(number: int) -> str:
    return f"{'is' if number == 1 else 'are'} {number}"


def _report(
    world: "World", cases: "Sequence[Case]", steps: int, quick: bool, stop: "StopRequest", listed: bool
) -> Report:
    from bireme.observe.collectives import hooks_missing
    from bireme.parity import TOLERANCE, References, run_variant
    from bireme.parity_cases import not_run, quick_leaves_out, variants_of

    left_out = [(str(layout), reason) for layout, reason in not_run(world.size)] if listed else []
    if quick:
        left_out += [(str(each), "left out by --quick") for each in cases if quick_leaves_out(each)]
        cases = [each for each in cases if not quick_leaves_out(each)]
    references = References(steps)
    rows = []
    for number, case in enumerate(cases, 1):
        variants = variants_of(case, quick)
        _say(world, f"{number}/{len(cases)} {case}, {count(len(variants), 'variant')} ...")
        started = time.monotonic()
        rows.append(Row(case, [run_variant(case, each, references, world, stop.check) for each in variants]))
        _say(world, f" {_verdict(rows[-1])} in {time.monotonic() - started:.1f} s\n")
    return Report(world.size, steps, TOLERANCE, rows, left_out, hooks_missing())


def _say(world: "World", text: str) -> None:
    if world.rank == 0:
        print(text, end="", file=sys.stderr, flush=True)


def _verdict(row: Row) -> str:
    return "passed" if row.passed else "FAILED"


# --- showing -----------------------------------------------------------------------------------------------------


def _print_json(report: Report) -> None:
    sys.stdout.write(orjson.dumps(report.as_dict(), option=orjson.OPT_INDENT_2).decode() + "\n")


def render(report: Report, console: Console) -> None:
    """The table, what failed, and what could not be run."""

    def line(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    table = Table(box=None, padding=(0, 0, 0, 1), pad_edge=False, header_style="bold")
    table.add_column("layout", min_width=16)
    table.add_column("loss per step", no_wrap=report.steps <= 5)
    for head in ("gradient\nerror", "gradient\nnorm", "reduc-\ntions"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for row in report.rows:
        first = row.outcomes[0]
        table.add_row(
            str(row.case),
            " ".join(f"{each:.3f}" for each in first.losses),
            f"{max(max(each.gradient_errors)[0] for each in row.outcomes):.1e}",
            f"{first.norms[-1]:.3f}",
            "n/a" if row.reductions_per_step is None else f"{row.reductions_per_step:.3g}",
            _verdict(row),
        )
    console.print(table, highlight=False)
    line("")
    for row in report.rows:
        failure = row.failure(report.tolerance)
        if failure is not None:
            line(f"FAILED {row.case}: {failure}")
    passed = sum(row.passed for row in report.rows)
    line(
        f"{passed} of {count(len(report.rows), 'layout')} equal to one process: {count(report.steps, 'step')} in fp32 "
        f"on {count(report.ranks, 'rank')}, errors of loss, gradients and norm at most {report.tolerance:.0e}"
    )
    if report.uncounted:
        line(f"reductions: n/a, {report.uncounted}")
    for reason in dict.fromkeys(reason for _, reason in report.not_run):
        line(f"not run: {'; '.join(layout for layout, each in report.not_run if each == reason)} ({reason})")
