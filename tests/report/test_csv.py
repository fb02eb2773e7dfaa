import csv
import io
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import orjson
import pytest

from bireme.errors import UserError
from bireme.ledger import PHASES, STATES
from bireme.record import RunWriter
from bireme.report.csv_export import COLUMNS, csv_command, write_rows
from bireme.run_reader import Run

MakeRun = Callable[..., Run]
Steps = list[list[dict[str, float] | None]]

CELLS = [f"{phase}_{state}_ms" for phase in PHASES for state in STATES]


def rows_of(run: Run) -> list[dict[str, str]]:
    out = io.StringIO(newline="")
    write_rows(run.facts, run.steps, out)
    return list(csv.DictReader(io.StringIO(out.getvalue(), newline=""), strict=True))


def test_a_row_per_step_and_rank_adds_up_exactly(make_run: MakeRun, balanced_steps: Steps) -> None:
    def uneven(lines: list[dict[str, Any]]) -> None:
        lines[2]["cells_ns"][1] = [1] * 29 + [10**15 + 7]
        lines[2]["end_ns"][1] = lines[2]["start_ns"][1] + sum(lines[2]["cells_ns"][1])
        for line in lines[3:]:
            moved = lines[2]["end_ns"][1] - line["start_ns"][1]
            line["start_ns"][1] += moved
            line["end_ns"][1] += moved

    run = make_run(balanced_steps, skipped=1, change=uneven)
    rows = rows_of(run)
    assert len(rows) == 12 and tuple(rows[0]) == COLUMNS and len(COLUMNS) == 43
    for row, (step, rank) in zip(rows, ((step, rank) for step in run.steps for rank in (0, 1)), strict=True):
        assert (row["step"], row["rank"], row["node"]) == (str(step["step"]), str(rank), "here")
        wall_ns = step["end_ns"][rank] - step["start_ns"][rank]
        assert sum(Decimal(row[name]) for name in CELLS) == Decimal(row["wall_ms"]) == Decimal(wall_ns) / 10**6
    assert rows[5]["other_blocked_ms"] == "1000000000.000007" and rows[5]["input_running_ms"] == "0.000001"
    assert [rows[0]["skipped"], rows[2]["skipped"]] == ["warm-up", ""]
    last = rows[-1]
    assert (last["loss_global"], last["tokens_global"], last["hidden_ms"]) == ("4.4", "1000", "4.000000")
    assert (last["overhead_training_thread_ms"], last["overhead_background_ms"]) == ("0.050000", "0.150000")


def test_what_was_not_observed_is_empty(make_run: MakeRun, balanced_steps: Steps) -> None:
    balanced_steps[1][0] = None  # rank 0 had ended
    run = make_run(balanced_steps[:2], missing={"collectives": "no hooks"})
    run.steps[0]["gc_ns"] = None  # older than the field
    run.steps[0]["loss"], run.steps[0]["loss_reason"] = None, "inf"
    rows = rows_of(run)
    assert rows[0]["backward_wait_ms"] == rows[0]["hidden_transfer_ms"] == rows[0]["gc_ms"] == ""
    assert rows[0]["backward_running_ms"] == "60.000000" and rows[0]["forward_runnable_ms"] == "0.000000"
    assert rows[0]["loss_global"] == "inf" and rows[0]["local_rank"] == ""
    gone = rows[2]
    assert (gone["step"], gone["rank"], gone["tokens_global"]) == ("2", "0", "1000")
    assert gone["wall_ms"] == "" and {gone[name] for name in COLUMNS[8:]} == {""}
    no_delay = rows_of(make_run(balanced_steps[:1], name="other", missing={"run_delay": "no schedstat"}))
    assert no_delay[0]["input_runnable_ms"] == "" and no_delay[0]["input_wait_ms"] == "0.000000"


def test_names_are_quoted_and_start_no_formula(make_run: MakeRun, balanced_steps: Steps) -> None:
    names = ('=HYPERLINK("http://x","y")', 'a,"b"\r\nc')
    ranks = [{"rank": rank, "node": name, "local_rank": 0} for rank, name in enumerate(names)]
    run = make_run(
        balanced_steps[:1], nodes=[{"name": name, "ranks": [rank]} for rank, name in enumerate(names)], ranks=ranks
    )
    run.steps[0]["skipped"] = "@why"
    rows = rows_of(run)
    assert [row["node"] for row in rows] == ["'" + names[0], names[1]]
    assert rows[0]["skipped"] == "'@why" and rows[0]["local_rank"] == "0"


def test_the_command_writes_a_whole_file_or_none(
    make_run: MakeRun, balanced_steps: Steps, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(balanced_steps)
    with (run.directory / "steps.jsonl").open("ab") as file:
        file.write(b'{"damaged\n{"step": 7, "torn')
    out = tmp_path / "ledger.csv"
    csv_command(run.directory, out)
    assert "1 damaged line of" in capsys.readouterr().err
    assert out.read_bytes().count(b"\r\n") == 13
    csv_command(run.directory, None)
    assert capsys.readouterr().out.replace("\r\n", "\n") == out.read_text(encoding="utf-8")
    with pytest.raises(UserError, match=r"cannot write .*No such file"):
        csv_command(run.directory, tmp_path / "nowhere" / "ledger.csv")
    (run.directory / "steps.jsonl").write_bytes(b"")
    with pytest.raises(UserError, match="has no step yet"):
        csv_command(run.directory, out)
    assert out.read_bytes().count(b"\r\n") == 13, "as it was"
    (run.directory / "steps.jsonl").unlink()
    with pytest.raises(UserError, match=r"no steps\.jsonl"):
        csv_command(run.directory, None)


def test_of_a_resumed_run_the_newest_attempt_with_a_step(make_run: MakeRun, balanced_steps: Steps) -> None:
    run = make_run(balanced_steps)
    facts = {name: value for name, value in run.facts.items() if name not in ("status", "attempt", "first_step")}
    directory, out = run.directory.parent / "resumed", run.directory.parent / "ledger.csv"
    before = RunWriter(directory, facts)
    before.steps(run.steps)
    before.close()
    elsewhere = {**facts, "first_step": 5, "nodes": [{"name": "elsewhere", "ranks": [0, 1]}]}
    writer = RunWriter(directory, elsewhere, resume_after=4)

    def nodes() -> list[tuple[str, str]]:
        csv_command(directory, out)
        return sorted({(row["step"], row["node"]) for row in csv.DictReader(out.open(newline=""))})

    assert nodes() == [(str(step), "here") for step in (1, 2, 3, 4)]
    writer.steps([{**run.steps[4], "step": 5}])
    writer.close()
    assert nodes() == [("5", "elsewhere")]


def test_lines_are_not_kept(make_run: MakeRun, balanced_steps: Steps) -> None:
    run = make_run(balanced_steps)
    step = orjson.dumps(run.steps[0])

    class Nowhere(io.StringIO):
        def write(self, text: str) -> int:
            return len(text)

    def peak_bytes(steps: int) -> int:
        tracemalloc.start()
        write_rows(run.facts, (orjson.loads(step) for _ in range(steps)), Nowhere())
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    peak_bytes(10)
    assert peak_bytes(400) < 1.5 * peak_bytes(20)


def test_a_closed_pipe_ends_quietly(make_run: MakeRun, balanced_steps: Steps) -> None:
    run = make_run([balanced_steps[0]] * 500)  # more than a pipe holds
    program = (
        "import sys; from pathlib import Path; from bireme import cli\n"
        "from bireme.report.csv_export import csv_command\n"
        "app = cli.cyclopts.App(result_action='return_value')\n"
        "app.command(lambda run: csv_command(Path(run), None), name='csv')\n"
        "sys.exit(cli.run(app, sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "csv", str(run.directory)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline().startswith(b"step,skipped,rank")
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=30) == 141
