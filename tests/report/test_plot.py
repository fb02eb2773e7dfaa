from dataclasses import replace
from pathlib import Path

import pytest

from bireme.errors import UserError
from bireme.report.plot import plot
from bireme.study.rows import Row

BALANCED = Row(
    ranks=2,
    straggler_ms=0.0,
    straggler_rank=None,
    straggler_phase=None,
    reduction="overlap",
    model="a$b_{c$",
    nodes=1,
    step_ms=126.0,
    compute_ms=80.0,
    contention_ms=4.0,
    transfer_ms=20.0,
    wait_ms=15.0,
    communication_share=0.28,
    other_ms=7.0,
    hidden_ms=3.0,
    step_minus_busy_ms=None,
    steps=20,
    run="runs/a",
)
DELAYED = replace(BALANCED, straggler_ms=150.0, straggler_rank=1, straggler_phase="forward", step_minus_busy_ms=190.0)
UNKNOWN = replace(BALANCED, ranks=1, contention_ms=None, transfer_ms=None, wait_ms=None, communication_share=None)


@pytest.mark.parametrize(
    "rows",
    [
        [BALANCED],
        [DELAYED],
        [UNKNOWN, BALANCED, replace(BALANCED, reduction="flat"), DELAYED, replace(DELAYED, straggler_ms=50.0)],
    ],
    ids=["balanced only", "straggler only", "everything"],
)
def test_there_is_a_picture_of_whatever_was_measured(rows: list[Row], tmp_path: Path) -> None:
    path = tmp_path / "new" / "study.png"
    plot(rows, path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
    assert [entry.name for entry in path.parent.iterdir()] == ["study.png"]


def test_a_picture_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "study.png"
    path.write_bytes(b"old")

    def fail(*_: object) -> None:
        raise OSError("full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="full"):
        plot([BALANCED], path)
    assert path.read_bytes() == b"old" and [entry.name for entry in tmp_path.iterdir()] == ["study.png"]


def test_without_rows_the_error_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"torchrun --nproc_per_node=1 multinode\.py"):
        plot([], tmp_path / "study.png")
