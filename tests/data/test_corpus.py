from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bireme.data import Corpus, TokenSet, open_tokens, prepare, rank_share, share

if TYPE_CHECKING:
    from tests.data.made_tokens import failure
else:
    from made_tokens import failure

Made = Callable[[int], TokenSet]
deterministic = settings(derandomize=True, deadline=None)


@pytest.mark.parametrize(("length", "enough"), [(1, 3), (8, 17), (128, 257)])
def test_a_corpus_that_is_too_short(made: Made, length: int, enough: int) -> None:
    message = failure(lambda: Corpus(made(enough - 1), length, 256))
    assert f"{enough - 1} tokens" in message and f"need {enough}" in message
    corpus = Corpus(made(enough), length, 256)
    assert (corpus.num_train_samples, corpus.num_evaluation_samples) == (1, 1)


def test_a_vocabulary_that_is_too_small(made: Made) -> None:
    message = failure(lambda: Corpus(made(1000), 8, 255))
    assert "255" in message and "256" in message and "made" in message
    Corpus(made(1000), 8, 1024)


@pytest.mark.parametrize(
    ("length", "held_out"), [(0, 0.01), (-1, 0.01), (8, 0.0), (8, 1.0), (8, -0.1), (8, float("nan"))]
)
def test_settings_that_make_no_sense(made: Made, length: int, held_out: float) -> None:
    failure(lambda: Corpus(made(1000), length, 256, held_out))


@given(st.integers(2, 60), st.integers(0, 200), st.integers(0, 100), st.integers(0, 100), st.integers())
@deterministic
def test_the_stream_does_not_depend_on_how_it_is_taken(
    made: Made, windows: int, first: int, a: int, b: int, seed: int
) -> None:
    corpus = Corpus(made(4 * windows + 1), 4, 256)
    whole = corpus.train_samples(first, a + b, seed)
    assert whole.shape == (a + b,) and whole.dtype == np.int64
    parts = [corpus.train_samples(first, a, seed), corpus.train_samples(first + a, b, seed)]
    assert np.array_equal(whole, np.concatenate(parts))


def test_an_epoch_is_every_training_sample_once_and_each_epoch_differs(made: Made) -> None:
    corpus = Corpus(made(4 * 100 + 1), 4, 256, held_out=0.1)
    epochs = [corpus.train_samples(epoch * 90, 90, seed=5).tolist() for epoch in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(90))
    assert all(a != b for a, b in pairwise(epochs))
    assert corpus.train_samples(0, 90, seed=6).tolist() != epochs[0]


def test_a_batch_may_span_several_epochs(made: Made) -> None:
    corpus = Corpus(made(4 * 3 + 1), 4, 256)
    assert corpus.num_train_samples == 2
    ids = corpus.train_samples(1, 9, seed=0).tolist()
    assert all(sorted(ids[start : start + 2]) == [0, 1] for start in (1, 3, 5, 7))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_worlds_of_every_size_see_the_same_samples_in_the_same_global_batches(made: Made, ranks: int) -> None:
    corpus = Corpus(made(16 * 300 + 1), 16, 256)
    for step in range(80):  # more than two epochs
        alone = corpus.train_samples(step * 8, 8, seed=3)
        world = [
            corpus.batch(corpus.train_samples(step * 8, 8, seed=3)[rank_share(8, rank, ranks)]) for rank in range(ranks)
        ]
        assert all(len(inputs) == 8 // ranks for inputs, _ in world)
        for together, expected in zip(zip(*world, strict=True), corpus.batch(alone), strict=True):
            assert np.array_equal(np.concatenate(together), expected)


# --- the corpus --------------------------------------------------------------------------------------------------


@given(st.integers(1, 12), st.integers(0, 60), st.floats(0.001, 0.999))
@deterministic
def test_windows_cover_the_tokens_once(made: Made, length: int, extra: int, held_out: float) -> None:
    token_set = made(2 * length + 1 + extra)
    corpus = Corpus(token_set, length, 256, held_out)
    assert corpus.num_train_samples >= 1 and corpus.num_evaluation_samples >= 1
    windows = corpus.num_train_samples + corpus.num_evaluation_samples
    inputs, targets = corpus.batch(np.arange(windows))
    predicted = windows * length
    tokens = token_set.read(np.array([0]), token_set.count)[0]
    assert token_set.count - 1 - predicted in range(length)  # fewer than a window are left over
    assert inputs.ravel().tolist() == tokens[:predicted].tolist()
    assert targets.ravel().tolist() == tokens[1 : predicted + 1].tolist()


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


def test_one_percent_is_held_out_at_the_end(made: Made) -> None:
    corpus = Corpus(made(4 * 1000 + 1), 4, 256)
    assert (corpus.num_train_samples, corpus.num_evaluation_samples) == (990, 10)
    assert corpus.evaluation_samples().tolist() == list(range(990, 1000))
    assert corpus.evaluation_samples().dtype == np.int64
    assert corpus.train_samples(0, 5000, seed=1).max() == 989


@pytest.mark.parametrize("limit", [0, 1, 3, 10, 11])
def test_a_limited_evaluation_is_spread_over_what_is_held_out(made: Made, limit: int) -> None:
    corpus = Corpus(made(4 * 1000 + 1), 4, 256)
    ids = corpus.evaluation_samples(limit)
    assert len(ids) == min(limit, 10)
    assert sorted(set(ids.tolist())) == ids.tolist()
    assert set(ids.tolist()) <= set(range(990, 1000))
    if limit == 3:
        assert ids.tolist() == [990, 993, 996]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 16])
def test_evaluation_is_shared_without_duplicates(made: Made, ranks: int) -> None:
    ids = Corpus(made(4 * 1000 + 1), 4, 256).evaluation_samples()
    shared = [ids[share(len(ids), rank, ranks)] for rank in range(ranks)]
    assert np.array_equal(np.concatenate(shared), ids)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_an_epoch_over_the_ranks_is_every_sample_once(made: Made, ranks: int) -> None:
    """B32: no sample is padded, repeated or left out, in training or in evaluation, and no epoch is like another."""
    corpus = Corpus(made(4 * 130 + 1), 4, 256, held_out=0.08)
    assert (corpus.num_train_samples, corpus.num_evaluation_samples) == (120, 10)
    epochs = []
    for epoch in range(2):
        batches = [corpus.train_samples(epoch * 120 + step * 12, 12, seed=1) for step in range(10)]
        seen = [each for batch in batches for rank in range(ranks) for each in batch[rank_share(12, rank, ranks)]]
        assert sorted(seen) == list(range(120))
        epochs.append(seen)
    assert epochs[0] != epochs[1]
    ids = corpus.evaluation_samples()
    evaluated = [each for rank in range(ranks) for each in ids[share(len(ids), rank, ranks)]]
    assert evaluated == list(range(120, 130))


def test_every_sample_once_over_ranks_and_workers(made: Made) -> None:
    """B34: two ranks with two workers each, which take every second step, over 100 samples."""
    corpus = Corpus(made(4 * 101 + 1), 4, 256)
    seen = [
        sample
        for rank in range(2)
        for worker in range(2)
        for step in range(worker, 25, 2)
        for sample in corpus.train_samples(step * 4, 4, seed=9)[rank_share(4, rank, 2)]
    ]
    assert len(seen) == 100 and sorted(seen) == list(range(100))
