"""`bireme nodes`: one command on every node of an emulated cluster at once, its output behind the node's name."""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Self, TextIO

from bireme.errors import UserError
from bireme.nodes import UNSHAPED, EmulatedCluster, NodeProcess, parse_ranks, torchrun_command

_GRACE_S = 15.0  # how long the other nodes may go on when one has failed
_KILL_AFTER_S = 5.0


def nodes_command(
    command: list[str],
    nodes: int,
    link: str,
    cores_per_node: int | None,
    delay: str | None,
    torchrun: str | None,
) -> int:
    """Runs a command on every node at once, its output behind the node's name; returns the first failure's code."""
    if not command:
        raise UserError("there is no command: bireme nodes --nodes 2 --link 1gbit -- COMMAND...")
    ranks = parse_ranks(torchrun, nodes) if torchrun is not None else None
    cluster = EmulatedCluster(nodes, link, cores_per_node, delay)
    with _Signals() as signals, cluster:
        if cluster.warning:
            print(f"bireme nodes: warning: {cluster.warning}", file=sys.stderr)
        if not cluster.shaped:
            print(f"bireme nodes: {cluster.reason}: plain processes on loopback instead, {UNSHAPED}", file=sys.stderr)
        output = PrefixedOutput()
        running: list[NodeProcess] = []
        for node in cluster.nodes:
            env = {"PYTHONUNBUFFERED": "1"}
            line = command
            if ranks is not None:
                line = torchrun_command(node, ranks[node.rank], command)
                threads = max(1, len(node.cores) // ranks[node.rank])  # where it is not said, torchrun warns
                env["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(threads))
            with output.of(node.name) as (stdout, stderr):
                running.append(node.start(line, env, stdout=stdout, stderr=stderr))
        code = _wait_for_all(running, signals)
        output.close()
    return code


def _wait_for_all(running: list[NodeProcess], signals: "_Signals") -> int:
    """The exit code of the first that failed, or 0. A first Ctrl-C goes to the commands, a second one kills them."""
    waiting = list(running)
    first_failure = 0
    to_send: list[tuple[float, int]] = []  # when, and which signal, to the commands that still run
    while waiting:
        for process in select.select(waiting, [], [], 0.2)[0]:
            waiting.remove(process)
            code = process.wait()
            if code and not first_failure:
                first_failure = code if code > 0 else 128 - code
                if waiting and not signals.first:
                    what = f"exit code {code}" if code > 0 else f"signal {-code}"
                    name = process.node.name
                    print(f"bireme nodes: {name} ended with {what}; the others have {_GRACE_S:.0f} s", file=sys.stderr)
                    end = time.monotonic() + _GRACE_S
                    to_send += [(end, signal.SIGTERM), (end + _KILL_AFTER_S, signal.SIGKILL)]
        now = time.monotonic()
        to_send += [(now, number) for number in signals.take()]
        for _, number in [due for due in to_send if due[0] <= now]:
            for process in waiting:
                process.signal(number)
        to_send = [later for later in to_send if later[0] > now]
    return 128 + signals.first if signals.first else first_failure


class _Signals:
    """Notes SIGINT, SIGTERM and SIGHUP instead of ending this process: the commands are told, and end first."""

    def __init__(self) -> None:
        self.first = 0
        self._pending: list[int] = []
        self._before: dict[int, Any] = {}

    def take(self) -> list[int]:
        """The signals to pass on: the first that came as it is, further ones as SIGKILL."""
        taken, self._pending = self._pending, []
        return taken

    def _note(self, number: int, frame: Any) -> None:
        self._pending.append(signal.SIGKILL if self.first else number)
        self.first = self.first or number

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class PrefixedOutput:
    """Copies what every node prints to this process's output, whole lines behind the node's name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[tuple[int, int]]:
        """(stdout, stderr) for the commands of one node; they are open while the block runs."""
        ends = []
        for target in (sys.stdout, sys.stderr):
            reading, writing = os.pipe()
            thread = threading.Thread(target=self._copy, args=(reading, name, target), daemon=True)
            thread.start()
            self._threads.append(thread)
            ends.append(writing)
        try:
            yield ends[0], ends[1]
        finally:
            for writing in ends:
                os.close(writing)

    def close(self) -> None:
        """Waits until everything is printed. What outlives its command may hold a pipe: it is not waited for long."""
        for thread in self._threads:
            thread.join(timeout=2.0)

    def _copy(self, reading: int, name: str, target: TextIO) -> None:
        with open(reading, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                with self._lock, contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                    target.write(f"{name} | {line.removesuffix(chr(10))}\n")
                    target.flush()
