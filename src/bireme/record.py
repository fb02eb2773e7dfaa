"""Writing the run directory while the run goes on (docs/run-directory.md). No torch."""

import contextlib
import errno
import fcntl
import os
import secrets
import threading
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from bireme.errors import UserError
from bireme.files import written_whole
from bireme.run_reader import (
    EVENTS_FILE,
    FORMAT,
    LOGS_DIRECTORY,
    RESUMED,
    RUN_FILE,
    SAMPLES_FILE,
    STEPS_FILE,
    TRACE_FILE,
    VERSION,
    earlier_run_file,
    read_facts,
    read_lines,
)

PROBE = ".probe-"  # a file that is made to see whether nodes share the directory
_OTHER = "choose another directory (--run-dir)"  # also for those who give it to bireme.Monitor
_LOCK_WAIT_S = 5.0  # what a process that is being ended may take to let go of its run


def utc_now() -> str:
    """The time as ISO 8601 with milliseconds, UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def default_run() -> str:
    """`runs/<UTC time>-<id>`: where a run goes that nobody named."""
    return str(Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}")


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
    with written_whole(path) as file:
        file.write(_encode(value, orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


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
        self._torn: dict[str, int] = {}  # files that a full disk cut in the middle of a line, and their size before
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
            taken = {entry.name for entry in directory.iterdir() if not _leaves_room(entry)}
        except (FileExistsError, NotADirectoryError):
            raise UserError(f"{directory} is not a directory: {_OTHER}") from None
        if RUN_FILE in taken:
            raise UserError(f"run {directory} exists: {_OTHER}, or go on with it (--resume)")
        if taken:
            raise UserError(f"{directory} is not empty and holds no run: {_OTHER}")
        self._hold(f"run {directory} exists: {_OTHER}", within_s=0.0)
        (directory / STEPS_FILE).touch()

    def _go_on(self, after: int) -> None:
        self._hold(f"run {self.directory} is written by another process: end that first", _LOCK_WAIT_S)
        before = read_facts(self.directory)
        attempt = before.get("attempt")
        attempt = attempt if type(attempt) is int else 1
        write_json_atomic(self.directory / earlier_run_file(attempt), before)
        (self.directory / STEPS_FILE).touch()
        for name in (STEPS_FILE, SAMPLES_FILE, TRACE_FILE):
            _keep_steps(self.directory / name, after)
        self._facts["attempt"] = attempt + 1
        self.event(RESUMED, attempt=attempt + 1, **(self._facts.get("resumed_from") or {}))

    def _hold(self, taken: str, within_s: float) -> None:
        """Two processes must not write to one run (UserError: `taken`); what a process holds goes with it, however it
        ends."""
        self._claim = os.open(self.directory / EVENTS_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        deadline = time.monotonic() + within_s
        while True:
            try:
                fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UserError(taken) from None
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

    def trace(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append what was seen of chosen steps, and how the ranks' clocks compare (docs/trace.md)."""
        if not (self.directory / TRACE_FILE).exists():
            (self.directory / TRACE_FILE).touch()
        self._append(TRACE_FILE, ({"attempt": self._facts["attempt"], **line} for line in lines))

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

    def learned(self, **facts: Any) -> None:
        """Renew `run.json` with what was not known when the run began."""
        with self._lock:
            self._facts |= facts
            write_json_atomic(self.directory / RUN_FILE, self._facts)

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
        # Opened anew each time: a handle kept open would write on, unseen, after the directory was removed.
        flags = os.O_WRONLY | os.O_APPEND
        with self._lock, os.fdopen(os.open(self.directory / name, flags), "ab", buffering=0) as file:
            if name in self._torn:
                file.truncate(self._torn[name])
            self._torn[name] = os.fstat(file.fileno()).st_size
            rest = memoryview(data)
            try:
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:  # all lines or none: they may be tried again
                file.truncate(self._torn[name])
                raise
            del self._torn[name]


def _leaves_room(entry: Path) -> bool:
    """Whether a run may begin beside this file: logs, a probe, and what a start that failed at once has left empty."""
    if entry.name in (STEPS_FILE, EVENTS_FILE):
        return entry.is_file() and entry.stat().st_size == 0
    return entry.name == LOGS_DIRECTORY or entry.name.startswith(PROBE)


def _keep_steps(path: Path, upto: int) -> None:
    """Keeps the lines of steps up to `upto`; the file is the old one or the new one at every moment."""
    lines, _ = read_lines(path)
    kept = [line for line in lines if isinstance(line, dict) and type(line.get("step")) is int and line["step"] <= upto]
    if not path.exists():
        return
    with written_whole(path) as file:
        file.writelines(_encode(line) + b"\n" for line in kept)
