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
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from rich.console import Console
from safetensors import SafetensorError

import bireme
from bireme.channel import set_group_timeout
from bireme.config import TrainConfig
from bireme.console import RankLog, StepPrinter
from bireme.cores import usable_cores
from bireme.data import Corpus, open_tokens, prepare, rank_share, share
from bireme.environment import UNSHAPED, Launch
from bireme.errors import SharedError, UserError
from bireme.flops import flops_per_token, measure_matmul_roof, peak_flops_per_s
from bireme.guards import check_replicas, check_start
from bireme.inject import Injector, Straggler
from bireme.layout import (
    Pipeline,
    arrange,
    check_compile,
    check_model,
    check_pipeline,
    crossing,
    describe_groups,
    parse_layout,
    stages_per_rank,
)
from bireme.mesh import local
from bireme.model import GPT, num_parameters, preset
from bireme.nodes import parse_rate
from bireme.observe.collectives import process_groups
from bireme.observe.monitor import Monitor, Step
from bireme.parallel import Plan, parallelise
from bireme.sample import WEIGHTS_FILE, save_weights
from bireme.shutdown import StopRequest
from bireme.traffic import crossing_bytes, node_bytes
from bireme.world import World, join, peer_lost_in_one_line, positive_seconds

log = logging.getLogger(__name__)

_SILENT_S = 20.0  # with what it takes to find out who is silent, half a minute


_OF_A_NODE = ("run", "data", "threads", "device")


class Trainer:
    """Everything that one rank needs to train: model, optimizer, data, and who reduces the gradients.

    UserError for sizes that do not fit each other, an unusable corpus, a straggler outside the world.
    """

    def __init__(self, config: TrainConfig, world: World):
        self.config = config
        self.world = world
        nodes = [node["ranks"] for node in world.nodes]
        self.layout = layout = parse_layout(config.layout, nodes)
        self.order = arrange(layout, nodes)
        if world.size == 1 and config.layout.strip().lower() not in ("ddp", ""):
            log.warning("there is one rank: layout %s has nothing to divide", config.layout)
        self.micro_batch_size, self.accumulation = config.batch_shape(layout.data_parallel_size, layout.pp)
        self.model_config = preset(config.preset, **config.model)
        self.length = config.sequence_length or self.model_config.sequence_length
        if self.length > self.model_config.sequence_length:
            raise UserError(
                f"sequence_length {self.length} is longer than the model's context of "
                f"{self.model_config.sequence_length} tokens: shorten it, or set model.sequence_length"
            )
        self.pipeline = Pipeline(
            schedule=config.pipeline_schedule,
            stages_per_rank=stages_per_rank(
                layout, config.pipeline_schedule, config.pipeline_stages_per_rank, self.model_config.num_layers
            ),
            micro_batches=self.accumulation,
        )
        check_pipeline(layout, self.pipeline, self.micro_batch_size)
        check_model(layout, self.model_config, self.length)
        check_compile(layout, config.compile)
        holders = layout.dp_shard * layout.tp * layout.pp
        weights_gb = num_parameters(self.model_config) * 4 / 1e9 / holders
        memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
        if world.device.type == "cpu" and weights_gb > memory_gb:
            raise UserError(
                f"the model's weights need {weights_gb:.3g} GB on a rank, this machine has {memory_gb:.3g} GB: "
                "choose a smaller preset or smaller model fields"
            )
        self.straggler = Straggler.from_environment(os.environ, world.size)
        self.injector = Injector(self.straggler, world.rank)
        self.autocast: Any = nullcontext()
        if world.device.type == "cuda":
            self.autocast = torch.autocast("cuda", torch.bfloat16)
        # One rank a node reads the sources; the others find them prepared.
        if world.first_on_node:
            prepare(config.data)

    def load(self) -> None:
        """The corpus, on this rank alone: what is wrong here is wrong before any rank waits."""
        self.tokens = open_tokens(prepare(self.config.data))
        self.corpus = Corpus(self.tokens, self.length, self.model_config.vocab_size)

    @property
    def plan(self) -> Plan:
        """How the model is to be built and wrapped."""
        config = self.config
        return Plan(
            layout=self.layout,
            order=self.order,
            model=self.model_config,
            seed=config.seed,
            length=self.length,
            micro_batch_size=self.micro_batch_size,
            pipeline=self.pipeline,
            activation_checkpointing=config.activation_checkpointing,
            overlap=config.overlap,
            bucket_mb=config.bucket_mb,
            reshard_after_forward=config.reshard_after_forward,
            compile=config.compile,
        )

    @property
    def traffic(self) -> dict[str, Any]:
        """What a step sends between nodes by the layout's formula: by node, and by dimension over the busiest link."""
        cuda = self.world.device.type == "cuda"
        nodes = [node["ranks"] for node in self.world.nodes]
        # Of a model that is sharded on GPUs, weights and activations are bf16; autocast alone sends fp32.
        how = (self.plan, nodes, "nccl" if cuda else "gloo", 2 if cuda and self.layout.dp_shard > 1 else 4)
        by_node = node_bytes(*how)
        return {
            "nodes": {node["name"]: by_node[index] for index, node in enumerate(self.world.nodes)},
            "dimensions": crossing_bytes(*how),
        }

    def parallelise(self) -> None:
        """Makes this rank's part of the model, and its optimizer: every rank at once."""
        config = self.config

        self.before_model_bytes = psutil.Process().memory_info().rss

        def plant(part: GPT) -> None:
            layers = list(part.layers.values())
            self.injector.plant_in_backward(layers[len(layers) // 2])

        limit_s = silence_limit_s(os.environ, self)
        self.parallel = parallelise(self.plan, self.world.device, plant, self.autocast, timeout_s=limit_s)
        parameters = [each for _, each in self.parallel.named_parameters()]
        matrices = [each for each in parameters if each.dim() >= 2]
        others = [each for each in parameters if each.dim() < 2]
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
        rank, ranks = self.parallel.mesh.data_parallel_rank, self.layout.data_parallel_size
        mine = samples[rank_share(batch_size, rank, ranks)]
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
        losses = self.parallel.gradients(micro_batches, monitor.phase, lambda: self.injector.sleep("forward"))
        with monitor.phase("optimizer"):
            self.injector.sleep("optimizer")
            if self.config.gradient_clip_norm:
                step.record(gradient_norm=self.parallel.clip(self.config.gradient_clip_norm))
            learning_rate = self.config.learning_rate(number)
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
            self.parallel.zero()
        if losses:  # only where the last stage of a pipeline is; the record has it from there
            tokens = self.micro_batch_size * self.accumulation * self.length
            step.loss(losses[0] if len(losses) == 1 else torch.stack(losses).mean(), tokens)
        step.record(learning_rate=learning_rate)
        if self.straggler is not None:
            step.record(injected_ms=self.straggler.delay_ms(number))

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the held-out samples, each counted once however many ranks there are."""
        samples = self.corpus.evaluation_samples(self.config.evaluation_samples)
        rank, ranks = self.parallel.mesh.data_parallel_rank, self.layout.data_parallel_size
        mine = samples[share(len(samples), rank, ranks)]
        # Where the model is sharded all ranks must compute equally often: who has no sample left repeats the first.
        most = max(len(range(*share(len(samples), each, ranks).indices(len(samples)))) for each in range(ranks))
        ids = [mine[start : start + self.micro_batch_size] for start in range(0, most, self.micro_batch_size)]
        batches = [self._tensors(each if len(each) else samples[:1]) for each in ids]
        with self.autocast:
            losses = self.parallel.evaluate(batches)
        totals = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        for loss, each in zip(losses, ids, strict=False):
            tokens = float(len(each) * self.length) if self.parallel.mesh.where["tp"] == 0 else 0.0
            totals += torch.stack([local(loss).double() * tokens, torch.tensor(tokens).double().to(totals.device)])
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
        # Paths and threads may differ from node to node; whether the data are the same is seen below.
        world.agree({name: each for name, each in config.as_dict().items() if name not in _OF_A_NODE})
        _set_threads(config, world)
        with world.together():
            trainer = Trainer(config, world)
        with world.together():
            trainer.load()
        if len(set(world.channel.all_gather(trainer.tokens.fingerprint))) > 1:
            raise SharedError(f"the ranks read different data: {config.data} is not the same on every node")
        trainer.parallelise()
        checked = check_start(trainer.parallel, world) if world.size > 1 else None
        peak = _peak(config, world)
        facts = describe(trainer, peak) | {"start_up_checks": checked.as_dict() if checked else None}
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
        if checked is not None:
            log.info("%s", checked)
        for line in _where(trainer, facts):
            log.info("%s", line)
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
            for group in process_groups():
                set_group_timeout(limit_s, group)
        with monitor:
            if trainer.straggler is not None:
                monitor.event("injection", **trainer.straggler.truth())
            with peer_lost_in_one_line(world, stop.check):
                loop(trainer, monitor, stop.check)
        # After the last exchange: nobody waits for a slow disk, and nothing is measured any more.
        weights = trainer.parallel.whole_weights()
        if world.rank == 0:
            try:
                save_weights(weights, directory / WEIGHTS_FILE, trainer.model_config)
            except (OSError, SafetensorError) as error:
                raise UserError(f"cannot save the weights in {directory}: {error}") from None
        return directory


def silence_limit_s(environ: Mapping[str, str], trainer: Trainer) -> float | None:
    """After how long without an answer a rank takes the others for lost; None: PyTorch's 30 minutes.

    BIREME_TIMEOUT_S says it. On emulated nodes it is 20 s, 40 s with a pipeline, and what slow links and planted delays
    explain.
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
    # A stage waits for what others compute, too.
    silent_s = _SILENT_S * (2 if trainer.layout.pp > 1 else 1)
    return silent_s + 10 * gradients_s + max(delays_ms, default=0.0) / 1e3


def loop(trainer: Trainer, monitor: Monitor, check_for_stop: Callable[[], None] = lambda: None) -> None:
    """All steps of a run, each accounted for."""
    config = trainer.config
    # Distinct tokens: the ranks of one pipeline or tensor-parallel group see the same.
    share_of_batch = config.global_batch_size // trainer.layout.data_parallel_size
    tokens_per_rank = share_of_batch * trainer.length if trainer.parallel.mesh.counts_tokens else 0
    for number in range(1, config.steps + 1):
        with monitor.step(tokens=tokens_per_rank) as step:
            check_for_stop()
            trainer.train_step(number, monitor, step)
            if number == 1 and trainer.world.size > 1:
                step.skip("replica check")
                check_replicas(trainer.parallel, trainer.world.device, "after step 1")
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
        "ranks": [
            {**rank, "threads": each, "role": trainer.layout.coordinates(trainer.order.index(rank["rank"]))}
            for rank, each in zip(world.ranks, threads, strict=True)
        ],
        "nodes": world.nodes,
        "config": config.as_dict(),
        "network": {"link": os.environ.get("BIREME_LINK"), "delay": os.environ.get("BIREME_DELAY")},
        "traffic": trainer.traffic,
        "memory": {"before_model_bytes": world.channel.all_gather(trainer.before_model_bytes)},
        "layout": str(trainer.layout),
        "mesh": trainer.layout.sizes,
        "pipeline": asdict(trainer.pipeline) if trainer.layout.pp > 1 else None,
        "reduction": trainer.parallel.reduction,
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
    how = (
        "one process"
        if ranks == 1
        else {
            "overlap": "gradients overlapped with backward",
            "flat": "gradients in one flat all-reduce",
            "sharded": "weights, gradients and optimizer sharded",
            "none": "no gradients to average",
        }[facts["reduction"]]
    )
    pipeline = facts["pipeline"]
    if pipeline:
        stages = f", {pipeline['stages_per_rank']} stages a rank" if pipeline["stages_per_rank"] > 1 else ""
        how += f", schedule {pipeline['schedule']} with {pipeline['micro_batches']} micro-batches{stages}"
    return (
        f"{model['preset']}: {model['parameters']:,} parameters, {config['steps']} steps of "
        f"{config['global_batch_size']} sequences on {ranks} rank{'s' if ranks > 1 else ''} "
        f"({', '.join(node['name'] for node in facts['nodes'])}), {facts['layout']}, {how}; run directory: {directory}"
    )


def _where(trainer: Trainer, facts: dict[str, Any]) -> list[str]:
    """Which group of the mesh lives on which nodes, and what each dimension sends between nodes in a step."""
    if trainer.world.size == 1:
        return []
    sent = facts["traffic"]["dimensions"]
    lines = describe_groups(trainer.layout, trainer.order, facts["nodes"])
    for index, name in enumerate(trainer.layout.mesh_sizes):
        if name in sent:
            lines[index] += f"; {sent[name] / 1e6:.3g} MB a step cross nodes"
    rest = {name: each for name, each in sent.items() if name not in trainer.layout.mesh_sizes}
    if sum(rest.values()) >= 1000:  # a norm's four bytes are not worth a line
        lines.append(f"{' and '.join(rest)}: {sum(rest.values()) / 1e6:.3g} MB a step cross nodes")
    if crossing(trainer.layout, trainer.order, [node["ranks"] for node in facts["nodes"]]).get("tp"):
        inside = gcd(trainer.layout.tp, *(len(node["ranks"]) for node in facts["nodes"]))
        hint = "with as many tp ranks as a node has, or a divisor of that, they would stay inside"
        if inside > 1:
            replicas = trainer.layout.dp_replicate * trainer.layout.tp // inside
            others = [
                f"{name}={size}" for name, size in (("pp", trainer.layout.pp), ("shard", trainer.layout.dp_shard))
            ]
            others = [each for each in others if not each.endswith("=1")]
            hint = f"--layout {','.join([*others, f'replicate={replicas}', f'tp={inside}'])} would keep them inside"
        log.warning(
            "tensor-parallel groups cross nodes: %.3g MB a step over the busiest link, for which every block waits; %s",
            sent["tp"] / 1e6,
            hint,
        )
    return lines


def _default_run() -> str:
    return str(Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}")
