"""Measures links: every rank of a process group runs the same operations at the same time and compares durations.

What to do next is decided from rank 0's clock and from durations that every rank has been told, so that all ranks
decide alike. The only place of `bireme links` that knows torch.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bireme.link_pairs import Pair, next_bytes, rounds
from bireme.links import INTER_NODE, INTRA_NODE, OPERATIONS, SMALLEST_BYTES, WORLD, Group, Measurement, Timing
from bireme.world import World

SIZE_STEP = 4
PAIR_SMALLEST_BYTES = 64 * 1024  # smaller messages say more about latency than about the link

_ELEMENT_BYTES = 4  # float32: what gradients are reduced in
_MOST_REPETITIONS = 31  # the first is not counted
_MOST_LONG_REPETITIONS = 11
_LONG_S = 0.02
_KEPT_SHARE = 1 / 3  # of the time, for repetitions
_TURN_S = 0.1  # how long a cell is repeated before it is the next one's turn
_PAIR_TARGET_S = 0.2
_PAIR_SHARE = 0.3  # of the time, for the pairs of nodes
_PAIR_LAST_SHARE = 0.5  # when a slow link has taken more than its share, no further pair is begun after this

Operation = Callable[[], None]


def sizes(max_bytes: int) -> list[int]:
    """1 KiB, 4 KiB, ... and `max_bytes`."""
    result = []
    size = SMALLEST_BYTES
    while size < max_bytes:
        result.append(size)
        size *= SIZE_STEP
    return [*result, max_bytes]


def groups_of(nodes: list[dict[str, Any]]) -> list[Group]:
    """Which ranks to measure together, for a given topology (pure)."""
    everybody = tuple(rank for node in nodes for rank in node["ranks"])
    intra = tuple(tuple(node["ranks"]) for node in nodes if len(node["ranks"]) > 1)
    firsts = tuple(node["ranks"][0] for node in nodes)
    groups = [Group(WORLD, (tuple(sorted(everybody)),))]
    if not intra:
        groups.append(Group(INTRA_NODE, (), reason="every node has one rank"))
    else:
        groups.append(Group(INTRA_NODE, intra, same_as=WORLD if len(nodes) == 1 else None))
    if len(nodes) == 1:
        groups.append(Group(INTER_NODE, (), reason="all ranks are on one node"))
    else:
        groups.append(Group(INTER_NODE, (firsts,), same_as=None if intra else WORLD))
    return groups


@dataclass(slots=True)
class _Side:
    """A group as this rank sees it: the members it is one of, if any, and their process group."""

    group: Group
    members: list[int]
    handle: Any


@dataclass(slots=True)
class _Cell:
    """One operation of one size on one group, and what it took so far: the same on every rank."""

    side: _Side
    operation: str
    size: int
    slowest_ns: list[list[int]]  # by node or other part of the group: of each repetition, the maximum over its ranks
    cost_s: float = 0.0  # of one repetition, with meeting and telling

    @property
    def kind(self) -> tuple[str, str]:
        return self.side.group.name, self.operation

    @property
    def text(self) -> str:
        return f"{self.operation} of {self.size:,} bytes, group {self.side.group.name}"

    @property
    def repetitions(self) -> int:
        return len(self.slowest_ns[0])

    @property
    def once_s(self) -> float:
        return max((each[-1] for each in self.slowest_ns if each), default=0) * 1e-9


class Probe:
    """One measurement; every rank makes one, with the same arguments. `check` may raise to stop between repetitions.

    `progress(elapsed_s, text)` is told how much of the time is over and what is next.
    """

    def __init__(
        self,
        world: World,
        max_bytes: int,
        seconds: float,
        check: Callable[[], None] = lambda: None,
        progress: Callable[[float, str], None] = lambda elapsed_s, text: None,
    ):
        self.world = world
        self.max_bytes = max_bytes
        self.seconds = seconds
        self.check = check
        self.progress = progress
        self.groups = groups_of(world.nodes)
        self._started_ns = time.perf_counter_ns()
        self.elapsed_s = 0.0  # on rank 0, when the ranks last agreed: the same number on every rank

    @property
    def left_s(self) -> float:
        return self.seconds - self.elapsed_s

    def repeat(self, operation: Operation | None, count: int) -> list[list[int] | None]:
        """Runs `operation` (None: this rank has no part) `count` times; durations in nanoseconds by rank, told to all.

        All ranks start each repetition together; each times its own part from its own start to its own finish.
        """
        cuda = self.world.device.type == "cuda"
        own: list[int] = []
        for _ in range(count):
            self.check()
            self._meet()
            if operation is not None:
                if cuda:
                    torch.cuda.synchronize(self.world.device)
                start_ns = time.perf_counter_ns()
                operation()
                if cuda:
                    torch.cuda.synchronize(self.world.device)
                own.append(time.perf_counter_ns() - start_ns)
        elapsed_s = (time.perf_counter_ns() - self._started_ns) * 1e-9
        told = self.world.channel.all_gather([elapsed_s, None if operation is None else own])
        self.elapsed_s = told[0][0]
        return [durations for _, durations in told]

    def _meet(self) -> None:
        """A barrier on the side group, as small as a message can be."""
        self.world.channel.reduce_min(torch.zeros(1))

    def run(self) -> tuple[list[Pair], list[Measurement]]:
        """Measures all there is to measure, as far as the time allows."""
        return self.measure_pairs(), self.measure_table()

    # --- groups, operations and sizes --------------------------------------------------------------------------------

    def measure_table(self) -> list[Measurement]:
        """Every cell once, in ascending sizes: a slow link leaves out the largest, of every operation alike. Then all
        of them again and again while there is time, so that a disturbance does not fall on one cell alone."""
        sides = [self._enter(group) for group in self.groups if group.members and group.same_as is None]
        cells = [
            _Cell(side, operation, size, [[] for _ in side.group.members])
            for size in sizes(self.max_bytes)
            for side in sides
            for operation in OPERATIONS
        ]
        # The first round leaves time to repeat; what time remains in the end is for still larger sizes.
        for kept_s in (_KEPT_SHARE * self.left_s, 0.0):
            self._reach(cells, kept_s)
            self._repeat_all(cells)
        return [self._measurement(cell) for cell in cells]

    def _reach(self, cells: list["_Cell"], kept_s: float) -> None:
        """Runs what has not run yet once, in ascending sizes, as far as the time allows without `kept_s` of it."""
        smaller: dict[tuple[str, str], _Cell] = {}
        for cell in cells:
            before = smaller.get(cell.kind)
            smaller[cell.kind] = cell
            if cell.repetitions or (before and not before.repetitions):
                continue
            expected_s = before.once_s * cell.size / before.size if before else 0.0
            if expected_s < self.left_s - (kept_s if before else 0.0):
                self._repeat_cell(cell, 1)

    def _repeat_all(self, cells: list["_Cell"]) -> None:
        """Repeats what has run, in turns, as often as it is worth it or the time allows."""
        going_on = True
        while going_on:
            going_on = False
            for cell in cells:
                if not cell.repetitions or self.left_s < cell.cost_s:
                    continue
                most = _MOST_LONG_REPETITIONS if cell.cost_s > _LONG_S else _MOST_REPETITIONS
                in_turn = max(1, int(min(_TURN_S, self.left_s) / cell.cost_s))
                more = min(in_turn, most - cell.repetitions)
                if more > 0:
                    self._repeat_cell(cell, more)
                    going_on = True

    def _enter(self, group: Group) -> _Side:
        """Makes the process groups of a group; collective over all ranks."""
        side = _Side(group, [], None)
        for members in group.members:
            # All ranks are in the default group already. Every rank has to take part in making any other.
            handle = (
                dist.group.WORLD
                if len(members) == self.world.size
                else dist.new_group(list(members), timeout=timedelta(seconds=self.world.channel.timeout_s))
            )
            if self.world.rank in members:
                side.members, side.handle = list(members), handle
        return side

    def _repeat_cell(self, cell: "_Cell", count: int) -> None:
        side = cell.side
        self.progress(min(self.elapsed_s, self.seconds), cell.text)
        run = _prepare(cell.operation, cell.size, side, self.world.rank, self.world.device) if side.members else None
        began_s = self.elapsed_s
        durations = self.repeat(run, count)
        cell.cost_s = max(1e-6, (self.elapsed_s - began_s) / count)
        for members, slowest_ns in zip(side.group.members, cell.slowest_ns, strict=True):
            slowest_ns += _slowest([durations[rank] for rank in members])

    def _measurement(self, cell: "_Cell") -> Measurement:
        name = cell.side.group.name
        if not cell.repetitions:
            reason = f"not reached in {self.seconds:g} s: raise --seconds"
            return Measurement(name, cell.operation, cell.size, None, reason)
        timings = [
            self._timing(cell.size, members, slowest_ns)
            for members, slowest_ns in zip(cell.side.group.members, cell.slowest_ns, strict=True)
        ]
        slowest = max(timings, key=lambda timing: timing.median_s)
        return Measurement(name, cell.operation, cell.size, slowest, None, tuple(timings) if name == INTRA_NODE else ())

    def _timing(self, size: int, members: tuple[int, ...], slowest_ns: list[int]) -> Timing:
        # The first repetition only warmed up: connections are made and memory is touched in it.
        counted_s = np.array(slowest_ns[1:] or slowest_ns, dtype=np.float64) * 1e-9
        p10_s, median_s, p90_s = (float(value) for value in np.quantile(counted_s, (0.1, 0.5, 0.9)))
        nodes = {self.world.ranks[rank]["node"] for rank in members}
        return Timing(
            ranks=len(members),
            bytes=_elements(size, len(members)) * _ELEMENT_BYTES,
            repetitions=len(counted_s),
            median_s=median_s,
            p10_s=p10_s,
            p90_s=p90_s,
            node=nodes.pop() if len(nodes) == 1 else None,
        )

    # --- pairs of nodes ----------------------------------------------------------------------------------------------

    def measure_pairs(self) -> list[Pair]:
        """The first rank of every node sends to the first rank of every other: one direction, then the other."""
        nodes = self.world.nodes
        schedule = [
            [pair if forth else pair[::-1] for pair in pairs] for pairs in rounds(len(nodes)) for forth in (True, False)
        ]
        result = []
        start_bytes = min(PAIR_SMALLEST_BYTES, self.max_bytes)
        for exchanges in schedule:
            names = [(nodes[source]["name"], nodes[target]["name"]) for source, target in exchanges]
            self.progress(min(self.elapsed_s, self.seconds), f"pairs of nodes: {names[0][0]} to {names[0][1]}")
            if self.elapsed_s > _PAIR_LAST_SHARE * self.seconds:
                reason = f"not reached: pairs of nodes may take half of the {self.seconds:g} s"
                result += [Pair(source, target, 0, 0, None, reason) for source, target in names]
                continue
            share_s = _PAIR_SHARE * self.seconds / len(schedule)
            target_s = min(_PAIR_TARGET_S, max(0.02, share_s / 4))
            ends = [(nodes[source]["ranks"][0], nodes[target]["ranks"][0]) for source, target in exchanges]
            measured = self._exchange(ends, start_bytes, target_s, max(1, min(3, int(share_s / target_s) - 1)))
            result += [
                Pair(source, target, bytes, repetitions, median_s)
                for (source, target), (bytes, repetitions, median_s) in zip(names, measured, strict=True)
            ]
            # The next link is probably like this one: most of the way up need not be walked again.
            start_bytes = max(start_bytes, min(bytes for bytes, _, _ in measured) // 16)
        return result

    def _exchange(
        self, ends: list[tuple[int, int]], start_bytes: int, target_s: float, repetitions: int
    ) -> list[tuple[int, int, float]]:
        """(bytes, repetitions, median seconds) of a message in each direction of `ends`, all at the same time."""
        size_of = dict.fromkeys(ends, start_bytes)
        settled: set[tuple[int, int]] = set()
        while True:
            measuring = len(settled) == len(ends)
            mine = next((each for each in ends if self.world.rank in each), None)
            run = None if mine is None else _message(*mine, size_of[mine], self.world.rank, self.world.device)
            durations = self.repeat(run, repetitions if measuring else 1)
            times_s = {each: median(_slowest([durations[rank] for rank in each])) * 1e-9 for each in ends}
            if measuring:
                return [(size_of[each], repetitions, times_s[each]) for each in ends]
            for each in ends:
                if each not in settled:
                    size_of[each], done = next_bytes(size_of[each], times_s[each], target_s, self.max_bytes)
                    settled |= {each} if done else set()


def _slowest(by_rank: list[list[int] | None]) -> list[int]:
    """Of each repetition, the longest duration among the ranks that had a part in it."""
    return [max(each) for each in zip(*(each for each in by_rank if each), strict=True)]


def _elements(size: int, ranks: int) -> int:
    """Elements of a message of about `size` bytes that `ranks` ranks can share evenly."""
    return max(1, -(-size // (_ELEMENT_BYTES * ranks))) * ranks


def _prepare(operation: str, size: int, side: _Side, rank: int, device: torch.device) -> Operation | None:
    """The operation on this rank, its memory at hand. What `size` means for each: docs/links.md."""
    members, group = side.members, side.handle
    count = len(members)
    elements = _elements(size, count)

    def zeros(number: int) -> torch.Tensor:
        return torch.zeros(number, dtype=torch.float32, device=device).fill_(0.0)  # touched: no page faults later

    match operation:
        case "all_reduce":
            whole = zeros(elements)
            return lambda: _discard(dist.all_reduce(whole, group=group))
        case "all_gather":
            whole, part = zeros(elements), zeros(elements // count)
            return lambda: _discard(dist.all_gather_single(whole, part, group=group))
        case "reduce_scatter":
            whole, part = zeros(elements), zeros(elements // count)
            return lambda: _discard(dist.reduce_scatter_single(part, whole, group=group))
        case "all_to_all":
            whole, received = zeros(elements), zeros(elements)
            return lambda: _discard(dist.all_to_all_single(received, whole, group=group))
        case "broadcast":
            whole = zeros(elements)
            return lambda: _discard(dist.broadcast(whole, src=members[0], group=group))
        case "send":  # from the first to the last: the others have no part in it
            if rank not in (members[0], members[-1]):
                return None
            whole = zeros(elements)
            if rank == members[0]:
                return lambda: _discard(dist.send(whole, dst=members[-1], group=group))
            return lambda: _discard(dist.recv(whole, src=members[0], group=group))
    raise AssertionError(operation)


def _message(source: int, target: int, bytes: int, rank: int, device: torch.device) -> Operation:
    data = torch.zeros(bytes, dtype=torch.uint8, device=device).fill_(0)
    if rank == source:
        return lambda: _discard(dist.send(data, dst=target))
    return lambda: _discard(dist.recv(data, src=source))


def _discard(_: Any) -> None:
    pass
