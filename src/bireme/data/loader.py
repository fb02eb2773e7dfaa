"""Each rank's share of every step's batch, read ahead in the background: by a thread, or by worker processes."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bireme.data.corpus import Corpus
from bireme.data.order import rank_share
from bireme.errors import UserError

_SHARED_MEMORY = Path("/dev/shm")
_SPARE_BYTES = 8 << 20
_AHEAD = 2  # steps read before they are asked for, by each reader

# What a scheduler sends to the whole process group. Workers live on until their rank has saved, and go with it.
_RANK_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True, slots=True)
class Batch:
    """What one rank trains on in one step."""

    ids: list[int]  # of its samples
    micro_batches: list[tuple[Tensor, Tensor]]  # (inputs, targets), each (micro batch, length), int64, on the CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Share(Dataset[Batch]):
    """Which samples a rank takes in which step: a function of its fields and the step alone. Picklable.

    `first_sample` is the place in the endless order of samples at which `first_step` begins.
    """

    corpus: Corpus
    seed: int
    global_batch_size: int
    micro_batches: int
    rank: int  # data-parallel
    ranks: int
    first_step: int = 1
    first_sample: int = 0
    before_read: Callable[[int], None] | None = None  # where reading the batch of a step is made slow; picklable

    def ids(self, step: int) -> Any:
        """(samples,) int64: this rank's part of the global batch, in order."""
        consumed = self.first_sample + (step - self.first_step) * self.global_batch_size
        samples = self.corpus.train_samples(consumed, self.global_batch_size, self.seed)
        return samples[rank_share(self.global_batch_size, self.rank, self.ranks)]

    def __getitem__(self, step: int) -> Batch:
        if self.before_read is not None:
            self.before_read(step)
        ids = self.ids(step)
        parts = [self.corpus.batch(each) for each in np.split(ids, self.micro_batches)]
        return Batch(ids.tolist(), [(torch.from_numpy(inputs), torch.from_numpy(targets)) for inputs, targets in parts])


class Loader:
    """Gives the batch of any step; steps that follow each other are read ahead, up to `last_step`.

    `workers` processes read, or with 0 a thread of this one: enough where storage keeps up, as no text is processed
    any more. UserError for a damaged shard, a token that the model does not know, a worker that was killed.
    """

    def __init__(self, share: Share, last_step: int, workers: int = 0):
        self._last_step = last_step
        self._source: _Thread | _Workers = _Workers(share, last_step, workers) if workers else _Thread(share, last_step)

    def __call__(self, step: int) -> Batch:
        return self._source(step)

    def close(self) -> None:
        self._source.close()


class _Thread:
    def __init__(self, share: Share, last_step: int):
        self._share = share
        self._last_step = last_step
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="bireme-loader")
        self._ahead: dict[int, Future[Batch]] = {}

    def __call__(self, step: int) -> Batch:
        wanted = range(step, min(step + _AHEAD, self._last_step) + 1)
        self._ahead = {each: future for each, future in self._ahead.items() if each in wanted}
        for each in (step, *wanted):
            if each not in self._ahead:
                self._ahead[each] = self._executor.submit(self._share.__getitem__, each)
        return self._ahead.pop(step).result()

    def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)


class _Told(Dataset[Batch | str]):
    """A share whose mistakes arrive as text: PyTorch would raise them again with a traceback for a message."""

    def __init__(self, share: Share):
        self._share = share

    def __getitem__(self, step: int) -> Batch | str:
        try:
            return self._share[step]
        except UserError as error:
            return str(error)


class _Workers:
    def __init__(self, share: Share, last_step: int, workers: int):
        self._share = share
        self._last_step = last_step
        self._workers = workers
        self._next = 0
        self._batches: Iterator[Batch | str] | None = None

    def __call__(self, step: int) -> Batch:
        if self._batches is None or step != self._next:
            self._begin(step)
        assert self._batches is not None
        self._next = step + 1
        try:
            batch = next(self._batches)
        except (RuntimeError, OSError, EOFError) as error:
            if isinstance(error, (OSError, EOFError)) or "DataLoader worker" in str(error):
                raise UserError(
                    "a data loader worker was killed, perhaps for lack of memory: take fewer --workers, or 0 (a thread)"
                ) from error
            raise
        if isinstance(batch, str):
            raise UserError(batch)
        return batch

    def _begin(self, step: int) -> None:
        self.close()
        loader = DataLoader(
            _Told(self._share),
            batch_size=None,
            sampler=range(step, max(step, self._last_step) + 1),
            num_workers=self._workers,
            prefetch_factor=_AHEAD,
            generator=torch.Generator(),  # the global one is part of a checkpoint
            # Not forked: this process has threads of gloo and OpenMP.
            multiprocessing_context="spawn",
        )
        with _held((signal.SIGUSR1,)):  # the others it ignores
            resource_tracker.ensure_running()  # started by the first worker otherwise, and then it lifts the block
        self._check_shared_memory()
        with _held(_RANK_SIGNALS):  # a process begins with the signals blocked that its parent's thread has blocked
            self._batches = iter(loader)

    def _check_shared_memory(self) -> None:
        """UserError where workers could not hand their batches over: PyTorch's own words are a traceback."""
        share = self._share
        tokens = share.global_batch_size // share.ranks * (share.corpus.sequence_length + 1)
        needed = 16 * tokens * _AHEAD * self._workers + _SPARE_BYTES
        if _SHARED_MEMORY.is_dir() and (
            not os.access(_SHARED_MEMORY, os.W_OK) or shutil.disk_usage(_SHARED_MEMORY).free < needed
        ):
            raise UserError(
                f"--workers need {needed / 1e6:.0f} MB in {_SHARED_MEMORY}, which has less or cannot be written: "
                "enlarge it (docker: --shm-size), or take --workers 0"
            )

    def close(self) -> None:
        self._batches = None  # ends the workers


@contextmanager
def _held(signals: tuple[signal.Signals, ...]) -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
