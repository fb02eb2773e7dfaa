import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from bireme.doctor import board as board_module
from bireme.doctor.board import Board, Meeting, Visitor, reason
from bireme.doctor.facts import Name
from bireme.doctor.reach import Answerer, reach_all
from bireme.doctor.wire import Wire, WireError, listen
from bireme.errors import UserError

SOON_S = 20.0


def check(stage: str, index: int, value: Any) -> Any:
    if not isinstance(value, str):
        raise UserError("a peer's value is not text")
    return value


@pytest.fixture
def board() -> Iterator[tuple[Board, int]]:
    board = Board(Meeting(0, 3, "job"), lambda: time.time_ns() + 5_000_000_000, check)
    board.expect("facts", frozenset({0, 1, 2}), time.monotonic() + SOON_S)
    yield board, board.open("127.0.0.1", [0])
    board.close()


def visit(port: int, index: int, job: str = "job") -> Visitor:
    return Visitor(Meeting(index, 3, job), ["127.0.0.1"], [port], time.monotonic() + SOON_S)


def test_everybody_reads_what_everybody_put(board: tuple[Board, int]) -> None:
    server, port = board
    got: dict[int, Any] = {}

    def take_part(index: int) -> None:
        visitor = visit(port, index)
        visitor.put("facts", f"I am {index}", time.monotonic() + SOON_S)
        got[index] = visitor.get("facts", time.monotonic() + SOON_S)
        visitor.close()

    threads = [threading.Thread(target=take_part, args=(index,)) for index in (1, 2)]
    for thread in threads:
        thread.start()
    server.put("facts", 0, "I am 0")
    for thread in threads:
        thread.join(SOON_S)
    everybody = {0: "I am 0", 1: "I am 1", 2: "I am 2"}
    assert server.get("facts") == got[1] == got[2] == everybody
    assert server.local_addresses == {1: "127.0.0.1", 2: "127.0.0.1"}
    server.wait_until_left(time.monotonic() + SOON_S)


def test_the_clock_of_a_node(board: tuple[Board, int]) -> None:
    visitor = visit(board[1], 1)
    clock = visitor.clock(time.time_ns, time.monotonic() + SOON_S)
    assert abs(clock.offset_s + 5) <= clock.bound_s + 0.001  # node 0 pretends to be 5 s ahead
    assert 0 < clock.bound_s < 2
    visitor.close()


def test_who_does_not_come_holds_nobody_up(board: tuple[Board, int]) -> None:
    server, port = board
    visitor = visit(port, 1)
    visitor.put("facts", "one", time.monotonic() + SOON_S)
    server.put("facts", 0, "zero")
    server.arrived("facts", frozenset({1, 2}), time.monotonic() + 0.2)
    assert server.known("facts") == {0, 1}
    server.expect("facts", server.known("facts"), time.monotonic() + SOON_S)
    assert visitor.get("facts", time.monotonic() + SOON_S) == {0: "zero", 1: "one"}
    late = visit(port, 2)
    late.put("facts", "late", time.monotonic() + SOON_S)
    assert 2 not in late.get("facts", time.monotonic() + SOON_S)
    visitor.close()
    late.close()


@pytest.mark.parametrize(("index", "job", "why"), [(1, "other", "different jobs"), (3, "job", "does not fit 3 nodes")])
def test_strangers_are_refused(index: int, job: str, why: str, board: tuple[Board, int]) -> None:
    with pytest.raises(WireError, match=why):
        Visitor(Meeting(index, 3, job), ["127.0.0.1"], [board[1]], time.monotonic() + 0.5)


def test_a_number_is_given_once(board: tuple[Board, int]) -> None:
    first = visit(board[1], 1)
    with pytest.raises(WireError, match="two doctors say that they are node 1"):
        Visitor(Meeting(1, 3, "job"), ["127.0.0.1"], [board[1]], time.monotonic() + 0.5)
    first.close()


def test_what_no_doctor_sends_is_refused(board: tuple[Board, int]) -> None:
    server, port = board
    visitor = visit(port, 1)
    with pytest.raises(WireError, match="is not text"):
        visitor.put("facts", {"a": 1}, time.monotonic() + SOON_S)
    assert server.refused[1] == "a peer's value is not text"
    assert server.known("facts") == set()
    visitor.close()


@pytest.mark.parametrize(
    "line", [b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"doctor":1,"job":"job","index":true}\n', b"\xff\n"]
)
def test_other_protocols_do_no_harm(line: bytes, board: tuple[Board, int]) -> None:
    server, port = board
    with socket.create_connection(("127.0.0.1", port), timeout=SOON_S) as connection:
        connection.sendall(line)
        connection.settimeout(SOON_S)
        answer = connection.recv(1000)
        assert answer == b"" or b"refused" in answer
    visitor = visit(port, 1)
    visitor.put("facts", "still there", time.monotonic() + SOON_S)
    assert server.known("facts") == {1}
    visitor.close()


def test_a_visitor_finds_the_board_behind_a_taken_port() -> None:
    """Somebody who never answers holds the first port; the board is at the second."""
    with listen("127.0.0.1") as taken:
        first = taken.getsockname()[1]
        board = Board(Meeting(0, 2, "job"), time.time_ns, check)
        second = board.open("127.0.0.1", [first, 0])
        assert second != first
        visitor = Visitor(Meeting(1, 2, "job"), ["127.0.0.1"], [first, second], time.monotonic() + SOON_S)
        visitor.close()
        board.close()


def test_node_0_was_not_started() -> None:
    with listen("127.0.0.1") as probe:
        port = probe.getsockname()[1]
    with pytest.raises(WireError, match="nothing listens there"):
        Visitor(Meeting(1, 2, "job"), ["127.0.0.1"], [port], time.monotonic() + 0.5)


def test_something_else_answers_at_the_meeting_point() -> None:
    with listen("127.0.0.1") as foreign:

        def answer() -> None:
            try:
                while True:
                    foreign.accept()[0].sendall(b"SSH-2.0-OpenSSH\r\n")
            except OSError:
                pass

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(WireError, match="not a bireme doctor"):
            Visitor(Meeting(1, 2, "job"), ["127.0.0.1"], [foreign.getsockname()[1]], time.monotonic() + 0.5)
        foreign.shutdown(socket.SHUT_RDWR)


def test_a_message_is_bounded() -> None:
    ours, theirs = socket.socketpair()
    sender = threading.Thread(target=lambda: ours.sendall(b"x" * 200_000), daemon=True)
    wire = object.__new__(Wire)
    wire.socket, wire._limit_bytes, wire._read = theirs, 1000, bytearray()
    sender.start()
    with pytest.raises(WireError, match="more than 1000 bytes"):
        wire.receive(time.monotonic() + SOON_S)
    theirs.close()
    ours.close()
    sender.join(SOON_S)


def test_silence_ends_at_the_deadline() -> None:
    with listen("127.0.0.1") as listener:
        wire = Wire(socket.create_connection(listener.getsockname()[:2]))
        with pytest.raises(WireError, match="does not answer"):
            wire.receive(time.monotonic() + 0.2)
        wire.close()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionRefusedError(111, "Connection refused"), "nothing listens"),
        (TimeoutError("timed out"), "firewall"),
        (OSError(113, "No route to host"), "no route to host"),
    ],
)
def test_reasons(error: OSError, words: str) -> None:
    assert words in reason(error)


def test_reaching_each_other() -> None:
    answerers = [Answerer(Meeting(index, 3, "job")) for index in range(3)]
    targets = {index: ("127.0.0.1", each.open("127.0.0.1")) for index, each in enumerate(answerers)}
    with listen("127.0.0.1") as closed:
        nowhere = closed.getsockname()[1]
    try:
        reaches = reach_all(Meeting(0, 3, "job"), targets, time.monotonic() + SOON_S)
        assert [(each.to, each.error) for each in reaches] == [(0, None), (1, None), (2, None)]
        # The address of node 1 leads to node 2: a bridge that every machine has, for example.
        (twisted,) = reach_all(Meeting(0, 3, "job"), {1: targets[2]}, time.monotonic() + SOON_S)
        assert "somebody else has this address" in str(twisted.error)
        (stranger,) = reach_all(Meeting(0, 3, "other"), {1: targets[1]}, time.monotonic() + SOON_S)
        assert stranger.error is not None
        bad = {0: ("127.0.0.1", nowhere), 1: ("no address", 1), 2: ("127.0.0.1", 70000)}
        assert all(each.error for each in reach_all(Meeting(0, 3, "job"), bad, time.monotonic() + SOON_S))
    finally:
        for each in answerers:
            each.close()


def test_a_name_that_nobody_knows_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """B68: the name of node 0 appears in the name server after the others have started."""
    asked: list[str] = []

    def look_up_all(names: list[str]) -> dict[str, Name]:
        asked.extend(names)
        known = len(asked) > 3
        return {name: Name(name, ["127.0.0.1"] if known else [], None if known else "unknown") for name in names}

    monkeypatch.setattr(board_module, "look_up_all", look_up_all)
    board = Board(Meeting(0, 2, "job"), time.time_ns, check)
    port = board.open("127.0.0.1", [0])
    Visitor(Meeting(1, 2, "job"), ["pod-0.job"], [port], time.monotonic() + SOON_S).close()
    board.close()
    asked.clear()
    with pytest.raises(WireError, match=r"the name pod-0.job is not known \(unknown\)"):
        Visitor(Meeting(1, 2, "job"), ["pod-0.job"], [port], time.monotonic() + 0.1)
