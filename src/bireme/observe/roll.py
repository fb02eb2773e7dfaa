"""Waits until every rank makes its Monitor, and names those that do not: making one is collective."""

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch.distributed as dist

from bireme.channel import COLLECTIVE_TIMEOUT_S
from bireme.errors import UserError
from bireme.text import name_ranks

log = logging.getLogger(__name__)

_SAY_AFTER_S = 20.0
_SAY_AGAIN_S = 60.0
_POLL_S, _SLOWEST_POLL_S = 0.02, 1.0
_GO, _STOP = "go", "stop"


class Store(Protocol):
    """What is needed of a PyTorch store."""

    def add(self, key: str, amount: int, /) -> int: ...
    def set(self, key: str, value: str, /) -> None: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


def call_the_roll(timeout_s: float = COLLECTIVE_TIMEOUT_S, environ: Mapping[str, str] = os.environ) -> None:
    """Returns when all ranks of the process group are here. UserError where there should be a group and is none, and
    for ranks that do not come in time: by default the half hour that PyTorch itself waits."""
    if not (dist.is_available() and dist.is_initialized()):
        size = environ.get("WORLD_SIZE", "")
        if size.isdecimal() and int(size) > 1:
            raise UserError(
                f"the Monitor was made before torch.distributed.init_process_group, in a job of {size} ranks: "
                "make it after that, on every rank"
            )
        return
    store: Any = dist.distributed_c10d._get_default_store()
    wait_for_all(store, dist.get_rank(), dist.get_world_size(), timeout_s)


def wait_for_all(
    store: Store,
    rank: int,
    size: int,
    timeout_s: float = COLLECTIVE_TIMEOUT_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Every rank says at the store that it is here. The first of those that wait names the others, after 20 seconds.

    UserError after `timeout_s`, on all ranks or on none: whoever decides first, that all are here or that they are not,
    decides for all.
    """
    if size == 1:
        return
    # The n-th of each rank belong together, in this process group: processes may have been in others before.
    prefix = f"bireme/monitor/{store.add(f'bireme/monitors/{rank}', 1)}"
    store.set(f"{prefix}/{rank}", "here")
    here = store.add(prefix, 1)
    began = clock()
    say_at, poll_s = began + _SAY_AFTER_S, _POLL_S
    while here < size:
        sleep(poll_s)
        poll_s = min(1.5 * poll_s, _SLOWEST_POLL_S)
        here = store.add(prefix, 0)
        now = clock()
        late = now - began > timeout_s
        if here >= size or not (late or now >= say_at):
            continue
        say_at = now + _SAY_AGAIN_S
        absent = [other for other in range(size) if not store.check([f"{prefix}/{other}"])]
        if not absent:
            continue
        who, seconds = name_ranks(absent), now - began
        if late:
            if _decided(store, prefix, _STOP) == _GO:
                return
            raise UserError(f"{who} made no Monitor in {seconds:.0f} s: every rank has to, at the same place")
        if rank == min(set(range(size)) - set(absent)):
            verb = "have" if len(absent) > 1 else "has"
            log.warning(
                "%s %s made no Monitor for %.0f s, and the others wait: every rank has to make one, after "
                "init_process_group",
                *(who, verb, seconds),
            )
    if _decided(store, prefix, _GO) == _STOP:
        raise UserError("this rank made its Monitor too late: the others have stopped waiting for it")


def _decided(store: Store, prefix: str, wish: str) -> str:
    return store.compare_set(f"{prefix}/decided", "", wish).decode()
