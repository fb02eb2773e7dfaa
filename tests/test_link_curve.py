import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.errors import UserError
from bireme.link_curve import Curve, fit_line

SIZES = [1024 * 4**power for power in range(9)]
points = st.dictionaries(st.integers(1, 1 << 60), st.floats(1e-9, 1e7), min_size=1, max_size=12).map(
    lambda each: list(each.items())
)


def test_an_exact_line_is_found_and_its_error_is_nothing() -> None:
    fit = fit_line([(size, 50e-6 + size / 50e6) for size in SIZES])
    assert fit is not None
    assert fit.alpha_s == pytest.approx(50e-6, rel=1e-6)
    assert fit.beta_s_per_byte == pytest.approx(1 / 50e6, rel=1e-6)
    assert fit.max_relative_error < 1e-6 and fit.median_relative_error < 1e-6


def test_the_fit_minimises_relative_errors() -> None:
    """One large size that is 10 % off must not spoil the small ones, as it would with absolute errors."""
    line = [(size, 1e-3 + size / 50e6) for size in SIZES]
    line[-1] = (line[-1][0], line[-1][1] * 1.1)
    fit = fit_line(line)
    assert fit is not None
    assert fit.alpha_s == pytest.approx(1e-3, rel=0.03)
    assert 0.01 < fit.max_relative_error < 0.1


@pytest.mark.parametrize(
    ("points", "zero"),
    [([(1000, 1e-6), (2000, 1e-4)], "alpha_s"), ([(1000, 1e-3), (2000, 1e-4)], "beta_s_per_byte")],
)
def test_neither_term_is_below_zero(points: list[tuple[int, float]], zero: str) -> None:
    fit = fit_line(points)
    assert fit is not None
    assert getattr(fit, zero) == 0.0 and fit.alpha_s >= 0 and fit.beta_s_per_byte >= 0
    assert fit.max_relative_error > 0.1


@given(points)
def test_whatever_was_measured_gives_positive_times(points: list[tuple[int, float]]) -> None:
    curve = Curve(points)
    times = dict(points)
    for size in times:
        assert curve.covers(size) and curve.time_s(size) == times[size]
    for other in (1.0, 1000.5, 2.0**20, 2.0**60):
        if curve.covers(other):
            low, high = min(times.values()), max(times.values())
            assert low * (1 - 1e-9) <= curve.time_s(other) <= high * (1 + 1e-9)
        elif curve.fit is None:
            with pytest.raises(UserError, match="only"):
                curve.time_s(other)
        else:
            assert math.isfinite(curve.time_s(other)) and curve.time_s(other) >= 0
            assert math.isfinite(curve.fit.max_relative_error)


def test_between_sizes_it_is_straight_in_logarithms() -> None:
    curve = Curve([(1024, 1e-3), (4096, 4e-3), (16384, 4e-3)])
    assert curve.time_s(2048) == pytest.approx(2e-3)
    assert curve.time_s(8192) == pytest.approx(4e-3)
    between = [curve.time_s(size) for size in range(1024, 16385, 64)]
    assert between == sorted(between)


def test_outside_it_is_the_line() -> None:
    curve = Curve([(1024, 1e-3), (4096, 2e-3)])
    assert curve.fit is not None
    assert not curve.covers(1023) and not curve.covers(4097)
    assert curve.time_s(1 << 20) == curve.fit.time_s(1 << 20)


@pytest.mark.parametrize("size", [0, -1, math.nan, math.inf])
def test_a_message_has_bytes(size: float) -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        Curve([(1024, 1e-3)]).time_s(size)
