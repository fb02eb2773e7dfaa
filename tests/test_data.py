import hashlib
import json
import logging
import os
import struct
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bireme import data
from bireme.data import Corpus, Permutation, TokenFile, open_tokens, prepare, rank_share, share
from bireme.errors import UserError

deterministic = settings(derandomize=True, deadline=None)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("BIREME_CACHE", str(folder))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three documents in two folders, in an order that is not the one they were made in."""
    root = tmp_path / "texts"
    (root / "b").mkdir(parents=True)
    (root / "c.txt").write_text("third")
    (root / "b" / "two.txt").write_text("zwöi")
    (root / "a.txt").write_text("first")
    return root


def text_of(path: Path) -> bytes:
    return open_tokens(path).tokens.astype(np.uint8).tobytes()


def failure(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def made_of(count: int) -> TokenFile:
    tokens = (np.arange(count) * 7 % 251).astype(np.uint16)
    return TokenFile(Path("made.tokens"), tokens, 256, "0" * 64, "made")


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
        "version": 1,
        "dtype": "uint16",
        "tokenizer": "bytes",
        "vocab_size": 256,
        "count": len(tokens) // 2,
        "sha256": hashlib.sha256(tokens).hexdigest(),
        "source": str(folder),
    }
    opened = open_tokens(path)
    assert (opened.fingerprint, opened.source, opened.vocab_size) == (header["sha256"], str(folder), 256)
    assert opened.tokens.dtype == np.uint16
    assert not opened.tokens.flags.writeable


def test_a_document_longer_than_a_chunk_keeps_its_letters_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "_CHUNK", 7)
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
    find = data._find

    def find_then_remove(name: str, cache: Path) -> data._Text:
        text = find(name, cache)
        (folder / "a.txt").unlink()
        return text

    monkeypatch.setattr(data, "_find", find_then_remove)
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
    assert len(opened.tokens) > 5_000_000
    assert opened.tokens.max() < 256
    text = text_of(path)
    assert Path(json.__file__).read_bytes() in text
    assert text.count(b"\0") > 500
    assert hashlib.sha256(opened.tokens.tobytes()).hexdigest() == opened.fingerprint


def test_what_is_left_out_of_the_standard_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "lib"
    for name in (
        *("os.py", "json/decoder.py", "latest/x.py", "notes.txt", "_sysconfigdata_linux.py", "sitecustomize.py"),
        *("test/a.py", "unittest/test/b.py", "lib2to3/tests/c.py", "idlelib/idle_test/d.py", "site-packages/e.py"),
        *("__pycache__/f.py", "config-3.11-x86/g.py"),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    monkeypatch.setattr(data.sysconfig, "get_path", lambda name: {"stdlib": str(root)}[name])
    assert text_of(prepare("stdlib")) == b"json/decoder.py\0latest/x.py\0os.py"


def test_no_standard_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.sysconfig, "get_path", lambda name: str(tmp_path))
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
        lambda raw: raw.replace(b'"version": 1', b'"version": 2'),
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


@pytest.mark.parametrize(("field", "value"), [("tokenizer", "b\u00fctes"), ("dtype", "uint32"), ("vocab_size", 512)])
def test_another_tokenizer_is_refused(folder: Path, field: str, value: object) -> None:
    path = prepare(str(folder))
    raw = path.read_bytes()
    length = struct.unpack_from("<I", raw, 8)[0]
    header = json.dumps({**json.loads(raw[12 : 12 + length]), field: value}).encode().ljust(length)
    path.write_bytes(raw[:12] + header + raw[12 + length :])
    message = failure(lambda: open_tokens(path))
    assert field in message and repr(value) in message


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
            patch.setattr(data.os, "fsync", fail)
        elif step == "replace":
            patch.setattr(data.Path, "replace", fail)
        else:
            patch.setattr(data, "_pieces", fail)
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
    monkeypatch.setattr(data.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error")))
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
    tokens = open_tokens(path).tokens
    path.rename(path.with_suffix(".old"))
    path.with_suffix(".old").unlink()
    prepare(str(folder))
    assert tokens.astype(np.uint8).tobytes() == "first\0zwöi\0third".encode()


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
        patch.setattr(data.os, "scandir", deny)
        assert f"cannot read the folder {str(folder)!r}: Permission denied" in failure(lambda: prepare(str(folder)))
    with monkeypatch.context() as patch:
        patch.setattr(data.Path, "read_bytes", deny)
        assert "c.txt': Permission denied" in failure(lambda: prepare(str(folder / "c.txt")))
        assert "skipped: 3 unreadable" in failure(lambda: prepare(str(folder)))


@pytest.mark.parametrize(("length", "enough"), [(1, 3), (8, 17), (128, 257)])
def test_a_corpus_that_is_too_short(length: int, enough: int) -> None:
    message = failure(lambda: Corpus(made_of(enough - 1), length, 256))
    assert f"{enough - 1} tokens" in message and f"need {enough}" in message
    corpus = Corpus(made_of(enough), length, 256)
    assert (corpus.num_train_samples, corpus.num_evaluation_samples) == (1, 1)


def test_a_vocabulary_that_is_too_small() -> None:
    message = failure(lambda: Corpus(made_of(1000), 8, 255))
    assert "255" in message and "256" in message and "made" in message
    Corpus(made_of(1000), 8, 1024)


@pytest.mark.parametrize(
    ("length", "held_out"), [(0, 0.01), (-1, 0.01), (8, 0.0), (8, 1.0), (8, -0.1), (8, float("nan"))]
)
def test_settings_that_make_no_sense(length: int, held_out: float) -> None:
    failure(lambda: Corpus(made_of(1000), length, 256, held_out))


# --- the order ---------------------------------------------------------------------------------------------------


@given(
    st.one_of(st.integers(1, 70), st.integers(0, 13).flatmap(lambda b: st.sampled_from([2**b, 2**b + 1, 2**b + 2]))),
    st.integers(),
    st.integers(0, 2**40),
)
@settings(deterministic, max_examples=300)
def test_a_permutation_is_a_bijection(n: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(Permutation(n, seed, epoch)(np.arange(n))), np.arange(n))


@pytest.mark.parametrize("n", [1, 2, 3, *(2**b + d for b in (2, 3, 4, 8, 16) for d in (-1, 0, 1))])
def test_a_permutation_of_every_awkward_size(n: int) -> None:
    assert np.array_equal(np.sort(Permutation(n, 1, 0)(np.arange(n))), np.arange(n))


@given(st.integers(1, 2**62), st.integers(), st.data())
@deterministic
def test_a_huge_permutation_stays_inside_and_does_not_collide(n: int, seed: int, draw: st.DataObject) -> None:
    positions = np.unique(draw.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=50)))
    there = Permutation(n, seed, 0)(positions)
    assert there.dtype == np.int64
    assert there.min() >= 0 and there.max() < n
    assert len(np.unique(there)) == len(positions)


@pytest.mark.parametrize("n", [1000, 1024, 1025, 93_434])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_permutation_looks_shuffled(n: int, seed: int) -> None:
    identity = np.arange(n)
    first, second = (Permutation(n, seed, epoch)(identity) for epoch in (0, 1))
    bound = 5 / np.sqrt(n)  # five standard deviations of the correlation of n independent pairs
    assert abs(np.corrcoef(identity, first)[0, 1]) < bound
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < bound
    assert abs(np.corrcoef(first, second)[0, 1]) < bound
    assert (first == identity).sum() < 10  # one is expected
    assert (first == second).sum() < 10
    assert (np.diff(first) == 1).sum() < 10
    assert abs((np.diff(first) > 0).mean() - 0.5) < 0.05
    # Each tenth of the epoch takes from all tenths of the corpus alike.
    counts = np.histogram2d(identity, first, bins=10)[0]
    assert abs(counts - n / 100).max() < 6 * np.sqrt(n / 100)


def test_small_permutations_are_all_reached() -> None:
    seen = [tuple(Permutation(4, seed, 0)(np.arange(4)).tolist()) for seed in range(600)]
    counts = [seen.count(permutation) for permutation in set(seen)]
    assert len(counts) == 24 and min(counts) > 5


def test_a_permutation_refuses_positions_outside() -> None:
    permutation = Permutation(10, 0, 0)
    for outside in (-1, 10):
        with pytest.raises(ValueError, match="outside"):
            permutation(np.array([0, outside]))
    assert permutation(np.array([], dtype=np.int64)).tolist() == []


def test_the_order_never_changes() -> None:
    """Resuming a run with a later version must find the same order: these numbers are part of the format."""
    assert Permutation(100, 7, 3)(np.arange(8)).tolist() == [21, 52, 68, 40, 38, 7, 59, 88]


@given(st.integers(2, 60), st.integers(0, 200), st.integers(0, 100), st.integers(0, 100), st.integers())
@deterministic
def test_the_stream_does_not_depend_on_how_it_is_taken(windows: int, first: int, a: int, b: int, seed: int) -> None:
    corpus = Corpus(made_of(4 * windows + 1), 4, 256)
    whole = corpus.train_samples(first, a + b, seed)
    assert whole.shape == (a + b,) and whole.dtype == np.int64
    parts = [corpus.train_samples(first, a, seed), corpus.train_samples(first + a, b, seed)]
    assert np.array_equal(whole, np.concatenate(parts))


def test_an_epoch_is_every_training_sample_once_and_each_epoch_differs() -> None:
    corpus = Corpus(made_of(4 * 100 + 1), 4, 256, held_out=0.1)
    epochs = [corpus.train_samples(epoch * 90, 90, seed=5).tolist() for epoch in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(90))
    assert all(a != b for a, b in pairwise(epochs))
    assert corpus.train_samples(0, 90, seed=6).tolist() != epochs[0]


def test_a_batch_may_span_several_epochs() -> None:
    corpus = Corpus(made_of(4 * 3 + 1), 4, 256)
    assert corpus.num_train_samples == 2
    ids = corpus.train_samples(1, 9, seed=0).tolist()
    assert all(sorted(ids[start : start + 2]) == [0, 1] for start in (1, 3, 5, 7))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_worlds_of_every_size_see_the_same_samples_in_the_same_global_batches(ranks: int) -> None:
    corpus = Corpus(made_of(16 * 300 + 1), 16, 256)
    for step in range(80):  # more than two epochs
        alone = corpus.train_samples(step * 8, 8, seed=3)
        world = [
            corpus.batch(corpus.train_samples(step * 8, 8, seed=3)[rank_share(8, rank, ranks)]) for rank in range(ranks)
        ]
        assert all(len(inputs) == 8 // ranks for inputs, _ in world)
        for together, expected in zip(zip(*world, strict=True), corpus.batch(alone), strict=True):
            assert np.array_equal(np.concatenate(together), expected)


@given(st.integers(0, 1000), st.integers(1, 40))
@deterministic
def test_shares_are_in_order_without_gap_and_nearly_equal(count: int, ranks: int) -> None:
    shares = [share(count, rank, ranks) for rank in range(ranks)]
    items = list(range(count))
    assert [item for part in shares for item in items[part]] == items
    sizes = {len(items[part]) for part in shares}
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("size", "ranks", "advice"), [(10, 4, "8 or 12"), (3, 4, "take 4"), (0, 2, "take 2"), (-4, 2, "take")]
)
def test_a_global_batch_that_cannot_be_shared(size: int, ranks: int, advice: str) -> None:
    message = failure(lambda: rank_share(size, 0, ranks))
    assert str(size) in message and str(ranks) in message and advice in message


# --- the corpus --------------------------------------------------------------------------------------------------


@given(st.integers(1, 12), st.integers(0, 60), st.floats(0.001, 0.999))
@deterministic
def test_windows_cover_the_tokens_once(length: int, extra: int, held_out: float) -> None:
    token_file = made_of(2 * length + 1 + extra)
    corpus = Corpus(token_file, length, 256, held_out)
    assert corpus.num_train_samples >= 1 and corpus.num_evaluation_samples >= 1
    windows = corpus.num_train_samples + corpus.num_evaluation_samples
    inputs, targets = corpus.batch(np.arange(windows))
    predicted = windows * length
    assert len(token_file.tokens) - 1 - predicted in range(length)  # fewer than a window are left over
    assert inputs.ravel().tolist() == token_file.tokens[:predicted].tolist()
    assert targets.ravel().tolist() == token_file.tokens[1 : predicted + 1].tolist()


def test_a_batch_is_two_contiguous_arrays_in_the_order_of_the_ids(folder: Path) -> None:
    (folder / "a.txt").write_text("abcdefghijklmnopqrstuvwxyz")
    corpus = Corpus(open_tokens(prepare(str(folder / "a.txt"))), 5, 256)
    inputs, targets = corpus.batch(np.array([2, 0, 2]))
    assert [bytes(row.tolist()) for row in inputs] == [b"klmno", b"abcde", b"klmno"]
    assert [bytes(row.tolist()) for row in targets] == [b"lmnop", b"bcdef", b"lmnop"]
    for array in (inputs, targets):
        assert array.dtype == np.int64 and array.shape == (3, 5)
        assert array.flags.c_contiguous and array.flags.writeable  # torch.from_numpy warns about read-only arrays
    assert corpus.batch(np.array([], dtype=np.int64))[0].shape == (0, 5)
    with pytest.raises(IndexError):
        corpus.batch(np.array([5]))


def test_one_percent_is_held_out_at_the_end() -> None:
    corpus = Corpus(made_of(4 * 1000 + 1), 4, 256)
    assert (corpus.num_train_samples, corpus.num_evaluation_samples) == (990, 10)
    assert corpus.evaluation_samples().tolist() == list(range(990, 1000))
    assert corpus.evaluation_samples().dtype == np.int64
    assert corpus.train_samples(0, 5000, seed=1).max() == 989


@pytest.mark.parametrize("limit", [0, 1, 3, 10, 11])
def test_a_limited_evaluation_is_spread_over_what_is_held_out(limit: int) -> None:
    corpus = Corpus(made_of(4 * 1000 + 1), 4, 256)
    ids = corpus.evaluation_samples(limit)
    assert len(ids) == min(limit, 10)
    assert sorted(set(ids.tolist())) == ids.tolist()
    assert set(ids.tolist()) <= set(range(990, 1000))
    if limit == 3:
        assert ids.tolist() == [990, 993, 996]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 16])
def test_evaluation_is_shared_without_duplicates(ranks: int) -> None:
    ids = Corpus(made_of(4 * 1000 + 1), 4, 256).evaluation_samples()
    shared = [ids[share(len(ids), rank, ranks)] for rank in range(ranks)]
    assert np.array_equal(np.concatenate(shared), ids)
