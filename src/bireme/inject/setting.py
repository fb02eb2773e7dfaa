"""Holds injections against the run they are planted in: do those ranks, nodes, stages and phases exist; pure."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bireme.errors import UserError, nearest
from bireme.inject.grammar import KINDS, Injection, mistake
from bireme.inject.straggler import Straggler
from bireme.nodes import parse_delay, parse_rate
from bireme.text import count, listed, name_ranks

_EXAMPLE = KINDS["stop"].example
# Of the first steps of a start: a factor multiplies what the phase takes in them. The first one compiles, allocates
# and connects.
MEASURED_STEPS = (2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What an injection needs to know of a run, the same on every rank."""

    node_of: Sequence[str]  # by rank, the name of its node
    steps: int  # the last step of the run
    first_step: int = 1  # of this start
    stage_of: Sequence[int] = ()  # by rank, its place in the pipeline; empty without one
    checkpoint_every: int = 0
    emulated: bool = False  # nodes that have links with a rate of their own
    cuda: bool = False
    cores_of: Sequence[Sequence[int]] = ()  # by rank, the cores it may use
    place_of: Sequence[int] = ()  # by rank, its number on its node

    @property
    def size(self) -> int:
        return len(self.node_of)

    @property
    def nodes(self) -> list[str]:
        return list(dict.fromkeys(self.node_of))


def resolve(
    injections: Sequence[Injection], setting: Setting, straggler: Straggler | None = None
) -> tuple[Injection, ...]:
    """With the ranks and nodes that each is about. UserError for what the run does not have, and for injections that
    contradict each other."""
    resolved = tuple(_resolve(each, setting) for each in injections)
    for index, each in enumerate(resolved):
        _check_straggler(each, straggler)
        for other in resolved[:index]:
            _check_pair(other, each)
    return resolved


def _resolve(injection: Injection, setting: Setting) -> Injection:
    text, kind = injection.text, KINDS[injection.kind]
    node = None
    if injection.node is not None:
        node = _node(injection, setting)
        ranks = tuple(rank for rank, its in enumerate(setting.node_of) if its == node)
    elif injection.stage is not None:
        ranks = _ranks_of_stage(injection, setting)
    elif injection.ranks:
        if injection.ranks[-1] >= setting.size:
            raise mistake(
                text, f"rank {injection.ranks[-1]} is not in this run: ranks are 0 to {setting.size - 1}", kind.example
            )
        ranks = injection.ranks
    else:
        everyone = kind.everyone or injection.all_ranks
        ranks = tuple(range(setting.size)) if everyone else (setting.size - 1,)
    if injection.first > setting.steps:
        raise mistake(text, f"step {injection.first} never comes: the run has steps 1 to {setting.steps}", kind.example)
    if injection.phase == "checkpoint":
        _check_checkpoints(injection, setting)
    if injection.kind == "link":
        _check_link(injection, setting)
    if injection.kind in ("mismatch", "imbalance") and (setting.size if injection.failure else len(ranks)) < 2:
        raise mistake(text, f"{injection.kind} needs two ranks or more", kind.example)
    if injection.kind == "mismatch" and len(ranks) == setting.size:
        raise mistake(text, "all ranks would issue the same: leave one out", kind.example)
    if injection.kind == "drift" and injection.last == injection.first:
        raise mistake(text, "a drift grows from step to step: give it several", kind.example)
    acts_from = setting.first_step + MEASURED_STEPS[-1]
    if injection.factor is not None and injection.last is not None and injection.last < acts_from:
        raise mistake(
            text, f"a factor is measured first and acts from step {acts_from} on: say ms, or later steps", kind.example
        )
    if injection.factor is not None and setting.cuda:
        raise mistake(text, "factor is measured on a CPU: on a GPU say ms", kind.example)
    cores = None
    if injection.kind == "contention":
        cores = tuple(setting.cores_of[rank][setting.place_of[rank] % len(setting.cores_of[rank])] for rank in ranks)
    nodes = tuple(dict.fromkeys(setting.node_of[rank] for rank in ranks))
    return replace(injection, ranks=ranks, node=node, nodes=nodes, cores=cores)


def _node(injection: Injection, setting: Setting) -> str:
    wanted, names = str(injection.node), setting.nodes
    if wanted in names:
        return wanted
    if wanted.isascii() and wanted.isdigit() and int(wanted[:9]) < len(names):
        return names[int(wanted[:9])]
    raise mistake(
        injection.text,
        f"node {wanted[:40]!r} is not in this run{nearest(wanted[:40], names)}: nodes are {listed(names)}, or "
        f"0 to {len(names) - 1}",
        KINDS[injection.kind].example,
    )


def _ranks_of_stage(injection: Injection, setting: Setting) -> tuple[int, ...]:
    example = KINDS[injection.kind].example
    stages = max(setting.stage_of, default=0) + 1
    if stages < 2:
        raise mistake(injection.text, "there are no stages: this layout has no pipeline (--layout pp)", example)
    if int(injection.stage or 0) >= stages:
        raise mistake(injection.text, f"stage {injection.stage} does not exist: stages are 0 to {stages - 1}", example)
    return tuple(rank for rank, stage in enumerate(setting.stage_of) if stage == injection.stage)


def _check_checkpoints(injection: Injection, setting: Setting) -> None:
    example = KINDS[injection.kind].example
    if not setting.checkpoint_every:
        raise mistake(injection.text, "this run never enters the phase checkpoint: give it --checkpoint-every", example)
    every = setting.checkpoint_every
    begin = -(-injection.first // every) * every
    end = min(setting.steps, injection.last or setting.steps)
    if not any(injection.active(step) for step in itertools.chain(range(begin, end + 1, every), (setting.steps,))):
        raise mistake(
            injection.text,
            f"it never acts: checkpoints are written every {count(every, 'step')}, and after step {setting.steps}",
            example,
        )


def _check_link(injection: Injection, setting: Setting) -> None:
    example = KINDS["link"].example
    if not setting.emulated:
        raise mistake(
            injection.text, "links can be slowed on emulated nodes only: bireme nodes -- bireme train ...", example
        )
    try:
        if injection.rate is not None:
            parse_rate(injection.rate)
        parse_delay(injection.delay)
    except UserError as error:
        raise mistake(injection.text, str(error), example) from None


# --- contradictions ----------------------------------------------------------------------------------------------


def _check_pair(one: Injection, other: Injection) -> None:
    if one.kind == other.kind == "link":
        shared = one.node if one.node == other.node else None
    elif {one.kind, other.kind} == {"pause", "stop"}:
        ranks = sorted({*one.ranks} & {*other.ranks})
        if ranks:  # whenever: the next pause ends with a signal to go on
            raise mistake(
                other.text, f"it contradicts {one.text[:90]!r}: a pause would let {name_ranks(ranks)} go on", _EXAMPLE
            )
        return
    else:
        alike = (one.failure and other.failure) or (one.kind, one.phase) == (other.kind, other.phase)
        ranks = sorted({*one.ranks} & {*other.ranks}) if alike else []
        shared = name_ranks(ranks) if ranks else None
    if shared is not None and _overlap(one, other):
        both = "both fail" if one.failure else "both act"
        raise mistake(
            other.text,
            f"it contradicts {one.text[:90]!r}: {both} on {shared} in the same steps; leave one away, or give them "
            "different steps=",
            KINDS[other.kind].example,
        )


def _overlap(one: Injection, other: Injection) -> bool:
    return (one.last is None or other.first <= one.last) and (other.last is None or one.first <= other.last)


def _check_straggler(injection: Injection, straggler: Straggler | None) -> None:
    if straggler is None or injection.kind != "sleep":
        return
    if straggler.rank in injection.ranks and straggler.phase == injection.phase:
        raise mistake(
            injection.text,
            f"STRAGGLER_MS makes rank {straggler.rank} sleep in {straggler.phase} as well: unset it, or take another "
            "rank or phase",
            KINDS["sleep"].example,
        )
