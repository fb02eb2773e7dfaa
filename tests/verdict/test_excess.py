"""Excess over peers, noise, stretches and ramps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.verdict.evidence import median_of_others
from bireme.verdict.excess import is_ramp, noise_ms, stretches, window_length, windows


@given(st.integers(2, 9), st.integers(1, 6), st.integers(0, 2**32 - 1), st.booleans())
def test_the_median_of_the_others_is_that(ranks: int, steps: int, seed: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    own = rng.integers(0, 3, (steps, ranks)).astype(float) if ties else rng.random((steps, ranks))
    result = median_of_others(own)
    for rank in range(ranks):
        assert result[:, rank] == pytest.approx(np.median(np.delete(own, rank, axis=1), axis=1))


def test_noise_is_the_standard_deviation_whatever_a_rank_does_for_half_of_the_run() -> None:
    rng = np.random.default_rng(1)
    series = rng.normal(0, 3.0, (400, 8))
    assert noise_ms(series) == pytest.approx(3.0, rel=0.1)
    series[200:, 5] += 500
    assert noise_ms(series) == pytest.approx(3.0, rel=0.1)


def test_noise_of_two_ranks_that_take_turns_is_not_their_turns() -> None:
    rng = np.random.default_rng(2)
    own = rng.normal(100, 2.0, (300, 2))
    own[np.arange(300), np.arange(300) % 2] += 60
    excess = own - own[:, ::-1]
    assert noise_ms(excess) > 20
    assert noise_ms(excess, own) < 8


def test_windows_leave_nothing_out() -> None:
    series = np.arange(23.0)[:, None]
    assert windows(series, 5)[:, 0].tolist() == [2, 7, 12, 18.5]
    assert windows(series[:3], 5)[:, 0].tolist() == [1]


@pytest.mark.parametrize(("noise", "least", "most"), [(0.0, 5, 5), (3.0, 5, 15), (14.0, 20, 25)])
def test_windows_are_longer_where_it_is_noisy_and_never_too_few(noise: float, least: int, most: int) -> None:
    assert least <= window_length(200, noise, 100.0) <= most


def _excess(steps: int, ranks: int, noise: float, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, noise, (steps, ranks))


def test_a_stretch_is_found_where_it_is() -> None:
    excess = _excess(200, 4, 3.0)
    excess[60:121, 2] += 15
    (stretch,) = stretches(excess, np.full(200, 100.0), 3.0)
    assert stretch.column == 2
    assert abs(stretch.start - 60) <= 10 and abs(stretch.end - 121) <= 10
    assert stretch.excess_ms == pytest.approx(15, rel=0.1)


def test_two_stretches_of_one_rank_are_two() -> None:
    excess = _excess(300, 2, 1.0)
    excess[50:100, 1] += 30
    excess[200:260, 1] += 30
    found = sorted((s.start, s.end) for s in stretches(excess, np.full(300, 100.0), 1.0) if s.column == 1)
    assert len(found) == 2
    assert abs(found[0][0] - 50) <= 5 and abs(found[1][1] - 260) <= 5


@pytest.mark.parametrize(
    ("effect", "count"),
    [(4.0, 0), (8.0, 1)],  # identical machines differ by up to 5 %
)
def test_what_is_below_five_percent_is_nobodys_fault(effect: float, count: int) -> None:
    excess = _excess(200, 4, 0.5)
    excess[:, 0] += effect
    assert len(stretches(excess, np.full(200, 100.0), 0.5)) == count


def test_one_spike_is_no_stretch() -> None:
    excess = _excess(100, 4, 1.0)
    excess[50, 0] = 5000
    assert stretches(excess, np.full(100, 100.0), 1.0) == []


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("noise", [0.5, 2.0])
def test_a_ramp_is_told_from_a_step(seed: int, noise: float) -> None:
    rng = np.random.default_rng(seed)
    ramp = np.clip((np.arange(300) - 200) / 90, 0, 1) * 10 + rng.normal(0, noise, 300)
    found = is_ramp(ramp)
    assert found is not None and abs(found[0] - 200) <= 20 and found[1] == pytest.approx(10, rel=0.25)
    step = (np.arange(300) >= 153) * 10 + rng.normal(0, noise, 300)
    assert is_ramp(step) is None
    nothing = is_ramp(rng.normal(0, noise, 300))
    assert nothing is None or nothing[1] < noise


def test_a_ramp_in_a_very_long_run_takes_no_longer() -> None:
    found = is_ramp(np.clip((np.arange(100_000) - 60_000) / 20_000, 0, 1) * 10)
    assert found is not None and abs(found[0] - 60_000) <= 100_000 // 24 and found[1] == pytest.approx(10, rel=0.05)


def test_what_falls_is_no_drift() -> None:
    assert is_ramp(-np.arange(200.0)) is None
