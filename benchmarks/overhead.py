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
TRAINING_STEPS = 10  # a block
EMPTY_STEPS = 300
COLLECTIVES = 8
PLANTED_NS = 1_000_000

Blocks = dict[str, list[float]]  # by arm: CPU time a step, mean over the ranks, of each block


class Arms:
    """Runs blocks of one kind of work, arm by arm, and keeps what each cost."""

    def __init__(self, world: World, scratch: Path, name: str):
        self.world = world
        self.scratch = scratch / name
        self.costs: dict[str, list[float]] = {arm: [] for arm in ARMS}
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

    def blocks(self) -> Blocks:
        """What a step cost, mean over the ranks."""
        gathered = self.world.channel.all_gather(self.costs)
        return {arm: [statistics.fmean(each) for each in zip(*(g[arm] for g in gathered), strict=True)] for arm in ARMS}


def work(duration_ns: int) -> None:
    """Keeps the training thread's core busy for so much CPU time."""
    until_ns = time.thread_time_ns() + duration_ns
    while time.thread_time_ns() < until_ns:
        pass


def training(trainer: Trainer, pairs: int, scratch: Path) -> Arms:
    """Steps of about 200 ms. CPU time of the whole process, with the background thread and the Monitor's close."""
    arms = Arms(trainer.world, scratch, "training")
    for arm, monitor in arms.turns(pairs):
        planted_ns = PLANTED_NS if arm == "planted" else 0
        observed: Any = monitor or common.UNOBSERVED
        start_ns = time.process_time_ns()
        with observed:
            for number in range(1, TRAINING_STEPS + 1):
                with monitor.step() if monitor else nullcontext(common.UNOBSERVED) as step:
                    trainer.train_step(number, observed, step)
                    work(planted_ns)
        arms.costs[arm].append((time.process_time_ns() - start_ns) / TRAINING_STEPS)
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


def differences(blocks: Blocks, arm: str, other: str, unit_ns: float) -> list[float]:
    return [(a - b) / unit_ns for a, b in zip(blocks[arm], blocks[other], strict=True)]


def planted(what: str, unit: str, unit_ns: float, blocks: Blocks) -> common.Result:
    """The planted work as the benchmark sees it; VISIBLE when no noise of the comparison on - off could be it."""
    noise = common.spread(differences(blocks, "on", "off", unit_ns))
    seen = common.spread(differences(blocks, "planted", "on", unit_ns))
    visible = seen.low > max(0.0, noise.half_width)
    return common.Result(what, unit, seen, 2 if unit == "ms" else 1, note="VISIBLE" if visible else "not visible")


def measure(world: World, pairs: int, scratch: Path) -> bool:
    trainer = Trainer(common.train_config(world, steps=1000), world)
    trainer.build()
    for number in range(1, 4):
        trainer.train_step(number, common.UNOBSERVED, common.UNOBSERVED)
    steps = training(trainer, pairs, scratch)
    fewer = max(2, pairs // 2)  # these agree with each other much better
    bare = empty(world, 0, fewer, scratch)
    reducing = empty(world, COLLECTIVES, fewer, scratch)
    steps_ns, bare_ns, reducing_ns = steps.blocks(), bare.blocks(), reducing.blocks()
    if world.rank:
        return True

    claimed = [own_account_ns(directory) / 1e6 for directory in steps.directories]
    ratios = [on / off for on, off in zip(steps_ns["on"], steps_ns["off"], strict=True)]
    per_step = differences(bare_ns, "on", "off", 1e3)
    per_collective = [
        (with_them - without) / COLLECTIVES
        for with_them, without in zip(differences(reducing_ns, "on", "off", 1e3), per_step, strict=True)
    ]
    results = [
        common.Result("training step: process CPU, on / off", "", common.spread(ratios), 4, most=1.01),
        common.Result(
            "training step: process CPU, on - off", "ms", common.spread(differences(steps_ns, "on", "off", 1e6)), 2
        ),
        common.Result("training step: what the monitor itself says it cost", "ms", common.spread(claimed), 2),
        planted("training step: 1 ms planted", "ms", 1e6, steps_ns),
        common.Result("empty step, four phases: thread CPU, on - off", "us", common.spread(per_step), 1, most=100.0),
        planted("empty step, four phases: 1000 us planted", "us", 1e3, bare_ns),
        common.Result(
            f"a collective, of {COLLECTIVES} in an empty step: thread CPU, on - off",
            "us",
            common.spread(per_collective),
            1,
            most=40.0,
        ),
        planted(f"empty step with {COLLECTIVES} collectives: 1000 us planted", "us", 1e3, reducing_ns),
    ]
    step_ms = statistics.median(steps_ns["off"]) / 1e6
    visible = all(result.note != "not visible" for result in results if result.unit == "us")
    return common.conclude(
        "overhead",
        f"What observing costs: {world.size} ranks, a training step is {step_ms:.0f} ms of CPU on each",
        results,
        {
            "global_batch_size": trainer.config.global_batch_size,
            "cpu_ns_per_step": {"training": steps_ns, "empty": bare_ns, f"empty-{COLLECTIVES}": reducing_ns},
        },
        ok=visible,
    )


def own_account_ns(directory: Path) -> float:
    """Nanoseconds a step, mean over the ranks, that the run's record says measuring took."""
    steps = [orjson.loads(line) for line in (directory / STEPS_FILE).read_bytes().splitlines()]
    return statistics.fmean(sum(rank) for step in steps for rank in step["overhead_ns"])


if __name__ == "__main__":
    raise SystemExit(common.main("What observing costs.", pairs=24, quick_pairs=4, measure=measure))
