"""Why training stands still, or has ended: from where every rank is to who is to blame. Pure; no torch.

Who waits for whom is known from the collectives: a rank that has issued the n-th collective of a group waits for the
members that have not. Whoever is waited for and waits for nobody is where it began.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bireme.hang_state import (
    GONE,
    INTERRUPTED,
    LEFT,
    LOST,
    RAISED,
    UNWATCHED,
    Collective,
    Group,
    RankState,
)
from bireme.hang_words import alike_by, bystanders, collective_text, doing, named, names, seconds, unfinished, where_of
from bireme.text import name_ranks

# These have no size that all members share.
_UNEVEN = frozenset({"all_to_all"})
_STOPPED = frozenset({"T", "t"})
_PHASE_ORDER = ("input", "forward", "backward", "optimizer")  # of a step; the others may come anywhere
_CHECKPOINT = "checkpoint"
_AT_ONCE_S = 0.05  # ranks that die of one cause do so within; a launcher that ends the others takes longer


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is wrong. `lines` are for people, the first one says it all.

    kind: died, raised, mismatch, stopped, left, hang, computing, network, lost; or checkpoint, which is no fault.
    """

    kind: str
    ranks: tuple[int, ...]
    step: int
    phase: str | None
    lines: tuple[str, ...]
    idle_s: float = 0.0  # for how long those it concerns have not moved
    trace: tuple[str, ...] = ()  # of the first real error

    @property
    def fault(self) -> bool:
        return self.kind != _CHECKPOINT


@dataclass(frozen=True, slots=True)
class Edge:
    """`waiter` cannot go on before `awaited` come to this collective (None: to their side of a send or receive)."""

    waiter: int
    awaited: tuple[int, ...]
    group: int
    collective: Collective | None


def diagnose_end(states: Sequence[RankState], groups: Sequence[Group]) -> Diagnosis | None:
    """Why a job has failed of which some ranks died or raised; None where nothing is to be said."""
    by_time = sorted((state for state in states if state.ended), key=lambda state: state.ended_at_s)
    primary = [state for state in by_time if state.ended == GONE or (state.ended == RAISED and not state.secondary)]
    others = [state for state in by_time if state.ended == INTERRUPTED]
    if not primary and others:
        return None
    if primary and others and others[0].ended_at_s < primary[0].ended_at_s - _AT_ONCE_S:
        return None
    if found := _mismatch(states, groups):
        return found
    if not primary:  # all were lost to each other, or something else looks like that
        raised = [state for state in by_time if state.ended == RAISED]
        return diagnose_stall(states, groups) or (_raised(raised, states, groups) if raised else None)
    first_s = primary[0].ended_at_s
    died = [state for state in primary if state.ended == GONE and state.ended_at_s <= first_s + _AT_ONCE_S]
    if died:
        return _died(died, states, groups)
    if len(primary) == len(states) and all(state.together for state in primary):
        return None
    return _raised(primary, states, groups)


def diagnose_stall(states: Sequence[RankState], groups: Sequence[Group], still_s: float = 0.0) -> Diagnosis | None:
    """Who keeps the others waiting; None where nobody waits, or nothing can be said. Of several, those who have not
    moved for `still_s`."""
    by_rank = {state.rank: state for state in states}
    if found := _mismatch(states, groups):
        return found
    stopped = [state for state in states if state.runs and state.process in _STOPPED]
    edges = _edges(by_rank, groups)
    if stopped:
        return _blame("stopped", stopped, states, groups, edges)
    waiting = {edge.waiter for edge in edges}
    roots = sorted(_awaited(edges) - waiting)
    if not edges:
        roots = _behind(states)
    elif not roots:  # a ring: each waits for another of them
        return _blame("hang", [by_rank[rank] for rank in sorted(_ring(edges))], states, groups, edges)
    if roots:
        culprits = [by_rank[rank] for rank in roots]
        culprits = [each for each in culprits if not each.runs or each.idle_s >= still_s] or culprits
        kind, culprits = _kind(culprits)
        return _blame(kind, culprits, states, groups, edges)
    return _network(states, groups)


def _kind(culprits: list[RankState]) -> tuple[str, list[RankState]]:
    """The worst of what keeps others waiting, and whom it concerns."""
    for kind, concerned in (
        ("lost", [each for each in culprits if each.ended == LOST]),
        ("left", [each for each in culprits if each.ended in (LEFT, INTERRUPTED, RAISED, GONE)]),
        ("hang", [each for each in culprits if each.runs and each.phase != _CHECKPOINT and not each.busy]),
        ("computing", [each for each in culprits if each.runs and each.phase != _CHECKPOINT]),
        (_CHECKPOINT, [each for each in culprits if each.runs]),
    ):
        if concerned:
            return kind, concerned
    return "hang", culprits  # of whom nothing is known


# --- who waits for whom ------------------------------------------------------------------------------------------


def _edges(by_rank: Mapping[int, RankState], groups: Sequence[Group]) -> list[Edge]:
    edges = []
    late = [_late(by_rank, group, index) for index, group in enumerate(groups)]
    for state in by_rank.values():
        if not state.runs and not (state.ended == RAISED and state.secondary):
            continue
        for index, recent in state.groups.items():
            if index >= len(groups):
                continue
            for issued, ranks in late[index].items():
                awaited = _first_awaited(state, recent, issued)
                if awaited is not None:
                    edges.append(Edge(state.rank, ranks, index, awaited))
        wait = state.wait
        if wait is not None and wait.peer is not None and wait.peer in by_rank and wait.peer != state.rank:
            edges.append(Edge(state.rank, (wait.peer,), wait.group, None))
    return edges


def _late(by_rank: Mapping[int, RankState], group: Group, index: int) -> dict[int, tuple[int, ...]]:
    """The members that somebody may wait for, by how many collectives they have issued: fewer than others have."""
    alike: dict[int, list[int]] = {}
    for rank in group.ranks:
        if rank in by_rank and by_rank[rank].ended != UNWATCHED:
            alike.setdefault(by_rank[rank].issued(index), []).append(rank)
    most = max(alike, default=0)
    return {issued: tuple(ranks) for issued, ranks in alike.items() if issued < most}


def _awaited(edges: Iterable[Edge]) -> set[int]:
    return set().union(*{edge.awaited for edge in edges})


def _first_awaited(state: RankState, recent: Iterable[Collective], issued: int) -> Collective | None:
    """The first collective that another, who has issued that many, has not come to. What an error has ended counts as
    finished, but cannot have been when a member was missing."""
    for each in recent:
        if each.sequence >= issued and not (each.finished and state.runs):
            return each
    return None


def _ring(edges: Sequence[Edge]) -> set[int]:
    """Those that wait for each other: what remains when everybody is dropped for whom nobody waits."""
    ring = {edge.waiter for edge in edges}
    while True:
        awaited = _awaited(edge for edge in edges if edge.waiter in ring)
        if ring <= awaited:
            return ring
        ring &= awaited


def _behind(states: Sequence[RankState]) -> list[int]:
    """Without collectives to compare: those in the earliest step and phase, where others are further on."""
    known = [state for state in states if state.runs and state.begun] or []
    left = [state for state in states if state.ended == LEFT]
    if known and left and all(each.step >= state.step for each in known for state in left):
        return sorted(state.rank for state in left)
    if len(known) < 2 or any(unfinished(state) for state in known):
        return []
    free = [state for state in known if state.wait is None]
    if free and len(free) < len(known):
        return [state.rank for state in free]
    first = min(state.step for state in known)
    late = [state for state in known if state.step == first]
    if len(late) == len(known) and all(state.phase in _PHASE_ORDER for state in known):
        earliest = min(_PHASE_ORDER.index(state.phase or "") for state in known)
        late = [state for state in known if state.phase == _PHASE_ORDER[earliest]]
    return sorted(state.rank for state in late) if len(late) < len(known) else []


# --- what is wrong -----------------------------------------------------------------------------------------------


def _mismatch(states: Sequence[RankState], groups: Sequence[Group]) -> Diagnosis | None:
    """The first collective that is not the same on all members, of those that are under way or failed."""
    for index, group in enumerate(groups):
        members = [state for state in states if state.rank in group.ranks and state.groups.get(index)]
        if len(members) < 2:
            continue
        failed = any(state.ended == RAISED for state in members)
        seen: dict[int, dict[tuple[str, int], list[RankState]]] = {}
        open_: set[int] = set()
        for state in members:
            for each in state.groups[index]:
                what = (each.operation, 0 if each.operation in _UNEVEN else each.bytes)
                seen.setdefault(each.sequence, {}).setdefault(what, []).append(state)
                if not each.finished:
                    open_.add(each.sequence)
        for sequence in sorted(seen):
            sides = seen[sequence]
            if len(sides) > 1 and (failed or sequence in open_):
                return _mismatched(index, sequence, sides, groups)
    return None


def _mismatched(
    index: int, sequence: int, sides: Mapping[tuple[str, int], list[RankState]], groups: Sequence[Group]
) -> Diagnosis:
    ordered = sorted(sides.items(), key=lambda side: (len(side[1]), side[1][0].rank))
    fewest = len(ordered[0][1])
    minority = [state for _, side in ordered if len(side) == fewest for state in side]
    if sum(map(len, sides.values())) == fewest * len(sides):  # nobody can say who is right
        minority = [state for _, side in ordered for state in side]
    at = minority[0]
    running = [state.idle_s for _, side in ordered for state in side if state.runs]
    lines = [
        f"the ranks issued different collectives: #{sequence} of group {groups[index].name} is not the same on all"
    ]
    for (operation, num_bytes), side in ordered:
        what = collective_text(Collective(sequence, operation, num_bytes, False), "")
        lines.append(f"{names(side)} issued {what} in {where_of(side[0])}")
    ranks = tuple(sorted(state.rank for state in minority))
    return Diagnosis("mismatch", ranks, at.step, at.phase, tuple(lines), min(running, default=float("inf")))


def _died(died: list[RankState], states: Sequence[RankState], groups: Sequence[Group]) -> Diagnosis:
    lines = []
    for state in sorted(died, key=lambda each: each.rank)[:4]:
        line = f"{named(state)} {state.exit or 'is gone without a word (killed?)'} in {doing(state, groups)}"
        if state.out_of_memory:
            times = f"{state.out_of_memory} process{'es' if state.out_of_memory > 1 else ''}"
            line += (
                f": probably out of memory, the kernel has killed {times} for that since the start; take a smaller "
                "model or micro-batch, shard the model, or start fewer ranks"
            )
        lines.append(line)
    if len(died) > 4:
        lines.append(f"and {len(died) - 4} more at the same time: {names(died[4:])}")
    lines += bystanders([state for state in states if state not in died and state.ended != UNWATCHED], groups)
    return _of("died", died, lines)


def _raised(primary: list[RankState], states: Sequence[RankState], groups: Sequence[Group]) -> Diagnosis:
    first = primary[0]
    same = [state for state in primary[1:] if state.ended == RAISED and state.error == first.error]
    lines = [f"{named(first)} failed in {where_of(first)}: {first.error}"]
    if same:
        lines.append(f"{names(same)} raised the same")
    known = [first, *same]
    lines += bystanders([state for state in states if state not in known and state.ended != UNWATCHED], groups)
    return _of("raised", [first], lines, trace=() if first.shown else first.trace)


def _blame(
    kind: str, culprits: list[RankState], states: Sequence[RankState], groups: Sequence[Group], edges: Sequence[Edge]
) -> Diagnosis:
    culprits = sorted(culprits, key=lambda each: each.rank)
    blamed = {state.rank for state in culprits}
    first = culprits[0]
    idle_s = min((state.idle_s for state in culprits if state.runs), default=0.0)
    waiting = [
        state
        for state in states
        if state.rank not in blamed and state.begun and (state.runs or (state.ended == RAISED and state.secondary))
    ]
    if kind in ("left", "lost"):
        idle_s = max((state.idle_s for state in waiting if state.runs), default=0.0)
    lines = []
    for where, alike in alike_by(culprits, lambda state: doing(state, groups)).items():
        who = named(alike[0]) if len(alike) == 1 else names(alike)
        lines.append(_sentence(kind, who, where, alike, idle_s, len(alike) > 1))
    ring = kind == "hang" and len(culprits) > 1 and blamed <= {edge.waiter for edge in edges}
    if ring:
        lines.insert(0, f"{names(culprits)} wait for each other, and have not moved for {seconds(idle_s)}")
    else:
        lines += _missing(culprits, groups, edges)
    lines += bystanders(waiting, groups)
    if first.step == first.first_step and kind == "computing":
        lines.append("it is the first step: compiling a model may take this long")
    return _of(kind, culprits, lines, idle_s)


def _sentence(kind: str, who: str, where: str, alike: Sequence[RankState], idle_s: float, many: bool) -> str:
    is_, has = ("are", "have") if many else ("is", "has")
    state = alike[0]
    if kind == "left":
        end = {LEFT: "left its loop", INTERRUPTED: "was interrupted", RAISED: "failed", GONE: "is gone"}[state.ended]
        if many:
            end = end.replace("its loop", "their loops").replace("was ", "were ").replace("is ", "are ")
        after = f"after step {state.step - 1}" if state.ended == LEFT else f"in {where}"
        return f"{who} {end} {after}"
    if kind == "lost":
        return f"{who} {'do' if many else 'does'} not answer any more: last seen in {where}; is the machine up?"
    if kind == "stopped":
        return f"{who} {is_} stopped (by SIGSTOP, a debugger or Ctrl-Z) for {seconds(idle_s)}: in {where}"
    if kind == "computing":
        return f"{who} {has} been computing for {seconds(idle_s)}: in {where}"
    if kind == _CHECKPOINT:
        longest_s = max(each.in_phase_s for each in alike)
        return f"{who} {has} been writing a checkpoint for {seconds(longest_s)}: step {state.step}"
    if state.ended == UNWATCHED:
        return f"{who} {is_} waited for, and {is_} not watched"
    return f"{who} {has} not moved for {seconds(idle_s)}: in {where}"


def _missing(culprits: Sequence[RankState], groups: Sequence[Group], edges: Sequence[Edge]) -> list[str]:
    """The first collective that the culprits have not issued and others wait in."""
    blamed = {state.rank for state in culprits}
    direct = [edge for edge in edges if edge.collective is not None and not blamed.isdisjoint(edge.awaited)]
    if not direct:
        return []
    edge = min(direct, key=lambda each: (each.group, each.collective.sequence if each.collective else 0))
    assert edge.collective is not None
    same = [
        each
        for each in direct
        if each.group == edge.group and each.collective and each.collective.sequence == edge.collective.sequence
    ]
    members = sorted(_awaited(same))
    name = groups[edge.group].name
    came = "have not come" if len(members) > 1 else "has not come"
    return [f"{name_ranks(members)} {came} to {collective_text(edge.collective, name)}"]


def _network(states: Sequence[RankState], groups: Sequence[Group]) -> Diagnosis | None:
    """Everybody has come, and nothing moves."""
    known = [state for state in states if state.runs or (state.ended == RAISED and state.secondary)]
    for index, group in enumerate(groups):
        inside = [state for state in known if state.rank in group.ranks and state.groups.get(index)]
        open_ = [each for state in inside for each in state.groups[index] if not each.finished or not state.runs]
        if not open_ or len(group.ranks) < 2 or len({state.issued(index) for state in inside}) > 1:
            continue
        what = collective_text(min(open_, key=lambda each: each.sequence), group.name)
        idle_s = min((state.idle_s for state in inside if state.runs), default=0.0)
        nodes = sorted({state.node for state in inside})
        cause = f"the network between {', '.join(nodes[:6])}" if len(nodes) > 1 else f"the sockets of {nodes[0]}"
        since = f" for {seconds(idle_s)}" if idle_s else ""
        lines = [f"nothing has moved{since}: all ranks that can be seen came to {what}, and it does not end"]
        lines.append(f"look at {cause}")
        return _of("network", inside, [*lines, *bystanders(inside, groups)], idle_s)
    idle = [state for state in states if state.runs and state.begun]
    if not idle or all(state.busy for state in idle):
        return None
    if all(state.phase == _CHECKPOINT for state in idle):
        return None
    idle_s = min(state.idle_s for state in idle)
    lines = [f"no rank has moved for {seconds(idle_s)}, and none is behind the others"]
    return _of("hang", idle, [*lines, *bystanders(idle, groups)], idle_s)


def _of(
    kind: str, culprits: Sequence[RankState], lines: Sequence[str], idle_s: float = 0.0, trace: tuple[str, ...] = ()
) -> Diagnosis:
    ranks = tuple(sorted(state.rank for state in culprits))
    return Diagnosis(kind, ranks, culprits[0].step, culprits[0].phase, tuple(lines), idle_s, trace)
