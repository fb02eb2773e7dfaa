import subprocess
import sys
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from bireme.errors import UserError
from bireme.ledger import PHASES, STATES
from bireme.report.summary import quantile, summarise
from bireme.run_reader import Run

MakeRun = Callable[..., Run]
Steps = list[list[dict[str, float] | None]]


def total(summary: dict[str, Any], rank: str) -> float:
    return sum(value or 0.0 for cells in summary["ledger_ms"][rank].values() for value in cells.values())


def reasons_are_given(value: Any) -> bool:
    """Whether every null has its reason beside it."""
    if isinstance(value, dict):
        nulls = [name for name, item in value.items() if item is None and name not in STATES]
        return all(value.get(f"{name}_reason") for name in nulls) and all(map(reasons_are_given, value.values()))
    return all(map(reasons_are_given, value)) if isinstance(value, list) else True


def test_the_object_has_the_fields_of_the_design(make_run: MakeRun, balanced_steps: Steps) -> None:
    summary = summarise(make_run(balanced_steps))
    assert list(summary) == [
        *(
            "world_size",
            "nodes",
            "layout",
            "roles",
            "steps",
            "step_ms",
            "tokens_per_s_global",
            "mfu",
            "ledger_ms",
            "compute_ms",
        ),
        *("contention_ms", "communication_ms", "communication_share", "collectives", "closure_error_ns", "clamped_ms"),
        *("unlocated_ms", "unmatched", "overhead", "loss", "verdicts", "verdicts_reason"),
        *("link_traffic", "memory", "host", "notes"),
    ]
    assert list(summary["ledger_ms"]) == ["0", "1"]
    for cells in summary["ledger_ms"].values():
        assert list(cells) == list(PHASES) and all(list(states) == list(STATES) for states in cells.values())
    assert reasons_are_given(summary)
    assert summary["notes"] == []
    assert orjson.loads(orjson.dumps(summary)) == summary


def test_the_numbers_by_hand(make_run: MakeRun, balanced_steps: Steps) -> None:
    summary = summarise(make_run(balanced_steps))
    assert summary["steps"] == {"measured": 6, "skipped": 0}
    assert summary["step_ms"] == pytest.approx(
        {"mean": (5 * 150 + 170) / 6, "median": 150, "p10": 150, "p90": 160}, abs=1e-9
    )
    # 6000 tokens in 920 ms: rank 0 and rank 1 take the same time
    assert summary["tokens_per_s_global"] == pytest.approx(6000 / 0.920)
    assert summary["mfu"]["value"] == pytest.approx(6000 / 0.920 * 1000 / 1e8)
    assert summary["mfu"]["value_causal"] == pytest.approx(6000 / 0.920 * 900 / 1e8)
    assert summary["mfu"]["peak_source"] == "measured" and "full attention" in summary["mfu"]["convention"]
    assert summary["compute_ms"] == pytest.approx((90 + 90.5) / 2)
    assert summary["contention_ms"] == pytest.approx(1.5)
    assert summary["communication_ms"] == pytest.approx(
        {"transfer": 5, "wait": (55 + 20 / 6 + 1) / 2, "hidden": 4, "hidden_transfer": 3}
    )
    assert summary["communication_share"] == pytest.approx(((60 * 6 + 20) / 920 + 6 * 6 / 920) / 2)
    assert summary["ledger_ms"]["1"]["forward"]["blocked"] == pytest.approx(50)
    assert summary["ledger_ms"]["1"]["input"]["blocked"] == pytest.approx(20 / 6)
    assert summary["clamped_ms"] == pytest.approx(0.01) and summary["unlocated_ms"] == pytest.approx(-0.02)
    assert summary["overhead"] == pytest.approx(
        {"ms_per_step": 0.2, "share": 0.2 / (920 / 6), "training_thread_ms": 0.05, "background_ms": 0.15}
    )
    assert summary["loss"] == {"first": 4.9, "last": 4.4}
    assert summary["unmatched"] == 0
    assert summary["collectives"] == [
        {
            "group": "world",
            "ranks": [0, 1],
            "operation": "all_reduce",
            "count": 8,
            "bytes": 4e6,
            "transfer_ms": 20,
            "wait_ms": 10,
            "bus_bandwidth_bytes_per_s": pytest.approx(4e6 / 0.020),  # 2 (n - 1) / n is 1 for two ranks
        }
    ]


def test_the_ledger_sums_to_the_step(make_run: MakeRun, balanced_steps: Steps) -> None:
    summary = summarise(make_run(balanced_steps, skipped=1))
    mean = (total(summary, "0") + total(summary, "1")) / 2
    assert mean == pytest.approx(summary["step_ms"]["mean"], rel=1e-12)
    assert summary["steps"] == {"measured": 5, "skipped": 1}
    assert summary["step_ms"]["mean"] == pytest.approx((4 * 150 + 170) / 5)


def test_steps_can_be_chosen_by_number_or_function(make_run: MakeRun, balanced_steps: Steps) -> None:
    run = make_run(balanced_steps, skipped=1)
    assert summarise(run, [2])["step_ms"]["mean"] == pytest.approx(170)
    assert summarise(run, lambda step: bool(step["step"] > 2))["step_ms"]["mean"] == pytest.approx(150)
    with pytest.raises(UserError, match="none of the steps asked for"):
        summarise(run, [1])  # it is skipped


def test_a_planted_nanosecond_is_a_closure_error(make_run: MakeRun, balanced_steps: Steps) -> None:
    assert summarise(make_run(balanced_steps, skipped=2))["closure_error_ns"] == 0

    def one_cell(lines: list[dict[str, Any]]) -> None:
        lines[0]["cells_ns"][1][3] += 1  # of a skipped step: closure knows no exceptions

    assert summarise(make_run(balanced_steps, skipped=2, name="cell", change=one_cell))["closure_error_ns"] == 1

    def cancelling(lines: list[dict[str, Any]]) -> None:
        lines[1]["cells_ns"][0][0] += 5
        lines[2]["cells_ns"][0][0] -= 5

    assert summarise(make_run(balanced_steps, name="cancelling", change=cancelling))["closure_error_ns"] == 5

    def gap(lines: list[dict[str, Any]]) -> None:  # each step closes, but time is lost between two of them
        for name in ("start_ns", "end_ns"):
            for line in lines[3:]:
                line[name][1] += 1

    assert summarise(make_run(balanced_steps, name="gap", change=gap))["closure_error_ns"] == 1

    def overlap(lines: list[dict[str, Any]]) -> None:  # no time is lost in the sum, but one step holds too much
        lines[3]["start_ns"][1] += 2

    assert summarise(make_run(balanced_steps, name="overlap", change=overlap))["closure_error_ns"] == 2


def test_a_lost_line_is_a_note_and_no_closure_error(make_run: MakeRun, balanced_steps: Steps) -> None:
    def lose(lines: list[dict[str, Any]]) -> None:
        lines[2]["cells_ns"] = "torn"

    summary = summarise(make_run(balanced_steps, change=lose))
    assert summary["closure_error_ns"] == 0
    assert "1 damaged lines of the record were left out" in summary["notes"]
    assert "steps are absent from the record: 3" in summary["notes"]


def test_without_collectives_what_they_would_have_said_is_not_zero(make_run: MakeRun, balanced_steps: Steps) -> None:
    summary = summarise(make_run(balanced_steps, missing={"collectives": "torch 2.13 has no hooks"}))
    assert summary["communication_ms"] == {
        "transfer": None,
        "transfer_reason": "torch 2.13 has no hooks",
        "wait": None,
        "wait_reason": "torch 2.13 has no hooks",
        "hidden": None,
        "hidden_reason": "torch 2.13 has no hooks",
        "hidden_transfer": None,
        "hidden_transfer_reason": "torch 2.13 has no hooks",
    }
    for name in ("communication_share", "collectives", "unlocated_ms"):
        assert summary[name] is None
    assert summary["contention_ms"] == pytest.approx(1.5)
    for cells in summary["ledger_ms"]["0"].values():
        assert cells["transfer"] is None and cells["wait"] is None and cells["running"] is not None
    assert "torch 2.13" in summary["ledger_ms_reason"]
    assert reasons_are_given(summary)
    assert "collectives not observed: torch 2.13 has no hooks" in summary["notes"]


def test_without_run_delay_contention_is_unknown(make_run: MakeRun, balanced_steps: Steps) -> None:
    summary = summarise(make_run(balanced_steps, missing={"run_delay": "no schedstat"}))
    assert summary["contention_ms"] is None and summary["contention_ms_reason"] == "no schedstat"
    assert summary["ledger_ms"]["1"]["backward"]["runnable"] is None
    assert summary["ledger_ms"]["1"]["backward"]["transfer"] == pytest.approx(5)
    assert reasons_are_given(summary)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"peak": None}, "peak"),
        ({"peak": {"flops_per_s": None, "source": None}}, "peak"),
        ({"peak": {"flops_per_s": 0, "source": "x"}}, "peak"),
        ({"model": None}, "FLOPs per token"),
        ({"model": {"flops_per_token": {"full": None}}}, "FLOPs per token"),
        ({"peak": {"flops_per_s": 1e6, "source": "datasheet"}}, "above 1: the peak is probably wrong"),
    ],
)
def test_mfu_is_a_number_or_a_reason(
    make_run: MakeRun, balanced_steps: Steps, facts: dict[str, Any], reason: str
) -> None:
    summary = summarise(make_run(balanced_steps, **facts))
    assert summary["mfu"]["value"] is None and reason in summary["mfu"]["value_reason"]
    assert reasons_are_given(summary)


def test_tokens_are_divided_by_the_slowest_ranks_time(make_run: MakeRun) -> None:
    run = make_run([[{"forward/running": 100.0}, {"forward/running": 200.0}] for _ in range(3)])
    assert summarise(run)["tokens_per_s_global"] == pytest.approx(3000 / 0.6)

    # Each rank is late once: nobody took 400 ms for two steps.
    turns: Steps = [
        [{"forward/running": 100.0}, {"forward/running": 200.0}],
        [{"forward/running": 200.0}, {"forward/running": 100.0}],
    ]
    assert summarise(make_run(turns, name="turns"))["tokens_per_s_global"] == pytest.approx(2000 / 0.3)

    # A rank that is gone says nothing about the run's whole time, however slow it was.
    gone: Steps = [[{"forward/running": 100.0}, {"forward/running": 900.0}], [{"forward/running": 100.0}, None]]
    assert summarise(make_run(gone, name="gone"))["tokens_per_s_global"] == pytest.approx(2000 / 0.2)


def test_a_rank_that_is_gone_is_left_out_and_not_zero(make_run: MakeRun) -> None:
    steps: Steps = [
        [{"forward/running": 100.0}, {"forward/running": 50.0, "forward/blocked": 50.0}],
        [{"forward/running": 100.0}, None],
        [{"forward/running": 100.0}, None],
    ]
    summary = summarise(make_run(steps, status="failed"))
    assert summary["step_ms"]["mean"] == pytest.approx(100)
    assert summary["ledger_ms"]["1"]["forward"]["running"] == pytest.approx(50)
    assert summary["compute_ms"] == pytest.approx((75 + 100 + 100) / 3)
    assert summary["closure_error_ns"] == 0
    assert summary["collectives"][0]["bytes"] == 4e6
    assert any("rank 1 recorded 1 of 3 steps" in note for note in summary["notes"])
    assert "the run failed" in summary["notes"]

    never = summarise(make_run([[cells[0], None] for cells in steps], name="never"))
    assert never["ledger_ms"]["1"]["forward"]["running"] is None
    assert "rank 1 recorded no measured step" in never["ledger_ms_reason"]
    assert list(never["ledger_ms"]["1"]) == list(PHASES)


def test_collectives_that_move_nothing_have_no_rate(make_run: MakeRun, balanced_steps: Steps) -> None:
    def change(lines: list[dict[str, Any]]) -> None:
        for line in lines:
            for rank in (0, 1):
                line["collectives"][rank] = [
                    [0, "all_gather", 1, 8_000_000, 0, 5_000_000],
                    [0, "barrier", 1, 0, 1_000_000, 5_000_000],
                    [1, "all_reduce", 1, 100, 1_000_000, 0],
                ]

    groups = [{"name": "world", "ranks": [0, 1]}, {"name": "self", "ranks": [0]}]
    summary = summarise(make_run(balanced_steps, change=change, groups=groups))
    rates = {each["operation"]: each for each in summary["collectives"]}
    assert all(each["bus_bandwidth_bytes_per_s"] is None for each in rates.values())
    assert rates["all_gather"]["bus_bandwidth_bytes_per_s_reason"] == "no transfer time is known"
    assert rates["barrier"]["bus_bandwidth_bytes_per_s_reason"] == "it moves no bytes"
    assert "one member" in rates["all_reduce"]["bus_bandwidth_bytes_per_s_reason"]


def test_a_rate_is_not_made_of_bytes_whose_time_is_unknown(make_run: MakeRun, balanced_steps: Steps) -> None:
    def change(lines: list[dict[str, Any]]) -> None:
        lines[0]["unmatched"] = [8, 8]
        for rank in (0, 1):
            lines[0]["collectives"][rank] = [[0, "all_reduce", 8, 4_000_000, 0, 0]]

    summary = summarise(make_run(balanced_steps, change=change))
    assert summary["unmatched"] == 16
    (each,) = summary["collectives"]
    assert each["bytes"] == 4e6
    assert each["bus_bandwidth_bytes_per_s"] == pytest.approx(4e6 / 0.020)


def test_bus_bandwidth_of_four_ranks(make_run: MakeRun) -> None:
    summary = summarise(make_run([[{"forward/running": 100.0}] * 4 for _ in range(2)]))
    assert summary["collectives"][0]["bus_bandwidth_bytes_per_s"] == pytest.approx(1.5 * 4e6 / 0.020)


def test_the_host_is_named_once_for_all_its_ranks(make_run: MakeRun, balanced_steps: Steps) -> None:
    events: list[dict[str, Any]] = [
        {"event": "host", "rank": 0, "throttled_ms": 46.0, "steal_ms": 18.4},
        {"event": "host", "rank": 0, "throttled_ms": 46.0, "steal_ms": 0},
        {"event": "host", "rank": 1, "throttled_ms": 92.0},
        {"event": "host", "rank": 99, "throttled_ms": 1e9},
        {"event": "host", "rank": "0", "throttled_ms": 1e9},
        {"event": "host", "rank": 1, "throttled_ms": "all"},
    ]
    summary = summarise(make_run(balanced_steps, events=events))
    # 920 ms of time on two cores
    assert summary["host"] == [
        {"node": "here", "throttled_share": pytest.approx(0.1), "steal_share": pytest.approx(0.01)}
    ]


def test_notes_say_what_to_know_first(make_run: MakeRun, balanced_steps: Steps) -> None:
    events: list[dict[str, Any]] = [{"event": "warning", "ranks": [rank], "message": "slow disk"} for rank in (1, 0)]
    events += [{"event": "warning", "ranks": None, "message": f"w{n}"} for n in range(9)]
    events += [{"event": "warning", "ranks": [0], "message": 3}]
    notes = summarise(make_run(balanced_steps, events=events, status="running"))["notes"]
    assert notes[0] == "the run is not finished, or was killed: 6 steps so far"
    assert notes[1] == "warning (ranks 0-1): slow disk"
    assert notes[-1] == "5 more warnings are in events.jsonl"


def test_without_a_measured_step_there_is_no_summary(make_run: MakeRun, balanced_steps: Steps) -> None:
    with pytest.raises(UserError, match=r"has no complete step yet$"):
        summarise(make_run([], name="none"))
    failed = make_run([], name="failed", status="failed")
    failed.facts["status_reason"] = "KeyError:\n 'x'"
    with pytest.raises(UserError, match=r"has no complete step yet; it failed: KeyError: 'x'$"):
        summarise(failed)
    with pytest.raises(UserError, match=r"no measured step yet: its 6 steps are skipped \(warm-up\)"):
        summarise(make_run(balanced_steps, skipped=9, name="warm-up"))
    with pytest.raises(UserError, match=r"no complete step yet \(6 lines of it are damaged\)"):
        summarise(make_run(balanced_steps, name="bad", change=lambda lines: [line.pop("cells_ns") for line in lines]))


def test_a_loop_without_losses_or_tokens(make_run: MakeRun, balanced_steps: Steps) -> None:
    def change(lines: list[dict[str, Any]]) -> None:
        for line in lines:
            line["loss"] = line["tokens"] = None

    summary = summarise(make_run(balanced_steps, change=change))
    assert summary["loss"] is None and summary["tokens_per_s_global"] is None
    assert "token" in summary["mfu"]["value_reason"]
    assert reasons_are_given(summary)


def test_quantiles_interpolate() -> None:
    assert [quantile([3, 1, 2], q) for q in (0, 0.25, 0.5, 1)] == [1, 1.5, 2, 3]
    assert quantile([7.0], 0.9) == 7.0


def test_reports_import_neither_torch_nor_pictures_before_they_are_needed() -> None:
    code = (
        "import bireme.report, bireme.study, bireme.record, bireme.report.plot, bireme.report.compare, sys;"
        "print([m for m in ('torch', 'numpy', 'matplotlib', 'rich') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"
