"""Weights of a run on disk, and text sampled from them."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bireme.checkpoint.folder import CHECKPOINTS, candidates
from bireme.data.tokenizers import BYTES, tokenizer_of
from bireme.errors import UserError
from bireme.model import GPT, ModelConfig
from bireme.text import one_line

WEIGHTS_FILE = "model.safetensors"


def save_weights(parameters: Mapping[str, Tensor], path: Path, config: ModelConfig, tokenizer: str = BYTES) -> None:
    """Writes a model's parameters (tied ones once) and its shape to `path`, or leaves `path` as it was.

    A safetensors file with the metadata "config" (the fields of ModelConfig as JSON) and "tokenizer" (the description
    of the token set that it was trained on).
    """
    weights = {name: parameter.detach().contiguous() for name, parameter in parameters.items()}
    metadata = {"config": json.dumps(dataclasses.asdict(config)), "tokenizer": tokenizer}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # as the umask has it; safetensors makes files that only their owner can read
        save_file(weights, temporary, metadata)
        temporary.chmod(mode)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)  # the new name is on disk only when its directory is
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def load_weights(path: Path) -> GPT:
    """The model saved at `path`, on the CPU. Raises UserError when it is missing, torn, or not a model of Bireme."""
    return _load(path)[0]


def _load(path: Path) -> tuple[GPT, str]:
    """The model and the description of its tokenizer."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            weights: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise UserError(f"{path.parent} is not a directory: give the directory of a run") from None
        hint = ", but checkpoints: export one with bireme checkpoint export" if _has_checkpoints(path.parent) else ""
        raise UserError(f"{path} does not exist: this run has saved no final weights yet{hint}") from None
    except SafetensorError as error:
        raise UserError(f"{path} is torn or not a safetensors file: {one_line(error)}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from None

    if "config" not in metadata or "tokenizer" not in metadata:
        raise UserError(f"{path} was not written by Bireme: its metadata lacks 'config' or 'tokenizer'")
    try:
        fields: dict[str, Any] = json.loads(metadata["config"])
        config = ModelConfig(**fields)
    except (ValueError, TypeError, UserError) as error:
        raise UserError(f"{path} describes no model in its metadata 'config': {one_line(error)}") from None

    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device="cpu")
    model.reset_buffers()
    if config.tied_embedding and "token_embedding.weight" in weights:
        weights["output.weight"] = weights["token_embedding.weight"]
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(f"{path} holds other weights than its 'config' describes: {one_line(error)}") from None
    return model, metadata["tokenizer"]


def _has_checkpoints(run_directory: Path) -> bool:
    return bool(candidates(run_directory / CHECKPOINTS))


@torch.inference_mode()
def generate(
    model: GPT,
    tokens: Tensor,
    num_tokens: int,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator,
) -> Tensor:
    """`tokens` (length, int64, at least one) followed by `num_tokens` sampled ones, each from the last context.

    Logits are divided by `temperature` (0: always the likeliest token); only the `top_k` likeliest are drawn from.
    Raises UserError for arguments out of range.
    """
    if tokens.numel() == 0:
        raise UserError("the prompt is empty: sampling needs at least one token to continue")
    if num_tokens < 0:
        raise UserError(f"the number of tokens is {num_tokens}: it must be at least 0")
    if not 0 <= temperature < float("inf"):
        raise UserError(f"temperature is {temperature}: it must be 0 (always the likeliest token) or more")
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k is {top_k}: it must be at least 1")

    length = tokens.numel()
    result = torch.cat((tokens, tokens.new_empty(num_tokens)))
    for end in range(length, length + num_tokens):
        context = result[max(0, end - model.config.sequence_length) : end]
        logits = model(context[None])[0, -1].float()
        if temperature == 0:
            result[end] = logits.argmax()
            continue
        if top_k is not None and top_k < logits.numel():
            logits, candidates = logits.topk(top_k)
        else:
            candidates = torch.arange(logits.numel(), device=logits.device)
        # Less the largest, so that a tiny temperature overflows to -inf (never drawn) instead of to NaN.
        probabilities = ((logits - logits.max()) / temperature).softmax(-1)
        result[end] = candidates[torch.multinomial(probabilities, 1, generator=generator)[0]]
    return result


def sample_run(
    run_directory: Path, prompt: str, num_tokens: int, temperature: float, top_k: int | None, seed: int
) -> str:
    """The prompt and `num_tokens` further tokens from the weights in `run_directory`; what is not UTF-8 shows as �.

    Raises UserError as `load_weights` and `generate` do, for a prompt that the model's vocabulary does not cover, and
    when the tokenizer of the run is missing, is another, or needs a library that is not installed.
    """
    path = run_directory / WEIGHTS_FILE
    model, description = _load(path)
    try:
        tokenizer = tokenizer_of(description, run_directory)
    except UserError as error:
        raise UserError(f"{path} cannot be sampled: {error}") from None
    if description != BYTES:  # which takes the bytes of a command line that are not UTF-8 as they are
        prompt = prompt.encode("utf-8", errors="surrogateescape").decode("utf-8", errors="replace")
    tokens = torch.from_numpy(tokenizer.encode_batch([prompt])[0].astype("int64"))
    if tokens.numel() and int(tokens.max()) >= model.config.vocab_size:
        raise UserError(
            f"the prompt has a {'byte' if description == BYTES else 'token'} {int(tokens.max())}: the model knows "
            f"{model.config.vocab_size} tokens"
        )
    generated = generate(model, tokens, num_tokens, temperature, top_k, torch.Generator().manual_seed(seed))
    return tokenizer.decode(generated.tolist())
