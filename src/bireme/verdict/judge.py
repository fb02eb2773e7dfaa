"""All verdicts on a stretch of a run, in the order in which one explains away another."""

from collections.abc import Sequence

import numpy as np

from bireme.text import short
from bireme.verdict.culprits import persistent
from bireme.verdict.evidence import Evidence
from bireme.verdict.excess import noise_ms
from bireme.verdict.hits import single_steps, takes_turns_in
from bireme.verdict.kinds import EFFECT, HEALTHY, ONE_OFF, Verdict
from bireme.verdict.links import Expected, link_verdicts
from bireme.verdict.shared import common
from bireme.verdict.stages import stage_verdicts

_MOST = 8  # verdicts worth reading


def judge(evidence: Evidence, expected: Expected | None = None) -> list[Verdict]:
    """At least one verdict; `healthy` alone when there is no other. The most expensive comes first.

    expected: what a collective takes by the measured table of links, in milliseconds.
    """
    if evidence.typical_ms <= 0:
        return [_healthy(evidence)]
    turns = takes_turns_in(evidence)
    persists = persistent(evidence, turns)
    stages = stage_verdicts(evidence)
    single = single_steps(evidence, persists)
    shared = common(evidence, [*persists, *single])
    if shared:  # which explains steps that were slow for everybody
        single = [each for each in single if each.kind != ONE_OFF or len(each.ranks) < len(evidence.ranks)]
    verdicts = [*persists, *stages, *single, *shared, *link_verdicts(evidence, expected)]
    verdicts = _without_repetition(verdicts)
    if not verdicts:
        return [_healthy(evidence)]
    return sorted(verdicts, key=lambda verdict: -verdict.share)[:_MOST]


def _without_repetition(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """One verdict for each thing: what is said of a rank in a phase need not be said again of all ranks in it."""
    kept: list[Verdict] = []
    for verdict in verdicts:
        same = (
            other
            for other in kept
            if other.phase == verdict.phase
            and other.kind == verdict.kind
            and (set(other.ranks) & set(verdict.ranks))
            and other.first_step <= verdict.last_step
            and verdict.first_step <= other.last_step
        )
        if next(same, None) is None:
            kept.append(verdict)
    return kept


def _healthy(evidence: Evidence) -> Verdict:
    first, last = int(evidence.steps[0]), int(evidence.steps[-1])
    step_ms = evidence.typical_ms
    if len(evidence.ranks) < 2:
        sentence = f"healthy: one rank, nothing to compare it with (steps {first} to {last})"
        return Verdict(HEALTHY, first_step=first, last_step=last, confidence=1.0, sentence=sentence)
    excess = evidence.excess_ms
    medians = np.median(excess, axis=0)
    worst = int(np.argmax(medians))
    noise = noise_ms(excess, evidence.own_ms)
    largest = max(0.0, float(medians[worst]))
    percent = 100 / step_ms if step_ms > 0 else 0.0
    rank = int(evidence.ranks[worst])
    return Verdict(
        HEALTHY,
        excess_ms=largest,
        first_step=first,
        last_step=last,
        # All of the room up to what would count is left, or none of it.
        confidence=max(0.0, min(1.0, 1.0 - largest / (EFFECT * step_ms))) if step_ms > 0 else 0.0,
        sentence=f"healthy: no rank, node or link stands out (steps {first} to {last}). Rank {rank} takes most of its "
        f"own, "
        f"{short(largest)} ms ({short(largest * percent)} %) more than its peers; from step to step that varies by "
        f"{short(noise)} ms ({short(noise * percent)} %)",
        evidence={
            "largest_excess": {"rank": rank, "ms": round(largest, 3)},
            "noise_ms": round(noise, 3),
            "own_ms": {
                "least": round(float(np.median(evidence.own_ms, axis=0).min()), 3),
                "most": round(float(np.median(evidence.own_ms, axis=0).max()), 3),
            },
        },
    )
