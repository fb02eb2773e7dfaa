"""One token file: what is in it, writing it in one piece or not at all, and reading it by position."""

import json
import os
import secrets
import struct
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from bireme.errors import UserError

SUFFIX = ".tokens"
VERSION = 2

_MAGIC = b"BIREMETK"
_PREFIX = struct.Struct("<8sI")  # magic, length of the JSON header
_ALIGNMENT = 64  # tokens start at a multiple of it
_DTYPES = {"uint16": "<u2", "uint32": "<u4"}
_CHUNK_BYTES = 1 << 22  # read at a time to check a file


@dataclass(frozen=True, slots=True)
class Shard:
    """Tokens in one file. Opening it again checks that the file still has its size."""

    path: Path
    offset: int  # bytes before the first token
    count: int  # tokens
    dtype: str  # of numpy
    sha256: str | None  # of the tokens; None: the format has none

    @property
    def size_bytes(self) -> int:
        """Of the whole file."""
        return self.offset + self.count * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Facts:
    """What the header of a shard says about its tokens, besides how they are stored."""

    tokenizer: str
    vocab_size: int
    source: str  # what it was prepared from, for people
    documents: int = 0
    part: str = ""  # which part of the source, prepared how: a shard with the same one need not be made again
    counts: dict[str, int] = field(default_factory=dict)  # what was skipped or replaced, by reason


def dtype_for(vocab_size: int) -> str:
    """The smallest type of token that holds the vocabulary."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def reason(error: BaseException) -> str:
    """What an error says, on one line."""
    return " ".join(str(getattr(error, "strerror", None) or error or type(error).__name__).split())[:300]


# --- writing -----------------------------------------------------------------------------------------------------


class ShardWriter:
    """Writes a shard: `append` tokens, then `finish`. Left without `finish`, nothing stays. Raises OSError."""

    def __init__(self, target: Path, vocab_size: int):
        self._target = target
        # Not by tempfile, whose files are closed to the others who share a folder.
        self._temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
        self._stored_as = dtype_for(vocab_size)
        self.dtype = np.dtype(_DTYPES[self._stored_as])
        self._digest = sha256()
        self.count = 0
        self._tokens_start = 4096  # the header is written at the end: it must fit here
        self._file = self._temporary.open("xb")
        self._file.write(bytes(self._tokens_start))

    def append(self, tokens: NDArray[Any]) -> None:
        stored = np.ascontiguousarray(tokens, self.dtype).data
        self._digest.update(stored)
        self._file.write(stored)
        self.count += len(tokens)

    def finish(self, facts: Facts) -> str:
        """Gives the file its header and its name. Returns the checksum of the tokens."""
        checksum = self._digest.hexdigest()
        stored = {
            "version": VERSION,
            "dtype": self._stored_as,
            "count": self.count,
            "sha256": checksum,
            **asdict(facts),
        }
        text = json.dumps(stored).encode()
        room = self._tokens_start - _PREFIX.size
        if len(text) > room:  # a path of thousands of characters: it is for people only
            text = json.dumps({**stored, "source": facts.source[:250] + "..."}).encode()
        self._file.seek(0)
        self._file.write(_PREFIX.pack(_MAGIC, room) + text.ljust(room))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._temporary.replace(self._target)
        return checksum

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._file.close()
        finally:
            self._temporary.unlink(missing_ok=True)


# --- reading -----------------------------------------------------------------------------------------------------


def is_shard(path: Path) -> bool:
    """Whether a regular file begins as a shard does."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def read_header(path: Path) -> tuple[Shard, Facts]:
    """The shard at `path`. UserError when it is missing, foreign, torn or of another version.

    Cheap: the header is held against the size of the file, the tokens are not read.
    """
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise UserError(f"{str(path)!r} is not a file; remove it")
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(_PREFIX.size)
            if len(prefix) < _PREFIX.size or not prefix.startswith(_MAGIC):
                raise UserError(f"{str(path)!r} is not a token file; a cached one can be deleted and is made again")
            start = _PREFIX.size + _PREFIX.unpack(prefix)[1]
            if start > size:
                raise UserError(f"token file {str(path)!r} is torn: it ends inside its header; delete it")
            header = file.read(start - _PREFIX.size)
    except OSError as error:
        raise UserError(f"cannot read token file {str(path)!r}: {reason(error)}") from error
    shard, facts = _parse_header(path, start, header)
    if start % _ALIGNMENT or shard.size_bytes != size:
        raise UserError(f"token file {str(path)!r} is torn: {shard.count} tokens do not make {size} bytes; delete it")
    return shard, facts


def _parse_header(path: Path, start: int, text: bytes) -> tuple[Shard, Facts]:
    try:
        header: dict[str, Any] = json.loads(text)
        version = header["version"]
        if version != VERSION:
            raise UserError(f"token file {str(path)!r} has version {version!r}, only {VERSION} is known; make it again")
        dtype, count, checksum = header["dtype"], header["count"], header["sha256"]
        facts = Facts(**{name: header[name] for name in Facts.__slots__})
        flawed = dtype not in _DTYPES or not _is_size(count) or not isinstance(checksum, str)
        flawed |= not all(isinstance(each, str) for each in (facts.tokenizer, facts.source, facts.part))
        flawed |= not _is_size(facts.vocab_size) or facts.vocab_size < 1 or not _is_size(facts.documents)
        flawed |= not all(_is_size(each) for each in facts.counts.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        flawed = True
    if flawed:
        raise UserError(f"token file {str(path)!r} is torn: its header makes no sense; delete it")
    return Shard(path, start, count, _DTYPES[dtype], checksum), facts


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


class OpenShard:
    """An open shard. Read by position and not mapped: a file that is cut short is an error and not a SIGBUS, reading
    lets other threads run, and it may be used from several of them. Closed when nobody holds it."""

    def __init__(self, shard: Shard):
        self._descriptor = -1
        self._shard = shard
        try:
            self._descriptor = os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC)
            size = os.fstat(self._descriptor).st_size
        except OSError as error:
            raise UserError(f"cannot read token file {str(shard.path)!r}: {reason(error)}") from error
        if size != shard.size_bytes:
            raise self._changed(f"it has {size} bytes instead of {shard.size_bytes}")

    def read_into(self, buffer: memoryview, first: int) -> None:
        """Fills `buffer` (bytes) with the tokens from position `first` on."""
        position = self._shard.offset + first * np.dtype(self._shard.dtype).itemsize
        while buffer:
            try:
                done = os.preadv(self._descriptor, [buffer], position)
            except OSError as error:
                raise UserError(f"cannot read token file {str(self._shard.path)!r}: {reason(error)}") from error
            if done == 0:
                raise self._changed("it ends early")
            buffer, position = buffer[done:], position + done

    def checksum(self) -> str:
        """SHA-256 of the tokens, all of which are read."""
        digest = sha256()
        width = np.dtype(self._shard.dtype).itemsize
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        for first in range(0, self._shard.count, _CHUNK_BYTES // width):
            part = buffer[: (self._shard.count - first) * width]
            self.read_into(part, first)
            digest.update(part)
        return digest.hexdigest()

    def _changed(self, how: str) -> UserError:
        return UserError(
            f"token file {str(self._shard.path)!r} was truncated or replaced while training: {how}; prepare it again"
        )

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
