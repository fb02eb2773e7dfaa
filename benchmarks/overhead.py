"""What observing costs: the same work with and without a Monitor, in blocks that take turns in the same processes.

Three arms: `off` without a monitor, `on` with one, and `planted`, which is `on` plus 1 ms of work a step: what
the benchmark must be able to see.
"""

import gc
import statistics
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import torch
import torch.distributed as dist

from bireme.observe.monitor import Monitor
from bireme.record import STEPS_FILE
from bireme.train import Trainer
from bireme.world import World

if TYPE_CHECKING:
    from benchmarks import common
else:
    import common

ARMS = ("off", "on", "planted")
TRAINING_STEPS = 20  # a block
EMPTY_STEPS = 300
COLLECTIVES = 8
PLANTED_NS = 1_000_000

Blocks = dict[str, list[float]]  # by arm: nanoseconds a step, mean over the ranks, of each block


class Arms:
    """Runs blocks of one kind of work, arm by arm, and keeps what each cost."""

    def __init__(self, world: World, scratch: Path, name: str):
        self.world = world
        self.scratch = scratch / name
        self.costs: Blocks = {arm: [] for arm in ARMS}
        self.yardsticks: Blocks = {arm: [] for arm in ARMS}
        self.directories: list[Path] = []

    def turns(self, pairs: int) -> Iterator[tuple[str, Monitor | None]]:
        """Every arm `pairs` times, in an order that turns round each time, so that no drift favours an arm."""
        for turn in range(pairs):
            for arm in ARMS if turn % 2 == 0 else ARMS[::-1]:
                gc.collect()
                dist.barrier()
                monitor = None
                if arm != "off":
                    directory = self.scratch / f"{turn}-{arm}"
                    monitor = Monitor(directory, channel=self.world.channel)
                    if arm == "on":
                        self.directories.append(directory)
                yield arm, monitor

    def mean(self, costs: Blocks) -> Blocks:
        """The mean over the ranks, on every rank."""
        gathered = self.world.channel.all_gather(costs)
        return {arm: [statistics.fmean(each) for each in zip(*(g[arm] for g in gathered), strict=True)] for arm in ARMS}


def work(duration_ns: int) -> None:
    """Keeps the training thread's core busy for so much CPU time."""
    until_ns = time.thread_time_ns() + duration_ns
    while time.thread_time_ns() < until_ns:
        pass


def training(trainer: Trainer, pairs: int, scratch: Path) -> Arms:
    """Steps of about 200 ms. CPU time of the whole process, with the background thread and the Monitor's close."""
    arms = Arms(trainer.world, scratch, "training")
    yardstick = common.Yardstick(trainer.module)
    for arm, monitor in arms.turns(pairs):
        planted_ns = PLANTED_NS if arm == "planted" else 0
        observed: Any = monitor or common.UNOBSERVED
        yardstick.take()
        start_ns = time.process_time_ns()
        with observed:
            for number in range(1, TRAINING_STEPS + 1):
                with monitor.step() if monitor else nullcontext(common.UNOBSERVED) as step:
                    trainer.train_step(number, observed, step)
                    work(planted_ns)
        arms.costs[arm].append((time.process_time_ns() - start_ns) / TRAINING_STEPS)
        arms.yardsticks[arm].append(yardstick.take() / TRAINING_STEPS)
    return arms


def empty(world: World, collectives: int, pairs: int, scratch: Path) -> Arms:
    """Steps of nothing but four phases and a few tiny all-reduces. CPU time of the training thread."""
    arms = Arms(world, scratch, f"empty-{collectives}")
    tensor = torch.zeros(1)
    for arm, monitor in arms.turns(pairs):
        planted_ns = PLANTED_NS if arm == "planted" else 0
        if monitor is None:
            start_ns = time.thread_time_ns()
            for _ in range(EMPTY_STEPS):
                for _ in range(collectives):
                    dist.all_reduce(tensor)
            cpu_ns = time.thread_time_ns() - start_ns
        else:
            with monitor:
                start_ns = time.thread_time_ns()
                for _ in range(EMPTY_STEPS):
                    with monitor.step():
                        with monitor.phase("input"):
                            pass
                        with monitor.phase("forward"):
                            pass
                        with monitor.phase("backward"):
                            for _ in range(collectives):
                                dist.all_reduce(tensor)
                        with monitor.phase("optimizer"):
                            if planted_ns:
                                work(planted_ns)
                cpu_ns = time.thread_time_ns() - start_ns
        arms.costs[arm].append(cpu_ns / EMPTY_STEPS)
    return arms


def ratios(blocks: Blocks, arm: str, other: str) -> list[float]:
    return [a / b for a, b in zip(blocks[arm], blocks[other], strict=True)]


def differences(blocks: Blocks, arm: str, other: str) -> list[float]:
    return [a - b for a, b in zip(blocks[arm], blocks[other], strict=True)]


def planted(what: str, unit: str, unit_ns: float, on_off_ns: list[float], planted_on_ns: list[float]) -> common.Result:
    """The planted work as the benchmark sees it; VISIBLE when no noise of the comparison on - off could be it."""
    noise = common.spread([each / unit_ns for each in on_off_ns])
    seen = common.spread([each / unit_ns for each in planted_on_ns])
    note = "VISIBLE" if seen.low > noise.half_width else "not visible"
    return common.Result(what, unit, seen, 2 if unit == "ms" else 1, note=note)


def measure(world: World, pairs: int, scratch: Path) -> int:
    trainer = Trainer(common.train_config(world, steps=1000), world)
    trainer.build()
    for number in range(1, 4):
        trainer.train_step(number, common.UNOBSERVED, common.UNOBSERVED)
    training_arms = training(trainer, pairs, scratch)
    empty_arms, reducing_arms = (empty(world, collectives, pairs, scratch) for collectives in (0, COLLECTIVES))
    steps_ns = training_arms.mean(training_arms.costs)
    forward_ns = training_arms.mean(training_arms.yardsticks)
    empty_ns, reducing_ns = empty_arms.mean(empty_arms.costs), reducing_arms.mean(reducing_arms.costs)
    if world.rank:
        return 0

    # In units of the block's own forward passes, brought back to what a step takes without a monitor.
    step_ns = statistics.median(steps_ns["off"])
    forwards = {
        arm: [step / forward for step, forward in zip(steps_ns[arm], forward_ns[arm], strict=True)] for arm in ARMS
    }
    on_off = ratios(forwards, "on", "off")
    on_off_ns = [(ratio - 1) * step_ns for ratio in on_off]
    planted_on_ns = [(ratio - 1) * step_ns for ratio in ratios(forwards, "planted", "on")]
    claimed_ms = [own_account_ns(directory) / 1e6 for directory in training_arms.directories]
    per_step_us = [each / 1e3 for each in differences(empty_ns, "on", "off")]
    per_collective_us = [
        (each / 1e3 - step_us) / COLLECTIVES
        for each, step_us in zip(differences(reducing_ns, "on", "off"), per_step_us, strict=True)
    ]
    results = [
        common.Result("training step: CPU on / off", "", common.spread(ratios(steps_ns, "on", "off")), 4),
        common.Result("the same in units of the forward pass", "", common.spread(on_off), 4, most=1.01),
        common.Result("  on - off", "ms", common.spread([each / 1e6 for each in on_off_ns]), 2),
        planted("  1 ms planted: planted - on", "ms", 1e6, on_off_ns, planted_on_ns),
        common.Result("the monitor's own account (overhead_ns)", "ms", common.spread(claimed_ms), 2),
        common.Result("empty step, 4 phases: on - off", "us", common.spread(per_step_us), 1, most=100.0),
        planted(
            "  1000 us planted: planted - on",
            "us",
            1e3,
            differences(empty_ns, "on", "off"),
            differences(empty_ns, "planted", "on"),
        ),
        common.Result(
            f"a collective, {COLLECTIVES} in an empty step: on - off",
            "us",
            common.spread(per_collective_us),
            1,
            most=40.0,
        ),
        planted(
            "  1000 us planted: planted - on",
            "us",
            1e3,
            differences(reducing_ns, "on", "off"),
            differences(reducing_ns, "planted", "on"),
        ),
    ]
    visible = all(result.note != "not visible" for result in results if result.unit == "us")
    return common.conclude(
        "overhead",
        f"What observing costs: {world.size} ranks, a training step is {step_ns / 1e6:.0f} ms of CPU on each",
        results,
        {
            "global_batch_size": trainer.config.global_batch_size,
            "steps_per_block": {"training": TRAINING_STEPS, "empty": EMPTY_STEPS},
            "cpu_ns_per_step": {"training": steps_ns, "empty": empty_ns, f"empty-{COLLECTIVES}": reducing_ns},
            "forward_cpu_ns_per_step": forward_ns,
        },
        ok=visible,
    )


def own_account_ns(directory: Path) -> float:
    """Nanoseconds a step, mean over the ranks, that the run's record says measuring took."""
    steps = [orjson.loads(line) for line in (directory / STEPS_FILE).read_bytes().splitlines()]
    return statistics.fmean(sum(rank) for step in steps for rank in step["overhead_ns"])


if __name__ == "__main__":
    raise SystemExit(common.main("What observing costs.", pairs=10, quick_pairs=3, measure=measure))
