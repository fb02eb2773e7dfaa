"""Token sets made for a test, and the one line that a user's mistake gives."""

import base64
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from bireme.data.shards import Facts, ShardWriter
from bireme.data.tokens import FORMAT, MANIFEST, TokenSet, open_tokens
from bireme.errors import UserError
from bireme.record import write_json_atomic


def failure(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_shard(path: Path, tokens: Sequence[int] | np.ndarray, vocab_size: int = 256) -> Path:
    with ShardWriter(path, vocab_size) as writer:
        writer.append(np.asarray(tokens))
        writer.finish(Facts("bytes", vocab_size, "made", documents=1))
    return path


def write_folder(folder: Path, parts: Sequence[Sequence[int] | np.ndarray], vocab_size: int = 256) -> Path:
    """A prepared folder with these shards."""
    folder.mkdir()
    shards = []
    for index, tokens in enumerate(parts):
        path = write_shard(folder / f"shard-{index:05}.tokens", tokens, vocab_size)
        checksum = open_tokens(path).fingerprint if len(tokens) else "0" * 64
        shards.append({"file": path.name, "count": len(tokens), "bytes": path.stat().st_size, "sha256": checksum})
    names = {"format": FORMAT, "version": 1, "tokenizer": "bytes", "source": "made", "preparation": "made"}
    write_json_atomic(folder / MANIFEST, {**names, "vocab_size": vocab_size, "shards": shards})
    return folder


def made_of(folder: Path, count: int) -> TokenSet:
    """One shard; no two neighbouring tokens are alike."""
    path = folder / f"made-{count}.tokens"
    return open_tokens(path if path.exists() else write_shard(path, np.arange(count) * 7 % 251))


def make_tokenizer_json(path: Path) -> Path:
    """A small byte-pair tokenizer of the Hugging Face library; the test is skipped where that is not installed."""
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(json.__file__).with_name("encoder.py").read_text()], trainer)
    path.write_text(tokenizer.to_str())
    return path


def make_tiktoken(path: Path, merges: int = 1000) -> Path:
    """A small tiktoken file: all bytes, and pairs of them that are common in code."""
    pytest.importorskip("tiktoken")
    common = b" \nertinasolf()_"
    pairs = [bytes([first, second]) for first in common for second in common]
    tokens = [bytes([each]) for each in range(256)] + [*pairs, *(pair + b" " for pair in pairs)][:merges]
    unique = list(dict.fromkeys(tokens))
    path.write_bytes(b"".join(b"%b %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(unique)))
    return path
