import io
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from rich.console import Console

from bireme.report import report_command
from bireme.report.compare import compare, render_comparison
from bireme.report.summary import summarise
from bireme.run_reader import Run

MakeRun = Callable[..., Run]
Steps = list[list[dict[str, float] | None]]


@pytest.fixture
def runs(make_run: MakeRun, balanced_steps: Steps) -> tuple[Run, Run]:
    a = make_run(balanced_steps, name="a", events=[{"event": "host", "rank": 0}])
    double: Steps = [
        [{name: 2 * value for name, value in (cells or {}).items()} for cells in r] for r in balanced_steps
    ]
    b = make_run(
        double,
        name="b",
        reduction="flat",
        config={"lr": 0.01, "seed": 1, "[b]new": None},
        peak=None,
        events=[{"event": "injection", "kind": "sleep", "rank": 1, "phase": "forward", "delays_ms": [150]}],
    )
    return a, b


def test_both_runs_and_only_what_differs(runs: tuple[Run, Run]) -> None:
    comparison = compare(*runs)
    assert list(comparison) == ["a", "b", "differences"]
    assert comparison["a"] == {"run": str(runs[0].directory), **summarise(runs[0])}
    facts = {row["field"]: (row["a"], row["b"]) for row in comparison["differences"]["facts"]}
    injection = {"kind": "sleep", "rank": 1, "phase": "forward", "delays_ms": [150]}
    assert facts.pop("injections") == ([], [injection])
    assert facts == {"reduction": ("overlap", "flat"), "config.lr": (0.001, 0.01), "config.[b]new": (None, None)}


def test_change_and_ratio(runs: tuple[Run, Run]) -> None:
    metrics = {row["metric"]: row for row in compare(*runs)["differences"]["metrics"]}
    step = metrics["step, median"]
    assert (step["a"], step["b"], step["change"], step["ratio"]) == pytest.approx((150, 300, 150, 2))
    assert metrics["tokens/s (global)"]["ratio"] == pytest.approx(0.5)
    assert metrics["forward/blocked"]["change"] == pytest.approx(25)
    mfu = metrics["MFU"]
    assert mfu["a"] > 0 and mfu["b"] is None and mfu["change"] is None and mfu["ratio"] is None
    nothing = metrics["checkpoint/running"]
    assert (nothing["a"], nothing["change"], nothing["ratio"]) == (0, 0, None)


def test_two_runs_as_text(runs: tuple[Run, Run]) -> None:
    output = io.StringIO()
    render_comparison(compare(*runs), *runs, Console(file=output, width=80))
    lines = [" ".join(line.split()) for line in output.getvalue().splitlines()]
    assert "step, median (ms) 150.0 300.0 +150.0 2.00" in lines
    assert "reduction overlap flat" in lines and "config.lr 0.001 0.01" in lines and "config.[b]new None None" in lines
    assert not any(line.startswith(("config.seed", "checkpoint/running")) for line in lines)
    assert any(line.startswith("MFU") and line.endswith("n/a n/a n/a") for line in lines)


def test_a_run_against_itself_differs_in_nothing(runs: tuple[Run, Run]) -> None:
    comparison = compare(runs[0], runs[0])
    assert comparison["differences"]["facts"] == []
    assert all(not row["change"] for row in comparison["differences"]["metrics"])


def test_the_command_compares_two_runs(runs: tuple[Run, Run], capsys: pytest.CaptureFixture[str]) -> None:
    report_command([run.directory for run in runs], as_json=True)
    value: dict[str, Any] = orjson.loads(capsys.readouterr().out)
    assert value == compare(*runs)
    report_command([run.directory for run in runs], as_json=False)
    assert "B - A" in capsys.readouterr().out
