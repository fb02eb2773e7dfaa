"""The ways in which a rank is made to fail on purpose."""

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from bireme.inject.grammar import Injection

_ODD_SIZE = 12_345  # elements: no collective of training has so many


def failure(injection: Injection, device: Any = None) -> Callable[[], None]:
    """What this rank does when the step and the phase have come."""
    return {
        "exit": lambda: _exit(injection.code or 0),
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "raise": _raise,
        "hang": _hang,
        "mismatch": lambda: _mismatch(device),
    }[injection.kind]


def _exit(code: int) -> None:
    """At once, as a library does that ends the process: nothing is closed, nobody is told."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _raise() -> None:
    raise RuntimeError("injected failure")


def _hang() -> None:
    while True:
        time.sleep(3600.0)


def _mismatch(device: Any) -> None:
    """One collective of the group of all ranks that the others do not make."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(_ODD_SIZE, device=device))
