import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest

from bireme.data import Corpus, open_tokens, preparation, prepare
from bireme.data.preparation import Summary, prepare_folder
from bireme.data.tokenizers import tokenizer_of
from bireme.data.tokens import LOCK, MANIFEST, verify_tokens

if TYPE_CHECKING:
    from tests.data.made_tokens import failure, make_tiktoken, make_tokenizer_json
else:
    from made_tokens import failure, make_tiktoken, make_tokenizer_json


class Silent:
    def start(self, text_bytes: int, workers: int) -> None:
        pass

    def advance(self, text_bytes: int) -> None:
        pass


def run(*sources: Path | str, out: Path, **options: Any) -> Summary:
    defaults = {"tokenizer": "bytes", "pattern": None, "text_field": "text", "workers": 2, "part_bytes": None}
    return prepare_folder([str(each) for each in sources], out, **{**defaults, **options}, progress=Silent())


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are made in this process: starting others takes most of the time."""

    def run_here(
        make: Callable[..., Any], arguments: tuple[Any, ...], tasks: list[Any], workers: int
    ) -> Generator[tuple[str, Any], None, None]:
        work = make(*arguments)
        for task in tasks:
            reports: list[int] = []
            result = work(task, reports.append)
            yield from (("progress", each) for each in reports)
            yield "done", result

    monkeypatch.setattr(preparation, "run_tasks", run_here)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    root.mkdir()
    for number in range(30):
        (root / f"{number:02}.txt").write_text(f"This is text {number}.\n" * 50)
    (root / "large.txt").write_text("".join(f"Line {number} of a text.\n" for number in range(2000)))
    documents = [{"text": f"Document {number} in a line."} for number in range(200)]
    (root / "z.jsonl").write_text("".join(json.dumps(each) + "\n" for each in documents))
    return root


def text_of(path: Path) -> bytes:
    tokens = open_tokens(path)
    return bytes(tokens.read(np.array([0]), tokens.count).astype(np.uint8).data)


def contents(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in folder.iterdir()}


def expected_text(source: Path) -> bytes:
    texts = [each.read_text() for each in sorted(source.glob("*.txt"))]
    texts += [json.loads(line)["text"] for line in (source / "z.jsonl").read_text().splitlines()]
    return "".join(text + "\0" for text in texts).encode()


# --- the result --------------------------------------------------------------------------------------------------


def test_the_result_does_not_depend_on_the_workers(source: Path, tmp_path: Path) -> None:
    for workers in (1, 3):
        summary = run(source, out=tmp_path / str(workers), workers=workers, part_bytes=10_000)
        assert (summary.documents, summary.shards, summary.kept) == (231, 9, 0)
    assert contents(tmp_path / "1") == contents(tmp_path / "3")
    assert text_of(tmp_path / "1") == expected_text(source)


@pytest.mark.usefixtures("here")
def test_samples_do_not_depend_on_the_size_of_the_shards(source: Path, tmp_path: Path) -> None:
    sets = []
    for part_bytes in (3000, 20_000, None):
        run(source, out=tmp_path / str(part_bytes), part_bytes=part_bytes)
        sets.append(open_tokens(tmp_path / str(part_bytes)))
        verify_tokens(sets[-1])
    assert [len(each.shards) for each in sets][-1] == 1 < len(sets[1].shards) < len(sets[0].shards)
    corpora = [Corpus(each, 64, 256) for each in sets]
    ids = corpora[0].train_samples(0, 50, seed=3)
    expected = corpora[0].batch(ids)
    for corpus in corpora[1:]:
        assert corpus.train_samples(0, 50, seed=3).tolist() == ids.tolist()
        assert all(np.array_equal(a, b) for a, b in zip(corpus.batch(ids), expected, strict=True))


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("make", [make_tokenizer_json, make_tiktoken])
def test_other_tokenizers(source: Path, tmp_path: Path, make: Callable[[Path], Path]) -> None:
    file = make(tmp_path / "cl100k_base.tiktoken")
    out = tmp_path / "out"
    run(source, out=out, tokenizer=str(file), part_bytes=10_000)
    tokens = open_tokens(out)
    assert tokens.tokenizer_file is not None and tokens.tokenizer_file.read_bytes() == file.read_bytes()
    tokenizer = tokenizer_of(tokens.tokenizer, out)
    assert tokens.vocab_size == tokenizer.vocab_size
    ids = tokens.read(np.array([0]), tokens.count)[0]
    documents = np.split(ids, np.flatnonzero(ids == tokenizer.separator) + 1)
    assert documents.pop().tolist() == []
    texts = "".join(tokenizer.decode(each[:-1].tolist()) + "\0" for each in documents)
    assert texts.encode() == expected_text(source)


@pytest.mark.usefixtures("here")
def test_a_folder_is_described(source: Path, tmp_path: Path) -> None:
    (source / "bad.txt").write_bytes(b"bad \xff")
    (source / "binary").write_bytes(b"\0")
    summary = run(source, out=tmp_path / "out")
    assert summary.notes() == "; skipped: 1 binary; replaced by U+FFFD: 1 characters that were not UTF-8"
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_bytes())
    assert (manifest["tokenizer"], manifest["vocab_size"], manifest["separator"]) == ("bytes", 256, 0)
    assert manifest["count"] == sum(each["count"] for each in manifest["shards"]) == summary.tokens
    assert manifest["counts"] == {"binary": 1, "characters that were not UTF-8": 1}
    assert prepare(str(tmp_path / "out")) == tmp_path / "out"


@pytest.mark.usefixtures("here")
def test_odd_names(tmp_path: Path) -> None:
    source = tmp_path / os.fsdecode(b"line\nbreak \xff")
    source.mkdir()
    (source / os.fsdecode(b"\xfe.txt")).write_text("text")
    assert run(source, out=source / "out").documents == 1
    assert text_of(source / "out") == b"text\0"
    assert open_tokens(source / "out").source.isprintable()


@pytest.mark.usefixtures("here")
def test_an_out_inside_the_source_is_not_read(source: Path, tmp_path: Path) -> None:
    run(source, out=source / "out")
    before = contents(source / "out")
    assert run(source, out=source / "out").kept == 1
    assert contents(source / "out") == before


# --- starting again ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("here")
def test_what_is_finished_is_kept(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(source, out=out, part_bytes=10_000).kept == 0
    whole = contents(out)
    assert run(source, out=out, part_bytes=10_000).kept == 9  # finished: nothing is done
    (out / MANIFEST).unlink()
    (out / "shard-00003.tokens").unlink()
    os.truncate(out / "shard-00005.tokens", 5000)
    (out / ".shard-00003.tokens.0123.tmp").write_bytes(b"half")
    (out / "shard-00099.tokens").write_bytes(b"of a longer source")
    assert run(source, out=out, part_bytes=10_000).kept == 7
    assert contents(out) == whole
    (out / "shard-00003.tokens").unlink()  # of a finished folder
    assert run(source, out=out, part_bytes=10_000).kept == 8
    assert contents(out) == whole


@pytest.mark.usefixtures("here")
def test_parts_of_another_source_or_tokenizer_are_made_afresh(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(source, out=out, part_bytes=10_000)
    (out / MANIFEST).unlink()
    (source / "05.txt").write_text("This is TEXT 5.\n" * 50)
    assert run(source, out=out, part_bytes=10_000).kept == 8
    assert text_of(out) == expected_text(source)
    (out / MANIFEST).unlink()
    file = make_tokenizer_json(tmp_path / "tokenizer.json")
    assert run(source, out=out, part_bytes=10_000, tokenizer=str(file)).kept == 0
    (out / MANIFEST).unlink()
    assert run(source, out=out, part_bytes=10_000).kept == 0
    (source / "05.txt").write_text("changed")
    assert "another source" in failure(lambda: run(source, out=out, part_bytes=10_000))


def test_killed_and_started_again(source: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle: nobody is left behind, and the next attempt goes on with what was finished."""
    run(source, out=tmp_path / "unbroken", part_bytes=1000)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "bireme", "data", "prepare", str(source), "--out", str(out)]
    command += ["--shard-megabytes", "0.001", "--workers", "2"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while len(list(out.glob("shard-*"))) < 3:
            assert process.poll() is None
            time.sleep(0.005)
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    psutil.wait_procs(children, timeout=20)
    assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in children)
    assert not (out / MANIFEST).exists()
    finished = {each.name: each.stat().st_ino for each in out.glob("shard-*")}
    assert len(finished) >= 3
    summary = run(source, out=out, part_bytes=1000)
    assert summary.kept == len(finished)
    assert {name: (out / name).stat().st_ino for name in finished} == finished
    assert contents(out) == contents(tmp_path / "unbroken")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_is_clean(source: Path, tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "bireme", "data", "prepare", str(source), "--out", str(out)]
    command += ["--shard-megabytes", "0.001", "--workers", "2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(command, **pipes) as process:  # type: ignore[call-overload]
        while not list(out.glob("shard-*")):
            assert process.poll() is None
            time.sleep(0.005)
        children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, number)  # as a terminal does
        shown, errors = process.communicate(timeout=20)
    psutil.wait_procs(children, timeout=20)
    assert (process.returncode, errors) == (128 + number if number == signal.SIGTERM else 130, "")
    assert "goes on from there" in shown
    assert not list(out.glob("*.tmp")) and not list(out.glob(".*.tmp"))
    assert "is not finished" in failure(lambda: open_tokens(out))


# --- what is refused ---------------------------------------------------------------------------------------------


def test_two_at_once(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with (out / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another preparation" in failure(lambda: run(source, out=out))
    assert [each.name for each in out.iterdir()] == [LOCK]


def test_an_out_that_holds_something_else(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    assert "'notes.txt'" in failure(lambda: run(source, out=out))
    (out / LOCK).touch()
    assert "'notes.txt'" in failure(lambda: run(source, out=out))
    (out / LOCK).unlink()
    (out / "notes.txt").rename(out / "tokenizer.json")  # not ours without the lock
    assert "'tokenizer.json'" in failure(lambda: run(source, out=out))
    assert "is not a folder" in failure(lambda: run(source, out=out / "tokenizer.json"))
    assert "cannot write to --out" in failure(lambda: run(source, out=out / "tokenizer.json" / "below"))
    assert [each.read_text() for each in out.iterdir()] == ["mine"]
    (out / LOCK).touch()
    (out / "tokenizer.json").rename(out / "mine.tokens")
    assert "'mine.tokens'" in failure(lambda: run(source, out=out))


@pytest.mark.usefixtures("here")
def test_a_copy_without_hidden_files_is_good(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(source, out=out)
    (out / LOCK).unlink()
    assert run(source, out=out).kept == 1


def test_a_disk_that_is_too_small_is_said_before_writing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = 2 * len(expected_text(source))
    asked: list[Path] = []

    def disk_usage(path: Path) -> Any:
        asked.append(path)
        return type("Usage", (), {"free": free})

    monkeypatch.setattr(preparation.shutil, "disk_usage", disk_usage)
    free = needed * 3 // 4
    message = failure(lambda: run(source, out=tmp_path / "new" / "out"))
    assert "free" in message and asked == [tmp_path]
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("here")
def test_a_disk_that_fills_up(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))
        message = failure(lambda: run(source, out=out))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert "cannot write to --out" in message and "File too large" in message
    assert not out.exists()


@pytest.mark.usefixtures("here")
def test_no_text_at_all(tmp_path: Path) -> None:
    out, source = tmp_path / "out", tmp_path / "source"
    source.mkdir()
    assert "no text" in failure(lambda: run(source, out=out))
    (source / "a.jsonl").write_text('{"body": "x", "id": 1}\n' * 3)
    message = failure(lambda: run(source, out=out))
    assert "3 lines without the text field 'text'" in message and "--text-field among 'body', 'id'" in message
    assert "nowhere" in failure(lambda: run(source / "nowhere", out=out))
    assert not out.exists()
    assert run(source, out=out, text_field="body").documents == 3


@pytest.mark.usefixtures("here")
def test_a_source_that_changes_meanwhile(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    finish = preparation._finish

    def change_then_finish(*arguments: Any) -> None:
        (source / "00.txt").write_text("another text")
        finish(*arguments)

    monkeypatch.setattr(preparation, "_finish", change_then_finish)
    assert "00.txt" in failure(lambda: run(source, out=out))
    assert not (out / MANIFEST).exists()
    monkeypatch.setattr(preparation, "_finish", finish)
    run(source, out=out)
    assert text_of(out) == expected_text(source)


def test_a_tokenizer_that_changes_meanwhile(source: Path, tmp_path: Path) -> None:
    file = make_tiktoken(tmp_path / "gpt2.tiktoken")
    recipe = preparation.Recipe(tmp_path, str(file), None, "tiktoken:gpt2:0000", "text", "source")
    assert "was changed" in failure(lambda: preparation._ShardMaker(recipe))
