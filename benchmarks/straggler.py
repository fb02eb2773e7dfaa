"""What a straggler sweep shows: does the delay appear where it was planted, and do the others wait for just that?

    STRAGGLER_MS=0,50,100,150,200 torchrun --nproc_per_node=2 multinode.py
    python benchmarks/straggler.py RUN

Reads the run's record only. Writes runs/benchmarks/straggler-PHASE.json.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from bireme.errors import UserError
from bireme.ledger import BLOCKED, PHASES, STATES, TRANSFER, WAIT
from bireme.record import write_json_atomic
from bireme.report.summary import measured_steps
from bireme.run_reader import read_run
from bireme.study.rows import fit_line


def analyse(directory: Path) -> dict[str, Any]:
    """Medians by delay of the slow rank's and the punctual ranks' ledgers; slopes from 50 ms up."""
    run = read_run(directory)
    truth = next((event for event in run.events if event["event"] == "injection"), None)
    if truth is None:
        raise UserError(f"{directory} has no straggler: run it with STRAGGLER_MS=0,50,100,150,200")
    slow, phase = truth["rank"], PHASES.index(truth["phase"])
    punctual = 0 if slow else 1
    rows: dict[float, dict[str, float]] = {}
    for delay in sorted(set(truth["delays_ms"])):
        steps = [step for step in measured_steps(run) if step.get("injected_ms") == delay]

        rows[delay] = {
            "steps": len(steps),
            "step_ms": _median_ms(step["end_ns"][slow] - step["start_ns"][slow] for step in steps),
            "slow_step_minus_busy_ms": _median_ms(
                sum(_state_ns(step, slow, state) for state in (TRANSFER, WAIT, BLOCKED)) for step in steps
            ),
            "slow_planted_phase_blocked_ms": _median_ms(
                step["cells_ns"][slow][phase * len(STATES) + BLOCKED] for step in steps
            ),
            "slow_wait_ms": _median_ms(_state_ns(step, slow, WAIT) for step in steps),
            "punctual_wait_ms": _median_ms(_state_ns(step, punctual, WAIT) for step in steps),
        }
    delays = [delay for delay in rows if delay >= 50]
    slopes = {
        name: dict(
            zip(("slope", "intercept", "r_squared"), fit_line(delays, [rows[d][name] for d in delays]), strict=True)
        )
        for name in ("step_ms", "slow_step_minus_busy_ms")
        if len(delays) > 1
    }
    most, least = max(rows), min(rows)
    grown = rows[most]["step_ms"] - rows[least]["step_ms"]
    return {
        "phase": truth["phase"],
        "rank": slow,
        "rows": {f"{delay:g}": row for delay, row in rows.items()},
        "slopes_from_50_ms": slopes,
        "wait_growth_over_step_growth": (rows[most]["punctual_wait_ms"] - rows[least]["punctual_wait_ms"]) / grown,
        "run": str(directory),
    }


def _state_ns(step: dict[str, Any], rank: int, state: int) -> int:
    return int(sum(step["cells_ns"][rank][state :: len(STATES)]))


def _median_ms(values_ns: Iterable[int]) -> float:
    return median(values_ns) / 1e6


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    try:
        found = analyse(Path(sys.argv[1]))
    except UserError as error:
        print(f"straggler.py: {error}", file=sys.stderr)
        return 2
    title = f"rank {found['rank']} sleeps in {found['phase']}; medians, ms a step"
    table = Table("delay", title=title, title_justify="left")
    names = list(next(iter(found["rows"].values())))
    for name in names:
        table.add_column(name.removesuffix("_ms").replace("_", " "), justify="right")
    for delay, row in found["rows"].items():
        table.add_row(delay, *(f"{row[name]:.1f}" if name != "steps" else str(row[name]) for name in names))
    console = Console(width=110)
    console.print(table)
    for name, fit in found["slopes_from_50_ms"].items():
        console.print(f"{name} = {fit['slope']:.3f} x delay + {fit['intercept']:.1f}, R2 = {fit['r_squared']:.4f}")
    console.print(f"wait of a punctual rank grows by {found['wait_growth_over_step_growth']:.3f} x the step's growth")
    path = Path(f"runs/benchmarks/straggler-{found['phase']}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(path, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
