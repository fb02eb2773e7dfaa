"""Which cell of the ledger an excess is in, what that means, and what to do about it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bireme.ledger import PHASES, STATES
from bireme.text import short
from bireme.verdict.evidence import Evidence

GARBAGE = "garbage collection"
GARBAGE_ADVICE = "collect on all ranks at the same step: --gc-every N (it freezes the long-lived objects first)"
_EXPLAINS = 0.5  # of the excess


@dataclass(frozen=True, slots=True)
class Cause:
    """The cell with the largest excess over the peers, and the words for it."""

    phase: str
    state: str
    excess_ms: float  # in that cell
    name: str
    advice: str

    def where(self, excess_ms: float) -> str:
        """``most of it in backward/blocked``, of an excess of so much."""
        part = "most of it" if self.excess_ms >= excess_ms / 2 else f"the largest part ({short(self.excess_ms)} ms)"
        return f"{part} in {self.phase}/{self.state}"


@dataclass(frozen=True, slots=True)
class Taken:
    """What took more time from a rank than from its peers, in milliseconds a step, in whatever cells it is."""

    garbage_ms: float = 0.0
    throttled_ms: float = 0.0
    steal_ms: float = 0.0


def cause_of(evidence: Evidence, columns: Sequence[int], steps: NDArray[np.int64] | slice, excess_ms: float) -> Cause:
    """Of the excess of these ranks in these steps, over the median of their peers there."""
    cells = evidence.cells_ms[steps].mean(axis=0, dtype=np.float64)  # (R, cells)
    taken = np.stack([each[steps].mean(axis=0) for each in (evidence.gc_ms, evidence.throttled_ms, evidence.steal_ms)])
    over, taken_over = np.zeros(cells.shape[1]), np.zeros(len(taken))
    for column in columns:
        peers = _peers(evidence, column, columns)
        over += (cells[column] - np.median(cells[peers], axis=0)) / len(columns)
        taken_over += (taken[:, column] - np.median(taken[:, peers], axis=1)) / len(columns)
    return name_cell(evidence, over, excess_ms, Taken(*taken_over.tolist()))


def name_cell(evidence: Evidence, over_ms: NDArray[np.float64], excess_ms: float, taken: Taken | None = None) -> Cause:
    """The cause from the excess in every cell (cells,), and what is known to have taken part of it."""
    own = evidence.own_cells
    cell = own[int(np.argmax(over_ms[own]))]
    phase, state = PHASES[cell // len(STATES)], STATES[cell % len(STATES)]
    taken = taken or Taken()
    for took_ms, name, advice in (
        (taken.garbage_ms, GARBAGE, GARBAGE_ADVICE),
        (taken.throttled_ms, "held back by a CPU quota", "raise the CPU limit of this rank's container or cgroup"),
        (
            taken.steal_ms,
            "cores taken by the hypervisor",
            "the virtual machine shares its cores with others: take dedicated cores, or another machine",
        ),
    ):
        if excess_ms > 0 and took_ms >= _EXPLAINS * excess_ms:
            return Cause(phase, state, float(over_ms[cell]), name, advice)
    name, advice = _WORDS.get((phase, state)) or _WORDS.get((phase, None)) or _OF_STATE[state]
    return Cause(phase, state, float(over_ms[cell]), name, advice)


def _peers(evidence: Evidence, column: int, culprits: Sequence[int]) -> list[int]:
    """The ranks of the same role that are not accused; all others where there is none."""
    same = evidence.role_of == evidence.role_of[column]
    accused = np.zeros(len(same), dtype=bool)
    accused[list(culprits)] = True
    for candidates in (same & ~accused, ~accused, ~(np.arange(len(same)) == column)):
        if candidates.any():
            return [int(each) for each in np.flatnonzero(candidates)]
    return [column]


# (phase, state) -> what it usually is, and what to do; (phase, None): any other state of the phase.
_WORDS: dict[tuple[str, str | None], tuple[str, str]] = {
    ("input", None): (
        "slow loader",
        "look at this rank's storage and at what is done to each sample; read ahead with more --workers",
    ),
    ("checkpoint", None): (
        "slow storage",
        "look at the disk that checkpoints go to; save less often, or to a faster one",
    ),
    ("other", "blocked"): (
        "the loop waits outside of training",
        "look at logging, evaluation and other code between the phases of this rank: it waits there for something",
    ),
    ("other", "running"): (
        "work outside of training",
        "look at logging, evaluation and other code between the phases of this rank",
    ),
    ("optimizer", "blocked"): (
        "waits in the optimizer",
        "look for disk, locks or sleeps in this rank's optimizer step",
    ),
}
_OF_STATE: dict[str, tuple[str, str]] = {
    "running": (
        "slow core or more work",
        "compare this machine's clock, temperature and power limit with its peers', and the work that the rank is "
        "given",
    ),
    "runnable": (
        "contention for cores",
        "another process uses this rank's cores, or a CPU quota holds it back: look at the machine with top, pin "
        "ranks to cores, or start fewer threads",
    ),
    "blocked": (
        "stands still",
        "the process sleeps, waits for disk or a lock, or is stopped from outside: look at it with py-spy or strace",
    ),
}
