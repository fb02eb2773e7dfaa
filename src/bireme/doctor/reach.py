"""Two-way TCP between all pairs of nodes on ephemeral ports, as gloo and NCCL will need it."""

import ipaddress
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from bireme.doctor.board import Meeting, reason
from bireme.doctor.facts import Reach
from bireme.doctor.wire import Wire, WireError, accept_until_closed, connect, listen, shut

_MOST_AT_ONCE = 64
_ANSWER_S = 2.0


class Answerer:
    """Listens on ephemeral ports of this node's addresses and says who it is, while the doctor runs."""

    def __init__(self, meeting: Meeting):
        self._meeting = meeting
        self._listeners: list[socket.socket] = []

    def open(self, address: str, port: int = 0) -> int:
        """Listens and returns the port. OSError where the address cannot be listened on."""
        listener = listen(address, port)
        self._listeners.append(listener)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return int(listener.getsockname()[1])

    def close(self) -> None:
        for listener in self._listeners:
            shut(listener)

    def _accept(self, listener: socket.socket) -> None:
        while (connection := accept_until_closed(listener)) is not None:
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        deadline_s = time.monotonic() + _ANSWER_S
        with Wire(connection, 4096) as wire:
            try:
                if wire.receive(deadline_s).get("job") == self._meeting.job:
                    wire.send({"job": self._meeting.job, "index": self._meeting.index}, deadline_s)
            except WireError:
                pass  # it was nobody's doctor


def reach_all(meeting: Meeting, targets: dict[int, tuple[str, int]], deadline_s: float) -> list[Reach]:
    """Connects to every target at once: index -> (address, port)."""
    if not targets:
        return []
    with ThreadPoolExecutor(min(_MOST_AT_ONCE, len(targets))) as pool:
        jobs = [
            pool.submit(_reach, meeting, index, address, port, deadline_s) for index, (address, port) in targets.items()
        ]
        return [job.result() for job in jobs]


def _reach(meeting: Meeting, index: int, address: str, port: int, deadline_s: float) -> Reach:
    try:
        ipaddress.ip_address(address.partition("%")[0])
        connection = connect(address, port, deadline_s)
    except ValueError:
        return Reach(index, address, None, "it announced no address")
    except (OSError, OverflowError) as error:
        return Reach(index, address, None, reason(error) if isinstance(error, OSError) else "it announced no port")
    with Wire(connection, 4096) as wire:
        local = str(connection.getsockname()[0])
        try:
            wire.send({"job": meeting.job}, deadline_s)
            answer = wire.receive(deadline_s)
        except WireError as error:
            return Reach(index, address, local, str(error))
    if answer.get("job") != meeting.job or answer.get("index") != index:
        return Reach(index, address, local, "somebody else has this address: is it used on two machines?")
    return Reach(index, address, local)
