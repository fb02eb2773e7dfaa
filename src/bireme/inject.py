"""Makes a rank slow on purpose, so that what the measurements say can be held against the truth."""

import time
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
        return {"kind": "sleep", "phase": self.phase, "rank": self.rank, "delays_ms": list(self.delays_ms)}


class Injector:
    """Sleeps on this rank where a straggler is planted. Costs one comparison where none is."""

    def __init__(self, straggler: Straggler | None, rank: int):
        self._straggler = straggler if straggler is not None and straggler.rank == rank else None
        self._delay_s = 0.0

    def begin(self, step: int) -> None:
        if self._straggler is not None:
            self._delay_s = self._straggler.delay_ms(step) / 1000

    def sleep(self, phase: str) -> None:
        """Called inside each phase of the step, once or more; sleeps in the planted one the first time."""
        if self._delay_s and self._straggler is not None and self._straggler.phase == phase:
            delay_s, self._delay_s = self._delay_s, 0.0
            time.sleep(delay_s)

    def plant_in_backward(self, module: Any) -> None:
        """Makes the sleep of phase `backward` happen inside the backward pass, where `module`'s gradient arrives."""
        if self._straggler is None or self._straggler.phase != "backward":
            return

        def arrived(gradient: Any) -> None:
            self.sleep("backward")

        def watch(_module: Any, _inputs: Any, output: Any) -> None:
            if output.requires_grad:
                output.register_hook(arrived)

        module.register_forward_hook(watch)
