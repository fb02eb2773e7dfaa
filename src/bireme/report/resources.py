"""What a run sent over its links, counted and by formula, and the memory that its ranks held. Pure."""

from collections.abc import Sequence, Set
from typing import Any

from bireme.run_reader import Run, is_number

_Object = dict[str, Any]


def unknown(names: Sequence[str], reason: str) -> _Object:
    """Each of these fields as null, with the reason beside it."""
    return {key: value for name in names for key, value in ((name, None), (f"{name}_reason", reason))}


# --- bytes over a link -------------------------------------------------------------------------------------------


def formula_link_bytes(run: Run) -> float | None:
    """Bytes a step that the busiest node sends over its link, as the trainer's formula has them for the run's layout
    (`bireme.traffic`); None where the run does not say."""
    traffic = run.facts.get("traffic")
    nodes = traffic.get("nodes") if isinstance(traffic, dict) else None
    sent = list(nodes.values()) if isinstance(nodes, dict) else []
    return float(max(sent)) if sent and all(is_number(each) for each in sent) else None


def counted_link_bytes(run: Run, measured: Set[int]) -> float | None:
    """Bytes a step that the interface of the busiest node counted in its busier direction: headers and all that crosses
    the link. Of the windows between two readings only those count whose steps are all `measured`. None without such.
    """
    totals: dict[str, list[int]] = {}  # by node: bytes sent, bytes received, steps
    for event in run.events:
        window: list[Any] = [event.get(name) for name in ("first_step", "last_step", "sent_bytes", "received_bytes")]
        if event["event"] != "traffic" or not all(type(each) is int for each in window):
            continue
        first, last, sent, received = window
        steps = range(first, last + 1)
        if 0 < len(steps) <= len(measured) and all(step in measured for step in steps):
            total = totals.setdefault(str(event.get("node")), [0, 0, 0])
            total[:] = [a + b for a, b in zip(total, (sent, received, len(steps)), strict=True)]
    return max((max(sent, received) / steps for sent, received, steps in totals.values()), default=None)


def link_traffic(run: Run, measured: Set[int]) -> _Object:
    """`counted_link_bytes`, `formula_link_bytes` and the one over the other."""
    counted, formula = counted_link_bytes(run, measured), formula_link_bytes(run)
    numbers: _Object = {"counted_link_bytes": counted, "formula_link_bytes": formula}
    if counted is None:
        one_node = len(run.facts.get("nodes") or ()) == 1
        reason = "there is one node" if one_node else "no reading of the interfaces lies within the measured steps"
        numbers |= unknown(["counted_link_bytes"], reason)
    if formula is None:
        numbers |= unknown(["formula_link_bytes"], "the run does not say what its layout sends")
    if counted is None or formula is None:
        reason = numbers.get("counted_link_bytes_reason") or numbers["formula_link_bytes_reason"]
        return numbers | unknown(["counted_over_formula"], reason)
    if not formula:
        return numbers | unknown(["counted_over_formula"], "nothing of this layout crosses a link")
    return numbers | {"counted_over_formula": counted / formula}


# --- memory -------------------------------------------------------------------------------------------------------


def memory_numbers(run: Run) -> _Object:
    """Memory of the ranks in bytes, each with its largest: `memory_bytes` is the peak that the allocator of a GPU had,
    (`on_device`), on a CPU the peak resident set without what was resident before the model was built; `peak_rss_bytes`
    is all of it."""
    found = [event for event in run.events if event["event"] == "memory" and type(event.get("rank")) is int]
    events = {event["rank"]: event for event in found}
    ranks = [events.get(rank, {}) for rank in range(run.world_size)]
    peaks = [each.get("peak_rss_bytes") for each in ranks]
    if not all(is_number(each) for each in peaks):
        return unknown(["memory_bytes", "peak_rss_bytes"], "not every rank recorded its memory")
    numbers: _Object = {"peak_rss_bytes": _with_largest(peaks), "on_device": False}
    on_device = [each.get("peak_device_bytes") for each in ranks]
    if all(is_number(each) for each in on_device):
        return {**numbers, "memory_bytes": _with_largest(on_device), "on_device": True}
    facts = run.facts.get("memory")
    before = facts.get("before_model_bytes") if isinstance(facts, dict) else None
    if not (isinstance(before, list) and len(before) == len(peaks) and all(is_number(each) for each in before)):
        return {**unknown(["memory_bytes"], "what was resident before the model was built is not recorded"), **numbers}
    return {"memory_bytes": _with_largest([peak - each for peak, each in zip(peaks, before, strict=True)]), **numbers}


def _with_largest(per_rank: list[Any]) -> _Object:
    return {"max": max(per_rank), "per_rank": per_rank}
