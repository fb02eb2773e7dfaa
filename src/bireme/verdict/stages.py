"""Pipelines: a stage that has more work than the others. Waiting there is the schedule's, nobody's fault."""

import numpy as np

from bireme.ledger import PHASES, RUNNING, STATES
from bireme.text import rank_list, short
from bireme.verdict.causes import name_cell
from bireme.verdict.evidence import Evidence
from bireme.verdict.excess import FEW_RANKS, noise_ms, stretches
from bireme.verdict.kinds import EFFECT, RANK, STAGE, Verdict
from bireme.verdict.worth import share, what_if

_OF_STAGE = 1.5 * EFFECT  # of the step: no model divides evenly
_WHOLE = 0.8  # of the run: a stage is as heavy at first as at last
_BOTH = 0.15  # of the excess in each of forward and backward: more layers are more of both


def stage_verdicts(evidence: Evidence) -> list[Verdict]:
    """The slowest stage against the median of the others: `stage_imbalance` when it computes more in both passes for
    the whole run, else `rank` where a stage is one rank, which has no other peers."""
    stages = np.unique(evidence.stage_of)
    if len(stages) < 2:
        return []
    members = [np.flatnonzero(evidence.stage_of == stage) for stage in stages]
    # The fastest rank of a stage tells its work: one that is slow by itself is not its stage.
    own = np.stack([evidence.own_ms[:, columns].min(axis=1) for columns in members], axis=1)  # (T, stages)
    others = np.stack([np.median(np.delete(own, each, axis=1), axis=1) for each in range(len(stages))], axis=1)
    excess = own - others
    verdicts = []
    for stretch in stretches(excess, evidence.step_ms, noise_ms(excess, own if len(stages) <= FEW_RANKS else None)):
        columns, steps = members[stretch.column], slice(stretch.start, stretch.end)
        local_ms = float(np.median(evidence.step_ms[steps]))
        if stretch.excess_ms < _OF_STAGE * local_ms:
            continue
        cells = np.stack([evidence.cells_ms[steps][:, each].mean(axis=(0, 1), dtype=np.float64) for each in members])
        over = cells[stretch.column] - np.median(np.delete(cells, stretch.column, axis=0), axis=0)
        computing = [over[PHASES.index(phase) * len(STATES) + RUNNING] for phase in ("forward", "backward")]
        is_work = min(computing) >= _BOTH * stretch.excess_ms
        is_work = is_work and stretch.end - stretch.start >= _WHOLE * len(evidence.steps)
        if not is_work and len(columns) > 1:
            continue  # its ranks have peers of their own
        cause = name_cell(evidence, over, stretch.excess_ms)
        saved = np.zeros(len(evidence.steps))
        if is_work:  # spread over all stages
            saved[steps] = own[steps].max(axis=1) - own[steps].mean(axis=1)
        else:
            cured = own[steps].copy()
            cured[:, stretch.column] = np.minimum(cured[:, stretch.column], others[steps][:, stretch.column])
            saved[steps] = own[steps].max(axis=1) - cured.max(axis=1)
        ranks = tuple(int(rank) for rank in evidence.ranks[columns])
        nodes = {evidence.node_names[evidence.node_of[column]] for column in columns}
        node = nodes.pop() if len(nodes) == 1 else None
        first, last = int(evidence.steps[stretch.start]), int(evidence.steps[stretch.end - 1])
        stage = int(stages[stretch.column])
        what = f"stage {stage} (rank{'s' if len(ranks) > 1 else ''} {rank_list(ranks)})"
        if is_work:
            sentence = f"{what} has more work than the other stages: {short(stretch.excess_ms)} ms a step of its own "
            "more"
            advice = (
                "move layers from this stage to the others, or take a schedule with several stages a rank (interleaved)"
            )
            cause_name = "more work in this stage"
        else:
            sentence = (
                f"rank {ranks[0]} on {node}, alone in stage {stage}, takes {short(stretch.excess_ms)} ms more of its "
                f"own in a "
                f"step than the other stages (steps {first} to {last}), {cause.where(stretch.excess_ms)}: "
                f"{cause.name}"
            )
            advice, cause_name = cause.advice, cause.name
        verdicts.append(
            Verdict(
                kind=STAGE if is_work else RANK,
                ranks=ranks,
                node=node,
                phase=cause.phase,
                state=cause.state,
                excess_ms=stretch.excess_ms,
                share=share(evidence, saved),
                first_step=first,
                last_step=last,
                confidence=stretch.hits,
                cause=cause_name,
                sentence=sentence,
                advice=advice,
                evidence={
                    "stage": stage,
                    "own_ms_by_stage": {
                        str(int(each)): round(float(np.median(own[steps][:, place])), 3)
                        for place, each in enumerate(stages)
                    },
                    "cell_excess_ms": round(cause.excess_ms, 3),
                },
                what_if=what_if(evidence, saved),
            )
        )
    return verdicts
