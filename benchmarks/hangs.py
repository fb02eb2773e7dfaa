"""Makes ranks of real runs fail in every way, and checks that the hang watch names who, where, when and why, in time.

    python benchmarks/hangs.py --seed 1                      # everything; about half an hour on two idle cores
    python benchmarks/hangs.py --only kill --settings "2 ranks" --trials 3

Each trial is a run of `bireme train` with one planted failure; whose turn it is, the step and the phase are drawn from
the seed. Right is a trial in which the diagnosis names what was planted within --stall-after + 5 s of it, every
process has ended as it should, and none is left. The ranks are forked from a process that has imported torch already.
Finished trials are kept in runs/benchmarks/hangs.json and not repeated for the same seed (--fresh repeats them), the
output of the wrong ones beside it. Exit code 1 when a trial was wrong.
"""

import argparse
import json
import os
import re
import select
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from rich.console import Console
from rich.table import Table

import bireme
from bireme.network import free_port
from bireme.nodes import MASTER_PORT, EmulatedCluster
from bireme.record import utc_now, write_json_atomic

if TYPE_CHECKING:
    from benchmarks import hang_trials
else:
    import hang_trials

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT.parent / "runs" / "benchmarks" / "hangs.json"
WRONG = ROOT.parent / "runs" / "benchmarks" / "hangs-wrong"

ENDS_WITHIN_S = 75.0
NOTHING_LEFT_WITHIN_S = 15.0  # the process that watches over all goes on for ten seconds without its rank


@dataclass
class Outcome:
    """How a trial went. `report_s`: from the planted moment to the diagnosis; None where there was none."""

    trial: hang_trials.Trial
    problem: str | None
    report_s: float | None
    ends_s: list[float | None]  # to the end of each rank
    codes: list[int | None]
    said: str
    seconds: float


# --- where ranks run ---------------------------------------------------------------------------------------------


class Places:
    """The residents that fork the ranks: one on this machine, one on each emulated node."""

    def __init__(self, scratch: Path, stack: ExitStack):
        self._scratch = scratch
        self._stack = stack
        self._lock = threading.Lock()
        self._ports = iter(range(MASTER_PORT + 1, 60000))
        self._machine: list[Path] = []
        self._cluster: EmulatedCluster | None = None
        self._cluster_sockets: list[Path] = []

    def sockets(self, nodes: int) -> list[Path]:
        """One for each machine; they are started when they are needed first."""
        with self._lock:
            if not nodes:
                self._machine = self._machine or [self._start_here()]
                return self._machine
            if self._cluster is None:
                self._cluster = self._stack.enter_context(EmulatedCluster(2))
                if not self._cluster.shaped:
                    raise SystemExit(f"hangs: there are no emulated nodes here: {self._cluster.reason}")
                for node in self._cluster.nodes:
                    path = self._scratch / f"{node.name}.socket"
                    node.start([sys.executable, str(ROOT / "resident.py"), str(path)], {"OMP_NUM_THREADS": "1"})
                    self._cluster_sockets.append(_there(path))
            return self._cluster_sockets

    def _start_here(self) -> Path:
        path = self._scratch / "here.socket"
        hidden = ("STRAGGLER_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "MASTER_")
        settings = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        command = [sys.executable, str(ROOT / "resident.py"), str(path)]
        process = subprocess.Popen(command, env=settings | {"OMP_NUM_THREADS": "1"}, start_new_session=True)
        self._stack.callback(process.wait)
        self._stack.callback(process.terminate)
        return _there(path)

    def address(self, nodes: int) -> dict[str, str]:
        if not nodes:
            return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
        with self._lock:
            return {"MASTER_PORT": str(next(self._ports))}

    def node_name(self, trial: hang_trials.Trial) -> str:
        return f"node{trial.rank // hang_trials.SETTINGS[trial.setting][1]}" if trial.nodes else socket.gethostname()


def _there(path: Path) -> Path:
    deadline = time.monotonic() + 120.0
    while not path.exists():
        if time.monotonic() > deadline:
            raise SystemExit(f"hangs: {path.name} did not start")
        time.sleep(0.05)
    return path


@contextmanager
def _connected(paths: Sequence[Path]) -> Iterator[list[socket.socket]]:
    """What they have started ends with the connections."""
    with ExitStack() as stack:
        connections = []
        for path in paths:
            connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            connection.connect(str(path))
            connections.append(connection)
        yield connections


# --- one trial ---------------------------------------------------------------------------------------------------


def run_trial(trial: hang_trials.Trial, places: Places, scratch: Path) -> Outcome:
    began_s = time.monotonic()
    folder = scratch / re.sub(r"\W+", "-", trial.name)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    codes: list[int | None] = [None] * trial.size
    ends_ns: list[int | None] = [None] * trial.size
    reported_ns: int | None = None
    with _connected(places.sockets(trial.nodes)) as connections:
        address = places.address(trial.nodes)
        ranks = hang_trials.SETTINGS[trial.setting][1]
        for rank in range(trial.size):
            place, local = divmod(rank, ranks)
            environment = {"RANK": str(rank), "WORLD_SIZE": str(trial.size), "LOCAL_RANK": str(local)}
            request = {
                "rank": rank,
                "environment": environment | {"LOCAL_WORLD_SIZE": str(ranks)} | address,
                "arguments": ["train", "--run-dir", str(folder / "run"), *trial.arguments],
                "output": str(folder / f"rank{rank}"),
                "planted": str(folder / "planted"),
            }
            connections[place].send(json.dumps(request).encode())
        deadline_s = began_s + ENDS_WITHIN_S + (60.0 if trial.kind == hang_trials.CHECKPOINT else 0.0)
        while None in codes and time.monotonic() < deadline_s:
            for connection in select.select(connections, [], [], 0.05)[0]:
                message = orjson.loads(connection.recv(1 << 16))
                codes[message["rank"]], ends_ns[message["rank"]] = message["code"], time.monotonic_ns()
            if reported_ns is None and hang_trials.findings(_text(folder / "rank0.err")):
                reported_ns = time.monotonic_ns()
        ended_ns = time.monotonic_ns()
        left = ["?"]
        while left and time.monotonic_ns() < ended_ns + NOTHING_LEFT_WITHIN_S * 1e9:
            if reported_ns is None and hang_trials.findings(_text(folder / "rank0.err")):
                reported_ns = time.monotonic_ns()
            left = [entry for connection in connections for entry in _left(connection)]
            time.sleep(0.05 if left else 0.0)
    planted = _text(folder / "planted")
    report_s = (reported_ns - int(planted)) / 1e9 if reported_ns and planted else None
    ends_s = [(each - int(planted)) / 1e9 if each and planted else None for each in ends_ns]
    said = hang_trials.findings(_text(folder / "rank0.err"))
    problems = [
        *([] if planted or trial.kind == hang_trials.CHECKPOINT else ["nothing was planted: the run failed before"]),
        *hang_trials.what_is_wrong(
            trial, places.node_name(trial), _text(folder / "rank0.err"), _hang_events(folder / "run"), codes
        ),
        *(
            [f"the diagnosis came after {report_s:.1f} s"]
            if report_s and report_s > hang_trials.REPORT_WITHIN_S
            else []
        ),
        *([f"left running: {', '.join(left)}"] if left else []),
    ]
    outcome = Outcome(
        trial,
        "; ".join(problems) or None,
        None if trial.kind == hang_trials.CHECKPOINT else report_s,
        ends_s,
        codes,
        said[-1] if said else "",
        time.monotonic() - began_s,
    )
    shutil.rmtree(WRONG / folder.name, ignore_errors=True)
    if problems:
        shutil.copytree(folder, WRONG / folder.name)
    shutil.rmtree(folder, ignore_errors=True)
    return outcome


def _left(connection: socket.socket) -> list[str]:
    connection.send(json.dumps({"left": True}).encode())
    while "left" not in (message := orjson.loads(connection.recv(1 << 16))):
        pass
    return [str(each) for each in message["left"]]


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _hang_events(run: Path) -> list[dict[str, Any]]:
    events = []
    for line in _text(run / "events.jsonl").splitlines():
        with suppress(orjson.JSONDecodeError):
            event = orjson.loads(line)
            if event.get("event") == "hang":
                events.append(event)
    return events


# --- the command -------------------------------------------------------------------------------------------------


def main() -> int:
    options = _options()
    console = Console(soft_wrap=True)
    known: dict[str, Any] = orjson.loads(RESULTS.read_bytes())["trials"] if RESULTS.exists() else {}
    wanted = [
        hang_trials.planned(kind, setting, number, options.seed)
        for setting in options.settings
        for number in range(options.trials)
        for kind in options.only
        if kind != hang_trials.CHECKPOINT
        or (number < hang_trials.CHECKPOINT_TRIALS and not hang_trials.SETTINGS[setting][0])
    ]
    to_run = [trial for trial in wanted if options.fresh or trial.name not in known]
    lock = threading.Lock()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bireme-hangs-")))
        places = Places(scratch, stack)

        def run_one(trial: hang_trials.Trial) -> None:
            outcome = run_trial(trial, places, scratch)
            with lock:
                known[trial.name] = asdict(outcome)
                _save(known)
                _show(outcome, console)

        with ThreadPoolExecutor(options.jobs) as pool:
            try:
                for each in [pool.submit(run_one, trial) for trial in to_run]:
                    each.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    outcomes = [known[trial.name] for trial in wanted]
    console.width = max(console.width, 140) if not console.is_terminal else console.width
    console.print(_table(outcomes, options))
    console.print(f"{RESULTS}  load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", highlight=False)
    return int(any(each["problem"] for each in outcomes))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = [*hang_trials.KINDS, hang_trials.CHECKPOINT]
    parser.add_argument("--seed", type=int, default=1, help="of ranks, steps and phases (default 1)")
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds, metavar="KIND", help=", ".join(kinds))
    parser.add_argument(
        "--settings",
        nargs="+",
        choices=list(hang_trials.SETTINGS),
        default=list(hang_trials.SETTINGS),
        metavar="SETTING",
    )
    parser.add_argument("--trials", type=int, default=10, help="of each kind in each setting (default 10)")
    parser.add_argument("--jobs", type=int, default=2, help="trials at a time: most of each is waiting (default 2)")
    parser.add_argument("--fresh", action="store_true", help="repeat trials that are finished already")
    return parser.parse_args()


def _show(outcome: Outcome, console: Console) -> None:
    trial = outcome.trial
    after = "" if outcome.report_s is None else f" after {outcome.report_s:.1f} s"
    verdict = f"WRONG: {outcome.problem}" if outcome.problem else "right"
    line = f"{trial.name}: {trial.inject}: {verdict}{after}, exit codes {outcome.codes}, {outcome.seconds:.0f} s"
    console.print(line, highlight=False, markup=False)
    if outcome.problem:
        folder = WRONG / re.sub(r"\W+", "-", trial.name)
        for path in sorted(folder.glob("*.err")):
            console.print(f"--- {path}\n{_text(path)[-4000:]}", highlight=False, markup=False)


def _save(known: dict[str, Any]) -> None:
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    facts = {"time_utc": utc_now(), "bireme": bireme.__version__, "stall_after_s": hang_trials.STALL_AFTER_S}
    write_json_atomic(RESULTS, {**facts, "abort_after_s": hang_trials.ABORT_AFTER_S, "trials": known})


def _table(outcomes: Sequence[dict[str, Any]], options: argparse.Namespace) -> Table:
    """Of each kind in each setting: right of tried; median and longest seconds from the failure to its diagnosis."""
    table = Table("kind", *options.settings)
    for kind in options.only:
        cells = []
        for setting in options.settings:
            mine = [each for each in outcomes if (each["trial"]["kind"], each["trial"]["setting"]) == (kind, setting)]
            seconds = [each["report_s"] for each in mine if each["report_s"] is not None]
            right = sum(each["problem"] is None for each in mine)
            took = f": {statistics.median(seconds):.1f} s, {max(seconds):.1f} s" if seconds else ""
            cells.append(f"{right} of {len(mine)}{took}" if mine else "")
        table.add_row(kind, *cells)
    return table


if __name__ == "__main__":
    sys.exit(main())
