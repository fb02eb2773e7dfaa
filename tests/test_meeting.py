"""Ranks as threads of this process: a meeting needs no process group."""

import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from bireme import meeting
from bireme.environment import Launch
from bireme.errors import UserError
from bireme.meeting import Meeting
from bireme.network import free_port
from bireme.text import name_ranks


@pytest.fixture(autouse=True)
def every_thread_is_a_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(meeting, "_joins", itertools.repeat(0))
    monkeypatch.setattr(meeting, "_LAST_WORD_S", 1.0)
    yield


def launches(size: int, address: str = "127.0.0.1", port: int = 0, **changes: Any) -> list[Launch]:
    port = port or free_port()
    return [
        replace(Launch(rank, size, rank, size, 0, 1, address, port, False, "environment"), **changes)
        for rank in range(size)
    ]


def together(
    launched: list[Launch],
    then: Callable[[Meeting], Any] = lambda met: None,
    timeout_s: float = 20.0,
    delays_s: Mapping[int, float] | None = None,
    environs: Mapping[int, Mapping[str, str]] | None = None,
) -> list[Any]:
    """What `then` returns for each launch in a thread of its own, or the UserError that it ended with."""

    def one(index: int) -> Any:
        time.sleep((delays_s or {}).get(index, 0.0))
        try:
            met = Meeting(launched[index], timeout_s, f"process {index}", (environs or {}).get(index, {}))
            return then(met), met  # the meeting is open until all are done
        except UserError as error:
            return error, None

    with ThreadPoolExecutor(len(launched)) as threads:
        ended = list(threads.map(one, range(len(launched))))
        return [result for result, _ in ended]


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1"])
def test_ranks_meet_and_share(address: str) -> None:
    if address == "::1":
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("no IPv6 here")

    def exchange(met: Meeting) -> Any:
        first = met.share("names", {"rank": met.launch.rank, "café": [None, 1.5]})
        return first, met.share("numbers", met.launch.rank**2)

    answers = together(launches(3, address), exchange)
    assert answers == [([{"rank": rank, "café": [None, 1.5]} for rank in range(3)], [0, 1, 4])] * 3


def test_a_rank_may_come_before_rank_0(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_SAY_AFTER_S", 0.3)
    launched = launches(2)
    assert together(launched, lambda met: met.share("rank", met.launch.rank), delays_s={0: 2.0}) == [[0, 1]] * 2
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert all(f"rank 1 waits for rank 0 at 127.0.0.1:{launched[0].master_port}" in line for line in lines)


def test_a_name_that_is_not_known_yet(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a cluster whose names appear after its pods."""
    monkeypatch.setattr(meeting, "_SAY_AFTER_S", 0.1)
    connect, known_at = socket.create_connection, time.monotonic() + 1.0

    def late(address: tuple[str, int], timeout: float) -> Any:
        if time.monotonic() < known_at:
            raise socket.gaierror(-2, "Name or service not known")
        return connect(address, timeout)

    monkeypatch.setattr(meeting.socket, "create_connection", late)
    assert together(launches(2, "localhost"), lambda met: met.launch.rank) == [0, 1]
    assert "waits for the name localhost ([Errno -2] Name or service not known)" in capsys.readouterr().err


def test_a_name_that_never_becomes_known() -> None:
    launched = launches(2, "no-such-host.invalid")
    for error in together(launched, timeout_s=0.5):
        assert "MASTER_ADDR=no-such-host.invalid cannot be resolved on rank" in str(error)


def test_who_never_comes_is_named() -> None:
    alone = launches(4)[:1]
    (error,) = together(alone, timeout_s=0.5)
    assert f"ranks 1-3 of 4 did not come to 127.0.0.1:{alone[0].master_port} in 0 s" in str(error)
    (error,) = together(launches(2)[1:], timeout_s=0.5)
    assert "rank 1 cannot reach rank 0 at 127.0.0.1:" in str(error)
    assert "bireme doctor" in str(error)


def test_the_owner_of_a_busy_port_is_named() -> None:
    with socket.create_server(("", 0)) as holder:
        port = holder.getsockname()[1]
        (error,) = together(launches(2, port=port)[:1])
    assert f"port {port} on 127.0.0.1 is in use by " in str(error)
    assert f"(pid {os.getpid()}: " in str(error)
    assert "choose another MASTER_PORT" in str(error)


def test_another_job_is_refused_at_once_and_the_first_goes_on() -> None:
    job = {"TORCHELASTIC_RUN_ID": "first"}
    launched = launches(2)
    started = time.monotonic()
    strangers = [launched[1], launches(3, port=launched[0].master_port)[1]]
    first, *refused, last = together(
        [launched[0], *strangers, launched[1]],
        lambda met: met.share("rank", met.launch.rank),
        delays_s={3: 1.5},
        environs={0: job, 1: {"TORCHELASTIC_RUN_ID": "second"}, 2: job, 3: job},
    )
    assert first == last == [0, 1]
    where = f"another job meets at 127.0.0.1:{launched[0].master_port}: run 'first' of 2 ranks, and this process"
    assert str(refused[0]).startswith(f"{where} (rank 1) belongs to run 'second' of 2 ranks")
    assert str(refused[1]).startswith(f"{where} (rank 1) belongs to run 'first' of 3 ranks")
    assert time.monotonic() - started < 15


def test_two_torchruns_at_one_agents_store() -> None:
    port = free_port()
    agent = dist.TCPStore("127.0.0.1", port, None, is_master=True, wait_for_workers=False)
    under_agent = launches(2, port=port, agent_store=True)

    def as_run(**environ: str) -> list[Any]:
        return together(under_agent, lambda met: met.launch.rank, environs=dict.fromkeys(range(2), environ))

    assert as_run(TORCHELASTIC_RUN_ID="a") == [0, 1]
    for error in as_run(TORCHELASTIC_RUN_ID="b"):
        assert "run 'a', and this process" in str(error)
        assert "belongs to run 'b'" in str(error)
    # The job's own next attempt is no stranger.
    assert as_run(TORCHELASTIC_RUN_ID="a", TORCHELASTIC_RESTART_COUNT="1") == [0, 1]
    del agent


def test_a_store_of_another_program() -> None:
    port = free_port()
    foreign = dist.TCPStore("127.0.0.1", port, None, is_master=True, wait_for_workers=False)
    (error,) = together(launches(2, port=port)[1:])
    assert f"what listens at 127.0.0.1:{port} is no rank 0 of Bireme" in str(error)
    del foreign


def test_two_processes_of_one_rank_are_refused_by_name() -> None:
    launched = launches(3)
    errors = together([launched[0], launched[1], launched[1]])
    for error in errors:
        assert "two processes say they are rank 1" in str(error)
        assert "process 1" in str(error)
        assert "process 2" in str(error)
    assert len(set(map(str, errors))) == 1


def test_a_rank_that_dies_in_between_is_named() -> None:
    def share_or_die(met: Meeting) -> Any:
        if met.launch.rank == 1:
            return "gone"
        met.deadline = time.monotonic() + 1.0
        return met.share("something", 1)

    first, second, third = together(launches(3), share_or_die)
    assert second == "gone"
    for error in (first, third):
        assert "rank 1 came to 127.0.0.1:" in str(error)
        assert "gave no answer" in str(error)


def test_what_stops_one_stops_all() -> None:
    def share(met: Meeting) -> Any:
        return met.share("ready", met.launch.rank != 2, lambda ready: None if all(ready) else "one is not ready")

    assert [str(error) for error in together(launches(4), share)] == ["one is not ready"] * 4


# --- several nodes and a loopback address ------------------------------------------------------------------------


def test_nodes_that_meet_at_loopback_are_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(meeting, "_AGENT_LISTENS_S", 0.3)
    monkeypatch.setattr(meeting, "_PERSON_STARTS_S", 0.6)
    for agent_store in (True, False):
        several = launches(2, num_nodes=2, agent_store=agent_store)
        (error,) = together(several[1:], timeout_s=20.0)
        assert "rank 1 finds nobody at 127.0.0.1:" in str(error)
        assert "another of the 2 nodes" in str(error)
    assert "MASTER_ADDR=127.0.0.1 is this machine itself, where nobody listens yet" in capsys.readouterr().err
    # Emulated nodes know what they do; so do the ranks of one node.
    (error,) = together(several[1:], timeout_s=1.0, environs={0: {"BIREME_NODE": "node1"}})
    assert "cannot reach rank 0" in str(error)
    (error,) = together(launches(2)[1:], timeout_s=1.0)
    assert "cannot reach rank 0" in str(error)


def test_nodes_that_are_all_here_meet_at_loopback(capsys: pytest.CaptureFixture[str]) -> None:
    """Two terminals on one machine: fine, and rank 0 says what cannot work."""
    assert together(launches(2, num_nodes=2), lambda met: met.launch.rank, delays_s={0: 0.5}) == [0, 1]
    assert "ranks on other machines cannot come here" in capsys.readouterr().err


# --- names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0-1"),
        ([0, 1, 2, 5], "ranks 0-2, 5"),
        ([5, 2, 1, 0], "ranks 0-2, 5"),
        ([1, 3, 5], "ranks 1, 3, 5"),
        ([0, 2, 3, 4, 6, 7], "ranks 0, 2-4, 6-7"),
        (list(range(1024)), "ranks 0-1023"),
    ],
)
def test_name_ranks(ranks: list[int], text: str) -> None:
    assert name_ranks(ranks) == text
