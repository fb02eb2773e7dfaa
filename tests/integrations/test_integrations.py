"""Other people's trainers on two ranks, one of them slow in backward: the same weights, a closed ledger, its name."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bireme.observe.collectives import hooks_missing
from bireme.report.summary import closure_error_ns, summarise
from bireme.run_reader import Run, read_run

LOOPS = Path(__file__).parent / "loops.py"
SLOW_MS = 30


def needs(library: str) -> pytest.MarkDecorator:
    absent = importlib.util.find_spec(library) is None
    return pytest.mark.skipif(absent, reason=f"{library} is not installed")


needs_hooks = pytest.mark.skipif(hooks_missing() is not None, reason=str(hooks_missing()))


def torchrun(tmp_path: Path, words: list[str], **environ: str) -> tuple[str, str]:
    """Runs two ranks; (standard output, standard error)."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
    known = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "SLOW_MS": str(SLOW_MS), **environ}
    done = subprocess.run(command, cwd=tmp_path, env=known, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, done.stderr


def weights(output: str) -> dict[str, str]:
    return dict(re.findall(r"rank (\d) weights (\S+)", output))


def check_run(run: Run, steps: int, skipped: int) -> None:
    assert run.facts["status"] == "finished" and run.damaged_lines == 0
    assert len(run.steps) == steps
    assert sum(line["skipped"] is not None for line in run.steps) == skipped
    assert closure_error_ns(run) == 0
    assert all(line["unmatched"] == [0, 0] for line in run.steps[1:])
    summary = summarise(run)
    for rank in ("0", "1"):
        for phase in ("input", "forward", "backward", "optimizer"):
            assert summary["ledger_ms"][rank][phase]["running"] > 0, (rank, phase)
    worst = summary["verdicts"][0]
    assert (worst["kind"], worst["ranks"]) == ("rank", [1]), worst
    assert (worst["phase"], worst["state"]) == ("backward", "blocked"), worst
    assert worst["excess_ms"] == pytest.approx(SLOW_MS, rel=0.5)


@needs_hooks
@pytest.mark.parametrize(
    ("name", "steps", "skipped"),
    [
        pytest.param("lightning", 32, 4, marks=needs("lightning")),  # warm-up, and the step with the validation
        pytest.param("transformers", 40, 4, marks=needs("transformers")),
        pytest.param("accelerate", 40, 3, marks=needs("accelerate")),
    ],
)
def test_a_straggler_in_somebody_elses_trainer(name: str, steps: int, skipped: int, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    observed, _ = torchrun(tmp_path, [str(LOOPS), name, out], BIREME_RUN=str(tmp_path / "run"))
    plain, _ = torchrun(tmp_path, [str(LOOPS), name, out], SLOW_MS="0")
    assert len(weights(plain)) == 2 and weights(observed) == weights(plain)
    run = read_run(tmp_path / "run")
    check_run(run, steps, skipped)
    if name == "transformers":
        assert run.steps[5]["tokens"] == 2 * 2 * 32
        assert summarise(run)["mfu"]["value"] is not None
        checkpoint = 4 * 5  # phases before checkpoint, states
        assert any(sum(line["cells_ns"][0][checkpoint : checkpoint + 5]) for line in run.steps)
    if name == "lightning":
        assert run.steps[5]["loss"] is not None and run.steps[5]["tokens"] == 2


@needs_hooks
def test_an_unmodified_script(tmp_path: Path) -> None:
    plain, _ = torchrun(tmp_path, [str(LOOPS), "plain"], SLOW_MS="0")
    run_words = ["-m", "bireme", "run", "--run-dir", str(tmp_path / "run"), str(LOOPS), "plain"]
    observed, said = torchrun(tmp_path, run_words)
    assert len(weights(plain)) == 2 and weights(observed) == weights(plain)
    assert f"run directory: {tmp_path / 'run'}" in said
    check_run(read_run(tmp_path / "run"), 39, 3)  # what comes before the first optimizer step is not seen


@needs("lightning")
def test_lightnings_losses_are_divided_already(tmp_path: Path) -> None:
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.demos.boring_classes import BoringModel

    from bireme.integrations.lightning import BiremeCallback

    class Constant(BoringModel):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self(batch).sum() * 0 + 3.0
            return loss

    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        limit_train_batches=8,
        limit_val_batches=0,
        accumulate_grad_batches=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[BiremeCallback(tmp_path / "run")],
    )
    trainer.fit(Constant())
    assert [line["loss"] for line in read_run(tmp_path / "run").steps] == [3.0, 3.0]
