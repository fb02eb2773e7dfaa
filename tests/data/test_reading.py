import gzip
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bireme.data import cuts, parts, reading
from bireme.data.parts import make_plan
from bireme.data.reading import NUL, REPLACED, Reader
from bireme.data.sources import find

if TYPE_CHECKING:
    from tests.data.made_tokens import failure
else:
    from made_tokens import failure

LINES = "".join(f"line {number} of a text\n" for number in range(400))


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


def read(*sources: Path, field: str = "text", part_bytes: int = 10**9) -> tuple[list[str], Reader, int]:
    """The documents, the reader, and how many parts they came from."""
    plan = make_plan([find(str(source), Path("/nowhere")) for source in sources], field, part_bytes)
    reader = Reader(field)
    documents = [""]
    source_bytes = 0
    for part in plan.parts:
        for piece in reader.read(part):
            documents[-1] += piece.text
            source_bytes += piece.source_bytes
            if piece.ends:
                documents.append("")
    reader.counts += plan.skipped
    assert documents.pop() == ""
    assert reader.documents == len(documents)
    assert source_bytes <= plan.text_bytes
    return documents, reader, len(plan.parts)


def lines(*values: Any) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


# --- text --------------------------------------------------------------------------------------------------------


def test_files_of_a_folder_in_order(here: Path) -> None:
    (here / "b").mkdir()
    (here / "c.txt").write_text("third")
    (here / "b" / "two").write_text("zweitens ☃")
    (here / "a.txt").write_text("\ufefffirst")  # a byte order mark is no text
    (here / "empty").touch()
    (here / ".hidden").write_text("hidden")
    documents, reader, _ = read(here)
    assert documents == ["first", "zweitens ☃", "third"]
    assert reader.counts == {"empty": 1, "hidden": 1}


@pytest.mark.parametrize("part_bytes", [500, 1000, 7999, 8000, 10**6])
def test_a_large_file_is_one_document_however_it_is_cut(
    here: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    monkeypatch.setattr(cuts, "PIECE_BYTES", 200)
    monkeypatch.setattr(cuts, "WINDOW_BYTES", 100)
    monkeypatch.setattr(parts, "WINDOW_BYTES", 100)
    (here / "large.txt").write_text(LINES)
    (here / "z.txt").write_text("after")
    documents, _, count = read(here, part_bytes=part_bytes)
    assert documents == [LINES, "after"]
    assert count >= len(LINES) // part_bytes


def test_what_is_not_utf_8_is_replaced_and_counted(here: Path) -> None:
    (here / "a.txt").write_bytes("schön \N{REPLACEMENT CHARACTER}".encode() + b"\xff \xe4")
    documents, reader, _ = read(here)
    assert documents == ["schön �� �"]
    assert reader.counts == {REPLACED: 2}


def test_binary_files_are_skipped_and_nul_later_is_replaced(here: Path) -> None:
    (here / "a.bin.txt").write_bytes(b"ELF\0\1")
    (here / "b.txt").write_bytes(b"x" * 10_000 + b"\0y")
    documents, reader, _ = read(here)
    assert documents == ["x" * 10_000 + "�y"]
    assert reader.counts == {"binary": 1, NUL: 1}
    assert "is binary" in failure(lambda: read(here / "a.bin.txt"))


def test_gzip(here: Path) -> None:
    for name, text in (("a.txt.gz", LINES), ("b.jsonl.gz", lines({"text": "one"}, {"text": "two"}))):
        (here / name).write_bytes(gzip.compress(text.encode()))
    documents, _, _ = read(here, part_bytes=100)
    assert documents == [LINES, "one", "two"]
    whole = (here / "a.txt.gz").read_bytes()
    for damaged in (whole[:-20], whole[:30] + b"\xff\xff\xff\xff" + whole[34:], b"plain"):
        (here / "a.txt.gz").write_bytes(damaged)
        assert "torn or no gzip file" in failure(lambda: read(here))


def test_other_compression_is_refused_or_skipped(here: Path) -> None:
    (here / "a.jsonl.zst").write_bytes(b"(\xb5/\xfd")
    assert "decompress it" in failure(lambda: read(here / "a.jsonl.zst"))
    assert "1 compressed (.zst)" in failure(lambda: read(here))


def test_nothing_to_read(here: Path) -> None:
    assert "there is no text" in failure(lambda: read(here))
    (here / "empty.txt").touch()
    assert "1 empty" in failure(lambda: read(here))
    assert "no text" in failure(lambda: read(here / "empty.txt"))


def test_a_file_that_changes_meanwhile(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "a.txt").write_text(LINES)
    plan = make_plan([find(str(here), Path("/nowhere"))], "text", None)
    os.utime(here / "a.txt", ns=(1, 1))
    assert "was changed" in failure(lambda: list(Reader("text").read(plan.parts[0])))
    (here / "a.txt").unlink()
    assert "is gone" in failure(lambda: list(Reader("text").read(plan.parts[0])))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_files_that_may_not_be_read(here: Path) -> None:
    (here / "a.txt").write_text("first")
    (here / "b.txt").write_text("second")
    (here / "a.txt").chmod(0)
    documents, reader, _ = read(here)
    assert documents == ["second"] and reader.counts == {"unreadable": 1}
    assert "Permission denied" in failure(lambda: read(here / "a.txt"))


# --- JSON lines --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part_bytes", [1, 60, 1000, 10**6])
def test_every_line_is_a_document_once(here: Path, part_bytes: int) -> None:
    expected = [f"document {number} ☃\nwith two lines" for number in range(100)]
    (here / "a.jsonl").write_text("\n" + lines(*({"id": 1, "text": each} for each in expected)).rstrip("\n"))
    documents, reader, count = read(here, part_bytes=part_bytes)
    assert documents == expected and not reader.counts
    size = (here / "a.jsonl").stat().st_size
    assert count == (101 if part_bytes == 1 else -(-size // part_bytes) if part_bytes > 100 else count)


def test_lines_that_cannot_be_used_are_counted(here: Path) -> None:
    content = lines({"text": "good"}, {"content": "x", "id": 2}, {"text": None}, [1], {"text": ""}).encode()
    content += b'{"text": "torn\n' + b'{"text": "bad \xff byte"}\n' + b'{"text": "half \\ud83d", "n": NaN}\n'
    content += b'{"text": "nul \\u0000"}\n' + b"[" * 5000 + b"\n \n" + b'{"text": "\\ud83d\\ude00"}'
    (here / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + content)
    documents, reader, _ = read(here)
    assert documents == ["good", "bad � byte", "half �", "nul �", "😀"]
    assert reader.counts == {
        "lines without the text field 'text'": 3,
        "lines that are no JSON": 2,
        "empty": 1,
        REPLACED: 2,
        NUL: 1,
    }
    assert list(reader.fields_seen) == ["content", "id", "text"]
    assert read(here, field="content")[0] == ["x"]


def test_long_documents_and_lines_that_are_too_long(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "PIECE_BYTES", 200)
    monkeypatch.setattr(cuts, "WINDOW_BYTES", 100)
    monkeypatch.setattr(reading, "PIECE_BYTES", 200)
    monkeypatch.setattr(reading, "_LONGEST_LINE_BYTES", 1 << 20)
    (here / "a.jsonl").write_text(lines({"text": LINES}, {"text": "x" * (1 << 21)}, {"text": "after"}))
    documents, reader, _ = read(here)
    assert documents == [LINES, "after"]
    assert reader.counts == {"lines over 1 MiB": 1}


# --- Parquet -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["string", "large_string", "binary", "string_view", "dictionary"])
@pytest.mark.parametrize("part_bytes", [1, 2000, 10**6])
def test_parquet(here: Path, kind: str, part_bytes: int) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [f"document {number} ☃ " * 5 if number % 7 else None for number in range(1, 100)]
    column = arrow.array(texts, arrow.string())
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(getattr(arrow, kind)())
    table = arrow.table({"id": range(99), "text": column})
    parquet.write_table(table, here / "a.parquet", row_group_size=10)
    (here / "b.txt").write_text("after")
    documents, reader, count = read(here, part_bytes=part_bytes)
    assert documents == [*(each for each in texts if each), "after"]
    assert reader.counts == {"rows without text": 14}
    assert count == {1: 15, 10**6: 1}.get(part_bytes, count)


def test_what_is_wrong_with_parquet(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = here / "a.parquet"
    parquet.write_table(arrow.table({"id": [1], "body": ["text"]}), path)
    message = failure(lambda: read(here))
    assert "no column 'text'" in message and "'id', 'body'" in message
    assert "holds int64, not text" in failure(lambda: read(here, field="id"))
    assert read(here, field="body")[0] == ["text"]
    whole = path.read_bytes()
    for damaged in (whole[:-10], b"PAR1", b"no Parquet at all"):
        path.write_bytes(damaged)
        assert "torn or no Parquet file" in failure(lambda: read(here))
    footer = int.from_bytes(whole[-8:-4], "little") + 8
    path.write_bytes(whole[:4] + bytes(len(whole) - footer - 4) + whole[-footer:])
    assert "is torn" in failure(lambda: read(here, field="body"))
    (here / "a.parquet.gz").write_bytes(whole)
    assert "decompress it" in failure(lambda: read(here / "a.parquet.gz"))
    path.write_bytes(whole)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install 'bireme[parquet]'" in failure(lambda: read(path))


# --- parts -------------------------------------------------------------------------------------------------------


def test_small_files_are_put_together(here: Path) -> None:
    for number in range(20):
        (here / f"{number:02}.txt").write_text("x" * 100)
    assert read(here, part_bytes=1000)[2] == 2
    assert read(here, part_bytes=50)[2] == 40  # each is cut
    assert read(here / "03.txt", here / "02.txt")[0] == ["x" * 100] * 2


def test_the_key_of_a_part_changes_with_the_text_and_the_way(here: Path) -> None:
    def key(how: str = "bytes") -> str:
        return make_plan([find(str(here), Path("/nowhere"))], "text", None).parts[0].key(how)

    (here / "a.txt").write_text("text")
    first = key()
    assert key() == first != key("other")
    (here / "a.txt").write_text("TEXT")
    os.utime(here / "a.txt", ns=(1, 1))
    second = key()
    (here / "a.txt").rename(here / "b.txt")
    assert len({first, second, key()}) == 3
