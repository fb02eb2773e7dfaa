"""Reading the run directory, also while it grows (docs/run-directory.md).

What is read may come from anywhere: it is checked here, once, so that reports can rely on its types. No torch.
"""

import contextlib
import gc
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, compress
from pathlib import Path
from typing import Any

import orjson

from bireme.errors import UserError
from bireme.files import open_regular
from bireme.ledger import PHASES, STATES

FORMAT = "bireme-run"
VERSION = 1
RUN_FILE = "run.json"
STEPS_FILE = "steps.jsonl"
EVENTS_FILE = "events.jsonl"
SAMPLES_FILE = "samples.jsonl"
TRACE_FILE = "trace.jsonl"
LOGS_DIRECTORY = "logs"
RESUMED = "resumed"  # the event that an attempt to continue the run begins with

CELLS = len(PHASES) * len(STATES)


def earlier_run_file(attempt: int) -> str:
    """The name under which the facts of an attempt are kept when the run is resumed."""
    return f"run-{attempt:04d}.json"


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


Kinds = tuple[type, ...]
NONE = type(None)
_TEXT: Kinds = (str, NONE)
_NUMBER: Kinds = (int, float, NONE)

# What reports use of run.json. A dotted name is looked up only where what it is in is there.
_REQUIRED: dict[str, Kinds] = {"status": (str,), "world_size": (int,), "nodes": (list,), "groups": (list,)}
_OPTIONAL: dict[str, Kinds] = {
    "status_reason": _TEXT,
    "started_utc": _TEXT,
    "ended_utc": _TEXT,
    "layout": _TEXT,
    "reduction": _TEXT,
    "missing": (dict, NONE),
    "config": (dict, NONE),
    "versions": (dict, NONE),
    "ranks": (list, NONE),
    "data": (dict, NONE),
    "model": (dict, NONE),
    "network": (dict, NONE),
    "model.preset": _TEXT,
    "model.parameters": (int, NONE),
    "model.flops_per_token": (dict, NONE),
    "model.flops_per_token.full": _NUMBER,
    "model.flops_per_token.causal": _NUMBER,
    "peak": (dict, NONE),
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
            expected = " or ".join("null" if kind is NONE else kind.__name__ for kind in kinds)
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


MOST = 1 << 62  # of whole numbers: what is computed from them fits 64 bits


def is_ints(value: Any, count: int) -> bool:
    if not (type(value) is list and len(value) == count and set(map(type, value)) <= {int}):
        return False
    return not value or -MOST < min(value) <= max(value) < MOST


def is_step(line: Any, world_size: int, groups: int) -> bool:
    """Whether a line of steps.jsonl has what reports use of it, with the right types."""
    if type(line) is not dict or type(line.get("step")) is not int or not abs(line["step"]) < MOST:
        return False
    gc_ns = line.get("gc_ns")  # older records have none
    if gc_ns is not None and not (type(gc_ns) is list and len(gc_ns) == world_size):
        return False
    if not all(type(each) is int or each is None for each in gc_ns or ()):
        return False
    if type(line.get("skipped")) not in _TEXT or type(line.get("tokens")) not in (int, NONE):
        return False
    if not all(line.get(name) is None or is_number(line[name]) for name in ("loss", "injected_ms")):
        return False
    arrays: list[Any] = [
        line.get(name) for name in ("start_ns", *_RANK_NUMBERS, "cells_ns", "overhead_ns", "collectives")
    ]
    if not all(type(array) is list and len(array) == world_size for array in arrays):
        return False
    here = [start_ns is not None for start_ns in line["start_ns"]]
    if not all(here):  # a rank that ended early leaves null everywhere
        if any(value is not None for array in arrays for value, there in zip(array, here, strict=True) if not there):
            return False
        arrays = [list(compress(array, here)) for array in arrays]
    start_ns, *numbers, cells_ns, overhead_ns, collectives = arrays
    if not all(is_ints(each, len(start_ns)) for each in (start_ns, *numbers)):
        return False
    if not all(end >= start for start, end in zip(start_ns, numbers[0], strict=True)):
        return False
    return _is_table(cells_ns, CELLS) and _is_table(overhead_ns, 2) and _are_uses(collectives, groups)


def _is_rows(rows: list[Any], width: int) -> bool:
    return set(map(type, rows)) <= {list} and set(map(len, rows)) <= {width}


def _is_table(rows: list[Any], width: int) -> bool:
    """Whether all are lists of so many whole numbers. Looked at as one: a step of a thousand ranks has 30 000."""
    if not _is_rows(rows, width):
        return False
    numbers = list(chain.from_iterable(rows))
    return is_ints(numbers, len(numbers))


def _are_uses(ranks: list[Any], groups: int) -> bool:
    """Whether all are lists of `[group, operation, count, bytes, transfer_ns, wait_ns]`."""
    if not set(map(type, ranks)) <= {list}:
        return False
    uses = list(chain.from_iterable(ranks))
    if not uses:
        return True
    if not _is_rows(uses, 6):
        return False
    group, operation, *numbers = (list(column) for column in zip(*uses, strict=True))
    if not all(is_ints(column, len(uses)) for column in (group, *numbers)):
        return False
    return set(map(type, operation)) <= {str} and min(group) >= 0 and max(group) < groups


def is_event(line: Any) -> bool:
    return type(line) is dict and type(line.get("event")) is str


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without garbage collection: millions of lists that hold no cycle take longer to look through than to make."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def read_lines(path: Path) -> tuple[list[Any], int]:
    """The lines that parse, and how many do not; a torn last line is one that is still being written. Raises OSError,
    and UserError for what is no regular file."""
    lines, damaged = [], 0
    try:
        with open_regular(path) as file, uncollected():
            for line in file:
                try:
                    if not line.isspace():
                        lines.append(orjson.loads(line))
                except orjson.JSONDecodeError:
                    damaged += line.endswith(b"\n")
    except FileNotFoundError:
        pass
    return lines, damaged


def read_facts(directory: Path, name: str = RUN_FILE) -> dict[str, Any]:
    """The facts of a run, checked. Raises UserError, in one line, when the directory holds none."""
    path = directory / name
    try:
        with open_regular(path) as file:
            facts = orjson.loads(file.read())
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


def number_of(facts: dict[str, Any], name: str) -> int:
    """A whole number of a record that may be older than the field: then 1."""
    value = facts.get(name)
    return value if type(value) is int else 1


def _since(lines: list[Any], facts: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """The lines of the attempts before that of `facts`, and its own."""
    before: list[Any] = []
    after: list[Any] = []
    if number_of(facts, "attempt") == 1:
        return before, lines
    first_step = number_of(facts, "first_step")
    for line in lines:
        step = line.get("step") if isinstance(line, dict) else None
        (before if type(step) is int and step < first_step else after).append(line)
    return before, after


def read_run(directory: Path) -> Run:
    """Read a run directory, finished or still growing; a run without steps is legal. Raises UserError, in one line,
    when it is none, is of a newer version or is damaged beyond single lines."""
    newest = facts = read_facts(directory)
    try:
        lines, damaged_steps = read_lines(directory / STEPS_FILE)
        events, damaged_events = read_lines(directory / EVENTS_FILE)
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from None
    earlier, steps = _since(lines, facts)
    for attempt in range(number_of(facts, "attempt") - 1, 0, -1):
        if steps or not earlier:
            break
        facts = read_facts(directory, earlier_run_file(attempt))  # resumed, and no step made since
        earlier, steps = _since(earlier, facts)
    facts = {**facts, **{name: newest.get(name) for name in ("status", "status_reason", "ended_utc")}}

    good_steps = [line for line in steps if is_step(line, facts["world_size"], len(facts["groups"]))]
    good_events = [line for line in events if is_event(line)]
    attempt = number_of(facts, "attempt")
    begun = [
        index
        for index, event in enumerate(good_events)
        if event["event"] == RESUMED and event.get("attempt") == attempt and attempt > 1
    ]
    begins = begun[-1] if begun else 0
    damaged = damaged_steps + damaged_events + len(steps) - len(good_steps) + len(events) - len(good_events)
    return Run(directory, facts, good_steps, good_events[begins:], damaged, earlier, good_events[:begins])
