import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bireme import link_pairs
from bireme.link_pairs import Pair
from bireme.link_probe import Probe, groups_of, sizes
from bireme.links import OPERATIONS, Measurement
from bireme.world import World, here

if TYPE_CHECKING:
    from tests.pool import RankPool
else:
    from pool import RankPool


@contextmanager
def world_of(node: str) -> Iterator[World]:
    """The pool's process group, this rank said to be on `node`."""
    os.environ["BIREME_NODE"] = node
    try:
        yield here(0, torch.device("cpu"))
    finally:
        del os.environ["BIREME_NODE"]


def nodes_of(*sizes: int) -> list[dict[str, Any]]:
    first, nodes = 0, []
    for index, size in enumerate(sizes):
        nodes.append({"name": f"node{index}", "ranks": list(range(first, first + size))})
        first += size
    return nodes


def test_sizes_grow_to_the_largest() -> None:
    assert sizes(1024) == [1024]
    assert sizes(5000) == [1024, 4096, 5000]
    assert sizes(16384) == [1024, 4096, 16384]
    assert len(sizes(64 << 20)) == 9


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (nodes_of(4), [("world", [[0, 1, 2, 3]], None), ("intra-node", [[0, 1, 2, 3]], "world"), ("inter-node", [])]),
        (nodes_of(1, 1), [("world", [[0, 1]], None), ("intra-node", []), ("inter-node", [[0, 1]], "world")]),
        (
            nodes_of(1, 2),
            [("world", [[0, 1, 2]], None), ("intra-node", [[1, 2]], None), ("inter-node", [[0, 1]], None)],
        ),
        (
            nodes_of(2, 2),
            [("world", [[0, 1, 2, 3]], None), ("intra-node", [[0, 1], [2, 3]], None), ("inter-node", [[0, 2]], None)],
        ),
    ],
)
def test_groups_follow_the_topology(nodes: list[dict[str, Any]], expected: list[tuple[Any, ...]]) -> None:
    for group, (name, members, *same_as) in zip(groups_of(nodes), expected, strict=True):
        assert (group.name, [list(each) for each in group.members]) == (name, members)
        assert bool(group.reason) == (not members)
        assert not members or group.same_as == same_as[0]


def measure(rank: int, size: int, nodes: list[str], max_bytes: int, seconds: float) -> tuple[Any, Any, float]:
    with world_of(nodes[rank]) as world:
        probe = Probe(world, max_bytes, seconds)
        pairs, measurements = probe.run()
        return pairs, measurements, probe.elapsed_s


def by_key(measurements: list[Measurement]) -> dict[tuple[str, str, int], Measurement]:
    return {(each.group, each.operation, each.nominal_bytes): each for each in measurements}


def test_every_operation_on_every_group(ranks: RankPool) -> None:
    """Two nodes of one and two ranks: all groups differ, and no size is a multiple of three ranks."""
    results = ranks(3, measure, ["node0", "node1", "node1"], 4096, 30.0)
    assert results[0] == results[1] == results[2], "every rank knows all of it"
    pairs, measurements, elapsed_s = results[0]
    table = by_key(measurements)
    assert len(table) == len(measurements) == 3 * 2 * len(OPERATIONS)
    for (group, operation, size), cell in table.items():
        timing = cell.timing
        assert timing is not None, (group, operation, cell.reason)
        assert timing.ranks == (3 if group == "world" else 2)
        assert size <= timing.bytes < size + 4 * timing.ranks and timing.bytes % (4 * timing.ranks) == 0
        assert 0 < timing.p10_s <= timing.median_s <= timing.p90_s < elapsed_s
        assert timing.repetitions >= 1
        assert timing.node == ("node1" if group == "intra-node" else None)
        assert [each.node for each in cell.by_node] == (["node1"] if group == "intra-node" else [])
    assert [(pair.source, pair.target) for pair in pairs] == [("node0", "node1"), ("node1", "node0")]
    assert all(pair.rate_bit_per_s > 0 and pair.bytes == 4096 for pair in pairs)


def test_nodes_measure_their_own_group_at_once_and_the_slowest_counts(ranks: RankPool) -> None:
    _, measurements, _ = ranks(4, measure, ["a", "a", "b", "b"], 1024, 30.0)[3]
    own = [each for each in measurements if each.group == "intra-node"]
    assert len(own) == len(OPERATIONS)
    for each in own:
        assert [timing.node for timing in each.by_node] == ["a", "b"]
        assert each.timing == max(each.by_node, key=lambda timing: timing.median_s)


def test_one_node_has_one_group_and_no_pairs(ranks: RankPool) -> None:
    pairs, measurements, _ = ranks(2, measure, ["a", "a"], 2048, 30.0)[0]
    assert pairs == []
    assert {each.group for each in measurements} == {"world"}


def measure_pairs_in_rounds(rank: int, size: int) -> list[Pair]:
    with world_of(f"node{rank}") as world, pytest.MonkeyPatch.context() as patch:
        patch.setattr(link_pairs, "ONE_AT_A_TIME_NODES", 3)
        assert [len(each) for each in link_pairs.rounds(size)] == [2, 2, 2]
        return Probe(world, 1 << 18, 20.0).measure_pairs()


def test_pairs_that_share_no_node_are_measured_at_once(ranks: RankPool) -> None:
    results = ranks(4, measure_pairs_in_rounds)
    assert all(each == results[0] for each in results)
    names = [f"node{rank}" for rank in range(4)]
    assert sorted((pair.source, pair.target) for pair in results[0]) == list(itertools.permutations(names, 2))
    assert all(pair.median_s is not None and 65536 <= pair.bytes <= 1 << 18 for pair in results[0])


def measure_pairs_without_time(rank: int, size: int) -> list[Pair]:
    with world_of(f"node{rank}") as world:
        probe = Probe(world, 1 << 18, 20.0)
        probe.elapsed_s = 11.0
        return probe.measure_pairs()


def test_pairs_for_which_no_time_is_left_say_so(ranks: RankPool) -> None:
    for pairs in ranks(2, measure_pairs_without_time):
        assert [(pair.source, pair.target) for pair in pairs] == [("node0", "node1"), ("node1", "node0")]
        assert all(pair.rate_bit_per_s is None and "half of the 20 s" in (pair.reason or "") for pair in pairs)


def slow_measure(rank: int, size: int, per_byte_s: float, seconds: float) -> tuple[list[Measurement], float]:
    """On a link on which every operation takes at least its size times `per_byte_s`."""
    with world_of("a") as world:
        probe = Probe(world, 1 << 20, seconds)
        current = [0]

        def progress(elapsed_s: float, text: str) -> None:
            current[0] = int(text.split(" of ")[1].split()[0].replace(",", ""))

        repeat = probe.repeat

        def slower(operation: Any, count: int) -> Any:
            def run() -> None:
                operation()
                time.sleep(current[0] * per_byte_s)

            return repeat(run, count)

        probe.progress = progress
        probe.repeat = slower  # type: ignore[method-assign]
        measurements = probe.measure_table()
        return measurements, probe.elapsed_s


def test_the_time_is_kept_and_what_was_not_reached_says_why(ranks: RankPool) -> None:
    # 64 KiB take 0.13 s, 256 KiB half a second, 1 MiB two seconds: not all of it fits.
    results = ranks(2, slow_measure, 2e-6, 3.0)
    assert results[0] == results[1]
    measurements, elapsed_s = results[0]
    table = by_key(measurements)
    assert len(table) == 6 * len(OPERATIONS), "nothing is left out in silence"
    missing = [each for each in measurements if each.timing is None]
    assert missing and all("not reached in 3 s" in (each.reason or "") for each in missing)
    assert all(table["world", operation, 1024].timing is not None for operation in OPERATIONS)
    assert all(table["world", operation, 1 << 20].timing is None for operation in OPERATIONS)
    assert elapsed_s < 3.0 + 2.0 + 5.0, "one repetition more at most; and a busy machine"


class StoppedError(Exception):
    pass


def stopped(rank: int, size: int) -> str:
    def check() -> None:
        calls.append(0)
        if len(calls) > 5:
            raise StoppedError

    calls: list[int] = []
    with world_of("a") as world:
        try:
            Probe(world, 4096, 30.0, check).run()
        except StoppedError:
            return "stopped"
    return "finished"


def test_a_stop_is_asked_for_between_repetitions(ranks: RankPool) -> None:
    assert ranks(2, stopped) == ["stopped", "stopped"]
