"""Where long text may be cut so that a byte-pair tokenizer gives the same tokens as for the whole. Pure."""

import re
from collections.abc import Callable, Iterator

PIECE_BYTES = 1 << 18  # long text is tokenized in pieces of about this size
WINDOW_BYTES = 1 << 18  # how far to look for a good place

# Splitting patterns of byte-pair tokenizers begin anew where a line begins with a letter or digit and the line before
# does not end with white space: more white space, or a slash, may be one token with the end of line.
_LINE = re.compile(rb"\n(?=[0-9A-Za-z\xc2-\xf4])")
_WORD = re.compile(rb"(?<=[!-~]) (?=[!-~])")  # the space goes with the word after it


def first_cut(window: bytes, start: int) -> int:
    """The first good place at or after `start` (at least 1): between lines, else between words, else characters."""
    for match in _LINE.finditer(window, start):
        cut = match.end()
        before = window[max(0, cut - 5) : cut - 1].decode(errors="ignore")[-1:]
        after = window[cut : cut + 4].decode(errors="ignore")[:1]
        if before and not before.isspace() and after.isalnum():
            return cut
    if word := _WORD.search(window, start):
        return word.start()
    return start + next(
        (
            each
            for each in range(4)
            if window[start + each : start + each + 1] and not 0x80 <= window[start + each] < 0xC0
        ),
        0,
    )  # not inside a character of several bytes


def pieces(read: Callable[[int], bytes]) -> Iterator[bytes]:
    """Text that `read(size)` gives until it gives nothing, in pieces that can be tokenized one by one."""
    buffer = b""
    while True:
        while len(buffer) <= PIECE_BYTES + WINDOW_BYTES and (block := read(PIECE_BYTES)):
            buffer += block
        if len(buffer) <= PIECE_BYTES + WINDOW_BYTES:
            if buffer:
                yield buffer
            return
        cut = first_cut(buffer[: PIECE_BYTES + WINDOW_BYTES], PIECE_BYTES)
        yield buffer[:cut]
        buffer = buffer[cut:]
