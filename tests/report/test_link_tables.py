from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from bireme.link_pairs import Pair
from bireme.links import LinkTable
from bireme.report.link_tables import bits, draw, rate, render, size_text

if TYPE_CHECKING:
    from tests.made_links import make_table
else:
    from made_links import make_table


def shown(table: LinkTable) -> str:
    file = StringIO()
    render(table, Console(file=file, width=80, color_system=None))
    text = file.getvalue()
    assert all(len(line) <= 80 for line in text.splitlines())
    return text


def test_a_table_shows_times_rates_pairs_and_what_is_missing() -> None:
    text = shown(make_table())
    words = " ".join(text.split())
    assert "links: 3 ranks on 2 nodes, gloo on cpu, link 400mbit" in words
    assert "group world (ranks 0-2): median time, ms" in words and "bus bandwidth, Mbit/s" in words
    assert "all-reduce of 1 MiB: 21.07 ms, bus bandwidth 531 Mbit/s (0.0664 GB/s)" in words
    assert "n/a: every operation from 8 MiB: not reached in 5 s" in words
    assert "1 direction between nodes: not reached: no time" in words
    assert "slowest 373 Mbit/s (0.0466 GB/s)" in words
    assert "no pair of nodes is slow" in words


def test_a_slow_pair_stands_out() -> None:
    table = make_table()
    slow = [Pair("node0", "node1", 1000, 3, 8000 / 4e7), Pair("node1", "node0", 1000, 3, 8000 / 4e8)]
    words = " ".join(shown(replace(table, pairs=slow)).split())
    assert "40 SLOW" in words
    assert "slow: node0 to node1, 40 Mbit/s, 0.10 x the nodes' median best" in words
    assert "node0 to node1 is slow, the other way is not" in words


def test_unshaped_stands_in_every_title() -> None:
    text = shown(make_table(link="unshaped"))
    titles = [
        line for line in text.splitlines() if "median time" in line or "bandwidth, " in line or "pairs of" in line
    ]
    assert len(titles) >= 7 and all("unshaped" in line for line in titles if "bandwidth 5" not in line)


def test_many_nodes_are_listed() -> None:
    table = make_table(link=None)
    names = [f"node{index}" for index in range(12)]
    pairs = [Pair(a, b, 1000, 3, 8000 / (4e7 if "node5" in (a, b) else 4e8)) for a in names for b in names if a != b]
    nodes = [{"name": name, "ranks": [index]} for index, name in enumerate(names)]
    words = " ".join(shown(replace(table, nodes=nodes, pairs=pairs)).split())
    assert "132 directions measured" in words and "and 12 more slow directions" in words
    assert "every pair with node5 is slow, both ways: its link" in words


HOSTILE = "[bold]\x1b[2J$x^{$" + "n" * 100


@pytest.mark.parametrize("change", ["hostile names", "nothing measured", "one node"])
def test_whatever_is_in_the_file_can_be_shown_and_drawn(change: str, tmp_path: Path) -> None:
    table = make_table(link=HOSTILE if change == "hostile names" else None)
    if change == "hostile names":
        nodes: list[Any] = [{"name": HOSTILE, "ranks": [0, 1]}, {"name": "b", "ranks": [2]}]
        table = replace(table, nodes=nodes, pairs=[Pair(HOSTILE, "b", 1000, 1, 1.0), Pair("b", HOSTILE, 1000, 1, 0.1)])
    elif change == "nothing measured":
        missing = [replace(each, timing=None, reason=HOSTILE, by_node=()) for each in table.measurements]
        table = replace(table, measurements=missing, pairs=[])
    else:
        table = replace(table, nodes=[{"name": "a", "ranks": [0, 1, 2]}], pairs=[])
    assert "\x1b" not in shown(table)
    path = tmp_path / "links.png"
    draw(table, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [each.name for each in tmp_path.iterdir()] == ["links.png"]


def test_rates_and_sizes_in_words() -> None:
    assert rate(385e6) == "385 Mbit/s (0.0481 GB/s)"
    assert bits(1.234e9) == "1.23 Gbit/s" and bits(2.5e3) == "0.0025 Mbit/s"
    assert [size_text(size) for size in (3, 1024, 65536, 3 << 19, 2 << 30)] == [
        "3 B",
        "1 KiB",
        "64 KiB",
        "1.5 MiB",
        "2 GiB",
    ]
