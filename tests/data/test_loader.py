"""Batches read ahead, by a thread or by processes: the right ones, in order, and workers that signals do not end."""

import os
import pickle
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bireme.data import Corpus, open_tokens, prepare
from bireme.data.loader import Batch, Loader, Share
from bireme.errors import UserError


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    monkeypatch.setenv("BIREME_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("".join(f"{n} squared is {n * n};\n" for n in range(400)))
    return Corpus(open_tokens(prepare(str(tmp_path / "text.txt"))), 16, 256)


def share_of(corpus: Corpus, rank: int = 0, ranks: int = 1, **fields: Any) -> Share:
    standard = {"seed": 3, "global_batch_size": 8, "micro_batches": 2}
    return Share(corpus=corpus, rank=rank, ranks=ranks, **{**standard, **fields})


def check(loader: Loader, share: Share, steps: list[int]) -> None:
    for step in steps:
        batch = loader(step)
        assert batch.ids == share.ids(step).tolist()
        inputs = torch.cat([each[0] for each in batch.micro_batches])
        targets = torch.cat([each[1] for each in batch.micro_batches])
        expected = share.corpus.batch(share.ids(step))
        assert torch.equal(inputs, torch.from_numpy(expected[0]))
        assert torch.equal(targets, torch.from_numpy(expected[1]))


@pytest.fixture
def two_workers(corpus: Corpus) -> Iterator[tuple[Loader, Share]]:
    share = share_of(corpus)
    loader = Loader(share, 50, workers=2)
    yield loader, share
    loader.close()


def test_a_thread_reads_ahead_the_same_batches(corpus: Corpus) -> None:
    share = share_of(corpus)
    loader = Loader(share, 6)
    check(loader, share, [1, 2, 3, 4, 5, 6, 9, 2, 3])
    loader.close()


def test_ahead_means_ahead(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    original = Share.__getitem__

    def noted(self: Share, step: int) -> Batch:
        asked.append(step)
        return original(self, step)

    monkeypatch.setattr(Share, "__getitem__", noted)
    loader = Loader(share_of(corpus), 5)
    loader(1)
    deadline = time.monotonic() + 10
    while asked != [1, 2, 3] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert asked == [1, 2, 3]
    for step in (2, 3, 4, 5):
        loader(step)
    loader.close()
    assert asked == [1, 2, 3, 4, 5], "each once, and nothing beyond the last step"


def test_ranks_and_workers_share_every_sample_once(corpus: Corpus) -> None:
    """B34: whatever reads, the ids are divided before it does."""
    whole = share_of(corpus, micro_batches=1)
    shares = [share_of(corpus, rank, 2, micro_batches=1) for rank in range(2)]
    for step in range(1, corpus.num_train_samples // 8 + 1):
        ids = np.concatenate([share.ids(step) for share in shares])
        assert ids.tolist() == whole.ids(step).tolist()
    steps = range(1, corpus.num_train_samples // 8 + 1)
    seen = [sample for step in steps for sample in whole.ids(step).tolist()]
    assert len(seen) == len(set(seen))


def test_a_share_goes_on_where_another_ended(corpus: Corpus) -> None:
    """B35: the position is kept in samples, so that another batch size leaves none out."""
    before = share_of(corpus)
    after = share_of(corpus, global_batch_size=4, first_step=6, first_sample=40)
    assert [*after.ids(6), *after.ids(7)] == before.ids(6).tolist()
    assert pickle.loads(pickle.dumps(after)).ids(9).tolist() == after.ids(9).tolist()


def children() -> list[int]:
    """Processes whose parent is this one."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid() and fields[0] not in ("Z", "X"):
            found.append(int(stat.parent.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")
def test_workers_outlive_the_signals_of_a_scheduler_but_not_their_rank(
    two_workers: tuple[Loader, Share], corpus: Corpus
) -> None:
    """B38."""
    before = set(children())
    loader, share = two_workers
    check(loader, share, [1, 2])
    processes = set(children()) - before
    assert len(processes) >= 2
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        for pid in processes:
            os.kill(pid, number)
    check(loader, share, list(range(3, 12)))
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set(), "this process gets its signals"
    loader.close()
    deadline = time.monotonic() + 20
    while len(set(children()) - before) > 1 and time.monotonic() < deadline:  # the tracker of shared memory stays
        time.sleep(0.05)
    assert len(set(children()) - before) <= 1

    broken = Loader(share_of(corpus, seed=1), 1000, workers=1)
    try:
        broken(1)
        for pid in set(children()) - before - processes:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(UserError, match="a data loader worker was killed"):
            for step in range(2, 1000):
                broken(step)
    finally:
        broken.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_token_that_the_model_does_not_know_is_one_line(corpus: Corpus, workers: int) -> None:
    corpus.vocab_size = 60
    loader = Loader(share_of(corpus), 5, workers)
    with pytest.raises(UserError, match="outside the model's vocab_size 60") as caught:
        loader(1)
    assert "\n" not in str(caught.value)
    loader.close()
