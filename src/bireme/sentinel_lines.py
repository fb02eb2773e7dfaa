"""JSON objects over a socket, one a line, without ever blocking. Standard library only."""

import json
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

LONGEST_BYTES = 4 << 20  # the configuration of a job of some thousand ranks
_AT_ONCE_BYTES = 1 << 16


class Lines:
    """One end of a connection. `ended`: the other end is gone, or says what is no message."""

    def __init__(self, connection: socket.socket, longest_bytes: int = LONGEST_BYTES):
        connection.setblocking(False)
        self.connection = connection
        self.ended = False
        self.longest_bytes = longest_bytes
        self._in = bytearray()
        self._out = bytearray()

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends now what the socket takes; the rest goes with `flush`. Who reads nothing is given up."""
        self._out += json.dumps(message).encode() + b"\n"
        if len(self._out) > 2 * LONGEST_BYTES:
            self._end()
        self.flush()

    def flush(self) -> bool:
        """True when nothing is left to send."""
        while self._out and not self.ended:
            try:
                del self._out[: self.connection.send(self._out)]
            except (BlockingIOError, InterruptedError):
                return False
            except OSError:
                self._end()
        return True

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have come."""
        while not self.ended:
            try:
                part = self.connection.recv(_AT_ONCE_BYTES)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                part = b""
            if not part:
                self.ended = True
            self._in += part
            if len(self._in) > self.longest_bytes:
                self._end()
        *whole, self._in = self._in.split(b"\n")
        messages = []
        for line in whole:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                message = None
            if not isinstance(message, dict):
                self._end()
                break
            messages.append(message)
        return messages

    def finish(self) -> None:
        """Nothing more will be sent."""
        if self.flush():
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_WR)

    def drained(self) -> bool:
        """Reads past whatever still comes; True when the other end has closed, too."""
        self.receive()
        return self.ended

    def close(self) -> None:
        self.ended = True
        self.connection.close()

    def _end(self) -> None:
        self.ended = True
        self._in.clear()
        self._out.clear()
