"""What a run and the link measurement do on emulated machines with planted faults."""

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import pytest
import torch

from bireme.links import LinkTable
from bireme.nodes import EmulatedCluster
from bireme.run_reader import read_run

if TYPE_CHECKING:
    from tests.planted import BLOCK, HOSTS, SECOND_CARD, on
else:
    from planted import BLOCK, HOSTS, SECOND_CARD, on

# In numbers: the names are what is broken. And without what `bireme nodes` says of the interface.
JOIN = """
import logging, os, sys
os.environ["MASTER_ADDR"] = "10.118.0.1"
for name in ("GLOO_SOCKET_IFNAME", "BIREME_NODE"):
    os.environ.pop(name, None)
logging.basicConfig(level=logging.INFO, format="%(message)s")
import orjson, torch, torch.distributed as dist
from bireme.errors import UserError
from bireme.world import join
try:
    world = join()
except UserError as error:
    print(error, file=sys.stderr)
    sys.exit(3)
total = torch.ones(1)
dist.all_reduce(total)
print(orjson.dumps({"ranks": world.ranks, "total": float(total)}).decode(), flush=True)
world.leave()
"""


@pytest.fixture
def cluster() -> Iterator[EmulatedCluster]:
    with EmulatedCluster(nodes=2, link="200mbit", cores_per_node=1) as cluster:
        if not cluster.shaped:
            pytest.skip(f"no emulated machines here: {cluster.reason}")
        yield cluster


def everywhere(cluster: EmulatedCluster, folder: Path, *command: str) -> tuple[list[int], list[str], list[str]]:
    """Exit codes, standard outputs and standard errors of a command on every node."""
    running = []
    for node in cluster.nodes:
        with (folder / f"{node.name}.out").open("w") as stdout, (folder / f"{node.name}.err").open("w") as stderr:
            running.append(node.start(command, stdout=stdout, stderr=stderr))
    codes = [process.wait(150) for process in running]
    texts = [[(folder / f"{node.name}.{end}").read_text() for node in cluster.nodes] for end in ("out", "err")]
    return codes, texts[0], texts[1]


@pytest.mark.parametrize(
    "fault", [pytest.param(HOSTS, id="B09: 127.0.1.1"), pytest.param(SECOND_CARD, id="B02: a VPN")]
)
def test_a_run_takes_the_card_that_leads_to_the_master(fault: str, cluster: EmulatedCluster, tmp_path: Path) -> None:
    for node in cluster.nodes:
        assert on(node, fault) == 0
    codes, outputs, errors = everywhere(cluster, tmp_path, sys.executable, "-c", JOIN)
    assert codes == [0, 0], errors
    for rank, (node, output, error) in enumerate(zip(cluster.nodes, outputs, errors, strict=True)):
        joined = orjson.loads(output)
        assert joined["total"] == 2
        assert [(each["node"], each["address"], each["interface"]) for each in joined["ranks"]] == [
            ("node0", "10.118.0.1", "eth0"),
            ("node1", "10.118.0.2", "eth0"),
        ]
        assert f"rank {rank} on node {node.name} advertises address {node.address} via interface eth0" in error


@pytest.mark.skipif(shutil.which("tc") is None, reason="tc, with which packets are dropped, is not installed")
def test_a_run_names_the_blocked_direction(cluster: EmulatedCluster, tmp_path: Path) -> None:
    """B05: node 1 may connect to node 0, but not the other way round; gloo would wait for half an hour."""
    if on(cluster.node(0), BLOCK) != 0:
        pytest.skip("this kernel cannot drop packets by their flags (htb, u32)")
    codes, _, errors = everywhere(cluster, tmp_path, sys.executable, "-c", JOIN)
    assert codes == [3, 3], errors
    for error in errors:
        assert "node node0 (rank 0) cannot connect to node node1 (rank 1) at 10.118.0.2:" in error
        assert "firewall" in error and "node1 (rank 1) cannot" not in error


TRAIN = ["-m", "bireme", "train", "--preset", "toy", "--steps", "100000", "--global-batch-size", "2"]


@pytest.mark.skipif(
    not hasattr(torch.distributed.ProcessGroup, "register_pre_hook"),
    reason="before PyTorch 2.14 a gloo group with a pending operation keeps a process from ending",
)
def test_a_run_whose_peer_is_gone_names_the_node(cluster: EmulatedCluster, tmp_path: Path) -> None:
    """Power loss: no connection is closed, nobody says goodbye."""
    run = tmp_path / "run"
    with (tmp_path / "err").open("w") as stderr:
        first, second = (
            node.start(
                [sys.executable, *TRAIN, "--run-dir", str(run)],
                env={"OMP_NUM_THREADS": "1", "BIREME_TIMEOUT_S": "5"},
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )
            for node in cluster.nodes
        )
    deadline = time.monotonic() + 120
    while not ((run / "steps.jsonl").exists() and (run / "steps.jsonl").stat().st_size):
        assert first.returncode is None and time.monotonic() < deadline, (tmp_path / "err").read_text()
        time.sleep(0.1)
    cluster.node(1).kill()
    assert first.wait(90) == 1
    assert second.wait(10) < 0
    said = (tmp_path / "err").read_text()
    (line,) = [line for line in said.splitlines() if line.startswith("bireme: ")] or [said]
    assert "rank 0 on node0 stopped: no answer from the other ranks; node1 (10.118.0.2) cannot be reached" in line
    assert read_run(run).facts["status"] != "running"


@pytest.mark.slow
def test_a_slowed_link_shows_in_the_next_measurement(cluster: EmulatedCluster, tmp_path: Path) -> None:
    """B11, B56: measured, one node's link set to a tenth, measured again."""
    out = tmp_path / "links.json"
    command = [sys.executable, "-m", "bireme", "links", "--max-bytes", "1MiB", "--seconds", "4", "--out", str(out)]
    rates = []
    for rate in ("200mbit", "20mbit"):
        cluster.node(1).set_link(rate)
        codes, outputs, errors = everywhere(cluster, tmp_path, *command)
        assert codes == [0, 0], errors
        table = LinkTable.load(out)
        rates.append(8 * 2**20 / table.time_s("all_reduce", 2**20))
        if rate == "20mbit":
            assert set(table.slow()) == {("node0", "node1"), ("node1", "node0")}
            assert outputs[0].count("SLOW") == 2
    assert rates[1] < 21e6  # more than the link carries is what no busy machine can feign
    assert rates[0] > 2 * rates[1]
