"""`bireme data prepare` and `bireme data verify`: what the user sees of them."""

import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from bireme.cores import usable_cores
from bireme.data.preparation import prepare_folder
from bireme.data.tokens import open_tokens
from bireme.errors import UserError
from bireme.shutdown import Interrupted
from bireme.text import count, printable

_LINE_EVERY_S = 5.0


def prepare_command(
    sources: list[str],
    out: Path,
    tokenizer: str,
    tokenizer_pattern: str | None,
    text_field: str,
    workers: int | None,
    shard_megabytes: float | None,
) -> None:
    if not sources:
        raise UserError("give at least one text, JSON lines or Parquet file, or a folder of them")
    if len(text_field) > 200:
        raise UserError(f"--text-field has {len(text_field)} characters; it is the name of a field")
    if workers is not None and workers < 1:
        raise UserError(f"--workers is {workers}; it must be at least 1")
    if shard_megabytes is not None and not 0.001 <= shard_megabytes <= 1e6:
        raise UserError(f"--shard-megabytes is {shard_megabytes}; it must be between 0.001 and 1000000")
    console = Console()
    previous = signal.signal(signal.SIGTERM, _stop)
    try:
        with Shown(console) as progress:
            summary = prepare_folder(
                sources,
                out,
                tokenizer=tokenizer,
                pattern=tokenizer_pattern,
                text_field=text_field,
                workers=workers or len(usable_cores()),
                part_bytes=None if shard_megabytes is None else int(shard_megabytes * 1e6),
                progress=progress,
            )
    except KeyboardInterrupt:
        _say(console, "stopped; finished shards are kept: the same command goes on from there")
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)
    kept = f", {summary.kept} of them finished before" if summary.kept else ""
    _say(
        console,
        f"{count_of(summary.documents, 'document')}, {count_of(summary.tokens, 'token')} "
        f"({summary.tokenizer}, vocab_size {summary.vocab_size}) in {count(summary.shards, 'shard')}{kept}, "
        f"{summary.seconds:.1f} s ({summary.text_bytes / 1e6 / summary.seconds:.1f} MB/s){summary.notes()}",
    )
    vocabulary = "" if summary.vocab_size == 256 else f" --model.vocab-size {summary.vocab_size}"
    _say(console, f"prepared: {out}  (bireme train --data {out}{vocabulary})")


def verify_command(path: Path) -> int:
    tokens = open_tokens(path)
    flaws = tokens.bad_shards()
    console = Console()
    for flaw in flaws:
        _say(console, flaw)
    size = f"{count_of(tokens.count, 'token')} ({tokens.tokenizer}) in {count(len(tokens.shards), 'shard')}"
    if flaws:
        _say(console, f"{len(flaws)} of {count(len(tokens.shards), 'shard')} bad: delete them and prepare again")
        return 1
    unchecked = " (without checksums: read, nothing to compare)" if tokens.shards[0].sha256 is None else ""
    _say(console, f"good: {size}, {tokens.size_bytes / 1e6:.1f} MB, from {tokens.source}{unchecked}")
    return 0


def count_of(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _say(console: Console, line: str) -> None:
    console.print(Text(printable(line)), soft_wrap=True)


def _stop(number: int, _frame: FrameType | None) -> None:
    raise Interrupted(number)


class Shown:
    """Progress: a bar on a terminal, elsewhere a line every few seconds."""

    def __init__(self, console: Console):
        self._console = console
        self._total = 0
        self._done = 0
        self._began = self._said = time.monotonic()
        self._bar: Progress | None = None

    def start(self, text_bytes: int, workers: int) -> None:
        self._total = text_bytes
        self._began = self._said = time.monotonic()
        if self._console.is_terminal:
            columns = (TextColumn("{task.fields[state]}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("", total=text_bytes, state=f"{count(workers, 'worker')}")
            self._bar.start()
        elif text_bytes:
            _say(self._console, f"preparing {text_bytes / 1e6:.1f} MB with {count(workers, 'worker')}")

    def advance(self, text_bytes: int) -> None:
        self._done += text_bytes
        now = time.monotonic()
        rate = self._done / max(now - self._began, 1e-9)
        state = f"{self._done / 1e6:,.0f} of {self._total / 1e6:,.0f} MB, {rate / 1e6:.1f} MB/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, state=state)
        elif now - self._said >= _LINE_EVERY_S:
            self._said = now
            _say(self._console, f"{state}, {max(0.0, self._total - self._done) / rate:.0f} s left")

    def __enter__(self) -> "Shown":
        return self

    def __exit__(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.stop()
