"""How long the HTML report of a large run takes to read, judge and write, and how large it is.

    python benchmarks/html_report.py --ranks 1024 --steps 1000

The run is made up (a straggler, pauses for garbage collection, checkpoints, evaluations, collectives of two kinds of
groups) and kept with --keep DIR.
"""

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bireme.ledger import STATES, TRANSFER, WAIT
from bireme.record import RunWriter
from bireme.run_reader import uncollected

if TYPE_CHECKING:
    from benchmarks.synthetic import Made
else:
    from synthetic import Made

RANKS_PER_NODE = 8
_WARM_UP = 3
_BYTES = 44_000_000


def make_run(directory: Path, ranks: int, steps: int, seed: int = 1, straggler_ms: float = 60.0) -> int:
    """Writes a run of so many ranks, eight on each node: rank `ranks // 3` stands still in backward from a third of the
    steps on. Returns the straggler's rank."""
    rng = np.random.default_rng(seed)
    nodes = -(-ranks // RANKS_PER_NODE)
    made = Made(steps, ranks, rng, noise=0.02, step_ms=200.0, nodes=nodes)
    slow = ranks // 3
    first = steps // 3
    made.plant(np.arange(first, steps), slow, ("backward", "blocked"), straggler_ms)
    pauses = [(step, int(rng.integers(ranks))) for step in range(17, steps, 40)]
    for step, rank in pauses:
        made.plant(step, rank, ("forward", "running"), 90.0)
    made.plant(slice(0, _WARM_UP), slice(None), ("forward", "running"), 300.0)
    checkpoints, evaluations = range(99, steps, 100), range(149, steps, 200)
    for step in checkpoints:
        made.plant(step, slice(None), ("checkpoint", "running"), 80.0)
    for step in evaluations:
        made.plant(step, slice(None), ("other", "running"), 400.0)
    cells_ms = made.evidence().cells_ms

    names = [f"node{node:03}" for node in range(nodes)]
    members = [list(range(n * RANKS_PER_NODE, min(ranks, (n + 1) * RANKS_PER_NODE))) for n in range(nodes)]
    flops = 6 * 124e6
    writer = RunWriter(directory, _facts(ranks, names, members, flops))
    writer.event(
        "injection", kind="sleep", phase="backward", ranks=[slow], nodes=[names[slow // RANKS_PER_NODE]],
        first_step=first + 1, last_step=None, text=f"sleep:{straggler_ms:g}ms in backward of rank {slow}",
    )  # fmt: skip
    for step, rank in pauses:
        writer.event("gc_pause", rank=rank, step=step + 1, phase="forward", generation=2, ms=90.0)
    for step in checkpoints:
        writer.event("checkpoint", step=step + 1, seconds=2.5, bytes=1_500_000_000, write_s=[2.0] * ranks)
    for step in evaluations:
        writer.event("evaluation", step=step + 1, loss=_loss(step) + 0.05)
    clock = rng.integers(10**12, 10**15, ranks)
    group_of = np.arange(ranks) // RANKS_PER_NODE + 1
    pause_of = dict(pauses)
    for step in range(steps):
        cells = np.round(cells_ms[step] * 1e6).astype(np.int64)
        start, clock = clock, clock + cells.sum(axis=1)
        transfer, wait = (cells[:, state :: len(STATES)].sum(axis=1).tolist() for state in (TRANSFER, WAIT))
        skipped = "warm-up" if step < _WARM_UP else "evaluation" if step in evaluations else None
        gc_ns = [0] * ranks
        if step in pause_of:
            gc_ns[pause_of[step]] = 90_000_000
        line = {
            "step": step + 1,
            "skipped": skipped,
            "loss": _loss(step) + float(rng.normal(0, 0.03)),
            "tokens": 8192 * ranks,
            "start_ns": start.tolist(),
            "end_ns": clock.tolist(),
            "cells_ns": cells.tolist(),
            "hidden_ns": [30_000_000] * ranks,
            "hidden_transfer_ns": [24_000_000] * ranks,
            "clamped_ns": [12_000] * ranks,
            "unlocated_ns": [-20_000] * ranks,
            "unmatched": [0] * ranks,
            "gc_ns": gc_ns,
            "overhead_ns": [[60_000, 210_000]] * ranks,
            "collectives": [
                [
                    [0, "all_reduce", 8, _BYTES, transfer[rank], wait[rank]],
                    [int(group_of[rank]), "all_gather", 12, _BYTES // 4, 3_000_000, 500_000],
                ]
                for rank in range(ranks)
            ],
        }
        writer.steps([line])
    writer.finish("finished")
    return slow


def _loss(step: int) -> float:
    return float(2.6 + 3.2 * np.exp(-step / 180))


def _facts(ranks: int, names: list[str], members: list[list[int]], flops: float) -> dict[str, Any]:
    node_of = {rank: name for name, each in zip(names, members, strict=True) for rank in each}
    return {
        "command": ["bireme", "train", "--preset", "gpt2", "--layout", f"hsdp {len(names)}x{RANKS_PER_NODE}"],
        "world_size": ranks,
        "ranks": [
            {"rank": rank, "node": node_of[rank], "local_rank": rank % RANKS_PER_NODE, "cores": [0, 1]}
            for rank in range(ranks)
        ],
        "nodes": [{"name": name, "ranks": each} for name, each in zip(names, members, strict=True)],
        "groups": [
            {"name": "replicate", "ranks": list(range(ranks))},
            *({"name": f"shard {name}", "ranks": each} for name, each in zip(names, members, strict=True)),
        ],
        "missing": {},
        "versions": {"bireme": "0.1.0", "python": "3.11", "torch": "2.14.1"},
        "config": None,
        "layout": "ddp",
        "reduction": "overlap",
        "model": {
            "preset": "gpt2",
            "parameters": 124_439_808,
            "flops_per_token": {"full": flops, "causal": 0.94 * flops, "recomputation_full": 0},
        },
        "peak": {"flops_per_s": 45e12 * ranks, "source": "made up"},
        "data": None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--keep", type=Path, help="folder for the made-up run; used again when it is there")
    parser.add_argument("--json", type=Path, help="write the numbers here as well")
    arguments = parser.parse_args()
    directory = arguments.keep or Path(tempfile.mkdtemp()) / "synthetic"
    try:
        if not (directory / "run.json").exists():
            began = time.perf_counter()
            make_run(directory, arguments.ranks, arguments.steps)
            print(f"made up in {time.perf_counter() - began:.1f} s")
        with uncollected():  # as the command does
            numbers = measure(directory)
    finally:
        if not arguments.keep:
            shutil.rmtree(directory.parent, ignore_errors=True)
    for name, value in numbers.items():
        print(f"{name:>24}  {value:,.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(numbers, indent=2) + "\n")


def measure(directory: Path) -> dict[str, float]:
    """Seconds of each part of `bireme report RUN --html`, and the sizes."""
    from bireme.report.html.numbers import run_page
    from bireme.report.html.write import write_page
    from bireme.report.summary import summarise
    from bireme.run_reader import read_run

    times = [time.perf_counter()]
    run = read_run(directory)
    times.append(time.perf_counter())
    summary = summarise(run)
    times.append(time.perf_counter())
    page = run_page(run, summary)
    times.append(time.perf_counter())
    path = directory / "report.html"
    write_page(page, path)
    times.append(time.perf_counter())
    parts = ("reading_s", "summing_and_judging_s", "aggregating_s", "writing_s")
    return {
        "ranks": run.world_size,
        "steps": len(run.steps),
        "record_mb": (directory / "steps.jsonl").stat().st_size / 1e6,
        **{name: times[i + 1] - times[i] for i, name in enumerate(parts)},
        "whole_s": times[-1] - times[0],
        "page_mb": path.stat().st_size / 1e6,
    }


if __name__ == "__main__":
    main()
