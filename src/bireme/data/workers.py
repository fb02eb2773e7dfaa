"""Processes that share out a list of tasks and end with the process that started them, however it ends."""

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Generator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from bireme.errors import UserError

_SIGNALS = {signal.SIGINT, signal.SIGTERM}

# What a worker does: made once in it by `make(*arguments)`, then called with each task and a function that reports
# progress; what it returns travels back.
Work = Callable[[Any, Callable[[Any], None]], Any]


def run_tasks(
    make: Callable[..., Work], arguments: tuple[Any, ...], tasks: list[Any], workers: int
) -> Generator[tuple[str, Any], None, None]:
    """Yields ("progress", what a task reported) and ("done", what it returned), until all tasks are done.

    UserError as a task raises it, and when a worker is killed. Leaving the loop early kills the workers.
    """
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    processes: dict[Connection, BaseProcess] = {}  # each with our end of its pipe
    waiting = list(reversed(tasks))
    try:
        for _ in range(min(workers, len(tasks))):
            ours, theirs = context.Pipe()
            process: BaseProcess = context.Process(target=_worker, args=(theirs, make, arguments), daemon=True)
            # Ctrl-C reaches the whole group, and must not find the worker before it ignores it.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
            try:
                process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            processes[ours] = process
            theirs.close()
            _hand(ours, waiting.pop())
        while processes:
            for connection in wait(list(processes), timeout=1.0):
                assert isinstance(connection, Connection)
                try:
                    kind, value = connection.recv()
                except (EOFError, ConnectionError):
                    raise _killed(processes[connection]) from None
                if kind == "failed":
                    raise UserError(value)
                if kind == "broken":
                    raise RuntimeError(f"a worker process failed:\n{value}")
                yield kind, value
                if kind == "done" and waiting:
                    _hand(connection, waiting.pop())
                elif kind == "done":
                    connection.close()
                    processes.pop(connection).join()
    finally:
        for connection, process in processes.items():
            connection.close()
            process.kill()
        for process in processes.values():
            process.join()


def _hand(connection: Connection, task: Any) -> None:
    with suppress(ConnectionError):  # the worker has failed: what it said, or that it said nothing, is read later
        connection.send(task)


def _killed(process: BaseProcess) -> UserError:
    process.join(5.0)
    code = process.exitcode
    how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
    memory = "; not enough memory? fewer --workers need less" if code == -signal.SIGKILL else ""
    return UserError(f"a worker process was ended from outside ({how}){memory}; start again: what is finished is kept")


def _worker(connection: Connection, make: Callable[..., Work], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and ends us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def report(progress: Any) -> None:
        connection.send(("progress", progress))

    with suppress(EOFError, ConnectionError):  # the parent is gone or has no more tasks
        try:
            work = make(*arguments)
            while True:
                connection.send(("done", work(connection.recv(), report)))
        except UserError as error:
            connection.send(("failed", str(error)))
        except (EOFError, ConnectionError):
            raise
        except BaseException:  # also what libraries in Rust raise when they panic
            connection.send(("broken", traceback.format_exc()))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
