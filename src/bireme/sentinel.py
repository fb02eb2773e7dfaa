"""A small process beside each rank, which outlives it by a moment: knows where the rank is, also once it was killed.

Started by `bireme.observe.watch`. Standard library only, never torch: it has to be there in a tenth of a second.
"""

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bireme.hang import diagnose_stall
from bireme.hang_state import GONE, INTERRUPTED, LEFT, LOST, RUNS, Group, RankState, merged
from bireme.observe.position import PositionReader
from bireme.sentinel_hub import SILENT_S, Hub, interval_s, show
from bireme.sentinel_lines import Lines
from bireme.sentinel_process import WatchedProcess

_TURN_S = 0.5
_SHORT_TURN_S = 0.1
_ALONE_S = 10.0  # that a hub goes on without its rank, and a sentinel with one that is not watched any more
_KILL_AFTER_S = 5.0  # from the order to end to SIGKILL
_STACK_S = 1.5
_STACK_LINES = 15
_DETAILS_AFTER_S = 1.5  # without movement: from then on all that is known of the collectives is reported
_STEP_BACK_S = 5.0  # a gap like this in our own time: the whole machine was stopped

Message = Mapping[str, Any]


class Sentinel:
    def __init__(self, rank: socket.socket, block: int, stacks: int, listening: socket.socket | None):
        configuration, rest = _first_line(rank)
        self._selector = selectors.DefaultSelector()
        self._rank_lines = Lines(rank)
        self._rank = int(configuration["rank"])
        self._reader = PositionReader(block, configuration["phases"], configuration["operations"])
        self._process = WatchedProcess(self._reader.process, self._reader.thread)
        self._stacks = stacks
        self._stack_signal = int(configuration["stack_signal"])
        self._stack_asked: tuple[int, float, int] | None = None  # where it begins, until when, its size last time
        self._stall_after_s = float(configuration["stall_after_s"])
        self._abort_after_s = float(configuration["abort_after_s"])
        self._interval_s = interval_s(int(configuration["world_size"]))
        self._groups = [Group(each["name"], tuple(each["ranks"])) for each in configuration["groups"]]
        own, first = configuration["own"], configuration["hub_rank"]
        self._own = RankState(own["rank"], own["node"], own["host"], own["pid"], first_step=self._reader.first_step)
        self._hub_state = RankState(
            first["rank"], first["node"], first["host"], first["pid"], first_step=self._reader.first_step
        )
        self._ended: dict[str, Any] = {}
        self._gone_s: float | None = None
        self._closed_s: float | None = None  # since when the rank, which may live on, is not watched any more
        self._moved_s = self._turned_s = time.monotonic()
        self._looks = self._computing = 0  # since it last moved: how often we looked, and it was computing
        self._reported_s = 0.0
        self._due = False
        self._end_at_s = float("inf")
        self._kill_at_s = float("inf")
        self._done = False
        self._speaker = False
        self._bye = False
        self._spoken = False
        self._hub: Hub | None = None
        self._up: Lines | None = None
        self._selector.register(rank, selectors.EVENT_READ, self._hear_rank)
        if self._process.descriptor >= 0:
            self._selector.register(self._process.descriptor, selectors.EVENT_READ, lambda: None)
        if listening is not None:
            self._hub = Hub(configuration, self._selector, listening, self._obey, self._rank_lines.send)
        else:
            self._connect(configuration)
        self._heard_s = time.monotonic()
        self._rank_lines.send({"do": "ready"})
        for message in rest:
            self._take(message)

    def run(self) -> None:
        while not self._finished():
            busy = self._stack_asked is not None or (self._hub is not None and self._hub.pending)
            for key, _ in self._selector.select(_SHORT_TURN_S if busy else _TURN_S):
                key.data()
            now_s = time.monotonic()
            self._observe(now_s)
            if self._due or now_s - self._reported_s >= self._interval_s:
                self._report(now_s)
            self._look_at_stack(now_s)
            self._enforce(now_s)
            if self._hub is not None:
                self._hub.turn()
            elif self._up is None:
                self._alone(now_s)
            elif now_s - self._heard_s > SILENT_S + 2 * self._interval_s:
                self._drop_hub(self._up)
            else:
                self._up.flush()
        if self._hub is not None:
            self._hub.finish()
        elif self._up is not None:
            deadline_s = time.monotonic() + 1.0
            while not self._up.flush() and time.monotonic() < deadline_s:
                time.sleep(0.02)

    def _finished(self) -> bool:
        if self._gone_s is None and self._closed_s is None and self._kill_at_s < float("inf"):
            return False  # it is about to end, and to be seen to
        if self._done or (self._hub is not None and self._hub.finished):
            return True
        if self._gone_s is None:
            return False
        if self._hub is not None:
            return time.monotonic() - self._gone_s > _ALONE_S
        return not self._due

    # --- the rank ---

    def _hear_rank(self) -> None:
        for message in self._rank_lines.receive():
            self._take(message)
        if self._rank_lines.ended:  # it watches no more, or is about to be gone
            self._closed_s = self._closed_s or time.monotonic()
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(self._rank_lines.connection)

    def _take(self, message: Message) -> None:
        if not self._ended and "ended" in message:
            self._ended = dict(message)
            self._due = True

    def _observe(self, now_s: float) -> None:
        if now_s - self._turned_s > _STEP_BACK_S:
            self._heard_s = self._moved_s = now_s
        if self._reader.moved() or self._moved_s == now_s:
            self._moved_s = now_s
            self._looks = self._computing = 0
        self._turned_s = now_s
        self._looks += 1
        self._computing += self._process.computes()
        if self._gone_s is None and self._process.gone():
            self._hear_rank()  # its last word may have come meanwhile
            self._gone_s = now_s
            self._due = True
            if self._process.descriptor >= 0:
                self._selector.unregister(self._process.descriptor)
            if not self._ended:
                words, ordered = self._process.end()
                self._ended = {
                    "ended": INTERRUPTED if ordered or self._kill_at_s < float("inf") else GONE,
                    "exit": words,
                    "out_of_memory": self._process.out_of_memory(),
                }

    def _state(self, now_s: float) -> dict[str, Any]:
        position = self._reader.read()
        idle_s = now_s - self._moved_s
        busy = idle_s > 1.0 and self._gone_s is None and 2 * self._computing > self._looks
        # A process that has caught the error of its training lives on, and is none of this job any more.
        lives_on = self._closed_s is not None and now_s - self._closed_s > _ALONE_S
        letter = "" if self._gone_s is not None or lives_on else self._process.letter()
        state = {**position, "idle_s": idle_s, "busy": busy, "process": letter, **self._ended}
        if idle_s < _DETAILS_AFTER_S and not self._ended:
            state["groups"] = {group: recent[-2:] for group, recent in state["groups"].items()}
        return state

    def _report(self, now_s: float) -> None:
        self._due = False
        self._reported_s = now_s
        self._up_send({"state": self._state(now_s)})

    def _up_send(self, message: Message) -> None:
        if self._hub is not None:
            self._hub.hear(self._rank, message)
        elif self._up is not None:
            self._up.send(message)

    # --- orders ---

    def _obey(self, message: Message) -> None:
        what = message.get("do")
        if what == "stacks":
            self._ask_for_stack()
        elif what == "abort":
            self._end_rank(str(message.get("reason")))
        elif what == "failed":
            self._spoken = True  # the hub has said why
            if within_s := message.get("within_s"):
                self._end_at_s = min(self._end_at_s, time.monotonic() + float(within_s))
        elif what == "done":
            self._done = True
        elif what == "bye":
            self._bye = True
        elif what == "tick" and isinstance(message.get("hub"), dict):
            self._speaker = message.get("speaker") == self._rank
            with contextlib.suppress(ValueError):
                self._hub_state = merged(self._hub_state, message["hub"], self._groups)

    def _end_rank(self, reason: str) -> None:
        if self._gone_s is None and self._kill_at_s == float("inf"):
            self._kill_at_s = time.monotonic() + _KILL_AFTER_S
            if not self._ended:
                self._ended = {"ended": INTERRUPTED}
            self._rank_lines.send({"do": "abort", "reason": reason})

    def _enforce(self, now_s: float) -> None:
        if self._gone_s is not None or self._closed_s is not None:
            return
        if now_s >= self._end_at_s:
            self._end_rank("another rank has failed, and this one did not end")
        if now_s >= self._kill_at_s:
            self._process.signal(signal.SIGKILL)
            self._kill_at_s = now_s + _KILL_AFTER_S

    # --- stacks ---

    def _ask_for_stack(self) -> None:
        if self._process.letter() in ("T", "t"):
            self._up_send({"stack": ["it is stopped, and cannot show its Python stack"]})
        elif not self._process.catches(self._stack_signal):
            self._up_send({"stack": ["it cannot show its Python stack: the handler for that is gone"]})
        else:
            begins = os.fstat(self._stacks).st_size
            self._stack_asked = begins, time.monotonic() + _STACK_S, begins
            self._process.signal(self._stack_signal)

    def _look_at_stack(self, now_s: float) -> None:
        if self._stack_asked is None:
            return
        begins, deadline_s, before = self._stack_asked
        size = os.fstat(self._stacks).st_size
        if now_s < deadline_s and (size == begins or size != before):
            self._stack_asked = begins, deadline_s, size
            return
        self._stack_asked = None
        text = os.pread(self._stacks, min(size - begins, 1 << 20), begins).decode("utf-8", "replace")
        self._up_send({"stack": thread_stack(text, self._reader.thread_name) or ["it does not show its Python stack"]})

    # --- the hub ---

    def _connect(self, configuration: Message) -> None:
        for _ in range(3):
            try:
                connection = socket.create_connection((configuration["address"], configuration["port"]), timeout=5.0)
            except OSError:
                time.sleep(0.5)
                continue
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._up = Lines(connection)
            self._up.send({"token": configuration["token"], "rank": self._rank})
            self._selector.register(connection, selectors.EVENT_READ, self._hear_hub)
            return
        self._spoken = True  # who never heard of the hub has nothing to say about it

    def _hear_hub(self) -> None:
        up = self._up
        if up is None:
            return
        for message in up.receive():
            self._heard_s = time.monotonic()
            self._obey(message)
        if up.ended:
            self._drop_hub(up)

    def _drop_hub(self, up: Lines) -> None:
        self._selector.unregister(up.connection)
        up.close()
        self._up = None

    def _alone(self, now_s: float) -> None:
        """Rank 0's machine is gone, or rank 0 has ended in order: who is to speak says so when its own rank hangs."""
        if self._ended.get("ended") in (LEFT, INTERRUPTED):
            self._done = True
            return
        state = self._state(now_s)
        if self._gone_s is None and self._abort_after_s and state["idle_s"] >= self._abort_after_s:
            self._end_rank(f"no movement for {self._abort_after_s:.0f} s, and rank {self._hub_state.rank} is gone")
        patience_s = self._stall_after_s if self._bye else min(self._stall_after_s, SILENT_S)
        if self._spoken or not self._speaker or (state["idle_s"] < patience_s and not self._ended):
            return
        self._spoken = True
        first = self._hub_state if self._bye else replace(self._hub_state, ended=LOST)
        own = merged(self._own, {**state, "ended": RUNS}, self._groups)
        diagnosis = diagnose_stall([first, own], self._groups)
        if self._bye and diagnosis is None:
            return
        where = f"on {first.node} (host {first.host})"
        lines = diagnosis.lines if diagnosis else (f"rank {first.rank} {where} does not answer any more",)
        show(
            [*lines, f"said by rank {own.rank} on {own.node}: rank {first.rank} {where} watched over all, and is gone"]
        )


def thread_stack(text: str, thread_name: str) -> list[str]:
    """The lines of one thread, innermost first, of what faulthandler wrote; of the first one when it is not there."""
    blocks = [block.splitlines() for block in text.split("\n\n") if block.strip()]
    chosen = next((block for block in blocks if thread_name in block[0]), blocks[0] if blocks else [])
    lines = [line.strip() for line in chosen[1:] if line.strip()]
    if len(lines) > _STACK_LINES:
        lines = [*lines[: _STACK_LINES - 1], f"... and {len(lines) - _STACK_LINES + 1} calls further out"]
    return lines


def _first_line(connection: socket.socket) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The configuration, and what has come with it."""
    lines = Lines(connection)
    deadline_s = time.monotonic() + 30.0
    while not (messages := lines.receive()):
        if lines.ended or time.monotonic() > deadline_s:
            raise SystemExit(0)  # the rank is gone before anything began
        time.sleep(0.005)
    return messages[0], messages[1:]


def main(arguments: Sequence[str]) -> None:
    """Arguments: descriptors of the rank's socket, its block, its stacks, and of the hub's listening socket or -1."""
    # It ends with its rank, whoever presses Ctrl-C.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    rank, block, stacks, listening = (int(each) for each in arguments)
    hub = socket.socket(fileno=listening) if listening >= 0 else None
    Sentinel(socket.socket(fileno=rank), block, stacks, hub).run()
