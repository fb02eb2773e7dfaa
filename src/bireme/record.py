"""The run directory: writing it while the run goes on, and reading it, also while it grows (docs/run-directory.md).

What is read may come from anywhere: it is checked here, once, so that reports can rely on its types. No torch.
"""

import contextlib
import itertools
import math
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
LOGS_DIRECTORY = "logs"

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

    def __init__(self, directory: Path, facts: Mapping[str, Any]):
        """Claim `directory` (created where needed; empty, or with nothing but `logs/`) and write `run.json`."""
        self.directory = directory
        # Re-entrant: a signal handler may want to finish the run while the same thread is writing to it.
        self._lock = threading.RLock()
        self._torn: set[str] = set()
        self._facts: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "status": "running",
            "status_reason": None,
            "started_utc": utc_now(),
            "ended_utc": None,
            **facts,
        }
        try:
            directory.mkdir(parents=True, exist_ok=True)
            taken = {entry.name for entry in directory.iterdir()} - {LOGS_DIRECTORY}
        except (FileExistsError, NotADirectoryError):
            raise UserError(f"{directory} is not a directory: choose another --run DIR") from None
        if RUN_FILE in taken:
            raise UserError(f"run {directory} exists: choose another --run DIR")
        if taken:
            raise UserError(f"{directory} is not empty and holds no run: choose another --run DIR")
        try:  # of two runs started at once, exactly one gets the directory
            (directory / STEPS_FILE).open("xb").close()
        except FileExistsError:
            raise UserError(f"run {directory} exists: choose another --run DIR") from None
        (directory / EVENTS_FILE).touch()
        write_json_atomic(directory / RUN_FILE, self._facts)

    def steps(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append one line a step."""
        self._append(STEPS_FILE, lines)

    def event(self, event: str, /, **fields: Any) -> None:
        """Append one event, stamped with the time."""
        self._append(EVENTS_FILE, [{"time_utc": utc_now(), "event": event, **fields}])

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
                self._torn.add(name)
                rest = memoryview(data)
                while rest:
                    rest = rest[file.write(rest) :]
                self._torn.discard(name)


# --- reading -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """A run as it was read: the types of what reports use are checked, the numbers are as they were written."""

    directory: Path
    facts: dict[str, Any]
    steps: list[dict[str, Any]]
    events: list[dict[str, Any]]
    damaged_lines: int  # lines that could not be used, other than a torn last one

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


def read_run(directory: Path) -> Run:
    """Read a run directory, finished or still growing; a run without steps is legal. Raises UserError, in one line,
    when it is none, is of a newer version or is damaged beyond single lines."""
    path = directory / RUN_FILE
    try:
        facts = orjson.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        if not directory.is_dir():
            raise UserError(f"{directory} is not a directory: give the directory of a run") from None
        raise UserError(f"{directory} is not a run: it holds no {RUN_FILE}") from None
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

    try:
        steps, damaged_steps = _read_lines(directory / STEPS_FILE)
        events, damaged_events = _read_lines(directory / EVENTS_FILE)
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from None
    good_steps = [line for line in steps if _is_step(line, facts["world_size"], len(facts["groups"]))]
    good_events = [line for line in events if _is_event(line)]
    damaged = damaged_steps + damaged_events + len(steps) - len(good_steps) + len(events) - len(good_events)
    return Run(directory, facts, good_steps, good_events, damaged)
