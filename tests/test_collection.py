"""Collections at the same step on every rank: when they come, what they look at, and what is as before afterwards."""

import gc
import logging
from collections.abc import Iterator

import pytest

from bireme import collection
from bireme.collection import SameStepCollection, resident_bytes


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    assert gc.isenabled() and gc.get_freeze_count() == 0


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done, in order; nothing takes any time."""
    done: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda: done.append("collect"))
    monkeypatch.setattr(gc, "freeze", lambda: done.append("freeze"))
    return done


def test_it_freezes_after_the_warm_up_and_collects_every_so_many_steps(collected: list[str]) -> None:
    when: dict[int, list[str]] = {}
    with SameStepCollection(every=10, freeze_after=3) as same_step:
        assert not gc.isenabled()
        for step in range(1, 41):
            same_step.after(step)
            if collected:
                when[step] = list(collected)
                collected.clear()
    assert when == {3: ["collect", "freeze"], 10: ["collect"], 20: ["collect"], 30: ["collect"], 40: ["collect"]}


def test_a_run_that_goes_on_collects_at_the_same_steps(collected: list[str]) -> None:
    with SameStepCollection(every=10, freeze_after=27) as same_step:
        for step in range(25, 31):
            same_step.after(step)
    assert collected == ["collect", "freeze", "collect"]


def test_with_0_nothing_is_changed(collected: list[str]) -> None:
    with SameStepCollection(every=0, freeze_after=1) as same_step:
        assert gc.isenabled()
        for step in range(1, 20):
            same_step.after(step)
    assert collected == []


def test_what_was_there_is_not_looked_at_again_until_the_end() -> None:
    with SameStepCollection(every=2, freeze_after=1) as same_step:
        same_step.after(1)
        assert gc.get_freeze_count() > 1000


def test_who_had_turned_collection_off_finds_it_off() -> None:
    gc.disable()
    try:
        with SameStepCollection(every=2, freeze_after=1):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_also_a_loop_that_fails_leaves_everything_as_before() -> None:
    with pytest.raises(RuntimeError, match="failed"), SameStepCollection(every=2, freeze_after=1) as same_step:
        same_step.after(1)
        raise RuntimeError("failed")


def test_memory_that_grows_is_said_once(
    collected: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    resident = iter([1e9, 1.4e9, 1.6e9, 1.9e9])
    monkeypatch.setattr(collection, "resident_bytes", lambda: next(resident))
    with caplog.at_level(logging.WARNING), SameStepCollection(every=5, freeze_after=1) as same_step:
        for step in range(1, 10):
            same_step.after(step)
        assert not caplog.messages, "less than half as much again"
        for step in range(10, 16):
            same_step.after(step)
    (said,) = caplog.messages
    assert "resident memory grew from 1.00 to 1.60 GB" in said and "every 5 steps" in said
    assert "smaller --gc-every" in said


def test_resident_memory_is_known_here() -> None:
    assert resident_bytes() > 1e7
