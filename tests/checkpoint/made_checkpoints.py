"""Small checkpoints as several ranks write them, made in one process."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors.torch import save_file
from torch import Tensor

from bireme.checkpoint.folder import commit, file_digest, hidden_folder, point
from bireme.model import GPT, ModelConfig, preset

TINY = preset("toy", num_layers=1, num_heads=2, num_kv_heads=2, embedding_dim=8, feed_forward_dim=12, sequence_length=4)

Part = tuple[str, tuple[int, ...], Tensor]  # name, where in the whole tensor, values


def model_of(config: ModelConfig = TINY, seed: int = 0) -> GPT:
    model = GPT(config)
    model.reset_parameters(seed)
    return model


def rows(model: GPT, ranks: int) -> list[list[Part]]:
    """The parameters by rank, divided by rows; who gets none of a small one has an empty part of it."""
    shares: list[list[Part]] = [[] for _ in range(ranks)]
    for name, parameter in model.named_parameters():
        size = -(-len(parameter) // ranks)
        for rank, share in enumerate(shares):
            first = min(rank * size, len(parameter))
            offsets = (first, *(0 for _ in parameter.shape[1:]))
            share.append((f"model.{name}", offsets, parameter.detach()[first : first + size].clone()))
    return shares


def made(
    checkpoints: Path, step: int, shares: Sequence[list[Part]] | None = None, config: ModelConfig = TINY, **fields: Any
) -> Path:
    """A whole checkpoint; `fields` replace what its manifest says."""
    shares = rows(model_of(config, seed=step), 2) if shares is None else shares
    partial = hidden_folder(checkpoints, step, "0a", "partial")
    partial.mkdir(parents=True)
    files = {}
    tensors: dict[str, Any] = {}
    for rank, share in enumerate(shares):
        path = partial / f"rank-{rank:05d}.safetensors"
        places = {name: {"saved_offsets": offsets} for name, offsets, _ in share}
        metadata = {"format": "pt", "DCP_SHARDING_INFO": orjson.dumps(places).decode()}
        save_file({name: values.contiguous() for name, _, values in share}, path, metadata)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": file_digest(path)}
        for name, offsets, values in share:
            before = tensors.get(name, {"shape": [0] * values.dim()})["shape"]
            ends = [offset + size for offset, size in zip(offsets, values.shape, strict=False)]
            tensors[name] = {"shape": [max(pair) for pair in zip(before, ends, strict=False)], "dtype": "F32"}
    manifest = {
        "samples": 16 * step,
        "world_size": len(shares),
        "layout": "fsdp",
        "config": {},
        "model": asdict(config),
        "data": {"fingerprint": "f", "sequence_length": 4, "seed": 0},
        "tokenizer": "bytes",
        "saved_utc": "2026-01-02T03:04:05.678Z",
        "versions": {"bireme": "0", "torch": torch.__version__},
        "tensors": tensors,
        "files": files,
    }
    folder = commit(partial, checkpoints, step, {**manifest, **fields}, "0a")
    point(checkpoints, step)
    return folder


def flip(path: Path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)
