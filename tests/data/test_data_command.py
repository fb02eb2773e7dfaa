import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from bireme import cli
from bireme.data import open_tokens
from bireme.data.command import Shown


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("A line of text.\n" * 1000)
    return path


def bireme(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.run(cli.app, [str(each) for each in arguments])
    return (code, *capsys.readouterr())


def test_prepare_and_verify(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    code, shown, errors = bireme(capsys, "data", "prepare", source, "--out", out, "--shard-megabytes", "0.006")
    assert (code, errors) == (0, "")
    assert "1 document, 16,001 tokens (bytes, vocab_size 256) in 3 shards" in shown
    assert f"bireme train --data {out}" in shown
    code, shown, errors = bireme(capsys, "data", "verify", out)
    assert (code, errors) == (0, "") and shown.startswith("good: 16,001 tokens (bytes) in 3 shards")
    shard = out / "shard-00001.tokens"
    raw = bytearray(shard.read_bytes())
    raw[-3] ^= 1
    shard.write_bytes(raw)
    code, shown, errors = bireme(capsys, "data", "verify", out)
    assert (code, errors) == (1, "")
    assert "shard-00001.tokens' has a wrong checksum" in shown and "1 of 3 shards bad" in shown
    shard.unlink()
    code, shown, errors = bireme(capsys, "data", "verify", out)
    assert code == 2 and "shard-00001.tokens" in errors
    code, shown, errors = bireme(capsys, "data", "prepare", source, "--out", out, "--shard-megabytes", "0.006")
    assert code == 0 and "2 of them finished before" in shown
    assert bireme(capsys, "data", "verify", out)[0] == 0


def test_a_file_of_another_project_has_no_checksum(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.bin"
    path.write_bytes(np.arange(1000).astype("<u2").tobytes())
    code, shown, _ = bireme(capsys, "data", "verify", path)
    assert code == 0 and "without checksums" in shown
    assert open_tokens(path).count == 1000


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "--out requires an argument"),
        (["--out", "out"], "at least one"),
        (["nowhere", "--out", "out"], "'nowhere'"),
        (["text.txt", "--out", "out", "--workers", "0"], "--workers is 0"),
        (["text.txt", "--out", "out", "--shard-megabytes", "-1"], "--shard-megabytes is -1"),
        (["text.txt", "--out", "out", "--shard-megabytes", "nan"], "--shard-megabytes is nan"),
        (["text.txt", "--out", "out", "--tokenizer", "gpt2"], "cannot read the tokenizer 'gpt2'"),
        (["text.txt", "--out", "out", "--tokenizer-pattern", "gpt2"], "for tiktoken files"),
        (["text.txt", "--out", "out", "--wokers", "3"], "unknown option --wokers"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    monkeypatch.chdir(source.parent)
    code, shown, errors = bireme(capsys, "data", "prepare", *options)
    assert (code, shown) == (2, "")
    assert words in errors and errors.count("\n") == 1
    assert os.listdir() == ["text.txt"]  # noqa: PTH208


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in ((["data", "--help"], "verify"), (["data", "prepare", "--help"], "--tokenizer-pattern")):
        code, shown, _ = bireme(capsys, *arguments)
        assert code == 0 and words in shown


@pytest.mark.parametrize("terminal", [True, False])
def test_progress(terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr("bireme.data.command.time.monotonic", lambda: float(next(clock)))
    options: dict[str, Any] = {"force_terminal": True} if terminal else {}
    with Shown(Console(width=100, **options)) as progress:
        progress.start(10_000_000, 2)
        for _ in range(5):
            progress.advance(2_000_000)
    shown = capsys.readouterr().out
    if terminal:
        assert "10 of 10 MB, 1.0 MB/s" in shown and "100%" in shown
    else:
        assert shown.splitlines() == ["preparing 10.0 MB with 2 workers", "6 of 10 MB, 1.0 MB/s, 4 s left"]
