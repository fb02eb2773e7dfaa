import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bireme.observe.thread import ThreadClock

schedstat = pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="this system has no per-thread schedstat"
)


@pytest.fixture
def clock() -> Iterator[ThreadClock]:
    clock = ThreadClock()
    yield clock
    clock.close()


def stretch(clock: ThreadClock, act: Callable[[], object]) -> tuple[int, int, int]:
    before = clock.read()
    act()
    wall_ns, cpu_ns, run_delay_ns = (b - a for a, b in zip(before, clock.read(), strict=True))
    return wall_ns, cpu_ns, run_delay_ns


def busy(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        sum(range(500))


@schedstat
def test_a_busy_thread_runs_or_waits_for_a_core(clock: ThreadClock) -> None:
    wall_ns, cpu_ns, run_delay_ns = stretch(clock, lambda: busy(0.2))
    assert cpu_ns >= 195e6
    # On an idle machine nothing else is left; a hypervisor may take the core without telling.
    assert cpu_ns + run_delay_ns <= wall_ns + 2_000_000
    assert cpu_ns + run_delay_ns >= 0.5 * wall_ns


def test_a_sleeping_thread_does_neither(clock: ThreadClock) -> None:
    stretches = [stretch(clock, lambda: time.sleep(0.05)) for _ in range(5)]
    assert all(wall_ns >= 50e6 for wall_ns, _, _ in stretches)
    assert statistics.median(cpu_ns for _, cpu_ns, _ in stretches) < 5e6
    blocked_ns = statistics.median(wall_ns - cpu_ns - run_delay_ns for wall_ns, cpu_ns, run_delay_ns in stretches)
    assert blocked_ns >= 45e6


@schedstat
def test_two_busy_threads_on_one_core_wait_for_each_other(clock: ThreadClock) -> None:
    cores = os.sched_getaffinity(0)
    core = min(cores)
    code = f"import os; os.sched_setaffinity(0, {{{core}}}); print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as neighbour:
        try:
            assert neighbour.stdout is not None
            neighbour.stdout.readline()
            os.sched_setaffinity(0, {core})
            wall_ns, cpu_ns, run_delay_ns = stretch(clock, lambda: busy(0.2))
        finally:
            os.sched_setaffinity(0, cores)
            neighbour.kill()
    assert run_delay_ns >= 0.25 * wall_ns
    assert cpu_ns + run_delay_ns >= 0.7 * wall_ns


@schedstat
def test_it_reads_the_thread_that_made_it() -> None:
    def elsewhere() -> None:
        clock = ThreadClock()
        results.append(stretch(clock, lambda: time.sleep(0.1)))
        clock.close()

    results: list[tuple[int, int, int]] = []
    thread = threading.Thread(target=elsewhere)
    thread.start()
    busy(0.1)
    thread.join()
    ((wall_ns, cpu_ns, _),) = results
    assert wall_ns >= 100e6 and cpu_ns < 30e6


def test_without_schedstat_waiting_for_a_core_is_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, flags: int) -> int:
        raise FileNotFoundError(path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        clock = ThreadClock()
    assert clock.missing is not None and "schedstat" in clock.missing
    wall_ns, cpu_ns, run_delay_ns = stretch(clock, lambda: time.sleep(0.01))
    assert wall_ns >= 10e6 and cpu_ns >= 0 and run_delay_ns == 0
    clock.close()


@pytest.mark.parametrize("content", [b"", b"12\n", b"a b c\n"])
def test_an_unreadable_schedstat_is_missing(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(descriptor: int, size: int, offset: int) -> bytes:
        return content

    with monkeypatch.context() as patched:
        patched.setattr(os, "pread", read)
        clock = ThreadClock()
    assert clock.missing is not None
    assert clock.read()[2] == 0


def test_no_descriptor_is_left_behind() -> None:
    if not Path("/proc/self/fd").exists():
        pytest.skip("no /proc")
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(3):
        clock = ThreadClock()
        clock.close()
        clock.close()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
