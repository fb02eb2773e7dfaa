import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from bireme import record
from bireme.errors import UserError
from bireme.record import RunWriter, write_json_atomic
from bireme.run_reader import CELLS, Run, read_facts, read_run

FACTS: dict[str, Any] = {
    "world_size": 1,
    "nodes": [{"name": "here", "ranks": [0]}],
    "groups": [{"name": "world", "ranks": [0]}],
    "model": {"preset": "tiny", "parameters": 10, "flops_per_token": {"full": 60, "causal": 50}},
    "peak": {"flops_per_s": 1e9, "source": "measured"},
}


def line(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": step,
        "skipped": None,
        "loss": 1.5,
        "tokens": 8,
        "start_ns": [100 * step],
        "end_ns": [100 * step + 100],
        "cells_ns": [[100] + [0] * (CELLS - 1)],
        "hidden_ns": [0],
        "hidden_transfer_ns": [0],
        "clamped_ns": [0],
        "unlocated_ns": [0],
        "unmatched": [0],
        "gc_ns": [0],
        "overhead_ns": [[1, 2]],
        "collectives": [[[0, "all_reduce", 1, 64, 10, 0]]],
        **changes,
    }


@pytest.fixture
def writer(tmp_path: Path) -> RunWriter:
    return RunWriter(tmp_path / "runs" / "a", FACTS)


# --- writing -----------------------------------------------------------------------------------------------------


def test_a_run_reads_back_as_it_was_written(writer: RunWriter) -> None:
    writer.steps([line(1), line(2)])
    writer.event("injection", kind="sleep", rank=0)  # a field may be named like the writer's own arguments
    running = read_run(writer.directory)
    assert running.facts["status"] == "running" and running.facts["ended_utc"] is None
    assert running.facts["started_utc"].endswith("Z")

    writer.steps([line(3)])
    writer.finish("interrupted", "SIGTERM", final_loss=1.0)
    run = read_run(writer.directory)
    assert run.steps == [line(1), line(2), line(3)]
    assert run.damaged_lines == 0
    assert (run.facts["status"], run.facts["status_reason"], run.facts["final_loss"]) == ("interrupted", "SIGTERM", 1.0)
    assert run.facts["ended_utc"] >= run.facts["started_utc"] == running.facts["started_utc"]
    assert [event["event"] for event in run.events] == ["injection", "status"]
    assert run.events[0]["kind"] == "sleep" and "time_utc" in run.events[0]


def test_lines_are_on_disk_when_the_call_returns(writer: RunWriter) -> None:
    writer.steps([line(1)])
    assert (writer.directory / "steps.jsonl").read_bytes().endswith(b"}\n")


def test_an_existing_run_is_refused_and_left_alone(writer: RunWriter) -> None:
    writer.steps([line(1)])
    before = {path.name: path.read_bytes() for path in writer.directory.iterdir()}
    with pytest.raises(
        UserError, match=r"exists: choose another directory \(--run-dir\), or go on with it \(--resume\)"
    ):
        RunWriter(writer.directory, FACTS)
    assert {path.name: path.read_bytes() for path in writer.directory.iterdir()} == before


def test_an_empty_directory_or_one_with_logs_is_free_and_any_other_is_not(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-1.log").write_text("started first\n")
    RunWriter(tmp_path, FACTS)
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        RunWriter(other, FACTS)
    assert [path.name for path in other.iterdir()] == ["thesis.tex"]
    for taken in (other / "thesis.tex", other / "thesis.tex" / "run"):
        with pytest.raises(UserError, match="not a directory"):
            RunWriter(taken, FACTS)


def test_of_two_writers_at_once_one_gets_the_directory(writer: RunWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "iterdir", lambda _: iter(()))  # the second looked before the first wrote
    with pytest.raises(UserError, match="exists"):
        RunWriter(writer.directory, FACTS)


def test_a_start_that_found_no_room_can_be_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(record, "write_json_atomic", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(OSError, match="No space left"):
            RunWriter(tmp_path, FACTS)
    RunWriter(tmp_path, FACTS).steps([line(1)])
    assert len(read_run(tmp_path).steps) == 1


def test_lines_of_several_threads_do_not_mix(writer: RunWriter) -> None:
    def write(thread: int) -> None:
        for number in range(20):
            writer.steps([line(1000 * thread + number)])
            writer.event("warning", ranks=[thread], message="x" * 3000)

    threads = [threading.Thread(target=write, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run = read_run(writer.directory)
    assert (len(run.steps), len(run.events), run.damaged_lines) == (80, 80, 0)


@pytest.mark.parametrize("cuts", [True, False], ids=["cut back", "cannot be cut back"])
def test_a_full_disk_is_an_oserror_and_the_lines_may_be_tried_again(
    writer: RunWriter, monkeypatch: pytest.MonkeyPatch, cuts: bool
) -> None:
    class FullDisk:
        def __init__(self, file: Any):
            self.file, self.written = file, 0

        def __enter__(self) -> "FullDisk":
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, data: memoryview) -> int:
            if self.written:
                raise OSError(28, "No space left on device")
            self.written = self.file.write(data[:40])
            return self.written

        def fileno(self) -> int:
            return int(self.file.fileno())

        def truncate(self, size: int) -> None:
            if not cuts:
                raise OSError(5, "Input/output error")
            self.file.truncate(size)

    writer.steps([line(1)])
    fdopen = os.fdopen
    with monkeypatch.context() as patch:
        patch.setattr(record.os, "fdopen", lambda *args, **kwargs: FullDisk(fdopen(*args, **kwargs)))
        with pytest.raises(OSError):
            writer.steps([line(2), line(3)])
    writer.steps([line(2), line(3)])
    run = read_run(writer.directory)
    assert [step["step"] for step in run.steps] == [1, 2, 3]
    assert run.damaged_lines == 0


def test_a_removed_directory_is_an_oserror(writer: RunWriter) -> None:
    (writer.directory / "steps.jsonl").unlink()
    with pytest.raises(OSError):
        writer.steps([line(1)])


def test_the_file_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    write_json_atomic(path, {"a": 1})
    monkeypatch.setattr(record.os, "fsync", lambda _: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_json_atomic(path, {"a": 2})
    assert orjson.loads(path.read_bytes()) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]


# --- going on with a run -----------------------------------------------------------------------------------------


def test_a_resumed_run_has_every_step_once(writer: RunWriter) -> None:
    writer.steps([line(step) for step in (1, 2, 3, 4)])
    writer.samples([{"step": step, "ids": [step]} for step in (1, 2, 3, 4)])
    writer.event("evaluation", step=2, loss=1.0)
    with (writer.directory / "steps.jsonl").open("ab") as file:
        file.write(b'{"step": 5, "torn')
    writer.close()

    again = RunWriter(writer.directory, {**FACTS, "first_step": 3, "resumed_from": {"step": 2}}, resume_after=2)
    run = read_run(writer.directory)  # no step yet: the attempt before is shown
    assert [each["step"] for each in run.steps] == [1, 2]
    assert run.facts["status"] == "running" and "evaluation" in [event["event"] for event in run.events]
    two_ranks = {**FACTS, "world_size": 2, "nodes": [{"name": "here", "ranks": [0, 1]}]}
    again.steps([line(3)])
    again.close()

    third = RunWriter(writer.directory, {**two_ranks, "first_step": 4, "resumed_from": {"step": 3}}, resume_after=3)
    arrays = {name: value * 2 for name, value in line(4).items() if isinstance(value, list)}
    third.steps([line(4, **arrays)])
    third.event("evaluation", step=4, loss=0.5)
    run = read_run(writer.directory)
    assert (run.world_size, run.facts["attempt"], run.facts["first_step"]) == (2, 3, 4)
    assert [each["step"] for each in run.steps] == [4]
    assert [each["step"] for each in run.earlier_steps] == [1, 2, 3]
    assert [event["event"] for event in run.events] == ["resumed", "evaluation"]
    assert run.events[0]["step"] == 3 and run.damaged_lines == 0
    for number, size in ((1, 1), (2, 1)):
        assert read_facts(writer.directory, f"run-{number:04d}.json")["world_size"] == size
    samples = [orjson.loads(each) for each in (writer.directory / "samples.jsonl").read_bytes().splitlines()]
    assert samples == [{"step": 1, "ids": [1]}, {"step": 2, "ids": [2]}], "of steps that are made again, none"


def test_two_processes_cannot_write_to_one_run(writer: RunWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    writer.steps([line(1), line(2)])
    monkeypatch.setattr(record, "_LOCK_WAIT_S", 0.2)
    with pytest.raises(UserError, match="is written by another process: end that first"):
        RunWriter(writer.directory, {**FACTS, "first_step": 2}, resume_after=1)
    assert len(read_run(writer.directory).steps) == 2, "nothing was touched"
    assert not (writer.directory / "run-0001.json").exists()
    writer.close()
    RunWriter(writer.directory, {**FACTS, "first_step": 2}, resume_after=1).close()
    assert len(read_run(writer.directory).steps) == 1


def test_a_command_line_that_is_not_utf8_is_written(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "a", {**FACTS, "command": ["train", os.fsdecode(b"caf\xe9")], "data": None})
    assert read_run(writer.directory).facts["command"][1].startswith("caf")


# --- reading -----------------------------------------------------------------------------------------------------


def test_what_is_no_run_says_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    cases = {"nowhere": "not a directory", "file": "not a directory", "empty": "not a run: it holds no run.json"}
    for name, message in cases.items():
        with pytest.raises(UserError, match=message) as error:
            read_run(tmp_path / name)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (b'{"format": "bireme-run", "ver', "is damaged"),
        (b"", "is damaged"),
        (b"[" * 2000, "is damaged"),
        (b"[1, 2]", "not a run of bireme"),
        (b'{"name": "package"}', "not a run of bireme"),
        ({"version": 2}, "install a newer"),
        ({"version": "1"}, "'version'"),
        ({"version": True}, "'version'"),
        ({"world_size": "1"}, "'world_size' is str"),
        ({"world_size": 1.0}, "'world_size'"),
        ({"world_size": True}, "'world_size'"),
        ({"world_size": 10**12}, "'nodes' does not hold every rank"),
        ({"world_size": 0, "nodes": [], "groups": []}, "'nodes'"),
        ({"world_size": 2, "nodes": [{"name": "a", "ranks": [0, 0]}]}, "'nodes' does not hold every rank"),
        ({"nodes": None}, "'nodes' is NoneType"),
        ({"nodes": ["here"]}, "'nodes'"),
        ({"nodes": [{"name": 1, "ranks": [0]}]}, "'nodes'"),
        ({"nodes": [{"name": "a", "ranks": ["0"]}]}, "'nodes'"),
        ({"groups": [{"name": "world", "ranks": [7]}]}, "'groups'"),
        ({"groups": {}}, "'groups' is dict"),
        ({"missing": []}, "'missing'"),
        ({"missing": {"collectives": None}}, "'missing'"),
        ({"status": None}, "'status'"),
        ({"model": "tiny"}, "'model'"),
        ({"model": {"flops_per_token": {"full": "60"}}}, "'model.flops_per_token.full'"),
        ({"peak": {"flops_per_s": [1]}}, "'peak.flops_per_s'"),
        ({"config": 3}, "'config'"),
    ],
)
def test_a_damaged_foreign_or_hostile_run_json_says_what_is_wrong(
    writer: RunWriter, change: bytes | dict[str, Any], message: str
) -> None:
    path = writer.directory / "run.json"
    data = change if isinstance(change, bytes) else orjson.dumps({**orjson.loads(path.read_bytes()), **change})
    path.write_bytes(data)
    with pytest.raises(UserError, match=message) as error:
        read_run(writer.directory)
    assert "\n" not in str(error.value) and "run.json" in str(error.value)


def test_a_run_without_steps_is_legal(writer: RunWriter) -> None:
    assert read_run(writer.directory).steps == []
    (writer.directory / "steps.jsonl").unlink()
    (writer.directory / "events.jsonl").unlink()
    run = read_run(writer.directory)
    assert (run.steps, run.events, run.damaged_lines, run.world_size, run.missing) == ([], [], 0, 1, {})


def test_a_line_that_is_still_being_written_is_skipped_at_every_length(writer: RunWriter) -> None:
    writer.steps([line(1), line(2)])
    path = writer.directory / "steps.jsonl"
    data = path.read_bytes()
    first = data.index(b"\n") + 1
    for end in range(first, len(data) - 1):
        path.write_bytes(data[:end])
        run = read_run(writer.directory)
        assert [step["step"] for step in run.steps] == [1]
        assert run.damaged_lines == 0
    path.write_bytes(data[:-1])
    assert len(read_run(writer.directory).steps) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda step: b"\x00\xff not json",
        lambda step: b'{"step": 2, "start',
        lambda step: b"[]",
        lambda step: b"3",
        lambda step: {**step, "step": "2"},
        lambda step: {**step, "step": True},
        lambda step: {**step, "skipped": 1},
        lambda step: {**step, "loss": "nan"},
        lambda step: {**step, "tokens": 1.5},
        lambda step: {**step, "injected_ms": [150]},
        lambda step: {**step, "start_ns": 100},
        lambda step: {**step, "start_ns": [100, 100]},
        lambda step: {**step, "start_ns": [100.0]},
        lambda step: {**step, "start_ns": [10**30]},
        lambda step: {**step, "end_ns": [0]},
        lambda step: {**step, "end_ns": [None]},
        lambda step: {**step, "cells_ns": [[1] * (CELLS - 1)]},
        lambda step: {**step, "cells_ns": [[None] * CELLS]},
        lambda step: {**step, "cells_ns": [[True] * CELLS]},
        lambda step: {**step, "cells_ns": ["x" * CELLS]},
        lambda step: {**step, "overhead_ns": [1]},
        lambda step: {**step, "hidden_ns": [[0]]},
        lambda step: {**step, "collectives": [None]},
        lambda step: {**step, "collectives": [[[5, "all_reduce", 1, 64, 10, 0]]]},
        lambda step: {**step, "collectives": [[[-1, "all_reduce", 1, 64, 10, 0]]]},
        lambda step: {**step, "collectives": [[[0, None, 1, 64, 10, 0]]]},
        lambda step: {**step, "collectives": [[[0, "all_reduce", 1, 64, 10]]]},
        lambda step: {name: value for name, value in step.items() if name != "unmatched"},
    ],
)
def test_a_bad_line_in_the_middle_is_counted_and_the_rest_is_read(
    writer: RunWriter, damage: Callable[[dict[str, Any]], Any]
) -> None:
    bad = damage(line(2))
    text = bad if isinstance(bad, bytes) else json.dumps(bad).encode()
    path = writer.directory / "steps.jsonl"
    path.write_bytes(b"\n".join([orjson.dumps(line(1)), text, orjson.dumps(line(3)), b""]))
    run = read_run(writer.directory)
    assert [step["step"] for step in run.steps] == [1, 3]
    assert run.damaged_lines == 1


def test_bad_events_are_counted(writer: RunWriter) -> None:
    (writer.directory / "events.jsonl").write_bytes(b'{"event": 1}\nnull\n{"event": "host"}\n{"ev')
    run = read_run(writer.directory)
    assert run.events == [{"event": "host"}]
    assert run.damaged_lines == 2


def test_a_rank_that_is_gone_leaves_null_everywhere(tmp_path: Path) -> None:
    two = {**FACTS, "world_size": 2, "nodes": [{"name": "here", "ranks": [0, 1]}]}
    writer = RunWriter(tmp_path / "two", two)
    whole = line(1)
    gone = {name: [*value, None] if type(value) is list else value for name, value in whole.items()}
    writer.steps([gone, {**gone, "hidden_ns": [0, 0]}])
    run: Run = read_run(writer.directory)
    assert len(run.steps) == 1 and run.damaged_lines == 1


def test_a_run_can_be_read_while_it_grows(writer: RunWriter) -> None:
    done = threading.Event()

    def grow() -> None:
        for number in range(200):
            writer.steps([line(number)])
        writer.finish("finished")
        done.set()

    thread = threading.Thread(target=grow)
    thread.start()
    seen = 0
    while not done.is_set():
        run = read_run(writer.directory)
        assert run.damaged_lines == 0
        assert len(run.steps) >= seen
        seen = len(run.steps)
    thread.join()
    assert len(read_run(writer.directory).steps) == 200
