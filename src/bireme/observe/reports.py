"""What each rank tells rank 0 about a window of steps, and the records that rank 0 makes of what all of them told."""

import logging
from math import isfinite
from typing import Any

import torch

from bireme import ledger
from bireme.ledger import PHASES
from bireme.observe.host import peak_rss_bytes
from bireme.observe.phases import Observation

log = logging.getLogger(__name__)

NOTABLE_PAUSE_NS = 1_000_000
_said_tokens = False


def memory(rank: int) -> dict[str, Any]:
    """The most memory that this rank has had. A process allocates on one GPU; which one, this thread does not know."""
    on_device = None
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        on_device = sum(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count()))
    return {"event": "memory", "rank": rank, "peak_rss_bytes": peak_rss_bytes(), "peak_device_bytes": on_device}


def notable_pauses(observation: Observation, rank: int) -> list[dict[str, Any]]:
    return [
        {
            "event": "gc_pause",
            "rank": rank,
            "step": observation.step,
            "phase": PHASES[phase],
            "generation": generation,
            "ms": round((end_ns - start_ns) / 1e6, 3),
        }
        for (start_ns, end_ns), generation, phase in observation.pauses
        if end_ns - start_ns >= NOTABLE_PAUSE_NS
    ]


def _number(value: Any) -> float | None:
    """A number or scalar tensor as a float; None for anything else, which is no reason to stop measuring."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _tokens(value: Any) -> int:
    """A number of tokens, also one in a tensor; 0 for what is none, with one warning."""
    try:
        if float(value) == int(value) >= 0:
            return int(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    global _said_tokens
    if not _said_tokens:
        _said_tokens = True
        log.warning("tokens=%s is no number of tokens: it counts as none", str(value)[:40])
    return 0


def step_report(observation: Observation, account: ledger.StepLedger) -> dict[str, Any]:
    """What one rank tells rank 0 about one step."""
    loss = _number(observation.loss)
    loss_count = None if observation.loss_count is None else _tokens(observation.loss_count)
    if loss is not None and loss_count is not None:
        loss *= loss_count
    # As text where JSON has no word for it: null would look like no loss.
    total = loss if loss is None or isfinite(loss) else str(loss)
    return {
        "step": observation.step,
        "skipped": observation.skipped,
        "tokens": _tokens(observation.tokens),
        "loss": None if total is None else [total, loss_count],
        "facts": {name: _number(value) for name, value in observation.facts.items()},
        "samples": observation.samples,
        "forward_flops": observation.forward_flops,
        "start_ns": account.start_ns,
        "end_ns": account.end_ns,
        "cells_ns": [cell for row in account.cells for cell in row],
        "hidden_ns": account.hidden_ns,
        "hidden_transfer_ns": account.hidden_transfer_ns,
        "clamped_ns": account.clamped_ns,
        "unlocated_ns": account.unlocated_ns,
        "unmatched": account.unmatched,
        "gc_ns": sum(end_ns - start_ns for (start_ns, end_ns), _, _ in observation.pauses),
        "overhead_ns": observation.overhead_ns,
        "collectives": [
            [use.group, use.operation, use.count, use.bytes, use.transfer_ns, use.wait_ns] for use in account.uses
        ],
    }


_PER_RANK = (
    "start_ns",
    "end_ns",
    "cells_ns",
    "hidden_ns",
    "hidden_transfer_ns",
    "clamped_ns",
    "unlocated_ns",
    "unmatched",
    "gc_ns",
    "overhead_ns",
    "collectives",
)


def assemble(
    reports: list[dict[str, Any]],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """The step records, events and sample ids of a window, from every rank's report in rank order (pure)."""
    lines = []
    samples = []
    for each in zip(*(report["steps"] for report in reports), strict=True):
        first = each[0]
        losses = [(float(step["loss"][0]), step["loss"][1]) for step in each if step["loss"] is not None]
        weights = [1 if count is None else count for _, count in losses]
        loss = sum(total for total, _ in losses) / sum(weights) if losses and sum(weights) else None
        line: dict[str, Any] = {
            **first["facts"],  # first: what was measured is not to be overwritten
            "step": first["step"],
            "skipped": next((step["skipped"] for step in each if step["skipped"]), None),
            "loss": loss if loss is None or isfinite(loss) else None,
            "tokens": sum(step["tokens"] for step in each),
        }
        if loss is not None and line["loss"] is None:
            line["loss_reason"] = str(loss)
        flops = [step["forward_flops"] for step in each if step.get("forward_flops")]
        if len(flops) == len(each):  # of a part nothing follows for the whole
            line["forward_flops"] = sum(flops)
        for name in _PER_RANK:
            line[name] = [step[name] for step in each]
        lines.append(line)
        shares = sorted(step["samples"] for step in each if step.get("samples") is not None)
        if shares:
            samples.append({"step": first["step"], "ids": [sample for _, ids in shares for sample in ids]})
    events = [event for report in reports for event in report["events"]]
    said: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        for message in report["warnings"]:
            said.setdefault(message, []).append(rank)
    events.extend({"event": "warning", "ranks": ranks, "message": message} for message, ranks in said.items())
    return lines, events, samples
