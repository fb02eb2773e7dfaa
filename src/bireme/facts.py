"""What a run says about itself: the facts of run.json, and the first lines on the console."""

import logging
import os
import sys
from dataclasses import asdict
from math import gcd
from pathlib import Path
from typing import Any

import torch

from bireme.config import TrainConfig
from bireme.device_peak import peak_of_ranks
from bireme.flops import flops_per_token
from bireme.layout import crossing, describe_groups
from bireme.model import num_parameters
from bireme.observe.own_facts import versions
from bireme.trainer import Trainer
from bireme.world import World

log = logging.getLogger(__name__)


def peak_of(config: TrainConfig, world: World) -> dict[str, Any]:
    return peak_of_ranks(world.channel, world.device, config.peak_seconds)


def describe(trainer: Trainer, peak: dict[str, Any]) -> dict[str, Any]:
    """The facts of run.json that the trainer knows (docs/run-directory.md)."""
    config, world, shape = trainer.config, trainer.world, trainer.model_config
    flops = flops_per_token(shape, trainer.length, config.activation_checkpointing)
    threads = world.channel.all_gather(torch.get_num_threads())
    return {
        "command": sys.argv,
        "launch_id": os.environ.get("TORCHELASTIC_RUN_ID"),
        "versions": versions(),
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
        "resumed_from": resumed_from(trainer),
        "data": {
            "name": config.data,
            "tokens": trainer.tokens.count,
            "fingerprint": trainer.tokens.fingerprint,
            "train_samples": trainer.corpus.num_train_samples,
            "evaluation_samples": trainer.corpus.num_evaluation_samples,
        },
    }


def resumed_from(trainer: Trainer) -> dict[str, Any] | None:
    """Which checkpoint the run goes on from; None for a run that began with step 1."""
    resume = trainer.resume
    if resume is None:
        return None
    before = {name: resume.manifest[name] for name in ("step", "samples", "world_size", "layout")}
    return {"checkpoint": resume.folder and str(resume.folder), **before, "passed_over": resume.skipped}


def headline(facts: dict[str, Any], directory: Path) -> str:
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


def where_groups_are(trainer: Trainer, facts: dict[str, Any]) -> list[str]:
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
