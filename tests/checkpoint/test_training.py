"""Training that is broken off, stopped or disturbed and goes on: the same samples, the same losses, nothing lost."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import orjson
import pytest
import torch
from rich.console import Console

from bireme import preemption, shutdown
from bireme.checkpoint import tensors
from bireme.checkpoint.folder import CHECKPOINTS, LATEST, candidates, check_files, read_manifest
from bireme.checkpoint.resume import find_resume
from bireme.config import TrainConfig, load_config
from bireme.errors import UserError
from bireme.ledger import BLOCKED, PHASES, STATES, WAIT
from bireme.report.summary import summarise
from bireme.run_reader import read_facts, read_run
from bireme.shutdown import REQUEUE
from bireme.train import Stopped, train
from bireme.trainer import Trainer
from bireme.world import here

if TYPE_CHECKING:
    from tests.pool import RankPool
else:
    from pool import RankPool

STEPS, BROKEN_AT, EVERY = 10, 8, 3
TINY: dict[str, Any] = {
    "preset": "toy",
    "model": {"num_layers": 4, "embedding_dim": 32, "feed_forward_dim": 48, "sequence_length": 16},
    "global_batch_size": 12,
    "steps": STEPS,
    "lr": 3e-3,
    "lr_warmup_steps": 1,
    "threads": 1,
    "evaluate_every": 0,
    "peak_seconds": 0.0,
    "skip_steps": 1,
    "log_samples": True,
}


class Crash(Exception):
    """Stands for a process that dies."""


@contextmanager
def at_step(number: int, action: Callable[[], None]) -> Iterator[None]:
    """Does something at the beginning of a step, on this rank."""
    original = Trainer.train_step

    def train_step(self: Trainer, step: int, *others: Any) -> None:
        if step == number:
            action()
        original(self, step, *others)

    with patch.object(Trainer, "train_step", train_step):
        yield


def crash() -> None:
    raise Crash


def run_trainer(rank: int, directory: Path, fields: dict[str, Any]) -> str:
    """Trains, or goes on, as the command does; returns what this rank printed."""
    output = directory.parent / f"{directory.name}-console-{rank}"
    given = {**fields, "run": str(directory)}
    with output.open("w") as file:
        world = here(rank, torch.device("cpu"))
        resuming = "resume" in given or "resume_from" in given
        resume = find_resume(TrainConfig(**given), world) if resuming else None
        # What a run that goes on is not told, it knows.
        config = (
            TrainConfig(**{**TINY, **given}) if resume is None else load_config(None, given, resume.manifest["config"])
        )
        train(config, world, Console(file=file, width=300), resume=resume)
    return output.read_text()


def run_all(rank: int, size: int, jobs: list[tuple[Path, dict[str, Any]]], broken_at: int | None = None) -> list[str]:
    printed = []
    for directory, fields in jobs:
        if broken_at is None:
            printed.append(run_trainer(rank, directory, fields))
        else:
            with at_step(broken_at, crash), pytest.raises(Crash):
                run_trainer(rank, directory, fields)
    return printed


def lines(directory: Path, name: str) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in (directory / name).read_bytes().splitlines()]


def losses(directory: Path) -> list[float]:
    return [step["loss"] for step in lines(directory, "steps.jsonl")]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text("".join(f"{n} squared is {n * n}, and its half is {n / 2:.1f};\n" for n in range(1000)))
    return str(path)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, ranks: RankPool, corpus: str) -> Path:
    directory = tmp_path_factory.mktemp("unbroken") / "run"
    ranks(2, run_all, [(directory, {"data": corpus})])
    return directory


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory, ranks: RankPool, corpus: str) -> Path:
    """A run of two ranks that ended in step 8; its last checkpoint is of step 6."""
    directory = tmp_path_factory.mktemp("broken") / "run"
    ranks(2, run_all, [(directory, {"data": corpus, "checkpoint_every": EVERY})], BROKEN_AT)
    assert [each.name for each in candidates(directory / CHECKPOINTS)] == ["step-00000006", "step-00000003"]
    return directory


def copy_of(run: Path, folder: Path, name: str) -> Path:
    return Path(shutil.copytree(run, folder / name))


# --- the order of samples ----------------------------------------------------------------------------------------


def test_any_number_of_ranks_sees_the_same_samples_in_every_step(
    ranks: RankPool, corpus: str, unbroken: Path, tmp_path: Path
) -> None:
    for size in (1, 3, 4):
        fields = {"data": corpus, "steps": 3, "micro_batch_size": 1 if size == 3 else None}
        ranks(size, run_all, [(tmp_path / str(size), fields)])
        assert lines(tmp_path / str(size), "samples.jsonl") == lines(unbroken, "samples.jsonl")[:3]
    ids = [line["ids"] for line in lines(unbroken, "samples.jsonl")]
    assert all(len(set(each)) == 12 for each in ids)
    assert len({each for step in ids for each in step}) == 12 * STEPS, "no sample twice in an epoch"


# --- going on ----------------------------------------------------------------------------------------------------


VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "same": (2, {}),
    "workers of one rank": (1, {}),
    "four ranks": (4, {"micro_batch_size": 1}),
    "fsdp": (2, {"layout": "fsdp"}),
    "pp": (2, {"layout": "pp", "pipeline_schedule": "interleaved"}),
    "pp x tp": (4, {"layout": "pp=2,tp=2"}),
}


def test_a_broken_run_goes_on_as_if_nothing_had_happened(
    ranks: RankPool, unbroken: Path, broken: Path, tmp_path: Path
) -> None:
    """B35, B37: kill, resume on other ranks and in other layouts; losses, samples and record of the unbroken run."""
    for size in (1, 2, 4):
        jobs = [
            (copy_of(broken, tmp_path, name), {"resume": True, **fields})
            for name, (ranks_needed, fields) in VARIANTS.items()
            if ranks_needed == size
        ]
        ranks(size, run_all, jobs, timeout_s=120)
    for name, (size, _) in VARIANTS.items():
        directory = tmp_path / name
        assert lines(directory, "samples.jsonl") == lines(unbroken, "samples.jsonl"), name
        if name == "same":
            assert losses(directory) == losses(unbroken), "bit for bit"
        assert losses(directory) == pytest.approx(losses(unbroken), rel=1e-5), name
        facts = read_facts(directory)
        assert (facts["attempt"], facts["first_step"], facts["world_size"]) == (2, 7, size)
        assert facts["resumed_from"] == {
            "checkpoint": str(directory / CHECKPOINTS / "step-00000006"),
            "step": 6,
            "samples": 72,
            "world_size": 2,
            "layout": "ddp",
            "passed_over": [],
        }
        assert read_facts(directory, "run-0001.json")["world_size"] == 2
        run = read_run(directory)
        assert [step["step"] for step in run.steps] == [7, 8, 9, 10]
        assert [step["step"] for step in run.earlier_steps] == [1, 2, 3, 4, 5, 6]
        assert run.events[0]["event"] == "resumed"
        summary = summarise(run)
        assert summary["closure_error_ns"] == 0
        assert summary["loss"]["first"] == losses(unbroken)[0]
        assert any("resumed after step 6" in note for note in summary["notes"])


def test_another_run_begins_where_one_was_broken(ranks: RankPool, unbroken: Path, broken: Path, tmp_path: Path) -> None:
    ranks(2, run_all, [(tmp_path / "new", {"resume_from": str(broken)})])
    assert losses(tmp_path / "new") == losses(unbroken)[6:]
    assert lines(tmp_path / "new", "samples.jsonl") == lines(unbroken, "samples.jsonl")[6:]
    assert read_facts(tmp_path / "new")["attempt"] == 1
    assert summarise(read_run(tmp_path / "new"))["steps"]["measured"] == 3
    only = broken / CHECKPOINTS / "step-00000003"
    ranks(2, run_all, [(tmp_path / "older", {"resume_from": str(only), "steps": 5})])
    assert lines(tmp_path / "older", "samples.jsonl") == lines(unbroken, "samples.jsonl")[3:5]


def test_a_run_that_went_to_its_end_can_be_made_longer(
    ranks: RankPool, unbroken: Path, corpus: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ranks(1, run_all, [(run, {"data": corpus, "checkpoint_every": 4, "steps": 5})])
    assert (run / CHECKPOINTS / LATEST).read_text() == "step-00000005\n", "the last step is saved, too"
    ranks(1, run_all, [(run, {"resume": True}), (run, {"resume": True, "steps": 7})])
    assert [step["step"] for step in lines(run, "steps.jsonl")] == [1, 2, 3, 4, 5, 6, 7]
    assert lines(run, "samples.jsonl") == lines(unbroken, "samples.jsonl")[:7]
    assert read_facts(run)["status"] == "finished"


def test_damage_is_passed_over_with_its_reason(ranks: RankPool, unbroken: Path, broken: Path, tmp_path: Path) -> None:
    """B36: the newest checkpoint is torn, so the one before is taken, and nothing is repeated in the record."""
    run = copy_of(broken, tmp_path, "run")
    torn = run / CHECKPOINTS / "step-00000006" / "rank-00001.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    ranks(2, run_all, [(run, {"resume": True})])
    assert losses(run) == losses(unbroken)
    assert lines(run, "samples.jsonl") == lines(unbroken, "samples.jsonl")
    (passed_over,) = read_facts(run)["resumed_from"]["passed_over"]
    assert "step-00000006" in passed_over and "rank-00001.safetensors has" in passed_over
    warnings = [event["message"] for event in read_run(run).events if event["event"] == "warning"]
    assert any("passed over" in message for message in warnings)
    # The damaged checkpoint of step 6 is kept aside, and the one that was made again is good.
    assert (run / CHECKPOINTS / "passed-over-step-00000006" / torn.name).exists()
    for folder in candidates(run / CHECKPOINTS):
        check_files(folder, read_manifest(folder))
    assert not list((run / CHECKPOINTS).glob(".step*"))


def refusals(rank: int, size: int, jobs: list[tuple[Path, dict[str, Any]]]) -> list[str]:
    said = []
    for directory, fields in jobs:
        with pytest.raises(UserError) as caught:
            run_trainer(rank, directory, fields)
        assert "\n" not in str(caught.value)
        said.append(str(caught.value))
    return said


def test_what_cannot_go_on_is_refused_in_one_line(ranks: RankPool, broken: Path, corpus: str, tmp_path: Path) -> None:
    other_text = tmp_path / "other.txt"
    other_text.write_text(Path(corpus).read_text().replace("squared", "SQUARED"))
    gone = copy_of(broken, tmp_path, "gone")
    shutil.rmtree(gone / CHECKPOINTS)
    damaged = copy_of(broken, tmp_path, "damaged")
    for folder in candidates(damaged / CHECKPOINTS):
        (folder / "manifest.json").unlink()
    empty = tmp_path / "empty"
    empty.mkdir()
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (broken, {"resume": True, "model": {"embedding_dim": 64}}, "of another model: embedding_dim 32 there, 64 here"),
        (broken, {"resume": True, "data": str(other_text)}, "fingerprint"),
        (broken, {"resume": True, "seed": 5}, "seed 0 there, 5 here"),
        (broken, {"resume": True, "sequence_length": 8}, "sequence_length 16 there, 8 here"),
        (damaged, {"resume": True}, "no usable checkpoint: "),
        (broken, {"resume": True, "global_batch_size": 6}, "the run that goes on has 12: keep it"),
        (gone, {"resume": True}, "holds no checkpoint to go on from: start a new run"),
        (tmp_path / "none", {"resume": True}, f"there is no run in {tmp_path / 'none'}: leave out --resume"),
        (tmp_path / "new", {"resume_from": str(empty)}, "holds no checkpoint to go on from"),
        (tmp_path / "new", {"resume_from": str(tmp_path / "missing")}, "is not a directory"),
        (broken, {"data": corpus}, "or go on with it (--resume)"),
    ]
    before = {path: path.read_bytes() for path in broken.rglob("*") if path.is_file() and path.suffix != ".log"}
    said = ranks(2, refusals, [(directory, fields) for directory, fields, _ in cases], timeout_s=120)
    for rank in range(2):
        for message, (_, _, expected) in zip(said[rank], cases, strict=True):
            assert expected in message
    assert "has no manifest.json" in said[0][4] and "step-00000003" in said[0][4] and "step-00000006" in said[0][4]
    for path, content in before.items():
        assert path.read_bytes() == content, "a refused run changes nothing"
    assert not (tmp_path / "new").exists()


def test_a_run_that_ended_before_its_first_checkpoint_begins_again(
    ranks: RankPool, unbroken: Path, corpus: str, tmp_path: Path
) -> None:
    """There is nothing to go on from, and nothing to lose: said aloud, and not refused again and again."""
    run = tmp_path / "run"
    ranks(2, run_all, [(run, {"data": corpus, "checkpoint_every": 9})], 5)
    assert 0 < len(lines(run, "steps.jsonl")) < 5
    ranks(2, run_all, [(run, {"resume": True})])
    assert losses(run) == losses(unbroken)
    assert lines(run, "samples.jsonl") == lines(unbroken, "samples.jsonl")
    facts = read_facts(run)
    assert (facts["attempt"], facts["first_step"], facts["resumed_from"]["checkpoint"]) == (2, 1, None)
    warnings = [event["message"] for event in read_run(run).events if event["event"] == "warning"]
    assert f"{run} ended before its first checkpoint: it begins again with step 1" in warnings


def resume_of(rank: int, size: int, directory: Path, environments: list[dict[str, str]]) -> list[Any]:
    """What each environment of a launcher makes of a start without --resume: a step, None, or what is refused."""
    world = here(rank, torch.device("cpu"))
    found: list[Any] = []
    for index, environment in enumerate(environments):
        try:
            resume = find_resume(TrainConfig(run=str(directory) if index else None), world, environment)
            found.append(resume and resume.step)
        except UserError as error:
            found.append(str(error))
    return found


def test_a_restart_by_the_launcher_goes_on(ranks: RankPool, broken: Path, tmp_path: Path) -> None:
    run = copy_of(broken, tmp_path, "run")
    facts = orjson.loads((run / "run.json").read_bytes())
    (run / "run.json").write_bytes(orjson.dumps({**facts, "launch_id": "job-7"}))
    environments = [
        {"TORCHELASTIC_RUN_ID": "job-7", "TORCHELASTIC_RESTART_COUNT": "1"},  # without --run
        {"TORCHELASTIC_RUN_ID": "job-7", "TORCHELASTIC_RESTART_COUNT": "1"},
        {"TORCHELASTIC_RUN_ID": "job-8"},
        {},
    ]
    found = ranks(1, resume_of, run, environments)[0]
    assert "give --run DIR" in found[0]
    assert found[1:] == [6, None, None]
    (run / "run.json").write_bytes(orjson.dumps({**facts, "launch_id": "none"}))
    found = ranks(1, resume_of, run, [{}, {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1"}])[0]
    assert found == [None, None], "every static launch says none"
    # One that failed before its first step would do so again.
    (run / "run.json").write_bytes(orjson.dumps({**facts, "launch_id": "job-7", "status_reason": "no such thing"}))
    (run / "steps.jsonl").write_bytes(b"")
    (run / "events.jsonl").write_bytes(b"")
    shutil.rmtree(run / CHECKPOINTS)
    found = ranks(1, resume_of, run, [{}, {"TORCHELASTIC_RUN_ID": "job-7", "TORCHELASTIC_RESTART_COUNT": "1"}])[0]
    assert found[1] == f"run {run} failed before its first step, and would again: no such thing"


# --- stopping ----------------------------------------------------------------------------------------------------


def stopped_by(rank: int, size: int, directory: Path, fields: dict[str, Any], number: int, asked: int) -> Any:
    """A signal comes to one rank; what each rank raises, and its exit code."""
    handler = signal.getsignal(number)

    def send() -> None:
        if rank == asked:
            os.kill(os.getpid(), number)

    try:
        # Every step is looked at: these take milliseconds.
        with at_step(4, send), patch.object(preemption, "LOOK_EVERY_S", 0.0), pytest.raises(Stopped) as caught:
            run_trainer(rank, directory, fields)
    finally:
        signal.signal(number, handler)
    return str(caught.value), caught.value.exit_code, caught.value.farewell


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGTERM, REQUEUE), (signal.SIGUSR1, REQUEUE), (signal.SIGINT, 130)]
)
def test_a_signal_to_one_rank_makes_all_save_the_same_step(
    ranks: RankPool, unbroken: Path, corpus: str, tmp_path: Path, number: int, exit_code: int
) -> None:
    """B38."""
    run = tmp_path / "run"
    said = ranks(2, stopped_by, run, {"data": corpus}, number, 1)
    step = int(said[0][2].removeprefix("saved step "))
    assert (
        said
        == [("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name, exit_code, f"saved step {step}")] * 2
    )
    assert step in (4, 5), "at the end of the next step at the latest"
    (folder,) = candidates(run / CHECKPOINTS)
    assert read_manifest(folder)["step"] == step
    assert [line["step"] for line in lines(run, "steps.jsonl")] == list(range(1, step + 1)), "the record has it, too"
    record = read_run(run)
    (event,) = [event for event in record.events if event["event"] == "preempted"]
    assert (event["step"], event["signal"], event["saved"]) == (step, signal.Signals(number).name, True)
    assert record.facts["status"] == "interrupted"
    ranks(2, run_all, [(run, {"resume": True})])
    assert losses(run) == losses(unbroken)


def test_an_evaluation_is_given_up_for_a_signal(ranks: RankPool, corpus: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    fields = {"data": corpus, "evaluate_every": 4, "evaluation_samples": 24, "micro_batch_size": 1}
    said = ranks(2, stopped_by, run, fields, signal.SIGTERM, 0)
    assert said[0][2] == "saved step 4", "an evaluation of several batches stands between step 4 and step 5"
    record = read_run(run)
    assert not [event for event in record.events if event["event"] == "evaluation"]
    assert record.steps[-1]["step"] == 4 and "evaluation_loss" not in record.steps[-1]


# --- what goes wrong while saving --------------------------------------------------------------------------------


def with_a_full_disk(rank: int, size: int, directory: Path, fields: dict[str, Any]) -> str:
    """The disk has no room when the checkpoint of step 6 is written."""
    usage, calls = shutil.disk_usage, 0

    def disk_usage(path: Any) -> Any:
        nonlocal calls
        calls += 1
        return usage(path)._replace(free=1000) if calls == 2 else usage(path)

    with patch.object(tensors.shutil, "disk_usage", disk_usage):
        return run_trainer(rank, directory, fields)


def test_a_full_disk_costs_one_checkpoint_and_no_training(
    ranks: RankPool, unbroken: Path, corpus: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    output = ranks(2, with_a_full_disk, run, {"data": corpus, "checkpoint_every": EVERY})[0]
    assert losses(run) == losses(unbroken)
    assert [each.name for each in candidates(run / CHECKPOINTS)] == [f"step-{n:08d}" for n in (10, 9, 3)]
    events = read_run(run).events
    (failed,) = [event for event in events if event["event"] == "checkpoint_failed"]
    assert failed["step"] == 6 and "the disk is full" in failed["reason"]
    assert [event["step"] for event in events if event["event"] == "checkpoint"] == [3, 9, 10]
    assert "checkpoint of step 6 failed" in output and "training goes on" in output
    assert not list((run / CHECKPOINTS).glob(".step*"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no tmpfs may be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fills_up(rank: int, size: int, directory: Path, fields: dict[str, Any]) -> str:
    """Another program fills the disk while the second checkpoint is written, and clears it later."""
    write = tensors._write
    filler = directory.parent / "filler"

    def full(path: Path, *others: Any) -> Any:
        if "00000006" in path.parent.name and rank == 0:
            with filler.open("wb", buffering=0) as file, pytest.raises(OSError):
                while True:
                    file.write(bytes(1 << 12))
        return write(path, *others)

    def clear() -> None:
        time.sleep(1.0)  # steps are faster than the save of step 6
        filler.unlink(missing_ok=True)

    with at_step(9, clear), patch.object(tensors, "_write", full):
        return run_trainer(rank, directory, fields)


def test_a_disk_that_runs_full_in_the_middle(
    ranks: RankPool, unbroken: Path, corpus: str, small_disk: Path, tmp_path: Path
) -> None:
    run = small_disk / "run"
    ranks(2, fills_up, run, {"data": corpus, "checkpoint_every": EVERY, "exchange_every": 1})
    assert losses(run) == losses(unbroken), "the record is whole: what found no room was written later"
    (failed,) = [event for event in read_run(run).events if event["event"] == "checkpoint_failed"]
    assert failed["step"] == 6 and "No space left" in failed["reason"]
    assert [each.name for each in candidates(run / CHECKPOINTS)] == [f"step-{n:08d}" for n in (10, 9, 3)]


SLOW_S = 1.2


def slow_storage(rank: int, size: int, directory: Path, fields: dict[str, Any]) -> None:
    """Rank 0 writes slowly, and nobody answers for longer than the training groups wait."""
    write = tensors._write

    def slow(*arguments: Any) -> Any:
        if rank == 0:
            time.sleep(SLOW_S)
        return write(*arguments)

    with patch.object(tensors, "_write", slow), patch.dict(os.environ, {"BIREME_TIMEOUT_S": "1"}):
        run_trainer(rank, directory, fields)


def test_slow_storage_is_checkpoint_time_and_nobodys_fault(
    ranks: RankPool, unbroken: Path, corpus: str, tmp_path: Path
) -> None:
    """B16: the next save waits for the one before; no rank is taken for lost, and it is not straggler wait."""
    run = tmp_path / "run"
    ranks(2, slow_storage, run, {"data": corpus, "checkpoint_every": 1, "steps": 3})
    assert lines(run, "samples.jsonl") == lines(unbroken, "samples.jsonl")[:3]
    phase = PHASES.index("checkpoint") * len(STATES)
    first, *others = read_run(run).steps
    assert all(sum(cells[phase : phase + len(STATES)]) < 0.5e9 * SLOW_S for cells in first["cells_ns"]), "a copy only"
    for step in others:
        for cells in step["cells_ns"]:
            assert cells[phase + BLOCKED] > 0.7e9 * SLOW_S
            assert sum(cells[WAIT :: len(STATES)]) < 0.5e9 * SLOW_S


def asked_while_it_waits(rank: int, size: int, directory: Path, fields: dict[str, Any]) -> Any:
    """A signal, a step before a rank waits for a slow save for longer than a stuck rank is given."""
    with patch.object(preemption, "_STUCK_AFTER_S", 0.2), patch.object(shutdown, "SAVE_S", 0.2):
        write = tensors._write

        def slow(*arguments: Any) -> Any:
            time.sleep(SLOW_S)
            return write(*arguments)

        with patch.object(tensors, "_write", slow):
            return stopped_by(rank, size, directory, fields, signal.SIGTERM, 0)


def test_a_rank_that_waits_for_its_own_save_is_not_taken_for_stuck(
    ranks: RankPool, corpus: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    said = ranks(2, asked_while_it_waits, run, {"data": corpus, "checkpoint_every": 1})
    step = int(said[0][2].removeprefix("saved step "))
    assert said == [("SIGTERM", REQUEUE, f"saved step {step}")] * 2
    assert read_manifest(candidates(run / CHECKPOINTS)[0])["step"] == step


def test_saving_costs_a_step_the_copy_only(ranks: RankPool, broken: Path) -> None:
    run = read_run(broken)
    phase = PHASES.index("checkpoint") * len(STATES)
    for step in run.steps:
        spent_ns = [sum(cells[phase : phase + len(STATES)]) for cells in step["cells_ns"]]
        assert all(spent_ns) == (step["step"] % EVERY == 0)
    assert summarise(run)["closure_error_ns"] == 0


# --- the launcher and workers, for real --------------------------------------------------------------------------


def test_the_whole_group_gets_sigterm_with_workers_alive(corpus: str, tmp_path: Path) -> None:
    """B38: what a scheduler does. Without a launcher: the exit code asks to be started again."""
    options = ["--preset", "toy", "--steps", "100000", "--evaluate-every", "0", "--peak-seconds", "0", "--workers", "1"]
    command = [sys.executable, "-m", "bireme", "train", "--run", str(tmp_path / "run"), "--data", corpus, *options]
    output = tmp_path / "output"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    with output.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, process_group=0)
    try:
        deadline = time.monotonic() + 120
        while "step      3/" not in output.read_text():
            assert process.poll() is None and time.monotonic() < deadline, output.read_text()
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(60) == REQUEUE, output.read_text()
    finally:
        process.kill()
        process.wait()
    step = lines(tmp_path / "run", "steps.jsonl")[-1]["step"]
    assert output.read_text().splitlines()[-1] == f"saved step {step}"
    with pytest.raises(ProcessLookupError):
        for _ in range(100):  # the workers go with their rank
            os.killpg(process.pid, 0)
            time.sleep(0.1)
