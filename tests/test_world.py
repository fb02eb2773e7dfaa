from typing import Any

import pytest

from bireme import world
from bireme.errors import UserError
from bireme.world import Launch, name_ranks, topology

MEETING = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
TORCHRUN = {
    **MEETING,
    "RANK": "9",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_RANK": "1",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
NODES = {**MEETING, "NODE_RANK": "1", "NNODES": "4"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({}, Launch(0, 1, 0, "", 0, False), id="nothing"),
        pytest.param({"PATH": "/bin", **MEETING}, Launch(0, 1, 0, "", 0, False), id="only a meeting point"),
        pytest.param({"NODE_RANK": "0"}, Launch(0, 1, 0, "", 0, False), id="half of the fallback"),
        pytest.param(TORCHRUN, Launch(9, 16, 1, "10.0.0.1", 29500, True), id="torchrun"),
        pytest.param(
            {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"},
            Launch(9, 16, 1, "10.0.0.1", 29500, False),
            id="torchrun without the agent's store",
        ),
        pytest.param(
            {**MEETING, "RANK": "3", "WORLD_SIZE": "4"}, Launch(3, 4, 3, "10.0.0.1", 29500, False), id="no LOCAL_RANK"
        ),
        pytest.param(
            {**MEETING, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
            Launch(0, 1, 0, "10.0.0.1", 29500, False),
            id="a world of one",
        ),
        pytest.param(NODES, Launch(1, 4, 0, "10.0.0.1", 29500, False), id="NODE_RANK of NNODES"),
        pytest.param({**NODES, "LOCAL_RANK": "3"}, Launch(1, 4, 0, "10.0.0.1", 29500, False), id="one rank a node"),
        pytest.param(
            {**TORCHRUN, "NODE_RANK": "1", "NNODES": "2"},
            Launch(9, 16, 1, "10.0.0.1", 29500, True),
            id="RANK comes before NODE_RANK",
        ),
        pytest.param({**NODES, "MASTER_PORT": "1"}, Launch(1, 4, 0, "10.0.0.1", 1, False), id="lowest port"),
        pytest.param({**NODES, "MASTER_PORT": "65535"}, Launch(1, 4, 0, "10.0.0.1", 65535, False), id="highest port"),
    ],
)
def test_a_launch_from_the_environment(environ: dict[str, str], expected: Launch) -> None:
    assert Launch.from_environment(environ) == expected


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        pytest.param(without(TORCHRUN, "WORLD_SIZE"), ["RANK=9 is set but WORLD_SIZE is not"], id="no WORLD_SIZE"),
        pytest.param(without(TORCHRUN, "RANK"), ["WORLD_SIZE=16 is set but RANK is not"], id="no RANK"),
        pytest.param({**TORCHRUN, "RANK": "16"}, ["RANK=16", "WORLD_SIZE=16", "0 to 15"], id="rank too high"),
        pytest.param({**TORCHRUN, "RANK": "-1"}, ["RANK=-1", "WORLD_SIZE=16"], id="rank negative"),
        pytest.param({**TORCHRUN, "RANK": "one"}, ["RANK='one' is not a whole number"], id="rank no number"),
        pytest.param({**TORCHRUN, "RANK": ""}, ["RANK='' is not a whole number"], id="rank empty"),
        pytest.param(
            {**TORCHRUN, "WORLD_SIZE": "2.5"}, ["WORLD_SIZE='2.5' is not a whole number"], id="size no number"
        ),
        pytest.param(
            {**TORCHRUN, "LOCAL_RANK": "8"}, ["LOCAL_RANK=8", "LOCAL_WORLD_SIZE=8", "contradict"], id="local rank high"
        ),
        pytest.param({**TORCHRUN, "LOCAL_RANK": "-1"}, ["LOCAL_RANK=-1", "LOCAL_WORLD_SIZE=8"], id="local negative"),
        pytest.param(
            {**TORCHRUN, "LOCAL_WORLD_SIZE": "32"}, ["LOCAL_WORLD_SIZE=32", "WORLD_SIZE=16"], id="node above world"
        ),
        pytest.param({**TORCHRUN, "LOCAL_RANK": "x"}, ["LOCAL_RANK='x' is not a whole number"], id="local no number"),
        pytest.param(without(TORCHRUN, "MASTER_ADDR"), ["RANK=9", "MASTER_ADDR is not"], id="no address"),
        pytest.param({**TORCHRUN, "MASTER_ADDR": ""}, ["RANK=9", "MASTER_ADDR is not"], id="empty address"),
        pytest.param(without(TORCHRUN, "MASTER_PORT"), ["RANK=9", "MASTER_PORT is not"], id="no port"),
        pytest.param({**TORCHRUN, "MASTER_PORT": "http"}, ["MASTER_PORT='http'"], id="port no number"),
        pytest.param({**TORCHRUN, "MASTER_PORT": "65536"}, ["MASTER_PORT=65536 is not a port"], id="port too high"),
        pytest.param({**TORCHRUN, "MASTER_PORT": "0"}, ["MASTER_PORT=0 is not a port"], id="port zero"),
        pytest.param({**NODES, "NODE_RANK": "4"}, ["NODE_RANK=4", "NNODES=4", "0 to 3"], id="node rank too high"),
        pytest.param({**NODES, "NNODES": "1:4"}, ["NNODES='1:4' is not a whole number"], id="elastic NNODES"),
        pytest.param(without(NODES, "MASTER_ADDR"), ["NODE_RANK=1", "MASTER_ADDR is not"], id="nodes, no address"),
    ],
)
def test_contradictions_are_said_with_the_variables(environ: dict[str, str], said: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        Launch.from_environment(environ)
    for part in said:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


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
