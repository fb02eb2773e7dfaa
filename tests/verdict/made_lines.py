"""Lines of steps.jsonl with given cells, as the reader gives them."""

from typing import Any

from bireme.ledger import PHASES, STATES

Cells = dict[str, float]  # {"forward/running": 100.0}, milliseconds


def facts(size: int, **more: Any) -> dict[str, Any]:
    ranks = list(range(size))
    return {
        "world_size": size,
        "nodes": [{"name": "here", "ranks": ranks}],
        "groups": [{"name": "world", "ranks": ranks}],
        "missing": {},
        **more,
    }


def line(step: int, cells: list[Cells | None], gc_ms: float = 0.0, **more: Any) -> dict[str, Any]:
    rows = []
    for each in cells:
        row = [0] * (len(PHASES) * len(STATES))
        for name, value_ms in (each or {}).items():
            phase, state = name.split("/")
            row[PHASES.index(phase) * len(STATES) + STATES.index(state)] = round(value_ms * 1e6)
        rows.append(row if each is not None else None)
    here = [row is not None for row in rows]
    start = 10**15 + step * 10**10  # a machine that has run for days
    return {
        "step": step,
        "skipped": None,
        "tokens": 1000,
        "start_ns": [start if each else None for each in here],
        "end_ns": [start + sum(row) if row is not None else None for row in rows],
        "cells_ns": rows,
        "gc_ns": [round(gc_ms * 1e6) if each else None for each in here],
        "collectives": [[] if each else None for each in here],
        **more,
    }
