"""What the benchmarks share: starting the ranks, choosing a batch, comparing paired blocks, keeping results."""

import argparse
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import bireme
from bireme.config import TrainConfig
from bireme.cores import usable_cores
from bireme.observe.monitor import Monitor
from bireme.record import utc_now, write_json_atomic
from bireme.trainer import Trainer
from bireme.world import World, join

RANKS = 2
STEP_MS = 200.0
RESULTS = Path(__file__).resolve().parent.parent / "runs" / "benchmarks"
_SCRATCH = "BIREME_BENCHMARK_SCRATCH"


# --- ranks -------------------------------------------------------------------------------------------------------


def main(description: str, pairs: int, quick_pairs: int, measure: Callable[[World, int, Path], int]) -> int:
    """The command of a benchmark, in the parent and in each rank: the exit code.

    `measure(world, pairs, scratch)` runs on every rank and returns its exit code.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--pairs", type=int, default=pairs, help=f"pairs of blocks to compare (default {pairs})")
    parser.add_argument("--quick", action="store_true", help=f"{quick_pairs} pairs: to see it work, not to judge by")
    options = parser.parse_args()
    if options.pairs < 2:
        parser.error("--pairs: a spread needs 2 or more")
    if _SCRATCH not in os.environ:
        return _start_ranks()
    torch.set_num_threads(1)
    cores = usable_cores()
    if len(cores) >= RANKS and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"])]})
    world = join()
    try:
        return measure(world, quick_pairs if options.quick else options.pairs, Path(os.environ[_SCRATCH]))
    finally:
        world.leave()


def _start_ranks() -> int:
    """Starts this same command once a rank, as torchrun would; returns the worst exit code."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {name: value for name, value in os.environ.items() if not name.startswith("STRAGGLER_")}
    settings |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    settings |= {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    with tempfile.TemporaryDirectory(prefix="bireme-benchmark-") as scratch:
        ranks = [
            subprocess.Popen(
                [sys.executable, *sys.argv],
                env={**settings, "RANK": str(rank), "LOCAL_RANK": str(rank), _SCRATCH: scratch},
            )
            for rank in range(RANKS)
        ]
        try:
            while any(rank.poll() is None for rank in ranks):
                if any(rank.poll() for rank in ranks):
                    time.sleep(2.0)  # the others leave by themselves, or never
                    break
                time.sleep(0.1)
        except KeyboardInterrupt:
            return 130
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    rank.terminate()
                rank.wait()
    return max(abs(int(rank.returncode)) for rank in ranks)


# --- the work ----------------------------------------------------------------------------------------------------


def train_config(world: World, steps: int) -> TrainConfig:
    """The toy GPT under DDP, with the batch for which a step takes a rank about STEP_MS of CPU time here."""
    config = TrainConfig(steps=steps, global_batch_size=world.size, evaluate_every=0, threads=1, device="cpu")
    costs = []
    for sequences in (1, 9):
        config = replace(config, global_batch_size=sequences * world.size)
        costs.append(max(world.channel.all_gather(_step_cpu_ms(config, world))))
    per_sequence = max(0.1, (costs[1] - costs[0]) / 8)
    sequences = max(1, 1 + round((STEP_MS - costs[0]) / per_sequence))
    return replace(config, global_batch_size=sequences * world.size)


def _step_cpu_ms(config: TrainConfig, world: World) -> float:
    trainer = Trainer(config, world)
    trainer.load()
    trainer.parallelise()
    costs = []
    for number in range(1, 7):
        start_ns = time.process_time_ns()
        trainer.train_step(number, UNOBSERVED, UNOBSERVED)
        costs.append((time.process_time_ns() - start_ns) / 1e6)
    return statistics.median(costs[1:])


class _Unobserved:
    """A monitor, its steps and its phases, of which nothing happens."""

    def phase(self, _name: str) -> "_Unobserved":
        return self

    def loss(self, *_: Any) -> None: ...

    def record(self, **_: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


UNOBSERVED: Any = _Unobserved()


class Yardstick:
    """The training thread's CPU time in a model's forward pass, where a CPU monitor does nothing.

    Neighbours on the same machine make the same work cost 10 % more CPU time in one block than in the next. They do
    so to the forward pass as well: in units of it, blocks compare three times as well.
    """

    def __init__(self, model: torch.nn.Module):
        self.cpu_ns = 0
        self._start_ns = 0
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end)

    def _begin(self, *_: Any) -> None:
        self._start_ns = time.thread_time_ns()

    def _end(self, *_: Any) -> None:
        self.cpu_ns += time.thread_time_ns() - self._start_ns

    def take(self) -> int:
        """Nanoseconds since the last call."""
        cpu_ns, self.cpu_ns = self.cpu_ns, 0
        return cpu_ns


# --- comparing ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spread:
    """The median over pairs of blocks, its 95 % bootstrap interval, and the quartiles of the pairs themselves."""

    median: float
    low: float
    high: float
    quartiles: tuple[float, float]
    pairs: int

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


def spread(values: Sequence[float]) -> Spread:
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(statistics.median(values), medians[49], medians[1949], (lower, upper), len(values))


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table. A target is `most` (the median may not exceed it) or `least`; or neither."""

    what: str
    unit: str
    measured: Spread
    digits: int
    most: float | None = None
    least: float | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        """ "met" or "MISSED" where the whole interval is on that side of the target, else "unresolved"."""
        low, high = self.measured.low, self.measured.high
        if self.most is not None:
            return "met" if high <= self.most else "MISSED" if low > self.most else "unresolved"
        if self.least is not None:
            return "met" if low >= self.least else "MISSED" if high < self.least else "unresolved"
        return self.note

    def cells(self) -> list[str]:
        def number(value: float) -> str:
            return f"{value:,.{self.digits}f}"

        target = ""
        if self.most is not None:
            target = f"≤ {self.most:g}"
        if self.least is not None:
            target = f"≥ {self.least:g}"
        return [
            self.what,
            f"{number(self.measured.median)} {self.unit}".strip(),
            f"{number(self.measured.low)} to {number(self.measured.high)}",
            " to ".join(number(each) for each in self.measured.quartiles),
            str(self.measured.pairs),
            target,
            self.verdict,
        ]


def await_exchange(monitor: Monitor) -> None:
    """Waits until the background thread has handed over what is due: its cost belongs to the steps before."""
    exchange = monitor._exchange
    while exchange._submitted >= exchange._target:
        time.sleep(0.001)


def conclude(name: str, title: str, results: Sequence[Result], facts: dict[str, Any], ok: bool = True) -> int:
    """Shows the table and writes runs/benchmarks/NAME.json (rank 0). The exit code: 1 when a target is missed or
    not all is `ok`; a target that the noise leaves unresolved is said to be so, and is no failure."""
    verdicts = {result.verdict for result in results}
    code = 1 if "MISSED" in verdicts or not ok else 0
    console = Console(soft_wrap=True)
    table = Table(title=title, title_justify="left")
    for heading in ("", "median", "95 % interval", "quartiles of the pairs", "pairs", "target", ""):
        table.add_column(heading, justify="right" if heading in ("median", "pairs") else "left", no_wrap=True)
    for result in results:
        table.add_row(*result.cells())
    console.width = max(console.width, 150) if not console.is_terminal else console.width
    console.print(table)
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(
        path,
        {
            "benchmark": name,
            "time_utc": utc_now(),
            "exit_code": code,
            "results": [{**asdict(result), "verdict": result.verdict} for result in results],
            "versions": {
                "bireme": bireme.__version__,
                "python": sys.version.split()[0],
                "torch": torch.__version__,
            },
            "cores": os.cpu_count(),
            "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
            **facts,
        },
    )
    console.print(f"{path}  load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return code
