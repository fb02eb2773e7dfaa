import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bireme.data import cuts
from bireme.data.cuts import first_cut, pieces

deterministic = settings(derandomize=True, deadline=None)


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("one\ntwo", "one\n"),  # a line that begins with a letter
        ("one\n  two\nthree", "one\n  two\n"),  # white space may be one token with the end of line
        ("one\n\ntwo\nthree", "one\n\ntwo\n"),
        ("one \ntwo\nthree", "one \ntwo\n"),
        ("one\r\ntwo\nthree", "one\r\ntwo\n"),
        ("one;\n//two\nthree", "one;\n//two\n"),  # a slash too
        ("eins\nÄpfel", "eins\n"),
        ("一\n二", "一\n"),
        ("one\n\u3000two\nthree", "one\n\u3000two\n"),  # a space that is not ASCII
        ("one\u00a0\ntwo\nthree", "one\u00a0\ntwo\n"),
        ("one two three", "one"),  # no lines: between words
        ("one,  two | four", "one,  two"),
        ("一二三", "一"),  # nothing better: between characters
    ],
)
def test_where_text_is_cut(text: str, after: str) -> None:
    raw = text.encode()
    assert raw[: first_cut(raw, 1)].decode() == after


@given(st.text(alphabet="ab \n\r/;ä一\u3000", max_size=200), st.binary(max_size=50))
@settings(deterministic, max_examples=200)
def test_pieces_add_up_and_split_no_character(text: str, noise: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuts, "PIECE_BYTES", 16)
        patch.setattr(cuts, "WINDOW_BYTES", 12)
        parts = list(pieces(io.BytesIO(text.encode()).read))
        assert "".join(part.decode() for part in parts) == text
        assert all(0 < len(part) <= 28 for part in parts)
        assert b"".join(pieces(io.BytesIO(text.encode() + noise).read)) == text.encode() + noise
