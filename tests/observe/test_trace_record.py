"""The trace while a run goes on: what is recorded of chosen steps, and clocks that are compared between real ranks."""

import queue
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import Mock, patch

import orjson
import pytest
import torch
import torch.distributed as dist
from torch import nn

from bireme.channel import Channel
from bireme.ledger import PHASES, Segment, Span
from bireme.observe import monitor as monitor_module
from bireme.observe import tracing
from bireme.observe.clocks import Reading, from_rank_0
from bireme.observe.collectives import hooks_missing
from bireme.observe.exchange import Exchange
from bireme.observe.monitor import Monitor
from bireme.observe.phases import Observation
from bireme.observe.tracing import Tracer
from bireme.record import RunWriter
from bireme.replicas import replicate
from bireme.report.trace import trace_of
from bireme.report.trace_clock import places
from bireme.run_reader import TRACE_FILE, Run, read_run
from bireme.trace_reader import read_trace

if TYPE_CHECKING:
    from tests.trace_checks import check_schema, check_sums, check_tiling, sums_ns
else:
    from trace_checks import check_schema, check_sums, check_tiling, sums_ns

Ranks = Callable[..., list[Any]]

needs_hooks = pytest.mark.skipif(hooks_missing() is not None, reason=str(hooks_missing()))

S = 1_000_000_000
FORWARD = PHASES.index("forward")


class FakeClock:
    """This machine's clock, `ahead_ns` ahead and too fast by `ppm`; what it shows can be told from the true time."""

    def __init__(self, ahead_ns: int, ppm: float):
        self._ahead_ns, self._ppm, self._since_ns = ahead_ns, ppm, time.perf_counter_ns()

    def shows(self, true_ns: int) -> int:
        return true_ns + self._ahead_ns + round((true_ns - self._since_ns) * self._ppm * 1e-6)

    def now_ns(self) -> int:
        return self.shows(time.perf_counter_ns())


def facts_of(size: int) -> dict[str, Any]:
    ranks = list(range(size))
    return {
        "world_size": size,
        "nodes": [{"name": "here", "ranks": ranks}],
        "groups": [{"name": "world", "ranks": ranks}],
    }


def nowhere(_: list[dict[str, Any]]) -> None:
    """Nothing is recorded."""


def resolve(observation: Observation) -> tuple[int, int, list[Segment]]:
    """A step that is one phase, with its times in the marks."""
    (phase, start_ns), end_ns = observation.boundaries[0], observation.end
    return start_ns, end_ns, [Segment(phase, start_ns, end_ns, (end_ns - start_ns) // 3)]


def run_steps(
    directory: Path,
    channel: Channel,
    clock: FakeClock,
    steps: int,
    traced: list[int],
    record: Callable[[list[dict[str, Any]]], None] | None = None,
    **more: Any,
) -> dict[int, int]:
    """Steps of 20 ms with one all-reduce each, by this clock, exchanged and recorded; the true time of each issue."""
    writer = RunWriter(directory, facts_of(channel.size)) if channel.rank == 0 else None

    def deliver(lines: list[dict[str, Any]], events: list[dict[str, Any]], _: list[dict[str, Any]]) -> None:
        assert writer is not None
        writer.steps(lines)
        for event in events:
            writer.event(event.pop("event"), **event)

    tracer = Tracer(channel, traced, record or (writer.trace if writer else nowhere), now_ns=clock.now_ns, **more)
    groups = [(list(range(channel.size)), channel.group)]
    exchange = Exchange(channel, groups, 3, resolve, deliver, list, tracer=tracer)
    exchange.start()
    issued = {}
    start_ns = clock.now_ns()
    for step in range(1, steps + 1):
        time.sleep(0.02)
        issued[step] = time.perf_counter_ns()
        if channel.distributed:
            dist.all_reduce(torch.zeros(8))
        issue_ns, finish_ns = clock.shows(issued[step]), clock.now_ns()
        span = Span(0, step, "all_reduce", 32, issue_ns, finish_ns, waits=[(issue_ns, finish_ns)], step=step)
        end_ns = clock.now_ns()
        observation = Observation(step, [(FORWARD, start_ns)], end_ns, [span], [((issue_ns, issue_ns + 1), 0, FORWARD)])
        exchange.submit(observation)
        start_ns = end_ns
    assert exchange.finish(30.0), exchange.failure
    if writer is not None:
        writer.finish("finished")
        writer.close()
    return issued


# --- clocks of real ranks ----------------------------------------------------------------------------------------


def train_with_a_fake_clock(rank: int, _size: int, directory: Path) -> dict[int, int]:
    clock = FakeClock(3 * S, 100.0) if rank == 1 else FakeClock(0, 0.0)
    return run_steps(directory, Channel(), clock, 30, list(range(8, 22)))


def test_arrivals_of_a_rank_with_another_clock_are_where_they_were(ranks: Ranks, tmp_path: Path) -> None:
    """Field report B63: rank 1's clock is 3 s ahead and 100 ppm fast. All ranks here are on one machine, so the truth
    is known: what the bound promises must hold, and without the offsets it must not."""
    issued = ranks(2, train_with_a_fake_clock, tmp_path / "run")
    trace = read_trace(tmp_path / "run")
    assert sorted({each.step for each in trace.steps}) == list(range(8, 22))
    assert trace.damaged_lines == 0 and len(trace.steps) == 28
    assert min(step for step, _ in trace.clocks) < 8 and max(step for step, _ in trace.clocks) >= 21
    placed = places(trace)
    own_ns = {(each.rank, each.step): each.spans[-1].issue_ns for each in trace.steps}
    for step in range(8, 22):
        true_ns = issued[1][step] - issued[0][step]
        merged_ns = own_ns[1, step] + placed[1, step].shift_ns - own_ns[0, step] - placed[0, step].shift_ns
        bound_ns = (placed[0, step].error_bound_ns or 0) + (placed[1, step].error_bound_ns or 0)
        assert 0 < bound_ns < 0.5 * S  # else it would say nothing
        assert abs(merged_ns - true_ns) <= bound_ns + 4
        assert abs(own_ns[1, step] - own_ns[0, step] - true_ns) > bound_ns
    drift_ppm = [each["drift_ppm"] for each in trace_of(trace)["otherData"]["clocks"]]
    assert drift_ppm[0] == 0.0 and len(drift_ppm) == 2


def ahead_of(rank: int) -> int:
    return (0, 5, -5, 3)[rank] * S


def compare_clocks(rank: int, _size: int) -> list[list[int]]:
    tracer = Tracer(Channel(), [2], nowhere, now_ns=FakeClock(ahead_of(rank), 0.0).now_ns)
    tracer.measure(5, 9)  # nothing is traced there: nobody is asked
    assert tracer.take()["clocks"] == []
    tracer.measure(0, 1)
    rows: list[list[int]] = tracer.take()["clocks"]
    return rows


def test_ranks_are_compared_along_a_tree(ranks: Ranks) -> None:
    told = ranks(4, compare_clocks)
    assert [[row[0] for row in rows] for rows in told] == [[1, 2], [], [3], []]
    known = from_rank_0({rank: Reading(*numbers) for rows in told for rank, *numbers in rows})
    assert sorted(known) == [1, 2, 3]
    for rank, reading in known.items():
        assert abs(reading.offset_ns - ahead_of(rank)) <= reading.error_bound_ns < S


class FakeNetwork:
    """Sends and receives between threads that are ranks; a group is the number of the rank that uses it."""

    def __init__(self, size: int):
        self._queues = {(a, b): queue.Queue[list[int]]() for a in range(size) for b in range(size)}

    def isend(self, tensor: torch.Tensor, to: int, group: int) -> Mock:
        self._queues[group, to].put(tensor.tolist())
        return Mock()

    def irecv(self, tensor: torch.Tensor, source: int, group: int) -> Mock:
        received = self._queues[source, group]
        return Mock(wait=lambda _: tensor.copy_(torch.tensor(received.get(timeout=30))))


def test_any_number_of_ranks_forms_a_tree() -> None:
    """Thirteen are no power of two. Nobody waits for ever, and every clock is told within its bound."""
    size = 13
    clocks = [FakeClock((rank * 7 % 11 - 5) * S, 0.0) for rank in range(size)]
    channels = [cast(Channel, SimpleNamespace(rank=rank, size=size, group=rank)) for rank in range(size)]
    tracers = [Tracer(channels[rank], [2], nowhere, now_ns=clocks[rank].now_ns) for rank in range(size)]
    with patch.object(tracing, "dist", FakeNetwork(size)), ThreadPoolExecutor(size) as pool:
        list(pool.map(lambda tracer: tracer.measure(0, 1), tracers, timeout=30))
    told = [row for tracer in tracers for row in tracer.take()["clocks"]]
    known = from_rank_0({rank: Reading(*numbers) for rank, *numbers in told})
    assert sorted(known) == list(range(1, size))
    for rank, reading in known.items():
        true_ns = clocks[rank].shows(0) - clocks[0].shows(0)
        assert abs(reading.offset_ns - true_ns) <= reading.error_bound_ns < S


# --- what is recorded --------------------------------------------------------------------------------------------


def alone(directory: Path, traced: list[int], **more: Any) -> Run:
    """One rank without a process group."""
    run_steps(directory, Channel(), FakeClock(0, 0.0), 8, traced, **more)
    return read_run(directory)


def lines_of(directory: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in (directory / TRACE_FILE).read_bytes().splitlines()]


def test_chosen_steps_are_recorded_as_their_ledger_saw_them(tmp_path: Path) -> None:
    run = alone(tmp_path / "run", [2, 5, 6])
    trace = read_trace(tmp_path / "run")
    assert [each.step for each in trace.steps] == [2, 5, 6]
    for each in trace.steps:
        line = run.steps[each.step - 1]
        assert (each.start_ns, each.end_ns) == (line["start_ns"][0], line["end_ns"][0])
        assert [span.step for span in each.spans][-1] == each.step
        assert each.spans[-1].transfer_ns is not None and len(each.spans[-1].waits) == 1
        assert each.pauses == [(each.spans[-1].issue_ns, each.spans[-1].issue_ns + 1, 0)]
    assert {line["attempt"] for line in lines_of(tmp_path / "run")} == {1}


def test_without_chosen_steps_there_is_no_file(tmp_path: Path) -> None:
    assert len(alone(tmp_path / "run", []).steps) == 8
    assert not (tmp_path / "run" / TRACE_FILE).exists()


def test_a_trace_without_room_ends_with_a_warning(tmp_path: Path) -> None:
    """Field report B61: the cap stops the trace, never the run."""
    run = alone(tmp_path / "run", list(range(1, 9)), most_bytes=800)
    traced = [each.step for each in read_trace(tmp_path / "run").steps]
    assert traced == list(range(1, len(traced) + 1)) and 1 <= len(traced) < 8
    assert (tmp_path / "run" / TRACE_FILE).stat().st_size <= 800 + 20 * len(traced)  # and the attempt
    assert len(run.steps) == 8 and run.facts["status"] == "finished"
    warnings = [event for event in run.events if event["event"] == "warning"]
    said = f"the trace ends before step {len(traced) + 1}: it has no more room (docs/trace.md)"
    assert [(each["ranks"], each["message"]) for each in warnings] == [([0], said)]


def test_a_trace_that_cannot_be_written_ends_with_a_warning(tmp_path: Path) -> None:
    def fail(_: list[dict[str, Any]]) -> None:
        raise OSError("no space left")

    run = alone(tmp_path / "run", [2, 5, 6], record=fail)
    assert len(run.steps) == 8 and run.facts["status"] == "finished"
    messages = [event["message"] for event in run.events if event["event"] == "warning"]
    assert messages == ["the trace ends, training and measuring go on: OSError: no space left"]


def test_a_stretch_is_looked_at_before_and_after() -> None:
    tracer = Tracer(Channel(), [5, 20, 21, 22], nowhere)
    assert [tracer.target(done, done + 10) for done in (0, 3, 5, 17, 18, 22)] == [3, 5, 15, 18, 22, 32]


def test_resuming_drops_the_trace_of_steps_that_are_made_again(tmp_path: Path) -> None:
    alone(tmp_path / "run", [2, 5, 6])
    facts = facts_of(1)
    writer = RunWriter(tmp_path / "run", facts, resume_after=5)
    writer.trace([{"step": 9, "clocks": []}])
    writer.close()
    assert [(line["attempt"], line["step"]) for line in lines_of(tmp_path / "run")] == [(1, 2), (1, 5), (2, 9)]


# --- a real loop -------------------------------------------------------------------------------------------------


def train_traced(rank: int, size: int, directory: Path) -> None:
    """A DDP loop whose steps 4 to 6 are traced; rank 1 is late."""
    told: list[dict[str, Any]] = []

    def with_tracer(channel: Channel, *args: Any, **kwargs: Any) -> Exchange:
        return Exchange(channel, *args, **{**kwargs, "tracer": Tracer(channel, [4, 5, 6], told.extend)})

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 200), nn.GELU(), nn.Linear(200, 64))
    facts = {"nodes": facts_of(size)["nodes"]}
    with (
        patch.object(monitor_module, "Exchange", with_tracer),
        Monitor(directory, facts=facts, exchange_every=3, skip_steps=1) as monitor,
    ):
        replicas = replicate(model, True, 0.05)
        for _ in range(8):
            with monitor.step(tokens=16):
                with monitor.phase("forward"):
                    time.sleep(0.03 * rank)
                    loss = replicas.model(torch.randn(16, 64)).square().mean()
                with monitor.phase("backward"):
                    loss.backward()
                    replicas.reduce()
                replicas.zero()
    if rank == 0:
        with (directory / TRACE_FILE).open("wb") as file:
            file.writelines(orjson.dumps({"attempt": 1, **line}) + b"\n" for line in told)


@needs_hooks
def test_the_trace_of_a_real_run_gives_its_ledger_back(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, train_traced, tmp_path / "run")
    run, trace = read_run(tmp_path / "run"), read_trace(tmp_path / "run")
    assert trace.damaged_lines == 0
    content = orjson.loads(orjson.dumps(trace_of(trace)))
    check_schema(content)
    check_tiling(content)
    check_sums(sums_ns(content), run, [4, 5, 6])
    reduces = [e for e in content["traceEvents"] if e["ph"] == "X" and e["name"] == "all_reduce"]
    assert len(reduces) >= 6
    # Thirty milliseconds are far more than the clocks are unsure of, unless the machine is very busy.
    bound_ns = content["otherData"]["clock_error_bound_ns"]
    first = next(e for e in reduces if e["pid"] == 0 and e["args"]["step"] == 5)
    assert first["args"]["last_arriver"] == "rank 1" or bound_ns > 5_000_000
