"""What is seen on one rank's training thread: phases, collectives and garbage collections, cut into steps."""

import itertools
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from bireme.errors import UserError
from bireme.ledger import Segment
from bireme.observe.automatic import PhaseFinder
from bireme.observe.collectives import CollectiveObserver, process_groups
from bireme.observe.device import DeviceClock, DeviceCollectiveObserver
from bireme.observe.forward_flops import ForwardFlops
from bireme.observe.garbage import GarbageObserver
from bireme.observe.groups import LateGroups
from bireme.observe.phases import OTHER, Observation, PhaseTracker
from bireme.observe.position import Position
from bireme.observe.thread import ThreadClock

_READINGS = 50  # to learn what one costs


class TrainingThread:
    """Made on the thread that it follows; `device`: "cuda" to follow the compute stream instead. `failed` is told of an
    error in here, which the loop never sees."""

    def __init__(self, device: str, failed: Callable[[Exception], None]):
        self.clock: ThreadClock | DeviceClock = DeviceClock() if device == "cuda" else ThreadClock()
        self.tracker = PhaseTracker(self.clock, self._entered, failed)
        self.finder: PhaseFinder | None = None
        self.collectives: CollectiveObserver
        self._failed = failed
        self._position: Position | None = None
        self._flops: ForwardFlops | None = None
        self._garbage: GarbageObserver | None = None
        self._late: LateGroups | None = None
        self._groups: dict[int, Any] = {}  # by id: those that are observed, or known not to be
        self._excluded: list[int | None] = []  # phases to return to
        self._pauses: list[tuple[tuple[int, int], int, int]] = []
        self._mark_ns = self._cost_of_a_mark()

    def find_phases(self, how: str, models: list[Any], optimizers: list[Any], count_flops: bool) -> None:
        """`how`: "automatic" or "explicit". UserError for another word, and for what has no hooks."""
        if how == "automatic":
            self.finder = PhaseFinder(self.tracker, models, optimizers, self._failed)
        elif how != "explicit":
            raise UserError(f'phases={how!r}: "automatic" or "explicit"')
        if count_flops:
            if not models:
                raise UserError('flops_per_token="count" needs the model: Monitor(..., model=model)')
            self._flops = ForwardFlops(models)

    def observe(self, groups: dict[int, Any], late: LateGroups | None, position: Position | None) -> None:
        """Begins with the collectives of these groups, by their place in the run's table. `late` gets groups that are
        made later (None: they cannot be seen); `position` is told where the thread is."""
        self._position = position
        if isinstance(self.clock, DeviceClock):
            self.collectives = DeviceCollectiveObserver(groups, position)
            self.clock.observer = self.collectives
        else:
            self.collectives = CollectiveObserver(groups, position)
        self._late = late
        self._groups = {id(group): group for group in process_groups()} if late is not None else {}
        self._garbage = GarbageObserver(self._paused)

    def resolve(self, observation: Observation) -> tuple[int, int, list[Segment]]:
        """Start, end and segments of a step; in the background."""
        return (self.clock.resolve if isinstance(self.clock, DeviceClock) else _resolve)(observation)

    # --- steps ---

    def begin(self) -> None:
        """The first step begins now: what was issued before it belongs to no step."""
        self.collectives.take()
        self._pauses.clear()
        if self._flops is not None:
            self._flops.begin()
        self.tracker.enter(OTHER)

    def cut(self, observation: Observation) -> None:
        """The step of this observation has ended: it gets all that was seen in it, and the next one begins."""
        if self._flops is not None:
            observation.forward_flops = self._flops.take()
            self._flops = None
        observation.boundaries, observation.end = self.tracker.cut()
        observation.spans = self.collectives.take()
        observation.pauses, self._pauses = self._pauses, []
        observation.overhead_ns = self.collectives.overhead_ns + self.tracker.marks * self._mark_ns
        self.collectives.overhead_ns = self.tracker.marks = 0
        self.collectives.step = observation.step + 1
        if self.finder is not None:
            self.finder.cut()
        if self._position is not None:
            self._position.begin_step(observation.step + 1)
        self._look_for_groups()

    # --- regions that are left alone ---

    @property
    def excluded(self) -> bool:
        return bool(self._excluded)

    def exclude(self, on: bool) -> None:
        """A region begins; `on`: whether anything is observed at all."""
        self.tracker.marked += 1
        self._excluded.append(self.tracker.enter(OTHER) if on and self.tracker.started else None)
        self.collectives.paused = True

    def include(self, on: bool) -> None:
        if self._excluded:
            self.tracker.marked -= 1
            before = self._excluded.pop()
            if before is not None and on:
                self.tracker.enter(before)
            self.collectives.paused = not on or self.excluded

    # --- the end ---

    def stop_looking(self) -> None:
        """Models, optimizers and PyTorch are as they were."""
        if self.finder is not None:
            self.finder.close()
        if self._flops is not None:
            self._flops.take()
            self._flops = None

    def turn_off(self) -> None:
        """Nothing is kept any more, and the hooks that have to stay do nothing."""
        with suppress(Exception):
            self.stop_looking()
        self.collectives.paused = True
        if self._garbage is not None:
            self._garbage.close()
        self._pauses.clear()

    def close(self) -> None:
        """After the background has read the last clocks: `stop_observing` comes before."""
        self.clock.close()
        # A group that outlives the interpreter's end aborts the process: whoever made it decides when it ends.
        self._groups.clear()

    def stop_observing(self) -> None:
        self.stop_looking()
        self.collectives.close()
        if self._garbage is not None:
            self._garbage.close()

    # --- inside ---

    def _look_for_groups(self) -> None:
        """Groups that were made since the last step are observed from the next one on."""
        if self._late is None:
            return
        groups = {id(group): group for group in process_groups()}
        for known, group in list(self._groups.items()):
            if known not in groups:  # destroyed: it must not live on in here
                self.collectives.drop(group)
                del self._groups[known]
        for known, group in groups.items():
            if known not in self._groups:
                self._groups[known] = group
                self.collectives.add(self._late.add(group), group)

    def _entered(self, phase: int) -> None:
        if self._position is not None:
            self._position.enter(phase)

    def _paused(self, start_ns: int, end_ns: int, generation: int) -> None:
        self._pauses.append(((start_ns, end_ns), generation, self.tracker.phase))

    def _cost_of_a_mark(self) -> int:
        costs = []
        for _ in range(_READINGS):
            start_ns = time.perf_counter_ns()
            self.clock.read()
            costs.append(time.perf_counter_ns() - start_ns)
        return int(statistics.median(costs))


def _resolve(observation: Observation) -> tuple[int, int, list[Segment]]:
    """From the thread's clock readings."""
    marks = [*observation.boundaries, (0, observation.end)]
    segments = [
        Segment(phase, a[0], b[0], b[1] - a[1], b[2] - a[2]) for (phase, a), (_, b) in itertools.pairwise(marks)
    ]
    return marks[0][1][0], observation.end[0], segments
