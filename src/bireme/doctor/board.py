"""Where the doctors of all nodes meet: node 0 holds a board on which every node puts what it knows, and reads the rest.

node i                              node 0
{"doctor": 1, "job", "index"}  ->   {"welcome": true} or {"refused": why}
{"ping": k}                    ->   {"time_ns": node 0's clock}
{"put": stage, "value": {...}} ->   {"took": true} or {"refused": why}
{"get": stage}                 ->   {"values": {index: value}}   when all have put theirs, or at the deadline
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bireme.doctor.facts import Clock
from bireme.doctor.machine import look_up_all
from bireme.doctor.wire import MOST_BYTES, Wire, WireError, accept_until_closed, connect, listen, shut
from bireme.errors import UserError
from bireme.text import printable

PROTOCOL = 1
PORTS_TRIED = 4  # where the port for the meeting is taken, the next ones are tried, by everybody
_PINGS = 12
_GREETING_S = 2.0


@dataclass(frozen=True, slots=True)
class Meeting:
    """Who meets: the same on every node but for `index`."""

    index: int
    size: int
    job: str  # doctors of another job that meet at the same place are told so


class Board:
    """Node 0's side. `check(stage, index, value)` raises UserError for what no doctor sends."""

    def __init__(self, meeting: Meeting, now_ns: Callable[[], int], check: Callable[[str, int, Any], Any]):
        self._meeting = meeting
        self._now_ns = now_ns
        self._check = check
        self._changed = threading.Condition()
        self._values: dict[str, dict[int, Any]] = {}
        self._expected: dict[str, frozenset[int]] = {}
        self._deadline_s: dict[str, float] = {}
        self._wires: dict[int, Wire] = {}
        self._listeners: list[socket.socket] = []
        self._closed = False
        self.local_addresses: dict[int, str] = {}  # of node 0, as node i reaches it
        self.refused: dict[int, str] = {}  # why a node could not take part

    def open(self, address: str, ports: list[int]) -> int:
        """Listens at the first free one of the ports. OSError when none is."""
        for position, port in enumerate(ports):
            try:
                listener = listen(address, port)
                break
            except OSError:
                if position == len(ports) - 1:
                    raise
        self._listeners.append(listener)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return int(listener.getsockname()[1])

    def expect(self, stage: str, members: frozenset[int], deadline_s: float) -> None:
        with self._changed:
            self._expected[stage], self._deadline_s[stage] = members, deadline_s
            self._changed.notify_all()

    def put(self, stage: str, index: int, value: Any) -> None:
        with self._changed:
            self._values.setdefault(stage, {})[index] = value
            self._changed.notify_all()

    def arrived(self, stage: str, members: frozenset[int], until_s: float) -> None:
        """Waits until these members have put their values, or for as long as is said."""
        with self._changed:
            while not members <= self._values.get(stage, {}).keys():
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return
                self._changed.wait(min(left_s, 0.5))

    def known(self, stage: str) -> frozenset[int]:
        """Who has put a value so far."""
        with self._changed:
            return frozenset(self._values.get(stage, {}))

    def get(self, stage: str) -> dict[int, Any]:
        """All values of a stage, as soon as they are there; what there is at its deadline."""
        with self._changed:
            while not self._closed:
                # Read again each time: node 0 may have stopped waiting for some.
                members = self._expected.get(stage)
                values = self._values.get(stage, {})
                if members is not None:
                    left_s = self._deadline_s[stage] - time.monotonic()
                    if left_s <= 0 or members <= values.keys():
                        return {index: value for index, value in values.items() if index in members}
                self._changed.wait(0.5 if members is None else min(left_s, 0.5))
        return {}

    def wait_until_left(self, deadline_s: float) -> None:
        """Until every visitor has read everything and gone."""
        with self._changed:
            while self._wires and time.monotonic() < deadline_s:
                self._changed.wait(0.1)

    def close(self) -> None:
        for listener in self._listeners:
            shut(listener)
        with self._changed:
            self._closed = True
            wires = list(self._wires.values())
            self._changed.notify_all()
        for wire in wires:
            with contextlib.suppress(OSError):
                wire.socket.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        while (connection := accept_until_closed(listener)) is not None:
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with Wire(connection, MOST_BYTES) as wire, contextlib.suppress(WireError, OSError):
            index = self._welcome(wire)
            if index is None:
                return
            try:
                while self._answer(wire, index):
                    pass
            finally:
                with self._changed:
                    self._wires.pop(index, None)
                    self._changed.notify_all()

    def _welcome(self, wire: Wire) -> int | None:
        deadline_s = time.monotonic() + _GREETING_S
        greeting = wire.receive(deadline_s, 4096)
        index = greeting.get("index")
        known = isinstance(index, int) and not isinstance(index, bool) and 0 < index < self._meeting.size
        refusal = None
        if greeting.get("doctor") != PROTOCOL:
            refusal = "the doctors are of different versions of Bireme: install the same on every node"
        elif greeting.get("job") != self._meeting.job:
            refusal = (
                "the doctors belong to different jobs: are --peers (or NNODES, MASTER_PORT and the job's id) the same "
                "on every node?"
            )
        elif not known:
            refusal = f"index {index!r:.20} does not fit {self._meeting.size} nodes: is the list the same everywhere?"
        with self._changed:
            if refusal is None and index in self._wires:
                refusal = f"two doctors say that they are node {index}: is NODE_RANK different on each?"
            if refusal is None:
                assert isinstance(index, int)
                self._wires[index] = wire
                self.local_addresses[index] = str(wire.socket.getsockname()[0])
            elif known:
                assert isinstance(index, int)
                self.refused[index] = refusal
        wire.send({"refused": refusal} if refusal else {"welcome": True}, deadline_s)
        return index if refusal is None and isinstance(index, int) else None

    def _answer(self, wire: Wire, index: int) -> bool:
        """One request; False at the end."""
        request = wire.receive(time.monotonic() + 60.0)
        soon_s = time.monotonic() + 5.0
        if "ping" in request:
            wire.send({"time_ns": self._now_ns()}, soon_s)
        elif isinstance(stage := request.get("put"), str):
            try:
                value = self._check(stage, index, request.get("value"))
            except UserError as error:
                self.refused[index] = str(error)
                wire.send({"refused": str(error)}, soon_s)
                return False
            self.put(stage, index, value)
            wire.send({"took": True}, soon_s)
        elif isinstance(stage := request.get("get"), str):
            values = self.get(stage)
            wire.send({"values": {str(each): value for each, value in values.items()}}, time.monotonic() + 5.0)
        else:
            return False
        return True


class Visitor:
    """The side of every other node. WireError where node 0 cannot be met."""

    def __init__(self, meeting: Meeting, hosts: list[str], ports: list[int], deadline_s: float):
        self._meeting = meeting
        self._wire = self._meet(hosts, ports, deadline_s)
        self.local_address = str(self._wire.socket.getsockname()[0])
        self.board_address = str(self._wire.socket.getpeername()[0])

    def _meet(self, hosts: list[str], ports: list[int], deadline_s: float) -> Wire:
        reasons: list[str] = []
        while True:
            # Names are looked up again and again: in some clusters they are known only after the start.
            names = look_up_all(hosts)
            reasons = [f"the name {name.name} is not known ({name.error})" for name in names.values() if name.error]
            for address in [address for name in names.values() for address in name.addresses]:
                for port in ports:
                    try:
                        return self._greet(connect(address, port, min(deadline_s, time.monotonic() + 2.0)), deadline_s)
                    except OSError as error:
                        reasons.append(reason(error))
                        if not isinstance(error, ConnectionRefusedError):
                            break  # no route, or a firewall: the next port is no different
                    except WireError as error:
                        reasons.append(str(error))
            if time.monotonic() + 0.2 > deadline_s:
                # The first port is the one that matters; the others are only tried where it is taken.
                telling = [text for text in reasons if text != reason(ConnectionRefusedError())]
                raise WireError((telling or reasons or [reason(TimeoutError())])[0])
            time.sleep(0.2)

    def _greet(self, connection: socket.socket, deadline_s: float) -> Wire:
        wire = Wire(connection, MOST_BYTES)
        try:
            soon_s = min(deadline_s, time.monotonic() + _GREETING_S)
            wire.send({"doctor": PROTOCOL, "job": self._meeting.job, "index": self._meeting.index}, soon_s)
            answer = wire.receive(soon_s)
            if "refused" in answer:
                raise WireError(printable(str(answer["refused"])[:300]))
            if answer.get("welcome") is not True:
                raise WireError("it is not a bireme doctor")
        except WireError:
            wire.close()
            raise
        return wire

    def clock(self, now_ns: Callable[[], int], deadline_s: float) -> Clock:
        """This clock minus node 0's, from the quickest of several questions; half its round trip is the bound."""
        best: tuple[int, float] | None = None
        for number in range(_PINGS):
            asked_ns, asked = now_ns(), time.perf_counter_ns()
            self._wire.send({"ping": number}, deadline_s)
            theirs_ns = self._wire.receive(deadline_s).get("time_ns")
            took_ns = time.perf_counter_ns() - asked
            if not isinstance(theirs_ns, int) or abs(theirs_ns) > 1 << 63:
                raise WireError("it does not tell its time")
            if best is None or took_ns < best[0]:
                best = took_ns, asked_ns + took_ns / 2 - theirs_ns
        assert best is not None
        return Clock(best[1] * 1e-9, best[0] / 2 * 1e-9)

    def put(self, stage: str, value: Any, deadline_s: float) -> None:
        self._wire.send({"put": stage, "value": value}, deadline_s)
        answer = self._wire.receive(deadline_s)
        if answer.get("took") is not True:
            raise WireError(printable(str(answer.get("refused", "it took nothing"))[:300]))

    def get(self, stage: str, deadline_s: float) -> dict[int, Any]:
        self._wire.send({"get": stage}, deadline_s)
        values = self._wire.receive(deadline_s, MOST_BYTES * self._meeting.size).get("values")
        if not isinstance(values, dict):
            raise WireError("it does not tell what the others said")
        known = {str(index): index for index in range(self._meeting.size)}
        return {known[text]: value for text, value in values.items() if text in known}

    def close(self) -> None:
        self._wire.close()


def reason(error: OSError) -> str:
    """Why a connection did not come about, in words that say what to look for."""
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there (was its doctor started?)"
    if isinstance(error, TimeoutError):
        return "no answer: a firewall, a wrong network, or the machine is down"
    return (error.strerror or str(error)).lower()
