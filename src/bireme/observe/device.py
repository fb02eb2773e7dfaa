"""The same observations on a GPU: CUDA events on the compute stream and on a side stream, nothing ever synchronised.

Not yet run on a GPU (docs/gpu.md). The timeline is the compute stream's: a mark is an event on it, and events are
resolved in the background thread, by polling. Nobody accounts for a stream as the kernel does for a thread, so all
time of forward, backward and optimizer that is not spent waiting for a collective counts as running.
"""

import time
from typing import Any

import torch

from bireme.ledger import Segment, Span
from bireme.observe.collectives import CollectiveObserver, unobserved_wait
from bireme.observe.phases import Observation
from bireme.observe.position import Position

_POLL_S = 0.001
_LATE_S = 600.0  # the host may be far ahead of the device


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _await(event: Any) -> bool:
    """Polls until the device has reached the event; False when it does not in time."""
    deadline = time.monotonic() + _LATE_S
    while not event.query():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


class DeviceClock:
    """Marks moments of the compute stream, and works out steps from them."""

    missing = "on a GPU idle gaps inside forward, backward and optimizer are not told from kernels"

    def __init__(self) -> None:
        self.observer: CollectiveObserver | None = None
        self._last: tuple[Any, int] | None = None

    def read(self) -> Any:
        return _event()

    def close(self) -> None:
        """Events need no closing."""

    def resolve(self, observation: Observation) -> tuple[int, int, list[Segment]]:
        """Start, end and segments of a step in the compute stream's time; also sets the times of its spans."""
        marks = [*observation.boundaries, (0, observation.end)]
        origin, origin_ns = self._last or (marks[0][1], 0)
        _await(observation.end)

        def time_ns(event: Any) -> int:
            # Milliseconds in single precision: counted from the step's start, they resolve well below a microsecond.
            return origin_ns + round(float(origin.elapsed_time(event)) * 1e6)

        times = [origin_ns]
        for _, event in marks[1:]:
            times.append(max(times[-1], time_ns(event)))
        segments = [
            Segment(phase, start, end, None) for (phase, _), start, end in zip(marks, times, times[1:], strict=False)
        ]
        self._last = (observation.end, times[-1])
        if isinstance(self.observer, DeviceCollectiveObserver):
            for span in observation.spans:
                self.observer.resolve(span, time_ns)
        return times[0], times[-1], segments


class DeviceCollectiveObserver(CollectiveObserver):
    """Issue, finish and waits of NCCL's collectives as events.

    NCCL's futures are done when the work is enqueued, so the finish is an event on a side stream that waits for it.
    """

    def __init__(self, groups: dict[int, Any], position: Position | None = None):
        self._side = torch.cuda.Stream()
        self._events: dict[int, tuple[Any, list[Any], list[tuple[Any, Any]]]] = {}
        super().__init__(groups, position)

    waits_to_the_end = False

    wait_begins = staticmethod(_event)

    def _note_issue(self, span: Span) -> None:
        self._events[id(span)] = (_event(), [], [])

    def _follow(self, work: Any, span: Span, async_op: bool, position: Position | None) -> None:
        with torch.cuda.stream(self._side):
            unobserved_wait(work)
            self._events[id(span)][1].append(_event())

    def _note_wait(self, span: Span, start: Any, end: Any) -> None:
        known = self._events.get(id(span))
        if known is not None:
            known[2].append((start, end))

    def resolve(self, span: Span, time_ns: Any) -> None:
        """Turns the span's events into times; its finish stays unknown when the device does not reach it in time."""
        issue, finish, waits = self._events.pop(id(span), (None, [], []))
        if issue is not None and finish and _await(finish[0]):
            span.issue_ns, span.finish_ns = time_ns(issue), time_ns(finish[0])
            span.waits = [(time_ns(start), time_ns(end)) for start, end in waits if start.query() and end.query()]
            if self._position is not None and span.sequence >= 0:
                self._position.finished(span.group, span.sequence)
