import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from bireme.environment import UNSHAPED
from bireme.errors import UserError
from bireme.nodes import EmulatedCluster, Node, parse_delay, parse_ranks, parse_rate, share_cores

PYTHON = sys.executable


def namespaces_refused() -> str | None:
    try:
        with EmulatedCluster(nodes=1) as cluster:
            return cluster.reason
    except Exception as error:
        return str(error)


REFUSED = namespaces_refused()
needs_namespaces = pytest.mark.skipif(REFUSED is not None, reason=f"no emulated machines here: {REFUSED}")


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmulatedCluster]:
    with EmulatedCluster(nodes=2, link="200mbit", cores_per_node=1) as cluster:
        yield cluster


def output(node: Node, *command: str, timeout_s: float = 30.0, **env: str) -> str:
    """What a command prints on a node; it must succeed."""
    reading, writing = os.pipe()
    process = node.start(command, env=env, stdout=writing)
    os.close(writing)
    with os.fdopen(reading) as printed:
        text = printed.read()
    assert process.wait(timeout_s) == 0, text
    return text.strip()


def python(node: Node, program: str, *arguments: str) -> str:
    return output(node, PYTHON, "-c", program, *arguments)


def eventually(condition: Callable[[], bool], within_s: float = 20.0) -> bool:
    end = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


# --- rates, delays, cores -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "bits_per_s"),
    [("100mbit", 100e6), ("1gbit", 1e9), ("2.5gbit", 2.5e9), ("640kbit", 640e3), ("1GBit", 1e9), ("unlimited", None)],
)
def test_a_rate(text: str, bits_per_s: float | None) -> None:
    assert parse_rate(text) == bits_per_s


@pytest.mark.parametrize(
    "text", ["1gbps", "-5mbit", "", "mbit", "1 gbit", "1e3mbit", "nan", "9" * 400 + "kbit", "10kbit", "40gbit", "0mbit"]
)
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(UserError, match="link rate"):
        parse_rate(text)


def test_delays() -> None:
    assert parse_delay(None) == 0
    assert parse_delay("1ms") == pytest.approx(1e-3)
    assert parse_delay("500us") == pytest.approx(5e-4)
    for text in ("1", "-1ms", "ms", "1m", "11s", "1ms2"):
        with pytest.raises(UserError, match="delay"):
            parse_delay(text)


def test_ranks_of_nodes() -> None:
    assert parse_ranks("2", 3) == [2, 2, 2]
    assert parse_ranks("1,2", 2) == [1, 2]
    for text in ("", "0", "1,0", "a", "1,2,3", "1.5", "-1"):
        with pytest.raises(UserError, match="--torchrun"):
            parse_ranks(text, 2)


@pytest.mark.parametrize(
    ("cores", "nodes", "per_node", "expected"),
    [
        ([0, 1], 2, None, [[0], [1]]),
        ([0, 1, 2, 3], 2, None, [[0, 1], [2, 3]]),
        ([4, 6, 8], 2, None, [[4], [6]]),
        ([0, 1, 2, 3], 2, 1, [[0], [1]]),
        ([0, 1], 3, None, [[0], [1], [0]]),
        ([0, 1], 2, 2, [[0, 1], [0, 1]]),
    ],
)
def test_cores_are_shared_out(cores: list[int], nodes: int, per_node: int | None, expected: list[list[int]]) -> None:
    shares, warning = share_cores(cores, nodes, per_node)
    assert shares == expected
    distinct = {core for share in shares for core in share}
    assert (warning is not None) == (sum(map(len, shares)) > len(distinct))


def test_impossible_clusters_are_refused() -> None:
    for arguments in ({"nodes": 0}, {"nodes": 251}, {"cores_per_node": 0}, {"link": "fast"}, {"delay": "soon"}):
        with pytest.raises(UserError):
            EmulatedCluster(**arguments)
    with pytest.raises(UserError, match="cores_per_node is 100000"):
        EmulatedCluster(cores_per_node=100000)


# --- machines -----------------------------------------------------------------------------------------------------


@needs_namespaces
def test_a_node_is_a_machine_of_its_own(cluster: EmulatedCluster) -> None:
    seen = []
    for node in cluster.nodes:
        text = python(
            node,
            "import os, socket, psutil\n"
            "peers = [socket.gethostbyname(f'node{i}') for i in range(2)]\n"
            "card = psutil.net_if_addrs()['eth0'][0].address\n"
            "inode = os.stat('/proc/self/ns/net').st_ino\n"
            "print(socket.gethostname(), socket.getfqdn(), *peers, card, *os.sched_getaffinity(0), os.getpid(), inode)",
        )
        host, name, first, second, card, core, number, inode = text.split()
        assert host == name == node.name
        assert [first, second] == [each.address for each in cluster.nodes]
        assert card == node.address
        assert [int(core)] == node.cores
        assert int(number) < 1000  # the node counts its own processes
        seen.append((core, inode))
    assert len({inode for _, inode in seen} | {str(Path("/proc/self/ns/net").stat().st_ino)}) == 3
    if psutil.cpu_count() != 1:
        assert seen[0][0] != seen[1][0]


@needs_namespaces
def test_launchers_find_their_variables_and_none_of_another_job(
    cluster: EmulatedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "SLURM_PROCID", "TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("KEPT", "here")
    text = python(cluster.node(1), "import os; [print(f'{k}={v}') for k, v in os.environ.items()]")
    environ = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    assert environ["NNODES"] == "2" and environ["NODE_RANK"] == "1"
    assert environ["MASTER_ADDR"] == "node0" and environ["MASTER_PORT"] == "29500"
    assert environ["GLOO_SOCKET_IFNAME"] == "eth0"
    assert environ["BIREME_NODE"] == "node1" and environ["BIREME_LINK"] == "200mbit"
    assert environ["KEPT"] == "here"
    assert not {"RANK", "SLURM_PROCID", "TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE", "NCCL_SOCKET_IFNAME"} & set(environ)


RECEIVE = """
import socket, time
server = socket.create_server(("", 0))
print(server.getsockname()[1], flush=True)
connection, _ = server.accept()
started, received = time.perf_counter(), 0
while part := connection.recv(1 << 16):
    received += len(part)
print(received / (time.perf_counter() - started))
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=20) as connection:
    connection.sendall(bytes(int(sys.argv[3])))
"""


def rate_between(sender: Node, receiver: Node, num_bytes: int) -> float:
    """Bits per second at which bytes arrive."""
    reading, writing = os.pipe()
    process = receiver.start([PYTHON, "-c", RECEIVE], stdout=writing)
    os.close(writing)
    with os.fdopen(reading) as printed:
        port = printed.readline().strip()
        python(sender, SEND, receiver.address, port, str(num_bytes))
        bytes_per_s = float(printed.readline())
    assert process.wait(30) == 0
    return bytes_per_s * 8


@needs_namespaces
def test_links_have_their_rate_in_both_directions_and_change_while_things_run(cluster: EmulatedCluster) -> None:
    first, second = cluster.nodes
    # A busy machine can only make it slower than the link: the upper bounds are the test.
    assert 20e6 < rate_between(first, second, 6_000_000) < 215e6
    assert 20e6 < rate_between(second, first, 6_000_000) < 215e6
    # The switch's end limits what the second receives, also where the sender has no limit.
    first.set_link("unlimited")
    assert 20e6 < rate_between(first, second, 6_000_000) < 215e6
    first.set_link("200mbit")
    second.set_link("20mbit")
    try:
        assert second.link == "20mbit"
        assert rate_between(first, second, 1_000_000) < 25e6
        assert rate_between(second, first, 1_000_000) < 25e6
        assert python(second, "import os; print(os.environ['BIREME_LINK'])") == "20mbit"
    finally:
        second.set_link("200mbit")
    assert rate_between(first, second, 6_000_000) > 40e6
    with pytest.raises(UserError, match="link rate"):
        second.set_link("fast")


REACH = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[3]))"


@needs_namespaces
def test_a_cable_can_be_pulled_and_put_back(cluster: EmulatedCluster) -> None:
    first, second = cluster.nodes
    listen = "import socket, time; s = socket.create_server(('', 45000)); print('up', flush=True); time.sleep(60)"
    reading, writing = os.pipe()
    server = second.start([PYTHON, "-c", listen], stdout=writing)
    os.close(writing)
    with os.fdopen(reading) as printed:
        assert printed.readline() == "up\n"
    python(first, REACH, second.address, "45000", "10")
    second.cut()
    silent = first.start([PYTHON, "-c", REACH, second.address, "45000", "1"], stderr=subprocess.DEVNULL)
    assert silent.wait(20) == 1
    second.restore()
    assert eventually(
        lambda: (
            first.start([PYTHON, "-c", REACH, second.address, "45000", "2"], stderr=subprocess.DEVNULL).wait(20) == 0
        )
    )
    server.kill()
    assert server.wait(10) == -signal.SIGKILL


@needs_namespaces
def test_a_node_stops_and_goes_on(cluster: EmulatedCluster, tmp_path: Path) -> None:
    ticks = tmp_path / "ticks"
    node = cluster.node(0)
    process = node.start(["sh", "-c", f"while sleep 0.02; do printf . >> {ticks}; done"])
    try:
        assert eventually(lambda: ticks.exists() and ticks.stat().st_size > 3)
        node.stop()
        time.sleep(0.3)
        stopped_at = ticks.stat().st_size
        time.sleep(0.5)
        assert ticks.stat().st_size == stopped_at
        node.resume()
        assert eventually(lambda: ticks.stat().st_size > stopped_at + 3)
    finally:
        process.kill()
        process.wait(10)


@needs_namespaces
def test_a_killed_node_takes_everything_on_it_along_and_the_others_stay() -> None:
    with EmulatedCluster(nodes=2, link="unlimited") as cluster:
        first, second = cluster.nodes
        # A daemon that has left its session and its parent.
        marker = f"bireme-test-{os.getpid()}-{time.monotonic_ns()}"
        process = second.start(["sh", "-c", f"setsid sh -c 'sleep 300; : {marker}' & sleep 300"])
        assert eventually(lambda: len(processes_with(marker)) >= 1)
        second.kill()
        assert process.wait(10) == -signal.SIGKILL
        assert eventually(lambda: not processes_with(marker))
        assert python(first, "print('alive')") == "alive"
        with pytest.raises(RuntimeError, match="node1 is not running"):
            second.start(["true"])
        second.kill()  # twice is once


@needs_namespaces
def test_two_clusters_at_once_do_not_clash(cluster: EmulatedCluster) -> None:
    with EmulatedCluster(nodes=2, link="1gbit") as other:
        for each in (cluster, other):
            assert rate_between(each.node(0), each.node(1), 100_000) > 0
        inode = "import os; print(os.stat('/proc/self/ns/net').st_ino)"
        assert len({python(node, inode) for node in (*cluster.nodes, *other.nodes)}) == 4


def test_misuse_is_said() -> None:
    for arguments in ({"nodes": "2"}, {"nodes": 2.0}, {"link": 5}, {"delay": 5}):
        with pytest.raises(UserError):
            EmulatedCluster(**arguments)
    with EmulatedCluster(nodes=1) as cluster:
        commands: tuple[Sequence[str], ...] = ([], "true")
        for command in commands:
            with pytest.raises(UserError, match="a command is a list of words"):
                cluster.node(0).start(command)
        with pytest.raises(RuntimeError, match="already"):
            cluster.start()
    for action in (lambda: cluster.node(0).start(["true"]), lambda: cluster.node(0).cut()):
        with pytest.raises(RuntimeError, match="node0 is not running"):
            action()


@needs_namespaces
def test_what_cannot_be_started_is_said(cluster: EmulatedCluster) -> None:
    with pytest.raises(UserError, match="node0 cannot start 'no-such-command': No such file"):
        cluster.node(0).start(["no-such-command"])
    with pytest.raises(UserError, match="Permission denied"):
        cluster.node(0).start(["/etc/hosts"])
    assert python(cluster.node(0), "print(1)") == "1"


@needs_namespaces
def test_a_delay_works_or_is_refused_with_the_reason() -> None:
    listen = "import socket; s = socket.create_server(('', 45001)); print('up', flush=True); s.accept(); s.accept()"
    reach = "import socket, time; t = time.perf_counter(); socket.create_connection(('node1', 45001), timeout=20); "
    reach += "print(time.perf_counter() - t)"
    try:
        with EmulatedCluster(nodes=2, link="1gbit", delay="50ms") as cluster:
            assert cluster.shaped
            first, second = cluster.nodes
            reading, writing = os.pipe()
            second.start([PYTHON, "-c", listen], stdout=writing)
            os.close(writing)
            with os.fdopen(reading) as printed:
                assert printed.readline() == "up\n"
                assert float(python(first, reach)) >= 0.1  # there and back
            assert python(second, "import os; print(os.environ['BIREME_DELAY'])") == "50ms"
    except UserError as error:
        assert "no netem" in str(error)
        pytest.skip(str(error))


# --- nothing is left behind ---------------------------------------------------------------------------------------


def processes_with(marker: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if marker in " ".join(process.cmdline()) or process.environ().get("MARKER") == marker:
                found.append(process.pid)
    return found


def namespaces_of(numbers: list[int]) -> set[tuple[str, int]]:
    found = set()
    for number in numbers:
        for kind in ("net", "mnt", "pid", "uts", "ipc", "user"):
            with contextlib.suppress(OSError):
                found.add((kind, Path(f"/proc/{number}/ns/{kind}").stat().st_ino))
    return found


HOLD = """
import sys, time
from bireme.nodes import EmulatedCluster
with EmulatedCluster(nodes=2, link="100mbit") as cluster:
    for node in cluster.nodes:
        node.start(["sh", "-c", "setsid sleep 300 & sleep 300"])
    print(cluster.shaped, flush=True)
    time.sleep(300)
"""


def start_and_kill(*before: str) -> None:
    """A process with a cluster of two busy nodes is killed; all that was started must go."""
    marker = f"bireme-test-{os.getpid()}-{time.monotonic_ns()}"
    command = [*before, PYTHON, "-c", HOLD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "MARKER": marker}) as parent:
        assert parent.stdout is not None
        parent_is_shaped = parent.stdout.readline().strip() == "True"
        assert len(processes_with(marker)) >= 6
        namespaces = namespaces_of(processes_with(marker)) - namespaces_of([os.getpid()])
        assert namespaces or not parent_is_shaped
        # `unshare` and its like may stand before the interpreter.
        for victim in (*psutil.Process(parent.pid).children(recursive=True), psutil.Process(parent.pid)):
            with contextlib.suppress(psutil.NoSuchProcess):
                if HOLD in victim.cmdline():
                    victim.kill()
    assert eventually(lambda: not processes_with(marker)), [psutil.Process(p).cmdline() for p in processes_with(marker)]
    assert eventually(lambda: not namespaces & namespaces_of(psutil.pids()))


@needs_namespaces
@pytest.mark.slow
def test_ten_killed_parents_leave_nothing_behind() -> None:
    before = set(psutil.net_if_addrs()), Path("/proc/self/mounts").read_text(), sorted(Path("/run").glob("netns/*"))
    for _ in range(10):
        start_and_kill()
    after = set(psutil.net_if_addrs()), Path("/proc/self/mounts").read_text(), sorted(Path("/run").glob("netns/*"))
    assert after == before


@needs_namespaces
def test_a_killed_switch_takes_the_nodes_along() -> None:
    marker = f"bireme-test-{os.getpid()}-{time.monotonic_ns()}"
    with EmulatedCluster(nodes=2) as cluster:
        process = cluster.node(1).start(["sh", "-c", "setsid sleep 300 & sleep 300"], env={"MARKER": marker})
        assert eventually(lambda: len(processes_with(marker)) >= 2)
        assert cluster._keeper is not None
        cluster._keeper.kill()
        assert eventually(lambda: not processes_with(marker))
        assert process.wait(10) == -signal.SIGKILL


@needs_namespaces
def test_closing_waits_until_everything_is_gone() -> None:
    marker = f"bireme-test-{os.getpid()}-{time.monotonic_ns()}"
    with EmulatedCluster(nodes=2) as cluster:
        for node in cluster.nodes:
            node.start(["sh", "-c", "setsid sleep 300 & sleep 300"], env={"MARKER": marker})
        assert eventually(lambda: len(processes_with(marker)) >= 4)
    assert not processes_with(marker)


# --- without rights -----------------------------------------------------------------------------------------------

# As nobody, with this interpreter readable whatever the rights of the folders above it are.
AS_NOBODY = """
set -e
python=$(readlink -f "$1"); home=$(dirname "$(dirname "$python")")
mkdir "$2/python"; mount --bind "$home" "$2/python"
top=/$(echo "$home" | cut -d/ -f2)
mount -t tmpfs -o mode=755 nobody "$top"; mkdir -p "$home"; mount --bind "$2/python" "$home"
shift 2
exec setpriv --reuid=65534 --regid=65534 --clear-groups "$@"
"""
WHO = """
import os, sys
from bireme.nodes import EmulatedCluster
with EmulatedCluster(nodes=2, link="100mbit") as cluster:
    print(os.getuid(), cluster.shaped, cluster.reason, flush=True)
    for node in cluster.nodes:
        assert node.start(["sh", "-c", "hostname"]).wait(20) == 0
"""


@needs_namespaces
def test_an_unprivileged_user_gets_the_same_machines(tmp_path: Path) -> None:
    command = [PYTHON, "-c", WHO]
    if os.geteuid() == 0:
        home = Path(PYTHON).resolve()
        if not shutil.which("setpriv") or not shutil.which("unshare") or home.parts[1] in ("usr", "bin", "work", "tmp"):
            pytest.skip("this test becomes nobody with setpriv and unshare, and an interpreter outside /usr")
        tmp_path.chmod(0o755)
        command = ["unshare", "--mount", "sh", "-c", AS_NOBODY, "sh", PYTHON, str(tmp_path), *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/")
    assert done.returncode == 0, done.stderr
    user, *rest = done.stdout.split()
    assert user != "0" and rest == ["True", "None", "node0", "node1"], done.stdout


def forbidden() -> list[str]:
    """A command's beginning under which there are no network namespaces."""
    if not shutil.which("unshare"):
        pytest.skip("this test forbids namespaces with unshare")
    limit = 'echo 0 > /proc/sys/user/max_net_namespaces && exec "$@"'
    before = ["unshare", "--user", "--map-root-user", "sh", "-c", limit, "sh"]
    if subprocess.run([*before, "true"], capture_output=True).returncode != 0:
        pytest.skip("this test forbids namespaces in a user namespace, and there may be none")
    return before


def test_where_namespaces_are_refused_nodes_are_processes_and_marked() -> None:
    bireme = [PYTHON, "-m", "bireme", "nodes", "--nodes", "2", "--"]
    script = 'echo "$BIREME_NODE $BIREME_LINK $NODE_RANK/$NNODES $MASTER_ADDR"; test "$MASTER_PORT" -gt 0'
    done = subprocess.run([*forbidden(), *bireme, "sh", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [
        f"node0 | node0 {UNSHAPED} 0/2 127.0.0.1",
        f"node1 | node1 {UNSHAPED} 1/2 127.0.0.1",
    ]
    assert len(done.stderr.splitlines()) == 1 and "loopback" in done.stderr and "max_net_namespaces" in done.stderr


def test_refused_nodes_also_leave_nothing_behind() -> None:
    start_and_kill(*forbidden())


UNSHAPED_LINKS = """
from bireme.nodes import EmulatedCluster, UserError
with EmulatedCluster(nodes=2) as cluster:
    assert not cluster.shaped
    for change in (lambda node: node.set_link("1gbit"), lambda node: node.cut(), lambda node: node.restore()):
        try:
            change(cluster.node(0))
        except UserError as error:
            print(error)
    process = cluster.node(1).start(["sleep", "300"])
    cluster.node(1).stop()
    cluster.node(1).resume()
    cluster.node(1).kill()
    assert process.wait(10) == -9
"""


def test_refused_nodes_have_no_links_to_change() -> None:
    done = subprocess.run([*forbidden(), PYTHON, "-c", UNSHAPED_LINKS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert [line.split(" the link")[0] for line in done.stdout.splitlines()] == [
        "cannot set the rate of",
        "cannot cut",
        "cannot restore",
    ]


# --- torchrun -----------------------------------------------------------------------------------------------------

WORKER = """
import os, socket, torch, torch.distributed as dist
dist.init_process_group("gloo")
place = torch.zeros(dist.get_world_size(), dtype=torch.int64)
place[dist.get_rank()] = 10 * int(os.environ["NODE_RANK"]) + int(os.environ["LOCAL_RANK"]) + 1
dist.all_reduce(place)
if dist.get_rank() == 0:
    print("places", *(place - 1).tolist())
dist.destroy_process_group()
"""


@needs_namespaces
@pytest.mark.parametrize("rendezvous", [pytest.param("static", marks=pytest.mark.slow), "c10d"])
def test_real_torchrun_runs_on_the_nodes(rendezvous: str, cluster: EmulatedCluster, tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    for attempt, ranks in enumerate(([1, 1], [2, 2], [1, 2])):
        started = []
        files = [tmp_path / f"{attempt}-{node.name}" for node in cluster.nodes]
        for node, file in zip(cluster.nodes, files, strict=True):
            port = str(29600 + attempt)
            where = (
                ["--rdzv-backend=c10d", f"--rdzv-endpoint=node0:{port}", f"--rdzv-id=test-{attempt}"]
                if rendezvous == "c10d"
                else [f"--node-rank={node.rank}", "--master-addr=node0", f"--master-port={port}"]
            )
            command = [PYTHON, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={ranks[node.rank]}"]
            with file.open("w") as stream:
                started.append(
                    node.start(
                        [*command, *where, str(worker)], env={"OMP_NUM_THREADS": "1"}, stdout=stream, stderr=stream
                    )
                )
        codes = [process.wait(120) for process in started]
        text = "\n".join(file.read_text() for file in files)
        assert codes == [0, 0], text
        (places,) = [line.split()[1:] for line in text.splitlines() if line.startswith("places")]
        expected = [10 * node + local for node in range(2) for local in range(ranks[node])]
        assert sorted(map(int, places)) == expected
        if rendezvous == "static":  # node 0 has the first ranks; c10d does not promise an order
            assert list(map(int, places)) == expected
