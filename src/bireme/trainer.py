"""Everything that one rank needs to train: model, optimizer, data, and the step that brings them together."""

import logging
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import psutil
import torch
import torch.distributed as dist

import bireme
from bireme.checkpoint.resume import Resume, check_continues
from bireme.checkpoint.state import restore_generators, tensors_to_load, tensors_to_save
from bireme.checkpoint.tensors import SaveError, load
from bireme.collection import SameStepCollection
from bireme.config import TrainConfig
from bireme.data import Corpus, open_tokens, prepare, share
from bireme.data.loader import Loader, Share
from bireme.data.tokens import verify_tokens
from bireme.environment import UNSHAPED
from bireme.errors import UserError
from bireme.inject import Injector, Setting, Straggler, parse, resolve
from bireme.inject.injector import longest_delay_ms, slowed_link
from bireme.layout import (
    Pipeline,
    arrange,
    check_compile,
    check_model,
    check_pipeline,
    parse_layout,
    stages_per_rank,
)
from bireme.mesh import local
from bireme.model import GPT, num_parameters, preset
from bireme.observe.monitor import Monitor, Step
from bireme.parallel import Plan, parallelise
from bireme.silence import silence_limit_s
from bireme.traffic import crossing_bytes, node_bytes
from bireme.world import World

log = logging.getLogger(__name__)

_VERIFY_AT_START_BYTES = 1 << 30  # a token set up to this size is read whole before training


class Trainer:
    """Everything that one rank needs to train: model, optimizer, data, and who reduces the gradients.

    UserError for sizes that do not fit each other, an unusable corpus, a straggler outside the world.
    """

    def __init__(self, config: TrainConfig, world: World, resume: Resume | None = None):
        self.config = config
        self.world = world
        self.resume = resume
        self.first_step = 1 if resume is None else resume.step + 1
        self._first_sample = 0 if resume is None else resume.samples
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
        self.injections = resolve(parse(config.inject), self._setting(), self.straggler)
        entries = self.accumulation * self.pipeline.stages_per_rank
        self.injector = Injector(self.injections, self.straggler, world.rank, entries, world.device)
        self.collection = SameStepCollection(config.gc_every, self.first_step - 1 + max(1, config.skip_steps))
        self.autocast: Any = nullcontext()
        if world.device.type == "cuda":
            self.autocast = torch.autocast("cuda", torch.bfloat16)
        slowest_ms = longest_delay_ms(self.injections, self.straggler)
        self.silence_limit_s = silence_limit_s(
            slowed_link(os.environ, self.injections), num_parameters(self.model_config), layout, slowest_ms
        )
        # One rank a node reads the sources; the others find them prepared.
        if world.first_on_node:
            prepare(config.data)

    def _setting(self) -> Setting:
        """What planted slowness is held against."""
        world, config = self.world, self.config
        stages = [0] * world.size
        for position, rank in enumerate(self.order):
            stages[rank] = self.layout.coordinates(position)["pp"]
        return Setting(
            node_of=[str(each["node"]) for each in world.ranks],
            steps=config.steps,
            first_step=self.first_step,
            stage_of=stages,
            checkpoint_every=config.checkpoint_every,
            emulated=bool(os.environ.get("BIREME_NODE")) and os.environ.get("BIREME_LINK", UNSHAPED) != UNSHAPED,
            cuda=world.device.type == "cuda",
            cores_of=[each["cores"] for each in world.ranks],
            place_of=[int(each["local_rank"]) for each in world.ranks],
        )

    @property
    def planted(self) -> list[dict[str, Any]]:
        """The truth about everything that is planted in this run, for its record."""
        short = [self.straggler.truth()] if self.straggler is not None else []
        return [*short, *(each.truth() for each in self.injections)]

    def load(self) -> None:
        """The corpus, on this rank alone: what is wrong here is wrong before any rank waits."""
        self.tokens = open_tokens(prepare(self.config.data))
        if self.world.first_on_node and self.tokens.size_bytes <= _VERIFY_AT_START_BYTES:
            verify_tokens(self.tokens)
        self.corpus = Corpus(self.tokens, self.length, self.model_config.vocab_size)
        if self.resume is not None:
            check_continues(self.resume, self.manifest(self.resume.step))

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

        how = (self.plan, self.world.device, plant, self.autocast)
        self.parallel = parallelise(*how, timeout_s=self.silence_limit_s)
        parameters = [each for _, each in self.parallel.named_parameters()]
        matrices = [each for each in parameters if each.dim() >= 2]
        others = [each for each in parameters if each.dim() < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            fused=True,
        )
        self.share = Share(
            corpus=self.corpus,
            seed=config.seed,
            global_batch_size=config.global_batch_size,
            micro_batches=self.accumulation,
            rank=self.parallel.mesh.data_parallel_rank,
            ranks=self.layout.data_parallel_size,
            first_step=self.first_step,
            first_sample=self._first_sample,
            before_read=self.injector.slow_reads,
        )
        self.loader = Loader(self.share, config.steps, config.workers)

    def restore(self) -> None:
        """Weights, moments and generators of the checkpoint to go on from, whatever layout wrote it; every rank at
        once."""
        resume = self.resume
        if resume is None or resume.folder is None:
            return
        rank, stored = self.world.rank, resume.manifest["tensors"]
        tensors = tensors_to_load(self.parallel, self.optimizer, resume.step, stored, rank, self.world.device)
        with self.world.together():
            for name, tensor in tensors.items():  # of the same model, so this is damage that no checksum showed
                if name not in stored or stored[name]["shape"] != list(tensor.shape):
                    raise UserError(f"checkpoint {resume.folder} has no {name} of shape {list(tensor.shape)}")
        with self.world.together():
            try:
                load(tensors, resume.folder, self.world.channel.group)
            except SaveError as error:
                raise UserError(f"checkpoint {resume.folder} cannot be read: {error}") from None
            restore_generators(tensors, rank, self.world.device)

    def state(self) -> dict[str, torch.Tensor]:
        """The tensors of a checkpoint that this rank has; not copies."""
        return tensors_to_save(self.parallel, self.optimizer, self.world.rank, self.world.device)

    def manifest(self, step: int) -> dict[str, Any]:
        """What a checkpoint says of itself, beside its tensors."""
        config = self.config
        return {
            "samples": self._first_sample + (step - self.first_step + 1) * config.global_batch_size,
            "world_size": self.world.size,
            "layout": str(self.layout),
            "config": config.as_dict(),
            "model": asdict(self.model_config),
            "data": {
                "fingerprint": self.tokens.fingerprint,
                "sequence_length": self.length,
                "seed": config.seed,
            },
            "tokenizer": self.tokens.tokenizer,
            "versions": {"bireme": bireme.__version__, "torch": torch.__version__},
        }

    def _on_device(self, micro_batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = micro_batch
        device = self.world.device
        return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)

    def train_step(self, number: int, monitor: Monitor, step: Step) -> None:
        injector = self.injector
        injector.begin(number)
        phase_of = injector.phases(monitor.phase)
        with phase_of("input"):
            batch = self.loader(number)
            micro_batches = [self._on_device(each) for each in batch.micro_batches]
            injector.enter("input")
        if self.config.log_samples and self.parallel.mesh.counts_tokens:
            step.samples(self.parallel.mesh.data_parallel_rank, batch.ids)
        losses = self.parallel.gradients(micro_batches, phase_of, lambda: injector.enter("forward"))
        with phase_of("optimizer"):
            injector.enter("optimizer")
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
        injector.enter("other")

    @torch.no_grad()
    def evaluate(
        self, stopped: Callable[[], int] = lambda: 0, alive: Callable[[], None] = lambda: None
    ) -> float | None:
        """Mean loss over the held-out samples, each counted once however many ranks there are; None when `stopped`,
        which is asked on every rank equally often, said so before the end. `alive` is called with every batch."""
        samples = self.corpus.evaluation_samples(self.config.evaluation_samples)
        rank, ranks = self.parallel.mesh.data_parallel_rank, self.layout.data_parallel_size
        mine = samples[share(len(samples), rank, ranks)]
        # Where the model is sharded all ranks must compute equally often: who has no sample left repeats the first.
        most = max(len(range(*share(len(samples), each, ranks).indices(len(samples)))) for each in range(ranks))
        ids = [mine[start : start + self.micro_batch_size] for start in range(0, most, self.micro_batch_size)]
        totals = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        for first in range(0, len(ids), self.accumulation):  # no longer than a step without asking
            if stopped():
                return None
            alive()
            part = ids[first : first + self.accumulation]
            read = [self.corpus.batch(each if len(each) else samples[:1]) for each in part]
            batches = [self._on_device((torch.from_numpy(each[0]), torch.from_numpy(each[1]))) for each in read]
            with self.autocast:
                losses = self.parallel.evaluate(batches)
            for loss, each in zip(losses, part, strict=False):
                tokens = float(len(each) * self.length) if self.parallel.mesh.where["tp"] == 0 else 0.0
                totals += torch.stack([local(loss).double() * tokens, torch.tensor(tokens).double().to(totals.device)])
        dist.all_reduce(totals)
        return float(totals[0] / totals[1])
