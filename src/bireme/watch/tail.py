"""Reading only what was added to a file of lines, whatever happens to the file meanwhile."""

import os
from dataclasses import dataclass
from pathlib import Path

from bireme.files import open_regular

_BLOCK_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 24  # of one look at the file: what is more comes with the next ones
_LONGEST_LINE_BYTES = 1 << 27  # what goes on for longer without a line end is no line
_REMEMBERED_BYTES = 256


@dataclass(frozen=True, slots=True)
class News:
    """What one look at the file found: whole lines, without their ends."""

    lines: list[bytes]
    started_over: bool = False  # the file is another one than before, or was cut: forget all lines seen so far
    more: bool = False  # there is more to read at once


class Tail:
    """The lines of a file that others append to, beginning with its last ones.

    Also of a file that is not there yet, is cut or replaced (a resumed run, a program that copies files), or ends in
    the middle of a line. Of a large file only the end is read: at most `last_lines` and `last_bytes` of what was there
    at first, and then what was added.
    """

    def __init__(self, path: Path, last_lines: int | None = None, last_bytes: int = 1 << 26):
        self._path = path
        self._last_lines = last_lines
        self._last_bytes = last_bytes
        self.reset()

    def reset(self) -> None:
        """The next look begins as if it were the first."""
        self._begun = False
        self._position = 0  # all before it was given out; always the beginning of a line
        self._before = b""  # the bytes before it
        self._chunk_bytes = _CHUNK_BYTES
        self.modified_s: float | None = None  # time of the last change, seconds since 1970; None while there is no file

    def look(self) -> News:
        """What is new since the last look. Raises OSError when the file is there and cannot be read, UserError when it
        is no file."""
        try:
            file = open_regular(self._path)
        except FileNotFoundError:
            started_over = self._begun
            self.reset()
            return News([], started_over)
        with file:
            return self._read(file.fileno())

    def _read(self, descriptor: int) -> News:
        status = os.fstat(descriptor)
        size = status.st_size
        started_over = self._begun and not (size >= self._position and self._goes_on(descriptor))
        if started_over or not self._begun:
            self._position = self._where_to_begin(descriptor, size)
            self._begun = True
        self.modified_s = status.st_mtime
        data = _pread(descriptor, min(self._chunk_bytes, size - self._position), self._position)
        end = data.rfind(b"\n") + 1
        more = self._position + len(data) < size
        if not end and more:
            if self._chunk_bytes < _LONGEST_LINE_BYTES:
                self._chunk_bytes *= 2
                return News([], started_over, more=True)
            end = len(data)
        self._chunk_bytes = _CHUNK_BYTES
        self._position += end
        self._before = _pread(
            descriptor, min(_REMEMBERED_BYTES, self._position), max(0, self._position - _REMEMBERED_BYTES)
        )
        return News([line for line in data[:end].split(b"\n") if line.strip()], started_over, more)

    def _goes_on(self, descriptor: int) -> bool:
        """A file that was written anew may by now be longer than before; a copy that took its place may be the same."""
        return _pread(descriptor, len(self._before), self._position - len(self._before)) == self._before

    def _where_to_begin(self, descriptor: int, size: int) -> int:
        """The beginning of a line near the end of the file."""
        if self._last_lines is None and size <= self._last_bytes:
            return 0
        start = end = size
        ends_seen = 0
        while start > 0:
            start = max(0, end - _BLOCK_BYTES, size - self._last_bytes)
            block = _pread(descriptor, end - start, start)
            found = block.count(b"\n")
            if self._last_lines is not None and ends_seen + found > self._last_lines:
                for _ in range(self._last_lines + 1 - ends_seen):
                    place = block.rfind(b"\n")
                    block = block[:place]
                return start + place + 1
            ends_seen += found
            if 0 < start <= size - self._last_bytes:  # the first line end in here, if there is one
                return start + block.find(b"\n") + 1
            end = start
        return 0


def _pread(descriptor: int, size: int, position: int) -> bytes:
    """All of it, or what is left of the file."""
    parts = []
    while size > 0:
        part = os.pread(descriptor, size, position)
        if not part:
            break
        parts.append(part)
        size -= len(part)
        position += len(part)
    return b"".join(parts)
