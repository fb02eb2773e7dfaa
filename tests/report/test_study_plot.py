from pathlib import Path
from typing import Any

import pytest

from bireme.report.study_plot import plot_study


def entry(nodes: int = 2, ranks: int = 1, link: str = "1gbit", **more: Any) -> dict[str, Any]:
    axes = {"nodes": nodes, "ranks_per_node": ranks, "reduction": "over$lap$", "layout": more.pop("layout", "ddp")}
    split = {"transfer": 20.0, "wait": 10.0, "hidden": 5.0, "hidden_transfer": 4.0}
    return {
        "status": "finished",
        "axes": axes,
        "link": link,
        "step_ms": {"mean": 100.0, "median": 99.0, "p10": 90.0, "p90": 110.0},
        "compute_ms": 60.0,
        "contention_ms": 5.0,
        "communication_ms": split,
        "other_ms": 5.0,
        "tokens_per_s_global": 1234.0,
        "efficiency": 0.9,
        "counted_link_bytes": 1.06e6,
        "formula_link_bytes": 1e6,
        "memory_bytes": {"max": 64_000_000, "per_rank": [64_000_000]},
        **more,
    }


UNKNOWN = entry(
    contention_ms=None,
    communication_ms=dict.fromkeys(("transfer", "wait", "hidden", "hidden_transfer")),
    tokens_per_s_global=None,
    efficiency=None,
    counted_link_bytes=None,
    formula_link_bytes=None,
    memory_bytes=None,
)
FIT = {"slope": 1.0, "intercept_ms": 100.0, "r_squared": 1.0}
DELAYS = [
    {"delay_ms": delay, "steps": 4, "step_ms": 100 + delay, "punctual_wait_ms": delay, "slow_found_ms": delay}
    for delay in (0.0, 50.0)
]
SWEEP = {
    "rank": 1,
    "phase": "forward",
    "delays": DELAYS,
    "found": {"phase": "forward", "state": "blocked"},
    "step_fit": FIT,
    "wait_fit": FIT,
}


def results(name: str, cells: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    settings = {"nodes": 2, "cores_per_node": 1, "preset": "a$b_{c$", "batch_per_rank": 8, "model": ""}
    return {"name": name, "settings": settings, "cells": cells, **more}


@pytest.mark.parametrize(
    "study",
    [
        results("ranks", [entry(nodes=1), entry(ranks=2), UNKNOWN, {"status": "failed"}]),
        results("ranks", [entry(nodes=1)]),
        results("links", [entry(nodes=1, link="unlimited")]),
        results("links", [entry(nodes=1, link="unlimited"), entry(bound_ms=70.0), entry(bound_ms=1000.0), UNKNOWN]),
        results("links", [entry(link=f"{rate}mbit", bound_ms=1.0) for rate in range(20)]),
        results("links", [entry(link="unshaped", bound_ms=None)]),
        results("layouts", [UNKNOWN]),
        results("layouts", [entry(), entry(layout="pp=2,replicate=2,tp=$2$"), entry(ranks=2, layout="fsdp"), UNKNOWN]),
        results("layouts", [entry(ranks=n // 5, link="unshaped", formula_link_bytes=0.0) for n in range(20)]),
        results("straggler", [entry()], sweep=SWEEP),
        results("straggler", [entry()], sweep={**SWEEP, "wait_fit": None}),
        results("straggler", [entry()], sweep={"delays": None, "delays_reason": "one delay"}),
        results("straggler", [entry()], sweep=None),
    ],
)
@pytest.mark.filterwarnings("error")
def test_there_is_a_picture_of_whatever_was_measured(study: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "study.png"
    plot_study(study, path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5_000
    assert [each.name for each in tmp_path.iterdir()] == ["study.png"]


def test_a_picture_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "study.png"
    path.write_bytes(b"old")

    def fail(*_: object) -> None:
        raise OSError("full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="full"):
        plot_study(results("ranks", [entry()]), path)
    assert path.read_bytes() == b"old" and [each.name for each in tmp_path.iterdir()] == ["study.png"]
