"""Files that are none, numbers that nobody wrote and streams that are closed: one line each, and no waiting."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from bireme.cli import app
from bireme.cli import run as run_cli
from bireme.run_reader import Run, read_run

if TYPE_CHECKING:
    from tests.report.made_trace import made_trace
else:
    from made_trace import made_trace

MakeRun = Callable[..., Run]
STEPS = [[{"forward/running": 100.0}, {"forward/running": 90.0, "backward/wait": 10.0}] for _ in range(4)]


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    """What waits for ever for the other end of a pipe fails instead."""

    def give_up(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def line_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command that is refused says, on its one line."""
    assert run_cli(app, arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("bireme: ") and said.count("\n") == 1
    return said.removeprefix("bireme: ").rstrip("\n")


COMMANDS = {
    "report": ["report"],
    "page": ["report", "--html"],
    "csv": ["export", "csv"],
    "trace": ["export", "trace"],
}


@pytest.mark.parametrize(
    ("command", "name"),
    [
        *((command, "run.json") for command in COMMANDS),
        *((command, "steps.jsonl") for command in ("report", "page", "csv")),
        *((command, "events.jsonl") for command in ("report", "page")),
        ("trace", "trace.jsonl"),
    ],
)
def test_a_pipe_in_a_files_place(tmp_path: Path, command: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    made_trace(tmp_path / "run").close()
    path = tmp_path / "run" / name
    path.unlink()
    os.mkfifo(path)
    assert line_of([*COMMANDS[command], str(tmp_path / "run")], capsys) == f"{path} is no regular file"
    assert not list((tmp_path / "run").glob("*report*")) and not (tmp_path / "run" / "trace.json").exists()


@pytest.mark.parametrize("name", ["run.json", "steps.jsonl", "events.jsonl"])
def test_watching_a_pipe(
    make_run: MakeRun, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    path = make_run(STEPS).directory / name
    path.unlink()
    os.mkfifo(path)
    assert run_cli(app, ["watch", str(path.parent), "--once"]) == 0
    assert f"{path.name} is no regular file" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("command", ["page", "csv", "trace"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "here"])
def test_nothing_but_a_file_is_replaced(
    tmp_path: Path, command: str, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made_trace(tmp_path / "run").close()
    monkeypatch.chdir(tmp_path)
    out = Path("." if kind == "here" else "out")
    if kind == "pipe":
        os.mkfifo(out)
    elif kind == "folder":
        out.mkdir()
    before = out.stat()
    said = line_of([*COMMANDS[command], str(tmp_path / "run"), "--out", str(out)], capsys)
    assert said.removesuffix(": choose another --out FILE") == f"cannot write {out}: it is no regular file"
    assert (out.stat().st_ino, out.stat().st_mode) == (before.st_ino, before.st_mode)
    assert {each.name for each in tmp_path.iterdir()} <= {"run", "out"}


@pytest.mark.parametrize(("command", "name"), [("page", "report.html"), ("trace", "trace.json")])
def test_a_link_in_a_run_leads_nowhere(
    tmp_path: Path, command: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made_trace(tmp_path / "run").close()
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / "run" / name).symlink_to(mine)
    said = line_of([*COMMANDS[command], str(tmp_path / "run")], capsys)
    assert said == f"{tmp_path / 'run' / name} is a symbolic link: name the file to write with --out FILE"
    assert mine.read_text() == "mine"
    assert run_cli(app, [*COMMANDS[command], str(tmp_path / "run"), "--out", str(tmp_path / "run" / name)]) == 0
    assert mine.read_text() != "mine" and (tmp_path / "run" / name).is_symlink()


def change(path: Path, **facts: Any) -> None:
    path.write_bytes(orjson.dumps({**orjson.loads(path.read_bytes()), **facts}))


@pytest.mark.parametrize("command", ["report", "csv"])
@pytest.mark.parametrize("attempt", [3, 1 << 62])
def test_an_attempt_without_its_file(
    make_run: MakeRun, command: str, attempt: int, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = make_run(STEPS).directory
    change(directory / "run.json", attempt=attempt, first_step=100)
    said = line_of([*COMMANDS[command], str(directory)], capsys)
    assert f"run-{attempt - 1:04d}.json" in said


def test_an_attempt_that_calls_itself_a_later_one_is_read_once(make_run: MakeRun) -> None:
    directory = make_run(STEPS).directory
    change(directory / "run.json", attempt=2, first_step=100)
    (directory / "run-0001.json").write_bytes((directory / "run.json").read_bytes())
    run = read_run(directory)
    assert run.steps == [] and len(run.earlier_steps) == 4


@pytest.mark.parametrize("arguments", [["export", "csv"], ["report", "--json"]])
def test_a_closed_standard_output(make_run: MakeRun, arguments: list[str]) -> None:
    run = make_run(STEPS)
    command = [sys.executable, "-m", "bireme", *arguments, str(run.directory)]
    closed = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command], stderr=subprocess.PIPE, text=True, timeout=60)
    assert closed.returncode == 2 and closed.stderr.startswith("bireme: standard output is closed: ")
    assert closed.stderr.count("\n") == 1
