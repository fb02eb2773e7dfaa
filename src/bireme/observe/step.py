"""What `monitor.step()` gives: the handle of one step while it lasts."""

from types import TracebackType
from typing import Any, Protocol, Self

from bireme.observe.phases import Observation


class EndsSteps(Protocol):
    """A monitor, as a step knows it."""

    def _begin_step(self) -> bool: ...
    def _leave_step(self, complete: bool) -> None: ...


class Step:
    """One step of the loop, while it lasts: a `with` block whose end is the end of the step."""

    __slots__ = ("_counts", "_monitor", "_observation")

    def __init__(self, monitor: EndsSteps, observation: Observation):
        self._monitor = monitor
        self._observation = observation
        self._counts = False

    def loss(self, mean: Any, tokens: int | None = None) -> None:
        """The step's mean loss on this rank: a number or a scalar tensor, read later and never here.

        `tokens`: how many it is the mean of; ranks are weighted by them. Without, every rank counts alike.
        """
        self._observation.loss = mean.detach() if hasattr(mean, "detach") else mean
        self._observation.loss_count = tokens

    def tokens(self, number: int) -> None:
        """This rank's distinct tokens of the step, where they are not known before it."""
        self._observation.tokens = number

    def record(self, **facts: Any) -> None:
        """Numbers or scalar tensors that belong to the step's record (rank 0's are kept)."""
        self._observation.facts.update(facts)

    def samples(self, place: int, ids: Any) -> None:
        """Logs the ids of the samples that this rank trains on in this step; `place` orders the ranks' shares."""
        self._observation.samples = (place, [int(each) for each in ids])

    def skip(self, why: str) -> None:
        """Keeps this step out of averages, because something happened in it that training does not do."""
        self._observation.skipped = why

    def __enter__(self) -> Self:
        self._counts = self._monitor._begin_step()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._counts:
            self._counts = False
            self._monitor._leave_step(complete=kind is None)
