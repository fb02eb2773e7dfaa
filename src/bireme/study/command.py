"""`bireme study NAME`: runs the cells that are not finished, and shows what all of them come to."""

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from bireme.cores import usable_cores
from bireme.errors import UserError
from bireme.nodes import NodeGone, share_cores
from bireme.report.summary import summarise
from bireme.run_reader import Run
from bireme.study import runner
from bireme.study.grid import Cell, Options, Study, fitting_model, parse_model, study_of
from bireme.study.results import study_results
from bireme.study.store import PICTURE_FILE, Folder
from bireme.study.tables import show

_Finished = dict[Cell, tuple[dict[str, Any], Run]]


def study_command(name: str, options: Options, out: Path | None = None, json: bool = False) -> int:
    """Returns the exit code: 1 when a cell failed, 130 after Ctrl-C."""
    cores = usable_cores()
    study = study_of(name, options, len(cores))
    _, warning = share_cores(cores, study.base.nodes, study.base.cores_per_node)
    messages = Console(stderr=True, highlight=False, soft_wrap=True)
    study = _check_model(study)
    for each in study.left_out:
        _say(messages, str(each))
    directory = out or Path("runs") / f"study-{name}"
    with Folder(directory, study) as folder:
        if not all(folder.finished(cell) for cell in study.cells):
            if warning:
                _say(messages, f"warning: {warning}")
            study = _as_this_machine_can(study, messages)
        finished, failed, stopped = _run_cells(study, folder, messages)
        status = "interrupted" if stopped else "failed" if failed else "finished"
        results = folder.write(study_results(study, finished, failed, status))
        if stopped:
            command = shlex.join(["bireme", *sys.argv[1:]])
            _say(messages, f"stopped: {len(finished)} of {len(study.cells)} cells are finished; to go on: {command}")
            return 130
        picture = directory / PICTURE_FILE
        if finished:
            from bireme.report.study_plot import plot_study

            try:
                plot_study(results, picture)
            except OSError as error:
                raise UserError(f"cannot write {picture}: {error.strerror or error}") from None
        if json:
            import orjson

            sys.stdout.write(orjson.dumps(results, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE).decode())
        else:
            console = Console(highlight=False)
            show(results, console)
            if finished:
                console.print(Text(f"picture: {picture}   numbers: {directory / 'study.json'}"), soft_wrap=True)
    return 1 if failed else 0


def _say(messages: Console, text: str) -> None:
    messages.print(Text(f"bireme study: {text}"))


def _check_model(study: Study) -> Study:
    """What every cell would refuse is refused before the first starts; layouts that the model does not divide over are
    left out."""
    base = study.base
    if study.name != "layouts" and base.preset == "toy" and not base.model and base.sequence_length is None:
        return study  # PyTorch takes seconds to load
    from bireme.model import preset

    model = preset(base.preset, **parse_model(base.model))
    context = model.sequence_length
    if base.sequence_length is not None and base.sequence_length > context:
        raise UserError(
            f"--sequence-length {base.sequence_length} is longer than the context of {base.preset}, {context} tokens"
        )
    return fitting_model(study, model, base.sequence_length or context) if study.name == "layouts" else study


def _as_this_machine_can(study: Study, messages: Console) -> Study:
    """The study, or where links cannot be limited what is left of it; that is said once."""
    reason = runner.why_unshaped()
    if reason is None:
        return study
    varied = study.name in ("links", "layouts")
    left = ", so no link rates are compared: what runs is unlimited" if varied else ""
    _say(messages, f"{reason}: nodes are plain processes on loopback{left}; every row is unshaped")
    return study.unshaped()


def _run_cells(study: Study, folder: Folder, messages: Console) -> tuple[_Finished, dict[Cell, str], bool]:
    """(finished cells, failed cells with the reason, whether Ctrl-C ended it)."""
    finished: _Finished = {}
    failed: dict[Cell, str] = {}
    with _Display(len(study.cells), messages) as display:
        try:
            for number, cell in enumerate(study.cells, 1):
                display.begin(number, cell)
                found = folder.finished(cell)
                if found is not None:
                    finished[cell] = found
                    display.end("finished before")
                    continue
                folder.prepare(cell)
                display.running("starting")
                try:
                    conditions = runner.run_cell(cell, folder.run_directory(cell), folder.log(cell), display.running)
                    folder.finish(cell, conditions)
                    found = folder.finished(cell)
                    if found is None:
                        raise runner.CellFailed(f"its run {folder.run_directory(cell)} cannot be read")
                except (runner.CellFailed, UserError, NodeGone) as error:
                    failed[cell] = str(error)
                    display.end(f"FAILED: {error}; its output: {folder.log(cell)}")
                else:
                    finished[cell] = found
                    median_ms = summarise(found[1])["step_ms"]["median"]
                    display.end(f"step {median_ms:.0f} ms (median), took {conditions['seconds']:.0f} s")
        except KeyboardInterrupt:
            # What is finished stays so, also what this process has not looked at yet.
            for cell in study.cells:
                found = finished.get(cell) or folder.finished(cell)
                if found is not None:
                    finished[cell] = found
            return finished, failed, True
    return finished, failed, False


class _Display:
    """What is running: on a terminal a progress bar, elsewhere a line when a cell starts and one when it ends."""

    def __init__(self, cells: int, console: Console):
        self._cells = cells
        self._console = console
        self._cell = ""
        self._started = False
        self._progress: Progress | None = None
        self._update: Callable[..., None] = lambda **_: None
        if console.is_terminal:
            columns: tuple[ProgressColumn, ...] = (
                TextColumn("cell"),
                MofNCompleteColumn(),
                BarColumn(20),
                TimeElapsedColumn(),
            )
            columns += (TextColumn("{task.fields[state]}", markup=False),)
            # Drawn seldom: what draws takes a core from what is measured.
            self._progress = Progress(*columns, console=console, transient=True, refresh_per_second=2)
            task = self._progress.add_task("", total=cells, state="")
            progress = self._progress
            self._update = lambda **fields: progress.update(task, **fields)

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def begin(self, number: int, cell: Cell) -> None:
        self._number = number
        self._cell = f"[{number}/{self._cells}] {cell}"
        self._started = False

    def running(self, state: str) -> None:
        """How far the cell is."""
        self._update(state=f"{self._cell.partition('] ')[2]}: {state}")
        if self._progress is None and not self._started:
            self._console.print(Text(f"{self._cell}: {state}"))
        self._started = True

    def end(self, result: str) -> None:
        self._console.print(Text(f"{self._cell}: {result}"))
        self._update(completed=self._number)
