"""A rank of a job without PyTorch: python fake_rank.py RANK SIZE DIRECTORY KIND. Rank 1 (or 0) does what the kind says
in step 3; collectives are files that all have to write."""

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from bireme.observe.watch import HangWatch

PHASES = ("input", "forward", "backward", "optimizer", "checkpoint", "other")
OPERATIONS = ("all_reduce", "broadcast")
STEPS = 5
AT = 3
rank, size, directory, kind = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
stall_after_s = 2.0
culprit = 0 if kind in ("lost", "checkpoint") else 1


class FileChannel:
    def __init__(self) -> None:
        self.rank, self.size, self._calls = rank, size, 0

    def all_gather(self, message: Any) -> list[Any]:
        self._calls += 1
        paths = [directory / f"gather-{self._calls}-{each}" for each in range(size)]
        partial = paths[rank].with_suffix(".part")
        partial.write_text(json.dumps(message))
        partial.rename(paths[rank])
        while not all(path.exists() for path in paths):
            time.sleep(0.005)
        return [json.loads(path.read_text()) for path in paths]


def all_reduce(number: int, watch: HangWatch, num_bytes: int = 4000) -> None:
    watch.position.issued(0, number, 0, num_bytes)
    watch.position.waits(0, 0, -1)
    (directory / f"reduce-{number}-{rank}").write_text(str(num_bytes))
    paths = [directory / f"reduce-{number}-{each}" for each in range(size)]
    while True:
        lost = any(dead(pid) for pid in pids)  # asked first: who came and died then did come
        if all(path.exists() and path.read_text() == str(num_bytes) for path in paths):
            break
        if lost:
            raise RuntimeError("Connection closed by peer [127.0.0.1]:1")
        time.sleep(0.02)
    watch.position.no_wait()
    watch.position.finished(0, number)


def dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def fail(watch: HangWatch) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "exit":
        os._exit(3)
    elif kind == "raise":
        raise ValueError("no such \x1b[31mtensor")
    elif kind == "late":
        error = ValueError("the first")
        watch.ended("raised", error)
        until_said("its error:")
        raise error
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind in ("hang", "abort"):
        never_comes()
    elif kind == "spin":
        until = time.monotonic() + 30
        while time.monotonic() < until and not said("has been computing"):
            sum(range(100_000))
    elif kind == "slow":
        until_said("has not moved for")
    elif kind == "lost":
        for _ in range(50):  # until the others have heard of it
            time.sleep(0.1)
            watch.position.alive()
        watch._process.kill()
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "interrupt":
        os.kill(os.getpid(), signal.SIGTERM)


def said(text: str) -> bool:
    return text in (directory / "err-0").read_text()


def until_said(text: str) -> None:
    """However long a busy machine takes to notice."""
    until = time.monotonic() + 60
    while not said(text) and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(0.2)


def never_comes() -> None:
    time.sleep(60)


def main(watch: HangWatch) -> None:
    position = watch.position
    for step in range(1, STEPS + 1):
        if kind == "leave" and rank == culprit and step == AT:
            break
        position.enter(PHASES.index("forward"))
        time.sleep(0.02)
        if rank == culprit and step == AT:
            fail(watch)
        position.enter(PHASES.index("backward"))
        all_reduce(step, watch, 8 if kind == "mismatch" and rank == culprit and step == AT else 4000)
        if kind == "checkpoint" and rank == culprit and step == AT:
            position.enter(PHASES.index("checkpoint"))
            until_said("has been writing a checkpoint")
        position.enter(PHASES.index("other"))
        position.begin_step(step + 1)


logging.basicConfig(format="%(message)s")
channel = FileChannel()
identity = {"rank": rank, "node": f"node{rank}", "host": "a" if rank == 0 else "b", "pid": os.getpid()}
people = channel.all_gather(identity)
pids = [each["pid"] for each in people]
begun = HangWatch.start(
    channel,
    people,
    [{"name": "world", "ranks": list(range(size))}],
    PHASES,
    OPERATIONS,
    1,
    stall_after_s,
    2.5 if kind == "abort" else 0.0,
    on_event=lambda event: print(json.dumps(event), flush=True),
    on_abort=lambda reason: print(f"told to end: {reason}", flush=True),
)
assert begun is not None
main(begun)
begun.ended("left")
if kind != "leave":
    channel.all_gather(None)  # no process ends while another still looks after it
else:
    until_said("left its loop")
begun.close()
