import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.text import Text

from bireme.report.colours import STATE_COLOURS
from bireme.text import duration
from bireme.watch.figures import Figures, figures, window_line
from bireme.watch.follow import Follower
from bireme.watch.view import ASCII_SHADES, SHADES, compose

if TYPE_CHECKING:
    from tests.watch.made_watched import facts, gone, line, verdict
else:
    from made_watched import facts, gone, line, verdict

from bireme.record import RunWriter

Of = Callable[..., Figures]


@pytest.fixture
def of(tmp_path: Path) -> Of:
    """of(lines, events=[], finish=None, later_s=0, lives=None, **facts): the figures of a run."""
    names = itertools.count()

    def make(
        lines: Sequence[dict[str, Any]],
        events: Sequence[dict[str, Any]] = (),
        finish: tuple[str, str | None] | None = None,
        later_s: float = 0.0,
        lives: bool | None = None,
        node_names: Sequence[str] = (),
        **about: Any,
    ) -> Figures:
        directory = tmp_path / f"run{next(names)}"
        described = facts(**about)
        for node, name in zip(described["nodes"], node_names, strict=False):
            node["name"] = name
        writer = RunWriter(directory, described)
        writer.steps(lines)
        for event in events:
            writer.event(event["event"], **{name: value for name, value in event.items() if name != "event"})
        if finish is not None:
            writer.finish(*finish)
        writer.close()
        follower = Follower(directory)
        follower.look()
        follower.seen.writer_lives = lives
        return figures(follower.seen, (directory / "steps.jsonl").stat().st_mtime + later_s)

    return make


def plain(lines: Sequence[Text]) -> str:
    return "\n".join(line.plain.rstrip() for line in lines)


def words(each: Figures, width: int = 100) -> str:
    return " ".join(plain(compose(each, width)).split())


def test_the_numbers_are_those_of_the_measured_steps(of: Of) -> None:
    lines = [line(1, wall_ms=9000, skipped="warm-up"), *(line(step) for step in range(2, 12))]
    each = of(lines, steps=31, later_s=3.0)
    assert (each.step, each.steps, each.measured, each.step_ms) == (11, 31, 10, 100.0)
    assert each.loss == "3.8900" and each.since_s == pytest.approx(3.0, abs=0.01)
    assert each.tokens_per_s == pytest.approx(10_000) and each.mfu == pytest.approx(0.1)
    assert each.left_s == pytest.approx(20 * 0.1) and each.status == "running"
    assert each.overall is not None and each.overall.states_ms == pytest.approx((75, 0, 5, 20, 0))
    assert [(bar.label, bar.self_ms) for bar in each.ranks] == [("rank 1", 100), ("rank 0", 50)]
    assert each.nodes == () and each.communication_share == pytest.approx(0.25)
    assert window_line(each, 10) == (
        "step 11/31  loss 3.8900  100 ms (median of 10)  10,000 tokens/s (global)  communication 25%  "
        "MFU 10.0% (full attention)  ETA 0:02  (10 new steps)"
    )


def test_what_is_left_counts_evaluations_and_checkpoints_and_no_accidents(of: Of) -> None:
    lines = [line(step) for step in range(1, 11)]
    lines[4] = line(5, wall_ms=600, skipped="evaluation")
    lines[6] = line(7, wall_ms=5000)  # an accident
    lines[8] = line(9, wall_ms=300)
    lines[8]["cells_ns"][0][24], lines[8]["cells_ns"][0][5] = 1, lines[8]["cells_ns"][0][5] - 1  # a checkpoint in it
    assert of(lines, steps=20).left_s == pytest.approx(10 * (0.1 + (0.5 + 0.2) / 10))


def test_unknown_is_n_a_and_says_why(of: Of) -> None:
    missing = {"collectives": "no hooks", "run_delay": "no schedstat"}
    each = of([line(1, tokens=0, loss=None)], missing=missing, model=None, config=None)
    text = words(each)
    for part in ("loss n/a", "n/a tokens/s (global)", "MFU n/a", "transfer n/a", "wait n/a", "runnable n/a"):
        assert part in text
    assert "transfer and wait are not observed, and in blocked: no hooks" in text and "ETA" not in text
    assert "communication n/a" in window_line(each, 1)
    assert words(of([line(1, loss=None, loss_reason="nan")])).count("loss nan") == 1
    early = words(of([line(1, skipped="warm-up"), line(2, skipped="warm-up")]))
    assert (
        "step 2/100" in early
        and "no measured step yet: 2 steps skipped (warm-up)" in early
        and "█ running" not in early
    )
    assert "1 rank did not record the last step" in words(of([gone(line(1), rank=0)]))
    assert of([line(1)], peak={"flops_per_s": 1.0}).mfu is None, "above 1 is not believed"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        ({"lines": [], "lives": True}, "running; no step yet"),
        ({"lines": [], "lives": True, "later_s": 90}, "no news for 90 s (its process, pid 1, is there); no step yet"),
        ({"lives": True, "later_s": 5}, "running"),
        ({"lives": True, "later_s": 42}, "no news for 42 s (its process, pid 1, is there)"),
        ({"lives": None, "later_s": 42}, "no news for 42 s (the writer may have been killed)"),
        ({"lives": None, "later_s": 7200}, "no news for 2:00:00 (the writer may have been killed)"),
        ({"lives": False}, "killed: the process that wrote it (pid 1) is gone"),
        ({"finish": ("finished", None), "later_s": 42}, "finished"),
        ({"finish": ("failed", "RuntimeError:\nx\x1b[31m")}, "failed: RuntimeError: x\\x1b[31m"),
        ({"finish": ("interrupted", "SIGTERM")}, "interrupted: SIGTERM"),
    ],
)
def test_how_the_run_is_doing(of: Of, make: dict[str, Any], sentence: str) -> None:
    each = of(**{"lines": [line(1)], **make})
    assert each.sentence == sentence and sentence in words(each, 200)
    if make.get("finish"):
        assert each.left_s is None and each.since_s is None and "ETA" not in words(each)


def test_slow_steps_are_no_silence(of: Of) -> None:
    assert of([line(1, wall_ms=30_000)], later_s=80).sentence == "running"
    assert "no news" in of([line(1, wall_ms=30_000)], later_s=100).sentence


def test_nodes_and_the_slowest_ranks_have_bars_on_one_scale(of: Of) -> None:
    each = of([line(step, size=8, slow=6) for step in range(1, 4)], size=8, nodes=2)
    lines = plain(compose(each, 80)).splitlines()
    bars = {text.split(" █")[0].strip(): text for text in lines if " █" in text and ", self " in text}
    assert list(bars)[:4] == ["all ranks", "node node1", "node node0", "rank 6 on node1"]
    assert "ranks, by self time" in lines and len(bars) == 3 + 8
    shades = [text.count("█") + text.count("░") + text.count("▒") for text in bars.values()]
    assert len(set(shades)) == 1, "all steps are equally long"
    slow, other = bars["rank 6 on node1"], bars["rank 0 on node0"]
    assert slow.count("█") == shades[0] and abs(other.count("█") - shades[0] / 2) <= 1
    assert slow.endswith("100.0 ms, self 100.0") and other.endswith("100.0 ms, self 50.0")
    few = plain(compose(each, 80, 16))
    assert "the slowest 1 of 8 ranks, by self time" in few and "rank 6 on node1" in few


def test_colours_are_the_states_and_say_nothing_that_shades_do_not(of: Of) -> None:
    row = next(text for text in compose(of([line(1)]), 80) if text.plain.startswith("rank 0"))
    styles = {row.plain[span.start]: str(span.style) for span in row.spans if span.end > span.start}
    for state in ("running", "transfer", "wait"):
        assert styles[SHADES[state]] == STATE_COLOURS[state]
    assert len(set(SHADES.values())) == 5
    ascii_only = plain(compose(of([line(1)]), 80, shades=ASCII_SHADES))
    ascii_only.encode("ascii")


def test_verdicts_and_events_are_shown_and_their_text_is_only_text(of: Of) -> None:
    hostile = "[red]x[/blue]\x1b[31m\u202e\n"
    each = of(
        [line(1)],
        [
            {"event": "verdict", **verdict(sentence=hostile)},
            {"event": "warning", "ranks": [0, 1], "message": hostile},
            {"event": "evaluation", "step": hostile, "loss": hostile},
        ],
        finish=("failed", hostile),
        nodes=2,
        node_names=[hostile],
        layout=hostile,
    )
    text = plain(compose(each, 200))
    assert "\x1b" not in text and "\u202e" not in text and text.count("[red]x[/blue]\\x1b[31m") >= 6
    assert "verdict: [red]x" in text and "warning (ranks 0-1): [red]x" in text


@pytest.mark.parametrize("width", [1, 7, 20, 40, 80, 200])
@pytest.mark.parametrize("height", [None, 1, 5, 12, 24, 60])
def test_it_fits_any_terminal(of: Of, width: int, height: int | None) -> None:
    lines = [line(step, size=64, slow=9) for step in range(1, 4)]
    events = [{"event": "evaluation", "step": step, "loss": 2.0} for step in range(30)]
    each = of(lines, [*events, {"event": "verdict", **verdict(sentence="模型 " * 30)}], size=64, nodes=16)
    view = compose(each, width, height, keys=True)
    assert max(text.cell_len for text in view) <= width
    assert height is None or len(view) <= height
    if width >= 40 and (height or 60) >= 24:
        text = plain(view)
        assert "step 3/100" in text and "rank 9" in text and "verdict after" in text and "q quits" in text


def test_durations_are_read_at_a_glance() -> None:
    assert [duration(seconds) for seconds in (0, 59.9, 61, 3600)] == ["0:00", "0:59", "1:01", "1:00:00"]
