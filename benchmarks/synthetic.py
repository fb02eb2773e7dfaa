"""Made-up ledgers with a known culprit: seeded, of 8 to 1024 ranks, as evidence for the verdicts to be scored on.

A step is simulated: every rank takes its own time (base x noise, plus what is planted), then all wait for the slowest
and transfer. Nothing here knows how verdicts are reached.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bireme.ledger import PHASES, STATES
from bireme.verdict.evidence import Evidence, Use

Array = NDArray[np.float64]
N_CELLS = len(PHASES) * len(STATES)
LIMITS = (8, 1024)


def cell(phase: str, state: str) -> int:
    return PHASES.index(phase) * len(STATES) + STATES.index(state)


# Of a step's own time without anything planted.
BASE = {
    cell("input", "running"): 0.005,
    cell("forward", "running"): 0.28,
    cell("backward", "running"): 0.53,
    cell("backward", "runnable"): 0.005,
    cell("optimizer", "running"): 0.06,
    cell("other", "running"): 0.02,
}
RANK_CELLS = (
    ("input", "blocked"),
    ("forward", "running"),
    ("forward", "blocked"),
    ("forward", "runnable"),
    ("backward", "running"),
    ("backward", "blocked"),
    ("backward", "runnable"),
    ("optimizer", "running"),
    ("optimizer", "blocked"),
    ("checkpoint", "blocked"),
    ("other", "running"),
)


@dataclass(frozen=True, slots=True)
class Truth:
    """What was planted. `kinds`: verdicts that say so; `cells`: where its excess is (none: not asked)."""

    name: str
    kinds: tuple[str, ...]
    ranks: tuple[int, ...] = ()
    cells: tuple[tuple[str, str], ...] = ()
    effect: float = 0.0
    noise: float = 0.0
    first_step: int = 1
    size: int = 0
    garbage: bool = False
    clean_ms: float = 0.0  # the mean step without it

    @property
    def alarm(self) -> bool:
        """Whether somebody is to be blamed."""
        return not {"healthy", "one_off"} & set(self.kinds)


@dataclass
class Made:
    """A step's ledgers before they are made evidence."""

    steps: int
    size: int
    rng: np.random.Generator
    noise: float
    step_ms: float = 200.0
    skewed: bool = False
    nodes: int = 1
    stages: int = 1
    cells: Array = field(init=False)
    gc_ms: Array = field(init=False)
    transfer_ms: Array = field(init=False)  # (T,)

    def __post_init__(self) -> None:
        shape = (self.steps, self.size)
        self.cells = np.zeros((*shape, N_CELLS))
        self.gc_ms = np.zeros(shape)
        self.transfer_ms = np.full(self.steps, 0.1 * self.step_ms) * (1 + 0.02 * self.rng.standard_normal(self.steps))
        # Noise of each part so that the sum over the parts has the wanted standard deviation.
        weights = np.array(list(BASE.values()))
        for (place, part), weight in zip(BASE.items(), weights / np.sqrt((weights**2).sum()), strict=True):
            if self.skewed:  # sometimes much slower, never much faster
                values = (self.rng.gamma(4.0, 0.5, shape) - 2.0) / 1.0
            else:
                values = self.rng.standard_normal(shape)
            self.cells[:, :, place] = np.maximum(self.step_ms * (part + self.noise * weight * values), 0.0)

    def plant(self, rows: Any, ranks: Any, where: tuple[str, str], ms: Any) -> None:
        self.cells[rows, ranks, cell(*where)] += ms

    def evidence(self, with_uses: bool = False) -> Evidence:
        """Everybody waits for the slowest, of whatever stage, and transfers."""
        own = self.cells.sum(axis=2)
        wait = own.max(axis=1)[:, None] - own
        cells = self.cells.copy()
        # Waiting is seen at the end of backward, part of it in forward where layouts gather there.
        cells[:, :, cell("backward", "wait")] += 0.8 * wait
        cells[:, :, cell("forward", "wait")] += 0.2 * wait
        cells[:, :, cell("backward", "transfer")] += self.transfer_ms[:, None]
        per_node = -(-self.size // self.nodes)
        per_stage = -(-self.size // self.stages)
        stage_of = np.arange(self.size) // per_stage
        size_bytes = np.full(self.steps, 44e6)
        use = Use(0, "all_reduce", np.full(self.steps, 8.0), size_bytes, self.transfer_ms * 1.5)
        return Evidence(
            steps=np.arange(1, self.steps + 1),
            ranks=np.arange(self.size),
            wall_ms=cells.sum(axis=2),
            cells_ms=cells.astype(np.float32),
            gc_ms=self.gc_ms,
            throttled_ms=np.zeros_like(self.gc_ms),
            steal_ms=np.zeros_like(self.gc_ms),
            tokens=np.full(self.steps, 4096.0 * self.size),
            node_of=np.arange(self.size) // per_node,
            node_names=tuple(f"node{index}" for index in range(-(-self.size // per_node))),
            stage_of=stage_of,
            role_of=stage_of.copy(),
            collectives_known=True,
            uses=(use,) if with_uses else (),
            groups=(("world", tuple(range(self.size))),),
        )

    @property
    def healthy_ms(self) -> float:
        """The mean step, as long as nothing is planted."""
        return float((self.cells.sum(axis=2).max(axis=1) + self.transfer_ms).mean())


def make(kind: str, seed: int, effect: float | None = None, noise: float | None = None) -> tuple[Evidence, Truth]:
    """One case: its size, the effect (10 to 50 % of the step), the noise (1 to 10 %) and the place come from `seed`."""
    rng = np.random.default_rng([seed, sum(kind.encode())])
    size = int(rng.choice([8, 8, 16, 16, 32, 64, 128, 256, 1024], p=[0.2, 0.1, 0.2, 0.1, 0.15, 0.1, 0.08, 0.05, 0.02]))
    steps = int(rng.integers(60, 301))
    noise = float(rng.uniform(0.01, 0.10)) if noise is None else noise
    effect = float(rng.uniform(0.10, 0.50)) if effect is None else effect
    nodes = int(rng.choice([1, 2, 4])) if kind != "node" else int(rng.choice([2, 4, 8]))
    stages = int(rng.choice([2, 4])) if kind == "stage" or (kind == "rank" and rng.random() < 0.25) else 1
    made = Made(steps, size, rng, noise, skewed=bool(rng.random() < 0.4), nodes=nodes, stages=stages)
    clean_ms = made.healthy_ms
    truth = Truth(kind, (kind,), effect=effect, noise=noise, size=size, clean_ms=clean_ms)
    return _KINDS[kind](made, rng, effect * clean_ms, truth)


def _spread(rng: np.random.Generator, ms: float, shape: Any, noise: float) -> Array:
    """What is planted varies as much as everything else."""
    return np.asarray(np.maximum(ms * (1 + noise * rng.standard_normal(shape)), 0.0))


def _healthy(made: Made, rng: np.random.Generator, ms: float, truth: Truth) -> tuple[Evidence, Truth]:
    return made.evidence(True), replace(truth, kinds=("healthy", "one_off"), effect=0.0)


def _tiny(made: Made, rng: np.random.Generator, ms: float, truth: Truth) -> tuple[Evidence, Truth]:
    """One rank takes twice as long in a phase that takes 1 ms."""
    made.plant(slice(None), int(rng.integers(made.size)), ("input", "running"), 0.005 * made.step_ms)
    return made.evidence(True), replace(truth, kinds=("healthy", "one_off"), effect=0.0)


def _rank(made: Made, rng: np.random.Generator, ms: float, truth: Truth) -> tuple[Evidence, Truth]:
    rank, where = int(rng.integers(made.size)), RANK_CELLS[rng.integers(len(RANK_CELLS))]
    first = 0 if rng.random() < 0.5 else int(rng.integers(0, made.steps // 2))
    rows = np.arange(first, made.steps)
    made.plant(rows, rank, where, _spread(rng, ms, len(rows), truth.noise))
    return made.evidence(True), replace(truth, kinds=("rank",), ranks=(rank,), cells=(where,), first_step=first + 1)


def _every(made: Made, rng: np.random.Generator, ms: float, truth: Truth) -> tuple[Evidence, Truth]:
    """One rank, every k-th step; as much in the mean."""
    rank, where, k = int(rng.integers(made.size)), RANK_CELLS[rng.integers(len(RANK_CELLS))], int(rng.integers(2, 9))
    rows = np.arange(int(rng.integers(k)), made.steps, k)
    made.plant(rows, rank, where, _spread(rng, k * ms, len(rows), truth.noise))
    return made.evidence(True), replace(truth, kinds=("rank",), ranks=(rank,), cells=(where,))


def _garbage(made: Made, rng: np.random.Generator, ms: float, truth: Truth) -> tuple[Evidence, Truth]:
    """Garbage collection on one rank, every k-th step."""
    rank, k = int(rng.integers(made.size)), int(rng.integers(3, 12))
    rows = np.arange(int(rng.integers(k)), made.steps, k)
    where = ("other", "running") if rng.random() < 0.5 else ("forward", "running")
    pause = _spread(rng, k * ms, len(rows), truth.noise)
    made.plant(rows, rank, where, pause)
    made.gc_ms[rows, rank] += pause
    return made.evidence(True), replace(truth, kinds=("rank",), ranks=(rank,), cells=(where,), garbage=True)


def _node(made: Made, rng: np.random.Generator, ms: float, truth: Truth) -> tuple[Evidence, Truth]:
    per_node = -(-made.size // made.nodes)
    number = int(rng.integers(-(-made.size // per_node)))
    ranks = np.arange(number * per_node, min(made.size, (number + 1) * per_node))
    where = RANK_CELLS[rng.integers(len(RANK_CELLS))]
    made.plant(slice(None), ranks, where, _spread(rng, ms, (made.steps, len(ranks)), truth.noise))
    kinds = ("node",) if len(ranks) > 1 else ("rank", "node")
    return made.evidence(True), replace(truth, kinds=kinds, ranks=tuple(int(rank) for rank in ranks), cells=(where,))


def _stage(made: Made, rng: np.random.Generator, ms: float, truth: Truth) -> tuple[Evidence, Truth]:
    per_stage = -(-made.size // made.stages)
    number = int(rng.integers(made.stages))
    ranks = np.arange(number * per_stage, min(made.size, (number + 1) * per_stage))
    for where, part in ((("forward", "running"), 0.35), (("backward", "running"), 0.65)):
        made.plant(slice(None), ranks, where, _spread(rng, part * ms, (made.steps, len(ranks)), truth.noise))
    cells = (("backward", "running"),)
    return made.evidence(), replace(
        truth, kinds=("stage_imbalance",), ranks=tuple(int(rank) for rank in ranks), cells=cells
    )


def _imbalance(made: Made, rng: np.random.Generator, ms: float, truth: Truth) -> tuple[Evidence, Truth]:
    """Another rank each step, in a random order, every rank as often."""
    effect = max(truth.effect, 0.3)
    ms = effect * truth.clean_ms
    order = np.concatenate([rng.permutation(made.size) for _ in range(made.steps // made.size + 1)])[: made.steps]
    made.plant(np.arange(made.steps), order, ("forward", "running"), _spread(rng, ms, made.steps, truth.noise))
    return made.evidence(True), replace(
        truth, kinds=("data_imbalance",), cells=(("forward", "running"),), effect=effect
    )


def _drift(made: Made, rng: np.random.Generator, ms: float, truth: Truth) -> tuple[Evidence, Truth]:
    """Slower bit by bit, from some step on, up to the effect (twice the effect of others: the mean is half)."""
    rank, first = int(rng.integers(made.size)), int(rng.integers(0, made.steps // 3))
    rows = np.arange(first, made.steps)
    ramp = 2 * ms * np.linspace(0, 1, len(rows))
    where = ("backward", "running")
    made.plant(rows, rank, where, np.maximum(ramp * (1 + truth.noise * rng.standard_normal(len(rows))), 0.0))
    return made.evidence(True), replace(truth, kinds=("drift",), ranks=(rank,), cells=(where,), first_step=first + 1)


def _spike(made: Made, rng: np.random.Generator, ms: float, truth: Truth) -> tuple[Evidence, Truth]:
    """Once, for ten steps' time."""
    rank, row = int(rng.integers(made.size)), int(rng.integers(made.steps))
    where = RANK_CELLS[rng.integers(len(RANK_CELLS))]
    made.plant(row, rank, where, 10 * truth.clean_ms)
    return made.evidence(True), replace(
        truth, kinds=("one_off",), ranks=(rank,), cells=(where,), first_step=row + 1, effect=10.0
    )


def _link(made: Made, rng: np.random.Generator, ms: float, truth: Truth) -> tuple[Evidence, Truth]:
    """Transfer takes longer from some step on, for everybody."""
    first = int(rng.integers(made.steps // 4, made.steps // 2))
    made.transfer_ms[first:] += ms
    return made.evidence(True), replace(
        truth, kinds=("link",), ranks=tuple(range(made.size)), first_step=first + 1, cells=(("backward", "transfer"),)
    )


def _input(made: Made, rng: np.random.Generator, ms: float, truth: Truth) -> tuple[Evidence, Truth]:
    """Every rank waits for its loader every k-th step."""
    k = int(rng.integers(2, 9))
    rows = np.arange(int(rng.integers(k)), made.steps, k)
    pause = _spread(rng, k * ms, (len(rows), made.size), truth.noise / 2)
    made.cells[rows, :, cell("input", "blocked")] += pause
    return made.evidence(True), replace(
        truth, kinds=("rank",), ranks=tuple(range(made.size)), cells=(("input", "blocked"),)
    )


_KINDS = {
    "healthy": _healthy,
    "tiny": _tiny,
    "rank": _rank,
    "every": _every,
    "gc": _garbage,
    "node": _node,
    "stage": _stage,
    "imbalance": _imbalance,
    "drift": _drift,
    "spike": _spike,
    "link": _link,
    "input": _input,
}
KINDS = tuple(_KINDS)
