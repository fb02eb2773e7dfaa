"""The Monitor in loops that know nothing of phases: what it finds, what it leaves alone, and how it fails."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import bireme
from bireme.errors import UserError
from bireme.ledger import PHASES, STATES
from bireme.model import GPT, PRESETS
from bireme.observe import reports
from bireme.observe.collectives import hooks_missing
from bireme.observe.groups import LateGroups
from bireme.observe.roll import call_the_roll, wait_for_all
from bireme.report.summary import closure_error_ns, summarise
from bireme.run_reader import read_run

if TYPE_CHECKING:
    from tests.observe.heard import heard
else:
    from heard import heard

torch.set_num_threads(1)

Ranks = Callable[..., list[Any]]

needs_hooks = pytest.mark.skipif(hooks_missing() is not None, reason=str(hooks_missing()))

STEPS = 8
DATA = torch.randn(STEPS * 8, 16, generator=torch.Generator().manual_seed(1))


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


def wrapped(how: str) -> Any:
    model = model_of()
    if how == "ddp":
        return DistributedDataParallel(model)
    if how == "fsdp2":
        fully_shard(model[0])
        return fully_shard(model)
    if how == "fsdp1":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    return model


def loop(model: Any, monitor: bireme.Monitor | None, steps: int = STEPS) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(DATA[: 8 * steps]), batch_size=8)
    losses = []
    for (batch,) in monitor.batches(loader) if monitor else loader:
        if monitor is None:
            losses.append(train_step(model, optimizer, batch))
        else:
            with monitor.step(tokens=len(batch)) as step:
                losses.append(train_step(model, optimizer, batch))
                step.loss(losses[-1])
    return losses


def train_step(model: Any, optimizer: Any, batch: torch.Tensor) -> float:
    loss = (model(batch) - batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def with_and_without(rank: int, size: int, directory: Path, how: str) -> tuple[list[float], list[float]]:
    plain = loop(wrapped(how), None)
    model = wrapped(how)
    monitor = bireme.Monitor(directory, model=model, skip_steps=2)
    losses = loop(model, monitor)
    dist.destroy_process_group()  # nobody closed the monitor
    return plain, losses


@needs_hooks
@pytest.mark.parametrize("how", ["ddp", "fsdp1", "fsdp2"])
def test_wrapped_models(how: str, ranks: Ranks, tmp_path: Path) -> None:
    for plain, losses in ranks(2, with_and_without, tmp_path / "run", how):
        assert losses == plain
    run = read_run(tmp_path / "run")
    assert run.facts["status"] == "finished"
    assert [line["step"] for line in run.steps] == list(range(1, STEPS + 1))
    assert closure_error_ns(run) == 0
    assert all(line["unmatched"] == [0, 0] for line in run.steps)
    ledger = summarise(run)["ledger_ms"]["1"]
    for phase in ("input", "forward", "backward", "optimizer"):
        assert ledger[phase]["running"] > 0
    exposed = {phase: states["transfer"] + states["wait"] for phase, states in ledger.items()}
    assert exposed["backward"] > 0
    assert (exposed["forward"] > 0) == (how != "ddp")
    assert run.facts["model"]["preset"].endswith("Sequential")  # FSDP2 makes a class of its own


def late_group(rank: int, size: int, directory: Path) -> list[str]:
    with heard() as said, bireme.Monitor(directory, exchange_every=2) as monitor:
        group: Any = None
        for number in range(6):
            with monitor.step():
                dist.all_reduce(torch.ones(10))
                if number == 1:
                    group = dist.new_group([1, 2], group_desc="mine")
                if number > 1 and rank in (1, 2):
                    dist.all_reduce(torch.ones(1000), group=group)
    return said


@needs_hooks
def test_groups_that_are_made_later_are_found(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(3, late_group, tmp_path / "run") == [[], [], []]
    run = read_run(tmp_path / "run")
    assert run.damaged_lines == 0
    assert run.facts["groups"][1] == {"name": "mine", "ranks": [1, 2]}
    for line in run.steps:
        assert line["unmatched"] == [0, 0, 0]
        late = [[use[:4] for use in uses if use[0] == 1] for uses in line["collectives"]]
        there = [[1, "all_reduce", 1, 4000]] if line["step"] > 2 else []
        assert late == [[], there, there]


def excluded(rank: int, size: int, directory: Path) -> list[str]:
    with heard() as said:
        model = DistributedDataParallel(model_of())
        with bireme.Monitor(directory, model=model, skip_steps=0) as monitor:
            for _ in range(4):
                with monitor.step(tokens=1):
                    with bireme.observe_nothing():
                        dist.all_reduce(torch.ones(10))
                        loop(model, monitor, steps=1)  # another loop, with its steps and phases
                    dist.all_reduce(torch.ones(20))
    return said


@needs_hooks
def test_observe_nothing(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, excluded, tmp_path / "run") == [[], []]
    run = read_run(tmp_path / "run")
    assert [line["tokens"] for line in run.steps] == [2] * 4
    for line in run.steps:
        assert [use[:4] for use in line["collectives"][0]] == [[0, "all_reduce", 1, 80]]
        # batches() marks its input itself; all else inside is `other`
        assert not any(line["cells_ns"][0][len(STATES) * PHASES.index("backward") :][: len(STATES)])


def failing_inside(rank: int, size: int, directory: Path) -> tuple[list[float], list[str]]:
    model = wrapped("ddp")
    with heard() as said:
        monitor = bireme.Monitor(directory, model=model, exchange_every=2)
        if rank == 1:
            reads = iter(range(20))
            read = monitor._thread.clock.read
            monitor._thread.clock.read = lambda: read() if next(reads, None) is not None else 1 / 0  # type: ignore
        losses = loop(model, monitor)
        monitor.close()
    return losses, said


def test_an_error_inside_ends_the_observing_and_not_the_training(ranks: Ranks, tmp_path: Path) -> None:
    answers = ranks(2, failing_inside, tmp_path / "run")
    assert answers[0][0] == answers[1][0] == ranks(2, only_train, "ddp")[0]
    said = [message for _, messages in answers for message in messages if "training goes on" in message]
    assert len([each for each in answers[1][1] if "ZeroDivisionError" in each and "training goes on" in each]) == 1
    assert len(said) <= 2
    run = read_run(tmp_path / "run")
    assert 0 < len(run.steps) < STEPS and closure_error_ns(run) == 0


def destroyed_in_finally(rank: int, size: int, directory: Path) -> None:
    monitor = bireme.Monitor(directory)
    try:
        for number in range(3):
            with monitor.step():
                dist.all_reduce(torch.ones(1))
                if number == 2:
                    raise ValueError("no such batch")
    except ValueError:
        dist.destroy_process_group()


def after_another_start(rank: int, size: int, directory: Path, store: str) -> list[float]:
    """The monitored group is destroyed, and the loop goes on in another one."""
    model = wrapped("ddp")
    monitor = bireme.Monitor(directory, model=model)
    loop(model, monitor, 3)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    return loop(wrapped("ddp"), monitor, 3)


def test_a_loop_goes_on_in_another_process_group(ranks: Ranks, tmp_path: Path) -> None:
    losses = ranks(2, after_another_start, tmp_path / "run", str(tmp_path / "store"))
    assert len(losses[0]) == 3 and losses[0] == losses[1]
    assert len(read_run(tmp_path / "run").steps) == 3


def different_options(rank: int, size: int, directory: Path) -> str:
    with pytest.raises(UserError) as caught:
        bireme.Monitor(directory, stall_after_s=30.0 * rank)
    return str(caught.value)


def test_ranks_that_ask_for_different_things_are_told(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2, different_options, tmp_path / "run")
    assert first == second and "stall_after_s is 0.0 on rank 0, but 30.0 on rank 1" in first


def test_a_late_group_that_members_find_in_different_rounds_has_one_place() -> None:
    table = [{"id": "0", "name": "default_pg", "ranks": [0, 1]}]
    learned: list[int] = []
    late = LateGroups(table, lambda known: learned.append(len(known)))
    other = {"id": "5", "name": "mine", "ranks": [0, 1]}
    assert late.joined([], [other, other]) == [other]  # the other rank has found it first
    late._found.append((1 << 20, other))
    assert late.joined([other], [other]) == []
    assert late.index_of(1 << 20) == 1 and late.found() == [] and learned == [2]


def test_destroying_the_groups_after_an_error_is_no_finished_run(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, destroyed_in_finally, tmp_path / "run")
    facts = read_run(tmp_path / "run").facts
    assert (facts["status"], facts["status_reason"]) == ("failed", "ValueError: no such batch")


def only_train(rank: int, size: int, how: str) -> list[float]:
    return loop(wrapped(how), None)


def wrong_on_one(rank: int, size: int, directory: Path) -> str:
    with pytest.raises(UserError) as caught:
        bireme.Monitor(directory, optimizer=object() if rank == 1 else None)
    return str(caught.value)


def test_a_mistake_on_one_rank_is_raised_on_all(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2, wrong_on_one, tmp_path / "run")
    assert first == second and first.startswith("rank 1: optimizer is a object")
    assert not (tmp_path / "run").exists()


# --- in one process ----------------------------------------------------------------------------------------------


def test_steps_in_steps_are_said_once_and_not_counted(tmp_path: Path) -> None:
    with heard() as said, bireme.Monitor(tmp_path / "run") as monitor:
        for _ in range(3):
            with monitor.step(tokens=5), monitor.step(tokens=7) as inner:
                inner.loss(1.0)
    assert [line["tokens"] for line in read_run(tmp_path / "run").steps] == [5, 5, 5]
    assert len(said) == 1 and "inside another" in said[0]


def test_a_closed_monitor_lets_the_loop_go_on(tmp_path: Path) -> None:
    model = model_of()
    monitor = bireme.Monitor(tmp_path / "run", model=model)
    first = loop(model, monitor, 2)
    monitor.close()
    assert len(loop(model, monitor, 3)) == 3 and len(first) == 2
    with monitor.phase("forward"):
        pass
    assert len(read_run(tmp_path / "run").steps) == 2


def test_batches_of_nothing(tmp_path: Path) -> None:
    with (
        bireme.Monitor(tmp_path / "run") as monitor,
        pytest.raises(UserError, match=r"batches\(int\): give what a for"),
    ):
        monitor.batches(3)  # type: ignore[arg-type]


def test_an_optimizer_that_never_steps_is_said(tmp_path: Path) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with heard() as said, bireme.Monitor(tmp_path / "run", model=model, optimizer=optimizer) as monitor:
        for _ in range(3):
            with monitor.step():
                model(DATA[:2]).sum().backward()
    assert len(said) == 1 and "the optimizer given to the Monitor never stepped" in said[0]


@pytest.mark.parametrize(
    ("tokens", "counted", "lines"),
    [(torch.tensor(5), 5, 0), (5.0, 5, 0), (torch.tensor(float("nan")), 0, 1), ("x", 0, 1), (-5, 0, 1), (2.5, 0, 1)],
)
def test_tokens_are_a_whole_number_or_none(
    tokens: Any, counted: int, lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "_said_tokens", False)
    with heard() as said, bireme.Monitor(tmp_path / "run") as monitor:
        for _ in range(3):
            with monitor.step(tokens=tokens) as step:
                step.loss(1.5, tokens=tokens)
    run = read_run(tmp_path / "run")
    assert [line["tokens"] for line in run.steps] == [counted] * 3
    assert len(said) == lines and all("is no number of tokens" in each for each in said)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"metrics_port": "9400"}, "metrics_port='9400'"),
        ({"trace_steps": 5}, "trace_steps=5"),
        ({"facts": [1]}, "facts="),
        ({"skip_steps": -1}, "skip_steps=-1: a whole number, at least 0"),
        ({"exchange_every": 0}, "exchange_every=0"),
        ({"stall_after_s": "x"}, "stall_after_s='x'"),
        ({"abort_after_s": float("nan")}, "abort_after_s=nan"),
        ({"phases": "auto"}, "phases='auto'"),
    ],
)
def test_options_of_the_wrong_kind_are_one_line(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        bireme.Monitor(tmp_path / "run", **options)
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="the run directory is 5"):
        bireme.Monitor(5)  # type: ignore[arg-type]


def test_a_second_monitor_ends_the_first(tmp_path: Path) -> None:
    model = model_of()
    first = bireme.Monitor(tmp_path / "a", model=model)
    loop(model, first, 3)
    with heard() as said:
        second = bireme.Monitor(tmp_path / "b", model=model)
    loop(model, second, 4)
    second.close()
    assert [len(read_run(tmp_path / name).steps) for name in ("a", "b")] == [3, 4]
    assert said == [f"the Monitor of {tmp_path / 'a'} is closed, since another one is made"]


def test_a_loop_without_steps_is_said(tmp_path: Path) -> None:
    with heard() as said, bireme.Monitor(tmp_path / "run") as monitor:
        for _ in monitor.batches([1, 2]):
            pass
    assert said == ["no step was recorded: put `with monitor.step():` around each of them"]


def test_what_is_told_inside_of_observe_nothing_is_nobodys(tmp_path: Path) -> None:
    with bireme.Monitor(tmp_path / "run", skip_steps=0) as monitor:
        with bireme.observe_nothing(), monitor.step(tokens=9):  # before the first step, too
            pass
        for _ in range(3):
            with monitor.step(tokens=5) as step:
                step.loss(1.0)
                with bireme.observe_nothing(), monitor.step(tokens=7) as other:
                    other.loss(2.0)
                    other.skip("evaluation")
    lines = read_run(tmp_path / "run").steps
    assert [(line["tokens"], line["loss"], line["skipped"]) for line in lines] == [(5, 1.0, None)] * 3


@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_compiled_models_are_not_counted_and_go_on(how: str, tmp_path: Path) -> None:
    model: Any = model_of()
    if how == "wrapped":
        model = torch.compile(model, backend="eager", fullgraph=True)
    else:
        model.compile(backend="eager", fullgraph=True)
    with heard() as said:
        monitor = bireme.Monitor(tmp_path / "run", model=model, flops_per_token="count")
        losses = loop(model, monitor, 3)
        monitor.close()
    torch._dynamo.reset()
    assert losses == loop(model_of(), None, 3)
    assert any("FLOPs of a compiled model are not counted" in each for each in said)


def test_a_restart_by_the_launcher_goes_on_in_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    model = model_of()
    monitor = bireme.Monitor(tmp_path / "run", model=model)
    loop(model, monitor, 3)
    monitor.close("failed", "it died")
    with pytest.raises(UserError, match="exists"):
        bireme.Monitor(tmp_path / "run", model=model)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monitor = bireme.Monitor(tmp_path / "run", model=model)
    loop(model, monitor, 2)
    monitor.close()
    run = read_run(tmp_path / "run")
    assert [line["step"] for line in run.earlier_steps] == [1, 2, 3]
    assert [line["step"] for line in run.steps] == [4, 5] and run.facts["attempt"] == 2
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-8")
    with pytest.raises(UserError, match="exists"):
        bireme.Monitor(tmp_path / "run", model=model)


def test_a_monitor_before_the_process_group() -> None:
    with pytest.raises(UserError, match=r"before torch\.distributed\.init_process_group, in a job of 2 ranks"):
        call_the_roll(environ={"WORLD_SIZE": "2"})
    call_the_roll(environ={"WORLD_SIZE": "1"})


@pytest.mark.parametrize("wrong", [0, -1.0, float("inf"), "no", True, lambda: 1 / 0, lambda: "x"])
def test_flops_that_are_none(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="flops_per_token"):
        bireme.Monitor(tmp_path / "run", flops_per_token=wrong)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("flops", ["count", 123.0, lambda: 123.0, None])
def test_where_flops_come_from(flops: Any, tmp_path: Path) -> None:
    """Field report B42: counted by PyTorch and computed from the layers' shapes they are the same, within 1 %."""
    config = PRESETS["toy"]
    model = GPT(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = bireme.Monitor(
        tmp_path / "run", model=model, flops_per_token=flops, sequence_length=32, skip_steps=1, stall_after_s=0
    )
    tokens = torch.randint(0, config.vocab_size, (2, 32))
    for _ in range(3):
        with monitor.step(tokens=tokens.numel()):
            logits = model(tokens)
            logits.flatten(0, 1).float().logsumexp(-1).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    monitor.close()
    run = read_run(tmp_path / "run")
    recorded = run.facts["model"]["flops_per_token"]["full"]
    from bireme.flops import flops_per_token

    known = flops_per_token(config, 32).full
    assert recorded == (123.0 if callable(flops) or flops == 123.0 else pytest.approx(known, rel=0.01))
    mfu = summarise(run)["mfu"]
    assert 0 < mfu["value"] < 1 and "full attention" in mfu["convention"]


# --- the roll ----------------------------------------------------------------------------------------------------


class Ticking:
    """A clock that goes on with every sleep."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def __call__(self) -> float:
        return self.now


def test_ranks_without_a_monitor_are_named_within_thirty_seconds() -> None:
    store, clock = dist.HashStore(), Ticking()
    with heard() as said, pytest.raises(UserError, match=r"ranks 0, 2 made no Monitor in 3[01] s"):
        wait_for_all(store, 1, 3, timeout_s=30.0, clock=clock, sleep=clock.sleep)
    assert said[0].startswith("ranks 0, 2 have made no Monitor for 2") and len(said) == 1


def test_all_ranks_go_or_none() -> None:
    store, clock = dist.HashStore(), Ticking()
    with pytest.raises(UserError, match="rank 1 made no Monitor"):
        wait_for_all(store, 0, 2, timeout_s=25.0, clock=clock, sleep=clock.sleep)
    with pytest.raises(UserError, match="too late"):  # the other one comes after all
        wait_for_all(store, 1, 2, timeout_s=25.0, clock=clock, sleep=clock.sleep)


def absent(rank: int, size: int, directory: Path) -> str:
    if rank == 1:
        return ""
    with pytest.raises(UserError) as caught:
        bireme.Monitor(directory, meet_within_s=-1.0)
    return str(caught.value)


def test_a_rank_that_makes_none_holds_up_the_others_no_longer_than_asked(ranks: Ranks, tmp_path: Path) -> None:
    assert "rank 1 made no Monitor" in ranks(2, quickly, tmp_path / "run")[0]
    assert not (tmp_path / "run").exists()


def quickly(rank: int, size: int, directory: Path) -> str:
    import bireme.observe.roll as roll

    before, roll._SAY_AFTER_S = roll._SAY_AFTER_S, 0.5
    try:
        return absent(rank, size, directory)
    finally:
        roll._SAY_AFTER_S = before


def test_a_forked_child_leaves_the_record_alone(tmp_path: Path) -> None:
    monitor = bireme.Monitor(tmp_path / "run")
    with monitor.step():
        pass
    child = os.fork()
    if child == 0:
        monitor._at_exit()
        os._exit(0)
    os.waitpid(child, 0)
    assert read_run(tmp_path / "run").facts["status"] == "running"
    monitor.close()
    assert read_run(tmp_path / "run").facts["status"] == "finished"
