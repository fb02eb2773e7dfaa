"""What the Prometheus endpoint tells of a run (docs/metrics.md): sums of its step records, as metric families."""

import math
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

import bireme
from bireme.ledger import PHASES, STATES, own_states, unobserved_states
from bireme.report.sums import present_ranks
from bireme.run_reader import is_number
from bireme.text import rank_list
from bireme.watch.standing import Standing, ranks_of

MOST_RANKS = 256  # with more: a series for each node instead of each rank
STEP_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

_MOST_REASONS = 16  # why steps are skipped is the loop's own text: it must not make series without end
_N_CELLS = len(PHASES) * len(STATES)
_BY_RANK = ("rank", "node")
_SMALL = ("hidden", "hidden_transfer", "gc", "unmatched", "overhead_training", "overhead_background")


@dataclass(slots=True)
class _Totals:
    """What one rank, or all ranks of a node, took since the process began. Nanoseconds."""

    cells: list[int] = field(default_factory=lambda: [0] * _N_CELLS)
    small: list[int] = field(default_factory=lambda: [0] * len(_SMALL))
    collectives: dict[tuple[str, str], list[int]] = field(default_factory=dict)  # count, bytes, transfer, wait

    def add(self, other: "_Totals") -> None:
        self.cells = _sum(self.cells, other.cells)
        self.small = _sum(self.small, other.small)
        for key, use in other.collectives.items():
            self.collectives[key] = _sum(self.collectives.get(key, [0] * 4), use)


def _sum(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return [x + y for x, y in zip(a, b, strict=True)]


class RunMetrics(Collector):
    """`update` takes the step records and events of a window, in any thread; `collect` is asked at each scrape.

    facts: as in run.json. What was not observed has no series, so that it cannot be taken for zero.
    """

    def __init__(self, facts: Mapping[str, Any], run: str = ""):
        self._lock = threading.Lock()
        self._facts = facts
        self._run = run
        self._size = int(facts["world_size"])
        self._node_of = {rank: str(node["name"]) for node in facts["nodes"] for rank in node["ranks"]}
        missing = facts.get("missing") or {}
        self._collectives_known = "collectives" not in missing
        self._unobserved = unobserved_states(missing)
        self._totals = [_Totals() for _ in range(self._size)]
        self._window_s: dict[int, tuple[float, float]] = {}  # rank: step, self time
        self._steps = self._tokens = 0
        self._skipped: Counter[str] = Counter()
        self._events: Counter[str] = Counter()
        self._buckets = [0] * (len(STEP_BUCKETS_S) + 1)
        self._steps_s = 0.0
        self._gauges: dict[str, float] = {}
        self._standing = Standing()

    # --- taking in ---

    def learned(self, **facts: Any) -> None:
        """Takes facts that were not known when the run began, such as groups made later."""
        with self._lock:
            self._facts = {**self._facts, **facts}

    def update(self, lines: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]] = ()) -> None:
        with self._lock:
            for line in lines:
                self._add(line)
            self._add_window([line for line in lines if line["skipped"] is None])
            for event in events:
                self._events[str(event.get("event"))] += 1
                self._standing.add(event)
                if event.get("event") == "evaluation" and is_number(event.get("loss")):
                    self._gauges["evaluation_loss"] = event["loss"]

    def _add(self, line: Mapping[str, Any]) -> None:
        self._steps += 1
        self._tokens += line["tokens"] or 0
        self._gauges |= {"step": line["step"], "timestamp": time.time()}
        if line.get("loss") is not None or "loss_reason" in line:
            self._gauges["loss"] = _loss(line)
        if line["skipped"] is not None:
            reason = str(line["skipped"])
            known = reason in self._skipped or len(self._skipped) < _MOST_REASONS
            self._skipped[reason if known else "other"] += 1
        gc_ns = line.get("gc_ns") or [0] * self._size
        groups = self._facts.get("groups") or []
        for rank in present_ranks(line):
            totals = self._totals[rank]
            totals.cells = _sum(totals.cells, line["cells_ns"][rank])
            hidden = (line[name][rank] for name in ("hidden_ns", "hidden_transfer_ns"))
            small = (*hidden, gc_ns[rank] or 0, line["unmatched"][rank], *line["overhead_ns"][rank])
            totals.small = _sum(totals.small, small)
            for group, operation, *use in line["collectives"][rank]:
                key = (str(groups[group]["name"]) if group < len(groups) else str(group), operation)
                totals.collectives[key] = _sum(totals.collectives.get(key, [0] * 4), use)

    def _add_window(self, measured: Sequence[Mapping[str, Any]]) -> None:
        """Rates and means of the newest steps; those kept out of averages are kept out here, too."""
        if not measured:
            return
        wall_s: dict[int, list[float]] = {}
        own_s: dict[int, list[float]] = {}
        own = own_states(self._collectives_known)
        for line in measured:
            here = present_ranks(line)
            for rank in here:
                wall_s.setdefault(rank, []).append((line["end_ns"][rank] - line["start_ns"][rank]) / 1e9)
                own_ns = sum(sum(line["cells_ns"][rank][state :: len(STATES)]) for state in own)
                own_s.setdefault(rank, []).append(own_ns / 1e9)
            if here:
                step_s = math.fsum(wall_s[rank][-1] for rank in here) / len(here)
                self._buckets[bisect_left(STEP_BUCKETS_S, step_s)] += 1
                self._steps_s += step_s
        self._window_s = {
            rank: (math.fsum(walls) / len(walls), math.fsum(own_s[rank]) / len(walls)) for rank, walls in wall_s.items()
        }
        tokens = sum(line["tokens"] or 0 for line in measured)
        slowest_s = max((math.fsum(walls) for walls in wall_s.values()), default=0.0)
        if tokens and slowest_s > 0:
            self._gauges["tokens_per_s"] = tokens / slowest_s

    # --- giving out ---

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            return [*self._about_run(), *self._of_steps(), *self._of_ranks(), *self._of_verdicts()]

    def _about_run(self) -> Iterator[Metric]:
        facts = self._facts
        about = {
            "run": self._run,
            "first_step": facts.get("first_step", 1),
            "layout": facts.get("layout") or "",
            "model": _part(facts, "model").get("preset") or "",
            "version": bireme.__version__,
        }
        yield InfoMetricFamily("bireme_run", "The run.", {name: str(value) for name, value in about.items()})
        yield _gauge("bireme_world_size", "Number of ranks.", self._size)
        yield _gauge("bireme_nodes", "Number of machines.", len(facts["nodes"]))

    def _of_steps(self) -> Iterator[Metric]:
        yield _gauge("bireme_step", "Number of the newest step in the record.", self._gauges.get("step"))
        yield _gauge(
            "bireme_last_step_timestamp_seconds",
            "When the newest steps came in, as seconds since 1970.",
            self._gauges.get("timestamp"),
        )
        yield CounterMetricFamily("bireme_steps", "Steps of this process, skipped ones too.", self._steps)
        skipped = CounterMetricFamily("bireme_skipped_steps", "Steps kept out of averages.", labels=["reason"])
        for reason, number in self._skipped.items():
            skipped.add_metric([reason], number)
        yield skipped
        bounds = [*map(str, STEP_BUCKETS_S), "+Inf"]
        cumulative = [sum(self._buckets[: index + 1]) for index in range(len(bounds))]
        yield HistogramMetricFamily(
            "bireme_step_duration_seconds",
            "Time of a measured step: the mean over its ranks.",
            buckets=list(zip(bounds, map(float, cumulative), strict=True)),
            sum_value=self._steps_s,
        )
        yield CounterMetricFamily("bireme_tokens", "Distinct tokens of all ranks, skipped steps too.", self._tokens)
        rate = self._gauges.get("tokens_per_s")
        yield _gauge(
            "bireme_tokens_per_second_global",
            "Distinct tokens of all ranks / wall time on the slowest rank, measured steps of the last window.",
            rate,
        )
        yield _gauge("bireme_loss", "Loss of the newest step, mean over all ranks.", self._gauges.get("loss"))
        yield _gauge("bireme_evaluation_loss", "Loss of the last evaluation.", self._gauges.get("evaluation_loss"))
        yield from self._mfu(rate)
        events = CounterMetricFamily("bireme_events", "Events, as in events.jsonl.", labels=["event"])
        for event, number in self._events.items():
            events.add_metric([event], number)
        yield events

    def _mfu(self, tokens_per_s: float | None) -> Iterator[Metric]:
        mfu = GaugeMetricFamily(
            "bireme_mfu_ratio",
            "Model FLOPs utilisation in the last window: full or causal attention, no recomputation.",
            labels=["convention"],
        )
        flops = _part(_part(self._facts, "model"), "flops_per_token")
        peak: Any = _part(self._facts, "peak").get("flops_per_s")
        if is_number(peak) and peak > 0:
            yield _gauge("bireme_peak_flops_per_second", "Peak of all ranks together, that MFU is held against.", peak)
            for convention in ("full", "causal"):
                per_token: Any = flops.get(convention)
                if tokens_per_s is not None and is_number(per_token) and 0 < per_token * tokens_per_s <= peak:
                    mfu.add_metric([convention], per_token * tokens_per_s / peak)
        yield mfu

    def _of_ranks(self) -> Iterator[Metric]:
        for name, what, index in (
            ("bireme_rank_step_seconds", "Mean time of a measured step of the last window.", 0),
            ("bireme_rank_self_time_seconds", "The same without transfer and wait: what the rank took of its own.", 1),
        ):
            gauge = GaugeMetricFamily(name, what, labels=_BY_RANK)
            for number, seconds in sorted(self._window_s.items()):
                gauge.add_metric([str(number), self._node_of[number]], seconds[index])
            yield gauge
        shown = self._shown()
        cells = CounterMetricFamily(
            "bireme_ledger_seconds", "The ledger: time by phase and state.", labels=(*_BY_RANK, "phase", "state")
        )
        seen = [state for state, name in enumerate(STATES) if name not in self._unobserved]
        for rank, node, totals in shown:
            for index, phase in enumerate(PHASES):
                for state in seen:
                    cells.add_metric(
                        [rank, node, phase, STATES[state]], totals.cells[index * len(STATES) + state] / 1e9
                    )
        yield cells
        yield self._counter(shown, "bireme_gc_pause_seconds", "Garbage-collection pauses.", {(): "gc"})
        yield self._counter(
            shown,
            "bireme_overhead_seconds",
            "The cost of measuring, as measured.",
            {("training",): "overhead_training", ("background",): "overhead_background"},
            ("thread",),
        )
        if self._collectives_known:
            yield from self._communication(shown)

    def _communication(self, shown: Sequence[tuple[str, str, _Totals]]) -> Iterator[Metric]:
        yield self._counter(
            shown,
            "bireme_hidden_communication_seconds",
            "Collectives in flight while the thread was not blocked on them.",
            {(): "hidden"},
        )
        yield self._counter(
            shown,
            "bireme_hidden_transfer_seconds",
            "Bytes moving while the thread was not blocked on them.",
            {(): "hidden_transfer"},
        )
        yield self._counter(
            shown,
            "bireme_unmatched_collectives",
            "Collectives whose split into transfer and wait is unknown.",
            {(): "unmatched"},
            scale=1,
        )
        for index, (name, what, scale) in enumerate(
            (
                ("bireme_collectives", "Collectives issued.", 1.0),
                ("bireme_collective_bytes", "Their payload.", 1.0),
                ("bireme_collective_transfer_seconds", "Time in which their bytes moved, hidden or not.", 1e9),
                ("bireme_collective_wait_seconds", "Time in which they waited for a member, hidden or not.", 1e9),
            )
        ):
            family = CounterMetricFamily(name, what, labels=(*_BY_RANK, "group", "operation"))
            for rank, node, totals in shown:
                for (group, operation), use in sorted(totals.collectives.items()):
                    family.add_metric([rank, node, group, operation], use[index] / scale)
            yield family

    def _of_verdicts(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "bireme_verdict_active",
            "1 for each verdict that has started and not ended.",
            labels=["kind", "ranks", "node", "phase", "state"],
        )
        labels = {
            (
                str(verdict.get("kind")),
                rank_list(ranks_of(verdict)),
                *(str(verdict.get(name) or "") for name in ("node", "phase", "state")),
            )
            for verdict in self._standing.verdicts
        }
        for each in sorted(labels):
            family.add_metric(each, 1)
        yield family

    # --- helpers ---

    def _shown(self) -> list[tuple[str, str, _Totals]]:
        """Rank, node and totals of every rank; of many ranks those of each node (without a rank), and of the rank that
        was slowest in the last window."""
        if self._size <= MOST_RANKS:
            return [(str(rank), self._node_of[rank], totals) for rank, totals in enumerate(self._totals)]
        shown = []
        for node in self._facts["nodes"]:
            together = _Totals()
            for rank in node["ranks"]:
                together.add(self._totals[rank])
            shown.append(("", str(node["name"]), together))
        if self._window_s:
            slowest = max(self._window_s, key=lambda rank: self._window_s[rank][1])
            shown.append((str(slowest), self._node_of[slowest], self._totals[slowest]))
        return shown

    def _counter(
        self,
        shown: Sequence[tuple[str, str, _Totals]],
        name: str,
        what: str,
        parts: Mapping[tuple[str, ...], str],
        labels: tuple[str, ...] = (),
        scale: float = 1e9,
    ) -> Metric:
        family = CounterMetricFamily(name, what, labels=(*_BY_RANK, *labels))
        for rank, node, totals in shown:
            for values, part in parts.items():
                family.add_metric([rank, node, *values], totals.small[_SMALL.index(part)] / scale)
        return family


def _part(facts: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A table of the facts; some are the user's own, or null."""
    part = facts.get(name)
    return part if isinstance(part, dict) else {}


def _gauge(name: str, what: str, value: float | None) -> GaugeMetricFamily:
    """Without a value the family has no series."""
    return GaugeMetricFamily(name, what, value=value)


def _loss(line: Mapping[str, Any]) -> float:
    """Prometheus has words for what JSON has none."""
    if is_number(line["loss"]):
        return float(line["loss"])
    reason = str(line.get("loss_reason"))
    return float(reason) if reason in ("inf", "-inf") else math.nan
