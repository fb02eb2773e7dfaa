"""Finds the phases of a loop that nobody marked: from module hooks, autograd, optimizer hooks and data loaders.

What is seen on the training thread: the model's forward (module hooks), every backward pass (`torch.autograd.backward`,
which `Tensor.backward` calls), every optimizer's step (PyTorch's hooks for all optimizers), and every batch that a
`DataLoader` gives. What lies between them is named once it is known what follows: the stretch before a backward pass is
`forward` (the loss; or all of it, where no model was given), the one between backward and the optimizer's step is
`optimizer` (clipping, unscaling). The rest is `other`. Forward passes without gradients are evaluation: `other`.

What the user marks holds: inside `monitor.phase(...)` nothing is looked for. Nor inside a backward pass, where
activation checkpointing runs forward again and some optimizers step.

The hooks are functions of this module that look for the finder of their thread: a model or an optimizer with hooks
on it can still be copied and pickled, and a forked data-loader worker has no finder.
"""

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch.optim import optimizer as optimizers
from torch.utils.data import dataloader

from bireme.errors import UserError
from bireme.ledger import PHASES
from bireme.observe.phases import OTHER, PhaseTracker

INPUT, FORWARD, BACKWARD, OPTIMIZER = (PHASES.index(name) for name in ("input", "forward", "backward", "optimizer"))


class PhaseFinder:
    """Marks phases on `tracker` for the thread that makes it, until closed.

    `models`: their forward passes; without any, forward is what comes before backward. `optimizers`: where zero_grad
    counts as well. `failed` is told of an error in a hook. UserError for what has no hooks.
    """

    def __init__(
        self,
        tracker: PhaseTracker,
        models: Iterable[Any] = (),
        optimizers: Iterable[Any] = (),
        failed: Callable[[Exception], None] = lambda error: None,
    ):
        models, optimizers = list(models), list(optimizers)
        _check(models, optimizers)
        self.optimizer_steps = 0
        self._tracker = tracker
        self.stepped: Callable[[Any], None] = lambda optimizer: None  # called with it after an optimizer's step
        self.failed = failed
        self._thread = threading.get_ident()
        self._begun: list[int | None] = []  # the phases to return to; None: the begin was not marked
        self._after_backward = False
        self._due: Any = None  # an optimizer that stepped inside a backward pass, which goes on
        self._handles = [
            handle
            for model in models
            for handle in (
                # First of all: FSDP2 gathers weights in a hook of its own.
                model.register_forward_pre_hook(_forward_begins, prepend=True),
                model.register_forward_hook(_forward_ends, always_call=True),
            )
        ]
        self._zeroed = [optimizer for optimizer in optimizers if _note_zero_grad(optimizer)]
        _finders[self._thread] = self
        _install()

    def close(self) -> None:
        """Looks for nothing any more, and leaves nothing behind."""
        if _finders.get(self._thread) is self:
            del _finders[self._thread]
        for handle in self._handles:
            handle.remove()
        for optimizer in self._zeroed:
            _forget_zero_grad(optimizer)
        _uninstall()

    def cut(self) -> None:
        """A step has ended: what was left open by an exception is not of the next one."""
        self._begun.clear()
        self._after_backward = False
        if self._tracker.phase != OTHER and not self._tracker.marked:
            self._tracker.enter(OTHER)

    # --- what the hooks say ---

    def begin(self, phase: int) -> None:
        tracker = self._tracker
        if not tracker.started or tracker.marked or tracker.phase == BACKWARD:
            self._begun.append(None)
            return
        if phase == BACKWARD and tracker.phase in (OTHER, OPTIMIZER):  # or in a closure, which an optimizer calls
            tracker.rename(FORWARD)
        elif phase == OPTIMIZER and tracker.phase == OTHER and self._after_backward:
            tracker.rename(OPTIMIZER)
        self._after_backward = False
        self._begun.append(tracker.enter(phase))

    def end(self, phase: int, failed: bool = False) -> None:
        before = self._begun.pop() if self._begun else None
        if before is None or self._tracker.marked:
            return
        if failed:
            self._tracker.fail(before)
        else:
            self._tracker.enter(before)
        self._after_backward = phase == BACKWARD
        if self._due is not None and phase == BACKWARD:
            optimizer, self._due = self._due, None
            self.stepped(optimizer)

    def forward_begins(self) -> None:
        self.begin(FORWARD if torch.is_grad_enabled() else OTHER)

    def step_ends(self, optimizer: Any) -> None:
        self.end(OPTIMIZER)
        self.optimizer_steps += 1
        if self._tracker.phase == BACKWARD:
            self._due = optimizer
        elif self._tracker.phase != OPTIMIZER:  # or one inside another: a sharded optimizer has a local one
            self.stepped(optimizer)


def _check(models: list[Any], given: list[Any]) -> None:
    for model in models:
        if isinstance(model, torch.jit.ScriptModule):
            raise UserError(
                "model is a ScriptModule, which takes no hooks: leave it away, and what precedes backward is forward"
            )
        if not isinstance(model, torch.nn.Module):
            raise UserError(
                f"model is a {type(model).__name__}: the monitor hooks a torch.nn.Module, or a list of them; "
                "leave it away and mark phases with monitor.phase(...)"
            )
    for optimizer in given:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UserError(
                f"optimizer is a {type(optimizer).__name__}: the monitor hooks a torch.optim.Optimizer, or a list of "
                'them; leave it away and mark its step with monitor.phase("optimizer")'
            )


# --- hooks: they find the finder of their thread, and never raise -------------------------------------------------

_finders: dict[int, PhaseFinder] = {}
os.register_at_fork(after_in_child=_finders.clear)


def _finder() -> PhaseFinder | None:
    return _finders.get(threading.get_ident())


def _forward_begins(_module: Any, _inputs: Any) -> None:
    if torch.compiler.is_compiling():  # a model compiled in place: forward is found from what follows it
        return
    finder = _finder()
    if finder is not None:
        try:
            finder.forward_begins()
        except Exception as error:
            finder.failed(error)


def _forward_ends(_module: Any, _inputs: Any, _output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    finder = _finder()
    if finder is not None:
        try:
            finder.end(FORWARD)
        except Exception as error:
            finder.failed(error)


def _step_begins(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    finder = _finder()
    if finder is not None:
        try:
            finder.begin(OPTIMIZER)
        except Exception as error:
            finder.failed(error)


def _step_ends(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    finder = _finder()
    if finder is not None:
        try:
            finder.step_ends(optimizer)
        except Exception as error:
            finder.failed(error)
    elif _first_stepped is not None and threading.current_thread() is threading.main_thread():
        _first_stepped(optimizer)


def _noted(phase: int, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` as a stretch of that phase."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        finder = None if torch.compiler.is_compiling() else _finder()
        if finder is None:
            return call(*args, **kwargs)
        try:
            finder.begin(phase)
        except Exception as error:
            finder.failed(error)
            return call(*args, **kwargs)
        failed = True
        try:
            answer = call(*args, **kwargs)
            failed = False
            return answer
        except StopIteration:  # the end of a loader is no failure
            failed = False
            raise
        finally:
            try:
                finder.end(phase, failed)
            except Exception as error:
                finder.failed(error)

    noted.noted_by_bireme = True  # type: ignore[attr-defined]
    noted.__name__ = getattr(call, "__name__", "noted")
    noted.__doc__ = call.__doc__
    return noted


def _note_zero_grad(optimizer: Any) -> bool:
    """PyTorch has no hook for it: the optimizer's own method is wrapped; copies and pickles do not take that along."""
    # A wrapper around an optimizer may pickle all that it has.
    pickled, usual = (vars(kind).get("__getstate__") for kind in (type(optimizer), torch.optim.Optimizer))
    if "zero_grad" in vars(optimizer) or pickled not in (None, usual):
        return False
    with suppress(Exception):
        optimizer.zero_grad = _noted(OPTIMIZER, optimizer.zero_grad)
        return True
    return False


def _forget_zero_grad(optimizer: Any) -> None:
    with suppress(Exception):
        if getattr(optimizer.zero_grad, "noted_by_bireme", False):
            del optimizer.zero_grad


class _Patch:
    """One attribute that calls ours instead, for as long as somebody is followed."""

    def __init__(self, owner: Any, name: str, phase: int):
        self._owner, self._name, self._phase = owner, name, phase
        self._original: Any = None
        self._ours: Any = None

    def install(self) -> None:
        now = vars(self._owner)[self._name]
        if self._ours is None or now is not self._ours:  # or somebody has put back what was there before
            self._original, self._ours = now, _noted(self._phase, now)
            setattr(self._owner, self._name, self._ours)

    def uninstall(self) -> None:
        # Where somebody has wrapped our wrapper it has to stay: without a finder it passes every call through.
        if self._ours is not None and vars(self._owner)[self._name] is self._ours:
            setattr(self._owner, self._name, self._original)
            self._ours = None


_patches = (_Patch(torch.autograd, "backward", BACKWARD), _Patch(dataloader._BaseDataLoaderIter, "__next__", INPUT))
_watches_optimizers = False
_first_stepped: Callable[[Any], None] | None = None


def when_stepped_unfollowed(call: Callable[[Any], None] | None) -> None:
    """`call(optimizer)` after each step on the main thread that no finder follows (None: nobody any more); it must not
    raise."""
    global _first_stepped
    _first_stepped = call
    _watch_optimizers()


def _watch_optimizers() -> None:
    """For good: PyTorch goes through its hooks while they run, so none may be added or taken away in one."""
    global _watches_optimizers
    if not _watches_optimizers:
        _watches_optimizers = True
        optimizers.register_optimizer_step_pre_hook(_step_begins)
        optimizers.register_optimizer_step_post_hook(_step_ends)


def _install() -> None:
    _watch_optimizers()
    for patch in _patches:
        patch.install()


def _uninstall() -> None:
    if not _finders:
        for patch in _patches:
            patch.uninstall()
