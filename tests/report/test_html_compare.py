"""The page of two runs: which differences exceed the noise."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from bireme.report import report_command
from bireme.report.compare import compare
from bireme.report.html.arrays import step_arrays
from bireme.report.html.compare_numbers import beyond_noise, compare_page, metric_series
from bireme.report.html.write import embedded_json
from bireme.report.summary import summarise
from bireme.run_reader import Run

MakeRun = Callable[..., Run]
Cells = dict[str, float]


def noisy(mean_ms: float, seed: int, count: int = 100, ranks: int = 2) -> list[list[Cells | None]]:
    """Steps of about so long, with 5 % noise."""
    values = np.random.default_rng(seed).normal(mean_ms, 0.05 * mean_ms, count)
    return [[{"forward/running": float(value), "backward/wait": 5.0} for _ in range(ranks)] for value in values]


def page_of(a: Run, b: Run) -> dict[str, Any]:
    page = compare_page(a, b, compare(a, b))
    orjson.loads(embedded_json(page))
    return page


def row(page: dict[str, Any], metric: str) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in page["metrics"] if each["metric"] == metric)
    return found


def test_the_same_run_twice_is_within_the_noise(make_run: MakeRun) -> None:
    page = page_of(make_run(noisy(100, 1), name="a"), make_run(noisy(100, 2), name="b"))
    assert row(page, "step, median (ms)")["beyond"] is False
    assert "within the noise" in page["verdict"]
    assert row(page, "forward/running (ms)")["beyond"] is False


def test_a_slower_run_is_not(make_run: MakeRun) -> None:
    page = page_of(make_run(noisy(100, 1), name="a"), make_run(noisy(110, 2), name="b", reduction="flat"))
    step = row(page, "step, median (ms)")
    assert step["beyond"] is True and step["noise"].startswith("yes (")
    assert row(page, "tokens/s (global)")["beyond"] is True and row(page, "MFU")["beyond"] is True
    assert row(page, "wait (ms)")["beyond"] is False  # 5 ms in both
    assert row(page, "step, p90 (ms)")["noise"] == "n/a"
    assert "longer" in page["verdict"] and "forward/running" in page["verdict"]
    assert ["reduction", "overlap", "flat"] in page["facts"]
    assert len(page["sides"]) == 2 and all(side["sentence_text"].startswith("A step takes") for side in page["sides"])


def test_the_rule_holds_its_rate_of_false_alarms() -> None:
    rng = np.random.default_rng(3)
    alarms = sum(bool(beyond_noise(rng.normal(1, 0.1, 60), rng.normal(1, 0.1, 60))["beyond"]) for _ in range(1000))
    assert alarms < 20  # three standard errors: 3 in a thousand, and the MAD of 60 steps is itself uncertain


def test_few_steps_have_no_noise(make_run: MakeRun) -> None:
    page = page_of(make_run(noisy(100, 1, 5), name="a"), make_run(noisy(100, 2, 50), name="b"))
    assert row(page, "step, median (ms)")["noise"] == "n/a" and "is not known" in page["verdict"]
    assert row(page, "step, median (ms)")["why"] == "fewer than 8 measured steps"


def test_no_noise_at_all() -> None:
    same, other = np.full(10, 3.0), np.full(10, 3.5)
    assert beyond_noise(same, same)["beyond"] is False and beyond_noise(same, other)["beyond"] is True


def test_series_agree_with_the_metrics(make_run: MakeRun) -> None:
    run = make_run(noisy(100, 1), name="a")
    found = metric_series(run, summarise(run), step_arrays(run))
    for metric in compare(run, run)["differences"]["metrics"]:
        if metric["metric"] in found and metric["metric"] not in ("step, median", "MFU", "tokens/s (global)"):
            wanted = pytest.approx(metric["a"], rel=1e-2, abs=1e-6)
            assert float(np.mean(found[metric["metric"]])) == wanted, metric["metric"]
    assert {"hidden", "hidden transfer", "communication share", "forward/running", "MFU"} <= set(found)


def test_unobserved_in_one_run(make_run: MakeRun) -> None:
    a = make_run(noisy(100, 1), name="a", missing={"collectives": "no hooks"})
    page = page_of(a, make_run(noisy(100, 2, ranks=3), name="b"))
    assert row(page, "wait (ms)")["a"] == "n/a" and row(page, "wait (ms)")["noise"] == "n/a"


def test_the_file_stands_beside_the_second_run(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = make_run(noisy(100, 1), name="first"), make_run(noisy(100, 2), name="second")
    report_command([a.directory, b.directory], as_json=False, html=True)
    path = Path(capsys.readouterr().out.strip())
    assert path == b.directory / "report-against-first.html" and "first" in path.read_text()
