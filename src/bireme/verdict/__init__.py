"""Whom to blame for slow steps, with evidence and what a cure is worth: pure functions of recorded ledgers."""

from bireme.verdict.evidence import Evidence, NotEnough
from bireme.verdict.judge import judge
from bireme.verdict.kinds import Verdict

__all__ = ["Evidence", "NotEnough", "Verdict", "judge"]
