"""The trainer on one, two and four ranks: the same losses, whole records, and what goes wrong said by every rank."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from bireme.config import TrainConfig
from bireme.errors import UserError
from bireme.observe.collectives import hooks_missing
from bireme.report.summary import summarise
from bireme.run_reader import read_run
from bireme.sample import WEIGHTS_FILE, sample_run
from bireme.train import train
from bireme.world import here

if TYPE_CHECKING:
    from tests.pool import RankPool
else:
    from pool import RankPool

TINY: dict[str, Any] = {
    "preset": "toy",
    "model": {"num_layers": 2, "embedding_dim": 64, "feed_forward_dim": 128},
    "sequence_length": 32,
    "global_batch_size": 8,
    "steps": 20,
    "threads": 1,
    "evaluate_every": 0,
    "evaluation_samples": 6,
    "peak_seconds": 0.0,
}


def run_trainer(
    rank: int, size: int, directory: Path, fields: dict[str, Any], environment: dict[str, str] | None = None
) -> str:
    """Trains on this rank; returns what it printed."""
    saved = dict(os.environ)
    os.environ.update(environment or {})
    try:
        with (directory.parent / f"{directory.name}-console-{rank}").open("w") as output:
            world = here(rank, torch.device("cpu"))
            train(TrainConfig(**{**TINY, **fields, "run": str(directory)}), world, Console(file=output, width=200))
    finally:
        os.environ.clear()
        os.environ.update(saved)
    return (directory.parent / f"{directory.name}-console-{rank}").read_text()


def losses(directory: Path) -> list[float]:
    return [step["loss"] for step in read_run(directory).steps]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small text of its own, so that no test waits for the default corpus."""
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text("".join(f"{n} squared is {n * n}, and its half is {n / 2:.1f};\n" for n in range(3000)))
    return str(path)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory, ranks: RankPool, corpus: str) -> Path:
    """The run that others are compared with: one rank, gradients reduced after the backward pass."""
    directory = tmp_path_factory.mktemp("runs") / "one"
    ranks(1, run_trainer, directory, {"data": corpus, "overlap": False})
    return directory


@pytest.mark.parametrize(("size", "overlap"), [(2, True), (2, False), (4, True), (4, False)])
def test_ranks_do_not_change_the_losses(
    ranks: RankPool, one_rank: Path, corpus: str, tmp_path: Path, size: int, overlap: bool
) -> None:
    ranks(size, run_trainer, tmp_path / "run", {"data": corpus, "overlap": overlap})
    alone = losses(one_rank)
    assert len(alone) == 20
    assert alone[-1] < alone[0] - 0.5, "the model does not learn"
    assert losses(tmp_path / "run") == pytest.approx(alone, rel=1e-5)


def test_accumulation_does_not_change_the_losses(ranks: RankPool, one_rank: Path, corpus: str, tmp_path: Path) -> None:
    ranks(2, run_trainer, tmp_path / "run", {"data": corpus, "micro_batch_size": 1})
    assert losses(tmp_path / "run") == pytest.approx(losses(one_rank), rel=1e-5)
    if hooks_missing() is None:
        step = read_run(tmp_path / "run").steps[10]
        buckets = [use for use in step["collectives"][0] if use[1] == "all_reduce"]
        model_bytes = 4 * json.loads((tmp_path / "run" / "run.json").read_text())["model"]["parameters"]
        assert sum(use[3] for use in buckets) == model_bytes, "four micro-batches must reduce their gradients once"


def test_a_repeated_run_is_identical_bit_for_bit(ranks: RankPool, corpus: str, tmp_path: Path) -> None:
    for name in ("first", "second"):
        ranks(2, run_trainer, tmp_path / name, {"data": corpus, "steps": 10})
    assert losses(tmp_path / "first") == losses(tmp_path / "second")
    first, second = (load_file(tmp_path / name / WEIGHTS_FILE) for name in ("first", "second"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_seed_changes_the_run(ranks: RankPool, one_rank: Path, corpus: str, tmp_path: Path) -> None:
    ranks(1, run_trainer, tmp_path / "run", {"data": corpus, "seed": 1, "steps": 3})
    assert losses(tmp_path / "run")[0] != losses(one_rank)[0]


def test_evaluation_counts_every_sample_once(ranks: RankPool, corpus: str, tmp_path: Path) -> None:
    """B21: shares that differ are weighted by their tokens, not averaged. (Training's shares are always equal.)"""
    found = {}
    for size in (1, 2, 4):  # six samples: unequal shares at four ranks
        directory = tmp_path / f"run-{size}"
        ranks(size, run_trainer, directory, {"data": corpus, "steps": 4, "evaluate_every": 2, "skip_steps": 1})
        run = read_run(directory)
        assert [step["skipped"] for step in run.steps] == ["warm-up", "evaluation", None, "evaluation"]
        found[size] = [step["evaluation_loss"] for step in run.steps if "evaluation_loss" in step]
        assert [event["step"] for event in run.events if event["event"] == "evaluation"] == [2, 4]
    assert found[2] == pytest.approx(found[1], rel=1e-5)
    assert found[4] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("overlap", [True, False])
def test_the_ledger_closes(ranks: RankPool, corpus: str, tmp_path: Path, size: int, overlap: bool) -> None:
    ranks(size, run_trainer, tmp_path / "run", {"data": corpus, "overlap": overlap, "steps": 12})
    run = read_run(tmp_path / "run")
    assert [step["step"] for step in run.steps] == list(range(1, 13))
    for rank in range(size):
        cells = sum(sum(step["cells_ns"][rank]) for step in run.steps)
        assert cells == run.steps[-1]["end_ns"][rank] - run.steps[0]["start_ns"][rank]
        assert all(cell >= 0 for step in run.steps for cell in step["cells_ns"][rank])
    summary = summarise(run)
    assert summary["closure_error_ns"] == 0
    assert summary["steps"] == {"measured": 9, "skipped": 3}
    assert summary["unmatched"] in (0, None)
    assert all(len(orjson.dumps(step)) < 1024 * size for step in run.steps), "more than 1 KB a rank and step"


def test_facts_tokens_and_weights_of_a_run(ranks: RankPool, corpus: str, tmp_path: Path) -> None:
    output = ranks(2, run_trainer, tmp_path / "run", {"data": corpus, "steps": 5})
    run = read_run(tmp_path / "run")
    assert run.facts["status"] == "finished"
    assert [rank["rank"] for rank in run.facts["ranks"]] == [0, 1]
    assert [node["ranks"] for node in run.facts["nodes"]] == [[0, 1]]
    assert all(step["tokens"] == 8 * 32 for step in run.steps)
    assert run.facts["peak"]["flops_per_s"] is None  # not measured here
    assert summarise(run)["mfu"]["value"] is None
    assert (tmp_path / "run" / "logs" / "rank-1.log").exists()
    assert output[0].count("step ") >= 5
    assert "MFU n/a" in output[0]
    assert "step 1/5" not in output[1], "only rank 0 speaks"
    text = sample_run(tmp_path / "run", "1 squared", 20, 0.8, None, 0)
    assert text.startswith("1 squared")
    assert len(text.encode()) >= len(b"1 squared") + 20


def test_a_planted_straggler_is_in_the_record(ranks: RankPool, corpus: str, tmp_path: Path) -> None:
    environment = {"STRAGGLER_MS": "0,40", "STRAGGLER_RANK": "1"}
    ranks(2, run_trainer, tmp_path / "run", {"data": corpus, "steps": 13, "overlap": False}, environment)
    run = read_run(tmp_path / "run")
    truth = next(event for event in run.events if event["event"] == "injection")
    assert (truth["rank"], truth["phase"], truth["delays_ms"]) == (1, "forward", [0.0, 40.0])
    slowed = [step for step in run.steps[3:] if step["injected_ms"] == 40]
    assert len(slowed) == 5
    forward_blocked = 1 * 5 + 4
    for step in slowed:
        assert step["cells_ns"][1][forward_blocked] >= 39e6, "the sleep is forward/blocked on the rank that slept"
    if hooks_missing() is None:
        wait = sorted(step["cells_ns"][0][2 * 5 + 3] for step in slowed)[len(slowed) // 2]
        assert wait > 20e6, "the other rank waits for it in backward"


def test_an_existing_run_is_refused_and_stays_as_it_was(ranks: RankPool, one_rank: Path, corpus: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in one_rank.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="choose another directory"):
        ranks(2, run_trainer, one_rank, {"data": corpus})
    assert {path: path.stat().st_mtime_ns for path in one_rank.rglob("*") if path.is_file()} == before


def different_data(rank: int, size: int, directory: Path, texts: list[str]) -> str:
    return run_trainer(rank, size, directory, {"data": texts[rank]})


def test_ranks_that_read_different_data_are_refused(ranks: RankPool, corpus: str, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("something else entirely\n" * 500)
    with pytest.raises(UserError, match="different data"):
        ranks(2, different_data, tmp_path / "run", [corpus, str(other)])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"global_batch_size": 5}, "does not divide over 2 ranks: 4 or 6 would"),
        ({"micro_batch_size": 3}, "micro_batch_size 3 does not divide"),
        ({"sequence_length": 4096}, "longer than the model's context"),
        ({"model": {"num_heads": 5}}, "num_heads"),
        ({"model": {"num_layerz": 5}}, "num_layers"),
        ({"preset": "tyo"}, "'toy'"),
        ({"data": "no/such/file.txt"}, "no/such/file.txt"),
    ],
)
def test_what_does_not_fit_is_one_line_on_every_rank(
    ranks: RankPool, corpus: str, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message.replace("(", r"\(")) as caught:
        ranks(2, run_trainer, tmp_path / "run", {"data": corpus, **fields})
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists(), "nothing half-written"


def test_data_too_short_on_one_rank_is_said_by_all(ranks: RankPool, corpus: str, tmp_path: Path) -> None:
    """The other rank must not sit in DDP's first collective meanwhile."""
    short = tmp_path / "short.txt"
    short.write_text("short")
    with pytest.raises(UserError, match=r"rank 1: .*short.txt"):
        ranks(2, different_data, tmp_path / "run", [corpus, str(short)])


def test_a_loss_that_is_not_a_number_is_said_once_and_shown(ranks: RankPool, corpus: str, tmp_path: Path) -> None:
    output = ranks(2, run_trainer, tmp_path / "run", {"data": corpus, "lr": 1e18, "gradient_clip_norm": 0.0})
    run = read_run(tmp_path / "run")
    assert run.steps[-1]["loss"] is None
    assert run.steps[-1]["loss_reason"] in ("nan", "inf")
    assert summarise(run)["loss"]["last_reason"] == run.steps[-1]["loss_reason"]
    assert sum(event["event"] == "warning" and "the loss is" in event["message"] for event in run.events) == 1
    assert "loss nan" in output[0] or "loss inf" in output[0]


def test_more_threads_than_cores_is_a_warning(ranks: RankPool, corpus: str, tmp_path: Path) -> None:
    threads = (os.cpu_count() or 1) + 1
    output = ranks(2, run_trainer, tmp_path / "run", {"data": corpus, "steps": 4, "threads": threads})
    assert output[0].count("contention") == 1, "said once"
    assert "ranks 0-1" in output[0]
    warnings = [event for event in read_run(tmp_path / "run").events if event["event"] == "warning"]
    assert any("contention" in event["message"] and event["ranks"] == [0, 1] for event in warnings)
