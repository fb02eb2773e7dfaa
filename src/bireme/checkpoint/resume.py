"""Which checkpoint to go on from: the newest that every rank finds whole, and whether it is of the same training."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bireme.checkpoint.folder import CHECKPOINTS, Unusable, candidates, check_files, is_checkpoint, read_manifest
from bireme.config import TrainConfig
from bireme.errors import SharedError, UserError
from bireme.run_reader import RESUMED, RUN_FILE, read_facts, read_run
from bireme.text import name_ranks
from bireme.world import World


@dataclass(frozen=True, slots=True)
class Resume:
    """A checkpoint that was checked, and how to go on from it."""

    folder: Path | None  # None: the run ended before its first checkpoint, and begins again
    manifest: dict[str, Any]
    run: str | None  # the run that is continued; None: a new run begins
    skipped: list[str] = field(default_factory=list)  # newer checkpoints that were passed over, and why
    facts: dict[str, Any] | None = None  # of the run that is continued

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    @property
    def config(self) -> dict[str, Any]:
        """The settings to go on with: the run's latest, which may be newer than those of its checkpoint."""
        latest = (self.facts or {}).get("config")
        return dict(latest or self.manifest["config"])

    @property
    def samples(self) -> int:
        """How many samples were trained on, all ranks together."""
        return int(self.manifest["samples"])


class _Plan(NamedTuple):
    """What to go on with, and where to look for a checkpoint."""

    run: str | None
    where: str
    facts: dict[str, Any] | None = None  # of the run
    from_zero: dict[str, Any] | None = None  # what stands for a checkpoint where there never was one


def restarted(environ: Mapping[str, str]) -> bool:
    """Whether the launcher has started these processes anew, after some of them had failed."""
    return environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0")


def find_resume(config: TrainConfig, world: World, environ: Mapping[str, str] = os.environ) -> Resume | None:
    """What to go on from, the same on every rank; None: nothing was asked for. Collective.

    A run that `--run` names is continued with `--resume`, and without it when the launcher that started it starts it
    again. UserError on every rank when its checkpoints are not usable, or gone: no run begins from zero but one that
    never had a checkpoint.
    """
    plan: _Plan | None = None
    with world.together():
        if world.rank == 0:
            plan = _plan(config, environ)
    told = world.channel.all_gather(None if plan is None else list(plan))[0]
    if told is None:
        return None
    run, where, facts, from_zero = told
    skipped: list[str] = []
    for folder in _candidates(Path(where), world):
        manifest, reason = _check(folder, world)
        if manifest is not None:
            return Resume(folder, manifest, run, skipped, facts)
        skipped.append(f"{folder}: {reason}")
    if skipped:
        raise SharedError(f"no usable checkpoint: {'; '.join(skipped)}; start a new run, with another --run DIR")
    if from_zero is not None:
        return Resume(None, from_zero, run, facts=facts)
    raise SharedError(
        f"{where} holds no checkpoint to go on from: start a new run, with another --run DIR and --checkpoint-every N"
    )


def _plan(config: TrainConfig, environ: Mapping[str, str]) -> _Plan | None:
    """On rank 0."""
    run = config.run
    same_launch = run is not None and _is_of_launch(Path(run), environ)
    if run is not None and (config.resume or same_launch):
        if not (Path(run) / RUN_FILE).exists():
            raise UserError(f"there is no run in {run}: leave out --resume to start one")
        own, facts = Path(run) / CHECKPOINTS, read_facts(Path(run))
        if config.resume_from is not None and not candidates(own):
            return _Plan(run, _source(Path(config.resume_from)), facts)
        return _Plan(run, str(own), facts, _from_zero(Path(run), same_launch))
    if config.resume:
        raise UserError("resume needs the run to go on with: give --run DIR")
    if config.resume_from is not None:
        return _Plan(None, _source(Path(config.resume_from)))
    if run is None and restarted(environ):
        raise UserError(
            "the launcher has started the ranks again, but nothing says which run to go on with: give --run DIR"
        )
    return None


def _is_of_launch(run: Path, environ: Mapping[str, str]) -> bool:
    """Whether the launcher that starts us has started this run before."""
    launch_id = environ.get("TORCHELASTIC_RUN_ID")
    if launch_id in (None, "", "none"):  # "none": of every static launch
        return False
    try:
        return read_facts(run).get("launch_id") == launch_id
    except UserError:  # no run, or none that can be read: whoever wants to write there will say so
        return False


def _from_zero(run: Path, same_launch: bool) -> dict[str, Any] | None:
    """What stands for the checkpoint of a run that ended before its first one; None where it had one."""
    record = read_run(run)
    saved = {"checkpoint", RESUMED}
    if any(event["event"] in saved for event in (*record.earlier_events, *record.events)):
        return None
    facts = record.facts
    if same_launch and facts["status"] == "failed" and not record.steps:
        why = " ".join((facts.get("status_reason") or "").split())
        raise UserError(f"run {run} failed before its first step, and would again: {why}")
    config, layout = facts.get("config") or {}, facts.get("layout") or ""
    return {"step": 0, "samples": 0, "config": config, "world_size": record.world_size, "layout": layout}


def _source(given: Path) -> str:
    """The folder that --resume-from means: of a run, of its checkpoints, or one checkpoint."""
    if not given.is_dir():
        raise UserError(f"resume_from: {given} is not a directory: give a run's, or a checkpoint's")
    if not is_checkpoint(given) and (given / CHECKPOINTS).is_dir():
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


def is_done(resume: Resume, steps: int) -> bool:
    """Whether the run that is continued has all its steps, and its end, already. UserError when there is none left to
    make for another reason."""
    if steps > resume.step:
        return False
    if resume.run is not None and steps == resume.step:
        return (resume.facts or {}).get("status") == "finished"
    raise UserError(f"steps is {steps}, and {resume.folder} is of step {resume.step}: give more --steps")


def check_continues(resume: Resume, facts: Mapping[str, Any]) -> None:
    """Whether this training (its manifest) is the checkpoint's. UserError naming what is another: the tensors would not
    fit, or samples be left out and repeated."""
    if resume.folder is None:
        return
    for part in ("model", "data"):
        stored, mine = resume.manifest[part], facts[part]
        differing = [name for name in mine if stored.get(name) != mine[name]]
        what = {"model": "of another model", "data": "of training in another order"}[part]
        if "fingerprint" in differing:
            what = "of other data, or of this before it was changed"
        if differing:
            pairs = [(name, *(_short(each.get(name)) for each in (stored, mine))) for name in differing[:6]]
            listed = ", ".join(f"{name} {there} there, {here} here" for name, there, here in pairs)
            raise UserError(f"checkpoint {resume.folder} is {what}: {listed}")
    name = "global_batch_size"
    before, now = resume.config.get(name), facts["config"][name]
    if resume.run is not None and before != now:
        raise UserError(
            f"{name} is {now}, but the run that goes on has {before}: keep it, or begin another run with --resume-from"
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 20 else f"{text[:13]}...'"
