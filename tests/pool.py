"""Rank processes for tests, started once per session: importing torch costs seconds, a process group milliseconds."""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

_START_S = 120.0
_STRAY_S = 10.0  # how long the other ranks may go on after one has failed, and how long leaving a group may take
# The first optimizer step imports dynamo (and that sympy and triton): seconds, on every rank at once.
_PRELOAD = ["torch._dynamo", "torch.distributed.device_mesh", "pytest", "bireme.train"]
_LOOPBACK = "lo"
_LEAVE = b"leave"
_DONE = pickle.dumps((None, None))


class RankPool:
    """Runs a function on several ranks at once, each time in a fresh gloo process group.

        results = ranks(2, check_something, tmp_path)  # check_something(rank, size, tmp_path) on two ranks

    The function is one of a test module, its arguments and results are picklable; the results come by rank. What a
    rank raises is raised here, with that rank's traceback as a note (the first, where several fail). A rank that is
    done keeps its process group until all are, and one that raises leaves it at once, as a process that dies would.
    After a failure, or when not all are done in `timeout_s`, the processes are ended: the next call starts new ones.
    """

    def __init__(self, max_ranks: int = 4):
        self.max_ranks = max_ranks
        self._ranks: list[tuple[ForkServerProcess, Connection]] = []
        self._directory = tempfile.TemporaryDirectory(prefix="bireme-ranks-")
        self._calls = 0

    def __call__(self, size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        assert 1 <= size <= self.max_ranks, f"the pool has at most {self.max_ranks} ranks"
        self._calls += 1
        store = str(Path(self._directory.name) / f"store-{self._calls}")
        job = pickle.dumps((sys.path, size, store, timeout_s, pickle.dumps((function, args))))
        try:
            self._start(size)
            for _, connection in self._ranks[:size]:
                connection.send_bytes(job)
            answers = self._answers(0, size, timeout_s)
            self._raise_first(answers, timeout_s)
            for _, connection in self._ranks[:size]:
                connection.send_bytes(_LEAVE)
            if None in self._answers(0, size, _STRAY_S):
                raise TimeoutError(f"a rank could not leave its process group in {_STRAY_S:.0f} s")
            return [answer[1] for answer in answers if answer is not None]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the rank processes; the next call would start new ones."""
        for process, _ in self._ranks:
            process.kill()
        for process, connection in self._ranks:
            process.join()
            connection.close()
        self._ranks.clear()

    def _start(self, size: int) -> None:
        # Forked from a fresh process of one thread that has imported what is slow to import.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        first = len(self._ranks)
        while len(self._ranks) < size:
            here, there = context.Pipe()
            rank = len(self._ranks)
            process = context.Process(target=_serve, args=(rank, there), name=f"rank {rank}", daemon=True)
            process.start()
            there.close()
            self._ranks.append((process, here))
        self._raise_first(self._answers(first, size, _START_S), _START_S)

    def _answers(self, first: int, end: int, timeout_s: float) -> list[Any]:
        """Of each rank from `first` on: (when it failed or None, result or exception); None where it is late."""
        rank_of = {connection: first + index for index, (_, connection) in enumerate(self._ranks[first:end])}
        answers: list[Any] = [None] * (end - first)
        deadline = time.monotonic() + timeout_s
        while rank_of:
            ready = wait(list(rank_of), max(0.0, deadline - time.monotonic()))
            if not ready:
                self._dump_stacks()
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = rank_of.pop(connection)
                try:
                    answer = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    process = self._ranks[rank][0]
                    process.join(_STRAY_S)
                    answer = time.monotonic_ns(), RuntimeError(f"rank {rank} died with exit code {process.exitcode}")
                answers[rank - first] = answer
                if answer[0] is not None:
                    deadline = min(deadline, time.monotonic() + _STRAY_S)
        return answers

    @staticmethod
    def _raise_first(answers: list[Any], timeout_s: float) -> None:
        failures = [answer for answer in answers if answer is not None and answer[0] is not None]
        if failures:
            raise min(failures, key=lambda failure: int(failure[0]))[1]
        if None in answers:
            raise TimeoutError(f"{answers.count(None)} ranks were not done in {timeout_s:.0f} s (stacks: stderr)")

    def _dump_stacks(self) -> None:
        """Where every rank is, into the test's captured standard error."""
        for process, _ in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid or 0, signal.SIGUSR1)
        time.sleep(0.5)


# --- in the rank processes ---------------------------------------------------------------------------------------


def _serve(rank: int, connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest: it ends the ranks
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if (Path("/sys/class/net") / _LOOPBACK).exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)  # whatever the machine's own name resolves to
    import torch

    torch.set_num_threads(1)
    connection.send_bytes(_DONE)
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        if message == _LEAVE:
            _leave()
            connection.send_bytes(_DONE)
        else:
            connection.send_bytes(_run(rank, message))


def _run(rank: int, job: bytes) -> bytes:
    import torch.distributed as dist

    try:
        path, size, store, timeout_s, call = pickle.loads(job)
        sys.path[:] = path
        function, args = pickle.loads(call)
        meeting = dist.FileStore(store, size)
        dist.init_process_group(
            "gloo",
            store=meeting,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
        # gloo returns on one rank while another still connects: a function that destroys the group at once, or
        # fails, would end the other inside `init_process_group`.
        meeting.set(f"in/{rank}", "")
        meeting.wait([f"in/{other}" for other in range(size)])
        return pickle.dumps((None, function(rank, size, *args)))
    except BaseException as error:
        failed_ns = time.monotonic_ns()
        text = f"on rank {rank}:\n{traceback.format_exc()}"
        with contextlib.suppress(Exception):
            _leave()
        try:
            sent = pickle.dumps(error)
            pickle.loads(sent).add_note(text)
        except Exception:  # not every exception can be pickled
            error = RuntimeError(f"{type(error).__name__}: {error}")
        error.__traceback__ = None
        error.add_note(text)
        return pickle.dumps((failed_ns, error))


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    # DTensor remembers meshes by their ranks: the next job's would be taken for one whose groups are gone.
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
