"""Where all sentinels of a job report to, inside rank 0's: decides when to say what, and when to end the job."""

import contextlib
import os
import selectors
import socket
import time
from _operator import _compare_digest as compare_digest  # hmac's; that imports all of OpenSSL
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bireme.hang import Diagnosis, diagnose_end, diagnose_stall
from bireme.hang_state import GONE, LEFT, LOST, RAISED, RUNS, UNWATCHED, Group, RankState, merged
from bireme.sentinel_lines import Lines
from bireme.text import name_ranks, printable

CONNECT_S = 30.0
COLLECT_S = 5.0  # from the first failure to the report, while processes still end
STACKS_S = 2.5
END_AFTER_S = 30.0  # that a rank may go on after another has failed
SILENT_S = 10.0

_LONGEST_REPORT_BYTES = 1 << 20
_MOST_STACKS = 2
_SCREEN_LINES = 40
_SCREEN_COLUMNS = 200

Message = Mapping[str, Any]


def interval_s(ranks: int) -> float:
    """How often a sentinel reports: the hub reads no more than some hundred reports a second."""
    return 1.0 + ranks / 512


def show(lines: Sequence[str]) -> None:
    """A block on standard error, of one screen; nothing in it drives the terminal."""
    shown = [printable(line)[:_SCREEN_COLUMNS] for line in lines[:_SCREEN_LINES]]
    text = "\n".join(["bireme: " + shown[0], *(f"  {line}" for line in shown[1:])]) + "\n"
    with contextlib.suppress(OSError):
        os.write(2, text.encode("utf-8", "backslashreplace"))


class Hub:
    """`obey` hands an order to the rank in whose sentinel this runs, `tell` a message to that rank's process."""

    def __init__(
        self,
        configuration: Message,
        selector: selectors.BaseSelector,
        listening: socket.socket,
        obey: Callable[[Message], None],
        tell: Callable[[Message], None],
    ):
        self.finished = False
        self._states = {
            each["rank"]: RankState(
                each["rank"], each["node"], each["host"], each["pid"], first_step=configuration["first_step"]
            )
            for each in configuration["ranks"]
        }
        self._groups = [Group(each["name"], tuple(each["ranks"])) for each in configuration["groups"]]
        self._rank = int(configuration["rank"])
        self._token = str(configuration["token"])
        self._stall_after_s = float(configuration["stall_after_s"])
        self._abort_after_s = float(configuration["abort_after_s"])
        self._selector = selector
        self._listening = listening
        self._obey = obey
        self._tell = tell
        self._links: dict[int, Lines] = {}
        self._heard_s: dict[int, float] = {self._rank: time.monotonic()}
        self._began_s = self._ticked_s = self._turned_s = time.monotonic()
        self._pending: tuple[Diagnosis, float, list[int]] | None = None
        self._stacks: dict[int, list[str]] = {}
        self._said: set[tuple[str, tuple[int, ...], int]] = set()
        self._stood_still_s = 0.0  # the longest since a stall was reported; 0: none was
        self._suspected: tuple[tuple[str, tuple[int, ...], int], float] | None = None  # and since when
        self._concluded = False
        self._last_word = ""
        self._aborted = False
        listening.setblocking(False)
        selector.register(listening, selectors.EVENT_READ, self._accept)

    # --- the connections ---

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listening.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            lines = Lines(connection, 4096)  # until it has said who it is
            self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(lines))

    def _read(self, lines: Lines, rank: int | None = None) -> None:
        for message in lines.receive():
            if rank is None:
                rank = self._introduced(lines, message)
                if rank is None:
                    break
            else:
                self.hear(rank, message)
        if lines.ended:
            self._drop(lines, rank)

    def _introduced(self, lines: Lines, message: Message) -> int | None:
        """Who a new connection is; one that does not know the secret ends at once."""
        rank, token = message.get("rank"), message.get("token")
        known = isinstance(token, str) and compare_digest(token.encode(), self._token.encode())
        if not known or not isinstance(rank, int) or rank not in self._states or rank == self._rank:
            lines.ended = True
            return None
        if rank in self._links:
            self._drop(self._links[rank], None)
        lines.longest_bytes = _LONGEST_REPORT_BYTES
        self._links[rank] = lines
        self._selector.modify(lines.connection, selectors.EVENT_READ, lambda: self._read(lines, rank))
        self._update(rank, {"ended": ""})
        return rank

    def _drop(self, lines: Lines, rank: int | None) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(lines.connection)
        lines.close()
        if rank is not None and self._links.get(rank) is lines:
            del self._links[rank]
            if self._states[rank].runs:
                self._update(rank, {"ended": LOST})

    def _order(self, message: Message, ranks: Sequence[int] | None = None) -> None:
        for rank in self._states if ranks is None else ranks:
            if rank == self._rank:
                self._obey(message)
            elif rank in self._links:
                self._links[rank].send(message)

    # --- what comes in ---

    def hear(self, rank: int, message: Message) -> None:
        """A report of a rank's sentinel."""
        self._heard_s[rank] = time.monotonic()
        if isinstance(state := message.get("state"), dict):
            with contextlib.suppress(ValueError):
                self._update(rank, state)
        if isinstance(stack := message.get("stack"), list):
            self._stacks[rank] = [str(line) for line in stack]

    def _update(self, rank: int, said: Message) -> None:
        before = self._states[rank]
        state = merged(before, said, self._groups)
        if state.ended and state.ended != before.ended:
            state = replace(state, ended_at_s=time.monotonic())
        self._states[rank] = state

    # --- twice a second ---

    def turn(self) -> None:
        now_s = time.monotonic()
        if now_s - self._turned_s > 5.0:  # this process itself was stopped: nobody else was silent
            self._heard_s = dict.fromkeys(self._heard_s, now_s)
        self._turned_s = now_s
        self._notice_silence(now_s)
        if self._pending is not None:
            self._report_when_ready(now_s)
        elif not self._concluded:
            self._look_for_an_end(now_s)
            if not self._failed:
                self._look_for_a_stall(now_s)
        states = self._states.values()
        if self._pending is None and all(
            state.ended in (LOST, UNWATCHED) or (state.ended and (not state.process or not self._failed))
            for state in states
        ):
            self.finish()
        if now_s - self._ticked_s >= interval_s(len(self._states)):
            self._ticked_s = now_s
            self._tick()
        for lines in self._links.values():
            lines.flush()

    @property
    def pending(self) -> bool:
        """A report waits for stacks."""
        return self._pending is not None

    @property
    def _failed(self) -> bool:
        return any(state.ended in (GONE, RAISED) for state in self._states.values())

    def finish(self) -> None:
        """Nothing is left to watch over, or nobody to do it."""
        if self.finished:
            return
        if self._failed and not self._concluded:
            self._conclude(diagnose_end(list(self._states.values()), self._groups))
        elif self._last_word:
            show([f"it began with: {self._last_word}"])
        self.finished = True
        everybody_ended = all(not state.runs for state in self._states.values())
        self._order({"do": "done" if everybody_ended else "bye"})
        # Who leaves with something unread takes back what the others have not read yet.
        deadline_s = time.monotonic() + 1.0
        for lines in self._links.values():
            lines.finish()
        while time.monotonic() < deadline_s and not all(lines.drained() for lines in self._links.values()):
            time.sleep(0.005)
        self._listening.close()

    def _notice_silence(self, now_s: float) -> None:
        silent_s = SILENT_S + 2 * interval_s(len(self._states))
        for rank, heard_s in self._heard_s.items():
            state = self._states[rank]
            if rank != self._rank and state.runs and now_s - heard_s > silent_s:
                self._update(rank, {"ended": LOST})
            elif state.ended == LOST and now_s - heard_s < 2.0 and rank in self._links:
                self._update(rank, {"ended": ""})
        if now_s - self._began_s > CONNECT_S:
            absent = [rank for rank in self._states if rank not in self._heard_s]
            for rank in absent:
                if self._states[rank].runs:
                    self._update(rank, {"ended": UNWATCHED})
            if absent and self._began_s > 0:
                text = f"{name_ranks(absent)}: nobody watches for hangs there, no connection to rank {self._rank}"
                self._tell({"do": "warn", "text": text})
            self._began_s = float("inf")  # once

    def _tick(self) -> None:
        """Tells the others where rank 0 is, and who of them speaks when this hub is gone."""
        own = self._states[self._rank]
        others = [state for state in self._states.values() if state.runs and state.rank != self._rank]
        elsewhere = [state for state in others if state.node != own.node]
        speaker = min((state.rank for state in elsewhere or others), default=-1)
        state = {
            "step": own.step,
            "phase": own.phase,
            "ended": own.ended,
            "process": own.process,
            "groups": {
                str(index): [[each.sequence, each.operation, each.bytes, each.finished] for each in recent]
                for index, recent in own.groups.items()
            },
        }
        self._order(
            {"do": "tick", "hub": state, "speaker": speaker}, [rank for rank in self._links if rank != self._rank]
        )

    # --- an end ---

    def _look_for_an_end(self, now_s: float) -> None:
        states = list(self._states.values())
        failures = [state for state in states if state.ended in (GONE, RAISED)]
        if not failures:
            return
        everybody_gone = all(not state.process or state.ended in (LOST, UNWATCHED) for state in states)
        if everybody_gone or now_s - min(state.ended_at_s for state in failures) >= COLLECT_S:
            self._ask_for_stacks(diagnose_end(states, self._groups), now_s)
            if self._pending is None:
                self._conclude(None)

    def _conclude(self, diagnosis: Diagnosis | None) -> None:
        """The last word, once; who goes on all the same is ended a little later."""
        self._concluded = True
        if diagnosis is not None:
            self._show(diagnosis)
            if any(state.process and state.ended not in (LOST, UNWATCHED) for state in self._states.values()):
                self._last_word = diagnosis.lines[0]  # who still is there may say what has become of it
        self._order({"do": "failed", "within_s": END_AFTER_S if self._abort_after_s else None})

    # --- a stall ---

    def _look_for_a_stall(self, now_s: float) -> None:
        states = list(self._states.values())
        still = [
            state
            for state in states
            if state.runs and state.begun and state.phase != "checkpoint" and state.idle_s >= self._stall_after_s
        ]
        if not still:
            self._suspected = None
            if self._stood_still_s and all(state.ended in (RUNS, LEFT) for state in states) and not self._aborted:
                show([f"training goes on after {self._stood_still_s:.0f} s"])
            self._stood_still_s = 0.0
            return
        diagnosis = diagnose_stall(states, self._groups, self._stall_after_s)
        if diagnosis is None or (diagnosis.fault and diagnosis.idle_s < self._stall_after_s):
            return
        key = diagnosis.kind, diagnosis.ranks, diagnosis.step
        if key not in self._said:
            if self._confirmed(key, now_s):
                self._said.add(key)
                self._ask_for_stacks(diagnosis, now_s)
            return
        if self._stood_still_s:
            self._stood_still_s = max(state.idle_s for state in still)
        if self._abort_after_s and diagnosis.fault and diagnosis.idle_s >= self._abort_after_s and not self._aborted:
            in_first = any(state.runs and state.begun and state.step == state.first_step for state in states)
            if not in_first:
                self._abort(diagnosis)

    def _confirmed(self, key: tuple[str, tuple[int, ...], int], now_s: float) -> bool:
        """Whether everybody has reported since this looked like a stall: reports come one by one, and what looks like
        one may be no more than that."""
        if self._suspected is None or self._suspected[0] != key:
            self._suspected = key, now_s
        since_s = self._suspected[1]
        heard = (self._heard_s.get(rank, now_s) for rank, state in self._states.items() if state.runs)
        return min(heard, default=now_s) > since_s or now_s - since_s > 3 * interval_s(len(self._states))

    def _abort(self, diagnosis: Diagnosis) -> None:
        self._aborted = True
        reason = f"no movement for {diagnosis.idle_s:.0f} s: {diagnosis.lines[0]}"
        show([f"no movement for {diagnosis.idle_s:.0f} s (limit: {self._abort_after_s:.0f} s): all ranks end"])
        self._order({"do": "abort", "reason": reason})

    # --- reports ---

    def _ask_for_stacks(self, diagnosis: Diagnosis | None, now_s: float) -> None:
        """The report comes when those to blame have shown their Python stacks, or do not."""
        if diagnosis is None:
            return
        asked = [
            rank
            for rank in diagnosis.ranks
            if diagnosis.fault and self._states[rank].process and self._states[rank].ended not in (LOST, UNWATCHED)
        ][:_MOST_STACKS]
        if diagnosis.kind in ("network", "raised", "died", "left"):  # it is known where they are
            asked = []
        self._stacks.clear()
        self._pending = diagnosis, now_s + STACKS_S, asked
        self._order({"do": "stacks"}, asked)
        self._report_when_ready(now_s)

    def _report_when_ready(self, now_s: float) -> None:
        assert self._pending is not None
        diagnosis, deadline_s, asked = self._pending
        if now_s < deadline_s and any(rank not in self._stacks and self._states[rank].process for rank in asked):
            return
        self._pending = None
        if self._failed:
            self._conclude(diagnosis)
        else:
            self._show(diagnosis)
            if diagnosis.fault:
                self._stood_still_s = max(self._stood_still_s, diagnosis.idle_s)

    def _show(self, diagnosis: Diagnosis) -> None:
        lines = list(diagnosis.lines)
        for rank in diagnosis.ranks:
            if stack := self._stacks.get(rank):
                lines += [f"where rank {rank} is (innermost call first):", *(f"  {line.strip()}" for line in stack)]
        if diagnosis.trace:
            room = _SCREEN_LINES - len(lines) - 1
            lines += ["its error:", *(f"  {line}" for line in diagnosis.trace[-room:])]
        show(lines)
        if diagnosis.fault:
            event = {
                "kind": diagnosis.kind,
                "ranks": list(diagnosis.ranks),
                "step": diagnosis.step,
                "phase": diagnosis.phase,
                "message": "; ".join(diagnosis.lines),
            }
            self._tell({"do": "event", "event": event})
