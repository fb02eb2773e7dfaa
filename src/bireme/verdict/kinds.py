"""What a verdict is, and the thresholds that it has to pass."""

from dataclasses import dataclass, field
from typing import Any

HEALTHY = "healthy"
ONE_OFF = "one_off"
RANK = "rank"
NODE = "node"
LINK = "link"
STAGE = "stage_imbalance"
DATA = "data_imbalance"
DRIFT = "drift"

# Identical GPUs in one healthy machine differ by up to 5 %: what is less is nobody's fault.
EFFECT = 0.05  # of the step
CAUSED = 0.02  # of the time: what the others wait for it, at least
NOISES = 3.0  # times the noise (a robust standard deviation), at least


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The run with the culprit made average."""

    step_ms: float
    tokens_per_s_global: float | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """One finding. `excess_ms`: by how much the culprit's own time exceeds its peers' in the steps it is slow in;
    `share`: what it costs the run, as a fraction of its time; `confidence`: the fraction of the steps in question that
    show it by themselves."""

    kind: str
    ranks: tuple[int, ...] = ()
    node: str | None = None
    phase: str | None = None
    state: str | None = None
    excess_ms: float = 0.0
    share: float = 0.0
    first_step: int = 0
    last_step: int = 0
    confidence: float = 0.0
    cause: str = ""
    sentence: str = ""
    advice: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)
    what_if: WhatIf | None = None

    def as_dict(self) -> dict[str, Any]:
        """As in `bireme report --json`."""
        return {
            "kind": self.kind,
            "ranks": list(self.ranks),
            "node": self.node,
            "phase": self.phase,
            "state": self.state,
            "excess_ms": round(self.excess_ms, 3),
            "share": round(self.share, 4),
            "first_step": self.first_step,
            "last_step": self.last_step,
            "confidence": round(self.confidence, 3),
            "cause": self.cause or None,
            "sentence": self.sentence,
            "advice": self.advice or None,
            "evidence": self.evidence,
            "what_if": None
            if self.what_if is None
            else {
                "step_ms": round(self.what_if.step_ms, 3),
                "tokens_per_s_global": self.what_if.tokens_per_s_global,
            },
        }
