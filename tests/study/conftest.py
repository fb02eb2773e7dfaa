from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bireme.ledger import PHASES, STATES
from bireme.record import RunWriter
from bireme.study.grid import WARM_UP_STEPS, Cell

GRADIENT_BYTES = 4_000_000
BEFORE_MODEL_BYTES = 200_000_000
HEADERS = 1.06  # bytes on the wire / payload

# Of each layout: bytes that it sends over a link, in DDP's; bytes that its largest rank holds.
LINK_SHARE = {"ddp": 1.0, "fsdp": 2.0, "hsdp": 0.5, "tp": 3.0, "pp": 0.1}
HELD_BYTES = {"ddp": 64_000_000, "fsdp": 16_000_000, "hsdp": 32_000_000, "tp": 20_000_000, "pp": 24_000_000}


def cells_ns(**ms: float) -> list[int]:
    """cells_ns(forward_running=80): nanoseconds in the order of the record."""
    return [round(ms.get(f"{phase}_{state}", 0) * 1e6) for phase in PHASES for state in STATES]


def write_run(cell: Cell, directory: Path, **facts: Any) -> dict[str, Any]:
    """What a trainer would leave of this cell, each step alike: 60 ms forward, 40 ms transfer (DDP; other layouts by
    what they send), the planted delay in forward of the slow rank, and the others' wait for it; what the nodes'
    interfaces counted, and the ranks' memory. Returns the conditions, as `run_cell` does."""
    alone = cell.ranks == 1
    transfer_ms = 0.0 if alone else 40 * LINK_SHARE.get(cell.layout, 1.0)
    sent_bytes = (
        0.0 if cell.nodes == 1 else LINK_SHARE.get(cell.layout, 1.0) * GRADIENT_BYTES * 2 * (1 - 1 / cell.ranks)
    )
    nodes = [
        {"name": f"node{n}", "ranks": list(range(n * cell.ranks_per_node, (n + 1) * cell.ranks_per_node))}
        for n in range(cell.nodes)
    ]
    writer = RunWriter(
        directory,
        {
            "world_size": cell.ranks,
            "nodes": nodes,
            "groups": [{"name": "world", "ranks": list(range(cell.ranks))}],
            "reduction": cell.reduction,
            "model": {"preset": cell.preset},
            "layout": cell.layout,
            "traffic": {"nodes": {node["name"]: sent_bytes for node in nodes}, "dimensions": {}},
            "memory": {"before_model_bytes": [BEFORE_MODEL_BYTES + rank for rank in range(cell.ranks)]},
            **facts,
        },
    )
    if cell.straggler_delays_ms:
        writer.event("injection", kind="sleep", rank=cell.straggler_rank, phase=cell.straggler_phase)
    start_ns = [0] * cell.ranks
    lines = []
    for number in range(1, WARM_UP_STEPS + cell.steps + 1):
        delays = cell.straggler_delays_ms or (0.0,)
        delay = delays[(number - 1) % len(delays)]
        ledgers = []
        for rank in range(cell.ranks):
            slow = rank == cell.straggler_rank
            blame = {"forward_blocked": delay} if slow else {"backward_wait": delay}
            ledgers.append(cells_ns(forward_running=60, backward_transfer=transfer_ms, **blame))
        end_ns = [start + sum(ledger) for start, ledger in zip(start_ns, ledgers, strict=True)]
        use = [0, "all_reduce", 8, GRADIENT_BYTES, round(transfer_ms * 1e6), 0]
        lines.append(
            {
                "step": number,
                "skipped": "warm-up" if number <= WARM_UP_STEPS else None,
                "loss": None,
                "tokens": 1000 * cell.ranks,
                "start_ns": start_ns,
                "end_ns": end_ns,
                "cells_ns": ledgers,
                "hidden_ns": [0] * cell.ranks,
                "hidden_transfer_ns": [0] * cell.ranks,
                "clamped_ns": [0] * cell.ranks,
                "unlocated_ns": [0] * cell.ranks,
                "unmatched": [0] * cell.ranks,
                "overhead_ns": [[0, 0]] * cell.ranks,
                "collectives": [[use]] * cell.ranks,
                **({"injected_ms": delay} if cell.straggler_delays_ms else {}),
            }
        )
        start_ns = end_ns
    writer.steps(lines)
    for node in nodes:
        for first, last in ((1, WARM_UP_STEPS), (WARM_UP_STEPS + 1, WARM_UP_STEPS + cell.steps)):
            extra = 9_000_000 if first == 1 else 0  # agreeing on who is there
            counted = round(sent_bytes * HEADERS) * (last - first + 1) + extra
            window = {"first_step": first, "last_step": last, "sent_bytes": counted, "received_bytes": counted - 1}
            writer.event("traffic", node=node["name"], interface="eth0", **window)
    for rank in range(cell.ranks):
        peak = BEFORE_MODEL_BYTES + rank + HELD_BYTES.get(cell.layout, 0) - 1000 * rank
        writer.event("memory", rank=rank, peak_rss_bytes=peak, peak_device_bytes=None)
    writer.finish("finished")
    return {"link": cell.link, "shaped": cell.link != "unshaped", "cores": [[0]] * cell.nodes, "seconds": 1.0}


@pytest.fixture(name="write_run")
def _write_run() -> Callable[..., dict[str, Any]]:
    return write_run
