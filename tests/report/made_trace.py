"""Traced runs with known numbers: real ledgers of made observations, each rank by a clock of its own."""

from pathlib import Path
from typing import Any

from bireme import ledger
from bireme.ledger import PHASES, Segment, Span
from bireme.record import RunWriter

MS = 1_000_000
S = 1_000_000_000
FORWARD, BACKWARD, OPTIMIZER, OTHER = (PHASES.index(name) for name in ("forward", "backward", "optimizer", "other"))

STEP_NS = 100 * MS
BOUND_NS = 20_000


def observed(step: int, rank: int, ahead_ns: int) -> tuple[int, int, list[Segment], list[Span], list[list[int]]]:
    """A step of 100 ms. Rank 1 is 20 ms later at the all-reduce in backward: rank 0 waits for it. `ahead_ns`: of the
    rank's clock. Returns start, end, segments, spans, pauses."""
    start_ns = 50 * S + step * STEP_NS + ahead_ns
    at = [start_ns + each * MS for each in (0, 10, 30, 90, 97, 100)]
    segments = [
        Segment(OTHER, at[0], at[1], 9 * MS, 300_001),
        Segment(FORWARD, at[1], at[2], 15 * MS, 2 * MS),
        Segment(BACKWARD, at[2], at[3], 19 * MS + 7, 0),
        Segment(OPTIMIZER, at[3], at[4], 8 * MS, 0),  # its clock runs ahead: cut
        Segment(OTHER, at[4], at[5], 1 * MS, 0),
    ]
    issue_ns = start_ns + (40 + 20 * min(rank, 2)) * MS
    finish_ns = start_ns + 80 * MS + 11 * rank
    spans = [
        Span(0, 2 * step, "all_reduce", 4_000_000, issue_ns, finish_ns, step=step),
        # A second one in flight at the same time, that lasts into the next step.
        Span(0, 2 * step + 1, "all_gather", 1_000, start_ns + 70 * MS, start_ns + 105 * MS, step=step),
        Span(0, -1, "send", 8, start_ns + 91 * MS, None, side=1 - rank, step=step, seen=False),
    ]
    spans[0].waits = [(issue_ns, finish_ns)]
    spans[0].duration_ns, spans[0].transfer_ns = finish_ns - issue_ns, 20 * MS
    spans[1].duration_ns, spans[1].transfer_ns = 35 * MS, 30 * MS
    return start_ns, start_ns + STEP_NS, segments, spans, [[start_ns + 12 * MS, start_ns + 14 * MS, 2]]


def span_row(span: Span) -> list[Any]:
    return [
        *(span.group, span.sequence, span.operation, span.bytes),
        *(span.issue_ns, span.finish_ns, span.duration_ns, span.transfer_ns),
        *(span.waits, span.origin, span.side, span.step),
    ]


def made_trace(
    directory: Path,
    traced: range = range(20, 23),
    ahead_ns: tuple[int, ...] = (0, 3 * S),
    clocks: bool = True,
    absent: tuple[tuple[int, int], ...] = (),
    node: str = "node",
) -> RunWriter:
    """A run whose steps 19 to 23 are recorded and of which some are traced. `absent`: (rank, step) without a line."""
    size = len(ahead_ns)
    ranks = list(range(size))
    facts = {
        "world_size": size,
        "ranks": [],
        "nodes": [{"name": f"{node}{rank}", "ranks": [rank]} for rank in ranks],
        "groups": [{"name": "world", "ranks": ranks}],
        "missing": {},
    }
    writer = RunWriter(directory, facts)
    carried: list[list[Span]] = [[] for _ in ranks]

    def compared(step: int) -> None:
        rows = [[r, 50 * S + (step + 1) * STEP_NS + ahead_ns[r], ahead_ns[r] + 5 * r, BOUND_NS] for r in ranks[1:]]
        if clocks and rows:
            writer.trace([{"step": step, "clocks": rows}])

    if traced:
        compared(traced[0] - 2)
    for step in range(19, 24):
        line: dict[str, Any] = {"step": step, "skipped": None, "loss": 1.0, "tokens": 10}
        own = [observed(step, rank, ahead_ns[rank]) for rank in ranks]
        accounts = []
        for rank, (start_ns, end_ns, segments, spans, pauses) in enumerate(own):
            spans = carried[rank] + spans
            accounts.append(ledger.account(start_ns, end_ns, segments, spans, step))
            carried[rank] = [span for span in spans if span.transfer_ns is not None and (span.finish_ns or 0) > end_ns]
            if step in traced and (rank, step) not in absent:
                writer.trace(
                    [
                        {
                            "step": step,
                            "rank": rank,
                            "start_ns": start_ns,
                            "end_ns": end_ns,
                            "segments": [
                                [each.phase, each.start_ns, each.end_ns, each.cpu_ns, each.run_delay_ns]
                                for each in segments
                            ],
                            "spans": [span_row(span) for span in spans],
                            "pauses": pauses,
                        }
                    ]
                )
        line["start_ns"] = [each.start_ns for each in accounts]
        line["end_ns"] = [each.end_ns for each in accounts]
        line["cells_ns"] = [[cell for row in each.cells for cell in row] for each in accounts]
        for name in ("hidden_ns", "hidden_transfer_ns", "clamped_ns", "unlocated_ns", "unmatched"):
            line[name] = [getattr(each, name) for each in accounts]
        line["gc_ns"] = [0] * size
        line["overhead_ns"] = [[0, 0]] * size
        line["collectives"] = [[]] * size
        writer.steps([line])
    if traced:
        compared(traced[-1])
    return writer
