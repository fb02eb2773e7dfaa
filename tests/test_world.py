import contextlib
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bireme import world
from bireme.advertise import Place
from bireme.channel import Channel
from bireme.errors import SharedError, UserError
from bireme.nodes import EmulatedCluster
from bireme.world import PeerLost, World, join_timeout_s, peer_lost_in_one_line, topology

if TYPE_CHECKING:
    from tests.pool import RankPool
else:
    from pool import RankPool

# --- topology ----------------------------------------------------------------------------------------------------


def identity(
    node: str, local_rank: int = 0, host: str | None = None, boot_id: str = "boot", **more: Any
) -> dict[str, Any]:
    return {"node": node, "host": host or node, "boot_id": boot_id, "local_rank": local_rank, "pid": 1, **more}


def test_one_rank() -> None:
    ranks, nodes = topology([identity("a", pid=77, cores=[0, 1], device="x86_64")])
    assert nodes == [{"name": "a", "ranks": [0]}]
    assert ranks == [
        {"rank": 0, "node": "a", "host": "a", "local_rank": 0, "pid": 77, "cores": [0, 1], "device": "x86_64"}
    ]


def test_unequal_nodes_whose_ranks_are_not_in_a_row() -> None:
    identities = [identity("a", 0), identity("b", 0), identity("a", 1), identity("a", 2), identity("b", 1)]
    ranks, nodes = topology(identities)
    assert nodes == [{"name": "a", "ranks": [0, 2, 3]}, {"name": "b", "ranks": [1, 4]}]
    assert [(each["rank"], each["node"], each["local_rank"]) for each in ranks] == [
        (0, "a", 0),
        (1, "b", 0),
        (2, "a", 1),
        (3, "a", 2),
        (4, "b", 1),
    ]


def test_two_machines_with_one_host_name_are_told_apart_by_their_boot() -> None:
    identities = [identity("localhost", boot_id=boot) for boot in ("one", "two", "one", "three")]
    ranks, nodes = topology(identities)
    assert nodes == [
        {"name": "localhost", "ranks": [0, 2]},
        {"name": "localhost-2", "ranks": [1]},
        {"name": "localhost-3", "ranks": [3]},
    ]
    assert [each["node"] for each in ranks] == ["localhost", "localhost-2", "localhost", "localhost-3"]
    assert {each["host"] for each in ranks} == {"localhost"}


def test_a_name_made_up_for_a_machine_is_not_another_machines() -> None:
    _, nodes = topology([identity("a-2"), identity("a", boot_id="x"), identity("a", boot_id="y")])
    assert [node["name"] for node in nodes] == ["a-2", "a", "a-3"]
    _, nodes = topology([identity("a", boot_id="x"), identity("a", boot_id="y"), identity("a-2")])
    assert len({node["name"] for node in nodes}) == 3


def test_emulated_nodes_share_a_host_and_a_boot() -> None:
    """BIREME_NODE names them."""
    identities = [
        identity("oar0", 0, host="laptop"),
        identity("oar1", 0, host="laptop"),
        identity("oar1", 1, host="laptop"),
    ]
    ranks, nodes = topology(identities)
    assert nodes == [{"name": "oar0", "ranks": [0]}, {"name": "oar1", "ranks": [1, 2]}]
    assert {each["host"] for each in ranks} == {"laptop"}


def test_the_identity_takes_its_node_from_bireme_node_or_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world.socket, "gethostname", lambda: "laptop")
    device = world.torch.device("cpu")
    monkeypatch.setenv("BIREME_NODE", "oar1")
    named = world._identity(5, device)
    assert (named["node"], named["host"], named["local_rank"]) == ("oar1", "laptop", 5)
    monkeypatch.setenv("BIREME_NODE", "")
    assert world._identity(5, device)["node"] == "laptop"
    monkeypatch.delenv("BIREME_NODE")
    unnamed = world._identity(5, device)
    assert unnamed["node"] == "laptop"
    assert unnamed["boot_id"] == named["boot_id"] != ""


def test_identities_are_left_as_they_are() -> None:
    identities = [identity("a", boot_id="x"), identity("a", boot_id="y")]
    topology(identities)
    assert identities == [identity("a", boot_id="x"), identity("a", boot_id="y")]


def test_the_identity_has_the_address_that_the_rank_advertises() -> None:
    device = world.torch.device("cpu")
    placed = world._identity(0, device, Place("a", "stack", "10.0.0.7", "eth1"))
    assert (placed["address"], placed["interface"]) == ("10.0.0.7", "eth1")
    alone = world._identity(0, device)
    assert (alone["address"], alone["interface"]) == (None, None)


# --- joining -----------------------------------------------------------------------------------------------------


def test_the_time_to_join() -> None:
    assert join_timeout_s({}) == join_timeout_s({"BIREME_JOIN_TIMEOUT_S": ""}) == 30.0
    assert join_timeout_s({"BIREME_JOIN_TIMEOUT_S": "2.5"}) == 2.5
    for wrong in ("0", "-1", "soon", "nan", "inf"):
        with pytest.raises(UserError, match=r"BIREME_JOIN_TIMEOUT_S=.* is not a number of seconds above 0"):
            join_timeout_s({"BIREME_JOIN_TIMEOUT_S": wrong})


JOIN = """
import torch, torch.distributed as dist
from bireme.channel import Channel
from bireme.errors import SharedError, UserError
from bireme.nodes import EmulatedCluster
from bireme.world import join
try:
    world = join()
except UserError as error:
    raise SystemExit(f"said: {error}")
mine = torch.full((1,), world.rank + 1.0)
dist.all_reduce(mine)
print("joined", int(mine), [(rank["node"], rank["address"]) for rank in world.ranks])
world.leave()
"""


@pytest.fixture(scope="module")
def two_machines() -> Iterator[EmulatedCluster]:
    with EmulatedCluster(nodes=2, link="unlimited") as cluster:
        if not cluster.shaped:
            pytest.skip(f"no emulated machines here: {cluster.reason}")
        yield cluster


def join_on(cluster: EmulatedCluster, *variables: dict[str, str]) -> list[tuple[int, str]]:
    """Each node's exit code and what its rank printed, when it joins with these variables and no others for gloo."""
    started = []
    with contextlib.ExitStack() as stack:
        for node, own in zip(cluster.nodes, variables, strict=True):
            output = stack.enter_context(tempfile.TemporaryFile("w+"))
            env = {"GLOO_SOCKET_IFNAME": "", "BIREME_JOIN_TIMEOUT_S": "60", **own}
            command = [sys.executable, "-c", JOIN]
            started.append((node.start(command, env=env, stdout=output.fileno(), stderr=output.fileno()), output))
        ended = []
        for process, output in started:
            code = process.wait(120.0)
            output.seek(0)
            ended.append((code, output.read()))
    return ended


def test_machines_find_their_cards_by_themselves(two_machines: EmulatedCluster) -> None:
    """Also where the master's own name is 127.0.1.1 to itself, as Debian's hosts file has it."""
    debian = {"MASTER_ADDR": "127.0.1.1"}
    joined = f"joined 3 {[(node.name, node.address) for node in two_machines.nodes]}"
    for code, printed in join_on(two_machines, debian, {}):
        assert code == 0, printed
        assert joined in printed


def test_a_card_that_others_cannot_reach_is_said_on_every_machine(two_machines: EmulatedCluster) -> None:
    (first, printed), (second, also_printed) = join_on(two_machines, {}, {"GLOO_SOCKET_IFNAME": "lo"})
    assert first == second == 1
    for said in (printed, also_printed):
        assert "said: node node0 (rank 0) cannot connect to node node1 (rank 1) at 127.0.0.1:" in said
        assert "interface lo, which only that node itself reaches" in said


# --- a peer that is gone ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gloo_says", "said"),
    [
        ("[gloo/transport/tcp/unbound_buffer.cc:84] Timed out waiting 5000ms for recv operation", "no answer"),
        ("Application timeout caused pair closure", "no answer"),
        ("Connection closed by peer [10.0.0.2]:1234", "another rank has left"),
        ("Read error [10.0.0.2]:1234: Connection reset by peer", "another rank has left"),
    ],
)
def test_what_gloo_says_of_a_lost_peer_becomes_one_line(gloo_says: str, said: str) -> None:
    world = World(1, 2, 0, torch.device("cpu"), Channel(), [{"rank": rank, "node": "here"} for rank in (0, 1)], [])
    with pytest.raises(PeerLost, match=f"rank 1 on here stopped: {said}"), peer_lost_in_one_line(world):
        raise RuntimeError(gloo_says)


def test_other_errors_stay_what_they_are() -> None:
    world = World(1, 2, 0, torch.device("cpu"), Channel(), [], [])
    with pytest.raises(RuntimeError, match="shape"), peer_lost_in_one_line(world):
        raise RuntimeError("the shape is wrong")


# --- settings --------------------------------------------------------------------------------------------------


def agree(rank: int, size: int) -> list[str]:
    here = world.here(rank, torch.device("cpu"))
    here.agree({"lr": 0.1, "steps": 3})  # the same on all: nothing to say
    said = []
    for values in ({"lr": 0.1, "steps": 3 + rank // 2}, {"lr": 0.1} if rank else {"quick": True}):
        with pytest.raises(SharedError) as error:
            here.agree(values)
        said.append(str(error.value))
    return said


def test_settings_that_differ_are_named(ranks: RankPool) -> None:
    """Ranks with other settings would wait for each other's next collective, or train something else."""
    for steps, commands in ranks(4, agree):
        assert steps == "the ranks were started with different settings: steps is 3 on rank 0, but 4 on ranks 2-3"
        assert commands.startswith("the ranks were started with different commands")
