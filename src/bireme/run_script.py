"""`bireme run SCRIPT`: runs a training script as it is, and accounts for its steps: those of its optimizer."""

import logging
import os
import runpy
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from bireme.after_import import after_import
from bireme.errors import SharedError, UserError
from bireme.record import default_run
from bireme.run_reader import RUN_FILE
from bireme.text import one_line

if TYPE_CHECKING:
    from bireme.observe.monitor import Monitor

log = logging.getLogger(__name__)

_ROLL_S = 60.0  # for the other ranks' optimizers to step for the first time; then the script goes on unobserved
_ANOTHER_LEADS_AFTER = 3


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the command line says beside the script."""

    directory: Path
    tokens_per_step: int = 0  # this rank's
    flops_per_token: float | None = None
    skip_steps: int = 3
    stall_after_s: float = 30.0
    metrics_port: int | None = None
    trace_steps: str = ""


def run_command(words: list[str], module: bool, options: RunOptions) -> int:
    """Runs the script with its arguments; returns its exit code. UserError for one that does not exist."""
    if not words:
        raise UserError("bireme run: give a script, as in bireme run train.py --its --arguments")
    if not module:
        _check_script(words[0])
    if os.environ.get("RANK", "0") == "0" and (options.directory / RUN_FILE).exists() and not _is_restart():
        raise UserError(f"run {options.directory} exists: choose another --run-dir")
    steps = ScriptSteps(options)
    after_import("torch", steps.follow)
    return _run(words, module, steps)


def _is_restart() -> bool:
    """By the launcher: the Monitor sees whether the run is one of this job, and goes on with it."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def _check_script(name: str) -> None:
    script = Path(name)
    if script.is_dir() and (script / "__main__.py").exists():
        return
    if not script.is_file():
        what = "is a directory without a __main__.py" if script.is_dir() else "does not exist"
        raise UserError(f"script {name} {what}: bireme run SCRIPT [ARGUMENTS], or bireme run -m MODULE [ARGUMENTS]")


class LeadingOptimizer:
    """Which optimizer's steps are the steps: the first that steps, or, when that one does not any more, the one that
    has stepped three times meanwhile."""

    def __init__(self) -> None:
        self._leader: int | None = None
        self._others: dict[int, int] = {}

    def leads(self, optimizer: Any) -> bool:
        this = id(optimizer)
        if self._leader is None:
            self._leader = this
        if this != self._leader:
            self._others[this] = self._others.get(this, 0) + 1
            if self._others[this] < _ANOTHER_LEADS_AFTER:
                return False
            self._leader = this
        self._others.clear()
        return True


@dataclass(slots=True)
class ScriptSteps:
    """Makes the Monitor when the first optimizer has stepped: all groups are there by then, and every rank is at the
    same place. From then on the leading optimizer's steps end the record's steps."""

    options: RunOptions
    monitor: "Monitor | None" = None
    problem: str | None = None
    _begun: bool = False
    _followed: bool = False
    _lead: LeadingOptimizer = field(default_factory=LeadingOptimizer)

    def follow(self, _torch: Any) -> None:
        """PyTorch is imported."""
        from bireme.observe.automatic import when_stepped_unfollowed

        when_stepped_unfollowed(self._first_step)
        self._followed = True

    @staticmethod
    def _speaks() -> bool:
        """What concerns all ranks is said by one."""
        return os.environ.get("RANK", "0") == "0"

    def _first_step(self, optimizer: Any) -> None:
        if self._begun:
            return
        self._begun = True
        try:
            self._begin(optimizer)
        except Exception as error:  # never into the script
            self.problem = str(error) if isinstance(error, UserError) else one_line(error)
            if self._speaks() or not isinstance(error, SharedError):
                log.warning("this run is not observed: %s", self.problem)

    def _begin(self, optimizer: Any) -> None:
        from bireme.observe.monitor import Monitor
        from bireme.observe.own_facts import device_of

        options = self.options
        monitor = Monitor(
            options.directory,
            device=device_of([], [optimizer]).type,
            flops_per_token=options.flops_per_token,
            skip_steps=options.skip_steps,
            stall_after_s=options.stall_after_s,
            metrics_port=options.metrics_port,
            trace_steps=options.trace_steps,
            meet_within_s=_ROLL_S,
        )
        self.monitor = monitor
        self._lead.leads(optimizer)
        monitor.on_optimizer_step(self._stepped)
        with monitor.phase("other"):  # the first step begins
            pass

    def _stepped(self, optimizer: Any) -> None:
        if self.monitor is not None and self._lead.leads(optimizer):
            self.monitor.end_step(self.options.tokens_per_step)

    def end(self, error: BaseException | None) -> None:
        """The script has ended, with that error; says where the record is."""
        if self._followed:
            from bireme.observe.automatic import when_stepped_unfollowed

            when_stepped_unfollowed(None)
        if self.monitor is None:
            # Nor where the script has a Monitor of its own.
            nobody = self.problem is None and error is None and "bireme.observe.monitor" not in sys.modules
            if nobody and self._speaks():
                print(
                    "bireme: no optimizer of PyTorch stepped in this process, so there is no step to account for "
                    "(ranks that the script starts itself are not seen: start them with torchrun)",
                    file=sys.stderr,
                )
            return
        self.monitor.__exit__(type(error) if error is not None else None, error, None)
        if self._speaks():
            directory = self.options.directory
            print(f"run directory: {directory}  (bireme report {directory})", file=sys.stderr)


def _run(words: list[str], module: bool, steps: ScriptSteps) -> int:
    script = words[0]
    code = 0
    failure: BaseException | None = None
    sys.argv = list(words)
    try:
        if module:
            _first_on_path(Path.cwd())
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            # A script finds what lies beside it; a folder or an archive is put there by runpy.
            if Path(script).is_file():
                _first_on_path(Path(script).resolve().parent)
            runpy.run_path(str(Path(script).absolute()), run_name="__main__")  # as `__file__` is under Python itself
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        failure = error if code else None
    except KeyboardInterrupt as error:
        code, failure = 130, error
    except BaseException as error:
        # As Python itself shows it: without the frames of what ran the script.
        error.__traceback__ = _own_frames(error.__traceback__, script)
        sys.excepthook(type(error), error, error.__traceback__)
        code, failure = 1, error
    steps.end(failure)
    return code


def _first_on_path(folder: Path) -> None:
    """Where Python itself puts it."""
    if not sys.flags.safe_path:
        sys.path[0] = str(folder)


def _own_frames(trace: TracebackType | None, script: str) -> TracebackType | None:
    """From the script's first frame on."""
    each = trace
    while each is not None:
        name = each.tb_frame.f_code.co_filename
        is_main = each.tb_frame.f_globals.get("__name__") == "__main__"
        if name == str(Path(script).absolute()) or (is_main and "runpy" not in name and "bireme" not in name):
            return each
        each = each.tb_next
    return trace


def default_options(directory: Path | None, **rest: Any) -> RunOptions:
    return RunOptions(directory=directory or Path(default_run()), **rest)
