"""What the exchange works out of every rank's observations; no process groups, the ranks are threads or lists."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import orjson
import pytest
import torch

from bireme.channel import Channel
from bireme.ledger import IN_PLACE, PHASES, STATES, Segment, Span
from bireme.observe.exchange import Exchange
from bireme.observe.phases import Observation
from bireme.observe.reports import assemble

# --- assemble ----------------------------------------------------------------------------------------------------

PER_RANK = (
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


def reported(step: int, rank: int, **changes: Any) -> dict[str, Any]:
    """One rank's report of one step; every number tells its field, step and rank."""
    numbers = {name: (index + 1) * 1000 + step * 10 + rank for index, name in enumerate(PER_RANK)}
    return {"step": step, "skipped": None, "tokens": 0, "loss": None, "facts": {}, **numbers, **changes}


def report(steps: list[dict[str, Any]], events: Any = (), warnings: Any = ()) -> dict[str, Any]:
    return {"steps": steps, "events": list(events), "warnings": list(warnings), "wall_ns": 1}


def one_step(*ranks: dict[str, Any]) -> dict[str, Any]:
    """The record of one step with these reports, as they arrive: through JSON."""
    reports = [report([reported(1, rank, **changes)]) for rank, changes in enumerate(ranks)]
    lines, _, _ = assemble(orjson.loads(orjson.dumps(reports)))
    assert len(lines) == 1
    return lines[0]


def test_every_step_becomes_one_line_with_a_value_per_rank_in_rank_order() -> None:
    lines, events, _ = assemble([report([reported(step, rank) for step in (4, 5, 6)]) for rank in range(3)])
    assert [line["step"] for line in lines] == [4, 5, 6]
    for line in lines:
        for index, name in enumerate(PER_RANK):
            assert line[name] == [(index + 1) * 1000 + line["step"] * 10 + rank for rank in range(3)]
    assert set(lines[0]) == {"step", "skipped", "loss", "tokens", *PER_RANK}
    assert events == []


def test_tokens_are_summed_over_ranks() -> None:
    assert one_step({"tokens": 100}, {"tokens": 28}, {})["tokens"] == 128


def test_the_loss_is_weighted_by_counts() -> None:
    assert one_step({"loss": [30.0, 10]}, {"loss": [2.0, 2]}, {"loss": [0.0, 4]})["loss"] == 2.0


def test_a_loss_without_a_count_is_a_mean() -> None:
    assert one_step({"loss": [2.0, None]}, {"loss": [5.0, None]})["loss"] == 3.5


def test_ranks_without_a_loss_do_not_count() -> None:
    """Only the last stage of a pipeline has one."""
    assert one_step({}, {"loss": [12.0, 4]}, {"loss": None})["loss"] == 3.0
    assert one_step({}, {})["loss"] is None


def test_a_loss_over_nothing_is_unknown() -> None:
    assert one_step({"loss": [0.0, 0]}, {"loss": [0.0, 0]})["loss"] is None


@pytest.mark.parametrize("loss", ["nan", "inf"])
def test_a_loss_that_is_not_finite_stays_what_it_is(loss: str) -> None:
    """It comes as text: JSON has no word for it, and null would look like no loss."""
    line = one_step({"loss": [loss, 10]}, {"loss": [20.0, 10]})
    assert (line["loss"], line["loss_reason"]) == (None, loss)


def test_a_step_is_skipped_when_any_rank_says_so() -> None:
    assert one_step({}, {"skipped": "evaluation"}, {"skipped": "warm-up"})["skipped"] == "evaluation"
    assert one_step({}, {})["skipped"] is None


def test_facts_are_rank_0s() -> None:
    line = one_step({"facts": {"lr": 0.5}}, {"facts": {"lr": 9.0, "grad_norm": 1.0}})
    assert line["lr"] == 0.5
    assert "grad_norm" not in line


@pytest.mark.parametrize("name", ["step", "loss", "tokens", "skipped", "cells_ns"])
def test_a_fact_does_not_replace_what_was_measured(name: str) -> None:
    measured: dict[str, Any] = {"loss": [6.0, 3], "tokens": 64, "skipped": "warm-up"}
    assert one_step({**measured, "facts": {name: 77.0}})[name] == one_step(measured)[name]


def test_events_follow_in_rank_order_and_warnings_name_the_ranks_that_said_them() -> None:
    lines, events, _ = assemble(
        [
            report([], [{"event": "gc_pause", "rank": 0}], ["low memory"]),
            report([], [{"event": "host", "rank": 1}, {"event": "gc_pause", "rank": 1}], ["low memory", "slow disk"]),
            report([], [], ["slow disk"]),
        ]
    )
    assert lines == []
    assert events == [
        {"event": "gc_pause", "rank": 0},
        {"event": "host", "rank": 1},
        {"event": "gc_pause", "rank": 1},
        {"event": "warning", "ranks": [0, 1], "message": "low memory"},
        {"event": "warning", "ranks": [1, 2], "message": "slow disk"},
    ]


def test_ranks_that_report_different_numbers_of_steps_are_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        assemble([report([reported(1, 0), reported(2, 0)]), report([reported(1, 1)])])


# --- what members learn from each other --------------------------------------------------------------------------


class Meeting:
    """Threads in place of ranks: `reduce_min` meets the others and takes the minimum, as gloo would."""

    def __init__(self, size: int):
        self.barrier = threading.Barrier(size, timeout=20)
        self.given: dict[int, torch.Tensor] = {}


class FakeChannel:
    def __init__(self, meeting: Meeting, rank: int):
        self.rank = rank
        self.meeting = meeting
        self.give_up: Callable[[], bool] = lambda: False

    def reduce_min(self, tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
        self.meeting.given[self.rank] = tensor.clone()
        self.meeting.barrier.wait()
        shapes = {each.shape for each in self.meeting.given.values()}
        assert len(shapes) == 1, "gloo would hang or crash"
        minimum = torch.stack(list(self.meeting.given.values())).amin(dim=0)
        self.meeting.barrier.wait()
        tensor.copy_(minimum)
        return tensor


class Ranks:
    """The exchanges of several ranks that are all members of one group."""

    def __init__(self, size: int):
        meeting = Meeting(size)
        self.exchanges = [
            Exchange(
                channel=cast(Channel, FakeChannel(meeting, rank)),
                groups=[(list(range(size)), None)],
                every=1,
                resolve=lambda observation: (0, 0, []),
                deliver=lambda lines, events, samples: None,
                warnings=list,
            )
            for rank in range(size)
        ]

    def split(self, *spans: list[Span]) -> list[list[int | None]]:
        """Each rank's transfer times of its spans of one window."""

        def one(rank: int) -> list[int | None]:
            self.exchanges[rank]._split([Observation(step=1, boundaries=[], spans=spans[rank])])
            return [span.transfer_ns for span in spans[rank]]

        with ThreadPoolExecutor(len(spans)) as pool:
            return list(pool.map(one, range(len(spans))))


def call(sequence: int, issue_ns: int, finish_ns: int | None, operation: str = "all_reduce", size: int = 64) -> Span:
    return Span(0, sequence, operation, size, issue_ns, finish_ns)


def test_the_shortest_duration_among_members_is_transfer_whatever_their_clocks_say() -> None:
    ranks = Ranks(2)
    # Rank 1's clock is 5000 ahead. It arrives late for the first, rank 0 for the second.
    transfers = ranks.split(
        [call(0, 100, 200), call(1, 270, 290)],
        [call(0, 5170, 5200), call(1, 5210, 5290)],
    )
    assert transfers == [[30, 20], [30, 20]]


def test_two_that_finish_out_of_order_keep_their_own_durations() -> None:
    spans = [call(0, 0, 100), call(1, 5, 35), call(2, 6, 65)]
    assert Ranks(1).split(spans) == [[100, 30, 30]]
    assert [span.duration_ns for span in spans] == [100, 30, 30]


def test_mismatched_collectives_stay_unmatched_and_the_others_match() -> None:
    transfers = Ranks(2).split(
        [call(0, 0, 10), call(1, 20, 30, size=64), call(2, 40, 50, "all_gather"), call(3, 60, 70)],
        [call(0, 0, 11), call(1, 20, 30, size=65), call(2, 40, 50, "all_reduce"), call(3, 60, 68)],
    )
    assert transfers == [[10, None, None, 8], [10, None, None, 8]]


def test_a_collective_that_one_member_has_not_seen_is_unmatched() -> None:
    transfers = Ranks(3).split(
        [call(0, 0, 10), call(1, 20, 30)],
        [call(0, 0, 12)],
        [call(0, 0, 11), call(1, 20, 30)],
    )
    assert transfers == [[10, None], [10], [10, None]]


def test_a_finish_that_one_member_does_not_know_leaves_the_collective_unmatched() -> None:
    transfers = Ranks(2).split([call(0, 0, 10), call(1, 20, 30)], [call(0, 0, None), call(1, 20, 33)])
    assert transfers == [[None, 10], [None, 10]]


def test_members_that_do_not_leave_together_keep_their_own_shortest_so_far() -> None:
    ranks = Ranks(2)
    first = [[call(0, 0, 40, "broadcast")], [call(0, 0, 25, "broadcast")]]
    assert ranks.split(*first) == [[40], [25]]
    later = [[call(1, 100, 130, "broadcast")], [call(1, 100, 190, "broadcast")]]
    assert ranks.split(*later) == [[30], [25]]
    assert first[0][0].transfer_ns == 40  # not revised
    mismatched = [[call(2, 200, 210, "broadcast")], [call(2, 200, 210, "broadcast", size=9)]]
    assert ranks.split(*mismatched) == [[None], [None]]


def test_send_and_receive_are_seen_by_two_members_only_and_need_no_partner() -> None:
    transfers = Ranks(3).split(
        [call(0, 0, 10), call(-1, 20, 60, "send"), call(-1, 70, 90, "send")],
        [call(0, 0, 10), call(-1, 20, 50, "receive")],
        [call(0, 0, 10)],
    )
    assert transfers == [[10, 40, 20], [10, 30], [10]]


def test_a_collective_in_flight_at_the_end_of_a_step_is_carried_into_the_next() -> None:
    exchange = Ranks(1).exchanges[0]
    window = [Observation(step, []) for step in (1, 2, 3)]
    carried = Span(0, 0, "all_reduce", 64, issue_ns=80, finish_ns=130, origin=IN_PLACE, step=1, transfer_ns=40)
    window[0].spans = [carried, Span(0, 1, "all_reduce", 64, issue_ns=90, finish_ns=120, step=1)]
    forward = PHASES.index("forward")
    resolved = [(start, start + 100, [Segment(forward, start, start + 100, cpu_ns=50)]) for start in (0, 100, 200)]
    steps = exchange._report(window, resolved)["steps"]
    forward_cells = [dict(zip(STATES, step["cells_ns"][forward * len(STATES) :], strict=False)) for step in steps]
    assert [(cells["transfer"], cells["wait"], cells["blocked"]) for cells in forward_cells] == [
        (10, 10, 30),
        (30, 0, 20),
        (0, 0, 50),
    ]
    assert [len(step["collectives"]) for step in steps] == [1, 0, 0]
    assert [step["unmatched"] for step in steps] == [1, 0, 0]


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -float("inf")])
def test_a_loss_that_is_not_finite_survives_the_way_to_rank_0(loss: float) -> None:
    """From a rank's observation through JSON to the record: JSON has no NaN, and one of them must not end measuring."""
    reports = []
    for rank, mean in enumerate([torch.tensor(loss), 20.0]):
        exchange = Ranks(2).exchanges[rank]
        observation = Observation(1, [], loss=mean, loss_count=10)
        reports.append(exchange._report([observation], [(0, 100, [Segment(0, 0, 100, cpu_ns=50)])]))
    lines, _, _ = assemble(orjson.loads(orjson.dumps(reports)))
    assert (lines[0]["loss"], lines[0]["loss_reason"]) == (None, str(loss))
