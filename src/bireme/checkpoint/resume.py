"""Which checkpoint to go on from: the newest that every rank finds whole, and whether it is of the same training."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bireme.checkpoint.folder import CHECKPOINTS, Unusable, candidates, check_files, is_checkpoint, read_manifest
from bireme.config import TrainConfig
from bireme.errors import SharedError, UserError
from bireme.record import RUN_FILE, read_facts
from bireme.text import name_ranks
from bireme.world import World


@dataclass(frozen=True, slots=True)
class Resume:
    """A checkpoint that was checked, and how to go on from it."""

    folder: Path
    manifest: dict[str, Any]
    run: str | None  # the run that is continued; None: a new run begins
    skipped: list[str] = field(default_factory=list)  # newer checkpoints that were passed over, and why

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    @property
    def samples(self) -> int:
        """How many samples were trained on, all ranks together."""
        return int(self.manifest["samples"])


def restarted(environ: Mapping[str, str]) -> bool:
    """Whether the launcher has started these processes anew, after some of them had failed."""
    return environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0")


def find_resume(config: TrainConfig, world: World, environ: Mapping[str, str] = os.environ) -> Resume | None:
    """What to go on from, the same on every rank; None: nothing was asked for. Collective.

    A run that `--run` names is continued with `--resume`, and without it when the launcher that started it starts it
    again. UserError on every rank when there is no usable checkpoint: nobody begins from zero unasked.
    """
    plan: tuple[str | None, str] | None = None  # the run to continue, the folder to look in
    with world.together():
        if world.rank == 0:
            plan = _plan(config, environ)
    plan = world.channel.all_gather(plan)[0]
    if plan is None:
        return None
    run, where = plan
    found = _candidates(Path(where), world)
    skipped: list[str] = []
    for folder in found:
        manifest, reason = _check(folder, world)
        if manifest is not None:
            return Resume(folder, manifest, run, skipped)
        skipped.append(f"{folder}: {reason}")
    if skipped:
        raise SharedError(f"no usable checkpoint: {'; '.join(skipped)}; start a new run, with another --run DIR")
    raise SharedError(
        f"{where} holds no checkpoint to go on from: start a new run, with another --run DIR and --checkpoint-every N"
    )


def _plan(config: TrainConfig, environ: Mapping[str, str]) -> tuple[str | None, str] | None:
    """On rank 0."""
    if config.resume_from is not None:
        return None, _source(Path(config.resume_from))
    if config.resume:
        if config.run is None:
            raise UserError("resume needs the run to go on with: give --run DIR")
        if not (Path(config.run) / RUN_FILE).exists():
            raise UserError(f"there is no run in {config.run}: leave out --resume to start one")
        return config.run, str(Path(config.run) / CHECKPOINTS)
    if config.run is None:
        if restarted(environ):
            raise UserError(
                "the launcher has started the ranks again, but nothing says which run to go on with: give --run DIR"
            )
        return None
    launch_id = environ.get("TORCHELASTIC_RUN_ID")
    if launch_id in (None, "", "none") or not (Path(config.run) / RUN_FILE).exists():  # "none": of every static launch
        return None
    if read_facts(Path(config.run)).get("launch_id") != launch_id:
        return None
    return config.run, str(Path(config.run) / CHECKPOINTS)


def _source(given: Path) -> str:
    """The folder that --resume-from means: of a run, of its checkpoints, or one checkpoint."""
    if not given.is_dir():
        raise UserError(f"resume_from: {given} is not a directory: give a run's, or a checkpoint's")
    if is_checkpoint(given):
        return str(given)
    if (given / CHECKPOINTS).is_dir():
        return str(given / CHECKPOINTS)
    return str(given)


def _candidates(where: Path, world: World) -> list[Path]:
    names: list[str] = []
    with world.together():
        if world.rank == 0:
            names = [str(where)] if is_checkpoint(where) else [str(each) for each in candidates(where)]
    return [Path(name) for name in world.channel.all_gather(names)[0]]


def _check(folder: Path, world: World) -> tuple[dict[str, Any] | None, str | None]:
    """The manifest of a checkpoint that is whole, or the reason why it is not. Each rank reads a part of the files."""
    manifest, reason = None, None
    try:
        manifest = read_manifest(folder)
    except Unusable as error:
        reason = str(error)
    answers = world.channel.all_gather((manifest, reason))
    if all(each == [manifest, None] for each in answers):
        assert manifest is not None
        try:
            check_files(folder, manifest, sorted(manifest["files"])[world.rank :: world.size])
        except Unusable as error:
            reason = str(error)
        answers = world.channel.all_gather((manifest, reason))
    reasons = [each[1] for each in answers]
    if not any(reasons):
        same = all(each[0] == answers[0][0] for each in answers)
        return (answers[0][0], None) if same else (None, "the nodes do not see the same checkpoint: they must share it")
    worst = next(each for each in reasons if each)
    ranks = [rank for rank, each in enumerate(reasons) if each == worst]
    # One rank reads each file: whose it was says nothing, unless the others do not see the checkpoint at all.
    everywhere = all(each[0] is not None for each in answers) or len(ranks) == world.size
    return None, worst if everywhere else f"{name_ranks(ranks)}: {worst}"


def check_continues(resume: Resume, facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Whether this training (`model`, `data`, as a manifest has them) is the checkpoint's. UserError naming what is
    another: the tensors would not fit, or samples be left out and repeated."""
    for part, what in (("model", "of another model"), ("data", "of other data, or of this before it was changed")):
        stored, mine = resume.manifest[part], facts[part]
        differing = [name for name in mine if stored.get(name) != mine[name]]
        if differing:
            listed = ", ".join(f"{name} {stored.get(name)!r} there, {mine[name]!r} here" for name in differing[:6])
            raise UserError(f"checkpoint {resume.folder} is {what}: {listed}")
