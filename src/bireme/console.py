"""What the user sees while ranks run: one log file a rank, one console, every warning once."""

import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from bireme.text import duration, name_ranks


class RankLog(logging.Handler):
    """The logging of one rank's process, from start to end of a run.

    Rank 0 shows information on the console; warnings of every rank travel to rank 0 (`take_warnings`), which shows
    each once with the ranks it came from. Everything goes to the rank's log file once the run directory exists; what
    was logged before is written first. Ranks other than 0 send standard error there too, where C++ writes.
    """

    def __init__(self, rank: int, console: Console):
        super().__init__(logging.INFO)
        self._rank = rank
        self._console = console
        self._early: list[logging.LogRecord] | None = []
        self._warnings: list[str] = []
        self._said: set[str] = set()
        self._lock_warnings = threading.Lock()
        self._file: logging.StreamHandler[TextIO] | None = None
        self._stderr = -1
        logging.captureWarnings(True)
        self._loggers = [logging.getLogger("bireme"), logging.getLogger("py.warnings")]
        self._before = [(logger.level, logger.propagate) for logger in self._loggers]
        for logger in self._loggers:
            logger.addHandler(self)
            logger.setLevel(logging.INFO)
            logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        if self._file is not None:
            self._file.handle(record)
        elif self._early is not None:
            self._early.append(record)
        if record.levelno >= logging.WARNING:
            message = " ".join(record.getMessage().split())
            with self._lock_warnings:
                if message not in self._said:
                    self._said.add(message)
                    self._warnings.append(message)
        elif self._rank == 0:
            with suppress(OSError):  # nobody reads the console: no reason not to train
                self._console.print(Text(record.getMessage()))

    def take_warnings(self) -> list[str]:
        """Warnings of this rank that rank 0 has not been told."""
        with self._lock_warnings:
            warnings, self._warnings = self._warnings, []
        return warnings

    def show_warning(self, message: str, ranks: list[int], world_size: int) -> None:
        where = "" if world_size == 1 else f" ({name_ranks(ranks)})"
        with suppress(OSError):
            self._console.print(Text(f"warning{where}: {message}", style="yellow"))

    def show_verdict(self, event: dict[str, Any]) -> None:
        """One line when a verdict starts, changes or ends (docs/verdicts.md)."""
        with suppress(OSError):
            style = "green" if event["change"] == "ended" else "bold yellow"
            self._console.print(Text(f"verdict after step {event['step']}: {event['message']}", style=style))

    def open(self, run_directory: Path) -> None:
        """Begins the rank's log file. A node without a shared file system gets a directory of its own."""
        path = run_directory / "logs" / f"rank-{self._rank}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("a", encoding="utf-8")
        self._file = logging.StreamHandler(stream)
        self._file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        for record in self._early or []:
            self._file.handle(record)
        self._early = None
        if self._rank != 0:
            sys.stderr.flush()
            self._stderr = os.dup(2)
            os.dup2(stream.fileno(), 2)

    def close(self) -> None:
        """Gives standard error back; warnings that never reached rank 0's console are shown there."""
        for logger, (level, propagate) in zip(self._loggers, self._before, strict=True):
            logger.removeHandler(self)
            logger.setLevel(level)
            logger.propagate = propagate
        logging.captureWarnings(False)
        if self._stderr >= 0:
            sys.stderr.flush()
            os.dup2(self._stderr, 2)
            os.close(self._stderr)
            self._stderr = -1
        if self._file is not None:
            self._file.stream.close()
            self._file = None
        if self._rank == 0:
            for message in self.take_warnings():
                self.show_warning(message, [0], 1)
        super().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class StepPrinter:
    """One line a step on rank 0, and on a terminal a progress bar below the lines."""

    def __init__(
        self,
        console: Console,
        steps: int,
        mfu_of: Callable[[float], float | None],
        communication_known: bool = True,
    ):
        self._communication_known = communication_known
        self._console = console
        self._steps = steps
        self._mfu_of = mfu_of
        self._recent_s: list[float] = []
        self._progress: Progress | None = None
        if console.is_terminal:
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[state]}"))
            self._progress = Progress(*columns, console=console, transient=True)
            self._task = self._progress.add_task("", total=steps, state="")
            self._progress.start()

    def show(self, line: dict[str, Any]) -> None:
        """Prints one step record (docs/run-directory.md)."""
        walls_ns = [end - start for start, end in zip(line["start_ns"], line["end_ns"], strict=True)]
        exposed = [sum(cells[2::5]) + sum(cells[3::5]) for cells in line["cells_ns"]]
        step_s = max(walls_ns) * 1e-9
        self._recent_s = [*self._recent_s[-19:], step_s]
        left_s = (self._steps - line["step"]) * sorted(self._recent_s)[len(self._recent_s) // 2]
        tokens_per_s = line["tokens"] / step_s
        mfu = self._mfu_of(tokens_per_s)
        loss = line.get("loss_reason", "n/a") if line["loss"] is None else f"{line['loss']:.4f}"
        share = sum(e / w for e, w in zip(exposed, walls_ns, strict=True)) / len(walls_ns)
        parts = [
            f"step {line['step']:>{len(str(self._steps))}}/{self._steps}",
            f"loss {loss}",
            f"{step_s * 1e3:.0f} ms",
            f"{tokens_per_s:,.0f} tokens/s (global)",
            f"communication {share:.0%}" if self._communication_known else "communication n/a",
            f"MFU {mfu:.1%}" if mfu is not None else "MFU n/a",
            f"ETA {duration(left_s)}",
        ]
        if line.get("evaluation_loss") is not None:
            parts.append(f"evaluation loss {line['evaluation_loss']:.4f}")
        text = "  ".join(part for part in parts if part)
        if self._progress is None:
            # Laying out text costs more than all other work on a step's record.
            self._console.file.write(text + "\n")
            self._console.file.flush()
        else:
            self._console.print(Text(text), soft_wrap=True)
            self._progress.update(self._task, completed=line["step"], state=f"loss {loss}  ETA {duration(left_s)}")

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
