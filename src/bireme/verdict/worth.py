"""What it would be worth to make a culprit average."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bireme.verdict.evidence import Array, Evidence
from bireme.verdict.kinds import WhatIf


def saved_ms(evidence: Evidence, columns: Sequence[int], average_ms: Array, steps: slice) -> Array:
    """(T,) by how much every step would be shorter if these ranks took `average_ms` (T, len(columns)) of their own, and
    only in `steps`: all ranks wait for the slowest, so the next slowest limits it."""
    saved = np.zeros(len(evidence.steps))
    own = evidence.own_ms[steps]
    cured = own.copy()
    cured[:, list(columns)] = np.minimum(own[:, list(columns)], average_ms[steps])
    saved[steps] = own.max(axis=1) - cured.max(axis=1)
    return saved


def what_if(evidence: Evidence, saved: Array) -> WhatIf:
    """The median step, and the rate, without `saved` (T,)."""
    step_ms = np.maximum(evidence.step_ms - saved, 0.0)
    rate = None
    total_s = float(step_ms.sum()) / 1e3
    if evidence.tokens is not None and total_s > 0:
        rate = float(evidence.tokens.sum()) / total_s
    return WhatIf(float(np.median(step_ms)), rate)


def share(evidence: Evidence, saved: Array) -> float:
    """Of the run's time."""
    total = float(evidence.step_ms.sum())
    return float(saved.sum()) / total if total > 0 else 0.0


def caused_ms(evidence: Evidence, columns: Sequence[int], excess_ms: Array, steps: slice | NDArray[np.int64]) -> float:
    """What the others wait for these ranks, per step: never more than the excess. Unknown waits count as the excess."""
    others = np.ones(len(evidence.ranks), dtype=bool)
    others[list(columns)] = False
    excess = np.maximum(excess_ms[steps], 0.0)
    if not evidence.collectives_known or not others.any():
        return float(excess.mean())
    waits = np.median(evidence.wait_ms[:, others], axis=1)
    # What happens at the end of a step, such as a checkpoint, the others wait for in the next one.
    waits = np.maximum(waits, np.append(waits[1:], 0.0))
    return float(np.minimum(excess, waits[steps]).mean())
