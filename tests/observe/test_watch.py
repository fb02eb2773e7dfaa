"""The hang watch on real ranks: what a monitored loop says when one of them is gone, stopped, or never comes."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bireme.errors import SharedError, UserError
from bireme.observe.collectives import hooks_missing
from bireme.observe.watch import described
from bireme.run_reader import read_run

LOOP = """
import os, signal, sys, time
import torch, torch.distributed as dist
from bireme import Monitor
kind, run, culprit = sys.argv[1], sys.argv[2], 1
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, tensor = dist.get_rank(), torch.ones(1000)
with Monitor(run, stall_after_s=2.0, abort_after_s=4.0) as monitor:
    for step in range(1, 6):
        due = rank == culprit and step == 3
        if due and kind == "leave":
            break
        with monitor.step():
            with monitor.phase("forward"):
                if due and kind == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if due and kind == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                if due and kind == "raise":
                    raise ValueError("no such shape")
                if due and kind == "hang":
                    time.sleep(100)
            with monitor.phase("backward"):
                dist.all_reduce(torch.ones(10) if due and kind == "mismatch" else tensor)
"""

needs_hooks = pytest.mark.skipif(hooks_missing() is not None, reason=str(hooks_missing()))


@pytest.fixture
def job(tmp_path: Path) -> Iterator["Job"]:
    job = Job(tmp_path)
    yield job
    for process in job.processes:
        process.kill()
        process.wait()


class Job:
    """Two ranks without a launcher: nobody ends the second one when the first has failed."""

    def __init__(self, directory: Path):
        self.run = directory / "run"
        self.processes: list[subprocess.Popen[bytes]] = []
        self._directory = directory

    def start(self, kind: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        for rank in range(2):
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank)}
            environment = {**os.environ, **where, "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
            with (self._directory / f"error-{rank}").open("w") as error:
                command = [sys.executable, "-c", LOOP, kind, str(self.run)]
                self.processes.append(subprocess.Popen(command, env=environment, stderr=error))

    def codes(self) -> list[int]:
        return [process.wait(120) for process in self.processes]

    def said(self) -> str:
        return (self._directory / "error-0").read_text()

    def wait_said(self, text: str) -> str:
        deadline = time.monotonic() + 30
        while text not in self.said() and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.said()


@needs_hooks
def test_a_killed_rank_is_named_with_step_and_phase(job: Job) -> None:
    """B12."""
    job.start("kill")
    assert job.codes() == [1, -signal.SIGKILL]
    said = job.wait_said("was killed")
    pid = job.processes[1].pid
    assert f"rank 1 on {socket.gethostname()} (pid {pid}) was killed by signal 9 (SIGKILL) in step 3, forward" in said
    assert "lost the others in step 3, backward" in said


@pytest.mark.slow
@needs_hooks
@pytest.mark.parametrize(
    ("kind", "code", "text"),
    [
        ("stop", -signal.SIGKILL, "is stopped (by SIGSTOP"),
        ("hang", 70, "has not come to all_reduce #2 (4.0 KB) of group default_pg"),
        ("leave", None, "left its loop after step 2"),  # told to end, or ended by itself once the others have
    ],
)
def test_a_rank_that_others_wait_for_is_named_and_all_end(job: Job, kind: str, code: int | None, text: str) -> None:
    job.start(kind)
    waiting, culprit = job.codes()
    assert waiting == 70 and culprit in ([0, 70] if code is None else [code])
    said = job.said()
    assert text in said and "all ranks end" in said
    event = next(event for event in read_run(job.run).events if event["event"] == "hang")
    assert event["ranks"] == [1] and event["step"] == 3


@pytest.mark.slow
@needs_hooks
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("raise", "failed in step 3, forward: ValueError: no such shape"),
        ("mismatch", "rank 1 on {host} issued all_reduce #2 (40 bytes) in step 3, backward"),
    ],
)
def test_the_first_real_error_is_said_last(job: Job, kind: str, text: str) -> None:
    job.start(kind)
    assert all(code != 0 for code in job.codes())
    said = job.wait_said("bireme: ")
    assert said.count("bireme: ") - said.count("bireme: it began with: ") == 1
    assert text.format(host=socket.gethostname()) in job.said()


def test_whose_error_it_is() -> None:
    first = described(ValueError("two\nlines"))
    assert first["error"] == "ValueError: two lines" and not first["secondary"] and not first["shown"]
    assert described(RuntimeError("[pair.cc] Connection closed by peer [127.0.0.1]:1"))["secondary"]
    wrapped = UserError("training stopped")
    wrapped.__cause__ = RuntimeError("Timed out waiting 20000ms for recv operation to complete")
    assert described(wrapped)["secondary"] and described(wrapped)["shown"]
    assert described(SharedError("steps must be at least 1"))["together"]
    assert not described(OSError("timed out"))["secondary"]
