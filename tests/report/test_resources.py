from pathlib import Path
from typing import Any

import pytest

from bireme.report.resources import counted_link_bytes, formula_link_bytes, link_traffic, memory_numbers
from bireme.run_reader import Run

MILLION = 1_000_000
MEASURED = {4, 5, 6, 7}


@pytest.fixture
def run() -> Run:
    """Two nodes with one rank each, as FSDP's: the interface counts 6 % more than the formula."""
    facts = {
        "world_size": 2,
        "traffic": {"nodes": {"node0": 8 * MILLION, "node1": 8 * MILLION}, "dimensions": {"shard": 8 * MILLION}},
        "memory": {"before_model_bytes": [200 * MILLION, 200 * MILLION + 1]},
    }
    events: list[dict[str, Any]] = [window(node, 4, 7, 4 * 8_480_000, 4 * 8_000_000) for node in ("node0", "node1")]
    events += [
        {"event": "memory", "rank": rank, "peak_rss_bytes": 216 * MILLION - 999 * rank, "peak_device_bytes": None}
        for rank in (0, 1)
    ]
    return Run(directory=Path("run"), facts=facts, steps=[], events=events, damaged_lines=0)


def window(node: str, first: Any, last: Any, sent: Any, received: Any) -> dict[str, Any]:
    return {
        "event": "traffic",
        "node": node,
        "first_step": first,
        "last_step": last,
        "sent_bytes": sent,
        "received_bytes": received,
    }


def test_only_windows_within_the_measured_steps_count(run: Run) -> None:
    run.events[:] = [
        window("node0", 1, 3, 900, 900),  # warm-up
        window("node0", 3, 4, 900, 900),  # half of it
        window("node0", 5, 5, 10, 0),
        window("node0", 6, 7, 20, 3),
        window("node0", 8, 9, 900, 900),  # more than was recorded
        window("node1", 5, 7, 3, 36),
        {**window("node1", 5, 7, 900, 900), "event": "other"},
    ]
    assert counted_link_bytes(run, MEASURED) == 12  # what the second node received, not sums over nodes or directions
    del run.events[5]
    assert counted_link_bytes(run, MEASURED) == 10


@pytest.mark.parametrize(
    "damaged",
    [
        window("node0", None, 5, 1, 1),
        window("node0", 5, "5", 1, 1),
        window("node0", 6, 5, 1, 1),
        window("node0", 5, 5, None, 1),
        window("node0", 5, 5, 1, True),
        window("node0", 5, 2**62, 1, 1),  # not to be counted through
        {"event": "traffic"},
    ],
)
def test_readings_that_cannot_be_used_are_none(run: Run, damaged: dict[str, Any]) -> None:
    run.events[:] = [damaged]
    assert counted_link_bytes(run, MEASURED) is None
    numbers = link_traffic(run, MEASURED)
    assert numbers["counted_link_bytes"] is numbers["counted_over_formula"] is None
    assert (
        "no reading" in numbers["counted_link_bytes_reason"] and "no reading" in numbers["counted_over_formula_reason"]
    )
    assert numbers["formula_link_bytes"] == 8 * MILLION


@pytest.mark.parametrize("traffic", [None, [], {}, {"nodes": None}, {"nodes": {}}, {"nodes": {"node0": "1"}}])
def test_a_run_without_a_formula(run: Run, traffic: Any) -> None:
    run.facts["traffic"] = traffic
    assert formula_link_bytes(run) is None
    numbers = link_traffic(run, MEASURED)
    assert numbers["counted_link_bytes"] == pytest.approx(8.48 * MILLION)
    assert numbers["counted_over_formula"] is None and "does not say" in numbers["counted_over_formula_reason"]


def test_the_busiest_node_and_a_layout_that_sends_nothing(run: Run) -> None:
    run.facts["traffic"] = {"nodes": {"node0": 1, "node1": 3.0, "node2": 2}}
    assert formula_link_bytes(run) == 3
    run.facts["traffic"] = {"nodes": {"node0": 0, "node1": 0}}
    numbers = link_traffic(run, MEASURED)
    assert numbers["formula_link_bytes"] == 0 and numbers["counted_over_formula"] is None
    assert "nothing" in numbers["counted_over_formula_reason"]


def test_memory_is_what_came_with_the_model(run: Run) -> None:
    """B70: of every rank, so that one that has too much shows."""
    numbers = memory_numbers(run)
    assert numbers["memory_bytes"] == {"max": 16 * MILLION, "per_rank": [16 * MILLION, 16 * MILLION - 1000]}
    assert numbers["peak_rss_bytes"]["per_rank"] == [216 * MILLION, 216 * MILLION - 999]
    for event in run.events:
        if event["event"] == "memory":
            event["peak_device_bytes"] = 7 + event["rank"]
    assert memory_numbers(run)["memory_bytes"] == {"max": 8, "per_rank": [7, 8]}  # a GPU's allocator


def test_memory_that_is_not_known(run: Run) -> None:
    damaged: list[Any] = [None, [], {"before_model_bytes": [1]}, {"before_model_bytes": [1, None]}]
    for before in damaged:
        run.facts["memory"] = before
        numbers = memory_numbers(run)
        assert numbers["memory_bytes"] is None and "before the model" in numbers["memory_bytes_reason"]
        assert numbers["peak_rss_bytes"]["max"] == 216 * MILLION
    run.events[:] = [event for event in run.events if event.get("rank") != 1]
    run.events.append({"event": "memory", "rank": [1], "peak_rss_bytes": 1})
    numbers = memory_numbers(run)
    assert (
        numbers["memory_bytes"] is numbers["peak_rss_bytes"] is None and "every rank" in numbers["memory_bytes_reason"]
    )
