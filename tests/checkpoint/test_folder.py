"""A checkpoint is whole or passed over with the reason; the newest good one is never deleted."""

import contextlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bireme.checkpoint.folder import (
    LATEST,
    MANIFEST,
    Unusable,
    candidates,
    check_files,
    clean,
    commit,
    hidden_folder,
    leftovers,
    name_of,
    prune,
    read_latest,
    read_manifest,
    set_aside,
    step_of,
    to_delete,
)
from bireme.errors import UserError

if TYPE_CHECKING:
    from tests.checkpoint.made_checkpoints import flip, made
else:
    from made_checkpoints import flip, made

quick = settings(
    deadline=None, max_examples=100, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def why(folder: Path) -> str:
    """Why a checkpoint is not usable; it must not be."""
    with pytest.raises(Unusable) as caught:
        check_files(folder, read_manifest(folder))
    line = str(caught.value)
    assert line.isprintable() and len(line) <= 300
    return line


def steps(checkpoints: Path) -> list[int]:
    return [step_of(each) or 0 for each in candidates(checkpoints)]


def test_a_checkpoint_reads_as_it_was_written(tmp_path: Path) -> None:
    folder = made(tmp_path, 100)
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    assert folder == tmp_path / "step-00000100" and read_latest(tmp_path) == folder.name
    assert manifest["step"] == 100 and sorted(manifest["files"]) == ["rank-00000.safetensors", "rank-00001.safetensors"]
    assert (tmp_path / LATEST).read_text() == "step-00000100\n"
    assert sorted(each.name for each in tmp_path.iterdir()) == [LATEST, "step-00000100"], "something was left"


def test_a_flipped_bit_anywhere_in_the_manifest_is_seen(tmp_path: Path) -> None:
    """B36: a flipped bit in a number is still valid JSON."""
    folder = made(tmp_path, 1)
    path = folder / MANIFEST
    right = path.read_bytes()
    for position in range(0, len(right), 3):
        flip(path, position, position % 8)
        with pytest.raises(Unusable):
            read_manifest(folder)
        path.write_bytes(right)
    for size in range(0, len(right) - 1, 31):  # the last byte is the line end
        path.write_bytes(right[:size])
        with pytest.raises(Unusable):
            read_manifest(folder)


@quick
@given(data=st.data())
def test_damage_anywhere_in_a_file_is_seen(tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / name_of(1)
    if not folder.exists():
        made(tmp_path, 1)
    path = folder / data.draw(st.sampled_from(sorted(read_manifest(folder)["files"])))
    right = path.read_bytes()
    try:
        damage = data.draw(st.sampled_from(["flip", "cut", "longer"]))
        if damage == "flip":
            flip(path, data.draw(st.integers(0, len(right) - 1)), data.draw(st.integers(0, 7)))
        elif damage == "cut":
            path.write_bytes(right[: data.draw(st.integers(0, len(right) - 1))])
        else:
            path.write_bytes(right + b"\0")
        assert why(folder).startswith(path.name)
    finally:
        path.write_bytes(right)
    check_files(folder, read_manifest(folder))


def rewritten(folder: Path, **fields: Any) -> None:
    """The manifest with other fields, sealed: as a program might write it that means harm."""
    manifest = read_manifest(folder)
    checkpoints, step = folder.parent, manifest.pop("step")
    partial = hidden_folder(checkpoints, step, "0b", "partial")
    shutil.copytree(folder, partial)
    (partial / MANIFEST).unlink()
    commit(partial, checkpoints, step, {**manifest, **fields}, "0b")


GOOD_FILE = {"bytes": 1, "sha256": "0"}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"version": 2}, "it has version 2, this bireme reads version 1"),
        ({"version": "\x1b[2J" * 200}, "it has version \\x1b[2J"),
        ({"format": "other"}, "manifest.json was not written by bireme"),
        ({"step": "7"}, "manifest.json has no step"),
        ({"step": True}, "manifest.json has no step"),
        ({"samples": 1.5}, "manifest.json has no samples"),
        ({"files": []}, "manifest.json has no files"),
        ({"files": {"rank-00000.safetensors": None}}, "describes a file as no bireme does"),
        ({"files": {"rank-00000.safetensors": {"bytes": "1", "sha256": "0"}}}, "describes a file as no bireme does"),
        ({"files": {"rank-00000.safetensors": {"bytes": 1}}}, "describes a file as no bireme does"),
        ({"files": {"../rank-00000.safetensors": GOOD_FILE}}, "describes a file as no bireme does"),
        ({"files": {"/etc/passwd": GOOD_FILE}}, "describes a file as no bireme does"),
        ({"files": {"rank-00000.safetensors/../../x": GOOD_FILE}}, "describes a file as no bireme does"),
        ({"files": {"rank-00000.safetensors\n": GOOD_FILE}}, "describes a file as no bireme does"),
        ({"files": {"rank-٠٠٠٠٠.safetensors": GOOD_FILE}}, "describes a file as no bireme does"),
        ({"files": {"": GOOD_FILE}}, "describes a file as no bireme does"),
        ({"files": {}}, "rank-00000.safetensors is not in its manifest"),
        ({"files": {"rank-00009.safetensors": GOOD_FILE}}, "rank-00009.safetensors is missing"),
        ({"tensors": {"model.x": 3}}, "describes a tensor as no bireme does"),
        ({"tensors": {"model.x": {"shape": [-1]}}}, "describes a tensor as no bireme does"),
        ({"tensors": {"model.x": {"shape": "2"}}}, "describes a tensor as no bireme does"),
    ],
)
def test_a_manifest_that_is_foreign_or_newer(tmp_path: Path, fields: dict[str, Any], reason: str) -> None:
    folder = made(tmp_path, 7)
    rewritten(folder, **fields)
    assert reason in why(folder)


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"null", b"\xff\xfe", b'{"manifest": 1, "sha256": "0"}', b"[" * 100_000, b"PK\x03\x04"],
)
def test_a_manifest_that_is_something_else(tmp_path: Path, content: bytes) -> None:
    folder = made(tmp_path, 7)
    (folder / MANIFEST).write_bytes(content)
    assert why(folder).startswith(MANIFEST)


def test_files_that_are_not_the_checkpoints(tmp_path: Path) -> None:
    folder = made(tmp_path, 7)
    (folder / ".DS_Store").touch()  # harmless
    check_files(folder, read_manifest(folder))
    shutil.copy(folder / "rank-00001.safetensors", folder / "rank-00002\x1b[2J.safetensors")
    assert why(folder) == "rank-00002\\x1b[2J.safetensors is not in its manifest"


@pytest.mark.parametrize("name", [MANIFEST, "rank-00001.safetensors"])
def test_a_folder_or_nothing_in_place_of_a_file(tmp_path: Path, name: str) -> None:
    folder = made(tmp_path, 7)
    (folder / name).unlink()
    assert name in why(folder)
    (folder / name).mkdir()
    assert name in why(folder)


def test_what_is_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert candidates(tmp_path / "none") == [] == leftovers(tmp_path / "none")
    made(tmp_path, 5)
    for name in ("step-5", "step-00000009.old", "xstep-00000009", "step-0000000٩", ".step-00000009.0a.partial"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000008").touch()  # named like one
    assert steps(tmp_path) == [8, 5]
    assert why(tmp_path / "step-00000008").startswith(MANIFEST)
    with pytest.raises(UserError, match="cannot read"):
        candidates(tmp_path / "step-00000008")
    assert steps(tmp_path) == [8, 5]
    made(tmp_path, 123_456_789_012)
    assert steps(tmp_path) == [123_456_789_012, 8, 5]


# --- which stay --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "keep_every", "deleted"),
    [(3, 0, [20, 10]), (1, 0, [40, 30, 20, 10]), (1, 20, [30, 10]), (2, 50, [30, 20, 10]), (9, 0, []), (1, 10, [])],
)
def test_the_last_and_every_nth_stay(tmp_path: Path, keep: int, keep_every: int, deleted: list[int]) -> None:
    every = [10, 20, 30, 40, 50]
    assert to_delete(every, keep, keep_every) == deleted
    for step in every:
        made(tmp_path, step)
    assert prune(tmp_path, keep, keep_every, "0a") == [name_of(step) for step in deleted]
    assert steps(tmp_path) == sorted(set(every) - set(deleted), reverse=True)
    assert leftovers(tmp_path) == []


@quick
@given(st.sets(st.integers(1, 200)), st.integers(1, 5), st.integers(0, 20))
def test_the_newest_always_stay(every: set[int], keep: int, keep_every: int) -> None:
    deleted = set(to_delete(every, keep, keep_every))
    stay = every - deleted
    assert deleted <= every and stay >= set(sorted(every)[-keep:])
    assert all(not keep_every or step % keep_every for step in deleted)
    assert len(stay) <= keep + len([step for step in every if keep_every and step % keep_every == 0])


def test_damaged_checkpoints_do_not_count(tmp_path: Path) -> None:
    """B36: keep-last-1 must not leave a torn one alone."""
    for step in (10, 20, 30):
        made(tmp_path, step)
    (tmp_path / name_of(30) / "rank-00000.safetensors").write_bytes(b"")
    assert prune(tmp_path, 1, 0, "0a") == [name_of(10)]
    assert steps(tmp_path) == [30, 20]


def test_what_was_passed_over_is_set_aside(tmp_path: Path) -> None:
    """B36: whole after all, or of another line of the run: it must not come back, nor push out what comes after."""
    for step in (10, 20, 30):
        made(tmp_path, step)
    assert set_aside(tmp_path, 10) == [f"passed-over-{name_of(step)}" for step in (30, 20)]
    assert steps(tmp_path) == [10]
    made(tmp_path, 30)
    assert set_aside(tmp_path, 20) == [f"passed-over-{name_of(30)}-2"]
    assert set_aside(tmp_path, 20) == []
    assert len(list(tmp_path.glob("passed-over-*/manifest.json"))) == 3


def test_a_damaged_one_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    folder = made(tmp_path, 10)
    flip(folder / "rank-00001.safetensors", 50)
    why(folder)
    assert made(tmp_path, 10) == folder
    check_files(folder, read_manifest(folder))
    assert sorted(each.name for each in tmp_path.iterdir()) == [LATEST, folder.name]


def test_a_killed_writer_leaves_no_checkpoint(tmp_path: Path) -> None:
    made(tmp_path, 10)
    partial = hidden_folder(tmp_path, 20, "0c", "partial")
    partial.mkdir()
    (partial / "rank-00000.safetensors").write_bytes(b"half")
    hidden_folder(tmp_path, 5, "0c", "deleted").mkdir()
    hidden_folder(tmp_path, 5, "0c", "replaced").mkdir()
    (tmp_path / ".latest.0c.tmp").touch()
    (tmp_path / ".somebody's").touch()
    kept = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    kept.mkdir()
    (kept / "file").touch()
    hidden_folder(tmp_path, 6, "0c", "partial").symlink_to(kept)
    assert steps(tmp_path) == [10]
    assert len(leftovers(tmp_path)) == 5
    clean(tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == [".somebody's", LATEST, name_of(10)]
    assert (kept / "file").exists(), "a link was followed"
    clean(tmp_path / "none")


def test_an_end_at_any_moment_of_a_commit_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B36: after each call that changes the disk, the newest whole checkpoint is that before or the new one."""

    class Killed(BaseException):
        pass

    def killing(function: Any, countdown: list[int]) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            countdown[0] -= 1
            if countdown[0] == 0:
                raise Killed
            return function(*arguments, **keywords)

        return call

    seen = set()
    for moment in range(1, 40):
        checkpoints = tmp_path / str(moment)
        made(checkpoints, 10)
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            countdown = [moment]
            for name in ("rename", "replace", "fsync"):
                patch.setattr(os, name, killing(getattr(os, name), countdown))
            made(checkpoints, 20)
            prune(checkpoints, 1, 0, "0a")
            seen.add("finished")
        newest = candidates(checkpoints)[0]
        check_files(newest, read_manifest(newest))
        seen.add(newest.name)
        assert read_latest(checkpoints) in [each.name for each in candidates(checkpoints)]
        if "finished" in seen:
            break
        clean(checkpoints)
        made(checkpoints, 20)
        assert leftovers(checkpoints) == [] and steps(checkpoints) in ([20, 10], [20])
    assert seen == {"finished", name_of(10), name_of(20)}


@pytest.mark.parametrize("content", [b"", b"step-", b"\xff\xff", b"../step-00000010\n", b"step-00000010/..\n"])
def test_a_damaged_latest_is_none(tmp_path: Path, content: bytes) -> None:
    made(tmp_path, 10)
    assert read_latest(tmp_path) == name_of(10)
    (tmp_path / LATEST).write_bytes(content)
    assert read_latest(tmp_path) is None
    (tmp_path / LATEST).unlink()
    assert read_latest(tmp_path) is None


def test_the_manifest_is_for_people_too(tmp_path: Path) -> None:
    text = (made(tmp_path, 10) / MANIFEST).read_bytes()
    assert text.count(b"\n") > 20 and orjson.loads(text)["manifest"]["layout"] == "fsdp"
