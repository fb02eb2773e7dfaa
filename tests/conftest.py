from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.pool import RankPool
else:
    from pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """ranks(2, function, *args): the results of function(rank, size, *args), run on two ranks at once."""
    pool = RankPool()
    yield pool
    pool.close()
