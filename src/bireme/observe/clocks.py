"""How far the clocks of two ranks are apart, and how sure that is. Pure; no torch, no clocks, no messages.

An offset is what a rank's clock shows less what rank 0's shows at the same moment. It is measured by pings
(`estimate`), along a tree of ranks (`from_rank_0`), several times, and a line is drawn through it (`fit`). Every error
bound follows from causality: an answer is not received before it was sent. Nothing here is used by the ledger.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

# Two clocks may run apart by this much while nobody has measured by how much: as far as NTP lets the kernel slew one.
MOST_DRIFT = 500e-6


@dataclass(frozen=True, slots=True)
class Ping:
    """One question and its answer (nanoseconds): `sent_ns` and `returned_ns` on the asking rank's clock, `received_ns`
    and `answered_ns` on the other's."""

    sent_ns: int
    received_ns: int
    answered_ns: int
    returned_ns: int

    @property
    def round_trip_ns(self) -> int:
        """How long question and answer were on their way, without the time that the other rank held them."""
        return (self.returned_ns - self.sent_ns) - (self.answered_ns - self.received_ns)


@dataclass(frozen=True, slots=True)
class Reading:
    """A clock against another: `offset_ns` ahead of it when it showed `at_ns`, wrong by `error_bound_ns` at most."""

    at_ns: int
    offset_ns: int
    error_bound_ns: int


def estimate(pings: Iterable[Ping]) -> Reading:
    """The other rank's clock against that of the rank that asked, from the ping with the shortest round trip; the
    error is at most half of that. Raises ValueError without pings."""
    best = min(pings, key=lambda ping: ping.round_trip_ns)
    least_ns = best.answered_ns - best.returned_ns  # it was answered before it returned
    most_ns = best.received_ns - best.sent_ns  # and received after it was sent
    return Reading(best.answered_ns, (least_ns + most_ns) // 2, max(0, (most_ns - least_ns + 1) // 2))


def parent_of(rank: int) -> int:
    """Who asks this rank (not 0) for its clock: ranks are a binomial tree, so that many can ask at the same time."""
    return rank & (rank - 1)


def from_rank_0(measured: Mapping[int, Reading]) -> dict[int, Reading]:
    """Every rank's clock against rank 0's, from its clock against its parent's (`measured`, by rank). Ranks that have
    not been reached are left out."""
    known: dict[int, Reading] = {}
    for rank in sorted(measured):  # a parent's number is smaller
        own, parent = measured[rank], parent_of(rank)
        if parent == 0:
            known[rank] = own
        elif parent in known:
            above = known[parent]
            # The two were measured some milliseconds apart, by the parent's clock.
            drifted_ns = abs(own.at_ns - own.offset_ns - above.at_ns) * MOST_DRIFT
            bound_ns = own.error_bound_ns + above.error_bound_ns + ceil(drifted_ns)
            known[rank] = Reading(own.at_ns, own.offset_ns + above.offset_ns, bound_ns)
    return known


@dataclass(frozen=True, slots=True)
class ClockLine:
    """A clock's offset to rank 0's as a line over what the clock itself shows.

    `error_bound_ns` holds from `first_ns` to `last_ns`, where it was measured; `bound_ns` tells it everywhere.
    """

    at_ns: int
    offset_ns: float  # at `at_ns`
    drift: float  # change of the offset per nanosecond
    first_ns: int
    last_ns: int
    error_bound_ns: int

    def offset_at(self, own_ns: int) -> int:
        """What the clock is ahead of rank 0's when it shows `own_ns`."""
        return round(self.offset_ns + self.drift * (own_ns - self.at_ns))

    def to_rank_0(self, own_ns: int) -> int:
        """What rank 0's clock shows when this one shows `own_ns`."""
        return own_ns - self.offset_at(own_ns)

    def bound_ns(self, own_ns: int) -> int:
        """By how much `offset_at` is wrong at most. Beyond what was measured it grows: there the line may lie as far
        off as the bounds at its two ends allow, or, with one reading, the drift is not known at all."""
        beyond_ns = max(self.first_ns - own_ns, own_ns - self.last_ns, 0)
        measured_ns = self.last_ns - self.first_ns
        growth = min(MOST_DRIFT, 2 * self.error_bound_ns / measured_ns) if measured_ns > 0 else MOST_DRIFT
        return self.error_bound_ns + ceil(beyond_ns * growth)


SAME_CLOCK = ClockLine(0, 0.0, 0.0, -(1 << 62), 1 << 62, 0)  # rank 0's against itself


def fit(readings: Sequence[Reading]) -> ClockLine:
    """The line through the readings of one clock, the sure ones counting more. What they deviate from it is part of
    its bound: a clock that does not drift evenly has a wide one. Raises ValueError without readings."""
    if not readings:
        raise ValueError("no readings of the clock")
    first_ns, last_ns = min(each.at_ns for each in readings), max(each.at_ns for each in readings)
    origin = readings[0]  # differences to it are small: floats hold them to well below a nanosecond
    weights = [1.0 / max(each.error_bound_ns, 1_000) ** 2 for each in readings]
    times = [float(each.at_ns - origin.at_ns) for each in readings]
    offsets = [float(each.offset_ns - origin.offset_ns) for each in readings]
    total = sum(weights)
    mean_time = sum(weight * time for weight, time in zip(weights, times, strict=True)) / total
    mean_offset = sum(weight * offset for weight, offset in zip(weights, offsets, strict=True)) / total
    spread = sum(weight * (time - mean_time) ** 2 for weight, time in zip(weights, times, strict=True))
    together = sum(
        weight * (time - mean_time) * (offset - mean_offset)
        for weight, time, offset in zip(weights, times, offsets, strict=True)
    )
    drift = together / spread if last_ns > first_ns and spread > 0 else 0.0
    at_ns = origin.at_ns + round(mean_time)
    at_offset_ns = origin.offset_ns + mean_offset + drift * (round(mean_time) - mean_time)
    line = ClockLine(at_ns, at_offset_ns, drift, first_ns, last_ns, 0)
    bound_ns = max(each.error_bound_ns + abs(each.offset_ns - line.offset_at(each.at_ns)) for each in readings)
    return ClockLine(at_ns, at_offset_ns, drift, first_ns, last_ns, bound_ns)
