"""Saves checkpoints while training goes on: a step waits for the copy, a thread of each rank does the rest."""

import contextlib
import logging
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from bireme.channel import Channel, PeerTimeout, new_side_group, set_group_timeout
from bireme.checkpoint.folder import CHECKPOINTS, clean, commit, hidden_folder, point, prune, set_aside
from bireme.checkpoint.state import copy_to_cpu
from bireme.checkpoint.tensors import SaveError, save
from bireme.errors import UserError
from bireme.record import PROBE, utc_now
from bireme.text import listed, name_ranks, one_line
from bireme.world import World

log = logging.getLogger(__name__)

_SEEN_WITHIN_S = 5.0  # for a network file system to show a new file elsewhere
MEET_WITHIN_S = 300.0  # for all ranks to come to a save: they are a step apart at most, but one may be held up
SLOWEST_WRITE_S = 6 * 3600.0  # training goes on meanwhile: a slow disk is no reason to give up
RECORD_WITHIN_S = 30.0  # for the run's record to have the step that a checkpoint is of


@dataclass(frozen=True, slots=True)
class Saved:
    """How the last save went; the same on every rank."""

    step: int
    problem: str | None = None


class Saver:
    """Made by every rank at once; `save` and `wait` are called by all of them at the same steps, on one thread.

    checkpoints: the folder for them. keep: so many of the newest stay, and every step that `keep_every` divides (0:
    none). before_write(step): called on every rank, in its thread, as it writes. before_commit(step): called on rank 0
    before a checkpoint becomes one, so that the run's record is not behind it. note(event, fields): told on
    rank 0 what to put into events.jsonl. resumed_after: the step that a run goes on after; newer checkpoints are set
    aside.
    """

    def __init__(
        self,
        checkpoints: Path,
        keep: int,
        keep_every: int,
        before_commit: Callable[[int], None] = lambda step: None,
        note: Callable[..., None] = lambda event, **fields: None,
        resumed_after: int | None = None,
        before_write: Callable[[int], None] = lambda step: None,
    ):
        self._checkpoints = checkpoints
        self._keep = keep
        self._keep_every = keep_every
        self._before_write = before_write
        self._before_commit = before_commit
        self._note = note
        self.meet_within_s = MEET_WITHIN_S
        self._channel = Channel()
        self._group = self._channel.group
        if self._group is None and self._channel.distributed:
            self._group = new_side_group([0])  # the group of all ranks is observed, and trains
        elif self._group is not None:
            set_group_timeout(SLOWEST_WRITE_S, self._group)
        self._tag = str(self._channel.all_gather(secrets.token_hex(4))[0])
        self._left_alone: str | None = None  # the group is of no use any more: messages on it would be mixed up
        self._thread: threading.Thread | None = None
        self._copies: dict[str, Tensor] = {}
        self._last: Saved | None = None
        if self._channel.rank == 0:
            clean(checkpoints)
            if resumed_after is not None:
                self._set_aside(resumed_after)

    def _set_aside(self, step: int) -> None:
        try:
            names = set_aside(self._checkpoints, step)
        except (OSError, UserError) as error:
            log.warning("checkpoints after step %d cannot be set aside: %s", step, one_line(error))
        else:
            if names:
                log.warning("checkpoints after step %d are kept as %s; delete them by hand", step, listed(names))

    def save(self, step: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Copies the tensors and has them written; waits first for a save that is still under way. `facts` go into the
        manifest. What goes wrong is told and noted, never raised."""
        self.wait()
        self._copies = copy_to_cpu(tensors, self._copies)
        self._thread = threading.Thread(
            target=self._write, args=(step, {**facts, "saved_utc": utc_now()}), name="bireme-checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self, within_s: float | None = None) -> Saved | None:
        """Waits for the save that is under way, no longer than `within_s`; returns how the last one went."""
        if self._thread is not None:
            self._thread.join(within_s)
            if not self._thread.is_alive():
                self._thread = None
        return self._last

    def _write(self, step: int, facts: dict[str, Any]) -> None:
        """In the thread, on every rank."""
        started = time.monotonic()
        partial = hidden_folder(self._checkpoints, step, self._tag, "partial")
        problem: str | None = None
        size_bytes, write_s = 0, 0.0
        seconds_by_rank: list[float] = []
        try:
            self._meet(step)
            try:
                written = save(self._copies, partial, self._group, lambda: self._before_write(step))
                write_s = written.write_s
                if self._channel.rank == 0:
                    self._before_commit(step)
                    files = {file.name: {"bytes": file.size_bytes, "sha256": file.sha256} for file in written.files}
                    size_bytes = sum(file.size_bytes for file in written.files)
                    self._complete(partial, step, {**facts, "tensors": written.tensors, "files": files})
            except Exception as error:  # whatever it is: the others wait for this rank's word
                problem = one_line(error)
            said = self._channel.all_gather([problem, round(write_s, 3)])
            problem, seconds_by_rank = said[0][0], [each[1] for each in said]
        except Exception as error:  # the thread's end is nobody's: what is wrong must be told
            problem = one_line(error)
        self._last = Saved(step, problem)
        if problem is not None:  # on every rank: nodes may not share the disk, against what was asked for
            shutil.rmtree(partial, ignore_errors=True)  # before it is noted: the record needs room, too
        if self._channel.rank == 0:
            self._tell(step, problem, time.monotonic() - started, size_bytes, seconds_by_rank)

    def _meet(self, step: int) -> None:
        """All ranks are about to save the same step. SaveError when one is not: nobody waits for it for long."""
        if self._left_alone is None:
            self._channel.timeout_s = self.meet_within_s
            try:
                steps = self._channel.all_gather(step)
            except PeerTimeout:
                self._left_alone = f"not all ranks came to save step {step} within {self.meet_within_s:.0f} s"
            else:
                if len(set(steps)) > 1:
                    others = [rank for rank, other in enumerate(steps) if other != steps[0]]
                    self._left_alone = f"rank 0 saves step {steps[0]}, {name_ranks(others)} another"
        if self._left_alone is not None:
            raise SaveError(f"{self._left_alone}, and every rank must; no more checkpoints are written")
        self._channel.timeout_s = SLOWEST_WRITE_S

    def _complete(self, partial: Path, step: int, manifest: dict[str, Any]) -> None:
        missing = [name for name in manifest["files"] if not (partial / name).exists()]
        if missing:
            raise SaveError(f"{missing[0]} is not to be seen from rank 0: all nodes must share {self._checkpoints}")
        commit(partial, self._checkpoints, step, manifest, self._tag)
        # The checkpoint is there, whatever becomes of the rest.
        try:
            point(self._checkpoints, step)
        except Exception as error:
            log.warning("latest cannot be renewed: %s", one_line(error))
        try:
            prune(self._checkpoints, self._keep, self._keep_every, self._tag)
        except Exception as error:
            log.warning("old checkpoints are not deleted: %s", one_line(error))

    def _tell(
        self, step: int, problem: str | None, seconds: float, size_bytes: int, seconds_by_rank: list[float]
    ) -> None:
        if problem is None:
            self._note("checkpoint", step=step, seconds=round(seconds, 3), bytes=size_bytes, write_s=seconds_by_rank)
            return
        log.error("checkpoint of step %d failed: %s; training goes on", step, problem)
        self._note("checkpoint_failed", step=step, reason=problem)


def check_shared(directory: Path, world: World) -> None:
    """UserError on every rank when the run directory cannot be written, or is not the same on all nodes; made where it
    is missing, and left as it was. Collective."""
    probe = directory / f"{PROBE}{world.channel.all_gather(secrets.token_hex(8))[0]}"
    try:
        with world.together():
            if world.rank == 0:
                tried = directory
                try:
                    directory.mkdir(parents=True, exist_ok=True)
                    probe.touch()
                    if (directory / CHECKPOINTS).exists():
                        tried = directory / CHECKPOINTS
                        inside = tried / probe.name
                        inside.touch()
                        inside.unlink()
                except OSError as error:
                    raise UserError(f"cannot write to {tried}: {error.strerror}") from None
        with world.together():
            deadline = time.monotonic() + _SEEN_WITHIN_S
            while not probe.exists():
                if time.monotonic() > deadline:
                    raise UserError(
                        f"{world.node} does not see {directory} of {world.ranks[0]['node']}: checkpoints need a run "
                        "directory on a disk that all nodes share"
                    )
                time.sleep(0.1)
    finally:
        if world.rank == 0:
            with contextlib.suppress(OSError):
                probe.unlink()
                directory.rmdir()  # as long as nothing is in it
