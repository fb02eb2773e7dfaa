"""The processes behind emulated nodes: one keeps the switch; one a node is the machine, and starts what runs there.

`bireme.nodes` starts `python -m bireme.namespaces FD FD...`: the ends of one socket for the switch and one for each
node. Nothing here has a name outside: namespaces, network cards and mounts live as long as these processes, and these
live as long as the other ends of their sockets are open. So a parent that is killed leaves nothing behind:

    parent --socket--> switch: own network namespace, holds the bridge
      |                  +-- holder of node 0 --- node 0: process 1 of its own PID, network, mount, host name namespace
      +----socket----------------------------------^      +-- the commands
"""

import contextlib
import ctypes
import errno
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import orjson
import psutil

INTERFACE = "eth0"  # every node's network card
PREFIX_LENGTH = 16

_NEW_MOUNTS, _NEW_HOST_NAME, _NEW_IPC = 0x00020000, 0x04000000, 0x08000000
_NEW_USER, _NEW_PID, _NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36
_MOUNT_NOSUID, _MOUNT_NODEV, _MOUNT_NOEXEC, _MOUNT_BIND, _MOUNT_RECURSIVE, _MOUNT_PRIVATE = (
    2,
    4,
    8,
    4096,
    16384,
    1 << 18,
)
_UNMOUNT_DETACH = 2

# The token bucket lets this much time's worth of bytes through at once. More would flatter small messages.
_BURST_S = 0.0015
_LEAST_BURST_BYTES = 16 * 1024
# TCP sends segments of up to 64 KiB. What is larger than the bucket, with a header for each packet in it, the kernel
# cuts up first, on the cores that train: at 200 Mbit/s and below a quarter of an overlapped step was contention, and at
# 400 Mbit/s an all-reduce reached 80 % of the link instead of 93 %. So TCP is told the largest that fits.
_SEGMENT_BYTES = 64 * 1024
_FRAME_BYTES = 1514
_OF_BURST = 0.9
_QUEUE_S = 0.05  # a switch's buffer: what waits longer is dropped, and TCP slows down

_libc = ctypes.CDLL(None, use_errno=True)


# --- messages: one JSON line each way, a request with the descriptors it passes -----------------------------------


def send(connection: socket.socket, message: dict[str, Any], descriptors: list[int] | None = None) -> None:
    line = orjson.dumps(message) + b"\n"
    sent = socket.send_fds(connection, [line], descriptors) if descriptors else 0
    connection.sendall(line[sent:])


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The next message and its descriptors. EOFError when the other side is gone."""
    line, descriptors = b"", []
    while not line.endswith(b"\n"):
        try:
            part, passed, _, _ = socket.recv_fds(connection, 1 << 16, 8)
        except ConnectionError:
            part, passed = b"", []
        descriptors += passed
        if not part:
            raise EOFError
        line += part
    return orjson.loads(line), descriptors


# --- system calls that Python 3.11 has no name for ----------------------------------------------------------------


def _system_call(name: str, *arguments: Any) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    _system_call("mount", source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())


def _die_with_parent() -> None:
    _system_call("prctl", _SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def _enter_user_namespace() -> None:
    """Becomes root of a namespace in which everything else may be made without being root outside."""
    uid, gid = os.geteuid(), os.getegid()
    _system_call("unshare", _NEW_USER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")


def _new_network() -> None:
    if os.geteuid() == 0:
        try:
            _system_call("unshare", _NEW_NETWORK)
            return
        except OSError as error:
            if error.errno != errno.EPERM:  # root in a container without the capability: try as anybody else
                raise
    _enter_user_namespace()
    _system_call("unshare", _NEW_NETWORK)


# --- links --------------------------------------------------------------------------------------------------------


def shape(interface: str, bits_per_s: int | None, delay_s: float) -> None:
    """Limits what leaves through an interface; None: no limit."""
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    with IPRoute() as route:
        index = route.link_lookup(ifname=interface)[0]
        with contextlib.suppress(NetlinkError):  # there is nothing to delete the first time
            route.tc("del", index=index, root=True)
        segment, queue = _SEGMENT_BYTES, 0
        if bits_per_s is not None:
            burst = max(int(bits_per_s / 8 * _BURST_S), _LEAST_BURST_BYTES)
            queue = int(bits_per_s / 8 * (_QUEUE_S + delay_s)) + 2 * 64 * 1024
            route.tc("add", "tbf", index=index, handle=0x10000, rate=bits_per_s // 8, burst=burst, limit=queue)
            segment = min(segment, int(burst * _OF_BURST))
        with contextlib.suppress(NetlinkError):  # kernels before 4.16 cannot be told
            route.link("set", index=index, gso_max_size=segment)
        if delay_s:
            place = {"parent": 0x10001, "handle": 0x20000} if bits_per_s is not None else {"handle": 0x20000}
            try:
                # netem takes the place of the bucket's queue, and counts packets.
                packets = 100_000 if bits_per_s is None else queue // _FRAME_BYTES
                route.tc("add", "netem", index=index, delay=int(delay_s * 1e6), limit=packets, **place)
            except NetlinkError as error:
                if error.code != errno.ENOENT:
                    raise
                raise NoNetem("this kernel cannot delay packets (it has no netem: module sch_netem)") from None


class NoNetem(Exception):
    """Delays cannot be emulated here; links without delay can."""


# --- the switch ---------------------------------------------------------------------------------------------------


def keep_cluster(control: socket.socket, nodes: list[socket.socket]) -> None:
    """Makes the machines that the first message describes and keeps them while the sockets are open."""
    parent = os.getppid()
    plan, _ = receive(control)
    shaped = plan["namespaces"]
    if shaped:
        _new_network()
        _add_bridge()
    elif sys.platform == "linux":
        _system_call("prctl", _SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    holders: list[int] = []
    for number, (node, connection) in enumerate(zip(plan["nodes"], nodes, strict=True)):
        holders.append(_start_holder(plan, node, number, connection, [control, *nodes[number + 1 :]]))
        connection.close()
    send(control, {"ready": True})
    with contextlib.suppress(EOFError):
        while _wait_readable(control, parent):
            request, _ = receive(control)
            _answer(control, partial(_serve_switch, request))
    control.close()
    _end_holders(holders)


def _wait_readable(connection: socket.socket, parent: int) -> bool:
    """Until there is a message; False when the parent is gone (its end of the socket may live on in its children)."""
    while not select.select([connection], [], [], 1.0)[0]:
        if os.getppid() != parent:
            return False
    return True


def _add_bridge() -> None:
    from pyroute2 import IPRoute

    with IPRoute() as route:
        route.link("add", ifname="switch", kind="bridge")
        route.link("set", index=route.link_lookup(ifname="switch")[0], state="up")


def _plug_in(number: int, holder: int, plan: dict[str, Any]) -> None:
    """A cable from the switch to the network card of a node."""
    from pyroute2 import IPRoute

    port = f"port{number}"
    with IPRoute() as route:
        route.link("add", ifname=port, kind="veth", peer={"ifname": INTERFACE, "net_ns_pid": holder})
        index = route.link_lookup(ifname=port)[0]
        route.link("set", index=index, master=route.link_lookup(ifname="switch")[0], state="up")
    shape(port, plan["bits_per_s"], 0.0)


def _serve_switch(request: dict[str, Any]) -> None:
    from pyroute2 import IPRoute

    port = f"port{request['node']}"
    if request["do"] == "shape":
        shape(port, request["bits_per_s"], 0.0)
    else:
        with IPRoute() as route:
            route.link("set", index=route.link_lookup(ifname=port)[0], state=request["do"])  # "up" or "down"


def _end_holders(holders: list[int]) -> None:
    """Every node ends by itself when its socket closes; who does not is killed."""

    def killed(*_: Any) -> None:
        for holder in holders:
            with contextlib.suppress(ProcessLookupError):
                os.kill(holder, signal.SIGKILL)

    signal.signal(signal.SIGALRM, killed)
    signal.alarm(5)
    for holder in holders:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(holder, 0)
    # Without namespaces, what a killed node leaves comes here.
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


# --- one node -----------------------------------------------------------------------------------------------------


def _start_holder(
    plan: dict[str, Any], node: dict[str, Any], number: int, connection: socket.socket, not_ours: list[socket.socket]
) -> int:
    """Forks the holder: what it makes exists for the node's first process, which is its child."""
    theirs, ours = socket.socketpair()
    holder = os.fork()
    if holder == 0:
        _run_child(lambda: _hold_node(plan, node, connection, [theirs, *not_ours], ours))
    ours.close()
    with theirs:
        if theirs.recv(1) == b"1" and plan["namespaces"]:  # its namespaces are there: plug the card in
            _plug_in(number, holder, plan)
            theirs.sendall(b"1")
    return holder


def _run_child(body: Callable[[], int]) -> None:
    code = 1
    try:
        code = body()
    finally:
        os._exit(code)


def _hold_node(
    plan: dict[str, Any],
    node: dict[str, Any],
    connection: socket.socket,
    not_ours: list[socket.socket],
    switch: socket.socket,
) -> int:
    for other in not_ours:
        other.close()
    try:
        if plan["namespaces"]:
            _die_with_parent()
            _system_call("unshare", _NEW_NETWORK | _NEW_PID | _NEW_MOUNTS | _NEW_HOST_NAME | _NEW_IPC)
            switch.sendall(b"1")
            if switch.recv(1) != b"1":
                raise OSError("the switch did not plug the node in")
    except Exception as error:
        send(connection, _failure(error))
        return 1
    switch.close()
    first = os.fork()
    if first == 0:
        _run_child(lambda: _run_node(plan, node, connection))
    connection.close()
    return os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])


def _run_node(plan: dict[str, Any], node: dict[str, Any], connection: socket.socket) -> int:
    """The node's first process: makes the machine, then starts commands in it until its socket closes."""
    try:
        if plan["namespaces"]:
            _die_with_parent()
            _make_machine(plan, node)
        elif sys.platform == "linux":
            _system_call("prctl", _SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, node["cores"])
    except Exception as error:
        send(connection, _failure(error))
        return 1
    send(connection, {"ready": True})
    _Commands(connection, alone=plan["namespaces"]).serve()
    return 0


def _failure(error: Exception) -> dict[str, Any]:
    number = getattr(error, "errno", getattr(error, "code", None))  # of the system, or of netlink
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return {"error": text or type(error).__name__, "kind": type(error).__name__, "errno": number}


def _make_machine(plan: dict[str, Any], node: dict[str, Any]) -> None:
    from pyroute2 import IPRoute

    socket.sethostname(node["name"])
    _mount("none", "/", "none", _MOUNT_RECURSIVE | _MOUNT_PRIVATE)
    # The file for /etc/hosts lives in a memory file system that only this node sees, and that goes with it.
    _mount("hosts", "/tmp", "tmpfs", 0, "size=1m")
    Path("/tmp/hosts").write_text("127.0.0.1 localhost\n::ffff:127.0.0.1 localhost\n::1 localhost\n" + plan["hosts"])
    if Path("/etc/hosts").exists():
        _mount("/tmp/hosts", "/etc/hosts", "none", _MOUNT_BIND)
    _system_call("umount2", b"/tmp", _UNMOUNT_DETACH)
    _mount("proc", "/proc", "proc", _MOUNT_NOSUID | _MOUNT_NODEV | _MOUNT_NOEXEC)  # with the node's own process numbers
    if Path("/dev/shm").is_dir():
        _mount("shm", "/dev/shm", "tmpfs", _MOUNT_NOSUID | _MOUNT_NODEV, "mode=1777")
    with IPRoute() as route:
        for name in ("lo", INTERFACE):
            index = route.link_lookup(ifname=name)[0]
            if name == INTERFACE:
                route.addr("add", index=index, address=node["address"], prefixlen=PREFIX_LENGTH)
            route.link("set", index=index, state="up")
    shape(INTERFACE, plan["bits_per_s"], plan["delay_s"])


class _Commands:
    """What runs on a node. `alone`: the node has its own process numbers, and this is its process 1."""

    def __init__(self, connection: socket.socket, alone: bool):
        self.connection = connection
        self.alone = alone
        self.status_of: dict[int, int] = {}  # process -> where to write its exit code
        self.started: list[subprocess.Popen[bytes]] = []  # kept, so that Python does not reap behind our back

    def serve(self) -> None:
        child_ended, wake_up = os.pipe()
        for descriptor in (child_ended, wake_up):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wake_up, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _no_action)
        try:
            while True:
                readable, _, _ = select.select([self.connection.fileno(), child_ended], [], [])
                if child_ended in readable:
                    with contextlib.suppress(BlockingIOError):
                        os.read(child_ended, 4096)
                    self.reap()
                if self.connection.fileno() in readable:
                    request, descriptors = receive(self.connection)
                    if request["do"] == "power off":
                        return
                    _answer(self.connection, partial(self.do, request, descriptors))
        except EOFError:
            return
        finally:
            if not self.alone:
                self.signal_all(signal.SIGKILL)

    def do(self, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any] | None:
        if request["do"] == "start":
            return {"process": self.start(request, descriptors)}
        if request["do"] == "signal":
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(request["process"], request["signal"])
        elif request["do"] == "signal all":
            self.signal_all(request["signal"])
        elif request["do"] == "shape":
            shape(INTERFACE, request["bits_per_s"], request["delay_s"])
        return None

    def start(self, request: dict[str, Any], descriptors: list[int]) -> int:
        stdin, stdout, stderr, status = descriptors
        try:
            process = subprocess.Popen(
                [_decoded(word) for word in request["command"]],
                env={_decoded(name): _decoded(value) for name, value in request["environment"].items()},
                cwd=_decoded(request["directory"]),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        except BaseException:
            os.close(status)
            raise
        finally:
            for descriptor in (stdin, stdout, stderr):
                os.close(descriptor)
        self.started.append(process)
        self.status_of[process.pid] = status
        return process.pid

    def reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                process, status = os.waitpid(-1, os.WNOHANG)
                if not process:
                    return
                code = os.waitstatus_to_exitcode(status)
                for started in self.started:
                    if started.pid == process:
                        started.returncode = code
                self.started = [each for each in self.started if each.returncode is None]
                if process in self.status_of:
                    descriptor = self.status_of.pop(process)
                    with contextlib.suppress(OSError):  # nobody waits for it
                        os.write(descriptor, str(code).encode())
                    os.close(descriptor)

    def signal_all(self, number: int) -> None:
        if self.alone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, number)  # everything on this node but this process
            return
        while processes := psutil.Process().children(recursive=True):
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
            if number != signal.SIGKILL:
                return
            psutil.wait_procs(processes, timeout=5)
            self.reap()


def _decoded(text: str) -> str:
    """What nodes._encoded sent."""
    return os.fsdecode(text.encode("latin-1"))


def _no_action(number: int, frame: FrameType | None) -> None:
    """A handler that does nothing: it lets the wake-up descriptor be written, and ends at exec."""


def _answer(connection: socket.socket, action: Callable[[], dict[str, Any] | None]) -> None:
    try:
        answer = action() or {}
    except Exception as error:
        answer = _failure(error)
    send(connection, {"ready": True, **answer})


def main(descriptors: list[str]) -> None:
    # Ctrl-C is for the parent, which tells the commands. (An ignored signal would be ignored by them, too.)
    signal.signal(signal.SIGINT, _no_action)
    control, *nodes = [socket.socket(fileno=int(each)) for each in descriptors]
    for each in (control, *nodes):
        each.set_inheritable(False)
    try:
        keep_cluster(control, nodes)
    except EOFError:
        pass
    except Exception as error:
        with contextlib.suppress(OSError):
            send(control, _failure(error))


if __name__ == "__main__":
    main(sys.argv[1:])
