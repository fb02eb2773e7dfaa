import io
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from rich.console import Console

from bireme import cli
from bireme.errors import UserError
from bireme.layout import Layout
from bireme.observe.collectives import hooks_missing
from bireme.parity import Outcome
from bireme.parity_cases import (
    Case,
    Variant,
    batch_size,
    cases_of,
    every_layout,
    model_of,
    not_run,
    pipeline_of,
    quick_leaves_out,
    sequence_length,
    variants_of,
)
from bireme.parity_command import Report, Row, choose, render

if TYPE_CHECKING:
    from tests.pool import RankPool
else:
    RankPool = Any

LAUNCHER = ("MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "NODE_RANK", "NNODES", "TORCHELASTIC_", "BIREME_", "SLURM_")
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}
SETTINGS = {**CLEAN, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "BIREME_JOIN_TIMEOUT_S": "120"}


def names(layouts: Any) -> list[str]:
    return [str(each) for each in layouts]


# --- what is run -------------------------------------------------------------------------------------------------


def test_every_layout_of_the_ranks_is_there() -> None:
    assert names(every_layout(1)) == ["ddp"]
    assert names(every_layout(2)) == ["ddp", "fsdp", "tp=2", "pp=2"]
    assert names(every_layout(4)) == [
        *("ddp", "fsdp", "hsdp 2x2", "tp=4", "pp=4"),
        *("pp=2,replicate=2", "pp=2,shard=2", "pp=2,tp=2", "replicate=2,tp=2", "shard=2,tp=2"),
    ]
    eight = every_layout(8)
    assert len(set(eight)) == len(eight) == 20 and all(layout.size == 8 for layout in eight)


@pytest.mark.parametrize("ranks", range(1, 17))
def test_every_kind_of_layout_is_run_or_named(ranks: int) -> None:
    run = {tuple(layout.mesh_sizes) for layout in every_layout(ranks)}
    named = [tuple(layout.mesh_sizes) for layout, _ in not_run(ranks)]
    assert not run & set(named) and len(named) == len(set(named)) and len(run) + len(named) == 15


def test_the_reason_is_the_number_of_ranks() -> None:
    reasons = {str(layout): reason for layout, reason in not_run(5)}
    assert reasons["hsdp 2x2"] == "needs 4 ranks, or another number that divides over 2 dimensions"
    assert reasons["pp=2,replicate=2,tp=2"] == "needs at least 8 ranks"


@pytest.mark.parametrize("ranks", range(1, 9))
def test_models_and_batches_divide_over_every_layout(ranks: int) -> None:
    for layout in every_layout(ranks):
        assert sequence_length(layout) % layout.tp == 0
        for case in cases_of(layout):
            for variant in variants_of(case, quick=False):
                model_of(layout, variant.shape)  # which checks it against the layout
                pipeline = pipeline_of(case, variant)
                assert batch_size(ranks) % (layout.data_parallel_size * variant.micro_batches) == 0
                assert case.schedule in (None, "gpipe") or pipeline.micro_batches % layout.pp == 0
                assert pipeline.stages_per_rank == (2 if case.schedule == "interleaved" else 1)


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_variants_cover_what_can_differ(ranks: int, quick: bool) -> None:
    for layout in every_layout(ranks):
        for case in cases_of(layout):
            variants = variants_of(case, quick)
            assert (
                len(set(variants)) == len(variants) and variants[0] == variants_of(case, not quick)[0]
            ) or layout.tp > 1
            if layout.tp > 1 and quick:
                continue
            assert {each.shape for each in variants} == {"gpt2", "llama"}
            assert {each.checkpointing for each in variants} == {False, True}
            assert layout.pp > 1 or len({each.micro_batches for each in variants}) > 1
            if not quick:
                assert ({each.reshard for each in variants} == {False, True}) == (layout.dp_shard > 1)
                assert ({each.overlap for each in variants} == {False, True}) == (layout.dp_replicate == ranks)


def test_all_schedules_of_a_pipeline_are_rows() -> None:
    assert [str(case) for case in cases_of(Layout(pp=2))] == ["pp=2 gpipe", "pp=2 1f1b", "pp=2 interleaved"]
    assert not any(quick_leaves_out(case) for case in cases_of(Layout(pp=2)))
    combined = cases_of(Layout(pp=2, tp=2))
    assert [case.schedule for case in combined if not quick_leaves_out(case)] == ["1f1b"]
    assert str(Variant(shape="gpt2", micro_batches=4, checkpointing=True, overlap=False, reshard=False)) == (
        "gpt2 K=4 checkpointing flat no reshard"
    )


FOUR, TWO_BY_TWO, EIGHT = [[0, 1, 2, 3]], [[0, 1], [2, 3]], [list(range(8))]


def test_layouts_are_chosen_by_name_and_by_sizes() -> None:
    assert [str(each) for each in choose(FOUR, ["DDP", "replicate=2, tp=2", "ddp"])] == ["ddp", "replicate=2,tp=2"]
    assert [str(each) for each in choose(FOUR, ["pp"])] == ["pp=4 gpipe", "pp=4 1f1b", "pp=4 interleaved"]
    assert [each.layout for each in choose(FOUR, ["hsdp"])] == [Layout(dp_replicate=2, dp_shard=2)]
    assert [each.layout for each in choose(TWO_BY_TWO, ["hsdp"])] == [Layout(dp_replicate=2, dp_shard=2)]
    assert names(choose(EIGHT, ["hsdp"])) == ["hsdp 2x4", "hsdp 4x2"]
    assert len(choose(FOUR, [])) == 4 + 4 * 3 + 2


@pytest.mark.parametrize(
    ("nodes", "text", "said"),
    [
        ([[0]], "tp", "needs at least 2 ranks, there is 1"),
        ([[0, 1]], "hsdp", "layout hsdp needs 4 ranks"),
        ([[0, 1]], "pp=2,tp=2", "is for 4 ranks, but there are 2"),
        ([[0, 1]], "fsdpp", "did you mean 'fsdp'"),
    ],
)
def test_a_layout_that_cannot_be_is_said(nodes: list[list[int]], text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        choose(nodes, ["ddp", text])


# --- what is shown -----------------------------------------------------------------------------------------------

K4 = Variant(shape="gpt2", micro_batches=4)
K1 = Variant(shape="llama", micro_batches=1, checkpointing=True)


def outcome(variant: Variant, error: float = 1e-6, reductions: float | None = 1.0, loss: float = 4.0) -> Outcome:
    errors = [(1e-7, "norm.bias"), (error, "layers.0.attention.wq.weight")]
    return Outcome(variant, [loss, 3.5], [2.0, 1.5], [1e-7, 0.0], errors, [0.0, 1e-8], reductions)


def report(*rows: Row, uncounted: str | None = None) -> Report:
    return Report(2, 2, 1e-5, list(rows), [("tp=2", "needs at least 2 ranks")], uncounted)


GOOD = Row(Case(Layout(dp_replicate=2)), [outcome(K4), outcome(K1, 2e-6, 3.0, loss=9.0)])
BAD = Row(Case(Layout(pp=2), "1f1b"), [outcome(K4), outcome(K1, 0.25)])
BROKEN = Row(Case(Layout(dp_shard=2)), [outcome(K4, math.inf, None)])


def test_the_object() -> None:
    made = orjson.loads(orjson.dumps(report(GOOD, BAD).as_dict()))
    assert made["passed"] is False and made["ranks"] == 2 and made["steps"] == 2 and made["tolerance"] == 1e-5
    assert made["not_run"] == [{"layout": "tp=2", "reason": "needs at least 2 ranks"}]
    good, bad = made["layouts"]
    assert good == {
        "layout": "ddp",
        "passed": True,
        "max_loss_error": 1e-7,
        "max_gradient_error": 2e-6,
        "max_norm_error": 1e-8,
        "gradient_norm": 1.5,
        "loss": [4.0, 3.5],
        "reductions_per_step": 3.0,
        "variants": ["gpt2 K=4", "llama K=1 checkpointing"],
        "worst": {"variant": "llama K=1 checkpointing", "step": 2, "tensor": "layers.0.attention.wq.weight"},
    }
    assert bad["layout"] == "pp=2 1f1b" and bad["passed"] is False and bad["max_gradient_error"] == 0.25
    assert bad["reason"].startswith("llama K=1 checkpointing, step 2: the gradient of layers.0.attention.wq.weight")


def test_what_is_not_finite_or_not_counted_is_null_with_a_reason() -> None:
    (broken,) = orjson.loads(orjson.dumps(report(BROKEN, uncounted="no hooks").as_dict()))["layouts"]
    assert broken["max_gradient_error"] is None and "missing or not finite" in broken["reason"]
    assert broken["reductions_per_step"] is None and broken["reductions_per_step_reason"] == "no hooks"


def shown(made: Report) -> str:
    console = Console(width=80, file=io.StringIO())
    render(made, console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_the_table_says_what_failed_and_what_was_not_run() -> None:
    text = shown(report(GOOD, BAD, BROKEN, uncounted="no hooks"))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "ddp 4.000 3.500 2.0e-06 1.500 3 passed" in lines
    assert "pp=2 1f1b 4.000 3.500 2.5e-01 1.500 1 FAILED" in lines
    assert "fsdp 4.000 3.500 inf 1.500 n/a FAILED" in lines
    flowing = " ".join(lines)
    where = "llama K=1 checkpointing, step 2: the gradient of layers.0.attention.wq.weight"
    assert f"FAILED pp=2 1f1b: {where} is off by 2.5e-01 (at most 1e-05)" in flowing
    assert "1 of 3 layouts equal to one process: 2 steps in fp32 on 2 ranks" in flowing
    assert "not run: tp=2 (needs at least 2 ranks)" in flowing and "reductions: n/a, no hooks" in flowing
    assert max(len(line) for line in text.splitlines()) <= 80


def test_five_losses_of_the_longest_layout_fit_a_terminal() -> None:
    long = outcome(K4)
    long.losses = [4.1234] * 5
    made = report(Row(Case(Layout(pp=2, dp_replicate=2, dp_shard=2), "interleaved"), [long]))
    made.steps = 5
    assert "4.123 4.123 4.123 4.123 4.123" in shown(made) and "passed" in shown(made)


# --- the command -------------------------------------------------------------------------------------------------


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process without a launcher."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # which the command would set for good
    for name in set(os.environ) - set(CLEAN) - {"OMP_WAIT_POLICY"}:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--layout", "fsdpp"], "did you mean 'fsdp'"),
        (["--layout", "pp=2,,tp=2"], "'' is no dimension"),
        (["--steps", "0"], "--steps 0"),
        (["--steps", "1001"], "--steps 1001"),
        (["--layout"], "--layout needs a layout"),
    ],
)
@pytest.mark.usefixtures("alone")
def test_a_mistake_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(cli.app, ["parity", *arguments]) == 2
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert captured.out == "" and len(lines) == 1 and said in lines[0]


def parity(folder: Path, ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [sys.executable, *launcher, "-m", "bireme", "parity", *arguments],
        cwd=folder,
        env=SETTINGS,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_two_ranks_run_everything_they_can(tmp_path: Path) -> None:
    done = parity(tmp_path, 2, "--quick", "--json", "--steps", "2")
    assert done.returncode == 0, done.stderr
    made = orjson.loads(done.stdout)
    assert made["passed"] is True and made["ranks"] == 2 and made["steps"] == 2
    rows = {row["layout"]: row for row in made["layouts"]}
    assert list(rows) == ["ddp", "fsdp", "tp=2", "pp=2 gpipe", "pp=2 1f1b", "pp=2 interleaved"]
    for name, row in rows.items():
        assert row["passed"] is True and len(row["loss"]) == 2, name
        assert 0 <= row["max_gradient_error"] <= 1e-5 and 0 <= row["max_loss_error"] <= 1e-5, name
        if hooks_missing() is None:
            assert row["reductions_per_step"] == (1 if name in ("ddp", "fsdp") else 0), name
    assert rows["ddp"]["loss"] == pytest.approx(rows["tp=2"]["loss"], rel=1e-5), "the same batches"
    assert {"layout": "hsdp 2x2", "reason": "needs at least 4 ranks"} in made["not_run"]
    assert done.stderr.count("passed in") == 6 and list(tmp_path.iterdir()) == []
