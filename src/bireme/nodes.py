"""Emulated machines: network namespaces with their own name, card and cores, joined by links with a real rate."""

import contextlib
import errno
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from bireme.cores import usable_cores
from bireme.environment import UNSHAPED
from bireme.errors import UserError
from bireme.namespaces import INTERFACE, receive, send
from bireme.network import free_port

MASTER_PORT = 29500  # free on every node: nothing else runs on its network card
MAX_NODES = 250
_START_S = 30.0
_ANSWER_S = 20.0


# --- rates, delays, cores -----------------------------------------------------------------------------------------


def parse_rate(text: str) -> int | None:
    """Bits per second; None for `unlimited`. UserError for what is no rate."""
    if not isinstance(text, str):
        raise UserError(f"link rate {text!r} is not text, as in '100mbit'")
    if text == "unlimited":
        return None
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,12})?)(kbit|mbit|gbit)", text.strip().lower())
    if not match:
        raise UserError(
            f"link rate {text!r} is not understood: write a number and kbit, mbit or gbit "
            "(100mbit, 1gbit, 2.5gbit), or unlimited"
        )
    rate = round(float(match[1]) * {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}[match[2]])
    if not 64_000 <= rate <= 32_000_000_000:
        raise UserError(f"link rate {text!r} cannot be emulated: choose 64kbit to 32gbit, or unlimited")
    return rate


def parse_delay(text: str | None) -> float:
    """Seconds; 0 for None. UserError for what is no delay."""
    if text is None:
        return 0.0
    if not isinstance(text, str):
        raise UserError(f"delay {text!r} is not text, as in '1ms'")
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,12})?)(us|ms|s)", text.strip().lower())
    if not match:
        raise UserError(f"delay {text!r} is not understood: write a number and us, ms or s, as in 1ms or 500us")
    seconds = float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]]
    if seconds > 10:
        raise UserError(f"delay {text!r} is more than 10 s")
    return seconds


def share_cores(cores: Sequence[int], nodes: int, cores_per_node: int | None) -> tuple[list[list[int]], str | None]:
    """Which cores each node gets, and a warning where two nodes must share some (pure)."""
    each = cores_per_node or max(1, len(cores) // nodes)
    if each > len(cores):
        raise UserError(f"cores_per_node is {each}, but only {len(cores)} cores are usable here")
    shares = [sorted({cores[(node * each + i) % len(cores)] for i in range(each)}) for node in range(nodes)]
    warning = None
    if each * nodes > len(cores):
        warning = (
            f"{nodes} nodes of {each} core{'s' if each > 1 else ''} share the {len(cores)} usable cores here: "
            "what one node computes slows another, and shows as contention"
        )
    return shares, warning


# --- the cluster --------------------------------------------------------------------------------------------------


class NodeProcess:
    """A command that runs on a node, in a session of its own."""

    def __init__(self, node: "Node", number: int, status: int):
        self.node = node
        self.number = number  # on the node
        self.returncode: int | None = None  # negative: the signal that ended it
        self._status = status

    def fileno(self) -> int:
        """Readable when the command has ended (for select)."""
        return self._status

    def wait(self, timeout_s: float | None = None) -> int:
        """The exit code; negative where a signal ended it. TimeoutError when it runs for longer."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout_s)[0]:
                raise TimeoutError(f"the command on {self.node.name} still runs after {timeout_s} s")
            # Nothing to read: the node went away with all that ran on it.
            self.returncode = int(os.read(self._status, 32) or -signal.SIGKILL)
            os.close(self._status)
        return self.returncode

    def __del__(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(OSError):
                os.close(self._status)

    def signal(self, number: int) -> None:
        """Sends a signal to the command's process group, as a terminal's Ctrl-C would."""
        if self.returncode is None:
            with contextlib.suppress(NodeGone):
                self.node.request({"do": "signal", "process": self.number, "signal": int(number)})

    def kill(self) -> None:
        self.signal(signal.SIGKILL)


class NodeGone(RuntimeError):
    """The node was killed, or the cluster is closed."""


class Node:
    """One emulated machine: what runs on it, and its cable to the switch."""

    def __init__(self, cluster: "EmulatedCluster", rank: int, name: str, address: str, cores: list[int]):
        self.cluster = cluster
        self.rank = rank
        self.name = name
        self.address = address
        self.cores = cores
        self.link = cluster.link
        self._connection: socket.socket | None = None
        self._one_at_a_time = threading.Lock()

    @property
    def environment(self) -> dict[str, str]:
        """What launchers look for, and what says which node this is."""
        cluster = self.cluster
        return {
            "NNODES": str(len(cluster.nodes)),
            "NODE_RANK": str(self.rank),
            "MASTER_ADDR": cluster.nodes[0].name if cluster.shaped else cluster.nodes[0].address,
            "MASTER_PORT": str(cluster.master_port),
            "GLOO_SOCKET_IFNAME": INTERFACE if cluster.shaped else _loopback(),
            "BIREME_NODE": self.name,
            "BIREME_LINK": self.link if cluster.shaped else UNSHAPED,
            **({"BIREME_DELAY": cluster.delay} if cluster.delay and cluster.shaped else {}),
        }

    def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
    ) -> NodeProcess:
        """Starts a command on this node: the node's variables over this process's, and `env` over both.

        Its output goes where this process's goes, unless files are given (subprocess.DEVNULL: nowhere). UserError when
        it cannot be started.
        """
        inherited = {name: value for name, value in os.environ.items() if not _LAUNCHERS.match(name)}
        if isinstance(command, str) or not command:
            raise UserError(f"a command is a list of words, not {command!r}")
        words = [str(part) for part in command]
        try:
            directory = str(cwd or Path.cwd())
        except FileNotFoundError:
            raise UserError("the working directory does not exist any more: change to one that does") from None
        environment = {**inherited, **self.environment, **(env or {})}
        message = {
            "do": "start",
            "command": [_encoded(word) for word in words],
            "environment": {_encoded(name): _encoded(value) for name, value in environment.items()},
            "directory": _encoded(directory),
        }
        if sys.stdout is not None:  # closed by the caller's shell
            sys.stdout.flush()
        ended, status = os.pipe()
        with Path(os.devnull).open("r+") as nothing:
            outputs = [_descriptor(stdout, 1), _descriptor(stderr, 2)]
            outputs = [nothing.fileno() if each == subprocess.DEVNULL else each for each in outputs]
            descriptors = [nothing.fileno(), *outputs, status]
            try:
                answer = self.request(message, descriptors)
            except BaseException as error:
                os.close(ended)
                if isinstance(error, OSError):
                    raise UserError(f"{self.name} cannot start {words[0]!r}: {error.strerror}") from None
                raise
            finally:
                os.close(status)
        return NodeProcess(self, answer["process"], ended)

    def set_link(self, rate: str) -> None:
        """Changes the rate of this node's link, both ways, while things run."""
        bits_per_s = parse_rate(rate)
        self._need_network("set the rate of")
        self.request({"do": "shape", "bits_per_s": bits_per_s, "delay_s": parse_delay(self.cluster.delay)})
        self.cluster.request({"do": "shape", "node": self.rank, "bits_per_s": bits_per_s})
        self.link = rate

    def cut(self) -> None:
        """Pulls the node's cable: nothing arrives and nothing is answered."""
        self._need_network("cut")
        self.cluster.request({"do": "down", "node": self.rank})

    def restore(self) -> None:
        """Puts the cable back."""
        self._need_network("restore")
        self.cluster.request({"do": "up", "node": self.rank})

    def stop(self) -> None:
        """Freezes everything that runs on the node, as SIGSTOP does; its kernel still answers."""
        self.request({"do": "signal all", "signal": int(signal.SIGSTOP)})

    def resume(self) -> None:
        """Lets a stopped node go on."""
        self.request({"do": "signal all", "signal": int(signal.SIGCONT)})

    def kill(self) -> None:
        """Power loss: everything on the node is gone at once, and its peers hear nothing more from it."""
        if self._connection is None:
            return
        if self.cluster.shaped:
            self.cut()
        with self._one_at_a_time, contextlib.suppress(OSError, EOFError):
            send(self._connection, {"do": "power off"})
            receive(self._connection)  # ends with the node
        self.close()

    def close(self) -> None:
        if self._connection is not None:
            _shut(self._connection)
            self._connection = None

    def request(self, message: dict[str, Any], descriptors: list[int] | None = None) -> dict[str, Any]:
        """Asks the node's first process to do something. OSError with its reason when it could not; NodeGone."""
        if self._connection is None:
            raise NodeGone(f"{self.name} is not running")
        with self._one_at_a_time:
            return _ask(self._connection, self.name, message, descriptors)

    def _need_network(self, what: str) -> None:
        if self._connection is None:
            raise NodeGone(f"{self.name} is not running")
        if not self.cluster.shaped:
            raise UserError(f"cannot {what} the link of {self.name}: the nodes are unshaped ({self.cluster.reason})")


class EmulatedCluster:
    """Machines on one switch, as a context manager; every node's link is limited in both directions.

    Where network namespaces are refused the nodes are plain processes on loopback: `shaped` is False, `reason` says
    why, and their environment says BIREME_LINK=unshaped. UserError for sizes and rates that cannot be.
    """

    def __init__(
        self,
        nodes: int = 2,
        link: str = "1gbit",
        cores_per_node: int | None = None,
        delay: str | None = None,
    ):
        if type(nodes) is not int or not 1 <= nodes <= MAX_NODES:
            raise UserError(f"nodes is {nodes}: choose 1 to {MAX_NODES}")
        if cores_per_node is not None and cores_per_node < 1:
            raise UserError(f"cores_per_node is {cores_per_node}: a node needs at least one core")
        parse_rate(link)
        parse_delay(delay)
        self.link = link
        self.delay = delay
        self.shaped = False
        self.reason: str | None = None
        self.master_port = MASTER_PORT
        shares, self.warning = share_cores(usable_cores(), nodes, cores_per_node)
        self.nodes = [Node(self, rank, f"node{rank}", "", cores) for rank, cores in enumerate(shares)]
        self._control: socket.socket | None = None
        self._keeper: subprocess.Popen[bytes] | None = None
        self._one_at_a_time = threading.Lock()

    def node(self, rank: int) -> Node:
        return self.nodes[rank]

    def start(self) -> Self:
        """Makes the machines; `with` does it."""
        if self._keeper is not None:
            raise RuntimeError("the cluster is running already")
        try:
            if sys.platform != "linux":
                raise _Refused(f"network namespaces need Linux, this is {sys.platform}")
            self._start(namespaces=True)
            self.shaped = True
        except _Refused as refused:
            self.reason = str(refused)
            if self.delay:
                raise UserError(f"a delay of {self.delay} cannot be emulated: {self.reason}") from None
            self.master_port = free_port()
            self._start(namespaces=False)
        return self

    def close(self) -> None:
        """Ends everything that runs on the nodes, and the nodes."""
        for node in self.nodes:
            node.close()
        if self._control is not None:
            _shut(self._control)
            self._control = None
        if self._keeper is not None:
            try:
                self._keeper.wait(timeout=15)
            except subprocess.TimeoutExpired:
                self._keeper.kill()
                self._keeper.wait()
            self._keeper = None

    def request(self, message: dict[str, Any]) -> dict[str, Any]:
        """Asks the switch to do something."""
        if self._control is None:
            raise NodeGone("the cluster is not running")
        with self._one_at_a_time:
            return _ask(self._control, "the switch", message)

    def _start(self, namespaces: bool) -> None:
        for node in self.nodes:
            node.address = f"10.118.0.{node.rank + 1}" if namespaces else "127.0.0.1"
        pairs = [socket.socketpair() for _ in range(len(self.nodes) + 1)]
        theirs = [pair[1].fileno() for pair in pairs]
        # A session of its own: Ctrl-C is for this process, which tells the commands.
        self._keeper = subprocess.Popen(
            [sys.executable, "-P", "-m", "bireme.namespaces", *map(str, theirs)],
            pass_fds=theirs,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        for _, their_end in pairs:
            their_end.close()
        self._control = pairs[0][0]
        for node, (ours, _) in zip(self.nodes, pairs[1:], strict=True):
            node._connection = ours
        plan = {
            "namespaces": namespaces,
            "bits_per_s": parse_rate(self.link),
            "delay_s": parse_delay(self.delay),
            # The second form is what a socket for both IP versions reports: without its name PyTorch warns.
            "hosts": "".join(f"{node.address} {node.name}\n::ffff:{node.address} {node.name}\n" for node in self.nodes),
            "nodes": [{"name": node.name, "address": node.address, "cores": node.cores} for node in self.nodes],
        }
        try:
            send(self._control, plan)
            for connection in [self._control, *(node._connection for node in self.nodes)]:
                assert connection is not None
                connection.settimeout(_START_S)
                _started(connection)
                connection.settimeout(None)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Refused(Exception):
    """This system does not let us make the machines."""


def _started(connection: socket.socket) -> None:
    try:
        answer, _ = receive(connection)
    except TimeoutError:
        raise UserError(f"the emulated nodes were not ready in {_START_S:.0f} s: is the machine overloaded?") from None
    except EOFError:
        raise _Refused("the process that makes the nodes ended; its message is above") from None
    if "error" not in answer:
        return
    if answer["kind"] == "NoNetem":
        raise UserError(f"{answer['error']}: leave out the delay, or load the module")
    number = answer["errno"]
    if number in (errno.ENOSPC, errno.EUSERS):
        reason = "no more network namespaces are allowed here (/proc/sys/user/max_net_namespaces)"
    elif number in (errno.EPERM, errno.EACCES):
        reason = f"network namespaces are not permitted here ({answer['error']})"
        if Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns").exists() and os.geteuid() != 0:
            reason += "; sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0 permits them"
    elif number is not None or answer["kind"] == "ImportError":
        reason = f"this system cannot make network namespaces with limited links ({answer['error']})"
    else:
        raise RuntimeError(f"the emulated nodes could not be made: {answer['kind']}: {answer['error']}")
    raise _Refused(reason)


def _shut(connection: socket.socket) -> None:
    """Also where a forked child still holds it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _ask(
    connection: socket.socket, who: str, message: dict[str, Any], descriptors: list[int] | None = None
) -> dict[str, Any]:
    connection.settimeout(_ANSWER_S)
    try:
        send(connection, message, descriptors)
        answer, _ = receive(connection)
    except TimeoutError:
        raise NodeGone(f"{who} does not answer") from None
    except (ConnectionError, EOFError):
        raise NodeGone(f"{who} is gone") from None
    finally:
        connection.settimeout(None)
    if "error" in answer:
        raise OSError(answer["errno"] or 0, answer["error"])
    return answer


def _encoded(text: str) -> str:
    """Bytes as a message can carry them: names and values need not be UTF-8."""
    return os.fsencode(text).decode("latin-1")


def _descriptor(file: int | IO[Any] | None, standard: int) -> int:
    if file is None:
        return standard
    return file if isinstance(file, int) else file.fileno()


def _loopback() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), names[0])


# A node is a machine of its own: what the launcher of this process says does not hold there.
_LAUNCHERS = re.compile(
    "(RANK|WORLD_SIZE|LOCAL_RANK|NODE_RANK|NNODES|(LOCAL|GROUP|ROLE)_(RANK|WORLD_SIZE|NAME)|GROUP_WORLD_SIZE)$"
    "|(TORCHELASTIC|PET|MASTER|SLURM|PMI|PMIX|OMPI)_|(GLOO|NCCL|TP)_SOCKET_IFNAME$"
)


# --- torchrun on nodes -------------------------------------------------------------------------------------------


def torchrun_command(node: Node, ranks: int, command: Sequence[str]) -> list[str]:
    """torchrun on one node, with the static rendezvous: node 0 hosts it and has the first ranks."""
    env = node.environment
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *(f"--nnodes={env['NNODES']}", f"--node-rank={node.rank}", f"--nproc-per-node={ranks}"),
        *(f"--master-addr={env['MASTER_ADDR']}", f"--master-port={env['MASTER_PORT']}"),
        *command,
    ]


def parse_ranks(text: str, nodes: int) -> list[int]:
    """Ranks on each node: `2` for all, or one number a node as in `1,2`."""
    try:
        ranks = [int(each) for each in text.split(",")]
    except ValueError:
        ranks = []
    if not ranks or min(ranks) < 1:
        raise UserError(f"--torchrun {text!r} is not a number of ranks: write 2, or 1,2 for unequal nodes")
    if len(ranks) == 1:
        return ranks * nodes
    if len(ranks) != nodes:
        raise UserError(f"--torchrun {text} is for {len(ranks)} nodes, and there are {nodes}")
    return ranks


def why_unshaped() -> str | None:
    """Why nodes would be plain processes on loopback here; None where they can be machines. Takes half a second."""
    with EmulatedCluster(nodes=1) as cluster:
        return cluster.reason


def wait_for_all(
    processes: Sequence[NodeProcess],
    turn: Callable[[], Sequence[int]],
    failed: Callable[[NodeProcess, bool], None] = lambda process, others_run: None,
    grace_s: float = 15.0,
    kill_after_s: float = 5.0,
) -> NodeProcess | None:
    """Waits for commands on several nodes; returns the first that failed. The others then have `grace_s`.

    `turn` is called several times a second and returns signals for those that still run; `failed(process, others_run)`
    once, when the first one fails.
    """
    waiting = list(processes)
    first: NodeProcess | None = None
    to_send: list[tuple[float, int]] = []  # when, and which signal
    while waiting:
        ended = select.select(waiting, [], [], 0.2)[0]
        waiting = [process for process in waiting if process not in ended]
        for process in ended:
            if process.wait() and first is None:
                first = process
                failed(process, bool(waiting))
                end = time.monotonic() + grace_s
                to_send += [(end, signal.SIGTERM), (end + kill_after_s, signal.SIGKILL)]
        now = time.monotonic()
        to_send += [(now, number) for number in turn()]
        for _, number in [due for due in to_send if due[0] <= now]:
            for process in waiting:
                process.signal(number)
        to_send = [later for later in to_send if later[0] > now]
    return first


def how_it_ended(process: NodeProcess) -> str:
    """``node1 ended with exit code 3``, or by which signal."""
    code = process.wait()
    return f"{process.node.name} ended with " + (f"exit code {code}" if code > 0 else f"signal {-code}")
