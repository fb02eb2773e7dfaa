"""Verdicts on made-up runs whose culprit is known (benchmarks/stragglers.py scores thousands of them)."""

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from bireme.ledger import PHASES
from bireme.verdict.evidence import Evidence, Use, from_lines
from bireme.verdict.judge import judge
from bireme.verdict.kinds import Verdict

if TYPE_CHECKING:
    from benchmarks.synthetic import KINDS, Made, cell, make
    from tests.verdict.made_lines import facts, line
else:
    from made_lines import facts, line

    from synthetic import KINDS, Made, cell, make

ALARMS = {"rank", "node", "link", "stage_imbalance", "data_imbalance", "drift"}


def alarms(verdicts: list[Verdict]) -> list[Verdict]:
    return [verdict for verdict in verdicts if verdict.kind in ALARMS]


def only(verdicts: list[Verdict]) -> Verdict:
    (verdict,) = verdicts
    return verdict


def quiet(steps: int = 200, size: int = 8, noise: float = 0.03, seed: int = 0, **more: Any) -> Made:
    return Made(steps, size, np.random.default_rng(seed), noise, **more)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_planted_is_found_and_nothing_else(kind: str) -> None:
    right = 0
    for seed in range(70_000, 70_012):
        evidence, truth = make(kind, seed, noise=0.03)
        verdicts = judge(evidence)
        found = [v for v in verdicts if v.kind in truth.kinds and (not truth.ranks or set(v.ranks) == set(truth.ranks))]
        right += bool(found) and (not truth.cells or (found[0].phase, found[0].state) in truth.cells)
        assert all(verdict in found for verdict in alarms(verdicts)), (kind, seed)
    assert right >= 11


def test_healthy_runs_stay_healthy() -> None:
    """B52 a: 8 ranks, noise of 3 %, 200 runs: less than one alarm in a hundred."""
    found = [alarms(judge(make("healthy", seed, noise=0.03)[0])) for seed in range(80_000, 80_200)]
    assert sum(map(bool, found)) <= 1


def test_healthy_is_a_verdict_and_says_what_it_saw() -> None:
    made = quiet()
    made.plant(slice(None), 3, ("forward", "running"), 0.02 * made.step_ms)
    verdict = only(judge(made.evidence()))
    assert verdict.kind == "healthy"
    assert "Rank 3 takes most of its own" in verdict.sentence and "(2" in verdict.sentence
    assert 0 < verdict.confidence < 1 and verdict.what_if is None


def test_one_spike_is_a_one_off() -> None:
    """B52 b."""
    made = quiet()
    made.plant(77, 5, ("input", "blocked"), 2000.0)
    verdict = only(judge(made.evidence()))
    assert (verdict.kind, verdict.ranks, verdict.first_step, verdict.last_step) == ("one_off", (5,), 78, 78)
    assert (verdict.phase, verdict.state) == ("input", "blocked")


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("in_order", [True, False])
def test_a_culprit_that_changes_is_uneven_work(size: int, in_order: bool) -> None:
    """B52 c."""
    for seed in range(5):
        made = quiet(size=size, seed=seed)
        who = np.arange(200) % size if in_order else np.random.default_rng(seed).integers(0, size, 200)
        made.plant(np.arange(200), who, ("forward", "running"), 0.3 * made.step_ms)
        verdict = only(judge(made.evidence()))
        assert verdict.kind == "data_imbalance" and verdict.ranks == tuple(range(size))
        assert (verdict.phase, verdict.state) == ("forward", "running")


def test_ten_percent_are_found_within_thirty_steps() -> None:
    """B52 d."""
    for seed in range(20):
        made = quiet(seed=seed)
        made.plant(slice(100, None), 3, ("backward", "running"), 0.1 * made.healthy_ms)
        evidence = made.evidence()
        verdict = only(judge(_first(evidence, 130)))
        assert (verdict.kind, verdict.ranks) == ("rank", (3,))


def _first(evidence: Evidence, steps: int) -> Evidence:
    cut = {name: getattr(evidence, name)[:steps] for name in ("steps", "wall_ms", "cells_ms", "gc_ms", "tokens")}
    uses = tuple(
        dataclasses.replace(use, count=use.count[:steps], bytes=use.bytes[:steps], transfer_ms=use.transfer_ms[:steps])
        for use in evidence.uses
    )
    return dataclasses.replace(evidence, **cut, uses=uses)


def test_twice_as_long_in_a_phase_of_a_millisecond_is_healthy() -> None:
    """B52 e."""
    made = quiet()
    made.plant(slice(None), 2, ("input", "running"), 1.0)
    assert only(judge(made.evidence())).kind == "healthy"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "where", [("input", "blocked"), ("forward", "blocked"), ("backward", "blocked"), ("optimizer", "running")]
)
def test_who_waits_is_not_blamed(rank: int, where: tuple[str, str]) -> None:
    """B51: all steps are equally long on both ranks; the one that waits less is the slow one, in its own phase."""
    made = quiet(size=2, steps=60)
    made.plant(slice(None), rank, where, 150.0)
    evidence = made.evidence()
    assert np.ptp(evidence.wall_ms, axis=1).max() < 1e-3
    verdict = only(judge(evidence))
    assert (verdict.kind, verdict.ranks, (verdict.phase, verdict.state)) == ("rank", (rank,), where)
    assert verdict.excess_ms == pytest.approx(150, rel=0.1)


def test_removing_the_culprit_is_worth_what_it_costs() -> None:
    for size in (2, 4, 16):
        for ms in (80.0, 250.0):
            made = quiet(size=size)
            clean_ms = made.healthy_ms
            made.plant(slice(None), 1, ("backward", "blocked"), ms)
            verdict = only(judge(made.evidence()))
            assert verdict.what_if is not None
            assert verdict.what_if.step_ms == pytest.approx(clean_ms, rel=0.05)
            assert verdict.what_if.tokens_per_s_global == pytest.approx(4096 * size / clean_ms * 1e3, rel=0.05)
            assert verdict.share == pytest.approx(ms / (clean_ms + ms), rel=0.15)


def test_the_next_slowest_limits_what_it_is_worth() -> None:
    made = quiet(size=4)
    clean_ms = made.healthy_ms
    for rank, ms in ((1, 200.0), (2, 150.0)):
        made.plant(slice(None), rank, ("forward", "running"), ms)
    verdicts = judge(made.evidence())
    assert {verdict.ranks for verdict in verdicts} == {(1,), (2,)}
    first = next(verdict for verdict in verdicts if verdict.ranks == (1,))
    assert first.what_if is not None and first.what_if.step_ms == pytest.approx(clean_ms + 150, rel=0.05)


def test_garbage_collection_at_different_steps_is_named() -> None:
    """B54: at least four fifths of the excess are attributed, to the ranks that paused."""
    made = quiet(size=2, steps=80)
    for rank in range(2):
        rows = np.arange(rank * 2, 80, 5)
        made.plant(rows, rank, ("forward", "running"), 300.0)
        made.gc_ms[rows, rank] = 290.0
    verdict = only(judge(made.evidence()))
    assert (verdict.kind, verdict.ranks, verdict.cause) == ("rank", (0, 1), "garbage collection")
    assert "--gc-every" in verdict.advice
    assert verdict.share * made.evidence().step_ms.sum() >= 0.8 * 32 * 290.0


def test_a_card_that_gets_slower_is_a_drift() -> None:
    """B55: 10 % more from step 200 on, bit by bit: the change is found within 20 steps."""
    for seed in range(5):
        made = quiet(steps=400, noise=0.01, seed=seed)
        ramp = np.clip((np.arange(400) - 200) / 150, 0, 1) * 0.1 * made.healthy_ms
        made.plant(np.arange(400), 6, ("backward", "running"), ramp)
        verdict = only(judge(made.evidence()))
        assert (verdict.kind, verdict.ranks) == ("drift", (6,))
        assert abs(verdict.first_step - 200) <= 20
        assert "temperature" in verdict.advice and "most of it in backward/running" in verdict.sentence


def test_all_cards_that_get_slower_are_a_drift() -> None:
    made = quiet(steps=300, noise=0.01)
    ramp = np.clip((np.arange(300) - 150) / 100, 0, 1) * 0.3 * made.step_ms
    made.cells[:, :, cell("backward", "running")] += ramp[:, None]
    verdict = only(judge(made.evidence()))
    assert verdict.kind == "drift" and len(verdict.ranks) == 8 and "all ranks" in verdict.sentence


def test_every_fourth_step_with_four_workers_is_the_loader() -> None:
    """B59: batches take 120 ms, four workers, a step takes 20 ms without them."""
    rows = []
    for step in range(1, 101):
        stall = 100.0 if step % 4 == 0 else 0.0
        rows.append(line(step, [{"input/blocked": 0.1 + stall, "forward/running": 20.0 + step % 3 * 0.1}] * 2))
    verdict = only(judge(from_lines(rows, facts(2, config={"workers": 4}))))
    assert (verdict.kind, verdict.ranks, verdict.phase, verdict.state) == ("rank", (0, 1), "input", "blocked")
    assert verdict.evidence["period_steps"] == 4 and "every 4th step waits, and there are 4 workers" in verdict.advice
    assert "about 9 workers would keep up" in verdict.advice  # 4 x 45 ms / 20 ms


@pytest.mark.parametrize("size", [2, 4, 8])
def test_every_other_step_is_not_half_as_much_in_every_step(size: int) -> None:
    for seed in range(5):
        made = quiet(size=size, seed=seed)
        made.plant(np.arange(1, 200, 2), 1, ("input", "blocked"), 100.0)
        verdict = only(judge(dataclasses.replace(made.evidence(), workers=2)))
        assert (verdict.kind, verdict.ranks, verdict.phase) == ("rank", (1,), "input")
        assert verdict.excess_ms == pytest.approx(100, rel=0.1)
        assert verdict.evidence["period_steps"] == 2 and "there are 2 workers" in verdict.advice


@pytest.mark.parametrize("begin", range(60, 70))
def test_the_ragged_edge_of_a_stretch_is_no_one_off(begin: int) -> None:
    made = quiet(size=2)
    made.plant(slice(begin, begin + 73), 1, ("forward", "blocked"), 150.0)
    assert [verdict.kind for verdict in judge(made.evidence())] == ["rank"]


def test_short_steps_with_a_few_long_ones_are_judged() -> None:
    """The mean and the median of the step are far apart."""
    rows = [
        line(step, [{"forward/running": 100.0 if step % 5 < 3 else 6.0, "input/blocked": 4.0}] * 2)
        for step in range(1, 101)
    ]
    assert judge(from_lines(rows, facts(2)))


def test_one_rank_whose_loader_stalls_now_and_then() -> None:
    made = quiet(size=4)
    rows = np.arange(3, 200, 6)
    made.plant(rows, 2, ("input", "blocked"), 400.0)
    verdict = only(judge(made.evidence()))
    assert (verdict.kind, verdict.ranks, verdict.phase) == ("rank", (2,), "input")
    assert verdict.evidence["period_steps"] == 6 and "every 6th step" in verdict.sentence


def test_a_slow_checkpoint_is_named_with_who_writes_it() -> None:
    rows = []
    for step in range(1, 61):
        saving = 500.0 if step % 10 == 0 else 0.0
        rows.append(line(step, [{"checkpoint/blocked": saving, "forward/running": 50.0}] * 2))
    events = [{"event": "checkpoint", "write_s": [0.1, 4.0]}]
    verdict = only(judge(from_lines(rows, facts(2), events)))
    assert (verdict.kind, verdict.ranks, verdict.phase, verdict.state) == ("rank", (1,), "checkpoint", "blocked")
    assert "rank 1 on here writes for 4 s, the others for 0.1 s" in verdict.sentence
    for write_s in ([0.001, 0.002], [0, 0], None):  # nobody whom it would be worth waiting for
        verdict = only(judge(from_lines(rows, facts(2), [{"event": "checkpoint", "write_s": write_s}])))
        assert verdict.ranks == (0, 1) and verdict.evidence["period_steps"] == 10


def test_what_happens_at_the_end_of_a_step_is_waited_for_in_the_next() -> None:
    rows = []
    for step in range(1, 61):
        saving, waited = 500.0 * (step % 4 == 0), 500.0 * (step % 4 == 1 and step > 1)
        usual = {"forward/running": 100.0 + step % 3}
        rows.append(line(step, [{**usual, "backward/wait": waited}, {**usual, "checkpoint/blocked": saving}]))
    verdict = only(judge(from_lines(rows, facts(2))))
    assert (verdict.kind, verdict.ranks, verdict.phase, verdict.state) == ("rank", (1,), "checkpoint", "blocked")
    assert verdict.evidence["period_steps"] == 4


def test_what_a_quota_or_the_hypervisor_took_is_the_cause() -> None:
    fast, slow = ({"forward/running": 100.0, where: 50.0} for where in ("backward/wait", "forward/runnable"))
    rows = [line(step, [fast, slow]) for step in range(1, 61)]
    for taken, cause in (("throttled_ms", "held back by a CPU quota"), ("steal_ms", "cores taken by the hypervisor")):
        host = {"event": "host", "rank": 1, "first_step": 1, "last_step": 60, "throttled_ms": 0, "steal_ms": 0}
        verdict = only(judge(from_lines(rows, facts(2), [{**host, taken: 2900.0}])))
        assert (verdict.ranks, verdict.state, verdict.cause) == ((1,), "runnable", cause)
    # Of three cores two thirds are not this rank's; and what is damaged is left out.
    three = facts(2, ranks=[{"cores": [0, 1, 2]}] * 2)
    assert only(judge(from_lines(rows, three, [{**host, "steal_ms": 2900.0}]))).cause == "contention for cores"
    damaged = [{**host, "rank": "x"}, {**host, "first_step": None}, {**host, "steal_ms": "much"}, {**host, "rank": 7}]
    assert only(judge(from_lines(rows, facts(2), damaged))).cause == "contention for cores"


# --- nodes, stages, links ----------------------------------------------------------------------------------------


def test_one_slow_rank_is_not_its_node() -> None:
    made = quiet(size=4, nodes=2)
    made.plant(slice(None), 3, ("backward", "running"), 60.0)
    verdict = only(judge(made.evidence()))
    assert (verdict.kind, verdict.ranks, verdict.node) == ("rank", (3,), "node1")


@pytest.mark.parametrize(("size", "nodes"), [(4, 2), (16, 2), (32, 8)])
def test_all_ranks_of_a_node_are_the_node(size: int, nodes: int) -> None:
    made = quiet(size=size, nodes=nodes)
    per_node = size // nodes
    ranks = np.arange(per_node, 2 * per_node)
    made.plant(slice(None), ranks, ("backward", "runnable"), 60.0)
    verdict = only(judge(made.evidence()))
    assert (verdict.kind, verdict.ranks, verdict.node) == ("node", tuple(ranks.tolist()), "node1")
    assert verdict.sentence.startswith("node node1")


def test_a_rank_that_is_much_worse_than_its_slow_node_is_named_too() -> None:
    made = quiet(size=8, nodes=2)
    made.plant(slice(None), np.arange(4, 8), ("backward", "running"), 40.0)
    made.plant(slice(None), 6, ("forward", "blocked"), 100.0)
    verdicts = {verdict.kind: verdict for verdict in judge(made.evidence())}
    assert verdicts["node"].ranks == (4, 5, 6, 7) and verdicts["rank"].ranks == (6,)
    assert verdicts["rank"].phase == "forward"


def test_waiting_in_a_pipeline_is_not_blame() -> None:
    made = quiet(size=8, stages=2)
    made.plant(slice(None), np.arange(4), ("forward", "wait"), 80.0)
    evidence = made.evidence()
    assert only(judge(evidence)).kind == "healthy"


def test_a_slow_rank_of_a_light_stage_is_found_by_its_peers() -> None:
    """Who arrives last overall is a rank of the heavy stage; only peers of the same stage show who is slow."""
    made = quiet(size=8, stages=2)
    made.plant(slice(None), np.arange(4, 8), ("forward", "running"), 40.0)
    made.plant(slice(None), np.arange(4, 8), ("backward", "running"), 80.0)
    made.plant(slice(None), 1, ("forward", "running"), 60.0)
    verdicts = {verdict.kind: verdict for verdict in judge(made.evidence())}
    assert verdicts["stage_imbalance"].ranks == (4, 5, 6, 7)
    assert verdicts["rank"].ranks == (1,)
    # All wait for the heavy stage anyway: to cure the rank alone would gain nothing.
    assert verdicts["rank"].share < 0.01 < verdicts["stage_imbalance"].share


def test_one_slow_rank_of_a_stage_is_not_its_stage() -> None:
    for ms in (40.0, 100.0):
        made = quiet(size=4, stages=2)
        made.plant(slice(None), 3, ("forward", "running"), 0.4 * ms)
        made.plant(slice(None), 3, ("backward", "running"), 0.6 * ms)
        verdict = only(judge(made.evidence()))
        assert (verdict.kind, verdict.ranks) == ("rank", (3,))


def test_a_stage_of_one_rank_that_sleeps_is_a_slow_rank() -> None:
    made = quiet(size=2, stages=2)
    made.plant(slice(None), 1, ("forward", "blocked"), 100.0)
    verdict = only(judge(made.evidence()))
    assert (verdict.kind, verdict.ranks, verdict.phase, verdict.state) == ("rank", (1,), "forward", "blocked")


def _with_uses(evidence: Evidence, *uses: Use, **more: Any) -> Evidence:
    return dataclasses.replace(evidence, uses=uses, **more)


def test_a_link_that_slows_down_is_the_link_and_no_rank() -> None:
    made = quiet(size=4, nodes=2)
    made.transfer_ms[120:] += 100
    verdict = only(judge(made.evidence(True)))
    assert (verdict.kind, verdict.ranks, verdict.state) == ("link", (0, 1, 2, 3), "transfer")
    assert abs(verdict.first_step - 121) <= 5
    assert verdict.evidence["nodes"] == ["node0", "node1"] and verdict.evidence["expected_from"] == "its own history"


def test_a_link_is_held_against_its_siblings_its_rate_and_what_was_measured() -> None:
    """B56: a pair at half of the bandwidth of the others like it."""
    made = quiet(size=8, nodes=2)
    made.transfer_ms[:] = 60.0
    size, ones = np.full(200, 10e6), np.ones(200)
    pairs = tuple(("replicate", (rank, rank + 4)) for rank in range(4))
    uses = [Use(i, "all_reduce", ones, size, np.full(200, 60.0 if i == 2 else 25.0)) for i in range(4)]
    verdict = only(judge(_with_uses(made.evidence(), *uses, groups=pairs)))
    assert (verdict.kind, verdict.ranks) == ("link", (2, 6))
    assert verdict.evidence["expected_from"] == "groups like it"

    world = (("world", tuple(range(8))),)
    one = Use(0, "all_reduce", ones, size, np.full(200, 60.0))
    healthy = _with_uses(made.evidence(), one, groups=world)
    assert only(judge(healthy)).kind == "healthy"  # it was never better
    # 10 MB over 7/4: 17.5 MB in 60 ms are 292 MB/s
    assert only(judge(dataclasses.replace(healthy, link_bytes_per_s=400e6))).kind == "healthy"
    verdict = only(judge(dataclasses.replace(healthy, link_bytes_per_s=1200e6)))
    assert verdict.kind == "link" and verdict.evidence["expected_from"] == "the link's rate"
    verdict = only(judge(healthy, lambda operation, ranks, size: 20.0))
    assert verdict.kind == "link" and verdict.evidence["expected_from"] == "links.json"
    assert only(judge(healthy, lambda operation, ranks, size: 50.0)).kind == "healthy"
    assert only(judge(healthy, lambda operation, ranks, size: None)).kind == "healthy"


def test_a_link_is_worth_what_the_step_feels_of_it() -> None:
    """Part of the transfer was hidden before, and is hidden still."""
    made = quiet(size=4, nodes=2)
    clean_ms = made.healthy_ms
    made.transfer_ms[100:] += 80.0
    evidence = made.evidence()
    use = Use(0, "all_reduce", np.ones(200), np.full(200, 1e7), made.transfer_ms * 1.5)
    verdict = only(judge(_with_uses(evidence, use)))
    assert verdict.kind == "link" and verdict.excess_ms == pytest.approx(80, rel=0.1)
    assert verdict.what_if is not None and verdict.what_if.step_ms == pytest.approx(clean_ms, rel=0.05)


def test_transfers_without_time_or_members_are_no_link() -> None:
    made = quiet(size=4, nodes=2)
    made.transfer_ms[:] = 60.0
    made.transfer_ms[:50] = 0.0
    evidence = made.evidence()
    use = Use(0, "all_reduce", np.ones(200), np.full(200, 1e7), made.transfer_ms)
    assert "link" not in {verdict.kind for verdict in judge(_with_uses(evidence, use))}
    gone = _with_uses(
        evidence, dataclasses.replace(use, transfer_ms=made.transfer_ms + 50), groups=(("world", (8, 9)),)
    )
    assert judge(dataclasses.replace(gone, link_bytes_per_s=1e12))


def test_a_rank_that_is_waited_for_is_not_the_link() -> None:
    """B53: a collective is as long on the good side as on the bad; its transfer is not."""
    made = quiet(size=4, nodes=2)
    made.plant(slice(100, None), 2, ("backward", "running"), 150.0)
    assert {verdict.kind for verdict in judge(made.evidence(True))} == {"rank"}


# --- odd runs ----------------------------------------------------------------------------------------------------


def test_one_rank_has_nobody_to_be_held_against() -> None:
    rows = [line(step, [{"forward/running": 100.0}]) for step in range(1, 31)]
    verdict = only(judge(from_lines(rows, facts(1))))
    assert verdict.kind == "healthy" and "one rank" in verdict.sentence


def test_a_missing_partner_leaves_the_others_of_the_stage() -> None:
    """tp=2 on four ranks, one of them not recorded."""
    rows = []
    for step in range(1, 61):
        own: list[Any] = [{"forward/running": 100.0 + step % 3, "backward/wait": 60.0} for _ in range(3)]
        own[1] = {"forward/running": 100.0 + step % 3, "forward/blocked": 60.0}
        rows.append(line(step, [*own, None]))
    roles = [{"role": {"tp": rank % 2}} for rank in range(4)]
    verdict = only(judge(from_lines(rows, facts(4, ranks=roles))))
    assert (verdict.kind, verdict.ranks) == ("rank", (1,))


def test_long_steps_are_told_without_exponents() -> None:
    made = quiet(size=2, step_ms=20_000.0)
    made.plant(slice(None), 1, ("forward", "blocked"), 12_345.0)
    verdict = only(judge(made.evidence()))
    assert "e+0" not in verdict.sentence and f"{verdict.excess_ms:.0f} ms" in verdict.sentence


def test_steps_without_time_are_no_reason_to_fail() -> None:
    rows = [line(step, [{}, {}]) for step in range(1, 31)]
    assert only(judge(from_lines(rows, facts(2)))).kind == "healthy"


@pytest.mark.parametrize("steps", [8, 9, 15, 24])
def test_short_runs_are_judged(steps: int) -> None:
    made = quiet(steps=steps, size=2)
    made.plant(slice(None), 1, ("forward", "blocked"), 150.0)
    verdict = only(judge(made.evidence()))
    assert (verdict.kind, verdict.ranks, verdict.phase) == ("rank", (1,), "forward")


def test_without_collectives_what_runs_is_compared() -> None:
    made = quiet(size=2, steps=60)
    made.plant(slice(None), 1, ("forward", "running"), 100.0)
    evidence = made.evidence()
    first = PHASES.index("backward") * 5
    evidence.cells_ms[:, :, first + 4] += evidence.cells_ms[:, :, first + 3]
    evidence.cells_ms[:, :, first + 3] = 0
    verdict = only(judge(dataclasses.replace(evidence, collectives_known=False)))
    assert (verdict.kind, verdict.ranks, verdict.phase) == ("rank", (1,), "forward")


def beside(own_ms: list[float], excess_ms: list[float]) -> list[Any]:
    """Two ranks: rank 1 takes that much more than rank 0, which waits for it."""
    return [
        line(step, [{"forward/running": own, "backward/wait": more}, {"forward/running": own + more}])
        for step, (own, more) in enumerate(zip(own_ms, excess_ms, strict=True), start=1)
    ]


@pytest.mark.parametrize(("excess_ms", "steps", "kind"), [(8.0, 14, "healthy"), (8.0, 24, "rank"), (40.0, 14, "rank")])
def test_what_is_small_has_to_last_longer(excess_ms: float, steps: int, kind: str) -> None:
    rows = beside([100.0] * 60, [excess_ms if 20 <= step < 20 + steps else 0.0 for step in range(60)])
    assert only(judge(from_lines(rows, facts(2)))).kind == kind


@pytest.mark.parametrize(("cores", "kind"), [([0, 1], "healthy"), ([0, 1, 2], "rank")])
def test_cores_that_are_all_in_use_are_not_equally_fast(cores: list[int], kind: str) -> None:
    known = facts(2, ranks=[{"rank": rank, "cores": cores} for rank in (0, 1)])
    assert only(judge(from_lines(beside([100.0] * 60, [8.0] * 60), known))).kind == kind


def test_a_cured_rank_is_at_times_the_slowest() -> None:
    rows = beside([100.0] * 30 + [120.0] * 30, [50.0] * 60)
    verdict = only(judge(from_lines(rows, facts(2))))
    assert verdict.ranks == (1,) and verdict.what_if is not None
    assert verdict.what_if.step_ms == pytest.approx(120.0, abs=1.0)  # and not 110, as if it were rank 0 itself
