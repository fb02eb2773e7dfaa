"""The text of an injection: what it says, when it acts on whom, and what is wrong with it."""

from typing import Any

import pytest

from bireme.errors import UserError
from bireme.inject import Injection, parse
from bireme.inject.grammar import KINDS


def one(written: str, **resolved: Any) -> Injection:
    """An injection; `resolved`: what holding it against a run would have filled in."""
    (injection,) = parse([written])
    return Injection(
        **{name: getattr(injection, name) for name in injection.__slots__ if name not in resolved}, **resolved
    )


def acting(injection: Injection, last: int = 40, rank: int | None = None) -> list[int]:
    return [step for step in range(1, last + 1) if injection.active(step, rank)]


# --- what it says ------------------------------------------------------------------------------------------------


def test_everything_that_may_be_said() -> None:
    text = "kind=sleep, rank=3, phase=backward, ms=1.5e2, steps=10:40, every=4, prob=0.1, seed=7"
    injection = one(text)
    assert (injection.kind, injection.ranks, injection.phase, injection.ms) == ("sleep", (3,), "backward", 150.0)
    assert (injection.first, injection.last, injection.every) == (10, 40, 4)
    assert (injection.prob, injection.seed) == (0.1, 7)


def test_the_order_does_not_matter() -> None:
    assert one("ms=5,rank=1,kind=sleep", text="") == one("kind=sleep,rank=1,ms=5", text="")


@pytest.mark.parametrize("kind", KINDS)
def test_the_example_of_every_kind_parses_and_has_a_truth(kind: str) -> None:
    example = KINDS[kind].example
    injection = one(example)
    assert injection.kind == kind
    truth = injection.truth()
    assert truth["kind"] == kind and truth["text"] == example
    assert {"phase", "ranks", "nodes", "first_step", "last_step"} <= truth.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_of_every_kind_is_read(kind: str) -> None:
    """A key that is allowed and then ignored would plant something else than what was asked for."""
    values = {"rank": "0", "node": "1", "phase": KINDS[kind].phases[-1] if KINDS[kind].phases else "", "steps": "7:9"}
    values |= {"every": "3", "prob": "0.5", "seed": "5", "ms": "11", "factor": "2", "stage": "1", "processes": "2"}
    values |= {"period_ms": "222", "objects": "123", "rate": "10mbit", "delay": "3ms", "over": "17", "code": "9"}
    expected = {"steps": ("first", 7), "rank": ("ranks", (0,)), "node": ("node", "1"), "rate": ("rate", "10mbit")}
    expected |= {"delay": ("delay", "3ms"), "phase": ("phase", values["phase"])}
    for key in KINDS[kind].keys:
        if key == "kind":
            continue
        needed = {group[0] for group in KINDS[kind].needs} - ({"ms"} if key == "factor" else set())
        said = {"kind": kind, **{each: values[each] for each in {*needed, key}}}
        injection = one(",".join(f"{name}={value}" for name, value in said.items()))
        name, value = expected.get(key, (key, float(values[key]) if values[key].replace(".", "").isdigit() else None))
        assert getattr(injection, name) == value


@pytest.mark.parametrize(
    ("text", "expected"),
    [("7", (7, 7)), ("10:40", (10, 40)), ("10:", (10, None)), (":40", (1, 40)), ("5:5", (5, 5))],
)
def test_steps(text: str, expected: tuple[int, int | None]) -> None:
    injection = one(f"kind=sleep,ms=1,steps={text}")
    assert (injection.first, injection.last) == expected


def test_ranks() -> None:
    assert one("kind=sleep,ms=1").ranks == ()
    assert one("kind=sleep,ms=1,rank=2+0").ranks == (0, 2)
    assert one("kind=sleep,ms=1,rank=all").all_ranks


def test_what_is_not_said_has_a_value() -> None:
    assert one("kind=sleep,ms=1").phase == "forward"
    assert one("kind=contention").processes == 1 and one("kind=contention").phase is None
    assert one("kind=gc").objects == 1_000_000
    assert one("kind=exit,steps=3").code == 3
    assert one("kind=pause,ms=99").period_ms == 100
    assert one("kind=input,ms=1").phase == "input" and one("kind=checkpoint,ms=1").phase == "checkpoint"
    assert one("kind=leave,steps=3").phase is None
    assert one("kind=stage,stage=1,ms=3").phases == ("forward", "backward")


# --- when it acts ------------------------------------------------------------------------------------------------


def test_without_steps_it_always_acts() -> None:
    assert acting(one("kind=sleep,ms=1")) == list(range(1, 41))


def test_both_ends_of_a_window_count() -> None:
    assert acting(one("kind=sleep,ms=1,steps=10:12")) == [10, 11, 12]
    assert acting(one("kind=sleep,ms=1,steps=7")) == [7]
    assert acting(one("kind=sleep,ms=1,steps=39:")) == [39, 40]


def test_every_counts_from_the_first_step_of_the_window() -> None:
    assert acting(one("kind=sleep,ms=1,steps=10:20,every=4")) == [10, 14, 18]


def test_prob_is_a_draw_that_every_rank_makes_alike() -> None:
    texts = [f"kind=sleep,ms=1,prob=0.3,seed={seed}" for seed in (1, 1, 2)]
    first, again, other = (acting(one(text), 1000) for text in texts)
    assert first == again != other
    assert 240 < len(first) < 360
    assert first == acting(one(texts[0], ranks=(0, 1)), 1000, rank=1)


def test_it_acts_on_its_ranks_only() -> None:
    injection = one("kind=sleep,ms=5,rank=1+2")
    assert injection.active(1, 1) and injection.active(1, 2) and not injection.active(1, 0)
    assert [injection.planted_ms(1, rank) for rank in range(4)] == [0, 5, 5, 0]


def test_collections_come_at_other_steps_on_every_rank() -> None:
    """B54."""
    injection = one("kind=gc,rank=all,every=5", ranks=(0, 1, 2))
    assert acting(injection, 12, rank=0) == [5, 10]
    assert acting(injection, 12, rank=1) == [4, 9]
    assert acting(injection, 12, rank=2) == [3, 8]
    assert acting(injection, 12) == [3, 4, 5, 8, 9, 10]
    assert acting(one("kind=gc,rank=1,steps=2:,every=5"), 12, rank=1) == [2, 7, 12]


def test_a_failure_happens_once() -> None:
    injection = one("kind=kill,rank=1,steps=5:10")
    assert acting(injection, rank=1) == [5] and acting(injection, rank=0) == []
    assert injection.truth()["last_step"] == 5
    assert injection.ends_before(6) and not injection.ends_before(5)


def test_an_imbalance_gives_every_rank_its_turn() -> None:
    injection = one("kind=imbalance,ms=60,steps=3:,seed=4", ranks=(0, 1, 2, 3))
    turns = []
    for step in range(3, 43):
        (turn,) = [rank for rank in range(4) if injection.planted_ms(step, rank) == 60]
        turns.append(turn)
    assert all(set(turns[start : start + 4]) == {0, 1, 2, 3} for start in range(0, 40, 4))
    assert len({tuple(turns[start : start + 4]) for start in range(0, 40, 4)}) > 3, "not always in the same order"
    assert [injection.planted_ms(2, rank) for rank in range(4)] == [0] * 4


def test_an_imbalance_that_comes_rarely_gives_turns_too() -> None:
    injection = one("kind=imbalance,ms=60,every=2", ranks=(0, 1))
    turns = [injection.turn(step) for step in (1, 3, 5, 7)]
    assert set(turns[:2]) == set(turns[2:]) == {0, 1}


def test_jitter_is_another_on_every_rank_and_step_and_repeats() -> None:
    injection = one("kind=jitter,ms=3", ranks=(0, 1))
    amounts = [[injection.planted_ms(step, rank) for step in range(1, 501)] for rank in (0, 1)]
    again = one("kind=jitter,ms=3", ranks=(0, 1))
    assert amounts == [[again.planted_ms(step, rank) for step in range(1, 501)] for rank in (0, 1)]
    assert amounts[0] != amounts[1] and len(set(amounts[0])) == 500
    assert all(0 <= each < 20 for each in amounts[0])
    assert 2.0 < sum(amounts[0]) / 500 < 2.8, "the mean of |normal(0, 3)| is 2.39"


def test_a_drift_grows_and_stays() -> None:
    drift = one("kind=drift,ms=100,steps=10:,over=50", ranks=(0,))
    assert [drift.planted_ms(step, 0) for step in (9, 10, 35, 60, 500)] == [0, 0, 50, 100, 100]
    assert one("kind=drift,ms=100,steps=10:30").over_steps == 20
    assert one("kind=drift,ms=100,steps=10:").over_steps == 200
    assert one("kind=drift,ms=100,steps=10").over_steps == 1
    assert drift.truth()["over"] == 50


def test_the_truth() -> None:
    text = "kind=contention,node=1,processes=2,steps=5:"
    injection = one(text, ranks=(2, 3), nodes=("b",), cores=(0, 1))
    assert injection.truth() == {
        "kind": "contention",
        "phase": None,
        "ranks": [2, 3],
        "nodes": ["b"],
        "processes": 2,
        "cores": {"2": 0, "3": 1},
        "first_step": 5,
        "last_step": None,
        "every": 1,
        "prob": 1.0,
        "seed": 0,
        "text": text,
    }


# --- what is wrong -----------------------------------------------------------------------------------------------

GRAMMAR = "write it as in kind="


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ["'' is not key=value"]),
        ("sleep", ["'sleep' is not key=value"]),
        ("kind=", ["'kind=' is not key=value"]),
        ("=sleep", ["'=sleep' is not key=value"]),
        ("kind=sleep,,ms=1", ["'' is not key=value"]),
        ("kind=sleep;ms=1", ["kind 'sleep;ms=1' is none of sleep, compute"]),
        ("rank=1,ms=5", ["it has no kind", "sleep, compute, contention", "leave"]),
        ("kind=slep,ms=5", ["kind 'slep' is none of", "did you mean 'sleep'?"]),
        ("kind=sleep,ms=5,ms=6", ["'ms' is there twice"]),
        ("kind=sleep,mss=5", ["sleep has no 'mss'", "did you mean 'ms'?", "kind, rank, node, steps"]),
        ("kind=gc,ms=5", ["gc has no 'ms'", "objects"]),
        ("kind=sleep", ["sleep needs ms="]),
        ("kind=compute", ["compute needs ms= or factor="]),
        ("kind=compute,ms=1,factor=2", ["ms and factor exclude each other"]),
        ("kind=stage,ms=1", ["stage needs stage="]),
        ("kind=stage,stage=1", ["stage needs ms= or factor="]),
        ("kind=stage,stage=1,rank=0,ms=1", ["stage has no 'rank'"]),
        ("kind=link,rate=1mbit", ["link needs node="]),
        ("kind=link,node=1", ["link needs rate= or delay="]),
        ("kind=link,rank=1,rate=1mbit", ["link has no 'rank'"]),
        ("kind=kill,rank=1", ["kill needs steps=", "kind=kill,rank=1,steps=20"]),
        ("kind=kill,steps=3,every=2", ["kill has no 'every'"]),
        ("kind=leave,steps=3,phase=forward", ["leave has no 'phase'"]),
        ("kind=sleep,ms=1,rank=0,node=a", ["rank and node exclude each other"]),
        (
            "kind=sleep,ms=1,phase=forwrd",
            ["sleep knows no phase 'forwrd'", "did you mean 'forward'?", "input, forward"],
        ),
        ("kind=compute,ms=1,phase=checkpoint", ["compute knows no phase 'checkpoint'", "input, forward, backward"]),
        ("kind=sleep,ms=-1", ["ms='-1' is not a number above 0 and up to 3600000"]),
        ("kind=sleep,ms=0", ["ms='0' is not a number above 0"]),
        ("kind=sleep,ms=nan", ["ms='nan' is not a number"]),
        ("kind=sleep,ms=inf", ["ms='inf' is not a number"]),
        ("kind=sleep,ms=150ms", ["ms='150ms' is not a number"]),
        ("kind=sleep,ms=1_0", ["ms='1_0' is not a number"]),
        ("kind=sleep,ms=1e99", ["ms='1e99' is not a number above 0 and up to"]),
        ("kind=sleep,ms=٣", ["is not a number"]),
        ("kind=compute,factor=1", ["factor='1' is not a number above 1 and up to 100"]),
        ("kind=pause,ms=100", ["ms must be below period_ms, which is 100"]),
        ("kind=pause,ms=20,period_ms=20", ["ms must be below period_ms, which is 20"]),
        ("kind=sleep,ms=1,rank=-1", ["rank='-1' is not a whole number from 0"]),
        ("kind=sleep,ms=1,rank=one", ["rank='one' is not a whole number"]),
        ("kind=sleep,ms=1,rank=1+", ["rank='' is not a whole number"]),
        ("kind=sleep,ms=1,rank=1+1", ["rank '1+1' names a rank twice"]),
        ("kind=sleep,ms=1,steps=0", ["steps='0' is not a whole number from 1"]),
        ("kind=sleep,ms=1,steps=a", ["steps 'a' is not understood: 7, 10:40"]),
        ("kind=sleep,ms=1,steps=1:2:3", ["steps '1:2:3' is not understood"]),
        ("kind=sleep,ms=1,steps=:", ["steps ':' says no step"]),
        ("kind=sleep,ms=1,steps=9:5", ["steps '9:5' ends before it begins"]),
        ("kind=sleep,ms=1,steps=99999999999", ["is not a whole number from 1 to 2147483647"]),
        ("kind=sleep,ms=1,every=0", ["every='0' is not a whole number from 1"]),
        ("kind=sleep,ms=1,prob=0", ["prob='0' is not a number above 0 and up to 1"]),
        ("kind=sleep,ms=1,prob=1.5", ["prob='1.5' is not a number above 0 and up to 1"]),
        ("kind=gc,objects=0", ["objects='0' is not a whole number from 1"]),
        ("kind=contention,processes=1000", ["processes='1000' is not a whole number from 1 to 64"]),
        ("kind=exit,steps=3,code=256", ["code='256' is not a whole number from 0 to 255"]),
        ("kind=sleep,ms=1,node=\x1b[2J", ["node has unprintable characters", "\\x1b"]),
        ("kind=" + "x" * 10_000, ["..."]),
    ],
)
def test_what_is_wrong_is_one_line_with_the_grammar(text: str, said: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        parse(["kind=sleep,ms=1", text])
    line = str(caught.value)
    for part in said:
        assert part in line
    assert GRAMMAR in line and "docs/injection.md" in line
    assert line.isprintable() and len(line) < 500
