"""Ranks and nodes that are slow for many steps on end: `rank`, `node`, and `drift` where they get slower bit by bit."""

from collections.abc import Sequence

import numpy as np

from bireme.text import rank_list, short
from bireme.verdict.causes import cause_of
from bireme.verdict.evidence import Array, Evidence
from bireme.verdict.excess import FEW_RANKS, Stretch, is_ramp, noise_ms, stretches
from bireme.verdict.kinds import CAUSED, DRIFT, EFFECT, NODE, RANK, Verdict
from bireme.verdict.worth import caused_ms, saved_ms, share, what_if

_OF_NODE = 0.5  # of its node's excess that a rank has, if it is the node
_MOST_RANKS = 0.8  # of a node's ranks that must have it
_WORSE = 1.7  # times its node's excess: then a rank is slow by itself, too
_FEW_NODES = 4
_LATEST = 15  # steps that tell how slow it is now
_STRICT_HITS = 0.9
_FULL = 2 * EFFECT  # of the step, where all cores are in use: they are not equally fast then


def persistent(evidence: Evidence, turns: bool) -> list[Verdict]:
    """Verdicts of kind rank, node and drift. `turns`: ranks take turns at being slow; then only a rank that is slow in
    nearly every step of a stretch is one that is slow by itself."""
    if len(evidence.ranks) < 2:
        return []
    hits = {"hits": _STRICT_HITS} if turns else {}
    peers, excess = evidence.peers_ms, evidence.excess_ms
    noise = noise_ms(excess, evidence.own_ms if len(evidence.ranks) <= FEW_RANKS else None)
    found = stretches(excess, evidence.step_ms, noise, **hits)
    nodes = _nodes(evidence, hits)
    verdicts = []
    explained: dict[int, list[Stretch]] = {}  # by column: what its node explains
    for stretch, columns, average in nodes:
        verdict = _verdict(evidence, stretch, columns, average, NODE)
        if verdict is not None:
            verdicts.append(verdict)
            for column in columns:
                explained.setdefault(column, []).append(stretch)
    for stretch in found:
        if not any(_explains(of_node, stretch) for of_node in explained.get(stretch.column, ())):
            verdict = _verdict(evidence, stretch, [stretch.column], peers[:, [stretch.column]], RANK)
            if verdict is not None:
                verdicts.append(verdict)
    return verdicts


def _explains(of_node: Stretch, of_rank: Stretch) -> bool:
    """Whether a rank is slow because its node is: at the same time, and about as much."""
    common = min(of_node.end, of_rank.end) - max(of_node.start, of_rank.start)
    inside = common >= _MOST_RANKS * (of_rank.end - of_rank.start)
    return inside and of_rank.excess_ms < _WORSE * of_node.excess_ms


def _nodes(evidence: Evidence, hits: dict[str, float]) -> list[tuple[Stretch, list[int], Array]]:
    """Nodes of several ranks that are slow as a whole: (stretch, columns, what their ranks would take if average)."""
    members = [np.flatnonzero(evidence.node_of == node) for node in range(len(evidence.node_names))]
    candidates = [node for node, columns in enumerate(members) if len(columns) > 1]
    if sum(len(columns) > 0 for columns in members) < 2 or not candidates:
        return []
    average = {node: _elsewhere(evidence, members[node], node, len(candidates)) for node in candidates}
    candidates = [node for node in candidates if not np.isnan(average[node]).any()]
    if not candidates:
        return []
    excess = np.stack(
        [np.median(evidence.own_ms[:, members[node]] - average[node], axis=1) for node in candidates], axis=1
    )
    found = []
    for stretch in stretches(excess, evidence.step_ms, noise_ms(excess), **hits):
        node = candidates[stretch.column]
        columns, steps = members[node], slice(stretch.start, stretch.end)
        each = np.median(evidence.own_ms[steps][:, columns] - average[node][steps], axis=0)
        if (each >= _OF_NODE * stretch.excess_ms).mean() >= _MOST_RANKS:
            found.append((stretch, [int(column) for column in columns], average[node]))
    return found


def _elsewhere(evidence: Evidence, columns: np.ndarray, node: int, nodes: int) -> Array:
    """(T, len(columns)) the median self time of the same role on other nodes; NaN where there is none."""
    result = np.full((len(evidence.steps), len(columns)), np.nan)
    roles = evidence.role_of[columns]
    for role in np.unique(roles):
        others = evidence.role_of == role
        elsewhere = others & (evidence.node_of != node)
        if not elsewhere.any():
            continue
        # Of many nodes one more or less in the median changes little, and it is the same for all of them.
        chosen = elsewhere if nodes <= _FEW_NODES else others
        result[:, roles == role] = np.median(evidence.own_ms[:, chosen], axis=1)[:, None]
    return result


def _verdict(evidence: Evidence, stretch: Stretch, columns: Sequence[int], average: Array, kind: str) -> Verdict | None:
    steps = slice(stretch.start, stretch.end)
    excess = np.median(evidence.own_ms[:, columns] - average, axis=1)
    local_ms = float(np.median(evidence.step_ms[steps]))
    caused = caused_ms(evidence, columns, excess, steps)
    if caused < CAUSED * local_ms:
        return None
    if evidence.crowded is not None and evidence.crowded[list(columns)].any() and stretch.excess_ms < _FULL * local_ms:
        return None
    ramp = is_ramp(excess)
    first, last, excess_ms, hits = stretch.start, stretch.end - 1, stretch.excess_ms, stretch.hits
    if ramp is not None and ramp[1] >= EFFECT * local_ms and stretch.end == len(evidence.steps):
        kind, first = DRIFT, min(ramp[0], first)
        excess_ms = float(np.median(excess[-max(5, (last - first) // 4) :]))
    span_of = slice(first, last + 1)
    # Average, but not in the same steps as its peers: all wait for the slowest, and with few ranks that is one more.
    cured = average.copy()
    cured[span_of] = np.roll(average[span_of], (last + 1 - first) // 2, axis=0)
    saved = saved_ms(evidence, columns, cured, span_of)
    mean_ms = float(excess[first : last + 1].mean())  # of a drift half of what it has come to
    cause = cause_of(evidence, columns, slice(first, last + 1), mean_ms)
    ranks = tuple(int(evidence.ranks[column]) for column in columns)
    nodes = {evidence.node_names[evidence.node_of[column]] for column in columns}
    node = nodes.pop() if len(nodes) == 1 else None
    span = evidence.steps[first], evidence.steps[last]
    who = f"node {node} ({rank_list(ranks)})" if kind == NODE else f"rank {ranks[0]} on {node}"
    if len(ranks) > 1 and kind == DRIFT:
        who = f"node {node}"
    if kind == DRIFT:
        does = f"gets slower since step {span[0]}, and takes {short(excess_ms)} ms more than its peers now"
    else:
        does = f"takes {short(excess_ms)} ms more of its own than its peers in a step"
    return Verdict(
        kind=kind,
        ranks=ranks,
        node=node,
        phase=cause.phase,
        state=cause.state,
        excess_ms=excess_ms,
        share=share(evidence, saved),
        first_step=int(span[0]),
        last_step=int(span[1]),
        confidence=hits,
        cause=_drifting(cause.name) if kind == DRIFT else cause.name,
        sentence=f"{who} {does} (steps {span[0]} to {span[1]}), {cause.where(mean_ms)}: {cause.name}",
        advice=_COOL if kind == DRIFT and cause.state == "running" else cause.advice,
        evidence={
            "own_ms": round(float(np.median(evidence.own_ms[steps][:, columns])), 3),
            "peers_own_ms": round(float(np.median(average[steps])), 3),
            "cell_excess_ms": round(cause.excess_ms, 3),
            "others_wait_ms": round(caused, 3),
            "latest_excess_ms": round(float(np.median(excess[steps][-_LATEST:])), 3),
            "noise_ms": round(noise_ms(excess[:, None]), 3),
            "times_the_noise": round(min(stretch.sigmas, 1e6), 1),
            "steps": stretch.end - stretch.start,
            "peers": _peers_named(evidence, columns),
        },
        what_if=what_if(evidence, saved),
    )


_COOL = (
    "look for heat or a power limit: compare this machine's clock and temperature now with those of the first steps, "
    "and with its peers'"
)


def _drifting(cause: str) -> str:
    return "gets slower bit by bit" if cause == "slow core or more work" else cause


def _peers_named(evidence: Evidence, columns: Sequence[int]) -> str:
    same = np.isin(evidence.role_of, evidence.role_of[list(columns)])
    same[list(columns)] = False
    return rank_list([int(rank) for rank in evidence.ranks[same]])
