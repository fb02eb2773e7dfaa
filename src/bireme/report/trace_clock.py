"""Places what many ranks saw, each by its own clock, on one timeline. Pure.

The timeline is rank 0's clock, at the rate of the fastest clock: so a rank's steps follow each other as they did, and
every duration stays what that rank's own clock measured. Inside a step nothing is stretched.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from bireme.observe.clocks import SAME_CLOCK, ClockLine, Reading, fit
from bireme.observe.trace_steps import stretches
from bireme.trace_reader import Trace, TracedStep


@dataclass(frozen=True, slots=True)
class Place:
    """Where a step of a rank is: `shift_ns` leads from its clock to the timeline. `error_bound_ns`: by how much
    a moment of it may be misplaced at most, against rank 0; None where the rank's clock was never compared."""

    shift_ns: int
    error_bound_ns: int | None
    offset_ns: int  # of the rank's clock to rank 0's, when the step began
    drift: float


Key = tuple[int, int]  # rank, step


def places(trace: Trace) -> dict[Key, Place]:
    """The place of every traced step of every rank."""
    lines: dict[Key, ClockLine] = {}
    unknown: set[Key] = set()
    steps = {(each.rank, each.step): each for each in trace.steps}
    for first, last in stretches(sorted({each.step for each in trace.steps})):
        here = [each for each in trace.steps if first <= each.step <= last]
        found = _clock_lines(trace, first, last)
        missing = sorted({each.rank for each in here} - set(found))
        for rank in missing:
            found[rank] = _by_its_start(rank, here, found)
        for each in here:
            lines[each.rank, each.step] = found[each.rank]
            if each.rank in missing:
                unknown.add((each.rank, each.step))
    return _placed(steps, lines, unknown)


def _clock_lines(trace: Trace, first: int, last: int) -> dict[int, ClockLine]:
    """The clocks of the ranks during these steps, from the readings around and within them."""
    before = [each for each in trace.clocks if each[0] < first][-1:]
    within = [each for each in trace.clocks if first <= each[0] < last]
    after = [each for each in trace.clocks if each[0] >= last][:1]
    readings: dict[int, list[Reading]] = {}
    for _, by_rank in (*before, *within, *after):
        for rank, numbers in by_rank.items():
            readings.setdefault(rank, []).append(Reading(*numbers))
    return {0: SAME_CLOCK, **{rank: fit(each) for rank, each in readings.items() if rank != 0}}


def _by_its_start(rank: int, here: list[TracedStep], known: Mapping[int, ClockLine]) -> ClockLine:
    """A clock that was never compared: its first step begins when another rank's does, for want of better."""
    own = min((each for each in here if each.rank == rank), key=lambda each: each.step)
    for other in here:
        if other.step == own.step and other.rank in known:
            offset_ns = own.start_ns - known[other.rank].to_rank_0(other.start_ns)
            return ClockLine(own.start_ns, offset_ns, 0.0, own.start_ns, own.end_ns, 0)
    return SAME_CLOCK


def _placed(steps: Mapping[Key, TracedStep], lines: Mapping[Key, ClockLine], unknown: set[Key]) -> dict[Key, Place]:
    origin_ns = min(lines[key].to_rank_0(step.start_ns) for key, step in steps.items())
    rate = 1.0 / min([1.0, *(1.0 - line.drift for line in lines.values())])
    placed: dict[Key, Place] = {}
    ends_ns: dict[int, int] = {}  # of each rank's last step so far
    for key in sorted(steps):
        step, line = steps[key], lines[key]
        begins_ns = round(rate * (line.to_rank_0(step.start_ns) - origin_ns))
        begins_ns = max(begins_ns, ends_ns.get(step.rank, begins_ns))  # two fits differ by less than what is between
        wall_ns = step.end_ns - step.start_ns
        ends_ns[step.rank] = begins_ns + wall_ns
        bound_ns = max(line.bound_ns(step.start_ns), line.bound_ns(step.end_ns))
        bound_ns += ceil(wall_ns * max(0.0, rate * (1.0 - line.drift) - 1.0))  # it is placed by its start
        placed[key] = Place(
            shift_ns=begins_ns - step.start_ns,
            error_bound_ns=None if key in unknown else bound_ns,
            offset_ns=line.offset_at(step.start_ns),
            drift=line.drift,
        )
    return placed
