"""From lines of the record to arrays."""

from typing import TYPE_CHECKING

import numpy as np
import pytest

from bireme.verdict.evidence import NotEnough, from_lines

if TYPE_CHECKING:
    from tests.verdict.made_lines import facts, line
else:
    from made_lines import facts, line


def lines(count: int, size: int = 2):  # type: ignore[no-untyped-def]
    return [line(step, [{"forward/running": 100.0, "backward/wait": 5.0}] * size) for step in range(1, count + 1)]


def test_times_are_milliseconds_and_own_time_is_without_the_others() -> None:
    evidence = from_lines(lines(10), facts(2))
    assert evidence.wall_ms == pytest.approx(np.full((10, 2), 105.0))
    assert evidence.own_ms == pytest.approx(np.full((10, 2), 100.0))
    assert evidence.steps.tolist() == list(range(1, 11))
    assert evidence.missing == ()


def test_where_collectives_are_unknown_blocked_is_nobodys_own() -> None:
    rows = [line(step, [{"forward/running": 80.0, "backward/blocked": 25.0}] * 2) for step in range(1, 11)]
    evidence = from_lines(rows, facts(2, missing={"collectives": "no hooks"}))
    assert evidence.own_ms == pytest.approx(np.full((10, 2), 80.0))


def test_skipped_steps_are_left_out_and_too_few_say_nothing() -> None:
    rows = lines(12)
    for row in rows[:5]:
        row["skipped"] = "warm-up"
    with pytest.raises(NotEnough, match=r"^7 complete measured steps are too few for a verdict: 8 are needed$"):
        from_lines(rows, facts(2))
    assert len(from_lines([*rows, line(13, [{"forward/running": 1.0}] * 2)], facts(2)).steps) == 8


def test_missing_ranks_and_steps_are_said() -> None:
    rows = [
        line(step, [{"forward/running": 100.0}, {"forward/running": 100.0} if step < 19 else None, None])
        for step in range(1, 21)
    ]
    evidence = from_lines(rows, facts(3))
    assert evidence.ranks.tolist() == [0, 1]
    assert len(evidence.steps) == 18
    assert evidence.missing == (
        "left out, with less than half of the steps recorded: rank 2",
        "left out, as a rank did not record them: 2 steps",
    )


def test_roles_are_stages_and_tensor_parallel_places() -> None:
    roles = [{"pp": rank // 4, "tp": rank % 2} for rank in range(8)]
    described = [{"rank": rank, "role": role} for rank, role in enumerate(roles)]
    evidence = from_lines(lines(10, 8), facts(8, ranks=described))
    assert evidence.stage_of.tolist() == [0] * 4 + [1] * 4
    assert len(set(evidence.role_of.tolist())) == 4
    # With two ranks a tensor-parallel place has one rank each: they are held against each other.
    evidence = from_lines(lines(10), facts(2, ranks=[{"rank": r, "role": {"tp": r}} for r in range(2)]))
    assert len(set(evidence.role_of.tolist())) == 1


def test_an_older_record_without_garbage_collection_is_read() -> None:
    rows = lines(10)
    for row in rows:
        del row["gc_ns"]
    assert from_lines(rows, facts(2)).gc_ms.sum() == 0


def test_what_a_full_machine_has_anyway_is_nobodys_own() -> None:
    """Two ranks on two cores: up to a tenth of the step without a core. With a core to spare it is the rank's."""
    rows = [
        line(step, [{"forward/running": 100.0}, {"forward/running": 100.0, "forward/runnable": waited}])
        for step, waited in ((step, 8.0 if step % 2 else 30.0) for step in range(1, 11))
    ]
    for cores, threads, full in (([0, 1], None, True), ([0, 1, 2], None, False), ([0, 1, 2], 2, True)):
        described = [{"rank": rank, "cores": cores, "threads": threads} for rank in (0, 1)]
        evidence = from_lines(rows, facts(2, ranks=described))
        assert evidence.own_ms[:, 0] == pytest.approx(np.full(10, 100.0))
        usual = 10.0 if full else 0.0  # a tenth of what rank 0 takes
        assert evidence.own_ms[0, 1] == pytest.approx(108.0 - min(8.0, usual))
        assert evidence.own_ms[1, 1] == pytest.approx(130.0 - usual)


@pytest.mark.parametrize("cores", [None, [], "all"])
def test_cores_that_nobody_knows_are_enough(cores: object) -> None:
    described = [{"rank": rank, "cores": cores} for rank in (0, 1)]
    crowded = from_lines(lines(10), facts(2, ranks=described)).crowded
    assert crowded is not None and crowded.tolist() == [False, False]
