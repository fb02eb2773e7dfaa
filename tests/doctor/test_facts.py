import copy
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from bireme.doctor.cluster import Cluster
from bireme.doctor.facts import facts_from_json, seen_from_json
from bireme.errors import UserError

Make = Callable[..., Cluster]


def test_facts_survive_the_way(make_cluster: Make) -> None:
    for facts in make_cluster(3).facts.values():
        assert facts_from_json(orjson.loads(orjson.dumps(facts.to_json()))) == facts


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((), []),
        ((), "facts"),
        (("name",), 7),
        (("name",), None),
        (("cores",), "2"),
        (("cores",), True),
        (("ranks",), 1.5),
        (("ranks",), 0),
        (("threads",), -1),
        (("cores",), 0.0),
        (("shm_bytes",), -1),
        (("schedstat",), 1),
        (("cards",), {}),
        (("cards", 0), "eth0"),
        (("cards", 0, "mtu_bytes"), None),
        (("cards", 0, "extra"), 1),
        (("clock",), {"offset_s": "soon", "bound_s": 0.0}),
        (("versions", "torch"), 2),
        (("more",), 1),
        (("reaches",), [{"to": 0}]),
        (("interface_warnings",), ["x"] * 5000),
    ],
)
def test_what_is_no_facts_is_refused(path: tuple[Any, ...], value: Any, make_cluster: Make) -> None:
    sent = copy.deepcopy(make_cluster(2).facts[1].to_json())
    if not path:
        sent = value
    else:
        place: Any = sent
        for part in path[:-1]:
            place = place[part]
        place[path[-1]] = value
    with pytest.raises(UserError, match="a peer's"):
        facts_from_json(sent)


def test_a_missing_field_is_named(make_cluster: Make) -> None:
    sent = make_cluster(2).facts[1].to_json()
    del sent["threads"]
    with pytest.raises(UserError, match=r"other fields than ours \(threads\)"):
        facts_from_json(sent)


def test_text_cannot_drive_a_terminal(make_cluster: Make) -> None:
    sent = make_cluster(2).facts[1].to_json()
    sent["name"] = "evil\x1b]0;owned\x07" + "x" * 10_000
    sent["versions"]["torch"] = "2\n\x1b[2J"
    facts = facts_from_json(sent)
    assert facts.name.startswith(r"evil\x1b]0;owned\x07") and len(facts.name) < 500
    assert facts.versions["torch"].isprintable()


def test_what_was_seen() -> None:
    seen = {"reaches": [{"to": 1, "address": "::1", "local_address": None, "error": "no answer"}], "peer_names": []}
    assert seen_from_json(seen).reaches[0].error == "no answer"
    with pytest.raises(UserError):
        seen_from_json({"reaches": []})
