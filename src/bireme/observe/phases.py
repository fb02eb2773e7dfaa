"""Where in the program the training thread is: the boundaries of phases, with the clocks read at each."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

from bireme.ledger import PHASES, Interval, Span

OTHER = PHASES.index("other")


class Clock(Protocol):
    """Marks a moment of the training thread; what the mark holds is resolved later, off the training path."""

    def read(self) -> Any: ...


@dataclass(slots=True)
class Observation:
    """What the training thread leaves of one step: only marks, counts and references, to be worked out elsewhere."""

    step: int
    boundaries: list[tuple[int, Any]]  # (phase that begins here, mark); the first is the step's start
    end: Any = None
    spans: list[Span] = field(default_factory=list)  # issued in this step
    pauses: list[tuple[Interval, int, int]] = field(default_factory=list)  # (interval, generation, phase)
    tokens: int = 0
    loss: Any = None  # tensor or number: a mean over loss_count tokens
    loss_count: int | None = None
    skipped: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)  # tensors or numbers, taken from rank 0
    samples: tuple[int, Any] | None = None  # this rank's place in the global batch, and its sample ids
    overhead_ns: int = 0
    forward_flops: int | None = None  # counted in this step


class PhaseTracker:
    """Follows the training thread through phases, which nest, and cuts the timeline into steps without a gap."""

    def __init__(
        self,
        clock: Clock,
        tell: Callable[[int], None] | None = None,
        failed: Callable[[Exception], None] | None = None,
    ):
        """`tell` is called with every phase that begins, `failed` with an error, which the loop never sees."""
        self._clock = clock
        self._tell = tell
        self._failed = failed
        self._phase = OTHER
        self.marked = 0  # how deep in phases that the user marks
        self._boundaries: list[tuple[int, Any]] = []
        self.marks = 0  # clock readings since the last step: the known part of the cost of measuring

    @property
    def phase(self) -> int:
        return self._phase

    @property
    def started(self) -> bool:
        return bool(self._boundaries)

    def enter(self, phase: int) -> int:
        """Begins a phase now; returns the one that it interrupts."""
        before = self._phase
        self._phase = phase
        try:
            self._boundaries.append((phase, self._clock.read()))
            self.marks += 1
            if self._tell is not None:
                self._tell(phase)
        except Exception as error:
            if self._failed is None:
                raise
            self._failed(error)
        return before

    def rename(self, phase: int) -> None:
        """The stretch since the last boundary was this phase, as has become clear; what goes on is as it was."""
        self._boundaries[-1] = (phase, self._boundaries[-1][1])

    def fail(self, before: int) -> None:
        """Leaves a phase on an exception: for whoever asks, the rank is still where it failed."""
        tell, self._tell = self._tell, None
        self.enter(before)
        self._tell = tell

    def cut(self) -> tuple[list[tuple[int, Any]], Any]:
        """Ends the step now: its boundaries and its end. The next step begins at the same reading."""
        end = self._clock.read()
        self.marks += 1
        boundaries, self._boundaries = self._boundaries, [(self._phase, end)]
        return boundaries, end


class Phase:
    """`with` block that is one phase. Made once per phase: entering it costs one clock reading, as does leaving."""

    __slots__ = ("_before", "_index", "_tracker")

    def __init__(self, tracker: PhaseTracker, index: int):
        self._tracker = tracker
        self._index = index
        self._before: list[int] = []

    def __enter__(self) -> None:
        self._tracker.marked += 1
        self._before.append(self._tracker.enter(self._index))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tracker.marked -= 1
        if kind is None:
            self._tracker.enter(self._before.pop())
        else:
            self._tracker.fail(self._before.pop())
