"""`bireme checkpoint list | verify | export` as a user types them."""

from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import pytest
import torch
from safetensors.torch import load_file

from bireme.checkpoint.folder import LATEST, MANIFEST, hidden_folder, name_of
from bireme.cli import app, run

if TYPE_CHECKING:
    from tests.checkpoint.made_checkpoints import flip, made
else:
    from made_checkpoints import flip, made

Output = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's directory with three checkpoints, of which the newest is damaged where its size does not show it."""
    checkpoints = tmp_path / "run" / "checkpoints"
    for step in (10, 20, 30):
        made(checkpoints, step)
    flip(checkpoints / name_of(30) / "rank-00001.safetensors", -1)
    return tmp_path / "run"


def said(output: Output, *arguments: object, code: int = 0) -> str:
    """What a command prints."""
    assert run(app, ["checkpoint", *map(str, arguments)]) == code
    out, err = output.readouterr()
    assert (err != "") == (code == 2) and "\x1b" not in out + err
    if code == 2:
        assert err.count("\n") == 1 and err.startswith("bireme: ") and out == ""
    return out + err


# --- list --------------------------------------------------------------------------------------------------------


def test_list(folder: Path, capsys: Output) -> None:
    lines = said(capsys, "list", folder).splitlines()
    assert lines[0].split() == ["step", "saved", "(UTC)", "size", "ranks", "layout", "samples"]
    assert [line.split()[0] for line in lines[1:]] == ["30", "20", "10"]
    assert lines[1].split()[1:3] == ["2026-01-02", "03:04:05"] and "2  fsdp        480  whole, latest" in lines[1]
    assert lines[2].rstrip().endswith("whole")
    assert said(capsys, "list", folder / "checkpoints").splitlines() == lines
    assert max(map(len, lines)) <= 80


def test_list_shows_what_is_not_whole_and_what_was_left(folder: Path, capsys: Output) -> None:
    checkpoints = folder / "checkpoints"
    (checkpoints / name_of(20) / "rank-00000.safetensors").write_bytes(b"torn")
    (checkpoints / name_of(40)).mkdir()
    partial = hidden_folder(checkpoints, 50, "0c", "partial")
    partial.mkdir()
    (partial / "rank-00000.safetensors").write_bytes(bytes(2_000_000))
    (checkpoints / LATEST).write_text("step-00000060\n")
    text = said(capsys, "list", folder)
    assert "step-00000020 is not whole: rank-00000.safetensors has 4 bytes instead of" in text
    assert f"step-00000040 is not whole: it has no {MANIFEST}" in text
    assert "latest names step-00000060, which is not there" in text
    assert f"{partial.name} (2 MB): being written or deleted, or left by a killed run" in text
    found = orjson.loads(said(capsys, "list", folder, "--json"))
    assert found["latest"] == "step-00000060" and found["leftovers"] == [{"name": partial.name, "bytes": 2_000_000}]
    assert [(each["step"], each["whole"]) for each in found["checkpoints"]] == [
        (40, False),
        (30, True),
        (20, False),
        (10, True),
    ]
    last = found["checkpoints"][-1]
    assert (last["samples"], last["world_size"], last["layout"]) == (160, 2, "fsdp")
    assert last["reason"] is None and not last["latest"] and last["bytes"] > 1000


def test_list_of_a_run_without_checkpoints(tmp_path: Path, capsys: Output) -> None:
    assert said(capsys, "list", tmp_path).count("\n") == 1
    (tmp_path / "run.json").touch()
    assert "holds no checkpoint" in said(capsys, "list", tmp_path)
    assert orjson.loads(said(capsys, "list", tmp_path, "--json"))["checkpoints"] == []
    assert "is not a directory" in said(capsys, "list", tmp_path / "none", code=2)


def test_what_a_foreign_manifest_says_does_not_drive_the_terminal(tmp_path: Path, capsys: Output) -> None:
    made(tmp_path, 10, layout="\x1b[2J[red]fsdp", saved_utc="\x1b]0;title\x07")
    text = said(capsys, "list", tmp_path)
    assert "\\x1b[2J[red]" in "".join(text.split())


# --- verify ------------------------------------------------------------------------------------------------------


def test_verify(folder: Path, capsys: Output) -> None:
    lines = said(capsys, "verify", folder, code=1).splitlines()
    assert lines[0] == f"{name_of(30)}: rank-00001.safetensors is damaged: it does not match its checksum"
    assert lines[1].startswith(f"{name_of(20)}: good, 2 files, ") and lines[2].startswith(f"{name_of(10)}: good")
    assert lines[3] == "1 of 3 checkpoints bad: they are passed over when the run goes on"
    (folder / "checkpoints" / name_of(30) / "rank-00000.safetensors").unlink()
    assert "rank-00000.safetensors is missing" in said(capsys, "verify", folder, code=1)
    for name in ("rank-00000.safetensors", "rank-00001.safetensors"):
        flip(folder / "checkpoints" / name_of(20) / name, 99)
    line = said(capsys, "verify", folder / "checkpoints" / name_of(20), code=1)
    assert line.count("\n") == 1 and line.count("does not match its checksum") == 2, "every damaged file is named"
    assert said(capsys, "verify", folder / "checkpoints" / name_of(10)).count("\n") == 1


def test_verify_as_json(folder: Path, capsys: Output) -> None:
    found = orjson.loads(said(capsys, "verify", folder, "--json", code=1))
    assert found["bad"] == 1
    assert [bool(each["flaws"]) for each in found["checkpoints"]] == [True, False, False]
    assert found["checkpoints"][1]["files"] == 2 and found["checkpoints"][1]["name"] == name_of(20)
    found = orjson.loads(said(capsys, "verify", folder / "checkpoints" / name_of(10), "--json"))
    assert found["bad"] == 0


def test_verify_of_nothing(tmp_path: Path, capsys: Output) -> None:
    assert "holds no checkpoint" in said(capsys, "verify", tmp_path, code=2)
    assert "is not a directory" in said(capsys, "verify", tmp_path / "none", code=2)


# --- export ------------------------------------------------------------------------------------------------------


def test_export_takes_the_newest_whole_one(folder: Path, tmp_path: Path, capsys: Output) -> None:
    out = tmp_path / "exported" / "model.safetensors"
    text = said(capsys, "export", folder, "--out", out)
    assert f"{name_of(30)}: rank-00001.safetensors is damaged" in text and "passed over" in text
    assert "step 20 (320 samples) of " in text
    assert sorted(each.name for each in out.parent.iterdir()) == ["model.json", "model.safetensors"]
    described = orjson.loads(out.with_suffix(".json").read_bytes())
    assert (described["step"], described["samples"], described["tokenizer"]) == (20, 320, "bytes")
    assert described["checkpoint"] == str(folder / "checkpoints" / name_of(20))
    assert described["config"]["embedding_dim"] == 8


def test_export_of_a_step_and_of_one_checkpoint(folder: Path, tmp_path: Path, capsys: Output) -> None:
    assert "step 10 " in said(capsys, "export", folder, "--step", 10, "--out", tmp_path / "a.safetensors")
    one = folder / "checkpoints" / name_of(10)
    assert "step 10 " in said(capsys, "export", one, "--out", tmp_path / "b.safetensors")
    a, b = (load_file(tmp_path / f"{name}.safetensors") for name in "ab")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    before = sorted(tmp_path.iterdir())
    missing = said(capsys, "export", folder, "--step", 15, "--out", tmp_path / "c.safetensors", code=2)
    assert "has no checkpoint of step 15; it has step-00000030, step-00000020, step-00000010" in missing
    damaged = said(capsys, "export", folder, "--step", 30, "--out", tmp_path / "c.safetensors", code=2)
    assert "no usable checkpoint: " in damaged and "rank-00001.safetensors" in damaged
    assert "--step chooses" in said(capsys, "export", one, "--step", 10, "--out", tmp_path / "c.safetensors", code=2)
    assert "holds no checkpoint" in said(capsys, "export", tmp_path, "--out", tmp_path / "c.safetensors", code=2)
    assert sorted(tmp_path.iterdir()) == before


def test_export_overwrites_nothing(folder: Path, tmp_path: Path, capsys: Output) -> None:
    for name in ("model.safetensors", "model.json"):
        (tmp_path / name).write_text("mine")
        text = said(capsys, "export", folder, "--out", tmp_path / "model.safetensors", code=2)
        assert f"{tmp_path / name} exists" in text
        assert (tmp_path / name).read_text() == "mine"
        (tmp_path / name).unlink()
    assert "ends in .safetensors" in said(capsys, "export", folder, "--out", tmp_path / "model.pt", code=2)
    (tmp_path / "file").touch()
    one = folder / "checkpoints" / name_of(10)
    assert "cannot write" in said(capsys, "export", one, "--out", tmp_path / "file" / "m.safetensors", code=2)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "run"]


def test_export_to_the_working_directory(
    folder: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "exported: model.safetensors, model.json" in said(capsys, "export", "run")
    assert "model.safetensors exists" in said(capsys, "export", "run", code=2)
