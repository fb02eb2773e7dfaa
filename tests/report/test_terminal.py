import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from rich.console import Console

from bireme.errors import UserError
from bireme.report import report_command
from bireme.report.summary import summarise
from bireme.report.terminal import ms, percent, render, scaled
from bireme.run_reader import Run
from bireme.text import rank_list

MakeRun = Callable[..., Run]
Steps = list[list[dict[str, float] | None]]


def rendered(run: Run, width: int = 80) -> str:
    output = io.StringIO()  # not a terminal
    render(summarise(run), run, Console(file=output, width=width))
    return output.getvalue()


def words(text: str) -> str:
    return " ".join(text.split())


def test_the_report_says_what_ran_and_where_the_time_went(make_run: MakeRun, balanced_steps: Steps) -> None:
    text = rendered(make_run(balanced_steps, skipped=1))
    assert max(map(len, text.splitlines())) <= 80 and "\x1b" not in text and "…" not in text
    flat = words(text)
    for part in (
        "2 ranks on 1 node | ddp, overlap | tiny, 123 thousand parameters | 5 steps measured, 1 skipped | finished",
        "step 150.0 ms median, 154.0 mean, p10 150.0, p90 162.0",
        "node here, mean of 2 ranks",
        "rank 0 on here",
        "rank 1 on here",
        "communication: transfer 5.00 ms + wait 30.0 ms",
        "world 0-1 all_reduce 8 4 MB 20.0 ms 10.0 ms 200 MB/s",
        "MFU: 6.5 % of 100 MFLOP/s over all ranks (measured); full attention",
        "cost of measuring: 0.200 ms a step (0.1 %)",
        "closure error 0 ns",
        "unlocated -0.020 ms",
    ):
        assert part in flat
    assert "backward 60.0 39% 3.00 2% 5.00 3% 1.00 1% - 69.0 45%" in flat


def test_many_ranks_are_shown_by_node_and_by_the_extremes(make_run: MakeRun) -> None:
    usual = {"forward/running": 60.0, "backward/wait": 40.0}
    slow = {"forward/running": 60.0, "forward/blocked": 35.0, "backward/wait": 5.0}
    fast = {"forward/running": 50.0, "backward/wait": 50.0}
    ranks: list[dict[str, float] | None] = [usual] * 12
    ranks[4], ranks[9] = slow, fast
    nodes = [{"name": "a", "ranks": list(range(0, 12, 2))}, {"name": "b", "ranks": list(range(1, 12, 2))}]
    text = rendered(make_run([ranks] * 3, nodes=nodes))
    titles = [line.strip() for line in text.splitlines() if line.startswith(("node ", "rank "))]
    assert titles == [
        "node a, mean of 6 ranks",
        "node b, mean of 6 ranks",
        "rank 9 on b, the fastest (50.0 ms a step of its own)",
        "rank 4 on a, the slowest (95.0 ms a step of its own)",
    ]


def test_unknown_is_n_a_with_its_reason(make_run: MakeRun, balanced_steps: Steps) -> None:
    text = words(rendered(make_run(balanced_steps, missing={"collectives": "no hooks"}, peak=None)))
    assert "communication: transfer and wait n/a (no hooks)" in text
    assert "MFU: n/a (the peak of this device is unknown)" in text
    assert "note: collectives not observed: no hooks" in text


def test_host_and_closure_errors_are_named(make_run: MakeRun, balanced_steps: Steps) -> None:
    events: list[dict[str, Any]] = [{"event": "host", "rank": 0, "throttled_ms": 110.4, "steal_ms": 92}]

    def change(lines: list[dict[str, Any]]) -> None:
        lines[0]["cells_ns"][0][0] += 3

    text = words(rendered(make_run(balanced_steps, events=events, change=change)))
    assert "cgroup CPU quota held node here back for 12 % of the time" in text
    assert "the hypervisor took 5.0 % of node here's core time (steal)" in text
    assert "closure error 3 ns: the ledger does NOT add up" in text


def test_names_from_files_are_only_text(make_run: MakeRun, balanced_steps: Steps) -> None:
    name = "[red]x[/blue]\x1b[31m\n"
    run = make_run(
        balanced_steps,
        nodes=[{"name": name, "ranks": [0, 1]}],
        groups=[{"name": name, "ranks": [0, 1]}],
        model={"preset": name, "parameters": 5},
        layout=name,
        peak={"flops_per_s": 1e9, "source": name},
        events=[{"event": "warning", "ranks": [0], "message": name}],
    )
    text = rendered(run, width=200)
    assert "\x1b" not in text and text.count("[red]x[/blue]") >= 5


def test_the_command_prints_one_run_as_json_or_text(
    make_run: MakeRun, balanced_steps: Steps, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(balanced_steps)
    report_command([run.directory], as_json=True)
    assert orjson.loads(capsys.readouterr().out) == summarise(run)
    report_command([run.directory], as_json=False)
    assert "closure error 0 ns" in capsys.readouterr().out


def test_the_command_wants_one_or_two_runs(tmp_path: Path) -> None:
    for paths in ([], [tmp_path] * 3):
        with pytest.raises(UserError, match="one run directory, or two"):
            report_command(paths, as_json=False)
    with pytest.raises(UserError, match="not a run"):
        report_command([tmp_path], as_json=True)


def test_numbers_keep_their_meaning_in_few_characters() -> None:
    assert [ms(value) for value in (None, 0.1234, 9.876, 98.76, 987.6, 9876.5)] == [
        *("n/a", "0.12", "9.88", "98.8", "987.6", "9876")
    ]
    assert [percent(value) for value in (None, 0, 0.0123, 0.5)] == ["n/a", "0 %", "1.2 %", "50 %"]
    assert [scaled(value) for value in (0, 999, 4_300_000, 2.5e13)] == ["0 B", "999 B", "4.3 MB", "25 TB"]
    assert rank_list([8, 0, 1, 2, 5]) == "0-2,5,8"
