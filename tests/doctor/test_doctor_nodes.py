"""The doctor on emulated machines with planted faults: each is named."""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from bireme.nodes import EmulatedCluster

if TYPE_CHECKING:
    from tests.planted import BLOCK, HOSTS, SECOND_CARD, on
else:
    from planted import BLOCK, HOSTS, SECOND_CARD, on


@pytest.fixture
def cluster() -> Iterator[EmulatedCluster]:
    with EmulatedCluster(nodes=2, link="1gbit") as cluster:
        if not cluster.shaped:
            pytest.skip(f"no emulated machines here: {cluster.reason}")
        yield cluster


def doctors(
    cluster: EmulatedCluster,
    *arguments: str,
    wait_s: int = 30,  # ample where all nodes will answer: this machine may be busy
    environment: dict[int, dict[str, str]] | None = None,
) -> list[dict[str, Any] | None]:
    """What each node's doctor reports; None where the report is node 0's."""
    running = []
    for node in cluster.nodes:
        output = tempfile.TemporaryFile()  # noqa: SIM115
        command = [sys.executable, "-m", "bireme", "doctor", "--json", "--wait", str(wait_s), *arguments]
        env = {"OMP_NUM_THREADS": "1", **(environment or {}).get(node.rank, {})}
        running.append((node.start(command, env=env, stdout=output), output))
    codes: list[int] = []
    reports: list[dict[str, Any] | None] = []
    for process, output in running:
        code = process.wait(120)
        with output:
            output.seek(0)
            text = output.read()
        report = orjson.loads(text) if text else None
        codes.append(code)
        reports.append(report)
    for code, report in zip(codes, reports, strict=True):
        # Where the report is node 0's, so is the verdict.
        decisive = report or reports[0]
        assert decisive is not None and code == (0 if decisive["passed"] else 1)
    return reports


def faults(report: dict[str, Any] | None) -> dict[str, str]:
    assert report is not None
    return {check["name"]: check["message"] for check in report["checks"] if check["status"] == "fail"}


def test_healthy_nodes(cluster: EmulatedCluster) -> None:
    first, second = doctors(cluster)
    assert first is not None and second is None
    assert first["passed"], faults(first)
    for node, facts, command in zip(cluster.nodes, first["nodes"], first["commands"], strict=True):
        assert (facts["name"], facts["address"], facts["interface"]) == (node.name, node.address, "eth0")
        assert command["command"].startswith("GLOO_SOCKET_IFNAME=eth0 torchrun ")
        assert f"--master-addr={cluster.nodes[0].address} " in command["command"]
        assert f"--local-addr={node.address} " in command["c10d"]


def test_a_hosts_file_with_127_0_1_1(cluster: EmulatedCluster) -> None:
    """B01, B09: Debian's line, on the first node and on another."""
    assert on(cluster.node(1), HOSTS) == 0
    first, _ = doctors(cluster)
    assert list(faults(first)) == ["own name"], faults(first)
    assert "node1 resolves to 127.0.1.1" in faults(first)["own name"]
    assert on(cluster.node(0), HOSTS) == 0
    first, _ = doctors(cluster)
    assert first is not None
    named = [check for check in first["checks"] if check["status"] == "fail"]
    assert [check["nodes"] for check in named] == [["node0"], ["node1"]]
    assert named[0]["fix"].endswith(f"add: {cluster.node(0).address} node0")


def test_a_second_card_that_leads_nowhere(cluster: EmulatedCluster) -> None:
    """B02: the machine's own name is the address of another network; the routed card is the one to use."""
    for node in cluster.nodes:
        assert on(node, SECOND_CARD) == 0
    first, _ = doctors(cluster)
    assert first is not None
    assert [(each["address"], each["interface"]) for each in first["nodes"]] == [
        (node.address, "eth0") for node in cluster.nodes
    ]
    assert all(each["command"].startswith("GLOO_SOCKET_IFNAME=eth0 ") for each in first["commands"])


def test_wrong_interface(cluster: EmulatedCluster) -> None:
    first, _ = doctors(cluster, environment={0: {"GLOO_SOCKET_IFNAME": "lo"}, 1: {"GLOO_SOCKET_IFNAME": "nosuch0"}})
    assert first is not None
    messages = [check["message"] for check in first["checks"] if check["status"] == "fail"]
    assert len(messages) == 2
    assert "GLOO_SOCKET_IFNAME=lo is the loopback interface: the way to the other nodes is eth0" in messages[0]
    assert "GLOO_SOCKET_IFNAME=nosuch0 names no network interface" in messages[1]


@pytest.mark.skipif(shutil.which("tc") is None, reason="tc, with which packets are dropped, is not installed")
def test_a_blocked_direction(cluster: EmulatedCluster) -> None:
    """B05: node 1 reaches node 0, but not the other way round; then node 1 cannot even come to the meeting."""
    if on(cluster.node(0), BLOCK) != 0:
        pytest.skip("this kernel cannot drop packets by their flags (htb, u32)")
    first, second = doctors(cluster)
    assert second is None
    assert list(faults(first)) == ["connections"], faults(first)
    assert faults(first)["connections"].startswith("node0 -> node1 (")
    assert faults(first)["connections"].endswith("node1 -> node0 works")


@pytest.mark.skipif(shutil.which("tc") is None, reason="tc, with which packets are dropped, is not installed")
def test_a_blocked_way_to_the_meeting(cluster: EmulatedCluster) -> None:
    if on(cluster.node(1), BLOCK) != 0:
        pytest.skip("this kernel cannot drop packets by their flags (htb, u32)")
    first, second = doctors(cluster, "--peers", "node0,node1", wait_s=8)
    assert "node1 -> node0 is blocked" in faults(first)["peers"]
    assert "node0 was not met: node1 -> node0 (node0:29500): no answer" in faults(second)["peers"]


def test_a_node_that_is_cut_off(cluster: EmulatedCluster) -> None:
    cluster.node(1).cut()
    first, second = doctors(cluster, wait_s=6)
    assert "node 1 is silent" in faults(first)["peers"]
    assert "node 0 was not met" in faults(second)["peers"]


MEET = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("ranks that met:", int(total))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("kind", [pytest.param("command", marks=pytest.mark.slow), "c10d"])
def test_the_printed_commands_work(kind: str, cluster: EmulatedCluster, tmp_path: Path) -> None:
    """Also with Debian's line on both nodes, where torchrun's own choices fail, and without the nodes' variables."""
    for node in cluster.nodes:
        assert on(node, HOSTS) == 0
    first, _ = doctors(cluster, "--ranks-per-node", "1")
    assert first is not None
    script = tmp_path / "meet.py"
    script.write_text(MEET)
    unset = ["env", *(f"-u{name}" for name in cluster.node(0).environment)]
    torchrun = f"{sys.executable} -m torch.distributed.run"
    running = []
    for node, each in zip(cluster.nodes, first["commands"], strict=True):
        command = each[kind].replace("-m bireme train --preset toy", str(script)).replace("torchrun", torchrun, 1)
        output = (tmp_path / f"{node.name}.txt").open("w")
        running.append(node.start([*unset, "sh", "-c", command], stdout=output, stderr=output))
        output.close()
    codes = [process.wait(200) for process in running]
    texts = [(tmp_path / f"{node.name}.txt").read_text() for node in cluster.nodes]
    assert codes == [0, 0], texts
    assert all("ranks that met: 2" in text for text in texts)
