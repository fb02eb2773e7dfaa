"""Makes ranks of real runs fail in every way, and checks that the hang watch names who, where, when and why, in time.

    python benchmarks/hangs.py --seed 1                      # everything; about half an hour on two idle cores
    python benchmarks/hangs.py --only kill --settings "2 ranks" --trials 3

Each trial is a run of `bireme train` with one planted failure; which rank's turn it is, the step and the phase are drawn
from the seed. Right is a trial in which the diagnosis names what was planted within --stall-after + 5 s of it, every
process has ended as it should, and none is left. The ranks are forked from a process that has imported torch already.
Finished trials are kept in runs/benchmarks/hangs.json and not repeated for the same seed (--fresh repeats them), the
output of the wrong ones beside it. Exit code 1 when a trial was wrong.
"""

import argparse
import json
import os
import random
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
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

import bireme
from bireme.network import free_port
from bireme.nodes import MASTER_PORT, EmulatedCluster
from bireme.record import utc_now, write_json_atomic

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT.parent / "runs" / "benchmarks" / "hangs.json"
WRONG = ROOT.parent / "runs" / "benchmarks" / "hangs-wrong"

STALL_AFTER_S = 4.0
ABORT_AFTER_S = 8.0
REPORT_WITHIN_S = STALL_AFTER_S + 5.0
ENDS_WITHIN_S = 75.0
NOTHING_LEFT_WITHIN_S = 15.0  # the process that watches over all goes on for ten seconds without its rank
PHASES = ("input", "forward", "backward", "optimizer")
STEPS = 12

# kind -> what the diagnosis calls it
KINDS = {
    "exit": "died",
    "kill": "died",
    "stop": "stopped",
    "raise": "raised",
    "hang": "hang",
    "mismatch": "mismatch",
    "leave": "left",
}
CHECKPOINT = "checkpoint"  # no failure: a checkpoint of 40 s with --stall-after 10
CHECKPOINT_TRIALS = 3
# name -> (emulated nodes or 0, ranks on each)
SETTINGS = {"2 ranks": (0, 2), "4 ranks": (0, 4), "2 nodes x 1 rank": (2, 1), "2 nodes x 2 ranks": (2, 2)}

MODEL = ["--model.num-layers", "2", "--model.embedding-dim", "32", "--model.num-heads", "2", "--model.feed-forward-dim"]
OPTIONS = [
    *("--preset", "toy", *MODEL, "64", "--sequence-length", "32", "--global-batch-size", "4"),
    *("--evaluate-every", "0", "--threads", "1", "--peak-seconds", "0", "--device", "cpu"),
]

_WHO = r"rank (?P<rank>\d+) on (?P<node>\S+) \((?:host \S+, )?pid \d+\)"
_AT = r"in step (?P<step>\d+), (?P<phase>\w+)"
# The first line of a diagnosis, by what the injection is called.
_SENTENCES = {
    "exit": rf"{_WHO} ended with exit code 3 without a word {_AT}",
    "kill": rf"{_WHO} was killed by signal 9 \(SIGKILL\) {_AT}",
    "stop": rf"{_WHO} is stopped \(by SIGSTOP, a debugger or Ctrl-Z\) for [\d.]+ s: {_AT}",
    "raise": rf"{_WHO} failed {_AT}: RuntimeError: injected failure$",
    "hang": rf"{_WHO} has not moved for [\d.]+ s: {_AT}",
    "mismatch": r"the ranks issued different collectives: #\d+ of group",
    "leave": rf"{_WHO} left its loop after step (?P<step>\d+)$",
}
_ODD_COLLECTIVE = rf"rank (?P<rank>\d+) on (?P<node>\S+) issued all_reduce #\d+ \(49\.4 KB\) {_AT}$"
_FINDINGS = re.compile(
    "without a word|was killed by|is stopped|failed in step|not moved|different collectives|left (its|their) loop"
    "|computing for|nothing has moved|no rank has moved|do(es)? not answer|wait for each other|are stopped|is gone"
)


@dataclass(frozen=True)
class Trial:
    """One run to be, and what is planted in it."""

    kind: str
    setting: str
    number: int
    seed: int
    rank: int
    step: int
    phase: str
    inject: str

    @property
    def nodes(self) -> int:
        return SETTINGS[self.setting][0]

    @property
    def size(self) -> int:
        nodes, ranks = SETTINGS[self.setting]
        return max(1, nodes) * ranks

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.setting}, {self.number + 1}, seed {self.seed}"

    @property
    def arguments(self) -> list[str]:
        if self.kind == CHECKPOINT:
            steps = ["--steps", "9", "--checkpoint-every", "3"]
            return [*OPTIONS, *steps, "--stall-after", "10", "--abort-after", "25", "--inject", self.inject]
        limits = ["--stall-after", f"{STALL_AFTER_S:g}", "--abort-after", f"{ABORT_AFTER_S:g}"]
        return [*OPTIONS, "--steps", str(STEPS), *limits, "--inject", self.inject]


@dataclass
class Outcome:
    """How a trial went. `report_s`: from the planted moment to the diagnosis; None where there was none."""

    trial: Trial
    problem: str | None
    report_s: float | None
    end_s: float | None  # to the end of the last rank
    codes: list[int | None]
    said: str
    seconds: float


def planned(kind: str, setting: str, number: int, seed: int) -> Trial:
    chance = random.Random(f"{seed} {kind} {setting}")
    nodes, each = SETTINGS[setting]
    size = max(1, nodes) * each
    turns = chance.sample(range(size), size)  # every rank has its turn
    chance = random.Random(f"{seed} {kind} {setting} {number}")
    rank, step, phase = turns[number % size], chance.randint(4, 9), chance.choice(PHASES)
    if kind == CHECKPOINT:
        step, phase = 6, CHECKPOINT
        how = f"sleep,rank={rank},phase=checkpoint" if number % 2 == 0 else f"checkpoint,rank={rank}"
        inject = f"kind={how},ms=40000,steps=6"
    elif kind == "leave":
        inject = f"kind=leave,rank={rank},steps={step}"
    else:
        inject = f"kind={kind},rank={rank},phase={phase},steps={step}"
    return Trial(kind, setting, number, seed, rank, step, phase, inject)


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

    def node_name(self, trial: Trial) -> str:
        return f"node{trial.rank // SETTINGS[trial.setting][1]}" if trial.nodes else socket.gethostname()


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


def run_trial(trial: Trial, places: Places, scratch: Path) -> Outcome:
    began_s = time.monotonic()
    folder = scratch / re.sub(r"\W+", "-", trial.name)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    codes: list[int | None] = [None] * trial.size
    reported_ns: int | None = None
    with _connected(places.sockets(trial.nodes)) as connections:
        address = places.address(trial.nodes)
        each = SETTINGS[trial.setting][1]
        for rank in range(trial.size):
            place, local = divmod(rank, each)
            environment = {"RANK": str(rank), "WORLD_SIZE": str(trial.size), "LOCAL_RANK": str(local)}
            request = {
                "rank": rank,
                "environment": environment | {"LOCAL_WORLD_SIZE": str(each)} | address,
                "arguments": ["train", "--run-dir", str(folder / "run"), *trial.arguments],
                "output": str(folder / f"rank{rank}"),
                "planted": str(folder / "planted"),
            }
            connections[place].send(json.dumps(request).encode())
        deadline_s = began_s + ENDS_WITHIN_S + (60.0 if trial.kind == CHECKPOINT else 0.0)
        while None in codes and time.monotonic() < deadline_s:
            for connection in select.select(connections, [], [], 0.05)[0]:
                message = orjson.loads(connection.recv(1 << 16))
                codes[message["rank"]] = message["code"]
            if reported_ns is None and findings(_text(folder / "rank0.err")):
                reported_ns = time.monotonic_ns()
        ended_ns = time.monotonic_ns()
        left = ["?"]
        while left and time.monotonic_ns() < ended_ns + NOTHING_LEFT_WITHIN_S * 1e9:
            if reported_ns is None and findings(_text(folder / "rank0.err")):
                reported_ns = time.monotonic_ns()
            left = [entry for connection in connections for entry in _left(connection)]
            time.sleep(0.05 if left else 0.0)
    planted = _text(folder / "planted")
    report_s = (reported_ns - int(planted)) / 1e9 if reported_ns and planted else None
    end_s = (ended_ns - int(planted)) / 1e9 if planted else None
    said = findings(_text(folder / "rank0.err"))
    problems = [
        *([] if planted or trial.kind == CHECKPOINT else ["nothing was planted: the run failed before"]),
        *what_is_wrong(
            trial, places.node_name(trial), _text(folder / "rank0.err"), _hang_events(folder / "run"), codes
        ),
        *([f"the diagnosis came after {report_s:.1f} s"] if report_s and report_s > REPORT_WITHIN_S else []),
        *([f"left running: {', '.join(left)}"] if left else []),
    ]
    outcome = Outcome(
        trial,
        "; ".join(problems) or None,
        None if trial.kind == CHECKPOINT else report_s,
        end_s,
        codes,
        said[-1] if said else "",
        time.monotonic() - began_s,
    )
    if problems:
        WRONG.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(WRONG / folder.name, ignore_errors=True)
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


# --- what is right -----------------------------------------------------------------------------------------------


def findings(text: str) -> list[str]:
    """The blocks of the hang watch in a rank's standard error that say what is wrong."""
    blocks = re.findall(r"^bireme: (.*(?:\n  .*)*)\n", text, re.MULTILINE)
    return [block for block in blocks if _FINDINGS.search(block.split("\n", 1)[0]) and "all ranks end" not in block]


def what_is_wrong(
    trial: Trial, node: str, text: str, events: Sequence[dict[str, Any]], codes: Sequence[int | None]
) -> list[str]:
    """Of what rank 0 has printed and recorded, and of how the ranks have ended."""
    problems = []
    said = findings(text)
    if trial.kind == CHECKPOINT:
        if said or events:
            problems.append(f"taken for a hang: {[*said, *events]}")
        if any(codes):
            problems.append(f"exit codes {list(codes)}")
        return problems
    if not said:
        problems.append("no diagnosis")
    for block in said:
        problems += _differences(trial, node, block)
    lines = [line for line in text.splitlines() if line.startswith("bireme: ") and "all ranks end" not in line]
    if said and lines[-1] != "bireme: " + said[-1].split("\n", 1)[0]:
        problems.append(f"the diagnosis is not the last word: {lines[-1]!r}")
    for event in events:
        expected = (KINDS[trial.kind], trial.step)
        there = trial.rank in event["ranks"] if trial.kind == "mismatch" else event["ranks"] == [trial.rank]
        place = trial.kind in ("leave", "mismatch") or event["phase"] == trial.phase
        if not there or not place or (event["kind"], event["step"]) != expected:
            problems.append(f"the event says {event['kind']}, {event['ranks']}, {event['step']}, {event['phase']}")
    wanted = {"exit": (3,), "kill": (-9,), "stop": (-9,), "raise": (1,), "leave": (0, 70)}.get(trial.kind)
    for rank, code in enumerate(codes):
        if code is None:
            problems.append(f"rank {rank} did not end")
        elif rank == trial.rank and wanted is not None:
            if code not in wanted:
                problems.append(f"rank {rank}, of the failure, ended with {code}")
        elif code == 0:
            problems.append(f"rank {rank} ended with 0")
    return problems


def _differences(trial: Trial, node: str, block: str) -> list[str]:
    first, *rest = block.split("\n")
    if (found := re.match(_SENTENCES[trial.kind], first)) is None:
        return [f"it says {first!r}"]
    if trial.kind == "mismatch":
        sides = [match for line in rest if (match := re.match(_ODD_COLLECTIVE, line.strip()))]
        if not sides:
            return ["it does not name the odd collective"]
        found = sides[0]
    said = found.groupdict()
    expected = {"rank": str(trial.rank), "node": node, "step": str(trial.step), "phase": trial.phase}
    if trial.kind == "leave":
        expected |= {"step": str(trial.step - 1)}
        del expected["phase"]
    return [f"{name} {said[name]}, not {value}" for name, value in expected.items() if said[name] != value]


# --- the command -------------------------------------------------------------------------------------------------


def main() -> int:
    options = _options()
    console = Console(soft_wrap=True)
    known: dict[str, Any] = orjson.loads(RESULTS.read_bytes())["trials"] if RESULTS.exists() else {}
    wanted = []
    for setting in options.settings:
        for number in range(options.trials):
            for kind in options.only:
                if kind != CHECKPOINT or (number < CHECKPOINT_TRIALS and not SETTINGS[setting][0]):
                    wanted.append(planned(kind, setting, number, options.seed))
    to_run = [trial for trial in wanted if options.fresh or trial.name not in known]
    lock = threading.Lock()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bireme-hangs-")))
        places = Places(scratch, stack)

        def run_one(trial: Trial) -> None:
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
    console.print(_table(outcomes, options))
    console.print(f"{RESULTS}  load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", highlight=False)
    return int(any(each["problem"] for each in outcomes))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = [*KINDS, CHECKPOINT]
    parser.add_argument("--seed", type=int, default=1, help="of ranks, steps and phases (default 1)")
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds, metavar="KIND", help=", ".join(kinds))
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS), metavar="SETTING")
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
    facts = {"time_utc": utc_now(), "bireme": bireme.__version__, "stall_after_s": STALL_AFTER_S}
    write_json_atomic(RESULTS, {**facts, "abort_after_s": ABORT_AFTER_S, "trials": known})


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
