import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bireme.channel import Channel
from bireme.ledger import Segment
from bireme.observe import host
from bireme.observe.exchange import Exchange
from bireme.observe.host import HostClock, TrafficCounter, peak_rss_bytes, traffic_counter
from bireme.observe.phases import Observation

Tree = Callable[[dict[str, str]], None]

TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    """tree({"/proc/stat": text}): files that are found in place of the machine's own."""
    monkeypatch.setattr(host, "Path", lambda path: Path(f"{tmp_path}{path}"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2}, raising=False)

    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            path = Path(f"{tmp_path}{name}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return write


def v2(throttled_us: int) -> str:
    return f"usage_usec 100\nuser_usec 60\nnr_periods 5\nnr_throttled 2\nthrottled_usec {throttled_us}\n"


def stat(*steal: int) -> str:
    lines = [f"cpu{core} 10 20 30 40 50 60 70 {ticks} 0 0" for core, ticks in enumerate(steal)]
    return "\n".join([f"cpu  1 2 3 4 5 6 7 {sum(steal)} 0 0", *lines, "intr 1 2 3", ""])


def test_version_2(tree: Tree) -> None:
    tree({"/proc/self/cgroup": "0::/user/job\n", "/sys/fs/cgroup/user/job/cpu.stat": v2(1000)})
    clock = HostClock()
    assert clock.taken_ns() == (0, 0)
    tree({"/sys/fs/cgroup/user/job/cpu.stat": v2(1250)})
    assert clock.taken_ns() == (250_000, 0)
    assert clock.taken_ns() == (0, 0)


def test_version_2_in_a_container_whose_own_root_is_mounted(tree: Tree) -> None:
    tree({"/proc/self/cgroup": "0::/docker/4c3\n", "/sys/fs/cgroup/cpu.stat": v2(5)})
    clock = HostClock()
    tree({"/sys/fs/cgroup/cpu.stat": v2(8)})
    assert clock.taken_ns()[0] == 3000


@pytest.mark.parametrize("mounted", ["/sys/fs/cgroup/cpu,cpuacct/job", "/sys/fs/cgroup/cpu/job", "/sys/fs/cgroup/cpu"])
def test_version_1_counts_nanoseconds(mounted: str, tree: Tree) -> None:
    lines = "7:memory:/job\n3:cpu,cpuacct:/job\n2:cpuset:/job\n"
    tree({"/proc/self/cgroup": lines, f"{mounted}/cpu.stat": "nr_periods 1\nthrottled_time 700\n"})
    clock = HostClock()
    tree({f"{mounted}/cpu.stat": "nr_periods 2\nthrottled_time 1900\n"})
    assert clock.taken_ns() == (1200, 0)


def test_both_versions_mounted(tree: Tree) -> None:
    tree(
        {
            "/proc/self/cgroup": "4:cpu,cpuacct:/job\n0::/job\n",
            "/sys/fs/cgroup/cpu,cpuacct/job/cpu.stat": "throttled_time 7\n",
            "/sys/fs/cgroup/unified/job/cgroup.procs": "",
        }
    )
    clock = HostClock()
    tree({"/sys/fs/cgroup/cpu,cpuacct/job/cpu.stat": "throttled_time 9\n"})
    assert clock.taken_ns()[0] == 2


def test_steal_is_of_the_usable_cores_alone(tree: Tree) -> None:
    tree({"/proc/stat": stat(5, 50, 7)})
    clock = HostClock()
    tree({"/proc/stat": stat(6, 90, 10)})
    assert clock.taken_ns() == (0, 4 * TICK_NS)


def test_a_machine_that_tells_nothing_takes_nothing(tree: Tree) -> None:
    assert HostClock().taken_ns() == (0, 0)


def test_unexpected_text_takes_nothing(tree: Tree) -> None:
    tree(
        {
            "/proc/self/cgroup": "0::/\n",
            "/sys/fs/cgroup/cpu.stat": "throttled_usec many\n",
            "/proc/stat": "cpu0 1 2 3\ncpu2 1 2 3 4 5 6 7 x\n",
        }
    )
    clock = HostClock()
    assert clock.taken_ns() == (0, 0)
    tree({"/sys/fs/cgroup/cpu.stat": v2(10)})  # it is not asked again
    assert clock.taken_ns() == (0, 0)


def test_a_group_that_vanishes(tree: Tree, tmp_path: Path) -> None:
    tree({"/proc/self/cgroup": "0::/job\n", "/sys/fs/cgroup/job/cpu.stat": v2(1000)})
    clock = HostClock()
    Path(f"{tmp_path}/sys/fs/cgroup/job/cpu.stat").unlink()
    throttled_ns, _ = clock.taken_ns()
    assert throttled_ns >= 0
    assert clock.taken_ns() == (0, 0)


def test_this_machine() -> None:
    throttled_ns, steal_ns = HostClock().taken_ns()
    assert throttled_ns >= 0 and steal_ns >= 0


# --- network -----------------------------------------------------------------------------------------------------


def card(sent: int | str, received: int) -> dict[str, str]:
    """The kernel's table of interfaces, as it is written."""
    others = "0    0    0     0          0         0"
    lines = [
        "Inter-|   Receive                                                |  Transmit",
        " face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls ...",
        f"    lo: 9000001      12    {others}  9000001      12    {others}",
        f"  eth0: {received}      7    {others} {sent}       8    {others}",
        f" eth01:       3       3    {others}        3       3    {others}",
    ]
    return {"/proc/self/net/dev": "\n".join([*lines, ""])}


def carried(first_step: int, last_step: int, sent: int, received: int) -> dict[str, Any]:
    return {
        "event": "traffic",
        "node": "node1",
        "interface": "eth0",
        "first_step": first_step,
        "last_step": last_step,
        "sent_bytes": sent,
        "received_bytes": received,
    }


def test_windows_of_traffic_follow_each_other_without_a_gap(tree: Tree) -> None:
    counter = TrafficCounter("node1", "eth0")
    for step, sent, received in ((0, 1000, 50), (10, 1700, 55), (12, 1900, 95)):
        tree(card(sent, received))
        counter.mark(step)
        taken = counter.take()
        tree(card(sent + 1, received + 1))  # what comes after the mark belongs to the next window
        if step == 0:
            assert taken is None
        elif step == 10:
            assert taken == carried(1, 10, 700, 5)
        else:
            assert taken == carried(11, 12, 200, 40)


def test_a_mark_that_was_not_taken_gives_its_bytes_to_the_next_window(tree: Tree) -> None:
    counter = TrafficCounter("node1", "eth0")
    for step, sent in ((0, 100), (3, 130), (4, 190)):
        tree(card(sent, 0))
        counter.mark(step)
        if step == 0:
            counter.take()
    assert counter.take() == carried(1, 4, 90, 0)


def test_no_step_no_window(tree: Tree) -> None:
    """At the end rounds go on without a step: their bytes are nobody's."""
    counter = TrafficCounter("node1", "eth0")
    tree(card(100, 100))
    counter.mark(0)
    counter.take()
    tree(card(200, 200))
    counter.mark(0)
    assert counter.take() is None
    tree(card(250, 200))
    counter.mark(1)
    assert counter.take() == carried(1, 1, 150, 100)


def test_counters_that_start_anew_or_vanish_claim_nothing(tree: Tree, tmp_path: Path) -> None:
    counter = TrafficCounter("node1", "eth0")
    tree(card(1000, 1000))
    counter.mark(0)
    counter.take()
    tree(card(10, 2000))
    counter.mark(1)
    assert counter.take() is None
    tree(card(30, 2005))
    counter.mark(2)
    assert counter.take() == carried(2, 2, 20, 5)
    tree(card("?", 2005))
    counter.mark(3)
    assert counter.take() is None
    Path(f"{tmp_path}/proc/self/net/dev").unlink()
    counter.mark(4)
    assert counter.take() is None
    tree(card(90, 2100))
    counter.mark(5)
    assert counter.take() == carried(3, 5, 60, 95)


def on(*nodes: str, interface: str | None = "eth0") -> list[dict[str, Any]]:
    return [{"rank": rank, "node": node, "interface": interface} for rank, node in enumerate(nodes)]


def test_the_first_rank_of_each_node_counts() -> None:
    ranks = on("a", "b", "b", "a", "c")
    assert [traffic_counter(ranks, rank) is not None for rank in range(5)] == [True, True, False, False, True]


def test_nobody_counts_what_is_not_between_machines() -> None:
    assert traffic_counter(on("a", "b"), 0) is not None
    assert traffic_counter(on("a", "a"), 0) is None
    assert traffic_counter(on("a", "b", interface="lo"), 0) is None
    assert traffic_counter(on("a", "b", interface=None), 0) is None
    assert traffic_counter([{"rank": 0, "node": "a"}, {"rank": 1, "node": "b"}], 0) is None


def test_this_machines_own_network() -> None:
    counter = TrafficCounter("here", "lo")
    counter.mark(0)
    counter.take()
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as hearer,
    ):
        hearer.bind(("127.0.0.1", 0))
        sender.sendto(bytes(20_000), hearer.getsockname())
        assert len(hearer.recv(65_536)) == 20_000
    counter.mark(1)
    event = counter.take()
    if not Path("/proc/self/net/dev").exists():
        assert event is None
    else:
        assert event is not None and min(event["sent_bytes"], event["received_bytes"]) >= 20_000


def test_an_interface_that_is_not_there_says_nothing() -> None:
    counter = TrafficCounter("here", "none7")
    for step in range(3):
        counter.mark(step)
        assert counter.take() is None


# --- memory ------------------------------------------------------------------------------------------------------


def test_the_peak_stays_after_memory_is_given_back() -> None:
    before = peak_rss_bytes()
    block = bytearray(before + 50_000_000)
    del block
    after = peak_rss_bytes()
    assert before + 50_000_000 < after < 20 * before + 1_000_000_000


def test_the_peak_is_not_that_of_whoever_started_the_process() -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("only Linux says it of a program alone")
    block = bytearray(200_000_000)
    code = "from bireme.observe.host import peak_rss_bytes; print(peak_rss_bytes())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert 1_000_000 < int(said) < len(block)


def test_without_proc_getrusage_says_it(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    monkeypatch.setattr(sys, "platform", "linux")
    assert peak_rss_bytes() >= kilobytes * 1024
    monkeypatch.setattr(sys, "platform", "darwin")
    assert kilobytes <= peak_rss_bytes() < kilobytes * 1024


# --- on their way to the record ----------------------------------------------------------------------------------


class Card(TrafficCounter):
    """Carries a hundred bytes for every step and a thousand between two marks."""

    def mark(self, step: int) -> None:
        self._marks = getattr(self, "_marks", -1) + 1
        self._marked = step, 100 * step + 1000 * self._marks, step


def exchange_steps(rank: int, size: int, steps: int) -> list[dict[str, Any]]:
    """The events of a run that closes only when its last steps were handed over already."""
    channel = Channel()
    events: list[dict[str, Any]] = []
    lines: list[dict[str, Any]] = []

    def deliver(new_lines: list[dict[str, Any]], new_events: list[dict[str, Any]], _: list[dict[str, Any]]) -> None:
        lines.extend(new_lines)
        events.extend(new_events)

    exchange = Exchange(
        channel,
        [(list(range(size)), channel.group)],
        every=1,
        resolve=lambda observation: (0, 100, [Segment(0, 0, 100, cpu_ns=100)]),
        deliver=deliver,
        warnings=list,
        traffic=Card("node1", "eth0") if rank == size - 1 else None,
    )
    exchange.start()
    exchange.begin()
    for step in range(1, steps + 1):
        exchange.submit(Observation(step, []))
        deadline = time.monotonic() + 20
        while exchange._done < step and time.monotonic() < deadline:
            time.sleep(0.001)
    time.sleep(0.01)
    exchange.note({"event": "last words"})
    assert exchange.finish(20), exchange.failure
    if rank == 0:
        assert [line["step"] for line in lines] == list(range(1, steps + 1))
    return events


def test_traffic_and_memory_reach_the_record(ranks: Callable[..., list[Any]]) -> None:
    events, nothing = ranks(2, exchange_steps, 3)
    assert nothing == []
    traffic = [event for event in events if event["event"] == "traffic"]
    assert [(event["first_step"], event["last_step"]) for event in traffic] == [(1, 1), (2, 2), (3, 3)]
    assert all(event["sent_bytes"] % 1000 == 100 and event["received_bytes"] == 1 for event in traffic)
    memory = [event for event in events if event["event"] == "memory"]
    assert [event["rank"] for event in memory] == [0, 1]
    assert all(event["peak_rss_bytes"] > 10_000_000 and event["peak_device_bytes"] is None for event in memory)
    assert sum(event["event"] == "last words" for event in events) == 2


def test_a_run_without_a_step_says_its_memory(ranks: Callable[..., list[Any]]) -> None:
    events, _ = ranks(2, exchange_steps, 0)
    assert [event["event"] for event in events] == ["last words", "memory", "last words", "memory"]
