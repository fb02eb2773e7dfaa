import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from bireme.shutdown import SAVE_S, STUCK_AFTER_S, Interrupted, StopRequest

SIGNALS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


@pytest.fixture(autouse=True)
def handlers_are_restored() -> Iterator[None]:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(fd)
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    after = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(after)
    assert after == fd


# --- in this process ---------------------------------------------------------------------------------------------


@SIGNALS
def test_a_signal_only_asks(number: signal.Signals) -> None:
    reached = []
    with pytest.raises(Interrupted) as caught, StopRequest() as stop:
        for step in range(5):
            stop.check()
            reached.append(step)
            if step == 2:
                os.kill(os.getpid(), number)
            reached.append(step)  # the step is finished
    assert reached == [0, 0, 1, 1, 2, 2]
    assert caught.value.exit_code == 128 + number
    assert str(caught.value) == ("Ctrl-C" if number == signal.SIGINT else "SIGTERM")
    assert isinstance(caught.value, KeyboardInterrupt)


def test_the_first_signal_counts() -> None:
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interrupted) as caught:
            stop.check()
    assert caught.value.exit_code == 143


def test_nothing_happens_without_a_signal() -> None:
    with StopRequest() as stop:
        stop.check()
    stop.check()


def test_a_loop_that_ends_in_time_is_left_alone() -> None:
    stuck: list[str] = []
    with StopRequest() as stop:
        stop.on_stuck = stuck.append
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interrupted):
            stop.check()
    time.sleep(STUCK_AFTER_S + 0.5)
    assert stuck == []


def test_the_watcher_ends_with_the_block() -> None:
    for number in (None, signal.SIGINT):
        with StopRequest():
            assert "bireme-shutdown" in [thread.name for thread in threading.enumerate()]
            if number is not None:
                signal.raise_signal(number)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            if "bireme-shutdown" not in [thread.name for thread in threading.enumerate()]:
                break
            time.sleep(0.01)
        else:
            pytest.fail("the watcher is still there")


def test_other_signals_do_not_ask() -> None:
    seen: list[int] = []
    previous = signal.signal(signal.SIGUSR2, lambda number, _: seen.append(number))
    try:
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGUSR2)
            time.sleep(0.1)
            stop.check()
    finally:
        signal.signal(signal.SIGUSR2, previous)
    assert seen == [signal.SIGUSR2]


def test_on_another_thread_it_does_nothing() -> None:
    handlers = []

    def elsewhere() -> None:
        with StopRequest() as stop:
            handlers.append(signal.getsignal(signal.SIGTERM))
            stop.check()

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert handlers == [before]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no /proc")
def test_no_descriptor_is_left_behind() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    before = descriptors()
    for _ in range(5):
        with StopRequest():
            pass
    deadline = time.monotonic() + 2
    while descriptors() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert descriptors() == before


# --- a rank that is stuck ----------------------------------------------------------------------------------------

# Its main thread waits for itself in C, where no Python handler runs.
STUCK = """
import ctypes, os, sys, threading, time
import bireme.shutdown
from bireme.shutdown import StopRequest

def raise_error(reason):
    raise ValueError(reason)

scenario = sys.argv[1]
if scenario != "stuck":
    bireme.shutdown.STUCK_AFTER_S, bireme.shutdown.SAVE_S = 0.3, 1.2
with StopRequest() as stop:
    stop.on_stuck = {
        "stuck": lambda reason: print("saving:", reason, flush=True),
        "locked": lambda reason: print("saving:", reason, flush=True),
        "error": raise_error,
        "hang": lambda reason: time.sleep(1000),
    }[scenario]
    print("ready", flush=True)
    if scenario == "locked":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    mutex = ctypes.create_string_buffer(256)
    lock = ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)
"""


Ended = tuple[int | None, float, str]  # exit code (None: it had to be killed), seconds since the signal, its output


def end_stuck(scenario: str, number: signal.Signals) -> Ended:
    with subprocess.Popen(
        [sys.executable, "-c", STUCK, scenario], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)
        process.send_signal(number)
        asked = time.monotonic()
        try:
            output, _ = process.communicate(timeout=30 if scenario == "stuck" else 8)
        except subprocess.TimeoutExpired:
            process.kill()
            return None, time.monotonic() - asked, ""
        return process.returncode, time.monotonic() - asked, output


@pytest.fixture(scope="module")
def stuck() -> Iterator[dict[str, Future[Ended]]]:
    """All at once: each takes its seconds."""
    with ThreadPoolExecutor() as pool:
        scenarios = {"stuck": signal.SIGINT, "locked": signal.SIGTERM, "error": signal.SIGTERM, "hang": signal.SIGTERM}
        yield {scenario: pool.submit(end_stuck, scenario, number) for scenario, number in scenarios.items()}


def test_a_rank_stuck_in_c_saves_and_ends(stuck: dict[str, Future[Ended]]) -> None:
    code, seconds, output = stuck["stuck"].result()
    assert (code, output) == (130, "saving: Ctrl-C\n")
    assert STUCK_AFTER_S + SAVE_S - 0.5 <= seconds < 25


def test_a_rank_stuck_on_a_lock_saves_and_ends(stuck: dict[str, Future[Ended]]) -> None:
    code, _, output = stuck["locked"].result()
    assert (code, output) == (143, "saving: SIGTERM\n")


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(
            "error",
        ),
        pytest.param("hang"),
    ],
)
def test_it_ends_whatever_saving_does(scenario: str, stuck: dict[str, Future[Ended]]) -> None:
    assert stuck[scenario].result()[0] == 143
