import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.link_pairs import Pair, blame, next_bytes, rounds, slow_pairs

MBIT = 1e6


def matrix(rates: dict[tuple[str, str], float], nodes: int = 4, usual: float = 400 * MBIT) -> list[Pair]:
    """All directions between node0, node1, ... at the usual rate, but for `rates`."""
    names = [f"node{index}" for index in range(nodes)]
    return [Pair(a, b, 1_000_000, 3, 8_000_000 / rates.get((a, b), usual)) for a, b in itertools.permutations(names, 2)]


def around(node: str, rate: float, nodes: int = 4, out: bool = True, back: bool = True) -> dict[tuple[str, str], float]:
    others = [f"node{index}" for index in range(nodes) if f"node{index}" != node]
    return {(node, each): rate for each in others if out} | {(each, node): rate for each in others if back}


@pytest.mark.parametrize("nodes", [3, 4, 5, 9])
def test_one_slow_node_is_marked_and_named(nodes: int) -> None:
    rates = around("node1", 40 * MBIT, nodes)
    pairs = matrix(rates, nodes)
    slow = slow_pairs(pairs)
    assert set(slow) == set(rates)
    assert all(why.startswith("0.10 x") for why in slow.values())
    assert blame(pairs, slow) == ["every pair with node1 is slow, both ways: its link"]


@pytest.mark.parametrize(
    ("out", "said"),
    [
        (True, "everything that node2 sends is slow: its link, outwards"),
        (False, "everything that node2 receives is slow: its link, inwards"),
    ],
)
def test_one_slow_side_of_a_node(out: bool, said: str) -> None:
    rates = around("node2", 100 * MBIT, out=out, back=not out)
    pairs = matrix(rates)
    slow = slow_pairs(pairs)
    assert set(slow) == set(rates)
    assert blame(pairs, slow) == [said]


def test_one_slow_direction_of_one_pair() -> None:
    pairs = matrix({("node0", "node3"): 100 * MBIT})
    slow = slow_pairs(pairs)
    assert set(slow) == {("node0", "node3")}
    assert blame(pairs, slow) == [
        "node0 to node3 is slow, the other way is not: the path between them, in that direction"
    ]


def test_one_slow_pair_is_the_path_and_no_node() -> None:
    pairs = matrix({("node0", "node3"): 200 * MBIT, ("node3", "node0"): 210 * MBIT})
    slow = slow_pairs(pairs)
    assert set(slow) == {("node0", "node3"), ("node3", "node0")}
    assert blame(pairs, slow) == [
        "node0 and node3 are slow both ways, and no other pair of theirs is: the path between them"
    ]


def test_two_slow_nodes_are_both_named() -> None:
    pairs = matrix(around("node1", 50 * MBIT, 5) | around("node4", 60 * MBIT, 5), 5)
    assert [sentence.split()[3] for sentence in blame(pairs, slow_pairs(pairs))] == ["node1", "node4"]


@pytest.mark.parametrize("nodes", [2, 3, 4, 8])
def test_equal_pairs_are_not_slow(nodes: int) -> None:
    pairs = matrix({("node0", "node1"): 300 * MBIT}, nodes)
    assert slow_pairs(pairs) == {} and blame(pairs, {}) == []


def test_two_nodes_compare_their_directions() -> None:
    pairs = matrix({("node1", "node0"): 40 * MBIT}, 2)
    slow = slow_pairs(pairs)
    assert set(slow) == {("node1", "node0")}
    assert blame(pairs, slow) == [
        "node1 to node0 is slow, the other way is not: the link of one of them, in that direction"
    ]


def test_two_nodes_equally_slow_are_held_against_the_link_and_the_measurement_before() -> None:
    pairs = matrix({}, 2, usual=40 * MBIT)
    assert slow_pairs(pairs) == {}
    slow = slow_pairs(pairs, link_bit_per_s=400 * MBIT)
    assert set(slow.values()) == {"0.10 x the link's rate"}
    assert blame(pairs, slow) == ["node0 and node1 are slow both ways: the link of one of them"]
    assert slow_pairs(matrix({}, 2), link_bit_per_s=400 * MBIT) == {}
    before = [Pair(p.source, p.target, p.bytes, 3, p.median_s, None, 390 * MBIT) for p in pairs]
    assert set(slow_pairs(before).values()) == {"0.10 x the measurement before"}


def test_pairs_that_were_not_measured_are_neither_slow_nor_in_the_way() -> None:
    pairs = [
        Pair(p.source, p.target, 0, 0, None, "not reached") if "node3" in (p.source, p.target) else p
        for p in matrix(around("node1", 40 * MBIT))
    ]
    slow = slow_pairs(pairs)
    assert not any("node3" in direction for direction in slow)
    assert blame(pairs, slow) == ["every pair with node1 is slow, both ways: its link"]
    assert slow_pairs([Pair("a", "b", 0, 0, None, "not reached")]) == {}


@given(
    st.integers(2, 6).flatmap(
        lambda nodes: st.tuples(
            st.just(nodes),
            st.lists(st.floats(1e5, 1e11), min_size=nodes * (nodes - 1), max_size=nodes * (nodes - 1)),
        )
    )
)
def test_every_slow_direction_is_explained(case: tuple[int, list[float]]) -> None:
    nodes, rates = case
    names = [f"n{index}" for index in range(nodes)]
    pairs = [
        Pair(a, b, 1000, 1, 8000 / rate) for (a, b), rate in zip(itertools.permutations(names, 2), rates, strict=True)
    ]
    slow = slow_pairs(pairs)
    said = " ".join(blame(pairs, slow))
    assert bool(slow) == bool(said)
    for source, target in slow:
        assert source in said or target in said


@pytest.mark.parametrize("nodes", [1, 2, 3, 16, 17, 18, 33])
def test_rounds_hold_every_pair_once_and_no_node_twice(nodes: int) -> None:
    schedule = rounds(nodes)
    pairs = [pair for each in schedule for pair in each]
    assert sorted(pairs) == list(itertools.combinations(range(nodes), 2))
    for each in schedule:
        members = [node for pair in each for node in pair]
        assert len(set(members)) == len(members)
    assert all(len(each) == 1 for each in schedule) == (nodes <= 16)
    if nodes > 16:
        assert len(schedule) == nodes - 1 + nodes % 2


@pytest.mark.parametrize("rate", [1e5, 1e6, 1e7, 1e8, 1e9, 1e10])
def test_a_message_grows_to_the_time_it_is_to_take(rate: float) -> None:
    """Bytes a second; with a first megabyte that passes at ten times the rate, as through a shaped link."""
    size, settled, spent = 65536, False, 0.0
    time_s = 0.0
    for _ in range(20):
        time_s = min(size, 1e6) / rate / 10 + max(0.0, size - 1e6) / rate
        if settled:
            break
        spent += time_s
        size, settled = next_bytes(size, time_s, 0.2, 1 << 26)
    assert settled
    assert time_s <= 2.5 and spent < 2.0
    assert time_s >= 0.05 or size == 1 << 26


def test_a_message_stops_growing_at_the_largest() -> None:
    assert next_bytes(1 << 20, 1e-6, 0.2, 1 << 20) == (1 << 20, True)
    assert next_bytes(1 << 20, 1e-6, 0.2, 3 << 20) == (3 << 20, False)
    assert next_bytes(1 << 20, 100.0, 0.2, 1 << 30) == (int((1 << 20) * 0.2 / 100), True)
