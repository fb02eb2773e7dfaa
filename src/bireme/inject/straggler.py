"""The short form of an injection, in the environment: STRAGGLER_MS makes one rank sleep in every step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bireme.errors import UserError, nearest

_PHASES = ("input", "forward", "backward", "optimizer")


@dataclass(frozen=True, slots=True)
class Straggler:
    """One rank that sleeps in one phase of every step: the delays, in milliseconds, take turns step by step."""

    delays_ms: tuple[float, ...]
    rank: int
    phase: str = "forward"

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], world_size: int) -> "Straggler | None":
        """From STRAGGLER_MS (one delay or a list), STRAGGLER_RANK (default: the last) and STRAGGLER_PHASE.

        UserError for a delay that is not a number or negative, a rank outside the world, an unknown phase.
        """
        text = environ.get("STRAGGLER_MS", "").strip()
        if not text:
            return None
        delays = []
        for part in text.split(","):
            try:
                delay_ms = float(part)
            except ValueError:
                raise UserError(
                    f"STRAGGLER_MS={text!r}: {part.strip()!r} is not a number of milliseconds: write 150, or 0,50,100"
                ) from None
            if not 0 <= delay_ms < 3_600_000:
                raise UserError(f"STRAGGLER_MS={text!r}: a delay is from 0 to 3600000 ms, not {part.strip()}")
            delays.append(delay_ms)
        rank_text = environ.get("STRAGGLER_RANK", "").strip() or str(world_size - 1)
        try:
            rank = int(rank_text)
        except ValueError:
            raise UserError(f"STRAGGLER_RANK={rank_text!r} is not a whole number") from None
        if not 0 <= rank < world_size:
            raise UserError(f"STRAGGLER_RANK={rank} is outside the world: ranks are 0 to {world_size - 1}")
        phase = environ.get("STRAGGLER_PHASE", "").strip() or "forward"
        if phase not in _PHASES:
            raise UserError(f"STRAGGLER_PHASE={phase!r} is none of {', '.join(_PHASES)}{nearest(phase, _PHASES)}")
        return cls(tuple(delays), rank, phase)

    def delay_ms(self, step: int) -> float:
        """The delay planted in `step` (counted from 1)."""
        return self.delays_ms[(step - 1) % len(self.delays_ms)]

    def truth(self) -> dict[str, Any]:
        """The event that tells a reader of the run what was planted."""
        delays_ms = list(self.delays_ms)
        return {"kind": "sleep", "phase": self.phase, "rank": self.rank, "ranks": [self.rank], "delays_ms": delays_ms}
