import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.pool import RankPool
else:
    from pool import RankPool


# A shell without job control starts what runs in its background with Ctrl-C ignored, which children would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """ranks(2, function, *args): the results of function(rank, size, *args), run on two ranks at once."""
    pool = RankPool()
    yield pool
    pool.close()
