"""`bireme watch RUN`: follows a run while it goes on. Imports stay cheap here."""

from pathlib import Path


def watch_command(run: Path, every_s: float = 1.0, once: bool = False) -> int:
    """Show a run that goes on, has ended or has yet to begin; returns the exit code (docs/watch.md).

    Raises UserError for a path that is no directory, and for an interval that is none.
    """
    from bireme.watch.command import watch

    return watch(run, every_s, once)
