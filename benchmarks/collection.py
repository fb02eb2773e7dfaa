"""Garbage collection at other steps on every rank, against the same step on all: how long the same training takes.

    python benchmarks/collection.py

Two ranks hold a large heap and collect every fifth step, each at steps of its own (`--inject kind=gc`), as Python does
by itself; then with `--gc-every 10`; turn by turn. Writes runs/benchmarks/collection.json.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bireme.report.summary import measured_steps
from bireme.run_reader import read_run

if TYPE_CHECKING:
    from benchmarks.common import RANKS, Result, conclude, spread
else:
    from common import RANKS, Result, conclude, spread

EVERY = 10
_FIELDS = ("--preset", "toy", "--sequence-length", "64", "--global-batch-size", "8", "--threads", "1")
_MORE = ("--evaluate-every", "0", "--peak-seconds", "0", "--device", "cpu")


def run(directory: Path, steps: int, objects: int, gc_every: int) -> dict[str, Any]:
    """One training: its measured seconds, and how many of its steps had a collection of a millisecond or more."""
    inject = f"kind=gc,rank=all,every=5,objects={objects}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command += ["-m", "bireme", "train", "--run-dir", str(directory), "--steps", str(steps), *_FIELDS, *_MORE]
    subprocess.run([*command, "--inject", inject, "--gc-every", str(gc_every)], check=True, capture_output=True)
    record = read_run(directory)
    measured = measured_steps(record)
    numbers = {step["step"] for step in measured}
    pauses = [event for event in record.events if event["event"] == "gc_pause" and event["step"] in numbers]
    return {
        "seconds": sum(max(step["end_ns"]) - max(step["start_ns"]) for step in measured) / 1e9,
        "steps_with_a_pause": len({event["step"] for event in pauses}),
        "paused_ms_per_rank": sum(event["ms"] for event in pauses) / RANKS,
        "loss": record.steps[-1]["loss"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4, help="pairs of runs to compare (default 4)")
    parser.add_argument("--steps", type=int, default=63, help="steps of a run, 3 of them warm-up (default 63)")
    parser.add_argument("--objects", type=int, default=1_000_000, help="objects that each rank holds")
    options = parser.parse_args()
    if options.pairs < 2:
        parser.error("--pairs: a spread needs 2 or more")
    with tempfile.TemporaryDirectory(prefix="bireme-collection-") as scratch:
        pairs = [
            [
                run(Path(scratch) / f"{pair}-{gc_every}", options.steps, options.objects, gc_every)
                for gc_every in (0, EVERY)
            ]
            for pair in range(options.pairs)
        ]
    shown = [
        Result("total, same step / each its own", "", spread([b["seconds"] / a["seconds"] for a, b in pairs]), 3, 1.0),
        *(
            Result(f"{what}: {name.replace('_', ' ')}", "", spread([float(pair[side][name]) for pair in pairs]), 1)
            for name in ("seconds", "steps_with_a_pause", "paused_ms_per_rank")
            for side, what in enumerate(("each its own", f"--gc-every {EVERY}"))
        ),
    ]
    same = len({each["loss"] for pair in pairs for each in pair}) == 1
    title = f"{RANKS} ranks, {options.steps} steps, {options.objects:,} objects a rank"
    title += f"; losses {'equal' if same else 'DIFFER'}"
    return conclude("collection", title, shown, {"pairs": pairs, "settings": vars(options)}, same)


if __name__ == "__main__":
    sys.exit(main())
