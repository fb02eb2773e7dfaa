"""The numbers of a run that goes on, over its last steps. Pure: a function of what was read and of the time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bireme.flops import mfu
from bireme.ledger import TRANSFER, WAIT, own_states, unobserved_states
from bireme.run_reader import is_number
from bireme.text import count, duration, printable
from bireme.watch.follow import Seen, StepSeen
from bireme.watch.liveness import writer_pid
from bireme.watch.notices import Notice, one_line

WAITING, RUNNING_WELL, QUIET, KILLED, FINISHED, STOPPED = "waiting", "running", "quiet", "killed", "finished", "stopped"

_QUIET_AFTER_S = 10.0  # no news for so long, and for three steps, is worth saying
_QUIET_AT_FIRST_S = 60.0  # the first step may take long


@dataclass(frozen=True, slots=True)
class Bar:
    """A mean step of one rank, or of several, by state."""

    label: str
    states_ms: tuple[float, ...]  # one for each of STATES
    self_ms: float

    @property
    def step_ms(self) -> float:
        return sum(self.states_ms)


@dataclass(frozen=True, slots=True)
class Figures:
    """What there is to show. Texts are on one line and without control characters; None is what is not known."""

    name: str
    what: str  # how many ranks, which model: empty while there is no run.json
    status: str  # one of the words above
    sentence: str  # the same for people
    step: int | None = None
    steps: int | None = None  # in all
    loss: str = "n/a"
    step_ms: float | None = None  # median over measured steps
    tokens_per_s: float | None = None
    mfu: float | None = None
    communication_share: float | None = None  # exposed: transfer and wait
    left_s: float | None = None
    since_s: float | None = None  # since the last step was recorded; None for a run that has ended
    measured: int = 0  # steps that the bars are a mean of
    overall: Bar | None = None
    unobserved: frozenset[str] = frozenset()  # states whose time is in `blocked`
    nodes: tuple[Bar, ...] = ()  # where there are several, the slowest first: by self time
    ranks: tuple[Bar, ...] = ()  # the same
    verdicts: tuple[str, ...] = ()
    notices: tuple[Notice, ...] = ()  # in the order of time
    notes: tuple[str, ...] = ()


def figures(seen: Seen, now_s: float) -> Figures:
    """`now_s`: the time, in seconds since 1970."""
    name, facts = printable(str(seen.directory)), seen.facts
    if facts is None:
        return Figures(name, "", WAITING, one_line(seen.problem))
    running = facts["status"] == "running"
    since_s = None if seen.modified_s is None or not running else max(0.0, now_s - seen.modified_s)
    measured = [step for step in seen.steps if step.skipped is None]
    usual_s = median(map(_wall_s, measured)) if measured else None
    status, sentence = _status(seen, facts, since_s, usual_s)
    last = seen.steps[-1] if seen.steps else None
    steps = (facts.get("config") or {}).get("steps")
    steps = steps if type(steps) is int and steps > 0 else None
    tokens_per_s = _tokens_per_s(measured)
    unobserved = unobserved_states(facts.get("missing"))
    rank_bars, node_bars, overall = _bars(_per_rank(measured, facts), facts)
    return Figures(
        name=name,
        what=_what(facts),
        status=status,
        sentence=sentence,
        step=last.step if last is not None else None,
        steps=steps,
        loss=_loss(last),
        step_ms=None if usual_s is None else 1e3 * usual_s,
        tokens_per_s=tokens_per_s,
        mfu=_mfu(facts, tokens_per_s),
        communication_share=_communication_share(overall, unobserved),
        left_s=_left_s(seen.steps, usual_s, steps) if running else None,
        since_s=since_s,
        measured=len(measured),
        overall=overall,
        unobserved=unobserved,
        nodes=node_bars,
        ranks=rank_bars,
        verdicts=tuple(one_line(each.get("sentence") or each.get("message")) for each in seen.standing.verdicts),
        notices=tuple(seen.notices.newest(100)),
        notes=_notes(seen, facts, measured),
    )


def window_line(each: Figures, new_steps: int) -> str:
    """One line of a log for the newest steps, in the words of `bireme train`."""
    of = f"/{each.steps}" if each.steps is not None else ""
    parts = [
        f"step {each.step}{of}",
        f"loss {each.loss}",
        f"{each.step_ms:.0f} ms (median of {each.measured})" if each.step_ms is not None else "step time n/a",
        rate(each),
        "communication n/a" if each.communication_share is None else f"communication {each.communication_share:.0%}",
        utilisation(each),
    ]
    parts += [f"ETA {duration(each.left_s)}"] if each.left_s is not None else []
    return "  ".join([*parts, f"({count(new_steps, 'new step')})"])


def rate(each: Figures) -> str:
    return "n/a tokens/s (global)" if each.tokens_per_s is None else f"{each.tokens_per_s:,.0f} tokens/s (global)"


def utilisation(each: Figures) -> str:
    return "MFU n/a" if each.mfu is None else f"MFU {each.mfu:.1%} (full attention)"


def ago(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else duration(seconds)


# --- helpers -----------------------------------------------------------------------------------------------------


def _what(facts: Mapping[str, Any]) -> str:
    parts = [f"{count(facts['world_size'], 'rank')} on {count(len(facts['nodes']), 'node')}"]
    parts += [one_line(facts[name]) for name in ("layout",) if facts.get(name)]
    preset = (facts.get("model") or {}).get("preset")
    parts += [one_line(preset)] if preset else []
    attempt = facts.get("attempt")
    parts += [f"attempt {attempt}"] if type(attempt) is int and attempt > 1 else []
    return " | ".join(parts)


def _status(seen: Seen, facts: Mapping[str, Any], since_s: float | None, usual_s: float | None) -> tuple[str, str]:
    status, reason = facts["status"], facts.get("status_reason")
    if status != "running":
        why = f": {one_line(reason)}" if reason else ""
        return FINISHED if status == "finished" else STOPPED, f"{one_line(status)}{why}"
    pid = writer_pid(facts)
    none_yet = "" if seen.steps else f"; {_no_step(facts)}"
    if seen.writer_lives is False:
        return KILLED, f"killed: the process that wrote it (pid {pid}) is gone{none_yet}"
    limit_s = max(_QUIET_AFTER_S, 3 * usual_s) if usual_s is not None else _QUIET_AT_FIRST_S
    if since_s is not None and since_s > limit_s:
        lives = f"its process, pid {pid}, is there" if seen.writer_lives else "the writer may have been killed"
        return QUIET, f"no news for {ago(since_s)} ({lives}){none_yet}"
    return RUNNING_WELL, "running" + none_yet


def _no_step(facts: Mapping[str, Any]) -> str:
    first_step, attempt = facts.get("first_step"), facts.get("attempt")
    if type(attempt) is int and attempt > 1 and type(first_step) is int:
        return f"resumed after step {first_step - 1}, no step since"
    return "no step yet"


def _notes(seen: Seen, facts: Mapping[str, Any], measured: Sequence[StepSeen]) -> tuple[str, ...]:
    missing = facts.get("missing") or {}
    notes = [one_line(seen.problem)] if seen.problem else []
    if "collectives" in missing:
        notes.append(f"transfer and wait are not observed, and in blocked: {one_line(missing['collectives'])}")
    if "run_delay" in missing:
        notes.append(f"runnable is not observed, and in blocked: {one_line(missing['run_delay'])}")
    if seen.steps and not measured:
        reasons = ", ".join(sorted({one_line(step.skipped) for step in seen.steps}))
        notes.append(f"no measured step yet: {count(len(seen.steps), 'step')} skipped ({reasons})")
    if seen.steps and (gone := [rank for rank, wall_ns in enumerate(seen.steps[-1].walls_ns) if wall_ns is None]):
        notes.append(f"{count(len(gone), 'rank')} did not record the last step")
    if seen.damaged_lines:
        notes.append(f"{count(seen.damaged_lines, 'damaged line')} left out")
    return tuple(notes)


def _loss(last: StepSeen | None) -> str:
    if last is None or (last.loss is None and last.loss_reason is None):
        return "n/a"
    return f"{last.loss:.4f}" if last.loss is not None else one_line(last.loss_reason)


def _wall_s(step: StepSeen) -> float:
    """On the slowest rank."""
    return max((wall_ns for wall_ns in step.walls_ns if wall_ns is not None), default=0) / 1e9


def _left_s(steps: Sequence[StepSeen], usual_s: float | None, total: int | None) -> float | None:
    """A usual step, and what evaluations and checkpoints add to one on average, times the steps that are left. A single
    slow step is not expected to come again."""
    if usual_s is None or total is None:
        return None
    begun = [step for step in steps if step.skipped is None or step.beside_training]
    extra_s = sum(max(0.0, _wall_s(step) - usual_s) for step in begun if step.beside_training) / len(begun)
    return max(0, total - steps[-1].step) * (usual_s + extra_s)


def _tokens_per_s(measured: Sequence[StepSeen]) -> float | None:
    """Distinct tokens / the wall time on the slowest rank."""
    walls_ns: dict[int, int] = {}
    for step in measured:
        for rank, wall_ns in enumerate(step.walls_ns):
            walls_ns[rank] = walls_ns.get(rank, 0) + (wall_ns or 0)
    slowest_ns, tokens = max(walls_ns.values(), default=0), sum(step.tokens for step in measured)
    return tokens / slowest_ns * 1e9 if tokens > 0 and slowest_ns > 0 else None


def _mfu(facts: Mapping[str, Any], tokens_per_s: float | None) -> float | None:
    per_token: Any = ((facts.get("model") or {}).get("flops_per_token") or {}).get("full")
    peak: Any = (facts.get("peak") or {}).get("flops_per_s")
    if tokens_per_s is None or not is_number(per_token) or not is_number(peak) or per_token <= 0:
        return None
    try:
        return mfu(per_token, tokens_per_s, peak)
    except ValueError:  # above 1, or no peak: not believed
        return None


def _communication_share(overall: Bar | None, unobserved: frozenset[str]) -> float | None:
    if overall is None or not overall.step_ms or "wait" in unobserved:
        return None
    return (overall.states_ms[TRANSFER] + overall.states_ms[WAIT]) / overall.step_ms


def _per_rank(measured: Sequence[StepSeen], facts: Mapping[str, Any]) -> dict[int, tuple[float, ...]]:
    """By rank the mean of each state in milliseconds, over the steps that it recorded."""
    means = {}
    for rank in range(facts["world_size"]):
        rows = [row for step in measured if (row := step.states_ns[rank]) is not None]
        if rows:
            means[rank] = tuple(sum(column) / len(rows) / 1e6 for column in zip(*rows, strict=True))
    return means


def _bars(
    per_rank: Mapping[int, tuple[float, ...]], facts: Mapping[str, Any]
) -> tuple[tuple[Bar, ...], tuple[Bar, ...], Bar | None]:
    own = own_states("wait" not in unobserved_states(facts.get("missing")))

    def bar(label: str, ranks: Sequence[int]) -> Bar:
        columns = zip(*(per_rank[rank] for rank in ranks), strict=True)
        states_ms = tuple(sum(column) / len(ranks) for column in columns)
        return Bar(label, states_ms, sum(states_ms[state] for state in own))

    if not per_rank:
        return (), (), None
    several_nodes = len(facts["nodes"]) > 1
    ranks, nodes = [], []
    for node in facts["nodes"]:
        here = [rank for rank in node["ranks"] if rank in per_rank]
        name = one_line(node["name"])
        if here and several_nodes:
            nodes.append(bar(f"node {name}", here))
        ranks += [bar(f"rank {rank}" + (f" on {name}" if several_nodes else ""), [rank]) for rank in here]
    for bars in (ranks, nodes):
        bars.sort(key=lambda each: -each.self_ms)
    return tuple(ranks if len(ranks) > 1 else ()), tuple(nodes), bar("all ranks", list(per_rank))
