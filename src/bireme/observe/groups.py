"""The run's table of observed process groups: those that are there at first, and those that are made later."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from bireme.channel import Channel, new_side_group

_FIRST_LATE = 1 << 20  # numbers of groups that have no place in the table yet


class LateGroups:
    """Groups that this rank became a member of after the monitor was made: the training thread adds them, under
    numbers of its own, and the exchange gives them their places in the run's table."""

    def __init__(
        self, table: list[dict[str, Any]], learned: Callable[[list[dict[str, Any]]], None] = lambda table: None
    ):
        """`table` is extended; `learned` is called with it on every rank when it was."""
        self._table = table
        self._learned = learned
        self._found: list[tuple[int, dict[str, Any]]] = []
        self._places: dict[int, int] = {}
        self._next = _FIRST_LATE

    def add(self, group: Any) -> int:
        """The number that its spans carry until it has a place."""
        number, self._next = self._next, self._next + 1
        self._found.append((number, described(group)))
        return number

    def found(self) -> list[dict[str, Any]]:
        """Those that have no place yet."""
        return [description for _, description in list(self._found)]

    def joined(self, found: list[dict[str, Any]], of_all: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """`of_all` ranks what they have found, `found` by this one among it; those that are new to the table, added.

        A member may find a group a round after another: then it has its place already.
        """
        new: list[dict[str, Any]] = []
        for each in of_all:
            if each not in self._table and each not in new:
                new.append(each)
        self._table.extend(new)
        for number, description in self._found[: len(found)]:
            self._places[number] = self._table.index(description)
        del self._found[: len(found)]
        if new:
            self._learned(self._table)
        return new

    def index_of(self, group: int) -> int:
        return self._places.get(group, group) if group >= _FIRST_LATE else group


def described(group: Any) -> dict[str, Any]:
    """A process group as the run's table has it; members of one group say the same."""
    return {
        "id": group.group_name,
        # A device mesh's is "mesh_shard"; PyTorch's word for none is "undefined".
        "name": (group.group_name if group.group_desc in (None, "", "undefined") else group.group_desc).removeprefix(
            "mesh_"
        ),
        "ranks": dist.get_process_group_ranks(group),
    }


def side_groups(
    channel: Channel, groups: list[Any]
) -> tuple[list[dict[str, Any]], list[tuple[list[int], Any]], dict[int, Any]]:
    """The run's table of observed groups, the side group of each, and which of them this rank's `groups` are.

    Collective: every rank calls it, each with the groups that it is a member of. Groups are told apart by their name
    and members; the table is sorted, so it is the same on every rank.
    """
    mine = [described(group) for group in groups]
    table: list[dict[str, Any]] = []
    for description in sorted(
        (each for gathered in channel.all_gather(mine) for each in gathered),
        key=lambda each: (each["id"], each["ranks"]),
    ):
        if description not in table:
            table.append(description)
    by_members: dict[tuple[int, ...], Any] = {tuple(range(channel.size)): channel.group}
    for description in table:
        members = tuple(description["ranks"])
        if members not in by_members:
            by_members[members] = new_side_group(list(members)) if len(members) > 1 else None
    indices = {
        index: group
        for index, description in enumerate(table)
        for group, own in zip(groups, mine, strict=True)
        if own == description
    }
    sides = [(description["ranks"], by_members[tuple(description["ranks"])]) for description in table]
    return table, sides, indices
