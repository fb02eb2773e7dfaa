"""Sums of a record are exact, whatever its size."""

from collections.abc import Callable
from typing import Any

import pytest

from bireme.report.summary import summarise
from bireme.report.sums import closure_error_ns, integers
from bireme.run_reader import Run

MakeRun = Callable[..., Run]
HUGE_NS = (1 << 61) - 1


def test_numbers_whose_sum_needs_more_than_64_bits() -> None:
    assert integers([[HUGE_NS]] * 8).sum(axis=0).tolist() == [8 * HUGE_NS]
    assert integers([[-HUGE_NS]] * 8).sum(axis=0).tolist() == [-8 * HUGE_NS]
    assert integers([[3], [4]]).dtype.kind == "i"


def test_huge_cells_in_one_step_are_summed_exactly(make_run: MakeRun) -> None:
    def change(lines: list[dict[str, Any]]) -> None:
        lines[4]["cells_ns"][1] = [HUGE_NS, HUGE_NS, *[0] * 28]
        lines[4]["collectives"][1] = [[0, "all_reduce", 8, HUGE_NS, HUGE_NS, 5]]

    run = make_run([[{"forward/running": 100.0}] * 2 for _ in range(9)], change=change)
    wall_ns = 100_000_000
    # The step is off by what was put into it, and so is the stretch from there to its end.
    assert closure_error_ns(run) == 2 * HUGE_NS - wall_ns
    summary = summarise(run)
    assert summary["ledger_ms"]["1"]["input"]["running"] == HUGE_NS / 9 / 1e6
    assert summary["ledger_ms"]["0"]["forward"]["running"] == 100.0
    assert summary["collectives"][0]["bytes"] == (17 * 4_000_000 + HUGE_NS) / 18


def test_ranks_that_come_and_go(make_run: MakeRun) -> None:
    rows: list[Any] = [[{"forward/running": 100.0}, {"forward/running": 50.0}, None] for _ in range(9)]
    rows[3][1] = rows[4][0] = rows[4][1] = None
    summary = summarise(make_run(rows))
    assert summary["closure_error_ns"] == 0
    assert summary["ledger_ms"]["1"]["forward"]["running"] == 50.0
    assert summary["ledger_ms"]["2"]["forward"]["running"] is None
    assert summary["step_ms"]["mean"] == pytest.approx((7 * 75 + 100) / 8)
    assert summary["collectives"][0]["count"] == 8
