"""torchrun's own store, where it already listens at the meeting point: there node 0 says where its board is."""

import os
import time
from datetime import timedelta
from typing import Any

import orjson

from bireme.doctor.wire import WireError, connect


def _store(host: str, port: int, deadline_s: float) -> Any:
    try:
        connect(host, port, deadline_s).close()  # the store's own client retries with pages of C++ frames
    except OSError as error:
        from bireme.doctor.board import reason

        raise WireError(f"torchrun's store at {host} port {port}: {reason(error)}") from None
    import torch.distributed as dist

    left_s = max(0.5, deadline_s - time.monotonic())
    try:
        return dist.TCPStore(
            host, port, is_master=False, timeout=timedelta(seconds=left_s), wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError as error:
        raise WireError(f"torchrun's store at {host} port {port}: {str(error).splitlines()[0][:200]}") from None


def _key() -> str:
    # One attempt of a restarted job must not find the board of the one before.
    return f"bireme/doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def publish(host: str, port: int, board: dict[str, int], deadline_s: float) -> Any:
    """Says where the board listens (address: port). Returns the store: who keeps it keeps the connection."""
    store = _store(host, port, deadline_s)
    store.set(_key(), orjson.dumps(board))
    return store


def find(host: str, port: int, deadline_s: float) -> dict[str, int]:
    """Where node 0's board listens. WireError when it is not said in time."""
    store = _store(host, port, deadline_s)
    while not store.check([_key()]):
        if time.monotonic() > deadline_s:
            raise WireError("its doctor did not say where to meet (was it started, or does it hang?)")
        time.sleep(0.05)
    board = orjson.loads(store.get(_key()))
    if not isinstance(board, dict) or not all(isinstance(port, int) for port in board.values()):
        raise WireError("it is not a bireme doctor")
    return board
