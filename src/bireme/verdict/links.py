"""Links: transfer that takes long on all members of a group while nobody waits for anybody."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bireme.ledger import LEAVE_TOGETHER, PHASES, STATES, TRANSFER, bus_bandwidth_factor
from bireme.text import listed, name_ranks, short
from bireme.verdict.evidence import Array, Evidence, Use
from bireme.verdict.excess import noise_ms, stretches, windows
from bireme.verdict.kinds import EFFECT, LINK, Verdict
from bireme.verdict.worth import share, what_if

# Times what is to be expected: less than that is how networks vary.
_THAN_BEFORE = 1.3
_THAN_SIBLINGS = 1.4
_BUSY = 1.4  # what a collective takes by itself: here it shares cores and sockets with training
_THAN_NOMINAL = 2.0
_TO_COMPARE = 5  # steps, at least
_BEST = 0.2  # the quantile of a group's own history that says what its link can do
# Of a shaped link's rate what gloo reaches as bus bandwidth when nothing is wrong (docs/links.md); it runs a
# reduce-scatter as an all-reduce.
_OF_NOMINAL = {"all_reduce": 0.9, "all_gather": 0.6, "reduce_scatter": 0.36}


# (operation, ranks, bytes) -> milliseconds, as measured; None: not measured
Expected = Callable[[str, tuple[int, ...], float], float | None]


@dataclass(frozen=True, slots=True)
class _Slow:
    use: Use
    start: int
    end: int
    expected_ms: Array  # (T,)
    against: str
    hits: float


def link_verdicts(evidence: Evidence, expected: Expected | None = None) -> list[Verdict]:
    """Groups over several nodes (or, on one node, over several ranks) whose transfers are slower than they were, than
    those of groups like them, than was measured (`expected`), or than half of what the link is said to carry."""
    if not evidence.collectives_known:
        return []
    slow = [each for use in evidence.uses if (each := _slow(evidence, use, expected)) is not None]
    by_group: dict[int, list[_Slow]] = {}
    for each in slow:
        by_group.setdefault(each.use.group, []).append(each)
    verdicts = [_verdict(evidence, found) for found in by_group.values()]
    good = [verdict for verdict in verdicts if verdict is not None]
    # One link, several groups over it: the group that loses most speaks for it.
    good.sort(key=lambda verdict: -verdict.share)
    return good[:1] if good and all(set(each.ranks) & set(good[0].ranks) for each in good) else good


def _slow(evidence: Evidence, use: Use, expected: Expected | None) -> _Slow | None:
    ranks = evidence.groups[use.group][1]
    if len(ranks) < 2 or use.operation not in LEAVE_TOGETHER or use.operation == "barrier":
        return None
    if float(np.median(use.bytes)) <= 0 or float(np.median(use.transfer_ms)) < EFFECT / 2 * evidence.typical_ms:
        return None
    rate = (use.bytes / np.maximum(use.transfer_ms, 1e-6))[use.transfer_ms > 0]  # bytes per millisecond
    best = float(np.quantile(windows(rate[:, None], 5), 1 - _BEST))
    candidates: list[tuple[Array, float, str]] = []  # what to expect, and how many times that is too slow
    if expected is not None:
        kinds, which = np.unique(np.stack([use.count, use.bytes]), axis=1, return_inverse=True)
        measured = [count * (expected(use.operation, ranks, size / count) or np.nan) for count, size in kinds.T]
        if not np.isnan(measured).any():
            candidates.append((np.array(measured)[which.reshape(-1)], _BUSY, "links.json"))
    candidates.append((use.bytes / best, _THAN_BEFORE, "its own history"))
    siblings = _siblings(evidence, use)
    if siblings is not None:
        candidates.append((use.bytes / siblings, _THAN_SIBLINGS, "groups like it"))
    nominal = _nominal(evidence, use)
    if nominal is not None:
        candidates.append((use.bytes / nominal, _THAN_NOMINAL, "the link's rate"))
    for expected_ms, too_slow, against in candidates:
        over = np.where(use.transfer_ms > too_slow * expected_ms, use.transfer_ms - expected_ms, 0.0)[:, None]
        for stretch in stretches(over, evidence.step_ms, noise_ms(over)):
            return _Slow(use, stretch.start, stretch.end, expected_ms, against, stretch.hits)
    return None


def _nominal(evidence: Evidence, use: Use) -> float | None:
    """Bytes per millisecond that an operation gets over an emulated link, when nothing is wrong."""
    ranks = evidence.groups[use.group][1]
    if evidence.link_bytes_per_s is None or use.operation not in _OF_NOMINAL or len(_nodes(evidence, ranks)) < 2:
        return None
    factor = bus_bandwidth_factor(use.operation, len(ranks))
    return evidence.link_bytes_per_s * _OF_NOMINAL[use.operation] / factor / 1e3


def _siblings(evidence: Evidence, use: Use) -> float | None:
    """The median rate, in bytes per millisecond, of other groups of the same name that move the same."""
    name = evidence.groups[use.group][0]
    size = float(np.median(use.bytes))
    rates = [
        float(np.median(other.bytes / np.maximum(other.transfer_ms, 1e-6)))
        for other in evidence.uses
        if other is not use
        and other.operation == use.operation
        and evidence.groups[other.group][0] == name
        and len(evidence.groups[other.group][1]) == len(evidence.groups[use.group][1])
        and len(_nodes(evidence, evidence.groups[other.group][1]))
        == len(_nodes(evidence, evidence.groups[use.group][1]))
        and 0.8 < float(np.median(other.bytes)) / size < 1.25
    ]
    return float(np.median(rates)) if len(rates) >= 2 else None


def _nodes(evidence: Evidence, ranks: tuple[int, ...]) -> list[str]:
    known = set(evidence.ranks.tolist())
    indices = {int(evidence.node_of[column]) for column in evidence.columns([rank for rank in ranks if rank in known])}
    return [evidence.node_names[index] for index in sorted(indices)]


def _verdict(evidence: Evidence, found: list[_Slow]) -> Verdict | None:
    worst = max(found, key=lambda each: float(np.median(each.use.transfer_ms - each.expected_ms)))
    start, end = min(each.start for each in found), max(each.end for each in found)
    steps = slice(start, end)
    name, ranks = evidence.groups[worst.use.group]
    known = set(evidence.ranks.tolist())
    columns = evidence.columns([rank for rank in ranks if rank in known])
    if not columns:
        return None
    # Of the slower transfer only what the step felt: the rest was hidden behind computing. In a step without a
    # straggler all members are exposed alike; where one waits less than the others, it is the least that counts.
    exposed = evidence.cells_ms[:, columns, TRANSFER :: len(STATES)].sum(axis=2, dtype=np.float64).min(axis=1)
    over = sum(np.maximum(each.use.transfer_ms - each.expected_ms, 0.0) for each in found)
    saved = np.zeros(len(evidence.steps))
    # What was hidden before may be hidden still: no more than the step feels of it now and did not before.
    outside = np.ones(len(saved), dtype=bool)
    outside[steps] = False
    before_ms = float(np.median(exposed[outside])) if outside.sum() >= _TO_COMPARE else 0.0
    saved[steps] = np.minimum(over, np.maximum(exposed - before_ms, 0.0))[steps]
    excess_ms = float(np.median(saved[steps]))
    if excess_ms < EFFECT * float(np.median(evidence.step_ms[steps])):
        return None
    phases = evidence.cells_ms[steps][:, columns].mean(axis=(0, 1), dtype=np.float64)[TRANSFER :: len(STATES)]
    use = worst.use
    rate = bus_bandwidth_factor(use.operation, len(ranks)) * use.bytes / np.maximum(use.transfer_ms, 1e-6) * 1e3
    wanted = bus_bandwidth_factor(use.operation, len(ranks)) * use.bytes / np.maximum(worst.expected_ms, 1e-6) * 1e3
    nodes = _nodes(evidence, ranks)
    between = f"between {listed(nodes)}" if len(nodes) > 1 else f"on {nodes[0]}"
    first, last = int(evidence.steps[start]), int(evidence.steps[end - 1])
    now, then = float(np.median(rate[steps])), float(np.median(wanted[steps]))
    known_by = {
        "links.json": "as measured before",
        "the link's rate": "to be expected of this link",
        "groups like it": "in groups like it",
        "its own history": "at its best in this run",
    }
    return Verdict(
        kind=LINK,
        ranks=tuple(ranks),
        node=None,
        phase=PHASES[int(np.argmax(phases))],
        state="transfer",
        excess_ms=excess_ms,
        share=share(evidence, saved),
        first_step=first,
        last_step=last,
        confidence=worst.hits,
        cause="slow link",
        sentence=f"the link {between} is slow (steps {first} to {last}): {use.operation} of group {name} over "
        f"{name_ranks(ranks)} reaches {short(now / 1e6)} MB/s of bus bandwidth, {short(then / 1e6)} MB/s "
        f"{known_by[worst.against]}",
        advice="measure it by itself with `bireme links`; look for another job on the network, a cable or port that "
        "fell back to a lower rate, and the interface that is used; or send less (docs/layouts.md)",
        evidence={
            "group": name,
            "operation": use.operation,
            "nodes": nodes,
            "bytes_per_step": int(np.median(use.bytes)),
            "bus_bandwidth_bytes_per_s": round(now),
            "expected_bytes_per_s": round(then),
            "expected_from": worst.against,
            "others_wait_ms": round(float(np.median(evidence.wait_ms[steps].mean(axis=1))), 3),
        },
        what_if=what_if(evidence, saved),
    )
