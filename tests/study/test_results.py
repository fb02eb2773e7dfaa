from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bireme.run_reader import Run, read_run
from bireme.study.grid import Cell, Options, study_of
from bireme.study.results import bound_ms, cell_numbers, largest_growth, link_bytes, link_rate, study_results

WriteRun = Callable[..., dict[str, Any]]
MILLION = 1_000_000


def results_of(name: str, directory: Path, write_run: WriteRun, leave_out: int = -1, **options: Any) -> dict[str, Any]:
    study = study_of(name, Options(**{"steps": 4, **options}), 2)
    finished: dict[Cell, tuple[dict[str, Any], Run]] = {}
    for index, cell in enumerate(study.cells):
        if index != leave_out:
            conditions = write_run(cell, directory / cell.key)
            finished[cell] = conditions, read_run(directory / cell.key)
    return study_results(study, finished, {}, "finished")


def use(operation: str, size: float, ranks: list[int]) -> dict[str, Any]:
    return {"operation": operation, "bytes": size, "ranks": ranks}


def nodes(*ranks: list[int]) -> list[dict[str, Any]]:
    return [{"name": f"node{index}", "ranks": each} for index, each in enumerate(ranks)]


def test_bytes_over_a_link() -> None:
    two = nodes([0], [1])
    assert link_bytes([use("all_reduce", 100, [0, 1])], two) == 100
    assert link_bytes([use("all_reduce", 100, [0, 1]), use("all_gather", 100, [0, 1])], two) == 150
    # A ring over two ranks on each of two nodes: 2 (2g - 1) / 2g N.
    assert link_bytes([use("all_reduce", 100, [0, 1, 2, 3])], nodes([0, 1], [2, 3])) == 150
    # Reduced inside the node first: only the second group crosses.
    inside, across = use("reduce_scatter", 100, [0, 1]), [use("all_reduce", 50, [0, 2]), use("all_reduce", 50, [1, 3])]
    assert link_bytes([inside], nodes([0, 1], [2, 3])) == 0
    assert link_bytes([inside, *across], nodes([0, 1], [2, 3])) == 100
    # The busiest node counts.
    assert link_bytes([use("all_reduce", 90, [0, 1]), use("all_reduce", 90, [1, 2])], nodes([0], [1], [2])) == 180
    assert link_bytes([use("all_reduce", 100, [0])], nodes([0])) == 0


def test_the_bound_is_the_larger_of_computing_and_moving() -> None:
    assert bound_ms(200, 1.25 * MILLION, 100 * MILLION) == 200
    assert bound_ms(50, 1.25 * MILLION, 100 * MILLION) == pytest.approx(100)
    assert bound_ms(50, 1e12, None) == 50
    assert link_rate("100mbit") == 100 * MILLION and link_rate("unlimited") is link_rate("unshaped") is None


def test_links_against_their_bound(tmp_path: Path, write_run: WriteRun) -> None:
    alone, slow, _, fast, _ = results_of("links", tmp_path, write_run, links="100mbit,1gbit")["cells"]
    assert alone["step_ms"]["median"] == pytest.approx(60) and "bound_ms" not in alone
    assert alone["link_bytes"] == 0 and alone["link_bit_per_s"] is None and alone["link_bit_per_s_reason"]
    assert slow["link_bytes"] == 4 * MILLION
    assert slow["link_bit_per_s"] == pytest.approx(8 * 4 * MILLION / 0.040)
    assert slow["link_share"] == pytest.approx(8) and fast["link_share"] == pytest.approx(0.8)
    assert slow["bound_ms"] == pytest.approx(320) and slow["step_over_bound"] == pytest.approx(100 / 320)
    assert fast["bound_ms"] == pytest.approx(60) and fast["step_over_bound"] == pytest.approx(100 / 60)
    assert slow["link"] == "100mbit" and slow["shaped"] is True and slow["run"] == f"cells/{slow['key']}"


def test_without_one_node_alone_there_is_no_bound(tmp_path: Path, write_run: WriteRun) -> None:
    alone, other, *_ = results_of("links", tmp_path, write_run, leave_out=0, links="1gbit")["cells"]
    assert alone["status"] == "not run" and "step_ms" not in alone
    assert other["bound_ms"] is other["step_over_bound"] is None
    assert "alone" in other["bound_ms_reason"] and "alone" in other["step_over_bound_reason"]


def test_an_unlimited_link_has_no_share(tmp_path: Path, write_run: WriteRun) -> None:
    cell = study_of("links", Options(links="unlimited", steps=2), 2).cells[1]
    write_run(cell, tmp_path / "run")
    numbers = cell_numbers(cell, read_run(tmp_path / "run"))
    assert numbers["link_share"] is None and numbers["link_share_reason"] == "the link is unlimited"
    assert numbers["link_bit_per_s"] > 0


def test_an_old_run_s_bytes_are_those_of_its_all_reduces(tmp_path: Path, write_run: WriteRun) -> None:
    cell = study_of("ranks", Options(steps=2), 2).cells[2]
    write_run(cell, tmp_path / "new")
    write_run(cell, tmp_path / "old", traffic=None)
    new, old = (cell_numbers(cell, read_run(tmp_path / name)) for name in ("new", "old"))
    assert new == old and new["link_bytes"] == 1.5 * 4 * MILLION
    sharded = replace(cell, layout="fsdp")
    numbers = cell_numbers(sharded, read_run(tmp_path / "old"))
    assert numbers["link_bytes"] is None and "does not say" in numbers["link_bytes_reason"]


def test_a_formula_needs_no_observation(tmp_path: Path, write_run: WriteRun) -> None:
    cell = study_of("ranks", Options(steps=2), 2).cells[1]
    write_run(cell, tmp_path / "run", missing={"collectives": "no hooks"})
    numbers = cell_numbers(cell, read_run(tmp_path / "run"))
    assert numbers["link_bytes"] == 4 * MILLION and numbers["link_bit_per_s_reason"] == "no hooks"


def test_what_was_not_observed_is_null_with_a_reason(tmp_path: Path, write_run: WriteRun) -> None:
    cell = study_of("ranks", Options(steps=2), 2).cells[1]
    write_run(cell, tmp_path / "run", missing={"collectives": "no hooks", "run_delay": "macOS"}, traffic=None)
    numbers = cell_numbers(cell, read_run(tmp_path / "run"))
    for name in ("contention_ms", "communication_share", "link_bytes", "link_bit_per_s", "link_share"):
        assert numbers[name] is None and numbers[f"{name}_reason"]
    assert numbers["communication_ms"]["transfer"] is None


def test_efficiency_is_of_one_rank_alone(tmp_path: Path, write_run: WriteRun) -> None:
    one, two, four = results_of("ranks", tmp_path, write_run)["cells"]
    assert one["efficiency"] == pytest.approx(1)
    assert two["efficiency"] == pytest.approx(0.6) and four["efficiency"] == pytest.approx(0.6)
    assert two["tokens_per_s_global"] == pytest.approx(20_000)


def test_efficiency_without_one_rank_alone(tmp_path: Path, write_run: WriteRun) -> None:
    _, two, _ = results_of("ranks", tmp_path, write_run, leave_out=0)["cells"]
    assert two["efficiency"] is None and "one rank" in two["efficiency_reason"]


def test_a_straggler_is_found_where_it_was_planted(tmp_path: Path, write_run: WriteRun) -> None:
    sweep = results_of("straggler", tmp_path, write_run, ranks="2", delays="0,50,100")["sweep"]
    assert [each["delay_ms"] for each in sweep["delays"]] == [0, 50, 100]
    assert [each["steps"] for each in sweep["delays"]] == [4, 4, 4]
    assert [each["punctual_wait_ms"] for each in sweep["delays"]] == pytest.approx([0, 50, 100])
    assert [each["slow_found_ms"] for each in sweep["delays"]] == pytest.approx([0, 50, 100])
    assert sweep["rank"] == 3 and sweep["phase"] == "forward"
    assert sweep["found"] == {
        "phase": "forward",
        "state": "blocked",
        "growth_ms": pytest.approx(100),
        "planted_ms": 100,
    }
    assert sweep["step_fit"] == pytest.approx({"slope": 1, "intercept_ms": 100, "r_squared": 1})
    assert sweep["wait_fit"] == pytest.approx({"slope": 1, "intercept_ms": 0, "r_squared": 1})


def test_a_straggler_that_did_not_run(tmp_path: Path, write_run: WriteRun) -> None:
    results = results_of("straggler", tmp_path, write_run, leave_out=0)
    assert results["sweep"] is None and results["sweep_reason"]


def test_growth_counts_unknown_cells_as_nothing() -> None:
    from bireme.ledger import PHASES, STATES

    before: dict[str, dict[str, float | None]] = {phase: dict.fromkeys(STATES, 1.0) for phase in PHASES}
    after = {phase: dict(states) for phase, states in before.items()}
    after["input"]["blocked"] = 9.0
    after["forward"]["wait"] = before["forward"]["wait"] = None
    assert largest_growth(before, after) == ("input", "blocked", 8.0)


def test_failed_cells_say_why(tmp_path: Path) -> None:
    study = study_of("ranks", Options(), 2)
    results = study_results(study, {}, {study.cells[0]: "node0 ended with exit code 1"}, "failed")
    assert results["status"] == "failed"
    assert [cell["status"] for cell in results["cells"]] == ["failed", "not run", "not run"]
    assert results["cells"][0]["reason"].startswith("node0") and results["cells"][0]["log"].endswith(".log")
