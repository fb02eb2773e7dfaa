"""Works out the ledgers off the training path: every few steps a background thread learns from the other ranks how
long each collective took them, divides the step, and hands everything to rank 0."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import orjson
import torch

from bireme import ledger
from bireme.channel import Channel, PeerTimeout
from bireme.ledger import LEAVE_TOGETHER, Span
from bireme.observe.groups import LateGroups
from bireme.observe.host import HostClock, TrafficCounter
from bireme.observe.phases import Observation
from bireme.observe.reports import assemble, memory, notable_pauses, step_report
from bireme.observe.tracing import Tracer

log = logging.getLogger(__name__)

_UNKNOWN = torch.iinfo(torch.int64).max
_LATE_FINISH_S = 2.0  # how long to wait for the finish of a collective after its step has ended
_ALONE_S = 5.0  # that a rank waits for the others at its end without a word
_MEANWHILE_S = 2.0  # steps are handed over at least this often, so that a reader is never far behind
_HOST_EVERY_NS = 5_000_000_000


class _GivenUp(RuntimeError):
    """All ranks stop together, since one of them has a problem."""


class Exchange(threading.Thread):
    """The background half of the monitor on each rank.

    `groups` is the run's table of observed groups, the same on every rank: for each its member ranks, and the gloo
    side group that stands for it (None where this rank is not a member, or is the only one). `deliver(lines, events,
    samples)` is called on rank 0 with complete step records. `traffic` is given on the rank that counts its node's
    bytes, `tracer` on every rank where steps are traced. An error ends the exchange, never the training: it is kept in
    `failure` and logged once.
    """

    def __init__(
        self,
        channel: Channel,
        groups: list[tuple[list[int], Any]],
        every: int,
        resolve: Callable[[Observation], tuple[int, int, list[ledger.Segment]]],
        deliver: Callable[[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]], None],
        warnings: Callable[[], list[str]],
        queue_workers: int = 2,
        traffic: TrafficCounter | None = None,
        first_step: int = 1,
        late_groups: LateGroups | None = None,
        tracer: Tracer | None = None,
        given_up: Callable[[], None] = lambda: None,
    ):
        super().__init__(name="bireme-exchange", daemon=True)
        self.failure: str | None = None
        self._channel = channel
        self._groups = groups
        self._every = every
        self._resolve = resolve
        self._deliver = deliver
        self._warnings = warnings
        self.unshared_steps = 0  # steps of the rank that went furthest which others did not reach
        self._problem: str | None = None  # on this rank: all are told in the next round, and stop together
        self._notes: deque[dict[str, Any]] = deque()
        self._queue: deque[Observation] = deque()
        self._submitted = first_step - 1  # last step that the training thread ended
        self._done = first_step - 1  # last step handed over
        self._target = first_step  # hand over when this step has ended
        self._at_once = 0  # hand over when this step has ended, whatever the target
        self._mean_ns = int(_MEANWHILE_S * 1e9)  # of a step in the last window; one step a window at first
        self._closing = False
        self._give_up_at: float | None = None
        self._wake = threading.Event()
        self._queue_workers = queue_workers
        self._clocks = [ledger.QueueClock(queue_workers) for _ in groups]
        self._late = late_groups or LateGroups([])
        self._first_late = len(groups)  # from here on groups have no side group of their own
        self._shortest = ledger.ShortestSeen()
        self._carried: list[Span] = []
        self._traffic = traffic
        self._tracer = tracer
        self._given_up = given_up  # called, in this thread, when all ranks stop because one of them cannot go on
        self._host = HostClock()
        self._host_since = self._host_wall_ns = 0
        self._cpu_ns = 0
        channel.give_up = lambda: self._give_up_at is not None and time.monotonic() > self._give_up_at

    # --- called by the training thread ---

    def submit(self, observation: Observation) -> None:
        if self.failure is not None:  # nobody would ever take it out of the queue
            return
        self._queue.append(observation)
        self._submitted = observation.step
        if observation.step >= self._target or observation.step == self._at_once:
            self._wake.set()

    def hand_over(self, step: int) -> None:
        """The steps up to this one go to the record as soon as it has ended: every rank asks for the same one."""
        self._at_once = step
        if self._submitted >= step:
            self._wake.set()

    def begin(self) -> None:
        """The first step begins: what the host took before is nobody's, and what the network carried."""
        self._host.taken_ns()
        if self._traffic is not None:
            self._traffic.mark(self._submitted)
            self._traffic.take()

    def give_up_on(self, problem: str) -> None:
        """Observing has failed on this rank: all ranks stop it, in the next round."""
        log.warning("measuring stops, training goes on: %s", problem)
        self._problem = problem
        self._wake.set()

    def note(self, event: dict[str, Any]) -> None:
        """An event that goes to the record with the next steps."""
        self._notes.append(event)

    def finish(self, within_s: float) -> bool:
        """Hands over what is left and ends; False when the other ranks did not answer in time. May be called again
        with a shorter time."""
        deadline = time.monotonic() + within_s
        self._give_up_at = min(deadline, self._give_up_at or deadline)
        self._closing = True
        self._wake.set()
        if self.is_alive():
            self.join(min(_ALONE_S, within_s + 2.0))
        if self.is_alive() and within_s > _ALONE_S:
            log.warning(
                "rank %d has ended its loop after step %d and waits for ranks that have not",
                *(self._channel.rank, self._submitted),
            )
            self.join(within_s + 2.0 - _ALONE_S)
        return not self.is_alive() and self.failure is None

    def release(self) -> None:
        """Lets go of the groups, once it has ended."""
        if not self.is_alive():
            self._groups = []

    # --- the thread ---

    def run(self) -> None:
        try:
            self._cpu_ns = time.thread_time_ns()
            while not self._round():
                pass
        except PeerTimeout as error:
            # Said by whoever closes: at the end of an interrupted run this is expected.
            self.failure = str(error)
        except _GivenUp as error:
            self.failure = str(error)
            self._given_up()
            if self._problem is None and self._channel.rank == 0:  # the rank that has a problem has said so
                self._say(f"measuring has stopped, training goes on: {error}")
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            if not self._closing:
                self._say(f"measuring has stopped, training goes on: {self.failure}")
        finally:
            self._queue.clear()
            self._channel.give_up = lambda: False

    def _say(self, message: str) -> None:
        log.warning("%s", message)
        if self._channel.rank == 0:  # at once: no exchange will carry it
            with suppress(Exception):
                self._deliver([], [{"event": "warning", "ranks": [0], "message": message}], [])

    def _round(self) -> bool:
        """One exchange; True when every rank has closed."""
        while (
            not self._closing
            and self._problem is None
            and self._submitted < self._target
            and not self._done < self._at_once <= self._submitted
        ):
            self._wake.wait()
            self._wake.clear()
        closing = self._closing  # read before the step: a step submitted before closing must be in this round
        last = self._submitted
        if self._traffic is not None:
            self._traffic.mark(last)  # before waiting for others: the next step's bytes are on their way
        healthy = self._problem is None
        found = self._late.found()  # after the step was read: those of all steps up to it are among them
        upto, most, all_closing, all_healthy, mean_ns, most_found = self._channel.reduce_min(
            torch.tensor([last, -last, int(closing), int(healthy), self._mean_ns, -len(found)])
        ).tolist()
        if not all_healthy:
            raise _GivenUp(self._problem or "another rank cannot go on")
        if most_found:
            self._add_groups(found)
        # The same on every rank: the next time that all hand over.
        self._target = upto + max(1, min(self._every, round(_MEANWHILE_S * 1e9 / mean_ns)))
        if self._tracer is not None:
            self._target = self._tracer.target(upto, self._target)
        if upto > self._done or all_closing:
            if self._tracer is not None:
                self._tracer.measure(self._done, upto)
            self._hand_over(upto, bool(all_closing))
        elif closing and not all_closing:
            time.sleep(0.05)  # this rank is done and others are not
        if all_closing:
            self.unshared_steps = -most - upto
        return bool(all_closing)

    def _hand_over(self, upto: int, last: bool) -> None:
        """All ranks do, for the same steps: at least one, but for the `last` time, when there may be none left."""
        window = []
        while self._queue and self._queue[0].step <= upto:
            window.append(self._queue.popleft())
        resolved = [self._resolve(observation) for observation in window]
        if window:
            self._await_finishes(window)
            self._split(window)
        blob = b""
        try:
            report = self._report(window, resolved)
            if window:
                self._mean_ns = max(1, report["wall_ns"] // len(window))
            if last:
                report["events"].append(memory(self._channel.rank))
            blob = orjson.dumps(report)
        except Exception as error:  # the others are about to gather: they must not wait for this rank
            self._fail(error)
        parts = self._channel.gather(blob)
        if parts and all(parts):
            try:
                reports = [orjson.loads(part) for part in parts]
                self._deliver(*assemble(reports))
                if self._tracer is not None:
                    self._tracer.deliver([report["trace"] for report in reports])
            except Exception as error:
                self._fail(error)
        self._done = upto

    def _fail(self, error: Exception) -> None:
        self._problem = f"rank {self._channel.rank}: {type(error).__name__}: {error}"
        log.warning("measuring stops, training goes on: %s", self._problem)
        log.debug("measuring stops", exc_info=True)

    def _await_finishes(self, window: list[Observation]) -> None:
        deadline = time.monotonic() + _LATE_FINISH_S
        for observation in window:
            for span in observation.spans:
                while (
                    span.seen and span.finish_ns is None and time.monotonic() < deadline and not self._channel.give_up()
                ):
                    time.sleep(0.002)

    def _add_groups(self, found: list[dict[str, Any]]) -> None:
        """Groups made after the monitor join the table, the same on every rank; all ranks call this at once."""
        table = sorted(
            (each for gathered in self._channel.all_gather(found) for each in gathered),
            key=lambda each: (each["id"], each["ranks"]),
        )
        new = self._late.joined(found, table)
        for description in new:
            self._groups.append((description["ranks"], None))
            self._clocks.append(ledger.QueueClock(self._queue_workers))

    def _split(self, window: list[Observation]) -> None:
        """Sets `duration_ns` and `transfer_ns` of the window's spans; transfer stays None where members disagree."""
        by_group: list[list[Span]] = [[] for _ in self._groups]
        for observation in window:
            for span in observation.spans:
                span.group = self._late.index_of(span.group)
                by_group[span.group].append(span)
        ordered = [self._in_order(spans, clock) for spans, clock in zip(by_group, self._clocks, strict=True)]
        for index, (members, side_group) in enumerate(self._groups[: self._first_late]):
            if self._channel.rank not in members:
                continue
            if len(members) == 1:
                agreed = [(span.duration_ns, span.duration_ns is not None) for span in ordered[index]]
            else:
                agreed = self._agree([ordered[index]], side_group)[0]
            self._divide(by_group[index], ordered[index], agreed)
        if len(self._groups) > self._first_late:
            late = range(self._first_late, len(self._groups))
            for index, agreed in zip(late, self._agree([ordered[index] for index in late]), strict=True):
                self._divide(by_group[index], ordered[index], agreed)

    @staticmethod
    def _in_order(spans: list[Span], clock: ledger.QueueClock) -> list[Span]:
        """Sets their own durations; those that every member sees, in the group's order."""
        ordered = sorted((span for span in spans if span.sequence >= 0), key=lambda span: span.sequence)
        for span in ordered:
            if span.finish_ns is not None:
                span.duration_ns = clock.duration_ns(span.issue_ns, span.finish_ns)
        for span in spans:
            if span.sequence < 0 and span.finish_ns is not None:  # send and receive have no queue in gloo
                span.duration_ns = max(0, span.finish_ns - span.issue_ns)
        return ordered

    def _divide(self, spans: list[Span], ordered: list[Span], agreed: list[tuple[int | None, bool]]) -> None:
        for span, (shortest_ns, matched) in zip(ordered, agreed, strict=False):
            if matched and span.duration_ns is not None:
                if span.operation in LEAVE_TOGETHER:
                    span.transfer_ns = shortest_ns
                else:
                    span.transfer_ns = self._shortest.transfer_ns(span, span.duration_ns)
        for span in spans:
            if span.sequence < 0 and span.duration_ns is not None:
                span.transfer_ns = self._shortest.transfer_ns(span, span.duration_ns)

    def _taken_by_host(self, window: list[Observation], wall_ns: int) -> list[dict[str, Any]]:
        """What a quota or the hypervisor took, where it matters; read every few seconds, as /proc/stat is slow."""
        self._host_since = self._host_since or window[0].step
        self._host_wall_ns += wall_ns
        if self._host_wall_ns < _HOST_EVERY_NS and not self._closing:
            return []
        throttled_ns, steal_ns = self._host.taken_ns()
        first_step, wall_ns = self._host_since, self._host_wall_ns
        self._host_since = self._host_wall_ns = 0
        if max(throttled_ns, steal_ns) * 100 < wall_ns:
            return []
        return [
            {
                "event": "host",
                "rank": self._channel.rank,
                "first_step": first_step,
                "last_step": window[-1].step,
                "wall_ms": round(wall_ns / 1e6, 3),
                "throttled_ms": round(throttled_ns / 1e6, 3),
                "steal_ms": round(steal_ns / 1e6, 3),
            }
        ]

    def _agree(self, ordered: list[list[Span]], side_group: Any = None) -> list[list[tuple[int | None, bool]]]:
        """For each span of each of these groups: the shortest duration among the members, and whether all of them mean
        the same collective.

        The members' side group agrees on one group at a time. Groups without one are agreed on by all ranks together:
        who is no member says what no minimum takes.
        """
        groups = self._groups[self._first_late :] if side_group is None else []
        outside = [self._channel.rank not in members for members, _ in groups] or [False]
        counts = self._channel.reduce_min(torch.tensor([-len(spans) for spans in ordered]), side_group).tolist()
        mine: list[tuple[int, int, int]] = []
        for spans, count, foreign in zip(ordered, counts, outside, strict=True):
            rows = [
                (_UNKNOWN, 0, 0)
                if span.duration_ns is None
                else (span.duration_ns, key := ledger.match_key(span), -key)
                for span in spans
            ]
            # As many as the member with the most; missing ones cannot match.
            missing = (_UNKNOWN, _UNKNOWN, _UNKNOWN) if foreign else (_UNKNOWN, 0, 0)
            mine += rows + [missing] * (-count - len(rows))
        if not mine and side_group is None:
            return [[] for _ in ordered]
        # Made at once from lists: setting a tensor's elements one by one costs more than all the rest.
        table = torch.tensor([[each[column] for each in mine] for column in range(3)], dtype=torch.int64)
        durations, keys, negated = self._channel.reduce_min(table, side_group).tolist()
        all_rows = [
            (duration, key > 0 and key == -minus) for duration, key, minus in zip(durations, keys, negated, strict=True)
        ]
        agreed, taken = [], 0
        for spans, count in zip(ordered, counts, strict=True):
            agreed.append(all_rows[taken : taken + len(spans)])
            taken -= count
        return agreed

    def _report(
        self, window: list[Observation], resolved: list[tuple[int, int, list[ledger.Segment]]]
    ) -> dict[str, Any]:
        """What this rank tells rank 0 about the window."""
        steps = []
        events: list[dict[str, Any]] = []
        for observation, (start_ns, end_ns, segments) in zip(window, resolved, strict=True):
            spans = self._carried + observation.spans
            account = ledger.account(start_ns, end_ns, segments, spans, observation.step)
            if self._tracer is not None:
                self._tracer.add(observation, start_ns, end_ns, segments, spans)
            self._carried = [span for span in spans if span.transfer_ns is not None and _ends_after(span, end_ns)]
            steps.append(step_report(observation, account))
            events.extend(notable_pauses(observation, self._channel.rank))
        wall_ns = sum(end_ns - start_ns for start_ns, end_ns, _ in resolved)
        if window:
            events.extend(self._taken_by_host(window, wall_ns))
        if self._traffic is not None and (carried := self._traffic.take()) is not None:
            events.append(carried)
        cpu_ns = time.thread_time_ns()
        for step in steps:  # this thread's own cost since the last window, spread evenly
            step["overhead_ns"] = [step["overhead_ns"], (cpu_ns - self._cpu_ns) // len(steps)]
        self._cpu_ns = cpu_ns
        while self._notes:
            events.append(self._notes.popleft())
        # A message may quote a file name that is not UTF-8.
        warnings = [each.encode("utf-8", "backslashreplace").decode() for each in self._warnings()]
        report = {"steps": steps, "events": events, "warnings": warnings, "wall_ns": wall_ns}
        if self._tracer is not None:
            warnings.extend(self._tracer.take_warnings())
            report["trace"] = self._tracer.take()
        return report


def _ends_after(span: Span, end_ns: int) -> bool:
    return span.finish_ns is not None and span.finish_ns > end_ns
