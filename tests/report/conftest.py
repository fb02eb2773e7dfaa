"""Small run directories with known numbers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bireme.ledger import PHASES, STATES
from bireme.record import RunWriter
from bireme.run_reader import Run, read_run

Cells = dict[str, float]  # {"forward/running": 100.0}, milliseconds

SHAPE = {"flops_per_token": {"full": 1000, "causal": 900, "recomputation": 0}}


def cells_ns(cells: Cells) -> list[int]:
    row = [0] * (len(PHASES) * len(STATES))
    for name, value_ms in cells.items():
        phase, state = name.split("/")
        row[PHASES.index(phase) * len(STATES) + STATES.index(state)] = round(value_ms * 1e6)
    return row


def make_facts(world_size: int, **more: Any) -> dict[str, Any]:
    ranks = list(range(world_size))
    return {
        "world_size": world_size,
        "ranks": [{"rank": rank, "node": "here", "cores": [0, 1]} for rank in ranks],
        "nodes": [{"name": "here", "ranks": ranks}],
        "groups": [{"name": "world", "ranks": ranks}],
        "missing": {},
        "config": {"lr": 0.001, "seed": 1},
        "layout": "ddp",
        "reduction": "overlap",
        "model": {"preset": "tiny", "parameters": 123456, **SHAPE},
        "peak": {"flops_per_s": 1e8, "per_rank_flops_per_s": 5e7, "source": "measured"},
        "data": None,
        **more,
    }


def make_steps(steps: list[list[Cells | None]], skipped: int = 0) -> list[dict[str, Any]]:
    """A line for each step from its ranks' cells; each rank has a clock of its own."""
    lines = []
    clock_ns = [1_000_000_000_000 * (rank + 1) + 7 for rank in range(len(steps[0]))]
    for number, ranks in enumerate(steps, 1):
        rows = [None if cells is None else cells_ns(cells) for cells in ranks]
        here = [rank for rank, row in enumerate(rows) if row is not None]
        end_ns = [clock + sum(row or []) for clock, row in zip(clock_ns, rows, strict=True)]

        def each(value: Any, here: list[int] = here, size: int = len(rows)) -> list[Any]:
            return [value if rank in here else None for rank in range(size)]

        lines.append(
            {
                "step": number,
                "skipped": "warm-up" if number <= skipped else None,
                "loss": 5.0 - number / 10,
                "tokens": 1000,
                "start_ns": [clock_ns[rank] if rank in here else None for rank in range(len(rows))],
                "end_ns": [end_ns[rank] if rank in here else None for rank in range(len(rows))],
                "cells_ns": rows,
                "hidden_ns": each(4_000_000),
                "hidden_transfer_ns": each(3_000_000),
                "clamped_ns": each(10_000),
                "unlocated_ns": each(-20_000),
                "unmatched": each(0),
                "gc_ns": each(0),
                "overhead_ns": each([50_000, 150_000]),
                "collectives": each([[0, "all_reduce", 8, 4_000_000, 20_000_000, 10_000_000]]),
            }
        )
        clock_ns = end_ns
    return lines


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run]:
    """make_run(steps, skipped=0, name="run", events=(), status="finished", change=None, **facts): written, read."""

    def make(
        steps: list[list[Cells | None]],
        skipped: int = 0,
        name: str = "run",
        events: list[dict[str, Any]] | None = None,
        status: str = "finished",
        change: Callable[[list[dict[str, Any]]], None] | None = None,
        **facts: Any,
    ) -> Run:
        writer = RunWriter(tmp_path / name, make_facts(len(steps[0]) if steps else 2, **facts))
        lines = make_steps(steps, skipped) if steps else []
        if change is not None:
            change(lines)
        writer.steps(lines)
        for event in events or []:
            writer.event(event["event"], **{key: value for key, value in event.items() if key != "event"})
        if status != "running":
            writer.finish(status)
        return read_run(tmp_path / name)

    return make


FAST: Cells = {"forward/running": 30, "backward/running": 60, "backward/transfer": 5, "backward/wait": 55}
SLOW: Cells = {
    "forward/running": 30,
    "forward/blocked": 50,
    "backward/running": 60,
    "backward/runnable": 3,
    "backward/transfer": 5,
    "backward/wait": 1,
    "optimizer/running": 0.5,
    "other/running": 0.5,
}


@pytest.fixture
def balanced_steps() -> list[list[Cells | None]]:
    """Six steps of two ranks, 150 ms each but for the second (170 ms); rank 1 is slow."""
    usual: list[list[Cells | None]] = [[dict(FAST), dict(SLOW)] for _ in range(5)]
    slower = SLOW | {"input/blocked": 20.0}
    return [usual[0], [FAST | {"backward/wait": 75.0}, slower], *usual[1:]]
