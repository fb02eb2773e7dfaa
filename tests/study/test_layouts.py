from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bireme.record import Run, read_run
from bireme.study.grid import Cell, Options, study_of
from bireme.study.layouts import compare_layouts, counted_link_bytes, formula_link_bytes, link_traffic, memory_numbers
from bireme.study.results import study_results

WriteRun = Callable[..., dict[str, Any]]
MILLION = 1_000_000


@pytest.fixture
def run(tmp_path: Path, write_run: WriteRun) -> Run:
    """FSDP on two nodes with one rank each; steps 4 to 7 are measured."""
    (cell,) = study_of("layouts", Options(layouts="fsdp", links="1gbit", ranks="1", steps=4), 2).cells
    write_run(cell, tmp_path / "run")
    return read_run(tmp_path / "run")


def results_of(directory: Path, write_run: WriteRun, leave_out: str = "", **options: Any) -> dict[str, Any]:
    study = study_of("layouts", Options(**{"steps": 4, **options}), 2)
    finished: dict[Cell, tuple[dict[str, Any], Run]] = {}
    for cell in study.cells:
        if cell.layout != leave_out:
            conditions = write_run(cell, directory / cell.key)
            finished[cell] = conditions, read_run(directory / cell.key)
    return study_results(study, finished, {}, "finished")


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
    assert counted_link_bytes(run) == 12  # what the second node received, not sums over nodes or directions
    del run.events[5]
    assert counted_link_bytes(run) == 10


@pytest.mark.parametrize(
    "damaged",
    [
        window("node0", None, 5, 1, 1),
        window("node0", 5, "5", 1, 1),
        window("node0", 6, 5, 1, 1),
        window("node0", 5, 5, None, 1),
        window("node0", 5, 5, 1, True),
        {"event": "traffic"},
    ],
)
def test_readings_that_cannot_be_used_are_none(run: Run, damaged: dict[str, Any]) -> None:
    run.events[:] = [damaged]
    assert counted_link_bytes(run) is None
    numbers = link_traffic(run)
    assert numbers["counted_link_bytes"] is numbers["counted_over_formula"] is None
    assert (
        "no reading" in numbers["counted_link_bytes_reason"] and "no reading" in numbers["counted_over_formula_reason"]
    )
    assert numbers["formula_link_bytes"] == 8 * MILLION


@pytest.mark.parametrize("traffic", [None, [], {}, {"nodes": None}, {"nodes": {}}, {"nodes": {"node0": "1"}}])
def test_a_run_without_a_formula(run: Run, traffic: Any) -> None:
    run.facts["traffic"] = traffic
    assert formula_link_bytes(run) is None
    numbers = link_traffic(run)
    assert numbers["counted_link_bytes"] == pytest.approx(8.48 * MILLION)
    assert numbers["counted_over_formula"] is None and "does not say" in numbers["counted_over_formula_reason"]


def test_the_busiest_node_and_a_layout_that_sends_nothing(run: Run) -> None:
    run.facts["traffic"] = {"nodes": {"node0": 1, "node1": 3.0, "node2": 2}}
    assert formula_link_bytes(run) == 3
    run.facts["traffic"] = {"nodes": {"node0": 0, "node1": 0}}
    numbers = link_traffic(run)
    assert numbers["formula_link_bytes"] == 0 and numbers["counted_over_formula"] is None
    assert "nothing" in numbers["counted_over_formula_reason"]


def test_memory_is_what_came_with_the_model(run: Run) -> None:
    numbers = memory_numbers(run)
    assert numbers["memory_bytes"] == {"max": 16 * MILLION, "per_rank": [16 * MILLION, 16 * MILLION - 1000]}
    assert numbers["peak_rss_bytes"]["per_rank"] == [216 * MILLION, 216 * MILLION + 1 - 1000]
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
    numbers = memory_numbers(run)
    assert (
        numbers["memory_bytes"] is numbers["peak_rss_bytes"] is None and "every rank" in numbers["memory_bytes_reason"]
    )


def test_the_cells_of_the_study(tmp_path: Path, write_run: WriteRun) -> None:
    results = results_of(tmp_path, write_run, links="1gbit")
    cells = {(each["axes"]["ranks_per_node"], each["axes"]["layout"]): each for each in results["cells"]}
    assert len(cells) == len(results["cells"]) == 9 and len(results["left_out"]) == 1
    hybrid = cells[2, "hsdp"]
    assert hybrid["formula_link_bytes"] == hybrid["link_bytes"] == 3 * MILLION
    assert hybrid["counted_link_bytes"] == 3.18 * MILLION and hybrid["counted_over_formula"] == pytest.approx(1.06)
    assert hybrid["communication_ms"]["transfer"] == pytest.approx(20) and hybrid["link_share"] == pytest.approx(1.2)
    assert hybrid["memory_bytes"]["max"] == 32 * MILLION and len(hybrid["memory_bytes"]["per_rank"]) == 4
    assert hybrid["tokens_per_s_global"] == pytest.approx(50_000)


def test_what_it_comes_to(tmp_path: Path, write_run: WriteRun) -> None:
    results = results_of(tmp_path, write_run)
    assert [(each["ranks_per_node"], each["link"], each["layout"]) for each in results["fastest"]] == [
        (1, "200mbit", "pp"),
        (1, "1gbit", "pp"),
        (2, "200mbit", "pp"),
        (2, "1gbit", "pp"),
    ]
    assert results["fastest"][0]["step_ms"] == pytest.approx(64)
    slow, fast = results["hsdp_over_fsdp"]
    assert (slow["ranks_per_node"], slow["link"], fast["link"]) == (2, "200mbit", "1gbit")
    assert slow["counted_link_bytes"] == slow["formula_link_bytes"] == 0.25
    assert slow["step"] == pytest.approx(80 / 140)
    assert results["counted_over_formula"] == {
        "min": pytest.approx(1.06),
        "max": pytest.approx(1.06),
        "cells": 18,
    }


def test_what_it_comes_to_without_some_cells(tmp_path: Path, write_run: WriteRun) -> None:
    results = results_of(tmp_path, write_run, leave_out="hsdp", ranks="2", links="1gbit")
    assert results["hsdp_over_fsdp"] == [] and results["fastest"][0]["layout"] == "pp"
    assert compare_layouts([{"status": "failed"}]) == {
        "fastest": [],
        "hsdp_over_fsdp": [],
        "counted_over_formula": None,
        "counted_over_formula_reason": "no cell has both",
    }
    for each in results["cells"]:
        each |= {"counted_link_bytes": None, "counted_link_bytes_reason": "no counter", "counted_over_formula": None}
    results["cells"][2] |= {**results["cells"][1], "axes": results["cells"][2]["axes"], "formula_link_bytes": 1.0}
    found = compare_layouts(results["cells"])
    assert found["counted_over_formula"] is None and found["hsdp_over_fsdp"][0]["counted_link_bytes"] is None
    assert found["hsdp_over_fsdp"][0]["counted_link_bytes_reason"] == "no counter"
    assert found["hsdp_over_fsdp"][0]["formula_link_bytes"] == pytest.approx(1 / (12 * MILLION))
