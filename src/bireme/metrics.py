"""The Prometheus endpoint of a running job: GET /metrics on rank 0 (docs/metrics.md)."""

import errno
import socket
import socketserver
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from bireme.errors import UserError
from bireme.metric_families import RunMetrics

PATH = "/metrics"

_CHOOSE_PORT = "choose a metrics port from 1024 to 65535 (--metrics-port)"
_MOST_CLIENTS = 8  # at once; more are turned away
_CLIENT_WITHIN_S = 10.0  # then a client that is slow, or does nothing, is cut off
_LOOK_EVERY_S = 0.5


class MetricsServer:
    """Serves the metrics of one run from a thread of its own; what clients do never holds up `update`.

    port: 0 takes a free one, which `port` then holds. facts: as in run.json. address: what to listen on; by default
    only programs of this machine can ask. run: the run's name, a label of `bireme_run_info`.
    """

    def __init__(self, port: int, facts: Mapping[str, Any], address: str = "127.0.0.1", run: str = ""):
        self.port = port
        self._address = address
        self._metrics = RunMetrics(facts, run)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self._metrics)
        self._server: _Server | None = None

    def start(self) -> None:
        """Begins to listen. Raises UserError, in one line, when it cannot."""
        if type(self.port) is not int or not 0 <= self.port <= 65535:
            raise UserError(f"metrics port {self.port!r} is not a port: {_CHOOSE_PORT}")
        try:
            self._server = _Server(self._address, self.port, self._registry)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UserError(
                    f"metrics port {self.port} is in use: choose another metrics port (--metrics-port)"
                ) from None
            why = error.strerror or str(error)
            if error.errno == errno.EACCES:
                why = f"only root may take it; {_CHOOSE_PORT}"
            raise UserError(f"cannot serve metrics on {self._address} port {self.port}: {why}") from None
        self.port = int(self._server.server_address[1])
        serve = threading.Thread(
            target=self._server.serve_forever, args=(_LOOK_EVERY_S,), name="bireme-metrics", daemon=True
        )
        serve.start()

    def update(self, lines: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]] = ()) -> None:
        """Takes the step records (lines of steps.jsonl) and events of a window."""
        self._metrics.update(lines, events)

    def learned(self, **facts: Any) -> None:
        """Takes facts that were not known when the run began."""
        self._metrics.learned(**facts)

    def close(self) -> None:
        """Gives the port back; at most about a second."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.end()


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True  # a run that follows another finds the port free
    daemon_threads = True
    request_queue_size = 16

    def __init__(self, address: str, port: int, registry: CollectorRegistry):
        if ":" in address:
            self.address_family = socket.AF_INET6
        self.registry = registry
        self._clients: dict[Any, float] = {}  # socket: when it is cut off
        super().__init__((address, port), _Handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return len(self._clients) < _MOST_CLIENTS

    def process_request(self, request: Any, client_address: Any) -> None:
        self._clients[request] = time.monotonic() + _CLIENT_WITHIN_S
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._clients.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called every half second. A timeout of the socket alone would not end a client that sends a byte a second."""
        self._cut(time.monotonic())

    def _cut(self, now: float) -> None:
        for client, until in list(self._clients.items()):
            if until <= now:
                with suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        self._cut(float("inf"))
        with suppress(OSError):  # processes forked meanwhile (data loader workers) hold the socket, too: end it for all
            self.socket.shutdown(socket.SHUT_RDWR)
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is nobody's concern."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _CLIENT_WITHIN_S
    server_version = "bireme"
    sys_version = ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != PATH:
            self._answer(404, "text/plain; charset=utf-8", f"only {PATH} is here\n".encode())
            return
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        self._answer(200, content_type, encode(self.server.registry))

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Not on the console of a training run."""
