"""The pages in a real browser: nothing fails, nothing is asked for, every control does what it says."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bireme.report import report_command
from bireme.run_reader import Run

if TYPE_CHECKING:
    from tests.report.browser import Opened, chromium
    from tests.report.study_folder import make_study
else:
    from browser import Opened, chromium
    from study_folder import make_study

MakeRun = Callable[..., Run]
HOSTILE = "</script><img src=x onerror=alert(1)>%{x}<b>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


def hostile_run(make_run: MakeRun, name: str, extra_ms: float = 60.0, ranks: int = 4) -> Run:
    rows = []
    for number in range(40):
        own = 100.0 + number % 3
        cells = [{"forward/running": own, "backward/transfer": 10.0, "backward/wait": extra_ms} for _ in range(ranks)]
        cells[1] = {"forward/running": own, "backward/transfer": 10.0, "forward/blocked": extra_ms}
        rows.append(cells)
    half = ranks // 2
    return make_run(
        rows,
        skipped=3,
        name=name,
        nodes=[
            {"name": HOSTILE, "ranks": list(range(half))},
            {"name": "b" + HOSTILE, "ranks": list(range(half, ranks))},
        ],
        groups=[{"name": HOSTILE, "ranks": list(range(ranks))}],
        layout=HOSTILE,
        events=[
            {"event": "injection", "kind": "sleep", "text": HOSTILE, "ranks": [1], "first_step": 3, "last_step": None},
            {"event": "checkpoint", "step": 20, "seconds": 1.0},
            {"event": "evaluation", "step": 20, "loss": 3.0},
            {"event": "gc_pause", "rank": 1, "step": 12, "ms": 30.0},
            {"event": "warning", "message": HOSTILE, "ranks": [0]},
        ],
    )


def written(*directories: Path) -> Path:
    path = directories[-1] / "page.html"
    report_command(list(directories), as_json=False, html=True, out=path)
    return path


def assert_clean(opened: Opened) -> None:
    assert opened.errors == []
    assert opened.other_requests() == []
    assert opened.page.query_selector("img") is None  # no name became an element


def test_a_run_and_all_its_controls(browser: Any, make_run: MakeRun, tmp_path: Path) -> None:
    opened = Opened(browser, written(hostile_run(make_run, "run").directory))
    page = opened.page
    assert_clean(opened)
    assert "the others wait for rank 1 on " + HOSTILE in page.inner_text("h1")
    assert page.locator("#heat-plot .main-svg, #time-plot .main-svg, #loss-plot .main-svg").count() >= 3

    # The heat map shows what is chosen.
    def shown() -> float:
        return float(page.evaluate("byId('heat-plot').data[0].z[1][5]"))

    assert shown() == 0.0  # the slow rank waits for nobody
    page.select_option("#quantity", label="forward / blocked")
    assert shown() == 60.0
    page.select_option("#quantity", label="self time")
    assert shown() > 150.0

    # The legend switches a state off in every bar.
    waits = page.locator('#ranks .part[data-state="wait"]')
    assert waits.count() == 3
    page.click('#states button[data-state="wait"]')
    assert waits.count() == 0
    assert page.get_attribute('#states button[data-state="wait"]', "aria-pressed") == "false"
    page.click('#states button[data-state="wait"]')
    assert waits.count() == 3

    # The rank box, and the kind of step.
    page.fill("#rank", "1")
    assert page.inner_text("#ledger-title").startswith("The ledger of rank 1 on ")
    assert page.locator("#rank-bar .row").count() == 1
    page.fill("#rank", "99")
    assert page.inner_text("#rank-error") == "There are ranks 0 to 3."
    page.fill("#rank", "")
    page.focus('input[name="which"][value="typical"]')
    page.keyboard.press("ArrowRight")
    assert "The bars: mean of 37 measured steps" in page.inner_text("#how-chosen")
    assert "mean step" in page.inner_text("#ledger-title")

    # Plotly's own legend switches a kind of event off, and the theme does not bring it back.
    switched_off = "byId('time-plot')._fullData.some((trace) => trace.visible === 'legendonly')"
    assert not page.evaluate(switched_off)
    page.locator("#time-plot .legendtoggle").last.click()
    for _ in range(50):  # Plotly waits for a second click; its policy forbids the page's own waiting for functions
        if page.evaluate(switched_off):
            break
        page.wait_for_timeout(100)
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.evaluate(switched_off)
    assert page.inner_text("#theme") == "Light"

    # A tip with units.
    page.hover('#overall .part[data-state="wait"]')
    assert "ms" in page.inner_text("#tip") and "of the step" in page.inner_text("#tip")

    # Hovering over the pictures: names stay text.
    for plot in ("heat-plot", "time-plot"):
        box = page.locator(f"#{plot} .nsewdrag").first.bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.wait_for_timeout(150)
    assert_clean(opened)
    page.context.close()


def test_every_control_has_a_name_and_a_place_in_the_order(browser: Any, make_run: MakeRun) -> None:
    opened = Opened(browser, written(hostile_run(make_run, "run").directory))
    unnamed = opened.page.evaluate(
        """[...document.querySelectorAll("main button, header button, main select, main input")].filter((each) =>
        !(each.labels?.length || each.getAttribute("aria-label") || each.textContent.trim())).length"""
    )
    unreachable = opened.page.evaluate(
        """[...document.querySelectorAll("button, select, input")].filter((each) => each.tabIndex < 0).length"""
    )
    assert (unnamed, unreachable) == (0, 0)
    opened.page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone(browser: Any, make_run: MakeRun, scheme: str) -> None:
    opened = Opened(browser, written(hostile_run(make_run, "run", ranks=40).directory), 390, 844, scheme)
    assert opened.overflow() == 0
    assert opened.page.inner_text("#theme") == ("Dark" if scheme == "light" else "Light")
    assert_clean(opened)
    opened.page.context.close()


def test_paper_is_light_and_without_controls(browser: Any, make_run: MakeRun) -> None:
    opened = Opened(browser, written(hostile_run(make_run, "run").directory), scheme="dark")
    opened.page.emulate_media(media="print", color_scheme="dark")
    assert opened.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not opened.page.is_visible("#theme") and not opened.page.is_visible("#quantity")
    assert opened.page.evaluate("byId('time-plot')._fullLayout.width") == 680
    assert_clean(opened)
    opened.page.context.close()


def test_two_runs(browser: Any, make_run: MakeRun) -> None:
    a, b = hostile_run(make_run, "a"), hostile_run(make_run, "b", 90.0)
    opened = Opened(browser, written(a.directory, b.directory))
    assert_clean(opened)
    assert "longer" in opened.page.inner_text("h1")
    assert opened.page.locator("#overall-0 .part, #overall-1 .part").count() >= 6
    widths = [opened.page.locator(f"#overall-{i} .part").first.bounding_box()["width"] for i in (0, 1)]
    assert widths[0] == pytest.approx(widths[1], rel=0.02)  # the same computing on one scale
    opened.page.click('#states button[data-state="running"]')
    assert opened.page.locator('#overall-0 .part[data-state="running"]').count() == 0
    opened.page.set_viewport_size({"width": 390, "height": 844})
    assert opened.overflow() == 0
    opened.page.context.close()


@pytest.mark.parametrize("name", ["links", "straggler", "ranks", "layouts"])
def test_a_study(browser: Any, tmp_path: Path, name: str) -> None:
    options: dict[str, Any] = {
        "links": {"links": "100mbit,1gbit"},
        "straggler": {"delays": "0,50,100"},
        "ranks": {"ranks": "1,2"},
        "layouts": {"layouts": "ddp,fsdp", "ranks": "1", "links": "1gbit"},
    }[name]
    make_study(name, tmp_path / "study", **options)
    opened = Opened(browser, written(tmp_path / "study"))
    assert_clean(opened)
    assert opened.page.locator("#cells-bars .row").count() >= 1
    assert opened.page.locator(".tick").count() == {"links": 4, "straggler": 0, "ranks": 3, "layouts": 2}[name]
    opened.page.click("#states button >> nth=0")
    assert opened.page.locator('#cells-bars .part[data-state="running"]').count() == 0
    opened.page.set_viewport_size({"width": 390, "height": 844})
    assert opened.overflow() == 0
    opened.page.context.close()
