"""The folder of a study: which study it is, and which of its cells are finished.

STUDY/study.json         what the study is, and its results (what `bireme study NAME --json` prints)
STUDY/cells/KEY/         the run directory of a cell
STUDY/cells/KEY.json     written last: the cell is finished, and under which conditions it ran
STUDY/cells/KEY.log      what its processes printed
STUDY/study.png          the picture
"""

import fcntl
import shutil
from dataclasses import MISSING, fields
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import orjson

from bireme.errors import UserError
from bireme.record import write_json_atomic
from bireme.report.summary import measured_steps
from bireme.run_reader import Run, read_run
from bireme.study.grid import Cell, Study

FORMAT = "bireme-study"
VERSION = 1
CELL_FORMAT = "bireme-cell"

STUDY_FILE = "study.json"
PICTURE_FILE = "study.png"
_LOCK_FILE = ".lock"


class Folder:
    """A study's folder, held by this process while the `with` block runs.

    UserError when it holds something else, another study, or is in use.
    """

    def __init__(self, directory: Path, study: Study):
        self.directory = directory
        self.study = study
        self._lock: IO[bytes] | None = None

    def __enter__(self) -> Self:
        directory = self.directory
        try:
            begun = directory.exists() and self._check()
            (directory / "cells").mkdir(parents=True, exist_ok=True)
            self._lock = (directory / _LOCK_FILE).open("ab")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not begun:
                self.write({"status": "running", "cells": []})
        except BlockingIOError:
            self._close()
            raise UserError(
                f"another process runs the study in {directory}: wait for it, or choose --out DIR"
            ) from None
        except OSError as error:
            self._close()
            raise UserError(f"cannot use {directory} for a study: {error.strerror or error}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _check(self) -> bool:
        """Whether the study was begun here. UserError when the directory is anything else, or not empty."""
        directory, other = self.directory, "choose another --out DIR"
        path = directory / STUDY_FILE
        if not directory.is_dir():
            raise UserError(f"{directory} is not a directory: {other}")
        if not path.exists():
            begun_and_killed = (_LOCK_FILE, "cells", f".{STUDY_FILE}.")
            if any(not each.name.startswith(begun_and_killed) for each in directory.iterdir()):
                raise UserError(f"{directory} is not empty and holds no study: {other}")
            return False
        try:
            found = orjson.loads(path.read_bytes())
        except orjson.JSONDecodeError as error:
            raise UserError(f"{path} is damaged ({error}): {other}") from None
        if not isinstance(found, dict) or found.get("format") != FORMAT or not isinstance(found.get("settings"), dict):
            raise UserError(f"{path} is not a study of bireme: {other}")
        if found.get("version") != VERSION:
            raise UserError(f"{path} has version {found.get('version')}, this bireme knows {VERSION}: {other}")
        if found.get("name") != self.study.name:
            raise UserError(f"{directory} holds the study of {found.get('name')}, not of {self.study.name}: {other}")
        difference = changed_setting(found["settings"], self.study)
        if difference is not None:
            name, theirs, ours = difference
            raise UserError(f"{directory} holds a study with {name} {theirs}, not {ours}: give that again, or {other}")
        return True

    def write(self, results: dict[str, Any]) -> dict[str, Any]:
        """Writes study.json; returns all of it."""
        whole = {
            "format": FORMAT,
            "version": VERSION,
            "name": self.study.name,
            "settings": self.study.settings(),
            **results,
        }
        write_json_atomic(self.directory / STUDY_FILE, whole)
        return whole

    # --- cells ---

    def run_directory(self, cell: Cell) -> Path:
        return self.directory / "cells" / cell.key

    def log(self, cell: Cell) -> Path:
        return self.directory / "cells" / f"{cell.key}.log"

    def _marker(self, cell: Cell) -> Path:
        return self.directory / "cells" / f"{cell.key}.json"

    def prepare(self, cell: Cell) -> None:
        """Makes way for a cell that is to run: what a killed study left of it goes."""
        self._marker(cell).unlink(missing_ok=True)
        self.log(cell).unlink(missing_ok=True)
        if self.run_directory(cell).exists():
            shutil.rmtree(self.run_directory(cell))

    def finish(self, cell: Cell, conditions: dict[str, Any]) -> None:
        """From here on the cell is not run again."""
        value = {"format": CELL_FORMAT, "version": VERSION, "cell": cell.as_dict(), "conditions": conditions}
        write_json_atomic(self._marker(cell), value)

    def finished(self, cell: Cell) -> tuple[dict[str, Any], Run] | None:
        """(conditions, run) of a finished cell; None when it has yet to run, or when its files are damaged."""
        try:
            value = orjson.loads(self._marker(cell).read_bytes())
            if value["format"] != CELL_FORMAT or not _same_cell(value["cell"], cell):
                return None
            run = read_run(self.run_directory(cell))
            measured_steps(run)
            return dict(value["conditions"]), run
        except (OSError, ValueError, KeyError, TypeError, UserError):
            return None


def changed_setting(found: dict[str, Any], study: Study) -> tuple[str, str, str] | None:
    """(name, value in the folder, value asked for) of the first setting that differs."""
    for name, ours in study.settings().items():
        theirs = found.get(name, _DEFAULTS[name])
        if theirs != ours:
            return name, _text(theirs), _text(ours)
    return None


def _same_cell(found: dict[str, Any], cell: Cell) -> bool:
    return {name: found.get(name, default) for name, default in _DEFAULTS.items()} == cell.as_dict()


# What a file does not know is an axis that came later: it had its default there.
_DEFAULTS: dict[str, Any] = {each.name: [] if each.default == () else each.default for each in fields(Cell)}


def _text(value: Any) -> str:
    return "none" if value is None else "unknown" if value is MISSING else str(value)[:60]
