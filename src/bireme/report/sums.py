"""What a record adds up to: sums over ranks, steps and collectives in whole nanoseconds, exact. Pure.

Of a thousand ranks and steps that is a billion additions: arrays make them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bireme.ledger import PHASES, STATES, bus_bandwidth_factor
from bireme.run_reader import Run

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Integers = NDArray[np.int64] | NDArray[np.object_]

Step = dict[str, Any]

_SAFE = 1 << 40  # nanoseconds are 18 minutes; four million of them fit 62 bits


def present_ranks(step: Mapping[str, Any]) -> list[int]:
    """The ranks that recorded this step."""
    return [rank for rank, start_ns in enumerate(step["start_ns"]) if start_ns is not None]


def known(values: Sequence[Any]) -> list[Any]:
    """Of an array by rank: the values of those that recorded the step."""
    return [value for value in values if value is not None]


def integers(rows: Sequence[Any]) -> "Integers":
    """Whole numbers as an array to add up: as Python's own where sums of as many as there are could exceed 64 bits."""
    import numpy as np

    array = np.array(rows, dtype=np.int64)
    return array if not array.size or int(np.abs(array).max()) < _SAFE else array.astype(object)


def mean_over_steps(steps: Sequence[Step], sums_ns: Callable[[Step], list[int]]) -> list[float]:
    """Column by column: the mean over the ranks of a step (whose sums over ranks `sums_ns` gives), then over the steps;
    nanoseconds in, milliseconds out."""
    means = []
    for step in steps:
        count = len(known(step["start_ns"]))
        means.append([total / count for total in sums_ns(step)])
    return [sum(column) / len(column) / 1e6 for column in zip(*means, strict=True)]


def cells_per_rank(run: Run, measured: Sequence[Step], cells_ns: "dict[int, Integers]") -> list[tuple[int, list[int]]]:
    """Of each rank: how many measured steps it recorded, and the sums of their cells."""
    import numpy as np

    recorded = np.zeros(run.world_size, dtype=np.int64)
    totals: Any = np.zeros((run.world_size, len(PHASES) * len(STATES)), dtype=np.int64)
    for step in measured:
        here, cells = present_ranks(step), cells_ns[id(step)]
        recorded[here] += 1
        totals = totals.astype(cells.dtype, copy=False) if cells.dtype == object else totals
        totals[here] += cells
    return list(zip(recorded.tolist(), totals.tolist(), strict=True))


def closure_error_ns(run: Run, cells_ns: "dict[int, Integers] | None" = None) -> int:
    """By how much the ledger does not close, over all steps and ranks (skipped ones too); 0 when it closes.

    Two sums that do not know of each other: the cells of every step, and (end of the last step - start of the first),
    per rank. A single step that does not add up counts as well, in case errors cancel. Where a step number is absent
    (a damaged line, a rank that was gone) no such second sum exists: each stretch without gap is held to it.
    `cells_ns`: by id of a step's line the cells of the ranks that recorded it, where the caller has them already.
    """
    import numpy as np

    largest = 0
    summed: Any = np.zeros(run.world_size, dtype=np.int64)  # of the stretch so far
    first_ns = np.zeros(run.world_size, dtype=np.int64)
    last_step = np.full(run.world_size, np.iinfo(np.int64).min)
    for step in run.steps:
        here = present_ranks(step)
        if not here:
            continue
        cells = integers(known(step["cells_ns"])) if cells_ns is None else cells_ns[id(step)]
        start_ns, end_ns = (np.array(known(step[name]), dtype=np.int64) for name in ("start_ns", "end_ns"))
        step_ns = cells.sum(axis=1)
        begins = last_step[here] != step["step"] - 1
        first_ns[here] = np.where(begins, start_ns, first_ns[here])
        stretch = np.where(begins, 0, summed[here]) + step_ns
        summed = summed.astype(stretch.dtype, copy=False)
        summed[here] = stretch
        last_step[here] = step["step"]
        off = (abs(step_ns - (end_ns - start_ns)).max(), abs(stretch - (end_ns - first_ns[here])).max())
        largest = max(largest, *map(int, off))
    return largest


def collectives(run: Run, measured: Sequence[Step]) -> list[dict[str, Any]]:
    """Per group and operation: the mean over the group's members and the measured steps they recorded."""
    # Every number is a sum over (member, step): count, bytes, transfer, wait, and bytes and transfer where the split
    # of all collectives is known. Only those give a rate: elsewhere there are bytes without their time.
    import numpy as np

    places: dict[tuple[int, str], int] = {}
    sums: list[list[int]] = []
    recorded_by = [0] * run.world_size
    for step in measured:
        here = present_ranks(step)
        for rank in here:
            recorded_by[rank] += 1
        uses = [use for rank in here for use in step["collectives"][rank]]
        if not uses:
            continue
        matched = [step["unmatched"][rank] == 0 for rank in here for _ in step["collectives"][rank]]
        groups, operations, *numbers = zip(*uses, strict=True)
        kinds = [places.setdefault(key, len(places)) for key in zip(groups, operations, strict=True)]
        sums += [[0] * 6 for _ in range(len(places) - len(sums))]
        values = integers(numbers)
        rows = np.concatenate([values, values[[1, 2]] * np.array(matched)]).T
        totals = np.zeros((len(places), 6), dtype=rows.dtype)
        np.add.at(totals, kinds, rows)
        sums = [[a + b for a, b in zip(old, new, strict=True)] for old, new in zip(sums, totals.tolist(), strict=True)]
    result = []
    for (group, operation), place in sorted(places.items()):
        ranks, totals_of = run.facts["groups"][group]["ranks"], sums[place]
        recorded = sum(recorded_by[rank] for rank in set(ranks)) or 1
        count, size, transfer_ns, wait_ns, known_bytes, known_transfer_ns = totals_of
        reason = None
        if operation == "barrier" or not size:
            reason = "it moves no bytes"
        elif len(ranks) < 2:
            reason = "the group has one member: nothing crosses a link"
        elif known_transfer_ns <= 0:
            reason = "no transfer time is known"
        rate = None if reason else bus_bandwidth_factor(operation, len(ranks)) * known_bytes / known_transfer_ns * 1e9
        result.append(
            {
                "group": run.facts["groups"][group]["name"],
                "ranks": ranks,
                "operation": operation,
                "count": count / recorded,
                "bytes": size / recorded,
                "transfer_ms": transfer_ns / recorded / 1e6,
                "wait_ms": wait_ns / recorded / 1e6,
                **or_reason("bus_bandwidth_bytes_per_s", rate, reason),
            }
        )
    return result


def or_reason(name: str, value: Any, reason: str | None) -> dict[str, Any]:
    return {name: value} if reason is None else {name: None, f"{name}_reason": reason}
