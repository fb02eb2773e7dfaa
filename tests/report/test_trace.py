import csv
import gzip
import io
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.errors import UserError
from bireme.ledger import PHASES, STATES, Segment, Span, account, divide
from bireme.record import RunWriter
from bireme.report.trace import microseconds, trace_command
from bireme.report.trace_layout import state_intervals
from bireme.run_reader import read_run
from bireme.trace_reader import read_trace

if TYPE_CHECKING:
    from tests.report.made_trace import BOUND_NS, MS, STEP_NS, S, made_trace
    from tests.trace_checks import check_schema, check_sums, check_tiling, ns, slices, sums_ns
else:
    from made_trace import BOUND_NS, MS, STEP_NS, S, made_trace

    from trace_checks import check_schema, check_sums, check_tiling, ns, slices, sums_ns


def exported(run: Path, steps: str | None = None, out: Path | None = None) -> dict[str, Any]:
    path = trace_command(run, steps, out)
    data = path.read_bytes()
    trace: dict[str, Any] = orjson.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return trace


def test_the_trace_keeps_the_formats_rules_and_gives_the_ledger_back(tmp_path: Path) -> None:
    made_trace(tmp_path / "run")
    trace = exported(tmp_path / "run")
    check_schema(trace)
    check_tiling(trace)
    check_sums(sums_ns(trace), read_run(tmp_path / "run"), [20, 21, 22])


@pytest.mark.skipif(shutil.which("trace_processor_shell") is None, reason="no trace_processor_shell on PATH")
def test_trace_processor_reads_the_same_numbers(tmp_path: Path) -> None:
    made_trace(tmp_path / "run")
    path = trace_command(tmp_path / "run", None, None)
    (tmp_path / "query.sql").write_text(
        "select p.pid as rank, extract_arg(s.arg_set_id, 'args.step') as step, "
        "extract_arg(s.arg_set_id, 'args.phase') as phase, s.name as state, sum(s.dur) as ns "
        "from slice s join thread_track t on s.track_id = t.id join thread using (utid) join process p using (upid) "
        "where s.category = 'state' group by 1, 2, 3, 4;"
    )
    answer = subprocess.run(
        ["trace_processor_shell", "-q", str(tmp_path / "query.sql"), str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    rows = csv.DictReader(io.StringIO(answer.stdout))
    sums = {(int(row["rank"]), int(row["step"]), row["phase"], row["state"]): int(row["ns"]) for row in rows}
    check_sums(sums, read_run(tmp_path / "run"), [20, 21, 22])


# --- clocks ------------------------------------------------------------------------------------------------------


def step_starts(trace: dict[str, Any]) -> dict[tuple[int, int], int]:
    return {(each["pid"], each["args"]["step"]): ns(each["ts"]) for each in slices(trace, "step")}


def test_ranks_are_on_one_clock_within_the_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 1's clock is three seconds ahead; in truth the steps of both begin together."""
    made_trace(tmp_path / "run")
    trace = exported(tmp_path / "run")
    starts = step_starts(trace)
    about = trace["otherData"]
    assert about["clock_error_bound_ns"] == BOUND_NS and about["ranks_not_aligned"] == []
    for step in (20, 21, 22):
        assert 0 < abs(starts[0, step] - starts[1, step]) <= BOUND_NS  # the made comparison is 5 ns off
    assert about["clocks"][1] == {
        "rank": 1,
        "first_step": 20,
        "last_step": 22,
        "offset_ns": 3 * S + 5,
        "drift_ppm": 0.0,
        "error_bound_ns": BOUND_NS,
    }
    assert "steps 20-22 of 2 ranks; clocks aligned to rank 0's within 0.020 ms" in capsys.readouterr().out


def test_a_clock_that_runs_fast_keeps_its_durations_and_overlaps_nothing(tmp_path: Path) -> None:
    """100 ppm: the steps of the slower clock have small gaps, and no duration is stretched."""
    run = tmp_path / "run"
    made_trace(run, clocks=False)
    lines = []
    for step in (18, 22):
        own_ns, drifted_ns = 53 * S + (step + 1) * STEP_NS, (step - 18) * STEP_NS // 10_000
        lines.append({"attempt": 1, "step": step, "clocks": [[1, own_ns, 3 * S + drifted_ns, 1_000]]})
    with (run / "trace.jsonl").open("ab") as file:
        file.writelines(orjson.dumps(line) + b"\n" for line in lines)
    trace = exported(run)
    check_schema(trace)
    check_tiling(trace)
    check_sums(sums_ns(trace), read_run(run), [20, 21, 22])
    starts = step_starts(trace)
    assert starts[1, 22] - starts[1, 20] == 2 * STEP_NS  # the fastest clock sets the rate
    assert starts[0, 22] - starts[0, 20] == pytest.approx(2 * STEP_NS * 1.0001, abs=100)
    assert trace["otherData"]["clocks"][1]["drift_ppm"] == pytest.approx(100, abs=0.1)
    # Rank 0's steps are placed by their start: to their end the rates part by 100 ppm.
    assert trace["otherData"]["clocks"][0]["error_bound_ns"] == pytest.approx(STEP_NS * 1e-4, abs=5)
    assert trace["otherData"]["clocks"][1]["error_bound_ns"] == pytest.approx(1_000, abs=5)


def test_clocks_that_were_not_compared_are_said_to_be_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_trace(tmp_path / "run", clocks=False)
    trace = exported(tmp_path / "run")
    check_schema(trace)
    check_sums(sums_ns(trace), read_run(tmp_path / "run"), [20, 21, 22])
    about = trace["otherData"]
    assert about["ranks_not_aligned"] == [1]
    assert (
        about["clocks"][1]["error_bound_ns"] is None and "not compared" in about["clocks"][1]["error_bound_ns_reason"]
    )
    assert "rank 1 on node1 (clock not aligned)" in process_names(trace)
    assert "n/a, they were not compared" in capsys.readouterr().out
    assert {each["args"]["last_arriver"] for each in slices(trace, "collective") if "last_arriver" in each["args"]} == {
        "n/a: the clocks of some members were not compared"
    }


# --- what is on the tracks ---------------------------------------------------------------------------------------


def process_names(trace: dict[str, Any]) -> list[str]:
    return [each["args"]["name"] for each in trace["traceEvents"] if each["name"] == "process_name"]


def track_names(trace: dict[str, Any], rank: int) -> dict[int, str]:
    events = trace["traceEvents"]
    return {
        each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name" and each["pid"] == rank
    }


def test_ranks_are_processes_and_tracks_are_named(tmp_path: Path) -> None:
    made_trace(tmp_path / "run", node='a "node"\x1b\n')
    trace = exported(tmp_path / "run")
    assert process_names(trace) == [r'rank 0 on a "node"\x1b\n0', r'rank 1 on a "node"\x1b\n1']
    assert list(track_names(trace, 0).values()) == [
        "phases",
        "states",
        "garbage collection",
        "collectives: world",
        "collectives: world (2)",
    ]
    assert trace["otherData"]["steps"] == "20-22" and trace["otherData"]["run"] == "run"


def test_collectives_in_flight_and_who_came_last(tmp_path: Path) -> None:
    made_trace(tmp_path / "run")
    trace = exported(tmp_path / "run")
    reduces = {
        each["pid"]: each
        for each in slices(trace, "collective")
        if each["name"] == "all_reduce" and each["args"]["step"] == 21
    }
    assert ns(reduces[0]["dur"]) == 40 * MS and ns(reduces[1]["dur"]) == 20 * MS + 11
    args = reduces[0]["args"]
    assert (args["bytes"], args["sequence"], args["transfer_ms"], args["wait_ms"]) == (4_000_000, 42, 20.0, 20.0)
    assert args["bus_bandwidth_bytes_per_s"] == 200_000_000  # two ranks: the bytes over the transfer time
    assert reduces[0]["args"]["last_arriver"] == reduces[1]["args"]["last_arriver"] == "rank 1"
    # The all-gather begins on both at once: 5 ns of misplacement are nothing that the clocks can tell.
    gathers = [each for each in slices(trace, "collective") if each["name"] == "all_gather"]
    assert {each["args"]["last_arriver"] for each in gathers} == {"n/a: closer to others than the clocks can tell"}
    assert len(gathers) == 2 * 4  # three steps, and that of step 19 which lasts into step 20; none twice


def test_arrows_lead_from_the_last_arriver_to_every_other_member(tmp_path: Path) -> None:
    made_trace(tmp_path / "run", ahead_ns=(0, 3 * S, -5 * S))
    trace = exported(tmp_path / "run")
    check_schema(trace)
    arrows: dict[int, list[dict[str, Any]]] = {}
    for each in trace["traceEvents"]:
        if each["ph"] in "sf" and each["name"] == "all_reduce":
            arrows.setdefault(each["id"], []).append(each)
    assert len(arrows) == 3 * 2  # steps, and members but for the last
    assert {(start["pid"], end["pid"]) for start, end in arrows.values()} == {(2, 0), (2, 1)}
    for start, end in arrows.values():
        assert ns(end["ts"]) - ns(start["ts"]) == pytest.approx(0, abs=100)  # rank 2 comes when the others leave


def test_a_transfer_that_is_not_known_is_said_to_be_unmatched(tmp_path: Path) -> None:
    made_trace(tmp_path / "run").close()
    path = tmp_path / "run" / "trace.jsonl"
    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    for line in lines:
        for span in line.get("spans", []):
            if span[2] == "all_gather":
                span[7] = None
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    (args, *_) = [
        each["args"] for each in slices(exported(tmp_path / "run"), "collective") if each["name"] == "all_gather"
    ]
    assert args["wait_ms"] == args["transfer_ms"] == "n/a: unmatched (members disagree, or a finish was not seen)"


def test_an_operation_whose_finish_was_not_seen_is_a_mark(tmp_path: Path) -> None:
    made_trace(tmp_path / "run")
    marks = [each for each in exported(tmp_path / "run", "21")["traceEvents"] if each["ph"] == "i"]
    assert sorted((each["pid"], each["name"], each["args"]["root_or_peer_rank"]) for each in marks) == [
        (0, "send issued, its finish was not seen", 1),
        (1, "send issued, its finish was not seen", 0),
    ]


def test_waits_are_where_they_were_and_other_states_say_that_they_are_not(tmp_path: Path) -> None:
    made_trace(tmp_path / "run")
    trace = exported(tmp_path / "run", "21")
    start = step_starts(trace)[0, 21]
    placed = [
        (each["name"], (ns(each["ts"]) - start) / MS, ns(each["dur"]) / MS, each["args"].get("position"))
        for each in slices(trace, "state")
        if each["pid"] == 0 and each["args"]["phase"] == "backward"
    ]
    somewhere = "not known inside the phase"
    # Blocked on the all-reduce from 40 to 80; the bytes of either collective moved since 60.
    assert [each for each in placed if each[0] in ("transfer", "wait")] == [
        ("wait", 40.0, 20.0, None),
        ("transfer", 60.0, 20.0, None),
    ]
    assert {position for name, _, _, position in placed if name == "running"} <= {None, somewhere}
    forward = [each for each in slices(trace, "state") if each["pid"] == 0 and each["args"]["phase"] == "forward"]
    assert [(each["name"], each["args"]["position"]) for each in forward] == [
        ("running", somewhere),
        ("runnable", somewhere),
        ("blocked", somewhere),
    ]


intervals = st.tuples(st.integers(0, 1_000), st.integers(0, 400)).map(lambda pair: (pair[0], pair[0] + pair[1]))


def made_span(wait: tuple[int, int], transfer_ns: int | None) -> Span:
    span = Span(0, 0, "all_reduce", 8, wait[0], wait[1], waits=[wait], duration_ns=wait[1] - wait[0])
    span.transfer_ns = transfer_ns
    return span


@given(
    st.lists(st.integers(0, 1_000), min_size=2, max_size=5).map(sorted),
    st.lists(st.tuples(st.integers(0, 1_200), st.integers(0, 1_200)), min_size=4, max_size=4),
    st.lists(st.builds(made_span, intervals, st.one_of(st.none(), st.integers(0, 500))), max_size=6),
)
def test_slices_tile_every_segment_and_add_up_to_the_ledger(
    bounds: list[int], clocks: list[tuple[int, int]], spans: list[Span]
) -> None:
    """Whatever the kernel and the collectives say, and however much they disagree."""
    segments = [
        Segment(index % len(PHASES), start, end, *clock)
        for index, (start, end, clock) in enumerate(zip(bounds, bounds[1:], clocks, strict=False))
    ]
    cells = [[0] * len(STATES) for _ in PHASES]
    for segment, division in zip(segments, divide(segments, spans), strict=True):
        boundary = segment.start_ns
        for state, (start, end), _ in state_intervals(segment, division):
            assert start == boundary < end
            cells[segment.phase][state] += end - start
            boundary = end
        assert boundary == segment.end_ns
    assert cells == account(bounds[0], bounds[-1], segments, spans).cells


def test_a_wait_that_the_kernel_has_less_of_is_shortened_from_its_beginning() -> None:
    segment = Segment(2, 0, 100, 80, 0)
    spans = [made_span((20, 90), 30)]
    placed = state_intervals(segment, divide([segment], spans)[0])
    by_name = [(STATES[state], interval) for state, interval, _ in placed]
    assert by_name == [
        ("running", (0, 48)),
        ("wait", (48, 60)),
        ("running", (60, 82)),
        ("transfer", (82, 90)),
        ("running", (90, 100)),
    ]
    assert {position["position"] for _, _, position in placed} == {
        "not known inside the phase",
        "shortened: the kernel says that the thread was blocked for less",
    }


@given(st.integers(0, 10**13))
def test_viewers_read_every_nanosecond_back(value: int) -> None:
    assert int(microseconds(value) * 1000.0) == round(microseconds(value) * 1000.0) == value


# --- choosing, writing, bad input --------------------------------------------------------------------------------


def test_chosen_steps_and_a_packed_file(tmp_path: Path) -> None:
    made_trace(tmp_path / "run")
    packed = exported(tmp_path / "run", "20,22", tmp_path / "two.json.gz")
    check_schema(packed)
    assert {each["args"]["step"] for each in slices(packed, "step")} == {20, 22}
    check_sums(sums_ns(packed), read_run(tmp_path / "run"), [20, 22])
    assert (tmp_path / "two.json.gz").read_bytes()[:2] == b"\x1f\x8b"
    assert not (tmp_path / "run" / "trace.json").exists()


def test_ranks_that_are_absent_are_said_to_be_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The room of one rank may end before that of others."""
    made_trace(tmp_path / "run", absent=((1, 20), (1, 21), (1, 22)))
    trace = exported(tmp_path / "run")
    check_schema(trace)
    assert trace["otherData"]["ranks_absent"] == [1] and process_names(trace) == ["rank 0 on node0"]
    assert "absent from this trace: 1 rank" in capsys.readouterr().out
    lasts = {each["args"].get("last_arriver") for each in slices(trace, "collective")}
    assert lasts == {"n/a: not all members are in this trace"}


def test_one_rank_needs_no_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_trace(tmp_path / "run", ahead_ns=(0,))
    trace = exported(tmp_path / "run")
    check_schema(trace)
    check_sums(sums_ns(trace), read_run(tmp_path / "run"), [20, 21, 22])
    assert trace["otherData"]["clock_error_bound_ns"] == 0
    assert capsys.readouterr().out == "steps 20-22 of 1 rank: one clock\n"


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ("19:21", "did not trace step 19: it traced 20-22"),
        ("7,40:41", "did not trace steps 7, 40-41: it traced 20-22"),
        ("", "did not trace no step"),
        ("x", "--steps 'x' is not understood"),
    ],
)
def test_steps_that_are_not_traced(tmp_path: Path, steps: str, said: str) -> None:
    made_trace(tmp_path / "run")
    with pytest.raises(UserError) as error:
        trace_command(tmp_path / "run", steps, None)
    assert said in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "run" / "trace.json").exists()


def test_a_run_without_traced_steps(tmp_path: Path) -> None:
    made_trace(tmp_path / "run", traced=range(0))
    with pytest.raises(UserError, match=r"run .* has no traced steps: train with --trace-steps 20:22"):
        trace_command(tmp_path / "run", None, None)
    with pytest.raises(UserError, match="is not a directory"):
        trace_command(tmp_path / "none", None, None)


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    made_trace(tmp_path / "run")
    (tmp_path / "taken").mkdir()
    with pytest.raises(UserError, match="cannot write"):
        trace_command(tmp_path / "run", None, tmp_path / "taken")
    with pytest.raises(UserError, match="cannot write"):
        trace_command(tmp_path / "run", None, tmp_path / "no" / "such" / "trace.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "taken"]


DAMAGED: list[dict[str, Any]] = [
    {"rank": 2},
    {"rank": True},
    {"segments": [[1, 0, 5, 5, 0]]},  # not the whole step
    {"segments": [[6, 0, 10, 5, 0]]},
    {"segments": [[1, 0, 10, -5, 0]]},
    {"spans": [[0, 0, "all_reduce"]]},
    {"spans": [[0, 0, "all_reduce", 8, 0, None, None, 5, [], "eager", -1, 20]]},  # a part of an unknown duration
    {"spans": [[0, 0, "all_reduce", 8, 0, 10, 10, 5, [[1]], "eager", -1, 20]]},
    {"pauses": [[9, 1, 2]]},
    {"start_ns": 1 << 63},
    {"step": None},
]


@pytest.mark.parametrize("change", DAMAGED, ids=lambda change: str(change)[:40])
def test_damaged_lines_are_left_out_and_counted(
    tmp_path: Path, change: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    made_trace(run)
    good = {"attempt": 1, "step": 20, "rank": 0, "start_ns": 0, "end_ns": 10, "pauses": [], "spans": []}
    line = {**good, "segments": [[1, 0, 10, 5, 0]], **change}
    with (run / "trace.jsonl").open("ab") as file:
        file.write(orjson.dumps(line) + b'\n{"attempt":1,"step":20,"clocks":[[1,2,3]]}\nno json\n{"attempt":1,"st')
    trace = exported(run)
    check_schema(trace)
    check_sums(sums_ns(trace), read_run(run), [20, 21, 22])
    assert "3 damaged lines of its record could not be used" in capsys.readouterr().out


def test_a_resumed_run_is_its_newest_attempt_with_a_trace(tmp_path: Path) -> None:
    run = tmp_path / "run"
    made_trace(run).close()
    facts = orjson.loads((run / "run.json").read_bytes())
    alone = {"world_size": 1, "nodes": [{"name": "alone", "ranks": [0]}], "groups": []}
    again = RunWriter(run, {**facts, **alone}, resume_after=21)
    again.close()
    assert [(each.rank, each.step) for each in read_trace(run).steps] == [(0, 20), (1, 20), (0, 21), (1, 21)]
    assert process_names(exported(run)) == ["rank 0 on node0", "rank 1 on node1"]
