"""The run directory: writing it while the run goes on, and reading it, also while it grows (docs/run-directory.md).

What is read may come from anywhere: it is checked here, once, so that reports can rely on its types. No torch.
"""

import contextlib
import errno
import fcntl
import itertools
import math
import os
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from bireme.errors import UserError
from bireme.ledger import PHASES, STATES

FORMAT = "bireme-run"
VERSION = 1
RUN_FILE = "run.json"
STEPS_FILE = "steps.jsonl"
EVENTS_FILE = "events.jsonl"
SAMPLES_FILE = "samples.jsonl"
LOGS_DIRECTORY = "logs"
RESUMED = "resumed"  # the event that an attempt to continue the run begins with

_LOCK_WAIT_S = 5.0  # what a process that is being ended may take to let go of its run

CELLS = len(PHASES) * len(STATES)

_temporary_names = itertools.count()


def utc_now() -> str:
    """The time as ISO 8601 with milliseconds, UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _encode(value: Any, option: int = 0) -> bytes:
    option |= orjson.OPT_SERIALIZE_NUMPY
    try:
        return orjson.dumps(value, default=str, option=option)
    except orjson.JSONEncodeError:  # a command line or host name that is not UTF-8 must not end the record
        return orjson.dumps(_utf8(value), default=str, option=option)


def _utf8(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if isinstance(value, Mapping):
        return {_utf8(str(key)): _utf8(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_utf8(item) for item in value]
    return value


def write_json_atomic(path: Path, value: Any) -> None:
    """Write `value` as JSON so that a reader sees the old file or the new one, never half of one. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{next(_temporary_names)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(_encode(value, orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class RunWriter:
    """The one writer of a run directory (rank 0). Safe to use from several threads; each call is on disk at return.

    Raises UserError when the directory is not free; every method raises OSError when the disk is full or gone.
    """

    def __init__(self, directory: Path, facts: Mapping[str, Any], resume_after: int | None = None):
        """Claim `directory` (created where needed; empty, or with nothing but `logs/`) and write `run.json`.

        With `resume_after` go on with the run that is there, after that step: what it recorded of later steps is
        dropped, since they are made again; its `run.json` is kept as `run-0001.json` (0002, ...)."""
        self.directory = directory
        # Re-entrant: a signal handler may want to finish the run while the same thread is writing to it.
        self._lock = threading.RLock()
        self._torn: set[str] = set()
        self._claim = -1
        self._facts: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "status": "running",
            "status_reason": None,
            "started_utc": utc_now(),
            "ended_utc": None,
            "attempt": 1,
            "first_step": 1,
            **facts,
        }
        try:
            if resume_after is None:
                self._begin()
            else:
                self._go_on(resume_after)
            write_json_atomic(directory / RUN_FILE, self._facts)
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        directory = self.directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            taken = {entry.name for entry in directory.iterdir()} - {LOGS_DIRECTORY}
        except (FileExistsError, NotADirectoryError):
            raise UserError(f"{directory} is not a directory: choose another --run DIR") from None
        if RUN_FILE in taken:
            raise UserError(f"run {directory} exists: choose another --run DIR, or continue it with --resume")
        if taken:
            raise UserError(f"{directory} is not empty and holds no run: choose another --run DIR")
        try:  # of two runs started at once, exactly one gets the directory
            (directory / STEPS_FILE).open("xb").close()
        except FileExistsError:
            raise UserError(f"run {directory} exists: choose another --run DIR") from None
        (directory / EVENTS_FILE).touch()
        self._hold()

    def _go_on(self, after: int) -> None:
        before = read_facts(self.directory)
        self._hold()
        attempt = before.get("attempt")
        attempt = attempt if type(attempt) is int else 1
        write_json_atomic(self.directory / earlier_run_file(attempt), before)
        for name in (STEPS_FILE, SAMPLES_FILE):
            _keep_steps(self.directory / name, after)
        self._facts["attempt"] = attempt + 1
        self.event(RESUMED, attempt=attempt + 1, **(self._facts.get("resumed_from") or {}))

    def _hold(self) -> None:
        """Two processes must not write to one run; what a process holds goes with it, however it ends."""
        self._claim = os.open(self.directory / EVENTS_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        deadline = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UserError(f"run {self.directory} is written by another process: end that first") from None
                time.sleep(0.1)
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                    raise
                return  # a file system without locks

    def close(self) -> None:
        """Lets go of the directory."""
        if self._claim >= 0:
            os.close(self._claim)
            self._claim = -1

    def steps(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append one line a step."""
        self._append(STEPS_FILE, lines)

    def samples(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append the sample ids of steps."""
        if lines and not (self.directory / SAMPLES_FILE).exists():
            (self.directory / SAMPLES_FILE).touch()
        self._append(SAMPLES_FILE, lines)

    def event(self, event: str, /, **fields: Any) -> None:
        """Append one event, stamped with the time unless it has one."""
        self._append(EVENTS_FILE, [{"time_utc": fields.pop("time_utc", None) or utc_now(), "event": event, **fields}])

    def sync(self) -> None:
        """What was written so far survives also the machine."""
        for name in (STEPS_FILE, SAMPLES_FILE):
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(self.directory / name, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    def finish(self, status: str, reason: str | None = None, **more_facts: Any) -> None:
        """Renew `run.json` with how the run ended, and note it as a `status` event."""
        with self._lock:
            self._facts |= {"status": status, "status_reason": reason, "ended_utc": utc_now(), **more_facts}
            write_json_atomic(self.directory / RUN_FILE, self._facts)
            self.event("status", status=status, reason=reason)

    def _append(self, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
        data = b"".join(_encode(line) + b"\n" for line in lines)
        if not data:
            return
        with self._lock:
            if name in self._torn:  # what a full disk cut short ends here: the lines after it stay whole
                data = b"\n" + data
            # Opened anew each time: a handle kept open would write on, unseen, after the directory was removed.
            with os.fdopen(os.open(self.directory / name, os.O_WRONLY | os.O_APPEND), "ab", buffering=0) as file:
                size_bytes = os.fstat(file.fileno()).st_size
                self._torn.add(name)
                rest = memoryview(data)
                try:
                    while rest:
                        rest = rest[file.write(rest) :]
                except OSError:  # all lines or none: they may be tried again
                    file.truncate(size_bytes)
                    self._torn.discard(name)
                    raise
                self._torn.discard(name)


def earlier_run_file(attempt: int) -> str:
    return f"run-{attempt:04d}.json"


def _keep_steps(path: Path, upto: int) -> None:
    """Keeps the lines of steps up to `upto`; the file is the old one or the new one at every moment."""
    lines, _ = _read_lines(path)
    kept = [line for line in lines if isinstance(line, dict) and type(line.get("step")) is int and line["step"] <= upto]
    if not path.exists():
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.writelines(_encode(line) + b"\n" for line in kept)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


# --- reading -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """A run as it was read: the types of what reports use are checked, the numbers are as they were written.

    Of a run that was resumed, `facts`, `steps` and `events` are those of its last attempt that made a step: ranks and
    layout may have changed. `earlier_steps` and `earlier_events` came before.
    """

    directory: Path
    facts: dict[str, Any]
    steps: list[dict[str, Any]]
    events: list[dict[str, Any]]
    damaged_lines: int  # lines that could not be used, other than a torn last one
    earlier_steps: list[dict[str, Any]] = field(default_factory=list)
    earlier_events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        return int(self.facts["world_size"])

    @property
    def missing(self) -> dict[str, str]:
        """What could not be observed, with the reason."""
        return self.facts.get("missing") or {}


_Kinds = tuple[type, ...]
_NONE = type(None)
_TEXT: _Kinds = (str, _NONE)
_NUMBER: _Kinds = (int, float, _NONE)

# What reports use of run.json. A dotted name is looked up only where what it is in is there.
_REQUIRED: dict[str, _Kinds] = {"status": (str,), "world_size": (int,), "nodes": (list,), "groups": (list,)}
_OPTIONAL: dict[str, _Kinds] = {
    "status_reason": _TEXT,
    "started_utc": _TEXT,
    "ended_utc": _TEXT,
    "layout": _TEXT,
    "reduction": _TEXT,
    "missing": (dict, _NONE),
    "config": (dict, _NONE),
    "versions": (dict, _NONE),
    "ranks": (list, _NONE),
    "data": (dict, _NONE),
    "model": (dict, _NONE),
    "network": (dict, _NONE),
    "model.preset": _TEXT,
    "model.parameters": (int, _NONE),
    "model.flops_per_token": (dict, _NONE),
    "model.flops_per_token.full": _NUMBER,
    "model.flops_per_token.causal": _NUMBER,
    "peak": (dict, _NONE),
    "peak.flops_per_s": _NUMBER,
    "peak.source": _TEXT,
}


def is_number(value: Any) -> bool:
    """Whether a value read from JSON is a finite number (and not true or false)."""
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _lookup(facts: dict[str, Any], dotted: str) -> Any:
    value: Any = facts
    for name in dotted.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _check_facts(directory: Path, facts: dict[str, Any]) -> None:
    def fail(what: str) -> UserError:
        return UserError(f"{directory / RUN_FILE}: {what}; not written by bireme, or damaged")

    for name, kinds in (_REQUIRED | _OPTIONAL).items():
        value = _lookup(facts, name)
        if type(value) not in kinds or (type(value) is float and not math.isfinite(value)):
            expected = " or ".join("null" if kind is _NONE else kind.__name__ for kind in kinds)
            raise fail(f"field {name!r} is {type(value).__name__}, expected {expected}")
    world_size = facts["world_size"]
    for table in ("nodes", "groups"):
        for entry in facts[table]:
            if not (isinstance(entry, dict) and type(entry.get("name")) is str and type(entry.get("ranks")) is list):
                raise fail(f"field {table!r} holds an entry without a name and a list of ranks")
            if not all(type(rank) is int and 0 <= rank < world_size for rank in entry["ranks"]):
                raise fail(f"field {table!r} names a rank that is not in 0 ... world_size - 1")
    ranks_of_nodes = [rank for node in facts["nodes"] for rank in node["ranks"]]
    if world_size < 1 or len(ranks_of_nodes) != world_size or len(set(ranks_of_nodes)) != world_size:
        raise fail("field 'nodes' does not hold every rank exactly once")
    if not all(type(reason) is str for reason in (facts.get("missing") or {}).values()):
        raise fail("field 'missing' holds a reason that is not text")


_RANK_NUMBERS = ("end_ns", "hidden_ns", "hidden_transfer_ns", "clamped_ns", "unlocated_ns", "unmatched")


def _is_ints(value: Any, count: int) -> bool:
    return type(value) is list and len(value) == count and set(map(type, value)) <= {int}


def _is_step(line: Any, world_size: int, groups: int) -> bool:
    """Whether a line of steps.jsonl has what reports use of it, with the right types."""
    if type(line) is not dict or type(line.get("step")) is not int:
        return False
    if type(line.get("skipped")) not in _TEXT or type(line.get("tokens")) not in (int, _NONE):
        return False
    if not all(line.get(name) is None or is_number(line[name]) for name in ("loss", "injected_ms")):
        return False
    arrays = [line.get(name) for name in ("start_ns", *_RANK_NUMBERS, "cells_ns", "overhead_ns", "collectives")]
    if not all(type(array) is list and len(array) == world_size for array in arrays):
        return False
    for start_ns, *numbers, cells_ns, overhead_ns, collectives in zip(*arrays, strict=True):
        if start_ns is None:  # a rank that ended early leaves null everywhere
            if any(value is not None for value in (*numbers, cells_ns, overhead_ns, collectives)):
                return False
            continue
        if not (_is_ints([start_ns, *numbers], 1 + len(numbers)) and numbers[0] >= start_ns):
            return False
        if not (_is_ints(cells_ns, CELLS) and _is_ints(overhead_ns, 2) and type(collectives) is list):
            return False
        for use in collectives:
            if not (type(use) is list and len(use) == 6 and type(use[1]) is str):
                return False
            if not (_is_ints([use[0], *use[2:]], 5) and 0 <= use[0] < groups):
                return False
    return True


def _is_event(line: Any) -> bool:
    return type(line) is dict and type(line.get("event")) is str


def _read_lines(path: Path) -> tuple[list[Any], int]:
    """The lines that parse, and how many do not; a torn last line is one that is still being written."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    lines, damaged = [], 0
    whole, _, last = data.rpartition(b"\n")
    for line in whole.split(b"\n"):
        if line.strip():
            try:
                lines.append(orjson.loads(line))
            except orjson.JSONDecodeError:
                damaged += 1
    with contextlib.suppress(orjson.JSONDecodeError):
        lines.append(orjson.loads(last))  # only the line end is missing
    return lines, damaged


def read_facts(directory: Path, name: str = RUN_FILE) -> dict[str, Any]:
    """The facts of a run, checked. Raises UserError, in one line, when the directory holds none."""
    path = directory / name
    try:
        facts = orjson.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        if not directory.is_dir():
            raise UserError(f"{directory} is not a directory: give the directory of a run") from None
        raise UserError(f"{directory} is not a run: it holds no {name}") from None
    except orjson.JSONDecodeError as error:
        raise UserError(f"{path} is damaged: {error}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise UserError(f'{path} is not a run of bireme: it lacks "format": "{FORMAT}"')
    version = facts.get("version")
    if type(version) is not int or version < 1:
        raise UserError(f"{path}: field 'version' is not a version number")
    if version > VERSION:
        raise UserError(f"{path} has version {version}, this bireme reads up to {VERSION}: install a newer bireme")
    _check_facts(directory, facts)
    return facts


def _number_of(facts: dict[str, Any], name: str) -> int:
    """A whole number of a record that may be older than the field."""
    value = facts.get(name)
    return value if type(value) is int else 1


def _since(lines: list[Any], facts: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """The lines of the attempts before that of `facts`, and its own."""
    before: list[Any] = []
    after: list[Any] = []
    if _number_of(facts, "attempt") == 1:
        return before, lines
    first_step = _number_of(facts, "first_step")
    for line in lines:
        step = line.get("step") if isinstance(line, dict) else None
        (before if type(step) is int and step < first_step else after).append(line)
    return before, after


def read_run(directory: Path) -> Run:
    """Read a run directory, finished or still growing; a run without steps is legal. Raises UserError, in one line,
    when it is none, is of a newer version or is damaged beyond single lines."""
    newest = facts = read_facts(directory)
    try:
        lines, damaged_steps = _read_lines(directory / STEPS_FILE)
        events, damaged_events = _read_lines(directory / EVENTS_FILE)
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from None
    earlier, steps = _since(lines, facts)
    while not steps and earlier:  # resumed, and no step made since
        facts = read_facts(directory, earlier_run_file(_number_of(facts, "attempt") - 1))
        earlier, steps = _since(earlier, facts)
    facts = {**facts, **{name: newest.get(name) for name in ("status", "status_reason", "ended_utc")}}

    good_steps = [line for line in steps if _is_step(line, facts["world_size"], len(facts["groups"]))]
    good_events = [line for line in events if _is_event(line)]
    attempt = _number_of(facts, "attempt")
    begun = [
        index
        for index, event in enumerate(good_events)
        if event["event"] == RESUMED and event.get("attempt") == attempt and attempt > 1
    ]
    begins = begun[-1] if begun else 0
    damaged = damaged_steps + damaged_events + len(steps) - len(good_steps) + len(events) - len(good_events)
    return Run(directory, facts, good_steps, good_events[begins:], damaged, earlier, good_events[:begins])
