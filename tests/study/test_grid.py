from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.errors import UserError
from bireme.model import preset
from bireme.study.grid import (
    VARIED,
    Cell,
    Options,
    Study,
    fitting_model,
    parse_delays,
    parse_layouts,
    parse_links,
    parse_model,
    parse_ranks_list,
    study_of,
)

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


def test_the_study_of_layouts_has_every_layout_that_fits_at_every_link() -> None:
    found = study("layouts")
    assert [(cell.ranks_per_node, cell.link, cell.layout) for cell in found.cells] == [
        (ranks, link, layout)
        for ranks, layouts in ((1, "ddp fsdp tp pp"), (2, "ddp fsdp hsdp tp pp"))
        for link in ("200mbit", "1gbit")
        for layout in layouts.split()
    ]
    assert [str(each) for each in found.left_out] == [
        "hsdp is left out at 2 nodes x 1 rank: layout hsdp shards inside a node, but every node has one rank: "
        "that is ddp; or use fsdp"
    ]
    assert len({cell.key for cell in found.cells}) == 18


def test_a_layout_has_one_name_however_it_is_written() -> None:
    wanted = "fsdp,hsdp;shard=4;shard=2,replicate=2;replicate=4;shard=2,pp=2;pp=2,shard=2,tp=1;pp=3"
    found = study("layouts", layouts=wanted, ranks="2", links="1gbit")
    assert [cell.layout for cell in found.cells] == ["fsdp", "hsdp", "ddp", "pp=2,shard=2"]
    (left_out,) = found.left_out
    assert left_out.layout == "pp=3" and "there are 4" in left_out.reason


def test_layouts_over_which_the_model_does_not_divide_are_left_out() -> None:
    shape = preset("small")  # 6 heads, 6 layers
    found = fitting_model(study("layouts", links="1gbit"), shape, 64)
    assert [(cell.ranks_per_node, cell.layout) for cell in found.cells] == [
        *((1, layout) for layout in ("ddp", "fsdp", "tp", "pp")),
        *((2, layout) for layout in ("ddp", "fsdp", "hsdp")),
    ]
    reasons = {each.layout: each.reason for each in found.left_out}
    assert "num_heads 6 does not divide over 4" in reasons["tp"] and "num_layers 6 does not" in reasons["pp"]
    with pytest.raises(UserError, match="none of the --layouts fits: tp is left out at 2 nodes x 2 ranks: num_heads"):
        fitting_model(study("layouts", layouts="tp", ranks="2"), shape, 64)
    # The study's own model fits everywhere, and the trainer says so too.
    own = study("layouts")
    assert fitting_model(own, preset(own.base.preset, **parse_model(own.base.model)), 64) == own


def test_a_preset_of_the_user_s_comes_without_the_study_s_sizes() -> None:
    assert study("layouts").base.model == "num_layers=8,embedding_dim=256,feed_forward_dim=1024"
    assert study("layouts", preset="small").base.model == "" and study("ranks").base.model == ""
    base = study("layouts", preset="small", model="num-layers=8", steps=2, sequence_length=32, batch_per_rank=1).base
    assert (base.preset, base.model, base.steps) == ("small", "num_layers=8", 2)
    assert (base.sequence_length, base.batch_per_rank) == (32, 1)


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
    assert not {"ranks_per_node", "link", "layout"} & set(study("layouts").settings())
    assert study("layouts", layouts="tp", ranks="1").settings() == study("layouts", links="1mbit").settings()
    assert study("straggler", delays="0,1").settings() == study("straggler", delays="0,1,2").settings()
    names = {each.name for each in fields(Cell)}
    assert all(set(varied) < names for varied in VARIED.values())


# --- keys --------------------------------------------------------------------------------------------------------


def test_a_key_names_the_axes_and_never_changes() -> None:
    assert CELL.key == "nodes2_ranks1_cores1_1gbit_flat_toy_batch8_steps20"
    slow = replace(CELL, straggler_delays_ms=(0, 0.5), straggler_rank=1, straggler_phase="forward", sequence_length=64)
    assert slow.key == "nodes2_ranks1_cores1_1gbit_flat_delays0-0.5_slow1_forward_toy_batch8_length64_steps20"
    assert str(CELL) == "2 nodes x 1 rank, 1gbit, ddp flat"
    assert "1gbit" not in str(replace(CELL, nodes=1))
    hybrid = replace(CELL, ranks_per_node=2, reduction="overlap", layout="hsdp")
    assert hybrid.key == "nodes2_ranks2_cores1_1gbit_overlap_hsdp_toy_batch8_steps20"
    assert str(hybrid) == "2 nodes x 2 ranks, 1gbit, hsdp"
    assert replace(hybrid, layout="pp=2,shard=2").key.startswith("nodes2_ranks2_cores1_1gbit_overlap_pp-2-shard-2_toy_")


@given(
    st.lists(
        st.builds(
            Cell,
            nodes=st.integers(1, 3),
            ranks_per_node=st.integers(1, 3),
            cores_per_node=st.just(1),
            link=st.sampled_from(["1gbit", "1Gbit", "1/gbit", "unshaped"]),
            reduction=st.sampled_from(["overlap", "flat"]),
            layout=st.sampled_from(["ddp", "pp=2,shard=2", "pp=2_shard=2"]),
            straggler_delays_ms=st.lists(st.floats(0, 1e6), max_size=40).map(tuple),
            preset=st.text(max_size=200),
            batch_per_rank=st.just(1),
            steps=st.just(1),
            model=st.sampled_from(["", "num_layers=1", "num-layers=1"]),
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
        ("layout", {}, "no study 'layout' (did you mean 'layouts'?): choose ranks, straggler, links, layouts"),
        ("links", {"layouts": "ddp"}, "--layouts has no meaning in the study of links"),
        ("layouts", {"link": "1gbit"}, "--link has no meaning in the study of layouts; it has --links"),
        ("layouts", {"nodes": 1}, "the study of layouts needs two nodes"),
        ("layouts", {"nodes": 10**9}, "1000000000 ranks: at most"),
        ("layouts", {"layouts": "ddp,fsdb"}, "--layouts: layout is 'fsdb': choose ddp"),
        ("layouts", {"layouts": "fsdb"}, "(did you mean 'fsdp'?)"),
        ("layouts", {"layouts": "ddp;pp=2,sard=2"}, "(did you mean 'shard'?)"),
        ("layouts", {"layouts": "ddp,pp=2,shard=2"}, "put semicolons around a layout that is written as sizes"),
        ("layouts", {"layouts": "ddp;"}, "--layouts '' is not a list"),
        ("layouts", {"layouts": ""}, "--layouts '' is not a list"),
        ("layouts", {"layouts": "pp=3"}, "none of the --layouts fits: pp=3 is left out at 2 nodes x 1 rank: layout"),
        ("layouts", {"ranks": "1", "layouts": "hsdp"}, "every node has one rank"),
        ("layouts", {"model": "num_layers"}, "'num_layers' is no size of a model: write num_layers=8"),
        ("layouts", {"model": "num_layers=x"}, "is no size of a model"),
        ("layouts", {"model": "num_layers=" + "9" * 5000}, "is no size of a model"),
        ("layouts", {"model": "num_layers=1,num-layers=2"}, "num_layers is there twice"),
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
    assert parse_layouts("FSDP, ddp,fsdp; PP=2, shard=2;tp=4") == ["fsdp", "ddp", "pp=2,shard=2", "tp=4"]
    assert parse_model("num-layers=8, embedding_dim = 256") == {"num_layers": 8, "embedding_dim": 256}
    assert parse_model("") == {}
