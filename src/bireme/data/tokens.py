"""A token set: the tokens of one or many files as one stream, read by position."""

import json
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from bireme.data.binary import SUFFIX as BINARY_SUFFIX
from bireme.data.binary import is_binary_folder, read_binary, read_binary_folder, sampled_fingerprint
from bireme.data.order import Ids
from bireme.data.shards import SUFFIX, OpenShard, Shard, dtype_for, is_shard, read_header, reason
from bireme.errors import UserError

MANIFEST = "dataset.json"  # of a prepared folder; written last
FORMAT = "bireme-tokens"
LOCK = ".bireme-prepare.lock"  # in a folder that a preparation was begun in
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.tiktoken")
UNKNOWN = "unknown"  # the tokenizer of a file that does not say

_OPEN_FILES = 64


class TokenSet:
    """Tokens on disk. Two with the same fingerprint hold the same tokens: ranks compare it before they train.

    Can be pickled: it opens its files again where it arrives.
    """

    path: Path
    count: int  # tokens to train on and to evaluate on
    evaluation_count: int  # the last of them, where the set has a part for evaluation; else 0
    vocab_size: int | None  # None: the files do not say
    tokenizer: str  # "bytes", "tokenizers:...", "tiktoken:..." or "unknown"
    tokenizer_file: Path | None
    fingerprint: str
    source: str  # what it was prepared from, for people
    size_bytes: int  # of the files
    shards: tuple[Shard, ...]

    def __init__(
        self,
        path: Path,
        shards: tuple[Shard, ...],
        fingerprint: str,
        source: str,
        *,
        tokenizer: str = UNKNOWN,
        vocab_size: int | None = None,
        tokenizer_file: Path | None = None,
        evaluation_count: int = 0,
    ):
        self.path = path
        self.shards = shards
        self.fingerprint = fingerprint
        self.source = source
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.tokenizer_file = tokenizer_file
        self.evaluation_count = evaluation_count
        self._ends = np.cumsum([shard.count for shard in shards], dtype=np.int64)  # of each shard, in the whole stream
        self.count = int(self._ends[-1]) if shards else 0
        self.size_bytes = sum(shard.size_bytes for shard in shards)
        self._open = lru_cache(_OPEN_FILES)(OpenShard)  # thousands of shards need no thousands of descriptors
        if self.count == 0:
            raise UserError(f"{str(path)!r} holds no tokens; prepare it again")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_open"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open = lru_cache(_OPEN_FILES)(OpenShard)

    def read(self, starts: Ids, length: int) -> Ids:
        """Tokens (len(starts), length) from each global position of `starts` on, across the borders of shards.

        IndexError outside the stream; UserError, naming the shard, when a file is shorter than when it was opened.
        """
        if len(starts) and (starts.min() < 0 or starts.max() + length > self.count):
            raise IndexError(f"a position is outside [0, {self.count})")
        width = np.dtype(self.shards[0].dtype).itemsize
        rows = np.empty((len(starts), length), self.shards[0].dtype)
        where = np.searchsorted(self._ends, starts, side="right")
        for row, start, index in zip(rows.view(np.uint8), starts.tolist(), where.tolist(), strict=True):
            missing = row.data
            while missing:
                shard, end = self.shards[index], int(self._ends[index])
                piece = missing[: (end - start) * width]
                if piece:
                    self._open(shard).read_into(piece, start - (end - shard.count))
                missing, start, index = missing[len(piece) :], end, index + 1
        return rows.astype(np.int64)

    def place(self, position: int) -> str:
        """Where a global position is, for people."""
        index = int(np.searchsorted(self._ends, position, side="right"))
        shard = self.shards[index]
        return f"token {position - int(self._ends[index]) + shard.count} of {str(shard.path)!r}"

    def bad_shards(self) -> list[str]:
        """What is wrong with each shard whose tokens are not those that were written; all are read."""
        flaws = []
        for shard in self.shards:
            try:
                checksum = OpenShard(shard).checksum()
                if shard.sha256 not in (None, checksum):
                    flaws.append(f"token file {str(shard.path)!r} has a wrong checksum")
            except UserError as error:
                flaws.append(str(error))
        return flaws


def is_token_set(path: Path) -> bool:
    """Whether `open_tokens` is meant, rather than text to prepare. An unfinished preparation is meant too."""
    if path.is_dir():
        return (path / LOCK).exists() or _is_manifest(path / MANIFEST) or is_binary_folder(path)
    return path.is_file() and (path.suffix == BINARY_SUFFIX or is_shard(path))


def open_tokens(path: Path) -> TokenSet:
    """The tokens at `path`: a prepared folder, one shard, a .bin file of nanoGPT or llm.c, or a folder of those.

    UserError when there are none, or when they are unfinished, torn or of another version. Cheap: headers and sizes
    are read, not the tokens (`verify_tokens` reads them).
    """
    if path.is_dir():
        return _open_folder(path)
    if path.suffix == BINARY_SUFFIX and not is_shard(path):
        shard = read_binary(path)
        return TokenSet(path, (shard,), sampled_fingerprint([shard]), str(path))
    shard, facts = read_header(path)
    return TokenSet(
        *(path, (shard,), shard.sha256 or "", facts.source),
        tokenizer=facts.tokenizer,
        vocab_size=facts.vocab_size,
        tokenizer_file=_tokenizer_file(path.parent, facts.tokenizer),
    )


def verify_tokens(tokens: TokenSet) -> None:
    """Reads everything. UserError naming the first shard whose checksum is wrong; .bin files hold none."""
    for flaw in tokens.bad_shards():
        raise UserError(f"{flaw}; delete it and start the same `bireme data prepare` again")


def _open_folder(folder: Path) -> TokenSet:
    if (folder / MANIFEST).exists():
        return _open_prepared(folder)
    if (folder / LOCK).exists() or next(folder.glob(f"*{SUFFIX}"), None):
        raise UserError(
            f"the preparation of {str(folder)!r} is not finished: start the same `bireme data prepare` again"
        )
    training, evaluation = read_binary_folder(folder)
    if not training:
        raise UserError(f"there are no tokens in {str(folder)!r}: neither {MANIFEST} nor .bin files")
    return TokenSet(
        folder,
        (*training, *evaluation),
        # Which tokens are for evaluation is part of what the set is.
        sampled_fingerprint(training) if not evaluation else _joined(map(sampled_fingerprint, (training, evaluation))),
        str(folder),
        evaluation_count=sum(shard.count for shard in evaluation),
    )


def _joined(parts: Any) -> str:
    return sha256("\n".join(parts).encode()).hexdigest()


def fingerprint(tokenizer: str, shards: tuple[Shard, ...]) -> str:
    """Of a prepared folder."""
    return _joined([tokenizer, *(f"{shard.count} {shard.sha256}" for shard in shards)])


def _is_manifest(path: Path) -> bool:
    try:
        manifest = json.loads(path.read_bytes())
        return isinstance(manifest, dict) and manifest.get("format") == FORMAT
    except (OSError, ValueError, RecursionError):
        return False


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a prepared folder, its types checked. UserError when it makes no sense."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        flawed = manifest["format"] != FORMAT or type(manifest["vocab_size"]) is not int
        flawed |= not all(isinstance(manifest[name], str) for name in ("tokenizer", "source", "preparation"))
        for shard in manifest["shards"]:
            name, count, checksum = shard["file"], shard["count"], shard["sha256"]
            flawed |= not isinstance(name, str) or Path(name).name != name or not isinstance(checksum, str)
            flawed |= type(count) is not int or not 0 <= count < 1 << 53 or type(shard["bytes"]) is not int
        names = [shard["file"] for shard in manifest["shards"]]
        flawed |= len(set(names)) < len(names) or not 1 <= manifest["vocab_size"] <= 1 << 32
        version = manifest["version"]
    except OSError as error:
        raise UserError(f"cannot read {str(path)!r}: {reason(error)}") from error
    except (ValueError, KeyError, TypeError, RecursionError):
        flawed, version = True, 1
    if flawed:
        raise UserError(f"{str(path)!r} is not the list of a prepared folder: it makes no sense; prepare it again")
    if version != 1:
        raise UserError(f"{str(path)!r} has version {version!r}, only 1 is known; prepare it again")
    return dict(manifest)


def _open_prepared(folder: Path) -> TokenSet:
    manifest = read_manifest(folder)
    dtype = "<u2" if dtype_for(manifest["vocab_size"]) == "uint16" else "<u4"
    width = np.dtype(dtype).itemsize
    shards = tuple(
        Shard(folder / each["file"], each["bytes"] - each["count"] * width, each["count"], dtype, each["sha256"])
        for each in manifest["shards"]
    )
    for shard in shards:
        try:
            size = shard.path.stat().st_size
        except OSError as error:
            raise UserError(f"cannot read token file {str(shard.path)!r}: {reason(error)}; prepare it again") from error
        if size != shard.size_bytes or shard.offset < 0:
            raise UserError(
                f"token file {str(shard.path)!r} is torn: it has {size} bytes instead of {shard.size_bytes}; delete it "
                "and start the same `bireme data prepare` again"
            )
    return TokenSet(
        *(folder, shards, fingerprint(manifest["tokenizer"], shards), manifest["source"]),
        tokenizer=manifest["tokenizer"],
        vocab_size=manifest["vocab_size"],
        tokenizer_file=_tokenizer_file(folder, manifest["tokenizer"]),
    )


def _tokenizer_file(folder: Path, tokenizer: str) -> Path | None:
    kind = tokenizer.split(":")[0]
    name = {"tokenizers": TOKENIZER_FILES[0], "tiktoken": TOKENIZER_FILES[1]}.get(kind)
    return folder / name if name and (folder / name).is_file() else None
