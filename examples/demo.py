"""`make demo`: 1, 2 and 4 ranks, then one rank slowed down by several delays; the table, the picture, one report.

Takes about two minutes on two cores. What it leaves is under runs/, and the corpus's tokens in ~/.cache/bireme.
"""

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
STEPS = "20"
STEP_LINE = re.compile(r"step +\d+/\d+ ")


def run(*command: str, **environment: str) -> str:
    """Runs a command as a user would type it; ends the demo where it fails. Returns the last line it printed."""
    typed = [f"{name}={value}" for name, value in environment.items()]
    typed += ["python" if part == sys.executable else part for part in command]
    print(f"\n$ {shlex.join(typed).replace('python -m torch.distributed.run', 'torchrun')}", flush=True)
    # One thread a rank is what every run here uses; said beforehand, torchrun does not warn about it.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("STRAGGLER_")}
    settings = {**inherited, "OMP_NUM_THREADS": "1", **environment}
    last = ""
    with subprocess.Popen(command, cwd=REPOSITORY, env=settings, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not STEP_LINE.match(line):  # the steps are in the run directory; here they would only scroll by
                print(line, end="", flush=True)
            last = line.strip() or last
    if process.returncode:
        sys.exit(f"the demo stopped: that command ended with exit code {process.returncode}")
    return last


def torchrun(ranks: int, **environment: str) -> str:
    launcher = (sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}")
    return run(*launcher, "multinode.py", "--steps", STEPS, **environment)


def main() -> None:
    started = time.monotonic()
    for ranks in (1, 2, 4):
        torchrun(ranks)
    last = torchrun(2, STRAGGLER_MS="0,50,100,150,200")
    run(sys.executable, "multinode.py", "--plot")
    run_directory = last.removeprefix("run directory: ").split("  ")[0]
    run(sys.executable, "-m", "bireme", "report", run_directory)
    print(f"\nThe demo took {time.monotonic() - started:.0f} s. Look at runs/multinode/multinode.png; try next:")
    print(f"  {Path(sys.executable).parent / 'bireme'} sample {run_directory}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
