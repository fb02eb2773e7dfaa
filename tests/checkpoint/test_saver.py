"""The saver's promises that training alone does not show: all ranks or none, one at a time, nothing half-written."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from bireme.checkpoint import saver, tensors
from bireme.checkpoint.folder import candidates, check_files, read_manifest
from bireme.checkpoint.saver import Saver, check_shared
from bireme.errors import SharedError
from bireme.world import here

Ranks = Callable[..., list[Any]]
FACTS: dict[str, Any] = {"samples": 8, "world_size": 2, "layout": "ddp", "config": {}, "model": {}, "data": {}}


def numbers(rank: int) -> dict[str, torch.Tensor]:
    return {"model.shared": torch.arange(6.0), f"random.rank-{rank:05d}.cpu": torch.full((5,), rank, dtype=torch.uint8)}


def alone(rank: int, size: int, folder: Path) -> tuple[str | None, float]:
    """Rank 0 saves, and the others do not come; later all do."""
    mine = Saver(folder, keep=3, keep_every=0)
    mine.meet_within_s = 1.0
    started = time.monotonic()
    if rank == 0:
        mine.save(1, numbers(rank), FACTS)
        mine.wait()
    else:
        time.sleep(3.0)
    took_s = time.monotonic() - started
    mine.save(2, numbers(rank), FACTS)
    last = mine.wait()
    return last.problem if last else None, took_s


def test_a_save_that_not_all_ranks_make_ends_with_a_word(ranks: Ranks, tmp_path: Path) -> None:
    """B15: a guard instead of a hang."""
    found = ranks(2, alone, tmp_path)
    assert found[0][1] < 10
    for problem, _ in found:
        assert problem is not None and "every rank must" in problem
    assert "not all ranks came to save step 1 within 1 s" in found[0][0]
    assert candidates(tmp_path) == []


def different_steps(rank: int, size: int, folder: Path) -> str | None:
    mine = Saver(folder, keep=3, keep_every=0)
    mine.save(4 + rank, numbers(rank), FACTS)
    last = mine.wait()
    return last.problem if last else None


def test_ranks_that_save_different_steps_are_named(ranks: Ranks, tmp_path: Path) -> None:
    for problem in ranks(2, different_steps, tmp_path):
        assert problem is not None and "rank 0 saves step 4, rank 1 another" in problem
    assert candidates(tmp_path) == []


def several(rank: int, size: int, folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Saves six steps, keeps two of them and every third; rank 1 cannot write step 5."""
    told: list[tuple[str, dict[str, Any]]] = []
    mine = Saver(folder, 2, 3, note=lambda event, **fields: told.append((event, fields)))
    write = tensors._write

    def refusing(path: Path, *others: Any) -> Any:
        if rank == 1 and "00000005" in path.parent.name:
            raise OSError(5, "Input/output error")
        return write(path, *others)

    with patch.object(tensors, "_write", refusing):
        values = numbers(rank)
        for step in range(1, 8):
            values["model.shared"].fill_(step)
            mine.save(step, values, FACTS)
            values["model.shared"].fill_(-1)  # training goes on: the copy is not touched by it
        mine.wait()
    return told


def test_checkpoints_are_whole_kept_by_rule_and_failures_are_told(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / ".step-00000009.0123abcd.partial").mkdir()
    (tmp_path / ".step-00000008.0123abcd.deleted").mkdir()
    told = ranks(2, several, tmp_path)
    assert told[1] == []
    assert [(event, fields["step"]) for event, fields in told[0]] == [
        *(("checkpoint", step) for step in (1, 2, 3, 4)),
        ("checkpoint_failed", 5),
        *(("checkpoint", step) for step in (6, 7)),
    ]
    assert told[0][4][1]["reason"] == "rank 1: Input/output error"
    assert [each.name for each in candidates(tmp_path)] == [f"step-{step:08d}" for step in (7, 6, 3)]
    assert sorted(each.name for each in tmp_path.iterdir() if each.name.startswith(".")) == []
    for folder in candidates(tmp_path):
        manifest = read_manifest(folder)
        check_files(folder, manifest)
        assert manifest["tensors"]["model.shared"] == {"shape": [6], "dtype": "F32"}
        assert {"random.rank-00000.cpu", "random.rank-00001.cpu"} < set(manifest["tensors"])
        read = {"model.shared": torch.zeros(6)}
        ranks(1, load_one, read, folder)
    assert (tmp_path / "latest").read_text() == "step-00000007\n"


def load_one(rank: int, size: int, read: dict[str, torch.Tensor], folder: Path) -> None:
    tensors.load(read, folder, None)
    assert read["model.shared"].tolist() == [float(read_manifest(folder)["step"])] * 6


def unseen(rank: int, size: int, folder: Path) -> str:
    world = here(rank, torch.device("cpu"))
    with patch.object(saver, "_SEEN_WITHIN_S", 0.2), pytest.raises(SharedError) as caught:
        check_shared(folder if rank == 0 else folder.with_name("elsewhere"), world)
    return str(caught.value)


def test_a_folder_that_nodes_do_not_share_is_refused_before_training(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks(2, unseen, tmp_path / "run"):
        assert said.startswith("rank 1: ") and "that all nodes share" in said
    assert list(tmp_path.iterdir()) == [], "what was only tried leaves nothing"


def unwritable(rank: int, size: int, folder: Path) -> str:
    with pytest.raises(SharedError) as caught:
        check_shared(folder, here(rank, torch.device("cpu")))
    return str(caught.value)


def test_a_folder_that_cannot_be_written_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for said in ranks(2, unwritable, tmp_path / "file" / "run"):
        assert "cannot write to" in said and "Not a directory" in said


def slow_on_rank_1(rank: int, size: int, folder: Path) -> list[list[float]]:
    told: list[list[float]] = []
    mine = Saver(
        folder,
        keep=3,
        keep_every=0,
        note=lambda event, **fields: told.append(fields["write_s"]),
        before_write=lambda step: time.sleep(0.5 * rank),
    )
    mine.save(1, numbers(rank), FACTS)
    mine.wait()
    return told


def test_whose_storage_is_slow_is_noted(ranks: Ranks, tmp_path: Path) -> None:
    ((fast_s, slow_s),), nothing = ranks(2, slow_on_rank_1, tmp_path)
    assert slow_s >= 0.5 and fast_s < slow_s  # though all ranks wait for it
    assert nothing == []
