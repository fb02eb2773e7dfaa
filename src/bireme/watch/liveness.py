"""Whether the process that writes a run still lives. Its lock is only looked at and never tried for: a run that is just
about to start would be refused."""

import os
import socket
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from bireme.run_reader import EVENTS_FILE

_LOCKS = Path("/proc/locks")
_CLOCKS_DIFFER_S = 60.0  # of the kernel's start of a process and a run's time stamp


def writer_pid(facts: Mapping[str, Any]) -> int | None:
    """The process of rank 0, as run.json has it."""
    pid = _rank_0(facts).get("pid")
    return pid if type(pid) is int and 0 < pid < 1 << 31 else None


def writer_lives(directory: Path, facts: Mapping[str, Any]) -> bool | None:
    """Of a run whose status is `running`; None where it cannot be known, as on another machine than the writer's."""
    if _is_locked(directory / EVENTS_FILE):
        return True
    pid = writer_pid(facts)
    if pid is None or _rank_0(facts).get("host") != socket.gethostname():
        return None
    # No lock to be seen proves nothing: some file systems have none, others show other device numbers.
    return _is_process(pid, facts.get("started_utc"))


def _rank_0(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    ranks = facts.get("ranks")
    first = ranks[0] if isinstance(ranks, list) and ranks else None
    return first if isinstance(first, dict) else {}


def _is_locked(path: Path) -> bool:
    """Whether the kernel of this machine knows of a lock on the file."""
    try:
        status = path.stat()
        locks = _LOCKS.read_text()
    except OSError:
        return False
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    return any({"FLOCK", file} <= set(line.split()) for line in locks.splitlines())


def _is_process(pid: int, started_utc: Any) -> bool:
    import psutil

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        born_s = process.create_time()
    except psutil.NoSuchProcess:
        return False
    except (psutil.Error, OSError):
        return True
    try:
        started_s = datetime.fromisoformat(started_utc).timestamp()
    except (TypeError, ValueError):
        return True
    return born_s <= started_s + _CLOCKS_DIFFER_S  # else its number was given to another one
