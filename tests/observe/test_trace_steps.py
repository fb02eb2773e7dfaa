import pytest

from bireme.errors import UserError
from bireme.observe.trace_steps import check_amount, parse_steps, stretches


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("", []),
        ("7", [7]),
        ("20:22", [20, 21, 22]),
        ("5,20:22", [5, 20, 21, 22]),
        (" 21 , 20:22,20 ", [20, 21, 22]),
    ],
)
def test_what_is_chosen(text: str, steps: list[int]) -> None:
    assert parse_steps(text) == steps


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("soon", "'soon' is not understood: 20, 20:22 (both ends count) or 5,20:22"),
        ("5,", "'' is not understood"),
        ("20:", "'20:' is not understood"),
        ("-3", "'-3' is not understood"),
        ("0:4", "'0:4': the first step is 1"),
        ("22:20", "'22:20' ends before it begins"),
        ("1:999999999", "chooses 999999999 steps"),
        ("9" * 5000, "is not understood"),
    ],
)
def test_what_is_no_choice_is_said_in_one_line(text: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        parse_steps(text)
    assert said in str(error.value) and str(error.value).startswith("--trace-steps")
    assert "\n" not in str(error.value) and len(str(error.value)) < 200


def test_a_choice_that_is_too_large_is_refused_with_an_estimate() -> None:
    """Field report B61: no trace of gigabytes that no viewer opens."""
    check_amount(list(range(20, 84)), 8)
    with pytest.raises(UserError, match=r"65 steps of 8 ranks, an estimated 4.16 MB: choose at most 64 steps"):
        check_amount(list(range(65)), 8)
    with pytest.raises(UserError, match=r"20 steps of 1024 ranks, an estimated 164 MB: choose at most 7 steps"):
        check_amount(list(range(20)), 1024)
    check_amount([7], 100_000)  # one step can always be asked for: each rank's share of the room is its limit


def test_stretches() -> None:
    assert stretches([]) == []
    assert stretches([5, 20, 21, 22]) == [(5, 5), (20, 22)]
