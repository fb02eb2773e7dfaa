"""Small messages between all ranks, on a gloo group of their own: never on the groups that train."""

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import orjson
import torch
import torch.distributed as dist

from bireme.errors import SharedError
from bireme.text import name_ranks

_POLL = timedelta(seconds=0.5)
COLLECTIVE_TIMEOUT_S = 1800.0  # PyTorch's own for gloo
SIDE_GROUP = "bireme"  # description of the groups that Bireme makes for itself: they are not observed


def new_side_group(ranks: list[int] | None = None, connect_s: float | None = None) -> Any:
    """A gloo group for messages that are not training's; collective over all ranks (None: of all ranks).

    `connect_s`: gloo's timeout while the ranks connect (it waits up to five times as long); None: PyTorch's.
    """
    timeout = None if connect_s is None else timedelta(seconds=connect_s)
    group = dist.new_group(ranks, backend="gloo", group_desc=SIDE_GROUP, timeout=timeout)
    if timeout is not None:
        set_group_timeout(COLLECTIVE_TIMEOUT_S, group)
    return group


def set_group_timeout(timeout_s: float, group: Any = None) -> None:
    """How long a collective of a group (None: of all ranks) may take from now on."""
    timeout = timedelta(seconds=timeout_s)
    if hasattr(dist, "set_timeout"):
        dist.set_timeout(timeout, group)
    else:  # torch 2.13
        dist.distributed_c10d._set_pg_timeout(timeout, group)


class PeerTimeout(RuntimeError):
    """The other ranks did not answer in time."""


class Channel:
    """Collective calls: every rank makes the same ones in the same order, from one thread at a time.

    Without a process group (one process) every call answers from this rank alone. A call that waits longer than
    `timeout_s` raises PeerTimeout; `give_up` is asked twice a second whether to stop waiting sooner.
    """

    def __init__(self, timeout_s: float = COLLECTIVE_TIMEOUT_S, connect_s: float | None = None):
        self.distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if self.distributed else 0
        self.size = dist.get_world_size() if self.distributed else 1
        self.timeout_s = timeout_s
        self.give_up: Callable[[], bool] = lambda: False
        # The side group shares nothing with the training groups: it has its own sockets and worker threads.
        self.group: Any = new_side_group(connect_s=connect_s) if self.size > 1 else None

    def wait(self, work: Any) -> None:
        """Waits for a collective in short turns, so that a rank whose peers are gone can leave."""
        started = time.monotonic()
        while True:
            try:
                work.wait(_POLL)
                return
            except RuntimeError as error:
                if "timed out" not in str(error).lower():
                    raise
                if self.give_up() or time.monotonic() - started > self.timeout_s:
                    raise PeerTimeout(f"no answer from the other ranks in {time.monotonic() - started:.0f} s") from None

    def reduce_min(self, tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
        """The element-wise minimum over the members of `group` (default: all ranks), in place."""
        if self.size > 1:
            self.wait(dist.all_reduce(tensor, dist.ReduceOp.MIN, group=group or self.group, async_op=True))
        return tensor

    def gather(self, blob: bytes) -> list[bytes]:
        """Everybody's bytes, by rank; on ranks other than 0 an empty list."""
        if self.size == 1:
            return [blob]
        padded, sizes = self._padded(blob)
        parts = [torch.empty_like(padded) for _ in sizes] if self.rank == 0 else None
        self.wait(dist.gather(padded, parts, dst=0, group=self.group, async_op=True))
        return [part[:size].numpy().tobytes() for part, size in zip(parts or [], sizes, strict=False)]

    def all_gather(self, message: Any) -> list[Any]:
        """Everybody's message (anything that JSON can hold), by rank, on every rank."""
        blob = orjson.dumps(message)
        if self.size == 1:
            return [orjson.loads(blob)]
        padded, sizes = self._padded(blob)
        parts = [torch.empty_like(padded) for _ in sizes]
        self.wait(dist.all_gather(parts, padded, group=self.group, async_op=True))
        return [orjson.loads(part[:size].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def agree(self, values: Mapping[str, Any]) -> None:
        """SharedError naming the first of these settings (what JSON can hold) that is another on some rank: the ranks
        would wait for each other's next collective, or train something else. Collective."""
        everybodys = self.all_gather(values)
        if not all(isinstance(each, dict) and each.keys() == values.keys() for each in everybodys):
            raise SharedError("the ranks were started with different commands, or different versions of bireme")
        for name, value in everybodys[0].items():
            others = [rank for rank, each in enumerate(everybodys) if each[name] != value]
            if others:
                raise SharedError(
                    f"the ranks were started with different settings: {name} is {value!r} on rank 0, but "
                    f"{everybodys[others[0]][name]!r} on {name_ranks(others)}"
                )

    def raise_together(self, problem: str | None) -> None:
        """SharedError on every rank when one has a problem: with the ranks that each problem comes from."""
        problems = self.all_gather(problem)
        said = []
        for message in dict.fromkeys(each for each in problems if each is not None):
            ranks = [rank for rank, each in enumerate(problems) if each == message]
            said.append(message if len(ranks) == self.size else f"{name_ranks(ranks)}: {message}")
        if said:
            raise SharedError("; ".join(said))

    def _padded(self, blob: bytes) -> tuple[torch.Tensor, list[int]]:
        """The bytes as a tensor as long as the longest, and how long everybody's are."""
        gathered = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self.wait(dist.all_gather(gathered, torch.tensor([len(blob)]), group=self.group, async_op=True))
        sizes = [int(each) for each in gathered]
        padded = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        if blob:
            padded[: len(blob)] = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
        return padded, sizes
