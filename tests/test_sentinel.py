"""Sentinels and their hub, beside ranks without PyTorch: every way to fail is told apart; nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bireme.sentinel import Sentinel

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="no pidfd")

_WITHIN_S = 60.0
FAKE = Path(__file__).with_name("fake_rank.py")
#: kind -> what is waited for in what is said
SAID = {
    "fine": "",
    "kill": "was killed by signal 9",
    "exit": "ended with exit code 3",
    "raise": "its error:",
    "late": "it began with",
    "stop": "is stopped",
    "hang": "where rank 1 is",
    "spin": "has been computing",
    "slow": "training goes on after",
    "leave": "left its loop",
    "mismatch": "issued all_reduce #3 (8 bytes)",
    "checkpoint": "has been writing a checkpoint",
    "lost": "does not answer any more",
    "interrupt": "",
    "abort": "all ranks end",
}
ENDS = ("fine", "raise", "kill", "exit", "slow", "checkpoint", "abort")  # by themselves


@dataclass
class Job:
    kind: str
    directory: Path
    ranks: list[subprocess.Popen[bytes]]

    def said(self) -> str:
        return "".join((self.directory / f"err-{rank}").read_text() for rank in range(len(self.ranks)))

    def out(self, rank: int) -> str:
        return (self.directory / f"out-{rank}").read_text()

    def wait_said(self) -> str:
        """What the ranks' standard errors have, once it is what is expected of this kind."""
        deadline = time.monotonic() + _WITHIN_S
        while SAID[self.kind] not in self.said() and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.said()

    def wait(self, rank: int) -> int:
        return self.ranks[rank].wait(_WITHIN_S)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Job]]:
    """All at once: most of their time they wait."""
    jobs = {}
    for kind in SAID:
        directory = tmp_path_factory.mktemp(kind)
        ranks = []
        for rank in range(2):
            with (directory / f"out-{rank}").open("w") as out, (directory / f"err-{rank}").open("w") as error:
                command = [sys.executable, str(FAKE), str(rank), "2", str(directory), kind]
                ranks.append(subprocess.Popen(command, stdout=out, stderr=error))
        jobs[kind] = Job(kind, directory, ranks)
    yield jobs
    for job in jobs.values():
        for process in job.ranks:
            process.kill()
            process.wait()
    deadline = time.monotonic() + 30
    pids = {rank.pid for job in jobs.values() for rank in job.ranks}
    while (left := sentinels_of(pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, "sentinels outlive their ranks"


def sentinels_of(ranks: set[int]) -> list[int]:
    """The sentinels that were started by these ranks and still run; an orphan has another parent, but our session."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            command = (each / "cmdline").read_bytes()
            fields = (each / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if b"bireme.sentinel" in command and fields[0] != "Z" and int(fields[3]) == os.getsid(0):
            found.append(int(each.name))
    return found


def lines_of(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith(("bireme:", "  "))]


def test_a_clean_end_is_silent(jobs: dict[str, Job]) -> None:
    assert [jobs["fine"].wait(rank) for rank in range(2)] == [0, 0]
    assert jobs["fine"].said() == ""


@pytest.mark.parametrize("kind", ["kill", "exit"])
def test_a_rank_that_is_gone_is_named_with_its_last_position(jobs: dict[str, Job], kind: str) -> None:
    said = jobs[kind].wait_said()
    assert f"bireme: rank 1 on node1 (host b, pid {jobs[kind].ranks[1].pid}) {SAID[kind]}" in said
    assert "in step 3, forward" in said
    assert "rank 0 on node0 lost the others in step 3, backward" in said
    jobs[kind].wait(0)
    assert jobs[kind].said().count("bireme: ") == 1


def test_the_first_error_comes_last_and_cannot_drive_the_terminal(jobs: dict[str, Job]) -> None:
    said = jobs["raise"].wait_said()
    assert "failed in step 3, forward: ValueError: no such \\x1b[31mtensor" in said
    jobs["raise"].wait(0), jobs["raise"].wait(1)
    block = said[said.index("bireme: rank 1") :]
    assert "in fail" in block and block.count("bireme: ") == 1


def test_what_other_ranks_say_later_is_not_the_last_word(jobs: dict[str, Job]) -> None:
    """A rank that has failed takes its time to end, and only then do others notice."""
    jobs["late"].wait(0), jobs["late"].wait(1)
    jobs["late"].wait_said()
    lines = (jobs["late"].directory / "err-0").read_text().splitlines()
    assert lines[0].endswith("failed in step 3, forward: ValueError: the first")
    assert "RuntimeError: Connection closed by peer [127.0.0.1]:1" in lines
    assert lines[-1] == lines[0].replace("bireme: ", "bireme: it began with: ")


def test_a_rank_that_hangs_is_named_with_its_stack(jobs: dict[str, Job]) -> None:
    said = jobs["hang"].wait_said()
    assert "bireme: rank 1 on node1 (host b" in said and "has not moved for" in said
    assert "rank 1 has not come to all_reduce #3 (4.0 KB) of group world" in said
    assert "rank 0 on node0 waits in step 3, backward, all_reduce #3 (4.0 KB) of group world" in said
    assert "in never_comes" in said
    (event,) = (json.loads(line) for line in jobs["hang"].out(0).splitlines())
    assert (event["kind"], event["ranks"], event["step"], event["phase"]) == ("hang", [1], 3, "forward")


def test_a_stopped_rank_a_busy_one_and_one_that_left_are_told_apart(jobs: dict[str, Job]) -> None:
    stopped = jobs["stop"].wait_said()
    assert "is stopped (by SIGSTOP" in stopped and "cannot show its Python stack" in stopped
    assert "rank 1 on node1 (host b" in jobs["spin"].wait_said()
    jobs["spin"].ranks[1].kill()
    assert "left its loop after step 2" in jobs["leave"].wait_said()
    assert all("has not moved" not in jobs[kind].said() for kind in ("stop", "spin", "leave"))


def test_different_collectives_are_named_on_both_sides(jobs: dict[str, Job]) -> None:
    said = jobs["mismatch"].wait_said()
    assert "different collectives: #3 of group world" in said
    assert "rank 0 on node0 issued all_reduce #3 (4.0 KB) in step 3, backward" in said
    assert "rank 1 on node1 issued all_reduce #3 (8 bytes) in step 3, backward" in said


def test_what_goes_on_is_said_to(jobs: dict[str, Job]) -> None:
    said = jobs["slow"].wait_said()
    assert jobs["slow"].wait(0) == 0
    assert "has not moved for" in said and said.count("bireme: ") == 2


def test_writing_a_checkpoint_is_no_hang(jobs: dict[str, Job]) -> None:
    """B16: others wait for much longer than the limit, and it is said once, as information."""
    jobs["checkpoint"].wait(0), jobs["checkpoint"].wait(1)
    said = jobs["checkpoint"].said()
    assert said.count("bireme: ") == 1 and "rank 0 on node0 (host a, pid" in said
    assert "has been writing a checkpoint for" in said
    assert jobs["checkpoint"].out(0) == ""


def test_a_lost_machine_of_rank_0_is_said_by_another(jobs: dict[str, Job]) -> None:
    said = jobs["lost"].wait_said()
    assert "rank 0 on node0 (host a, pid" in said
    assert "said by rank 1 on node1" in said


def test_a_job_that_is_told_to_end_is_silent(jobs: dict[str, Job]) -> None:
    assert jobs["interrupt"].wait(1) == -signal.SIGTERM
    jobs["interrupt"].wait(0)
    assert "bireme: " not in jobs["interrupt"].said()


def test_after_too_long_all_ranks_end(jobs: dict[str, Job]) -> None:
    # Rank 0 may see first that rank 1 has ended.
    assert jobs["abort"].wait(1) == 70 and jobs["abort"].wait(0) in (70, 1)
    said = jobs["abort"].said()
    assert "all ranks end" in said and said.count("bireme: ") == 2
    assert "told to end: no movement for" in jobs["abort"].out(1)


@pytest.mark.parametrize("watched", [True, False])
def test_a_process_that_has_caught_the_error_of_its_training_is_not_ended(watched: bool) -> None:
    """A notebook, or a test's process, lives on when its training has failed."""
    signals: list[int] = []

    class Process:
        def signal(self, number: int) -> None:
            signals.append(number)

    sentinel = object.__new__(Sentinel)
    sentinel._process = Process()  # type: ignore[assignment]
    sentinel._gone_s, sentinel._closed_s = None, None if watched else 1.0
    sentinel._end_at_s, sentinel._kill_at_s = float("inf"), 5.0
    sentinel._enforce(10.0)
    assert signals == ([signal.SIGKILL] if watched else [])
