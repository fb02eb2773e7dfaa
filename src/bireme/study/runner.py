"""Runs one cell of a study: the trainer under torchrun, on every node of an emulated cluster."""

import contextlib
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bireme.environment import UNSHAPED
from bireme.errors import UserError
from bireme.nodes import EmulatedCluster, NodeProcess, how_it_ended, torchrun_command, wait_for_all, why_unshaped
from bireme.report.summary import measured_steps
from bireme.run_reader import STEPS_FILE, read_run
from bireme.study.grid import UNLIMITED, WARM_UP_STEPS, Cell, parse_model

_OTHERS_MAY_GO_ON_S = 15.0  # when one node has failed
_STOP_WITHIN_S = 15.0  # after Ctrl-C; the trainer itself needs at most 9
_SHORT_STEPS = 20  # in twice the trainer's ten steps between readings of the interfaces a whole window lies


__all__ = ["CellFailed", "run_cell", "why_unshaped"]


class CellFailed(Exception):
    """The cell did not finish; one line says why."""


def trainer_arguments(cell: Cell, run_directory: Path) -> list[str]:
    """What torchrun is to start on every node."""
    arguments = [
        *("-m", "bireme", "train", "--run-dir", str(run_directory)),
        *("--layout", cell.layout, "--preset", cell.preset, f"--{'' if cell.reduction == 'overlap' else 'no-'}overlap"),
        *("--global-batch-size", str(cell.batch_per_rank * cell.ranks)),
        *("--steps", str(WARM_UP_STEPS + cell.steps), "--skip-steps", str(WARM_UP_STEPS)),
        *("--threads", "1", "--device", "cpu", "--evaluate-every", "0", "--peak-seconds", "0"),
    ]
    if cell.sequence_length is not None:
        arguments += ["--sequence-length", str(cell.sequence_length)]
    if cell.steps < _SHORT_STEPS:  # the first reading is after one step; then one where the warm-up ends
        arguments += ["--exchange-every", str(WARM_UP_STEPS - 1)]
    for name, size in parse_model(cell.model).items():
        arguments += [f"--model.{name.replace('_', '-')}", str(size)]
    return arguments


def trainer_environment(cell: Cell) -> dict[str, str]:
    """The trainer's variables; an empty one hides what the user's shell may have set."""
    return {
        "STRAGGLER_MS": ",".join(map(repr, cell.straggler_delays_ms)),
        "STRAGGLER_RANK": "" if cell.straggler_rank is None else str(cell.straggler_rank),
        "STRAGGLER_PHASE": cell.straggler_phase or "",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }


def run_cell(cell: Cell, run_directory: Path, log: Path, show: Callable[[str], None]) -> dict[str, Any]:
    """Runs a cell to its end; returns the conditions it ran under. `show` is told, again and again, how far it is.

    CellFailed with the reason; `log` has what the processes printed. At KeyboardInterrupt the ranks are asked to stop,
    and have stopped when it leaves.
    """
    started = time.monotonic()
    link = UNLIMITED if cell.link == UNSHAPED else cell.link
    run_directory = run_directory.absolute()
    steps = WARM_UP_STEPS + cell.steps

    def progress() -> Sequence[int]:
        done = _lines(run_directory / STEPS_FILE)
        show(f"step {done}/{steps}" if done else f"starting ({time.monotonic() - started:.0f} s)")
        return ()

    with EmulatedCluster(cell.nodes, link, cell.cores_per_node) as cluster, log.open("ab") as output:
        if cluster.shaped == (cell.link == UNSHAPED):
            raise CellFailed(cluster.reason or "links can be limited now, and could not before: run the study again")
        processes = []
        try:
            for node in cluster.nodes:
                command = torchrun_command(node, cell.ranks_per_node, trainer_arguments(cell, run_directory))
                processes.append(node.start(command, trainer_environment(cell), stdout=output, stderr=output))
            first = wait_for_all(processes, progress, grace_s=_OTHERS_MAY_GO_ON_S)
        except KeyboardInterrupt:
            _stop(processes)
            raise
        cores = [node.cores for node in cluster.nodes]
    if first is not None:
        raise CellFailed(_reason(log, how_it_ended(first)))
    try:
        status = read_run(run_directory).facts["status"]
        if status != "finished":
            raise UserError(f"the run is {status}")
        measured_steps(read_run(run_directory))
    except UserError as error:
        raise CellFailed(f"it left no usable run: {error}") from None
    return {
        "link": cell.link,
        "shaped": cell.link != UNSHAPED,
        "cores": cores,
        "seconds": round(time.monotonic() - started, 1),
    }


def _stop(processes: Sequence[NodeProcess]) -> None:
    """Ctrl-C for every node; what does not end by it is ended with the cluster."""
    for process in processes:
        process.signal(signal.SIGINT)
    deadline = time.monotonic() + _STOP_WITHIN_S
    for process in processes:
        with contextlib.suppress(TimeoutError):
            process.wait(max(0.0, deadline - time.monotonic()))


def _lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except OSError:
        return 0


def _reason(log: Path, failure: str) -> str:
    """The trainer's own line about what is wrong where it printed one, else the last error of a traceback."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 100_000))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    except OSError:
        lines = []
    said = [line for line in lines if line.startswith("bireme: ")]
    said.sort(key=lambda line: " stopped: " in line)  # what another rank's end has done comes after the cause
    raised = [line for line in lines if re.match(r"(\[\w+\]: ?)?[\w.]*(Error|Exception)\b.*: ", line)]
    for found in (said[:1], raised[:1]):
        if found:
            return f"{failure}: {found[0].removeprefix('bireme: ')[:300]}"
    return failure
