"""A process that has imported torch and forks the ranks of many short runs: starting Python with torch takes seconds.

    python benchmarks/resident.py SOCKET

Whoever connects to SOCKET sends one JSON message for each rank to start (`rank`, `environment`, `arguments`, `output`,
and `planted`, the file that gets the moment at which a planted failure happens), is told of each rank's end, and may
ask what is `left`. What a connection has started is ended with it. Single-threaded, so that it can be forked.
"""

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PRELOAD = ("torch._dynamo", "torch.distributed.device_mesh", "bireme.train")
_TURN_S = 0.05


@dataclass
class _Job:
    """What one connection has started."""

    connection: socket.socket
    running: dict[int, int] = field(default_factory=dict)  # process -> rank
    sessions: set[int] = field(default_factory=set)

    def left(self) -> list[str]:
        """Processes of this job that are not dead, in words; each rank has a session of its own."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError, ValueError):
                name, _, rest = path.read_text().rpartition(")")
                letter, _, _, session = rest.split()[:4]
                if int(session) in self.sessions and letter not in ("Z", "X"):
                    found.append(f"{name}) {letter}")
        return found

    def end(self) -> None:
        for entry in self.left():
            with suppress(OSError):
                os.kill(int(entry.split()[0]), signal.SIGKILL)
        for process in self.running:
            os.waitpid(process, 0)


def serve(listening: socket.socket) -> dict[str, Any] | None:
    """Returns in the process of a rank with what it is to do, and in the resident at the end, with nothing."""
    parent = os.getppid()
    jobs: dict[int, _Job] = {}
    door = listening.fileno()
    while os.getppid() == parent:
        readable, _, _ = select.select([door, *jobs], [], [], _TURN_S)
        for each in readable:
            if each == door:
                connection, _ = listening.accept()
                jobs[connection.fileno()] = _Job(connection)
                continue
            job = jobs[each]
            message = job.connection.recv(1 << 16)
            if not message:
                job.end()
                job.connection.close()
                del jobs[each]
                continue
            request = json.loads(message)
            if "left" in request:
                _send(job, {"left": job.left()})
            elif (process := os.fork()) == 0:
                listening.close()
                for other in jobs.values():
                    other.connection.close()
                os.setsid()
                return dict(request)
            else:
                job.running[process] = request["rank"]
                job.sessions.add(process)
        for job in jobs.values():
            _reap(job)
    for job in jobs.values():
        job.end()
    return None


def _reap(job: _Job) -> None:
    for process, rank in list(job.running.items()):
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            del job.running[process]
            _send(job, {"rank": rank, "code": os.waitstatus_to_exitcode(status)})


def _send(job: _Job, message: dict[str, Any]) -> None:
    with suppress(OSError):
        job.connection.send(json.dumps(message).encode())


# --- in a rank ---------------------------------------------------------------------------------------------------


def _become(request: dict[str, Any]) -> None:
    """This process is a rank from here on."""
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    for descriptor, ending in ((1, "out"), (2, "err")):
        with Path(f"{request['output']}.{ending}").open("ab") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ.update(request["environment"])
    sys.argv = ["bireme", *request["arguments"]]
    _note_the_moment(Path(request["planted"]))


def _note_the_moment(planted: Path) -> None:
    """The moment of a planted failure, on the clock that all processes of a machine share, just before it happens."""
    from bireme.inject import injector

    original, leaves = injector.failure, injector.Injector.leaves

    def failure(*arguments: Any) -> Callable[[], None]:
        act = original(*arguments)

        def noted() -> None:
            planted.write_text(str(time.monotonic_ns()))
            act()

        return noted

    def noted_leaves(self: Any, step: int) -> bool:
        answer: bool = leaves(self, step)
        if answer:
            planted.write_text(str(time.monotonic_ns()))
        return answer

    injector.failure = failure  # type: ignore[assignment]
    injector.Injector.leaves = noted_leaves  # type: ignore[method-assign]


def main() -> int:
    for name in _PRELOAD:
        __import__(name)
    path = Path(sys.argv[1])
    if (threads := len(list(Path("/proc/self/task").iterdir()))) > 1:
        print(f"resident: {threads} threads: forking it may hang", file=sys.stderr)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(f"{path}.new")
    listening.listen(16)
    Path(f"{path}.new").rename(path)  # whoever sees it can connect
    request = serve(listening)
    if request is None:
        return 0
    _become(request)
    from bireme.cli import main as bireme

    return bireme()


if __name__ == "__main__":
    sys.exit(main())
