"""Text to batches: token files, a shuffled order without end, and each rank's share of it.

Everything is a function of (tokens, seed, samples consumed). The number of ranks only decides who computes what:
worlds of any size that take the same global batches see the same samples in the same order.
"""

from bireme.data.cache import prepare
from bireme.data.corpus import Corpus
from bireme.data.order import rank_share, share
from bireme.data.tokens import TokenSet, open_tokens

__all__ = ["Corpus", "TokenSet", "open_tokens", "prepare", "rank_share", "share"]
