"""What slows all ranks alike: input, checkpoints, and getting slower together."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bireme.ledger import PHASES, STATES
from bireme.text import short
from bireme.verdict.causes import name_cell
from bireme.verdict.evidence import Evidence
from bireme.verdict.excess import is_ramp, noise_ms
from bireme.verdict.hits import loader_advice, period_of
from bireme.verdict.kinds import DRIFT, EFFECT, ONE_OFF, RANK, Verdict
from bireme.verdict.worth import share, what_if

_SLOWER_WRITER = 2.0  # times the other ranks' time, to be the one that all wait for
_TOGETHER = 0.15  # of the step: machines are busier at one time than at another
_LEAST_TREND_STEPS = 100


def common(evidence: Evidence, explained: Sequence[Verdict]) -> list[Verdict]:
    """`explained`: verdicts on single ranks and nodes, whose share in this is told already."""
    told = {rank for verdict in explained if verdict.kind != ONE_OFF for rank in verdict.ranks}
    others = np.array([int(rank) not in told for rank in evidence.ranks])
    verdicts = [_phase(evidence, name, others) for name in ("input", "checkpoint") if others.any()]
    return [verdict for verdict in (*verdicts, _slower_together(evidence)) if verdict is not None]


def _phase(evidence: Evidence, name: str, of: NDArray[np.bool_]) -> Verdict | None:
    """A phase that should take next to nothing, and takes more than that on every rank."""
    phase = PHASES.index(name)
    spent = np.median(evidence.phase_ms(phase)[:, of], axis=1)  # (T,) no single rank's fault
    cost = float(spent.sum() / evidence.step_ms.sum()) if evidence.step_ms.sum() > 0 else 0.0
    if cost < EFFECT:
        return None
    rows = np.flatnonzero(spent >= max(EFFECT * evidence.typical_ms, 0.3 * float(spent.max())))
    if not len(rows):  # many short steps with little of it each, and a few long ones
        return None
    period = period_of(evidence.steps[rows])
    saved = spent.copy()
    cells = evidence.cells_ms[rows].mean(axis=(0, 1), dtype=np.float64)
    inside = np.zeros_like(cells)
    inside[phase * len(STATES) : (phase + 1) * len(STATES)] = cells[phase * len(STATES) : (phase + 1) * len(STATES)]
    cause = name_cell(evidence, inside, float(spent[rows].mean()))
    ranks = tuple(int(rank) for rank in evidence.ranks)
    advice, of_all = cause.advice.replace("this rank's ", "the "), "all ranks"
    node = None
    if name == "input" and period is not None:
        advice = loader_advice(evidence, period[0], int(np.argmax(evidence.phase_ms(phase).mean(axis=0))))
    if name == "checkpoint" and len(evidence.write_s) > 1:
        slowest = int(np.argmax(evidence.write_s))
        others = [each for rank, each in enumerate(evidence.write_s) if rank != slowest]
        later_s = evidence.write_s[slowest] - float(np.median(others))
        # A rank with nothing to write takes no time, and what takes no time holds nobody up.
        explains = later_s >= 0.5 * float(spent[rows].mean()) / 1e3
        if (
            explains
            and evidence.write_s[slowest] >= _SLOWER_WRITER * float(np.median(others))
            and slowest in evidence.ranks
        ):
            ranks = (slowest,)
            node = evidence.node_names[evidence.node_of[evidence.columns([slowest])[0]]]
            of_all = (
                f"all ranks (rank {slowest} on {node} writes for {short(evidence.write_s[slowest])} s, the others for "
            )
            of_all += f"{short(np.median(others))} s)"
    often = f", every {period[0]} steps" if period else ""
    first, last = int(evidence.steps[rows[0]]), int(evidence.steps[rows[-1]])
    return Verdict(
        kind=RANK,
        ranks=ranks,
        node=node,
        phase=name,
        state=cause.state,
        excess_ms=float(spent[rows].mean()),
        share=cost,
        first_step=first,
        last_step=last,
        confidence=period[1] if period else float(len(rows) / max(1, rows[-1] - rows[0] + 1)),
        cause=cause.name,
        sentence=f"{name} holds up {of_all}: {short(spent[rows].mean())} ms in {len(rows)} of {len(evidence.steps)} "
        f"steps{often}, {short(100 * cost)} % of the time",
        advice=advice,
        evidence={
            "slow_steps": len(rows),
            "period_steps": period[0] if period else None,
            "mean_ms_per_step": round(float(spent.mean()), 3),
            "workers": evidence.workers if name == "input" else None,
        },
        what_if=what_if(evidence, saved),
    )


def _slower_together(evidence: Evidence) -> Verdict | None:
    if len(evidence.steps) < _LEAST_TREND_STEPS:
        return None
    own = np.median(evidence.own_ms, axis=1)
    noise = noise_ms(own[:, None])
    ramp = is_ramp(own)
    if ramp is None:
        return None
    begin, rise = ramp
    usual = float(np.median(own[: max(5, begin)]))
    if rise < _TOGETHER * evidence.typical_ms or rise < 4 * noise:
        return None
    saved = np.maximum(own - usual, 0.0)
    saved[:begin] = 0.0
    late, early = evidence.cells_ms[-max(5, len(own) // 8) :], evidence.cells_ms[: max(5, begin)]
    over = np.median(late.mean(axis=0, dtype=np.float64), axis=0) - np.median(
        early.mean(axis=0, dtype=np.float64), axis=0
    )
    cause = name_cell(evidence, over, rise)
    if cause.state != "running":  # a machine that is shared is busier at one time than at another: that is no drift
        return None
    first, last = int(evidence.steps[begin]), int(evidence.steps[-1])
    return Verdict(
        kind=DRIFT,
        ranks=tuple(int(rank) for rank in evidence.ranks),
        phase=cause.phase,
        state=cause.state,
        excess_ms=rise,
        share=share(evidence, saved),
        first_step=first,
        last_step=last,
        confidence=float((own[begin:] >= usual + 0.25 * rise).mean()),
        cause="gets slower bit by bit",
        sentence=f"all ranks get slower together since step {first}: by {short(rise)} ms of {short(usual)} ms by step "
        f"{last}, {cause.where(rise)}",
        advice="look for heat or power limits of all machines, memory that fills up, or work that grows from step to "
        "step",
        evidence={"own_at_first_ms": round(usual, 3), "rise_ms": round(rise, 3), "noise_ms": round(noise, 3)},
        what_if=what_if(evidence, saved),
    )
