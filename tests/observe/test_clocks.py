import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bireme.observe.clocks import (
    MOST_DRIFT,
    SAME_CLOCK,
    ClockLine,
    Ping,
    Reading,
    estimate,
    fit,
    from_rank_0,
    parent_of,
)

S = 1_000_000_000
MS = 1_000_000
US = 1_000


@dataclass
class Host:
    """A clock that is `ahead_ns` at time 0 and runs by `ppm` too fast."""

    ahead_ns: int
    ppm: float

    def now_ns(self, true_ns: int) -> int:
        return 40 * S + true_ns + self.ahead_ns + round(true_ns * self.ppm * 1e-6)


def ping(asking: Host, other: Host, true_ns: int, draw: random.Random) -> tuple[Ping, int]:
    """One exchange over a network and a scheduler that hold messages up now and then; and when it is over."""

    def way_ns() -> int:
        return 20 * US + round(draw.expovariate(1 / (30 * US))) + (2 * MS if draw.random() < 0.2 else 0)

    received = true_ns + way_ns()
    answered = received + 5 * US
    returned = answered + way_ns()
    numbers = asking.now_ns(true_ns), other.now_ns(received), other.now_ns(answered), asking.now_ns(returned)
    return Ping(*numbers), returned


def compare(hosts: list[Host], true_ns: int, draw: random.Random) -> dict[int, Reading]:
    """Every clock against rank 0's, along the tree, as the ranks do it from this moment on."""
    measured = {}
    for rank in range(1, len(hosts)):
        pings = []
        when_ns = true_ns
        for _ in range(10):
            each, when_ns = ping(hosts[parent_of(rank)], hosts[rank], when_ns, draw)
            pings.append(each)
        measured[rank] = estimate(pings)
    return from_rank_0(measured)


def test_an_offset_is_the_middle_of_what_is_possible_and_its_bound_half_the_way() -> None:
    # Sent at 100; the other clock is 1000 ahead; 10 there, 30 back, 5 held.
    assert estimate([Ping(100, 1110, 1115, 145)]) == Reading(1115, 990, 20)


def test_the_shortest_round_trip_wins() -> None:
    slow, quick = Ping(0, 5_000, 5_010, 5_030), Ping(10_000, 11_010, 11_015, 10_035)
    assert quick.round_trip_ns == 30 and slow.round_trip_ns > 5_000
    assert estimate([slow, quick, slow]) == estimate([quick])


def test_a_bound_covers_an_odd_round_trip() -> None:
    """All of the way may be there or back: half a nanosecond counts."""
    for there, back in ((0, 7), (7, 0), (3, 4)):
        reading = estimate([Ping(0, there, there, there + back)])  # the true offset is 0
        assert abs(reading.offset_ns) <= reading.error_bound_ns == 4


def test_clocks_add_up_along_the_tree() -> None:
    assert [parent_of(rank) for rank in range(1, 9)] == [0, 0, 2, 0, 4, 4, 6, 0]
    known = from_rank_0({2: Reading(5_000, 1_000, 10), 3: Reading(9_000, 4_000, 20)})
    # Rank 2's clock showed 5000 in the one comparison and 5000 in the other.
    assert known == {2: Reading(5_000, 1_000, 10), 3: Reading(9_000, 5_000, 30)}


def test_the_time_between_two_comparisons_widens_the_bound() -> None:
    later = from_rank_0({2: Reading(0, 0, 10), 3: Reading(10 * MS, 0, 20)})[3]
    assert later.error_bound_ns == 30 + round(10 * MS * MOST_DRIFT)


def test_a_rank_whose_parent_was_not_reached_is_left_out() -> None:
    assert from_rank_0({3: Reading(0, 0, 1), 4: Reading(0, 0, 1)}) == {4: Reading(0, 0, 1)}


def test_a_line_goes_through_its_readings() -> None:
    line = fit([Reading(10 * S, 3 * S, 100), Reading(20 * S, 3 * S + 1_000_000, 100)])
    assert line.drift == pytest.approx(100e-6)
    assert line.offset_at(10 * S) == 3 * S and line.offset_at(15 * S) == 3 * S + 500_000
    assert line.to_rank_0(15 * S) == 12 * S - 500_000
    assert line.error_bound_ns == line.bound_ns(12 * S) == 100


def test_what_deviates_from_the_line_is_in_the_bound() -> None:
    """A clock that was set by 5 ms in the middle."""
    readings = [Reading(0, 0, 100), Reading(1 * S, 0, 100), Reading(2 * S, 5 * MS, 100), Reading(3 * S, 5 * MS, 100)]
    line = fit(readings)
    for reading in readings:
        assert abs(line.offset_at(reading.at_ns) - reading.offset_ns) <= line.error_bound_ns
    assert line.error_bound_ns > 0.5 * MS


def test_the_bound_grows_outside_what_was_measured() -> None:
    line = fit([Reading(10 * S, 0, 1_000), Reading(11 * S, 0, 1_000)])
    assert line.bound_ns(10 * S) == line.bound_ns(11 * S) == 1_000
    assert line.bound_ns(12 * S) == line.bound_ns(9 * S) == 3_000
    alone = fit([Reading(10 * S, 5, 1_000)])
    assert (alone.drift, alone.offset_at(30 * S), alone.bound_ns(10 * S)) == (0.0, 5, 1_000)
    assert alone.bound_ns(12 * S) == 1_000 + 2 * S * MOST_DRIFT


def test_one_clock_needs_no_readings() -> None:
    assert SAME_CLOCK.to_rank_0(123) == 123 and SAME_CLOCK.bound_ns(1 << 60) == 0
    with pytest.raises(ValueError, match="no readings"):
        fit([])


def aligned(hosts: list[Host], draw: random.Random) -> list[ClockLine]:
    """The lines of every clock over three seconds: compared before, in the middle and after."""
    readings: dict[int, list[Reading]] = {}
    for true_ns in (0, 1_600 * MS, 3_000 * MS):
        for rank, reading in compare(hosts, true_ns, draw).items():
            readings.setdefault(rank, []).append(reading)
    return [SAME_CLOCK, *(fit(readings[rank]) for rank in range(1, len(hosts)))]


clocks = st.builds(Host, st.integers(-5 * S, 5 * S), st.floats(-50, 50))


@settings(max_examples=60, deadline=None)
@given(st.lists(clocks, min_size=4, max_size=4), st.integers(0, 1 << 30))
def test_the_true_offset_is_within_the_bound(hosts: list[Host], seed: int) -> None:
    """Field report B63: four hosts, seconds apart, drifting by up to 50 ppm, with jitter."""
    for rank, line in enumerate(aligned(hosts, random.Random(seed))):
        for true_ns in range(-500 * MS, 3_500 * MS, 50 * MS):  # also before the first comparison and after the last
            own_ns, truth_ns = hosts[rank].now_ns(true_ns), hosts[0].now_ns(true_ns)
            assert abs(line.to_rank_0(own_ns) - truth_ns) <= line.bound_ns(own_ns) + 2  # and clocks of whole ns


@settings(max_examples=30, deadline=None)
@given(st.lists(clocks, min_size=4, max_size=4), st.integers(0, 1 << 30))
def test_the_order_of_events_is_restored(hosts: list[Host], seed: int) -> None:
    """What is further apart than the bounds of the two clocks comes in its true order, whoever saw it."""
    draw = random.Random(seed)
    lines = aligned(hosts, draw)
    events = [(draw.randrange(3_000 * MS), draw.randrange(4)) for _ in range(200)]
    seen = [(rank, hosts[rank].now_ns(true_ns)) for true_ns, rank in events]
    told = 0
    for (first_ns, _), (first, own_first) in zip(events, seen, strict=True):
        for (second_ns, _), (second, own_second) in zip(events, seen, strict=True):
            apart_ns = lines[second].to_rank_0(own_second) - lines[first].to_rank_0(own_first)
            if apart_ns > lines[first].bound_ns(own_first) + lines[second].bound_ns(own_second) + 4:
                told += 1
                assert first_ns < second_ns
    assert told > 0.9 * len(events) ** 2 / 2  # and the bounds are narrow enough to be of use


def test_without_alignment_effects_come_before_causes() -> None:
    hosts = [Host(0, 0.0), Host(-3 * S, 40.0), Host(4 * S, -50.0), Host(S, 10.0)]
    events = [(true_ns, rank % 4) for rank, true_ns in enumerate(range(0, 3_000 * MS, 10 * MS))]
    own = [hosts[rank].now_ns(true_ns) for true_ns, rank in events]
    assert own != sorted(own)
    lines = aligned(hosts, random.Random(0))
    merged = [lines[rank].to_rank_0(own_ns) for (_, rank), own_ns in zip(events, own, strict=True)]
    assert merged == sorted(merged)
