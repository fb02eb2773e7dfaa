"""The record of a run as arrays, from which the page's pictures are aggregated."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bireme.ledger import PHASES, STATES, own_states
from bireme.report.sums import present_ranks
from bireme.run_reader import Run

Floats = NDArray[np.floating]
N_CELLS = len(PHASES) * len(STATES)


@dataclass(frozen=True, slots=True)
class StepArrays:
    """Every recorded step that some rank made. T steps, R ranks; milliseconds, NaN where a rank did not record it."""

    steps: NDArray[np.int64]  # (T,) their numbers
    measured: NDArray[np.bool_]  # (T,) not skipped
    wall_ms: NDArray[np.float64]  # (T, R)
    cells_ms: NDArray[np.float32]  # (T, R, phases x states)
    tokens: NDArray[np.float64]  # (T,) distinct ones; NaN where not counted

    @property
    def step_ms(self) -> NDArray[np.float64]:
        """(T,) a step's time, as in the report: the mean over the ranks that recorded it."""
        return np.asarray(np.nanmean(self.wall_ms, axis=1))

    @property
    def slowest_ms(self) -> NDArray[np.float64]:
        """(T,) a step's time on its slowest rank."""
        return np.asarray(np.nanmax(self.wall_ms, axis=1))

    @property
    def present(self) -> NDArray[np.bool_]:
        """(T, R)"""
        return ~np.isnan(self.wall_ms)

    def state_ms(self, state: int) -> NDArray[np.float32]:
        """(T, R) all phases of a state."""
        return np.asarray(self.cells_ms[:, :, state :: len(STATES)].sum(axis=2))

    def own_ms(self, collectives_known: bool) -> NDArray[np.float32]:
        """(T, R) self time."""
        return np.asarray(sum(self.state_ms(state) for state in own_states(collectives_known)))


def step_arrays(run: Run) -> StepArrays:
    """Of the run's last attempt. Lines that no rank took part in are left out."""
    lines = [line for line in run.steps if present_ranks(line)]
    shape = (len(lines), run.world_size)
    wall_ms = np.full(shape, np.nan)
    cells_ms = np.full((*shape, N_CELLS), np.nan, dtype=np.float32)
    for row, line in enumerate(lines):
        here = present_ranks(line)
        # Whole nanoseconds of a clock that may have run for months do not fit a float: subtracted before.
        wall_ms[row, here] = [(line["end_ns"][rank] - line["start_ns"][rank]) / 1e6 for rank in here]
        cells = line["cells_ns"] if len(here) == run.world_size else [line["cells_ns"][rank] for rank in here]
        cells_ms[row, here] = np.array(cells, dtype=np.int64) / 1e6
    return StepArrays(
        steps=np.array([line["step"] for line in lines], dtype=np.int64),
        measured=np.array([line["skipped"] is None for line in lines], dtype=bool),
        wall_ms=wall_ms,
        cells_ms=cells_ms,
        tokens=np.array([np.nan if line["tokens"] is None else line["tokens"] for line in lines], dtype=np.float64),
    )


def bucket_edges(count: int, most: int) -> tuple[list[tuple[int, int]], int]:
    """`count` places in a row as at most `most` stretches [first, end) of equal length (the last may be shorter), and
    that length."""
    size = max(1, -(-count // most))
    return [(first, min(count, first + size)) for first in range(0, count, size)], size


def rounded(values: Sequence[float] | Floats, digits: int = 3) -> list[float | None]:
    """For JSON: None where a value is not a number."""
    return [round(value, digits) if np.isfinite(value) else None for value in map(float, values)]


def significant(values: Floats, digits: int = 4) -> NDArray[np.float64]:
    """Rounded to so many digits that count."""
    values = np.asarray(values, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        exponent = np.floor(np.log10(np.abs(values)))
    # Powers of ten that are whole are exact: 0.1 is none, and dividing by 10 gives the shortest text.
    power = np.where(np.isfinite(exponent), digits - 1 - exponent, 0).clip(-15, 15)
    up, down = 10.0 ** np.maximum(power, 0), 10.0 ** np.maximum(-power, 0)
    return np.asarray(np.round(values * up / down) / up * down)
