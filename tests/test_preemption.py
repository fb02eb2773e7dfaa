"""A signal to one rank stops all of them at the same boundary, whichever way they wait for each other's answer."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bireme.preemption import CommonStop
from bireme.shutdown import StopRequest

Ranks = Callable[..., list[Any]]


def loop_of(rank: int, size: int, asked: int, at: int, step_s: float, late_s: float) -> tuple[int, int, int]:
    """Boundaries until this rank stops, the signal that it stops for, and that a second poll says."""
    torch.set_num_threads(1)
    handler = signal.getsignal(signal.SIGUSR1)
    try:
        with StopRequest((signal.SIGUSR1,)) as request:
            stop = CommonStop(request, size)
            stop.step_s = step_s
            for boundary in range(1, 20):
                if rank == 0:
                    time.sleep(late_s)  # ranks never reach a boundary at the same time
                if found := stop.poll():
                    break
                if rank == asked and boundary == at:
                    os.kill(os.getpid(), signal.SIGUSR1)
            stop.close()
            return boundary, found, stop.poll()
    finally:
        signal.signal(signal.SIGUSR1, handler)


# With steps of 0.3 s boundaries 1, 2, 5, 8, 11, ... are looked at, and each reads the answer of the one before.
@pytest.mark.parametrize(("step_s", "at"), [(1.0, 7), (0.0, 7), (0.3, 11), (5.0, 6)], ids=str)
def test_all_ranks_stop_at_one_boundary(ranks: Ranks, step_s: float, at: int) -> None:
    for asked in (0, 1):
        found = ranks(2, loop_of, asked, 5, step_s, 0.02)
        assert found == [(at, signal.SIGUSR1, signal.SIGUSR1)] * 2
    assert ranks(1, loop_of, 0, 5, step_s, 0.0) == [(6, signal.SIGUSR1, signal.SIGUSR1)]


def test_nobody_stops_without_a_signal(ranks: Ranks) -> None:
    assert ranks(2, loop_of, -1, 0, 0.1, 0.0) == [(19, 0, 0)] * 2


def test_once_all_have_agreed_more_signals_change_nothing_but_ctrl_c_ends_at_once() -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with StopRequest() as request:
            stop = CommonStop(request, 1)
            signal.raise_signal(signal.SIGTERM)
            assert stop.poll() == signal.SIGTERM
            signal.raise_signal(signal.SIGTERM)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN, "the process is about to end"
        assert signal.getsignal(signal.SIGINT) is handlers[signal.SIGINT]
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
