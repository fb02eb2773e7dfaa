"""How often verdicts are right: on made-up ledgers with a known culprit, and on real runs with planted slowness.

    python benchmarks/stragglers.py --seed 1 --write         # everything; about an hour on two idle cores
    python benchmarks/stragglers.py --only synthetic         # other cases each time; three minutes

Real runs that are finished are kept in runs/benchmarks/stragglers.json and not repeated for the same seed, so this can
be done in pieces (--fresh repeats them); the records of those with a wrong verdict are kept beside it. A run whose
cores were taken by other processes does not count, and is repeated the next time. --write renews the tables of
docs/accuracy.md. Exit code 1 when a promised number is missed.
"""

import argparse
import os
import secrets
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import torch
from rich.console import Console

import bireme
from bireme.record import utc_now, write_json_atomic

if TYPE_CHECKING:
    from benchmarks import injected_runs, straggler_tables, synthetic_scores
    from benchmarks.run_scores import CLEAN, RunScore
    from benchmarks.straggler_tables import Part
else:
    import injected_runs
    import straggler_tables
    import synthetic_scores
    from run_scores import CLEAN, RunScore
    from straggler_tables import Part

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "runs" / "benchmarks" / "stragglers.json"
WRONG = ROOT / "runs" / "benchmarks" / "stragglers-wrong"
DOCUMENT = ROOT / "docs" / "accuracy.md"
PARTS = ("synthetic", "real", "controls", "what-if")


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and not without the ranks
    console = Console(soft_wrap=True)
    parts = [options.only] if options.only else list(PARTS)
    console.print(f"seed {options.seed}", highlight=False)
    shown: list[Part] = []
    for name in parts:
        if name == "synthetic":
            part = straggler_tables.synthetic_part(*_synthetic(options, console))
        else:
            trials = _trials(name, options)
            scores = _run(trials, options, console)
            part = {
                "real": straggler_tables.real_part,
                "controls": straggler_tables.controls_part,
                "what-if": straggler_tables.what_if_part,
            }[name](scores)
        part.show(console)
        shown.append(part)
        if not options.quick:
            _keep("parts", name, {"seed": options.seed, **_facts(), **part.as_dict()})
    missed = [promise for part in shown for promise in part.promises if not promise.met]
    if options.write:
        for part in shown:
            straggler_tables.renew(DOCUMENT, part, f"{_command(options)} --only {part.name}", _where())
    if not options.quick:
        console.print(f"{RESULTS}  load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", highlight=False)
    for promise in missed:
        console.print(
            f"MISSED: {promise.what}: {promise.value}, wanted {promise.wanted}", highlight=False, markup=False
        )
    return int(bool(missed))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, help="of all cases; default: another one each time")
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--synthetic-trials", type=int, default=2400, help="at effects of 10 %% and more")
    parser.add_argument("--real-trials", type=int, default=44, help="of the grid, which has 44 and then begins again")
    parser.add_argument("--control-trials", type=int, default=10, help="healthy runs, and as many jittery ones")
    parser.add_argument("--rounds", type=int, default=3, help="of every what-if case, each between two clean runs")
    parser.add_argument("--wait", type=float, default=60.0, help="seconds to wait before each run for an idle machine")
    parser.add_argument("--fresh", action="store_true", help="repeat real runs that are finished already")
    parser.add_argument(
        "--quick", action="store_true", help="a few of each: to see it work, not to judge by; keeps nothing"
    )
    parser.add_argument("--write", action="store_true", help="renew the tables of docs/accuracy.md")
    options = parser.parse_args()
    if options.quick and options.write:
        parser.error("--quick is nothing to write down: leave --write away")
    if options.seed is None:
        options.seed = secrets.randbelow(100_000)
    if not 0 <= options.seed < 1_000_000:
        parser.error("--seed: 0 to 999999")
    if options.quick:
        options.synthetic_trials, options.real_trials, options.control_trials, options.rounds = 120, 3, 1, 1
    return options


def _command(options: argparse.Namespace) -> str:
    """That gives the same cases again."""
    words = ["python", "benchmarks/stragglers.py", "--seed", str(options.seed)]
    for name, usual in (("synthetic_trials", 2400), ("real_trials", 44), ("control_trials", 10), ("rounds", 3)):
        if getattr(options, name) != usual:
            words += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    return shlex.join(words)


def _facts() -> dict[str, Any]:
    return {
        "time_utc": utc_now(),
        "versions": {"bireme": bireme.__version__, "python": sys.version.split()[0], "torch": torch.__version__},
        "cores": os.cpu_count(),
    }


def _where() -> str:
    return f"{utc_now()[:10]}, {os.cpu_count()} cores, Bireme {bireme.__version__}, PyTorch {torch.__version__}"


def _known() -> dict[str, Any]:
    return dict(orjson.loads(RESULTS.read_bytes())) if RESULTS.exists() else {}


def _keep(section: str, name: str, value: Any) -> None:
    """Read again each time: two parts may run in two terminals."""
    known = _known()
    known.setdefault(section, {})[name] = value
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(RESULTS, known)


# --- the parts ---------------------------------------------------------------------------------------------------


def _synthetic(options: argparse.Namespace, console: Console) -> tuple[list[Any], list[Any], list[Any]]:
    """Scores of the strong, the healthy and the weak cases."""
    count = options.synthetic_trials
    few = max(10, count // 24) if options.quick else None
    groups = (
        synthetic_scores.strong_cases(options.seed, count),
        synthetic_scores.healthy_cases(options.seed, few or 500),
        synthetic_scores.weak_cases(options.seed, few or 800),
    )
    began = time.monotonic()
    strong, healthy, weak = (synthetic_scores.score_all(cases) for cases in groups)
    cases = sum(len(cases) for cases in groups)
    console.print(f"{cases} made-up runs judged in {time.monotonic() - began:.0f} s", highlight=False)
    return strong, healthy, weak


def _trials(name: str, options: argparse.Namespace) -> list[Any]:
    if name == "controls":
        return injected_runs.controls(options.seed, options.control_trials)
    if name == "what-if":
        return injected_runs.what_if(options.seed, options.rounds)
    crowded = [] if options.quick else injected_runs.crowded(options.seed)
    return [*injected_runs.grid(options.seed, options.real_trials), *crowded]


def _run(trials: Sequence[Any], options: argparse.Namespace, console: Console) -> list[RunScore]:
    """In order; what is known already is not run again."""
    finished: dict[str, Any] = {} if options.quick else _known().get("runs", {})
    scores = []
    with tempfile.TemporaryDirectory(prefix="bireme-stragglers-") as scratch:
        for number, trial in enumerate(trials):
            before = RunScore(**finished[trial.key]) if trial.key in finished else None
            if before is not None and not before.disturbed and not options.fresh:
                scores.append(before)
                continue
            injected_runs.wait_for_quiet(options.wait)
            score = injected_runs.run_trial(trial, Path(scratch), WRONG)
            scores.append(score)
            if not options.quick:
                _keep("runs", trial.key, asdict(score))
            word = "right" if score.right else "WRONG"
            if score.disturbed or trial.name.endswith(CLEAN):
                word = "does not count: other processes took the cores" if score.disturbed else ""
            detail = score.problem or "; ".join(score.wrong)
            console.print(
                f"{number + 1}/{len(trials)} {trial.group}: {trial.name}  {score.given} {word}  "
                f"{score.seconds:.0f} s  {detail}",
                highlight=False,
                markup=False,
            )
    return scores


if __name__ == "__main__":
    sys.exit(main())
