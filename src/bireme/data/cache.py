"""The cache of `--data`: a text file, a folder of text or the standard library, as one file of byte tokens."""

import codecs
import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bireme.data.shards import SUFFIX, VERSION, Facts, ShardWriter, read_header, reason
from bireme.data.sources import Found, find, listed_counts
from bireme.data.tokens import is_token_set
from bireme.errors import UserError

_VOCABULARY = 256
_CHUNK = 1 << 22  # bytes of text looked at at a time
# What `bireme data prepare` reads: as text, their syntax would be trained on.
_NOT_PLAIN = frozenset({".jsonl", ".ndjson", ".parquet", ".gz", ".zst", ".bz2", ".xz"})

_logger = logging.getLogger(__name__)


def prepare(name_or_path: str) -> Path:
    """The token set of a corpus: ``"stdlib"``, a text file, a folder of text files, or the path of a token set.

    Text goes to a file in the cache, written when it is missing or damaged, or when a file of the corpus changed (path,
    size or time). Any number of processes may prepare the same corpus at once. UserError when there is no text or the
    cache cannot be written.
    """
    began = time.monotonic()
    with contextlib.suppress(OSError, ValueError):  # what is wrong with the path is said below
        if name_or_path and is_token_set(Path(name_or_path)):
            return Path(os.path.realpath(name_or_path))
    cache = _cache_folder()
    found = find(name_or_path, cache)
    salt = json.dumps([found.source, VERSION, "bytes"])
    target = cache / f"{found.name}-{found.fingerprint(salt)}{SUFFIX}"
    if os.path.lexists(target):
        try:
            read_header(target)
            return target
        except UserError as error:
            _logger.warning("the cached corpus is prepared afresh: %s", error)
    documents, count = _write(target, found)
    _logger.info(
        "prepared %s: %d documents, %d tokens in %.1f s%s, as %s",
        *(found.source, documents, count, time.monotonic() - began, _skips(found), target),
    )
    return target


def _write(target: Path, found: Found) -> tuple[int, int]:
    """Writes the token file, in one piece or not at all. Returns how many documents and how many tokens it holds."""
    documents = 0
    try:
        with ShardWriter(target, _VOCABULARY) as writer:
            for document in _documents(found):
                for piece in ([b"\0"] if documents else []) + list(_pieces(document)):
                    writer.append(np.frombuffer(piece, np.uint8))
                documents += 1
            if writer.count == 0:
                raise UserError(
                    f"there is no text in {found.source!r}{_skips(found)}; give a text file or a folder of them"
                )
            writer.finish(Facts("bytes", _VOCABULARY, found.source, documents))
    except OSError as error:
        raise _cache_error(target.parent, error) from error
    return documents, writer.count


def _documents(found: Found) -> Iterator[bytes]:
    """The files that are text, without the empty ones. Those that are not text are counted in `found.skipped`."""
    for path, _ in found.files.values():
        try:
            document = path.read_bytes()
            flaw = _flaw(document)
        except OSError as error:
            document, flaw = b"", "unreadable"
            if found.named:
                raise UserError(f"cannot read {str(path)!r}: {reason(error)}") from error
        if path.suffix.lower() in _NOT_PLAIN:
            flaw = "JSON lines, Parquet or packed"
        if flaw and found.named:
            raise UserError(
                f"{str(path)!r} is {flaw}; --data takes text in UTF-8 as it is: prepare anything else with "
                "`bireme data prepare FILE --out FOLDER`, and give the folder"
            )
        if flaw:
            found.skipped[flaw] += 1
        elif document:
            yield document


def _skips(found: Found) -> str:
    """For example ``" (skipped: 2 binary, 1 hidden)"``, or an empty string."""
    reasons = listed_counts(found.skipped)
    return f" (skipped: {reasons})" if reasons else ""


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
    return UserError(f"cannot write to the cache folder {str(folder)!r}: {reason(error)}; set BIREME_CACHE to another")
