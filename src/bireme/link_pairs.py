"""Every node to every other, one direction at a time: in which order to measure, which pair is slow, whom to blame.

Pure functions: no torch, no clocks.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

SLOW_SHARE = 0.7  # of what the nodes reach with their best peer
SLOW_SHARE_OF_LINK = 0.5  # of the rate that the link is said to have: a program never gets all of it
ONE_AT_A_TIME_NODES = 16  # up to here no two pairs are measured at the same time


@dataclass(frozen=True, slots=True)
class Pair:
    """What one message from the first rank on `source` to the first rank on `target` took."""

    source: str
    target: str
    bytes: int
    repetitions: int
    median_s: float | None  # None: not measured, and `reason` says why
    reason: str | None = None
    previous_bit_per_s: float | None = None  # of the measurement that this one replaces

    @property
    def rate_bit_per_s(self) -> float | None:
        return None if self.median_s is None else self.bytes * 8 / self.median_s


Direction = tuple[str, str]  # source, target


def rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """Every pair of `nodes` once; the pairs of one round share no node and are measured at the same time."""
    if nodes <= ONE_AT_A_TIME_NODES:
        return [[pair] for pair in itertools.combinations(range(nodes), 2)]
    seats: list[int | None] = [*range(nodes), *([None] if nodes % 2 else [])]
    result = []
    for _ in range(len(seats) - 1):
        facing = zip(seats[: len(seats) // 2], reversed(seats), strict=False)
        result.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]  # all but one move up: everybody meets everybody
    return result


def next_bytes(bytes: int, time_s: float, target_s: float, max_bytes: int) -> tuple[int, bool]:
    """The size of the next message, and whether it is the one to measure with: it takes about `target_s`.

    Sizes grow by four at most: a shaped link lets the first bytes through faster, and would mislead a larger step.
    """
    if bytes >= max_bytes:
        return max_bytes, True
    if time_s >= target_s / 4:
        return max(1, min(max_bytes, int(bytes * min(4.0, target_s / time_s)))), True
    return min(max_bytes, bytes * 4), False


def slow_pairs(pairs: Sequence[Pair], link_bit_per_s: float | None = None) -> dict[Direction, str]:
    """Directions that are slow, each with what it was compared with.

    The measure is what the nodes reach with their best peer (the median over nodes). The median over all pairs would
    miss one slow node of three: two of the three pairs are its own. Where all pairs are equally slow only the link's
    own rate, or the measurement before, can tell.
    """
    rates = {(pair.source, pair.target): pair.rate_bit_per_s for pair in pairs}
    best: dict[str, float] = {}
    for direction, rate in rates.items():
        for node in direction:
            if rate is not None:
                best[node] = max(rate, best.get(node, 0.0))
    if not best:
        return {}
    reference = median(best.values())
    slow = {}
    for pair in pairs:
        rate = pair.rate_bit_per_s
        if rate is None:
            continue
        against = (
            (reference, SLOW_SHARE, "the nodes' median best"),
            (pair.previous_bit_per_s, SLOW_SHARE, "the measurement before"),
            (link_bit_per_s, SLOW_SHARE_OF_LINK, "the link's rate"),
        )
        for expected, share, what in against:
            if expected is not None and rate < share * expected:
                slow[pair.source, pair.target] = f"{rate / expected:.2f} x {what}"
                break
    return slow


def blame(pairs: Sequence[Pair], slow: Mapping[Direction, str]) -> list[str]:
    """One sentence for each node or path that explains slow pairs; every slow pair is in one of them."""
    measured = [(pair.source, pair.target) for pair in pairs if pair.median_s is not None]
    nodes = list(dict.fromkeys(name for direction in measured for name in direction))
    sentences = []
    explained: set[Direction] = set()
    sending, receiving = (
        {node for node in nodes if _all_slow([each for each in measured if each[end] == node], slow)} for end in (0, 1)
    )
    for node in nodes:
        if node not in sending | receiving:
            continue
        explained |= {each for each in slow if each[0] == node and node in sending}
        explained |= {each for each in slow if each[1] == node and node in receiving}
        if node in sending and node in receiving:
            sentences.append(f"every pair with {node} is slow, both ways: its link")
        elif node in sending:
            sentences.append(f"everything that {node} sends is slow: its link, outwards")
        else:
            sentences.append(f"everything that {node} receives is slow: its link, inwards")
    for source, target in slow:
        if (source, target) in explained:
            continue
        explained.add((source, target))
        others = ", and no other pair of theirs is" if len(nodes) > 2 and not sentences else ""
        whose = "the path between them" if len(nodes) > 2 else "the link of one of them"
        if (target, source) in slow:
            explained.add((target, source))
            sentences.append(f"{source} and {target} are slow both ways{others}: {whose}")
        else:
            sentences.append(f"{source} to {target} is slow, the other way is not: {whose}, in that direction")
    return sentences


def _all_slow(directions: Sequence[Direction], slow: Mapping[Direction, str]) -> bool:
    """With one peer only, a slow pair does not tell which end it is."""
    return len(directions) > 1 and all(each in slow for each in directions)
