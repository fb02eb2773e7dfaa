import io
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bireme.console import RankLog, StepPrinter
from bireme.ledger import PHASES, STATES

log = logging.getLogger("bireme.somewhere")

MS = 1_000_000


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("bireme", "py.warnings")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (level, propagate) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.propagate = propagate


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=60, highlight=False, soft_wrap=True)


def shown(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


# --- logging -----------------------------------------------------------------------------------------------------


def test_information_of_rank_0_is_shown_and_of_others_not(console: Console) -> None:
    for rank in range(2):
        with RankLog(rank, console):
            log.info("rank %d speaks [bold]of brackets[/bold] and more than sixty characters of other things", rank)
            log.debug("nobody hears this")
    assert shown(console) == ["rank 0 speaks [bold]of brackets[/bold] and more than sixty characters of other things"]


def test_a_warning_travels_once(console: Console) -> None:
    with RankLog(0, console) as rank_log:
        for _ in range(3):
            log.warning("the disk\n  is %s", "full")
        log.error("and slow")
        assert shown(console) == []
        assert rank_log.take_warnings() == ["the disk is full", "and slow"]
        log.warning("the disk is full")
        assert rank_log.take_warnings() == []
    assert shown(console) == []  # rank 0 has been told


@pytest.mark.parametrize(
    "ranks, size, where",
    [([0], 1, ""), ([3], 4, " (rank 3)"), ([0, 1, 2, 5], 8, " (ranks 0-2, 5)")],
)
def test_a_warning_is_shown_with_its_ranks(ranks: list[int], size: int, where: str, console: Console) -> None:
    with RankLog(0, console) as rank_log:
        rank_log.show_warning("[/x] is full", ranks, size)
    assert shown(console) == [f"warning{where}: [/x] is full"]


def test_warnings_that_never_travelled_are_shown_at_the_end(console: Console) -> None:
    with RankLog(0, console):
        log.warning("late")
    with RankLog(1, console):
        log.warning("later")
    assert shown(console) == ["warning: late"]


def test_python_warnings_are_logged(console: Console, tmp_path: Path) -> None:
    with warnings.catch_warnings(), RankLog(0, console) as rank_log:
        rank_log.open(tmp_path)
        warnings.simplefilter("always")
        warnings.warn("old thing", stacklevel=1)
        (message,) = rank_log.take_warnings()
    assert "old thing" in message
    assert "old thing" in (tmp_path / "logs" / "rank-0.log").read_text()


def test_the_file_has_everything_in_order(console: Console, tmp_path: Path) -> None:
    with RankLog(1, console) as rank_log:
        log.info("before the run")
        log.warning("naïve ⛵")
        rank_log.open(tmp_path / "run")
        log.info("in the run")
        log.debug("too much")
        log.warning("naïve ⛵")  # here every one is kept
    log.warning("after the run")
    lines = (tmp_path / "run" / "logs" / "rank-1.log").read_text(encoding="utf-8").splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [
        "INFO before the run",
        "WARNING naïve ⛵",
        "INFO in the run",
        "WARNING naïve ⛵",
    ]


def test_standard_error_of_other_ranks_goes_to_the_file(
    console: Console, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with RankLog(1, console) as rank_log:
        os.write(2, b"before\n")
        rank_log.open(tmp_path)
        os.write(2, b"from C++\n")
        log.info("from Python")
        os.write(2, b"again\n")
    os.write(2, b"after\n")
    lines = (tmp_path / "logs" / "rank-1.log").read_text().splitlines()
    assert [lines[0], lines[1].split(" ", 2)[2], lines[2]] == ["from C++", "INFO from Python", "again"]
    assert capfd.readouterr().err == "before\nafter\n"


def test_standard_error_of_rank_0_stays(console: Console, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with RankLog(0, console) as rank_log:
        rank_log.open(tmp_path)
        os.write(2, b"from C++\n")
    assert capfd.readouterr().err == "from C++\n"
    assert (tmp_path / "logs" / "rank-0.log").read_text() == ""


def test_closing_twice_is_harmless(console: Console, tmp_path: Path) -> None:
    with RankLog(1, console) as rank_log:
        rank_log.open(tmp_path)
        rank_log.close()
    handlers = logging.getLogger("bireme").handlers
    assert not any(isinstance(handler, RankLog) for handler in handlers)


def test_closing_gives_the_loggers_back(console: Console) -> None:
    loggers = [logging.getLogger(name) for name in ("bireme", "py.warnings")]
    before = [(logger.level, logger.propagate, logger.handlers) for logger in loggers]
    with RankLog(0, console):
        pass
    assert [(logger.level, logger.propagate, logger.handlers) for logger in loggers] == before


# --- steps -------------------------------------------------------------------------------------------------------


def record(step: int, walls_ms: list[int], exposed_ms: list[int] | None = None, **more: Any) -> dict[str, Any]:
    """A step record: each rank's wall time, and how much of it was half transfer and half wait."""
    cells = []
    for wall_ms, exposed in zip(walls_ms, exposed_ms or [0] * len(walls_ms), strict=True):
        row = [0] * (len(PHASES) * len(STATES))
        backward = PHASES.index("backward") * len(STATES)
        row[backward + STATES.index("transfer")] = exposed * MS // 2
        row[backward + STATES.index("wait")] = exposed * MS // 2
        row[backward + STATES.index("running")] = (wall_ms - exposed) * MS
        cells.append(row)
    return {
        "step": step,
        "loss": 2.34567,
        "tokens": 4096,
        "start_ns": [7 * MS] * len(walls_ms),
        "end_ns": [(7 + wall_ms) * MS for wall_ms in walls_ms],
        "cells_ns": cells,
        **more,
    }


def test_a_line_a_step(console: Console) -> None:
    printer = StepPrinter(console, 200, lambda rate: rate / 1e5)
    printer.show(record(7, [400, 500], [40, 150]))
    printer.close()
    # 193 steps of half a second are left; shares of 10 % and 30 % of each rank's own step
    assert shown(console) == [
        "step   7/200  loss 2.3457  500 ms  8,192 tokens/s (global)  communication 20%  MFU 8.2%  ETA 1:36"
    ]


def test_what_is_not_known_is_not_available(console: Console) -> None:
    printer = StepPrinter(console, 9, lambda rate: None)
    printer.show(record(9, [1000], loss=None))
    expected = "step 9/9  loss n/a  1000 ms  4,096 tokens/s (global)  communication 0%  MFU n/a  ETA 0:00"
    assert shown(console) == [expected]


def test_an_evaluation_is_in_the_line(console: Console) -> None:
    printer = StepPrinter(console, 10, lambda rate: None)
    printer.show(record(1, [100], evaluation_loss=1.23456))
    assert shown(console)[0].endswith("evaluation loss 1.2346")


def test_the_remaining_time_is_from_the_median_step(console: Console) -> None:
    printer = StepPrinter(console, 7203, lambda rate: None)
    for step, wall_ms in enumerate([9000, 1000, 1000], 1):
        printer.show(record(step, [wall_ms]))
    assert [line.rpartition("ETA ")[2] for line in shown(console)][-1] == "2:00:00"


def test_the_remaining_time_of_days(console: Console) -> None:
    printer = StepPrinter(console, 100_001, lambda rate: None)
    printer.show(record(1, [1000]))
    assert shown(console)[0].endswith("ETA 27:46:40")


def test_a_terminal_has_a_bar_as_well() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=150, highlight=False)
    printer = StepPrinter(console, 3, lambda rate: None)
    printer.show(record(1, [100]))
    printer.close()
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "step 1/3  loss 2.3457  100 ms" in text
    assert "1/3" in text.replace("step 1/3", "", 1)  # the bar's own count
