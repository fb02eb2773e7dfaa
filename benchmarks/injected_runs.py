"""Real trainings with something planted in them: which, and how they are run."""

import os
import random
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bireme.run_reader import read_run

if TYPE_CHECKING:
    from benchmarks.run_scores import (
        CLEAN,
        CROWDED,
        GRID,
        HEALTHY_RUN,
        JITTERY_RUN,
        MOST_BY_OTHERS,
        WHAT_IF,
        RunScore,
        score_run,
    )
else:
    from run_scores import CLEAN, CROWDED, GRID, HEALTHY_RUN, JITTERY_RUN, MOST_BY_OTHERS, WHAT_IF, RunScore, score_run

FIRST = 16  # step from which something is planted: what comes before says what a clean step takes
TIMEOUT_S = 300.0
OPTIONS = ("--preset", "toy", "--threads", "1", "--peak-seconds", "0", "--evaluate-every", "0", "--device", "cpu")


@dataclass(frozen=True, slots=True)
class Trial:
    """One training to run. `nodes` of 0: one machine as it is; else so many emulated ones."""

    name: str
    group: str
    seed: int
    inject: tuple[str, ...] = ()
    layout: str = "ddp"
    steps: int = 56
    nodes: int = 0
    ranks: int = 2  # in all
    extra: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return f"{self.seed}/{self.group}/{self.name}"

    def command(self, directory: Path) -> list[str]:
        train = ["-m", "bireme", "train", "--run-dir", str(directory), *OPTIONS, "--steps", str(self.steps)]
        train += ["--seed", str(self.seed), "--layout", self.layout, *self.extra]
        for text in self.inject:
            train += ["--inject", text]
        if not self.nodes:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            return [*launcher, "--nproc-per-node", str(self.ranks), *train]
        nodes = [sys.executable, "-m", "bireme", "nodes", "--nodes", str(self.nodes), "--link", "400mbit"]
        return [*nodes, "--torchrun", str(self.ranks // self.nodes), "--", *train]


# --- which ones --------------------------------------------------------------------------------------------------


def grid(seed: int, count: int) -> list[Trial]:
    """Kinds x culprits x layouts, in an order that any first part of has some of everything; more than there are
    begin again with other numbers."""
    trials: list[Trial] = []
    while len(trials) < count:
        draw = random.Random(f"{seed} round {len(trials)}")
        for template in _templates(draw):
            number = len(trials)
            trials.append(
                Trial(
                    f"{number:03d} {template.pop('name')}",
                    GRID,
                    seed * 1000 + number,
                    inject=template.pop("inject"),
                    **template,
                )
            )
    return trials[:count]


def _templates(draw: random.Random) -> list[dict[str, Any]]:
    def ms() -> int:
        return draw.randrange(100, 181)

    def plan(name: str, inject: str, **fields: Any) -> dict[str, Any]:
        return {"name": name, "inject": (f"kind={inject},steps={FIRST}:",), **fields}

    def link(name: str, inject: str, first: int) -> dict[str, Any]:
        return {"name": name, "inject": (f"kind=link,{inject},steps={first}:",), "nodes": 2}

    every = {"extra": ("--checkpoint-every", "4")}
    by_kind: list[list[dict[str, Any]]] = [
        [plan(f"sleep {p}, rank {r}", f"sleep,rank={r},phase={p},ms={ms()}") for r in (1, 0)]
        for p in ("backward", "forward", "input", "optimizer", "other")
    ]
    by_kind += [
        [plan(f"compute backward, rank {r}", f"compute,rank={r},phase=backward,factor=2") for r in (0, 1)],
        [plan(f"compute forward, rank {r}", f"compute,rank={r},phase=forward,factor=3") for r in (1, 0)],
        [plan(f"contention, rank {r}", f"contention,rank={r}") for r in (0, 1)],
        [plan(f"pause, rank {r}", f"pause,rank={r},ms=45,period_ms=100") for r in (1, 0)],
        [plan(f"slow loader, rank {r}", f"input,rank={r},ms={250 + ms()}") for r in (0, 1)],
        [plan(f"garbage, rank {r}", f"gc,rank={r},every=3,objects=3000000") for r in (1, 0)],
        [
            plan(f"sleep checkpoint, rank {r}", f"sleep,rank={r},phase=checkpoint,ms={4 * ms()}", **every)
            for r in (0, 1)
        ],
        [plan(f"slow storage, rank {r}", f"checkpoint,rank={r},ms={1500 + ms()}", **every) for r in (1, 0)],
        [plan(f"drift, rank {r}", f"drift,rank={r},ms={2 * ms()},over=60", steps=86) for r in (0, 1)],
        [plan(f"imbalance {n}", f"imbalance,ms={ms()},seed={draw.randrange(1000)}") for n in (1, 2)],
        [
            plan(f"sleep backward, fsdp, rank {r}", f"sleep,rank={r},phase=backward,ms={2 * ms()}", layout="fsdp")
            for r in (1, 0)
        ],
        [
            plan(f"compute forward, fsdp, rank {r}", f"compute,rank={r},phase=forward,ms={2 * ms()}", layout="fsdp")
            for r in (0, 1)
        ],
        [
            plan(f"sleep backward, pp, rank {r}", f"sleep,rank={r},phase=backward,ms={ms()}", layout="pp")
            for r in (1, 0)
        ],
        [
            plan(f"sleep forward, tp, rank {r}", f"sleep,rank={r},phase=forward,ms={2 * ms()}", layout="tp")
            for r in (0, 1)
        ],
        # A stage is heavy from the first step to the last.
        [{"name": f"stage {s}, pp", "inject": (f"kind=stage,stage={s},ms={ms()}",), "layout": "pp"} for s in (1, 0)],
        [
            plan(f"sleep forward, emulated nodes, node {n}", f"sleep,node={n},phase=forward,ms={ms()}", nodes=2)
            for n in (1, 0)
        ],
        [
            link("link slowed in the run", "node=1,rate=50mbit", FIRST),
            link("link from the start", "node=0,rate=50mbit", 1),
        ],
    ]
    return [pair[turn] for turn in (0, 1) for pair in by_kind]


def crowded(seed: int) -> list[Trial]:
    """Two ranks on each of two nodes: more ranks than cores where there are two cores."""
    texts = [
        ("sleep forward", "sleep,node=1,phase=forward,ms=300"),
        ("sleep backward", "sleep,node=0,phase=backward,ms=300"),
    ]
    texts += [("compute forward", "compute,node=1,phase=forward,ms=200"), ("one rank of four", "sleep,rank=2,ms=300")]
    return [
        Trial(name, CROWDED, seed * 1000 + 800 + i, (f"kind={text},steps={FIRST}:",), steps=46, nodes=2, ranks=4)
        for i, (name, text) in enumerate(texts)
    ]


def controls(seed: int, count: int) -> list[Trial]:
    """Nothing planted; and noise that is no one's fault: 3 ms and more, on all ranks alike."""
    trials = []
    for number in range(count):
        trials.append(Trial(f"healthy {number + 1}", HEALTHY_RUN, seed * 1000 + 900 + number))
        jitter = f"kind=jitter,ms=3,seed={number}"
        trials.append(Trial(f"jittery {number + 1}", JITTERY_RUN, seed * 1000 + 900 + number, (jitter,)))
    return trials


def what_if(seed: int, rounds: int) -> list[Trial]:
    """Clean and injected runs take turns, with the same seed: each injected one between two clean ones."""
    cases = {
        "150 ms asleep in backward": "kind=sleep,rank=1,phase=backward,ms=150",
        "twice the work in backward": "kind=compute,rank=1,phase=backward,factor=2",
        "a busy process on its core": "kind=contention,rank=1",
    }
    trials = [Trial(f"000 {CLEAN}", WHAT_IF, seed * 1000)]
    for text in [(name, text) for _ in range(rounds) for name, text in cases.items()]:
        trials.append(Trial(f"{len(trials):03d} {text[0]}", WHAT_IF, seed * 1000, (text[1],)))
        trials.append(Trial(f"{len(trials):03d} {CLEAN}", WHAT_IF, seed * 1000))
    return trials


# --- running -----------------------------------------------------------------------------------------------------


def run_trial(trial: Trial, scratch: Path, kept: Path) -> RunScore:
    """Runs and scores it. The record of one whose verdict is wrong is kept, without the weights, under `kept`."""
    directory = scratch / "run"
    shutil.rmtree(directory, ignore_errors=True)
    shown = trial.command(Path("runs/trial"))
    score = RunScore(trial.key, trial.group, trial.name, shlex.join(["python", *shown[1:]]))
    began = time.monotonic()
    with _host(score.host):
        score.problem = _run(trial.command(directory), scratch / "output.txt")
    score.seconds = round(time.monotonic() - began, 1)
    if score.problem is None:
        score_run(read_run(directory), score)
    if not score.right or score.wrong or score.wrong_live:
        target = kept / trial.key.replace("/", "-").replace(" ", "-").replace(",", "")
        shutil.rmtree(target, ignore_errors=True)
        ignored = shutil.ignore_patterns("*.safetensors", "checkpoints")
        if directory.exists():
            shutil.copytree(directory, target, ignore=ignored)
        else:
            target.mkdir(parents=True)
        shutil.copy(scratch / "output.txt", target)
    shutil.rmtree(directory, ignore_errors=True)
    return score


def _run(command: Sequence[str], output: Path) -> str | None:
    """None, or what went wrong."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("STRAGGLER_", "BIREME_"))}
    environment["OMP_NUM_THREADS"] = "1"
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(TIMEOUT_S)
        except BaseException as error:
            # Its launcher ends the ranks; what does not end is ended.
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return f"it did not end within {TIMEOUT_S:.0f} s"
    if code:
        return f"exit code {code}: {output.read_text(errors='replace').strip()[-400:]}"
    return None


def wait_for_quiet(patience_s: float) -> None:
    """Until other processes leave the cores alone, or patience ends."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        shares: dict[str, float] = {}
        with _host(shares):
            time.sleep(5.0)  # they come and go
        if shares["others"] <= MOST_BY_OTHERS / 2:
            return
        time.sleep(5.0)


@contextmanager
def _host(shares: dict[str, float]) -> Iterator[None]:
    """What the machine did meanwhile: shares of all cores' time that the hypervisor took, and that processes which are
    none of ours ran."""
    shares["load_before"] = round(os.getloadavg()[0], 2)
    wall, (busy, steal), own = time.monotonic(), _cpu_s(), _children_s()
    yield
    total = (time.monotonic() - wall) * (os.cpu_count() or 1)
    now_busy, now_steal = _cpu_s()
    shares["steal"] = round((now_steal - steal) / total, 4)
    shares["others"] = round(max(0.0, now_busy - busy - (_children_s() - own)) / total, 4)


def _cpu_s() -> tuple[float, float]:
    """Seconds of all cores together since boot: at work, and taken by the hypervisor."""
    try:
        values = [int(each) for each in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    except (OSError, ValueError):
        return 0.0, 0.0
    user, nice, system, _idle, _iowait, irq, softirq, steal = values[:8]
    tick = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq) / tick, steal / tick


def _children_s() -> float:
    used, mine = resource.getrusage(resource.RUSAGE_CHILDREN), resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime + mine.ru_utime + mine.ru_stime
