"""The Monitor: follows a training loop and leaves a run directory with the ledger of every rank and step."""

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, cast

import torch

from bireme.channel import COLLECTIVE_TIMEOUT_S, Channel
from bireme.errors import SharedError, UserError, nearest
from bireme.ledger import PHASES
from bireme.observe import leaving, nothing
from bireme.observe.collectives import OPERATION_NAMES, hooks_missing, process_groups
from bireme.observe.device import DeviceClock
from bireme.observe.exchange import Exchange
from bireme.observe.groups import LateGroups, side_groups
from bireme.observe.host import traffic_counter
from bireme.observe.options import check_options, path_of, restarted_after
from bireme.observe.own_facts import FlopsPerToken, device_of, given_flops, own_facts
from bireme.observe.phases import OTHER, Observation, Phase
from bireme.observe.recorder import Listener, Recorder
from bireme.observe.roll import call_the_roll
from bireme.observe.step import Step
from bireme.observe.trace_steps import check_amount, parse_steps
from bireme.observe.tracing import Tracer
from bireme.observe.training_thread import TrainingThread
from bireme.observe.watch import HangWatch
from bireme.record import utc_now
from bireme.text import one_line
from bireme.world import introduce

if TYPE_CHECKING:
    from bireme.metrics import MetricsServer

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_CLOSE_WITHIN_S = 60.0
_AT_EXIT_S = 5.0
_THE_SAME = ("phases", "exchange_every", "first_step", "resume", "stall_after_s", "abort_after_s", "trace_steps")
_NO_PHASE: AbstractContextManager[None] = nullcontext()


class Monitor:
    """Accounts for every step of a training loop, on every rank.

        monitor = bireme.Monitor("runs/mine", model=model, optimizer=optimizer)
        for batch in monitor.batches(loader):
            with monitor.step(tokens=batch.numel()):
                ...                                             # forward, backward, optimizer: as it was

    Made by every rank, on the thread that trains, after `init_process_group` (a rank that does not is named). A step
    lasts from the end of the one before to the end of its `with` block. On the training path nothing is synchronised,
    exchanged or written: a background thread does that, on gloo groups of its own. Results stay what they were, bit
    for bit, and an error in here ends the observing, never the training. docs/monitor.md.

    directory: the run directory, made by rank 0; UserError on every rank when it exists already.
    model, optimizer: one or a list. Phases are found through them (observe/automatic.py); UserError for what has no
        hooks. `phases="explicit"`: only what `monitor.phase(...)` marks counts.
    flops_per_token: a number, a function without arguments that returns one, or "count" to count them once, in the
        first step; not given, they come from a known config of the model and `sequence_length`; else MFU is n/a.
    facts: fields of run.json that the loop knows (docs/run-directory.md names them).
    channel: to share the side group, else one is made.
    exchange_every: hand the steps over at least this often. skip_steps: warm-up steps kept out of averages.
    on_steps: called on rank 0, in the background thread, with each window's step records and events.
    warnings: asked for this rank's new warnings, which travel to rank 0.
    device: "cuda" to follow the compute stream; not given, what the model's parameters are on.
    first_step: the number of the first step; with `resume` the run that is in the directory goes on with it.
    stall_after_s: say who keeps the others waiting when a rank has not moved for so long; 0: never (docs/hangs.md).
    abort_after_s: end all ranks then, with exit code 70; 0: never. The first step may take longer.
    metrics_port: rank 0 serves Prometheus metrics there, on `metrics_address` (docs/metrics.md).
    meet_within_s: how long to wait for the other ranks to make theirs; UserError on all of them when one does not.
    trace_steps: steps whose every span is kept for `bireme export trace`, as in "20:22" (docs/trace.md).
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        model: Any = None,
        optimizer: Any = None,
        phases: Literal["automatic", "explicit"] = "automatic",
        flops_per_token: FlopsPerToken = None,
        sequence_length: int | None = None,
        facts: dict[str, Any] | None = None,
        channel: Channel | None = None,
        exchange_every: int = 10,
        skip_steps: int = 3,
        on_steps: Listener | None = None,
        warnings: Callable[[], list[str]] = list,
        device: str | None = None,
        first_step: int = 1,
        resume: bool = False,
        stall_after_s: float = 30.0,
        abort_after_s: float = 0.0,
        metrics_port: int | None = None,
        metrics_address: str = "127.0.0.1",
        trace_steps: str = "",
        meet_within_s: float = COLLECTIVE_TIMEOUT_S,
    ):
        asked = {name: value for name, value in locals().items() if name != "self"}
        models, optimizers = _several(model), _several(optimizer)
        if phases == "automatic":
            nothing.end_others()
        if channel is None:
            call_the_roll(meet_within_s if isinstance(meet_within_s, int | float) else COLLECTIVE_TIMEOUT_S)
        self._own_channel = channel is None
        self._channel = channel or Channel()
        self._off = self._closed = False
        self._closing = threading.RLock()  # a signal handler may close while the loop does
        self._in_step = False
        self._said: set[str] = set()
        self._process = os.getpid()
        self._metrics: MetricsServer | None = None
        used = device_of(models, optimizers) if device is None else torch.device(device)
        self._thread = TrainingThread(used.type, self._turn_off)
        self._together(lambda: check_options(asked))
        self.directory = self._together(lambda: path_of(directory))
        self._channel.agree({name: asked[name] for name in _THE_SAME})
        if self._own_channel and not resume:
            last_step = restarted_after(self._channel, self.directory)
            if last_step is not None:
                first_step, resume = last_step + 1, True
        self._step = self._first_step = first_step
        self._optimizers = bool(optimizers)
        self._skip_upto = self._step - 1 + skip_steps
        count_flops = flops_per_token == "count"
        self._together(lambda: self._thread.find_phases(phases, models, optimizers, count_flops))
        observed = process_groups() if self._channel.distributed and hooks_missing() is None else []
        table, sides, mine = side_groups(self._channel, observed)
        missing = {
            "collectives": hooks_missing() if self._channel.distributed else None,
            "run_delay": self._thread.clock.missing,
        }
        # Always: every rank makes the same calls, whatever facts it was given.
        ranks, nodes = introduce(self._channel, device=used)
        flops = self._together(lambda: given_flops(models, flops_per_token, sequence_length))
        known = own_facts(self._channel, models, flops, used)
        self.missing = {what: why for what, why in missing.items() if why}
        facts = {
            "ranks": ranks,
            "nodes": nodes,
            **known,
            **(facts or {}),
            "world_size": self._channel.size,
            "groups": _groups_of(table),
            "missing": self.missing,
            "skip_steps": skip_steps,
            "first_step": first_step,
        }
        steps = self._together(lambda: self._steps_to_trace(trace_steps))
        self._recorder: Recorder | None = None
        self._open_run(facts, first_step - 1 if resume else None, on_steps, metrics_port, metrics_address)

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
        late = LateGroups(table, lambda table: self._learned(groups=_groups_of(table)))
        self._thread.observe(mine, late if observed else None, position)
        self._phases = {name: Phase(self._thread.tracker, index) for index, name in enumerate(PHASES)}
        self._exchange = Exchange(
            self._channel,
            sides,
            exchange_every,
            self._thread.resolve,
            self._deliver,
            warnings,
            queue_workers=1 if used.type == "cuda" else 2,  # NCCL has one queue, gloo two worker threads
            traffic=traffic_counter(facts["ranks"], self._channel.rank),
            first_step=self._step,
            late_groups=late,
            tracer=Tracer(self._channel, steps, self._record_trace) if steps else None,
            given_up=self._stop_watching,
        )
        for why in self.missing.values():
            log.warning("%s", why)
        self._exchange.start()
        atexit.register(self._at_exit)
        nothing.follow(self)
        leaving.before_destroy(self._end)
        self._observation = Observation(self._step, [])

    # --- the loop ---

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Iterates over `loader`; the time that it takes to give the next batch is `input`."""
        try:
            with self.phase("input"):  # a loader starts its workers here
                iterator = iter(loader)
        except TypeError:
            kind = type(loader).__name__
            raise UserError(f"monitor.batches({kind}): give what a for loop takes, such as a DataLoader") from None
        return self._batches(iterator)

    def _batches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        while True:
            with self.phase("input"):
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            yield batch

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A `with` block that is one of the phases input, forward, backward, optimizer, checkpoint, other; nothing else
        is looked for inside it."""
        if name not in self._phases:
            raise UserError(f"unknown phase {name!r}{nearest(name, PHASES)}: the phases are {', '.join(PHASES)}")
        if self._off or self._thread.excluded:
            return _NO_PHASE
        if not self._thread.tracker.started:
            self._begin()
        return self._phases[name]

    def step(self, tokens: int = 0) -> Step:
        """A `with` block whose end is the end of a step. `tokens`: this rank's distinct tokens in it, 0: not known."""
        if self._off or self._thread.excluded or self._in_step:
            return Step(self, Observation(0, []))  # what it is told is nobody's
        if not self._thread.tracker.started:
            self._begin()
        self._observation.tokens = tokens
        return Step(self, self._observation)

    def end_step(self, tokens: int = 0, loss: Any = None, skipped: str | None = None) -> None:
        """The end of a step, for loops that call back where no `with` block is possible. `skipped`: why the step is
        kept out of averages."""
        step = self.step(tokens)
        if loss is not None:
            step.loss(loss)
        if skipped is not None:
            step.skip(skipped)
        with step:
            pass

    def was(self, phase: str) -> None:
        """What ran since the last boundary of phases was this phase, as a callback tells after the fact."""
        tracker = self._thread.tracker
        if not self._off and tracker.started and not tracker.marked and tracker.phase == OTHER:
            tracker.rename(PHASES.index(phase))
            tracker.enter(OTHER)

    @property
    def optimizer_steps(self) -> int:
        """How many steps of optimizers were seen so far; none more once `off`."""
        return self._thread.finder.optimizer_steps if self._thread.finder is not None else 0

    def on_optimizer_step(self, stepped: Callable[[Any], None]) -> None:
        """`stepped(optimizer)` is called after each of them."""
        if self._thread.finder is not None:
            self._thread.finder.stepped = stepped

    @property
    def off(self) -> bool:
        """Whether nothing is observed any more: it was closed, or an error in here has ended it."""
        return self._off

    def event(self, event: str, /, **fields: Any) -> None:
        """Adds an event to the run (rank 0; ignored on other ranks)."""
        if self._recorder is None:
            return
        if self._exchange.is_alive():
            self._exchange.note({"event": event, "time_utc": utc_now(), **fields})
        else:  # it would take it nowhere any more
            self._recorder.event(event, fields)

    def alive(self) -> None:
        """Something long inside one phase goes on: nobody takes this rank for stuck (docs/hangs.md)."""
        if self._watch is not None:
            self._watch.position.alive()

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
        if self._recorder is None:
            return True
        return self._recorder.wait_recorded(step, within_s, lambda: self._closed or self._exchange.failure is not None)

    def sync_record(self) -> None:
        """On rank 0: what was recorded so far survives also the machine. Raises OSError."""
        if self._recorder is not None:
            self._recorder.sync()

    def replaced(self) -> None:
        """Another Monitor is made on this thread: this one's loop is over."""
        if self._thread.finder is not None and not self._closed:
            log.warning("the Monitor of %s is closed, since another one is made", self.directory)
            self.close()

    def exclude(self) -> None:
        """`bireme.observe_nothing()` begins."""
        self._thread.exclude(not self._off)

    def include(self) -> None:
        """It ends."""
        self._thread.include(not self._off)

    def _begin(self) -> None:
        """The first step begins now: what was issued before it belongs to no step."""
        self._exchange.begin()
        self._thread.begin()

    def _begin_step(self) -> bool:
        """Whether the step counts."""
        if self._off or self._thread.excluded:
            return False
        if self._in_step:
            self._say_once("a step begins inside another: the inner one does not count; end a step before the next")
            return False
        self._in_step = True
        return True

    def _leave_step(self, complete: bool) -> None:
        self._in_step = False
        if complete and not self._off:
            try:
                self._end_step()
            except Exception as error:
                self._turn_off(error)

    def _end_step(self) -> None:
        observation = self._observation
        if self._step <= self._skip_upto:
            observation.skipped = "warm-up"
        self._thread.cut(observation)
        self._step += 1
        self._observation = Observation(self._step, [])
        self._exchange.submit(observation)

    # --- the end ---

    def close(self, status: str = "finished", reason: str | None = None, within_s: float = _CLOSE_WITHIN_S) -> None:
        """Hands over the last steps, waiting at most `within_s` for the other ranks, and completes run.json."""
        with self._closing:  # the loop and the one who watches over a stuck loop may both close: the second waits
            if not self._closed:
                self._closed = self._off = True
                self._close(status, reason, within_s)

    def _close(self, status: str, reason: str | None, within_s: float) -> None:
        atexit.unregister(self._at_exit)
        if self._watch is not None:
            self._watch.ended("left" if status == "finished" else "interrupted")
        self._stop_listening()
        self._thread.stop_observing()
        if self._thread.tracker.started and self._step == self._first_step and status == "finished":
            log.warning("no step was recorded: put `with monitor.step():` around each of them")
        if self._optimizers and self._step > self._first_step and not self.optimizer_steps:
            log.warning("the optimizer given to the Monitor never stepped: its phase holds nothing")
        if self._thread.collectives.failure:
            log.warning("collectives were not all observed: %s", self._thread.collectives.failure)
        ended = False
        try:
            complete = self._exchange.finish(within_s)
            ended = True
            if not complete and status == "finished":
                reason = f"the last steps are not in the record: {self._exchange.failure or 'no answer in time'}"
                log.log(logging.WARNING if self._exchange.failure is None else logging.DEBUG, "%s", reason)
            elif self._exchange.unshared_steps and status == "finished":
                more = self._exchange.unshared_steps
                reason = f"{more} more steps of some ranks are not in the record: others had ended"
                log.warning("%s", reason)
        finally:  # also of somebody who does not wait for the others any longer
            if self._recorder is not None:
                self._recorder.close(status if ended else "interrupted", reason)
            if self._metrics is not None:
                self._metrics.close()
            self._thread.close()
            self._stop_watching()
            self._exchange.release()
            if self._own_channel:
                self._channel.group = None

    def _at_exit(self) -> None:
        """A loop that never closed its monitor keeps its record, and its process ends as if there were none."""
        if os.getpid() != self._process:  # a child that was forked
            return
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        self._end(None if isinstance(error, SystemExit) else error, _AT_EXIT_S)

    def _end(self, error: BaseException | None, within_s: float = _CLOSE_WITHIN_S) -> None:
        """As if a `with` block had ended so."""
        if error is None:
            self.close(within_s=within_s)
        else:
            self.__exit__(type(error), error, None)

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

    def _together(self, action: Callable[[], _T]) -> _T:
        """What is wrong on one rank is raised on every rank: nobody waits for one that has given up."""
        answer: Any = None
        problem = None
        try:
            answer = action()
        except UserError as error:
            problem = str(error)
        except Exception as error:  # the others wait for an answer
            problem = f"the Monitor cannot be made: {type(error).__name__}: {one_line(error)}"
        try:
            self._channel.raise_together(problem)
        except UserError:
            self._thread.stop_looking()
            self._thread.close()
            raise
        return cast("_T", answer)

    def _open_run(
        self, facts: dict[str, Any], resume_after: int | None, on_steps: Listener | None, port: int | None, address: str
    ) -> None:
        """Rank 0 makes the run directory; what stands in the way of it is raised on every rank."""
        problem = None
        if self._channel.rank == 0:
            try:
                if port is not None:
                    from bireme.metrics import MetricsServer  # late: few have it

                    self._metrics = MetricsServer(port, facts, address, str(self.directory))
                    self._metrics.start()
                self._recorder = Recorder(self.directory, facts, resume_after, [on_steps] if on_steps else [])
                if self._metrics is not None:
                    self._recorder.listen(self._metrics.update, self._metrics.learned)
            except UserError as error:
                problem = str(error)
            except OSError as error:
                problem = f"cannot write the run directory {self.directory}: {error.strerror or error}"
            except Exception as error:  # the others wait for an answer
                problem = f"the Monitor cannot be made: {type(error).__name__}: {one_line(error)}"
        problem = self._channel.all_gather(problem)[0]
        if problem:
            if self._metrics is not None:
                self._metrics.close()
            self._thread.stop_looking()
            self._thread.close()
            raise SharedError(problem)

    def _deliver(
        self, lines: list[dict[str, Any]], events: list[dict[str, Any]], samples: list[dict[str, Any]]
    ) -> None:
        if self._recorder is not None:
            self._recorder.deliver(lines, events, samples)

    def _steps_to_trace(self, text: str) -> list[int]:
        steps = parse_steps(text)
        check_amount(steps, self._channel.size)
        if steps and isinstance(self._thread.clock, DeviceClock):
            log.warning("no steps are traced on a GPU: the clocks of its streams are not aligned")
            return []
        return steps

    def _record_trace(self, lines: list[dict[str, Any]]) -> None:
        if self._recorder is not None:
            self._recorder.write(lambda writer: writer.trace(lines))

    def _learned(self, **facts: Any) -> None:
        if self._recorder is not None:
            self._recorder.learned(**facts)

    def _turn_off(self, error: BaseException) -> None:
        """An error in here is no reason to stop training: all ranks stop observing, and it is said once."""
        if self._off:
            return
        self._off = True
        log.debug("the monitor fails", exc_info=error)
        with suppress(Exception):
            self._stop_listening()
            self._thread.turn_off()
            self._exchange.give_up_on(f"rank {self._channel.rank}: {type(error).__name__}: {error}")
            self._stop_watching()  # the others do so as soon as they hear of it

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.close()

    def _stop_listening(self) -> None:
        """Neither to regions that are left alone nor to the end of the process groups."""
        nothing.unfollow(self)
        leaving.forget(self._end)

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            log.warning("%s", message)


def _several(given: Any) -> list[Any]:
    """One or a list."""
    return list(given) if isinstance(given, list | tuple) else [] if given is None else [given]


def _groups_of(table: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"name": each["name"], "ranks": each["ranks"]} for each in table]
