import pytest

from bireme.text import count, listed, name_ranks, printable, rank_list, shell


@pytest.mark.parametrize(
    ("ranks", "short", "named"),
    [
        ([3], "3", "rank 3"),
        ([2, 0, 1, 5], "0-2,5", "ranks 0-2, 5"),
        ([1, 3], "1,3", "ranks 1, 3"),
        ([4, 4, 5], "4-5", "ranks 4-5"),
    ],
)
def test_ranks(ranks: list[int], short: str, named: str) -> None:
    assert rank_list(ranks) == short
    assert name_ranks(ranks) == named


def test_lists_and_counts() -> None:
    assert listed(["a", "b"]) == "a, b"
    assert listed(list("abcdefgh"), most=3) == "a, b, c and 5 more"
    assert (count(1, "node"), count(2, "node"), count(0, "node")) == ("1 node", "2 nodes", "0 nodes")


def test_foreign_text() -> None:
    assert printable("a\x1b[31m\nb") == "a\\x1b[31m\\nb"
    assert shell("a b; rm -rf $HOME") == "'a b; rm -rf $HOME'"
