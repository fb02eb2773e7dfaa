"""`bireme train`'s loop against a bare PyTorch DDP loop of the same model on the same data, block by block.

Both are in the same processes and take turns. They must give the same losses and the same weights, bit for bit.
"""

import gc
import os
import statistics
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import orjson
import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bireme.checkpoint.folder import CHECKPOINTS
from bireme.checkpoint.saver import Saver
from bireme.config import TrainConfig
from bireme.console import StepPrinter
from bireme.data import Corpus, open_tokens, prepare, rank_share
from bireme.facts import describe
from bireme.model import GPT, preset
from bireme.observe.monitor import Monitor
from bireme.preemption import CommonStop
from bireme.replicas import Overlapped
from bireme.run_reader import STEPS_FILE
from bireme.shutdown import StopRequest
from bireme.train import loop
from bireme.trainer import Trainer
from bireme.world import World

if TYPE_CHECKING:
    from benchmarks import common
else:
    import common

STEPS = 20  # a block


# --- a DDP script as one would write it without Bireme -------------------------------------------------------------


class Bare:
    def __init__(self, config: TrainConfig, rank: int, size: int, bucket_mb: float):
        self.config, self.rank, self.size = config, rank, size
        shape = preset(config.preset)
        self.corpus = Corpus(open_tokens(prepare(config.data)), shape.sequence_length, shape.vocab_size)
        model = GPT(shape)
        model.reset_parameters(config.seed)
        self.model = DistributedDataParallel(
            model,
            bucket_cap_mb=bucket_mb,  # annotated as int, used as a float
            gradient_as_bucket_view=True,
        )
        matrices = [each for each in model.parameters() if each.dim() >= 2]
        others = [each for each in model.parameters() if each.dim() < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            fused=True,
        )

    def train(self, output: TextIO) -> list[torch.Tensor]:
        """Every step's loss on this rank."""
        config, model, optimizer = self.config, self.model, self.optimizer
        batch_size = config.global_batch_size
        losses = []
        for number in range(1, config.steps + 1):
            samples = self.corpus.train_samples((number - 1) * batch_size, batch_size, config.seed)
            mine = samples[rank_share(batch_size, self.rank, self.size)]
            inputs, targets = (torch.from_numpy(each) for each in self.corpus.batch(mine))
            loss = model(inputs, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), config.gradient_clip_norm)
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rate(number)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if self.rank == 0 and number % 10 == 0:
                print(f"step {number}  loss {loss.item():.4f}", file=output, flush=True)
        return losses


# --- the same with Bireme, as `bireme.train.train` does it -----------------------------------------------------------


def observed(trainer: Trainer, directory: Path, facts: dict[str, Any], output: TextIO) -> tuple[int, int]:
    """Trains a block; (process CPU, wall) of its steps, with what the background thread does for them.

    A run pays for making and closing the monitor once; a block of a few steps would pay too much of it.
    """
    world = trainer.world
    printer: StepPrinter | None = None

    def on_steps(lines: list[dict[str, Any]], events: list[dict[str, Any]]) -> None:
        for line in lines:
            if printer is not None:
                printer.show(line)

    with ExitStack() as stack:
        stop = CommonStop(stack.enter_context(StopRequest()), world.size)
        monitor = Monitor(
            directory,
            facts=facts,
            channel=world.channel,
            exchange_every=trainer.config.exchange_every,
            skip_steps=trainer.config.skip_steps,
            on_steps=on_steps,
        )
        if world.rank == 0:
            console = Console(file=output, highlight=False, soft_wrap=True)
            printer = StepPrinter(console, trainer.config.steps, lambda rate: None)
            stack.callback(printer.close)
        saver = Saver(directory / CHECKPOINTS, keep=1, keep_every=0)
        cpu_ns, wall_ns = time.process_time_ns(), time.perf_counter_ns()
        with monitor:
            loop(trainer, monitor, stop, saver)
            wall_ns = time.perf_counter_ns() - wall_ns
            stop.close()
            common.await_exchange(monitor)
            return time.process_time_ns() - cpu_ns, wall_ns


# --- comparing -------------------------------------------------------------------------------------------------------


def measure(world: World, pairs: int, scratch: Path) -> int:
    config = replace(common.train_config(world, STEPS), skip_steps=0)
    trainer = Trainer(config, world)
    trainer.load()
    trainer.parallelise()
    replicas = trainer.parallel.replicas
    assert isinstance(replicas, Overlapped)
    bare = Bare(config, world.rank, world.size, replicas.bucket_mb)
    tokens = config.global_batch_size // world.size * trainer.length
    facts = describe(trainer, {"flops_per_s": None, "per_rank_flops_per_s": [], "source": "n/a"})

    yardsticks = {"bireme": common.Yardstick(trainer.parallel.parts[0]), "bare": common.Yardstick(bare.model.module)}
    costs: dict[str, list[tuple[int, int, int]]] = {"bireme": [], "bare": []}  # CPU, wall, CPU in forward
    directories: list[Path] = []
    bare_losses: list[float] = []
    with Path(os.devnull).open("w") as output:
        for turn in range(-1, pairs):  # the first turn warms up, and is only compared for equal losses
            for arm in ("bireme", "bare") if turn % 2 else ("bare", "bireme"):
                gc.collect()
                yardsticks[arm].take()
                dist.barrier()
                if arm == "bireme":
                    directories.append(scratch / f"{turn}")
                    cost = observed(trainer, directories[-1], facts, output)
                else:
                    cpu_ns, wall_ns = time.process_time_ns(), time.perf_counter_ns()
                    losses = bare.train(output)
                    cost = time.process_time_ns() - cpu_ns, time.perf_counter_ns() - wall_ns
                    # As a run records a loss: each rank's sum over its tokens.
                    bare_losses.extend(float(loss) * tokens for loss in losses)
                if turn >= 0:
                    costs[arm].append((*cost, yardsticks[arm].take()))

    weights = zip(trainer.parallel.parts[0].parameters(), bare.model.parameters(), strict=True)
    same_weights = all(world.channel.all_gather(all(torch.equal(a, b) for a, b in weights)))
    gathered = world.channel.all_gather(costs)
    gathered_losses = world.channel.all_gather(bare_losses)
    if world.rank:
        return 0

    recorded = [
        orjson.loads(line)["loss"]
        for directory in directories
        for line in (directory / STEPS_FILE).read_bytes().splitlines()
    ]
    expected = [sum(each) / (tokens * world.size) for each in zip(*gathered_losses, strict=True)]
    same_losses = recorded == expected

    def ratios(a: list[float], b: list[float]) -> common.Spread:
        return common.spread([x / y for x, y in zip(a, b, strict=True)])

    cpu: dict[str, list[float]] = {}
    wall: dict[str, list[float]] = {}
    forwards: dict[str, list[float]] = {}
    for arm in costs:
        blocks = list(zip(*(rank[arm] for rank in gathered), strict=True))
        cpu[arm] = [sum(rank[0] for rank in block) for block in blocks]
        wall[arm] = [max(rank[1] for rank in block) for block in blocks]
        forwards[arm] = [sum(rank[0] for rank in block) / sum(rank[2] for rank in block) for block in blocks]
    step_ms = statistics.median(wall["bare"]) / STEPS / 1e6
    results = [
        common.Result("CPU a token: Bireme / bare", "", ratios(cpu["bireme"], cpu["bare"]), 4),
        common.Result(
            "the same in units of the forward pass", "", ratios(forwards["bireme"], forwards["bare"]), 4, most=1.01
        ),
        common.Result("tokens/s: Bireme / bare", "", ratios(wall["bare"], wall["bireme"]), 4, least=0.95),
    ]
    code = common.conclude(
        "ddp",
        f"Bireme's loop against bare DDP: {world.size} ranks, {STEPS} steps a block, a bare step is {step_ms:.0f} ms",
        results,
        {
            "global_batch_size": config.global_batch_size,
            "steps_per_block": STEPS,
            "cpu_ns": cpu,
            "cpu_per_forward_cpu": forwards,
            "wall_ns": wall,
            "same_losses": same_losses,
            "same_weights": same_weights,
        },
        ok=same_losses and same_weights,
    )
    for what, same in (("losses", same_losses), ("weights", same_weights)):
        print(f"{len(recorded)} steps, {what} {'the same bit for bit' if same else 'DIFFER'}")
    return code


if __name__ == "__main__":
    raise SystemExit(common.main("Bireme's loop against bare DDP.", pairs=16, quick_pairs=3, measure=measure))
