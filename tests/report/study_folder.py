"""A study's folder as `bireme study` leaves it, of made-up runs."""

import importlib.util
from pathlib import Path
from typing import Any

from bireme.run_reader import Run, read_run
from bireme.study.grid import Cell, Options, study_of
from bireme.study.results import study_results
from bireme.study.store import Folder


def _write_run(cell: Cell, directory: Path) -> dict[str, Any]:
    path = Path(__file__).parents[1] / "study" / "conftest.py"
    spec = importlib.util.spec_from_file_location("made_study_runs", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    conditions: dict[str, Any] = module.write_run(cell, directory)
    return conditions


def make_study(name: str, directory: Path, failed: int = -1, **options: Any) -> dict[str, Any]:
    """Writes it (the cell with the index `failed` has failed); returns its results."""
    study = study_of(name, Options(**{"steps": 8, **options}), 2)
    finished: dict[Cell, tuple[dict[str, Any], Run]] = {}
    with Folder(directory, study) as folder:
        for index, cell in enumerate(study.cells):
            if index != failed:
                conditions = _write_run(cell, folder.run_directory(cell))
                finished[cell] = conditions, read_run(folder.run_directory(cell))
        failures = {cell: "it <failed>" for index, cell in enumerate(study.cells) if index == failed}
        return folder.write(study_results(study, finished, failures, "failed" if failures else "finished"))
