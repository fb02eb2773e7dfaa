"""The trials of benchmarks/hangs.py: what is planted in each, and whether what was said and done is right; pure."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

STALL_AFTER_S = 4.0
ABORT_AFTER_S = 8.0
REPORT_WITHIN_S = STALL_AFTER_S + 5.0
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

MODEL = ["--model.num-layers", "2", "--model.embedding-dim", "32", "--model.feed-forward-dim", "64"]
OPTIONS = [
    *("--preset", "toy", *MODEL, "--sequence-length", "32", "--global-batch-size", "4"),
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


# --- what is right -----------------------------------------------------------------------------------------------


def findings(text: str) -> list[str]:
    """The blocks of the hang watch in a rank's standard error that say what is wrong; a rank that has lost another says
    so in a line of its own, and what came first may be said again at the end."""
    blocks = re.findall(r"^bireme: (?!rank \d+ on \S+ stopped: |it began with: )(.*(?:\n  .*)*)\n", text, re.MULTILINE)
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
    if said and lines[-1].replace("it began with: ", "") != "bireme: " + said[-1].split("\n", 1)[0]:
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
