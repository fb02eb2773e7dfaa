"""STRAGGLER_MS and its companions: the delays, the rank, the phase, and what is wrong with them."""

import pytest

from bireme.errors import UserError
from bireme.inject import Straggler


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
    assert truth == {"kind": "sleep", "phase": "input", "rank": 1, "ranks": [1], "delays_ms": [0.0, 50.0]}
