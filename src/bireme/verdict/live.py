"""Verdicts while the run goes on: judged again and again over the last steps, and told only when they change."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bireme.text import name_ranks, short
from bireme.verdict.evidence import NotEnough, Row, from_rows, row_of
from bireme.verdict.judge import judge
from bireme.verdict.kinds import DATA, DRIFT, HEALTHY, NODE, ONE_OFF, RANK, Verdict

STARTED, CHANGED, ENDED = "started", "changed", "ended"

_KEPT_STEPS = 200
_LEAST_STEPS = 15  # of a young run that say anything
_EVERY_STEPS = 10
_RECENT_STEPS = 20  # a verdict that has not shown for so long is over
_TWICE = 2  # judgements in a row that must agree before a change is told
_SHARE_OF_TIME = 0.002  # that judging may take
_ONE_CULPRIT = {RANK, NODE, DRIFT}


@dataclass(frozen=True, slots=True)
class Change:
    """What to tell: a verdict has started, changed or ended."""

    state: str
    verdict: Verdict
    step: int  # at which it was seen

    @property
    def sentence(self) -> str:
        verdict = self.verdict
        if self.state != ENDED:
            worth = ""
            if verdict.what_if is not None and verdict.kind != ONE_OFF:
                worth = f"; without it a step would take {short(verdict.what_if.step_ms)} ms"
            now = f" ({short(_latest(verdict))} ms in the last steps)" if self.state == CHANGED else ""
            advice = f". {_capital(verdict.advice)}" if verdict.advice else ""
            return f"{verdict.sentence}{now}{worth}{advice}"
        who = f"node {verdict.node}" if verdict.kind == NODE else name_ranks(verdict.ranks)
        if verdict.kind == DATA:
            return f"over since step {verdict.last_step}: no rank is much slower than the others in a step any more"
        if verdict.kind in _ONE_CULPRIT:
            verb = "is" if verdict.kind == NODE or len(verdict.ranks) == 1 else "are"
            return f"over since step {verdict.last_step}: {who} {verb} no slower than its peers ({verdict.cause})"
        return f"over since step {verdict.last_step}: {verdict.cause}"

    def as_event(self) -> dict[str, Any]:
        """As in events.jsonl."""
        return {
            "event": "verdict",
            "change": self.state,
            "step": self.step,
            "message": self.sentence,
            **self.verdict.as_dict(),
        }


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


@dataclass(slots=True)
class _Open:
    verdict: Verdict
    unlike: int = 0  # judgements in a row that saw it otherwise
    gone: int = 0  # judgements in a row that did not see it


class LiveJudge:
    """`add` takes the records of steps as they come, on rank 0, and returns what there is to tell. `facts`: of
    run.json. Its memory is bounded, and so is its time: where judging takes long (many ranks) it happens less often."""

    def __init__(self, facts: Mapping[str, Any], clock: Callable[[], float] = time.monotonic):
        self._facts = facts
        self._clock = clock
        self._rows: deque[Row] = deque(maxlen=_KEPT_STEPS)
        self._events: deque[Mapping[str, Any]] = deque(maxlen=_KEPT_STEPS)
        self._new = 0
        self._not_before = 0.0
        self._open: list[_Open] = []
        self._pending: dict[tuple[Any, ...], int] = {}
        self._told_once: set[int] = set()

    def add(self, lines: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]] = ()) -> list[Change]:
        # Not the lines: lists of numbers by the million would make the garbage collections that verdicts are about.
        measured = [row_of(line) for line in lines if line["skipped"] is None]
        self._rows.extend(measured)
        self._events.extend(event for event in events if event.get("event") in ("checkpoint", "host"))
        self._new += len(measured)
        began = self._clock()
        if self._new < _EVERY_STEPS or len(self._rows) < _LEAST_STEPS or began < self._not_before:
            return []
        self._new = 0
        try:
            evidence = from_rows(list(self._rows), self._facts, list(self._events))
            verdicts = judge(evidence)
        except NotEnough:
            return []
        finally:
            self._not_before = self._clock() + (self._clock() - began) / _SHARE_OF_TIME
        return self._compare(verdicts, int(evidence.steps[-1]))

    def _compare(self, verdicts: Sequence[Verdict], now: int) -> list[Change]:
        recent = [v for v in verdicts if v.kind != HEALTHY and v.last_step >= now - _RECENT_STEPS]
        changes = self._once([verdict for verdict in recent if verdict.kind == ONE_OFF], now)
        lasting = [verdict for verdict in recent if verdict.kind != ONE_OFF]
        past = [verdict for verdict in verdicts if verdict.last_step < now - _RECENT_STEPS]
        matches = self._matches(lasting)
        for each in list(self._open):
            match = matches.get(id(each))
            if match is None:
                each.gone += 1
                over = next((verdict for verdict in past if _same_thing(each.verdict, verdict)), None)
                if over is not None or each.gone >= _TWICE:
                    self._open.remove(each)
                    changes.append(Change(ENDED, over or each.verdict, now))
                continue
            each.gone = 0
            each.unlike = each.unlike + 1 if _is_other(each.verdict, match) else 0
            if each.unlike >= _TWICE:
                each.unlike = 0
                each.verdict = match
                changes.append(Change(CHANGED, match, now))
            elif not each.unlike:
                each.verdict = match
        matched = {id(match) for match in matches.values()}
        seen = {_key(verdict): verdict for verdict in lasting if id(verdict) not in matched}
        self._pending = {key: self._pending.get(key, 0) + 1 for key in seen}
        for key, verdict in seen.items():
            # What is large needs no second look.
            if self._pending[key] >= _TWICE or verdict.share >= 0.1:
                del self._pending[key]
                self._open.append(_Open(verdict))
                changes.append(Change(STARTED, verdict, now))
        return changes

    def _matches(self, verdicts: Sequence[Verdict]) -> dict[int, Verdict]:
        """By identity of the open verdict: what it is now. The same culprit in the same phase first, as several things
        may be wrong with the same ranks."""
        left, matches = list(verdicts), {}
        for alike in (_same_thing, _same_culprit):
            for each in self._open:
                match = next((verdict for verdict in left if alike(each.verdict, verdict)), None)
                if id(each) not in matches and match is not None:
                    matches[id(each)] = match
                    left = [verdict for verdict in left if verdict is not match]
        return matches

    def _once(self, verdicts: Sequence[Verdict], now: int) -> list[Change]:
        new = [verdict for verdict in verdicts if verdict.first_step not in self._told_once]
        self._told_once |= {step for verdict in new for step in range(verdict.first_step, verdict.last_step + 1)}
        self._told_once = {step for step in self._told_once if step > now - 2 * _KEPT_STEPS}
        return [Change(STARTED, verdict, now) for verdict in new]


def _key(verdict: Verdict) -> tuple[Any, ...]:
    return verdict.kind, verdict.ranks, verdict.phase


def _same_thing(a: Verdict, b: Verdict) -> bool:
    return a.phase == b.phase and _same_culprit(a, b)


def _same_culprit(a: Verdict, b: Verdict) -> bool:
    """Of a rank and its node, too; but what holds up all ranks is no rank."""
    if a.kind in _ONE_CULPRIT and b.kind in _ONE_CULPRIT:
        smaller, larger = sorted((set(a.ranks), set(b.ranks)), key=len)
        return smaller <= larger and (a.kind == b.kind == RANK) <= (len(smaller) == len(larger))
    return a.kind == b.kind


def _is_other(a: Verdict, b: Verdict) -> bool:
    """Whether it is worth a line that `a` is `b` now."""
    if (a.kind, a.ranks if a.kind in _ONE_CULPRIT else ()) != (b.kind, b.ranks if b.kind in _ONE_CULPRIT else ()):
        return True
    return (a.cause, a.state) != (b.cause, b.state) or not 0.5 <= _latest(b) / max(_latest(a), 1e-9) <= 2.0


def _latest(verdict: Verdict) -> float:
    return float(verdict.evidence.get("latest_excess_ms", verdict.excess_ms))
