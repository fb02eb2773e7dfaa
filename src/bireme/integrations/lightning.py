"""A callback for PyTorch Lightning: `Trainer(callbacks=[BiremeCallback("runs/mine")])`."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
import torch

from bireme.observe.monitor import Monitor


class BiremeCallback(pl.Callback):
    """Accounts for every optimizer step of `Trainer.fit` in a run directory of Bireme.

    directory: the run directory; UserError when it exists already.
    tokens: this rank's distinct tokens of a batch, as a function of the batch; without it there are no tokens/s.
    options: what else `bireme.Monitor` takes (flops_per_token, skip_steps, metrics_port, trace_steps, ...).

    Validation is `other`, and its step is kept out of averages; what the trainer saves is `checkpoint`.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, tokens: Callable[[Any], int] | None = None, **options: Any
    ):
        self._directory = directory
        self._tokens_of = tokens
        self._options = options
        self._monitor: Monitor | None = None
        self._seen_steps = 0
        self._tokens = 0
        self._losses: list[Any] = []
        self._skip: str | None = None
        self._evaluation = ExitStack()

    @property
    def monitor(self) -> Monitor | None:
        """While the fit goes on."""
        return self._monitor

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        model = trainer.strategy.model
        monitor = Monitor(
            self._directory,
            model=model if model is not None else pl_module,
            optimizer=list(trainer.optimizers),
            **self._options,
        )
        self._monitor, self._seen_steps, self._tokens, self._losses = monitor, 0, 0, []
        with monitor.phase("other"):  # the first step begins
            pass
        save = trainer.save_checkpoint

        def save_checkpoint(*args: Any, **kwargs: Any) -> None:
            with monitor.phase("checkpoint"):
                save(*args, **kwargs)

        trainer.save_checkpoint = save_checkpoint  # type: ignore[method-assign]

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._tokens_of is not None:
            self._tokens += int(self._tokens_of(batch))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        monitor = self._monitor
        if monitor is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if monitor.off:
            return
        if isinstance(loss, torch.Tensor):
            self._losses.append(loss.detach())
        if monitor.optimizer_steps == self._seen_steps:  # gradients are accumulated
            return
        self._seen_steps = monitor.optimizer_steps
        total = sum(self._losses) if self._losses else None
        if total is not None and not pl_module.automatic_optimization:
            total = total / len(self._losses)  # Lightning has not divided them by how many are accumulated
        monitor.end_step(self._tokens, total, self._skip)
        self._tokens, self._losses, self._skip = 0, [], None

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._monitor is not None:
            self._evaluation.enter_context(self._monitor.phase("other"))
            self._skip = "evaluation"

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._evaluation.close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._close(trainer, exception)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close(trainer, None)

    def _close(self, trainer: pl.Trainer, error: BaseException | None) -> None:
        monitor, self._monitor = self._monitor, None
        if monitor is not None:
            vars(trainer).pop("save_checkpoint", None)
            monitor.__exit__(type(error) if error is not None else None, error, None)
