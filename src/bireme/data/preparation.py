"""Sources to a folder of shards: in parallel, each shard in one piece or not at all, and restartable."""

import contextlib
import fcntl
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from bireme.data.parts import Part, Plan, make_plan
from bireme.data.reading import NUL, REPLACED, Piece, Reader, check_unchanged
from bireme.data.shards import SUFFIX, VERSION, Facts, ShardWriter, dtype_for, read_header, reason
from bireme.data.sources import find, listed_counts
from bireme.data.tokenizers import Tokenizer, copy_atomic, load_tokenizer
from bireme.data.tokens import FORMAT, LOCK, MANIFEST, TOKENIZER_FILES, open_tokens, read_manifest
from bireme.data.workers import run_tasks
from bireme.errors import UserError
from bireme.files import sync_folder
from bireme.record import write_json_atomic

_BATCH_CHARACTERS = 1 << 18  # tokenized at a time
_SAMPLES, _SAMPLE_CHARACTERS = 8, 1 << 15
_OURS = re.compile("|".join([*map(re.escape, (LOCK, MANIFEST, *TOKENIZER_FILES)), r"shard-\d+\.tokens", r"\..+\.tmp"]))


class Recipe(NamedTuple):
    """How text becomes tokens; what a worker is given."""

    out: Path
    tokenizer: str  # as the user gave it
    pattern: str | None
    description: str  # of the tokenizer, as it was found
    text_field: str
    source: str


@dataclass(slots=True)
class Summary:
    """What a preparation did, or had done before."""

    folder: Path
    source: str
    tokenizer: str
    vocab_size: int
    documents: int = 0
    tokens: int = 0
    shards: int = 0
    kept: int = 0  # shards that were finished before
    text_bytes: int = 0  # read this time
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)

    def notes(self) -> str:
        """For example ``"; skipped: 2 binary; replaced: 3 NUL characters"``, or nothing."""
        replaced = Counter({what: self.counts[what] for what in (REPLACED, NUL)})
        parts = {"skipped": listed_counts(self.counts - replaced), "replaced by U+FFFD": listed_counts(replaced)}
        return "".join(f"; {what}: {counts}" for what, counts in parts.items() if counts)


class Progress(Protocol):
    """What is told while shards are made."""

    def start(self, text_bytes: int, workers: int) -> None: ...
    def advance(self, text_bytes: int) -> None: ...


def prepare_folder(
    sources: list[str],
    out: Path,
    *,
    tokenizer: str,
    pattern: str | None,
    text_field: str,
    workers: int,
    part_bytes: int | None,
    progress: Progress,
) -> Summary:
    """Prepares `sources` into the folder `out`. What an earlier call has finished of the same is kept.

    UserError for what is wrong with the sources, the tokenizer or the folder; nothing is written before that is known.
    """
    began = time.monotonic()
    chosen = load_tokenizer(tokenizer, pattern)
    out = Path(os.path.realpath(out))
    plan = make_plan([find(source, out) for source in sources], text_field, part_bytes)
    recipe = Recipe(out, tokenizer, pattern, chosen.description, text_field, plan.source)
    keys = [part.key(_how(chosen, text_field)) for part in plan.parts]
    preparation = blake2b("\n".join(keys).encode(), digest_size=16).hexdigest()
    summary = Summary(out, plan.source, chosen.description, chosen.vocab_size)
    with _claimed(out, lambda: _check_disk(out, plan, chosen, text_field, _missing(out, plan, keys))):
        if _is_prepared(out, preparation):
            missing = []
        else:
            (out / MANIFEST).unlink(missing_ok=True)
            _remove_leftovers(out, len(plan.parts))
            missing = _missing(out, plan, keys)
            _make_shards(recipe, missing, keys, workers, progress, summary)
            _finish(plan, keys, preparation, chosen, out)
    manifest = read_manifest(out)
    summary.documents, summary.tokens, summary.shards = manifest["documents"], manifest["count"], len(plan.parts)
    summary.kept = len(plan.parts) - len(missing)
    summary.counts = Counter(manifest["counts"])
    summary.seconds = time.monotonic() - began
    return summary


def _how(tokenizer: Tokenizer, text_field: str) -> str:
    return f"{VERSION} {tokenizer.description} {tokenizer.separator} {text_field}"


def shard_name(index: int) -> str:
    return f"shard-{index:05}{SUFFIX}"


# --- the folder --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _claimed(out: Path, check: Callable[[], None]) -> Iterator[None]:
    """The folder for this process alone; the lock goes when the process does. `check` comes before anything is made."""
    made = not out.exists()
    if not made:
        _check_contents(out)
    check()
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / LOCK).open("a")
    except OSError as error:
        raise UserError(f"cannot write to --out {str(out)!r}: {reason(error)}") from error
    with lock:
        if not _is_locked(lock.fileno(), out / LOCK):
            raise UserError(f"another preparation is writing to {str(out)!r}; wait for it, or give another --out")
        try:
            yield
        except OSError as error:
            raise UserError(
                f"cannot write to --out {str(out)!r}: {reason(error)}; finished shards are kept, start it again"
            ) from error
        finally:
            _tidy(out, made)


def _is_locked(descriptor: int, path: Path) -> bool:
    """Whether the lock is ours now, and still the one that others find."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except (BlockingIOError, FileNotFoundError):
        return False


def _tidy(out: Path, made: bool) -> None:
    """Where nothing was made, no trace stays."""
    with contextlib.suppress(OSError):
        if [each.name for each in out.iterdir()] == [LOCK]:
            (out / LOCK).unlink()
            if made:
                out.rmdir()


def _check_contents(out: Path) -> None:
    if not out.is_dir():
        raise UserError(f"--out {str(out)!r} is not a folder; give another")
    try:
        names = {each.name for each in out.iterdir()}
    except OSError as error:
        raise UserError(f"cannot read --out {str(out)!r}: {reason(error)}") from error
    foreign = sorted(name for name in names if not _OURS.fullmatch(name))
    if names and (foreign or not names & {LOCK, MANIFEST}):
        other = (foreign or sorted(names))[0]
        raise UserError(f"--out {str(out)!r} holds something else, as {other!r}; give an empty folder or a new name")


def _is_prepared(out: Path, preparation: str) -> bool:
    """UserError when another preparation is finished there."""
    if not (out / MANIFEST).exists():
        return False
    if read_manifest(out)["preparation"] != preparation:
        raise UserError(
            f"--out {str(out)!r} holds what was prepared from another source, or in another way; give another folder"
        )
    try:
        open_tokens(out)
        return True
    except UserError:  # a shard is gone or torn: it is made again
        return False


def _remove_leftovers(out: Path, num_parts: int) -> None:
    """What a killed preparation left, or one of a source with more parts."""
    expected = {shard_name(index) for index in range(num_parts)}
    for each in out.iterdir():
        if each.suffix in (".tmp", SUFFIX) and each.name not in expected:
            each.unlink()


def _missing(out: Path, plan: Plan, keys: list[str]) -> list[Part]:
    return [part for part in plan.parts if not _is_finished(out / shard_name(part.index), keys[part.index])]


def _is_finished(path: Path, key: str) -> bool:
    try:
        return read_header(path)[1].part == key
    except UserError:
        return False


def _check_disk(out: Path, plan: Plan, tokenizer: Tokenizer, text_field: str, missing: list[Part]) -> None:
    """UserError when the shards to be made will not fit, by a sample of the text."""
    if not missing:
        return
    width = np.dtype(dtype_for(tokenizer.vocab_size)).itemsize
    needed = int(_tokens_per_byte(plan, tokenizer, text_field) * width * sum(part.text_bytes for part in missing))
    existing = next(each for each in (out, *out.parents) if each.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise UserError(
            f"the shards need about {needed / 1e6:,.1f} MB, the disk of {str(out)!r} has {free / 1e6:,.1f} MB free; "
            "make room or give another --out"
        )


def _tokens_per_byte(plan: Plan, tokenizer: Tokenizer, text_field: str) -> float:
    """Of source, from the beginnings of a few parts."""
    tokens = 0
    read_bytes = 0.0
    for index in np.unique(np.linspace(0, len(plan.parts) - 1, _SAMPLES).astype(int)).tolist():
        left = _SAMPLE_CHARACTERS
        for piece in Reader(text_field).read(plan.parts[index]):
            text = piece.text[:left]
            tokens += len(tokenizer.encode_batch([text])[0]) + piece.ends
            read_bytes += piece.source_bytes * (len(text) / len(piece.text) if piece.text else 1.0)
            left -= max(1, len(text))
            if left <= 0:
                break
    return tokens / read_bytes if read_bytes else 1.0


# --- the shards --------------------------------------------------------------------------------------------------


def _make_shards(
    recipe: Recipe, missing: list[Part], keys: list[str], workers: int, progress: Progress, summary: Summary
) -> None:
    workers = min(workers, len(missing))
    progress.start(sum(part.text_bytes for part in missing), workers)
    tasks = [(part, keys[part.index]) for part in missing]
    try:
        fields_seen: dict[str, None] = {}
        with contextlib.closing(run_tasks(_ShardMaker, (recipe,), tasks, workers)) as events:
            for kind, value in events:
                if kind == "progress":
                    progress.advance(value)
                    summary.text_bytes += value
                else:
                    fields_seen.update(dict.fromkeys(value))
    finally:
        for temporary in recipe.out.glob(".*.tmp"):  # of workers that were ended
            temporary.unlink(missing_ok=True)
    _check_not_empty(recipe, fields_seen, len(keys))


def _check_not_empty(recipe: Recipe, fields_seen: dict[str, None], num_parts: int) -> None:
    """UserError when all shards are empty; they are removed, so that the next attempt begins anew."""
    paths = [recipe.out / shard_name(index) for index in range(num_parts)]
    counts: Counter[str] = Counter()
    for path in paths:
        shard, facts = read_header(path)
        if shard.count:
            return
        counts.update(facts.counts)
    for path in paths:
        path.unlink()
    skipped = f" (skipped: {listed_counts(counts)})" if counts.total() else ""
    advice = "give text, JSON lines or Parquet files"
    if fields_seen:
        advice = f"choose the text with --text-field among {', '.join(map(repr, list(fields_seen)[:20]))}"
    raise UserError(f"there is no text in {recipe.source!r}{skipped}; {advice}")


class _ShardMaker:
    """In a worker: turns one part into one shard. Called with each task of `run_tasks`."""

    def __init__(self, recipe: Recipe):
        # The processes share out the cores; threads inside them would only quarrel.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._recipe = recipe
        self._tokenizer = load_tokenizer(recipe.tokenizer, recipe.pattern)
        if self._tokenizer.description != recipe.description:
            raise UserError(f"the tokenizer {recipe.tokenizer!r} was changed; start the preparation again")

    def __call__(self, task: tuple[Part, str], report: Callable[[int], None]) -> list[str]:
        """Returns the fields of JSON lines that had no text."""
        part, key = task
        reader = Reader(self._recipe.text_field)
        try:
            with ShardWriter(self._recipe.out / shard_name(part.index), self._tokenizer.vocab_size) as writer:
                for batch in _batches(reader.read(part)):
                    self._append(writer, batch)
                    report(sum(piece.source_bytes for piece in batch))
                facts = (self._tokenizer.description, self._tokenizer.vocab_size, self._recipe.source)
                writer.finish(Facts(*facts, reader.documents, key, dict(reader.counts)))
        except OSError as error:
            raise UserError(
                f"cannot write to --out {str(self._recipe.out)!r}: {reason(error)}; finished shards are kept, start it "
                "again when that is mended"
            ) from error
        return list(reader.fields_seen)

    def _append(self, writer: ShardWriter, batch: list[Piece]) -> None:
        separator = np.array([self._tokenizer.separator], writer.dtype)
        encoded: list[Any] = []
        for piece, tokens in zip(batch, self._tokenizer.encode_batch([piece.text for piece in batch]), strict=True):
            encoded += [tokens, separator] if piece.ends else [tokens]
        writer.append(np.concatenate(encoded, dtype=writer.dtype))


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text) + 64  # many tiny documents cost memory too
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


# --- the end -----------------------------------------------------------------------------------------------------


def _finish(plan: Plan, keys: list[str], preparation: str, tokenizer: Tokenizer, out: Path) -> None:
    """Writes the list of shards: from then on the folder is complete."""
    for part in plan.parts:
        for span in part.spans:
            check_unchanged(span)
    if tokenizer.file is not None:
        name = TOKENIZER_FILES[0] if tokenizer.description.startswith("tokenizers:") else TOKENIZER_FILES[1]
        copy_atomic(tokenizer.file, out / name)
    counts = Counter(plan.skipped)
    documents = tokens = 0
    shards = []
    for index in range(len(keys)):
        shard, facts = read_header(out / shard_name(index))
        counts.update(facts.counts)
        documents += facts.documents
        tokens += shard.count
        shards.append(
            {
                "file": shard.path.name,
                "count": shard.count,
                "documents": facts.documents,
                "bytes": shard.size_bytes,
                "sha256": shard.sha256,
            }
        )
    sync_folder(out)
    manifest = {
        "format": FORMAT,
        "version": 1,
        "tokenizer": tokenizer.description,
        "vocab_size": tokenizer.vocab_size,
        "separator": tokenizer.separator,
        "source": plan.source,
        "preparation": preparation,
        "documents": documents,
        "count": tokens,
        "counts": dict(+counts),
        "shards": shards,
    }
    write_json_atomic(out / MANIFEST, manifest)
    sync_folder(out)
