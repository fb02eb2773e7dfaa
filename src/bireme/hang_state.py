"""Where each rank is, as its sentinel says it. Pure; no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

# How a rank has ended.
RUNS = ""
LEFT = "left"  # its loop, in order
INTERRUPTED = "interrupted"  # by a signal, or told to end
RAISED = "raised"
GONE = "gone"  # without a word
LOST = "lost"  # nobody answers for it any more
UNWATCHED = "unwatched"  # nobody ever did

POINT_TO_POINT = frozenset({"send", "receive"})


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective that a rank has issued on a group."""

    sequence: int
    operation: str
    bytes: int
    finished: bool


@dataclass(frozen=True, slots=True)
class Group:
    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """An operation that a rank blocks in, in Python; `peer`: the rank that a send or receive is with."""

    operation: str
    group: int
    peer: int | None = None


@dataclass(frozen=True, slots=True)
class RankState:
    """What is known of one rank."""

    rank: int
    node: str
    host: str = ""
    pid: int = 0
    process: str = "S"  # the kernel's letter: R S D T Z; empty: there is none
    ended: str = RUNS
    ended_at_s: float = 0.0  # when that was heard of, on the clock of whoever asks
    error: str = ""  # what it raised: the first line
    trace: tuple[str, ...] = ()
    secondary: bool = False  # it only noticed that another rank is gone
    together: bool = False  # all ranks raise it at the same time, and it is shown
    shown: bool = False  # it is a message for the user, which the program prints itself
    exit: str = ""  # ``killed by signal 9 (SIGKILL)``, where known
    out_of_memory: int = 0  # processes that the kernel has killed for that since the start, when this one ended
    step: int = 0
    first_step: int = 1
    phase: str | None = None  # None: its first step has not begun
    idle_s: float = 0.0  # without movement
    in_phase_s: float = 0.0
    busy: bool = False  # its thread has computed since
    wait: Wait | None = None
    groups: Mapping[int, tuple[Collective, ...]] = field(default_factory=dict)

    @property
    def runs(self) -> bool:
        return self.ended == RUNS

    @property
    def begun(self) -> bool:
        return self.phase is not None

    def issued(self, group: int) -> int:
        """How many collectives of a group it has issued."""
        recent = self.groups.get(group)
        return recent[-1].sequence + 1 if recent else 0


_PLAIN: dict[str, type] = {
    "process": str,
    "ended": str,
    "error": str,
    "secondary": bool,
    "together": bool,
    "shown": bool,
    "exit": str,
    "out_of_memory": int,
    "step": int,
    "idle_s": float,
    "in_phase_s": float,
    "busy": bool,
}


def merged(state: RankState, message: Mapping[str, Any], groups: Sequence[Group]) -> RankState:
    """The state with what a message of its sentinel says anew. ValueError for what no sentinel would say."""
    try:
        said: dict[str, Any] = {name: kind(message[name]) for name, kind in _PLAIN.items() if name in message}
        if "phase" in message:
            said["phase"] = None if message["phase"] is None else str(message["phase"])
        if "trace" in message:
            said["trace"] = tuple(str(line) for line in message["trace"])
        if "wait" in message:
            said["wait"] = _wait(message["wait"], groups)
        if "groups" in message:
            said["groups"] = {
                int(index): tuple(Collective(int(a), str(b), int(c), bool(d)) for a, b, c, d in recent)
                for index, recent in message["groups"].items()
                if int(index) < len(groups)
            }
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ValueError(f"a state that is none: {error}") from None
    return replace(state, **said)


def _wait(wait: Any, groups: Sequence[Group]) -> Wait | None:
    if wait is None:
        return None
    operation, group, side = str(wait[0]), int(wait[1]), int(wait[2])
    peer = None
    if operation in POINT_TO_POINT and 0 <= group < len(groups) and 0 <= side < len(groups[group].ranks):
        peer = groups[group].ranks[side]
    return Wait(operation, group, peer)
