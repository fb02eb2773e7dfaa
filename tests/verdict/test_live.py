"""Verdicts while the run goes on: told when they start, change and end."""

from typing import TYPE_CHECKING, Any

import numpy as np

from bireme.verdict.live import LiveJudge

if TYPE_CHECKING:
    from tests.verdict.made_lines import facts, line
else:
    from made_lines import facts, line


def run(slow: Any, steps: int = 200, **more: Any) -> list[tuple[int, str, str, tuple[int, ...]]]:
    """`slow(step)`: extra milliseconds of (rank 0, rank 1) in forward, blocked."""
    rng = np.random.default_rng(0)
    live = LiveJudge(facts(2, **more), clock=lambda: 0.0)  # as if judging took no time
    told = []
    for step in range(1, steps + 1):
        extra = slow(step)
        own = [100 + float(rng.normal(0, 1)) + each for each in extra]
        cells = [
            {"forward/running": o - e, "forward/blocked": e, "backward/wait": max(own) - o}
            for o, e in zip(own, extra, strict=True)
        ]
        for change in live.add([line(step, list(cells))]):
            told.append((change.step, change.state, change.verdict.kind, change.verdict.ranks))
            assert change.as_event()["message"] == change.sentence
    return told


def test_a_quiet_run_says_nothing() -> None:
    assert run(lambda step: (0.0, 0.0)) == []


def test_a_culprit_is_told_at_its_start_and_at_its_end_and_never_else() -> None:
    started, ended = run(lambda step: (0.0, 60.0 if 50 < step <= 120 else 0.0))
    assert started[1:] == ("started", "rank", (1,)) and 50 < started[0] <= 75
    assert ended[1:] == ("ended", "rank", (1,)) and 120 < ended[0] <= 160


def test_another_culprit_is_another_verdict() -> None:
    told = run(lambda step: (60.0, 0.0) if step > 100 else (0.0, 60.0))
    assert [each[1:] for each in told[:1]] == [("started", "rank", (1,))]
    assert ("started", "rank", (0,)) in [each[1:] for each in told]
    assert ("ended", "rank", (1,)) in [each[1:] for each in told]


def test_a_culprit_that_gets_much_worse_is_told_again() -> None:
    told = run(lambda step: (0.0, 15.0 if step < 100 else 150.0))
    assert [each[1] for each in told] == ["started", "changed"]


def test_one_spike_is_told_once() -> None:
    assert [each[1:] for each in run(lambda step: (0.0, 3000.0 if step == 60 else 0.0))] == [
        ("started", "one_off", (1,))
    ]


def test_skipped_steps_are_not_judged() -> None:
    live = LiveJudge(facts(2))
    rows = [
        line(step, [{"forward/running": 1.0}, {"forward/running": 900.0}], skipped="evaluation")
        for step in range(1, 100)
    ]
    assert live.add(rows) == []


def test_judging_takes_a_bounded_part_of_the_time() -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0  # every look at the clock: judging takes two seconds
        return now[0]

    live = LiveJudge(facts(2), clock)
    judged = 0
    for step in range(1, 400):
        before = live._not_before
        live.add([line(step, [{"forward/running": 100.0}] * 2)])
        judged += live._not_before != before
    assert 1 <= judged <= 3


def test_several_things_wrong_with_the_same_ranks_are_told_apart() -> None:
    """Input and checkpoints hold up all ranks, and one of them is slow besides: three verdicts, told once each."""
    rng = np.random.default_rng(0)
    live = LiveJudge(facts(2), clock=lambda: 0.0)
    told = []
    for step in range(1, 401):
        cells = []
        for rank in range(2):
            own = {"input/blocked": 15.0, "forward/running": 100 + float(rng.normal(0, 1))}
            # It becomes the most expensive of them half-way: that makes it no other verdict.
            saving = 100.0 if step < 200 else 180.0
            own["checkpoint/blocked"] = saving if step % 10 == 0 else 0.0
            own["backward/wait" if rank == 0 else "forward/blocked"] = 20.0
            cells.append(own)
        told += [(change.state, change.verdict.phase) for change in live.add([line(step, list(cells))])]
    assert sorted(told) == [("started", "checkpoint"), ("started", "forward"), ("started", "input")]


def test_what_is_kept_of_a_step_is_no_garbage_to_collect() -> None:
    import gc

    live = LiveJudge(facts(64), clock=lambda: 0.0)
    gc.collect()
    before = len(gc.get_objects())
    for step in range(1, 15):
        row = line(step, [{"forward/running": 100.0}] * 64)
        row["collectives"] = [[[0, "all_reduce", 8, 4_000_000, 1_000_000, 0]] for _ in range(64)]
        live.add([row])
        del row
    gc.collect()
    assert len(gc.get_objects()) - before < 14 * 20  # of 14 x 64 lists of cells
