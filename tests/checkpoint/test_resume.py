"""Which checkpoint a run goes on from, in one process: never a damaged one, never from zero unasked."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest
import torch

from bireme.checkpoint.folder import LATEST, MANIFEST, name_of
from bireme.checkpoint.resume import Resume, check_continues, find_resume
from bireme.config import TrainConfig
from bireme.errors import UserError
from bireme.record import RunWriter
from bireme.world import World, here

if TYPE_CHECKING:
    from tests.checkpoint.made_checkpoints import flip, made
else:
    from made_checkpoints import flip, made


@pytest.fixture(scope="module")
def world() -> World:
    return here(0, torch.device("cpu"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of the steps 10 and 20."""
    run = tmp_path / "run"
    nodes = [{"name": "here", "ranks": [0]}]
    writer = RunWriter(run, {"world_size": 1, "nodes": nodes, "groups": [], "launch_id": "job-1"})
    writer.close()
    for step in (10, 20):
        made(run / "checkpoints", step)
    return run


def resumed(run: Path, world: World) -> Resume:
    return found_with(world, run=str(run), resume=True)


def found_with(world: World, **fields: Any) -> Resume:
    found = find_resume(TrainConfig(**fields), world, {})
    assert found is not None
    return found


def refused(world: World, environ: dict[str, str] | None = None, **fields: Any) -> str:
    with pytest.raises(UserError) as caught:
        find_resume(TrainConfig(**fields), world, environ or {})
    line = str(caught.value)
    assert line.isprintable()
    return line


def test_the_newest_is_gone_on_from(run: Path, world: World) -> None:
    found = resumed(run, world)
    assert (found.step, found.samples, found.run, found.skipped) == (20, 320, str(run), [])
    assert found.folder == run / "checkpoints" / name_of(20)


# --- damage ------------------------------------------------------------------------------------------------------


def removed(path: Path) -> None:
    path.unlink()


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def flipped(at: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        flip(path, int(at * (path.stat().st_size - 1)), 3)

    return damage


DAMAGE: dict[str, Callable[[Path], None]] = {
    "removed": removed,
    "emptied": emptied,
    "truncated": truncated,
    **{f"bit flipped at {at}": flipped(at) for at in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)},
}


@pytest.mark.parametrize("name", [MANIFEST, "rank-00000.safetensors", "rank-00001.safetensors"])
def test_every_damage_to_every_file_is_passed_over(run: Path, world: World, name: str) -> None:
    """B36: with the reason, and the checkpoint before is used."""
    path = run / "checkpoints" / name_of(20) / name
    right = path.read_bytes()
    for what, damage in DAMAGE.items():
        damage(path)
        found = resumed(run, world)
        assert found.step == 10, what
        assert len(found.skipped) == 1 and found.skipped[0].startswith(f"{path.parent}: "), what
        assert name in found.skipped[0], what
        path.write_bytes(right)
    assert resumed(run, world).step == 20


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_latest_is_for_people(run: Path, world: World, damage: Callable[[Path], None]) -> None:
    damage(run / "checkpoints" / LATEST)
    assert resumed(run, world).step == 20


def test_files_and_folders_from_elsewhere(run: Path, world: World) -> None:
    checkpoints = run / "checkpoints"
    (checkpoints / name_of(90)).mkdir()
    (checkpoints / name_of(80)).mkdir()
    (checkpoints / name_of(80) / "model.pt").write_bytes(b"PK\x03\x04")
    (checkpoints / name_of(70)).write_text("a file")
    made(checkpoints, 60, version=2)
    made(checkpoints, 50, files={"../../secret.safetensors": {"bytes": 1, "sha256": ""}})
    (made(checkpoints, 40) / "other\x1b[2J.safetensors").touch()
    (checkpoints / "notes.txt").touch()
    found = resumed(run, world)
    assert found.step == 20
    reasons = [each.split(": ", 1) for each in found.skipped]
    assert [Path(folder).name for folder, _ in reasons] == [name_of(step) for step in (90, 80, 70, 60, 50, 40)]
    assert [reason for _, reason in reasons] == [
        "it has no manifest.json",
        "it has no manifest.json",
        "manifest.json cannot be read: Not a directory",
        "it has version 2, this bireme reads version 1",
        "manifest.json describes a file as no bireme does",
        "other\\x1b[2J.safetensors is not in its manifest",
    ]


def test_none_is_usable(run: Path, world: World) -> None:
    """Nobody begins from zero unasked."""
    for step in (10, 20):
        emptied(run / "checkpoints" / name_of(step) / "rank-00001.safetensors")
    line = refused(world, run=str(run), resume=True)
    assert line.startswith("no usable checkpoint: ") and line.count("has 0 bytes instead of") == 2
    line = refused(world, resume_from=str(run / "checkpoints" / name_of(10)))
    assert line.count("rank-00001.safetensors has 0 bytes") == 1


def test_there_is_none(run: Path, world: World) -> None:
    for each in (run / "checkpoints").iterdir():
        each.rename(run / each.name)
    with (run / "events.jsonl").open("ab") as events:  # it once had some: they are gone
        events.write(orjson.dumps({"event": "checkpoint", "step": 20}) + b"\n")
    assert "holds no checkpoint to go on from" in refused(world, run=str(run), resume=True)
    (run / "checkpoints").rmdir()
    assert "holds no checkpoint to go on from" in refused(world, run=str(run), resume=True)


# --- what was asked for ------------------------------------------------------------------------------------------


def test_nothing_was_asked_for(run: Path, world: World) -> None:
    assert find_resume(TrainConfig(), world, {}) is None
    assert find_resume(TrainConfig(run=str(run)), world, {}) is None  # which is then refused: the run exists
    assert find_resume(TrainConfig(run=str(run)), world, {"TORCHELASTIC_RUN_ID": "job-2"}) is None
    assert find_resume(TrainConfig(run=str(run)), world, {"TORCHELASTIC_RUN_ID": "none"}) is None
    assert find_resume(TrainConfig(run=str(run / "new")), world, {"TORCHELASTIC_RUN_ID": "job-1"}) is None


def test_the_launcher_that_started_the_run_goes_on_with_it(run: Path, world: World) -> None:
    found = find_resume(TrainConfig(run=str(run)), world, {"TORCHELASTIC_RUN_ID": "job-1"})
    assert found is not None and found.step == 20 and found.run == str(run)


def test_a_restart_does_not_begin_another_run(world: World) -> None:
    line = refused(world, {"TORCHELASTIC_RESTART_COUNT": "1"})
    assert "give --run DIR" in line
    assert find_resume(TrainConfig(), world, {"TORCHELASTIC_RESTART_COUNT": "0"}) is None


def test_resume_without_a_run(world: World, tmp_path: Path) -> None:
    assert "give --run DIR" in refused(world, resume=True)
    assert "there is no run in" in refused(world, resume=True, run=str(tmp_path))
    assert "exclude each other" in refused(world, resume=True, resume_from="x", run=str(tmp_path))


@pytest.mark.parametrize(("inside", "step"), [("", 20), ("checkpoints", 20), ("checkpoints/step-00000010", 10)])
def test_another_runs_checkpoint(run: Path, world: World, inside: str, step: int) -> None:
    found = found_with(world, resume_from=str(run / inside))
    assert found.step == step and found.run is None


def test_a_checkpoint_that_was_copied_to_another_name(run: Path, world: World) -> None:
    copied = (run / "checkpoints" / name_of(10)).rename(run.parent / "good one")
    assert found_with(world, resume_from=str(copied)).step == 10


def test_no_such_folder(world: World, tmp_path: Path) -> None:
    assert "is not a directory" in refused(world, resume_from=str(tmp_path / "none"))
    assert "holds no checkpoint" in refused(world, resume_from=str(tmp_path))


# --- whether it is of the same training --------------------------------------------------------------------------


def test_another_model_or_other_data(run: Path, world: World) -> None:
    found = resumed(run, world)
    model, data, config = (found.manifest[name] for name in ("model", "data", "config"))
    config = {"global_batch_size": config.get("global_batch_size")}
    check_continues(found, {"model": model, "data": data, "config": config})
    with pytest.raises(
        UserError, match="of another model: norm 'layernorm' there, 'rmsnorm' here, num_layers 1 there, 2 here"
    ):
        check_continues(found, {"model": {**model, "norm": "rmsnorm", "num_layers": 2}, "data": data})
    with pytest.raises(UserError, match=r"of other data.*: fingerprint 'f' there, 'g' here"):
        check_continues(found, {"model": model, "data": {**data, "fingerprint": "g"}})
    with pytest.raises(UserError, match="seed 0 there, 1 here"):
        check_continues(found, {"model": model, "data": {**data, "seed": 1}})


def test_a_manifest_is_not_changed_by_the_way_through_the_ranks(run: Path, world: World) -> None:
    found = resumed(run, world)
    assert found.folder is not None
    assert found.manifest == orjson.loads((found.folder / MANIFEST).read_bytes())["manifest"]
