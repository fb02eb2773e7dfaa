from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.errors import UserError
from bireme.study.grid import VARIED, Cell, Options, Study, parse_delays, parse_links, parse_ranks_list, study_of

CELL = Cell(
    nodes=2,
    ranks_per_node=1,
    cores_per_node=1,
    link="1gbit",
    reduction="flat",
    preset="toy",
    batch_per_rank=8,
    steps=20,
)


def study(name: str, cores: int = 2, **options: Any) -> Study:
    return study_of(name, Options(**options), cores)


def test_the_study_of_ranks_starts_with_one_rank_alone() -> None:
    cells = study("ranks").cells
    assert [(cell.nodes, cell.ranks_per_node) for cell in cells] == [(1, 1), (2, 1), (2, 2)]
    assert {(cell.link, cell.reduction, cell.batch_per_rank, cell.steps) for cell in cells} == {
        ("1gbit", "overlap", 8, 20)
    }
    assert [cell.ranks for cell in study("ranks", nodes=1, ranks="1,4").cells] == [1, 4]


def test_the_study_of_a_straggler_is_one_run_with_all_delays() -> None:
    (cell,) = study("straggler", nodes=2, ranks="2", delays="0, 30,60,30", phase="backward", steps=5).cells
    assert cell.straggler_delays_ms == (0.0, 30.0, 60.0) and cell.steps == 15
    assert (cell.straggler_rank, cell.straggler_phase, cell.ranks) == (3, "backward", 4)


def test_the_study_of_links_has_both_reductions_and_one_node_alone() -> None:
    cells = study("links", links="100mbit,unlimited").cells
    assert [(cell.nodes, cell.link, cell.reduction) for cell in cells] == [
        (1, "unlimited", "overlap"),
        (2, "100mbit", "overlap"),
        (2, "100mbit", "flat"),
        (2, "unlimited", "overlap"),
        (2, "unlimited", "flat"),
    ]


def test_where_links_cannot_be_limited_their_rates_become_one() -> None:
    cells = study("links").unshaped().cells
    assert [(cell.nodes, cell.link, cell.reduction) for cell in cells] == [
        (1, "unshaped", "overlap"),
        (2, "unshaped", "overlap"),
        (2, "unshaped", "flat"),
    ]
    assert study("links").unshaped().settings() == study("links").settings()


def test_a_node_has_as_many_cores_when_it_is_alone() -> None:
    assert {cell.cores_per_node for cell in study("links", cores=16, nodes=4).cells} == {4}
    assert {cell.cores_per_node for cell in study("ranks", cores=2, nodes=4).cells} == {1}


def test_what_a_study_varies_may_get_more_values_and_nothing_else() -> None:
    few, many = study("links", links="1gbit"), study("links", links="1gbit,10mbit")
    assert few.settings() == many.settings() and set(few.cells) < set(many.cells)
    assert few.settings() != study("links", links="1gbit", steps=21).settings()
    assert study("ranks", ranks="1").settings() == study("ranks", ranks="4").settings()
    assert study("straggler", delays="0,1").settings() == study("straggler", delays="0,1,2").settings()
    names = {each.name for each in fields(Cell)}
    assert all(set(varied) < names for varied in VARIED.values())


# --- keys --------------------------------------------------------------------------------------------------------


def test_a_key_names_the_axes_and_never_changes() -> None:
    assert CELL.key == "nodes2_ranks1_cores1_1gbit_flat_toy_batch8_steps20"
    slow = replace(CELL, straggler_delays_ms=(0, 0.5), straggler_rank=1, straggler_phase="forward", sequence_length=64)
    assert slow.key == "nodes2_ranks1_cores1_1gbit_flat_delays0-0.5_slow1_forward_toy_batch8_length64_steps20"
    assert str(CELL) == "2 nodes x 1 rank, 1gbit, flat"
    assert "1gbit" not in str(replace(CELL, nodes=1))


@given(
    st.lists(
        st.builds(
            Cell,
            nodes=st.integers(1, 3),
            ranks_per_node=st.integers(1, 3),
            cores_per_node=st.just(1),
            link=st.sampled_from(["1gbit", "1Gbit", "1/gbit", "unshaped"]),
            reduction=st.sampled_from(["overlap", "flat"]),
            straggler_delays_ms=st.lists(st.floats(0, 1e6), max_size=40).map(tuple),
            preset=st.text(max_size=200),
            batch_per_rank=st.just(1),
            steps=st.just(1),
        ),
        max_size=5,
    )
)
def test_two_cells_never_share_a_key_and_keys_are_plain_file_names(cells: list[Cell]) -> None:
    keys = {cell.key for cell in cells}
    assert len(keys) == len(set(cells))
    assert all(len(key) < 120 and "/" not in key and key.isascii() for key in keys)


# --- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("link", {}, "no study 'link' (did you mean 'links'?)"),
        ("", {}, "no study ''"),
        ("links", {"link": "1gbit"}, "--link has no meaning in the study of links; it has --links"),
        ("ranks", {"links": "1gbit"}, "--links has no meaning in the study of ranks"),
        ("ranks", {"delays": "0,1"}, "--delays has no meaning"),
        ("links", {"phase": "forward"}, "--phase has no meaning"),
        ("links", {"links": "1gbps"}, "--links: link rate '1gbps' is not understood"),
        ("links", {"links": "1gbit,,2gbit"}, "--links '1gbit,,2gbit' is not a list"),
        ("links", {"nodes": 1}, "needs two nodes"),
        ("links", {"ranks": "1,2"}, "takes one value"),
        ("ranks", {"link": "1gbit,2gbit"}, "takes one value"),
        ("ranks", {"ranks": "2,x"}, "'x' is not a number of ranks"),
        ("ranks", {"ranks": "0"}, "'0' is not a number of ranks"),
        ("ranks", {"ranks": "²"}, "is not a number of ranks"),
        ("ranks", {"ranks": "9" * 5000}, "is not a number of ranks"),
        ("ranks", {"ranks": "1000", "nodes": 2}, "2000 ranks"),
        ("ranks", {"steps": 0}, "--steps is 0: it must be at least 1"),
        ("ranks", {"steps": 10**9}, "more than 1000000 steps"),
        ("ranks", {"nodes": 0}, "--nodes is 0"),
        ("ranks", {"cores_per_node": -1}, "--cores-per-node is -1"),
        ("ranks", {"batch_per_rank": 0}, "--batch-per-rank is 0"),
        ("ranks", {"sequence_length": 0}, "--sequence-length is 0"),
        ("straggler", {"nodes": 1}, "needs two ranks"),
        ("straggler", {"delays": "0,x"}, "--delays '0,x': 'x' is not a number"),
        ("straggler", {"delays": "-1,0"}, "--delays '-1,0': a delay is from 0"),
        ("straggler", {"delays": "nan,0"}, "a delay is from 0"),
        ("straggler", {"delays": ""}, "--delays '' is not a list"),
        ("ranks", {"ranks": ""}, "--ranks '' is not a list"),
        ("ranks", {"link": ""}, "--link '' is not a list"),
        ("straggler", {"delays": "100"}, "two different delays"),
        ("straggler", {"delays": "5,5"}, "two different delays"),
        ("straggler", {"phase": "forwards"}, "--phase 'forwards' is none of"),
    ],
)
def test_bad_input_is_one_line(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        study(name, **options)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_lists_hold_each_value_once() -> None:
    with pytest.raises(UserError, match="not a list"):
        parse_links("")
    assert parse_links("1gbit, 1000mbit,UNLIMITED") == ["1gbit", "unlimited"]
    assert parse_ranks_list("2,1,2") == [2, 1]
    assert parse_delays("0,50,50.0", "input", 2) == ((0.0, 50.0), "input")
