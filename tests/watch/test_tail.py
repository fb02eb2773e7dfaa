import os
import random
from pathlib import Path

import pytest

from bireme.errors import UserError
from bireme.watch import tail
from bireme.watch.tail import News, Tail


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lines"


def test_a_line_is_given_once_and_whole(path: Path) -> None:
    lines = Tail(path)
    assert lines.look() == News([])
    append(path, b"one\ntw")
    assert lines.look() == News([b"one"])
    assert lines.modified_s == path.stat().st_mtime
    assert lines.look() == News([])
    append(path, b"o\n\nthree\nfo")
    assert lines.look() == News([b"two", b"three"])
    append(path, b"ur\n")
    assert lines.look() == News([b"four"])


@pytest.mark.parametrize("block", [4, 16, 1 << 16])
@pytest.mark.parametrize("torn", [b"", b"torn"])
def test_of_a_large_file_only_the_last_lines_are_read(
    path: Path, monkeypatch: pytest.MonkeyPatch, block: int, torn: bytes
) -> None:
    monkeypatch.setattr(tail, "_BLOCK_BYTES", block)
    path.write_bytes(b"".join(b"line %d\n" % number for number in range(100)) + torn)
    assert Tail(path, last_lines=3).look().lines == [b"line 97", b"line 98", b"line 99"]
    assert len(Tail(path, last_lines=100).look().lines) == len(Tail(path, last_lines=500).look().lines) == 100
    few = Tail(path, last_bytes=40).look().lines
    assert few == [b"line %d" % number for number in range(100 - len(few), 100)] and 0 < len(few) < 16


def test_how_much_is_read_does_not_depend_on_the_size(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 30)  # a gigabyte with a hole
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + b"x" * 1000 + b"\n" + b"y" * 1000 + b"\n")
    read = []
    pread = os.pread

    def counted(descriptor: int, size: int, position: int) -> bytes:
        read.append(size)
        return pread(descriptor, size, position)

    monkeypatch.setattr(tail.os, "pread", counted)
    lines = Tail(path, last_lines=2)
    assert [line[:1] for line in lines.look().lines] == [b"x", b"y"]
    lines.look()
    assert sum(read) < 1 << 20


def test_a_file_that_is_replaced_cut_or_removed_is_begun_anew(path: Path, tmp_path: Path) -> None:
    lines = Tail(path, last_lines=2)
    append(path, b"1\n2\n3\n")
    assert lines.look() == News([b"2", b"3"])
    (tmp_path / "copy").write_bytes(b"1\n2\n3\n4\n5\n")
    (tmp_path / "copy").replace(path)  # as rsync does
    assert lines.look() == News([b"4", b"5"]), "the same file, and longer"
    (tmp_path / "copy").write_bytes(b"1\n2\n3\n6\n7\n8\n")
    (tmp_path / "copy").replace(path)
    assert lines.look() == News([b"7", b"8"], started_over=True)
    with path.open("r+b") as file:
        file.truncate(4)
    assert lines.look() == News([b"1", b"2"], started_over=True)
    path.unlink()
    assert lines.look() == News([], started_over=True) and lines.modified_s is None
    assert lines.look() == News([])


def test_a_file_that_is_rewritten_in_place_is_begun_anew_even_if_it_is_longer(path: Path) -> None:
    lines = Tail(path)
    append(path, b"a1\na2\n")
    assert len(lines.look().lines) == 2
    path.write_bytes(b"b1\nb2\nb3\n")  # the same inode
    assert lines.look() == News([b"b1", b"b2", b"b3"], started_over=True)


def test_long_lines_and_files_come_in_pieces_and_no_line_goes_on_for_ever(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail, "_CHUNK_BYTES", 8)
    monkeypatch.setattr(tail, "_LONGEST_LINE_BYTES", 64)
    random.seed(0)
    expected = [bytes([random.choice(b"abc")]) * random.randint(1, 60) for _ in range(50)]
    path.write_bytes(b"\n".join(expected) + b"\n")
    lines = Tail(path)

    def all_of_it() -> list[bytes]:
        looks = [lines.look()]
        while looks[-1].more:
            looks.append(lines.look())
            assert len(looks) < 1000, "it never came to the end"
        return [line for look in looks for line in look.lines]

    assert all_of_it() == expected
    append(path, b"\x00" * 1000)
    all_of_it()
    append(path, b"\nlast\n")
    assert all_of_it()[-1] == b"last"


def test_what_is_no_file_is_a_usererror(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(UserError, match="is no regular file"):
            Tail(path).look()
