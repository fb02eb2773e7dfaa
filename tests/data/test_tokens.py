import os
import pickle
import re
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bireme.data import Corpus, open_tokens, prepare
from bireme.data.order import Ids
from bireme.data.tokens import LOCK, MANIFEST, is_token_set, verify_tokens

if TYPE_CHECKING:
    from tests.data.made_tokens import failure, write_folder, write_shard
else:
    from made_tokens import failure, write_folder, write_shard

deterministic = settings(derandomize=True, deadline=None)
STREAM = np.arange(1000) * 7 % 251


def rows(*starts: int) -> Ids:
    return np.array(starts, dtype=np.int64)


# --- the same tokens, however they are cut -----------------------------------------------------------------------


@given(st.lists(st.integers(0, 1000), max_size=8), st.integers(1, 60), st.data())
@settings(deterministic, max_examples=40)
def test_samples_do_not_depend_on_the_shards(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], length: int, draw: st.DataObject
) -> None:
    borders = [0, *sorted(cuts), 1000]  # empty shards among them
    folder = tmp_path_factory.mktemp("sharded") / "set"
    tokens = open_tokens(write_folder(folder, [STREAM[first:last] for first, last in pairwise(borders)]))
    assert (tokens.count, len(tokens.shards)) == (1000, len(borders) - 1)
    corpus = Corpus(tokens, length, 256)
    ids = np.array(draw.draw(st.lists(st.integers(0, (999 // length) - 1), max_size=5)), dtype=np.int64)
    inputs, targets = corpus.batch(ids)
    assert inputs.tolist() == [STREAM[each * length : (each + 1) * length].tolist() for each in ids.tolist()]
    assert targets.tolist() == [STREAM[each * length + 1 : (each + 1) * length + 1].tolist() for each in ids.tolist()]


def test_reading_outside_is_an_error(tmp_path: Path) -> None:
    tokens = open_tokens(write_folder(tmp_path / "set", [STREAM[:500], STREAM[500:]]))
    assert tokens.read(rows(0, 990), 10).tolist() == [STREAM[:10].tolist(), STREAM[990:].tolist()]
    assert tokens.read(rows(), 10).shape == (0, 10)
    for start in (-1, 991):
        with pytest.raises(IndexError):
            tokens.read(rows(start), 10)


@pytest.mark.parametrize(("vocab_size", "width"), [(65536, 2), (65537, 4)])
def test_tokens_take_two_bytes_where_the_vocabulary_allows(tmp_path: Path, vocab_size: int, width: int) -> None:
    largest = np.array([0, vocab_size - 1, 1])
    path = write_shard(tmp_path / "one.tokens", largest, vocab_size)
    assert path.stat().st_size == 4096 + 3 * width
    assert open_tokens(path).read(rows(0), 3)[0].tolist() == largest.tolist()
    whole = open_tokens(write_folder(tmp_path / "set", [largest], vocab_size))
    assert whole.read(rows(0), 3)[0].tolist() == largest.tolist()
    assert whole.size_bytes == path.stat().st_size


def test_a_set_arrives_in_another_process_without_its_files(tmp_path: Path) -> None:
    corpus = Corpus(open_tokens(write_folder(tmp_path / "set", [STREAM[:500], STREAM[500:]])), 16, 256)
    expected = corpus.batch(rows(0, 31, 5))
    arrived = pickle.loads(pickle.dumps(corpus))
    for each, other in zip(arrived.batch(rows(0, 31, 5)), expected, strict=True):
        assert np.array_equal(each, other)
    assert arrived.token_set.fingerprint == corpus.token_set.fingerprint


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_many_shards_need_few_descriptors(tmp_path: Path) -> None:
    tokens = open_tokens(write_folder(tmp_path / "set", [STREAM[first : first + 5] for first in range(0, 1000, 5)]))
    before = descriptors()
    assert tokens.read(rows(0), 1000)[0].tolist() == STREAM.tolist()
    assert descriptors() - before <= 64
    del tokens
    assert descriptors() <= before


def test_the_fingerprint_is_that_of_the_tokens(tmp_path: Path) -> None:
    first = open_tokens(write_folder(tmp_path / "a", [STREAM]))
    same = open_tokens(write_folder(tmp_path / "b", [STREAM]))
    other = open_tokens(write_folder(tmp_path / "c", [STREAM[::-1]]))
    assert first.fingerprint == same.fingerprint != other.fingerprint


# --- damage ------------------------------------------------------------------------------------------------------


def test_a_shard_cut_short_while_training_is_named(tmp_path: Path) -> None:
    tokens = open_tokens(write_folder(tmp_path / "set", [STREAM[:500], STREAM[500:]]))
    shard = tokens.shards[1].path
    tokens.read(rows(0), 1000)
    os.truncate(shard, 4096 + 100)  # the open file
    assert re.search("shard-00001.tokens.* was truncated", failure(lambda: tokens.read(rows(600), 10)))
    reopened = pickle.loads(pickle.dumps(tokens))
    assert re.search("shard-00001.tokens.* was truncated", failure(lambda: reopened.read(rows(600), 10)))
    assert reopened.read(rows(0), 10)[0].tolist() == STREAM[:10].tolist()
    shard.unlink()
    assert "shard-00001.tokens" in failure(lambda: pickle.loads(pickle.dumps(tokens)).read(rows(600), 10))


def test_a_wrong_checksum_is_named(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "set", [STREAM[:500], STREAM[500:]])
    verify_tokens(open_tokens(path))
    shard = path / "shard-00001.tokens"
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    tokens = open_tokens(path)
    assert re.search("shard-00001.tokens.* wrong checksum", failure(lambda: verify_tokens(tokens)))
    assert len(tokens.bad_shards()) == 1
    assert "wrong checksum" in failure(lambda: verify_tokens(open_tokens(shard)))


def test_a_token_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    tokens = [np.arange(500) % 7, np.arange(500) % 7]
    tokens[1][123] = 300
    corpus = Corpus(open_tokens(write_folder(tmp_path / "set", tokens, 256)), 10, 256)
    corpus.batch(rows(0, 1))
    message = failure(lambda: corpus.batch(rows(0, 62)))
    assert "token 123 of" in message and "shard-00001.tokens" in message and "300" in message and "256" in message


def test_a_missing_or_torn_shard_of_a_folder(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "set", [STREAM[:500], STREAM[500:]])
    shard = path / "shard-00001.tokens"
    os.truncate(shard, shard.stat().st_size - 1)
    assert re.search("shard-00001.tokens.* is torn", failure(lambda: open_tokens(path)))
    shard.unlink()
    assert "shard-00001.tokens" in failure(lambda: open_tokens(path))


@pytest.mark.parametrize(
    "damage",
    [
        lambda manifest: [],
        lambda manifest: {},
        lambda manifest: {**manifest, "format": "other"},
        lambda manifest: {**manifest, "version": 2},
        lambda manifest: {**manifest, "vocab_size": "256"},
        lambda manifest: {**manifest, "shards": 3},
        lambda manifest: {**manifest, "shards": [3]},
        lambda manifest: {**manifest, "shards": []},
        lambda manifest: {**manifest, "shards": [{**manifest["shards"][0], "file": "../set/shard-00000.tokens"}]},
        lambda manifest: {**manifest, "shards": [{**manifest["shards"][0], "count": -1}]},
        lambda manifest: {**manifest, "shards": [{**manifest["shards"][0], "count": 10**9}]},
        lambda manifest: {**manifest, "shards": [{**manifest["shards"][0], "sha256": None}]},
    ],
)
def test_a_damaged_list_of_shards(tmp_path: Path, damage: Any) -> None:
    path = write_folder(tmp_path / "set", [STREAM])
    manifest = orjson.loads((path / MANIFEST).read_bytes())
    (path / MANIFEST).write_bytes(orjson.dumps(damage(manifest)))
    failure(lambda: open_tokens(path))
    (path / MANIFEST).write_bytes(b"{" * 100_000)
    failure(lambda: open_tokens(path))


def test_an_unfinished_folder_says_so(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "set", [STREAM])
    (path / MANIFEST).unlink()
    assert "is not finished" in failure(lambda: open_tokens(path))
    for shard in path.iterdir():
        shard.unlink()
    assert "there are no tokens" in failure(lambda: open_tokens(path))
    (path / LOCK).touch()
    assert "is not finished" in failure(lambda: open_tokens(path))
    assert prepare(str(path)) == path  # not a folder of text


def test_a_set_without_tokens(tmp_path: Path) -> None:
    assert "no tokens" in failure(lambda: open_tokens(write_shard(tmp_path / "empty.tokens", [])))


# --- what is a token set -----------------------------------------------------------------------------------------


def test_what_is_prepared_is_taken_as_it_is(tmp_path: Path, cache: Path) -> None:
    folder = write_folder(tmp_path / "set", [STREAM])
    shard = write_shard(tmp_path / "one.tokens", STREAM)
    binary = tmp_path / "train.bin"
    binary.write_bytes(STREAM.astype("<u2").tobytes())
    for path in (folder, shard, binary):
        assert prepare(str(path)) == path
    assert not cache.exists()


def test_a_folder_of_text_is_no_token_set(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "firmware.bin").write_bytes(b"\0\1")
    (tmp_path / MANIFEST).write_text('{"format": "of somebody else"}')
    assert not is_token_set(tmp_path)
    assert prepare(str(tmp_path)) != tmp_path
    assert not is_token_set(tmp_path / "nowhere")
