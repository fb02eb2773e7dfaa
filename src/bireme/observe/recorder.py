"""Rank 0's half of a record: writes what the ranks hand over, judges it, and passes it on to who shows it."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from bireme.record import RunWriter
from bireme.verdict.live import LiveJudge

log = logging.getLogger(__name__)

_KEPT_WRITES = 10_000  # of a record that cannot be written: the oldest go first
_LOOK_AGAIN_S = 0.2

Records = list[dict[str, Any]]


class Listener(Protocol):
    """Takes each window's step records and events, in the background thread."""

    def __call__(self, lines: Records, events: Records) -> None: ...


class Recorder:
    """Writes to `directory` on rank 0; elsewhere it takes everything and keeps nothing.

    `facts`: what run.json holds. `listeners` get each window's step records and events, verdicts included; one that
    fails is not asked again. Raises UserError or OSError when the directory is not free.
    """

    def __init__(self, directory: Path, facts: dict[str, Any], resume_after: int | None, listeners: Sequence[Listener]):
        self._directory = directory
        self._writer = RunWriter(directory, facts, resume_after)
        self._judge: LiveJudge | None = LiveJudge(facts)
        self._facts = facts
        self._listeners = list(listeners)
        self._learners: list[Callable[..., None]] = []
        self._shown = bool(listeners)
        self._failure: str | None = None
        self._writing = threading.Lock()
        self._unwritten: deque[Callable[[RunWriter], None]] = deque(maxlen=_KEPT_WRITES)
        self._recorded = threading.Condition()
        self._recorded_step = int(facts["first_step"]) - 1
        self._said_not_finite = False

    def listen(self, listener: Listener, learner: Callable[..., None]) -> None:
        """One more that gets the windows, and what `learned` is told."""
        self._listeners.append(listener)
        self._learners.append(learner)

    def write(self, action: Callable[[RunWriter], None]) -> None:
        """Writes, in order; what finds no room is kept and tried again the next time: a disk may be cleared."""
        try:
            with self._writing:  # an event of the hang watch comes from a thread of its own
                self._unwritten.append(action)
                while self._unwritten:
                    self._unwritten[0](self._writer)
                    self._unwritten.popleft()
        except OSError as error:
            if self._failure is None:
                self._failure = error.strerror or str(error)
                why = f"cannot write to {self._directory}: {self._failure}"
                log.error("%s; training goes on, what is to be recorded is kept and tried again", why)
            return
        if self._failure is not None:
            log.warning("the record in %s is written again", self._directory)
            self._failure = None

    def event(self, event: str, fields: Mapping[str, Any]) -> None:
        self.write(lambda writer: writer.event(event, **fields))

    def learned(self, **facts: Any) -> None:
        """What was not known when the run began goes to run.json."""
        self._facts.update(facts)  # the judge's, too
        for learner in self._learners:
            learner(**facts)
        self.write(lambda writer: writer.learned(**facts))

    def deliver(self, lines: Records, events: Records, samples: Records) -> None:
        """A window of complete step records."""
        self._learn_flops(lines)
        self.write(lambda writer: writer.steps(lines))
        if samples:
            self.write(lambda writer: writer.samples(samples))
        for line in lines:
            if "loss_reason" in line and not self._said_not_finite:
                self._said_not_finite = True
                log.warning(
                    "the loss is %s since step %d: is the learning rate too high?", line["loss_reason"], line["step"]
                )
        for event in events:
            self.event(event["event"], {name: value for name, value in event.items() if name != "event"})
        if lines and not self._unwritten:
            with self._recorded:
                self._recorded_step = lines[-1]["step"]
                self._recorded.notify_all()
        events = [*events, *self._judged(lines, events)]
        for listener in list(self._listeners):
            try:
                listener(lines, events)
            except Exception as error:  # nobody reads the console any more, or so: no reason to lose the record
                self._listeners.remove(listener)
                log.warning("the steps are not shown any more: %s: %s", type(error).__name__, error)

    def wait_recorded(self, step: int, within_s: float, given_up: Callable[[], bool]) -> bool:
        """Waits until the record has this step; also True once `given_up` says that it never will."""
        deadline = time.monotonic() + within_s
        with self._recorded:
            while self._recorded_step < step and not given_up():
                if time.monotonic() > deadline or self._failure is not None:
                    return False
                self._recorded.wait(_LOOK_AGAIN_S)  # an exchange that fails tells nobody
        return True

    def sync(self) -> None:
        """What was recorded so far survives also the machine. Raises OSError."""
        self._writer.sync()

    def close(self, status: str, reason: str | None) -> None:
        # Also after a failed write: a disk may have room for this much, and nobody should take the run for alive.
        with suppress(OSError):
            self._writer.finish(status, reason or self._failure)
        self._writer.close()

    # --- inside ---

    def _judged(self, lines: Records, events: Records) -> Records:
        """Verdicts on the last steps, as events; what goes wrong with them is no reason to lose the record."""
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
            self.event("verdict", {name: value for name, value in verdict.items() if name != "event"})
            if not self._shown:
                log.warning("%s", verdict["message"])
        return verdicts

    def _learn_flops(self, lines: Records) -> None:
        """From the step in which every rank counted its forward FLOPs: the backward pass costs twice as many."""
        for line in lines:
            counted = line.pop("forward_flops", None)
            if counted and line["tokens"]:
                model = dict(self._facts.get("model") or {})
                model["flops_per_token"] = {"full": 3 * counted / line["tokens"]}
                self.learned(model=model)
