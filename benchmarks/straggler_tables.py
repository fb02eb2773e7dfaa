"""What the scores of verdicts come to: tables for the terminal and for docs/accuracy.md, and the promises kept."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from bireme.errors import UserError

if TYPE_CHECKING:
    from benchmarks.run_scores import CLEAN, GRID, HEALTHY_RUN, JITTERY_RUN, RunScore
    from benchmarks.synthetic import KINDS
    from benchmarks.synthetic_scores import WRONG_RANKS, Score, count_scores, in_band, quantiles
else:
    from run_scores import CLEAN, GRID, HEALTHY_RUN, JITTERY_RUN, RunScore
    from synthetic import KINDS
    from synthetic_scores import WRONG_RANKS, Score, count_scores, in_band, quantiles

VERDICTS = ("healthy", "one_off", "rank", "node", "link", "stage_imbalance", "data_imbalance", "drift", WRONG_RANKS)
MOST_LISTED = 40
LEAST_EFFECT = 0.3  # of a step, of what real runs promise


@dataclass(frozen=True, slots=True)
class Shown:
    """One table."""

    title: str
    heading: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Promise:
    what: str
    value: str
    wanted: str
    met: bool


@dataclass(slots=True)
class Part:
    """What one part of the suite shows. `wrong`: every case with a flaw, and how to see it again."""

    name: str
    promises: list[Promise] = field(default_factory=list)
    tables: list[Shown] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def promise(
        self, what: str, value: float | None, form: str, *, least: float | None = None, most: float | None = None
    ) -> None:
        """A number that is not there (no case of the kind) misses nothing."""
        if value is None:
            return
        met = (least is None or value >= least) and (most is None or value <= most)
        wanted = [f">= {least:g}"] if least is not None else []
        wanted += [f"<= {most:g}"] if most is not None else []
        self.promises.append(Promise(what, format(value, form), ", ".join(wanted), met))

    def all_tables(self) -> list[Shown]:
        rows = [(each.what, each.value, each.wanted, "met" if each.met else "MISSED") for each in self.promises]
        return [Shown("Promised", ("", "measured", "promised", ""), rows), *self.tables]

    def show(self, console: Console) -> None:
        for each in self.all_tables():
            table = Table(title=each.title, title_justify="left")
            for number, heading in enumerate(each.heading):
                table.add_column(heading, justify="right" if number else "left", no_wrap=True)
            for row in each.rows:
                table.add_row(*row)
            console.width = max(console.width, 160)
            console.print(table)
        for line in self.wrong:
            console.print(f"wrong: {line}", highlight=False, markup=False)

    def as_dict(self) -> dict[str, Any]:
        tables = {each.title: [each.heading, *each.rows] for each in self.all_tables()}
        return {"tables": tables, "wrong": self.wrong}

    def as_markdown(self) -> str:
        blocks = []
        for each in self.all_tables():
            lines = [f"**{each.title}**", ""]
            lines += ["| " + " | ".join(row) + " |" for row in (each.heading, ("---",) * len(each.heading), *each.rows)]
            blocks.append("\n".join(lines))
        if self.wrong:
            listed = [f"* {_plain(line)}" for line in self.wrong[:MOST_LISTED]]
            more = len(self.wrong) - MOST_LISTED
            listed += [f"* and {more} more, in runs/benchmarks/stragglers.json"] if more > 0 else []
            blocks.append("\n".join(["**With a flaw**", "", *listed]))
        return "\n\n".join(blocks)


def _plain(line: str) -> str:
    """One line that Markdown takes as it is."""
    words = "".join(each if each.isprintable() else " " for each in line).split()
    return " ".join(words).replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;").replace("_", "\\_")


def renew(document: Path, part: Part, command: str, where: str) -> None:
    """The part's tables, between its markers in the document. UserError where they are missing."""
    text = document.read_text()
    begin, end = f"<!-- {part.name} -->", f"<!-- /{part.name} -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise UserError(f"{document} has no place for {part.name}: put {begin} and {end} where its tables belong")
    before, after = text.split(begin)[0], text.split(end)[1]
    middle = f"\n    {command}\n\n{where}.\n\n{part.as_markdown()}\n\n"
    temporary = document.with_name(document.name + ".partial")
    temporary.write_text(f"{before}{begin}\n{middle}{end}{after}")
    temporary.replace(document)


def _percent(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{100 * value:.{digits}f} %"


def _steps(counted: dict[str, float] | None) -> str:
    return "" if counted is None else f"{counted['median']:.0f} ({counted['p90']:.0f})"


# --- made-up runs ------------------------------------------------------------------------------------------------


def synthetic_part(strong: Sequence[Score], healthy: Sequence[Score], weak: Sequence[Score]) -> Part:
    part = Part("synthetic")
    counted = count_scores(strong)

    def of(kind: str) -> list[Score]:
        return [score for score in strong if score.kind == kind]

    def rate(scores: Sequence[Score], good: Callable[[Score], bool]) -> float | None:
        return fmean(good(score) for score in scores) if scores else None

    part.promise("precision: right ones of all alarms", counted["precision"], ".4f", least=0.99)
    part.promise("recall: culprits that are named", counted["recall"], ".4f", least=0.98)
    part.promise("right cause, of those", counted["right_cause"], ".4f", least=0.97)
    alarms = rate(healthy, lambda score: score.alarms > 0)
    part.promise("healthy with 3 % noise: alarms", alarms, ".4f", most=0.01)
    for kind, what, label in (
        ("spike", "one slow step: one-off", "one_off"),
        ("imbalance", "slow in turn: data imbalance", "data_imbalance"),
        ("tiny", "twice as slow in a 1 ms phase: no alarm", None),
    ):
        if label is None:
            value = rate(of(kind), lambda score: score.alarms == 0)
        else:
            value = rate(of(kind), lambda score, label=label: score.right and score.given == label)  # type: ignore[misc]
        part.promise(what, value, ".4f", least=0.98)

    rows = []
    for kind in KINDS:
        given = Counter(score.given for score in of(kind))
        rows.append((kind, str(len(of(kind))), *(str(given[each] or "") for each in VERDICTS)))
    part.tables.append(Shown("Planted, and the verdict given", ("planted", "cases", *VERDICTS), rows))
    part.tables.append(
        Shown(
            "By kind; steps to detect and error of the what-if: median (90th percentile)",
            ("planted", "cases", "false alarms", "recall", "right cause", "steps to detect", "what-if off by"),
            [_kind_row(kind, of(kind)) for kind in KINDS] + [_kind_row("all", strong)],
        )
    )
    usual = [score for score in strong if score.alarm and score.kind != "imbalance"]
    for what, bands in (
        ("effect", ((0.10, 0.20), (0.20, 0.30), (0.30, 0.5001))),
        ("noise", ((0.01, 0.03), (0.03, 0.06), (0.06, 0.1001))),
        ("size", ((8, 17), (32, 129), (256, 1025))),
    ):
        rows = [_band_row(what, low, high, in_band(usual, what, low, high)) for low, high in bands]
        part.tables.append(Shown(f"By {_BANDS[what]}", (_BANDS[what], *_BAND_HEADING), rows))
    edges = [0.0, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08, 0.1001]
    rows = [_band_row("effect", low, high, in_band(weak, "effect", low, high)) for low, high in pairwise(edges)]
    part.tables.append(Shown("Effects below 10 %: nothing is promised", (_BANDS["effect"], *_BAND_HEADING), rows))
    for score in (*strong, *healthy):
        if not score.flawless:
            part.wrong.append(
                f"make({score.kind!r}, {score.seed}{', noise=0.03' if score in healthy else ''}): {score.size} ranks, "
                f"effect {100 * score.effect:.0f} %, noise {100 * score.noise:.1f} %, said: {score.told}"
            )
    return part


_BANDS = {"effect": "effect, of the step", "noise": "noise, of the step", "size": "ranks"}
_BAND_HEADING = ("cases", "precision", "recall", "right cause", "steps to detect")


def _kind_row(name: str, scores: Sequence[Score]) -> tuple[str, ...]:
    counted = count_scores(scores)
    error = counted["worth_error"]
    off = "" if error is None else f"{100 * error['median']:.1f} % ({100 * error['p90']:.1f} %)"
    return (
        name,
        str(counted["cases"]),
        str(counted["false_alarms"]),
        _percent(counted["recall"]),
        _percent(counted["right_cause"]),
        _steps(counted["steps_to_detect"]),
        off,
    )


def _band_row(what: str, low: float, high: float, scores: Sequence[Score]) -> tuple[str, ...]:
    counted = count_scores(scores)
    band = f"{low:.0f} to {high - 1:.0f}" if what == "size" else f"{100 * low:.0f} to {100 * high:.0f} %"
    return (
        band,
        str(counted["cases"]),
        _percent(counted["precision"]),
        _percent(counted["recall"]),
        _percent(counted["right_cause"]),
        _steps(counted["steps_to_detect"]),
    )


# --- real runs ---------------------------------------------------------------------------------------------------


def _flaws(scores: Sequence[RunScore]) -> list[str]:
    lines = []
    for score in scores:
        said = [score.problem] if score.problem else []
        said += [f"given: {score.given}"] if not score.problem and not score.right else []
        said += [f"at the end: {each}" for each in score.wrong] + [f"live, {each}" for each in score.wrong_live]
        if said:
            host = ", ".join(f"{name} {value:.3g}" for name, value in score.host.items())
            name = f"{score.name} (not counted)" if score.disturbed else score.name
            lines.append(f"{name}: {'; '.join(said)} (machine: {host}) `{score.command}`")
    return lines


def real_part(scores: Sequence[RunScore]) -> Part:
    part = Part("real", wrong=_flaws(scores))
    mine = [score for score in scores if score.group == GRID]
    counted = [score for score in mine if not score.disturbed]
    strong = [score for score in counted if score.effect is None or score.effect >= LEAST_EFFECT]
    if mine:
        missed = len(strong) - sum(score.right for score in strong)
        part.promise(f"wrong culprit or phase, of {len(strong)} runs", float(missed), ".0f", most=0)
    names: dict[str, list[RunScore]] = {}
    for score in [*counted, *(score for score in scores if score.group != GRID)]:
        name = score.name.split(" ", 1)[1] if score.group == GRID else f"{score.name} (4 ranks, 2 nodes)"
        for end in (", rank 0", ", rank 1", ", node 0", ", node 1"):
            name = name.removesuffix(end)
        names.setdefault(name.rstrip("0123456789 "), []).append(score)
    heading = (
        "planted",
        "runs",
        "right",
        "culprit",
        "phase, state",
        "other alarms",
        "effect",
        "seen live",
        "steps to detect",
    )
    rows = [_run_row(name, group) for name, group in names.items()]
    rows.append(_run_row(f"all with 2 ranks, effect {100 * LEAST_EFFECT:.0f} % and more", strong))
    disturbed = [score for score in mine if score.disturbed]
    if disturbed:
        rows.append(_run_row("not counted: other processes took the cores", disturbed))
    part.tables.append(Shown("Real runs; steps to detect: median (90th percentile), live", heading, rows))
    return part


def _run_row(name: str, scores: Sequence[RunScore]) -> tuple[str, ...]:
    effects = [score.effect for score in scores if score.effect is not None]
    spread = "" if not effects else f"{100 * min(effects):.0f} to {100 * max(effects):.0f} %"
    waits = [score.steps_to_detect for score in scores if score.steps_to_detect is not None]
    return (
        name,
        str(len(scores)),
        str(sum(score.right for score in scores)),
        str(sum(score.culprit for score in scores)),
        str(sum(score.culprit and score.place for score in scores)),
        str(sum(len([each for each in score.wrong if not each.startswith("elsewhere")]) for score in scores)),
        spread,
        str(len(waits)),
        _steps(quantiles(waits)),
    )


def controls_part(scores: Sequence[RunScore]) -> Part:
    part = Part("controls", wrong=_flaws(scores))
    rows = []
    for group in (HEALTHY_RUN, JITTERY_RUN):
        all_of_group = [score for score in scores if score.group == group]
        mine = [score for score in all_of_group if not score.disturbed]
        if not mine:
            continue
        alarmed = [score for score in mine if not score.right]
        part.promise(f"{group} runs with an alarm, of {len(mine)}", float(len(alarmed)), ".0f", most=len(mine) / 10)
        unexplained = [score for score in alarmed if score.problem or not score.explained]
        part.promise(f"{group}: alarms that taken or slow cores do not explain", float(len(unexplained)), ".0f", most=0)
        live = [score for score in mine if score.wrong_live]
        steals, others = ([score.host.get(name, 0.0) for score in mine] for name in ("steal", "others"))
        medians = [score.step_ms for score in mine if score.step_ms is not None]
        rows.append(
            (
                group,
                str(len(mine)),
                str(len(alarmed)),
                str(len(live)),
                f"{min(medians):.0f} to {max(medians):.0f} ms" if medians else "",
                f"{100 * max(steals):.1f} %",
                f"{100 * max(others):.1f} %",
            )
        )
    heading = (
        "runs",
        "number",
        "alarm at the end",
        "alarm while running",
        "median step",
        "most steal",
        "most by others",
    )
    part.tables.append(Shown("Controls; steal, and what other processes ran, of all cores' time", heading, rows))
    return part


def what_if_part(scores: Sequence[RunScore]) -> Part:
    """Each injected run's prediction against the clean runs before and after it."""
    part = Part("what-if", wrong=_flaws(scores))
    quiet = [score for score in scores if not score.disturbed]
    clean = [score.step_ms for score in quiet if score.name.endswith(CLEAN) and score.step_ms]
    cases: dict[str, list[tuple[float, float, float]]] = {}
    for before, score, after in zip(scores, scores[1:], scores[2:], strict=False):
        name = score.name.split(" ", 1)[1]
        if any(each.disturbed for each in (before, score, after)):
            continue
        if name != CLEAN and score.predicted_ms and score.step_ms and before.step_ms and after.step_ms:
            measured = (before.step_ms + after.step_ms) / 2
            cases.setdefault(name, []).append((score.step_ms, score.predicted_ms, measured))
    rows = []
    for name, triples in cases.items():
        errors = [predicted / measured - 1 for _, predicted, measured in triples]
        part.promise(f"{name}: median error", median(errors), "+.3f", least=-0.05, most=0.05)
        rows.append(
            (
                name,
                str(len(triples)),
                *(f"{median(each[place] for each in triples):.0f} ms" for place in range(3)),
                ", ".join(f"{100 * error:+.1f} %" for error in errors),
            )
        )
    heading = ("planted", "runs", "step with it", "predicted without", "measured without", "errors")
    part.tables.append(Shown("What-if: medians", heading, rows))
    if clean:
        row = (
            str(len(clean)),
            f"{median(clean):.0f} ms",
            f"{min(clean):.0f} to {max(clean):.0f} ms",
            f"{100 * (min(clean) / median(clean) - 1):+.1f} to {100 * (max(clean) / median(clean) - 1):+.1f} %",
        )
        part.tables.append(
            Shown("The clean runs themselves: median step", ("runs", "median", "range", "around the median"), [row])
        )
    return part
