"""Verdicts as the report gives them."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from rich.console import Console

from bireme.errors import UserError
from bireme.links import LinkTable
from bireme.report.summary import summarise
from bireme.report.terminal import render
from bireme.run_reader import Run, read_run

if TYPE_CHECKING:
    from tests.made_links import make_table
else:
    from made_links import make_table

FIELDS = {
    *("kind", "ranks", "node", "phase", "state", "excess_ms", "share", "first_step", "last_step", "confidence"),
    *("cause", "sentence", "advice", "evidence", "what_if"),
}


def steps(count: int, extra_ms: float, rank: int = 1, ranks: int = 2) -> list[list[dict[str, float] | None]]:
    """Rank `rank` is held up in forward; the others wait for it."""
    rows: list[list[dict[str, float] | None]] = []
    for number in range(count):
        own = 100.0 + number % 3
        cells: list[dict[str, float] | None] = [
            {"forward/running": own, "backward/wait": extra_ms} for _ in range(ranks)
        ]
        cells[rank] = {"forward/running": own, "forward/blocked": extra_ms}
        rows.append(cells)
    return rows


def text_of(summary: dict[str, Any], run: Run) -> str:
    console = Console(file=io.StringIO(), width=80)
    render(summary, run, console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_a_culprit_is_shown_with_evidence_worth_and_advice(make_run: Callable[..., Run]) -> None:
    run = make_run(steps(30, 60.0))
    summary = summarise(run)
    (verdict,) = orjson.loads(orjson.dumps(summary["verdicts"]))
    assert set(verdict) == FIELDS
    assert (verdict["kind"], verdict["ranks"], verdict["node"]) == ("rank", [1], "here")
    assert (verdict["phase"], verdict["state"]) == ("forward", "blocked")
    assert verdict["what_if"]["step_ms"] == pytest.approx(101, abs=1)
    assert verdict["what_if"]["tokens_per_s_global"] == pytest.approx(1000 / 0.101, rel=0.02)
    text = " ".join(text_of(summary, run).split())
    assert "verdict: rank 1 on here takes 60 ms more of its own than its peers in a step (steps 1 to 30)" in text
    assert "worth: 37.3 % of the time; a step would take 101 ms without it" in text
    assert "evidence: own time 161 ms, its peers' 101 ms" in text and "advice: the process sleeps" in text


def test_healthy_is_shown(make_run: Callable[..., Run]) -> None:
    run = make_run(steps(30, 0.0))
    summary = summarise(run)
    assert [verdict["kind"] for verdict in summary["verdicts"]] == ["healthy"]
    assert summary["verdicts"][0]["what_if"] is None and "verdicts_reason" not in summary
    assert "verdict: healthy: no rank, node or link stands out" in " ".join(text_of(summary, run).split())


def test_too_few_steps_say_so(make_run: Callable[..., Run]) -> None:
    run = make_run(steps(5, 60.0))
    summary = summarise(run)
    assert summary["verdicts"] is None
    assert summary["verdicts_reason"].startswith("5 complete measured steps are too few")
    assert "verdict: n/a (5 complete measured steps" in text_of(summary, run)


def test_chosen_steps_are_not_judged(make_run: Callable[..., Run]) -> None:
    summary = summarise(make_run(steps(30, 60.0)), lambda step: step["step"] % 2 == 0)
    assert summary["verdicts"] is None and "chosen steps" in summary["verdicts_reason"]


def test_a_record_with_a_missing_rank_and_torn_lines_is_judged_for_what_is_there(make_run: Callable[..., Run]) -> None:
    rows = steps(40, 60.0, ranks=3)
    for number, row in enumerate(rows):
        if number >= 10:
            row[2] = None
    run = make_run(rows)
    path = run.directory / "steps.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[20] = lines[20][: len(lines[20]) // 2] + b"\n"
    path.write_bytes(b"".join(lines)[:-30])
    run = read_run(run.directory)
    summary = summarise(run)
    (verdict,) = summary["verdicts"]
    assert (verdict["kind"], verdict["ranks"]) == ("rank", [1])
    assert verdict["evidence"]["not_recorded"] == ["left out, with less than half of the steps recorded: rank 2"]
    assert "rank 2 recorded 10 of 38 steps" in " ".join(summary["notes"])
    assert "less than half of the steps recorded: rank 2" in " ".join(text_of(summary, run).split())


def test_names_in_the_record_do_not_drive_the_terminal(make_run: Callable[..., Run]) -> None:
    run = make_run(steps(30, 60.0), nodes=[{"name": "\x1b[31m[bold]evil", "ranks": [0, 1]}])
    text = text_of(summarise(run), run)
    assert "\x1b" not in text and "[bold]evil" in text


def test_measured_links_must_be_of_as_many_ranks(make_run: Callable[..., Run], tmp_path: Path) -> None:
    table = make_table()
    ranks = len(table.ranks)
    run = make_run(steps(30, 0.0, ranks=ranks + 1))
    with pytest.raises(UserError, match=f"measured with {ranks} ranks, and the run has more"):
        summarise(run, links=table)
    assert isinstance(table, LinkTable)
    fits = make_run(steps(30, 0.0, ranks=ranks), name="fits")
    assert [verdict["kind"] for verdict in summarise(fits, links=table)["verdicts"]] == ["healthy"]


@pytest.mark.parametrize(
    "damage",
    [
        {"gc_ns": ["x", 1]},
        {"gc_ns": [[1], 2]},
        {"gc_ns": [1]},
        {"step": 2**63},
        {"end_ns": [2**63, 2**63 + 10]},
        {"end_ns": [2**64 - 1, 5]},
    ],
)
def test_damaged_lines_are_left_out_and_the_rest_is_judged(
    make_run: Callable[..., Run], damage: dict[str, Any]
) -> None:
    def change(lines: list[dict[str, Any]]) -> None:
        lines[7].update(damage)

    run = make_run(steps(30, 60.0), change=change)
    assert run.damaged_lines == 1
    (verdict,) = summarise(run)["verdicts"]
    assert (verdict["kind"], verdict["ranks"]) == ("rank", [1])


def test_damaged_events_are_no_evidence(make_run: Callable[..., Run]) -> None:
    events: list[dict[str, Any]] = [
        {"event": "checkpoint", "write_s": value}
        for value in ([True, 1], [-1, 2], [1e308, 1], ["x", 1], [1], None, [None, 1])
    ]
    events += [{"event": "host", "rank": 1, "first_step": 1, "last_step": 30, "steal_ms": 1e308, "throttled_ms": None}]
    cells = {"checkpoint/blocked": 60.0, "forward/running": 100.0}
    rows: list[list[dict[str, float] | None]] = [[cells, cells] for _ in range(30)]
    (verdict,) = summarise(make_run(rows, events=events))["verdicts"]
    assert verdict["ranks"] == [0, 1] and "inf" not in verdict["sentence"]
