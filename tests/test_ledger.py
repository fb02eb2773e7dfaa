import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bireme.ledger import (
    BLOCKED,
    COMPUTE_PHASES,
    EAGER,
    IN_PLACE,
    LEAVE_TOGETHER,
    PHASES,
    REDUCER,
    RUNNABLE,
    RUNNING,
    STATES,
    TRANSFER,
    WAIT,
    GroupUse,
    Interval,
    QueueClock,
    Segment,
    ShortestSeen,
    Span,
    StepLedger,
    account,
    bus_bandwidth_factor,
    clip,
    intersection,
    length,
    match_key,
    union,
)

MS = 1_000_000
US = 1_000
FORWARD, BACKWARD, OPTIMIZER, OTHER = (PHASES.index(name) for name in ("forward", "backward", "optimizer", "other"))

quick = settings(derandomize=True, deadline=None, max_examples=50)
thorough = settings(derandomize=True, deadline=None, max_examples=300)


# --- making observations by hand ---------------------------------------------------------------------------------


def segment(phase: int, start_ms: int, end_ms: int, cpu_ms: int | None, run_delay_ms: int = 0) -> Segment:
    return Segment(phase, start_ms * MS, end_ms * MS, None if cpu_ms is None else cpu_ms * MS, run_delay_ms * MS)


def span(
    issue_ms: int,
    finish_ms: int,
    transfer_ms: int | None,
    origin: str = EAGER,
    waits_ms: Sequence[Interval] = (),
    *,
    operation: str = "all_reduce",
    group: int = 0,
    sequence: int = 0,
    step: int = 1,
    duration_ms: int | None = None,
) -> Span:
    """One collective; its own duration is the whole time from issue to finish unless said otherwise."""
    return Span(
        group=group,
        sequence=sequence,
        operation=operation,
        bytes=1000,
        issue_ns=issue_ms * MS,
        finish_ns=finish_ms * MS,
        origin=origin,
        step=step,
        waits=[(start * MS, end * MS) for start, end in waits_ms],
        duration_ns=(finish_ms - issue_ms if duration_ms is None else duration_ms) * MS,
        transfer_ns=None if transfer_ms is None else transfer_ms * MS,
    )


def row_ms(ledger: StepLedger, phase: int) -> dict[str, float]:
    """The states of a phase that are not zero, in milliseconds."""
    return {state: cell / MS for state, cell in zip(STATES, ledger.cells[phase], strict=True) if cell}


# --- intervals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([], []),
        ([(3, 3)], []),
        ([(5, 2)], []),
        ([(1, 3), (3, 5)], [(1, 5)]),  # touching
        ([(1, 3), (4, 5)], [(1, 3), (4, 5)]),
        ([(4, 5), (1, 3)], [(1, 3), (4, 5)]),
        ([(1, 9), (2, 3), (4, 10)], [(1, 10)]),  # one inside another
        ([(1, 2), (1, 2)], [(1, 2)]),
        ([(-5, -1), (-3, 4)], [(-5, 4)]),
    ],
)
def test_union_merges_what_touches_and_drops_what_is_empty(intervals: list[Interval], expected: list[Interval]) -> None:
    assert union(intervals) == expected


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([(0, 100)], [(10, 20)]),
        ([(12, 15)], [(12, 15)]),
        ([(5, 12), (18, 30)], [(10, 12), (18, 20)]),
        ([(0, 10), (20, 30)], []),  # touching from outside
        ([(0, 5), (25, 30)], []),
    ],
)
def test_clip_keeps_what_is_inside(intervals: list[Interval], expected: list[Interval]) -> None:
    assert clip(intervals, 10, 20) == expected


def test_clip_to_nothing_has_no_length() -> None:
    assert length(clip([(0, 100)], 50, 50)) == 0


def test_length_adds_up() -> None:
    assert length([]) == 0
    assert length([(1, 4), (10, 20)]) == 13


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([], [(0, 1)], []),
        ([(0, 10)], [(2, 3), (5, 20)], [(2, 3), (5, 10)]),
        ([(0, 2), (4, 6), (8, 10)], [(1, 9)], [(1, 2), (4, 6), (8, 9)]),
        ([(0, 5)], [(5, 9)], []),
        ([(0, 5), (6, 9)], [(0, 5), (6, 9)], [(0, 5), (6, 9)]),
    ],
)
def test_intersection(a: list[Interval], b: list[Interval], expected: list[Interval]) -> None:
    assert intersection(a, b) == expected
    assert intersection(b, a) == expected


intervals_lists = st.lists(st.tuples(st.integers(0, 40), st.integers(-3, 15)).map(lambda each: (each[0], sum(each))))


def points(intervals: Sequence[Interval]) -> set[int]:
    return {point for start, end in intervals for point in range(start, end)}


@settings(quick, max_examples=200)
@given(intervals_lists, intervals_lists, st.integers(0, 40), st.integers(0, 20))
def test_intervals_are_sets_of_points(a: list[Interval], b: list[Interval], start: int, size: int) -> None:
    merged, other = union(a), union(b)
    assert points(merged) == points(a)
    assert length(merged) == len(points(a))
    assert all(first[1] < second[0] for first, second in pairwise(merged))
    both = intersection(merged, other)
    assert points(both) == points(a) & points(b)
    assert length(both) == len(points(both))
    inside = clip(merged, start, start + size)
    assert points(inside) == points(a) & set(range(start, start + size))
    assert length(inside) == len(points(inside))


# --- collectives -------------------------------------------------------------------------------------------------


def test_queue_clock_of_one_worker_starts_when_the_previous_finished() -> None:
    clock = QueueClock(workers=1)
    assert [clock.duration_ns(*each) for each in [(0, 100), (10, 130), (200, 250)]] == [100, 30, 50]


def test_queue_clock_of_two_workers_serves_two_at_once() -> None:
    clock = QueueClock()
    # The third starts when the first worker gets free (40), the fourth at 90, the fifth when it is issued.
    observed = [(0, 100), (0, 40), (0, 90), (0, 160), (500, 501)]
    assert [clock.duration_ns(*each) for each in observed] == [100, 40, 50, 70, 1]


def test_queue_clock_is_never_negative() -> None:
    clock = QueueClock(workers=1)
    clock.duration_ns(0, 100)
    assert clock.duration_ns(0, 60) == 0  # a clock that jumped: nothing that ran after the first can end before it


def test_out_of_order_finishes_of_two_workers_keep_their_durations() -> None:
    """The trap of the naive rule: start at the previous finish."""
    observed = [(0, 100), (5, 35), (6, 65), (8, 130)]
    previous = 0
    naive = []
    for issue, finish in observed:
        naive.append(finish - max(issue, previous))
        previous = finish
    assert min(naive) < 0  # "lasted" 35 - 100 = -65
    clock = QueueClock(workers=2)
    assert [clock.duration_ns(*each) for each in observed] == [100, 30, 30, 65]


@settings(quick, max_examples=100)
@given(st.integers(1, 3), st.lists(st.tuples(st.integers(0, 20), st.integers(0, 30)), max_size=20))
def test_queue_clock_recovers_the_durations_of_a_simulated_queue(workers: int, work: list[tuple[int, int]]) -> None:
    """A first-in first-out queue served by workers that do not know of this clock."""
    free = [0] * workers
    now = 0
    clock = QueueClock(workers)
    for gap, duration in work:
        now += gap
        server = min(range(workers), key=lambda index: free[index])
        free[server] = max(now, free[server]) + duration
        assert clock.duration_ns(now, free[server]) == duration


PINNED = 66878634158876674  # blake2b of 7|all_reduce|4096 in seven bytes


def test_match_key_is_pinned_positive_and_fits_a_signed_64_bit_number() -> None:
    """Ranks of one job compare keys: they may not depend on the process, the machine or the version."""
    key = match_key(Span(0, 7, "all_reduce", 4096, issue_ns=0))
    assert key == PINNED
    assert 0 < key < 1 << 56


def test_match_key_is_the_same_in_a_process_with_another_hash_seed() -> None:
    code = "from bireme.ledger import Span, match_key; print(match_key(Span(0, 7, 'all_reduce', 4096, 0)))"
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert int(done.stdout) == PINNED


def test_match_key_tells_sequence_operation_and_bytes_apart_and_nothing_else() -> None:
    base = Span(0, 7, "all_reduce", 4096, issue_ns=0)
    others = [replace(base, sequence=8), replace(base, operation="all_gather"), replace(base, bytes=4097)]
    # Digits that move from one field to the next.
    others += [replace(base, sequence=74, bytes=96), replace(base, sequence=1, bytes=11), replace(base, sequence=11)]
    assert len({match_key(each) for each in [base, *others]}) == 1 + len(others)
    same = replace(base, group=3, issue_ns=99, finish_ns=100, origin=REDUCER, side=2, step=9, duration_ns=5)
    assert match_key(same) == match_key(base)


def test_operations_that_do_not_leave_together_take_the_shortest_seen_so_far() -> None:
    """It is kept per group, operation, bytes and side; what was written before is not revised."""
    shortest = ShortestSeen()
    base = Span(0, 0, "broadcast", 1000, issue_ns=0, side=0)
    assert base.operation not in LEAVE_TOGETHER

    def seen(each: Span, duration_ns: int) -> int:
        each.transfer_ns = shortest.transfer_ns(each, duration_ns)
        return each.transfer_ns

    first = replace(base)
    assert seen(first, 50) == 50
    assert seen(replace(base, sequence=1), 80) == 50
    assert seen(replace(base, sequence=1), 60) == 50
    assert seen(replace(base, sequence=2), 30) == 30
    assert seen(replace(base, sequence=3, issue_ns=7, step=4), 50) == 30
    assert first.transfer_ns == 50
    for other in (
        replace(base, group=1),
        replace(base, operation="scatter"),
        replace(base, bytes=1001),
        replace(base, side=1),
    ):
        assert seen(other, 90) == 90
    assert seen(replace(base), 0) == 0


def test_leave_together_is_what_every_member_has_to_wait_for() -> None:
    assert sorted(LEAVE_TOGETHER) == ["all_gather", "all_reduce", "barrier", "reduce_scatter"]


@pytest.mark.parametrize(
    ("operation", "factors"),
    [
        ("all_reduce", (1.0, 1.5, 1.75)),
        ("all_gather", (0.5, 0.75, 0.875)),
        ("reduce_scatter", (0.5, 0.75, 0.875)),
        ("all_to_all", (0.5, 0.75, 0.875)),
        ("broadcast", (1.0, 1.0, 1.0)),
        ("reduce", (1.0, 1.0, 1.0)),
        ("send", (1.0, 1.0, 1.0)),
        ("receive", (1.0, 1.0, 1.0)),
    ],
)
def test_bus_bandwidth_factor(operation: str, factors: tuple[float, ...]) -> None:
    assert tuple(bus_bandwidth_factor(operation, ranks) for ranks in (2, 4, 8)) == factors


# --- the ledger: what may go wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "segments",
    [
        [],
        [segment(FORWARD, 1, 100, 0)],  # begins late
        [segment(FORWARD, -1, 100, 0)],  # begins early
        [segment(FORWARD, 0, 99, 0)],  # ends early
        [segment(FORWARD, 0, 101, 0)],  # ends late
        [segment(FORWARD, 0, 40, 0), segment(BACKWARD, 50, 100, 0)],  # gap
        [segment(FORWARD, 0, 60, 0), segment(BACKWARD, 50, 100, 0)],  # overlap
        [segment(BACKWARD, 50, 100, 0), segment(FORWARD, 0, 50, 0)],  # out of order
        [segment(FORWARD, 0, 60, 0), segment(OTHER, 60, 50, 0), segment(BACKWARD, 50, 100, 0)],  # backwards
    ],
)
def test_segments_that_do_not_tile_the_step_raise(segments: list[Segment]) -> None:
    with pytest.raises(ValueError, match="segments"):
        account(0, 100 * MS, segments, [])


def test_an_empty_step_is_a_ledger_of_zeros() -> None:
    ledger = account(5, 5, [], [])
    assert ledger.wall_ns == 0
    assert ledger.cells == [[0] * len(STATES) for _ in PHASES]
    assert ledger.uses == []


def test_kernel_states_without_collectives() -> None:
    """Clocks that exceed the wall clock are cut, running first, and what was cut is reported."""
    segments = [
        segment(FORWARD, 0, 100, cpu_ms=60, run_delay_ms=25),
        segment(BACKWARD, 100, 200, cpu_ms=90, run_delay_ms=17),  # 7 too much
        segment(OPTIMIZER, 200, 210, cpu_ms=11, run_delay_ms=2),  # 1 + 2 too much
        segment(FORWARD, 210, 220, cpu_ms=0),
    ]
    ledger = account(0, 220 * MS, segments, [])
    assert row_ms(ledger, FORWARD) == {"running": 60, "runnable": 25, "blocked": 25}
    assert row_ms(ledger, BACKWARD) == {"running": 90, "runnable": 10}
    assert row_ms(ledger, OPTIMIZER) == {"running": 10}
    assert ledger.clamped_ns == 10 * MS
    assert (ledger.hidden_ns, ledger.unlocated_ns, ledger.unmatched) == (0, 0, 0)


# --- the ledger: the rules that were measured --------------------------------------------------------------------


def test_one_late_rank_the_punctual_one_waits_and_the_late_one_does_not() -> None:
    """Both leave at 200 ms; rank 1 arrives at 170: 30 ms of bytes, and 70 ms of waiting on rank 0 only."""
    durations = [QueueClock().duration_ns(100 * MS, 200 * MS), QueueClock().duration_ns(170 * MS, 200 * MS)]
    shortest_ms = min(durations) // MS
    assert shortest_ms == 30
    punctual = account(
        0, 200 * MS, [segment(FORWARD, 0, 200, cpu_ms=100)], [span(100, 200, shortest_ms, waits_ms=[(100, 200)])]
    )
    late = account(
        0, 200 * MS, [segment(FORWARD, 0, 200, cpu_ms=170)], [span(170, 200, shortest_ms, waits_ms=[(170, 200)])]
    )
    assert row_ms(punctual, FORWARD) == {"running": 100, "transfer": 30, "wait": 70}
    assert row_ms(late, FORWARD) == {"running": 170, "transfer": 30}
    assert punctual.uses == [GroupUse(0, "all_reduce", 1, 1000, 30 * MS, 70 * MS)]
    assert late.uses == [GroupUse(0, "all_reduce", 1, 1000, 30 * MS, 0)]
    assert punctual.hidden_ns == late.hidden_ns == 0


def test_a_sleep_in_backward_beside_a_saturated_link_stays_blocked() -> None:
    """The link is busy from the first bucket to the last, but the thread waits for it only in DDP's tail."""
    buckets = [
        span(20, 160, 140, REDUCER, sequence=0),
        span(100, 300, 140, REDUCER, sequence=1, duration_ms=140),
        span(300, 400, 100, REDUCER, sequence=2),
    ]
    # Runs 50 ms, sleeps 150 ms, runs 100 ms, waits for DDP's tail 100 ms.
    ledger = account(0, 400 * MS, [segment(BACKWARD, 0, 400, cpu_ms=150)], buckets)
    assert row_ms(ledger, BACKWARD) == {"running": 150, "transfer": 100, "blocked": 150}
    assert ledger.unlocated_ns == 150 * MS
    assert ledger.hidden_ns == 280 * MS  # in flight from 20 to 400, without the tail
    assert ledger.hidden_transfer_ns == 280 * MS


def test_ddp_tail_lasts_from_the_last_issue_to_the_last_finish_even_out_of_order() -> None:
    """The bucket that was issued last is not the one that finishes last."""
    buckets = [span(10, 100, 40, REDUCER, sequence=0), span(50, 80, 20, REDUCER, sequence=1)]
    ledger = account(0, 120 * MS, [segment(BACKWARD, 0, 120, cpu_ms=60)], buckets)
    # Located: 50 to 100. Windows: 60 to 100 covers 60 to 80.
    assert row_ms(ledger, BACKWARD) == {"running": 60, "transfer": 40, "wait": 10, "blocked": 10}


def test_ddp_tail_ends_with_its_phase_and_each_backward_has_its_own() -> None:
    segments = [
        segment(BACKWARD, 0, 100, cpu_ms=50),
        segment(FORWARD, 100, 200, cpu_ms=60),
        segment(BACKWARD, 200, 300, cpu_ms=50),
    ]
    buckets = [span(60, 110, 50, REDUCER, sequence=0), span(270, 290, 20, REDUCER, sequence=1)]
    ledger = account(0, 300 * MS, segments, buckets)
    assert row_ms(ledger, BACKWARD) == {"running": 100, "transfer": 60, "blocked": 40}  # 60 to 100, 270 to 290
    assert row_ms(ledger, FORWARD) == {"running": 60, "blocked": 40}  # 100 to 110 in flight, but nobody waited


def test_one_unmatched_bucket_leaves_ddp_tail_blocked() -> None:
    buckets = [span(10, 50, 40, REDUCER, sequence=0), span(60, 100, None, REDUCER, sequence=1)]
    ledger = account(0, 100 * MS, [segment(BACKWARD, 0, 100, cpu_ms=60)], buckets)
    assert row_ms(ledger, BACKWARD) == {"running": 60, "blocked": 40}
    assert ledger.unmatched == 1
    assert ledger.unlocated_ns == 0


@pytest.mark.parametrize("origin", [EAGER, REDUCER, IN_PLACE])
def test_mismatched_collectives_stay_unmatched_and_their_time_blocked(origin: str) -> None:
    waits = [(40, 100)] if origin == EAGER else []
    ledger = account(0, 100 * MS, [segment(BACKWARD, 0, 100, cpu_ms=40)], [span(40, 100, None, origin, waits)])
    assert row_ms(ledger, BACKWARD) == {"running": 40, "blocked": 60}
    assert ledger.unmatched == 1
    assert (ledger.hidden_ns, ledger.hidden_transfer_ns, ledger.unlocated_ns) == (0, 0, 0)
    assert ledger.uses == [GroupUse(0, "all_reduce", 1, 1000, 0, 0)]


def test_a_collective_whose_finish_was_never_seen_is_unmatched() -> None:
    lost = Span(0, 0, "reduce_scatter", 1000, issue_ns=40 * MS, waits=[(40 * MS, 60 * MS)])
    ledger = account(0, 100 * MS, [segment(FORWARD, 0, 100, cpu_ms=80)], [lost])
    assert row_ms(ledger, FORWARD) == {"running": 80, "blocked": 20}
    assert ledger.unmatched == 1


def test_located_time_beyond_the_kernels_blocked_is_cut_and_reported_with_its_sign() -> None:
    ledger = account(0, 200 * MS, [segment(FORWARD, 0, 200, cpu_ms=120)], [span(100, 200, 40, waits_ms=[(100, 200)])])
    # 100 located, 80 blocked: both parts shrink alike.
    assert row_ms(ledger, FORWARD) == {"running": 120, "transfer": 32, "wait": 48}
    assert ledger.unlocated_ns == -20 * MS
    assert ledger.hidden_ns == 20 * MS
    assert ledger.hidden_transfer_ns == 8 * MS


def test_unlocated_time_is_summed_with_its_sign_where_collectives_were_waited_for() -> None:
    segments = [
        segment(FORWARD, 0, 100, cpu_ms=90),  # located 30, blocked 10: -20
        segment(BACKWARD, 100, 200, cpu_ms=25),  # located 20, blocked 75: +55
        segment(OTHER, 200, 300, cpu_ms=0),  # nothing located: says nothing about collectives
    ]
    spans = [span(50, 80, 30, waits_ms=[(50, 80)]), span(150, 170, 20, waits_ms=[(150, 170)], sequence=1)]
    assert account(0, 300 * MS, segments, spans).unlocated_ns == 35 * MS


def test_the_cut_never_loses_a_nanosecond() -> None:
    ledger = account(
        0, 10, [Segment(FORWARD, 0, 10, cpu_ns=3)], [Span(0, 0, "barrier", 0, 0, 10, IN_PLACE, transfer_ns=3)]
    )
    # 3 x 7 / 10 rounds down; the wait takes the rest.
    assert ledger.cells[FORWARD] == [3, 0, 2, 5, 0]
    assert ledger.unlocated_ns == -3


def test_an_async_collective_that_overlaps_with_running_is_hidden() -> None:
    """It was in flight 60 ms (40 of them bytes); the thread then waited for the last 10 ms only."""
    segments = [segment(FORWARD, 0, 100, cpu_ms=90)]
    ledger = account(0, 100 * MS, segments, [span(20, 80, 40, waits_ms=[(70, 80)])])
    assert row_ms(ledger, FORWARD) == {"running": 90, "transfer": 10}
    assert ledger.hidden_ns == 50 * MS
    assert ledger.hidden_transfer_ns == 30 * MS
    entirely = account(0, 100 * MS, [segment(FORWARD, 0, 100, 100)], [span(20, 80, 40, waits_ms=[(90, 90)])])
    assert row_ms(entirely, FORWARD) == {"running": 100}
    assert (entirely.hidden_ns, entirely.hidden_transfer_ns) == (60 * MS, 40 * MS)


def test_a_wait_that_ends_after_the_finish_is_wait_and_hides_nothing() -> None:
    """The thread woke up late: it was blocked on the collective all the same, but no bytes moved any more."""
    ledger = account(0, 100 * MS, [segment(FORWARD, 0, 100, cpu_ms=48)], [span(48, 95, 47, waits_ms=[(48, 100)])])
    assert row_ms(ledger, FORWARD) == {"running": 48, "transfer": 47, "wait": 5}
    assert (ledger.hidden_ns, ledger.hidden_transfer_ns) == (0, 0)


def test_what_another_group_moves_meanwhile_is_transfer() -> None:
    """Windows are united over groups: the thread waits for one, bytes of the other are on the link."""
    spans = [span(0, 60, 60, group=1), span(20, 100, 30, waits_ms=[(20, 100)])]
    ledger = account(0, 100 * MS, [segment(BACKWARD, 0, 100, cpu_ms=20)], spans)
    assert row_ms(ledger, BACKWARD) == {"running": 20, "transfer": 70, "wait": 10}
    assert [(use.group, use.transfer_ns // MS, use.wait_ns // MS) for use in ledger.uses] == [(0, 30, 50), (1, 60, 0)]


def test_a_collective_in_place_is_located_from_issue_to_finish() -> None:
    ledger = account(0, 100 * MS, [segment(FORWARD, 0, 100, cpu_ms=50)], [span(40, 90, 20, IN_PLACE)])
    assert row_ms(ledger, FORWARD) == {"running": 50, "transfer": 20, "wait": 30}


def test_an_eager_collective_that_nobody_waited_for_is_not_located() -> None:
    ledger = account(0, 100 * MS, [segment(FORWARD, 0, 100, cpu_ms=50)], [span(40, 90, 20)])
    assert row_ms(ledger, FORWARD) == {"running": 50, "blocked": 50}
    assert ledger.hidden_ns == 50 * MS
    assert ledger.unlocated_ns == 0


def test_a_collective_issued_in_the_step_before_that_finishes_in_this_step() -> None:
    """Its time is shared out between the steps; its use is listed once, where it was issued."""
    carried = span(80, 140, 50, waits_ms=[(120, 140)], step=1)  # bytes from 90 to 140
    first = account(0, 100 * MS, [segment(OTHER, 0, 100, cpu_ms=100)], [carried], step=1)
    second = account(100 * MS, 200 * MS, [segment(FORWARD, 100, 200, cpu_ms=80)], [carried], step=2)
    assert row_ms(first, OTHER) == {"running": 100}
    assert (first.hidden_ns, first.hidden_transfer_ns) == (20 * MS, 10 * MS)
    assert first.uses == [GroupUse(0, "all_reduce", 1, 1000, 50 * MS, 10 * MS)]
    assert row_ms(second, FORWARD) == {"running": 80, "transfer": 20}
    assert (second.hidden_ns, second.hidden_transfer_ns) == (20 * MS, 20 * MS)
    assert second.uses == []


def test_an_unmatched_collective_is_counted_in_its_own_step_only() -> None:
    lost = span(80, 140, None, waits_ms=[(120, 140)], step=1)
    segments = [segment(FORWARD, 100, 200, cpu_ms=80)]
    assert account(100 * MS, 200 * MS, segments, [lost], step=2).unmatched == 0
    assert account(100 * MS, 200 * MS, segments, [lost], step=1).unmatched == 1
    assert account(100 * MS, 200 * MS, segments, [lost]).unmatched == 1


def test_a_bucket_of_the_step_before_does_not_move_this_steps_tail() -> None:
    spans = [span(-50, 90, 20, REDUCER, step=0), span(40, 60, 20, REDUCER, sequence=1)]
    ledger = account(0, 100 * MS, [segment(BACKWARD, 0, 100, cpu_ms=80)], spans)
    assert row_ms(ledger, BACKWARD) == {"running": 80, "transfer": 20}


def test_device_segments_are_busy_in_compute_phases_and_idle_elsewhere() -> None:
    """Nobody accounts for a compute stream: it runs where it is not waiting for a collective."""
    segments = [
        segment(PHASES.index("input"), 0, 10, None),
        segment(FORWARD, 10, 110, None),
        segment(BACKWARD, 110, 210, None),
        segment(OPTIMIZER, 210, 220, None),
        segment(PHASES.index("checkpoint"), 220, 240, None),
        segment(OTHER, 240, 300, None),
    ]
    spans = [
        span(20, 60, 20, waits_ms=[(20, 60)]),
        span(150, 200, 50, waits_ms=[(180, 200)], sequence=1),
        span(250, 260, 10, waits_ms=[(250, 260)], sequence=2),
    ]
    ledger = account(0, 300 * MS, segments, spans)
    assert [row_ms(ledger, phase) for phase in range(len(PHASES))] == [
        {"blocked": 10},
        {"running": 60, "transfer": 20, "wait": 20},
        {"running": 80, "transfer": 20},
        {"running": 10},
        {"blocked": 20},
        {"transfer": 10, "blocked": 50},
    ]
    assert ledger.clamped_ns == 0
    assert ledger.hidden_ns == 30 * MS


def test_uses_with_a_finish_at_zero_on_the_clock() -> None:
    ledger = account(-100 * MS, 0, [segment(OTHER, -100, 0, 0)], [span(-50, 0, 20, waits_ms=[(-50, 0)])])
    assert ledger.uses == [GroupUse(0, "all_reduce", 1, 1000, 20 * MS, 30 * MS)]


def test_uses_are_unions_per_group_and_operation_in_order() -> None:
    spans = [
        span(0, 50, 30, group=1, operation="all_gather"),
        span(10, 70, 40, group=1, operation="all_gather", sequence=1),  # windows 20-50 and 30-70
        span(0, 10, None, group=1, operation="all_gather", sequence=2),
        span(0, 5, 2, group=1, operation="all_reduce", sequence=3, duration_ms=4),
        span(0, 5, 5, group=0, operation="barrier"),
        span(0, 5, 5, group=0, operation="barrier", step=0),
    ]
    ledger = account(0, 100 * MS, [segment(OTHER, 0, 100, 100)], spans, step=1)
    assert ledger.uses == [
        GroupUse(0, "barrier", 1, 1000, 5 * MS, 0),
        GroupUse(1, "all_gather", 3, 3000, 50 * MS, 20 * MS),
        GroupUse(1, "all_reduce", 1, 1000, 2 * MS, 2 * MS),
    ]
    assert ledger.unmatched == 1


# --- the ledger: against a reference that knows no intervals -----------------------------------------------------


@dataclass
class Case:
    start_ns: int
    end_ns: int
    segments: list[Segment]
    spans: list[Span]

    def account(self, step: int | None = None) -> StepLedger:
        return account(self.start_ns, self.end_ns, self.segments, self.spans, step)


def cases(unit_ns: int = US, overrun: int = 3) -> st.SearchStrategy[Case]:
    """Random steps whose times are multiples of `unit_ns`; waits end up to `overrun` units after the finish."""
    stretch = st.tuples(
        st.integers(0, len(PHASES) - 1),
        st.integers(0, 40),
        st.integers(-2 * unit_ns, 20 * unit_ns).map(lambda cpu_ns: None if cpu_ns < 0 else cpu_ns),
        st.integers(-9 * unit_ns, 9 * unit_ns).map(lambda run_delay_ns: max(0, run_delay_ns)),
    )
    call = st.tuples(
        st.sampled_from([REDUCER, EAGER, IN_PLACE, REDUCER, EAGER, REDUCER]),
        st.integers(0, 8).map(lambda chance: chance != 8),  # matched
        st.integers(-10, 40),  # issue
        st.integers(0, 30),  # finish - issue
        st.integers(0, 30),  # transfer, at most finish - issue
        st.integers(0, 30),  # own duration, at least transfer
        st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=2),
        st.tuples(st.integers(0, 2), st.sampled_from(["all_reduce", "all_gather", "broadcast"]), st.integers(0, 99)),
        st.integers(1, 2),  # step
    )

    def build(start: int, stretches: list[tuple[int, int, int | None, int]], calls: list[tuple[Any, ...]]) -> Case:
        segments = []
        now = start
        for phase, size, cpu_ns, run_delay_ns in stretches:
            delay_ns = 0 if cpu_ns is None else run_delay_ns
            segments.append(Segment(phase, now * unit_ns, (now + size) * unit_ns, cpu_ns, delay_ns))
            now += size
        return Case(start * unit_ns, now * unit_ns, segments, [one(start, *each) for each in calls])

    def one(
        start: int,
        origin: str,
        matched: bool,
        issue: int,
        flight: int,
        transfer: int,
        duration: int,
        waits: list[Interval],
        what: tuple[int, str, int],
        step: int,
    ) -> Span:
        issue += start
        finish = issue + flight
        transfer = min(transfer, flight)
        duration = min(flight, max(duration, transfer))
        seen = [(issue + begin, min(finish + overrun, issue + begin + size)) for begin, size in waits]
        seen = [(begin, end) for begin, end in seen if begin <= end]
        lost = not matched and duration % 2 == 1
        return Span(
            group=what[0],
            sequence=0,
            operation=what[1],
            bytes=what[2],
            issue_ns=issue * unit_ns,
            finish_ns=None if lost else finish * unit_ns,
            origin=origin,
            step=step,
            waits=[(begin * unit_ns, end * unit_ns) for begin, end in seen] if origin == EAGER else [],
            duration_ns=None if lost else duration * unit_ns,
            transfer_ns=transfer * unit_ns if matched else None,
        )

    return st.builds(
        build,
        st.integers(0, 50),
        st.lists(stretch, min_size=2, max_size=5),
        st.lists(call, min_size=2, max_size=8),
    )


def moments(start_ns: int, end_ns: int) -> set[int]:
    """The microseconds of an interval on the grid."""
    assert start_ns % US == end_ns % US == 0
    return set(range(start_ns // US, end_ns // US))


def finish_of(each: Span) -> int:
    assert each.finish_ns is not None
    return each.finish_ns


def flight(each: Span) -> set[int]:
    return moments(each.issue_ns, finish_of(each))


def window(each: Span) -> set[int]:
    assert each.transfer_ns is not None
    return moments(finish_of(each) - each.transfer_ns, finish_of(each))


def any_of(sets: Sequence[set[int]]) -> set[int]:
    return set().union(*sets)


def kernel_states(part: Segment, located_ns: int) -> tuple[int, int, int]:
    """running, runnable, blocked: the design's formulas, and the device's rule where no kernel accounts."""
    wall = part.end_ns - part.start_ns
    if part.cpu_ns is None:
        running = wall - located_ns if PHASES[part.phase] in COMPUTE_PHASES else 0
        return running, 0, wall - running
    running = min(part.cpu_ns, wall)
    runnable = min(part.run_delay_ns, wall - running)
    return running, runnable, wall - running - runnable


def located_in(part: Segment, spans: list[Span]) -> set[int]:
    """The microseconds of a segment in which the thread is known to have been blocked on a collective."""
    here = moments(part.start_ns, part.end_ns)
    known = [each for each in spans if each.transfer_ns is not None]
    waited = any_of([moments(*wait) for each in known for wait in each.waits])
    in_place = any_of([flight(each) for each in known if each.origin == IN_PLACE])
    buckets = [each for each in spans if each.origin == REDUCER and each.issue_ns // US in here]
    tail: set[int] = set()
    if all(each in known for each in buckets):
        for moment in here:
            issued = all(each.issue_ns <= moment * US for each in buckets)
            if issued and any(moment * US < finish_of(each) for each in buckets):
                tail.add(moment)
    return here & (waited | in_place | tail)


def reference(case: Case, step: int | None) -> StepLedger:
    """Every microsecond on its own: which sets is it in? Then the cut that the design documents, per segment."""
    known = [each for each in case.spans if each.transfer_ns is not None]
    moving = any_of([window(each) for each in known])
    in_flight = any_of([flight(each) for each in known])
    whole = moments(case.start_ns, case.end_ns)
    cells = [[0] * len(STATES) for _ in PHASES]
    clamped = unlocated = 0
    for part in case.segments:
        located = located_in(part, case.spans)
        located_ns = len(located) * US
        running, runnable, blocked = kernel_states(part, located_ns)
        transfer, wait = len(located & moving) * US, len(located - moving) * US
        if located:
            unlocated += blocked - located_ns
        if located_ns > blocked:
            transfer = transfer * blocked // located_ns
            wait = blocked - transfer
        if part.cpu_ns is not None:
            clamped += part.cpu_ns + part.run_delay_ns - running - runnable
        for state, value in zip(STATES, (running, runnable, transfer, wait, blocked - transfer - wait), strict=True):
            cells[part.phase][STATES.index(state)] += value
    exposed = sum(row[TRANSFER] + row[WAIT] for row in cells)
    exposed_transfer = sum(row[TRANSFER] for row in cells)
    listed = [each for each in case.spans if step is None or each.step == step]
    uses = []
    for group, operation in sorted({(each.group, each.operation) for each in listed}):
        same = [each for each in listed if (each.group, each.operation) == (group, operation)]
        bytes_moving = any_of([window(each) for each in same if each in known])
        active = any_of(
            [moments(finish_of(each) - (each.duration_ns or 0), finish_of(each)) for each in same if each in known]
        )
        transfer_ns, wait_ns = len(bytes_moving) * US, len(active - bytes_moving) * US
        uses.append(GroupUse(group, operation, len(same), sum(each.bytes for each in same), transfer_ns, wait_ns))
    return StepLedger(
        start_ns=case.start_ns,
        end_ns=case.end_ns,
        cells=cells,
        hidden_ns=max(0, len(in_flight & whole) * US - exposed),
        hidden_transfer_ns=max(0, len(moving & whole) * US - exposed_transfer),
        clamped_ns=clamped,
        unlocated_ns=unlocated,
        unmatched=sum(each.transfer_ns is None for each in listed),
        uses=uses,
    )


@thorough
@given(cases(), st.none() | st.integers(1, 2))
def test_account_agrees_with_the_reference_on_every_microsecond(case: Case, step: int | None) -> None:
    assert case.account(step) == reference(case, step)


@thorough
@given(cases(unit_ns=977, overrun=0), st.integers(0, 10**6))
def test_account_keeps_its_promises_off_the_grid(case: Case, extra_ns: int) -> None:
    """Identities and bounds that need no reference, with one stretch of odd length at the end."""
    case.segments.append(Segment(OTHER, case.end_ns, case.end_ns + extra_ns, extra_ns // 3, extra_ns // 5))
    case.end_ns += extra_ns
    ledger = case.account()
    cells = [cell for row in ledger.cells for cell in row]
    assert sum(cells) == case.end_ns - case.start_ns == ledger.wall_ns
    assert min(cells) >= 0
    known = [each for each in case.spans if each.transfer_ns is not None]
    windows = union((finish_of(each) - (each.transfer_ns or 0), finish_of(each)) for each in known)
    flights = union((each.issue_ns, finish_of(each)) for each in known)
    for phase, row in enumerate(ledger.cells):
        parts = [part for part in case.segments if part.phase == phase]
        wall = sum(part.end_ns - part.start_ns for part in parts)
        assert sum(row) == wall
        kernel = [kernel_states(part, 0) for part in parts]
        if all(part.cpu_ns is not None for part in parts):
            assert row[RUNNING] == sum(each[0] for each in kernel)
            assert row[RUNNABLE] == sum(each[1] for each in kernel)
            assert row[TRANSFER] + row[WAIT] + row[BLOCKED] == sum(each[2] for each in kernel)
        moving = sum(length(clip(windows, part.start_ns, part.end_ns)) for part in parts)
        in_flight = sum(length(clip(flights, part.start_ns, part.end_ns)) for part in parts)
        assert row[TRANSFER] <= moving
        assert row[TRANSFER] + row[WAIT] <= in_flight  # no wait outlasts its collective here
    exposed = sum(row[TRANSFER] + row[WAIT] for row in ledger.cells)
    assert ledger.hidden_ns == length(clip(flights, case.start_ns, case.end_ns)) - exposed >= 0
    exposed_transfer = sum(row[TRANSFER] for row in ledger.cells)
    assert ledger.hidden_transfer_ns == length(clip(windows, case.start_ns, case.end_ns)) - exposed_transfer >= 0
    assert ledger.hidden_transfer_ns <= length(windows)
    assert ledger.clamped_ns >= 0


def twice(spans: list[Span]) -> list[Span]:
    return [*spans, *(replace(each, waits=list(each.waits)) for each in spans)]


@quick
@given(cases())
def test_every_collective_seen_twice_gives_the_same_ledger(case: Case) -> None:
    """Unions of intervals, never sums of durations."""
    once, again = case.account(), account(case.start_ns, case.end_ns, case.segments, twice(case.spans))
    for each in again.uses:
        each.count //= 2
        each.bytes //= 2
    again.unmatched //= 2
    assert once == again


@quick
@given(cases(), st.integers(0, 6))
def test_the_order_of_the_spans_does_not_matter_and_none_is_changed(case: Case, turn: int) -> None:
    before = [replace(each, waits=list(each.waits)) for each in case.spans]
    ledger = case.account()
    assert case.spans == before
    for order in (case.spans[::-1], case.spans[turn:] + case.spans[:turn]):
        assert account(case.start_ns, case.end_ns, case.segments, order) == ledger


@quick
@given(cases(), st.integers(1, 10**9))
def test_only_differences_of_the_clock_count(case: Case, offset: int) -> None:
    """The same step at another time of day."""
    offset_ns = offset * US

    def later(each: Span) -> Span:
        return replace(
            each,
            issue_ns=each.issue_ns + offset_ns,
            finish_ns=None if each.finish_ns is None else each.finish_ns + offset_ns,
            waits=[(begin + offset_ns, end + offset_ns) for begin, end in each.waits],
        )

    segments = [
        replace(part, start_ns=part.start_ns + offset_ns, end_ns=part.end_ns + offset_ns) for part in case.segments
    ]
    moved = account(case.start_ns + offset_ns, case.end_ns + offset_ns, segments, [later(each) for each in case.spans])
    expected = replace(case.account(), start_ns=case.start_ns + offset_ns, end_ns=case.end_ns + offset_ns)
    assert moved == expected
