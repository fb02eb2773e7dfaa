import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

from bireme.channel import Channel
from bireme.ledger import EAGER, IN_PLACE, REDUCER, Span
from bireme.observe.collectives import CollectiveObserver, hooks_missing, process_groups
from bireme.observe.exchange import Exchange
from bireme.observe.groups import side_groups
from bireme.observe.phases import Observation

torch.set_num_threads(1)

Ranks = Callable[..., list[Any]]

needs_hooks = pytest.mark.skipif(hooks_missing() is not None, reason=str(hooks_missing()))


def world_group() -> Any:
    return dist.distributed_c10d._get_default_group()


# --- what the hooks see ------------------------------------------------------------------------------------------


def _wait_all(works: list[Any]) -> None:
    for work in works:
        work.wait()


def _operations(rank: int, other: int) -> dict[str, Callable[[], Any]]:
    """Each way to communicate, by a name; called on both ranks."""
    whole, half = torch.ones(12), torch.ones(6)
    halves = [torch.ones(6), torch.ones(6)]
    root_only = halves if rank == 0 else None
    sending, receiving = (dist.isend, dist.irecv)

    def async_reduce_scatter() -> None:
        work: Any = dist.reduce_scatter_tensor(half, whole, async_op=True)
        work.wait()

    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, half),
        "all_gather": lambda: dist.all_gather(halves, half),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(half, whole),
        "async reduce_scatter": async_reduce_scatter,
        "broadcast": lambda: dist.broadcast(whole, 1),
        "reduce": lambda: dist.reduce(whole, 1),
        "gather": lambda: dist.gather(half, root_only, dst=0),
        "scatter": lambda: dist.scatter(half, root_only, src=0),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty(12), whole),
        "barrier": dist.barrier,
        "send and recv": lambda: dist.send(whole, other) if rank == 0 else dist.recv(whole, other),
        "isend and irecv": lambda: _wait_all([(sending if rank == 0 else receiving)(whole, other)]),
        "batch_isend_irecv": lambda: _wait_all(
            dist.batch_isend_irecv([dist.P2POp(sending, half, other), dist.P2POp(receiving, torch.empty(6), other)])
        ),
        "functional all_reduce": lambda: functional.wait_tensor(functional.all_reduce(whole, "sum", world_group())),
        "functional all_gather": lambda: functional.wait_tensor(
            functional.all_gather_tensor(half, 0, group=world_group())
        ),
        "two at once": lambda: _wait_all([dist.all_reduce(torch.ones(3), async_op=True) for _ in range(2)]),
    }


Seen = tuple[str, int, int, str, int, bool, bool]


def observe_operations(rank: int, size: int) -> dict[str, list[Seen]]:
    """By the name of the way: (operation, sequence, bytes, origin, side, finish is sane, a wait was seen)."""
    observer = CollectiveObserver({0: world_group()})
    seen: dict[str, list[Seen]] = {}
    for name, act in _operations(rank, 1 - rank).items():
        started_ns = time.perf_counter_ns()
        act()
        spans = observer.take()
        deadline = time.monotonic() + 5
        while any(span.finish_ns is None for span in spans) and time.monotonic() < deadline:
            time.sleep(0.001)  # a future's callback may come after the wait
        ended_ns = time.perf_counter_ns()
        seen[name] = [
            (
                span.operation,
                span.sequence,
                span.bytes,
                span.origin,
                span.side,
                span.finish_ns is not None and started_ns < span.issue_ns <= span.finish_ns < ended_ns,
                bool(span.waits),
            )
            for span in spans
        ]
        dist.barrier()
        observer.take()
    observer.close()
    assert observer.failure is None, observer.failure
    return seen


@needs_hooks
def test_every_kind_of_operation_is_seen(ranks: Ranks) -> None:
    both = ranks(2, observe_operations)
    expected = {
        "all_reduce": ("all_reduce", 48, EAGER),
        "all_gather_into_tensor": ("all_gather", 48, EAGER),
        "all_gather": ("all_gather", 48, EAGER),
        "reduce_scatter_tensor": ("reduce_scatter", 48, EAGER),
        "async reduce_scatter": ("reduce_scatter", 48, EAGER),
        "broadcast": ("broadcast", 48, EAGER),
        "reduce": ("reduce", 48, EAGER),
        "all_to_all_single": ("all_to_all", 48, EAGER),
        "barrier": ("barrier", 0, EAGER),
        "functional all_reduce": ("all_reduce", 48, IN_PLACE),
        "functional all_gather": ("all_gather", 48, IN_PLACE),
    }
    for rank, seen in enumerate(both):
        for name, (operation, size, origin) in expected.items():
            ((seen_operation, sequence, seen_size, seen_origin, side, sane, waited),) = seen[name]
            assert (seen_operation, seen_size, seen_origin) == (operation, size, origin), name
            assert sequence >= 0 and sane, name
            assert side == (1 if name in ("broadcast", "reduce") else -1), name
            assert waited or origin == IN_PLACE, name
        # The root of these has the whole, the others a part.
        for name in ("gather", "scatter"):
            assert [(each[0], each[4], each[5]) for each in seen[name]] == [(name, 0, True)]
            assert seen["gather"][0][2] == 48 or rank == 1
        direction = "send" if rank == 0 else "receive"
        for name in ("send and recv", "isend and irecv"):
            assert seen[name] == [(direction, -1, 48, EAGER, 1 - rank, True, True)]
        assert seen["batch_isend_irecv"] == [
            ("send", -1, 24, EAGER, 1 - rank, True, True),
            ("receive", -1, 24, EAGER, 1 - rank, True, True),
        ]
        assert [each[:3:2] for each in seen["two at once"]] == [("all_reduce", 12)] * 2
        assert all(each[5] for each in seen["two at once"])
    collectives = [name for name in both[0] if "send" not in name]
    for name in collectives:
        assert [each[1] for each in both[0][name]] == [each[1] for each in both[1][name]], name


def observe_a_late_rank(rank: int, size: int) -> tuple[list[Span], list[tuple[int, int]]]:
    observer = CollectiveObserver({0: world_group()})
    busy = []
    for _ in range(3):
        dist.barrier()
        observer.take()
        if rank == 1:
            time.sleep(0.06)
        work: Any = dist.all_reduce(torch.ones(4), async_op=True)
        started_ns = time.perf_counter_ns()
        while time.perf_counter_ns() < started_ns + 150_000_000:
            sum(range(100))
        busy.append((started_ns, time.perf_counter_ns()))
        work.wait()
    spans = observer.take()
    observer.close()
    return spans, busy


@needs_hooks
def test_an_asynchronous_finish_is_the_true_one_not_when_somebody_looked(ranks: Ranks) -> None:
    (spans, busy), _ = ranks(2, observe_a_late_rank)
    span, (busy_start_ns, busy_end_ns) = spans[-1], busy[-1]
    assert span.finish_ns is not None
    assert busy_start_ns + 30_000_000 < span.finish_ns < busy_end_ns - 20_000_000


def observe_ddp(rank: int, size: int) -> list[tuple[str, str]]:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    observer = CollectiveObserver({0: world_group()})
    model(torch.ones(2, 8)).sum().backward()
    spans = observer.take()
    observer.close()
    return [(span.operation, span.origin) for span in spans]


@needs_hooks
def test_ddp_is_told_from_the_callers_own(ranks: Ranks) -> None:
    assert ranks(2, observe_ddp) == [[("all_reduce", REDUCER)]] * 2


def observe_groups(rank: int, size: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("data",))
    pair = dist.new_group([0, 1])
    alone = dist.new_group([0])
    groups = process_groups()
    channel = Channel()
    table, sides, mine = side_groups(channel, groups)
    return {
        "same": mesh.get_group() is groups[0],
        "groups": len(groups),
        "table": [each["ranks"] for each in table],
        "mine": sorted(mine),
        "sides": [(members, side is None) for members, side in sides],
        "shared": [side for members, side in sides if members == [0, 1]].count(channel.group),
        "pair": pair in groups,
        "alone": alone in groups,
    }


def test_each_group_is_in_the_table_once(ranks: Ranks) -> None:
    first, second = ranks(2, observe_groups)
    assert first["same"] and first["groups"] == 3 and second["groups"] == 2
    assert first["pair"] and first["alone"] and not second["alone"]
    assert first["table"] == second["table"] and sorted(first["table"]) == [[0], [0, 1], [0, 1]]
    assert first["mine"] == [0, 1, 2] and len(second["mine"]) == 2
    assert first["sides"] == second["sides"]
    assert ([0], True) in first["sides"]
    assert first["shared"] == 2  # both groups of the same members are served by the channel's group


# --- leaving no trace --------------------------------------------------------------------------------------------


def close_observers(rank: int, size: int) -> dict[str, Any]:
    original = Work.wait
    first, second = (CollectiveObserver({0: world_group()} if number == 0 else {}) for number in range(2))
    replaced = Work.wait is not original
    first.close()
    still_replaced = Work.wait is not original
    second.close()
    restored = Work.wait is original
    dist.all_reduce(torch.ones(1))
    after_close = len(first.take())

    third = CollectiveObserver({0: world_group()})
    observed_wait = Work.wait
    calls = []

    def wrapped(work: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return observed_wait(work, *args, **kwargs)

    with patch.object(Work, "wait", wrapped):
        third.close()
        third.close()
        dist.all_reduce(torch.ones(1))  # through both wrappers, although nobody observes
    return {
        "replaced": replaced,
        "still_replaced": still_replaced,
        "restored": restored,
        "after_close": after_close,
        "calls": calls,
    }


@needs_hooks
def test_closing_restores_what_was(ranks: Ranks) -> None:
    for known in ranks(2, close_observers):
        assert known == {
            "replaced": True,
            "still_replaced": True,
            "restored": True,
            "after_close": 0,
            "calls": [1],
        }


def wait_while_closing(rank: int, size: int) -> float:
    """As a thread does that has looked `Work.wait` up just before it is put back: the exchange's waits all the time."""
    observer = CollectiveObserver({})
    wait: Any = Work.wait
    observer.close()
    tensor = torch.ones(1)
    wait(dist.all_reduce(tensor, async_op=True))
    return float(tensor)


def test_a_wait_that_is_under_way_survives_closing(ranks: Ranks) -> None:
    assert ranks(2, wait_while_closing) == [2.0, 2.0]


def users_hooks(rank: int, size: int) -> tuple[list[str], bool]:
    group = world_group()
    seen: list[str] = []
    group.register_pre_hook(7, lambda args: seen.append(args.name.name))
    observer = CollectiveObserver({0: group})
    dist.all_reduce(torch.ones(1))
    observer.close()
    dist.barrier()
    return seen, len(observer.take()) == 1


@needs_hooks
def test_the_users_own_hooks_stay(ranks: Ranks) -> None:
    assert ranks(2, users_hooks) == [(["ALLREDUCE", "BARRIER"], True)] * 2


def wait_on_another_thread(rank: int, size: int) -> list[int]:
    observer = CollectiveObserver({0: world_group()})
    work: Any = dist.all_reduce(torch.ones(1), async_op=True)
    waiter = threading.Thread(target=work.wait)
    waiter.start()
    waiter.join()
    dist.all_reduce(torch.ones(1))
    spans = observer.take()
    observer.close()
    return [len(span.waits) for span in spans]


@needs_hooks
def test_only_the_training_threads_waits_count(ranks: Ranks) -> None:
    assert ranks(2, wait_on_another_thread) == [[0, 1]] * 2


def fail_in_the_operation(rank: int, size: int) -> tuple[str, int]:
    observer = CollectiveObserver({0: world_group()})
    message = ""
    try:
        dist.all_reduce(torch.ones(2, dtype=torch.int16))  # gloo cannot
    except Exception as error:
        message = str(error)
    dist.all_reduce(torch.ones(1))
    matched = len(observer.take())
    observer.close()
    return message, matched


@needs_hooks
def test_errors_of_the_operation_pass_through(ranks: Ranks) -> None:
    for message, spans in ranks(2, fail_in_the_operation):
        assert message and spans >= 1


def test_closing_after_the_group_was_destroyed(ranks: Ranks) -> None:
    assert ranks(2, destroy_first) == [None, None]


def destroy_first(rank: int, size: int) -> str | None:
    observer = CollectiveObserver({0: world_group()} if hooks_missing() is None else {})
    dist.destroy_process_group()
    observer.close()
    return observer.failure


# --- what members agree on ---------------------------------------------------------------------------------------


def _exchange(channel: Channel, sides: list[tuple[list[int], Any]]) -> Exchange:
    return Exchange(channel, sides, 10, lambda _: (0, 0, []), lambda *_: None, list)


def _span(sequence: int, start: int, end: int | None, operation: str = "all_reduce", size: int = 8) -> Span:
    return Span(0, sequence, operation, size, issue_ns=start, finish_ns=end)


def split(rank: int, size: int, spans_by_rank: list[list[Span]]) -> list[tuple[int | None, int | None]]:
    channel = Channel(timeout_s=30)
    spans = spans_by_rank[rank]
    members = list(range(size))
    window = [Observation(1, [], spans=spans)]
    _exchange(channel, [(members, channel.group)])._split(window)
    return [(span.duration_ns, span.transfer_ns) for span in spans]


def test_the_shortest_member_is_the_transfer(ranks: Ranks) -> None:
    here = [_span(0, 1000, 1500), _span(1, 2000, 2100), _span(2, 3000, 3900, "broadcast")]
    there = [_span(0, 91400, 91500), _span(1, 92000, 92300), _span(2, 93000, 93200, "broadcast")]
    # The last does not leave together: each side's own shortest so far.
    assert ranks(2, split, [here, there]) == [
        [(500, 100), (100, 100), (900, 900)],
        [(100, 100), (300, 100), (200, 200)],
    ]


def test_members_that_mean_different_things_are_unmatched(ranks: Ranks) -> None:
    here = [_span(0, 0, 10), _span(1, 20, 30, size=8), _span(2, 40, 50), _span(3, 60, 70), _span(4, 80, None)]
    there = [_span(0, 0, 30), _span(1, 20, 30, size=16), _span(2, 40, 50, "all_gather"), _span(3, 60, 65)]
    there.append(_span(4, 80, 85))
    there.append(_span(5, 90, 95))  # one more than the other has
    first, second = ranks(2, split, [here, there])
    assert [transfer for _, transfer in first] == [10, None, None, 5, None]
    assert [transfer for _, transfer in second] == [10, None, None, 5, None, None]


def test_a_member_without_any_collective(ranks: Ranks) -> None:
    assert ranks(2, split, [[], [_span(0, 0, 10)]]) == [[], [(10, None)]]
    assert ranks(2, split, [[], []]) == [[], []]


def test_four_members_agree_on_the_last_to_come(ranks: Ranks) -> None:
    durations = [400, 100, 300, 200]
    spans = [[_span(0, 0, duration), _span(1, 1000, 1000 + duration)] for duration in durations]
    spans[3][1].bytes = 4  # one of four is enough to disagree
    for duration, parts in zip(durations, ranks(4, split, spans), strict=True):
        assert parts == [(duration, 100), (duration, None)]


def test_sends_need_no_agreement(ranks: Ranks) -> None:
    here = [_span(-1, 0, 500, "send"), _span(-1, 600, 700, "send"), _span(0, 800, 850)]
    there = [_span(0, 800, 820)]
    assert ranks(2, split, [here, there]) == [[(500, 500), (100, 100), (50, 20)], [(20, 20)]]


def test_a_pending_callback_does_not_keep_the_observer_and_its_groups() -> None:
    """It may be the last to hold them, on a thread of the group, which cannot end itself: the process would abort."""
    callbacks: list[Any] = []

    class Pending:
        def get_future(self) -> Any:
            return self

        def add_done_callback(self, callback: Any) -> None:
            callbacks.append(callback)

    observer = CollectiveObserver({})
    span = Span(0, 0, "all_reduce", 8, 1, None, EAGER, -1, 1)
    observer._follow(Pending(), span, True, None)
    alive = weakref.ref(observer)
    observer.close()
    del observer
    gc.collect()
    assert alive() is None
    callbacks[0](None)
    assert span.finish_ns is not None


def compiled_sums(rank: int, size: int, fullgraph: bool) -> tuple[list[float], str | None]:
    observer = CollectiveObserver(dict(enumerate(process_groups())))
    compiled = torch.compile(_sum_over_ranks, fullgraph=fullgraph, backend="aot_eager")
    try:
        return compiled(torch.full((2,), float(rank))).tolist(), observer.failure
    finally:
        observer.close()
        torch._dynamo.reset()


def _sum_over_ranks(x: torch.Tensor) -> Any:
    return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1  # type: ignore[arg-type]


@needs_hooks
@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiled_code_with_collectives_is_left_alone(ranks: Ranks, fullgraph: bool) -> None:
    """A wait that is traced must not bring the observer into the user's graph."""
    assert ranks(2, compiled_sums, fullgraph) == [([3.0, 3.0], None)] * 2
