"""The documents of one part of a source: text, JSON lines and Parquet, in pieces small enough to tokenize."""

import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import IO, Any, NamedTuple, cast

import orjson

from bireme.data.cuts import PIECE_BYTES, pieces
from bireme.data.parts import JSON_LINES, PARQUET, Part, Span, open_parquet
from bireme.data.shards import reason
from bireme.errors import UserError

REPLACED = "characters that were not UTF-8"  # counted, not skipped
NUL = "NUL characters"
_LONGEST_LINE_BYTES = 1 << 25  # of JSON lines
_BINARY_HEAD_BYTES = 8192
_FIELDS_NAMED = 20
_ROWS = 64  # of Parquet at a time
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_REPLACEMENT = "�".encode()


class Piece(NamedTuple):
    text: str
    ends: bool  # a document ends here
    source_bytes: int  # how much of the source was read for it


class Reader:
    """Reads a part; what is replaced or skipped is counted. UserError when a file changed since it was found."""

    def __init__(self, text_field: str):
        self._field = text_field
        self.counts: Counter[str] = Counter()
        self.documents = 0
        self.fields_seen: dict[str, None] = {}  # in the JSON lines without the field

    def read(self, part: Part) -> Iterator[Piece]:
        for span in part.spans:
            check_unchanged(span)
            try:
                if span.kind == PARQUET:
                    documents = self._parquet(span)
                elif span.kind == JSON_LINES:
                    documents = self._json_lines(span)
                else:
                    documents = self._text(span)
                for piece in documents:
                    self.documents += piece.ends
                    yield piece
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise UserError(f"{str(span.path)!r} is torn or no gzip file: {reason(error)}") from error
            except OSError as error:
                if span.named or not isinstance(error, PermissionError):
                    raise UserError(f"cannot read {str(span.path)!r}: {reason(error)}") from error
                self.counts["unreadable"] += 1
            check_unchanged(span)

    def _open(self, span: Span) -> IO[bytes]:
        return cast(IO[bytes], gzip.open(span.path)) if span.packed else span.path.open("rb")

    def _text(self, span: Span) -> Iterator[Piece]:
        with self._open(span) as file:
            if span.start == 0:
                head = file.read(_BINARY_HEAD_BYTES)
                if b"\0" in head:
                    if span.named:
                        raise UserError(f"{str(span.path)!r} is binary; give text, JSON lines or Parquet")
                    self.counts["binary"] += 1
                    return
            file.seek(span.start)
            left = None if span.packed else span.end - span.start

            def read(size: int) -> bytes:
                nonlocal left
                block = file.read(size if left is None else min(size, left))
                left = None if left is None else left - len(block)
                return block

            yield from self._in_pieces(read, span.start == 0, span.last)

    def _in_pieces(self, read: Any, first: bool, last: bool) -> Iterator[Piece]:
        """Each piece is held back until it is known whether the document ends with it."""
        held: Piece | None = None
        for block in pieces(read):
            if held is not None:
                yield held
            mark = first and held is None and block.startswith(_BYTE_ORDER_MARK)
            held = Piece(self._decode(block[len(_BYTE_ORDER_MARK) :] if mark else block), False, len(block))
        if held is not None:
            yield held._replace(ends=last)

    def _decode(self, block: bytes) -> str:
        try:
            text = block.decode()
        except UnicodeDecodeError:
            text = block.decode(errors="replace")
            self.counts[REPLACED] += text.count("�") - block.count(_REPLACEMENT)
        return self._without_nul(text)

    def _without_nul(self, text: str) -> str:
        if "\0" in text:  # which separates documents of byte tokens
            self.counts[NUL] += text.count("\0")
            text = text.replace("\0", "�")
        return text

    def _document(self, text: str, source_bytes: int) -> Iterator[Piece]:
        if not text:
            self.counts["empty"] += 1
            yield Piece("", False, source_bytes)
        elif len(text) < PIECE_BYTES:
            yield Piece(self._without_nul(text), True, source_bytes)
        else:
            for piece in self._in_pieces(io.BytesIO(text.encode()).read, False, True):
                yield piece._replace(source_bytes=source_bytes if piece.ends else 0)

    # --- JSON lines ---

    def _json_lines(self, span: Span) -> Iterator[Piece]:
        with self._open(span) as file:
            file.seek(span.start)
            position = span.start
            while span.packed or position < span.end:
                line = file.readline(_LONGEST_LINE_BYTES)
                if not line:
                    return
                size = len(line)
                if size == _LONGEST_LINE_BYTES and not line.endswith(b"\n"):
                    while (rest := file.readline(_LONGEST_LINE_BYTES)) and not rest.endswith(b"\n"):
                        size += len(rest)
                    size += len(rest)
                    self.counts[f"lines over {_LONGEST_LINE_BYTES >> 20} MiB"] += 1
                    yield Piece("", False, size)
                elif line.isspace():
                    yield Piece("", False, size)
                else:
                    if position == 0 and line.startswith(_BYTE_ORDER_MARK):
                        line = line[len(_BYTE_ORDER_MARK) :]
                    text = self._field_of(line)
                    yield from self._document(text, size) if text is not None else [Piece("", False, size)]
                position += size

    def _field_of(self, line: bytes) -> str | None:
        try:
            value = orjson.loads(line)
        except ValueError:
            value = self._lenient(line)
        if value is _UNPARSED:
            self.counts["lines that are no JSON"] += 1
            return None
        text = value.get(self._field) if isinstance(value, dict) else None
        if isinstance(text, str):
            return text
        self.counts[f"lines without the text field {self._field!r}"] += 1
        if isinstance(value, dict):
            self.fields_seen.update(dict.fromkeys(list(value)[: _FIELDS_NAMED - len(self.fields_seen)]))
        return None

    def _lenient(self, line: bytes) -> Any:
        """What the fast parser refuses: bytes that are not UTF-8, half characters written as escapes, NaN."""
        text = line.decode(errors="replace")
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return _UNPARSED
        self.counts[REPLACED] += text.count("�") - line.count(_REPLACEMENT)
        if isinstance(value, dict) and isinstance(found := value.get(self._field), str):
            whole = found.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
            self.counts[REPLACED] += whole.count("�") - found.count("�")
            value[self._field] = whole
        return value

    # --- Parquet ---

    def _parquet(self, span: Span) -> Iterator[Piece]:
        import pyarrow as arrow

        with open_parquet(span.path, self._field) as file:
            batches = file.iter_batches(
                batch_size=_ROWS, row_groups=range(span.start, span.end), columns=[self._field], use_threads=False
            )
            try:
                for batch in batches:
                    column = batch.column(0)
                    if arrow.types.is_dictionary(column.type):
                        column = column.dictionary_decode()
                    for value in column.cast(arrow.large_binary()).to_pylist():
                        if value is None:
                            self.counts["rows without text"] += 1
                        else:
                            yield from self._document(self._decode(value), len(value))
            except (arrow.ArrowException, OSError, ValueError) as error:
                raise UserError(f"{str(span.path)!r} is torn: {reason(error)}") from error


_UNPARSED = object()


def check_unchanged(span: Span) -> None:
    """UserError when the file is not the one that was found."""
    try:
        status = span.path.stat()
    except OSError as error:
        raise UserError(f"{str(span.path)!r} is gone since the preparation began: {reason(error)}") from error
    if (status.st_size, status.st_mtime_ns) != (span.size_bytes, span.modified_ns):
        raise UserError(f"{str(span.path)!r} was changed while it was prepared; start the preparation again")
