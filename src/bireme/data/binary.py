"""Token files of other projects: nanoGPT's and llm.c's .bin files."""

import os
import re
import struct
from hashlib import blake2b
from pathlib import Path

import numpy as np

from bireme.data.shards import Shard, reason
from bireme.errors import UserError

SUFFIX = ".bin"

_HEADER_BYTES = 256 * 4
_HEADER = struct.Struct("<iii")  # magic, version, count
_LLM_C = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # by magic: version and type of token; GPT-2's, Llama 3's
_LLM_C_TASKS = 20240522  # multiple-choice questions, not text
_EVALUATION = re.compile(r"(^|[^a-z])(val|valid|validation)([^a-z]|$)", re.IGNORECASE)
_TRAINING = re.compile(r"(^|[^a-z])train(ing)?([^a-z]|$)", re.IGNORECASE)
_SAMPLED_BLOCKS, _BLOCK_BYTES = 64, 4096


def read_binary(path: Path) -> Shard:
    """The shard in a .bin file: llm.c's with its header, or nanoGPT's, which is nothing but uint16 tokens."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(_HEADER.size)
    except OSError as error:
        raise UserError(f"cannot read token file {str(path)!r}: {reason(error)}") from error
    magic, version, count = _HEADER.unpack(start) if len(start) == _HEADER.size else (0, 0, 0)
    if magic == _LLM_C_TASKS:
        raise UserError(f"{str(path)!r} holds llm.c's multiple-choice questions, not text to train on")
    if magic in _LLM_C:
        known_version, dtype = _LLM_C[magic]
        shard = Shard(path, _HEADER_BYTES, max(count, 0), dtype, None)
        if version != known_version:
            raise UserError(
                f"{str(path)!r} is a .bin file of llm.c of version {version}, only {known_version} is known"
            )
        if shard.size_bytes != size:
            raise UserError(f"token file {str(path)!r} is torn: {count} tokens do not make {size} bytes; make it again")
        return shard
    if size % 2 or not size:
        raise UserError(f"{str(path)!r} is no .bin file of nanoGPT or llm.c: it has {size} bytes, not whole tokens")
    return Shard(path, 0, size // 2, "<u2", None)


def binary_files(folder: Path) -> list[Path]:
    """The .bin files of a folder, sorted; not of folders below it."""
    return sorted(each for each in folder.iterdir() if each.suffix == SUFFIX and not each.name.startswith("."))


def is_binary_folder(folder: Path) -> bool:
    """Whether a folder holds token files rather than text beside which something is called .bin."""
    try:
        files = binary_files(folder)
        if any(_EVALUATION.search(each.stem) or _TRAINING.search(each.stem) for each in files):
            return True
        return bool(files) and len(files) == sum(not each.name.startswith(".") for each in folder.iterdir())
    except OSError:
        return False


def read_binary_folder(folder: Path) -> tuple[list[Shard], list[Shard]]:
    """The shards to train on, and those to evaluate on: files named "val", as train.bin and val.bin."""
    try:
        shards = [read_binary(path) for path in binary_files(folder)]
    except OSError as error:
        raise UserError(f"cannot read the folder {str(folder)!r}: {reason(error)}") from error
    evaluation = [each for each in shards if _EVALUATION.search(each.path.stem)]
    training = [each for each in shards if each not in evaluation]
    if shards and not training:
        raise UserError(
            f"the folder {str(folder)!r} holds nothing but .bin files for validation; give one for training"
        )
    if len({each.dtype for each in shards}) > 1:
        raise UserError(f"the .bin files in {str(folder)!r} hold tokens of different size; put each kind in a folder")
    return training, evaluation


def sampled_fingerprint(shards: list[Shard]) -> str:
    """A hash of the sizes and of blocks spread over each file, first and last among them: these formats hold no
    checksum, and reading all would take minutes. An edit between the blocks is not seen; another name changes nothing.
    """
    digest = blake2b(digest_size=32)
    for shard in shards:
        digest.update(b"%d %d %b\0" % (shard.size_bytes, shard.count, shard.dtype.encode()))
        last = max(0, shard.size_bytes - _BLOCK_BYTES)
        try:
            with shard.path.open("rb") as file:
                for position in np.unique(np.linspace(0, last, _SAMPLED_BLOCKS).astype(np.int64)).tolist():
                    file.seek(position)
                    digest.update(file.read(_BLOCK_BYTES))
        except OSError as error:
            raise UserError(f"cannot read token file {str(shard.path)!r}: {reason(error)}") from error
    return digest.hexdigest()
