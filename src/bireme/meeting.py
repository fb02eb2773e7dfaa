"""Where the ranks of a job meet: waiting for the store, telling jobs apart, calling the roll, sharing messages."""

import itertools
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import orjson
import torch.distributed as dist

from bireme.environment import Launch, run_id
from bireme.errors import SharedError, UserError
from bireme.network import Endpoint, is_loopback, local_address_towards, port_owner, resolve
from bireme.text import name_ranks

log = logging.getLogger(__name__)

_SAY_AFTER_S = 5.0
_STRANGER_S = 4.0  # for the meeting point's owner to say which job it is
_LAST_WORD_S = 3.0  # for the others to read why everybody stops, before the store ends with rank 0
# With several nodes and a loopback address, for somebody to listen here. torchrun's agent does so before its ranks
# start; a person who tries two "nodes" in two terminals needs some seconds.
_AGENT_LISTENS_S, _PERSON_STARTS_S = 2.0, 10.0
_REFUSED = 1 << 40  # added to the count of arrivals: somebody was refused
_joins = itertools.count()


class Meeting:
    """All ranks of a launch, present at one store. `store` is this attempt's own part of it.

    UserError, naming the address and who is missing or wrong, when they do not come together in `timeout_s`.
    Rank 0's process hosts the store (or torchrun's agent does): it is open as long as this object lives.
    """

    def __init__(self, launch: Launch, timeout_s: float, person: str, environ: Mapping[str, str] = os.environ):
        """`person`: how other ranks shall read of this process, as in ``process 7 on node laptop``."""
        self.launch = launch
        self._environ = environ
        self.where = str(Endpoint(launch.master_address, launch.master_port))
        self.timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        self._server: Any = None
        job = {"run": run_id(environ), "size": 0 if launch.agent_store else launch.size}
        hosts_store = launch.rank == 0 and not launch.agent_store
        if hosts_store:
            self._server = self._open("127.0.0.1", True)
            self._server.set("bireme/job", orjson.dumps(job).decode())
        self._await_listener(hosts_store)
        # Every opened store costs PyTorch a question to the name service, which may be seconds away.
        own = hosts_store and _is_here(launch.master_address)
        store = self._server if own else self._open(launch.master_address, False)
        if launch.rank == 0 and launch.num_nodes > 1:
            threading.Thread(target=self._excuse_warning, name="bireme-names", daemon=True).start()
        with self._lost_store():
            self._refuse_strangers(store, job)
            # Neither an earlier attempt of a restarted job nor an earlier world of this process is seen again.
            attempt = f"{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{launch.size}/{next(_joins)}"
            self.store = dist.PrefixStore(f"bireme/{job['run']}/{attempt}", store)
            self._call_the_roll(person)
        self.deadline = max(self.deadline, time.monotonic() + min(10.0, timeout_s))

    def left_s(self) -> float:
        return max(0.1, self.deadline - time.monotonic())

    def share(
        self, name: str, message: Any, stop: Callable[[list[Any]], str | None] = lambda messages: None
    ) -> list[Any]:
        """Everybody's message, by rank, on every rank: each writes one key and reads one, which rank 0 puts together.

        What `stop(messages)` says, on rank 0, is raised on every rank.
        """
        store, rank, size = self.store, self.launch.rank, self.launch.size
        with self._lost_store():
            store.set(f"{name}/{rank}", orjson.dumps(message).decode())
            if rank == 0:
                store.set(name, orjson.dumps(self._collect(name, stop)).decode())
            # Rank 0 gives up first: what it says is worth waiting for.
            store.set_timeout(timedelta(seconds=self.left_s() + (0 if rank == 0 else _LAST_WORD_S)))
            answer = orjson.loads(store.get(name))
            if answer["stop"]:
                self._last_word(name, size)
                raise SharedError(answer["stop"])
        messages: list[Any] = answer["messages"]
        return messages

    def _collect(self, name: str, stop: Callable[[list[Any]], str | None]) -> dict[str, Any]:
        keys = [f"{name}/{rank}" for rank in range(self.launch.size)]
        self.store.set_timeout(timedelta(seconds=self.left_s()))
        try:
            messages = [orjson.loads(each) for each in self.store.multi_get(keys)]
        except RuntimeError:
            missing = name_ranks([rank for rank, key in enumerate(keys) if not self.store.check([key])])
            return {"stop": f"{missing} came to {self.where} and then gave no answer: see what it printed"}
        return {"messages": messages, "stop": stop(messages)}

    def _last_word(self, name: str, size: int) -> None:
        """Rank 0 waits until the others have read why it stops."""
        read = self.store.add(f"{name}/read", 1)
        deadline = time.monotonic() + _LAST_WORD_S
        while self.launch.rank == 0 and read < size and time.monotonic() < deadline:
            time.sleep(0.02)
            read = self.store.add(f"{name}/read", 0)

    @contextmanager
    def _lost_store(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = str(error).splitlines()[0][:200]
            raise UserError(
                f"rank {self.launch.rank} lost the meeting point at {self.where} ({reason}): rank 0 ended, or the "
                "network between them did; see what rank 0 printed"
            ) from None

    # --- arriving ------------------------------------------------------------------------------------------------

    def _open(self, host: str, is_master: bool) -> Any:
        """A store; in a thread, as what listens there may be no store and never answer."""
        opened: list[Any] = []

        def open_it() -> None:
            try:
                opened.append(self._store(host, is_master))
            except BaseException as error:
                opened.append(error)

        thread = threading.Thread(target=open_it, name="bireme-store", daemon=True)
        thread.start()
        thread.join(self.left_s())
        if not opened:
            raise UserError(
                f"what listens at {self.where} is no rank 0 of Bireme: it does not answer; "
                "is another program using this port? Choose another MASTER_PORT"
            )
        if isinstance(opened[0], BaseException):
            raise opened[0]
        return opened[0]

    def _store(self, host: str, is_master: bool) -> Any:
        launch = self.launch
        try:
            return dist.TCPStore(
                host,
                launch.master_port,
                launch.size,
                is_master=is_master,
                timeout=timedelta(seconds=self.left_s()),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except (RuntimeError, ValueError) as error:
            if is_master and ("EADDRINUSE" in str(error) or "in use" in str(error)):
                owner = port_owner(launch.master_port)
                by = f" by {owner}" if owner else ""
                raise UserError(
                    f"port {launch.master_port} on {launch.master_address} is in use{by}: choose another MASTER_PORT"
                ) from None
            reason = str(error).splitlines()[0]
            raise UserError(f"rank {launch.rank} cannot meet the others at {self.where}: {reason}") from None

    def _await_listener(self, hosts_store: bool) -> None:
        """Waits until the master's name is known and somebody listens there: on a cluster that is just starting
        neither need be so yet. (The store's own client retries with pages of C++ frames.)"""
        launch = self.launch
        started = time.monotonic()
        say_at = started + _SAY_AFTER_S
        warned = False
        while True:
            try:
                socket.create_connection(
                    (launch.master_address, launch.master_port), timeout=min(_SAY_AFTER_S, self.left_s())
                ).close()
                break
            except OSError as error:
                now = time.monotonic()
                unknown = isinstance(error, socket.gaierror)
                if not unknown and not hosts_store and self._leads_nowhere():
                    self._refuse_loopback(now - started)
                    if not warned:
                        warned = True
                        self._say(
                            f"MASTER_ADDR={launch.master_address} is this machine itself, where nobody listens yet: "
                            "rank 0 must be started here too"
                        )
                if now > self.deadline:
                    raise UserError(self._unreachable(error, hosts_store)) from None
                if now > say_at:
                    say_at = now + _SAY_AFTER_S
                    what = f"for the name {launch.master_address}" if unknown else f"for rank 0 at {self.where}"
                    self._say(f"rank {launch.rank} waits {what} ({error})")
            time.sleep(0.1)
        if hosts_store and self._leads_nowhere():
            self._say(
                f"MASTER_ADDR={launch.master_address} is this machine itself: ranks on other machines cannot come here"
            )

    def _unreachable(self, error: OSError, hosts_store: bool) -> str:
        launch = self.launch
        if isinstance(error, socket.gaierror):
            return (
                f"MASTER_ADDR={launch.master_address} cannot be resolved on rank {launch.rank} in {self.timeout_s:.0f} "
                f"s: {error}; use rank 0's address in numbers, or see `bireme doctor`"
            )
        if hosts_store:
            return (
                f"rank 0 listens on port {launch.master_port}, but does not reach itself at {self.where} ({error}): "
                "is MASTER_ADDR an address of the machine that rank 0 runs on?"
            )
        return (
            f"rank {launch.rank} cannot reach rank 0 at {self.where} in {self.timeout_s:.0f} s ({error}): "
            "check MASTER_ADDR and MASTER_PORT, that rank 0 was started, and `bireme doctor`"
        )

    def _leads_nowhere(self) -> bool:
        """Whether several nodes are to meet at an address of which every machine has its own."""
        if self.launch.num_nodes == 1 or self._environ.get("BIREME_NODE"):
            return False
        try:
            return all(map(is_loopback, resolve(self.launch.master_address)))
        except OSError:
            return False

    def _refuse_loopback(self, waited_s: float) -> None:
        launch = self.launch
        if waited_s > min(_AGENT_LISTENS_S if launch.agent_store else _PERSON_STARTS_S, self.timeout_s):
            raise UserError(
                f"rank {launch.rank} finds nobody at {self.where}, which is this machine itself: rank 0 is on another "
                f"of the {launch.num_nodes} nodes; give every node an address by which all reach rank 0's "
                "(torchrun --rdzv-endpoint or --master-addr, or MASTER_ADDR)"
            )

    def _say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def _excuse_warning(self) -> None:
        try:
            address = resolve(self.launch.master_address)[0]
            if not is_loopback(address):
                socket.getnameinfo((address, self.launch.master_port), socket.NI_NAMEREQD)
        except OSError:
            log.info(
                "the nodes' addresses have no names here: PyTorch's warning that the hostname of the client socket "
                "cannot be retrieved is harmless"
            )

    def _refuse_strangers(self, store: Any, job: dict[str, Any]) -> None:
        """UserError at once when the store at this endpoint belongs to another job."""
        if self.launch.agent_store:
            found = store.compare_set("bireme/job", "", orjson.dumps(job).decode())
        else:
            deadline = time.monotonic() + _STRANGER_S
            while not store.check(["bireme/job"]):
                if time.monotonic() > deadline:
                    raise UserError(
                        f"what listens at {self.where} is no rank 0 of Bireme: "
                        "is another program using this port? Choose another MASTER_PORT"
                    )
                time.sleep(0.05)
            found = store.get("bireme/job")
        other = orjson.loads(found)
        if other != job:
            raise UserError(
                f"another job meets at {self.where}: {_describe(other)}, and this process (rank {self.launch.rank}) "
                f"belongs to {_describe(job)}; choose another port, or start all ranks with the same values"
            )

    def _call_the_roll(self, person: str) -> None:
        """Waits until every rank has come: by a counter, so that only a missing rank costs a question for each."""
        store, launch = self.store, self.launch
        who = f"{person} (number {os.urandom(4).hex()})"
        before = store.compare_set(f"here/{launch.rank}", "", who).decode()
        if before != who:
            other = before.rpartition(" (number")[0]
            problem = (
                f"two processes say they are rank {launch.rank} at {self.where}: {other}, and {person}: "
                "give each its own RANK (or NODE_RANK, or --node-rank)"
            )
            store.set("refused", problem)
            store.add("arrived", _REFUSED)
            raise UserError(problem)
        arrived = store.add("arrived", 1)
        say_at = time.monotonic() + _SAY_AFTER_S
        pause_s = 0.01
        while arrived < launch.size:
            now = time.monotonic()
            if now > min(self.deadline, say_at):
                missing = name_ranks([rank for rank in range(launch.size) if not store.check([f"here/{rank}"])])
                if now > self.deadline:
                    raise UserError(
                        f"{missing} of {launch.size} did not come to {self.where} in {self.timeout_s:.0f} s: "
                        "was every rank started with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT?"
                    )
                say_at = now + _SAY_AFTER_S
                self._say(f"rank {launch.rank} waits for {missing} at {self.where}")
            time.sleep(pause_s)
            pause_s = min(0.5, pause_s * 1.3)
            arrived = store.add("arrived", 0)
        if arrived >= _REFUSED:
            problem = store.get("refused").decode()
            self._last_word("refused", launch.size)
            raise SharedError(problem)


def _is_here(host: str) -> bool:
    """Whether a host's first address is one of this machine's."""
    try:
        address = resolve(host)[0]
    except OSError:
        return False
    return is_loopback(address) or local_address_towards(address) == address


def _describe(job: dict[str, Any]) -> str:
    name = f"run {job['run']!r}" if job["run"] else "a run without a name"
    return f"{name} of {job['size']} ranks" if job["size"] else name
