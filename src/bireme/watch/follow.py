"""What there is to know of a run that grows, read bit by bit from its directory (docs/watch.md)."""

import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from bireme.errors import UserError
from bireme.ledger import PHASES, STATES
from bireme.run_reader import EVENTS_FILE, RUN_FILE, STEPS_FILE, is_event, is_number, is_step, read_facts
from bireme.watch.liveness import writer_lives
from bireme.watch.notices import Notice, Notices
from bireme.watch.standing import Standing
from bireme.watch.tail import Tail

WINDOW_STEPS = 50
WAITING = f"no run here yet: waiting for {RUN_FILE}"

_EVENTS_BYTES = 1 << 25  # of an existing run, so much of its newest events
_LOOK_WITHIN_S = 0.5  # then the view gets its turn, though there may be more to read
# Frequent, and nothing to show: not even parsed.
_UNSHOWN = tuple(f'"event":"{name}"'.encode() for name in ("gc_pause", "host", "traffic"))
_CHECKPOINT = PHASES.index("checkpoint") * len(STATES)


@dataclass(frozen=True, slots=True)
class StepSeen:
    """What is kept of a step's line. Lists are indexed by rank, None where the rank did not record the step."""

    step: int
    skipped: str | None
    loss: float | None
    loss_reason: str | None
    tokens: int
    walls_ns: list[int | None]
    states_ns: list[list[int] | None]  # a number for each of STATES: the sum over phases
    beside_training: bool  # an evaluation, or time in the phase checkpoint


@dataclass(slots=True)
class Seen:
    """The state of a run as far as it was read."""

    directory: Path
    facts: dict[str, Any] | None = None
    problem: str = WAITING  # why there are no facts, or none that are newer
    steps: deque[StepSeen] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    notices: Notices = field(default_factory=Notices)
    standing: Standing = field(default_factory=Standing)
    damaged_lines: int = 0
    modified_s: float | None = None  # when the last step was written, seconds since 1970
    writer_lives: bool | None = None  # None: not known


@dataclass(slots=True)
class News:
    """What one look brought."""

    steps: list[StepSeen] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    more: bool = False  # look again at once


class Follower:
    """`look` reads what is new and brings `seen` up to date. Raises UserError for a path that is no directory."""

    def __init__(self, directory: Path, window: int = WINDOW_STEPS):
        if not directory.exists():
            raise UserError(
                f"{directory} does not exist: give the directory of a run, or one that a run will be made in"
            )
        if not directory.is_dir():
            raise UserError(f"{directory} is not a directory: give the directory of a run")
        self.directory = directory
        self._window = window
        self._facts_version: tuple[int, ...] | None = None
        self._facts_problem = ""
        self._steps = Tail(directory / STEPS_FILE, last_lines=window)
        self._events = Tail(directory / EVENTS_FILE, last_bytes=_EVENTS_BYTES)
        self._begin_anew()

    def look(self) -> News:
        """Never raises: what cannot be read is said in `seen.problem`."""
        news = News()
        self._look_at_facts()
        seen = self.seen
        seen.problem = self._facts_problem
        if seen.facts is None:
            return news
        until = time.monotonic() + _LOOK_WITHIN_S
        try:
            while True:
                news.more = self._look_at_events(news) | self._look_at_steps(news)
                if not news.more or time.monotonic() > until:
                    break
        except OSError as error:
            seen.problem = f"cannot read {error.filename or self.directory}: {error.strerror}"
        except UserError as error:
            seen.problem = str(error)
        seen.modified_s = self._steps.modified_s
        running = seen.facts["status"] == "running"
        seen.writer_lives = writer_lives(self.directory, seen.facts) if running else None
        return news

    def _begin_anew(self, facts: dict[str, Any] | None = None) -> None:
        self.seen = Seen(self.directory, facts, steps=deque(maxlen=self._window))
        self._steps.reset()
        self._events.reset()

    def _look_at_facts(self) -> None:
        seen = self.seen
        try:
            status = (self.directory / RUN_FILE).stat()
        except OSError:
            if self._facts_version is not None:
                self._facts_version = None
                self._begin_anew()
            self._facts_problem = WAITING if self.directory.is_dir() else "the directory is gone: waiting for it"
            return
        version = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if version == self._facts_version:
            return
        try:
            facts = read_facts(self.directory)
        except UserError as error:  # perhaps half of a copy: it is read again as soon as it changes
            self._facts_problem = str(error)
            return
        finally:
            self._facts_version = version
        if seen.facts is None or _attempt(facts) != _attempt(seen.facts):
            self._begin_anew(facts)
        self.seen.facts, self._facts_problem = facts, ""

    def _look_at_events(self, news: News) -> bool:
        found = self._events.look()
        if found.started_over:
            self.seen.standing, self.seen.notices = Standing(), Notices()
        for text in found.lines:
            if any(each in text for each in _UNSHOWN):
                continue
            event = _parsed(text)
            if not is_event(event):
                self.seen.damaged_lines += 1
                continue
            self.seen.standing.add(event)
            notice = self.seen.notices.add(event)
            if notice is not None:
                news.notices.append(notice)
        return found.more

    def _look_at_steps(self, news: News) -> bool:
        seen, facts = self.seen, self.seen.facts
        assert facts is not None
        found = self._steps.look()
        if found.started_over:
            seen.steps.clear()
        for text in found.lines[-self._window :]:
            line = _parsed(text)
            if isinstance(line, dict) and _is_of_earlier_attempt(line, facts):
                continue
            if not is_step(line, facts["world_size"], sys.maxsize):  # groups may be newer than run.json was
                seen.damaged_lines += 1
                continue
            step = _seen(line)
            if seen.steps and step.step <= seen.steps[-1].step:  # a file that was read again
                continue
            seen.steps.append(step)
            news.steps.append(step)
        return found.more


def _attempt(facts: Mapping[str, Any]) -> tuple[Any, ...]:
    return facts.get("attempt"), facts.get("started_utc"), facts["world_size"]


def _is_of_earlier_attempt(line: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    first_step, step = facts.get("first_step"), line.get("step")
    return type(first_step) is int and type(step) is int and step < first_step


def _parsed(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def _seen(line: Mapping[str, Any]) -> StepSeen:
    pairs = zip(line["start_ns"], line["end_ns"], strict=True)
    cells = [each for each in line["cells_ns"] if each is not None]
    reason = line.get("loss_reason")
    return StepSeen(
        step=line["step"],
        skipped=line["skipped"],
        loss=line["loss"] if is_number(line["loss"]) else None,
        loss_reason=reason if isinstance(reason, str) else None,
        tokens=line["tokens"] or 0,
        walls_ns=[None if start is None else end - start for start, end in pairs],
        states_ns=[
            None if row is None else [sum(row[state :: len(STATES)]) for state in range(len(STATES))]
            for row in line["cells_ns"]
        ],
        beside_training=line["skipped"] == "evaluation"
        or any(any(row[_CHECKPOINT : _CHECKPOINT + len(STATES)]) for row in cells),
    )
