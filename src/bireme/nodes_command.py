"""`bireme nodes`: one command on every node of an emulated cluster at once, its output behind the node's name."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any, Self, TextIO

from bireme.environment import UNSHAPED
from bireme.errors import UserError
from bireme.nodes import (
    EmulatedCluster,
    NodeProcess,
    how_it_ended,
    parse_ranks,
    torchrun_command,
    wait_for_all,
)

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
        for node in cluster.nodes if not signals.first else ():
            env = {"PYTHONUNBUFFERED": "1"}
            line = command
            if ranks is not None:
                line = torchrun_command(node, ranks[node.rank], command)
                threads = max(1, len(node.cores) // ranks[node.rank])  # where it is not said, torchrun warns
                env["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(threads))
            with output.of(node.name) as (stdout, stderr):
                running.append(node.start(line, env, stdout=stdout, stderr=stderr))
        first = wait_for_all(running, signals.take, partial(_say_failed, output), _GRACE_S, _KILL_AFTER_S)
        output.close()
    if signals.first:
        return 128 + signals.first
    code = first.wait() if first is not None else 0
    return code if code >= 0 else 128 - code


def _say_failed(output: "PrefixedOutput", process: NodeProcess, others_run: bool) -> None:
    if others_run and output.failure is None:
        print(f"bireme nodes: {how_it_ended(process)}; the others have {_GRACE_S:.0f} s", file=sys.stderr)


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
        self.failure: OSError | None = None
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
        """Waits until everything is printed; OSError where it could not be.

        What outlives its command may hold a pipe: it is not waited for long.
        """
        for thread in self._threads:
            thread.join(timeout=2.0)
        if self.failure is not None:
            raise self.failure

    def _copy(self, reading: int, name: str, target: TextIO | None) -> None:
        # Where it cannot be printed, the pipe is closed: the commands learn it as they would from a pipe of their own.
        with open(reading, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if target is None:  # the caller's shell closed it
                    continue
                try:
                    with self._lock:
                        target.write(f"{name} | {line.removesuffix(chr(10))}\n")
                        target.flush()
                except OSError as error:
                    self.failure = self.failure or error
                    return
