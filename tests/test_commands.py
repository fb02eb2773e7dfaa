"""The commands as users type them: the guide's five, bad input, Ctrl-C and killed ranks."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch

from bireme import cli, meeting
from bireme.run_reader import read_run
from bireme.shutdown import REQUEUE

REPOSITORY = Path(__file__).resolve().parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
MULTINODE = str(REPOSITORY / "multinode.py")
CLEAN = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(
        ("STRAGGLER_", "CUDA_VISIBLE", "TORCHELASTIC_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "NODE", "NNODES")
    )
    and not name.startswith(("GROUP_", "SLURM_", "BIREME_", "GLOO_SOCKET", "NCCL_SOCKET", "TP_SOCKET"))
}


def run(arguments: list[str], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {**CLEAN, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    return subprocess.run(arguments, cwd=cwd, env=settings, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder in which the guide's five commands were run, with fewer steps; their output by command."""
    folder = tmp_path_factory.mktemp("guide")
    output = {}
    for ranks, delay in ((1, ""), (2, ""), (4, ""), (4, "150")):
        command = [*TORCHRUN, f"--nproc_per_node={ranks}", MULTINODE, "--steps", "4"]
        done = run(command, folder, **({"STRAGGLER_MS": delay} if delay else {}))
        assert done.returncode == 0, done.stdout + done.stderr
        output[f"{ranks}{delay and '+' + delay}"] = done.stdout
    done = run([sys.executable, MULTINODE, "--plot"], folder)
    assert done.returncode == 0, done.stderr
    output["plot"] = done.stdout
    return folder, output


def test_the_five_commands(recorded: tuple[Path, dict[str, str]]) -> None:
    folder, output = recorded
    assert "contention" in output["4"] and "comm: transfer" in output["4"]
    rows = [line for line in output["4+150"].splitlines() if re.match(r" +\d+ .* flat ", line)]
    assert len(rows) == 4, "the table so far has a row for each command"
    assert (folder / "runs/multinode/multinode.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    runs = [Path(text.split("run directory: ")[-1].split()[0]) for name, text in output.items() if name != "plot"]
    assert len(set(runs)) == 4
    for directory in runs:
        report = run([sys.executable, "-m", "bireme", "report", str(directory), "--json"], folder)
        summary = orjson.loads(report.stdout)
        assert summary["closure_error_ns"] == 0
        assert summary["steps"] == {"measured": 4, "skipped": 3}


def test_report_shows_and_compares(recorded: tuple[Path, dict[str, str]]) -> None:
    folder, output = recorded
    two, four = (output[name].split("run directory: ")[-1].split()[0] for name in ("2", "4"))
    alone = run([sys.executable, "-m", "bireme", "report", two], folder)
    assert alone.returncode == 0
    for word in ("forward", "backward", "transfer", "closure error 0 ns", "MFU", "cost of measuring"):
        assert word in " ".join(alone.stdout.split())
    both = run([sys.executable, "-m", "bireme", "report", two, four], folder)
    assert both.returncode == 0, both.stderr
    assert "world_size" in both.stdout


def test_multinode_says_what_to_run_when_nothing_is_recorded(tmp_path: Path) -> None:
    done = run([sys.executable, MULTINODE, "--plot"], tmp_path)
    assert done.returncode == 2
    assert "torchrun --nproc_per_node=1 multinode.py" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_help_is_quick_and_complete() -> None:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        done = run([sys.executable, "-m", "bireme", "--help"], REPOSITORY)
        times.append(time.perf_counter() - start)
        assert done.returncode == 0 and "train" in done.stdout
    imports = run([sys.executable, "-X", "importtime", "-m", "bireme", "--help"], REPOSITORY).stderr
    loaded = {line.rsplit("|", 1)[-1].strip() for line in imports.splitlines()}
    assert not {"torch", "numpy"} & loaded
    assert sorted(times)[2] < 3.0, "half a second on an idle machine"  # measured in docs/measurements.md
    options = run([sys.executable, "-m", "bireme", "train", "--help"], REPOSITORY).stdout
    for option in ("--run", "--preset", "--steps", "--seed", "--data", "--overlap", "--no-overlap", "--bucket-mb"):
        assert option in options


# --- bad input ---------------------------------------------------------------------------------------------------


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """say("train", "--stepz", "5", RANK="0"): what the command writes to standard error before it ends with code 2."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # which the command would set for good
    threads = torch.get_num_threads()
    for name in set(os.environ) - set(CLEAN):
        monkeypatch.delenv(name)

    def command(*arguments: str, **environment: str) -> str:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert cli.run(cli.app, arguments) == 2
        captured = capsys.readouterr()
        lines = [line for line in captured.err.splitlines() if " waits for " not in line]
        assert len(lines) == 1, captured.err
        assert not (tmp_path / "runs").exists(), "nothing half-written"
        return lines[0]

    yield command
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--stepz", "5"], "unknown option --stepz (did you mean '--steps'?)"),
        (["train", "--steps", "many"], "--steps"),
        (["train", "--steps", "0"], "steps is 0"),
        (["train", "--layout", "zigzag"], "ddp"),
        (["train", "--preset", "tyo"], "'toy'"),
        (["train", "missing.toml"], "cannot read missing.toml"),
        (["train", "--model.num-headz", "4"], "num_heads"),
        (["train", "--model.num-heads", "5"], "num_heads"),
        (["train", "--data", "missing.txt"], "missing.txt"),
        (["train", "--device", "cuda"], "no GPU"),
        (["trian"], "train"),
        (["report"], "report"),
        (["report", "missing"], "missing"),
        (["report", "."], "run.json"),
        (["sample", "missing"], "missing"),
    ],
)
def test_bad_arguments(say: Any, arguments: list[str], message: str) -> None:
    assert message in say(*arguments)


def test_bad_corpora(say: Any, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "short.txt").write_text("too short")
    assert "empty.txt" in say("train", "--data", "empty.txt")
    assert "folder" in say("train", "--data", "folder")
    assert "128" in say("train", "--data", "short.txt")


def test_bad_config_file(say: Any, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("stpes = 3\n")
    line = say("train", "bad.toml")
    assert "bad.toml" in line and "'steps'" in line


def test_torn_and_newer_runs(say: Any, tmp_path: Path) -> None:
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "run.json").write_text('{"format": "bireme-run", ')
    assert "torn" in say("report", "torn")
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "run.json").write_text(json.dumps({"format": "bireme-run", "version": 99}))
    assert "99" in say("report", "newer")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"STRAGGLER_MS": "abc"}, "'abc' is not a number"),
        ({"STRAGGLER_MS": "-5"}, "-5"),
        ({"STRAGGLER_MS": "5", "STRAGGLER_RANK": "1"}, "STRAGGLER_RANK=1 is outside the world"),
        ({"RANK": "0"}, "WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "RANK is not"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "RANK=2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({"RANK": "0", "WORLD_SIZE": "x"}, "WORLD_SIZE='x'"),
        ({"NODE_RANK": "0", "NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
    ],
)
def test_bad_environment(say: Any, environment: dict[str, str], message: str) -> None:
    assert message in say("train", **environment)


def test_a_port_in_use(say: Any) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        line = say("train", RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    assert f"port {port} on 127.0.0.1 is in use" in line


def test_ranks_that_never_come_are_named(say: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIREME_JOIN_TIMEOUT_S", "1")
    monkeypatch.setattr(meeting, "_SAY_AFTER_S", 0.5)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = str(holder.getsockname()[1])
    line = say("train", RANK="0", WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    assert "ranks 1-2 of 3 did not come" in line
    line = say("train", RANK="1", WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    assert "rank 1 cannot reach rank 0" in line


# --- several launchers -------------------------------------------------------------------------------------------


def launch(arguments: list[str], cwd: Path, **environment: str) -> subprocess.Popen[str]:
    settings = {**CLEAN, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    return subprocess.Popen(
        [*TORCHRUN, *arguments], cwd=cwd, env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def outputs(launched: list[subprocess.Popen[str]]) -> list[str]:
    """What they printed, when all have ended well."""
    try:
        printed = [each.communicate(timeout=180)[0] for each in launched]
    finally:
        for each in launched:
            if each.poll() is None:
                each.terminate()  # torchrun ends its ranks
                each.communicate()
    assert [each.returncode for each in launched] == [0] * len(launched), "\n".join(printed)
    return printed


def test_unequal_nodes_whose_numbers_are_not_heeded(tmp_path: Path) -> None:
    """The c10d rendezvous numbers nodes as it likes: who is where is learned, never computed."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        endpoint = f"127.0.0.1:{holder.getsockname()[1]}"
    training = ["-m", "bireme", "train", "--steps", "4", "--run-dir", "run", "--peak-seconds", "0"]
    training += ["--global-batch-size", "3", "--sequence-length", "32", "--evaluate-every", "0", "--threads", "1"]
    common = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=unequal", *training]
    printed = outputs(
        [
            launch(
                [f"--nproc-per-node={ranks}", f"--node-rank={node_rank}", *common],
                tmp_path,
                BIREME_NODE=name,
            )
            for name, ranks, node_rank in (("lone", 1, 1), ("pair", 2, 0))
        ]
    )
    facts = read_run(tmp_path / "run").facts
    ranks_of = {node["name"]: node["ranks"] for node in facts["nodes"]}
    assert {name: len(ranks) for name, ranks in ranks_of.items()} == {"lone": 1, "pair": 2}
    assert sorted(ranks_of["lone"] + ranks_of["pair"]) == [0, 1, 2]
    for rank in facts["ranks"]:
        assert rank["rank"] in ranks_of[rank["node"]]
        assert rank["local_rank"] == ranks_of[rank["node"]].index(rank["rank"])
        assert rank["address"]
        assert rank["interface"]
    # The shortcut puts some rank on another node, whichever node torchrun counts first.
    order = sorted(ranks_of, key=lambda name: ranks_of[name])
    computed = [rank["rank"] // len(ranks_of[rank["node"]]) for rank in facts["ranks"]]
    assert computed != [order.index(rank["node"]) for rank in facts["ranks"]]
    advertised = [line for line in "".join(printed).splitlines() if " advertises address " in line]
    assert len(advertised) == 1, "the console is rank 0's; the others write it into their files"
    assert advertised[0].startswith(f"rank 0 on node {facts['ranks'][0]['node']} advertises address ")
    for rank in facts["ranks"]:
        text = (tmp_path / "run" / "logs" / f"rank-{rank['rank']}.log").read_text()
        assert f"rank {rank['rank']} on node {rank['node']} advertises address {rank['address']} via" in text


JOIN = """
import torch, torch.distributed as dist
from bireme.world import join
world = join()
mine = torch.ones(1)
dist.all_reduce(mine)
if world.rank == 0:
    print("sum", int(mine))
world.leave()
"""


def start_jobs_at_once(folder: Path, times: int) -> None:
    (folder / "job.py").write_text(JOIN)
    for _ in range(times):
        jobs = [launch(["--standalone", "--nproc-per-node=2", "job.py"], folder) for _ in range(2)]
        assert ["sum 2" in printed for printed in outputs(jobs)] == [True, True]


@pytest.mark.slow
def test_two_jobs_at_once(tmp_path: Path) -> None:
    start_jobs_at_once(tmp_path, 1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_jobs_at_once_ten_times(tmp_path: Path) -> None:
    start_jobs_at_once(tmp_path, 10)


# --- interrupted -------------------------------------------------------------------------------------------------


def start(folder: Path) -> subprocess.Popen[str]:
    """A two-rank run that would go on for long, in a process group of its own, once it has recorded steps."""
    command = [*TORCHRUN, "--nproc_per_node=2", "-m", "bireme", "train", "--steps", "5000", "--run-dir", "run"]
    command += ["--global-batch-size", "2", "--sequence-length", "32", "--evaluate-every", "0", "--peak-seconds", "0"]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=CLEAN,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    await_steps(folder, process)
    return process


def await_steps(folder: Path, process: subprocess.Popen[Any]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        time.sleep(0.2)
        if (folder / "run" / "steps.jsonl").exists() and len(read_run(folder / "run").steps) > 5:
            return
    process.kill()
    pytest.fail(f"the run did not begin: {process.communicate()[0]}")


def rank_pids(folder: Path) -> list[int]:
    return [rank["pid"] for rank in read_run(folder / "run").facts["ranks"]]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def end(process: subprocess.Popen[str], pids: list[int]) -> float:
    """Seconds until the launcher and all ranks have gone."""
    started = time.monotonic()
    try:
        process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    while any(alive(pid) for pid in pids) and time.monotonic() - started < 60:
        time.sleep(0.05)
    return time.monotonic() - started


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to see that the ranks have gone")
def test_ctrl_c_ends_every_rank_and_leaves_a_readable_run(tmp_path: Path) -> None:
    process = start(tmp_path)
    pids = rank_pids(tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    assert end(process, pids) < 30, "a few seconds on an idle machine"
    run_record = read_run(tmp_path / "run")
    assert run_record.facts["status"] == "interrupted"
    assert run_record.facts["status_reason"] == "Ctrl-C"
    assert run_record.steps[-1]["step"] == len(run_record.steps)
    assert run_record.damaged_lines == 0
    assert len(run_record.steps) > 5


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to see that the ranks have gone")
def test_a_killed_rank_ends_the_others_and_leaves_a_readable_run(tmp_path: Path) -> None:
    process = start(tmp_path)
    pids = rank_pids(tmp_path)
    os.kill(pids[1], signal.SIGKILL)
    assert end(process, pids) < 60
    assert process.returncode != 0
    run_record = read_run(tmp_path / "run")
    # Failed, as the connection broke, or interrupted, where the launcher's own signal came first.
    assert run_record.facts["status"] in ("failed", "interrupted")
    reason = run_record.facts["status_reason"]
    if run_record.facts["status"] == "failed":  # B18: who it was, on which machine
        assert "rank 1 on " in reason and f"(pid {pids[1]}) is gone" in reason
    assert len(run_record.steps) > 5


def test_one_process_ends_with_the_code_that_shells_expect(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bireme", "train", "--steps", "5000", "--run", "run", "--evaluate-every", "0"]
    command += ["--global-batch-size", "2", "--sequence-length", "32", "--peak-seconds", "0", "--device", "cpu"]
    process = subprocess.Popen(command, cwd=tmp_path, env=CLEAN, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    await_steps(tmp_path, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == REQUEUE, output
    assert read_run(tmp_path / "run").facts["status_reason"] == "SIGTERM"


# One that rank 0 finds, one that every rank does.
@pytest.mark.parametrize("options", [["--run-dir", "taken"], pytest.param(["--preset", "tyo"], marks=pytest.mark.slow)])
def test_a_mistake_is_said_once_for_all_ranks(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "run.json").write_text("{}")
    launcher = [*TORCHRUN, "--nproc_per_node=2", "-m", "bireme", "train", "--peak-seconds", "0"]
    done = run([*launcher, *options], tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("bireme: ") == 1, done.stderr
