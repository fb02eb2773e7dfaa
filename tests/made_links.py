"""A table of links with known numbers, for tests."""

from typing import Any

from bireme.link_pairs import Pair
from bireme.links import OPERATIONS, Group, LinkTable, Measurement, Timing

SIZES = [1024, 4096, 1 << 20, 8 << 20]


def timing(size: int, ranks: int = 2, node: str | None = None, factor: float = 1.0) -> Timing:
    median_s = factor * (1e-4 + size / 50e6)
    return Timing(ranks, size, 5, median_s, median_s * 0.9, median_s * 1.2, node)


def make_table(**facts: Any) -> LinkTable:
    """Two nodes, 2 + 1 ranks; the largest size was not reached on group world."""
    measurements = []
    for size in SIZES:
        for operation in OPERATIONS:
            reached = size < 8 << 20
            reason = None if reached else "not reached in 5 s"
            measurements.append(Measurement("world", operation, size, timing(size, 3) if reached else None, reason))
            own = timing(size, 2, "node0", 0.1)
            measurements.append(Measurement("intra-node", operation, size, own, by_node=(own,)))
            measurements.append(Measurement("inter-node", operation, size, timing(size)))
    return LinkTable(
        facts={
            "bireme": "0.1",
            "torch": "2.14.1",
            "backend": "gloo",
            "device": "cpu",
            "link": "400mbit",
            "measured_utc": "2026-01-01T00:00:00.000Z",
            "seconds": 5.0,
            "max_bytes": 8 << 20,
            "elapsed_s": 4.9,
            **facts,
        },
        nodes=[{"name": "node0", "ranks": [0, 1]}, {"name": "node1", "ranks": [2]}],
        ranks=[{"rank": rank} for rank in range(3)],
        groups=[
            Group("world", ((0, 1, 2),)),
            Group("intra-node", ((0, 1),)),
            Group("inter-node", ((0, 2),)),
        ],
        measurements=measurements,
        pairs=[
            Pair("node0", "node1", 8 << 20, 3, 0.18, None, 390e6),
            Pair("node1", "node0", 0, 0, None, "not reached: no time"),
        ],
    )
