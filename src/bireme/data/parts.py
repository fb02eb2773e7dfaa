"""The source of a preparation cut into parts: each becomes one shard, whoever makes it and in whatever order."""

import os
import struct
from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson

from bireme.data.cuts import WINDOW_BYTES, first_cut
from bireme.data.shards import reason
from bireme.data.sources import Found, listed_counts
from bireme.errors import UserError
from bireme.text import printable

TEXT, JSON_LINES, PARQUET = "text", "JSON lines", "Parquet"

_SUFFIXES = {".jsonl": JSON_LINES, ".ndjson": JSON_LINES, ".parquet": PARQUET}
_COMPRESSED = (".zst", ".bz2", ".xz", ".lz4", ".zip", ".7z", ".tar", ".tgz", ".rar")
_LARGEST_BYTES, _SMALLEST_BYTES, _PARTS = 128_000_000, 4_000_000, 64


@dataclass(frozen=True, slots=True)
class Span:
    """A file or a piece of one, at least a whole document but for long text."""

    path: Path
    name: str  # within the source
    kind: str
    packed: bool  # by gzip
    start: int  # in bytes; of Parquet, in row groups
    end: int
    last: bool  # of the file
    text_bytes: int  # about; what progress counts
    size_bytes: int  # of the file, and
    modified_ns: int  # when it was found
    named: bool  # the user named this file: when it cannot be used, that is an error


@dataclass(frozen=True, slots=True)
class Part:
    index: int
    spans: tuple[Span, ...]

    @property
    def text_bytes(self) -> int:
        return sum(span.text_bytes for span in self.spans)

    def key(self, how: str) -> str:
        """The same for the same text prepared in the same way: its shard need not be made again."""
        spans = [
            [os.fsencode(each.name).hex(), each.kind, each.start, each.end, each.size_bytes, each.modified_ns]
            for each in self.spans
        ]
        return blake2b(orjson.dumps([how, spans]), digest_size=16).hexdigest()


@dataclass(slots=True)
class Plan:
    source: str  # for people
    parts: list[Part]
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def text_bytes(self) -> int:
        return sum(part.text_bytes for part in self.parts)


def make_plan(sources: list[Found], text_field: str, part_bytes: int | None) -> Plan:
    """Cuts the files into parts of about `part_bytes` of text; None: 128 MB, or less, so that there is work for many.

    Opens large files at the places where they are cut, and reads what Parquet files say about themselves. UserError
    when there is nothing to prepare.
    """
    plan = Plan(printable(", ".join(each.source for each in sources)), [])
    wholes = [span for found in sources for span in _wholes(found, text_field, plan.skipped)]
    total = sum(span.text_bytes for span in wholes)
    if part_bytes is None:
        part_bytes = min(_LARGEST_BYTES, max(_SMALLEST_BYTES, total // _PARTS))
    group: list[Span] = []
    for whole in wholes:
        spans = _cut(whole, text_field, part_bytes, plan.skipped)
        if len(spans) > 1 or sum(each.text_bytes for each in [*group, *spans]) > part_bytes:
            _add(plan, group)
            group = []
        if len(spans) > 1:
            for span in spans:
                _add(plan, [span])
        else:
            group += spans
    _add(plan, group)
    if not plan.parts:
        skipped = f" (skipped: {listed_counts(plan.skipped)})" if plan.skipped.total() else ""
        raise UserError(f"there is no text in {plan.source!r}{skipped}; give text, JSON lines or Parquet files")
    return plan


def _add(plan: Plan, spans: list[Span]) -> None:
    if spans:
        plan.parts.append(Part(len(plan.parts), tuple(spans)))


def _wholes(found: Found, text_field: str, skipped: Counter[str]) -> list[Span]:
    """Each file as one span."""
    skipped.update(found.skipped)
    spans = []
    for name, (path, status) in found.files.items():
        suffixes = [each.lower() for each in path.suffixes]
        packed = suffixes[-1:] == [".gz"]
        kind = _SUFFIXES.get("".join(suffixes[-2:-1] if packed else suffixes[-1:]), TEXT)
        size = status.st_size
        if suffixes[-1:] and suffixes[-1] in _COMPRESSED:
            if found.named:
                raise UserError(f"{str(path)!r} is compressed; of such files only .gz is read: decompress it first")
            skipped[f"compressed ({suffixes[-1]})"] += 1
            continue
        if not size:
            skipped["empty"] += 1
            continue
        text_bytes = _unpacked_bytes(path, size) if packed else size
        spans.append(
            Span(
                *(path, name, kind, packed, 0, size, True, text_bytes, size, status.st_mtime_ns, found.named),
            )
        )
    return spans


def _cut(whole: Span, text_field: str, part_bytes: int, skipped: Counter[str]) -> list[Span]:
    try:
        if whole.kind == PARQUET:
            return _row_groups(whole, text_field, part_bytes)
        if whole.packed or whole.text_bytes <= part_bytes:
            return [whole]
        return _ranges(whole, part_bytes)
    except OSError as error:
        if whole.named:
            raise UserError(f"cannot read {str(whole.path)!r}: {reason(error)}") from error
        skipped["unreadable"] += 1
        return []


def _ranges(whole: Span, part_bytes: int) -> list[Span]:
    size = whole.size_bytes
    count = -(-size // part_bytes)
    cut = _line_start if whole.kind == JSON_LINES else _text_cut
    with whole.path.open("rb", buffering=0) as file:
        cuts = {min(size, cut(file.fileno(), size * index // count)) for index in range(1, count)}
    borders = sorted({0, size, *cuts})
    return [_piece(whole, start, end, end == size, end - start) for start, end in pairwise(borders)]


def _piece(whole: Span, start: int, end: int, last: bool, text_bytes: int) -> Span:
    return Span(
        *(whole.path, whole.name, whole.kind, whole.packed, start, end, last, text_bytes),
        *(whole.size_bytes, whole.modified_ns, whole.named),
    )


def _line_start(descriptor: int, target: int) -> int:
    """The first start of a line at or after `target`."""
    position = target - 1
    while block := os.pread(descriptor, WINDOW_BYTES, position):
        if (found := block.find(b"\n")) >= 0:
            return position + found + 1
        position += len(block)
    return position


def _text_cut(descriptor: int, target: int) -> int:
    before = min(target, 8)
    return target - before + first_cut(os.pread(descriptor, WINDOW_BYTES, target - before), before)


def _unpacked_bytes(path: Path, size: int) -> int:
    """What a .gz file says: right for one piece under 4 GiB, and good enough to show progress."""
    try:
        with path.open("rb") as file:
            file.seek(-4, os.SEEK_END)
            return max(size, int(struct.unpack("<I", file.read(4))[0]))
    except (OSError, struct.error):
        return size


# --- Parquet -----------------------------------------------------------------------------------------------------


def open_parquet(path: Path, text_field: str) -> Any:
    """A pyarrow.parquet.ParquetFile whose column `text_field` is text. UserError for anything else."""
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError:
        raise UserError(
            f"{str(path)!r} needs the package pyarrow; install it with: pip install 'bireme[parquet]'"
        ) from None
    try:
        file = parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
        schema = file.schema_arrow
    except (arrow.ArrowException, ValueError) as error:
        raise UserError(f"{str(path)!r} is torn or no Parquet file: {reason(error)}") from None
    index = schema.get_field_index(text_field)
    if index < 0:
        names = ", ".join(repr(name) for name in schema.names[:20])
        raise UserError(f"{str(path)!r} has no column {text_field!r}; choose with --text-field among {names}")
    kind = schema.field(index).type
    value = kind.value_type if arrow.types.is_dictionary(kind) else kind
    known = (arrow.types.is_string, arrow.types.is_large_string, arrow.types.is_string_view, arrow.types.is_binary)
    if not any(is_kind(value) for is_kind in (*known, arrow.types.is_large_binary)):
        raise UserError(f"the column {text_field!r} of {str(path)!r} holds {kind}, not text; choose with --text-field")
    return file


def _row_groups(whole: Span, text_field: str, part_bytes: int) -> list[Span]:
    if whole.packed:
        raise UserError(f"{str(whole.path)!r} is a compressed Parquet file; decompress it first")
    with open_parquet(whole.path, text_field) as file:
        metadata = file.metadata
        sizes = [_column_bytes(metadata.row_group(index), text_field) for index in range(metadata.num_row_groups)]
    spans: list[Span] = []
    start = 0
    for index in range(len(sizes)):
        following = sizes[index + 1] if index + 1 < len(sizes) else part_bytes
        if index + 1 == len(sizes) or sum(sizes[start : index + 1]) + following > part_bytes:
            last = index + 1 == len(sizes)
            spans.append(_piece(whole, start, index + 1, last, max(1, sum(sizes[start : index + 1]))))
            start = index + 1
    return spans


def _column_bytes(row_group: Any, text_field: str) -> int:
    columns = (row_group.column(index) for index in range(row_group.num_columns))
    return sum(int(each.total_uncompressed_size) for each in columns if each.path_in_schema == text_field)
