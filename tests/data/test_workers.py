import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from bireme.data.workers import Work, run_tasks
from bireme.errors import UserError

if TYPE_CHECKING:
    from tests.data.made_tokens import failure
else:
    from made_tokens import failure


def make(offset: int) -> Work:
    def work(task: int, report: Callable[[Any], None]) -> Any:
        report(1)
        if task == -1:
            raise UserError("task -1 is wrong")
        if task == -2:
            raise ValueError("a mistake in the program")
        if task == -3:
            os.kill(os.getpid(), signal.SIGKILL)
        if task == -4:
            time.sleep(60)
        return task + offset, os.getpid()

    return work


def test_each_task_is_done_once() -> None:
    events = list(run_tasks(make, (100,), list(range(20)), 3))
    done = [value for kind, value in events if kind == "done"]
    assert sorted(value for value, _ in done) == list(range(100, 120))
    assert len(events) == 40 and sum(kind == "progress" for kind, _ in events) == 20
    assert os.getpid() not in {process for _, process in done}
    assert list(run_tasks(make, (100,), [], 3)) == []


def test_failures_end_all() -> None:
    assert failure(lambda: list(run_tasks(make, (0,), [1, -1, -4], 2))) == "task -1 is wrong"
    with pytest.raises(RuntimeError, match="a mistake in the program"):
        list(run_tasks(make, (0,), [1, -2], 1))
    assert "signal 9" in failure(lambda: list(run_tasks(make, (0,), [1, -3, -4], 2)))
    assert not [each for each in psutil.Process().children() if "spawn_main" in " ".join(each.cmdline())]
