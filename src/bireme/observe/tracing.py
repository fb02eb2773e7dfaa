"""The trace of chosen steps: what every rank saw of them, and how its clock compares with rank 0's (docs/trace.md)."""

import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import orjson
import torch
import torch.distributed as dist

from bireme.channel import Channel, PeerTimeout
from bireme.ledger import Segment, Span
from bireme.observe.clocks import Ping, Reading, estimate, from_rank_0
from bireme.observe.phases import Observation
from bireme.observe.trace_steps import MOST_BYTES, stretches

log = logging.getLogger(__name__)

_PINGS = 10
_BEFORE_STEPS = 2  # the clocks are read when a step that comes so long before a traced one has ended
_ANSWER_WITHIN = timedelta(seconds=60)

Record = Callable[[list[dict[str, Any]]], None]


class Tracer:
    """What the exchange does for the trace, on each rank; the steps are the same on all of them.

    `steps`: those to trace, sorted. `record` is called on rank 0, in the exchange's thread, with lines of trace.jsonl.
    `now_ns`: the clock that the observations' times are of. A trace that fails or finds no more room ends, with a
    warning; only ranks that do not answer a ping end the exchange, as they would everywhere else.
    """

    def __init__(
        self,
        channel: Channel,
        steps: Sequence[int],
        record: Record,
        now_ns: Callable[[], int] = time.perf_counter_ns,
        most_bytes: int = MOST_BYTES,
    ):
        self._channel = channel
        self._steps = frozenset(steps)
        # A look at the clocks before each stretch of them, and right after it.
        self._looks = [look for first, last in stretches(sorted(steps)) for look in (first - _BEFORE_STEPS, last)]
        self._record: Record | None = record
        self._now_ns = now_ns
        self._room_bytes = most_bytes // channel.size  # of each rank: nobody needs to know of the others
        self._full = False
        self._lines: list[orjson.Fragment] = []
        self._readings: list[tuple[int, Reading]] = []  # (rank, its clock against this one's)
        self._measured_step = 0
        self._warnings: list[str] = []

    # --- clocks: every rank calls these with the same steps ---

    def target(self, done: int, target: int) -> int:
        """When to hand over next, after `done`, at `target` at the latest."""
        return min([target, *(look for look in self._looks if look > done)])

    def measure(self, done: int, upto: int) -> None:
        """Compares the clocks where steps after `done`, or soon after `upto`, are traced."""
        near = any(done < step <= upto + _BEFORE_STEPS for step in self._steps)
        if not near or self._channel.size == 1:
            return
        self._measured_step = upto
        rank, stage = self._channel.rank, 1
        while stage < self._channel.size:
            if rank & stage:
                self._answer(rank - stage)
                return
            if rank + stage < self._channel.size:
                self._readings.append((rank + stage, self._ask(rank + stage)))
            stage *= 2

    def _ask(self, rank: int) -> Reading:
        question = torch.zeros(1, dtype=torch.int64)
        answer = torch.zeros(2, dtype=torch.int64)
        pings = []
        for _ in range(_PINGS):
            sent_ns = self._now_ns()
            sending = dist.isend(question, rank, group=self._channel.group)
            self._receive(answer, rank)
            returned_ns = self._now_ns()
            _finish(sending, rank)
            received_ns, answered_ns = answer.tolist()
            pings.append(Ping(sent_ns, received_ns, answered_ns, returned_ns))
        return estimate(pings)

    def _answer(self, rank: int) -> None:
        question = torch.zeros(1, dtype=torch.int64)
        for _ in range(_PINGS):
            self._receive(question, rank)
            received_ns = self._now_ns()
            answer = torch.tensor([received_ns, 0])
            answer[1] = self._now_ns()
            _finish(dist.isend(answer, rank, group=self._channel.group), rank)

    def _receive(self, tensor: torch.Tensor, rank: int) -> None:
        _finish(dist.irecv(tensor, rank, group=self._channel.group), rank)

    # --- steps ---

    def add(
        self, observation: Observation, start_ns: int, end_ns: int, segments: list[Segment], spans: list[Span]
    ) -> None:
        """Keeps the step if it is a chosen one. `spans`: all that its ledger was made of."""
        if observation.step not in self._steps or self._full:
            return
        try:
            line = _step_line(observation, self._channel.rank, start_ns, end_ns, segments, spans)
        except Exception as error:
            self._end(error)
            return
        self._room_bytes -= len(line)
        if self._room_bytes < 0:
            self._full = True
            self._warnings.append(f"the trace ends before step {observation.step}: it has no more room (docs/trace.md)")
            return
        self._lines.append(orjson.Fragment(line))

    def take(self) -> dict[str, Any]:
        """What this rank tells rank 0, since the last time."""
        lines, self._lines = self._lines, []
        readings, self._readings = self._readings, []
        return {
            "lines": lines,
            "clocks": [[rank, each.at_ns, each.offset_ns, each.error_bound_ns] for rank, each in readings],
        }

    def take_warnings(self) -> list[str]:
        warnings, self._warnings = self._warnings, []
        return warnings

    def deliver(self, told: list[dict[str, Any]]) -> None:
        """On rank 0: what all ranks have told, to the record."""
        lines = [line for each in told for line in each["lines"]]
        measured = {rank: Reading(*numbers) for each in told for rank, *numbers in each["clocks"]}
        if measured:
            known = from_rank_0(measured)
            rows = [[rank, each.at_ns, each.offset_ns, each.error_bound_ns] for rank, each in known.items()]
            lines.append({"step": self._measured_step, "clocks": rows})
        if not lines or self._record is None:
            return
        try:
            self._record(lines)
        except Exception as error:
            self._record = None
            self._end(error)

    def _end(self, error: Exception) -> None:
        self._full = True
        message = f"the trace ends, training and measuring go on: {type(error).__name__}: {error}"
        log.warning("%s", message)
        self._warnings.append(message)


def _step_line(
    observation: Observation, rank: int, start_ns: int, end_ns: int, segments: list[Segment], spans: list[Span]
) -> bytes:
    return orjson.dumps(
        {
            "step": observation.step,
            "rank": rank,
            "start_ns": start_ns,
            "end_ns": end_ns,
            "segments": [[each.phase, each.start_ns, each.end_ns, each.cpu_ns, each.run_delay_ns] for each in segments],
            "spans": [_span_row(span) for span in spans],
            "pauses": [[*interval, generation] for interval, generation, _ in observation.pauses],
        }
    )


def _span_row(span: Span) -> list[Any]:
    return [
        *(span.group, span.sequence, span.operation, span.bytes),
        *(span.issue_ns, span.finish_ns, span.duration_ns, span.transfer_ns),
        *(span.waits, span.origin, span.side, span.step),
    ]


def _finish(work: Any, rank: int) -> None:
    # Not in short turns, as `Channel.wait` does: gloo closes its connections when a send or receive is given up.
    try:
        work.wait(_ANSWER_WITHIN)
    except RuntimeError as error:
        if "timed out" not in str(error).lower():
            raise
        raise PeerTimeout(f"rank {rank} did not answer a ping in {_ANSWER_WITHIN.total_seconds():.0f} s") from None
