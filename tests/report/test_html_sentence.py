"""Why is it this fast, and not faster?"""

import re
from typing import Any

import pytest

from bireme.ledger import PHASES, STATES
from bireme.report.html.losses import LOSSES, PARTS, mean_cells, split, total_ms
from bireme.report.html.sentence import as_text, sentence


def cells(**ms: float) -> list[float | None]:
    """cells(forward_running=80): 30 cells in the order of the record."""
    return [ms.get(f"{phase}_{state}", 0.0) for phase in PHASES for state in STATES]


FAST = cells(forward_running=60, backward_running=80, backward_transfer=98, backward_wait=150, input_runnable=24)
SLOW = cells(
    forward_running=60, backward_running=80, backward_transfer=98, backward_blocked=150, input_runnable=24
)  # fmt: skip
FACTS: dict[str, Any] = {
    "ranks": 4, "mean_ms": 412.0, "median_ms": 412.0, "measured": 100, "verdicts_reason": None, "unknown": [],
}  # fmt: skip


def verdict(**more: Any) -> dict[str, Any]:
    return {
        "kind": "rank",
        "ranks": [3],
        "node": "node1",
        "phase": "backward",
        "state": "blocked",
        "share": 0.36,
        "cause": "stands still",
        "sentence": "rank 3 on node1 takes 150 ms more of its own than its peers",
        "evidence": {"others_wait_ms": 150.0, "steps": 100},
        "what_if": {"step_ms": 262.0, "tokens_per_s_global": None},
        **more,
    }


HEALTHY = verdict(kind="healthy", ranks=[], node=None, share=0.0, what_if=None, evidence={}, cause=None)


def said(typical: dict[int, list[float | None]], verdicts: list[dict[str, Any]] | None, **facts: Any) -> str:
    return as_text(sentence(typical, verdicts, {**FACTS, **facts}))


def test_the_largest_loss_comes_first_and_names_the_culprit() -> None:
    text = said({0: FAST, 1: FAST, 2: FAST, 3: SLOW}, [verdict()])
    assert text == (
        "A step takes 412.0 ms: 150.0 ms of it the others wait for rank 3 on node1 (stands still in backward); "
        "98.0 ms exposed transfer; 24.0 ms contention for cores; the rest, 140.0 ms, is computing."
    )


@pytest.mark.parametrize(
    "typical", [{0: FAST, 1: SLOW}, {0: SLOW}, dict.fromkeys(range(64), FAST), {0: cells(forward_running=5)}]
)
@pytest.mark.parametrize("verdicts", [None, [HEALTHY], [verdict()], [verdict(ranks=[0])]])
def test_its_numbers_add_up_to_the_step(
    typical: dict[int, list[float | None]], verdicts: list[dict[str, Any]] | None
) -> None:
    pieces = sentence(typical, verdicts, {**FACTS, "ranks": len(typical), "verdicts_reason": "too few"})
    step, *parts = [float(piece["text"].removesuffix(" ms")) for piece in pieces if piece["number"]]
    if len(parts) > 1:  # a healthy one names only the largest
        assert sum(parts) == pytest.approx(step, abs=0.2)


def test_a_healthy_run_gets_an_honest_sentence() -> None:
    own = cells(forward_running=371, backward_transfer=31, backward_wait=10)
    text = said({0: own, 1: own}, [HEALTHY])
    assert text == (
        "A step takes 412.0 ms, and 371.0 ms of it (90 %) is computing; the largest losses are 31.0 ms exposed "
        "transfer, 10.0 ms waiting for other ranks. No rank, node or link stands out."
    )


def test_without_a_culprit_nobody_is_blamed() -> None:
    text = said({0: FAST, 1: FAST}, [HEALTHY])
    assert "150.0 ms waiting for other ranks" in text and "rank 3" not in text


def test_without_verdicts_it_says_why() -> None:
    text = said({0: FAST, 1: FAST}, None, verdicts_reason="5 complete measured steps are too few for a verdict")
    assert text.endswith(" Who is to blame is not known: 5 complete measured steps are too few for a verdict.")


def test_one_rank_has_nobody_to_wait_for() -> None:
    text = said({0: cells(forward_running=50, input_blocked=50)}, [HEALTHY], ranks=1, mean_ms=100.0)
    assert text == "A step takes 100.0 ms: 50.0 ms input; the rest, 50.0 ms, is computing."


def test_what_was_not_observed_is_said() -> None:
    unknown = [
        None if n % 5 in (2, 3) else value for n, value in enumerate(cells(forward_running=50, forward_blocked=50))
    ]
    text = said({0: unknown, 1: unknown}, [HEALTHY], unknown=["collectives could not be observed (no hooks)"])
    assert "50.0 ms blocked on something else" in text and "collectives could not be observed (no hooks)." in text
    assert "transfer" not in text.split(".")[0]


def test_of_two_equally_slow_ranks_both_are_named() -> None:
    alone_worth_nothing = {"step_ms": 412.0, "tokens_per_s_global": None}
    two = [verdict(ranks=[rank], what_if=alone_worth_nothing) for rank in (2, 3)]
    text = said({0: FAST, 1: FAST, 2: SLOW, 3: SLOW}, two)
    assert "150.0 ms of it the others wait for rank 2 on node1 (" in text and "rank 3 on node1 (" in text


def test_a_rank_that_was_slow_for_a_while_is_not_in_the_typical_step() -> None:
    brief = verdict(
        what_if={"step_ms": 412.0, "tokens_per_s_global": None}, evidence={"others_wait_ms": 150.0, "steps": 20}
    )
    text = said({0: FAST, 1: FAST, 2: FAST, 3: FAST}, [brief])
    assert "150.0 ms waiting for other ranks" in text
    assert text.endswith(" Rank 3 on node1 takes 150 ms more of its own than its peers.")


def test_slow_steps_that_the_typical_one_does_not_show() -> None:
    saves = verdict(
        kind="rank", ranks=[0, 1, 2, 3], phase="checkpoint", what_if={"step_ms": 411.0, "tokens_per_s_global": None},
        sentence="checkpoint holds up all ranks: 2000 ms in 10 of 100 steps", evidence={"slow_steps": 10},
    )  # fmt: skip
    text = said(dict.fromkeys(range(4), FAST), [saves], mean_ms=612.0)
    assert "Slower steps bring the mean to 612.0 ms. Checkpoint holds up all ranks: 2000 ms in 10 of 100 steps." in text


def test_the_parts_are_all_of_the_ledger() -> None:
    each = [float(2**n) for n in range(30)]
    parts = split(each)
    assert set(parts) == set(PARTS) == {"computing", *LOSSES}
    assert sum(value or 0.0 for value in parts.values()) == total_ms(each) == 2.0**30 - 1


def test_a_mean_leaves_out_what_is_not_known() -> None:
    assert mean_cells([[1.0, None, None], [3.0, 4.0, None]]) == [2.0, 4.0, None]


def test_a_name_is_only_text() -> None:
    hostile = "</script><img src=x onerror=alert(1)>"
    text = said({0: FAST, 1: FAST, 2: FAST, 3: SLOW}, [verdict(node=hostile)])
    assert re.search(re.escape(hostile), text)  # escaped where it is written, not here
