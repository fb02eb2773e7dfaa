"""What a real training's record has to say about what was planted in it, and whether it does."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bireme.ledger import PHASES
from bireme.report.summary import measured_steps, summarise
from bireme.run_reader import Run
from bireme.verdict.causes import GARBAGE
from bireme.verdict.kinds import DATA, DRIFT, HEALTHY, LINK, NODE, ONE_OFF, RANK, STAGE

GRID, CROWDED, HEALTHY_RUN, JITTERY_RUN, WHAT_IF = "grid", "crowded", "healthy", "jittery", "what-if"
CLEAN = "clean"  # how the names of what-if runs without anything planted end
NO_ALARM = (HEALTHY, ONE_OFF)
MOST_BY_OTHERS = 0.15  # of all cores' time: with less left over there are more ranks than cores


@dataclass(frozen=True, slots=True)
class Expected:
    """What the verdict on an injection has to be; None: anything."""

    kinds: tuple[str, ...]
    ranks: tuple[int, ...] | None
    phases: tuple[str, ...] | None
    state: str | None
    garbage: bool = False

    def culprit(self, verdict: Mapping[str, Any]) -> bool:
        return verdict["kind"] in self.kinds and (self.ranks is None or set(verdict["ranks"]) == set(self.ranks))

    def culprit_so_far(self, verdict: Mapping[str, Any]) -> bool:
        """While it runs: a rank that gets slower bit by bit is a slow rank at first."""
        early = DRIFT in self.kinds and verdict["kind"] == RANK
        return self.culprit({**verdict, "kind": DRIFT} if early else verdict)

    def place(self, verdict: Mapping[str, Any]) -> bool:
        if self.garbage:
            return bool(verdict["cause"] == GARBAGE)
        right_phase = self.phases is None or verdict["phase"] in self.phases
        return right_phase and (self.state is None or verdict["state"] == self.state)


@dataclass(slots=True)
class RunScore:
    """What became of one trial."""

    key: str
    group: str
    name: str
    command: str
    problem: str | None = None
    culprit: bool = False  # kind and ranks are right
    place: bool = False  # phase and state are, too
    given: str = ""  # kind of the most expensive verdict
    wrong: list[str] = field(default_factory=list)  # other alarms at the end
    wrong_live: list[str] = field(default_factory=list)  # while it ran
    explained: bool = True  # of wrong alarms: cores that were taken or slow
    steps_to_detect: int | None = None
    effect: float | None = None  # mean step with it / mean step before it - 1
    step_ms: float | None = None
    predicted_ms: float | None = None  # the median step, were it not for the culprit
    host: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def disturbed(self) -> bool:
        """Whether other processes took so much of the cores that the run is no trial of anything."""
        return self.host.get("others", 0.0) > MOST_BY_OTHERS

    @property
    def right(self) -> bool:
        """Without anything planted: no alarm at the end."""
        if self.problem is not None:
            return False
        if self.group in (HEALTHY_RUN, JITTERY_RUN) or self.name.endswith(CLEAN):
            return not self.wrong
        return self.culprit and self.place


def expected_of(event: Mapping[str, Any], facts: Mapping[str, Any]) -> Expected:
    """From an `injection` event, the truth, and run.json."""
    kind, phase = event["kind"], event["phase"]
    ranks = tuple(event["ranks"])
    phases = (phase,) if phase is not None else None
    whole_node = any(tuple(node["ranks"]) == ranks for node in facts["nodes"]) and len(facts["nodes"]) > 1
    kinds = ((NODE,) if len(ranks) > 1 else (RANK, NODE)) if whole_node else (RANK,)
    table = {
        "sleep": Expected(kinds, ranks, phases, "blocked"),
        "compute": Expected(kinds, ranks, phases, "running"),
        "contention": Expected(kinds, ranks, None, "runnable"),
        "pause": Expected(kinds, ranks, None, "blocked"),
        "input": Expected(kinds, ranks, ("input",), "blocked"),
        "gc": Expected(kinds, ranks, None, None, garbage=True),
        "checkpoint": Expected(kinds, ranks, ("checkpoint",), "blocked"),
        "imbalance": Expected((DATA,), None, phases, "running"),
        "stage": Expected((STAGE,), ranks, ("forward", "backward"), "running"),
        "drift": Expected((DRIFT,), ranks, phases, "running"),
        "link": Expected((LINK,), tuple(range(facts["world_size"])), None, "transfer"),
    }
    return table[kind]


def score_run(run: Run, score: RunScore) -> None:
    """Fills in what the record says."""
    summary = summarise(run)
    verdicts = summary["verdicts"] or []
    alarms = [verdict for verdict in verdicts if verdict["kind"] not in NO_ALARM]
    planted = [event for event in run.events if event["event"] == "injection" and event["kind"] != "jitter"]
    truth = planted[0] if planted else None
    expected = expected_of(truth, run.facts) if truth is not None else Expected((), None, None, None)
    right = next((verdict for verdict in alarms if expected.culprit(verdict)), None)
    others = [verdict for verdict in alarms if not expected.culprit(verdict)]
    live = [
        event
        for event in run.events
        if event["event"] == "verdict" and event["change"] != "ended" and event["kind"] not in NO_ALARM
    ]
    score.step_ms = round(summary["step_ms"]["median"], 2)
    score.given = verdicts[0]["kind"] if verdicts else "none"
    score.wrong = [_words(run, verdict) for verdict in others]
    score.wrong_live = [
        f"after step {event['step']}: {event['sentence']}" for event in live if not expected.culprit_so_far(event)
    ]
    score.explained = all(_taken(run, verdict) for verdict in others)
    if right is not None:
        score.culprit, score.place = True, expected.place(right)
        score.predicted_ms = right["what_if"]["step_ms"] if right["what_if"] else None
        if not score.place:
            score.wrong.append("elsewhere: " + _words(run, right))
    if truth is not None:
        first = int(truth["first_step"])
        seen = [event["step"] - first for event in live if expected.culprit_so_far(event) and event["step"] >= first]
        score.steps_to_detect = seen[0] if seen else None
        score.effect = _effect(run, first, late=truth["kind"] == "drift")


def _effect(run: Run, first: int, late: bool) -> float | None:
    times = {step["step"]: _step_ms(step) for step in measured_steps(run)}
    before = [time_ms for number, time_ms in times.items() if number < first]
    since = [time_ms for number, time_ms in times.items() if number >= first]
    if len(before) < 5 or not since:
        return None
    if late:
        since = since[-len(since) // 4 :]
    return round(statistics.fmean(since) / statistics.median(before) - 1, 3)


def _step_ms(step: Mapping[str, Any]) -> float:
    walls = [end - start for start, end in zip(step["start_ns"], step["end_ns"], strict=True) if end is not None]
    return statistics.fmean(walls) / 1e6


def _states_over(run: Run, verdict: Mapping[str, Any]) -> dict[str, float]:
    """By how many ms the accused ranks exceed the others in each state of their own, in the verdict's steps."""
    inside = range(verdict["first_step"], verdict["last_step"] + 1)
    ledger = summarise(run, steps=lambda step: step["step"] in inside)["ledger_ms"]
    own = ("running", "runnable", "blocked")
    sums = {
        int(rank): {state: sum(ledger[rank][phase][state] or 0.0 for phase in PHASES) for state in own}
        for rank in ledger
    }
    accused = [rank for rank in sums if rank in verdict["ranks"]]
    others = [rank for rank in sums if rank not in verdict["ranks"]]
    if not accused or not others:
        return {}
    return {
        state: statistics.fmean(sums[rank][state] for rank in accused)
        - statistics.median(sums[rank][state] for rank in others)
        for state in own
    }


def _taken(run: Run, verdict: Mapping[str, Any]) -> bool:
    """Whether most of an alarm's excess is time that the machine took: ready without a core, or slower cores."""
    over = _states_over(run, verdict)
    if not over:  # all ranks alike
        return verdict["state"] in ("running", "runnable")
    return over["running"] + over["runnable"] >= over["blocked"]


def _words(run: Run, verdict: Mapping[str, Any]) -> str:
    over = _states_over(run, verdict)
    split = ", ".join(f"{state} {value:+.3g}" for state, value in over.items())
    return f"{verdict['sentence']}" + (f" [ms over the others: {split}]" if split else "")
