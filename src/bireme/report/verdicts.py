"""The verdicts on a run, for its report: reached anew from the record, and put into words for a terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bireme.errors import UserError
from bireme.links import LinkTable
from bireme.run_reader import Run
from bireme.text import short
from bireme.verdict.kinds import HEALTHY, ONE_OFF

if TYPE_CHECKING:
    from bireme.verdict.evidence import Evidence
    from bireme.verdict.links import Expected


def verdicts_of(
    run: Run, measured: Sequence[dict[str, Any]], links: LinkTable | None = None
) -> tuple[list[dict[str, Any]] | None, str | None]:
    """(verdicts as in `--json`, None), or (None, why there are none)."""
    from bireme.verdict.evidence import NotEnough, from_lines  # late: they load numpy
    from bireme.verdict.judge import judge

    try:
        evidence = from_lines(measured, run.facts, run.events)
    except NotEnough as error:
        return None, str(error)
    verdicts = [verdict.as_dict() for verdict in judge(evidence, _expected(links, evidence))]
    for verdict in verdicts:
        verdict["evidence"] |= {"not_recorded": list(evidence.missing)} if evidence.missing else {}
    return verdicts, None


def _expected(links: LinkTable | None, evidence: "Evidence") -> "Expected | None":
    if links is None:
        return None
    if len(links.ranks) <= int(evidence.ranks.max()):
        raise UserError(
            f"--links: measured with {len(links.ranks)} ranks, and the run has more: measure the same ranks "
            "with `bireme links`"
        )

    def expected_ms(operation: str, ranks: tuple[int, ...], size: float) -> float | None:
        for group in links.groups:
            if tuple(sorted(ranks)) in {tuple(sorted(members)) for members in group.members}:
                try:
                    return links.time_s(operation, size, group.name) * 1e3
                except UserError:  # an operation that was not measured
                    return None
        return None

    return expected_ms


def verdict_lines(summary: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Per verdict what it says, and the lines below it. Nothing here is safe for a terminal yet."""
    if summary["verdicts"] is None:
        return [(f"verdict: n/a ({summary['verdicts_reason']})", [])]
    return [(f"verdict: {verdict['sentence']}", _below(verdict)) for verdict in summary["verdicts"]]


def _below(verdict: dict[str, Any]) -> list[str]:
    lines = []
    if verdict["kind"] == HEALTHY:
        return [f"but {missing}" for missing in verdict["evidence"].get("not_recorded", [])]
    worth = verdict["what_if"]
    if worth is not None and verdict["kind"] != ONE_OFF:
        rate = worth["tokens_per_s_global"]
        share, step_ms = short(100 * verdict["share"]), short(worth["step_ms"])
        text = f"worth: {share} % of the time; a step would take {step_ms} ms without it"
        lines.append(text + (f", {rate:,.0f} tokens/s (global)" if rate is not None else ""))
    lines.append(f"evidence: {_evidence(verdict)}")
    if verdict["advice"]:
        lines.append(f"advice: {verdict['advice']}")
    return lines


_WORDS = {
    "own_ms": "own time {} ms",
    "peers_own_ms": "its peers' {} ms",
    "cell_excess_ms": "{} ms of it in that cell",
    "others_wait_ms": "the others wait {} ms a step",
    "noise_ms": "varies by {} ms from step to step",
    "times_the_noise": "{} times what chance explains",
    "steps": "{} steps",
    "slow_steps": "{} slow steps",
    "period_steps": "every {} steps",
    "pauses": "{} pauses",
    "mean_pause_ms": "of {} ms",
    "peers": "compared with ranks {}",
    "workers": "{} workers",
    "expected_from": "held against {}",
    "typical_step_ms": "a typical step takes {} ms",
    "own_at_first_ms": "own time at first {} ms",
}


def _evidence(verdict: dict[str, Any]) -> str:
    known = [
        words.format(short(value) if isinstance(value := verdict["evidence"][name], float) else value)
        for name, words in _WORDS.items()
        if verdict["evidence"].get(name) not in (None, "", [])
    ]
    known += verdict["evidence"].get("not_recorded", [])
    return ", ".join([*known, f"confidence {verdict['confidence']:.2f}"])
