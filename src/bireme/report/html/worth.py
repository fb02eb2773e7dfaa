"""MFU with its convention, and what a step would take without each loss: simple arithmetic, an estimate. Pure."""

from typing import Any

from bireme.report.html.losses import LOSSES, PARTS, mean_cells, split
from bireme.report.terminal import ms, percent, scaled
from bireme.run_reader import Run, is_number
from bireme.verdict.kinds import HEALTHY, ONE_OFF

_FLOPS = {"MFLOP/s": 1e6, "GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15}
_SMALL = 0.005  # of the step
_KINDS = {"rank": "rank", "node": "node", "link": "slow link", "drift": "drift"}


def mfu_rows(run: Run, summary: dict[str, Any]) -> list[list[str]]:
    """[name, value, what it is] of every convention, and the peak."""
    mfu = summary["mfu"]
    model = run.facts.get("model") or {}
    flops = model.get("flops_per_token") or {}
    peak = mfu["peak_flops_per_s"]
    rows = []
    for name, key, what in (
        ("MFU, full attention", "value", mfu["convention"]),
        ("MFU, causal attention", "value_causal", "as above, with attention counted for the causal half"),
    ):
        rows.append([name, percent(mfu[key]), mfu.get(f"{key}_reason") or what])
    repeated: Any = flops.get("recomputation_full")
    if mfu["value"] is not None and is_number(repeated) and repeated > 0:  # with a value there is `full` too
        hfu = mfu["value"] * (1 + repeated / flops["full"])
        rows.append(["HFU, full attention", percent(hfu), "with recomputation"])
    source = mfu["peak_source"] or mfu.get("peak_source_reason") or "source not recorded"
    rows.append(
        [
            "peak, all ranks",
            "n/a" if peak is None else scaled(peak, _FLOPS),
            mfu.get("peak_flops_per_s_reason") or source,
        ]
    )
    return rows


def worth_rows(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """What the mean step, the rate and MFU would be without each loss: `label`, `state`, `step_ms` and texts.

    Without a part of the ledger: the step less that part, on every rank. Without a verdict's culprit: the verdict's
    own what-if, which knows that the next slowest rank limits the step.
    """
    step_ms = summary["step_ms"]["mean"]
    ledgers = [
        [value for cells in ledger.values() for value in cells.values()] for ledger in summary["ledger_ms"].values()
    ]
    parts = split(mean_cells([each for each in ledgers if any(value is not None for value in each)]))
    rows = [_row("as it is", None, step_ms, 1.0, summary, "measured")]
    for verdict in summary["verdicts"] or []:
        worth = verdict["what_if"]
        if verdict["kind"] not in (HEALTHY, ONE_OFF) and worth is not None and step_ms > 0 and verdict["share"] < 1:
            rate, now = worth["tokens_per_s_global"], summary["tokens_per_s_global"]
            faster = rate / now if rate and now else 1 / (1 - verdict["share"])
            cured = _row(_name(verdict), "wait", step_ms / faster, faster, summary, "the verdict's what-if")
            rows.append(cured)
    removed = 0.0
    for part in LOSSES:
        value = parts[part] or 0.0
        removed += value
        if value >= _SMALL * step_ms and value < step_ms:
            state, label, _ = PARTS[part]
            rows.append(_row(f"without {label}", state, step_ms - value, step_ms / (step_ms - value), summary, ""))
    if len(rows) > 2 and 0 < removed < step_ms:
        left = step_ms - removed
        rows.append(_row("computing alone", "running", left, step_ms / left, summary, "without any of these"))
    return rows


def _name(verdict: dict[str, Any]) -> str:
    ranks = verdict["ranks"]
    if verdict["kind"] == "rank" and len(ranks) == 1:
        return f"with rank {ranks[0]} as fast as its peers"
    if verdict["kind"] == "node" and verdict["node"]:
        return f"with node {verdict['node']} as fast as the others"
    if verdict["kind"] == "link":
        return "with the link as it should be"
    if verdict["phase"] in ("input", "checkpoint"):
        return f"without the delay in {verdict['phase']}"
    return f"without {_KINDS.get(verdict['kind'], verdict['kind'].replace('_', ' '))}"


def _row(
    label: str, state: str | None, step_ms: float, faster: float, summary: dict[str, Any], detail: str
) -> dict[str, Any]:
    rate, mfu = summary["tokens_per_s_global"], summary["mfu"]["value"]
    value = None if mfu is None else mfu * faster
    return {
        "label": label,
        "detail": detail,
        "state": state,
        "step_ms": round(step_ms, 3),
        "step_text": f"{ms(step_ms)} ms",
        "faster": round(faster, 4),
        "faster_text": f"{faster:.2f} x",
        "rate_text": "n/a" if rate is None else f"{rate * faster:,.0f}",
        "mfu": None if value is None else round(value, 5),
        "mfu_text": "n/a" if value is None else percent(value) if value <= 1 else "above 1: not believed",
    }
