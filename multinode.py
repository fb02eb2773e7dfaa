"""Data-parallel training on 1, 2, 4 ranks, and one rank made slow: what each step spends its time on.

    torchrun --nproc_per_node=1 multinode.py
    torchrun --nproc_per_node=2 multinode.py
    torchrun --nproc_per_node=4 multinode.py
    STRAGGLER_MS=150 torchrun --nproc_per_node=4 multinode.py
    python multinode.py --plot

Every run trains the toy GPT with a fixed batch and one thread per rank, adds its row to runs/multinode/ and prints the
table so far. STRAGGLER_MS may be a list (0,50,100,150,200): the delays then take turns step by step. STRAGGLER_RANK is
the rank that sleeps (the last, if not set), STRAGGLER_PHASE where (forward, if not set).
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cyclopts
from rich.console import Console

from bireme.cli import run
from bireme.config import TrainConfig

ROWS = Path("runs/multinode")
BATCH_PER_RANK = 8
WARM_UP_STEPS = 3

app = cyclopts.App(name="multinode.py", help=__doc__, help_format="plaintext", result_action="return_value")


@app.default
def multinode(*, plot: bool = False, overlap: bool = False, steps: int = 40) -> None:
    """Train and add a row to the table, or draw it.

    Parameters
    ----------
    plot
        Draw what was recorded so far as runs/multinode/multinode.png instead of training.
    overlap
        Reduce gradients during the backward pass (DDP's buckets) instead of in one all-reduce after it.
    steps
        Measured steps, for each delay.
    """
    if plot:
        _plot()
    else:
        _train(overlap, steps)


def _train(overlap: bool, steps: int) -> None:
    from bireme.environment import Launch
    from bireme.inject import Straggler
    from bireme.run_reader import read_run
    from bireme.study.rows import load_rows, rows_from_run, save_rows, table
    from bireme.train import run_training

    def config(base: Mapping[str, Any] | None) -> TrainConfig:
        ranks = Launch.from_environment(os.environ).size
        straggler = Straggler.from_environment(os.environ, ranks)
        delays = len(straggler.delays_ms) if straggler else 1
        return TrainConfig(
            preset="toy",
            overlap=overlap,
            global_batch_size=BATCH_PER_RANK * ranks,
            threads=1,
            device="cpu",
            steps=WARM_UP_STEPS + steps * delays,
            skip_steps=WARM_UP_STEPS,
            evaluate_every=0,
        )

    directory, world = run_training(config)
    if world.rank == 0:
        save_rows(rows_from_run(read_run(directory)), ROWS)
        rows, notes = load_rows(ROWS)
        console = Console()
        console.print(table(rows))
        for note in notes:
            console.print(note, markup=False)
        console.print(f"run directory: {directory}  (bireme report {directory})", markup=False, soft_wrap=True)


def _plot() -> None:
    from bireme.report.plot import plot
    from bireme.study.rows import load_rows

    rows, _ = load_rows(ROWS)
    picture = ROWS / "multinode.png"
    plot(rows, picture)
    print(f"drew {len(rows)} rows of {ROWS} as {picture}")


if __name__ == "__main__":
    sys.exit(run(app, sys.argv[1:]))
