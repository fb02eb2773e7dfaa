"""Kills and preempts real runs at random moments, resumes them, and holds them against one that was left alone.

    python benchmarks/crashes.py                      # 20 kills, 40 signals; about half an hour
    python benchmarks/crashes.py --kills 4 --signals 1

A kill is SIGKILL to one of two ranks, every other time while a checkpoint is being written; the run is then resumed on
the same ranks, on one, or in another layout. A signal is SIGTERM or SIGUSR1 to one rank, or to the whole process group
with the loader workers in it; every other time the run saves checkpoints all along. Writes
runs/benchmarks/crashes.json; exit code 1 when anything is not as it should be.
"""

import argparse
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from bireme.checkpoint.folder import CHECKPOINTS, Unusable, candidates, check_files, read_manifest, step_of
from bireme.errors import UserError
from bireme.record import write_json_atomic
from bireme.run_reader import read_facts
from bireme.shutdown import REQUEUE

RESULTS = Path(__file__).resolve().parent.parent / "runs" / "benchmarks"
STEPS = 24
EVERY = 2
WAIT_S = 300.0
SAVED_WITHIN_S = 10.0

# Enough parameters that writing a checkpoint takes long enough to be hit.
MODEL = ["--model.num-layers", "4", "--model.embedding-dim", "256", "--model.feed-forward-dim", "1024"]
OPTIONS = [
    *("--preset", "toy", *MODEL, "--sequence-length", "32", "--global-batch-size", "8"),
    *("--evaluate-every", "0", "--threads", "1", "--peak-seconds", "0", "--log-samples", "--device", "cpu"),
]
LIMITED = ["--steps", str(STEPS), "--checkpoint-every", str(EVERY)]
# (ranks, layout) to resume on; the first is the one that was killed, where every bit must be the same.
RESUMED_ON = [(2, "ddp"), (1, "ddp"), (2, "fsdp"), (2, "pp"), (2, "tp")]


@dataclass
class Kill:
    """What one kill did."""

    moment: str
    rank: int
    newest_whole: int  # step of the newest whole checkpoint that the kill left
    resumed_after: int
    ranks: int
    layout: str
    while_writing: bool  # whether a checkpoint was being written at that moment
    largest_loss_difference: float
    problem: str | None = None


@dataclass
class Signalled:
    """What one signal did."""

    name: str
    to: str
    seconds: float
    step: int | None
    exit_codes: list[int]
    problem: str | None = None


class Ranks:
    """The ranks of one run, started as a launcher would, in a process group of their own."""

    def __init__(self, count: int, arguments: list[str], output: Path):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        settings = {name: value for name, value in os.environ.items() if not name.startswith("STRAGGLER_")}
        settings |= {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        settings |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        self.output = output
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank in range(count):
            with output.open("ab") as file:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "bireme", "train", *arguments],
                        env={**settings, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        process_group=0 if rank == 0 else self.processes[0].pid,
                    )
                )

    def wait(self) -> list[int]:
        deadline = time.monotonic() + WAIT_S
        try:
            return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the ranks did not end: {self.tail()}") from None
        finally:
            self.kill()

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    def tail(self) -> str:
        return self.output.read_text(errors="replace")[-500:]


def record(run: Path, name: str) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in (run / name).read_bytes().splitlines()]


def wait_for(ranks: Ranks, what: Any) -> None:
    deadline = time.monotonic() + WAIT_S
    while not what():
        if time.monotonic() > deadline or ranks.processes[0].poll() is not None:
            raise RuntimeError(f"the run did not get there: {ranks.tail()}")
        time.sleep(0.001)


def newest_whole(run: Path) -> int:
    for folder in candidates(run / CHECKPOINTS):
        try:
            check_files(folder, read_manifest(folder))
            return step_of(folder) or 0
        except Unusable:
            continue
    return 0


def kill_once(number: int, chance: random.Random, folder: Path, unbroken: Path) -> Kill:
    run = folder / f"kill-{number}"
    checkpoints = run / CHECKPOINTS
    ranks = Ranks(2, ["--run", str(run), *OPTIONS, *LIMITED], folder / f"kill-{number}.txt")
    victim, least = chance.randrange(2), chance.randrange(2, STEPS - 6)
    writing = number % 2 == 0
    try:
        wait_for(ranks, lambda: any((step_of(each) or 0) >= least for each in candidates(checkpoints)))
        if writing:
            wait_for(ranks, lambda: any(checkpoints.glob(".step-*.partial")))
            time.sleep(chance.uniform(0.0, 0.06))
        else:
            time.sleep(chance.uniform(0.0, 0.6))
        partial = any(checkpoints.glob(".step-*.partial"))
        ranks.processes[victim].kill()
        ranks.wait()
    finally:
        ranks.kill()
    whole = newest_whole(run)
    count, layout = RESUMED_ON[number % len(RESUMED_ON)]
    moment = "while a checkpoint was written" if writing else "at a random moment"
    result = Kill(moment, victim, whole, -1, count, layout, partial, float("nan"))
    resumed = Ranks(count, ["--run", str(run), "--resume", "--layout", layout], folder / f"resume-{number}.txt")
    if any(resumed.wait()):
        result.problem = f"the resumed run failed: {resumed.tail()}"
        return result
    result.resumed_after = read_facts(run)["resumed_from"]["step"]
    steps, expected = record(run, "steps.jsonl"), record(unbroken, "steps.jsonl")
    if [step["step"] for step in steps] != list(range(1, STEPS + 1)):
        result.problem = "steps are missing from the record, or there twice"
        return result
    differences = [abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(steps, expected, strict=True)]
    result.largest_loss_difference = max(differences)
    allowed = 0.0 if (count, layout) == RESUMED_ON[0] else 1e-5
    if result.resumed_after != whole:
        result.problem = f"resumed after step {result.resumed_after}, though step {whole} was whole"
    elif record(run, "samples.jsonl") != record(unbroken, "samples.jsonl"):
        result.problem = "other samples than those of the unbroken run"
    elif result.largest_loss_difference > allowed:
        result.problem = "other losses than those of the unbroken run"
    return result


def signal_once(number: int, name: str, to: str, chance: random.Random, folder: Path) -> Signalled:
    run = folder / f"signal-{name}-{to}-{number}".replace(" ", "-")
    options = [*OPTIONS, "--steps", "100000", "--workers", "1", "--checkpoint-every", str(EVERY * (number % 2))]
    ranks = Ranks(2, ["--run", str(run), *options], folder / f"{run.name}.txt")
    try:
        wait_for(ranks, lambda: b"step      5/" in ranks.output.read_bytes())
        time.sleep(chance.uniform(0.0, 0.5))
        began = time.monotonic()
        if to == "one rank":
            ranks.processes[chance.randrange(2)].send_signal(signal.Signals[name])
        else:
            os.killpg(ranks.processes[0].pid, signal.Signals[name])
        codes = ranks.wait()
        seconds = time.monotonic() - began
    finally:
        ranks.kill()
    events = [event for event in record(run, "events.jsonl") if event["event"] == "preempted"]
    step = events[0]["step"] if events else None
    result = Signalled(name, to, seconds, step, codes)
    last = ranks.output.read_text(errors="replace").strip().splitlines()[-1]
    if step is None or newest_whole(run) != step:
        result.problem = f"the checkpoint is of step {newest_whole(run)}, the event of {step}: {ranks.tail()}"
    elif record(run, "steps.jsonl")[-1]["step"] != step:
        result.problem = "the record does not end with the step that was saved"
    elif codes != [REQUEUE, REQUEUE]:
        result.problem = f"exit codes {codes}"
    elif last != f"saved step {step}":
        result.problem = f"the last line is {last!r}"
    elif seconds > SAVED_WITHIN_S:
        result.problem = f"it took {seconds:.1f} s"
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument(
        "--signals", type=int, default=10, help="of each kind: SIGTERM and SIGUSR1, to one rank and to the group"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    console = Console()
    kills: list[Kill] = []
    signals: list[Signalled] = []
    with tempfile.TemporaryDirectory(prefix="bireme-crashes-") as scratch:
        folder = Path(scratch)
        unbroken = folder / "unbroken"
        if any(Ranks(2, ["--run", str(unbroken), *OPTIONS, *LIMITED], folder / "unbroken.txt").wait()):
            raise UserError((folder / "unbroken.txt").read_text()[-500:])
        for number in range(options.kills):
            kills.append(kill_once(number, chance, folder, unbroken))
            console.print(f"kill {number + 1}: {kills[-1]}", highlight=False)
        for number in range(options.signals):
            for name in ("SIGTERM", "SIGUSR1"):
                for to in ("one rank", "the group"):
                    signals.append(signal_once(number, name, to, chance, folder))
                    console.print(f"signal: {signals[-1]}", highlight=False)
    table = Table("what", "as it should be", "of", "remarks")
    good = [kill for kill in kills if kill.problem is None]
    hit = sum(kill.while_writing for kill in kills)
    worst = max((kill.largest_loss_difference for kill in good), default=0.0)
    table.add_row(
        "SIGKILL of a rank, resumed", str(len(good)), str(len(kills)), f"{hit} hit a checkpoint being written"
    )
    table.add_row("largest loss difference", "", "", f"{worst:.1e}")
    for name, to in product(("SIGTERM", "SIGUSR1"), ("one rank", "the group")):
        mine = [each for each in signals if (each.name, each.to) == (name, to)]
        fine = sum(each.problem is None for each in mine)
        slowest = max((each.seconds for each in mine), default=0.0)
        table.add_row(f"{name} to {to}", str(fine), str(len(mine)), f"saved and ended in {slowest:.1f} s or less")
    console.print(table)
    RESULTS.mkdir(parents=True, exist_ok=True)
    written = {"seed": options.seed, "kills": [asdict(kill) for kill in kills], "signals": [asdict(s) for s in signals]}
    write_json_atomic(RESULTS / "crashes.json", written)
    return int(len(good) < len(kills) or any(each.problem for each in signals))


if __name__ == "__main__":
    sys.exit(main())
