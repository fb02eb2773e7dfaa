"""Single slow steps, and what they add up to: one rank again and again, another one each time, or once."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from bireme.ledger import PHASES, STATES
from bireme.text import name_ranks, short
from bireme.verdict.causes import GARBAGE, GARBAGE_ADVICE, cause_of, name_cell
from bireme.verdict.evidence import Array, Evidence
from bireme.verdict.excess import FEW_RANKS, MAD, noise_ms, window_length
from bireme.verdict.kinds import CAUSED, DATA, EFFECT, ONE_OFF, RANK, Verdict
from bireme.verdict.worth import caused_ms, saved_ms, share, what_if

_HIT = 2 * EFFECT  # of the step: a single step is noisier than a median
_HIT_NOISES = 5.0
_ONCE = 0.3  # of the step, to be worth a word when it happens once
_ONCE_NOISES = 8.0
_OFTEN = 0.4  # of the steps must have a culprit if culprits take turns
_MOST = 0.6  # of the hits that one of several ranks may have, if they take turns
_MOST_OF_TWO = 0.75
_STANDS_OUT = 0.25  # how often the slowest stands out x how far ahead of the second slowest it is
_CHANGES = 0.25  # of the hits that must fall on another rank than the one before
_CONCENTRATED = 0.8  # of the hits on one rank: then it is that rank
_LEAST_HITS = 5
_LEAST_PERIODIC = 3
_MOST_ONE_OFFS = 3
_LONGEST_PERIOD = 64


@dataclass(frozen=True, slots=True)
class Hits:
    """Steps in which somebody was slow: the slowest rank's column and its excess, by step."""

    leader: NDArray[np.int64]  # (T,)
    excess_ms: Array  # (T,)
    alone: Array  # (T,) 1 - the second slowest's excess / the slowest's: 0 where two are equally slow
    hit: NDArray[np.bool_]  # (T,) large enough to count
    noise_ms: float


def _noises_of_turns(ranks: int) -> float:
    """Times the noise that the slowest of so many healthy ranks reaches in less than a tenth of the steps."""
    return -NormalDist().inv_cdf(0.1 / ranks) + 0.7


def find_hits(evidence: Evidence, excess: Array, turns: bool = False) -> Hits:
    """`turns`: to see whether ranks take turns, which makes most of their differences large."""
    noises = _noises_of_turns(len(evidence.ranks)) if turns else _HIT_NOISES
    noise = noise_ms(excess, evidence.own_ms if turns or len(evidence.ranks) <= FEW_RANKS else None)
    leader = np.argmax(excess, axis=1)
    largest = excess[np.arange(len(excess)), leader]
    second = np.partition(excess, -2, axis=1)[:, -2]
    alone = 1 - np.clip(second / np.maximum(largest, 1e-9), 0.0, 1.0)
    return Hits(leader, largest, alone, largest >= max(_HIT * evidence.typical_ms, noises * noise), noise)


def takes_turns(hits: Hits, ranks: int) -> bool:
    """Whether most steps have a slowest rank that stands out, and it is another one from step to step."""
    leaders = hits.leader[hits.hit]
    if len(leaders) < max(4, _OFTEN * len(hits.hit)):
        return False
    # One that is slow every other step takes no turns: what is left without it must look the same.
    first = Counter(leaders.tolist()).most_common(1)[0][0] if ranks > FEW_RANKS else -1
    others = hits.leader != first
    if not (hits.hit & others).any():
        return False
    # Of a thousand ranks whose times vary one is always far out, but then others are nearly as far.
    often, alone = float(hits.hit[others].mean()), float(np.median(hits.alone[hits.hit & others]))
    if often * alone < _STANDS_OUT:
        return False
    most = max(Counter(leaders.tolist()).values()) / len(leaders)
    changes = float((np.diff(leaders) != 0).mean())
    return most <= (_MOST_OF_TWO if ranks == 2 else _MOST) and changes >= _CHANGES


def single_steps(evidence: Evidence, explained: Sequence[Verdict]) -> list[Verdict]:
    """Verdicts from steps that no persistent verdict explains."""
    if len(evidence.ranks) < 2:
        return _common_one_offs(evidence, set())
    peers, excess = evidence.peers_ms, evidence.excess_ms.copy()
    for verdict in explained:  # what is left of a rank that is slow all the time
        rows = np.flatnonzero((evidence.steps >= verdict.first_step) & (evidence.steps <= verdict.last_step))
        # Where a stretch begins and ends is known to a window; the steps beside it are part of the same.
        edge = window_length(len(excess), noise_ms(excess), evidence.typical_ms)
        beside = np.r_[max(0, rows[0] - edge) : rows[0], rows[-1] + 1 : min(len(excess), rows[-1] + 1 + edge)]
        for column in evidence.columns(verdict.ranks):
            excess[rows, column] -= _level(excess[rows, column])
            excess[beside, column] = np.minimum(excess[beside, column], 0.0)
    hits = find_hits(evidence, excess)
    turn_hits = find_hits(evidence, excess, turns=True)
    turns = takes_turns(turn_hits, len(evidence.ranks))
    verdicts = _garbage(evidence, hits, peers, excess)
    if not verdicts and turns:
        verdicts = [_taking_turns(evidence, turn_hits)]
    if not verdicts:
        verdicts = _again_and_again(evidence, hits, peers)
    if not verdicts:
        verdicts = _one_offs(evidence, hits, excess)
        told = {step for verdict in verdicts for step in range(verdict.first_step, verdict.last_step + 1)}
        verdicts += _common_one_offs(evidence, told | set(evidence.steps[hits.hit].tolist()))
    return verdicts


def _level(series: Array) -> Array:
    """(n,) the series smoothed by medians of a few steps: where it is, whether it stays or rises."""
    around = 7
    if len(series) < around:
        return np.full(len(series), float(np.median(series)))
    padded = np.pad(series, around // 2, mode="reflect")
    return np.asarray(np.median(np.lib.stride_tricks.sliding_window_view(padded, around), axis=1))


def takes_turns_in(evidence: Evidence) -> bool:
    if len(evidence.ranks) < 2:
        return False
    return takes_turns(find_hits(evidence, evidence.excess_ms, turns=True), len(evidence.ranks))


def period_of(places: NDArray[np.int64]) -> tuple[int, float] | None:
    """(k, how regular) when events at these steps come every k-th step, k of 2 or more; None when they do not."""
    if len(places) < _LEAST_PERIODIC:
        return None
    gaps = np.diff(places)
    common = Counter(gaps.tolist()).most_common(1)[0]
    k = int(common[0])
    if not 2 <= k <= _LONGEST_PERIOD:
        return None
    residues = Counter((places % k).tolist()).most_common(1)[0]
    expected = (places[-1] - places[0]) // k + 1
    regular = min(residues[1] / len(places), residues[1] / expected)
    return (k, float(regular)) if regular >= 0.8 else None


# --- kinds -------------------------------------------------------------------------------------------------------


def _garbage(evidence: Evidence, hits: Hits, peers: Array, excess: Array) -> list[Verdict]:
    """Pauses for garbage collection on one rank or on several, at different steps."""
    columns = np.arange(len(evidence.ranks))
    over = evidence.gc_ms - evidence.median_of_peers(evidence.gc_ms)
    paused = (over >= 0.5 * np.maximum(excess, 1e-9)) & (excess >= EFFECT * evidence.typical_ms)
    guilty = columns[paused.sum(axis=0) >= _LEAST_PERIODIC]
    if not len(guilty):
        return []
    any_paused = np.flatnonzero(paused[:, guilty].any(axis=1))
    # Only what the pauses explain: a hit of another cause is not theirs.
    if len(any_paused) < 0.5 * hits.hit.sum():
        return []
    average = np.where(paused[:, guilty], peers[:, guilty], evidence.own_ms[:, guilty])
    saved = saved_ms(evidence, guilty.tolist(), average, slice(0, len(evidence.steps)))
    if share(evidence, saved) < CAUSED:
        return []
    mean_ms = float(over[:, guilty][paused[:, guilty]].mean())
    ranks = tuple(int(evidence.ranks[column]) for column in guilty)
    rows = [np.flatnonzero(paused[:, column]) for column in guilty]
    cause = cause_of(evidence, [int(guilty[0])], rows[0], mean_ms)
    first, last = int(evidence.steps[any_paused[0]]), int(evidence.steps[any_paused[-1]])
    nodes = {evidence.node_names[evidence.node_of[column]] for column in guilty}
    each = "it stands" if len(ranks) == 1 else "they stand, at different steps,"
    return [
        Verdict(
            kind=RANK,
            ranks=ranks,
            node=nodes.pop() if len(nodes) == 1 else None,
            phase=cause.phase,
            state=cause.state,
            excess_ms=mean_ms,
            share=share(evidence, saved),
            first_step=first,
            last_step=last,
            confidence=float(min(1.0, len(any_paused) / max(1, int(hits.hit.sum())))),
            cause=GARBAGE,
            sentence=f"Python's garbage collection stops {name_ranks(ranks)}: {each} for {short(mean_ms)} ms in "
            f"{len(any_paused)} of {len(evidence.steps)} steps, and all others wait",
            advice=GARBAGE_ADVICE,
            evidence={
                "pauses": int(sum(len(row) for row in rows)),
                "mean_pause_ms": round(mean_ms, 3),
                "steps_with_a_pause": len(any_paused),
                "noise_ms": round(hits.noise_ms, 3),
            },
            what_if=what_if(evidence, saved),
        )
    ]


def _taking_turns(evidence: Evidence, hits: Hits) -> Verdict:
    own, rows = evidence.own_ms, np.flatnonzero(hits.hit)
    saved = np.where(hits.hit, own.max(axis=1) - own.mean(axis=1), 0.0)
    leaders = hits.leader[rows]
    counts = Counter(leaders.tolist())
    ranks = tuple(sorted(int(evidence.ranks[column]) for column in counts))
    excess_ms = float(np.median(hits.excess_ms[rows]))
    over = np.mean([_cells_over(evidence, int(row), int(hits.leader[row])) for row in rows[:200]], axis=0)
    cause = name_cell(evidence, over, excess_ms)
    first, last = int(evidence.steps[rows[0]]), int(evidence.steps[rows[-1]])
    most = max(counts.values()) / len(rows)
    work = cause.state == "running"
    return Verdict(
        kind=DATA,
        ranks=ranks,
        phase=cause.phase,
        state=cause.state,
        excess_ms=excess_ms,
        share=share(evidence, saved),
        first_step=first,
        last_step=last,
        confidence=float(hits.hit[(evidence.steps >= first) & (evidence.steps <= last)].mean()),
        cause="uneven work" if work else "uneven steps",
        sentence=f"another rank is the slowest from step to step: {name_ranks(ranks)} take turns, "
        f"by {short(excess_ms)} ms in {len(rows)} of {len(evidence.steps)} steps, {cause.where(excess_ms)}",
        advice="give every rank the same amount of work in a step: pack or sort sequences by length, or share out "
        "tokens instead of samples"
        if work
        else cause.advice.replace("this rank", "the rank that is slow"),
        evidence={
            "steps_with_a_slowest": len(rows),
            "most_often": {"rank": int(evidence.ranks[max(counts, key=lambda c: counts[c])]), "share": round(most, 3)},
            "noise_ms": round(hits.noise_ms, 3),
        },
        what_if=what_if(evidence, saved),
    )


def _again_and_again(evidence: Evidence, hits: Hits, peers: Array) -> list[Verdict]:
    """One rank that is slow in some steps, regularly or not."""
    rows = np.flatnonzero(hits.hit)
    counts = Counter(hits.leader[rows].tolist())
    verdicts = []
    for column, number in counts.most_common(2):
        mine = rows[hits.leader[rows] == column]
        places = evidence.steps[mine]
        period = period_of(places)
        concentrated = number >= _CONCENTRATED * len(rows) and number >= _LEAST_HITS
        if not (concentrated or period is not None):
            continue
        average = evidence.own_ms[:, [column]].copy()
        average[mine, 0] = peers[mine, column]
        saved = saved_ms(evidence, [column], average, slice(0, len(evidence.steps)))
        excess_ms = float(np.median(hits.excess_ms[mine]))
        caused = caused_ms(evidence, [column], evidence.excess_ms[:, column], mine)
        if share(evidence, saved) < CAUSED or caused * number < CAUSED * float(evidence.step_ms.sum()):
            continue
        cause = cause_of(evidence, [column], mine, excess_ms)
        rank, node = int(evidence.ranks[column]), evidence.node_names[evidence.node_of[column]]
        often = f"every {_ordinal(period[0])} step" if period else f"in {number} of {len(evidence.steps)} steps"
        advice = cause.advice
        if period and cause.phase == "input":
            advice = loader_advice(evidence, period[0], column)
        verdicts.append(
            Verdict(
                kind=RANK,
                ranks=(rank,),
                node=node,
                phase=cause.phase,
                state=cause.state,
                excess_ms=excess_ms,
                share=share(evidence, saved),
                first_step=int(places[0]),
                last_step=int(places[-1]),
                confidence=float(number / len(rows)),
                cause=cause.name,
                sentence=f"rank {rank} on {node} takes {short(excess_ms)} ms more of its own than its peers {often}, "
                f"{cause.where(excess_ms)}: {cause.name}",
                advice=advice,
                evidence={
                    "slow_steps": int(number),
                    "period_steps": period[0] if period else None,
                    "of_all_slow_steps": round(number / len(rows), 3),
                    "others_wait_ms": round(caused, 3),
                    "noise_ms": round(hits.noise_ms, 3),
                },
                what_if=what_if(evidence, saved),
            )
        )
    return verdicts


def loader_advice(evidence: Evidence, period: int, column: int) -> str:
    """What an input stall every k-th step means where k workers read: each batch takes k steps to make."""
    if evidence.workers and period == evidence.workers:
        with_input = float(evidence.step_ms.mean())
        without = with_input - float(evidence.phase_ms(0)[:, column].mean())
        needed = int(np.ceil(period * with_input / max(without, 1e-9)))
        return (
            f"every {_ordinal(period)} step waits, and there are {period} workers: the loader is too slow; about "
            f"{needed} workers would keep up, if there are cores for them"
        )
    return "the loader is too slow now and then: look at what every batch of that kind needs, and read ahead further"


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _one_offs(evidence: Evidence, hits: Hits, excess: Array) -> list[Verdict]:
    # Of many ranks one is far out in every step: what happens once is far out among those.
    usual = float(np.median(hits.excess_ms))
    spread = MAD * float(np.median(np.abs(hits.excess_ms - usual)))
    least = max(_ONCE * evidence.typical_ms, _ONCE_NOISES * hits.noise_ms, usual + _ONCE_NOISES * spread)
    rows = np.flatnonzero(hits.hit & (hits.excess_ms >= least))
    if not len(rows):
        return []
    runs = np.split(rows, np.flatnonzero((np.diff(rows) > 1) | (np.diff(hits.leader[rows]) != 0)) + 1)
    runs.sort(key=lambda run: -float(hits.excess_ms[run].sum()))
    verdicts = []
    for run in runs[:_MOST_ONE_OFFS]:
        columns = sorted(set(hits.leader[run].tolist()))
        excess_ms = float(hits.excess_ms[run].max())
        worst = int(hits.leader[run][np.argmax(hits.excess_ms[run])])
        cause = cause_of(evidence, [worst], run, excess_ms)
        saved = np.zeros(len(evidence.steps))
        saved[run] = np.minimum(hits.excess_ms[run], np.maximum(evidence.step_ms[run] - evidence.typical_ms, 0.0))
        ranks = tuple(int(evidence.ranks[column]) for column in columns)
        first, last = int(evidence.steps[run[0]]), int(evidence.steps[run[-1]])
        when = f"in step {first}" if first == last else f"in steps {first} to {last}"
        verdicts.append(
            Verdict(
                kind=ONE_OFF,
                ranks=ranks,
                node=evidence.node_names[evidence.node_of[worst]],
                phase=cause.phase,
                state=cause.state,
                excess_ms=excess_ms,
                share=share(evidence, saved),
                first_step=first,
                last_step=last,
                confidence=1.0,
                cause=cause.name,
                sentence=f"once, {when}, {name_ranks(ranks)} took {short(excess_ms)} ms more than its peers, "
                f"{cause.where(excess_ms)}: {cause.name}",
                advice="",
                evidence={"noise_ms": round(hits.noise_ms, 3), "typical_step_ms": round(evidence.typical_ms, 3)},
                what_if=what_if(evidence, saved),
            )
        )
    return sorted(verdicts, key=lambda verdict: verdict.first_step)


def _common_one_offs(evidence: Evidence, told: set[int]) -> list[Verdict]:
    """Steps that were slow for everybody at once."""
    over = evidence.step_ms - evidence.typical_ms
    noise = noise_ms(evidence.step_ms[:, None])
    rows = np.flatnonzero(over >= max(1.0 * evidence.typical_ms, 2 * _ONCE_NOISES * noise))
    rows = np.array([row for row in rows if int(evidence.steps[row]) not in told], dtype=np.int64)
    if not 0 < len(rows) <= _MOST_ONE_OFFS:
        return []
    verdicts = []
    usual = np.median(evidence.cells_ms.mean(axis=1, dtype=np.float64), axis=0)
    for row in rows:
        cells = evidence.cells_ms[row].mean(axis=0, dtype=np.float64) - usual

        cell = int(np.argmax(cells))
        saved = np.zeros(len(evidence.steps))
        saved[row] = over[row]
        step = int(evidence.steps[row])
        phase, state = PHASES[cell // len(STATES)], STATES[cell % len(STATES)]
        verdicts.append(
            Verdict(
                kind=ONE_OFF,
                ranks=tuple(int(rank) for rank in evidence.ranks),
                phase=phase,
                state=state,
                excess_ms=float(over[row]),
                share=share(evidence, saved),
                first_step=step,
                last_step=step,
                confidence=1.0,
                cause="all ranks at once",
                sentence=f"once, in step {step}, all ranks took {short(over[row])} ms more than usual, most of it in "
                f"{phase}/{state}",
                evidence={"noise_ms": round(noise, 3), "typical_step_ms": round(evidence.typical_ms, 3)},
                what_if=what_if(evidence, saved),
            )
        )
    return verdicts


def _cells_over(evidence: Evidence, row: int, column: int) -> Array:
    cells = evidence.cells_ms[row].astype(np.float64)
    same = evidence.role_of == evidence.role_of[column]
    same[column] = False
    peers = same if same.any() else np.arange(len(same)) != column
    return np.asarray(cells[column] - np.median(cells[peers], axis=0))
