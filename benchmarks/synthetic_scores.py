"""Scores the verdicts on made-up ledgers against what was planted in them, and counts the scores."""

import multiprocessing
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bireme.verdict.causes import GARBAGE
from bireme.verdict.evidence import Evidence
from bireme.verdict.judge import judge
from bireme.verdict.kinds import HEALTHY, ONE_OFF, Verdict

if TYPE_CHECKING:
    from benchmarks.synthetic import KINDS, Truth, make
else:
    from synthetic import KINDS, Truth, make

NO_ALARM = (HEALTHY, ONE_OFF)
WRONG_RANKS = "right kind, other ranks"
# As a run does it: every so many steps, over the last so many.
JUDGED_EVERY, JUDGED_OVER, FIRST_JUDGED = 10, 200, 20
WEAK_KINDS = ("rank", "every", "gc", "node", "stage", "drift", "link", "input")
# Curing these leaves the step as it was without them; spreading work over all ranks does not.
CURED_KINDS = ("rank", "every", "gc", "node", "link", "input")
SEEDS_A_RUN = 1_000_000  # the cases of one --seed do not meet those of another


@dataclass(frozen=True, slots=True)
class Case:
    """A case to make and judge; None: drawn from the seed."""

    kind: str
    seed: int
    effect: float | None = None
    noise: float | None = None
    timed: bool = False  # also: after how many steps is it found


@dataclass(frozen=True, slots=True)
class Score:
    """What became of one case."""

    kind: str
    seed: int
    effect: float
    noise: float
    size: int
    alarm: bool  # whether somebody is to be blamed
    given: str  # the verdict's kind: of the right one, where it was given, else of the most expensive
    right: bool
    right_cause: bool
    alarms: int
    right_alarms: int
    steps_to_detect: int | None = None
    worth_error: float | None = None  # predicted mean step / that without what was planted - 1
    told: str = ""  # where anything is wrong: what was said

    @property
    def flawless(self) -> bool:
        return self.right and self.right_cause and self.alarms == self.right_alarms


def says_so(verdict: Verdict, truth: Truth) -> bool:
    """The right kind, and exactly the ranks that were made slow."""
    return verdict.kind in truth.kinds and (not truth.ranks or set(verdict.ranks) == set(truth.ranks))


def score_verdicts(verdicts: Sequence[Verdict], truth: Truth, seed: int = 0, tokens_a_step: float = 0.0) -> Score:
    right = next((verdict for verdict in verdicts if says_so(verdict, truth)), None)
    alarms = [verdict for verdict in verdicts if verdict.kind not in NO_ALARM]
    wrong = [verdict for verdict in alarms if not says_so(verdict, truth)]
    if not truth.alarm and alarms:  # nobody is to be blamed: a right word besides does not make that right
        right = None
    given = right or (alarms[0] if alarms else verdicts[0])
    cause = right is not None and (not truth.cells or (right.phase, right.state) in truth.cells)
    if truth.garbage and right is not None:
        cause = cause and right.cause == GARBAGE
    error = None
    rate = right.what_if.tokens_per_s_global if right is not None and right.what_if is not None else None
    if rate and tokens_a_step and truth.name in CURED_KINDS:
        error = 1e3 * tokens_a_step / rate / truth.clean_ms - 1
    label = WRONG_RANKS if right is None and given.kind in truth.kinds and truth.ranks else given.kind
    flaw = right is None or bool(wrong) or not cause
    return Score(
        kind=truth.name,
        seed=seed,
        effect=truth.effect,
        noise=truth.noise,
        size=truth.size,
        alarm=truth.alarm,
        given=label,
        right=right is not None,
        right_cause=cause,
        alarms=len(alarms),
        right_alarms=len(alarms) - len(wrong),
        worth_error=error,
        told="; ".join(_words(verdict) for verdict in verdicts[:3]) if flaw else "",
    )


def _words(verdict: Verdict) -> str:
    ranks = ",".join(map(str, verdict.ranks[:4])) + ("..." if len(verdict.ranks) > 4 else "")
    place = f" {verdict.phase}/{verdict.state}" if verdict.phase else ""
    excess = f" {verdict.excess_ms:.3g} ms" if verdict.ranks else ""
    return f"{verdict.kind} {ranks}{place}{excess} steps {verdict.first_step} to {verdict.last_step}"


def score_case(case: Case) -> Score:
    evidence, truth = make(case.kind, case.seed, effect=case.effect, noise=case.noise)
    tokens = float(evidence.tokens.mean()) if evidence.tokens is not None else 0.0
    score = score_verdicts(judge(evidence), truth, case.seed, tokens)
    if case.timed and score.right and truth.alarm:
        score = replace(score, steps_to_detect=_steps_to_detect(evidence, truth))
    return score


def _steps_to_detect(evidence: Evidence, truth: Truth) -> int | None:
    """From the first planted step to the first judgement on the way that is right; None where only the last one is."""
    for end in range(FIRST_JUDGED, len(evidence.steps) + 1, JUDGED_EVERY):
        if end > truth.first_step:
            verdicts = judge(part_of(evidence, max(0, end - JUDGED_OVER), end))
            if any(says_so(verdict, truth) for verdict in verdicts):
                return int(end - truth.first_step)
    return None


def part_of(evidence: Evidence, start: int, end: int) -> Evidence:
    """The evidence of steps [start, end) alone."""
    rows = slice(start, end)
    uses = tuple(
        replace(use, count=use.count[rows], bytes=use.bytes[rows], transfer_ms=use.transfer_ms[rows])
        for use in evidence.uses
    )
    return replace(
        evidence,
        steps=evidence.steps[rows],
        wall_ms=evidence.wall_ms[rows],
        cells_ms=evidence.cells_ms[rows],
        gc_ms=evidence.gc_ms[rows],
        tokens=None if evidence.tokens is None else evidence.tokens[rows],
        uses=uses,
    )


# --- many cases --------------------------------------------------------------------------------------------------


def strong_cases(seed: int, count: int) -> list[Case]:
    """Every kind as often; effects of 10 % of the step and more."""
    return [Case(KINDS[i % len(KINDS)], seed * SEEDS_A_RUN + i, timed=True) for i in range(count)]


def healthy_cases(seed: int, count: int) -> list[Case]:
    return [Case("healthy", seed * SEEDS_A_RUN + 500_000 + i, noise=0.03) for i in range(count)]


def weak_cases(seed: int, count: int) -> list[Case]:
    """Effects of 0 to 10 % of the step."""
    draw = np.random.default_rng([seed, 10])
    effects = draw.uniform(0.0, 0.10, count)
    return [
        Case(WEAK_KINDS[i % len(WEAK_KINDS)], seed * SEEDS_A_RUN + 700_000 + i, effect=float(effects[i]))
        for i in range(count)
    ]


def score_all(cases: Sequence[Case], told: Callable[[int], None] = lambda done: None) -> list[Score]:
    """On all usable cores, in the order of the cases."""
    scores = []
    with multiprocessing.Pool(len(os.sched_getaffinity(0))) as pool:
        for score in pool.imap(score_case, cases, chunksize=8):
            scores.append(score)
            told(len(scores))
    return scores


# --- counting ----------------------------------------------------------------------------------------------------


def ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def count_scores(scores: Sequence[Score]) -> dict[str, Any]:
    """`precision`: of all alarms; `recall`: of the cases in which somebody is to be blamed; `right_cause`: of those
    that were found."""
    blamed = [score for score in scores if score.alarm]
    found = [score for score in blamed if score.right]
    waits = [score.steps_to_detect for score in found if score.steps_to_detect is not None]
    errors = [abs(score.worth_error) for score in scores if score.worth_error is not None]
    return {
        "cases": len(scores),
        "right": sum(score.right for score in scores),
        "precision": ratio(sum(score.right_alarms for score in scores), sum(score.alarms for score in scores)),
        "recall": ratio(len(found), len(blamed)),
        "right_cause": ratio(sum(score.right_cause for score in found), len(found)),
        "alarms": sum(score.alarms for score in scores),
        "false_alarms": sum(score.alarms - score.right_alarms for score in scores),
        "steps_to_detect": quantiles(waits),
        "worth_error": quantiles(errors),
    }


def quantiles(values: Sequence[float]) -> dict[str, float] | None:
    """The median and the 90th percentile; None of nothing."""
    if not values:
        return None
    p90 = statistics.quantiles(values, n=10, method="inclusive")[8] if len(values) > 1 else values[0]
    return {"median": float(statistics.median(values)), "p90": float(p90)}


def in_band(scores: Sequence[Score], what: str, low: float, high: float) -> list[Score]:
    return [score for score in scores if low <= getattr(score, what) < high]
