"""What a Monitor was asked for: whether it can be done, and whether it goes on with the run of a restarted job."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from bireme.channel import Channel
from bireme.errors import UserError
from bireme.run_reader import RUN_FILE, STEPS_FILE, read_facts

_TAIL_BYTES = 8 << 20  # of steps.jsonl, to find its last step: longer than any line
_MOST_S = 1e9


def check_options(options: Mapping[str, Any]) -> None:
    """UserError for an argument of the Monitor that is of the wrong kind, with its name."""
    for name in ("exchange_every", "skip_steps", "first_step"):
        least = 0 if name == "skip_steps" else 1
        if type(options[name]) is not int or options[name] < least:
            raise UserError(f"{name}={options[name]!r}: a whole number, at least {least}")
    for name in ("stall_after_s", "abort_after_s", "meet_within_s"):
        value = options[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST_S:
            raise UserError(f"{name}={value!r}: a number of seconds")
    port = options["metrics_port"]
    if port is not None and type(port) is not int:
        raise UserError(f"metrics_port={port!r}: the number of a port, or None")
    for name in ("trace_steps", "metrics_address"):
        if not isinstance(options[name], str):
            raise UserError(f"{name}={options[name]!r}: a text")
    facts = options["facts"]
    if facts is not None and not (isinstance(facts, dict) and all(isinstance(name, str) for name in facts)):
        raise UserError(f"facts={str(facts)[:40]}: a dictionary of fields of run.json")


def path_of(directory: Any) -> Path:
    try:
        return Path(directory)
    except TypeError:
        raise UserError(f"the run directory is {directory!r}: give a path") from None


def restarted_after(channel: Channel, directory: Path) -> int | None:
    """The last step in the record of an attempt that the launcher has restarted since; None for any other start.

    Collective: rank 0 looks. The same job (TORCHELASTIC_RUN_ID) writes to its own run again, and goes on behind it.
    """
    return channel.all_gather(_last_step(directory) if channel.rank == 0 else None)[0]  # type: ignore[no-any-return]


def is_restart(directory: Path) -> bool:
    """Whether the run that is there is one of this job, before the launcher restarted it."""
    job = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if job == "none" or not count.isdecimal() or count == "0" or not (directory / RUN_FILE).is_file():
        return False
    try:
        return read_facts(directory).get("launch_id") == job
    except UserError:
        return False


def _last_step(directory: Path) -> int | None:
    if not is_restart(directory):
        return None
    last = 0
    try:
        with (directory / STEPS_FILE).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return last
    for line in lines:
        try:
            step = orjson.loads(line)["step"]
        except (orjson.JSONDecodeError, TypeError, KeyError):  # torn, or the end of a longer one
            continue
        if type(step) is int:
            last = max(last, step)
    return last
