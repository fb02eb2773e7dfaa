import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bireme import nodes_command
from bireme.cli import app, run
from bireme.cores import usable_cores

BIREME = [sys.executable, "-m", "bireme"]


def nodes(*arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*BIREME, "nodes", *arguments], capture_output=True, text=True, timeout=timeout_s)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--nodes", "2", "true"], "put -- before the command", id="no --"),
        pytest.param(["--"], "there is no command", id="no command"),
        pytest.param(["--link", "1gbps", "--", "true"], "link rate '1gbps'", id="no rate"),
        pytest.param(["--link=-5mbit", "--", "true"], "link rate '-5mbit'", id="negative rate"),
        pytest.param(["--delay", "soon", "--", "true"], "delay 'soon'", id="no delay"),
        pytest.param(["--nodes", "0", "--", "true"], "nodes is 0", id="no nodes"),
        pytest.param(["--nodes", "two", "--", "true"], "--nodes", id="nodes in words"),
        pytest.param(["--cores-per-node", "9999", "--", "true"], "cores_per_node is 9999", id="too many cores"),
        pytest.param(["--torchrun", "1,2,3", "--", "x.py"], "--torchrun 1,2,3 is for 3 nodes", id="ranks of 3 nodes"),
        pytest.param(["--node", "2", "--", "true"], "unknown option --node", id="unknown option"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(app, ["nodes", *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and len(printed.err.splitlines()) == 1 and not printed.out


def test_every_node_runs_the_command_and_its_lines_carry_its_name() -> None:
    done = nodes(
        "--nodes", "3", "--cores-per-node", "1", "--", "sh", "-c", "echo $NODE_RANK of $NNODES; echo $BIREME_NODE >&2"
    )
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [f"node{i} | {i} of 3" for i in range(3)]
    assert {line for line in done.stderr.splitlines() if "|" in line} == {f"node{i} | node{i}" for i in range(3)}
    if len(usable_cores()) < 3:
        assert "warning: 3 nodes of 1 core share" in done.stderr


def test_no_line_is_torn() -> None:
    program = "import sys\nfor i in range(500): sys.stdout.write(f'<{i:03}' + 'x' * 300 + '>\\n')"
    done = nodes("--nodes", "4", "--", sys.executable, "-c", program)
    assert done.returncode == 0
    lines = Counter(done.stdout.splitlines())
    assert len(lines) == 2000
    assert all(re.fullmatch(r"node[0-3] \| <\d{3}x{300}>", line) for line in lines)


def test_the_first_failure_gives_the_exit_code() -> None:
    done = nodes("--nodes", "2", "--", "sh", "-c", "sleep $((1 - NODE_RANK)); exit $((NODE_RANK + 4))")
    assert done.returncode == 5
    assert "node1 ended with exit code 5; the others have 15 s" in done.stderr
    done = nodes("--nodes", "2", "--", "sh", "-c", "test $NODE_RANK = 0 || kill -9 $$")
    assert done.returncode == 128 + 9


def test_a_command_that_is_not_there_is_one_line() -> None:
    done = nodes("--nodes", "2", "--", "no-such-command")
    assert done.returncode == 2
    assert "node0 cannot start 'no-such-command': No such file or directory" in done.stderr
    assert "Traceback" not in done.stderr


def test_who_goes_on_for_too_long_after_a_failure_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nodes_command, "_GRACE_S", 0.5)
    monkeypatch.setattr(nodes_command, "_KILL_AFTER_S", 0.5)
    script = f"test $NODE_RANK = 0 || exit 3; trap 'touch {tmp_path}/told' TERM; while :; do sleep 0.1; done"
    started = time.monotonic()
    code = nodes_command.nodes_command(["sh", "-c", script], 2, "1gbit", 1, None, None)
    assert code == 3
    assert (tmp_path / "told").exists()
    assert time.monotonic() - started < 30


@contextmanager
def started(command: list[str]) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_goes_to_the_commands_which_end_in_their_own_way(number: int, tmp_path: Path) -> None:
    name = "INT" if number == signal.SIGINT else "TERM"
    script = (
        f"trap 'sleep 0.3; touch {tmp_path}/ended-$NODE_RANK; exit 0' {name}; echo up; while :; do sleep 0.05; done"
    )
    command = [*BIREME, "nodes", "--nodes", "2", "--", "sh", "-c", script]
    with started(command) as process:
        assert process.stdout is not None
        assert {process.stdout.readline(), process.stdout.readline()} == {"node0 | up\n", "node1 | up\n"}
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    assert {path.name for path in tmp_path.iterdir()} == {"ended-0", "ended-1"}


def test_a_second_ctrl_c_does_not_wait_any_longer() -> None:
    script = "trap : INT; echo up; while :; do sleep 0.05; done"
    command = [*BIREME, "nodes", "--nodes", "2", "--", "sh", "-c", script]
    with started(command) as process:
        assert process.stdout is not None
        assert {process.stdout.readline(), process.stdout.readline()} == {"node0 | up\n", "node1 | up\n"}
        process.send_signal(signal.SIGINT)
        time.sleep(1.0)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130


def test_names_and_values_need_not_be_utf8() -> None:
    command = [*BIREME, "nodes", "--nodes", "1", "--", "sh", "-c", 'printf "%s" "$ODD" | od -An -tx1', "\udcfe"]
    environment = {**os.environb, b"ODD": b"\xff\x80"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stdout.split()) == (0, ["node0", "|", "ff", "80"]), done.stderr


def test_a_reader_that_leaves_does_not_hold_the_commands_up() -> None:
    command = " ".join([*BIREME, "nodes", "--", "sh", "-c", "'for i in $(seq 2000); do echo $i; done'"])
    done = subprocess.run(["sh", "-c", f"{command} | head -1"], capture_output=True, text=True, timeout=60)
    assert re.fullmatch(r"node[01] \| \d+\n", done.stdout)
    assert "Traceback" not in done.stderr


def test_what_cannot_be_printed_ends_the_commands() -> None:
    # Endless commands: the pipe that nobody reads ends them, as it would without `bireme nodes` in between.
    script = f"{' '.join(BIREME)} nodes -- yes | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (141, b"")
    with Path("/dev/full").open("w") as full:
        full_disk = subprocess.run([*BIREME, "nodes", "--", "yes"], stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert full_disk.returncode == 1
    assert full_disk.stderr == b"bireme: cannot write the output: No space left on device\n"
    closed = subprocess.run(["sh", "-c", " ".join([*BIREME, "nodes", "--", "true", ">&-"])], stderr=subprocess.PIPE)
    assert (closed.returncode, closed.stderr) == (0, b"")


def test_a_working_directory_that_is_gone(tmp_path: Path) -> None:
    script = f"cd {tmp_path} && mkdir gone && cd gone && rmdir ../gone && {' '.join(BIREME)} nodes -- true"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "bireme: the working directory does not exist any more: change to one that does\n"


def test_output_is_copied_from_threads_that_end() -> None:
    before = threading.active_count()
    output = nodes_command.PrefixedOutput()
    with output.of("node0") as (stdout, stderr):
        os.write(stdout, b"no newline at the end \xff")
        os.write(stderr, b"")
    output.close()
    assert threading.active_count() == before


@pytest.mark.slow
def test_torchrun_trains_on_unequal_nodes(tmp_path: Path) -> None:
    run_directory = tmp_path / "run"
    options = ["--preset", "toy", "--steps", "3", "--global-batch-size", "12", "--run-dir", str(run_directory)]
    done = nodes("--torchrun", "1,2", "--", "-m", "bireme", "train", *options, timeout_s=180)
    assert done.returncode == 0, done.stderr
    from bireme.run_reader import read_run

    recorded = read_run(run_directory)
    assert [node["ranks"] for node in recorded.facts["nodes"]] == [[0], [1, 2]]
    assert [node["name"] for node in recorded.facts["nodes"]] == ["node0", "node1"]
    assert len(recorded.steps) == 3
    assert "Traceback" not in done.stderr
