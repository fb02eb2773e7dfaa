"""Boils a run down to the one object of `bireme report RUN --json` (its fields: docs/run-directory.md). Pure.

Means are taken per step over the ranks that recorded it, then over the measured steps; so the cells of the ledger,
averaged the same way, add up to the mean step time. What cannot be computed is None with a `<field>_reason` beside it.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from bireme.errors import UserError
from bireme.ledger import COMPUTE_PHASES, PHASES, RUNNABLE, RUNNING, STATES, TRANSFER, WAIT, unobserved_states
from bireme.links import LinkTable
from bireme.report.resources import link_traffic, memory_numbers
from bireme.report.sums import (
    Step,
    cells_per_rank,
    closure_error_ns,
    collectives,
    integers,
    known,
    mean_over_steps,
    or_reason,
    present_ranks,
)
from bireme.report.verdicts import verdicts_of
from bireme.run_reader import Run, is_number
from bireme.text import name_ranks

MFU_CONVENTION = "full attention, head once, embedding 0, no recomputation"

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
    cells_ns = {id(step): integers(known(step["cells_ns"])) for step in run.steps}
    cells_ms = mean_over_steps(measured, lambda step: cells_ns[id(step)].sum(axis=0).tolist())
    small_ms = mean_over_steps(measured, lambda step: [sum(known(step[name])) for name in _SMALL])
    overhead_ms = mean_over_steps(measured, lambda step: list(map(sum, zip(*known(step["overhead_ns"]), strict=True))))
    per_rank = cells_per_rank(run, measured, cells_ns)
    no_collectives = run.missing.get("collectives")
    no_run_delay = run.missing.get("run_delay")

    summary: dict[str, Any] = {
        "world_size": run.world_size,
        "nodes": [{"name": node["name"], "ranks": node["ranks"]} for node in run.facts["nodes"]],
        **or_reason("layout", run.facts.get("layout"), None if run.facts.get("layout") else "not recorded"),
        "roles": _roles(run),
        "steps": {"measured": len(measured), "skipped": sum(step["skipped"] is not None for step in run.steps)},
        "step_ms": step_ms,
    }
    summary |= or_reason("tokens_per_s_global", *_tokens_per_s(measured))
    summary["mfu"] = _mfu(run, summary["tokens_per_s_global"], summary.get("tokens_per_s_global_reason"))
    summary |= _ledger(run, per_rank)
    compute = [PHASES.index(phase) for phase in COMPUTE_PHASES]
    summary["compute_ms"] = sum(cells_ms[phase * len(STATES) + RUNNING] for phase in compute)
    summary |= or_reason("contention_ms", sum(cells_ms[RUNNABLE :: len(STATES)]), no_run_delay)
    communication = {
        "transfer": sum(cells_ms[TRANSFER :: len(STATES)]),
        "wait": sum(cells_ms[WAIT :: len(STATES)]),
        "hidden": small_ms[_SMALL.index("hidden_ns")],
        "hidden_transfer": small_ms[_SMALL.index("hidden_transfer_ns")],
    }
    summary["communication_ms"] = {}
    for name, value in communication.items():
        summary["communication_ms"] |= or_reason(name, value, no_collectives)
    summary |= or_reason("communication_share", _communication_share(per_rank), no_collectives)
    summary |= or_reason("collectives", collectives(run, measured), no_collectives)
    summary["closure_error_ns"] = closure_error_ns(run, cells_ns)
    summary["clamped_ms"] = small_ms[_SMALL.index("clamped_ns")]
    summary |= or_reason("unlocated_ms", small_ms[_SMALL.index("unlocated_ns")], no_collectives)
    summary["unmatched"] = sum(value or 0 for step in measured for value in step["unmatched"])
    summary["overhead"] = {
        "ms_per_step": sum(overhead_ms),
        **or_reason("share", *_ratio(sum(overhead_ms), step_ms["mean"], "the steps took no time")),
        "training_thread_ms": overhead_ms[0],
        "background_ms": overhead_ms[1],
    }
    losses = [step for step in run.earlier_steps if is_number(step.get("loss"))]
    losses += [step for step in run.steps if step.get("loss") is not None or "loss_reason" in step]
    loss = {"first": losses[0].get("loss"), "last": losses[-1].get("loss")} if losses else None
    for name, step in zip(("first", "last"), (losses[0], losses[-1]), strict=True) if loss else ():
        if step.get("loss") is None:
            loss = {**(loss or {}), f"{name}_reason": str(step["loss_reason"])}
    summary |= or_reason("loss", loss, None if losses else "no loss was recorded")
    chosen = "these are chosen steps: what persists cannot be seen in them"
    summary |= or_reason("verdicts", *(verdicts_of(run, measured, links) if steps is None else (None, chosen)))
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


# --- helpers -----------------------------------------------------------------------------------------------------

_SMALL = ("hidden_ns", "hidden_transfer_ns", "clamped_ns", "unlocated_ns")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


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
        **or_reason("value", *utilisation(flops.get("full"))),
        **or_reason("value_causal", *utilisation(flops.get("causal"))),
        "convention": MFU_CONVENTION,
        **or_reason("peak_flops_per_s", peak_flops_per_s, no_peak),
        **or_reason("peak_source", peak.get("source"), None if peak.get("source") else no_peak or "not recorded"),
    }


def _ledger(run: Run, per_rank: Sequence[tuple[int, list[int]]]) -> dict[str, Any]:
    """`ledger_ms`: the mean of every cell over the measured steps that the rank recorded."""
    unknown = unobserved_states(run.missing)
    reasons = [
        f"{name} not observed: {run.missing[name]}" for name in ("collectives", "run_delay") if name in run.missing
    ]
    ledger_ms: dict[str, Any] = {}
    for rank, (recorded, totals_ns) in enumerate(per_rank):
        if not recorded:
            reasons.append(f"rank {rank} recorded no measured step")
        means = [total / recorded / 1e6 for total in totals_ns] if recorded else []
        ledger_ms[str(rank)] = {
            phase: {
                state: None if not means or state in unknown else means[p * len(STATES) + s]
                for s, state in enumerate(STATES)
            }
            for p, phase in enumerate(PHASES)
        }
    return {"ledger_ms": ledger_ms} | ({"ledger_ms_reason": "; ".join(reasons)} if reasons else {})


def _communication_share(per_rank: Sequence[tuple[int, list[int]]]) -> float | None:
    """Exposed communication / time, of each rank over its measured steps; the mean over ranks."""
    shares = []
    for _, totals_ns in per_rank:
        wall_ns = sum(totals_ns)
        if wall_ns > 0:
            exposed_ns = sum(totals_ns[TRANSFER :: len(STATES)]) + sum(totals_ns[WAIT :: len(STATES)])
            shares.append(exposed_ns / wall_ns)
    return _mean(shares) if shares else None


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
    cores = _cores(run)
    result = []
    for node in run.facts["nodes"]:
        ranks = [rank for rank in node["ranks"] if wall_ms[rank] > 0]
        shares = {
            # A quota stops cores one by one, and the kernel adds up their times: never more than all of the time.
            "throttled_share": max((min(1.0, throttled_ms[rank] / wall_ms[rank]) for rank in ranks), default=0.0),
            "steal_share": max((min(1.0, steal_ms[rank] / wall_ms[rank] / cores[rank]) for rank in ranks), default=0.0),
        }
        result.append({"node": node["name"], **shares})
    return result


def _cores(run: Run) -> list[int]:
    """By rank the number of cores that it may use; 1 when it was not recorded."""
    cores = [0] * run.world_size
    for facts in run.facts.get("ranks") or []:
        if isinstance(facts, dict) and isinstance(facts.get("cores"), list):
            rank: Any = facts.get("rank")
            if type(rank) is int and 0 <= rank < run.world_size:
                cores[rank] = cores[rank] or max(1, len(facts["cores"]))
    return [each or 1 for each in cores]


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
