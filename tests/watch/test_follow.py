import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from bireme.errors import UserError
from bireme.record import RunWriter
from bireme.watch import liveness
from bireme.watch.follow import WAITING, WINDOW_STEPS, Follower
from bireme.watch.liveness import writer_lives
from bireme.watch.standing import Standing

if TYPE_CHECKING:
    from tests.watch.made_watched import facts, gone, line, verdict, writer
else:
    from made_watched import facts, gone, line, verdict, writer


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def numbers(follower: Follower) -> list[int]:
    return [step.step for step in follower.seen.steps]


def test_a_run_is_followed_from_an_empty_directory_to_its_end(run: Path) -> None:
    run.mkdir()
    follower = Follower(run)
    assert follower.look().steps == [] and follower.seen.problem == WAITING
    writing = writer(run, last=3)
    assert [step.step for step in follower.look().steps] == [1, 2, 3] and follower.seen.problem == ""
    assert follower.look().steps == []
    writing.steps([gone(line(4, skipped="warm-up", loss=None, loss_reason="nan", tokens=None), rank=0)])
    (step,) = follower.look().steps
    assert (step.skipped, step.loss, step.loss_reason, step.tokens) == ("warm-up", None, "nan", 0)
    assert step.walls_ns == [None, 100_000_000] and step.states_ns == [None, [100_000_000, 0, 0, 0, 0]]
    assert follower.seen.modified_s == (run / "steps.jsonl").stat().st_mtime
    writing.finish("failed", "out of memory")
    writing.close()
    assert [str(notice)[10:] for notice in follower.look().notices] == ["failed: out of memory"]
    assert follower.seen.facts is not None and follower.seen.facts["status"] == "failed"


def test_only_the_last_steps_are_kept_and_read(run: Path) -> None:
    writer(run, last=300).close()
    follower = Follower(run)
    assert len(follower.look().steps) == WINDOW_STEPS
    assert numbers(follower) == list(range(251, 301)) and follower.seen.damaged_lines == 0


def test_what_is_no_directory_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for name, message in (("nowhere", "does not exist"), ("file", "is not a directory")):
        with pytest.raises(UserError, match=message):
            Follower(tmp_path / name)


def test_a_resumed_run_is_shown_from_where_it_goes_on(run: Path) -> None:
    before = writer(run, last=20)
    before.event("verdict", **verdict())
    before.close()
    follower = Follower(run)
    follower.look()
    assert numbers(follower)[-1] == 20 and len(follower.seen.standing.verdicts) == 1
    again = RunWriter(run, facts(4, first_step=16, resumed_from={"step": 15}), resume_after=15)
    follower.look()
    assert numbers(follower) == [] and follower.seen.standing.verdicts == []
    assert follower.seen.facts is not None and follower.seen.facts["world_size"] == 4
    again.steps([line(16, size=4)])
    follower.look()
    again.close()
    assert numbers(follower) == [16] and follower.seen.damaged_lines == 0
    assert [str(notice)[10:] for notice in follower.seen.notices.newest(9)][-1] == "resumed after step 15 (attempt 2)"


def test_a_directory_that_is_being_copied_is_followed(run: Path, tmp_path: Path) -> None:
    """File by file and in pieces, steps before run.json, and later whole files in the place of old ones."""
    writing = writer(run, last=30)
    writing.event("warning", ranks=[0], message="careful")
    copy = tmp_path / "copy"
    copy.mkdir()
    steps, run_json = (run / "steps.jsonl").read_bytes(), (run / "run.json").read_bytes()
    follower = Follower(copy)
    (copy / "steps.jsonl").write_bytes(steps[: len(steps) // 2])
    follower.look()
    (copy / "run.json").write_bytes(run_json[:100])
    follower.look()
    assert follower.seen.facts is None and "is damaged" in follower.seen.problem
    (copy / "run.json").write_bytes(run_json)
    follower.look()
    assert 10 < numbers(follower)[-1] < 20 and follower.seen.problem == ""
    last = 30
    for _ in range(3):
        last += 1
        writing.steps([line(last)])
        for name in ("steps.jsonl", "events.jsonl"):
            shutil.copy2(run / name, copy / f".{name}.part")
            (copy / f".{name}.part").replace(copy / name)
        news = follower.look()
        assert numbers(follower) == list(range(1, last + 1)), "each once"
        assert len(news.notices) == (1 if last == 31 else 0), "an event is news once"
    writing.close()


def test_damage_is_counted_and_survived(run: Path) -> None:
    writing = writer(run, last=2)
    with (run / "steps.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "torn\n' + orjson.dumps(line(4, size=3)) + b"\n[]\n")
    (run / "events.jsonl").write_bytes(b'null\n{"event": 3}\n{"event": "evaluation"}\n')
    writing.steps([line(5)])
    follower = Follower(run)
    follower.look()
    assert numbers(follower) == [1, 2, 5] and follower.seen.damaged_lines == 5
    assert follower.seen.notices.newest(5)[0].text == "evaluation after step None: loss None"
    shutil.rmtree(run)
    follower.look()
    assert follower.seen.facts is None and "the directory is gone" in follower.seen.problem
    writer(run, last=1).close()
    follower.look()
    assert numbers(follower) == [1]
    (run / "steps.jsonl").unlink()
    (run / "steps.jsonl").mkdir()
    follower.look()
    assert follower.seen.problem == f"{run / 'steps.jsonl'} is no regular file"


def test_a_warning_of_four_ranks_is_shown_once_with_its_ranks(run: Path) -> None:
    """Field report B65."""
    writing = writer(run, last=1, size=4)
    follower = Follower(run)
    follower.look()
    writing.event("warning", ranks=[0, 2], message="the same\x1b[31m  warning")
    assert len(follower.look().notices) == 1
    writing.event("warning", ranks=[1], message="the same\x1b[31m  warning")
    writing.event("warning", ranks=[3, 2], message="the same\x1b[31m  warning")
    assert [str(each)[10:] for each in follower.look().notices] == [
        "warning (ranks 0-2): the same\\x1b[31m warning",
        "warning (ranks 0-3): the same\\x1b[31m warning",
    ], "new ranks are news"
    writing.event("warning", ranks=[3], message="the same\x1b[31m  warning")
    writing.close()
    assert follower.look().notices == []
    (notice,) = follower.seen.notices.newest(10)
    assert notice.ranks == (0, 1, 2, 3)


def test_events_are_told_in_words_and_the_frequent_ones_are_not(run: Path) -> None:
    writing = writer(run, last=1)
    for event, fields in (
        ("gc_pause", {"ms": 5}),
        ("traffic", {}),
        ("checkpoint", {"step": 5, "seconds": 1.25, "bytes": 4_300_000}),
        ("checkpoint_failed", {"step": 6, "reason": "disk full"}),
        ("evaluation", {"step": 7, "loss": 2.5}),
        ("preempted", {"step": 8, "signal": "SIGUSR1", "saved": False}),
        ("hang", {"message": "rank 1 on node1\nhas not moved"}),
        ("injection", {"text": "kind=sleep,rank=1"}),
        ("memory", {"rank": 0}),
        ("verdict", verdict()),
    ):
        writing.event(event, **fields)
    writing.close()
    follower = Follower(run)
    follower.look()
    assert [notice.text for notice in follower.seen.notices.newest(99)] == [
        "checkpoint of step 5, 4.3 MB, written in 1.2 s",
        "checkpoint of step 6 failed: disk full",
        "evaluation after step 7: loss 2.5000",
        "stopped after step 8 by SIGUSR1; there is no checkpoint of it",
        "hang: rank 1 on node1 has not moved",
        "injected: kind=sleep,rank=1",
        "verdict after step 20: rank 1 takes 50 ms more of its own than its peers. Look at it",
    ]
    assert follower.seen.damaged_lines == 0


def test_verdicts_stand_until_they_end() -> None:
    standing = Standing()

    def tell(change: str, **more: Any) -> list[tuple[str, list[int]]]:
        standing.add({"event": "verdict", **verdict(change, **more)})
        return [(each["kind"], each["ranks"]) for each in standing.verdicts]

    assert tell("started", kind="one_off") == []
    assert tell("started") == [("rank", [1])]
    assert tell("started", phase="input") == [("rank", [1])] * 2, "two things are wrong with it"
    assert tell("started", kind="link", ranks=[]) == [("rank", [1]), ("rank", [1]), ("link", [])]
    assert tell("changed", kind="node", ranks=[0, 1]) == [("rank", [1]), ("link", []), ("node", [0, 1])]
    assert standing.verdicts[0]["phase"] == "input"
    assert tell("ended", kind="link", ranks=[]) == [("rank", [1]), ("node", [0, 1])]
    assert tell("ended", phase="input") == [("node", [0, 1])]
    assert tell("ended", kind="drift", ranks=[9]) == [("node", [0, 1])], "nobody's"
    standing.add({"event": "resumed"})
    assert standing.verdicts == []


# --- whether the writer lives ---


@pytest.fixture
def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(liveness, "_LOCKS", tmp_path / "no locks")
    yield


def about(pid: int, host: str | None = None) -> dict[str, Any]:
    now = {"started_utc": "2999-01-01T00:00:00Z"}
    return {"ranks": [{"rank": 0, "host": host or socket.gethostname(), "pid": pid}], **now}


def test_a_writer_that_holds_its_lock_lives_and_is_not_disturbed(run: Path, ended_pid: int) -> None:
    writing = writer(run, last=1)
    if not liveness._is_locked(run / "events.jsonl"):
        pytest.skip("this file system does not show its locks in /proc/locks")
    assert writer_lives(run, about(ended_pid)) is True, "the lock says more than the number"
    writing.close()
    assert writer_lives(run, about(ended_pid)) is False


def test_without_a_lock_the_process_says_it_on_its_own_machine(
    run: Path, ended_pid: int, without_locks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert writer_lives(run, about(os.getpid())) is True
    assert writer_lives(run, about(ended_pid)) is False
    reused = {**about(os.getpid()), "started_utc": "2001-01-01T00:00:00Z"}
    assert writer_lives(run, reused) is False, "this process is younger than the run"
    assert writer_lives(run, {**reused, "started_utc": None}) is True
    for unknown in (about(ended_pid, host="elsewhere"), {}, {"ranks": [3]}, about(-1), about(1 << 40)):
        assert writer_lives(run, unknown) is None


def test_looking_never_takes_the_lock(run: Path) -> None:
    """A writer that begins while somebody looks on gets its run."""
    run.mkdir()
    (run / "events.jsonl").touch()
    follower = Follower(run)
    for _ in range(20):
        follower.look()
        writing = RunWriter(run, facts())
        follower.look()
        writing.close()
        for name in ("run.json", "steps.jsonl", "events.jsonl"):
            (run / name).unlink()
