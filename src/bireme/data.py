"""Text to batches: a cached file of byte tokens, a shuffled order without end, and each rank's share of it.

Everything is a function of (corpus, seed, samples consumed). The number of ranks only decides who computes what:
worlds of any size that take the same global batches see the same samples in the same order.
"""

import codecs
import contextlib
import json
import logging
import os
import platform
import re
import secrets
import stat
import struct
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bireme.errors import UserError, nearest

STDLIB = "stdlib"
VOCABULARY = 256  # byte tokens

_MAGIC = b"BIREMETK"
_PREFIX = struct.Struct("<8sI")  # magic, length of the JSON header
_FORMAT = {"version": 1, "dtype": "uint16", "tokenizer": "bytes", "vocab_size": VOCABULARY}
_ALIGNMENT = 64  # tokens start at a multiple of it
_CHUNK = 1 << 22  # bytes of text looked at at a time

# Not part of the "stdlib" corpus: what is not the library, or differs between two builds of the same Python.
_NOT_STDLIB_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_NOT_STDLIB = re.compile(r"config-|_sysconfigdata|(site|user)customize\.py")

_ROUNDS = 6  # of the Feistel network

_logger = logging.getLogger(__name__)

Ids = NDArray[np.int64]


# --- the token file ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenFile:
    """An open token file. Two with the same fingerprint hold the same tokens: ranks compare it before they train."""

    path: Path
    tokens: NDArray[np.uint16]  # (count,), memory-mapped, read-only; documents are separated by token 0
    vocab_size: int
    fingerprint: str  # SHA-256 of the tokens, computed when the file was prepared
    source: str  # what it was prepared from, for people


def open_tokens(path: Path) -> TokenFile:
    """The token file at `path`, memory-mapped. UserError when it is missing, foreign, torn or of another version.

    Cheap: the header is held against the size of the file, the tokens are not read.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(_PREFIX.size)
            if len(prefix) < _PREFIX.size or not prefix.startswith(_MAGIC):
                raise UserError(f"{str(path)!r} is not a token file; a cached one can be deleted and is made again")
            start = _PREFIX.size + _PREFIX.unpack(prefix)[1]
            if start > size:
                raise UserError(f"token file {str(path)!r} is torn: it ends inside its header; delete it")
            header = _parse_header(path, file.read(start - _PREFIX.size))
            count = header["count"]
            if start % _ALIGNMENT or start + 2 * count != size:
                raise UserError(f"token file {str(path)!r} is torn: {count} tokens do not make {size} bytes; delete it")
            # Mapped through the same open file: another rank may replace what the path names in between.
            tokens = np.memmap(file, dtype="<u2", mode="r", offset=start, shape=(count,))
    except OSError as error:
        raise UserError(f"cannot read token file {str(path)!r}: {_reason(error)}") from error
    # As a plain array: indexing the subclass np.memmap costs more.
    return TokenFile(path, np.asarray(tokens), VOCABULARY, header["sha256"], header["source"])


def _parse_header(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header: dict[str, Any] = json.loads(text)
        flawed = type(header["count"]) is not int or header["count"] < 1
        flawed |= not isinstance(header["sha256"], str) or not isinstance(header["source"], str)
        found = {key: header[key] for key in _FORMAT}
    except (ValueError, KeyError, TypeError):
        flawed = True
    if flawed:
        raise UserError(f"token file {str(path)!r} is torn: its header makes no sense; delete it")
    for key, expected in _FORMAT.items():
        if found[key] != expected:
            raise UserError(f"token file {str(path)!r} has {key} {found[key]!r}, only {expected!r} is known; delete it")
    return header


def _header(source: str, count: int, digest: str) -> bytes:
    """Everything before the tokens. Its length depends on `source` alone, so that it can be filled in at the end."""
    fields = json.dumps({**_FORMAT, "count": count, "sha256": digest, "source": source}).encode()
    least = _PREFIX.size + len(json.dumps(source)) + 256  # the other fields take less than 256 bytes
    return _PREFIX.pack(_MAGIC, _aligned(least) - _PREFIX.size) + fields.ljust(_aligned(least) - _PREFIX.size)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


# --- preparing it ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Text:
    """The files that make up a corpus, as they were found."""

    name: str  # of the cached file
    source: str  # for people
    files: dict[str, tuple[Path, os.stat_result]] = field(default_factory=dict)  # by sorted relative path
    named: bool = False  # the user named this one file: when it cannot be used, that is an error
    skipped: Counter[str] = field(default_factory=Counter)  # by reason

    def fingerprint(self) -> str:
        """Changes when the files do. They are not read."""
        digest = blake2b(json.dumps([self.source, _FORMAT]).encode(), digest_size=16)
        for relative, (_, status) in self.files.items():
            digest.update(b"\0%b\0%d %d" % (os.fsencode(relative), status.st_size, status.st_mtime_ns))
        return digest.hexdigest()

    def documents(self) -> Iterator[bytes]:
        """The files that are text, without the empty ones. Those that are not text are counted in `skipped`."""
        for path, _ in self.files.values():
            try:
                document = path.read_bytes()
                flaw = _flaw(document)
            except OSError as error:
                document, flaw = b"", "unreadable"
                if self.named:
                    raise UserError(f"cannot read {str(path)!r}: {_reason(error)}") from error
            if flaw and self.named:
                raise UserError(
                    f"{str(path)!r} is {flaw}; the corpus must be text in UTF-8: convert it or give another"
                )
            if flaw:
                self.skipped[flaw] += 1
            elif document:
                yield document

    def skips(self) -> str:
        """For example ``" (skipped: 2 binary, 1 hidden)"``, or an empty string."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.skipped.items()) if count)
        return f" (skipped: {reasons})" if reasons else ""


def prepare(name_or_path: str) -> Path:
    """The cached token file of a corpus: ``"stdlib"``, a text file, or a folder of text files.

    It is written when it is missing or damaged, or when a file of the corpus changed (path, size or time). Any number
    of processes may prepare the same corpus at once. UserError when there is no text or the cache cannot be written.
    """
    began = time.monotonic()
    cache = _cache_folder()
    text = _find(name_or_path, cache)
    target = cache / f"{text.name}-{text.fingerprint()}.tokens"
    if os.path.lexists(target):
        try:
            open_tokens(target)
            return target
        except UserError as error:
            _logger.warning("the cached corpus is prepared afresh: %s", error)
    documents, count = _write(target, text)
    _logger.info(
        "prepared %s: %d documents, %d tokens in %.1f s%s, as %s",
        *(text.source, documents, count, time.monotonic() - began, text.skips(), target),
    )
    return target


def _write(target: Path, text: _Text) -> tuple[int, int]:
    """Writes the token file, in one piece or not at all. Returns how many documents and how many tokens it holds."""
    # Not by tempfile, whose files are closed to the others who share a cache.
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    digest = sha256()
    documents = count = 0
    try:
        with temporary.open("xb") as file:
            file.write(bytes(len(_header(text.source, 0, ""))))
            for document in text.documents():
                for piece in ([b"\0"] if documents else []) + list(_pieces(document)):
                    tokens = np.frombuffer(piece, np.uint8).astype("<u2").data
                    digest.update(tokens)
                    file.write(tokens)
                    count += len(piece)
                documents += 1
            if count == 0:
                raise UserError(
                    f"there is no text in {text.source!r}{text.skips()}; give a text file or a folder of them"
                )
            file.seek(0)
            file.write(_header(text.source, count, digest.hexdigest()))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as error:
        raise _cache_error(target.parent, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return documents, count


def _pieces(document: bytes) -> Iterator[memoryview]:
    view = memoryview(document)
    return (view[start : start + _CHUNK] for start in range(0, len(view), _CHUNK))


def _flaw(document: bytes) -> str | None:
    """Why a document is not text, or None."""
    if b"\0" in document:
        return "binary"
    decoder = codecs.getincrementaldecoder("utf-8")()  # piecewise: a decoded string takes up to four times the memory
    try:
        for piece in _pieces(document):
            decoder.decode(piece)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return "not UTF-8"
    return None


def _cache_folder() -> Path:
    """$BIREME_CACHE, or $XDG_CACHE_HOME/bireme, or ~/.cache/bireme; made when it does not exist."""
    chosen, shared = os.environ.get("BIREME_CACHE"), os.environ.get("XDG_CACHE_HOME")
    folder = Path(chosen or (Path(shared or "~/.cache") / "bireme"))
    try:
        folder = Path(os.path.realpath(folder.expanduser()))
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        raise _cache_error(folder, error) from error
    return folder


def _cache_error(folder: Path, error: Exception) -> UserError:
    return UserError(f"cannot write to the cache folder {str(folder)!r}: {_reason(error)}; set BIREME_CACHE to another")


def _find(name_or_path: str, cache: Path) -> _Text:
    """The files of a corpus, in order. They are not read yet."""
    if name_or_path == STDLIB:
        text = _Text(STDLIB, f"the standard library of Python {platform.python_version()}")
        _walk(text, Path(sysconfig.get_path("stdlib")), cache, _in_stdlib)
        text.skipped.clear()  # not wanted, rather than skipped
        if not text.files:
            raise UserError(f"no sources of {text.source} are installed; give a text file or a folder as the corpus")
        return text
    try:
        status = os.stat(name_or_path)  # noqa: PTH116 (Path("") is the current folder, which was not meant)
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot read the corpus {name_or_path!r}: {_reason(error)}{nearest(name_or_path, [STDLIB])}; "
            f'give "{STDLIB}", a text file or a folder'
        ) from error
    path = Path(os.path.realpath(name_or_path))
    text = _Text(re.sub(r"[^A-Za-z0-9._-]", "_", path.name)[:40].lstrip(".") or "corpus", str(path))
    if stat.S_ISDIR(status.st_mode):
        _walk(text, path, cache, _not_hidden)
    elif stat.S_ISREG(status.st_mode):
        text.files[path.name] = (path, status)
        text.named = True
    else:  # a pipe would be read without end
        raise UserError(f"the corpus {name_or_path!r} is neither a file nor a folder; save the text to a file first")
    return text


def _walk(text: _Text, root: Path, cache: Path, wanted: Callable[[str, bool], bool]) -> None:
    """Finds the wanted regular files under `root`. `wanted(name, whether it is a folder)`.

    Links to files are followed; links to folders are not, they could lead round in circles or anywhere.
    """

    def unreadable(error: OSError) -> None:
        if error.filename == str(root):
            raise UserError(f"cannot read the folder {str(root)!r}: {_reason(error)}") from error
        text.skipped["unreadable"] += 1

    found: dict[str, tuple[Path, os.stat_result]] = {}
    for folder, folders, names in os.walk(root, onerror=unreadable):
        here = Path(folder)
        for name in names:
            path = here / name
            if not wanted(name, False):
                text.skipped["hidden"] += 1
                continue
            try:
                status = path.stat()
            except OSError:  # a dangling link, or removed in this moment
                text.skipped["unreadable"] += 1
                continue
            if stat.S_ISREG(status.st_mode):
                found[path.relative_to(root).as_posix()] = (path, status)
            else:
                text.skipped["not a file"] += 1
        shown = [name for name in folders if wanted(name, True)]
        text.skipped["hidden"] += len(folders) - len(shown)
        text.skipped["linked folder"] += sum((here / name).is_symlink() for name in shown)
        folders[:] = [name for name in shown if here / name != cache]  # os.walk descends into these
    text.files = dict(sorted(found.items()))


def _not_hidden(name: str, folder: bool) -> bool:
    return not name.startswith(".")


def _in_stdlib(name: str, folder: bool) -> bool:
    if _NOT_STDLIB.match(name):
        return False
    return name not in _NOT_STDLIB_FOLDERS if folder else name.endswith(".py")


# --- the order ---------------------------------------------------------------------------------------------------


class Permutation:
    """A pseudo-random permutation of [0, n), a function of (n, seed, epoch) that takes no memory.

    A Feistel network permutes [0, 2^bits); what falls outside [0, n), less than half, walks on until it is inside.
    """

    def __init__(self, n: int, seed: int, epoch: int):
        bits = max(2, (n - 1).bit_length())
        self._n = np.uint64(n)
        self._left = np.uint64(bits // 2)  # the two parts of a number, in bits
        self._right = np.uint64(bits - bits // 2)
        key = blake2b(f"{seed}|{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = np.frombuffer(key, "<u8")

    def __call__(self, positions: Ids) -> Ids:
        """Where each position goes; same shape, at least one-dimensional. ValueError outside [0, n)."""
        values = positions.astype(np.uint64)  # negative ones become huge
        if (values >= self._n).any():
            raise ValueError(f"a position is outside [0, {self._n})")
        values = self._shuffle(values)
        while (outside := values >= self._n).any():
            values[outside] = self._shuffle(values[outside])
        return values.astype(np.int64)

    def _shuffle(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        # Each round changes one part by a function of the other, which its inverse could repeat: a bijection.
        left, right = values >> self._right, values & ((np.uint64(1) << self._right) - np.uint64(1))
        for index, key in enumerate(self._keys):
            if index % 2:
                right ^= _mix(left, key) >> (np.uint64(64) - self._right)
            else:
                left ^= _mix(right, key) >> (np.uint64(64) - self._left)
        return (left << self._right) | right


def _mix(values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Keyed 64-bit hash, best in its high bits (the two multiplications of splitmix64)."""
    mixed = (values + key) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    return mixed


def share(count: int, rank: int, ranks: int) -> slice:
    """The contiguous part of `count` items that is this rank's. Parts differ by at most one item and may be empty."""
    return slice(count * rank // ranks, count * (rank + 1) // ranks)


def rank_share(global_batch_size: int, data_parallel_rank: int, data_parallel_size: int) -> slice:
    """The contiguous, equal share of a global batch that is this rank's. UserError when it cannot be equal."""
    per_rank, rest = divmod(global_batch_size, data_parallel_size)
    if rest or per_rank < 1:
        near = " or ".join(str(n * data_parallel_size) for n in (per_rank, per_rank + 1) if n > 0)
        raise UserError(
            f"a global batch of {global_batch_size} samples cannot be shared equally by {data_parallel_size} "
            f"data-parallel ranks; take {near}"
        )
    return share(global_batch_size, data_parallel_rank, data_parallel_size)


# --- the corpus --------------------------------------------------------------------------------------------------


class Corpus:
    """A token file cut into windows of sequence_length + 1 tokens, each starting on the last token of the one before.

    The ids of the windows are the global sample ids. The last `held_out` of them, rounded, but at least one and not
    all, are for evaluation; the rest is trained on. (Held out in one piece, so that training sees nothing of them.)
    UserError when the corpus is too short for one window of each, or the model's vocabulary too small for its tokens.
    """

    def __init__(self, token_file: TokenFile, sequence_length: int, vocab_size: int, held_out: float = 0.01):
        if vocab_size < token_file.vocab_size:
            raise UserError(
                f"the model's vocab_size {vocab_size} is too small for the corpus {token_file.source!r}, "
                f"whose vocab_size is {token_file.vocab_size}; take at least that"
            )
        if sequence_length < 1:
            raise UserError(f"sequence_length is {sequence_length}; it must be at least 1")
        if not 0 < held_out < 1:
            raise UserError(f"the held-out fraction is {held_out}; it must be between 0 and 1, for example 0.01")
        found, needed = len(token_file.tokens), 2 * sequence_length + 1
        if found < needed:
            raise UserError(
                f"the corpus {token_file.source!r} is too short for sequence_length {sequence_length}: it has {found} "
                f"tokens, one window to train on and one to hold out need {needed}; give more text or a shorter length"
            )
        self.token_file = token_file
        self.sequence_length = sequence_length
        # (windows, sequence_length + 1), a view of the mapped file
        self._windows = np.lib.stride_tricks.sliding_window_view(token_file.tokens, sequence_length + 1)[
            ::sequence_length
        ]
        windows = len(self._windows)
        self.num_evaluation_samples = min(max(1, round(held_out * windows)), windows - 1)
        self.num_train_samples = windows - self.num_evaluation_samples

    def train_samples(self, first: int, count: int, seed: int) -> Ids:
        """Ids (count,) of the positions [first, first + count) of the endless stream: each epoch a new permutation.

        A function of its arguments only: take a global batch of it, then `rank_share` of that.
        """
        n = self.num_train_samples
        ids = np.empty(count, np.int64)
        done = 0
        while done < count:
            epoch, start = divmod(first + done, n)
            part = min(n - start, count - done)
            ids[done : done + part] = Permutation(n, seed, epoch)(np.arange(start, start + part))
            done += part
        return ids

    def evaluation_samples(self, limit: int | None = None) -> Ids:
        """Ids of all held-out samples, or of `limit` of them spread evenly; ranks take their `share`, maybe empty."""
        n = self.num_evaluation_samples
        count = n if limit is None else min(limit, n)
        return self.num_train_samples + np.arange(count, dtype=np.int64) * n // max(1, count)

    def batch(self, ids: Ids) -> tuple[Ids, Ids]:
        """Inputs and targets, each (len(ids), sequence_length) and contiguous; targets are one token ahead."""
        windows = self._windows[ids]
        return windows[:, :-1].astype(np.int64), windows[:, 1:].astype(np.int64)
