"""Run directories as they grow, with known numbers."""

from pathlib import Path
from typing import Any

from bireme.ledger import PHASES, STATES
from bireme.record import RunWriter


def facts(size: int = 2, nodes: int = 1, steps: int = 100, **more: Any) -> dict[str, Any]:
    here = size // nodes
    return {
        "world_size": size,
        "ranks": [{"rank": rank, "host": "elsewhere", "pid": 1} for rank in range(size)],
        "nodes": [{"name": f"node{n}", "ranks": list(range(n * here, (n + 1) * here))} for n in range(nodes)],
        "groups": [{"name": "world", "ranks": list(range(size))}],
        "missing": {},
        "config": {"steps": steps},
        "layout": "ddp",
        "model": {"preset": "toy", "flops_per_token": {"full": 1000, "causal": 900}},
        "peak": {"flops_per_s": 1e8},
        **more,
    }


def line(step: int, size: int = 2, slow: int = 1, wall_ms: int = 100, **more: Any) -> dict[str, Any]:
    """Rank `slow` runs all the time in forward; the others run for half of it, and wait in backward for 40 % and
    transfer for 10 %."""
    wall_ns = wall_ms * 1_000_000
    start_ns = step * 10**9
    rows = []
    for rank in range(size):
        row = [0] * (len(PHASES) * len(STATES))
        if rank == slow:
            row[5] = wall_ns
        else:
            row[5], row[12], row[13] = wall_ns // 2, wall_ns // 10, wall_ns - wall_ns // 2 - wall_ns // 10
        rows.append(row)
    return {
        "step": step,
        "skipped": None,
        "loss": 4.0 - step / 100,
        "tokens": 1000,
        "start_ns": [start_ns] * size,
        "end_ns": [start_ns + wall_ns] * size,
        "cells_ns": rows,
        "hidden_ns": [0] * size,
        "hidden_transfer_ns": [0] * size,
        "clamped_ns": [0] * size,
        "unlocated_ns": [0] * size,
        "unmatched": [0] * size,
        "gc_ns": [0] * size,
        "overhead_ns": [[1, 2]] * size,
        "collectives": [[]] * size,
        **more,
    }


def gone(line: dict[str, Any], rank: int) -> dict[str, Any]:
    """The line without a rank that has ended."""
    return {
        name: [None if index == rank else each for index, each in enumerate(value)] if type(value) is list else value
        for name, value in line.items()
    }


def writer(directory: Path, first: int = 1, last: int = 10, size: int = 2, **more: Any) -> RunWriter:
    """A run that has made these steps and goes on."""
    writer = RunWriter(directory, facts(size, **more))
    writer.steps([line(step, size) for step in range(first, last + 1)])
    return writer


def verdict(change: str = "started", **more: Any) -> dict[str, Any]:
    sentence = "rank 1 takes 50 ms more of its own than its peers"
    about = {"kind": "rank", "ranks": [1], "node": "node0", "phase": "forward", "state": "running"}
    return {"change": change, "step": 20, "sentence": sentence, "message": f"{sentence}. Look at it", **about, **more}
