"""With --peers node 0 knows where the others are: while it waits for them it tries the way to those who do not come."""

import contextlib
import threading
import time
from collections.abc import Container

from bireme.doctor.machine import is_mine, look_up
from bireme.doctor.meeting import Plan
from bireme.doctor.reach import Answerer, reach_all
from bireme.network import Endpoint, is_loopback

_EVERY_S = 0.7
_ANSWER_S = 1.5


def answer_dials(plan: Plan, answerer: Answerer) -> None:
    """Every other node's side: be there under its own entry of --peers, while it tries to reach node 0."""
    entry = plan.entries[plan.meeting.index]
    # On loopback all nodes are one machine: there this would take the port that node 0 finds free or held.
    for address in (each for each in look_up(entry.host).addresses if is_mine(each) and not is_loopback(each)):
        with contextlib.suppress(OSError):  # something else has the port: then this cannot be told
            answerer.open(address, entry.port)


class Dialer:
    """Tries those who have not come, again and again."""

    def __init__(self, plan: Plan, come: Container[int]):
        self._plan = plan
        self._come = come
        self._stop = threading.Event()
        self._answered: set[int] = set()
        self._errors: dict[int, str] = {}
        threading.Thread(target=self._dial, daemon=True).start()

    def close(self) -> None:
        self._stop.set()

    def what_of(self, index: int) -> str | None:
        """What the way to a node that never came says about it; None when nothing is known."""
        label = self._plan.label(index)
        if index in self._answered:
            return f"its doctor runs and the way to it is free, but {label} -> {self._plan.label(0)} is blocked"
        error = self._errors.get(index)
        return f"it did not come, nor could it be reached ({error})" if error else None

    def _dial(self) -> None:
        known: dict[int, str] = {}
        while not self._stop.wait(_EVERY_S):
            targets = {}
            for index, entry in enumerate(self._plan.entries):
                if index == 0 or index in self._come or index in self._answered:
                    continue
                if index not in known:
                    name = look_up(entry.host)
                    if not name.addresses:
                        self._errors[index] = f"{entry.host}: {name.error}"
                        continue
                    known[index] = name.addresses[0]
                targets[index] = (known[index], entry.port)
            for reach in reach_all(self._plan.meeting, targets, time.monotonic() + _ANSWER_S):
                if reach.error:
                    self._errors[reach.to] = f"{Endpoint(reach.address, targets[reach.to][1])}: {reach.error}"
                else:
                    self._answered.add(reach.to)
