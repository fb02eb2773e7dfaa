from typing import Any

import pytest
import torch

from bireme import inject
from bireme.errors import UserError
from bireme.inject import Injector, Straggler


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The sleeps so far, in seconds; none takes any time."""
    sleeps: list[float] = []
    monkeypatch.setattr(inject.time, "sleep", sleeps.append)
    return sleeps


# --- the environment ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("environ", [{}, {"STRAGGLER_MS": ""}, {"STRAGGLER_MS": "  "}, {"STRAGGLER_RANK": "99"}])
def test_no_delay_no_straggler(environ: dict[str, str]) -> None:
    assert Straggler.from_environment(environ, 4) is None


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"STRAGGLER_MS": "150"}, Straggler((150.0,), 3, "forward")),
        ({"STRAGGLER_MS": " 2.5 "}, Straggler((2.5,), 3, "forward")),
        ({"STRAGGLER_MS": "0"}, Straggler((0.0,), 3, "forward")),
        ({"STRAGGLER_MS": "0,50, 100"}, Straggler((0.0, 50.0, 100.0), 3, "forward")),
        ({"STRAGGLER_MS": "1", "STRAGGLER_RANK": "0"}, Straggler((1.0,), 0, "forward")),
        ({"STRAGGLER_MS": "1", "STRAGGLER_RANK": "3"}, Straggler((1.0,), 3, "forward")),
        ({"STRAGGLER_MS": "1", "STRAGGLER_RANK": " "}, Straggler((1.0,), 3, "forward")),
        ({"STRAGGLER_MS": "1", "STRAGGLER_PHASE": "backward"}, Straggler((1.0,), 3, "backward")),
        ({"STRAGGLER_MS": "1", "STRAGGLER_PHASE": ""}, Straggler((1.0,), 3, "forward")),
    ],
)
def test_a_straggler_from_the_environment(environ: dict[str, str], expected: Straggler) -> None:
    assert Straggler.from_environment(environ, 4) == expected


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"STRAGGLER_MS": "abc"}, ["STRAGGLER_MS='abc'", "'abc' is not a number", "150"]),
        ({"STRAGGLER_MS": "0,abc,5"}, ["STRAGGLER_MS='0,abc,5'", "'abc' is not a number"]),
        ({"STRAGGLER_MS": "0,,5"}, ["STRAGGLER_MS='0,,5'", "'' is not a number"]),
        ({"STRAGGLER_MS": "150ms"}, ["'150ms' is not a number of milliseconds"]),
        ({"STRAGGLER_MS": "-1"}, ["STRAGGLER_MS='-1'", "from 0 to", "not -1"]),
        ({"STRAGGLER_MS": "5,-3"}, ["STRAGGLER_MS='5,-3'", "not -3"]),
        ({"STRAGGLER_MS": "nan"}, ["STRAGGLER_MS='nan'", "not nan"]),
        ({"STRAGGLER_MS": "inf"}, ["STRAGGLER_MS='inf'", "not inf"]),
        ({"STRAGGLER_MS": "1e9"}, ["STRAGGLER_MS='1e9'", "3600000"]),
        ({"STRAGGLER_MS": "1", "STRAGGLER_RANK": "4"}, ["STRAGGLER_RANK=4", "outside the world", "0 to 3"]),
        ({"STRAGGLER_MS": "1", "STRAGGLER_RANK": "-1"}, ["STRAGGLER_RANK=-1", "outside the world"]),
        ({"STRAGGLER_MS": "1", "STRAGGLER_RANK": "one"}, ["STRAGGLER_RANK='one'", "not a whole number"]),
        ({"STRAGGLER_MS": "1", "STRAGGLER_RANK": "1.5"}, ["STRAGGLER_RANK='1.5'", "not a whole number"]),
        ({"STRAGGLER_MS": "1", "STRAGGLER_PHASE": "forwrd"}, ["STRAGGLER_PHASE='forwrd'", "did you mean 'forward'?"]),
        ({"STRAGGLER_MS": "1", "STRAGGLER_PHASE": "other"}, ["STRAGGLER_PHASE='other'", "input, forward, backward"]),
    ],
)
def test_what_is_wrong_is_said_with_the_variable(environ: dict[str, str], said: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        Straggler.from_environment(environ, 4)
    for part in said:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_delays_take_turns_from_the_first_step() -> None:
    straggler = Straggler((0.0, 50.0, 100.0), rank=1)
    assert [straggler.delay_ms(step) for step in range(1, 8)] == [0, 50, 100, 0, 50, 100, 0]


def test_the_truth_says_what_was_planted() -> None:
    truth = Straggler((0.0, 50.0), 1, "input").truth()
    assert truth == {"kind": "sleep", "phase": "input", "rank": 1, "delays_ms": [0.0, 50.0]}


# --- the injector ------------------------------------------------------------------------------------------------


def a_step(injector: Injector, number: int, micro_batches: int = 1) -> None:
    """The trainer's calls."""
    injector.begin(number)
    injector.sleep("input")
    for _ in range(micro_batches):
        injector.sleep("forward")
        injector.sleep("backward")
    injector.sleep("optimizer")


def test_it_sleeps_once_in_each_step_also_with_several_micro_batches(slept: list[float]) -> None:
    injector = Injector(Straggler((150.0,), rank=2), rank=2)
    a_step(injector, 1, micro_batches=4)
    assert slept == [0.15]
    a_step(injector, 2, micro_batches=4)
    assert slept == [0.15, 0.15]


def test_it_sleeps_on_its_rank_only(slept: list[float]) -> None:
    for rank in (0, 1, 3):
        a_step(Injector(Straggler((150.0,), rank=2), rank), 1)
    a_step(Injector(None, 2), 1)
    assert slept == []


@pytest.mark.parametrize("phase", ["input", "forward", "backward", "optimizer"])
def test_it_sleeps_in_its_phase_only(phase: str, slept: list[float]) -> None:
    injector = Injector(Straggler((10.0,), 0, phase), 0)
    injector.begin(1)
    for other in {"input", "forward", "backward", "optimizer", "other"} - {phase}:
        injector.sleep(other)
    assert slept == []
    injector.sleep(phase)
    assert slept == [0.01]


def test_delays_take_turns_and_a_delay_of_zero_does_not_sleep(slept: list[float]) -> None:
    injector = Injector(Straggler((0.0, 50.0, 100.0), 0), 0)
    for step in range(1, 7):
        a_step(injector, step)
    assert slept == [0.05, 0.1, 0.05, 0.1]


def test_a_delay_that_was_not_slept_is_not_kept_for_the_next_step(slept: list[float]) -> None:
    injector = Injector(Straggler((40.0, 0.0), 0), 0)
    injector.begin(1)
    injector.begin(2)
    injector.sleep("forward")
    assert slept == []


def test_before_the_first_step_it_does_not_sleep(slept: list[float]) -> None:
    """The forward passes of a rehearsal, say."""
    Injector(Straggler((40.0,), 0), 0).sleep("forward")
    assert slept == []


def events_of_a_pass(injector: Injector, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The order in which the passes and the sleep happen in a model of two layers, planted in the first."""
    events: list[str] = []
    monkeypatch.setattr(inject.time, "sleep", lambda seconds: events.append(f"sleep {seconds}"))
    first, last = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    layers = torch.nn.Sequential(first, last)
    injector.plant_in_backward(first)
    injector.begin(1)

    def arrived(name: str) -> Any:
        return lambda gradient: events.append(name)

    first.weight.register_hook(arrived("first layer's gradient"))
    last.weight.register_hook(arrived("last layer's gradient"))
    loss = layers(torch.ones(1, 2)).sum()
    events.append("loss")
    loss.backward()
    with torch.no_grad():
        layers(torch.ones(1, 2))  # an evaluation: nothing requires a gradient
    return events


def test_a_sleep_in_backward_happens_where_the_layers_gradient_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    events = events_of_a_pass(Injector(Straggler((20.0,), 0, "backward"), 0), monkeypatch)
    assert events[0] == "loss"
    assert events.count("sleep 0.02") == 1
    assert events.index("sleep 0.02") < events.index("first layer's gradient")


@pytest.mark.parametrize(
    ("straggler", "rank"),
    [(None, 0), (Straggler((20.0,), 1, "backward"), 0), (Straggler((20.0,), 0, "forward"), 0)],
)
def test_nothing_is_planted_in_backward_where_no_straggler_sleeps_there(
    straggler: Straggler | None, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = torch.nn.Linear(1, 1)
    Injector(straggler, rank).plant_in_backward(layer)
    assert not layer._forward_hooks
    events = events_of_a_pass(Injector(straggler, rank), monkeypatch)
    assert not [each for each in events if each.startswith("sleep")]
