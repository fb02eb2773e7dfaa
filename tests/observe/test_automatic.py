"""Phases that are found without anybody marking them, by what the hooks see of real loops in one process."""

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset, dataloader

from bireme.errors import UserError
from bireme.ledger import PHASES
from bireme.observe import automatic
from bireme.observe.automatic import PhaseFinder
from bireme.observe.phases import OTHER, Phase, PhaseTracker

torch.set_num_threads(1)


class Counting:
    """A clock whose readings are numbers, one after the other."""

    def __init__(self) -> None:
        self.readings = 0

    def read(self) -> int:
        self.readings += 1
        return self.readings


class Loop:
    """A model, an optimizer and a finder; `phases` tells what was found, each stretch once."""

    def __init__(self, model: Any = None, optimizer: Any = None, follow: bool = True, **options: Any):
        torch.manual_seed(0)
        self.model = model or nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.optimizer = optimizer or torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.tracker = PhaseTracker(Counting())
        self.failures: list[Exception] = []
        self.finder = PhaseFinder(
            self.tracker, [self.model] if follow else [], [self.optimizer] if follow else [], self.failures.append
        )
        self.tracker.enter(OTHER)

    def marked(self, phase: str) -> Phase:
        return Phase(self.tracker, PHASES.index(phase))

    def step(self, batch: torch.Tensor | None = None) -> torch.Tensor:
        batch = torch.ones(4, 8) if batch is None else batch
        loss: torch.Tensor = (self.model(batch) - batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def phases(self) -> list[str]:
        """Since the last call; stretches that follow each other in the same phase are one, and `other` is left out."""
        boundaries, _ = self.tracker.cut()
        self.finder.cut()
        assert self.failures == []
        assert self.tracker.phase == OTHER
        found = [PHASES[phase] for phase, _ in boundaries if phase != OTHER]
        return [phase for index, phase in enumerate(found) if index == 0 or found[index - 1] != phase]


@contextmanager
def loop(*args: Any, **options: Any) -> Iterator[Loop]:
    made = Loop(*args, **options)
    try:
        yield made
    finally:
        made.finder.close()


def test_a_plain_loop() -> None:
    with loop() as it:
        it.step()
        assert it.phases() == ["forward", "backward", "optimizer"]
        it.step()
        assert it.phases() == ["forward", "backward", "optimizer"]


def test_what_lies_between_is_named_by_what_follows() -> None:
    with loop() as it:
        output = it.model(torch.ones(4, 8))
        before = it.tracker._boundaries[-1]
        assert before[0] == OTHER  # nobody knows yet
        loss = output.square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(it.model.parameters(), 1.0)
        it.optimizer.step()
        boundaries, _ = it.tracker.cut()
        # other, forward, the loss, backward, clipping, the step, other
        named = [PHASES[phase] for phase, _ in boundaries]
        assert named == ["other", "forward", "forward", "backward", "optimizer", "optimizer", "other"]


def test_without_a_model_forward_is_what_comes_before_backward() -> None:
    with loop(follow=False) as it:
        it.step()
        assert it.phases() == ["forward", "backward", "optimizer"]


def test_gradient_accumulation() -> None:
    with loop() as it:
        for _ in range(3):
            it.model(torch.ones(4, 8)).sum().backward()
        it.optimizer.step()
        assert it.phases() == ["forward", "backward"] * 3 + ["optimizer"]


def test_two_models_and_two_optimizers() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (first, second)]
    tracker = PhaseTracker(Counting())
    finder = PhaseFinder(tracker, [first, second], optimizers)
    tracker.enter(OTHER)
    for model, optimizer in zip((first, second), optimizers, strict=True):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    boundaries, _ = tracker.cut()
    finder.close()
    found = [PHASES[phase] for phase, _ in boundaries if phase != OTHER]
    assert [a for a, b in pairwise([*found, ""]) if a != b] == ["forward", "backward", "optimizer"] * 2
    assert finder.optimizer_steps == 2


def test_a_closure_runs_forward_and_backward_inside_the_step() -> None:
    model = nn.Linear(8, 8)
    with loop(model, torch.optim.LBFGS(model.parameters(), max_iter=2)) as it:

        def closure() -> torch.Tensor:
            it.optimizer.zero_grad()
            loss: torch.Tensor = it.model(torch.ones(4, 8)).square().mean()
            loss.backward()
            return loss

        it.optimizer.step(closure)
        found = it.phases()
    assert found[:4] == ["optimizer", "forward", "backward", "optimizer"]
    assert it.finder.optimizer_steps == 1


def test_grad_scaler_also_when_it_skips_the_step() -> None:
    with loop() as it:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for batch in (torch.ones(4, 8), torch.full((4, 8), float("inf"))):
            loss = it.model(batch).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(it.optimizer)
            scaler.step(it.optimizer)
            scaler.update()
            found = it.phases()
            assert found == ["forward", "backward", *(["optimizer"] if batch.isfinite().all() else [])]
            it.optimizer.zero_grad()
            it.phases()
        assert it.finder.optimizer_steps == 1


@pytest.mark.parametrize("how", ["wrapped", "wrapped, after", "in place", "in place, before"])
def test_compiled_models_even_without_graph_breaks(how: str) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    used: Any = torch.compile(model, backend="eager", fullgraph=True) if how == "wrapped" else model
    if how == "in place, before":
        model.compile(backend="eager", fullgraph=True)
    with loop(used, torch.optim.SGD(model.parameters(), lr=0.1)) as it:
        if how == "in place":
            model.compile(backend="eager", fullgraph=True)
        elif how == "wrapped, after":
            it.model = torch.compile(model, backend="eager", fullgraph=True)
        for _ in range(2):
            it.step()
            assert it.phases() == ["forward", "backward", "optimizer"]
    torch._dynamo.reset()


def test_recomputation_inside_backward_is_backward() -> None:
    inner = nn.Linear(8, 8)
    with loop(inner) as it:
        checkpoint(it.model, torch.ones(4, 8, requires_grad=True), use_reentrant=False).sum().backward()
        assert it.phases() == ["forward", "backward"]
        # The first forward is without gradients, so it is `other`; what comes before backward is forward all the same.
        checkpoint(it.model, torch.ones(4, 8, requires_grad=True), use_reentrant=True).sum().backward()
        assert it.phases() == ["forward", "backward"]


def test_an_optimizer_inside_backward_is_told_when_backward_has_ended() -> None:
    with loop(follow=False) as it:
        optimizers = {each: torch.optim.SGD([each], lr=0.1) for each in it.model.parameters()}
        for each, optimizer in optimizers.items():
            each.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
        told: list[str] = []
        it.finder.stepped = lambda optimizer: told.append(PHASES[it.tracker.phase])
        it.model(torch.ones(4, 8)).sum().backward()
        assert told == ["other"]
        assert it.phases() == ["forward", "backward"]


def test_evaluation_is_other() -> None:
    with loop() as it:
        with torch.no_grad():
            it.model(torch.ones(4, 8))
        assert it.phases() == []


def test_data_loaders_are_input_with_and_without_workers() -> None:
    data = TensorDataset(torch.ones(4, 8))
    for workers in (0, 1):
        with loop() as it:
            batches = 0
            for (batch,) in DataLoader(data, batch_size=2, num_workers=workers):
                batches += len(batch)
                it.step(batch)
            assert batches == 4
            assert it.phases() == ["input", "forward", "backward", "optimizer"] * 2 + ["input"]


def test_what_the_user_marks_holds() -> None:
    with loop() as it:
        with it.marked("checkpoint"):
            it.step()
        assert it.phases() == ["checkpoint"]
        with it.marked("forward"):
            loss = it.model(torch.ones(4, 8)).sum()
        with it.marked("backward"):
            loss.backward()
        assert it.phases() == ["forward", "backward"]


def test_an_exception_leaves_nothing_open() -> None:
    class Failing(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            raise ValueError("no")

    with loop(Failing(8, 8)) as it:
        with pytest.raises(ValueError):
            it.step()
        assert it.phases() == ["forward"]
        output = torch.ones(2, requires_grad=True).square()
        output.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            output.sum().backward()
        it.phases()


def test_another_thread_is_not_seen() -> None:
    with loop() as it:
        worker = threading.Thread(target=Loop.step, args=(it,))
        worker.start()
        worker.join()
        assert it.phases() == []


def test_models_and_optimizers_can_be_copied_and_pickled() -> None:
    with loop() as it:
        copied = copy.deepcopy(it.model)
        AveragedModel(it.model)
        pickle.loads(pickle.dumps(it.model))
        other = pickle.loads(pickle.dumps(it.optimizer))
        copy.deepcopy(it.optimizer)
        assert "zero_grad" not in vars(other)
        copied(torch.ones(4, 8)).sum().backward()
        assert it.phases() == ["forward", "backward"]
    copied(torch.ones(4, 8)).sum().backward()  # the copy has its hooks still: they find nobody


def test_the_numbers_are_the_same_and_nothing_is_left_behind() -> None:
    before = torch.autograd.backward, dataloader._BaseDataLoaderIter.__next__
    losses = []
    for follow in (True, False):
        it = Loop(follow=follow)
        if not follow:
            it.finder.close()
        losses.append([it.step() for _ in range(3)])
        it.finder.close()
        assert not it.model._forward_hooks and not it.model._forward_pre_hooks
        assert "zero_grad" not in vars(it.optimizer)
    assert torch.equal(torch.stack(losses[0]), torch.stack(losses[1]))
    assert (torch.autograd.backward, dataloader._BaseDataLoaderIter.__next__) == before
    assert automatic._finders == {}


def test_a_wrapper_that_pickles_all_that_it_has_is_not_touched() -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer):
            self.optimizer, self.param_groups = optimizer, optimizer.param_groups

        def __getstate__(self) -> dict[str, Any]:
            return dict(self.__dict__)

    model = nn.Linear(8, 8)
    with loop(model, Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))) as it:
        assert "zero_grad" not in vars(it.optimizer)


def test_another_wrapper_around_zero_grad_stays() -> None:
    it = Loop()
    ours = it.optimizer.zero_grad
    it.optimizer.zero_grad = theirs = lambda: ours()  # type: ignore[method-assign]
    it.finder.close()
    assert it.optimizer.zero_grad is theirs


def test_a_patch_that_somebody_took_away_is_made_again() -> None:
    original = torch.autograd.backward
    with loop():
        torch.autograd.backward = original
    with loop() as it:
        it.step()
        assert it.phases() == ["forward", "backward", "optimizer"]
    assert torch.autograd.backward is original


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda tracker: PhaseFinder(tracker, [len], []), "model is a builtin_function_or_method"),
        (lambda tracker: PhaseFinder(tracker, [], [object()]), "optimizer is a object"),
        (lambda tracker: PhaseFinder(tracker, [torch.jit.script(nn.Linear(2, 2))]), "model is a ScriptModule"),
    ],
)
def test_what_has_no_hooks_is_refused(wrong: Callable[[PhaseTracker], Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        wrong(PhaseTracker(Counting()))
    assert automatic._finders == {}


def test_an_error_in_a_hook_never_reaches_the_loop() -> None:
    with loop() as it:

        def broken(phase: int) -> int:
            raise OSError("the clock is gone")

        it.tracker.enter = broken  # type: ignore[method-assign]
        it.step()
        assert it.failures and all(isinstance(each, OSError) for each in it.failures)
