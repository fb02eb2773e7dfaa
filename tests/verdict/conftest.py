"""The made-up ledgers of the benchmark are the tests' too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
