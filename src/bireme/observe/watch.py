"""The rank's side of the hang watch: writes where it is, and starts the sentinel that tells the others."""

import faulthandler
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from bireme.errors import SharedError, UserError
from bireme.network import local_address_towards, network_stack
from bireme.observe.position import Position, anonymous_file
from bireme.text import name_ranks, one_line, printable

log = logging.getLogger(__name__)

EXIT_CODE = 70  # of a rank that is told to end: nothing has moved for too long, or another rank has failed
_CLOSE_S = 4.0  # for the record of a rank that is told to end
_READY_S = 2.0
_JOIN_S = 1.0
_ENDS_WITHIN_S = 0.5
_TRACE_LINES = 40
_SECONDARY = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "timed out",
    "timeout caused",
    "no answer from the other",
)

_sentinels: set[subprocess.Popen[bytes]] = set()  # that still run
_stacks: tuple[int, int] | None = None  # the process's file for its Python stacks, and the signal that asks for them


class AllGather(Protocol):
    """What is needed of a Channel."""

    rank: int
    size: int

    def all_gather(self, message: Any) -> list[Any]: ...


class HangWatch:
    """Made by every rank at once; None where the watch cannot work (said in one warning).

    `on_event` is called on rank 0 with what was found, `on_abort` on a rank that has to end, both from a thread of
    their own.
    """

    @classmethod
    def start(
        cls,
        channel: AllGather,
        ranks: Sequence[Mapping[str, Any]],
        groups: Sequence[Mapping[str, Any]],
        phases: Sequence[str],
        operations: Sequence[str],
        first_step: int,
        stall_after_s: float,
        abort_after_s: float,
        on_event: Callable[[dict[str, Any]], None] = lambda event: None,
        on_abort: Callable[[str], None] = lambda reason: None,
    ) -> Self | None:
        listening: socket.socket | None = None
        try:
            stacks = [str(each) for each in channel.all_gather(network_stack())]
            hub: dict[str, Any] = {}
            if channel.rank == 0:
                try:
                    listening = _listen(ranks, len(set(stacks)) == 1)
                    address, port = listening.getsockname()[:2]
                    hub = {"address": address, "port": port, "token": secrets.token_hex(16)}
                except OSError as error:
                    hub = {"problem": one_line(error)}
            hub = channel.all_gather(hub)[0]
            if "problem" in hub:
                if channel.rank == 0:
                    log.warning("hangs are not watched for: %s", hub["problem"])
                return None
            watch, problem = None, None
            try:
                facts = {
                    "ranks": ranks,
                    "groups": [{"name": each["name"], "ranks": each["ranks"]} for each in groups],
                    "phases": phases,
                    "operations": operations,
                    "first_step": first_step,
                    "stall_after_s": stall_after_s,
                    "abort_after_s": abort_after_s,
                }
                watch = cls(channel, facts, hub, listening, on_event, on_abort)
            except (OSError, ValueError, RuntimeError) as error:
                problem = one_line(error)
            problems = channel.all_gather(problem)  # also so that all ranks go on at the same time
            unwatched = [rank for rank, each in enumerate(problems) if each]
            if unwatched and channel.rank == 0:
                text = f"{problems[unwatched[0]]}: hangs of {name_ranks(unwatched)} are not watched for"
                log.warning("%s", printable(text))
            return watch
        finally:
            if listening is not None:
                listening.close()  # the sentinel has it

    def __init__(
        self,
        channel: AllGather,
        facts: Mapping[str, Any],
        hub: Mapping[str, Any],
        listening: socket.socket | None,
        on_event: Callable[[dict[str, Any]], None],
        on_abort: Callable[[str], None],
    ):
        self._on_event = on_event
        self._on_abort = on_abort
        self._told = False
        self._closed = False
        self._ready = threading.Event()
        self._sending = threading.Lock()
        self.position = Position(facts["first_step"], len(facts["groups"]))
        stacks, stack_signal = _stacks_on_a_signal()
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(None)
        passed = [theirs.fileno(), self.position.descriptor, stacks]
        if listening is not None:
            passed.append(listening.fileno())
        people = [
            {name: each.get(name, "") for name in ("rank", "node", "host")} | {"pid": each.get("pid", 0)}
            for each in facts["ranks"]
        ]
        configuration = {
            **{name: each for name, each in facts.items() if name != "ranks"},
            **hub,
            "rank": channel.rank,
            "world_size": channel.size,
            "stack_signal": stack_signal,
            "own": people[channel.rank],
            "hub_rank": people[0],
            "ranks": people if channel.rank == 0 else [],
        }
        arguments = ", ".join(repr(str(each)) for each in (*passed, *([-1] if listening is None else [])))
        package = str(Path(__file__).parents[2])
        program = f"import sys; sys.path.insert(0, {package!r}); from bireme.sentinel import main; main([{arguments}])"
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=passed,
                cwd="/",
            )
        except OSError:
            self._socket.close()
            self.position.close()
            raise
        finally:
            theirs.close()
        _sentinels.add(self._process)
        self._send(configuration)
        self._listener = threading.Thread(target=self._listen_to_sentinel, name="bireme-watch", daemon=True)
        self._listener.start()
        # It takes a tenth of a second of a core to start: not one of the first step's.
        self._ready.wait(_READY_S)
        self._excepthook = sys.excepthook
        sys.excepthook = self._uncaught

    def ended(self, how: str, error: BaseException | None = None) -> None:
        """This rank's loop has ended: `left` in order, `interrupted`, or `raised`. What is said first holds."""
        if self._told:
            return
        self._told = True
        message: dict[str, Any] = {"ended": how}
        if error is not None:
            message |= described(error)
        self._send(message)

    def close(self) -> None:
        """Ends the watch over this rank; its sentinel ends when no rank is left to watch over."""
        if self._closed:
            return
        self._closed = True
        self.ended("left")
        if sys.excepthook == self._uncaught:
            sys.excepthook = self._excepthook
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._listener:
            self._listener.join(_JOIN_S)
        self._socket.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDS_WITHIN_S)
            _sentinels.discard(self._process)

    # --- inside ---

    def _send(self, message: Mapping[str, Any]) -> None:
        with suppress(OSError, ValueError), self._sending:
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """A loop without a `with` block tells its error, too."""
        if issubclass(kind, (KeyboardInterrupt, SystemExit)):
            self.ended("interrupted")
        else:
            self.ended("raised", error)
        self._excepthook(kind, error, trace)

    def _listen_to_sentinel(self) -> None:
        rest = b""
        while True:
            try:
                part = self._socket.recv(1 << 16)
            except OSError:
                return
            if not part:
                self._ready.set()
                return
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                try:
                    self._obey(json.loads(line))
                except Exception as error:  # never into training
                    log.debug("the hang watch: %s", error)

    def _obey(self, message: Mapping[str, Any]) -> None:
        if message.get("do") == "ready":
            self._ready.set()
        elif message.get("do") == "event":
            self._on_event(dict(message["event"]))
        elif message.get("do") == "warn":
            log.warning("%s", printable(str(message["text"])))
        elif message.get("do") == "abort":
            closing = threading.Thread(target=self._on_abort, args=(str(message.get("reason")),), daemon=True)
            closing.start()
            closing.join(_CLOSE_S)
            os._exit(EXIT_CODE)


def described(error: BaseException) -> dict[str, Any]:
    """An error as the others are told: its first line, its traceback, and whether another rank is behind it."""
    chain: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in chain:
        chain.append(each)
        each = each.__cause__ or each.__context__
    lines = "".join(traceback.format_exception(error)).splitlines()
    lost = any(type(each).__name__ in ("PeerLost", "PeerTimeout") for each in chain)
    by_backend = any(
        isinstance(each, RuntimeError) and any(words in str(each).lower() for words in _SECONDARY) for each in chain
    )
    text = one_line(error, 500)
    return {
        "error": text if isinstance(error, UserError) else f"{type(error).__name__}: {text}",
        "trace": [line[:500] for line in lines[-_TRACE_LINES:]],
        "secondary": lost or by_backend,
        "together": isinstance(error, SharedError),
        "shown": isinstance(error, UserError),
    }


def _listen(ranks: Sequence[Mapping[str, Any]], one_machine: bool) -> socket.socket:
    """On rank 0's own address: the one that gloo uses, where it is known."""
    address = "127.0.0.1"
    if not one_machine:
        address = ranks[0].get("address") or _towards(os.environ.get("MASTER_ADDR", "")) or address
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=max(128, len(ranks)))


def _towards(host: str) -> str | None:
    """The address of this machine that the others reach; rank 0 is often the master itself."""
    try:
        known = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM) if host else []
        return local_address_towards(str(known[0][4][0])) if known else None
    except (OSError, IndexError):
        return None


def _stacks_on_a_signal() -> tuple[int, int]:
    """Makes the process write its stacks to a file on a real-time signal that nobody else uses (0: there is none).

    It stays so until the process ends: a signal that came late would end it otherwise.
    """
    global _stacks
    if _stacks is None:
        file, number = anonymous_file("bireme-stacks"), 0
        for each in range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1) if hasattr(signal, "SIGRTMAX") else ():
            if signal.getsignal(each) is signal.SIG_DFL:
                faulthandler.register(each, file=file, all_threads=True, chain=False)
                number = int(each)
                break
        _stacks = file, number
    return _stacks
