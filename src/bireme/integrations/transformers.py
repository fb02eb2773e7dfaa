"""A callback for Hugging Face's Trainer: `Trainer(..., callbacks=[BiremeCallback("runs/mine")])`."""

import os
from contextlib import ExitStack
from typing import Any

import torch
from transformers import TrainerCallback

from bireme.observe.monitor import Monitor

_counts: dict[int, int] = {}  # by id of a model: tokens that it was trained on since they were last asked for


class BiremeCallback(TrainerCallback):
    """Accounts for every optimizer step of `Trainer.train` in a run directory of Bireme.

    directory: the run directory; UserError when it exists already. Training again with this callback writes beside it,
        to directory-2 and so on.
    options: what else `bireme.Monitor` takes (flops_per_token, sequence_length, skip_steps, metrics_port, ...).

    Tokens are those of `input_ids`, padding included. Evaluation is `other`, and its step is kept out of averages; what
    the trainer saves is `checkpoint`. The loss is not recorded: how the Trainer scales it depends on its arguments.
    """

    def __init__(self, directory: str | os.PathLike[str], **options: Any):
        self._directory = directory
        self._options = options
        self._monitor: Monitor | None = None
        self._counted: Any = None
        self._hook: Any = None
        self._skip: str | None = None
        self._trainings = 0
        self._evaluation = ExitStack()

    @property
    def monitor(self) -> Monitor | None:
        """While training goes on."""
        return self._monitor

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        model, optimizer = given["model"], given.get("optimizer")
        self._end("failed", "training began anew")  # the Trainer does not say that it has failed
        self._trainings += 1
        name = self._directory if self._trainings == 1 else f"{os.fspath(self._directory)}-{self._trainings}"
        self._monitor = Monitor(name, model=model, optimizer=optimizer, **self._options)
        self._counted = model
        _counts[id(model)] = 0
        self._hook = model.register_forward_pre_hook(_count_tokens, with_kwargs=True)
        with self._monitor.phase("other"):  # the first step begins
            pass

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self._monitor is not None:
            self._monitor.end_step(_counts.get(id(self._counted), 0), skipped=self._skip)
            _counts[id(self._counted)] = 0
            self._skip = None

    def on_prediction_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self._monitor is not None and self._skip is None:
            self._evaluation.enter_context(self._monitor.phase("other"))
            self._skip = "evaluation"

    def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self._monitor is not None:
            self._evaluation.close()
            self._monitor.was("other")
            self._skip = "evaluation"

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **given: Any) -> None:
        self.on_evaluate(args, state, control)

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self._monitor is not None:
            self._monitor.was("checkpoint")

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._end("finished", None)

    def _end(self, status: str, reason: str | None) -> None:
        monitor, self._monitor = self._monitor, None
        if monitor is not None:
            self._evaluation.close()
            self._hook.remove()
            _counts.pop(id(self._counted), None)
            self._counted = self._skip = None
            monitor.close(status, reason)


def _count_tokens(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A function of this module, so that a model with the hook can be copied and pickled."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    ids = kwargs.get("input_ids", args[0] if args else None)
    if id(model) in _counts and isinstance(ids, torch.Tensor):
        _counts[id(model)] += ids.numel()
