"""The Monitor: follows a training loop and leaves a run directory with the ledger of every rank and step."""

import atexit
import itertools
import logging
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bireme.channel import Channel
from bireme.errors import SharedError, UserError, nearest
from bireme.ledger import PHASES, Segment
from bireme.observe.collectives import OPERATION_NAMES, CollectiveObserver, hooks_missing, process_groups
from bireme.observe.device import DeviceClock, DeviceCollectiveObserver
from bireme.observe.exchange import Exchange, side_groups
from bireme.observe.garbage import GarbageObserver
from bireme.observe.host import traffic_counter
from bireme.observe.phases import OTHER, Observation, Phase, PhaseTracker
from bireme.observe.thread import ThreadClock
from bireme.observe.watch import HangWatch
from bireme.record import RunWriter, utc_now
from bireme.verdict.live import LiveJudge
from bireme.world import introduce

log = logging.getLogger(__name__)

_CLOSE_WITHIN_S = 60.0
_LOOK_AGAIN_S = 0.2
_KEPT_WRITES = 10_000  # of a record that cannot be written: the oldest go first


class Monitor:
    """Accounts for every step of a training loop, on every rank.

        with Monitor("runs/mine", facts={...}) as monitor:
            for batch in monitor.batches(loader):
                with monitor.step(tokens=batch.numel()) as step:
                    with monitor.phase("forward"): ...
                    with monitor.phase("backward"): ...
                    with monitor.phase("optimizer"): ...
                    step.loss(loss)

    Made by every rank, on the thread that trains, after the process groups. A step lasts from the end of the one
    before to the end of its `with` block; time outside every phase is `other`. On the training path nothing is
    synchronised, exchanged or written: a background thread does that, on gloo groups of its own.

    directory: the run directory, made by rank 0; UserError on every rank when it exists already.
    facts: fields of run.json that the loop knows (docs/run-directory.md names them).
    channel: to share the side group, else one is made.
    exchange_every: hand the steps over at least this often. skip_steps: warm-up steps kept out of averages.
    on_steps: called on rank 0, in the background thread, with each window's step records and events.
    warnings: asked for this rank's new warnings, which travel to rank 0. device: "cuda" to follow the compute stream.
    first_step: the number of the first step; with `resume` the run that is in the directory goes on with it.
    stall_after_s: say who keeps the others waiting when a rank has not moved for so long; 0: never (docs/hangs.md).
    abort_after_s: end all ranks then, with exit code 70; 0: never. The first step may take longer.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        facts: dict[str, Any] | None = None,
        channel: Channel | None = None,
        exchange_every: int = 10,
        skip_steps: int = 3,
        on_steps: Callable[[list[dict[str, Any]], list[dict[str, Any]]], None] | None = None,
        warnings: Callable[[], list[str]] = list,
        device: str = "cpu",
        first_step: int = 1,
        resume: bool = False,
        stall_after_s: float = 30.0,
        abort_after_s: float = 0.0,
    ):
        self.directory = Path(directory)
        self._channel = channel or Channel()
        self._on_steps = on_steps
        self._step = first_step
        self._skip_upto = self._step - 1 + skip_steps
        self._closed = False
        self._closing = threading.Lock()
        self._writer: RunWriter | None = None
        self._writer_failure: str | None = None
        self._writing = threading.Lock()
        self._unwritten: deque[Callable[[RunWriter], None]] = deque(maxlen=_KEPT_WRITES)
        self._recorded = threading.Condition()
        self._recorded_step = self._step - 1
        self._said_not_finite = False

        observed = process_groups() if self._channel.distributed and hooks_missing() is None else []
        table, sides, mine = side_groups(self._channel, observed)
        self._clock: ThreadClock | DeviceClock = DeviceClock() if device == "cuda" else ThreadClock()
        missing = {
            "collectives": hooks_missing() if self._channel.distributed else None,
            "run_delay": self._clock.missing,
        }
        ranks, nodes = introduce(self._channel)  # always: every rank makes the same calls, whatever facts it was given
        self.missing = {what: why for what, why in missing.items() if why}
        facts = {"ranks": ranks, "nodes": nodes, **(facts or {})}
        self._open_run(
            {
                **facts,
                "world_size": self._channel.size,
                "groups": [{"name": each["name"], "ranks": each["ranks"]} for each in table],
                "missing": self.missing,
                "skip_steps": skip_steps,
                "first_step": first_step,
            },
            first_step - 1 if resume else None,
        )

        self._judge: LiveJudge | None = LiveJudge(
            {**facts, "groups": table, "world_size": self._channel.size, "missing": self.missing}
        )
        self._watch: HangWatch | None = None
        if self._channel.size > 1 and stall_after_s > 0:
            self._watch = HangWatch.start(
                self._channel,
                ranks,
                table,
                PHASES,
                OPERATION_NAMES,
                first_step,
                stall_after_s,
                abort_after_s,
                on_event=lambda event: self._deliver([], [{"event": "hang", "time_utc": utc_now(), **event}], []),
                on_abort=lambda reason: self.close("failed", reason, within_s=3.0),
            )
        position = self._watch.position if self._watch is not None else None
        self._position = position
        self._tracker = PhaseTracker(self._clock, position.enter if position is not None else None)
        self._phases = {name: Phase(self._tracker, index) for index, name in enumerate(PHASES)}
        self._pauses: list[tuple[tuple[int, int], int, int]] = []
        self._mark_ns = self._cost_of_a_mark()
        resolve = _resolve_thread
        if isinstance(self._clock, DeviceClock):
            self._collectives: CollectiveObserver = DeviceCollectiveObserver(mine, position)
            self._clock.observer = self._collectives
            resolve = self._clock.resolve
        else:
            self._collectives = CollectiveObserver(mine, position)
        self._garbage = GarbageObserver(self._paused)
        self._exchange = Exchange(
            self._channel,
            sides,
            exchange_every,
            resolve,
            self._deliver,
            warnings,
            queue_workers=1 if device == "cuda" else 2,  # NCCL has one queue, gloo two worker threads
            traffic=traffic_counter(facts["ranks"], self._channel.rank),
            first_step=self._step,
        )
        for why in self.missing.values():
            log.warning("%s", why)
        self._exchange.start()
        atexit.register(self._at_exit)
        self._observation = Observation(self._step, [])

    # --- the loop ---

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Iterates over `loader`; the time that it takes to give the next batch is `input`."""
        iterator = iter(loader)
        while True:
            with self.phase("input"):
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            yield batch

    def phase(self, name: str) -> Phase:
        """A `with` block that is one of the phases input, forward, backward, optimizer, checkpoint, other."""
        if not self._tracker.started:
            self._begin()
        if name not in self._phases:
            raise UserError(f"unknown phase {name!r}{nearest(name, PHASES)}: the phases are {', '.join(PHASES)}")
        return self._phases[name]

    def step(self, tokens: int = 0) -> "Step":
        """A `with` block whose end is the end of a step. `tokens`: this rank's distinct tokens in it."""
        if not self._tracker.started:
            self._begin()
        self._observation.tokens = tokens
        return Step(self, self._observation)

    def event(self, event: str, /, **fields: Any) -> None:
        """Adds an event to the run (rank 0; ignored on other ranks)."""
        if self._writer is None:
            return
        if self._exchange.is_alive():
            self._exchange.note({"event": event, "time_utc": utc_now(), **fields})
        else:  # it would take it nowhere any more
            self._write(lambda writer: writer.event(event, **fields))

    def alive(self) -> None:
        """Something long inside one phase goes on: nobody takes this rank for stuck (docs/hangs.md)."""
        if self._position is not None:
            self._position.alive()

    def failing(self, error: BaseException) -> None:
        """Tells the other ranks why this one is about to end, before it has written all that it has to write."""
        if self._watch is not None:
            interrupted = isinstance(error, (KeyboardInterrupt, SystemExit))
            self._watch.ended("interrupted" if interrupted else "raised", None if interrupted else error)

    def hand_over(self, step: int) -> None:
        """The steps up to this one go to the record as soon as it has ended; every rank asks for the same step."""
        self._exchange.hand_over(step)

    def wait_recorded(self, step: int, within_s: float) -> bool:
        """On rank 0: waits until the record has this step. Also True when there is no record to wait for."""
        deadline = time.monotonic() + within_s
        with self._recorded:
            while self._recorded_step < step and not self._closed and self._exchange.failure is None:
                if time.monotonic() > deadline or self._writer_failure is not None:
                    return False
                self._recorded.wait(_LOOK_AGAIN_S)  # an exchange that fails tells nobody
        return True

    def sync_record(self) -> None:
        """On rank 0: what was recorded so far survives also the machine. Raises OSError."""
        if self._writer is not None:
            self._writer.sync()

    def _begin(self) -> None:
        """The first step begins now: what was issued before it belongs to no step."""
        self._collectives.take()
        self._pauses.clear()
        self._exchange.begin()
        self._tracker.enter(OTHER)

    def _end_step(self) -> None:
        observation = self._observation
        if self._step <= self._skip_upto:
            observation.skipped = "warm-up"
        observation.boundaries, observation.end = self._tracker.cut()
        observation.spans = self._collectives.take()
        observation.pauses, self._pauses = self._pauses, []
        observation.overhead_ns = self._collectives.overhead_ns + self._tracker.marks * self._mark_ns
        self._collectives.overhead_ns = self._tracker.marks = 0
        self._step += 1
        self._collectives.step = self._step
        if self._position is not None:
            self._position.begin_step(self._step)
        self._observation = Observation(self._step, [])
        self._exchange.submit(observation)

    # --- the end ---

    def close(self, status: str = "finished", reason: str | None = None, within_s: float = _CLOSE_WITHIN_S) -> None:
        """Hands over the last steps, waiting at most `within_s` for the other ranks, and completes run.json."""
        with self._closing:  # the loop and the one who watches over a stuck loop may both close: the second waits
            if not self._closed:
                self._closed = True
                self._close(status, reason, within_s)

    def _close(self, status: str, reason: str | None, within_s: float) -> None:
        atexit.unregister(self._at_exit)
        if self._watch is not None:
            self._watch.ended("left" if status == "finished" else "interrupted")
        self._collectives.close()
        self._garbage.close()
        if self._collectives.failure:
            log.warning("collectives were not all observed: %s", self._collectives.failure)
        complete = self._exchange.finish(within_s)
        if not complete and status == "finished":
            reason = f"the last steps are not in the record: {self._exchange.failure or 'no answer in time'}"
            log.warning("%s", reason)
        elif self._exchange.unshared_steps and status == "finished":
            reason = f"{self._exchange.unshared_steps} more steps of some ranks are not in the record: others had ended"
            log.warning("%s", reason)
        if self._writer is not None:
            # Also after a failed write: a disk may have room for this much, and nobody should take the run for alive.
            with suppress(OSError):
                self._writer.finish(status, reason or self._writer_failure)
            self._writer.close()
        self._clock.close()
        if self._watch is not None:
            self._watch.close()

    def _at_exit(self) -> None:
        """A loop that never closed its monitor keeps its record, and its process ends as if there were none."""
        self.close("finished", "the monitor was not closed", within_s=5.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.failing(error)
        if kind is None:
            self.close()
        elif issubclass(kind, (KeyboardInterrupt, SystemExit)):
            self.close("interrupted", str(error) or "Ctrl-C", within_s=3.0)
        else:
            self.close("failed", f"{kind.__name__}: {error}", within_s=3.0)

    # --- inside ---

    def _open_run(self, facts: dict[str, Any], resume_after: int | None) -> None:
        """Rank 0 makes the run directory; what stands in the way of it is raised on every rank."""
        problem = None
        if self._channel.rank == 0:
            try:
                self._writer = RunWriter(self.directory, facts, resume_after)
            except UserError as error:
                problem = str(error)
            except OSError as error:
                problem = f"cannot write the run directory {self.directory}: {error.strerror or error}"
        problem = self._channel.all_gather(problem)[0]
        if problem:
            self._clock.close()
            raise SharedError(problem)

    def _write(self, action: Callable[[RunWriter], None]) -> None:
        """Writes, in order; what finds no room is kept and tried again the next time: a disk may be cleared."""
        if self._writer is None:
            return
        try:
            with self._writing:  # an event of the hang watch comes from a thread of its own
                self._unwritten.append(action)
                while self._unwritten:
                    self._unwritten[0](self._writer)
                    self._unwritten.popleft()
        except OSError as error:
            if self._writer_failure is None:
                self._writer_failure = error.strerror or str(error)
                why = f"cannot write to {self.directory}: {self._writer_failure}"
                log.error("%s; training goes on, what is to be recorded is kept and tried again", why)
            return
        if self._writer_failure is not None:
            log.warning("the record in %s is written again", self.directory)
            self._writer_failure = None

    def _deliver(
        self, lines: list[dict[str, Any]], events: list[dict[str, Any]], samples: list[dict[str, Any]]
    ) -> None:
        self._write(lambda writer: writer.steps(lines))
        if samples:
            self._write(lambda writer: writer.samples(samples))
        for line in lines:
            if "loss_reason" in line and not self._said_not_finite:
                self._said_not_finite = True
                log.warning(
                    "the loss is %s since step %d: is the learning rate too high?", line["loss_reason"], line["step"]
                )
        for event in events:
            fields = {name: value for name, value in event.items() if name != "event"}
            self._write(lambda writer, kind=event["event"], fields=fields: writer.event(kind, **fields))  # type: ignore[misc]
        if lines and not self._unwritten:
            with self._recorded:
                self._recorded_step = lines[-1]["step"]
                self._recorded.notify_all()
        events = [*events, *self._judged(lines, events)]
        if self._on_steps is not None:
            try:
                self._on_steps(lines, events)
            except Exception as error:  # nobody reads the console any more, or so: no reason to lose the record
                self._on_steps = None
                log.warning("the steps are not shown any more: %s: %s", type(error).__name__, error)

    def _judged(self, lines: list[dict[str, Any]], events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rank 0's verdicts on the last steps, as events; what goes wrong with them is no reason to lose the record."""
        if self._judge is None or not lines:
            return []
        try:
            verdicts = [change.as_event() for change in self._judge.add(lines, events)]
        except Exception as error:
            self._judge = None
            log.warning("no more verdicts while the run goes on: %s: %s", type(error).__name__, error)
            log.debug("no more verdicts", exc_info=True)
            return []
        for verdict in verdicts:
            fields = {name: value for name, value in verdict.items() if name != "event"}
            self._write(lambda writer, fields=fields: writer.event("verdict", **fields))  # type: ignore[misc]
            if self._on_steps is None:
                log.warning("%s", verdict["message"])
        return verdicts

    def _paused(self, start_ns: int, end_ns: int, generation: int) -> None:
        self._pauses.append(((start_ns, end_ns), generation, self._tracker.phase))

    def _cost_of_a_mark(self) -> int:
        costs = []
        for _ in range(50):
            start_ns = time.perf_counter_ns()
            self._clock.read()
            costs.append(time.perf_counter_ns() - start_ns)
        return int(statistics.median(costs))


class Step:
    """One step of the loop, while it lasts."""

    __slots__ = ("_monitor", "_observation")

    def __init__(self, monitor: Monitor, observation: Observation):
        self._monitor = monitor
        self._observation = observation

    def loss(self, mean: Any, tokens: int | None = None) -> None:
        """The step's mean loss on this rank: a number or a detached scalar tensor, read later and never here.

        `tokens`: how many it is the mean of; ranks are weighted by them. Without, every rank counts alike.
        """
        self._observation.loss = mean.detach() if hasattr(mean, "detach") else mean
        self._observation.loss_count = tokens

    def record(self, **facts: Any) -> None:
        """Numbers or scalar tensors that belong to the step's record (rank 0's are kept)."""
        self._observation.facts.update(facts)

    def samples(self, place: int, ids: Any) -> None:
        """Logs the ids of the samples that this rank trains on in this step; `place` orders the ranks' shares."""
        self._observation.samples = (place, [int(each) for each in ids])

    def skip(self, why: str) -> None:
        """Keeps this step out of averages, because something happened in it that training does not do."""
        self._observation.skipped = why

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._monitor._end_step()


def _resolve_thread(observation: Observation) -> tuple[int, int, list[Segment]]:
    """Start, end and segments of a step from the thread's clock readings."""
    marks = [*observation.boundaries, (0, observation.end)]
    segments = [
        Segment(phase, a[0], b[0], b[1] - a[1], b[2] - a[2]) for (phase, a), (_, b) in itertools.pairwise(marks)
    ]
    return marks[0][1][0], observation.end[0], segments
