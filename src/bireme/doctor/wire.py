"""One JSON object a line over a TCP connection: bounded in size and in time, whoever is at the other end."""

import contextlib
import socket
import time
from typing import Any, Self

import orjson

MOST_BYTES = 1 << 20  # of one message of one node
_CHUNK_BYTES = 1 << 16


class WireError(Exception):
    """The other side is gone, silent, or speaks something else; the text says which."""


class Wire:
    """A connection. `limit_bytes` bounds what one message of the other side may cost us."""

    def __init__(self, connection: socket.socket, limit_bytes: int = MOST_BYTES):
        self.socket = connection
        self._limit_bytes = limit_bytes
        self._read = bytearray()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: dict[str, Any], deadline_s: float) -> None:
        self._time_out_at(deadline_s)
        try:
            self.socket.sendall(orjson.dumps(message) + b"\n")
        except TimeoutError:
            raise WireError("it does not take what it is sent") from None
        except OSError as error:
            raise WireError(f"the connection broke ({error.strerror or error})") from None

    def receive(self, deadline_s: float, allow_bytes: int | None = None) -> dict[str, Any]:
        limit_bytes = allow_bytes or self._limit_bytes
        searched = 0
        while (end := self._read.find(b"\n", searched)) < 0:
            searched = len(self._read)
            if searched > limit_bytes:
                raise WireError(f"it sent more than {limit_bytes} bytes at once")
            self._time_out_at(deadline_s)
            try:
                part = self.socket.recv(_CHUNK_BYTES)
            except TimeoutError:
                raise WireError("it does not answer") from None
            except OSError as error:
                raise WireError(f"the connection broke ({error.strerror or error})") from None
            if not part:
                raise WireError("it closed the connection")
            self._read += part
        line = bytes(self._read[:end])
        del self._read[: end + 1]
        try:
            message = orjson.loads(line)
        except orjson.JSONDecodeError:
            raise WireError("it is not a bireme doctor") from None
        if not isinstance(message, dict):
            raise WireError("it is not a bireme doctor")
        return message

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _time_out_at(self, deadline_s: float) -> None:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise WireError("it does not answer")
        self.socket.settimeout(left_s)


def connect(host: str, port: int, deadline_s: float) -> socket.socket:
    """OSError with a reason; a deadline that has passed is a TimeoutError."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return socket.create_connection((host, port), timeout=left_s)


def listen(address: str, port: int = 0) -> socket.socket:
    """A listening socket on one address of this machine; port 0: an ephemeral one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and hasattr(socket, "IPV6_V6ONLY"):
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((address, port))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def accept_until_closed(listener: socket.socket) -> socket.socket | None:
    """The next connection; None once the listener was shut down."""
    while True:
        try:
            return listener.accept()[0]
        except (ConnectionAbortedError, InterruptedError):
            continue
        except OSError:
            return None


def shut(listener: socket.socket) -> None:
    """Closes a listener; a thread that waits in accept() returns."""
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()
