import os
from pathlib import Path

import pytest

from bireme.report.figure import PARTS, ledger_parts_ms, picture


def test_a_picture_replaces_nothing_but_a_file(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    os.mkfifo(path)
    with pytest.raises(OSError, match="it is no regular file"), picture(path, 1, 1):
        pass
    assert path.is_fifo() and [each.name for each in tmp_path.iterdir()] == ["picture.png"]


def test_the_parts_of_a_bar_add_up_to_the_step() -> None:
    states = ("running", "runnable", "transfer", "wait", "blocked")
    phases = ("input", "forward", "backward", "optimizer", "checkpoint", "other")
    ledger: dict[str, dict[str, float | None]] = {
        phase: {state: 10.0 * row + column for column, state in enumerate(states)} for row, phase in enumerate(phases)
    }
    ledger["checkpoint"]["wait"] = None
    compute, contention, transfer, wait, other = parts = ledger_parts_ms(ledger)
    assert len(parts) == len(PARTS)
    assert (compute, contention, transfer) == (60.0, 156.0, 162.0)
    assert wait == 168.0 - 43.0
    assert other == 174.0 + (0.0 + 40.0 + 50.0)  # blocked anywhere, running outside of compute
    assert sum(parts) == pytest.approx(sum(value or 0.0 for cells in ledger.values() for value in cells.values()))
