"""Ranks, places and collectives in words, for people who look for a hang. Pure; no torch."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from bireme.hang_state import LEFT, LOST, POINT_TO_POINT, RAISED, Collective, Group, RankState
from bireme.text import name_ranks


def unfinished(state: RankState) -> list[tuple[int, Collective]]:
    return [(index, each) for index, recent in state.groups.items() for each in recent if not each.finished]


def named(state: RankState) -> str:
    host = f"host {state.host}, " if state.host and state.host != state.node else ""
    return f"rank {state.rank} on {state.node} ({host}pid {state.pid})"


def names(states: Sequence[RankState]) -> str:
    nodes = list(dict.fromkeys(state.node for state in sorted(states, key=lambda each: each.rank)))
    where = ", ".join(nodes[:3]) + (f" and {len(nodes) - 3} more nodes" if len(nodes) > 3 else "")
    return f"{name_ranks([state.rank for state in states])} on {where}"


def where_of(state: RankState) -> str:
    if state.phase is None:
        return f"step {state.step}, which it has not begun"
    return f"step {state.step}, {state.phase}"


def doing(state: RankState, groups: Sequence[Group]) -> str:
    """Step, phase, and what it waits in."""
    where = where_of(state)
    open_ = unfinished(state)
    wait = state.wait
    if open_:
        index, collective = min(open_, key=lambda each: each[1].sequence)
        if index < len(groups):
            return f"{where}, {collective_text(collective, groups[index].name)}"
    if wait is not None:
        peer = f" {'from' if wait.operation == 'receive' else 'to'} rank {wait.peer}" if wait.peer is not None else ""
        return f"{where}, {wait.operation}{peer if wait.operation in POINT_TO_POINT else ''}"
    return where


def collective_text(collective: Collective, group: str) -> str:
    of = f" of group {group}" if group else ""
    return f"{collective.operation} #{collective.sequence} ({size_text(collective.bytes)}){of}"


def size_text(num_bytes: int) -> str:
    """``4.2 MB``."""
    value, unit = float(num_bytes), "bytes"
    for unit in ("bytes", "KB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"


def seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def alike_by(states: Iterable[RankState], key: Callable[[RankState], Hashable]) -> dict[Any, list[RankState]]:
    alike: dict[Any, list[RankState]] = {}
    for state in states:
        alike.setdefault(key(state), []).append(state)
    return alike


def bystanders(states: Sequence[RankState], groups: Sequence[Group]) -> list[str]:
    """Where the others are, alike ones together."""
    lines = []
    alike = alike_by(
        states, lambda state: (state.ended or ("wait" if _is_waiting(state) else "run"), doing(state, groups))
    )
    for (how, where), those in list(alike.items())[:4]:
        who, many = names(those), len(those) > 1
        idle_s = min(state.idle_s for state in those)
        since = f", for {seconds(idle_s)}" if idle_s >= 1.0 else ""
        if how == "wait":
            lines.append(f"{who} wait{'' if many else 's'} in {where}{since}")
        elif how == "run":
            lines.append(f"{who} {'were' if many else 'was'} in {where}{since}")
        elif how == LEFT:
            lines.append(f"{who} {'have' if many else 'has'} left the loop")
        elif how == RAISED:
            lines.append(f"{who} lost {'the others' if those[0].secondary else 'its way, too,'} in {where}")
        elif how == LOST:
            lines.append(f"{who} {'do' if many else 'does'} not answer: last seen in {where}")
        else:
            lines.append(f"{who} ended in {where}")
    if len(alike) > 4:
        lines.append(f"and {sum(map(len, list(alike.values())[4:]))} more ranks elsewhere")
    return lines


def _is_waiting(state: RankState) -> bool:
    return state.wait is not None or bool(unfinished(state))
