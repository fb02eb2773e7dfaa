import hashlib
import json
import logging
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bireme.data import cache as cache_module
from bireme.data import open_tokens, prepare, shards, sources
from bireme.data.order import Ids

if TYPE_CHECKING:
    from tests.data.made_tokens import failure
else:
    from made_tokens import failure

deterministic = settings(derandomize=True, deadline=None)


def tokens_of(path: Path) -> Ids:
    opened = open_tokens(path)
    return opened.read(np.array([0]), opened.count).ravel()


def text_of(path: Path) -> bytes:
    return tokens_of(path).astype(np.uint8).tobytes()


# --- preparing ---------------------------------------------------------------------------------------------------


def test_a_folder_is_its_documents_in_sorted_order_with_zeros_between(folder: Path) -> None:
    (folder / "b" / "empty.txt").touch()
    assert text_of(prepare(str(folder))) == "first\0zwöi\0third".encode()


def test_a_file_is_one_document(folder: Path) -> None:
    assert text_of(prepare(str(folder / "c.txt"))) == b"third"


def test_the_file_is_laid_out_as_documented(folder: Path) -> None:
    path = prepare(str(folder))
    raw = path.read_bytes()
    magic, length = struct.unpack_from("<8sI", raw)
    header = json.loads(raw[12 : 12 + length])
    tokens = raw[12 + length :]
    assert magic == b"BIREMETK"
    assert (12 + length) % 64 == 0
    assert np.frombuffer(tokens, "<u2").tolist() == list("first\0zwöi\0third".encode())
    assert header == {
        "version": 2,
        "dtype": "uint16",
        "tokenizer": "bytes",
        "vocab_size": 256,
        "count": len(tokens) // 2,
        "sha256": hashlib.sha256(tokens).hexdigest(),
        "source": str(folder),
        "documents": 3,
        "part": "",
        "counts": {},
    }
    opened = open_tokens(path)
    assert (opened.fingerprint, opened.source, opened.vocab_size) == (header["sha256"], str(folder), 256)
    assert (opened.count, opened.tokenizer, opened.tokenizer_file) == (17, "bytes", None)


def test_a_document_longer_than_a_chunk_keeps_its_letters_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "_CHUNK", 7)
    text = "aäß€" * 20
    (tmp_path / "long.txt").write_text(text)
    assert text_of(prepare(str(tmp_path / "long.txt"))) == text.encode()


def test_the_second_time_the_cached_file_is_used(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "bireme.data"):
        path = prepare(str(folder))
        before = path.stat()
        assert prepare(str(folder)) == path
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    (message,) = caplog.messages
    assert "3 documents, 17 tokens" in message and str(folder) in message and str(path) in message


def test_nothing_is_printed(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prepare(str(folder))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("edit", ["content", "time", "addition", "removal", "renaming"])
def test_an_edited_corpus_is_prepared_afresh(folder: Path, edit: str) -> None:
    path = prepare(str(folder))
    file = folder / "a.txt"
    match edit:
        case "content":
            file.write_text("first again")
        case "time":
            file.write_text("FIRST")
            os.utime(file, ns=(1, 1))
        case "addition":
            (folder / "d.txt").write_text("fourth")
        case "removal":
            file.unlink()
        case "renaming":
            file.rename(folder / "z.txt")
    fresh = prepare(str(folder))
    assert fresh != path
    assert text_of(fresh) != text_of(path)


def test_a_renamed_file_counts_as_an_edit_even_in_the_same_place(folder: Path) -> None:
    path = prepare(str(folder))
    (folder / "a.txt").rename(folder / "aa.txt")
    assert prepare(str(folder)) != path


def test_equal_text_in_another_place_has_the_same_fingerprint(folder: Path, tmp_path: Path) -> None:
    first = prepare(str(folder))
    moved = folder.rename(tmp_path / "elsewhere")
    second = prepare(str(moved))
    assert second != first
    assert open_tokens(second).fingerprint == open_tokens(first).fingerprint


def test_what_is_not_text_is_skipped_and_counted(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "binary").write_bytes(b"text\0more")
    (folder / "latin.txt").write_bytes("zwöi".encode("latin-1"))
    (folder / "cut.txt").write_bytes("zwö".encode()[:-1])
    (folder / ".hidden").write_text("hidden")
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("hidden")
    (folder / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(folder / "pipe")  # would block whoever opens it
    with caplog.at_level(logging.INFO, "bireme.data"):
        path = prepare(str(folder))
    assert text_of(path) == "first\0zwöi\0third".encode()
    assert "(skipped: 1 binary, 2 hidden, 2 not UTF-8, 1 not a file, 1 unreadable)" in caplog.text


def test_links_to_files_are_followed_and_links_to_folders_are_not(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "linked.txt").write_text("linked")
    (folder / "d.txt").symlink_to(tmp_path / "linked.txt")
    (folder / "loop").symlink_to(folder)
    (folder / "b" / "up").symlink_to(tmp_path)
    (folder / "self").symlink_to(folder / "self")
    assert text_of(prepare(str(folder))) == "first\0zwöi\0third\0linked".encode()


def test_a_cache_inside_the_corpus_is_not_part_of_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIREME_CACHE", str(folder / "cache"))
    assert prepare(str(folder)) == prepare(str(folder))


def test_a_file_that_vanishes_before_it_is_read_is_skipped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_then_remove(name: str, excluded: Path) -> sources.Found:
        found = sources.find(name, excluded)
        (folder / "a.txt").unlink()
        return found

    monkeypatch.setattr(cache_module, "find", find_then_remove)
    assert text_of(prepare(str(folder))) == "zwöi\0third".encode()


@pytest.mark.parametrize("name", ["naïve file ☃.txt", "line\nbreak.txt", "..txt", "x" * 200, os.fsdecode(b"\xff.txt")])
def test_odd_file_names(tmp_path: Path, cache: Path, name: str) -> None:
    (tmp_path / name).write_text("text")
    path = prepare(str(tmp_path / name))
    assert text_of(path) == b"text"
    assert path.parent == cache and not path.name.startswith(".") and path.name.isascii()


def test_the_standard_library() -> None:
    path = prepare("stdlib")
    opened = open_tokens(path)
    assert path.name.startswith("stdlib-")
    assert opened.count > 5_000_000
    assert tokens_of(path).max() < 256
    text = text_of(path)
    assert Path(json.__file__).read_bytes() in text
    assert text.count(b"\0") > 500
    assert hashlib.sha256(tokens_of(path).astype("<u2").tobytes()).hexdigest() == opened.fingerprint


def test_what_is_left_out_of_the_standard_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "lib"
    for name in (
        *("os.py", "json/decoder.py", "latest/x.py", "notes.txt", "_sysconfigdata_linux.py", "sitecustomize.py"),
        *("test/a.py", "unittest/test/b.py", "lib2to3/tests/c.py", "idlelib/idle_test/d.py", "site-packages/e.py"),
        *("__pycache__/f.py", "config-3.11-x86/g.py"),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda name: {"stdlib": str(root)}[name])
    assert text_of(prepare("stdlib")) == b"json/decoder.py\0latest/x.py\0os.py"


def test_no_standard_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda name: str(tmp_path))
    assert "Python" in failure(lambda: prepare("stdlib"))


# --- the cache ---------------------------------------------------------------------------------------------------


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path, cache: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert prepare(str(folder)).parent == cache
    monkeypatch.setenv("BIREME_CACHE", "")
    assert prepare(str(folder)).parent == tmp_path / "xdg" / "bireme"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert prepare(str(folder)).parent == tmp_path / "home" / ".cache" / "bireme"


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: b"",
        lambda raw: raw[:5],
        lambda raw: raw[:40],
        lambda raw: raw[:-1],
        lambda raw: raw[:-2],
        lambda raw: raw + b"\0\0",
        lambda raw: b"NOTMAGIC" + raw[8:],
        lambda raw: bytes(len(raw)),
        lambda raw: raw[:8] + b"\xff\xff\xff\xff" + raw[12:],
        lambda raw: raw[:12] + b"{" + raw[12:-1],
        lambda raw: raw.replace(b'"count": 17', b'"count": -1'),
        lambda raw: raw.replace(b'"count": 17', b'"count": [ '),
        lambda raw: raw.replace(b'"sha256"', b'"sha257"'),
        lambda raw: raw.replace(b'"version": 2', b'"version": 3'),
    ],
)
def test_a_damaged_cached_file_is_rebuilt(
    folder: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    path = prepare(str(folder))
    intact = path.read_bytes()
    assert damage(intact) != intact
    path.write_bytes(damage(intact))
    assert str(path) in failure(lambda: open_tokens(path))
    caplog.clear()
    assert prepare(str(folder)) == path
    assert path.read_bytes() == intact
    assert [record.levelname for record in caplog.records if "afresh" in record.message] == ["WARNING"]


@given(st.binary(max_size=300))
@deterministic
def test_foreign_bytes_are_refused_in_one_line(tmp_path_factory: pytest.TempPathFactory, noise: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "noise.tokens"
    for content in (noise, b"BIREMETK" + noise, b"BIREMETK" + struct.pack("<I", max(0, len(noise) - 9)) + noise):
        path.write_bytes(content)
        failure(lambda: open_tokens(path))


def test_a_missing_token_file(tmp_path: Path) -> None:
    assert "nowhere" in failure(lambda: open_tokens(tmp_path / "nowhere"))


@pytest.mark.parametrize("step", ["fsync", "replace", "read"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_in_the_middle_leaves_no_file(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        if step == "fsync":
            patch.setattr(shards.os, "fsync", fail)
        elif step == "replace":
            patch.setattr(shards.Path, "replace", fail)
        else:
            patch.setattr(cache_module, "_pieces", fail)
        if isinstance(error, OSError) and step != "read":
            assert "BIREME_CACHE" in failure(lambda: prepare(str(folder)))
        elif isinstance(error, KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt):
                prepare(str(folder))
        else:  # what cannot be read is not blamed on the cache
            assert "skipped: 3 unreadable" in failure(lambda: prepare(str(folder)))
    assert list(cache.iterdir()) == []
    assert text_of(prepare(str(folder))) == "first\0zwöi\0third".encode()


def test_a_failure_leaves_the_old_file_as_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = prepare(str(folder))
    path.write_bytes(path.read_bytes()[:-2] + b"x")  # damaged in place, so that it must be replaced
    damaged = path.read_bytes()
    monkeypatch.setattr(shards.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    failure(lambda: prepare(str(folder)))
    assert path.read_bytes() == damaged


def test_ranks_may_prepare_at_once(folder: Path, cache: Path) -> None:
    (folder / "big.txt").write_text("many words " * 50_000)
    barrier = threading.Barrier(8)
    texts: list[bytes] = []
    errors: list[BaseException] = []

    def rank() -> None:
        try:
            barrier.wait()
            texts.append(text_of(prepare(str(folder))))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=rank) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(texts) == 8 and len(set(texts)) == 1
    assert [path.suffix for path in cache.iterdir()] == [".tokens"]


def test_an_open_file_outlives_its_replacement(folder: Path) -> None:
    path = prepare(str(folder))
    opened = open_tokens(path)
    opened.read(np.array([0]), 1)
    path.rename(path.with_suffix(".old"))
    path.with_suffix(".old").unlink()
    prepare(str(folder))
    assert opened.read(np.array([0]), opened.count)[0].astype(np.uint8).tobytes() == "first\0zwöi\0third".encode()


def test_the_cached_file_is_open_to_others_who_share_the_cache(folder: Path) -> None:
    mask = os.umask(0o022)
    try:
        assert prepare(str(folder)).stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(mask)


def test_a_cache_that_cannot_be_written(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for bad in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/bireme")):
        monkeypatch.setenv("BIREME_CACHE", str(bad))
        message = failure(lambda: prepare(str(folder)))
        assert "BIREME_CACHE" in message and str(bad) in message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_without_permission(folder: Path, cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o500)
    assert "BIREME_CACHE" in failure(lambda: prepare(str(folder)))


# --- bad corpora -------------------------------------------------------------------------------------------------


def test_a_corpus_that_does_not_exist(tmp_path: Path) -> None:
    assert "nowhere" in failure(lambda: prepare(str(tmp_path / "nowhere")))
    assert "did you mean 'stdlib'?" in failure(lambda: prepare("stdlb"))
    failure(lambda: prepare(""))
    failure(lambda: prepare("a\0b"))


def test_a_corpus_without_text(tmp_path: Path, cache: Path) -> None:
    root = tmp_path / "texts"
    root.mkdir()
    assert str(root) in failure(lambda: prepare(str(root)))
    (root / "empty.txt").touch()
    assert str(root) in failure(lambda: prepare(str(root)))
    assert "empty.txt" in failure(lambda: prepare(str(root / "empty.txt")))
    (root / "binary").write_bytes(b"\0")
    assert "skipped: 1 binary" in failure(lambda: prepare(str(root)))
    assert "is binary" in failure(lambda: prepare(str(root / "binary")))
    (root / "latin.txt").write_bytes(b"\xe4")
    assert "is not UTF-8" in failure(lambda: prepare(str(root / "latin.txt")))
    os.mkfifo(root / "pipe")
    assert "neither a file nor a folder" in failure(lambda: prepare(str(root / "pipe")))
    assert list(cache.iterdir()) == []


def test_a_corpus_that_cannot_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(path: object, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(sources.os, "scandir", deny)
        assert f"cannot read the folder {str(folder)!r}: Permission denied" in failure(lambda: prepare(str(folder)))
    with monkeypatch.context() as patch:
        patch.setattr(cache_module.Path, "read_bytes", deny)
        assert "c.txt': Permission denied" in failure(lambda: prepare(str(folder / "c.txt")))
        assert "skipped: 3 unreadable" in failure(lambda: prepare(str(folder)))
