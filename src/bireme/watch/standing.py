"""Which verdicts of a run hold now, from its `verdict` events alone. No numpy."""

from collections.abc import Mapping
from typing import Any

from bireme.verdict.kinds import DRIFT, NODE, ONE_OFF, RANK

_ONE_CULPRIT = {RANK, NODE, DRIFT}


class Standing:
    """`add` takes events in their order; `verdicts` are those that have started and not ended, the newest last.

    Single slow steps never end, and so never stand.
    """

    def __init__(self) -> None:
        self.verdicts: list[Mapping[str, Any]] = []

    def add(self, event: Mapping[str, Any]) -> None:
        if event.get("event") == "resumed":  # who judges begins anew
            self.verdicts.clear()
        if event.get("event") != "verdict" or event.get("kind") == ONE_OFF:
            return
        before = self._match(event)
        if before is not None:
            self.verdicts = [verdict for verdict in self.verdicts if verdict is not before]
        if event.get("change") != "ended":
            self.verdicts.append(event)

    def _match(self, event: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """What this event is about: the most alike first, since several things may be wrong with the same ranks."""
        if event.get("change") == "started":
            alike = [_same]
        else:
            alike = [_same, _same_thing, _same_culprit]
        for match in alike:
            for verdict in self.verdicts:
                if match(verdict, event):
                    return verdict
        return None


def ranks_of(event: Mapping[str, Any]) -> tuple[int, ...]:
    """The ranks that an event names; a rank is a whole number."""
    ranks = event.get("ranks")
    return tuple(sorted({rank for rank in ranks if type(rank) is int})) if isinstance(ranks, list | tuple) else ()


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return (a.get("kind"), ranks_of(a), a.get("phase")) == (b.get("kind"), ranks_of(b), b.get("phase"))


def _same_thing(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.get("phase") == b.get("phase") and _same_culprit(a, b)


def _same_culprit(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """A rank may have turned out to be its whole node, and the reverse."""
    if a.get("kind") in _ONE_CULPRIT and b.get("kind") in _ONE_CULPRIT:
        return bool(set(ranks_of(a)) & set(ranks_of(b)))
    return a.get("kind") == b.get("kind")
