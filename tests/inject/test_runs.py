"""Real runs with something planted: the same losses as without, the truth in the record, the time where it belongs."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from rich.console import Console

from bireme.config import TrainConfig
from bireme.errors import UserError
from bireme.ledger import BLOCKED, PHASES, RUNNING, STATES
from bireme.run_reader import Run, read_run
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
    "steps": 16,
    "threads": 1,
    "evaluate_every": 0,
    "peak_seconds": 0.0,
}


def run_trainer(rank: int, size: int, directory: Path, fields: dict[str, Any]) -> None:
    with (directory.parent / f"{directory.name}-console-{rank}").open("w") as output:
        world = here(rank, torch.device("cpu"))
        train(TrainConfig(**{**TINY, **fields, "run": str(directory)}), world, Console(file=output, width=200))


def losses(run: Run) -> list[float]:
    return [step["loss"] for step in run.steps]


def ms(run: Run, step: int, rank: int, phase: str, state: int) -> float:
    cells = run.steps[step - 1]["cells_ns"][rank]
    return float(cells[PHASES.index(phase) * len(STATES) + state]) / 1e6


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text("".join(f"{n} squared is {n * n}, and its half is {n / 2:.1f};\n" for n in range(3000)))
    return str(path)


SLOW = [
    "kind=sleep,rank=1,phase=backward,ms=60,steps=8",
    "kind=sleep,rank=0,phase=other,ms=50,steps=9",
    "kind=compute,rank=0,phase=optimizer,ms=40,steps=10",
    "kind=compute,rank=1,factor=2,steps=2:12",
    "kind=input,rank=1,ms=10,steps=5:7",
    "kind=gc,rank=all,every=5,objects=20000",
    "kind=jitter,ms=1",
    "kind=imbalance,ms=5,steps=4:6",
    "kind=drift,rank=0,ms=5,steps=4:8",
    "kind=pause,rank=0,ms=20,period_ms=50,steps=13:",
    "kind=contention,rank=1,steps=14:",
    "kind=checkpoint,rank=1,ms=50,steps=12",
    "kind=sleep,rank=0,phase=checkpoint,ms=50,steps=12",
]


def test_slow_runs_have_the_same_losses_and_the_truth(ranks: RankPool, corpus: str, tmp_path: Path) -> None:
    fields = {"data": corpus, "micro_batch_size": 2, "checkpoint_every": 12}
    ranks(2, run_trainer, tmp_path / "plain", fields)
    ranks(2, run_trainer, tmp_path / "slow", {**fields, "inject": SLOW})
    plain, slow = read_run(tmp_path / "plain"), read_run(tmp_path / "slow")
    assert losses(slow) == losses(plain), "bit for bit"

    truth = [event for event in slow.events if event["event"] == "injection"]
    assert [event["text"] for event in truth] == SLOW
    assert truth[0]["ranks"] == [1] and len(truth[0]["nodes"]) == 1
    assert (truth[0]["first_step"], truth[0]["last_step"], truth[0]["phase"]) == (8, 8, "backward")

    assert ms(slow, 8, 1, "backward", BLOCKED) >= 50
    assert ms(slow, 9, 0, "other", BLOCKED) >= 40
    assert ms(slow, 10, 0, "optimizer", RUNNING) >= 35
    assert ms(slow, 12, 0, "checkpoint", BLOCKED) >= 40
    collections = {(event["rank"], event["step"]) for event in slow.events if event["event"] == "gc_pause"}
    assert {(0, 5), (1, 4), (0, 10), (1, 9)} <= collections
    for step in slow.steps:
        for cells, start_ns, end_ns in zip(step["cells_ns"], step["start_ns"], step["end_ns"], strict=True):
            assert sum(cells) == end_ns - start_ns


@pytest.mark.parametrize("layout", ["fsdp", "pp"])
def test_backward_is_slowed_inside_the_backward_pass_of_every_layout(
    ranks: RankPool, corpus: str, tmp_path: Path, layout: str
) -> None:
    stage = ["kind=stage,stage=1,ms=20,steps=6"] if layout == "pp" else []
    inject = ["kind=sleep,rank=1,phase=backward,ms=60,steps=5", "kind=compute,rank=0,phase=backward,ms=40,steps=4"]
    fields = {"data": corpus, "layout": layout, "steps": 6, "inject": [*inject, *stage]}
    ranks(2, run_trainer, tmp_path / "run", fields)
    run = read_run(tmp_path / "run")
    assert 45 <= ms(run, 5, 1, "backward", BLOCKED) < 110, "once"
    assert ms(run, 4, 0, "backward", RUNNING) >= 35
    if stage:
        assert ms(run, 6, 1, "forward", RUNNING) >= 17 and ms(run, 6, 1, "backward", RUNNING) >= 17


def test_same_step_collection_in_a_run(ranks: RankPool, corpus: str, tmp_path: Path) -> None:
    """B54: Python's own collections come no more; all ranks collect after the same steps, outside every phase."""
    inject = ["kind=gc,rank=all,every=3,objects=20000"]
    fields = {"data": corpus, "steps": 12, "gc_every": 5, "inject": inject}
    ranks(2, run_trainer, tmp_path / "run", fields)
    ranks(2, run_trainer, tmp_path / "plain", {"data": corpus, "steps": 12})
    run = read_run(tmp_path / "run")
    assert losses(run) == losses(read_run(tmp_path / "plain"))
    pauses = [event for event in run.events if event["event"] == "gc_pause"]
    assert {(event["rank"], event["step"]) for event in pauses if event["step"] <= 3} == {(0, 3), (1, 3)}
    assert {event["step"] for event in pauses} <= {3, 5, 10} and {event["phase"] for event in pauses} == {"other"}


@pytest.mark.parametrize(
    ("inject", "said"),
    [
        ("kind=slep,ms=1", "did you mean 'sleep'"),
        ("kind=sleep,rank=2,ms=1", "rank 2 is not in this run: ranks are 0 to 1"),
        ("kind=link,node=0,rate=1mbit", "emulated nodes only"),
        ("kind=checkpoint,ms=5", "--checkpoint-every"),
    ],
)
def test_what_cannot_be_planted_is_one_line_and_nothing_is_written(
    ranks: RankPool, corpus: str, tmp_path: Path, inject: str, said: str
) -> None:
    with pytest.raises(UserError, match=said) as caught:
        ranks(2, run_trainer, tmp_path / "run", {"data": corpus, "inject": [inject]})
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()
