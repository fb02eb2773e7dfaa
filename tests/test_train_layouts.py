"""The trainer in every layout: the losses of one process, a whole record with roles, a ledger that closes."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from bireme.config import TrainConfig
from bireme.errors import UserError
from bireme.ledger import STATES, TRANSFER, WAIT
from bireme.observe.collectives import hooks_missing
from bireme.report.summary import summarise
from bireme.run_reader import Run, read_run
from bireme.sample import WEIGHTS_FILE, sample_run
from bireme.train import train
from bireme.world import here

if TYPE_CHECKING:
    from tests.pool import RankPool
else:
    from pool import RankPool

STEPS = 6
SEQUENCES = 8
LENGTH = 16
TINY: dict[str, Any] = {
    "preset": "toy",
    "model": {"num_layers": 4, "embedding_dim": 32, "feed_forward_dim": 48, "sequence_length": LENGTH},
    "global_batch_size": SEQUENCES,
    "steps": STEPS,
    "lr": 3e-3,
    "lr_warmup_steps": 1,
    "threads": 1,
    "evaluate_every": STEPS,
    "evaluation_samples": 5,  # no number of data-parallel ranks divides it
    "peak_seconds": 0.0,
    "skip_steps": 1,
}

BLOCKED = ("transfer", "wait", "blocked")

needs_hooks = pytest.mark.skipif(hooks_missing() is not None, reason=str(hooks_missing()))


def run_trainer(rank: int, size: int, runs: list[tuple[Path, dict[str, Any]]]) -> list[str]:
    """Trains on this rank, run after run; returns what each printed."""
    printed = []
    for directory, fields in runs:
        path = directory.parent / f"{directory.name}-console-{rank}"
        with path.open("w") as output:
            world = here(rank, torch.device("cpu"))
            train(TrainConfig(**{**TINY, **fields, "run": str(directory)}), world, Console(file=output, width=200))
        printed.append(path.read_text())
    return printed


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text("".join(f"{n} squared is {n * n}, and its half is {n / 2:.1f};\n" for n in range(2000)))
    return str(path)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, ranks: RankPool, corpus: str) -> dict[str, Path]:
    """What one process gets, by preset."""
    folder = tmp_path_factory.mktemp("alone")
    names = ("toy", "toy-llama")
    ranks(1, run_trainer, [(folder / name, {"data": corpus, "preset": name}) for name in names])
    return {name: folder / name for name in names}


CASES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "fsdp": {"layout": "fsdp"},
        "fsdp gathered once": {"layout": "fsdp", "reshard_after_forward": False, "micro_batch_size": 2},
        "tp": {"layout": "tp", "preset": "toy-llama"},
        "pp": {"layout": "pp"},
        "pp gpipe": {"layout": "pp", "pipeline_schedule": "gpipe", "preset": "toy-llama"},
        "pp interleaved": {"layout": "pp", "pipeline_schedule": "interleaved", "activation_checkpointing": "full"},
    },
    4: {
        "hsdp": {"layout": "replicate=2,shard=2", "micro_batch_size": 1},
        "pp x shard": {"layout": "pp=2,shard=2", "preset": "toy-llama"},
        "pp x replicate": {"layout": "pp=2,replicate=2"},
        "tp x replicate": {"layout": "replicate=2,tp=2"},
        "pp x tp": {"layout": "pp=2,tp=2", "preset": "toy-llama"},
    },
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, ranks: RankPool, corpus: str) -> dict[str, tuple[Path, list[str]]]:
    """The run directory of every case, and what each rank printed."""
    folder = tmp_path_factory.mktemp("layouts")
    found = {}
    for size, cases in CASES.items():
        jobs = [(folder / name.replace(" ", "-"), {"data": corpus, **fields}) for name, fields in cases.items()]
        printed = ranks(size, run_trainer, jobs, timeout_s=300)
        for index, (name, (directory, _)) in enumerate(zip(cases, jobs, strict=True)):
            found[name] = (directory, [each[index] for each in printed])
    return found


every_case = pytest.mark.parametrize(
    ("size", "name"), [(size, name) for size, cases in CASES.items() for name in cases]
)


def losses(run: Run) -> list[float]:
    return [step["loss"] for step in run.steps]


@every_case
def test_losses_norms_and_weights_are_those_of_one_process(
    size: int, name: str, runs: dict[str, tuple[Path, list[str]]], alone: dict[str, Path]
) -> None:
    """B22, B25, B29: neither the ranks nor their kind change what is learned from, clipped or logged."""
    reference = alone[CASES[size][name].get("preset", "toy")]
    run, one = read_run(runs[name][0]), read_run(reference)
    assert len(run.steps) == STEPS and losses(one)[-1] < losses(one)[0] - 0.3, "the model does not learn"
    assert losses(run) == pytest.approx(losses(one), rel=1e-5)
    for field in ("gradient_norm", "evaluation_loss", "learning_rate"):
        found, expected = ([step[field] for step in each.steps if field in step] for each in (run, one))
        assert expected and found == pytest.approx(expected, rel=2e-5), field
    weights, right = load_file(runs[name][0] / WEIGHTS_FILE), load_file(reference / WEIGHTS_FILE)
    assert weights.keys() == right.keys()
    for each, value in right.items():
        if not each.endswith("wk.bias"):  # whose gradient is rounding alone, which AdamW makes large
            torch.testing.assert_close(weights[each], value, rtol=1e-3, atol=2e-4)


@every_case
def test_tokens_are_counted_once(size: int, name: str, runs: dict[str, tuple[Path, list[str]]]) -> None:
    """B45: the ranks of a pipeline and of a tensor-parallel group see the same tokens."""
    run = read_run(runs[name][0])
    assert [step["tokens"] for step in run.steps] == [SEQUENCES * LENGTH] * STEPS


@every_case
def test_the_first_rank_shows_the_loss(size: int, name: str, runs: dict[str, tuple[Path, list[str]]]) -> None:
    """B28: also where only the last stage of a pipeline, another rank, knows it."""
    directory, printed = runs[name]
    last = losses(read_run(directory))[-1]
    assert f"step {STEPS}/{STEPS}  loss {last:.4f}" in printed[0]
    assert all("loss" not in each for each in printed[1:])


@needs_hooks
@every_case
def test_the_ledger_closes(size: int, name: str, runs: dict[str, tuple[Path, list[str]]]) -> None:
    run = read_run(runs[name][0])
    summary = summarise(run)
    assert summary["closure_error_ns"] == 0
    assert summary["unmatched"] == 0, "a collective whose split is not known"
    assert all(cell >= 0 for step in run.steps for cells in step["cells_ns"] for cell in cells)
    assert all(len(orjson.dumps(step)) < 1024 * size for step in run.steps), "more than 1 KB a rank and step"
    blocked_ms = sum(
        phase[state] for phases in summary["ledger_ms"].values() for phase in phases.values() for state in BLOCKED
    )
    assert abs(summary["unlocated_ms"]) < 0.5 * blocked_ms / size + 10, "located and the kernel's do not agree"
    exposed = [
        sum(cells[TRANSFER :: len(STATES)]) + sum(cells[WAIT :: len(STATES)]) for cells in run.steps[2]["cells_ns"]
    ]
    assert all(each > 0 for each in exposed), "every rank of every layout waits for somebody"


@every_case
def test_the_record_knows_the_roles(size: int, name: str, runs: dict[str, tuple[Path, list[str]]]) -> None:
    facts = read_run(runs[name][0]).facts
    sizes = facts["mesh"]
    assert sizes["pp"] * sizes["replicate"] * sizes["shard"] * sizes["tp"] == size
    roles = [tuple(rank["role"].values()) for rank in facts["ranks"]]
    assert len(set(roles)) == size
    assert list(facts["ranks"][0]["role"]) == ["pp", "replicate", "shard", "tp"]
    assert (facts["pipeline"] is not None) == ("pp" in name)
    assert facts["start_up_checks"]["corrected"] == []
    assert "start-up checks passed" in runs[name][1][0]


def test_a_model_from_a_pipeline_can_be_sampled(runs: dict[str, tuple[Path, list[str]]]) -> None:
    assert sample_run(runs["pp"][0], "1 squared", 8, 0.8, None, 0).startswith("1 squared")


# --- what cannot be ----------------------------------------------------------------------------------------------


def refused(rank: int, size: int, directory: Path, several: list[dict[str, Any]]) -> list[str]:
    said = []
    for fields in several:
        world = here(rank, torch.device("cpu"))
        try:
            train(TrainConfig(**{**TINY, **fields, "run": str(directory)}), world, Console(quiet=True))
        except UserError as error:
            said.append(str(error))
    return said


def test_what_does_not_fit_is_one_line_on_every_rank(ranks: RankPool, corpus: str, tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"layout": "tp=4"}, "layout 'tp=4' is for 4 ranks, but there are 2"),
        ({"layout": "hsdp"}, "all 2 ranks are on one node"),
        ({"layout": "pp", "model": {**TINY["model"], "num_layers": 3}}, "num_layers 3 does not divide over 2"),
        ({"layout": "pp", "model": {**TINY["model"], "num_layers": 1}}, "num_layers is 1, fewer than 2"),
        ({"layout": "pp", "micro_batch_size": 8}, "needs at least 2 micro-batches a step, there is 1"),
        (
            {"layout": "tp", "model": {**TINY["model"], "num_heads": 1, "num_kv_heads": 1}},
            "num_heads 1 does not divide",
        ),
        ({"layout": "tp", "model": {**TINY["model"], "vocab_size": 257}}, "vocab_size 257 does not divide"),
        ({"layout": "tp", "compile": True}, "set compile to false"),
        ({"layout": "fsdp", "global_batch_size": 7}, "global_batch_size 7 does not divide over 2 ranks: 6 or 8"),
    ]
    fields = [{"data": corpus, **each} for each, _ in wrong]
    for said in ranks(2, refused, tmp_path / "run", fields):
        for text, (_, expected) in zip(said, wrong, strict=True):
            assert expected in text and "\n" not in text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"layout": "fdsp"}, "did you mean 'fsdp'"),
        ({"layout": "pp=0"}, "not a number of ranks"),
        ({"pipeline_stages_per_rank": 0}, "it must be positive"),
    ],
)
def test_what_no_world_can_run_is_refused_before_any_rank_is_met(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        TrainConfig(**{**TINY, **fields})


@pytest.mark.parametrize(
    ("share", "pipeline", "expected"),
    [
        (16, 1, (16, 1)),
        (16, 2, (4, 4)),
        (16, 4, (2, 8)),
        (6, 2, (1, 6)),
        (4, 4, (1, 4)),
        (3, 2, (1, 3)),
        (2, 2, (1, 2)),
    ],
)
def test_micro_batches_of_a_pipeline(share: int, pipeline: int, expected: tuple[int, int]) -> None:
    """B27: twice as many as stages, where the batch allows it."""
    assert TrainConfig(global_batch_size=share).batch_shape(1, pipeline) == expected
