"""Several doctors at once, as their users start them: processes on loopback."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from bireme.cores import usable_cores
from bireme.network import free_port

LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "MASTER_",
    "TORCHELASTIC_",
    "SLURM_",
    "NODE",
    "NNODES",
    "BIREME_",
)
CLEAN = {
    name: value for name, value in os.environ.items() if not name.startswith((*LAUNCHERS, "OMP_", "GLOO_", "NCCL_"))
}
DOCTOR = [sys.executable, "-m", "bireme", "doctor"]
ENDS_S = 60.0  # it promises 15; these machines are busy

Process = subprocess.Popen[str]


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def start(processes: list[Process], *arguments: str, **environment: str) -> Process:
    patience = [] if "--wait" in arguments else ["--wait", "30"]  # ample where all answer: this machine may be busy
    process = subprocess.Popen(
        [*DOCTOR, *patience, *arguments],
        env={**CLEAN, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    processes.append(process)
    return process


def node(index: int, size: int, port: int) -> dict[str, str]:
    return {"NNODES": str(size), "NODE_RANK": str(index), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def ended(process: Process) -> tuple[int, str]:
    output, errors = process.communicate(timeout=ENDS_S)
    assert "Traceback" not in errors, errors
    return process.returncode, output


def reported(process: Process) -> tuple[int, dict[str, Any]]:
    code, output = ended(process)
    report = orjson.loads(output)
    assert code == (0 if report["passed"] else 1)
    return code, report


def faults(report: dict[str, Any], status: str = "fail") -> dict[str, str]:
    return {check["name"]: check["message"] for check in report["checks"] if check["status"] == status}


def test_alone(processes: list[Process]) -> None:
    code, report = reported(start(processes, "--json", "--port", str(free_port())))
    assert code == 0
    assert set(report) == {"passed", "checks", "nodes", "commands"}
    assert set(report["checks"][0]) == {"name", "status", "nodes", "message", "fix"}
    assert report["commands"][0]["command"].startswith("torchrun --standalone")


def test_three_nodes_say_the_same(processes: list[Process]) -> None:
    port = free_port()
    second, third = (start(processes, **node(index, 3, port)) for index in (1, 2))
    code, report = reported(start(processes, "--json", **node(0, 3, port)))
    assert code == 0, report["checks"]
    assert [each["index"] for each in report["nodes"]] == [0, 1, 2]
    assert all(len(each["reaches"]) == 2 for each in report["nodes"])
    assert all(abs(each["clock"]["offset_s"]) <= each["clock"]["bound_s"] + 0.05 for each in report["nodes"][1:])
    assert len(report["commands"]) == 3 and f"--master-port={port}" in report["commands"][2]["command"]
    for process in (second, third):
        code, output = ended(process)
        assert code == 0 and len(output.splitlines()) == 1 and "no failure" in output


def test_by_hand_with_planted_faults(processes: list[Process]) -> None:
    """A clock that is 3 s ahead, and another torch: named on every node, and said to be pretended."""
    port = free_port()
    peers = f"127.0.0.1:{port},127.0.0.2:{port}"
    if sys.platform != "linux":
        pytest.skip("only Linux answers on all of 127.0.0.0/8")
    pretended = {"BIREME_DOCTOR_PRETEND": "clock=+3s,torch=2.13.0"}
    running = [
        start(processes, "--peers", peers, "--json", NODE_RANK=str(index), **(pretended if index else {}))
        for index in (0, 1)
    ]
    for process in running:
        code, report = reported(process)
        assert code == 1
        assert list(faults(report)) == ["versions"]
        assert "torch 2.13.0" in faults(report)["versions"]
        warnings = faults(report, "warn")
        assert " s ahead of " in warnings["clock"] and "clock=+3s,torch=2.13.0" in warnings["pretended"]


def test_a_silent_peer_is_named(processes: list[Process]) -> None:
    port = free_port()
    code, output = ended(start(processes, "--wait", "6", **node(0, 2, port)))
    assert code == 1
    assert "node 1 is silent: did not come to 127.0.0.1 port" in output
    assert "1 failure" in output


@pytest.mark.slow
def test_a_silent_first_node_is_named(processes: list[Process]) -> None:
    port = free_port()
    code, output = ended(start(processes, "--wait", "6", **node(1, 2, port)))
    assert code == 1
    assert f"node 0 was not met: node 1 -> node 0 (127.0.0.1:{port}): nothing listens there" in output
    assert "fix: on node 0: bireme doctor, at the same time as here" in output


def test_a_peer_that_hangs_is_named(processes: list[Process]) -> None:
    """It comes, says who it is, and then nothing more."""
    port = free_port()
    first = start(processes, "--json", "--wait", "6", **node(0, 2, port))
    from bireme.doctor.meeting import make_plan

    plan = make_plan(node(1, 2, port), None, None)
    greeting = {"doctor": 1, "job": plan.meeting.job, "index": 1}
    for _ in range(600):
        try:
            hanging = socket.create_connection(("127.0.0.1", port), timeout=ENDS_S)
            break
        except ConnectionRefusedError:
            assert first.poll() is None
            time.sleep(0.05)
    with hanging:
        hanging.sendall(orjson.dumps(greeting) + b"\n")
        code, report = reported(first)
    assert code == 1 and "node 1 is silent" in faults(report)["peers"]


@pytest.mark.slow
def test_by_hand_the_way_to_who_does_not_come_is_tried(processes: list[Process]) -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux answers on all of 127.0.0.0/8")
    port = free_port()
    peers = f"127.0.0.1:{port},127.0.0.2:{port}"
    _, report = reported(start(processes, "--peers", peers, "--json", "--wait", "6", NODE_RANK="0"))
    assert f"nor could it be reached (127.0.0.2:{port}: nothing listens there" in faults(report)["peers"]


def test_a_busy_port(processes: list[Process]) -> None:
    """Somebody who never answers holds the master's port: the doctors meet all the same, and name the holder."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        second = start(processes, **node(1, 2, port))
        code, report = reported(start(processes, "--json", **node(0, 2, port)))
        assert code == 1
        assert list(faults(report)) == ["ports"]
        assert f"port {port}" in faults(report)["ports"]
        visible = next(each for each in report["nodes"][0]["ports"] if each["port"] == port)["owner"]
        assert visible is None or f"pid {os.getpid()}" in visible
        assert all(f"--master-port={port}" not in each["command"] for each in report["commands"])
        assert ended(second)[0] == 1


def test_a_wrong_interface_name(processes: list[Process]) -> None:
    code, report = reported(start(processes, "--json", "--port", str(free_port()), GLOO_SOCKET_IFNAME="nosuch0"))
    assert code == 1 and "GLOO_SOCKET_IFNAME=nosuch0 names no network interface" in faults(report)["interface"]


def test_eight_threads_on_one_core(processes: list[Process]) -> None:
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("no CPU affinity on this system")
    before = usable_cores()
    os.sched_setaffinity(0, before[:1])
    try:
        process = start(processes, "--json", "--port", str(free_port()), OMP_NUM_THREADS="8")
    finally:
        os.sched_setaffinity(0, before)
    code, report = reported(process)
    assert code == 1 and "8 threads (OMP_NUM_THREADS) share" in faults(report)["cores"]


def test_slurm_against_the_rest(processes: list[Process]) -> None:
    port = free_port()
    slurm = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_JOB_ID": "7"}
    second = start(processes, **node(1, 2, port), **slurm)
    code, report = reported(start(processes, "--json", **node(0, 2, port)))
    assert code == 1
    assert "NNODES=2" in faults(report)["launcher"] and "SLURM_STEP_NUM_TASKS" in faults(report)["launcher"]
    assert ended(second)[0] == 1


def test_two_lines(processes: list[Process]) -> None:
    port = free_port()
    second = start(processes, "--brief", **node(1, 2, port))
    code, output = ended(start(processes, "--brief", **node(0, 2, port)))
    assert code == 0
    lines = output.splitlines()
    assert len(lines) == 2
    assert "no failure" in lines[0] and "torch 2." in lines[1] and "clocks within" in lines[1]
    assert ended(second) == (0, "")


def test_ipv6(processes: list[Process]) -> None:
    """B08: literals with and without a port."""
    try:
        port = free_port("::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    peers = f"[::1]:{port},[::1]:{port + 50}"
    second = start(processes, "--peers", peers, NODE_RANK="1")
    code, report = reported(start(processes, "--peers", peers, "--json", NODE_RANK="0"))
    assert code == 0, report["checks"]
    assert report["nodes"][1]["address"] == "::1"
    assert f"--rdzv-endpoint='[::1]:{port}'" in report["commands"][1]["c10d"]
    assert ended(second)[0] == 0


def test_under_torchrun(processes: list[Process]) -> None:
    """Two agents with one and two ranks: their store listens at the meeting point, and one doctor a node speaks."""
    port = free_port()
    processes += [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={index}"),
                *(f"--nproc-per-node={index + 1}", "--master-addr=127.0.0.1", f"--master-port={port}"),
                *("-m", "bireme", "doctor", "--wait", "60"),
            ],
            env={**CLEAN, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in (0, 1)
    ]
    outputs = [process.communicate(timeout=180) for process in processes]
    first, second = (output for output, _ in outputs)
    assert f"{port} is held by the launcher" in first, outputs
    assert "all 2 nodes answered" in first and "2 ranks x 1 thread" in first
    assert len([line for line in second.splitlines() if line.startswith("doctor: ")]) == 1


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (["--peers", "nowhere.invalid,also.invalid"], {}, "is this machine"),
        (["--peers", "127.0.0.1"], {}, "fewer than two nodes"),
        (["--peers", "127.0.0.1:99999,b"], {}, "not a port"),
        (["--port", "0"], {}, "--port 0"),
        (["--ranks-per-node", "0"], {}, "--ranks-per-node 0"),
        (["--workers", "-1"], {}, "--workers -1"),
        (["--wait", "0"], {}, "--wait 0"),
        ([], {"BIREME_DOCTOR_PRETEND": "cores=1"}, "BIREME_DOCTOR_PRETEND"),
    ],
)
def test_mistakes_get_one_line(
    arguments: list[str], environment: dict[str, str], words: str, processes: list[Process]
) -> None:
    process = start(processes, *arguments, **environment)
    _, errors = process.communicate(timeout=ENDS_S)
    assert process.returncode == 2
    assert words in errors and len(errors.splitlines()) == 1


@pytest.mark.slow
def test_a_silent_peer_costs_no_more_than_what_was_promised(processes: list[Process]) -> None:
    """Without --wait; the promise is 15 s, the margin is for busy machines."""
    port = free_port()
    started_s = time.monotonic()
    process = subprocess.Popen(
        DOCTOR, env={**CLEAN, **node(0, 2, port)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    processes.append(process)
    code, output = ended(process)
    assert code == 1 and "node 1 is silent" in output
    assert time.monotonic() - started_s < 40
