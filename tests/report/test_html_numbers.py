"""What the page of a run shows, as numbers and texts; no browser."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import pytest

from bireme.ledger import PHASES, STATES
from bireme.report.html import heat
from bireme.report.html.arrays import bucket_edges, significant, step_arrays
from bireme.report.html.numbers import job_rate, run_page
from bireme.report.html.timeline import POINTS, series
from bireme.report.html.write import embedded_json
from bireme.report.summary import summarise
from bireme.run_reader import Run

if TYPE_CHECKING:
    from tests.made_links import make_table
else:
    from made_links import make_table

MakeRun = Callable[..., Run]
Cells = dict[str, float]


def steps(count: int, ranks: int, extra_ms: float = 0.0, slow: int = 1) -> list[list[Cells | None]]:
    """Rank `slow` is held up in backward; the others wait for it."""
    rows: list[list[Cells | None]] = []
    for number in range(count):
        own = 100.0 + number % 3
        cells: list[Cells | None] = [
            {"forward/running": own, "backward/transfer": 20.0, "backward/wait": extra_ms} for _ in range(ranks)
        ]
        if extra_ms:
            cells[slow] = {"forward/running": own, "backward/transfer": 20.0, "backward/blocked": extra_ms}
        rows.append(cells)
    return rows


def page_of(run: Run, **more: Any) -> dict[str, Any]:
    """The page's numbers, which must go into JSON."""
    page = run_page(run, summarise(run, **more), **more)
    orjson.loads(embedded_json(page))
    return page


def nodes(ranks: int, size: int) -> list[dict[str, Any]]:
    return [{"name": f"node{n}", "ranks": list(range(n * size, (n + 1) * size))} for n in range(ranks // size)]


def figure(page: dict[str, Any], label: str) -> dict[str, Any]:
    return next(each for each in page["figures"] if each["label"] == label)


def test_a_straggler(make_run: MakeRun) -> None:
    page = page_of(make_run(steps(30, 4, 60.0)))
    assert page["sentence_text"].startswith("A step takes 181.0 ms: 60.0 ms of it the others wait for rank 1 on here (")
    assert [bar["label"] for bar in page["bars"]["ranks"]] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert [bar["accused"] for bar in page["bars"]["ranks"]] == [False, True, False, False]
    assert page["bars"]["nodes"] == []  # one node: the bar of all ranks is its own
    assert [card["kind"] for card in page["verdicts"]] == ["rank"]
    assert page["verdicts"][0]["without_ms"] == pytest.approx(121, abs=1)
    assert {line["name"] for line in page["verdicts"][0]["lines"]} == {"worth", "evidence", "advice"}
    cured = next(row for row in page["worth"] if row["label"] == "with rank 1 as fast as its peers")
    assert cured["mfu"] == pytest.approx(page["worth"][0]["mfu"] * 181 / 121, rel=0.01)
    lane = next(lane for lane in page["time"]["lanes"] if lane["name"] == "verdict")
    assert lane["spans"][0][:2] == [1, 30]


def test_the_bars_are_the_ledger(make_run: MakeRun) -> None:
    run = make_run(steps(30, 2, 60.0))
    summary = summarise(run)
    page = run_page(run, summary)
    wanted = [value for cells in summary["ledger_ms"]["1"].values() for value in cells.values()]
    assert page["bars"]["ranks"][1]["mean"] == pytest.approx(wanted)
    assert sum(page["bars"]["overall"]["mean"]) == pytest.approx(summary["step_ms"]["mean"])
    # Nearest the median of 180, 181, 182: those of 181.
    assert sum(page["bars"]["overall"]["typical"]) == pytest.approx(181.0)
    assert "5 steps of 30 measured steps nearest the median step time (181.0 ms)" in page["how_chosen"]["typical"]


def test_one_rank(make_run: MakeRun) -> None:
    page = page_of(make_run([[{"forward/running": 100.0 + n % 2}] for n in range(20)]))
    assert page["bars"]["ranks"] == page["bars"]["nodes"] == []
    assert "stands out" not in page["sentence_text"]
    assert page["sentence_text"].startswith("A step takes") and "is computing" in page["sentence_text"]


def test_a_missing_rank_is_said_not_drawn_as_zero(make_run: MakeRun) -> None:
    rows = steps(20, 3)
    for row in rows:
        row[2] = None
    page = page_of(make_run(rows))
    assert [bar["label"] for bar in page["bars"]["ranks"]] == ["rank 0", "rank 1"]
    assert "Rank 2 recorded no measured step." in page["bars"]["ranks_text"]
    assert page["ledgers"]["typical"][2] is None and page["ledgers"]["mean"][2] is None
    assert all(value is None for value in page["heat"]["quantities"][0]["z"][2])


def test_unobserved_states_are_na_everywhere(make_run: MakeRun) -> None:
    missing = {"collectives": "torch has no hooks", "run_delay": "no schedstat"}
    page = page_of(make_run(steps(20, 2, 60.0), missing=missing))
    unknown = [n for n, state in enumerate(STATES * len(PHASES)) if state in ("transfer", "wait", "runnable")]
    assert all(page["bars"]["overall"]["typical"][n] is None for n in unknown)
    assert page["communication"]["reason"] == "torch has no hooks" and page["communication"]["parts"] == []
    names = [each["name"] for each in page["heat"]["quantities"]]
    assert "wait" not in names and names[:2] == ["own", "step"] and not any("transfer" in name for name in names)
    assert "torch has no hooks" in page["sentence_text"] and figure(page, "exposed communication")["value"] == "n/a"


def test_no_tokens_no_peak(make_run: MakeRun) -> None:
    def without_tokens(lines: list[dict[str, Any]]) -> None:
        for line in lines:
            line["tokens"] = None

    page = page_of(make_run(steps(20, 2), change=without_tokens, peak=None))
    assert page["time"]["tokens_per_s"] is None and page["time"]["tokens_reason"] == "no token counts were recorded"
    for label in ("tokens/s (global)", "tokens/s/rank (median)", "tokens/s of the job (global)"):
        assert (figure(page, label)["value"], figure(page, label)["detail"]) == ("n/a", "no token counts were recorded")
    assert figure(page, "MFU")["detail"] == "the peak of this device is unknown"
    assert {row["mfu_text"] for row in page["worth"]} == {"n/a"}


def test_too_few_steps_for_a_verdict(make_run: MakeRun) -> None:
    page = page_of(make_run(steps(4, 2, 60.0)))
    assert page["verdicts"] == [] and page["verdicts_reason"].startswith("4 complete measured steps")
    assert "Who is to blame is not known" in page["sentence_text"]


def test_a_running_run_is_noted(make_run: MakeRun) -> None:
    page = page_of(make_run(steps(20, 2), status="running"))
    assert any("not finished, or was killed" in note for note in page["notes"]) and page["what"][-1] == "running"


def test_events_are_marked(make_run: MakeRun) -> None:
    events: list[dict[str, Any]] = [
        {"event": "injection", "kind": "sleep", "phase": "forward", "ranks": [1], "first_step": 5, "last_step": None,
         "text": "sleep <b>"},
        {"event": "injection", "kind": "sleep", "rank": 1, "phase": "forward", "delays_ms": [50, 100]},
        {"event": "checkpoint", "step": 10, "seconds": 1.5},
        {"event": "checkpoint_failed", "step": 12, "reason": "disk full"},
        {"event": "evaluation", "step": 11, "loss": 3.25},
        {"event": "gc_pause", "rank": 0, "step": 7, "ms": 12.0},
        {"event": "gc_pause", "rank": 1, "step": 7, "ms": 40.0},
        {"event": "checkpoint", "step": 999},
        {"event": "gc_pause", "rank": 1, "step": "7", "ms": None},
    ]  # fmt: skip
    page = page_of(make_run(steps(20, 2), events=events))
    lanes = {lane["name"]: lane for lane in page["time"]["lanes"]}
    assert list(lanes) == ["injection", "checkpoint", "evaluation", "GC pause"]
    assert lanes["injection"]["spans"][0] == [5, 20, "injected: sleep <b>"]
    assert lanes["injection"]["spans"][1] == [1, 20, "injected: sleep of 50, 100 ms in forward, rank 1"]
    assert [mark[0] for mark in lanes["checkpoint"]["marks"]] == [10, 12]
    assert lanes["GC pause"]["marks"] == [[7, "2 GC pauses in step 7, the longest 40.0 ms on rank 1"]]
    assert page["loss"]["evaluation"] == {"x": [11], "y": [3.25]}


def test_warm_up_is_marked_and_kept_out_of_averages(make_run: MakeRun) -> None:
    """Field report B47: throughput that improves because the first steps hold everything that happens once."""
    rows = [[{"forward/running": 600.0}], *([{"forward/running": 100.0}] for _ in range(20))]
    run = make_run(rows, skipped=1)
    page = page_of(run)
    skipped = page["time"]["skipped"]
    assert (skipped["x"], skipped["step_ms"], skipped["text"]) == ([1], [600.0], ["warm-up"])
    assert 1 not in page["time"]["step_ms"]["x"] and set(page["time"]["step_ms"]["y"]) == {100.0}
    assert sum(page["bars"]["overall"]["mean"]) == pytest.approx(100.0)
    assert figure(page, "tokens/s (global)")["value"] == "10,000"
    # The job's rate holds all that the average leaves out: 21 steps in 2.6 s.
    assert job_rate(step_arrays(run)) == pytest.approx(21 * 1000 / 2.6)
    assert figure(page, "tokens/s of the job (global)")["value"] == "8,077"
    assert "1 skipped step left out" in page["heat"]["text"]


def test_rates_carry_their_scope(make_run: MakeRun) -> None:
    """Field report B45: "per GPU" that is the total, "total" that is per rank."""
    rows: list[list[Cells | None]] = [[{"forward/running": 100.0}, {"forward/running": 125.0}] for _ in range(20)]
    page = page_of(make_run(rows))
    rates = [each for each in page["figures"] if "tokens/s" in each["label"]]
    assert all("(global)" in each["label"] or "/rank" in each["label"] for each in rates)
    assert figure(page, "tokens/s (global)")["value"] == "8,000"  # 1000 tokens in the 125 ms of the slower rank
    per_rank = figure(page, "tokens/s/rank (median)")
    assert (per_rank["value"], per_rank["detail"]) == ("4,500", "min 4,000, max 5,000 over ranks")


def test_mfu_is_shown_in_both_conventions(make_run: MakeRun) -> None:
    """Field report B42: two tools give one run two utilisations."""
    shape = {
        "preset": "t",
        "parameters": 1,
        "flops_per_token": {"full": 1000, "causal": 900, "recomputation_full": 300},
    }
    page = page_of(make_run(steps(20, 2), model=shape))
    rows = {name: (value, what) for name, value, what in page["mfu"]}
    assert set(rows) == {"MFU, full attention", "MFU, causal attention", "HFU, full attention", "peak, all ranks"}
    full, causal, hfu = (float(rows[name][0].removesuffix(" %")) for name in list(rows)[:3])
    assert causal == pytest.approx(0.9 * full, rel=0.05) and hfu == pytest.approx(1.3 * full, rel=0.05)
    assert "no recomputation" in rows["MFU, full attention"][1] and rows["peak, all ranks"][1] == "measured"
    assert "causal" in figure(page, "MFU")["detail"]


def test_collectives_against_the_measured_link(make_run: MakeRun) -> None:
    def megabytes(lines: list[dict[str, Any]]) -> None:
        for line in lines:
            line["collectives"] = [[[0, "all_reduce", 8, 8 << 20, 20_000_000, 0]]] * 2

    page = page_of(make_run(steps(20, 2), change=megabytes), links=make_table())
    (row,) = page["communication"]["collectives"]
    # Of 1 MiB each; `bireme links` measured ranks 0 and 1, intra-node: a tenth of 0.1 ms + 1 MiB / 50 MB/s.
    assert (row["rate"], row["measured"], row["of_link_text"]) == ("419 MB/s", "498 MB/s", "84 %")
    without = page_of(make_run(steps(20, 2), name="without"))["communication"]["collectives"][0]
    assert (without["measured"], without["measured_reason"]) == ("n/a", "no --links FILE")
    parts = {part["label"]: part["ms"] for part in page["communication"]["parts"]}
    assert parts["exposed transfer"] == pytest.approx(20.0) and parts["hidden transfer"] == pytest.approx(3.0)


def test_many_groups_that_are_alike_share_a_row(make_run: MakeRun) -> None:
    def change(lines: list[dict[str, Any]]) -> None:
        for line in lines:
            line["collectives"] = [
                [[rank // 2, "all_gather", 1, 1000, 2_000_000 if rank // 2 == 7 else 1_000_000, 0]]
                for rank in range(60)
            ]

    groups = [{"name": f"g{n}", "ranks": [2 * n, 2 * n + 1]} for n in range(30)]
    mean, slowest = page_of(make_run(steps(10, 60), groups=groups, change=change))["communication"]["collectives"]
    assert (mean["group"], mean["transfer"], mean["ranks"]) == ("30 groups of 2 ranks, means", "1.03", "")
    assert (slowest["group"], slowest["transfer"], slowest["ranks"]) == ("the slowest of them: g7", "2.00", "14-15")


def test_no_collective_was_seen(make_run: MakeRun) -> None:
    def without(lines: list[dict[str, Any]]) -> None:
        for line in lines:
            line["collectives"] = [[] for _ in line["collectives"]]

    assert page_of(make_run(steps(20, 2), change=without))["communication"]["collectives"] == []


def test_losses_that_are_no_numbers(make_run: MakeRun) -> None:
    def change(lines: list[dict[str, Any]]) -> None:
        lines[3] |= {"loss": None, "loss_reason": "nan <b>"}

    loss = page_of(make_run(steps(20, 2), change=change))["loss"]
    assert loss["not_numbers"] == [[4, "nan <b>"]] and 4 not in loss["training"]["x"]

    def none(lines: list[dict[str, Any]]) -> None:
        for line in lines:
            line["loss"] = None

    assert page_of(make_run(steps(20, 2), name="none", change=none))["loss"] == {"reason": "no loss was recorded"}


# --- large runs ---------------------------------------------------------------------------------------------------


def test_a_thousand_ranks_are_grouped_and_the_culprit_is_not_lost(make_run: MakeRun) -> None:
    run = make_run(steps(10, 1024, 60.0, slow=700), nodes=nodes(1024, 8))
    page = page_of(run)
    assert "rank 700 on node87" in page["sentence_text"]
    ranks = [bar["label"] for bar in page["bars"]["ranks"]]
    assert "rank 700" in ranks and ranks[-1] == "the other 1016 ranks" and len(ranks) == 9
    assert "1016 ranks are not shown one by one" in page["bars"]["ranks_text"]
    named = [bar["label"] for bar in page["bars"]["nodes"]]
    assert "node87" in named and named[-1] == "the other 120 nodes"
    wait = page["heat"]["quantities"][0]
    assert len(wait["rows"]) <= heat.MEAN_ROWS + heat.EXTREMES and "rank 700, node87" in wait["rows"]
    assert "the mean of about 24 ranks" in page["heat"]["text"]
    assert len(page["ledgers"]["mean"]) == 1024


def test_many_steps_are_columns_of_means(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heat, "_CELLS", 0)  # at least 60 columns
    page = page_of(make_run(steps(240, 2)))
    step = next(each for each in page["heat"]["quantities"] if each["name"] == "step")
    assert len(page["heat"]["columns"]) == 60 and page["heat"]["columns"][:2] == ["1-4", "5-8"]
    assert step["z"][0][0] == pytest.approx(np.mean([120, 121, 122, 120]), abs=0.1)
    assert "Each column: the mean of 4 measured steps." in page["heat"]["text"]


def test_many_points_become_medians_and_a_band() -> None:
    values = np.arange(POINTS + 1, dtype=float)
    few, many = series(range(POINTS), values[:-1]), series(range(POINTS + 1), values)
    assert few["size"] == 1 and len(few["y"]) == POINTS and "low" not in few
    assert many["size"] == 5 and many["y"][0] == 2.0 and (many["low"][0], many["high"][0]) == (0.4, 3.6)
    assert len(many["y"]) == len(many["x"]) == len(many["low"]) == 401


def test_buckets_are_whole() -> None:
    assert bucket_edges(10, 4) == ([(0, 3), (3, 6), (6, 9), (9, 10)], 3)
    assert bucket_edges(3, 4) == ([(0, 1), (1, 2), (2, 3)], 1)


def test_rounding_to_digits_that_count() -> None:
    values = significant(np.array([0.0, 1234567.0, 0.000123456, -98.7654, np.nan]))
    assert values[:4].tolist() == [0.0, 1235000.0, 0.0001235, -98.77] and np.isnan(values[4])


def test_a_record_of_a_thousand_steps_stays_small(make_run: MakeRun) -> None:
    """Field report B61: pages and traces of gigabytes. A page has 4.8 MB of Plotly, and these numbers."""
    rng = np.random.default_rng(1)
    rows: list[list[Cells | None]] = [
        [{f"{phase}/{state}": float(rng.uniform(1, 99)) for phase in PHASES for state in STATES} for _ in range(8)]
        for _ in range(1000)
    ]
    assert len(embedded_json(page_of(make_run(rows)))) < 3_000_000
