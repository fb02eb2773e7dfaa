from dataclasses import dataclass
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.errors import UserError
from bireme.layout import (
    DIMENSIONS,
    Layout,
    Pipeline,
    arrange,
    check_compile,
    check_layout_text,
    check_model,
    check_pipeline,
    crossing,
    describe_groups,
    fitting,
    parse_layout,
    stage_layers,
    stages_per_rank,
)

ONE_NODE = [[0, 1, 2, 3]]
TWO_BY_TWO = [[0, 1], [2, 3]]


@dataclass(frozen=True)
class Shape:
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    vocab_size: int = 256
    embedding_dim: int = 128
    feed_forward_dim: int = 384


layouts = st.builds(
    Layout,
    dp_replicate=st.integers(1, 4),
    dp_shard=st.integers(1, 4),
    tp=st.integers(1, 4),
    pp=st.integers(1, 4),
)


# --- reading -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nodes", "layout", "name"),
    [
        ("ddp", ONE_NODE, Layout(dp_replicate=4), "ddp"),
        ("DDP", [[0]], Layout(), "ddp"),
        ("fsdp", ONE_NODE, Layout(dp_shard=4), "fsdp"),
        ("tp", ONE_NODE, Layout(tp=4), "tp=4"),
        ("pp", ONE_NODE, Layout(pp=4), "pp=4"),
        ("hsdp", TWO_BY_TWO, Layout(dp_replicate=2, dp_shard=2), "hsdp 2x2"),
        ("hsdp", [[0, 1, 2], [3, 4, 5]], Layout(dp_replicate=2, dp_shard=3), "hsdp 2x3"),
        ("replicate=2,shard=2", ONE_NODE, Layout(dp_replicate=2, dp_shard=2), "hsdp 2x2"),
        ("dp_replicate=2, dp_shard=2", ONE_NODE, Layout(dp_replicate=2, dp_shard=2), "hsdp 2x2"),
        ("tp=2,pp=2", ONE_NODE, Layout(pp=2, tp=2), "pp=2,tp=2"),
        ("pp=2,shard=2,tp=1", ONE_NODE, Layout(pp=2, dp_shard=2), "pp=2,shard=2"),
    ],
)
def test_layouts_are_read(text: str, nodes: list[list[int]], layout: Layout, name: str) -> None:
    assert parse_layout(text, nodes) == layout
    assert str(layout) == name


@pytest.mark.parametrize(
    ("text", "nodes", "said"),
    [
        ("fdsp", ONE_NODE, "did you mean 'fsdp'"),
        ("", ONE_NODE, "choose ddp, fsdp, hsdp, tp, pp"),
        ("pp=2,tpp=2", ONE_NODE, "'tpp' is no dimension"),
        ("pp=2,pp=2", ONE_NODE, "pp is there twice"),
        ("pp=two", ONE_NODE, "pp='two' is not a number"),
        ("pp=0", ONE_NODE, "pp='0' is not a number"),
        ("pp=-2", ONE_NODE, "pp='-2' is not a number"),
        ("tp=000001" + 5000 * "0", ONE_NODE, "is not a number of ranks from 1 to 1000000"),
        ("pp=²", ONE_NODE, "is not a number"),
        ("pp=2,", ONE_NODE, "'' is no dimension"),
        ("tp=2", ONE_NODE, "is for 2 ranks, but there are 4: tp=4 or shard=2,tp=2 or replicate=2,tp=2 would fit"),
        ("tp=2", [[0]], "is for 2 ranks, but there is 1: replicate=1 would fit"),
        ("shard=3", ONE_NODE, "shard=4 or "),
        ("hsdp", ONE_NODE, "all 4 ranks are on one node: use replicate=2,shard=2 or fsdp"),
        ("hsdp", [[0], [1]], "every node has one rank: that is ddp; or use fsdp"),
        ("hsdp", [[0, 1], [2]], "equally many ranks, these have 2, 1"),
    ],
)
def test_what_is_wrong_with_a_layout_is_said(text: str, nodes: list[list[int]], said: str) -> None:
    with pytest.raises(UserError) as raised:
        parse_layout(text, nodes)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_what_no_number_of_ranks_can_mend_is_found_without_them() -> None:
    assert check_layout_text(" FSDP ") == "fsdp"
    assert check_layout_text("pp=3") == "pp=3"
    with pytest.raises(UserError):
        check_layout_text("pp=3,q=1")


@given(layouts, st.integers(1, 24))
def test_what_is_said_to_fit_fits(layout: Layout, ranks: int) -> None:
    for text in fitting(layout, ranks):
        assert parse_layout(text, [list(range(ranks))]).size == ranks


# --- who is where ------------------------------------------------------------------------------------------------


@given(layouts)
def test_every_position_has_its_own_place(layout: Layout) -> None:
    places = [tuple(layout.coordinates(position).values()) for position in range(layout.size)]
    assert len(set(places)) == layout.size == len(places)
    assert list(layout.coordinates(0)) == list(DIMENSIONS)
    for name in DIMENSIONS:
        groups = layout.groups(name)
        assert sorted(position for group in groups for position in group) == list(range(layout.size))
        for group in groups:
            assert [layout.coordinates(position)[name] for position in group] == list(range(layout.sizes[name]))


@given(layouts)
def test_each_share_of_the_batch_is_seen_by_one_pipeline_and_tensor_group(layout: Layout) -> None:
    ranks = [layout.data_parallel_rank(layout.coordinates(position)) for position in range(layout.size)]
    assert sorted(set(ranks)) == list(range(layout.data_parallel_size))
    assert {ranks.count(rank) for rank in ranks} == {layout.pp * layout.tp}


def test_inner_dimensions_are_neighbours() -> None:
    layout = Layout(pp=2, dp_shard=2, tp=2)
    assert layout.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.groups("pp", "tp") == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_inner_dimensions_stay_inside_nodes_also_when_ranks_are_not_in_a_row() -> None:
    layout = Layout(dp_replicate=2, dp_shard=2)
    nodes = [[0, 2], [1, 3]]
    order = arrange(layout, nodes)
    assert order == [0, 2, 1, 3]
    assert crossing(layout, order, nodes) == {"replicate": True, "shard": False}
    # A group numbers its members by rank: an order that disagrees is not taken.
    assert arrange(Layout(dp_replicate=2, dp_shard=2), [[0, 3], [1, 2]]) == [0, 1, 2, 3]


@pytest.mark.parametrize("per_node", [[8, 8], [4, 4], [2, 2, 2], [3, 2]], ids=str)
def test_tensor_parallel_groups_are_inside_nodes_or_flagged(per_node: list[int]) -> None:
    """B71: for every layout that the ranks allow."""
    starts = [sum(per_node[:index]) for index in range(len(per_node))]
    nodes = [list(range(start, start + ranks)) for start, ranks in zip(starts, per_node, strict=True)]
    ranks = sum(per_node)
    inside = flagged = 0
    for sizes in product(range(1, ranks + 1), repeat=4):
        layout = Layout(pp=sizes[0], dp_replicate=sizes[1], dp_shard=sizes[2], tp=sizes[3])
        if layout.size != ranks or layout.tp == 1:
            continue
        order = arrange(layout, nodes)
        crosses = crossing(layout, order, nodes)["tp"]
        on_one_node = all(
            any({order[position] for position in group} <= set(node) for node in nodes) for group in layout.groups("tp")
        )
        assert crosses != on_one_node
        if all(size % layout.tp == 0 for size in per_node):
            assert not crosses, "the innermost dimension fits into a node"
        inside, flagged = inside + on_one_node, flagged + crosses
    assert flagged and (inside or per_node == [3, 2])


def test_groups_are_described_with_their_nodes() -> None:
    nodes = [{"name": "a", "ranks": [0, 1]}, {"name": "b", "ranks": [2, 3]}]
    assert describe_groups(Layout(dp_replicate=2, dp_shard=2), [0, 1, 2, 3], nodes) == [
        "replicate 2: ranks 0, 2 on a and b; ranks 1, 3 on a and b",
        "shard 2: ranks 0-1 on a; ranks 2-3 on b",
    ]
    many = describe_groups(Layout(dp_replicate=8, tp=2), list(range(16)), [{"name": "a", "ranks": list(range(16))}])
    assert many[1].endswith("; and 4 more")


# --- what must divide --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "length", "said"),
    [
        (Shape(num_heads=6, num_kv_heads=6), 128, "num_heads 6 does not divide over 4 tensor-parallel ranks: 4 or 8"),
        (
            Shape(num_kv_heads=2),
            128,
            "num_kv_heads 2 does not divide over 4 tensor-parallel ranks: 4 would, or tp=1 or tp=2",
        ),
        (Shape(num_kv_heads=4, vocab_size=255), 128, "vocab_size 255"),
        (Shape(num_kv_heads=4, feed_forward_dim=130), 128, "feed_forward_dim 130"),
        (Shape(num_kv_heads=4), 126, "sequence_length 126"),
    ],
)
def test_a_model_that_does_not_divide_over_tensor_ranks(shape: Shape, length: int, said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_model(Layout(tp=4), shape, length)
    check_model(Layout(dp_shard=4), shape, length)


def test_a_model_that_divides() -> None:
    check_model(Layout(tp=2), Shape(), 128)


@pytest.mark.parametrize(
    ("layout", "schedule", "wanted", "layers", "said"),
    [
        (Layout(pp=4), "1f1b", None, 6, "num_layers 6 does not divide over 4 pipeline stages: 4 or 8 layers would"),
        (Layout(pp=4), "1f1b", None, 3, "num_layers is 3, fewer than 4 pipeline stages"),
        (Layout(pp=4), "interleaved", None, 6, "fewer than 8 stages \\(4 ranks x 2\\)"),
        (Layout(pp=2), "interleaved", 3, 8, "does not divide over 6 stages"),
        (Layout(pp=2), "interleaved", 1, 8, "needs at least 2"),
        (Layout(dp_shard=2), "interleaved", 2, 8, "layout fsdp has no pipeline"),
        (Layout(pp=2), "gpipe", 2, 8, "schedule gpipe has one stage on a rank"),
    ],
)
def test_stages_that_do_not_fit(layout: Layout, schedule: str, wanted: int | None, layers: int, said: str) -> None:
    with pytest.raises(UserError, match=said):
        stages_per_rank(layout, schedule, wanted, layers)


def test_stages() -> None:
    assert stages_per_rank(Layout(), "interleaved", None, 5) == 1
    assert stages_per_rank(Layout(pp=2), "1f1b", None, 4) == 1
    assert stages_per_rank(Layout(pp=2), "interleaved", None, 4) == 2
    assert stages_per_rank(Layout(pp=2), "interleaved", 4, 8) == 4
    assert [stage_layers(6, 3, stage) for stage in range(3)] == [range(2), range(2, 4), range(4, 6)]


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "said"),
    [
        ("1f1b", 3, "needs at least 4 micro-batches a step, there are 3: .* global_batch_size at least 16"),
        ("interleaved", 1, "needs at least 4 micro-batches a step, there is 1"),
        ("interleaved", 6, "needs a multiple of 4 micro-batches a step, there are 6: .* 4 or 8"),
    ],
)
def test_too_few_micro_batches(schedule: str, micro_batches: int, said: str) -> None:
    pipeline = Pipeline(schedule=schedule, stages_per_rank=1, micro_batches=micro_batches)
    with pytest.raises(UserError, match=said):
        check_pipeline(Layout(pp=4, dp_replicate=2), pipeline, micro_batch_size=2)
    check_pipeline(Layout(dp_replicate=2), pipeline, micro_batch_size=2)


def test_enough_micro_batches() -> None:
    for schedule, micro_batches in (("gpipe", 1), ("1f1b", 5), ("interleaved", 8)):
        pipeline = Pipeline(schedule=schedule, stages_per_rank=1, micro_batches=micro_batches)
        check_pipeline(Layout(pp=4), pipeline, micro_batch_size=1)


def test_what_cannot_be_compiled() -> None:
    check_compile(Layout(dp_shard=4), compiled=True)
    check_compile(Layout(pp=4), compiled=False)
    with pytest.raises(UserError, match="set compile to false"):
        check_compile(Layout(tp=2), compiled=True)
