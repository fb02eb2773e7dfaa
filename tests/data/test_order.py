from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bireme.data.order import Permutation, rank_share, share

if TYPE_CHECKING:
    from tests.data.made_tokens import failure
else:
    from made_tokens import failure

deterministic = settings(derandomize=True, deadline=None)


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
