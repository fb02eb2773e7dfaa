import gc
import threading
import time
from collections.abc import Iterator

import pytest

from bireme.observe.garbage import GarbageObserver

Pause = tuple[int, int, int]


@pytest.fixture
def pauses() -> Iterator[list[Pause]]:
    seen: list[Pause] = []
    observer = GarbageObserver(lambda *pause: seen.append(pause))
    yield seen
    observer.close()


def test_a_collection_is_seen_with_its_generation(pauses: list[Pause]) -> None:
    pauses.clear()
    before_ns = time.perf_counter_ns()
    gc.collect()
    gc.collect(0)
    after_ns = time.perf_counter_ns()
    mine = [pause for pause in pauses if pause[0] >= before_ns]
    assert [pause[2] for pause in mine if pause[2] != 1][-2:] == [2, 0]
    assert all(before_ns <= start_ns <= end_ns <= after_ns for start_ns, end_ns, _ in mine)


def test_a_big_heap_takes_longer_than_the_notable_pause(pauses: list[Pause]) -> None:
    heap = [[index] for index in range(400_000)]
    pauses.clear()
    gc.collect()
    assert max(end_ns - start_ns for start_ns, end_ns, _ in pauses) >= 1_000_000
    assert len(heap) == 400_000


def test_collections_of_every_thread_count(pauses: list[Pause]) -> None:
    pauses.clear()
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()
    assert any(generation == 2 for _, _, generation in pauses)


def test_nothing_is_seen_after_closing() -> None:
    seen: list[Pause] = []
    before = list(gc.callbacks)
    observer = GarbageObserver(lambda *pause: seen.append(pause))
    observer.close()
    observer.close()
    seen.clear()
    gc.collect()
    assert seen == [] and gc.callbacks == before


def test_one_that_begins_inside_a_collection_ignores_its_end() -> None:
    seen: list[Pause] = []
    observer = GarbageObserver(lambda *pause: seen.append(pause))
    observer._callback("stop", {"generation": 2})
    observer.close()
    assert seen == []
