import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bireme.ledger import PHASES, STATES
from bireme.run_reader import Run
from bireme.study.rows import (
    Row,
    balanced_rows,
    fit_line,
    load_rows,
    nothing_to_show,
    rows_from_run,
    save_rows,
    straggler_pair,
    sweep_rows,
    table,
)


def cells(**ms: float) -> list[int]:
    """cells(forward_running=80): nanoseconds in the order of the record."""
    return [round(ms.get(f"{phase}_{state}", 0) * 1e6) for phase in PHASES for state in STATES]


def a_run(delays: list[float], rank: int | None = 1, slope: float = 1.0, **facts: Any) -> Run:
    """Two ranks; in each step rank 1 sleeps its delay and rank 0 waits; the sleeper's core saves `1 - slope` of it."""
    steps: list[dict[str, Any]] = []
    for number, delay in enumerate(delays, 1):
        grown = slope * delay
        rows = [
            cells(forward_running=60, backward_transfer=10, backward_wait=20 + grown, input_running=10),
            cells(forward_running=60, forward_runnable=30 + grown - delay, forward_blocked=delay, backward_transfer=10),
        ]
        steps.append(
            {
                "step": number,
                "skipped": "warm-up" if number == 1 else None,
                "loss": None,
                "tokens": 10,
                "start_ns": [0, 0],
                "end_ns": [sum(row) for row in rows],
                "cells_ns": rows,
                "hidden_ns": [3_000_000] * 2,
                "hidden_transfer_ns": [0, 0],
                "clamped_ns": [0, 0],
                "unlocated_ns": [0, 0],
                "unmatched": [0, 0],
                "overhead_ns": [[0, 0]] * 2,
                "collectives": [[], []],
                **({} if rank is None else {"injected_ms": delay}),
            }
        )
    events = [{"event": "injection", "kind": "sleep", "rank": rank, "phase": "forward", "delays_ms": delays}]
    world: dict[str, Any] = {
        "status": "finished",
        "world_size": 2,
        "nodes": [{"name": "here", "ranks": [0, 1]}],
        "groups": [],
        "reduction": "overlap",
        "model": {"preset": "tiny"},
    }
    return Run(Path("runs/x"), world | facts, steps, [] if rank is None else events, 0)


def balanced() -> Row:
    (row,) = rows_from_run(a_run([0, 0, 0], rank=None))
    return row


def test_a_balanced_run_gives_one_row() -> None:
    row = balanced()
    assert (row.ranks, row.nodes, row.reduction, row.model, row.steps, row.run) == (
        2,
        1,
        "overlap",
        "tiny",
        2,
        "runs/x",
    )
    assert (row.straggler_ms, row.straggler_rank, row.straggler_phase, row.step_minus_busy_ms) == (0, None, None, None)
    assert (row.step_ms, row.compute_ms, row.contention_ms) == pytest.approx((100, 60, 15))
    assert (row.transfer_ms, row.wait_ms, row.hidden_ms) == pytest.approx((10, 10, 3))
    assert row.communication_share == pytest.approx((0.3 + 0.1) / 2)
    assert row.other_ms == pytest.approx(100 - 60 - 15 - 10 - 10)


def test_a_sweep_gives_a_row_for_each_delay_and_its_slope() -> None:
    rows = rows_from_run(a_run([0, 20, 40, 0, 20, 40, 0], slope=0.6))
    assert [(row.straggler_ms, row.straggler_rank, row.steps) for row in rows] == [(0, 1, 2), (20, 1, 2), (40, 1, 2)]
    delays = [row.straggler_ms for row in rows]
    slope, intercept, r_squared = fit_line(delays, [row.step_ms for row in rows])
    assert (slope, intercept, r_squared) == pytest.approx((0.6, 100, 1))
    idle = [row.step_minus_busy_ms or 0.0 for row in rows]
    assert fit_line(delays, idle)[:2] == pytest.approx((1, 10))  # whoever uses the sleeper's core


def test_a_delay_of_zero_alone_is_a_balanced_run() -> None:
    (row,) = rows_from_run(a_run([0, 0, 0]))
    assert row.straggler_rank is None and row.key == balanced().key


def test_what_was_not_observed_stays_unknown() -> None:
    run = a_run(
        [0, 0], rank=None, missing={"collectives": "no hooks", "run_delay": "macOS"}, model=None, reduction=None
    )
    (row,) = rows_from_run(run)
    assert row.transfer_ms is row.wait_ms is row.contention_ms is row.communication_share is row.hidden_ms is None
    assert row.other_ms == pytest.approx(40)
    assert (row.model, row.reduction) == ("unknown", "unknown")


@pytest.mark.parametrize("event", [{}, {"rank": "1"}, {"rank": 7}, {"rank": [1]}, {"rank": 1, "phase": 3}])
def test_hostile_events_are_survived(event: dict[str, Any]) -> None:
    run = a_run([0, 50])
    run.events[:] = [{"event": "injection", **event}]
    (row,) = rows_from_run(run)
    assert row.straggler_ms == 50 and row.straggler_phase is None


# --- rows as files -----------------------------------------------------------------------------------------------


def test_rows_read_back_and_a_rerun_replaces_its_row(tmp_path: Path) -> None:
    rows = rows_from_run(a_run([0, 20, 40, 0, 20, 40, 0]))
    save_rows([*rows, balanced()], tmp_path / "multinode")
    loaded, notes = load_rows(tmp_path / "multinode")
    assert notes == [] and len(loaded) == 4 and set(loaded) == {*rows, balanced()}

    again = replace(rows[1], step_ms=1.0, run="runs/y")
    save_rows([again], tmp_path / "multinode")
    loaded, _ = load_rows(tmp_path / "multinode")
    assert set(loaded) == {rows[0], again, rows[2], balanced()}


def test_no_name_leaves_the_folder_or_hides_another_row(tmp_path: Path) -> None:
    names = ["../../x", "..-..-x", "a/b", "a-b", "", "\udcff", "x" * 300]
    rows = [replace(balanced(), model=name) for name in names]
    save_rows(rows, tmp_path / "rows")
    assert len(list((tmp_path / "rows").glob("*.json"))) == len(names)
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"format": "other"}',
        '{"format": "bireme-row", "version": 9}',
        '{"format": "bireme-row", "version": 1, "ranks": "2"}',
        '{"format": "bireme-row", "version": 1, "ranks": true}',
    ],
)
def test_foreign_and_torn_files_are_skipped_with_a_note(tmp_path: Path, text: str) -> None:
    save_rows([balanced()], tmp_path)
    (tmp_path / "other.json").write_text(text)
    (tmp_path / "notes.txt").write_text("not looked at")
    rows, notes = load_rows(tmp_path)
    assert rows == [balanced()]
    assert len(notes) == 1 and "other.json" in notes[0] and "\n" not in notes[0]


def test_without_a_folder_there_are_no_rows_and_the_error_names_the_commands(tmp_path: Path) -> None:
    assert load_rows(tmp_path / "nowhere") == ([], [])
    text = str(nothing_to_show(tmp_path))
    for ranks in (1, 2, 4):
        assert f"torchrun --nproc_per_node={ranks} multinode.py" in text
    assert "STRAGGLER_MS=0,50,100,150,200 torchrun --nproc_per_node=2 multinode.py" in text


# --- the table and the line --------------------------------------------------------------------------------------


def test_the_table_fits_80_columns() -> None:
    rows = [balanced(), *rows_from_run(a_run([0, 150, 150])), replace(balanced(), ranks=4, transfer_ms=None)]
    output = io.StringIO()
    Console(file=output, width=80).print(table(rows))
    lines = [" ".join(line.split()) for line in output.getvalue().splitlines()]
    assert "…" not in output.getvalue()
    assert "2 none overlap 60.0 15.0 10.0 + 10.0 20 % 100.0" in lines
    assert "2 150 ms, rank 1 overlap 60.0 15.0 10.0 + 85.0 38 % 250.0" in lines
    assert any(line.startswith("4 none overlap 60.0 15.0 n/a") for line in lines)


def test_a_line_through_points() -> None:
    assert fit_line([0, 1, 2], [1, 3, 5]) == pytest.approx((2, 1, 1))
    slope, intercept, r_squared = fit_line([0, 1, 2, 3], [0, 1, 0, 1])
    assert (slope, intercept, r_squared) == pytest.approx((0.2, 0.2, 0.2))
    assert fit_line([0, 1], [4, 4]) == (0, 4, 1)
    for x in ([], [1], [2, 2]):
        with pytest.raises(ValueError, match="two distinct"):
            fit_line(x, [1.0] * len(x))


def test_which_rows_are_compared() -> None:
    sweep = rows_from_run(a_run([0, 20, 40, 0, 20, 40, 0]))
    plain = replace(balanced(), run="runs/plain")
    single = replace(sweep[2], ranks=4, straggler_ms=150.0, run="runs/single")
    assert sweep_rows([plain, single, *reversed(sweep)]) == sweep
    assert sweep_rows([plain, single]) == []
    assert balanced_rows([*sweep, plain]) == [plain]
    assert balanced_rows(sweep) == [sweep[0]]
    assert straggler_pair([*sweep, plain, single]) == (sweep[0], sweep[2])  # nothing balanced with four ranks
    assert straggler_pair([sweep[2], plain]) == (plain, sweep[2])
    four = replace(plain, ranks=4)
    assert straggler_pair([*sweep, plain, single, four]) == (four, single)
    assert straggler_pair([single]) == (None, single)
    assert straggler_pair([plain]) == (None, None)
