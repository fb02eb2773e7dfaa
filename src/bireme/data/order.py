"""The order of samples: a permutation for each epoch, and each rank's share of a global batch. Pure."""

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from bireme.errors import UserError

_ROUNDS = 6  # of the Feistel network

Ids = NDArray[np.int64]


class Permutation:
    """A pseudo-random permutation of [0, n), a function of (n, seed, epoch) that takes no memory.

    A Feistel network permutes [0, 2^bits); what falls outside [0, n), less than half, walks on until it is inside.
    """

    def __init__(self, n: int, seed: int, epoch: int):
        bits = max(2, (n - 1).bit_length())
        self._n = np.uint64(n)
        self._left = np.uint64(bits // 2)  # the two parts of a number, in bits
        self._right = np.uint64(bits - bits // 2)
        key = blake2b(f"{seed}|{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = np.frombuffer(key, "<u8")

    def __call__(self, positions: Ids) -> Ids:
        """Where each position goes; same shape, at least one-dimensional. ValueError outside [0, n)."""
        values = positions.astype(np.uint64)  # negative ones become huge
        if (values >= self._n).any():
            raise ValueError(f"a position is outside [0, {self._n})")
        values = self._shuffle(values)
        while (outside := values >= self._n).any():
            values[outside] = self._shuffle(values[outside])
        return values.astype(np.int64)

    def _shuffle(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        # Each round changes one part by a function of the other, which its inverse could repeat: a bijection.
        left, right = values >> self._right, values & ((np.uint64(1) << self._right) - np.uint64(1))
        for index, key in enumerate(self._keys):
            if index % 2:
                right ^= _mix(left, key) >> (np.uint64(64) - self._right)
            else:
                left ^= _mix(right, key) >> (np.uint64(64) - self._left)
        return (left << self._right) | right


def _mix(values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Keyed 64-bit hash, best in its high bits (the two multiplications of splitmix64)."""
    mixed = (values + key) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    return mixed


def share(count: int, rank: int, ranks: int) -> slice:
    """The contiguous part of `count` items that is this rank's. Parts differ by at most one item and may be empty."""
    return slice(count * rank // ranks, count * (rank + 1) // ranks)


def rank_share(global_batch_size: int, data_parallel_rank: int, data_parallel_size: int) -> slice:
    """The contiguous, equal share of a global batch that is this rank's. UserError when it cannot be equal."""
    per_rank, rest = divmod(global_batch_size, data_parallel_size)
    if rest or per_rank < 1:
        near = " or ".join(str(n * data_parallel_size) for n in (per_rank, per_rank + 1) if n > 0)
        raise UserError(
            f"a global batch of {global_batch_size} samples cannot be shared equally by {data_parallel_size} "
            f"data-parallel ranks; take {near}"
        )
    return share(global_batch_size, data_parallel_rank, data_parallel_size)
