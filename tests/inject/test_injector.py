"""What is planted happens on its rank, in its step and phase, and nowhere else; what is beside a rank ends with it."""

import gc
import os
import pickle
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from bireme.errors import UserError
from bireme.inject import Injection, Injector, Setting, Straggler, parse, resolve
from bireme.inject import injector as module
from bireme.inject.injector import longest_delay_ms, slowed_link
from bireme.inject.work import Work

PHASES = ("input", "forward", "backward", "optimizer", "checkpoint", "other")


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The sleeps so far, in seconds; none takes any time."""
    sleeps: list[float] = []
    monkeypatch.setattr(time, "sleep", sleeps.append)
    return sleeps


@pytest.fixture
def worked(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The extra work so far, in milliseconds; none takes any time."""
    works: list[float] = []
    monkeypatch.setattr(Work, "_on_cpu", lambda self, ms: works.append(ms))
    return works


def planted(*texts: str, rank: int = 0, ranks: int = 2, entries: int = 1, **setting: Any) -> Injector:
    whole: dict[str, Any] = {"node_of": ["here"] * ranks, "steps": 1000, "checkpoint_every": 5}
    whole |= {"cores_of": [sorted(os.sched_getaffinity(0))] * ranks, "place_of": list(range(ranks))}
    injections = resolve(parse(texts), Setting(**{**whole, **setting}))
    injector = Injector(injections, None, rank, entries)
    injector.prepare()
    return injector


# --- the short form -------------------------------------------------------------------------------------------------


def a_step(injector: Injector, number: int, micro_batches: int = 1) -> None:
    """The trainer's calls."""
    injector.begin(number)
    injector.enter("input")
    for _ in range(micro_batches):
        injector.enter("forward")
        injector.enter("backward")
    injector.enter("optimizer")


def test_it_sleeps_once_in_each_step_also_with_several_micro_batches(slept: list[float]) -> None:
    injector = Injector((), Straggler((150.0,), rank=2), rank=2)
    a_step(injector, 1, micro_batches=4)
    assert slept == [0.15]
    a_step(injector, 2, micro_batches=4)
    assert slept == [0.15, 0.15]


def test_it_sleeps_on_its_rank_only(slept: list[float]) -> None:
    for rank in (0, 1, 3):
        a_step(Injector((), Straggler((150.0,), rank=2), rank), 1)
    a_step(Injector((), None, 2), 1)
    assert slept == []


@pytest.mark.parametrize("phase", ["input", "forward", "backward", "optimizer"])
def test_it_sleeps_in_its_phase_only(phase: str, slept: list[float]) -> None:
    injector = Injector((), Straggler((10.0,), 0, phase), 0)
    injector.begin(1)
    for other in {"input", "forward", "backward", "optimizer", "other"} - {phase}:
        injector.enter(other)
    assert slept == []
    injector.enter(phase)
    assert slept == [0.01]


def test_delays_take_turns_and_a_delay_of_zero_does_not_sleep(slept: list[float]) -> None:
    injector = Injector((), Straggler((0.0, 50.0, 100.0), 0), 0)
    for step in range(1, 7):
        a_step(injector, step)
    assert slept == [0.05, 0.1, 0.05, 0.1]


def test_a_delay_that_was_not_slept_is_not_kept_for_the_next_step(slept: list[float]) -> None:
    injector = Injector((), Straggler((40.0, 0.0), 0), 0)
    injector.begin(1)
    injector.begin(2)
    injector.enter("forward")
    assert slept == []


def test_before_the_first_step_it_does_not_sleep(slept: list[float]) -> None:
    """The forward passes of a rehearsal, say."""
    Injector((), Straggler((40.0,), 0), 0).enter("forward")
    assert slept == []


def events_of_a_pass(injector: Injector, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The order in which the passes and the sleep happen in a model of two layers, planted in the first."""
    events: list[str] = []
    monkeypatch.setattr(time, "sleep", lambda seconds: events.append(f"sleep {seconds}"))
    first, last = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    layers = torch.nn.Sequential(first, last)
    injector.plant_in_backward(first)
    injector.begin(1)

    def arrived(name: str) -> Any:
        return lambda gradient: events.append(name)

    first.weight.register_hook(arrived("first layer's gradient"))
    last.weight.register_hook(arrived("last layer's gradient"))
    loss = layers(torch.ones(1, 2)).sum()
    events.append("loss")
    loss.backward()
    with torch.no_grad():
        layers(torch.ones(1, 2))  # an evaluation: nothing requires a gradient
    return events


def test_a_sleep_in_backward_happens_where_the_layers_gradient_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    events = events_of_a_pass(Injector((), Straggler((20.0,), 0, "backward"), 0), monkeypatch)
    assert events[0] == "loss"
    assert events.count("sleep 0.02") == 1
    assert events.index("sleep 0.02") < events.index("first layer's gradient")


@pytest.mark.parametrize(
    ("straggler", "rank"),
    [(None, 0), (Straggler((20.0,), 1, "backward"), 0), (Straggler((20.0,), 0, "forward"), 0)],
)
def test_nothing_is_planted_in_backward_where_no_straggler_sleeps_there(
    straggler: Straggler | None, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = torch.nn.Linear(1, 1)
    Injector((), straggler, rank).plant_in_backward(layer)
    assert not layer._forward_hooks
    events = events_of_a_pass(Injector((), straggler, rank), monkeypatch)
    assert not [each for each in events if each.startswith("sleep")]


# --- sleep and work ----------------------------------------------------------------------------------------------


def test_nothing_planted_costs_a_comparison() -> None:
    for injector in (Injector(), planted("kind=sleep,rank=1,ms=5", rank=0)):
        assert injector.idle
        phase_of = nullcontext
        assert injector.phases(phase_of) is phase_of
        a_step(injector, 1)
        assert injector.slow_reads is None and not injector.leaves(1)
        injector.before_write(5)
        injector.close()


@pytest.mark.parametrize("phase", PHASES)
def test_a_sleep_in_every_phase(phase: str, slept: list[float]) -> None:
    injector = planted(f"kind=sleep,rank=0,phase={phase},ms=10,steps=5:6")
    for step in (4, 5, 6, 7):
        injector.begin(step)
        for each in PHASES:
            injector.enter(each)
            injector.enter(each)
            if each == phase:
                assert len(slept) == {4: 0, 5: 1, 6: 2, 7: 2}[step]
    assert slept == [0.01] * 2


def test_several_in_one_phase_all_happen(slept: list[float], worked: list[float]) -> None:
    injector = planted("kind=sleep,rank=0,ms=10", "kind=jitter,ms=1", "kind=compute,rank=0,ms=7")
    a_step(injector, 1)
    assert len(slept) == 2 and slept[0] == 0.01 and 0 < slept[1] < 0.01 and worked == [7]


def test_work_is_spread_over_the_micro_batches(worked: list[float]) -> None:
    injector = planted("kind=compute,rank=0,ms=60", "kind=compute,rank=0,phase=optimizer,ms=5", entries=4)
    a_step(injector, 1, micro_batches=4)
    assert worked == [15, 15, 15, 15, 5]


def test_a_stage_has_more_work_forward_and_backward(worked: list[float]) -> None:
    for rank, expected in ((0, []), (1, [30, 30])):
        injector = planted("kind=stage,stage=1,ms=30", rank=rank, stage_of=[0, 1])
        a_step(injector, 1)
        assert worked == expected


def test_a_factor_multiplies_what_the_phase_takes_by_itself(
    worked: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock_ns = [0]
    monkeypatch.setattr(time, "thread_time_ns", lambda: clock_ns[0])
    injector = planted("kind=compute,rank=0,factor=3,phase=forward", entries=2)

    def step(number: int, own_ms: int) -> None:
        injector.begin(number)
        phase_of = injector.phases(lambda name: nullcontext())
        for _ in range(2):
            with phase_of("forward"):
                injector.enter("forward")
                clock_ns[0] += own_ms * 500_000
            with phase_of("backward"):
                clock_ns[0] += 7_000_000

    step(11, 500)  # the first of this start: it compiles and allocates
    step(12, 9)
    step(13, 11)
    assert worked == []
    step(14, 10)
    assert worked == [10, 10], "twice its own 10 ms, over two micro-batches"


def test_a_drift_and_an_imbalance_work(worked: list[float]) -> None:
    drift = planted("kind=drift,rank=0,ms=100,steps=3:,over=10")
    for step in range(1, 16):
        a_step(drift, step)
    assert worked == [10.0 * step for step in range(1, 11)] + [100.0] * 2
    worked.clear()
    both = [planted("kind=imbalance,ms=60", rank=rank) for rank in (0, 1)]
    for step in range(1, 9):
        for injector in both:
            a_step(injector, step)
    assert worked == [60] * 8


def test_work_is_work_and_leaves_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    work = Work(torch.device("cpu"))
    started_ns = time.thread_time_ns()
    work.ms(20.0)
    assert time.thread_time_ns() - started_ns >= 20e6
    assert torch.equal(torch.get_rng_state(), before)


# --- input, checkpoint, collections ------------------------------------------------------------------------------


def test_reading_is_slow_where_it_is_planted(slept: list[float]) -> None:
    slow = planted("kind=input,rank=0,ms=20,steps=2:3").slow_reads
    assert slow is not None
    for step in (1, 2, 3, 4):
        pickle.loads(pickle.dumps(slow))(step)
    assert slept == [0.02, 0.02]
    assert planted("kind=input,rank=0,ms=20", rank=1).slow_reads is None


def test_writing_a_checkpoint_is_slow_where_it_is_planted(slept: list[float]) -> None:
    injector = planted("kind=checkpoint,rank=0,ms=500,steps=6:10")
    for step in (5, 10, 15):
        injector.before_write(step)
    assert slept == [0.5]


def test_collections_as_python_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[str] = []
    injector = planted("kind=gc,rank=0,objects=1000,every=2", "kind=gc,rank=0,objects=1,phase=other,steps=3")
    assert len(injector._heap) == 1001 and gc.is_tracked(injector._heap[0])
    monkeypatch.setattr(gc, "collect", lambda: collected.append("collected"))
    for step in (1, 2, 3):
        a_step(injector, step)
    assert len(collected) == 2
    injector.enter("other")
    assert len(collected) == 3
    gc.disable()
    try:
        a_step(injector, 5)
    finally:
        gc.enable()
    assert len(collected) == 3, "collection is turned off: Python would not collect either"
    injector.close()
    assert not injector._heap


# --- failures ----------------------------------------------------------------------------------------------------


def test_a_raised_failure_comes_in_its_step_and_phase() -> None:
    injector = planted("kind=raise,rank=0,phase=optimizer,steps=3")
    a_step(injector, 2)
    injector.begin(3)
    injector.enter("forward")
    with pytest.raises(RuntimeError, match="injected failure"):
        injector.enter("optimizer")


def test_a_rank_leaves_before_its_step() -> None:
    injector = planted("kind=leave,rank=0,steps=3")
    assert [injector.leaves(step) for step in (1, 2, 3)] == [False, False, True]
    a_step(injector, 3)


FAIL = """
import sys
from bireme.inject import Injector, Setting, parse, resolve
injector = Injector(resolve(parse([sys.argv[1]]), Setting(node_of=["here", "here"], steps=9)), rank=0)
injector.begin(2)
injector.enter("forward")
print("unharmed", flush=True)
injector.begin(3)
injector.enter("forward")
print("still there")
"""


@pytest.mark.parametrize(("text", "code"), [("kind=exit,code=7", 7), ("kind=exit", 3), ("kind=kill", -9)])
def test_the_end_of_a_process(text: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", FAIL, f"{text},rank=0,steps=3"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, "unharmed\n", "")


@pytest.mark.parametrize("kind", ["stop", "hang"])
def test_a_process_that_goes_no_further(kind: str) -> None:
    command = [sys.executable, "-c", FAIL, f"kind={kind},rank=0,steps=3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "unharmed\n"
        assert wait_for(lambda: state(process.pid) == ("T" if kind == "stop" else "S"))
        time.sleep(0.1)
        assert process.poll() is None
        process.kill()
        assert process.stdout.read() == ""


# --- beside the rank ---------------------------------------------------------------------------------------------


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def wait_for(condition: Any, within_s: float = 20.0) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_contention_keeps_the_core_busy_for_its_steps_and_puts_the_rank_back() -> None:
    before = set(children(os.getpid()))
    allowed = os.sched_getaffinity(0)
    injector = planted("kind=contention,rank=0,steps=2:3,processes=2")
    core = min(allowed)
    try:
        helpers = set(children(os.getpid())) - before
        assert len(helpers) == 2
        injector.begin(1)
        time.sleep(0.3)
        idle = sum(map(cpu_ticks, helpers))
        assert os.sched_getaffinity(0) == allowed
        injector.begin(2)
        for thread in Path("/proc/self/task").iterdir():
            assert os.sched_getaffinity(int(thread.name)) == {core}
        assert wait_for(lambda: sum(map(cpu_ticks, helpers)) > idle + 20)
        assert all(os.sched_getaffinity(helper) == {core} for helper in helpers)
        injector.begin(3)
        assert os.sched_getaffinity(0) == {core}
        injector.begin(4)
        assert os.sched_getaffinity(0) == allowed
        assert wait_for(lambda: all(state(helper) == "S" for helper in helpers))
    finally:
        injector.close()
    assert os.sched_getaffinity(0) == allowed
    assert not set(children(os.getpid())) & helpers


PAUSED = """
import os, sys, time
from bireme.inject import Injector, Setting, parse, resolve
texts = ["kind=pause,rank=0,ms=300,period_ms=400,steps=1:1", "kind=contention,rank=0"]
setting = Setting(node_of=["here"], steps=9, cores_of=[sorted(os.sched_getaffinity(0))], place_of=[0])
injector = Injector(resolve(parse(texts), setting), rank=0)
injector.prepare()
injector.begin(1)
print("begun", flush=True)
sys.stdin.readline()
injector.begin(2)
print("over", flush=True)
time.sleep(600)
"""


def test_a_pause_stops_and_goes_on_and_its_helpers_end_with_the_rank() -> None:
    command = [sys.executable, "-c", PAUSED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            assert process.stdout.readline() == "begun\n"
            for wanted in ("T", "S", "T", "S"):
                assert wait_for(lambda wanted=wanted: state(process.pid) == wanted)
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "over\n"
            time.sleep(0.5)
            for _ in range(50):
                assert state(process.pid) == "S", "its steps are over, it is stopped no more"
                time.sleep(0.01)
            helpers = children(process.pid)
            assert len(helpers) == 2
        finally:
            process.kill()
    assert wait_for(lambda: all(state(helper) in ("gone", "Z") for helper in helpers))


def test_a_slowed_link_is_shaped_for_its_steps_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    shaped: list[tuple[str, int | None, float]] = []
    monkeypatch.setattr(module, "shape", lambda *how: shaped.append(how))
    monkeypatch.setenv("BIREME_LINK", "1gbit")
    monkeypatch.setenv("BIREME_DELAY", "1ms")
    text = "kind=link,node=here,rate=50mbit,steps=2:3"
    slow, before = ("eth0", 50_000_000, 0.001), ("eth0", 1_000_000_000, 0.001)
    injector = planted(text, emulated=True)
    assert shaped == [slow, before], "tried before training"
    shaped.clear()
    for step in (1, 2, 3):
        injector.begin(step)
    assert shaped == [slow]
    injector.begin(4)
    assert shaped == [slow, before]
    injector.begin(2)
    injector.close()
    assert shaped == [slow, before, slow, before]
    shaped.clear()
    planted(text, rank=1, emulated=True).begin(2)
    assert shaped == [], "the node's first rank does it"


def test_a_kernel_that_cannot_delay_says_so_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_delay(interface: str, rate: int | None, delay_s: float) -> None:
        if delay_s:
            raise module.NoNetem("this kernel cannot delay packets")

    monkeypatch.setattr(module, "shape", no_delay)
    monkeypatch.setenv("BIREME_LINK", "1gbit")
    with pytest.raises(UserError, match="cannot delay packets: say rate only"):
        planted("kind=link,node=here,rate=50mbit,delay=2ms", emulated=True)


# --- how long others wait ----------------------------------------------------------------------------------------


def test_who_waits_for_an_answer_counts_what_is_planted() -> None:
    def all_of(*texts: str) -> tuple[Injection, ...]:
        return parse(texts)

    assert longest_delay_ms((), None) == 0
    assert longest_delay_ms((), Straggler((0.0, 50.0), 1)) == 50
    assert longest_delay_ms(all_of("kind=sleep,ms=9000", "kind=stage,stage=1,ms=1000"), Straggler((1.0,), 1)) == 11_001
    assert longest_delay_ms(all_of("kind=compute,factor=2"), None) >= 20_000
    assert longest_delay_ms(all_of("kind=pause,ms=90"), None) >= 9 * 20_000 * 0.99
    link = all_of("kind=link,node=1,rate=20mbit", "kind=link,node=0,rate=2gbit", "kind=link,node=0,delay=1ms")
    assert slowed_link({"BIREME_LINK": "1gbit"}, link)["BIREME_LINK"] == "20mbit"
    assert slowed_link({"BIREME_LINK": "10mbit"}, link)["BIREME_LINK"] == "10mbit"
    assert slowed_link({"BIREME_LINK": "unlimited"}, link)["BIREME_LINK"] == "20mbit"
    assert slowed_link({"BIREME_LINK": "1gbit"}, ()) == {"BIREME_LINK": "1gbit"}
    assert slowed_link({}, ()) == {}
