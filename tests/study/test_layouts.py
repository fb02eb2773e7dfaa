from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bireme.run_reader import Run, read_run
from bireme.study.grid import Cell, Options, study_of
from bireme.study.layouts import compare_layouts
from bireme.study.results import study_results

WriteRun = Callable[..., dict[str, Any]]
MILLION = 1_000_000


def results_of(directory: Path, write_run: WriteRun, leave_out: str = "", **options: Any) -> dict[str, Any]:
    study = study_of("layouts", Options(**{"steps": 4, **options}), 2)
    finished: dict[Cell, tuple[dict[str, Any], Run]] = {}
    for cell in study.cells:
        if cell.layout != leave_out:
            conditions = write_run(cell, directory / cell.key)
            finished[cell] = conditions, read_run(directory / cell.key)
    return study_results(study, finished, {}, "finished")


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
