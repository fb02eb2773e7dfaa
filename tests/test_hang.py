"""Who is blamed for a job that stands still or has failed."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.hang import Diagnosis, diagnose_end, diagnose_stall
from bireme.hang_state import (
    GONE,
    INTERRUPTED,
    LEFT,
    LOST,
    RAISED,
    RUNS,
    UNWATCHED,
    Collective,
    Group,
    RankState,
    Wait,
    merged,
)

NONSENSE: list[dict[str, Any]] = [
    {"step": "x"},
    {"groups": []},
    {"groups": {"0": [[1]]}},
    {"wait": 3},
    {"trace": 1},
]
WORLD = [Group("world", (0, 1, 2, 3))]


def issued(count: int, num_bytes: int = 4_200_000, finished: bool = False) -> tuple[Collective, ...]:
    """The last two of so many; the last one is under way."""
    return tuple(
        Collective(number, "all_reduce", num_bytes, finished or number < count - 1)
        for number in range(max(0, count - 2), count)
    )


def rank(number: int, **changes: object) -> RankState:
    """One that waits in the collective #17 of step 6."""
    state = RankState(
        number,
        f"node{number // 2}",
        f"host{number // 2}",
        100 + number,
        step=6,
        phase="backward",
        idle_s=12.0,
        groups={0: issued(18)},
    )
    return replace(state, **changes)  # type: ignore[arg-type]


def behind(number: int, **changes: object) -> RankState:
    """One that has not come to it."""
    return rank(number, **{"phase": "forward", "groups": {0: issued(17, finished=True)}, **changes})


def found(diagnosis: Diagnosis | None) -> tuple[str, tuple[int, ...], str]:
    assert diagnosis is not None
    return diagnosis.kind, diagnosis.ranks, "\n".join(diagnosis.lines)


def stall(*states: RankState, groups: list[Group] = WORLD) -> tuple[str, tuple[int, ...], str]:
    return found(diagnose_stall(states, groups))


def test_who_has_not_come_is_named_and_so_are_those_who_wait() -> None:
    kind, ranks, said = stall(rank(0), behind(1), rank(2), rank(3))
    assert (kind, ranks) == ("hang", (1,))
    assert "rank 1 on node0 (host host0, pid 101) has not moved for 12 s: in step 6, forward" in said
    assert "rank 1 has not come to all_reduce #17 (4.2 MB) of group world" in said
    assert "ranks 0, 2-3 on node0, node1 wait in step 6, backward, all_reduce #17 (4.2 MB) of group world" in said


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"process": "T"}, "stopped"),
        ({"busy": True}, "computing"),
        ({"ended": LEFT}, "left"),
        ({"ended": LOST}, "lost"),
        ({"phase": "checkpoint"}, "checkpoint"),
    ],
)
def test_why_it_does_not_come(changes: dict[str, object], kind: str) -> None:
    assert stall(rank(0), behind(1, **changes), rank(2), rank(3))[:2] == (kind, (1,))


def test_a_rank_that_left_its_loop() -> None:
    said = stall(rank(0), behind(1, ended=LEFT, phase="other"), rank(2), rank(3))[2]
    assert "rank 1 on node0 (host host0, pid 101) left its loop after step 5" in said
    # Where collectives cannot be seen, too.
    blind = [rank(each, groups={}, ended=LEFT if each == 1 else RUNS) for each in range(4)]
    assert stall(*blind)[:2] == ("left", (1,))


def test_the_one_at_the_end_of_a_chain_is_blamed() -> None:
    """0 waits for 1 in one group, 1 for 2 in another, and 2 for nobody."""
    groups = [Group("replicate", (0, 1)), Group("shard", (1, 2))]
    states = [
        rank(0, groups={0: issued(5)}),
        rank(1, groups={0: issued(4, finished=True), 1: issued(9)}),
        rank(2, groups={1: issued(8, finished=True)}, phase="input"),
    ]
    assert stall(*states, groups=groups)[:2] == ("hang", (2,))


def test_ranks_that_wait_for_each_other() -> None:
    groups = [Group("a", (0, 1)), Group("b", (0, 1))]
    states = [rank(0, groups={0: issued(5), 1: issued(4, finished=True)}),
              rank(1, groups={0: issued(4, finished=True), 1: issued(5)})]  # fmt: skip
    kind, ranks, said = stall(*states, groups=groups)
    assert (kind, ranks) == ("hang", (0, 1)) and "wait for each other" in said


def test_a_pipeline_stage_that_others_wait_for() -> None:
    """Sends and receives have no numbers: who waits says for whom."""
    states = [rank(0, groups={}, phase="forward", wait=Wait("receive", 0, 1)), rank(1, groups={}, phase="forward")]
    assert stall(*states)[:2] == ("hang", (1,))


def test_without_collectives_the_one_in_the_earlier_step_or_phase_is_blamed() -> None:
    states = [rank(each, groups={}, phase="input" if each == 2 else "backward") for each in range(4)]
    assert stall(*states)[:2] == ("hang", (2,))
    assert stall(*(replace(each, step=5 if each.rank == 3 else 6) for each in states))[:2] == ("hang", (3,))


def test_all_have_come_and_nothing_moves() -> None:
    kind, _, said = stall(*map(rank, range(4)))
    assert kind == "network" and "the network between node0, node1" in said


def test_who_computes_while_nobody_waits_is_not_blamed() -> None:
    states = [rank(each, groups={}, phase="forward", busy=True) for each in range(4)]
    assert diagnose_stall(states, WORLD) is None


def test_different_collectives_are_named_on_both_sides() -> None:
    other = (Collective(17, "broadcast", 800, False),)
    kind, ranks, said = stall(rank(0), rank(1), rank(2, groups={0: other}), rank(3))
    assert (kind, ranks) == ("mismatch", (2,))
    assert "rank 2 on node1 issued broadcast #17 (800 bytes) in step 6, backward" in said
    assert "ranks 0-1, 3 on node0, node1 issued all_reduce #17 (4.2 MB) in step 6, backward" in said
    # Of two, nobody can say who is right; and an exchange of unequal parts is none.
    assert stall(rank(0), rank(1, groups={0: other}))[:2] == ("mismatch", (0, 1))
    uneven = [rank(each, groups={0: (Collective(17, "all_to_all", 8 * each, False),)}) for each in range(4)]
    assert stall(*uneven)[0] == "network"


def lost(number: int, at_s: float = 1.2, **changes: object) -> RankState:
    return rank(
        number, **{"ended": RAISED, "secondary": True, "error": "closed by peer", "ended_at_s": at_s, **changes}
    )


def test_the_first_that_died_is_blamed_not_those_that_a_launcher_ended_then() -> None:
    died = behind(1, ended=GONE, process="", exit="was killed by signal 9 (SIGKILL)", out_of_memory=1, ended_at_s=1.0)
    ordered = rank(2, ended=INTERRUPTED, ended_at_s=1.3)
    killed = rank(3, ended=GONE, ended_at_s=9.0)
    kind, ranks, said = found(diagnose_end([lost(0), died, ordered, killed], WORLD))
    assert (kind, ranks) == ("died", (1,))
    assert (
        "was killed by signal 9 (SIGKILL) in step 6, forward: probably out of memory, the kernel has killed 1" in said
    )


def test_the_first_real_error_is_the_one_that_counts() -> None:
    """B12: the innocent see an error first, too."""
    first = behind(1, ended=RAISED, error="ValueError: x", trace=("Traceback", "ValueError: x"), ended_at_s=1.5)
    diagnosis = diagnose_end([lost(0, 1.0), first, lost(2), replace(first, rank=3, ended_at_s=1.6)], WORLD)
    assert found(diagnosis)[:2] == ("raised", (1,))
    assert diagnosis is not None and diagnosis.trace == first.trace
    assert any("rank 3 on node0 raised the same" in line for line in diagnosis.lines)


def test_what_all_raise_together_or_a_signal_ends_is_not_repeated() -> None:
    together = [rank(each, ended=RAISED, error="no", together=True, shown=True) for each in range(4)]
    assert diagnose_end(together, WORLD) is None
    assert diagnose_end([lost(0), rank(1, ended=INTERRUPTED), lost(2), lost(3)], WORLD) is None
    early = [rank(0, ended=INTERRUPTED, ended_at_s=1.0), behind(1, ended=GONE, ended_at_s=2.0), rank(2), rank(3)]
    assert diagnose_end(early, WORLD) is None


def test_a_timeout_of_the_others_still_names_the_one_that_hangs() -> None:
    assert found(diagnose_end([lost(0), behind(1), lost(2), lost(3)], WORLD))[:2] == ("hang", (1,))
    assert found(diagnose_end(list(map(lost, range(4))), WORLD))[0] == "network"


def test_what_no_sentinel_would_say_is_refused() -> None:
    assert merged(rank(0), {"groups": {"0": [[1, "all_reduce", 8, True]]}, "unknown": 1}, WORLD).issued(0) == 2
    for nonsense in NONSENSE:
        with pytest.raises(ValueError, match="none"):
            merged(rank(0), nonsense, WORLD)


collectives = st.builds(
    Collective, st.integers(0, 5), st.sampled_from(["all_reduce", "barrier"]), st.sampled_from([8, 16]), st.booleans()
)
recents = st.lists(collectives, max_size=3).map(lambda some: tuple(sorted(some, key=lambda each: each.sequence)))
states = st.builds(
    RankState,
    rank=st.integers(0, 3),
    node=st.sampled_from("ab"),
    process=st.sampled_from("RSDTZ"),
    ended=st.sampled_from([RUNS, RUNS, LEFT, INTERRUPTED, RAISED, GONE, LOST, UNWATCHED]),
    ended_at_s=st.floats(0, 5),
    secondary=st.booleans(),
    together=st.booleans(),
    step=st.integers(1, 3),
    phase=st.sampled_from(["input", "forward", "backward", "checkpoint", "other", None]),
    idle_s=st.floats(0, 100),
    busy=st.booleans(),
    wait=st.none() | st.builds(Wait, st.sampled_from(["send", "receive"]), st.integers(0, 2), st.integers(0, 5)),
    groups=st.dictionaries(st.integers(0, 2), recents, max_size=2),
)


@given(st.lists(states, max_size=4, unique_by=lambda state: state.rank))
def test_nothing_raises_whatever_is_said(everybody: list[RankState]) -> None:
    groups = [Group("world", (0, 1, 2, 3)), Group("pair", (1, 2))]
    for diagnosis in (diagnose_stall(everybody, groups), diagnose_end(everybody, groups)):
        assert diagnosis is None or (diagnosis.lines and set(diagnosis.ranks) <= {state.rank for state in everybody})


@given(st.sets(st.integers(0, 3), min_size=1, max_size=3), st.integers(1, 20))
def test_who_waits_is_not_blamed_while_another_is_missing(absent: set[int], number: int) -> None:
    everybody = [
        behind(each, groups={0: issued(number - 1, finished=True)}) if each in absent
        else rank(each, groups={0: issued(number)})
        for each in range(4)
    ]  # fmt: skip
    assert stall(*everybody)[:2] == ("hang", tuple(sorted(absent)))
