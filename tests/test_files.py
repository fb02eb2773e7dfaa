import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from bireme.errors import UserError
from bireme.files import not_a_link, open_regular, written_whole


def test_files_are_whole_and_nothing_else_is_left(tmp_path: Path) -> None:
    with pytest.raises(ValueError), written_whole(tmp_path / "x") as file:
        file.write(b"half")
        raise ValueError
    assert list(tmp_path.iterdir()) == []
    with written_whole(tmp_path / "x") as file:
        file.write(b"whole")
        assert not (tmp_path / "x").exists()
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("x", b"whole")]


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(path))  # the kernel takes 107 characters


NO_FILES: dict[str, Callable[[Path], object]] = {"pipe": os.mkfifo, "folder": Path.mkdir, "socket": make_socket}


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_regular_file_is_neither_replaced_nor_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x"
    NO_FILES[kind](path)
    (tmp_path / "link").symlink_to(path)
    before = path.lstat()
    opened: list[object] = []
    monkeypatch.setattr(os, "open", lambda *given: opened.append(given))
    for name in (path, tmp_path / "link"):
        with pytest.raises(OSError) as error, written_whole(name):
            pass
        assert error.value.strerror == "it is no regular file"
        with pytest.raises(UserError) as refused:
            open_regular(name)
        assert str(refused.value) == f"{name} is no regular file"
    assert not opened
    assert (path.lstat().st_ino, path.lstat().st_mode) == (before.st_ino, before.st_mode)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link", "x"]


def test_the_folder_one_is_in_is_no_regular_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (".", ".."):
        with pytest.raises(OSError, match="it is no regular file"), written_whole(Path(name)):
            pass


def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link, link_to_nothing = tmp_path / "there" / "x", tmp_path / "link", tmp_path / "absent"
    target.write_bytes(b"old")
    link.symlink_to(Path("there") / "x")
    link_to_nothing.symlink_to(tmp_path / "there" / "y")
    for path in (link, link_to_nothing):
        with written_whole(path) as file:
            file.write(b"new")
            assert target.read_bytes() == (b"old" if path is link else b"new")
        assert path.is_symlink() and path.read_bytes() == b"new"
    assert sorted(each.name for each in (tmp_path / "there").iterdir()) == ["x", "y"]
    assert not_a_link(target) == target
    with pytest.raises(UserError, match="is a symbolic link: name the file to write with --out FILE"):
        not_a_link(link)


def test_a_file_is_opened_to_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"a\nb\n")
    with open_regular(tmp_path / "x") as file:
        assert list(file) == [b"a\n", b"b\n"]
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "y")
