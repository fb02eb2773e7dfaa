"""Injections held against a run: whom they act on, and what the run does not have."""

from typing import Any

import pytest

from bireme.errors import UserError
from bireme.inject import Injection, Setting, Straggler, parse, resolve

TWO_NODES: dict[str, Any] = {
    "node_of": ["big", "big", "big", "small"],
    "steps": 40,
    "stage_of": [0, 0, 1, 1],
    "checkpoint_every": 10,
    "emulated": True,
    "cores_of": [[0, 1, 2]] * 3 + [[7]],
    "place_of": [0, 1, 2, 0],
}


def resolved(*texts: str, straggler: Straggler | None = None, **changed: Any) -> tuple[Injection, ...]:
    return resolve(parse(texts), Setting(**{**TWO_NODES, **changed}), straggler)


@pytest.mark.parametrize(
    ("text", "ranks", "nodes"),
    [
        ("kind=sleep,ms=1", (3,), ("small",)),
        ("kind=sleep,ms=1,rank=0", (0,), ("big",)),
        ("kind=sleep,ms=1,rank=1+3", (1, 3), ("big", "small")),
        ("kind=sleep,ms=1,rank=all", (0, 1, 2, 3), ("big", "small")),
        ("kind=sleep,ms=1,node=0", (0, 1, 2), ("big",)),
        ("kind=sleep,ms=1,node=small", (3,), ("small",)),
        ("kind=gc", (0, 1, 2, 3), ("big", "small")),
        ("kind=jitter,ms=1", (0, 1, 2, 3), ("big", "small")),
        ("kind=imbalance,ms=1", (0, 1, 2, 3), ("big", "small")),
        ("kind=stage,stage=1,ms=1", (2, 3), ("big", "small")),
        ("kind=link,node=small,rate=1mbit,delay=1ms", (3,), ("small",)),
        ("kind=kill,steps=40", (3,), ("small",)),
        ("kind=sleep,phase=checkpoint,ms=1,steps=25:30", (3,), ("small",)),
        ("kind=checkpoint,ms=1,steps=31:", (3,), ("small",)),
    ],
)
def test_whom_it_acts_on(text: str, ranks: tuple[int, ...], nodes: tuple[str, ...]) -> None:
    (injection,) = resolved(text)
    assert (injection.ranks, injection.nodes) == (ranks, nodes)


def test_a_nodes_name_goes_before_its_number() -> None:
    (injection,) = resolved("kind=sleep,ms=1,node=1", node_of=["1", "0"], cores_of=[], stage_of=[])
    assert injection.ranks == (0,)


def test_contention_is_on_a_core_of_each_ranks_own() -> None:
    (injection,) = resolved("kind=contention,rank=all")
    assert injection.cores == (0, 1, 2, 7)


@pytest.mark.parametrize(
    ("text", "changed", "said"),
    [
        ("kind=sleep,ms=1,rank=4", {}, ["rank 4 is not in this run: ranks are 0 to 3"]),
        ("kind=sleep,ms=1,rank=0+9", {}, ["rank 9 is not in this run"]),
        ("kind=sleep,ms=1,node=smal", {}, ["node 'smal'", "did you mean 'small'?", "nodes are big, small, or 0 to 1"]),
        ("kind=sleep,ms=1,node=2", {}, ["node '2' is not in this run", "0 to 1"]),
        ("kind=sleep,ms=1,steps=41", {}, ["step 41 never comes: the run has steps 1 to 40"]),
        ("kind=stage,stage=2,ms=1", {}, ["stage 2 does not exist: stages are 0 to 1"]),
        ("kind=stage,stage=1,ms=1", {"stage_of": [0] * 4}, ["no pipeline", "--layout pp"]),
        ("kind=checkpoint,ms=1", {"checkpoint_every": 0}, ["never enters the phase checkpoint", "--checkpoint-every"]),
        ("kind=sleep,phase=checkpoint,ms=1", {"checkpoint_every": 0}, ["never enters the phase checkpoint"]),
        ("kind=checkpoint,ms=1,steps=11:19", {}, ["it never acts: checkpoints are written every 10 steps"]),
        ("kind=checkpoint,ms=1,steps=1:39,every=11", {}, ["it never acts"]),
        ("kind=link,node=0,rate=1mbit", {"emulated": False}, ["emulated nodes only", "bireme nodes"]),
        ("kind=link,node=0,rate=1mb", {}, ["link rate '1mb' is not understood", "mbit"]),
        ("kind=link,node=0,delay=1", {}, ["delay '1' is not understood"]),
        ("kind=imbalance,ms=1,rank=1", {}, ["imbalance needs two ranks or more"]),
        ("kind=mismatch,steps=1", {"node_of": ["a"], "stage_of": [0]}, ["mismatch needs two ranks or more"]),
        ("kind=compute,factor=2", {"cuda": True}, ["factor is measured on a CPU: on a GPU say ms"]),
        ("kind=compute,factor=2,steps=1:3", {}, ["acts from step 4 on"]),
        ("kind=compute,factor=2,steps=13", {"first_step": 11}, ["acts from step 14 on"]),
        ("kind=mismatch,rank=all,steps=4", {}, ["all ranks would issue the same"]),
        ("kind=drift,ms=5,steps=10", {}, ["a drift grows from step to step"]),
    ],
)
def test_what_the_run_does_not_have_is_one_line(text: str, changed: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        resolved(text, **changed)
    for part in said:
        assert part in str(caught.value)
    assert f"--inject {text!r}: " in str(caught.value) and "write it as in kind=" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("kind=sleep,rank=1,ms=5", "kind=sleep,rank=1,ms=6"),
        ("kind=sleep,rank=1,ms=5,steps=1:10", "kind=sleep,node=0,ms=6,steps=10:"),
        ("kind=sleep,rank=all,ms=5", "kind=sleep,rank=2,ms=5,steps=3"),
        ("kind=contention,rank=1", "kind=contention,rank=1,processes=2"),
        ("kind=kill,rank=1,steps=5", "kind=hang,rank=1,steps=5"),
        ("kind=leave,rank=1,steps=5:9", "kind=hang,rank=1,steps=8"),
        ("kind=link,node=1,rate=1mbit", "kind=link,node=small,rate=2mbit"),
    ],
)
def test_two_that_contradict_each_other_are_refused(one: str, other: str) -> None:
    for texts in ((one, other), (other, one)):
        with pytest.raises(UserError) as caught:
            resolved(*texts)
        line = str(caught.value)
        assert one in line and other in line and "contradicts" in line and "different steps=" in line
        assert "\n" not in line


def test_a_pause_would_wake_a_rank_that_was_stopped() -> None:
    one, other = "kind=pause,rank=1,ms=10,steps=1:3", "kind=stop,rank=1,steps=20"
    for texts in ((one, other), (other, one)):
        with pytest.raises(UserError, match="a pause would let rank 1 go on"):
            resolved(*texts)
    assert len(resolved(one, "kind=stop,rank=0,steps=20")) == 2


def test_what_does_not_contradict_is_allowed() -> None:
    for texts in (
        ("kind=sleep,rank=1,ms=5,steps=1:10", "kind=sleep,rank=1,ms=5,steps=11:"),
        ("kind=sleep,rank=1,ms=5", "kind=sleep,rank=1,ms=5,phase=backward"),
        ("kind=sleep,rank=1,ms=5", "kind=sleep,rank=2,ms=5", "kind=compute,rank=1,ms=5", "kind=jitter,ms=1"),
        ("kind=kill,rank=1,steps=5", "kind=kill,rank=2,steps=5", "kind=sleep,rank=1,ms=9"),
        ("kind=link,node=0,rate=1mbit", "kind=link,node=1,rate=1mbit"),
        ("kind=link,node=0,rate=1mbit,steps=1:3", "kind=link,node=0,rate=2mbit,steps=4:"),
    ):
        assert len(resolved(*texts)) == len(texts)


def test_straggler_ms_and_a_sleep_in_the_same_place_contradict() -> None:
    straggler = Straggler((5.0,), 1, "forward")
    with pytest.raises(UserError, match="STRAGGLER_MS makes rank 1 sleep in forward as well"):
        resolved("kind=sleep,rank=all,ms=5", straggler=straggler)
    assert resolved("kind=sleep,rank=1,phase=backward,ms=5", "kind=sleep,rank=2,ms=5", straggler=straggler)
    assert resolved("kind=compute,rank=1,ms=5", straggler=straggler)
