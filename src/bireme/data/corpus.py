"""Samples: windows of a token set, and which of them are for training."""

import numpy as np

from bireme.data.order import Ids, Permutation
from bireme.data.tokens import TokenSet
from bireme.errors import UserError


class Corpus:
    """A token set cut into windows of sequence_length + 1 tokens, each starting on the last token of the one before.

    The ids of the windows are the global sample ids. The last `held_out` of them, rounded, but at least one and not
    all, are for evaluation; the rest is trained on. (Held out in one piece, so that training sees nothing of them.) A
    set that has a part for evaluation is evaluated on that, and holds nothing out of training.
    UserError when the corpus is too short for one window of each, or the model's vocabulary too small for its tokens.
    """

    def __init__(self, token_set: TokenSet, sequence_length: int, vocab_size: int, held_out: float = 0.01):
        if token_set.vocab_size is not None and vocab_size < token_set.vocab_size:
            raise UserError(
                f"the model's vocab_size {vocab_size} is too small for the tokens in {str(token_set.path)!r}: give "
                f"--model.vocab-size {token_set.vocab_size}, or more"
            )
        if sequence_length < 1:
            raise UserError(f"sequence_length is {sequence_length}; it must be at least 1")
        if not 0 < held_out < 1:
            raise UserError(f"the held-out fraction is {held_out}; it must be between 0 and 1, for example 0.01")
        self.token_set = token_set
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size
        if token_set.evaluation_count:
            self._evaluation_start = token_set.count - token_set.evaluation_count
            self.num_train_samples = self._windows(self._evaluation_start, "to train on")
            self.num_evaluation_samples = self._windows(token_set.evaluation_count, "to evaluate on")
        else:
            found, needed = token_set.count, 2 * sequence_length + 1
            if found < needed:
                raise UserError(
                    f"the corpus {token_set.source!r} is too short for sequence_length {sequence_length}: it has "
                    f"{found} tokens, one window to train on and one to hold out need {needed}; give more text or a "
                    "shorter length"
                )
            windows = (found - 1) // sequence_length
            self.num_evaluation_samples = min(max(1, round(held_out * windows)), windows - 1)
            self.num_train_samples = windows - self.num_evaluation_samples
            self._evaluation_start = self.num_train_samples * sequence_length

    def _windows(self, tokens: int, purpose: str) -> int:
        if tokens <= self.sequence_length:
            raise UserError(
                f"the corpus {self.token_set.source!r} is too short for sequence_length {self.sequence_length}: it has "
                f"{tokens} tokens {purpose}, one window needs {self.sequence_length + 1}; give more or a shorter length"
            )
        return (tokens - 1) // self.sequence_length

    def train_samples(self, first: int, count: int, seed: int) -> Ids:
        """Ids (count,) of the positions [first, first + count) of the endless stream: each epoch a new permutation.

        A function of its arguments only: take a global batch of it, then `rank_share` of that.
        """
        n = self.num_train_samples
        ids = np.empty(count, np.int64)
        done = 0
        while done < count:
            epoch, start = divmod(first + done, n)
            part = min(n - start, count - done)
            ids[done : done + part] = Permutation(n, seed, epoch)(np.arange(start, start + part))
            done += part
        return ids

    def evaluation_samples(self, limit: int | None = None) -> Ids:
        """Ids of all held-out samples, or of `limit` of them spread evenly; ranks take their `share`, maybe empty."""
        n = self.num_evaluation_samples
        count = n if limit is None else min(limit, n)
        return self.num_train_samples + np.arange(count, dtype=np.int64) * n // max(1, count)

    def batch(self, ids: Ids) -> tuple[Ids, Ids]:
        """Inputs and targets, each (len(ids), sequence_length) and contiguous; targets are one token ahead.

        UserError when a token is outside the model's vocabulary.
        """
        if len(ids) and (ids.min() < 0 or ids.max() >= self.num_train_samples + self.num_evaluation_samples):
            raise IndexError(f"a sample is outside [0, {self.num_train_samples + self.num_evaluation_samples})")
        past_training = ids - self.num_train_samples
        starts = np.where(past_training < 0, ids * self.sequence_length, 0)
        starts += np.where(past_training < 0, 0, self._evaluation_start + past_training * self.sequence_length)
        windows = self.token_set.read(starts, self.sequence_length + 1)
        if windows.size and windows.max() >= self.vocab_size:
            row, column = np.argwhere(windows >= self.vocab_size)[0].tolist()
            raise UserError(
                f"{self.token_set.place(int(starts[row]) + column)} is {windows[row, column]}, outside the model's "
                f"vocab_size {self.vocab_size}; give a larger --model.vocab-size, or tokens that the model is for"
            )
        return np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])
