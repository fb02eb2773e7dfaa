"""By how much each rank exceeds its peers, how noisy that is, and the stretches of steps in which it persists."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from bireme.verdict.evidence import Array
from bireme.verdict.kinds import EFFECT, NOISES

_MEDIAN_ERROR = 1.2533  # standard error of a median / that of a mean, for normal noise
MAD = 1.4826  # median absolute deviation to standard deviation
_ALARMS = 1e-4  # false alarms of a healthy run, by the noise alone
_LEAST_WINDOW = 5
_CLEARLY = 6.0  # times the remaining variance, by which a ramp must explain more than a step
_MOST_POINTS = 200  # of a series in which a ramp is looked for: the time it takes grows with their square
FEW_RANKS = 3  # of which one that takes turns with the others is slow in many steps
_LEAST_STEPS = 10  # that an excess has to persist
_LARGE = 0.25  # of the step: what is smaller has to persist twice as long, since cores get slower for a second or two
_HITS = 0.55  # of the steps of a stretch must show the excess


def noise_ms(series_ms: Array, own_ms: Array | None = None) -> float:
    """The robust standard deviation of (T, n) series from step to step, of a typical column.

    From differences of neighbours, so that a rank that is slow for half of the run is no noise. Between two ranks that
    take turns at being slow every difference is large: then the lower half of their own times tells the noise.
    """
    if len(series_ms) < 2:
        return 0.0
    differences = np.diff(series_ms, axis=0)
    noise = float(np.median(MAD * np.median(np.abs(differences), axis=0) / math.sqrt(2)))
    if own_ms is not None:
        # Between the 10th and the 25th percentile of a normal distribution lie 0.607 standard deviations.
        low, quarter = np.quantile(own_ms, (0.1, 0.25), axis=0)
        # An excess varies as the rank does, and as the median of the others.
        others = own_ms.shape[1] - 1
        of_excess = math.sqrt(1 + (math.pi / 2 / others if others > 1 else 1.0))
        noise = min(noise, of_excess * float(np.median((quarter - low) / 0.607)))
    return noise


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps [start, end) in which one column's excess persists."""

    column: int
    start: int
    end: int
    excess_ms: float  # median
    hits: float  # fraction of its steps that show it
    sigmas: float  # how far above the noise


def window_length(steps: int, noise: float, step_ms: float) -> int:
    """Steps per window: so many that its median tells a quarter of a notable effect from the noise, and at least eight
    windows."""
    if step_ms <= 0:
        return _LEAST_WINDOW
    needed = math.ceil((2 * _MEDIAN_ERROR * noise / (EFFECT / 2 * step_ms)) ** 2)
    least = _LEAST_WINDOW if steps >= 8 * _LEAST_WINDOW else 3
    return max(least, min(needed, steps // 8))


def windows(series: Array, length: int) -> Array:
    """(T, n) -> (W, n): medians of whole windows; what is left at the end belongs to the last."""
    count = max(1, len(series) // length)
    if count == 1:
        return np.asarray(np.median(series, axis=0)[None])
    whole = np.median(series[: (count - 1) * length].reshape(count - 1, length, -1), axis=1)
    return np.concatenate([whole, np.median(series[(count - 1) * length :], axis=0)[None]])


def stretches(excess_ms: Array, step_ms: Array, noise: float, hits: float = _HITS) -> list[Stretch]:
    """The stretches in which a column of (T, n) exceeds by more than its share of noise, at most one a column and
    start: found by the largest sum of what windows exceed half of a notable effect by, then tested as a whole."""
    steps, columns = excess_ms.shape
    typical_ms = float(np.median(step_ms))
    length = window_length(steps, noise, typical_ms)
    medians = windows(excess_ms, length)
    half = EFFECT / 2 * typical_ms
    score = np.clip(medians, -math.inf, 2 * half) - half
    trials = columns * len(medians) ** 2 / 2
    found = []
    for column in np.flatnonzero((score > 0).any(axis=0)):
        for first, last in _runs(score[:, column], 0, len(score)):
            start, end = first * length, steps if last == len(score) else last * length
            stretch = _tested(excess_ms, step_ms, noise, int(column), start, end, trials, hits)
            if stretch is not None:
                found.append(stretch)
    return found


def _tested(
    excess_ms: Array, step_ms: Array, noise: float, column: int, start: int, end: int, trials: float, hits: float
) -> Stretch | None:
    series, steps = excess_ms[start:end, column], end - start
    median_ms, local_ms = float(np.median(series)), float(np.median(step_ms[start:end]))
    least = _LEAST_STEPS if median_ms >= _LARGE * local_ms else 2 * _LEAST_STEPS
    if steps < min(least, max(4, len(excess_ms) // 2)):
        return None
    error_ms = _MEDIAN_ERROR * noise / math.sqrt(steps)
    # Many ranks times many stretches are looked at: one of them is far out by chance.
    sigmas = max(NOISES, -NormalDist().inv_cdf(min(0.5, _ALARMS / max(1.0, trials))))
    # Half of what it is in the middle: a rank that is slow every other step is no rank that is half as slow in all.
    share = float((series >= max(EFFECT / 2 * local_ms, median_ms / 2)).mean())
    if median_ms < max(EFFECT * local_ms, sigmas * error_ms) or share < hits:
        return None
    return Stretch(column, start, end, median_ms, share, median_ms / error_ms if error_ms > 0 else math.inf)


def _runs(score: NDArray[np.float64], first: int, end: int, depth: int = 0) -> list[tuple[int, int]]:
    """The runs of windows [a, b) of the largest sum, and then those left and right of it."""
    if first >= end or depth > 4:
        return []
    total = np.concatenate([[0.0], np.cumsum(score[first:end])])
    lowest = np.minimum.accumulate(total)
    b = int(np.argmax(total - lowest))
    if total[b] - lowest[b] <= 0:
        return []
    a = int(np.argmin(total[: b + 1]))
    left, right = (first, first + a), (first + b, end)
    return [*_runs(score, *left, depth + 1), (first + a, first + b), *_runs(score, *right, depth + 1)]


def is_ramp(excess_ms: Sequence[float] | Array) -> tuple[int, float] | None:
    """Whether a series (T,) rises bit by bit and not at once: (step at which it begins, rise); None where it does not.

    The windows' medians are fitted by a ramp between two levels (flat, straight, flat) and by a step; the ramp must be
    a quarter of the run long and explain clearly more.
    """
    length = max(_LEAST_WINDOW, len(excess_ms) // _MOST_POINTS)
    points = windows(np.asarray(excess_ms, dtype=np.float64)[:, None], length)[:, 0]
    if len(points) < 8:
        return None
    at_once, ramps, begins = _shapes(len(points))
    points = points - points.mean()
    total = float(points @ points)
    rest_at_once = total - float(((at_once @ points) ** 2).max())
    along = ramps @ points
    best = int(np.argmax(along**2))
    rest, begin, end = total - float(along[best] ** 2), *begins[best]
    rise = float(along[best]) / math.sqrt(float((_ramp(len(points), begin, end) ** 2).sum()))
    if rise > 0 and rest_at_once - rest > _CLEARLY * rest / max(1, len(points) - 4):
        return begin * length, rise
    return None


def _ramp(count: int, begin: int, end: int) -> Array:
    """From 0 to 1 between two of so many points, less its mean."""
    shape = np.clip((np.arange(count) - begin) / (end - begin), 0.0, 1.0)
    return np.asarray(shape - shape.mean())


@lru_cache(maxsize=8)
def _shapes(count: int) -> tuple[Array, Array, list[tuple[int, int]]]:
    """All steps, and all ramps that are long enough, over so many points: (shapes, points), of mean 0 and length 1."""
    shortest, stride = max(4, count // 4), max(1, count // 24)
    begins = [
        (begin, end)
        for begin in range(0, count - shortest + 1, stride)
        for end in range(begin + shortest, count + 1, stride)
    ]
    at_once = np.stack([(np.arange(count) >= change) - (count - change) / count for change in range(1, count)])
    ramps = np.stack([_ramp(count, begin, end) for begin, end in begins])
    return (*(each / np.linalg.norm(each, axis=1, keepdims=True) for each in (at_once, ramps)), begins)
