import socket

import pytest

from bireme.doctor import meeting
from bireme.doctor.facts import Name
from bireme.doctor.meeting import host_of, make_plan, which_am_i
from bireme.errors import UserError

KNOWN = {
    "node0": ["10.0.0.1"],
    "node1": ["10.0.0.2"],
    "node1.cluster": ["10.0.0.2"],
    "mine-by-loopback": ["127.0.1.1"],
    "fd00::2": ["fd00::2"],
    "10.0.0.2": ["10.0.0.2"],
    "10.0.0.1": ["10.0.0.1"],
    "127.0.0.1": ["127.0.0.1"],
    "127.0.0.2": ["127.0.0.2"],
}


@pytest.fixture(autouse=True)
def this_is_node1(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up_all(names: list[str]) -> dict[str, Name]:
        errors = {name: None if name in KNOWN else "Name or service not known" for name in names}
        return {name: Name(name, KNOWN.get(name, []), errors[name]) for name in names}

    monkeypatch.setattr(meeting, "look_up_all", look_up_all)
    monkeypatch.setattr(meeting, "outward_address", lambda: "10.0.0.2")
    monkeypatch.setattr(meeting, "is_mine", lambda address: address in ("10.0.0.2", "fd00::2") or address[:4] == "127.")
    monkeypatch.setattr(socket, "gethostname", lambda: "node1")


@pytest.mark.parametrize(
    ("hosts", "index"),
    [
        (["node0", "node1"], 1),
        (["node1.cluster", "node0"], 0),
        (["10.0.0.1", "10.0.0.2"], 1),
        (["node0", "fd00::2"], 1),
        (["NODE1", "node0"], 0),
        (["nowhere", "node1"], 1),
        (["mine-by-loopback", "node1"], 1),  # the host name decides
    ],
)
def test_which_am_i(hosts: list[str], index: int) -> None:
    assert which_am_i({}, hosts) == index


def test_which_am_i_when_it_is_unclear() -> None:
    with pytest.raises(UserError, match="both this machine: say which one this is with NODE_RANK=0"):
        which_am_i({}, ["127.0.0.1", "127.0.0.2"])
    assert which_am_i({"NODE_RANK": "1"}, ["127.0.0.1", "127.0.0.2"]) == 1
    with pytest.raises(UserError, match=r"none of node0, nowhere is this machine \(node1, 10.0.0.2\); not known here"):
        which_am_i({}, ["node0", "nowhere"])
    assert which_am_i({"NODE_RANK": "1"}, ["node0", "nowhere"]) == 1
    with pytest.raises(UserError):
        which_am_i({"NODE_RANK": "2"}, ["node0", "nowhere"])


def test_peers_by_hand() -> None:
    plan = make_plan({}, "node0:29600,node1", 29700)
    assert (plan.how, plan.meeting.index, plan.meeting.size) == ("peers", 1, 2)
    assert (plan.master, plan.master_port, plan.board_ports) == ("node0", 29600, [29600, 29601, 29602, 29603])
    assert [plan.label(index) for index in range(2)] == ["node0", "node1"]
    again = make_plan({"NODE_RANK": "0", "NNODES": "9"}, " node0:29600, node1 ,", 29700)
    assert again.meeting.job == plan.meeting.job
    assert make_plan({"MASTER_PORT": "29555"}, "node0,[fd00::2]", None).master_port == 29555
    assert make_plan({}, "node0,node1", None).master_port == 29500


@pytest.mark.parametrize("peers", ["", "node1", "node1,node1", "node1,a b", "node0:0,node1", "node0:70000,node1"])
def test_peers_that_are_none(peers: str) -> None:
    with pytest.raises(UserError):
        make_plan({}, peers, None)


def test_from_a_launcher() -> None:
    nodes = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29511"}
    plan = make_plan(nodes, None, None)
    assert (plan.how, plan.meeting.index, plan.meeting.size, plan.speaks) == ("environment", 1, 2, True)
    assert plan.board_ports[0] == plan.master_port == 29511
    other_port = make_plan(nodes, None, 29600)
    assert other_port.master_port == 29600 and other_port.board_ports[0] == 29511

    torchrun = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "41000",
        "TORCHELASTIC_RUN_ID": "x",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    plan = make_plan(torchrun, None, None)
    assert (plan.how, plan.meeting.index, plan.meeting.size, plan.speaks) == ("agent", 1, 2, False)
    assert plan.world_size == 4

    slurm = {
        "SLURM_JOB_ID": "9",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_PROCID": "1",
        "SLURM_NODEID": "1",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NODELIST": "node[0-1]",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }
    plan = make_plan(slurm, None, None)
    assert (plan.how, plan.meeting.index, plan.master, plan.launcher) == ("environment", 1, "node0", "slurm")
    assert plan.meeting.job == make_plan({**slurm, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}, None, None).meeting.job


def test_alone() -> None:
    plan = make_plan({}, None, None)
    assert (plan.how, plan.meeting.size, plan.master_port, plan.contradictions) == ("alone", 1, 29500, [])


def test_contradictions_do_not_keep_the_others_from_hearing_of_them() -> None:
    nodes = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29511"}
    slurm = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_JOB_ID": "7"}
    plan = make_plan({**nodes, **slurm}, None, None)
    assert plan.meeting.size == 2 and plan.meeting.job == make_plan(nodes, None, None).meeting.job
    assert len(plan.contradictions) == 1 and "NNODES=2" in plan.contradictions[0]
    plan = make_plan({"RANK": "5", "WORLD_SIZE": "2"}, None, None)
    assert plan.how == "alone" and any("RANK=5" in text for text in plan.contradictions)


def test_hosts_without_what_is_stuck_to_them() -> None:
    assert [host_of(text) for text in ("[fd00::1]", "node0:29500", "fd00::1", "a b")] == [
        "fd00::1",
        "node0",
        "fd00::1",
        "a b",
    ]


def test_a_port_that_is_none() -> None:
    with pytest.raises(UserError, match="--port 70000"):
        make_plan({}, None, 70000)
