from collections.abc import Callable

import pytest

from bireme.doctor.cluster import Cluster
from bireme.doctor.pretend import Pretence
from bireme.errors import UserError


def test_what_is_pretended_is_said(make_cluster: Callable[..., Cluster]) -> None:
    facts = make_cluster(1).facts[0]
    pretence = Pretence.parse("clock=+3s, torch=2.13.0,python=3.12.1,bireme=9.9")
    assert pretence.clock_ns == 3_000_000_000
    pretence.apply(facts)
    assert facts.versions == {"python": "3.12.1", "torch": "2.13.0", "bireme": "9.9"}
    assert facts.pretended == ["clock=+3s", "torch=2.13.0", "python=3.12.1", "bireme=9.9"]


def test_one_node_alone_can_pretend() -> None:
    pretence = Pretence.parse("node=1,clock=+3s")
    assert pretence.on(1).clock_ns == 3_000_000_000 and pretence.on(1).words == ("clock=+3s",)
    assert pretence.on(0) == Pretence()
    assert Pretence.parse("clock=+3s").on(0).clock_ns == 3_000_000_000


@pytest.mark.parametrize(("text", "clock_ns"), [("", 0), ("clock=-0.5s", -500_000_000), ("clock=2s", 2_000_000_000)])
def test_clock(text: str, clock_ns: int) -> None:
    assert Pretence.parse(text).clock_ns == clock_ns


@pytest.mark.parametrize(
    "text",
    [
        "clock",
        "clock=3",
        "clock=+3m",
        "clock=1e9s",
        "cores=1",
        "torch=",
        "torch=2 13",
        "torch=2.13;clock=3s",
        "x",
        "node=-1",
        "node=one",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="BIREME_DOCTOR_PRETEND"):
        Pretence.parse(text)
