"""Made-up ledgers, on which verdicts are scored: they add up, hold what was planted, and come again from their seed;
and the scoring itself."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from bireme.ledger import PHASES, STATES, TRANSFER, WAIT
from bireme.verdict.judge import judge
from bireme.verdict.kinds import Verdict

if TYPE_CHECKING:
    from benchmarks import run_scores, straggler_tables, synthetic, synthetic_scores
else:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
    try:
        run_scores, straggler_tables, synthetic, synthetic_scores = (
            importlib.import_module(name)
            for name in ("run_scores", "straggler_tables", "synthetic", "synthetic_scores")
        )
    finally:
        del sys.path[0]


@pytest.mark.parametrize("kind", synthetic.KINDS)
def test_the_cells_of_every_step_add_up_and_all_ranks_leave_together(kind: str) -> None:
    evidence, truth = synthetic.make(kind, 3)
    np.testing.assert_allclose(evidence.cells_ms.sum(axis=2, dtype=np.float64), evidence.wall_ms, rtol=1e-5)
    np.testing.assert_allclose(evidence.wall_ms, evidence.wall_ms[:, :1] * np.ones(evidence.wall_ms.shape[1]))
    assert (evidence.cells_ms >= 0).all() and truth.name == kind
    waits = evidence.cells_ms[:, :, WAIT :: len(STATES)].sum(axis=2)
    assert np.allclose(waits.min(axis=1), 0.0, atol=1e-4), "the slowest waits for nobody"
    assert (evidence.cells_ms[:, :, TRANSFER :: len(STATES)].sum(axis=2) > 0).all()


@pytest.mark.parametrize("seed", range(6))
def test_the_culprit_has_what_was_planted(seed: int) -> None:
    evidence, truth = synthetic.make("rank", seed, effect=0.4, noise=0.02)
    (rank,), ((phase, state),) = truth.ranks, truth.cells
    series = evidence.cells_ms[:, :, PHASES.index(phase) * len(STATES) + STATES.index(state)]
    excess = series[:, rank] - np.median(np.delete(series, rank, axis=1), axis=1)
    since = evidence.steps >= truth.first_step
    assert np.median(excess[since]) == pytest.approx(0.4 * truth.clean_ms, rel=0.1)
    if not since.all():
        assert abs(np.median(excess[~since])) < 0.05 * truth.clean_ms


def test_the_same_seed_gives_the_same_case_and_another_one_another() -> None:
    (one, truth), (same, also), (other, _) = (synthetic.make("gc", seed) for seed in (7, 7, 8))
    assert truth == also and np.array_equal(one.cells_ms, same.cells_ms) and np.array_equal(one.gc_ms, same.gc_ms)
    assert one.cells_ms.shape != other.cells_ms.shape or not np.array_equal(one.cells_ms, other.cells_ms)


def test_sizes_and_noise_are_as_said() -> None:
    sizes = {synthetic.make("healthy", seed)[0].cells_ms.shape[1] for seed in range(40)}
    assert min(sizes) >= synthetic.LIMITS[0] and max(sizes) <= synthetic.LIMITS[1] and len(sizes) > 3
    evidence, _ = synthetic.make("healthy", 1, noise=0.05)
    spread = np.median(evidence.own_ms.std(axis=0)) / synthetic.Made(1, 1, np.random.default_rng(0), 0.0).step_ms
    assert spread == pytest.approx(0.05, rel=0.25)


# --- scoring -----------------------------------------------------------------------------------------------------

TRUTH = synthetic.Truth("rank", ("rank",), ranks=(3,), cells=(("forward", "running"),), clean_ms=100.0)
RIGHT = Verdict("rank", ranks=(3,), phase="forward", state="running", share=0.2)


@pytest.mark.parametrize(
    ("verdicts", "right", "cause", "false_alarms", "given"),
    [
        ([RIGHT], True, True, 0, "rank"),
        ([replace(RIGHT, phase="backward")], True, False, 0, "rank"),
        ([replace(RIGHT, ranks=(4,))], False, False, 1, synthetic_scores.WRONG_RANKS),
        ([replace(RIGHT, ranks=(3, 4))], False, False, 1, synthetic_scores.WRONG_RANKS),
        ([replace(RIGHT, kind="drift")], False, False, 1, "drift"),
        ([replace(RIGHT, ranks=(4,)), RIGHT], True, True, 1, "rank"),
        ([Verdict("one_off", ranks=(3,)), RIGHT], True, True, 0, "rank"),
        ([Verdict("healthy")], False, False, 0, "healthy"),
    ],
)
def test_a_verdict_counts_when_kind_and_ranks_are_right(
    verdicts: list[Verdict], right: bool, cause: bool, false_alarms: int, given: str
) -> None:
    score = synthetic_scores.score_verdicts(verdicts, TRUTH)
    assert (score.right, score.right_cause, score.given) == (right, cause, given)
    assert score.alarms - score.right_alarms == false_alarms
    assert bool(score.told) == (not (right and cause) or false_alarms > 0)


def test_an_alarm_on_a_healthy_run_is_wrong_even_beside_a_one_off() -> None:
    healthy = synthetic.Truth("healthy", ("healthy", "one_off"))
    score = synthetic_scores.score_verdicts([Verdict("one_off", ranks=(1,)), RIGHT], healthy)
    assert not score.right and score.given == "rank" and score.alarms == 1
    assert synthetic_scores.score_verdicts([Verdict("one_off", ranks=(1,))], healthy).right


def test_precision_recall_and_right_cause_are_counted_over_what_they_are_about() -> None:
    said = ([RIGHT], [replace(RIGHT, phase="backward")], [replace(RIGHT, ranks=(4,))], [Verdict("healthy")])
    scores = [synthetic_scores.score_verdicts(verdicts, TRUTH) for verdicts in said]
    scores.append(synthetic_scores.score_verdicts([RIGHT], synthetic.Truth("healthy", ("healthy", "one_off"))))
    counted = synthetic_scores.count_scores(scores)
    assert (counted["precision"], counted["recall"], counted["right_cause"]) == (0.5, 0.5, 0.5)
    assert synthetic_scores.count_scores([])["precision"] is None


def test_a_clear_case_is_found_soon_and_its_worth_is_known() -> None:
    score = synthetic_scores.score_case(synthetic_scores.Case("rank", 11, effect=0.5, noise=0.01, timed=True))
    assert score.flawless and score.steps_to_detect is not None and score.steps_to_detect <= 40
    assert score.worth_error is not None and abs(score.worth_error) < 0.02
    evidence, truth = synthetic.make("rank", 11, effect=0.5, noise=0.01)
    part = synthetic_scores.part_of(evidence, 0, truth.first_step + 30)
    assert len(part.own_ms) == len(part.steps) == truth.first_step + 30
    assert any(synthetic_scores.says_so(verdict, truth) for verdict in judge(part))


def test_cases_of_one_seed_are_not_those_of_another() -> None:
    ours, theirs = (
        {
            case.seed
            for make in (synthetic_scores.strong_cases, synthetic_scores.healthy_cases, synthetic_scores.weak_cases)
            for case in make(seed, 3000)
        }
        for seed in (1, 2)
    )
    assert len(ours) == 9000 and not ours & theirs


# --- real runs ---------------------------------------------------------------------------------------------------

FACTS = {"world_size": 4, "nodes": [{"name": "a", "ranks": [0, 1]}, {"name": "b", "ranks": [2, 3]}]}


@pytest.mark.parametrize(
    ("planted", "verdict", "culprit", "place"),
    [
        ({"kind": "sleep", "ranks": [1], "phase": "backward"}, ("rank", [1], "backward", "blocked"), True, True),
        ({"kind": "sleep", "ranks": [1], "phase": "backward"}, ("rank", [1], "forward", "blocked"), True, False),
        ({"kind": "sleep", "ranks": [2, 3], "phase": "forward"}, ("node", [2, 3], "forward", "blocked"), True, True),
        ({"kind": "sleep", "ranks": [2, 3], "phase": "forward"}, ("rank", [2], "forward", "blocked"), False, True),
        ({"kind": "contention", "ranks": [0], "phase": None}, ("rank", [0], "backward", "runnable"), True, True),
        ({"kind": "contention", "ranks": [0], "phase": None}, ("rank", [0], "backward", "running"), True, False),
        ({"kind": "link", "ranks": [2, 3], "phase": None}, ("link", [0, 1, 2, 3], "backward", "transfer"), True, True),
        ({"kind": "gc", "ranks": [1], "phase": "forward"}, ("rank", [1], "forward", "running"), True, False),
    ],
)
def test_what_a_real_run_has_to_say(
    planted: dict[str, object], verdict: tuple[str, list[int], str, str], culprit: bool, place: bool
) -> None:
    expected = run_scores.expected_of(planted, FACTS)
    said = {**dict(zip(("kind", "ranks", "phase", "state"), verdict, strict=True)), "cause": "something else"}
    assert (expected.culprit(said), expected.place(said)) == (culprit, place)


def test_a_run_with_nothing_planted_is_right_without_an_alarm() -> None:
    for group, name in ((run_scores.HEALTHY_RUN, "healthy 1"), (run_scores.WHAT_IF, f"000 {run_scores.CLEAN}")):
        assert run_scores.RunScore("", group, name, "").right
        assert not run_scores.RunScore("", group, name, "", wrong=["rank 1"]).right
        assert not run_scores.RunScore("", group, name, "", problem="exit code 1").right
    planted = run_scores.RunScore("", run_scores.GRID, "000 sleep", "", culprit=True, host={"others": 0.4})
    assert not planted.right and planted.disturbed
    planted.place = True
    assert planted.right


def test_tables_are_renewed_between_their_markers(tmp_path: Path) -> None:
    document = tmp_path / "accuracy.md"
    document.write_text("# Title\n\n<!-- real -->\nold\n<!-- /real -->\n\nText.\n")
    part = straggler_tables.Part("real", wrong=["a|b <script>\n\x1b[31mred"])
    part.promise("errors", 0.0, ".0f", most=0)
    straggler_tables.renew(document, part, "python benchmarks/stragglers.py --seed 1", "here")
    text = document.read_text()
    assert text.startswith("# Title\n\n<!-- real -->\n") and text.endswith("<!-- /real -->\n\nText.\n")
    assert "| errors | 0 | <= 0 | met |" in text and "old" not in text and "--seed 1" in text
    assert "\x1b" not in text and "<script>" not in text
    straggler_tables.renew(document, part, "python benchmarks/stragglers.py --seed 1", "here")
    assert document.read_text() == text
