import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bireme.errors import UserError
from bireme.ledger import bus_bandwidth_factor
from bireme.link_pairs import Pair
from bireme.links import OPERATIONS, Group, LinkTable, checked_link_rate

if TYPE_CHECKING:
    from tests.made_links import make_table, timing
else:
    from made_links import make_table, timing


def test_what_is_saved_is_read(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    path.write_text("what was there before")
    table = make_table()
    table.save(path)
    assert LinkTable.load(path) == table
    assert [each.name for each in tmp_path.iterdir()] == ["links.json"]
    content = orjson.loads(path.read_bytes())
    assert content["format"] == "bireme-links" and content["version"] == 1
    row = next(each for each in content["measurements"] if each["group"] == "world" and each["bytes"] == 1 << 20)
    assert row["algorithm_bandwidth_bytes_per_s"] == pytest.approx((1 << 20) / row["median_s"])
    assert row["bus_bandwidth_bytes_per_s"] == pytest.approx(row["algorithm_bandwidth_bytes_per_s"] * 4 / 3)
    missing = next(each for each in content["measurements"] if each["reason"])
    assert missing["median_s"] is None and missing["nominal_bytes"] == 8 << 20
    assert content["pairs"][0]["rate_bit_per_s"] == pytest.approx(8 * (8 << 20) / 0.18)
    assert content["fit"]["world"]["all_reduce"]["max_relative_error"] < 1e-6


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bus_bandwidth_follows_nccl_tests(ranks: int) -> None:
    once = {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0, "send": 1.0}
    for operation in OPERATIONS:
        algorithm, bus = timing(1 << 20, ranks).bandwidths(operation)
        assert bus / algorithm == pytest.approx(once.get(operation, (ranks - 1) / ranks))
        assert bus / algorithm == pytest.approx(bus_bandwidth_factor(operation, ranks))


def test_a_time_is_looked_up_by_operation_size_and_group() -> None:
    table = make_table()
    assert table.time_s("all_reduce", 1 << 20) == timing(1 << 20).median_s
    assert table.time_s("all_reduce", 1 << 20, "intra-node") == pytest.approx(0.1 * timing(1 << 20).median_s)
    assert table.time_s("send", 8 << 20) == pytest.approx(timing(8 << 20).median_s), "extrapolated"
    assert not table.curve("send").covers(8 << 20) and table.curve("send", "inter-node").covers(8 << 20)


def test_a_group_of_the_same_ranks_has_the_same_times() -> None:
    table = make_table()
    table.groups[2] = Group("inter-node", ((0, 1, 2),), same_as="world")
    assert table.time_s("send", 5000, "inter-node") == table.time_s("send", 5000, "world")


def test_what_was_not_measured_is_said() -> None:
    table = make_table()
    table.groups[1] = Group("intra-node", (), reason="every node has one rank")
    empty = LinkTable(table.facts, table.nodes, table.ranks, table.groups, [], [])
    for call, said in (
        (lambda: table.time_s("all_reduec", 1), "did you mean 'all_reduce'"),
        (lambda: table.time_s("send", 1, "inter-nod"), "did you mean 'inter-node'"),
        (lambda: empty.time_s("send", 1, "intra-node"), "every node has one rank"),
        (lambda: empty.time_s("send", 1), "was not reached in the time given"),
    ):
        with pytest.raises(UserError, match=said):
            call()


@pytest.mark.parametrize(
    ("link", "rate"),
    [
        ("400mbit", 400e6),
        ("1gbit", 1e9),
        ("10gbit", None),
        ("unlimited", None),
        ("unshaped", None),
        (None, None),
        ("9" * 400 + "kbit", None),
        ("\x00", None),
    ],
)
def test_the_links_own_rate(link: str | None, rate: float | None) -> None:
    assert checked_link_rate(link) == rate


def test_a_pair_is_held_against_the_links_own_rate() -> None:
    """It measured 373 Mbit/s."""
    assert make_table(link="400mbit").slow() == {}
    assert list(make_table(link="1gbit").slow()) == [("node0", "node1")]
    # Without a link there is none to blame, however much the directions differ: the second is a tenth of the first.
    uneven = replace(make_table(link="unshaped"), pairs=[_pair("node0", "node1", 0.1), _pair("node1", "node0", 1.0)])
    assert uneven.slow() == {}
    assert replace(uneven, facts={**uneven.facts, "link": None}).slow() != {}


def _pair(source: str, target: str, median_s: float) -> Pair:
    return Pair(source, target, 8 << 20, 3, median_s)


# --- foreign and damaged files -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is damaged"),
        (b"{", "is damaged"),
        (b"\xff\xfe", "is damaged"),
        (b"[" * 5000, "is damaged"),
        (b'{"format": "bireme-links", "version": NaN}', "is damaged"),
        (b"[]", "was not written by"),
        (b'"bireme-links"', "was not written by"),
        (b'{"format": "bireme-run", "version": 1}', "was not written by"),
        (b'{"format": "bireme-links"}', "not a version number"),
        (b'{"format": "bireme-links", "version": true}', "not a version number"),
        (b'{"format": "bireme-links", "version": 0}', "not a version number"),
        (b'{"format": "bireme-links", "version": 2}', "install a newer bireme"),
        (b'{"format": "bireme-links", "version": 1}', "not a text"),
    ],
)
def test_a_file_that_is_no_table(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=said) as error:
        LinkTable.load(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        LinkTable.load(tmp_path / "links.json")
    with pytest.raises(UserError, match="is not a file"):
        LinkTable.load(tmp_path)
    with pytest.raises(UserError, match="cannot read"):
        LinkTable.load(Path("a\x00b"))


def test_a_torn_file(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    make_table().save(path)
    whole = path.read_bytes().rstrip()
    for end in range(0, len(whole), 97):
        path.write_bytes(whole[:end])
        with pytest.raises(UserError, match="is damaged"):
            LinkTable.load(path)


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        (("measurements", 0, "median_s"), 0, "median_s"),
        (("measurements", 0, "median_s"), -1.0, "median_s"),
        (("measurements", 0, "median_s"), "1", "median_s"),
        (("measurements", 0, "median_s"), True, "median_s"),
        (("measurements", 0, "median_s"), None, "median_s"),
        (("measurements", 0, "median_s"), 1.0, "between p10_s and p90_s"),
        (("measurements", 0, "p10_s"), 1e300, "p10_s"),
        (("measurements", 0, "bytes"), 0, "bytes"),
        (("measurements", 0, "bytes"), 10.5, "not a whole number"),
        (("measurements", 0, "bytes"), 4096, "measured twice"),
        (("measurements", 0, "ranks"), 1, "ranks"),
        (("measurements", 0, "repetitions"), 0, "repetitions"),
        (("measurements", 0, "operation"), "allreduce", "operation"),
        (("measurements", 0, "group"), "\x1b[2J", "group"),
        (("measurements", 0, "reason"), 5, "reason"),
        (("measurements", 0), [], "not a list of objects"),
        (("measurements", 1, "by_node", 0, "node"), "node9", "node"),
        (("measurements",), {}, "measurements"),
        (("pairs", 0, "median_s"), 0, "median_s"),
        (("pairs", 0, "to"), "node0", "pair of one node"),
        (("pairs", 0, "from"), "node7", "from"),
        (("pairs", 0, "previous_bit_per_s"), 0, "previous_bit_per_s"),
        (("nodes", 0, "ranks"), [0], "every rank exactly once"),
        (("nodes", 0, "ranks"), [0, 0], "twice"),
        (("nodes", 0, "ranks"), [0, 7], "ranks"),
        (("nodes", 0, "name"), "node1", "name of its own"),
        (("groups", 0, "members"), [[0, "1"]], "members"),
        (("groups", 0, "members"), None, "members"),
        (("groups", 0, "same_as"), "me", "same_as"),
        (("seconds",), None, "seconds"),
        (("torch",), None, "torch"),
    ],
)
def test_a_wrong_field_is_named(where: tuple[Any, ...], value: Any, said: str, tmp_path: Path) -> None:
    content = orjson.loads(orjson.dumps(make_table().as_dict()))
    holder = content
    for key in where[:-1]:
        holder = holder[key]
    holder[where[-1]] = value
    path = tmp_path / "links.json"
    path.write_bytes(orjson.dumps(content))
    with pytest.raises(UserError, match=said) as error:
        LinkTable.load(path)
    assert "\n" not in str(error.value)


SOUND = orjson.loads(orjson.dumps(make_table().as_dict()))
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def places(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(content, dict):
        return [path, *(each for key, value in content.items() for each in places(value, (*path, key)))]
    if isinstance(content, list):
        return [path, *(each for index, value in enumerate(content) for each in places(value, (*path, index)))]
    return [path]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.sampled_from(places(SOUND)[1:]), anything), min_size=1, max_size=3))
def test_no_file_breaks_the_reader(changes: list[tuple[tuple[Any, ...], Any]], tmp_path: Path) -> None:
    content = copy.deepcopy(SOUND)
    for where, value in changes:
        holder = content
        try:
            for key in where[:-1]:
                holder = holder[key]
            holder[where[-1]] = value
        except (KeyError, IndexError, TypeError):
            continue
    path = tmp_path / "links.json"
    path.write_bytes(orjson.dumps(content))
    try:
        table = LinkTable.load(path)
    except UserError as error:
        assert "\n" not in str(error)
        return
    # What is accepted can be used and saved again.
    table.save(path)
    assert LinkTable.load(path) == table
    for (group, operation), curve in table.curves.items():
        if curve.fit is not None:
            assert math.isfinite(table.time_s(operation, 3 << 30, group))
