import gc
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Work
from torch.distributed.device_mesh import init_device_mesh

from bireme.channel import Channel
from bireme.errors import UserError
from bireme.ledger import PHASES, STATES, WAIT
from bireme.observe import exchange
from bireme.observe.collectives import hooks_missing
from bireme.observe.monitor import Monitor
from bireme.replicas import Overlapped, replicate
from bireme.run_reader import Run, read_run
from bireme.shutdown import Interrupted

if TYPE_CHECKING:
    from tests.observe.heard import heard
else:
    from heard import heard

torch.set_num_threads(1)

Ranks = Callable[..., list[Any]]

needs_hooks = pytest.mark.skipif(hooks_missing() is not None, reason=str(hooks_missing()))

SLEEP_S = 0.06
SLEEP_NS = SLEEP_S * 1e9


# --- on the ranks ------------------------------------------------------------------------------------------------


def facts_of(size: int) -> dict[str, Any]:
    return {"nodes": [{"name": "here", "ranks": list(range(size))}]}


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 200), nn.GELU(), nn.Linear(200, 100), nn.GELU(), nn.Linear(100, 64))


def train(
    rank: int,
    monitor: Monitor | None,
    overlap: bool,
    steps: int,
    forward_s: float = 0.0,
    backward_s: float = 0.0,
    bucket_mb: float | None = 0.05,
) -> tuple[list[float], Any]:
    """A plain loop, slow by that much in each step; the losses and the replicas."""
    model = model_of()
    if backward_s:

        def watch(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
            output.register_hook(lambda _: time.sleep(backward_s))

        model[2].register_forward_hook(watch)
    replicas = replicate(model, overlap, bucket_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for number in range(steps):
        generator = torch.Generator().manual_seed(100 * number + rank)
        batch = torch.randn(16, 64, generator=generator)
        if monitor is None:
            losses.append(train_step(replicas, optimizer, batch, forward_s))
            continue
        with monitor.step(tokens=16) as step:
            losses.append(train_step(replicas, optimizer, batch, forward_s, monitor))
            step.loss(losses[-1])
    return losses, replicas


def train_step(replicas: Any, optimizer: Any, batch: Any, forward_s: float, monitor: Monitor | None = None) -> float:
    with monitor.phase("forward") if monitor else nullcontext():
        if forward_s:
            time.sleep(forward_s)
        loss = (replicas.model(batch) - batch).square().mean()
    with monitor.phase("backward") if monitor else nullcontext():
        loss.backward()
        replicas.reduce()
    with monitor.phase("optimizer") if monitor else nullcontext():
        optimizer.step()
        replicas.zero()
    return float(loss.detach())


def train_observed(
    rank: int,
    size: int,
    directory: Path,
    overlap: bool,
    steps: int = 8,
    slow: dict[str, float] | None = None,
    exchange_every: int = 3,
) -> dict[str, Any]:
    """`slow`: delays of the last rank. Returns what the rank knows besides the record."""
    with (
        heard() as messages,
        Monitor(directory, facts=facts_of(size), exchange_every=exchange_every, skip_steps=2) as monitor,
    ):
        losses, replicas = train(rank, monitor, overlap, steps, **(slow or {} if rank == size - 1 else {}))
    known: dict[str, Any] = {"losses": losses, "said": messages}
    known["gradient_bytes"] = 4 * sum(each.numel() for each in replicas.model.parameters())
    if isinstance(replicas, Overlapped):
        logged: Any = replicas.model._get_ddp_logging_data()
        known["buckets"] = len(str(logged["rebuilt_bucket_sizes"]).split(","))
    return known


# --- reading -----------------------------------------------------------------------------------------------------


def cell(line: dict[str, Any], rank: int, phase: str, state: str) -> int:
    return int(line["cells_ns"][rank][PHASES.index(phase) * len(STATES) + STATES.index(state)])


def median_cell(run: Run, rank: int, phase: str, state: str) -> float:
    return statistics.median(cell(line, rank, phase, state) for line in run.steps if not line["skipped"])


def check_closure(run: Run, size: int, steps: int) -> None:
    assert run.damaged_lines == 0
    assert [line["step"] for line in run.steps] == list(range(1, steps + 1))
    for line in run.steps:
        for rank in range(size):
            assert min(line["cells_ns"][rank]) >= 0
            assert sum(line["cells_ns"][rank]) == line["end_ns"][rank] - line["start_ns"][rank]
            assert line["hidden_ns"][rank] >= 0 and line["hidden_transfer_ns"][rank] >= 0
            assert line["clamped_ns"][rank] >= 0
    for before, after in zip(run.steps, run.steps[1:], strict=False):
        assert after["start_ns"] == before["end_ns"]
    for rank in range(size):
        cells_ns = sum(sum(line["cells_ns"][rank]) for line in run.steps)
        assert cells_ns == run.steps[-1]["end_ns"][rank] - run.steps[0]["start_ns"][rank]


def uses(line: dict[str, Any], rank: int) -> list[tuple[int, str, int, int]]:
    """(group, operation, count, bytes) of a step's collectives."""
    return [(group, operation, count, size) for group, operation, count, size, _, _ in line["collectives"][rank]]


# --- the record --------------------------------------------------------------------------------------------------


@needs_hooks
def test_flat_reduction_is_one_matched_all_reduce_a_step(ranks: Ranks, tmp_path: Path) -> None:
    known = ranks(2, train_observed, tmp_path / "run", False)
    run = read_run(tmp_path / "run")
    check_closure(run, 2, 8)
    assert run.facts["status"] == "finished" and run.world_size == 2
    assert [group["ranks"] for group in run.facts["groups"]] == [[0, 1]]
    assert run.missing == {}
    assert [line["skipped"] for line in run.steps] == ["warm-up"] * 2 + [None] * 6
    gradient_bytes = known[0]["gradient_bytes"]
    for line in run.steps[1:]:  # in the first, Flat sends its weights round
        assert line["unmatched"] == [0, 0]
        assert line["tokens"] == 32
        assert uses(line, 0) == uses(line, 1) == [(0, "all_reduce", 1, gradient_bytes)]
    losses = [statistics.fmean(pair) for pair in zip(known[0]["losses"], known[1]["losses"], strict=True)]
    assert [line["loss"] for line in run.steps] == pytest.approx(losses)
    assert known[0]["said"] == known[1]["said"] == []


@needs_hooks
def test_every_bucket_of_ddp_is_counted_and_matched(ranks: Ranks, tmp_path: Path) -> None:
    known = ranks(2, train_observed, tmp_path / "run", True)
    run = read_run(tmp_path / "run")
    check_closure(run, 2, 8)
    assert known[0]["buckets"] > 1
    for line in run.steps[2:]:  # DDP settles its buckets in the second step
        assert line["unmatched"] == [0, 0]
        expected = [(0, "all_reduce", known[0]["buckets"], known[0]["gradient_bytes"])]
        assert uses(line, 0) == uses(line, 1) == expected
    assert known[0]["said"] == known[1]["said"] == []


def test_states_close_with_or_without_hooks(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, train_observed, tmp_path / "run", True)
    run = read_run(tmp_path / "run")
    check_closure(run, 2, 8)
    assert ("collectives" in run.missing) == (hooks_missing() is not None)


def test_four_ranks_on_few_cores_close(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4, train_observed, tmp_path / "run", True)
    run = read_run(tmp_path / "run")
    check_closure(run, 4, 8)
    assert all(line["unmatched"] == [0] * 4 for line in run.steps)


def test_a_process_group_of_one(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1, train_observed, tmp_path / "run", False)
    run = read_run(tmp_path / "run")
    check_closure(run, 1, 8)
    assert all(line["unmatched"] == [0] for line in run.steps)
    if hooks_missing() is None:
        assert uses(run.steps[-1], 0)[0][:3] == (0, "all_reduce", 1)


def test_without_a_process_group(tmp_path: Path) -> None:
    model = model_of()
    seen: list[int] = []
    with Monitor(
        tmp_path / "run",
        facts=facts_of(1),
        skip_steps=1,
        exchange_every=2,
        on_steps=lambda lines, events: seen.extend(line["step"] for line in lines),
    ) as monitor:
        for batch in monitor.batches(torch.randn(8, 16, 64)):
            with monitor.step(tokens=16) as step:
                with monitor.phase("forward"):
                    loss = model(batch).square().mean()
                with monitor.phase("backward"):
                    loss.backward()
                step.loss(loss.detach())
                step.record(learning_rate=0.5, gradient_norm=torch.tensor(2.0))
                if monitor._step == 3:
                    step.skip("evaluation")
                    monitor.event("evaluation", step=3, loss=1.5)
    run = read_run(tmp_path / "run")
    check_closure(run, 1, 8)
    assert seen == list(range(1, 9))
    assert run.facts["groups"] == [] and run.missing == {}
    assert [line["skipped"] for line in run.steps[:4]] == ["warm-up", None, "evaluation", None]
    assert run.steps[4]["learning_rate"] == 0.5 and run.steps[4]["gradient_norm"] == 2.0
    assert all(line["loss"] > 0 and line["tokens"] == 16 for line in run.steps)
    assert [event["event"] for event in run.events if event["event"] in ("evaluation", "status")] == [
        "evaluation",
        "status",
    ]


def test_the_three_line_integration_can_be_read(tmp_path: Path) -> None:
    with Monitor(tmp_path / "run") as monitor, monitor.step():
        pass
    assert len(read_run(tmp_path / "run").steps) == 1


def weighted_losses(rank: int, size: int, directory: Path) -> None:
    with Monitor(directory, facts=facts_of(size)) as monitor:
        with monitor.step(tokens=10 + rank) as step:
            step.loss(*((10.0, 2) if rank == 0 else (torch.tensor(2.0), 4)))
        with monitor.step() as step:
            step.record(learning_rate=1.0 + rank)
        monitor.event("evaluation", step=2, loss=0.1)


def test_losses_are_weighted_by_their_tokens(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, weighted_losses, tmp_path / "run")
    run = read_run(tmp_path / "run")
    assert [line["loss"] for line in run.steps] == [pytest.approx(28 / 6), None]
    assert [line["tokens"] for line in run.steps] == [21, 0]
    assert run.steps[1]["learning_rate"] == 1.0
    assert sum(event["event"] == "evaluation" for event in run.events) == 1


def test_input_and_time_outside_of_phases(tmp_path: Path) -> None:
    def slow_loader() -> Iterator[int]:
        for index in range(4):
            time.sleep(0.03)
            yield index

    with Monitor(tmp_path / "run", facts=facts_of(1), skip_steps=0) as monitor:
        for _ in monitor.batches(slow_loader()):
            with monitor.step():
                with monitor.phase("forward"), monitor.phase("checkpoint"):  # phases nest
                    time.sleep(0.02)
                time.sleep(0.01)
    run = read_run(tmp_path / "run")
    check_closure(run, 1, 4)
    for line in run.steps:
        assert cell(line, 0, "input", "blocked") >= 27e6
        assert cell(line, 0, "checkpoint", "blocked") >= 18e6
        assert cell(line, 0, "forward", "blocked") < 10e6
        assert cell(line, 0, "other", "blocked") >= 9e6


# --- where the time goes -----------------------------------------------------------------------------------------


@needs_hooks
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_sleeping_rank_makes_the_other_wait(phase: str, ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, train_observed, tmp_path / "run", False, 10, {f"{phase}_s": SLEEP_S})
    run = read_run(tmp_path / "run")
    check_closure(run, 2, 10)
    waited_ns = median_cell(run, 0, "backward", "wait")
    assert waited_ns >= 0.6 * SLEEP_NS
    assert median_cell(run, 1, "backward", "wait") < 0.3 * waited_ns
    assert median_cell(run, 1, phase, "blocked") >= 0.9 * SLEEP_NS
    assert median_cell(run, 0, phase, "blocked") < 0.3 * SLEEP_NS


@needs_hooks
def test_a_sleeping_rank_makes_ddp_wait(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, train_observed, tmp_path / "run", True, 10, {"forward_s": SLEEP_S})
    run = read_run(tmp_path / "run")
    check_closure(run, 2, 10)
    assert median_cell(run, 0, "backward", "wait") >= 0.6 * SLEEP_NS
    assert median_cell(run, 1, "backward", "wait") < 0.3 * SLEEP_NS
    assert median_cell(run, 1, "forward", "blocked") >= 0.9 * SLEEP_NS


def overlap_with_compute(rank: int, size: int, directory: Path) -> None:
    with Monitor(directory, facts=facts_of(size), skip_steps=1) as monitor:
        for _ in range(6):
            with monitor.step():
                dist.barrier()
                with monitor.phase("forward"):
                    if rank == 1:
                        time.sleep(0.08)
                    work: Any = dist.all_reduce(torch.ones(1000), async_op=True)
                    until = time.thread_time() + 0.15
                    while rank == 0 and time.thread_time() < until:
                        sum(range(1000))
                    work.wait()


@needs_hooks
def test_what_overlaps_compute_is_hidden(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, overlap_with_compute, tmp_path / "run")
    run = read_run(tmp_path / "run")
    check_closure(run, 2, 6)
    hidden_ns = statistics.median(line["hidden_ns"][0] for line in run.steps if not line["skipped"])
    assert hidden_ns >= 40e6
    assert median_cell(run, 0, "forward", "wait") + median_cell(run, 0, "forward", "transfer") < 20e6


def everything_once(rank: int, size: int, directory: Path) -> None:
    whole, half = torch.ones(12), torch.ones(6)
    parts = [torch.empty(12), torch.empty(12)]
    with Monitor(directory, facts=facts_of(size), skip_steps=0) as monitor:
        for _ in range(3):
            with monitor.step(), monitor.phase("forward"):
                dist.all_reduce(whole)
                dist.all_gather_into_tensor(whole, half)
                dist.reduce_scatter_tensor(half, whole)
                dist.broadcast(whole, 1)
                dist.reduce(whole, 1)
                dist.all_to_all_single(torch.empty(12), whole)
                dist.barrier()
                dist.all_gather(parts, whole)


@needs_hooks
def test_every_kind_is_matched(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, everything_once, tmp_path / "run")
    run = read_run(tmp_path / "run")
    check_closure(run, 2, 3)
    for line in run.steps:
        assert line["unmatched"] == [0, 0]
        for rank in range(2):
            assert uses(line, rank) == [
                (0, "all_gather", 2, 48 + 96),
                (0, "all_reduce", 1, 48),
                (0, "all_to_all", 1, 48),
                (0, "barrier", 1, 0),
                (0, "broadcast", 1, 48),
                (0, "reduce", 1, 48),
                (0, "reduce_scatter", 1, 48),
            ]


def gather_and_scatter(rank: int, size: int, directory: Path) -> None:
    part, parts = torch.ones(6), [torch.ones(6) for _ in range(size)]
    with Monitor(directory, facts=facts_of(size), skip_steps=0) as monitor, monitor.step(), monitor.phase("forward"):
        dist.gather(part, parts if rank == 0 else None, dst=0)
        dist.scatter(part, parts if rank == 0 else None, src=0)


@needs_hooks
def test_gather_and_scatter_are_matched(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, gather_and_scatter, tmp_path / "run")
    (line,) = read_run(tmp_path / "run").steps
    assert uses(line, 0) == uses(line, 1) == [(0, "gather", 1, 48), (0, "scatter", 1, 48)]
    assert line["unmatched"] == [0, 0]


def sends(rank: int, size: int, directory: Path) -> None:
    gc.collect()  # a pause of one rank in the first step would make its receive no measure of the transfer
    with Monitor(directory, facts=facts_of(size), skip_steps=1) as monitor:
        dist.barrier()
        for _ in range(5):
            with monitor.step(), monitor.phase("forward"):
                if rank == 0:
                    time.sleep(SLEEP_S if monitor._step > 1 else 0)
                    dist.send(torch.ones(100), 1)
                else:
                    dist.recv(torch.empty(100), 0)
            dist.barrier()


@needs_hooks
def test_who_receives_waits_for_who_sends(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, sends, tmp_path / "run")
    run = read_run(tmp_path / "run")
    check_closure(run, 2, 5)
    assert all(line["unmatched"] == [0, 0] for line in run.steps)
    assert (0, "send", 1, 400) in uses(run.steps[-1], 0)
    assert (0, "receive", 1, 400) in uses(run.steps[-1], 1)
    assert median_cell(run, 1, "forward", "wait") >= 0.6 * SLEEP_NS
    assert median_cell(run, 0, "forward", "blocked") >= 0.9 * SLEEP_NS


def train_without_hooks(rank: int, size: int, directory: Path) -> list[str]:
    with patch("bireme.observe.monitor.hooks_missing", return_value="this PyTorch is old"):
        return list(train_observed(rank, size, directory, True)["said"])


def test_states_are_known_without_hooks(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, train_without_hooks, tmp_path / "run") == [["this PyTorch is old"]] * 2
    run = read_run(tmp_path / "run")
    check_closure(run, 2, 8)
    assert run.facts["groups"] == [] and run.missing == {"collectives": "this PyTorch is old"}
    for line in run.steps:
        assert line["collectives"] == [[], []] and line["unmatched"] == [0, 0]
        for rank in range(2):
            assert all(cell(line, rank, phase, state) == 0 for phase in PHASES for state in ("transfer", "wait"))


# --- groups ------------------------------------------------------------------------------------------------------


def one_dimensional_mesh(rank: int, size: int, directory: Path) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("data",))
    with Monitor(directory, facts=facts_of(size)) as monitor:
        for _ in range(3):
            with monitor.step():
                dist.all_reduce(torch.ones(8), group=mesh.get_group())


@needs_hooks
def test_a_one_dimensional_mesh_is_the_world_and_counted_once(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, one_dimensional_mesh, tmp_path / "run")
    run = read_run(tmp_path / "run")
    assert [group["ranks"] for group in run.facts["groups"]] == [[0, 1]]
    for line in run.steps:
        assert uses(line, 0) == uses(line, 1) == [(0, "all_reduce", 1, 32)]


def two_dimensional_mesh(rank: int, size: int, directory: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with Monitor(directory, facts=facts_of(size), exchange_every=1) as monitor:
        for _ in range(3):
            with monitor.step(), monitor.phase("backward"):
                dist.all_reduce(torch.ones(2), group=mesh.get_group("shard"))
                dist.all_reduce(torch.ones(4), group=mesh.get_group("replicate"))
                dist.all_reduce(torch.ones(8))


@needs_hooks
def test_each_group_of_a_mesh_is_observed_by_its_members(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4, two_dimensional_mesh, tmp_path / "run")
    run = read_run(tmp_path / "run")
    check_closure(run, 4, 3)
    table = [group["ranks"] for group in run.facts["groups"]]
    assert sorted(table) == [[0, 1], [0, 1, 2, 3], [0, 2], [1, 3], [2, 3]]
    for line in run.steps:
        assert line["unmatched"] == [0] * 4
        for rank in range(4):
            seen = {tuple(table[group]): (count, size) for group, _, count, size in uses(line, rank)}
            shard, replicate = (0, 1) if rank < 2 else (2, 3), (rank % 2, rank % 2 + 2)
            assert seen == {shard: (1, 8), replicate: (1, 16), (0, 1, 2, 3): (1, 32)}


def share_channel(rank: int, size: int, directory: Path) -> list[list[int]]:
    channel = Channel()
    with Monitor(directory, facts=facts_of(size), channel=channel) as monitor:
        assert monitor._channel is channel
        for _ in range(2):
            with monitor.step():
                dist.all_reduce(torch.ones(1))
    channel.all_gather(None)
    return [group["ranks"] for group in read_run(directory).facts["groups"]]


def test_a_shared_channel_is_not_observed(ranks: Ranks, tmp_path: Path) -> None:
    for groups in ranks(2, share_channel, tmp_path / "run"):
        assert groups == ([[0, 1]] if hooks_missing() is None else [])


# --- never in the way --------------------------------------------------------------------------------------------


def train_with_and_without(rank: int, size: int, directory: Path, overlap: bool) -> tuple[list[float], list[float]]:
    without, _ = train(rank, None, overlap, 6)
    return without, train_observed(rank, size, directory, overlap, 6)["losses"]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "flat"])
def test_losses_are_the_same_bit_for_bit(overlap: bool, ranks: Ranks, tmp_path: Path) -> None:
    for without, observed in ranks(2, train_with_and_without, tmp_path / "run", overlap):
        assert without == observed


def train_with_broken_hooks(rank: int, size: int, directory: Path, target: str) -> dict[str, Any]:
    with patch(f"bireme.observe.collectives.{target}", side_effect=ZeroDivisionError("boo")) as broken:
        known = train_observed(rank, size, directory, overlap="_note_wait" not in target)
        assert broken.called
        return known


@needs_hooks
@pytest.mark.parametrize(
    "target",
    [
        "_caller",
        "CollectiveObserver._follow",
        "CollectiveObserver._note_wait",
    ],
)
def test_a_raising_hook_never_reaches_the_loop(target: str, ranks: Ranks, tmp_path: Path) -> None:
    for known in ranks(2, train_with_broken_hooks, tmp_path / "run", target):
        assert len(known["losses"]) == 8
        assert known["said"] == ["collectives were not all observed: ZeroDivisionError: boo"]
    check_closure(read_run(tmp_path / "run"), 2, 8)


def train_twice(rank: int, size: int, directory: Path) -> bool:
    original = Work.wait
    for name in ("first", "second"):
        train_observed(rank, size, directory / name, False, 4)
    return Work.wait is original


@needs_hooks
def test_two_monitors_one_after_the_other(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, train_twice, tmp_path) == [True, True]
    for name in ("first", "second"):
        run = read_run(tmp_path / name)
        check_closure(run, 2, 4)
        assert [use[1:3] for use in uses(run.steps[-1], 0)] == [("all_reduce", 1)]
        assert run.steps[-1]["unmatched"] == [0, 0]


@needs_hooks
def test_side_groups_of_an_earlier_monitor_are_not_observed(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, train_twice, tmp_path)
    assert [group["ranks"] for group in read_run(tmp_path / "second").facts["groups"]] == [[0, 1]]


def refused(rank: int, size: int, directory: Path) -> list[str]:
    messages = []
    original = Work.wait
    for _ in range(2):
        with Monitor(directory / f"{_}", facts=facts_of(size)) as monitor, monitor.step():
            pass
        try:
            Monitor(directory / f"{_}", facts=facts_of(size))
        except UserError as error:
            messages.append(str(error))
        assert Work.wait is original
    return messages


def test_a_run_is_refused_on_every_rank_when_it_exists(ranks: Ranks, tmp_path: Path) -> None:
    for messages in ranks(2, refused, tmp_path):
        assert messages == [
            f"run {tmp_path / name} exists: choose another directory (--run-dir), or go on with it (--resume)"
            for name in ("0", "1")
        ]


def end_early(rank: int, size: int, directory: Path, counts: list[int]) -> float:
    with Monitor(directory, facts=facts_of(size), exchange_every=2) as monitor:
        for _ in range(counts[rank]):
            with monitor.step():
                time.sleep(0.02)
        started = time.monotonic()
    return time.monotonic() - started


@pytest.mark.parametrize("counts", [[5, 9], [9, 5], [0, 3]], ids=str)
def test_ranks_that_end_at_different_steps(counts: list[int], ranks: Ranks, tmp_path: Path) -> None:
    closing_s = ranks(2, end_early, tmp_path / "run", counts)
    assert max(closing_s) < 15
    run = read_run(tmp_path / "run")
    assert [line["step"] for line in run.steps] == list(range(1, min(counts) + 1))
    assert run.facts["status"] == "finished"


def leave_early(rank: int, size: int, directory: Path) -> list[str]:
    with (
        patch.object(exchange, "_ALONE_S", 0.2),
        heard() as messages,
        Monitor(directory, facts=facts_of(size), exchange_every=1) as monitor,
    ):
        for _ in range(3 if rank == 1 else 4):
            with monitor.step():
                time.sleep(0.01 if rank == 1 else 0.4)
    return messages


def test_a_rank_that_has_no_data_left_is_named_instead_of_waited_for_in_silence(ranks: Ranks, tmp_path: Path) -> None:
    """B13."""
    messages = ranks(2, leave_early, tmp_path / "run")
    assert "rank 1 has ended its loop after step 3 and waits for ranks that have not" in messages[1]
    assert not any("waits for ranks" in message for message in messages[0])


def test_the_end_of_a_run_is_in_its_record(tmp_path: Path) -> None:
    for error, status, reason in (
        (ValueError("boo"), "failed", "ValueError: boo"),
        (Interrupted(2), "interrupted", "Ctrl-C"),
        (KeyboardInterrupt(), "interrupted", "Ctrl-C"),
        (Interrupted(15), "interrupted", "SIGTERM"),
    ):
        directory = tmp_path / str(error)
        with pytest.raises(type(error)), Monitor(directory, facts=facts_of(1)) as monitor:
            with monitor.step():
                pass
            with monitor.step():
                raise error
        run = read_run(directory)
        assert (run.facts["status"], run.facts["status_reason"]) == (status, reason)
        assert [line["step"] for line in run.steps] == [1]
        shutil.rmtree(directory)


def test_a_lost_directory_does_not_end_training(tmp_path: Path) -> None:
    with heard() as messages, Monitor(tmp_path / "run", facts=facts_of(1), exchange_every=1) as monitor:
        shutil.rmtree(tmp_path / "run")
        for _ in range(5):
            with monitor.step():
                time.sleep(0.01)
    assert len(messages) == 1 and "training goes on" in messages[0]


LOSING = """
import sys, torch, torch.distributed as dist
from bireme.observe.monitor import Monitor

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
with Monitor(sys.argv[1], facts={"nodes": [{"name": "here", "ranks": [0, 1]}]}, exchange_every=2) as monitor:
    for number in range(10):
        with monitor.step():
            with monitor.phase("forward"):
                if rank == 1 and number == 5:
                    print("lost", flush=True)
                    raise ValueError("lost")
            with monitor.phase("backward"):
                dist.all_reduce(torch.ones(10))
"""


@pytest.mark.skipif(
    hooks_missing() is not None,
    reason="before PyTorch 2.14 a gloo group with a pending operation keeps a process from ending",
)
def test_losing_a_rank_ends_both_processes(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LOSING, str(tmp_path / "run")],
            env={**os.environ, **common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert processes[1].stdout is not None
        assert processes[1].stdout.readline() == "lost\n"
        lost = time.monotonic()
        errors = [process.communicate(timeout=60)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert time.monotonic() - lost < 25
    assert [process.returncode for process in processes] == [1, 1]
    assert "ValueError: lost" in errors[1]
    run = read_run(tmp_path / "run")
    assert run.facts["status"] == "failed"
    assert [line["step"] for line in run.steps] == list(range(1, len(run.steps) + 1))
    assert 3 <= len(run.steps) <= 5  # at most the last window is lost
    reasons = [event["reason"] for event in run.events if event["event"] == "status"]
    assert reasons == [run.facts["status_reason"]]


# --- garbage -----------------------------------------------------------------------------------------------------


def test_a_long_collection_is_an_event(tmp_path: Path) -> None:
    heap = [[index] for index in range(400_000)]
    with Monitor(tmp_path / "run", facts=facts_of(1)) as monitor:
        with monitor.step(), monitor.phase("optimizer"):
            gc.collect()
        with monitor.step():
            pass
    assert len(heap) == 400_000
    run = read_run(tmp_path / "run")
    assert run.steps[0]["gc_ns"][0] >= 1_000_000
    assert run.steps[0]["gc_ns"][0] <= sum(run.steps[0]["cells_ns"][0])
    pauses = [event for event in run.events if event["event"] == "gc_pause" and event["generation"] == 2]
    assert [(each["rank"], each["step"], each["phase"]) for each in pauses] == [(0, 1, "optimizer")]
    assert 1.0 <= pauses[0]["ms"] <= run.steps[0]["gc_ns"][0] / 1e6 + 0.001


def functional_reduce_scatters(rank: int, size: int, directory: Path) -> int:
    from torch.distributed._functional_collectives import reduce_scatter_tensor, wait_tensor

    with Monitor(directory, facts=facts_of(size), exchange_every=1) as monitor:
        for number in range(4):
            with monitor.step():
                if number == 2 and rank == 1:
                    time.sleep(0.6)
                wait_tensor(reduce_scatter_tensor(torch.ones(4), "sum", 0, dist.distributed_c10d._get_default_group()))
        deadline = time.monotonic() + 20
        while monitor._exchange._done < 4 and time.monotonic() < deadline:
            time.sleep(0.05)
        return len(monitor._thread.collectives._waited_for)


@needs_hooks
def test_functional_reduce_scatters_are_seen_though_nobody_waits_in_python(ranks: Ranks, tmp_path: Path) -> None:
    """Tensor parallelism's: without a future, and waited for in C++."""
    assert ranks(2, functional_reduce_scatters, tmp_path / "run") == [0, 0]
    run = read_run(tmp_path / "run")
    assert all(line["unmatched"] == [0, 0] for line in run.steps)
    waited_ns = [sum(cells[WAIT :: len(STATES)]) for cells in run.steps[2]["cells_ns"]]
    assert waited_ns[0] > 200e6 > 2 * waited_ns[1]
