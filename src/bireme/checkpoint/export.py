"""One checkpoint of many shards as one safetensors file of the whole model, which a plain script can load."""

import contextlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bireme.checkpoint.folder import CHECKPOINTS
from bireme.checkpoint.state import MODEL_PREFIX
from bireme.data.tokenizers import HUGGING_FACE_FILE, TIKTOKEN_FILE, copy_atomic
from bireme.errors import UserError
from bireme.model import GPT, ModelConfig, num_parameters
from bireme.record import write_json_atomic
from bireme.sample import save_weights
from bireme.text import printable


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part of a tensor that is in one file of a checkpoint."""

    file: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def place(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.shape, strict=True))


def export(folder: Path, manifest: dict[str, Any], out: Path) -> list[Path]:
    """Writes the model of a checkpoint that was checked to `out`, and what it is to a JSON file beside it; returns the
    files written. UserError when one of them exists, or the checkpoint does not hold the model whole."""
    described = description_file(out)
    config = _model_config(folder, manifest)
    tokenizer = manifest.get("tokenizer")
    if not isinstance(tokenizer, str):
        raise UserError(f"checkpoint {folder} does not say what tokenizer its model is for")
    weights = assemble(folder, manifest, config)
    facts = {
        "config": asdict(config),
        "tokenizer": tokenizer,
        "step": manifest["step"],
        "samples": manifest["samples"],
        "trained_sequence_length": manifest["data"].get("sequence_length"),
        "checkpoint": str(folder.resolve()),
        "saved_utc": manifest["saved_utc"],
        "layout": manifest["layout"],
        "world_size": manifest["world_size"],
        "versions": manifest.get("versions"),
    }
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        save_weights(weights, out, config, tokenizer)
        try:
            write_json_atomic(described, facts)
        except BaseException:
            out.unlink()
            raise
        return [out, described, *_copy_tokenizer(folder, out.parent)]
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {out}: {getattr(error, 'strerror', None) or error}") from None


def description_file(out: Path) -> Path:
    """The name of the JSON file beside `out`. UserError when either exists, or `out` is no safetensors file."""
    if out.suffix != ".safetensors":
        raise UserError(f"--out is {out}: give a name that ends in .safetensors")
    described = out.with_suffix(".json")
    for each in (out, described):
        if each.exists() or each.is_symlink():
            raise UserError(f"{each} exists: choose another --out FILE")
    return described


def assemble(folder: Path, manifest: dict[str, Any], config: ModelConfig) -> dict[str, Tensor]:
    """Every parameter of the model, whole and in fp32; of tied ones the embedding's. Reads the files one by one."""
    try:
        chunks = _find_chunks(folder, manifest)
        with torch.device("meta"):
            shapes = {name: tuple(parameter.shape) for name, parameter in GPT(config).named_parameters()}
        for name, shape in shapes.items():
            _check_cover(folder, name, shape, chunks.get(name, []))
        weights = {name: torch.empty(shape, dtype=torch.float32) for name, shape in shapes.items()}
        # File by file: what is mapped into memory at a time is one rank's part.
        for file_name in sorted({chunk.file for each in chunks.values() for chunk in each}):
            with safe_open(folder / file_name, framework="pt") as file:
                for name, weight in weights.items():
                    for chunk in chunks[name]:
                        if chunk.file == file_name:
                            weight[chunk.place].copy_(file.get_tensor(MODEL_PREFIX + name))
    except (OSError, SafetensorError) as error:
        raise UserError(f"checkpoint {folder} cannot be read: {printable(str(error))[:200]}") from None
    return weights


def _model_config(folder: Path, manifest: dict[str, Any]) -> ModelConfig:
    try:
        config = ModelConfig(**manifest["model"])
    except (TypeError, UserError) as error:
        raise UserError(f"checkpoint {folder} describes no model: {error}") from None
    # A made-up size must not cost the memory to find out.
    if num_parameters(config) * 4 > sum(file["bytes"] for file in manifest["files"].values()):
        raise UserError(f"checkpoint {folder} is smaller than the model that it describes")
    return config


def _find_chunks(folder: Path, manifest: dict[str, Any]) -> dict[str, list[Chunk]]:
    """Where the parts of each parameter are, from the headers of the files."""
    found: dict[str, list[Chunk]] = {}
    for file_name in sorted(manifest["files"]):
        with safe_open(folder / file_name, framework="pt") as file:
            places = _places(folder, file_name, (file.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
            for key in file.keys():  # noqa: SIM118
                if not key.startswith(MODEL_PREFIX):
                    continue
                shape = tuple(file.get_slice(key).get_shape())
                offsets = places.get(key, (0,) * len(shape))
                if len(offsets) != len(shape):
                    raise UserError(f"checkpoint {folder}: {file_name} does not say where its {printable(key)} belongs")
                if 0 not in shape:  # of a tensor that has fewer rows than ranks
                    found.setdefault(key.removeprefix(MODEL_PREFIX), []).append(Chunk(file_name, offsets, shape))
    return found


def _places(folder: Path, file_name: str, text: str) -> dict[str, tuple[int, ...]]:
    """Where in the whole tensor each part belongs, as its file says it."""
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        places = {key: tuple(each["saved_offsets"]) for key, each in orjson.loads(text).items()}
        if all(type(offset) is int and offset >= 0 for each in places.values() for offset in each):
            return places
    raise UserError(f"checkpoint {folder}: {file_name} does not say where its tensors belong")


def _check_cover(folder: Path, name: str, shape: tuple[int, ...], chunks: list[Chunk]) -> None:
    """Whether the chunks are the tensor: every element once, and no more."""
    covered = torch.zeros(shape, dtype=torch.bool)
    for chunk in chunks:
        inside = len(chunk.shape) == len(shape) and all(
            offset + size <= whole for offset, size, whole in zip(chunk.offsets, chunk.shape, shape, strict=True)
        )
        if not inside:
            raise UserError(f"checkpoint {folder}: {name} in {chunk.file} goes beyond its shape {list(shape)}")
        if covered[chunk.place].any():
            raise UserError(f"checkpoint {folder}: {name} in {chunk.file} overlaps another part of it")
        covered[chunk.place] = True
    if not covered.all():
        missing = covered.numel() - int(covered.sum())
        raise UserError(
            f"checkpoint {folder}: {name} is not whole, {missing} of {covered.numel()} elements are missing"
        )


def _copy_tokenizer(folder: Path, target: Path) -> list[Path]:
    """The run's tokenizer file, which `bireme sample` needs beside the weights; none where the tokens are bytes."""
    if folder.resolve().parent.name != CHECKPOINTS:
        return []
    run = folder.resolve().parent.parent
    names = [name for name in (HUGGING_FACE_FILE, TIKTOKEN_FILE) if (run / name).is_file()]
    copied = [target / name for name in names if not (target / name).exists()]
    for each in copied:
        copy_atomic(run / each.name, each)
    return copied
