"""Boils a run down to the one object of `bireme report RUN --json` (its fields: docs/run-directory.md). Pure.

Means are taken per step over the ranks that recorded it, then over the measured steps; so the cells of the ledger,
averaged the same way, add up to the mean step time. What cannot be computed is None with a `<field>_reason` beside it.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from bireme.errors import UserError
from bireme.ledger import COMPUTE_PHASES, PHASES, RUNNABLE, RUNNING, STATES, TRANSFER, WAIT, bus_bandwidth_factor
from bireme.links import LinkTable
from bireme.report.resources import link_traffic, memory_numbers
from bireme.report.verdicts import verdicts_of
from bireme.run_reader import Run, is_number
from bireme.text import name_ranks

MFU_CONVENTION = "full attention, head once, embedding 0, no recomputation"

Step = dict[str, Any]
StepFilter = Callable[[Step], bool] | Collection[int]

_WARNINGS_SHOWN = 5


def summarise(run: Run, steps: StepFilter | None = None, links: LinkTable | None = None) -> dict[str, Any]:
    """The summary of a run, over its measured steps (those not skipped), or over those of them that `steps` keeps: a
    function of the step's line, or a collection of step numbers. `links`: what the verdicts hold the run's links
    against. Raises UserError when no step is left."""
    measured = measured_steps(run, steps)
    walls_ms = [_mean(ranks_wall_ms(step)) for step in measured]
    step_ms = {
        "mean": _mean(walls_ms),
        "median": quantile(walls_ms, 0.5),
        "p10": quantile(walls_ms, 0.1),
        "p90": quantile(walls_ms, 0.9),
    }
    cells_ms = _mean_over_steps(measured, lambda step, rank: step["cells_ns"][rank])
    small_ms = _mean_over_steps(measured, lambda step, rank: [step[name][rank] for name in _SMALL])
    overhead_ms = _mean_over_steps(measured, lambda step, rank: step["overhead_ns"][rank])
    no_collectives = run.missing.get("collectives")
    no_run_delay = run.missing.get("run_delay")

    summary: dict[str, Any] = {
        "world_size": run.world_size,
        "nodes": [{"name": node["name"], "ranks": node["ranks"]} for node in run.facts["nodes"]],
        **_or_reason("layout", run.facts.get("layout"), None if run.facts.get("layout") else "not recorded"),
        "roles": _roles(run),
        "steps": {"measured": len(measured), "skipped": sum(step["skipped"] is not None for step in run.steps)},
        "step_ms": step_ms,
    }
    summary |= _or_reason("tokens_per_s_global", *_tokens_per_s(measured))
    summary["mfu"] = _mfu(run, summary["tokens_per_s_global"], summary.get("tokens_per_s_global_reason"))
    summary |= _ledger(run, measured)
    compute = [PHASES.index(phase) for phase in COMPUTE_PHASES]
    summary["compute_ms"] = sum(cells_ms[phase * len(STATES) + RUNNING] for phase in compute)
    summary |= _or_reason("contention_ms", sum(cells_ms[RUNNABLE :: len(STATES)]), no_run_delay)
    communication = {
        "transfer": sum(cells_ms[TRANSFER :: len(STATES)]),
        "wait": sum(cells_ms[WAIT :: len(STATES)]),
        "hidden": small_ms[_SMALL.index("hidden_ns")],
        "hidden_transfer": small_ms[_SMALL.index("hidden_transfer_ns")],
    }
    summary["communication_ms"] = {}
    for name, value in communication.items():
        summary["communication_ms"] |= _or_reason(name, value, no_collectives)
    summary |= _or_reason("communication_share", _communication_share(run, measured), no_collectives)
    summary |= _or_reason("collectives", _collectives(run, measured), no_collectives)
    summary["closure_error_ns"] = closure_error_ns(run)
    summary["clamped_ms"] = small_ms[_SMALL.index("clamped_ns")]
    summary |= _or_reason("unlocated_ms", small_ms[_SMALL.index("unlocated_ns")], no_collectives)
    summary["unmatched"] = sum(value or 0 for step in measured for value in step["unmatched"])
    summary["overhead"] = {
        "ms_per_step": sum(overhead_ms),
        **_or_reason("share", *_ratio(sum(overhead_ms), step_ms["mean"], "the steps took no time")),
        "training_thread_ms": overhead_ms[0],
        "background_ms": overhead_ms[1],
    }
    losses = [step for step in run.earlier_steps if is_number(step.get("loss"))]
    losses += [step for step in run.steps if step.get("loss") is not None or "loss_reason" in step]
    loss = {"first": losses[0].get("loss"), "last": losses[-1].get("loss")} if losses else None
    for name, step in zip(("first", "last"), (losses[0], losses[-1]), strict=True) if loss else ():
        if step.get("loss") is None:
            loss = {**(loss or {}), f"{name}_reason": str(step["loss_reason"])}
    summary |= _or_reason("loss", loss, None if losses else "no loss was recorded")
    chosen = "these are chosen steps: what persists cannot be seen in them"
    summary |= _or_reason("verdicts", *(verdicts_of(run, measured, links) if steps is None else (None, chosen)))
    summary["link_traffic"] = link_traffic(run, {step["step"] for step in measured})
    summary["memory"] = memory_numbers(run)
    summary["host"] = _host(run)
    summary["notes"] = _notes(run)
    return summary


def _no_peak(run: Run) -> str:
    """Why there is no peak to hold the run against."""
    source = (run.facts.get("peak") or {}).get("source")
    if isinstance(source, str) and source.startswith("n/a: "):
        return f"the device's peak is unknown: {source.removeprefix('n/a: ')}"
    return "the peak of this device is unknown"


def _roles(run: Run) -> dict[str, dict[str, int]]:
    """By rank: its place in those dimensions of the mesh that have several ranks; empty where nothing is divided."""
    mesh = run.facts.get("mesh")
    sizes = mesh if isinstance(mesh, dict) else {}
    several = [name for name, size in sizes.items() if is_number(size) and size > 1]
    roles = {}
    for rank, each in enumerate(run.facts.get("ranks") or []):
        role = each.get("role") if isinstance(each, dict) else None
        if isinstance(role, dict) and several not in ([], ["replicate"]):
            roles[str(rank)] = {name: role[name] for name in several if type(role.get(name)) is int}
    return roles


def measured_steps(run: Run, keep: StepFilter | None = None) -> list[Step]:
    """The steps that averages are taken over. Raises UserError when there are none."""
    complete = [step for step in run.steps if present_ranks(step)]
    if not complete:
        damaged = f" ({run.damaged_lines} lines of it are damaged)" if run.damaged_lines else ""
        ended = f"; it {_how_it_ended(run)}" if run.facts["status"] not in ("running", "finished") else ""
        raise UserError(f"run {run.directory} has no complete step yet{damaged}{ended}")
    measured = [step for step in complete if step["skipped"] is None]
    if not measured:
        reasons = ", ".join(sorted({step["skipped"] for step in complete}))
        raise UserError(
            f"run {run.directory} has no measured step yet: its {len(complete)} steps are skipped ({reasons})"
        )
    if keep is None:
        return measured
    kept = [step for step in measured if (keep(step) if callable(keep) else step["step"] in keep)]
    if not kept:
        raise UserError(f"run {run.directory} has none of the steps asked for among its {len(measured)} measured steps")
    return kept


def present_ranks(step: Step) -> list[int]:
    """The ranks that recorded this step."""
    return [rank for rank, start_ns in enumerate(step["start_ns"]) if start_ns is not None]


def ranks_wall_ms(step: Step) -> list[float]:
    """The step's wall time on each rank that recorded it."""
    return [(step["end_ns"][rank] - step["start_ns"][rank]) / 1e6 for rank in present_ranks(step)]


def quantile(values: Iterable[float], q: float) -> float:
    """The q-quantile (0 ... 1) with linear interpolation between the two nearest values."""
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def closure_error_ns(run: Run) -> int:
    """By how much the ledger does not close, over all steps and ranks (skipped ones too); 0 when it closes.

    Two sums that do not know of each other: the cells of every step, and (end of the last step - start of the first),
    per rank. A single step that does not add up counts as well, in case errors cancel. Where a step number is absent
    (a damaged line, a rank that was gone) no such second sum exists: each stretch without gap is held to it.
    """
    largest = 0
    for rank in range(run.world_size):
        cells_ns = first_ns = last_ns = 0
        last_step: int | None = None
        for step in run.steps:
            if step["start_ns"][rank] is None:
                continue
            start_ns, end_ns, here_ns = step["start_ns"][rank], step["end_ns"][rank], sum(step["cells_ns"][rank])
            if last_step is None or step["step"] != last_step + 1:
                cells_ns, first_ns = 0, start_ns
            cells_ns += here_ns
            last_ns, last_step = end_ns, step["step"]
            largest = max(largest, abs(here_ns - (end_ns - start_ns)), abs(cells_ns - (last_ns - first_ns)))
    return largest


# --- helpers -----------------------------------------------------------------------------------------------------

_SMALL = ("hidden_ns", "hidden_transfer_ns", "clamped_ns", "unlocated_ns")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _mean_over_steps(steps: Sequence[Step], vector_ns: Callable[[Step, int], list[int]]) -> list[float]:
    """Column by column: the mean over the ranks of a step, then over the steps; nanoseconds in, milliseconds out."""
    means = []
    for step in steps:
        vectors = [vector_ns(step, rank) for rank in present_ranks(step)]
        means.append([sum(column) / len(vectors) for column in zip(*vectors, strict=True)])
    return [_mean(column) / 1e6 for column in zip(*means, strict=True)]


def _or_reason(name: str, value: Any, reason: str | None) -> dict[str, Any]:
    return {name: value} if reason is None else {name: None, f"{name}_reason": reason}


def _ratio(numerator: float, denominator: float, reason: str) -> tuple[float | None, str | None]:
    return (numerator / denominator, None) if denominator > 0 else (None, reason)


def _tokens_per_s(measured: Sequence[Step]) -> tuple[float | None, str | None]:
    """Distinct tokens / the wall time of the slowest rank, among the ranks that recorded the most measured steps."""
    per_rank: dict[int, tuple[int, int, int]] = {}  # rank: steps, wall_ns, tokens
    for step in measured:
        if step["tokens"] is not None:
            for rank in present_ranks(step):
                steps, wall_ns, tokens = per_rank.get(rank, (0, 0, 0))
                wall_ns += step["end_ns"][rank] - step["start_ns"][rank]
                per_rank[rank] = steps + 1, wall_ns, tokens + step["tokens"]
    _, wall_ns, tokens = max(per_rank.values(), default=(0, 0, 0))
    if not tokens:
        return None, "no token counts were recorded"
    return _ratio(tokens, wall_ns / 1e9, "the steps took no time")


def _mfu(run: Run, tokens_per_s: float | None, no_tokens: str | None) -> dict[str, Any]:
    model, peak = run.facts.get("model") or {}, run.facts.get("peak") or {}
    flops = model.get("flops_per_token") or {}
    peak_flops_per_s = peak.get("flops_per_s")
    no_peak = None if peak_flops_per_s and peak_flops_per_s > 0 else _no_peak(run)

    def utilisation(flops_per_token: float | None) -> tuple[float | None, str | None]:
        if no_peak or no_tokens:
            return None, no_peak or no_tokens
        if not flops_per_token or flops_per_token <= 0:
            return None, "the model's FLOPs per token are unknown"
        assert tokens_per_s is not None and peak_flops_per_s is not None
        value = tokens_per_s * flops_per_token / peak_flops_per_s
        if value > 1:
            return None, f"came out as {value:.3g}, above 1: the peak is probably wrong, or is that of another dtype"
        return value, None

    return {
        **_or_reason("value", *utilisation(flops.get("full"))),
        **_or_reason("value_causal", *utilisation(flops.get("causal"))),
        "convention": MFU_CONVENTION,
        **_or_reason("peak_flops_per_s", peak_flops_per_s, no_peak),
        **_or_reason("peak_source", peak.get("source"), None if peak.get("source") else no_peak or "not recorded"),
    }


def _ledger(run: Run, measured: Sequence[Step]) -> dict[str, Any]:
    """`ledger_ms`: the mean of every cell over the measured steps that the rank recorded."""
    needs = {"transfer": "collectives", "wait": "collectives", "runnable": "run_delay"}
    unknown = {state for state, capability in needs.items() if capability in run.missing}
    reasons = [
        f"{name} not observed: {run.missing[name]}" for name in ("collectives", "run_delay") if name in run.missing
    ]
    ledger_ms: dict[str, Any] = {}
    for rank in range(run.world_size):
        rows = [step["cells_ns"][rank] for step in measured if step["cells_ns"][rank] is not None]
        if not rows:
            reasons.append(f"rank {rank} recorded no measured step")
        means = [sum(column) / len(rows) / 1e6 for column in zip(*rows, strict=True)] if rows else []
        ledger_ms[str(rank)] = {
            phase: {
                state: None if not means or state in unknown else means[p * len(STATES) + s]
                for s, state in enumerate(STATES)
            }
            for p, phase in enumerate(PHASES)
        }
    return {"ledger_ms": ledger_ms} | ({"ledger_ms_reason": "; ".join(reasons)} if reasons else {})


def _communication_share(run: Run, measured: Sequence[Step]) -> float | None:
    """Exposed communication / time, of each rank over its measured steps; the mean over ranks."""
    shares = []
    for rank in range(run.world_size):
        rows = [step["cells_ns"][rank] for step in measured if step["cells_ns"][rank] is not None]
        wall_ns = sum(sum(row) for row in rows)
        if wall_ns > 0:
            exposed_ns = sum(sum(row[TRANSFER :: len(STATES)]) + sum(row[WAIT :: len(STATES)]) for row in rows)
            shares.append(exposed_ns / wall_ns)
    return _mean(shares) if shares else None


def _collectives(run: Run, measured: Sequence[Step]) -> list[dict[str, Any]]:
    """Per group and operation: the mean over the group's members and the measured steps they recorded."""
    # Every number is a sum over (member, step): count, bytes, transfer, wait, and bytes and transfer where the split
    # of all collectives is known. Only those give a rate: elsewhere there are bytes without their time.
    sums: dict[tuple[int, str], list[int]] = {}
    for step in measured:
        for rank in present_ranks(step):
            for group, operation, count, size, transfer_ns, wait_ns in step["collectives"][rank]:
                known = step["unmatched"][rank] == 0
                row = (count, size, transfer_ns, wait_ns, size * known, transfer_ns * known)
                totals = sums.setdefault((group, operation), [0] * len(row))
                totals[:] = [total + value for total, value in zip(totals, row, strict=True)]
    result = []
    for (group, operation), totals in sorted(sums.items()):
        ranks = run.facts["groups"][group]["ranks"]
        recorded = sum(len(set(ranks) & set(present_ranks(step))) for step in measured) or 1
        count, size, transfer_ns, wait_ns, known_bytes, known_transfer_ns = totals
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
                **_or_reason("bus_bandwidth_bytes_per_s", rate, reason),
            }
        )
    return result


def _host(run: Run) -> list[dict[str, Any]]:
    """Per node: time a CPU quota or the hypervisor took, of the run's time. Ranks of a node see the same machine, and
    perhaps only one of them reports: the rank that saw the most speaks for the node."""
    wall_ms = [0.0] * run.world_size
    for step in run.steps:
        for rank in present_ranks(step):
            wall_ms[rank] += (step["end_ns"][rank] - step["start_ns"][rank]) / 1e6
    throttled_ms, steal_ms = [0.0] * run.world_size, [0.0] * run.world_size
    for event in run.events:
        reporter: Any = event.get("rank")
        if event["event"] == "host" and type(reporter) is int and 0 <= reporter < run.world_size:
            for name, total_ms in (("throttled_ms", throttled_ms), ("steal_ms", steal_ms)):
                total_ms[reporter] += event[name] if is_number(event.get(name)) else 0.0
    result = []
    for node in run.facts["nodes"]:
        ranks = [rank for rank in node["ranks"] if wall_ms[rank] > 0]
        shares = {
            # A quota stops cores one by one, and the kernel adds up their times: never more than all of the time.
            "throttled_share": max((min(1.0, throttled_ms[rank] / wall_ms[rank]) for rank in ranks), default=0.0),
            "steal_share": max(
                (min(1.0, steal_ms[rank] / wall_ms[rank] / _cores(run, rank)) for rank in ranks), default=0.0
            ),
        }
        result.append({"node": node["name"], **shares})
    return result


def _cores(run: Run, rank: int) -> int:
    """Number of cores that the rank may use; 1 when it was not recorded."""
    for facts in run.facts.get("ranks") or []:
        if isinstance(facts, dict) and facts.get("rank") == rank and isinstance(facts.get("cores"), list):
            return max(1, len(facts["cores"]))
    return 1


def _how_it_ended(run: Run) -> str:
    """`failed: why`, in one line."""
    status, reason = run.facts["status"], " ".join((run.facts.get("status_reason") or "").split())
    return f"{'was ' if status == 'interrupted' else ''}{status}" + (f": {reason}" if reason else "")


def _notes(run: Run) -> list[str]:
    """What a reader has to know before believing the numbers."""
    notes = []
    status = run.facts["status"]
    if status == "running":
        notes.append(f"the run is not finished, or was killed: {len(run.steps)} steps so far")
    elif status != "finished":
        notes.append(f"the run {_how_it_ended(run)}")
    begun = run.facts.get("resumed_from")
    if isinstance(begun, dict) and not run.earlier_steps and begun.get("checkpoint"):
        notes.append(f"begins after step {begun.get('step')} of {begun['checkpoint']}")
    if run.earlier_steps:
        first = run.facts["first_step"]
        notes.append(f"resumed after step {first - 1}: everything but the first loss is of the steps from {first} on")
    notes += [f"{capability} not observed: {why}" for capability, why in sorted(run.missing.items())]
    if run.damaged_lines:
        notes.append(f"{run.damaged_lines} damaged lines of the record were left out")
    numbers = [step["step"] for step in run.steps]
    gaps = [(a + 1, b - 1) for a, b in itertools.pairwise(numbers) if b > a + 1]
    if gaps:
        listed = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in gaps[:3]) + (", ..." if len(gaps) > 3 else "")
        notes.append(f"steps are absent from the record: {listed}")
    for rank in range(run.world_size):
        recorded = [step["step"] for step in run.steps if step["start_ns"][rank] is not None]
        if len(recorded) < len(run.steps):
            last = f"its last is step {recorded[-1]}" if recorded else "it has none"
            notes.append(
                f"rank {rank} recorded {len(recorded)} of {len(run.steps)} steps ({last}); means leave it out elsewhere"
            )
    warnings: dict[str, list[int]] = {}
    for event in run.events:
        if event["event"] == "warning" and isinstance(event.get("message"), str):
            ranks = event.get("ranks")
            known = [rank for rank in ranks if type(rank) is int] if isinstance(ranks, list) else []
            warnings.setdefault(event["message"], []).extend(known)
    for message, ranks in list(warnings.items())[:_WARNINGS_SHOWN]:
        where = f" ({name_ranks(sorted(set(ranks)))})" if ranks else ""
        notes.append(f"warning{where}: {message}")
    if len(warnings) > _WARNINGS_SHOWN:
        notes.append(f"{len(warnings) - _WARNINGS_SHOWN} more warnings are in events.jsonl")
    return notes
