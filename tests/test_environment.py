import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.environment import (
    Launch,
    contradictions,
    expand_counts,
    expand_nodelist,
    forgotten_launcher,
    run_id,
)
from bireme.errors import UserError

MEETING = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
TORCHRUN = {
    **MEETING,
    "RANK": "9",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_RANK": "9",
    "ROLE_WORLD_SIZE": "16",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
NODES = {**MEETING, "NODE_RANK": "1", "NNODES": "4"}
BY_HAND = {**MEETING, "RANK": "3", "WORLD_SIZE": "4"}

# What Slurm sets in a job of two nodes with four tasks each: in the batch script, and in the tasks of a step.
JOB = {
    "SLURM_JOB_ID": "4242",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "8",
    "SLURM_TASKS_PER_NODE": "4(x2)",
}
BATCH = {**JOB, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_JOB_NAME": "train.sh"}


def step(task: int, node: int, local: int, tasks: int, per_node: str, nodes: str, number: str = "0") -> dict[str, str]:
    return {
        **JOB,
        "SLURM_NTASKS": str(tasks),
        "SLURM_STEP_ID": number,
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_TASKS_PER_NODE": per_node,
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_NUM_NODES": str(len(expand_nodelist(nodes))),
        "SLURM_PROCID": str(task),
        "SLURM_NODEID": str(node),
        "SLURM_LOCALID": str(local),
    }


ONE_A_NODE = step(1, 1, 0, 2, "1(x2)", "gpu[07-08]")
TASKS = step(5, 1, 1, 8, "4(x2)", "gpu[07-08]")
ALONE = Launch(0, 1, 0, 1, 0, 1, "", 0, False, "none")
ALONE_IN_STEP = Launch(0, 1, 0, 1, 0, 1, "", 0, False, "slurm")
ON_TORCHRUN = Launch(9, 16, 1, 8, 1, 2, "10.0.0.1", 29500, True, "torchrun")
SLURM_PORT = Launch.from_environment(TASKS).master_port


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({}, ALONE, id="nothing"),
        pytest.param({"PATH": "/bin", **MEETING}, ALONE, id="only a meeting point"),
        pytest.param({"NODE_RANK": "0"}, ALONE, id="half of the fallback"),
        pytest.param(TORCHRUN, ON_TORCHRUN, id="torchrun"),
        pytest.param(
            {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"},
            Launch(9, 16, 1, 8, 1, 2, "10.0.0.1", 29500, False, "torchrun"),
            id="torchrun without the agent's store",
        ),
        pytest.param(
            {**TORCHRUN, "WORLD_SIZE": "3", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"},
            Launch(0, 3, 0, 1, 0, 2, "10.0.0.1", 29500, True, "torchrun"),
            id="unequal nodes",
        ),
        pytest.param(BY_HAND, Launch(3, 4, 3, 4, 0, 1, "10.0.0.1", 29500, False, "environment"), id="no LOCAL_RANK"),
        pytest.param(
            {**BY_HAND, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            Launch(3, 4, 1, 2, 1, 2, "10.0.0.1", 29500, False, "environment"),
            id="by hand on two nodes",
        ),
        pytest.param(
            {**MEETING, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
            Launch(0, 1, 0, 1, 0, 1, "10.0.0.1", 29500, False, "environment"),
            id="a world of one",
        ),
        pytest.param(NODES, Launch(1, 4, 0, 1, 1, 4, "10.0.0.1", 29500, False, "environment"), id="NODE_RANK"),
        pytest.param(
            {**NODES, "LOCAL_RANK": "3"},
            Launch(1, 4, 0, 1, 1, 4, "10.0.0.1", 29500, False, "environment"),
            id="one rank a node",
        ),
        pytest.param({**TORCHRUN, "NODE_RANK": "1", "NNODES": "2"}, ON_TORCHRUN, id="RANK comes before NODE_RANK"),
        pytest.param(
            {**NODES, "MASTER_PORT": "1"},
            Launch(1, 4, 0, 1, 1, 4, "10.0.0.1", 1, False, "environment"),
            id="lowest port",
        ),
        pytest.param(
            {**NODES, "MASTER_PORT": "65535"},
            Launch(1, 4, 0, 1, 1, 4, "10.0.0.1", 65535, False, "environment"),
            id="highest port",
        ),
        # Slurm
        pytest.param(BATCH, ALONE, id="python in a batch script"),
        pytest.param(JOB, ALONE, id="salloc's shell"),
        pytest.param({**BATCH, "SLURM_STEP_ID": "4294967291"}, ALONE, id="the batch script as a step"),
        pytest.param({**BATCH, "SLURM_STEP_ID": "4294967290"}, ALONE, id="an interactive step"),
        pytest.param(step(0, 0, 0, 1, "1", "gpu07"), ALONE_IN_STEP, id="srun --pty with one task"),
        pytest.param({**BATCH, **TORCHRUN}, ON_TORCHRUN, id="torchrun in a batch script"),
        pytest.param({**ONE_A_NODE, **TORCHRUN}, ON_TORCHRUN, id="torchrun in srun, one task a node"),
        pytest.param(
            {**step(0, 0, 0, 2, "1(x2)", "gpu[07-08]"), **TORCHRUN}, ON_TORCHRUN, id="torchrun numbers nodes itself"
        ),
        pytest.param({**step(0, 0, 0, 1, "1", "gpu07"), **TORCHRUN}, ON_TORCHRUN, id="a step for each node"),
        pytest.param(
            TASKS, Launch(5, 8, 1, 4, 1, 2, "gpu07", SLURM_PORT, False, "slurm"), id="srun with a task for each rank"
        ),
        pytest.param(
            {**TASKS, **MEETING}, Launch(5, 8, 1, 4, 1, 2, "10.0.0.1", 29500, False, "slurm"), id="the user's endpoint"
        ),
        pytest.param(
            step(2, 1, 0, 3, "2,1", "gpu[07-08]", "0"),
            Launch(2, 3, 0, 1, 1, 2, "gpu07", SLURM_PORT, False, "slurm"),
            id="unequal nodes in a smaller step",
        ),
        pytest.param(
            {**step(1, 0, 1, 2, "2", "gpu08"), "SLURM_NTASKS": "8"},
            Launch(1, 2, 1, 2, 0, 1, "gpu08", SLURM_PORT, False, "slurm"),
            id="the step's tasks, not the job's",
        ),
        pytest.param(
            step(3, 1, 1, 4, "2(x2)", "gpu[07-08]"),
            Launch(3, 4, 1, 2, 1, 2, "gpu07", SLURM_PORT, False, "slurm"),
            id="half of the tasks",
        ),
        pytest.param({**TASKS, **TORCHRUN, "GROUP_WORLD_SIZE": "8"}, None, id="an agent for each of several tasks"),
        pytest.param(
            {**ONE_A_NODE, "SLURM_HET_SIZE": "2", **TORCHRUN, "GROUP_WORLD_SIZE": "3"},
            None,
            id="torchrun in a heterogeneous job",
        ),
        pytest.param(
            {**step(0, 0, 0, 3, "1(x3)", "n[1-3]"), **TORCHRUN, "TORCHELASTIC_MAX_RESTARTS": "3"},
            ON_TORCHRUN,
            id="an elastic job that lost a node",
        ),
        pytest.param(
            {**TASKS, **MEETING, "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
            Launch(5, 8, 1, 4, 1, 2, "10.0.0.1", 29500, False, "environment"),
            id="ranks copied from Slurm by hand",
        ),
        pytest.param(
            {**ONE_A_NODE, **MEETING, "RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"},
            Launch(6, 8, 2, 4, 1, 2, "10.0.0.1", 29500, False, "environment"),
            id="tasks that fork their ranks",
        ),
    ],
)
def test_a_launch_from_the_environment(environ: dict[str, str], expected: Launch | None) -> None:
    found = Launch.from_environment(environ)
    assert contradictions(environ) == []
    if expected is not None:
        assert found == expected


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
        pytest.param({**TORCHRUN, "GROUP_RANK": "2"}, ["GROUP_RANK=2", "GROUP_WORLD_SIZE=2"], id="agent too high"),
        pytest.param(
            {**TORCHRUN, "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"},
            ["GROUP_WORLD_SIZE=1", "LOCAL_WORLD_SIZE=8", "WORLD_SIZE=16"],
            id="one node that is half the world",
        ),
        pytest.param(without(TORCHRUN, "MASTER_ADDR"), ["RANK=9", "MASTER_ADDR is not"], id="no address"),
        pytest.param({**TORCHRUN, "MASTER_ADDR": ""}, ["RANK=9", "MASTER_ADDR is not"], id="empty address"),
        pytest.param(without(TORCHRUN, "MASTER_PORT"), ["RANK=9", "MASTER_PORT is not"], id="no port"),
        pytest.param({**TORCHRUN, "MASTER_PORT": "http"}, ["MASTER_PORT='http'"], id="port no number"),
        pytest.param({**TORCHRUN, "MASTER_PORT": "65536"}, ["MASTER_PORT=65536 is not a port"], id="port too high"),
        pytest.param({**TORCHRUN, "MASTER_PORT": "0"}, ["MASTER_PORT=0 is not a port"], id="port zero"),
        pytest.param({**NODES, "NODE_RANK": "4"}, ["NODE_RANK=4", "NNODES=4", "0 to 3"], id="node rank too high"),
        pytest.param({**NODES, "NNODES": "1:4"}, ["NNODES='1:4' is not a whole number"], id="elastic NNODES"),
        pytest.param(without(NODES, "MASTER_ADDR"), ["NODE_RANK=1", "MASTER_ADDR is not"], id="nodes, no address"),
        # Slurm
        pytest.param(
            {**step(2, 2, 0, 3, "1(x3)", "n[1-3]"), **TORCHRUN},
            ["2 nodes (GROUP_WORLD_SIZE)", "3 tasks (SLURM_STEP_NUM_TASKS)", "--nnodes 3"],
            id="torchrun of two nodes in three tasks",
        ),
        pytest.param(
            {**ONE_A_NODE, **TORCHRUN, "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "WORLD_SIZE": "8", "RANK": "1"},
            ["1 node (GROUP_WORLD_SIZE)", "2 tasks (SLURM_STEP_NUM_TASKS)"],
            id="a small world in every task",
        ),
        pytest.param(
            {**TASKS, **MEETING, "RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "1"},
            ["RANK=0", "task 5", "SLURM_PROCID", "inside of srun"],
            id="RANK exported before srun",
        ),
        pytest.param(
            {**step(1, 0, 1, 4, "4", "gpu07"), **MEETING, "RANK": "1", "WORLD_SIZE": "8"},
            ["WORLD_SIZE=8", "4 tasks (SLURM_STEP_NUM_TASKS)"],
            id="the job's size in a smaller step",
        ),
        pytest.param({**TASKS, **NODES}, ["NNODES=4", "8 tasks"], id="NNODES in a step of ranks"),
        pytest.param(
            {**TASKS, "SLURM_HET_SIZE": "2"}, ["SLURM_HET_SIZE=2", "SLURM_STEP_NUM_TASKS=8", "torchrun"], id="het job"
        ),
        pytest.param({**TASKS, "SLURM_PROCID": "8"}, ["SLURM_PROCID=8", "SLURM_STEP_NUM_TASKS=8"], id="task too high"),
        pytest.param({**TASKS, "SLURM_PROCID": ""}, ["SLURM_STEP_ID=0", "SLURM_PROCID is not"], id="no task"),
        pytest.param(
            {**TASKS, "SLURM_STEP_TASKS_PER_NODE": "4,3"}, ["adds up to 7", "SLURM_STEP_NUM_TASKS=8"], id="7 of 8 tasks"
        ),
        pytest.param({**TASKS, "SLURM_STEP_NODELIST": "gpu07"}, ["has 1 nodes", "4(x2) has 2"], id="node missing"),
        pytest.param({**TASKS, "SLURM_NODEID": "2"}, ["SLURM_NODEID=2", "2 nodes"], id="node too high"),
        pytest.param({**TASKS, "SLURM_LOCALID": "4"}, ["SLURM_LOCALID=4", "4 tasks of node 1"], id="local too high"),
        pytest.param({**TASKS, "SLURM_STEP_TASKS_PER_NODE": "4(2)"}, ["4(2)", "4(x2),1"], id="counts not readable"),
        pytest.param({**TASKS, "SLURM_STEP_NODELIST": ""}, ["SLURM_STEP_NODELIST is not set"], id="no nodes"),
        pytest.param({**TASKS, "MASTER_PORT": "99999"}, ["MASTER_PORT=99999 is not a port"], id="step, port too high"),
    ],
)
def test_contradictions_are_said_with_the_variables(environ: dict[str, str], said: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        Launch.from_environment(environ)
    for part in said:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert contradictions(environ)[0] == str(caught.value)


def test_every_contradiction_is_listed() -> None:
    found = contradictions({**TASKS, **TORCHRUN, "RANK": "16", "MASTER_PORT": "0", "SLURM_LOCALID": "9"})
    assert [line.split("=")[0] for line in found[:3]] == ["RANK", "MASTER_PORT", "SLURM_LOCALID"]
    assert "GROUP_WORLD_SIZE" in found[3]
    assert len(found) == 4


def test_the_port_of_a_step_is_its_own() -> None:
    ports = set()
    for job, number in (("4242", "0"), ("4242", "1"), ("4243", "0")):
        launch = Launch.from_environment({**TASKS, "SLURM_JOB_ID": job, "SLURM_STEP_ID": number})
        assert 20000 <= launch.master_port < 30000
        ports.add(launch.master_port)
    assert len(ports) == 3


def test_the_name_of_a_job() -> None:
    assert run_id({}) == run_id(BATCH) == run_id(NODES) == ""
    assert run_id(TASKS) == "4242.0"
    assert run_id({**TASKS, **TORCHRUN, "TORCHELASTIC_RUN_ID": "mine"}) == "mine"


def test_a_process_alone_in_a_job_of_many_tasks() -> None:
    said = forgotten_launcher(BATCH)
    assert said is not None
    assert "8 tasks (SLURM_NTASKS)" in said
    for normal in ({}, TORCHRUN, TASKS, {**BATCH, **TORCHRUN}, {**BATCH, "SLURM_NTASKS": "1"}):
        assert forgotten_launcher(normal) is None


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("x2", ["x2"]),
        ("node[01-03,07],x2", ["node01", "node02", "node03", "node07", "x2"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
        ("r[1-2]n[1,3]-ib", ["r1n1-ib", "r1n3-ib", "r2n1-ib", "r2n3-ib"]),
        ("a,b-1.cluster", ["a", "b-1.cluster"]),
    ],
)
def test_a_nodelist(text: str, names: list[str]) -> None:
    assert expand_nodelist(text) == names


@pytest.mark.parametrize("text", ["n[1-2", "n]1", "n[]", "n[a]", "n[3-1]", "n[1[2]]"])
def test_what_is_no_nodelist(text: str) -> None:
    with pytest.raises(UserError, match="is not a list of nodes"):
        expand_nodelist(text)


def test_no_list_is_endless() -> None:
    for text in ("a[1-99999999]", "a[1-999]b[1-999]"):
        with pytest.raises(UserError, match="more than 100000 nodes"):
            expand_nodelist(text)
    with pytest.raises(UserError, match="more than 100000 nodes"):
        expand_counts("1(x99999999)")


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=5))
def test_counts(groups: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in groups)
    assert expand_counts(text) == [count for count, times in groups for _ in range(times)]
