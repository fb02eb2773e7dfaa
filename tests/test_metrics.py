"""The Prometheus endpoint, as a scraper sees it."""

import http.client
import math
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from bireme import metrics
from bireme.errors import UserError
from bireme.ledger import PHASES, STATES
from bireme.metric_families import MOST_RANKS
from bireme.metrics import MetricsServer
from bireme.report.csv_export import COLUMNS

HOSTILE = 'a"b\\c\n}{ x="1'

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def facts(size: int, **more: Any) -> dict[str, Any]:
    half = size // 2
    nodes = [{"name": "left", "ranks": list(range(half))}, {"name": "right", "ranks": list(range(half, size))}]
    return {
        "world_size": size,
        "nodes": [node for node in nodes if node["ranks"]],
        "groups": [{"name": "default_pg", "ranks": list(range(size))}],
        "missing": {},
        "model": {"preset": "toy", "flops_per_token": {"full": 1000, "causal": 900}},
        "peak": {"flops_per_s": 1e7},
        **more,
    }


def line(step: int, walls_ms: list[float | None], **more: Any) -> dict[str, Any]:
    """Each rank runs in forward for half of the step, and waits in backward for the rest."""

    def each(value: Any) -> list[Any]:
        return [None if wall is None else value for wall in walls_ms]

    walls_ns = [None if wall is None else round(wall * 1e6) for wall in walls_ms]
    cells: list[list[int] | None] = []
    for wall_ns in walls_ns:
        row = [0] * (len(PHASES) * len(STATES))
        if wall_ns is not None:
            row[5], row[13] = wall_ns // 2, wall_ns - wall_ns // 2
        cells.append(None if wall_ns is None else row)
    return {
        "step": step,
        "skipped": None,
        "loss": 2.5,
        "tokens": 100,
        "start_ns": each(1000),
        "end_ns": [None if wall_ns is None else 1000 + wall_ns for wall_ns in walls_ns],
        "cells_ns": cells,
        "hidden_ns": each(3_000_000),
        "hidden_transfer_ns": each(2_000_000),
        "clamped_ns": each(0),
        "unlocated_ns": each(0),
        "unmatched": each(1),
        "gc_ns": each(4_000_000),
        "overhead_ns": each([50_000, 150_000]),
        "collectives": each([[0, "all_reduce", 8, 4096, 20_000_000, 10_000_000]]),
        **more,
    }


def get(server: MetricsServer, path: str = "/metrics", **headers: str) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    body = response.read().decode()
    connection.close()
    return response.status, response.headers["Content-Type"], body


def scraped(server: MetricsServer) -> Samples:
    status, _, text = get(server)
    assert status == 200
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        assert family.name.startswith("bireme_") and family.documentation
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in samples, f"twice: {key}"
            samples[key] = sample.value
    return samples


def key(name: str, **labels: Any) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset((label, str(value)) for label, value in labels.items())


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[MetricsServer]]:
    """Servers put in here are closed."""
    monkeypatch.setattr(metrics, "_LOOK_EVERY_S", 0.02)
    servers: list[MetricsServer] = []
    yield servers
    for server in servers:
        server.close()


def serve(servers: list[MetricsServer], facts: dict[str, Any], run: str = "") -> MetricsServer:
    server = MetricsServer(0, facts, run=run)
    server.start()
    servers.append(server)
    return server


def test_a_scrape_gives_back_the_lines_that_were_fed(started: list[MetricsServer]) -> None:
    server = serve(started, facts(2, layout="ddp"), run="mine")
    assert key("bireme_step") not in scraped(server), "no step yet is not step 0"
    server.update([line(1, [9000, 9000], skipped="warm-up"), line(2, [100, 110])], [])
    server.update([line(3, [200, 210]), line(4, [400, 450])], [{"event": "evaluation", "loss": 3.0}])
    got = scraped(server)
    expected = {
        key("bireme_world_size"): 2,
        key("bireme_nodes"): 2,
        key("bireme_step"): 4,
        key("bireme_steps_total"): 4,
        key("bireme_skipped_steps_total", reason="warm-up"): 1,
        key("bireme_tokens_total"): 400,
        key("bireme_loss"): 2.5,
        key("bireme_evaluation_loss"): 3.0,
        key("bireme_tokens_per_second_global"): 200 / 0.66,
        key("bireme_mfu_ratio", convention="full"): 200 / 0.66 * 1000 / 1e7,
        key("bireme_mfu_ratio", convention="causal"): 200 / 0.66 * 900 / 1e7,
        key("bireme_peak_flops_per_second"): 1e7,
        key("bireme_step_duration_seconds_count"): 3,
        key("bireme_step_duration_seconds_sum"): 0.105 + 0.205 + 0.425,
        key("bireme_step_duration_seconds_bucket", le="0.1"): 0,
        key("bireme_step_duration_seconds_bucket", le="0.25"): 2,
        key("bireme_step_duration_seconds_bucket", le="+Inf"): 3,
        key("bireme_rank_step_seconds", rank=1, node="right"): 0.33,
        key("bireme_rank_self_time_seconds", rank=1, node="right"): 0.165,
        key("bireme_ledger_seconds_total", rank=0, node="left", phase="forward", state="running"): 4.85,
        key("bireme_ledger_seconds_total", rank=0, node="left", phase="backward", state="wait"): 4.85,
        key("bireme_ledger_seconds_total", rank=0, node="left", phase="input", state="blocked"): 0,
        key("bireme_gc_pause_seconds_total", rank=1, node="right"): 0.016,
        key("bireme_hidden_communication_seconds_total", rank=1, node="right"): 0.012,
        key("bireme_hidden_transfer_seconds_total", rank=1, node="right"): 0.008,
        key("bireme_unmatched_collectives_total", rank=1, node="right"): 4,
        key("bireme_overhead_seconds_total", rank=0, node="left", thread="training"): 0.0002,
        key("bireme_overhead_seconds_total", rank=0, node="left", thread="background"): 0.0006,
        key("bireme_events_total", event="evaluation"): 1,
    }
    use = {"rank": 0, "node": "left", "group": "default_pg", "operation": "all_reduce"}
    expected |= {
        key("bireme_collectives_total", **use): 32,
        key("bireme_collective_bytes_total", **use): 4 * 4096,
        key("bireme_collective_transfer_seconds_total", **use): 0.08,
        key("bireme_collective_wait_seconds_total", **use): 0.04,
    }
    assert {name: got.get(name) for name in expected} == pytest.approx(expected)
    ledger = [value for (name, _), value in got.items() if name == "bireme_ledger_seconds_total"]
    assert len(ledger) == 60 and sum(ledger) == pytest.approx(9.7 + 9.77)
    about = next(dict(labels) for name, labels in got if name == "bireme_run_info")
    assert (about["run"], about["layout"], about["model"], about["first_step"]) == ("mine", "ddp", "toy", "1")


def test_openmetrics_is_spoken_with_those_who_ask_for_it(started: list[MetricsServer]) -> None:
    server = serve(started, facts(1, nodes=[{"name": HOSTILE, "ranks": [0]}]))
    server.update([line(1, [100.0])])
    _, content_type, text = get(server, Accept="application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert {family.name for family in parse_openmetrics(text)} >= {"bireme_run", "bireme_steps", "bireme_mfu_ratio"}


def test_what_was_not_observed_or_is_not_known_has_no_series(started: list[MetricsServer]) -> None:
    unknown = {"collectives": "no hooks", "run_delay": "no schedstat"}
    server = serve(started, facts(2, missing=unknown, model=None, peak={"flops_per_s": None}))
    server.update([line(1, [100, None], tokens=0, loss=None), line(2, [None, 100], tokens=0, loss=None)])
    got = scraped(server)
    states = {dict(labels)["state"] for name, labels in got if name == "bireme_ledger_seconds_total"}
    assert states == {"running", "blocked"}
    names = {name for name, _ in got}
    unknown_names = {"bireme_tokens_per_second_global", "bireme_loss", "bireme_mfu_ratio", "bireme_collectives_total"}
    assert not unknown_names & names and "bireme_peak_flops_per_second" not in names
    assert got[key("bireme_rank_self_time_seconds", rank=0, node="left")] == pytest.approx(0.05)

    server.update([line(3, [100, 100], loss=None, loss_reason="nan")])
    assert math.isnan(scraped(server)[key("bireme_loss")])
    odd = serve(started, facts(2, peak="fast", model=["toy"]))
    odd.update([line(1, [100, 100])])
    assert not any(name == "bireme_mfu_ratio" for name, _ in scraped(odd))
    too_fast = serve(started, facts(2, peak={"flops_per_s": 1.0}))
    too_fast.update([line(1, [100, 100])])
    assert not any(name == "bireme_mfu_ratio" for name, _ in scraped(too_fast)), "above 1 is not believed"


def test_names_come_back_as_they_were(started: list[MetricsServer]) -> None:
    server = serve(
        started,
        facts(1, nodes=[{"name": HOSTILE, "ranks": [0]}], groups=[{"name": HOSTILE, "ranks": [0]}], layout=HOSTILE),
    )
    server.update([line(1, [100], skipped=HOSTILE), *(line(n, [100], skipped=f"reason {n}") for n in range(2, 99))])
    got = scraped(server)
    assert key("bireme_gc_pause_seconds_total", rank=0, node=HOSTILE) in got
    assert key("bireme_collectives_total", rank=0, node=HOSTILE, group=HOSTILE, operation="all_reduce") in got
    assert got[key("bireme_skipped_steps_total", reason=HOSTILE)] == 1
    reasons = [value for (name, _), value in got.items() if name == "bireme_skipped_steps_total"]
    assert len(reasons) <= 17 and sum(reasons) == 98


def test_groups_and_flops_may_become_known_later(started: list[MetricsServer]) -> None:
    server = serve(started, facts(1, model=None))
    use = [[1, "all_gather", 1, 2, 3, 4]]
    server.update([line(1, [100.0], collectives=[use])])
    assert not any(name == "bireme_mfu_ratio" for name, _ in scraped(server))
    groups = [{"name": "default_pg", "ranks": [0]}, {"name": "late", "ranks": [0]}]
    server.learned(groups=groups, model={"flops_per_token": {"full": 1000}})
    server.update([line(2, [100.0], collectives=[use])])
    got = scraped(server)
    assert got[key("bireme_mfu_ratio", convention="full")] == pytest.approx(0.1)
    assert key("bireme_collectives_total", rank=0, node="right", group="late", operation="all_gather") in got


def test_verdicts_stand_until_they_end(started: list[MetricsServer]) -> None:
    server = serve(started, facts(4))

    def verdict(change: str, kind: str, ranks: list[int], **more: Any) -> dict[str, Any]:
        fields = {"event": "verdict", "change": change, "kind": kind, "ranks": ranks, "node": None}
        return {**fields, "phase": "backward", "state": "blocked", **more}

    def active() -> list[tuple[str, str, str]]:
        labels = [dict(labels) for name, labels in scraped(server) if name == "bireme_verdict_active"]
        return sorted((each["kind"], each["ranks"], each["node"]) for each in labels)

    server.update(
        [], [verdict("started", "one_off", [0]), verdict("started", "rank", [2]), verdict("started", "link", [])]
    )
    assert active() == [("link", "", ""), ("rank", "2", "")]
    server.update([], [verdict("changed", "node", [2, 3], node=HOSTILE)])
    assert active() == [("link", "", ""), ("node", "2-3", HOSTILE)]
    server.update([], [verdict("ended", "node", [2, 3])])
    assert active() == [("link", "", "")]


def test_many_ranks_are_told_by_node_and_the_slowest(started: list[MetricsServer]) -> None:
    size = MOST_RANKS + 4
    server = serve(started, facts(size))
    walls: list[float | None] = [100.0] * size
    walls[7] = 300.0
    server.update([line(1, walls)])
    got = scraped(server)
    running = {"phase": "forward", "state": "running"}
    assert got[key("bireme_ledger_seconds_total", rank="", node="right", **running)] == pytest.approx(0.05 * size / 2)
    assert got[key("bireme_ledger_seconds_total", rank=7, node="left", **running)] == pytest.approx(0.15)
    assert len([1 for name, _ in got if name == "bireme_ledger_seconds_total"]) == 3 * 30
    assert len([1 for name, _ in got if name == "bireme_rank_self_time_seconds"]) == size
    use = {"group": "default_pg", "operation": "all_reduce"}
    assert got[key("bireme_collective_bytes_total", rank="", node="left", **use)] == 4096 * size / 2


def test_a_port_in_use_and_one_that_is_none_are_one_line(started: list[MetricsServer]) -> None:
    server = serve(started, facts(1))
    again = MetricsServer(server.port, facts(1))
    with pytest.raises(UserError, match=f"port {server.port} is in use: choose another metrics port"):
        again.start()
    again.close()
    for port, address, message in (
        (70000, "127.0.0.1", r"70000 is not a port: choose a metrics port from 1024 to 65535 \(--metrics-port\)"),
        ("9400", "127.0.0.1", "'9400' is not a port"),
        (9400.0, "127.0.0.1", r"9400\.0 is not a port"),
        (True, "127.0.0.1", "True is not a port"),
        (0, "203.0.113.7", "cannot serve metrics on 203.0.113.7 port 0"),
        (0, "no such host", "cannot serve metrics on no such host"),
    ):
        with pytest.raises(UserError, match=message) as error:
            MetricsServer(port, facts(1), address=address).start()  # type: ignore[arg-type]
        assert "\n" not in str(error.value)


def test_close_frees_the_port_also_from_forked_processes(started: list[MetricsServer]) -> None:
    first = serve(started, facts(1))
    first.update([line(1, [100.0])])
    assert first._server is not None
    shared = os.dup(first._server.fileno())  # as a data loader's worker has it
    try:
        assert scraped(first)[key("bireme_step")] == 1
        first.close()
        first.close()
        second = MetricsServer(first.port, facts(1))
        second.start()
        started.append(second)
        second.update([line(5, [100.0])])
        assert scraped(second)[key("bireme_step")] == 5
    finally:
        os.close(shared)


def test_only_metrics_are_served_and_only_on_loopback(started: list[MetricsServer]) -> None:
    server = serve(started, facts(1))
    assert server._server is not None and server._server.server_address[0] == "127.0.0.1"
    assert get(server, "/")[0] == 404 and get(server, "/metrics?x=1")[0] == 200
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("POST", "/metrics", body=b"x")
    assert connection.getresponse().status == 501
    connection.close()


def test_idle_and_slow_clients_are_cut_off_and_hold_up_nobody(
    started: list[MetricsServer], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics, "_CLIENT_WITHIN_S", 0.2)
    server = serve(started, facts(1))
    idle = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(14)]
    idle[0].sendall(b"GET /metr")
    server.update([line(1, [100.0])])
    assert [client.recv(1) for client in idle] == [b""] * 14, "all were let go"
    while server._server is not None and server._server._clients:
        time.sleep(0.01)
    assert scraped(server)[key("bireme_step")] == 1
    for client in idle:
        client.close()
    assert capfd.readouterr().err == ""


def test_the_documentation_names_every_metric(started: list[MetricsServer]) -> None:
    server = serve(started, facts(2))
    verdict = {"event": "verdict", "change": "started", "kind": "rank", "ranks": [0]}
    server.update(
        [line(1, [9, 9], skipped="warm-up"), line(2, [9, 9])], [{"event": "evaluation", "loss": 3.0}, verdict]
    )
    page = (Path(__file__).parent.parent / "docs" / "metrics.md").read_text(encoding="utf-8")
    documented = dict(re.findall(r"^\| `(bireme_\w+)` \| (\w+) \|", page, re.MULTILINE))
    served = {}
    for family in text_string_to_metric_families(get(server)[2]):
        assert family.samples, f"{family.name} was not fed"
        served[family.name + ("_total" if family.type == "counter" else "")] = family.type
    assert documented == served
    others = [column for column in COLUMNS if not column.startswith(PHASES)]
    assert all(f"`{column}`" in page for column in others) and "`<phase>_<state>_ms`" in page


def test_scrapes_while_steps_come_in_are_consistent(started: list[MetricsServer]) -> None:
    server = serve(started, facts(2))
    done = threading.Event()

    def feed() -> None:
        for step in range(1, 201):
            server.update([line(step, [100, 100])])
        done.set()

    thread = threading.Thread(target=feed)
    thread.start()
    while not done.is_set():
        got = scraped(server)
        if key("bireme_step") in got:
            assert got[key("bireme_step")] == got[key("bireme_steps_total")]
    thread.join()
    assert scraped(server)[key("bireme_steps_total")] == 200
