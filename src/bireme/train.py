"""The training loop. `train` runs on every rank; what it needs is made first, then the loop reads top to bottom."""

import logging
import os
import platform
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from safetensors import SafetensorError
from torch import nn

import bireme
from bireme.config import TrainConfig
from bireme.console import RankLog, StepPrinter
from bireme.cores import usable_cores
from bireme.data import Corpus, open_tokens, prepare, rank_share, share
from bireme.environment import UNSHAPED, Launch
from bireme.errors import SharedError, UserError
from bireme.flops import flops_per_token, measure_matmul_roof, peak_flops_per_s
from bireme.inject import Injector, Straggler
from bireme.replicas import Replicas, replicate
from bireme.model import GPT, compile_blocks, num_parameters, preset
from bireme.nodes import parse_rate
from bireme.observe.monitor import Monitor, Step
from bireme.sample import WEIGHTS_FILE, save_weights
from bireme.shutdown import StopRequest
from bireme.world import World, join, peer_lost_in_one_line, positive_seconds

log = logging.getLogger(__name__)

_SILENT_S = 20.0  # with what it takes to find out who is silent, half a minute


class Trainer:
    """Everything that one rank needs to train: model, optimizer, data, and who reduces the gradients.

    UserError for sizes that do not fit each other, an unusable corpus, a straggler outside the world.
    """

    def __init__(self, config: TrainConfig, world: World):
        self.config = config
        self.world = world
        self.micro_batch_size, self.accumulation = config.batch_shape(world.size)
        self.model_config = preset(config.preset, **config.model)
        self.length = config.sequence_length or self.model_config.sequence_length
        if self.length > self.model_config.sequence_length:
            raise UserError(
                f"sequence_length {self.length} is longer than the model's context of "
                f"{self.model_config.sequence_length} tokens: shorten it, or set model.sequence_length"
            )
        weights_gb = num_parameters(self.model_config) * 4 / 1e9
        memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
        if world.device.type == "cpu" and weights_gb > memory_gb:
            raise UserError(
                f"the model's weights need {weights_gb:.3g} GB, this machine has {memory_gb:.3g} GB: "
                "choose a smaller preset or smaller model fields"
            )
        self.straggler = Straggler.from_environment(os.environ, world.size)
        self.injector = Injector(self.straggler, world.rank)
        # One rank a node reads the sources; the others find them prepared.
        if world.first_on_node:
            prepare(config.data)

    def load(self) -> None:
        """The corpus and the model, on this rank alone: what is wrong here is wrong before any rank waits."""
        config, world = self.config, self.world
        self.tokens = open_tokens(prepare(config.data))
        self.corpus = Corpus(self.tokens, self.length, self.model_config.vocab_size)
        self.autocast: Any = nullcontext()
        if world.device.type == "cuda":
            self.autocast = torch.autocast("cuda", torch.bfloat16)
        model = GPT(self.model_config, config.activation_checkpointing)
        model.reset_parameters(config.seed)
        model.to(world.device)
        self.module = model

    def replicate(self) -> None:
        """Makes the model one of its replicas, and its optimizer: every rank at once."""
        config, model = self.config, self.module
        self.injector.plant_in_backward(list(model.layers.values())[len(model.layers) // 2])
        if config.compile:
            # Blocks are compiled one by one: there is nothing for dynamo's own DDP splitting to do, and it refuses
            # buckets below a megabyte.
            torch._dynamo.config.optimize_ddp = False
            compile_blocks(model)
        self.replicas: Replicas = replicate(model, config.overlap, config.bucket_mb)
        matrices = [each for each in model.parameters() if each.dim() >= 2]
        others = [each for each in model.parameters() if each.dim() < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            fused=True,
        )

    def micro_batches(self, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's (inputs, targets) of a step, each (micro batch, length): its share of the global batch."""
        batch_size = self.config.global_batch_size
        samples = self.corpus.train_samples((step - 1) * batch_size, batch_size, self.config.seed)
        mine = samples[rank_share(batch_size, self.world.rank, self.world.size)]
        return [self._tensors(each) for each in np.split(mine, self.accumulation)]

    def _tensors(self, samples: Any) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = (torch.from_numpy(each) for each in self.corpus.batch(samples))
        device = self.world.device
        return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)

    def train_step(self, number: int, monitor: Monitor, step: Step) -> None:
        self.injector.begin(number)
        with monitor.phase("input"):
            micro_batches = self.micro_batches(number)
            self.injector.sleep("input")
        losses = []
        for index, (inputs, targets) in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            with self.replicas.accumulating(last):
                with monitor.phase("forward"):
                    self.injector.sleep("forward")
                    with self.autocast:
                        loss = self.replicas.model(inputs, targets)
                with monitor.phase("backward"):
                    (loss / self.accumulation if self.accumulation > 1 else loss).backward()
                    if last:
                        self.replicas.reduce()
            losses.append(loss.detach())
        with monitor.phase("optimizer"):
            self.injector.sleep("optimizer")
            if self.config.gradient_clip_norm:
                norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.config.gradient_clip_norm)
                step.record(gradient_norm=norm)
            learning_rate = self.config.learning_rate(number)
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
            self.replicas.zero()
        tokens = self.micro_batch_size * self.accumulation * self.length
        step.loss(losses[0] if len(losses) == 1 else torch.stack(losses).mean(), tokens)
        step.record(learning_rate=learning_rate)
        if self.straggler is not None:
            step.record(injected_ms=self.straggler.delay_ms(number))

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the held-out samples, each counted once however many ranks there are."""
        samples = self.corpus.evaluation_samples(self.config.evaluation_samples)
        mine = samples[share(len(samples), self.world.rank, self.world.size)]
        totals = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        self.module.eval()
        for start in range(0, len(mine), self.micro_batch_size):
            inputs, targets = self._tensors(mine[start : start + self.micro_batch_size])
            with self.autocast:
                loss = self.module(inputs, targets)
            totals += torch.stack(
                [loss.double() * targets.numel(), torch.tensor(float(targets.numel())).to(loss.device)]
            )
        self.module.train()
        dist.all_reduce(totals)
        return float(totals[0] / totals[1])


def run_training(load: Callable[[], TrainConfig]) -> tuple[Path, World]:
    """What each rank's process does: joins the others, trains, leaves. Returns the run directory and who took part.

    `load` gives the configuration. What is wrong with it is said once for all ranks.
    """
    launch = Launch.from_environment(os.environ)
    config: TrainConfig | None = None
    problem: str | None = None
    try:
        config = load()
    except UserError as error:
        problem = str(error)
        if launch.size == 1:
            raise
    cuda = config is not None and config.device != "cpu" and torch.cuda.is_available()
    if config is not None and config.device == "cuda" and not cuda:
        problem = "device is cuda, but PyTorch sees no GPU here: use --device cpu"
    console = Console(highlight=False, soft_wrap=True)
    with RankLog(launch.rank, console) as rank_log:
        world = join("cuda" if cuda else "cpu")
        try:
            with peer_lost_in_one_line(world):
                world.raise_together(problem)
                assert config is not None
                return train(config, world, console, rank_log), world
        finally:
            world.leave()


def train(config: TrainConfig, world: World, console: Console, rank_log: RankLog | None = None) -> Path:
    """Trains on every rank of `world`; returns the run directory. Ends with an exception when it did not finish."""
    with ExitStack() as stack:
        if rank_log is None:
            rank_log = stack.enter_context(RankLog(world.rank, console))
        _set_threads(config, world)
        with world.together():
            trainer = Trainer(config, world)
        with world.together():
            trainer.load()
        if len(set(world.channel.all_gather(trainer.tokens.fingerprint))) > 1:
            raise SharedError(f"the ranks read different data: {config.data} is not the same on every node")
        trainer.replicate()
        peak = _peak(config, world)
        facts = describe(trainer, peak)
        flops = facts["model"]["flops_per_token"]["full"]
        sum_of_peaks = peak["flops_per_s"]
        printer: StepPrinter | None = None

        def on_steps(lines: list[dict[str, Any]], events: list[dict[str, Any]]) -> None:
            for event in events:
                if event["event"] == "warning":
                    rank_log.show_warning(event["message"], event["ranks"], world.size)
            for line in lines:
                if printer is not None:
                    printer.show(line)

        stop = stack.enter_context(StopRequest())
        directory = Path(world.channel.all_gather(config.run or _default_run())[0])
        monitor = Monitor(
            directory,
            facts=facts,
            channel=world.channel,
            exchange_every=config.exchange_every,
            skip_steps=config.skip_steps,
            on_steps=on_steps,
            warnings=rank_log.take_warnings,
            device=world.device.type,
        )
        stop.on_stuck = lambda reason: monitor.close("interrupted", reason, within_s=3.0)
        rank_log.open(directory)
        log.info("%s", _headline(facts, directory))
        if world.rank == 0:
            printer = StepPrinter(
                console,
                config.steps,
                lambda rate: rate * flops / sum_of_peaks if sum_of_peaks else None,
                communication_known=not monitor.missing.get("collectives"),
            )
            stack.callback(printer.close)

        limit_s = silence_limit_s(os.environ, trainer)
        if limit_s is not None:
            world.set_timeout(limit_s)
        with monitor:
            if trainer.straggler is not None:
                monitor.event("injection", **trainer.straggler.truth())
            with peer_lost_in_one_line(world, stop.check):
                loop(trainer, monitor, stop.check)
        # After the last exchange: nobody waits for a slow disk, and nothing is measured any more.
        if world.rank == 0:
            try:
                save_weights(trainer.module, directory / WEIGHTS_FILE, trainer.model_config)
            except (OSError, SafetensorError) as error:
                raise UserError(f"cannot save the weights in {directory}: {error}") from None
        return directory


def silence_limit_s(environ: Mapping[str, str], trainer: Trainer) -> float | None:
    """After how long without an answer a rank takes the others for lost; None: PyTorch's 30 minutes.

    BIREME_TIMEOUT_S says it. On emulated nodes it is 20 s, and what slow links and planted delays explain.
    """
    given = environ.get("BIREME_TIMEOUT_S")
    if given:
        return positive_seconds("BIREME_TIMEOUT_S", given)
    if not environ.get("BIREME_NODE"):
        return None
    link = environ.get("BIREME_LINK", UNSHAPED)
    bits_per_s = None if link == UNSHAPED else parse_rate(link)
    gradients_s = num_parameters(trainer.model_config) * 4 * 8 / bits_per_s if bits_per_s else 0.0
    delays_ms = trainer.straggler.delays_ms if trainer.straggler else ()
    return _SILENT_S + 10 * gradients_s + max(delays_ms, default=0.0) / 1e3


def loop(trainer: Trainer, monitor: Monitor, check_for_stop: Callable[[], None] = lambda: None) -> None:
    """All steps of a run, each accounted for."""
    config, world = trainer.config, trainer.world
    tokens_per_rank = config.global_batch_size // world.size * trainer.length
    for number in range(1, config.steps + 1):
        with monitor.step(tokens=tokens_per_rank) as step:
            check_for_stop()
            trainer.train_step(number, monitor, step)
            if config.evaluate_every and number % config.evaluate_every == 0:
                loss = trainer.evaluate()
                step.skip("evaluation")
                step.record(evaluation_loss=loss)
                monitor.event("evaluation", step=number, loss=loss)


def _set_threads(config: TrainConfig, world: World) -> None:
    cores = len(usable_cores())
    threads = config.threads or max(1, cores // world.local_size)
    if threads * world.local_size > cores:
        log.warning(
            "%d ranks x %d threads share %d cores on node %s: waiting for a core will show as contention",
            world.local_size,
            threads,
            cores,
            world.node,
        )
    torch.set_num_threads(threads)


def _peak(config: TrainConfig, world: World) -> dict[str, Any]:
    """What the devices could do: a datasheet's peak for a known GPU, a measured matrix multiplication on a CPU."""
    per_rank: float | None = None
    source = "n/a: not measured"
    if world.device.type == "cuda":
        known = peak_flops_per_s(torch.cuda.get_device_name(world.device), "bfloat16")
        if known is not None:
            per_rank, source = known.flops_per_s, known.source
        else:
            source = "n/a: the device is not in the table of peaks"
    elif config.peak_seconds:
        world.channel.all_gather(None)  # all at once: ranks that share cores share the roof
        per_rank = measure_matmul_roof(config.peak_seconds)
        source = f"measured fp32 matrix multiplication, {torch.get_num_threads()} threads per rank"
    gathered = world.channel.all_gather(per_rank)
    known_everywhere = all(each is not None for each in gathered)
    return {
        "flops_per_s": sum(gathered) if known_everywhere else None,
        "per_rank_flops_per_s": gathered,
        "source": source,
    }


def describe(trainer: Trainer, peak: dict[str, Any]) -> dict[str, Any]:
    """The facts of run.json that the trainer knows (docs/run-directory.md)."""
    config, world, shape = trainer.config, trainer.world, trainer.model_config
    flops = flops_per_token(shape, trainer.length, config.activation_checkpointing)
    threads = world.channel.all_gather(torch.get_num_threads())
    return {
        "command": sys.argv,
        "launch_id": os.environ.get("TORCHELASTIC_RUN_ID"),
        "versions": {
            "bireme": bireme.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "platform": platform.platform(),
        },
        "ranks": [{**rank, "threads": each} for rank, each in zip(world.ranks, threads, strict=True)],
        "nodes": world.nodes,
        "config": config.as_dict(),
        "network": {"link": os.environ.get("BIREME_LINK"), "delay": os.environ.get("BIREME_DELAY")},
        "layout": config.layout,
        "reduction": "overlap" if config.overlap else "flat",
        "model": {
            "preset": config.preset,
            **asdict(shape),
            "parameters": num_parameters(shape),
            "flops_per_token": asdict(flops),
        },
        "peak": peak,
        "data": {
            "name": config.data,
            "tokens": len(trainer.tokens.tokens),
            "fingerprint": trainer.tokens.fingerprint,
            "train_samples": trainer.corpus.num_train_samples,
            "evaluation_samples": trainer.corpus.num_evaluation_samples,
        },
    }


def _headline(facts: dict[str, Any], directory: Path) -> str:
    config = facts["config"]
    model = facts["model"]
    ranks = len(facts["ranks"])
    reduction = "overlapped with backward" if config["overlap"] else "in one flat all-reduce"
    return (
        f"{model['preset']}: {model['parameters']:,} parameters, {config['steps']} steps of "
        f"{config['global_batch_size']} sequences on {ranks} rank{'s' if ranks > 1 else ''} "
        f"({', '.join(node['name'] for node in facts['nodes'])}), gradients {reduction}; run directory: {directory}"
    )


def _default_run() -> str:
    return str(Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}")
