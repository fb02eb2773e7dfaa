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

from bireme.observe.collectives import CollectiveObserver
from bireme.observe.monitor import Monitor
from bireme.run_reader import STEPS_FILE
from bireme.trainer import Trainer
from bireme.world import World

if TYPE_CHECKING:
    from benchmarks import common
else:
    import common

ARMS = ("off", "on", "planted")
TRAINING_STEPS = 10  # a block: one window of the exchange between ranks
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

    def turns(self, pairs: int) -> Iterator[str]:
        """Every arm `pairs` times, in an order that turns round each time, so that no drift favours an arm."""
        for turn in range(pairs):
            for arm in ARMS if turn % 2 == 0 else ARMS[::-1]:
                gc.collect()
                dist.barrier()
                yield arm

    def mean(self, costs: Blocks) -> Blocks:
        """The mean over the ranks, on every rank."""
        gathered = self.world.channel.all_gather(costs)
        return {arm: [statistics.fmean(each) for each in zip(*(g[arm] for g in gathered), strict=True)] for arm in ARMS}


def work(duration_ns: int) -> None:
    """Keeps the training thread's core busy for so much CPU time."""
    until_ns = time.thread_time_ns() + duration_ns
    while time.thread_time_ns() < until_ns:
        pass


class PausingMonitor:
    """One Monitor for all blocks, that sees nothing in between: what a run pays once is paid once, before them.

    This reaches into the Monitor, which has no such switch: hooks off and on, and a step that begins when asked.
    """

    def __init__(self, world: World, directory: Path):
        self.monitor = Monitor(directory, channel=world.channel, phases="explicit")
        self._groups = dict(self.monitor._thread.collectives._groups)
        self.pause()

    def pause(self) -> None:
        common.await_exchange(self.monitor)
        self.monitor._thread.collectives.close()

    def go_on(self) -> None:
        self.monitor._thread.collectives = CollectiveObserver(self._groups)
        self.monitor._thread.collectives.step = self.monitor._step
        self.monitor._thread.tracker._boundaries.clear()


def training(trainer: Trainer, pairs: int, scratch: Path) -> Arms:
    """Steps of about 200 ms. CPU time of the whole process, with all that the background thread does for them."""
    arms = Arms(trainer.world, scratch, "training")
    yardstick = common.Yardstick(trainer.parallel.parts[0])
    pausing = PausingMonitor(trainer.world, arms.scratch)
    for arm in arms.turns(pairs):
        planted_ns = PLANTED_NS if arm == "planted" else 0
        observed: Any = common.UNOBSERVED if arm == "off" else pausing.monitor
        if arm != "off":
            pausing.go_on()
        yardstick.take()
        start_ns = time.process_time_ns()
        for number in range(1, TRAINING_STEPS + 1):
            with nullcontext(common.UNOBSERVED) if arm == "off" else pausing.monitor.step() as step:
                trainer.train_step(number, observed, step)
                work(planted_ns)
        if arm != "off":
            pausing.pause()
        arms.costs[arm].append((time.process_time_ns() - start_ns) / TRAINING_STEPS)
        arms.yardsticks[arm].append(yardstick.take() / TRAINING_STEPS)
    pausing.monitor.close()
    return arms


def empty(world: World, collectives: int, pairs: int, scratch: Path) -> Arms:
    """Steps of nothing but four phases and a few tiny all-reduces. CPU time of the training thread."""
    arms = Arms(world, scratch, f"empty-{collectives}")
    tensor = torch.zeros(1)
    for block, arm in enumerate(arms.turns(pairs)):
        planted_ns = PLANTED_NS if arm == "planted" else 0
        if arm == "off":
            start_ns = time.thread_time_ns()
            for _ in range(EMPTY_STEPS):
                for _ in range(collectives):
                    dist.all_reduce(tensor)
            cpu_ns = time.thread_time_ns() - start_ns
        else:
            with Monitor(arms.scratch / str(block), channel=world.channel, phases="explicit") as monitor:
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
    trainer.load()
    trainer.parallelise()
    for number in range(1, 4):
        trainer.train_step(number, common.UNOBSERVED, common.UNOBSERVED)
    training_arms = training(trainer, pairs, scratch)
    few = max(3, pairs // 3)  # these are far less noisy
    empty_arms, reducing_arms = (empty(world, collectives, few, scratch) for collectives in (0, COLLECTIVES))
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
    claimed_ms = [each / 1e6 for each in own_account_ns(training_arms.scratch)]
    per_step_us = [each / 1e3 for each in differences(empty_ns, "on", "off")]
    per_reducing_step_us = [each / 1e3 for each in differences(reducing_ns, "on", "off")]
    per_collective_us = [
        (each - step_us) / COLLECTIVES for each, step_us in zip(per_reducing_step_us, per_step_us, strict=True)
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
            f"step with {COLLECTIVES} collectives: on - off",
            "us",
            common.spread(per_reducing_step_us),
            1,
            most=100.0 + 40.0 * COLLECTIVES,
        ),
        common.Result("  of it, a collective", "us", common.spread(per_collective_us), 1),
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


def own_account_ns(directory: Path) -> list[float]:
    """Nanoseconds of each step, mean over the ranks, that the run's record says measuring took."""
    steps = [orjson.loads(line) for line in (directory / STEPS_FILE).read_bytes().splitlines()]
    return [statistics.fmean(sum(rank) for rank in step["overhead_ns"]) for step in steps[1:]]


if __name__ == "__main__":
    raise SystemExit(common.main("What observing costs.", pairs=24, quick_pairs=3, measure=measure))
