"""The time that one operation takes, by size: between measured sizes, and with a stated error outside of them.

Between measured sizes a time is interpolated, straight in the logarithms of size and time. Outside of them an
alpha-beta line (time = alpha + beta x bytes) extrapolates, and says how well it fits what was measured. Pure.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bireme.errors import UserError


@dataclass(frozen=True, slots=True)
class Fit:
    """time = alpha_s + beta_s_per_byte x bytes, and how far that is from what was measured (1 is 100 %)."""

    alpha_s: float
    beta_s_per_byte: float
    max_relative_error: float
    median_relative_error: float

    def time_s(self, bytes: float) -> float:
        return self.alpha_s + self.beta_s_per_byte * bytes


def fit_line(points: Sequence[tuple[int, float]]) -> Fit | None:
    """The line through (bytes, seconds) with the least squared *relative* error; neither term is below zero.

    None for less than two sizes: one point is no line. (Absolute errors would fit the largest message only.)
    """
    if len(points) < 2:
        return None
    # The unknowns of (alpha + beta x) / t = 1, with x in units of the largest size so that nothing under- or overflows.
    unit = float(max(size for size, _ in points))
    ones = [1 / time for _, time in points]
    sizes = [size / unit / time for size, time in points]
    aa, ab, bb = (math.fsum(map(math.prod, zip(u, v, strict=True))) for u, v in _pairs_of(ones, sizes))
    a, b = math.fsum(ones), math.fsum(sizes)
    determinant = aa * bb - ab * ab
    alpha = (a * bb - b * ab) / determinant if determinant > 0 else -1.0
    beta = (b * aa - a * ab) / determinant if determinant > 0 else -1.0
    if alpha < 0:
        alpha, beta = 0.0, b / bb
    elif beta < 0:
        alpha, beta = a / aa, 0.0
    errors = [abs((alpha + beta * size / unit) / time - 1) for size, time in points]
    return Fit(alpha, beta / unit, max(errors), median(errors))


def _pairs_of(u: list[float], v: list[float]) -> tuple[tuple[list[float], list[float]], ...]:
    return (u, u), (u, v), (v, v)


class Curve:
    """The time of one operation on one group, by size."""

    def __init__(self, points: Sequence[tuple[int, float]]):
        """`points`: (bytes, seconds), at least one, all positive, no size twice."""
        self.points = sorted(points)
        self.fit = fit_line(self.points)
        self._sizes = [size for size, _ in self.points]

    def covers(self, bytes: float) -> bool:
        """Whether the size is between measured ones: interpolated, not extrapolated."""
        return self._sizes[0] <= bytes <= self._sizes[-1]

    def time_s(self, bytes: float) -> float:
        if not (bytes > 0 and math.isfinite(bytes)):
            raise ValueError(f"a message has at least one byte, not {bytes}")
        if not self.covers(bytes):
            if self.fit is None:
                size = self._sizes[0]
                raise UserError(f"only {size} bytes were measured, which says nothing of {bytes:g}: measure more sizes")
            return self.fit.time_s(bytes)
        above = bisect.bisect_left(self._sizes, bytes)
        size, time = self.points[above]
        if size == bytes:
            return time
        size_below, time_below = self.points[above - 1]
        share = math.log(bytes / size_below) / math.log(size / size_below)
        return float(time_below * (time / time_below) ** share)
