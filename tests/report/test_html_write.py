"""The page as a file: whole or not at all, self-contained, and nothing in it is read as markup."""

import re
import subprocess
import sys
import webbrowser
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import orjson
import pytest

from bireme.cli import app
from bireme.cli import run as run_cli
from bireme.errors import UserError
from bireme.report import report_command
from bireme.report.html.numbers import run_page
from bireme.report.html.write import embedded_json, render, write_page
from bireme.report.summary import summarise
from bireme.run_reader import Run

MakeRun = Callable[..., Run]
HOSTILE = "</script><img src=x onerror=alert(1)>\u2028&\"'"
STEPS = [
    [{"forward/running": 100.0, "backward/wait": 60.0}, {"forward/running": 100.0, "forward/blocked": 60.0}]
    for _ in range(20)
]


def hostile_run(make_run: MakeRun, name: str = "run") -> Run:
    def change(lines: list[dict[str, Any]]) -> None:
        lines[4] |= {"loss": None, "loss_reason": HOSTILE}

    return make_run(
        STEPS,
        name=name,
        nodes=[{"name": HOSTILE, "ranks": [0]}, {"name": HOSTILE + "2", "ranks": [1]}],
        groups=[{"name": HOSTILE, "ranks": [0, 1]}],
        command=["train", HOSTILE],
        layout=HOSTILE,
        versions={HOSTILE: HOSTILE},
        status_reason=HOSTILE,
        peak={"flops_per_s": 1e8, "source": HOSTILE},
        model={"preset": HOSTILE, "parameters": 1, "flops_per_token": {"full": 10, "causal": 9}},
        events=[
            {"event": "warning", "message": HOSTILE, "ranks": [0]},
            {"event": "injection", "kind": HOSTILE, "text": HOSTILE, "ranks": [1], "first_step": 3, "last_step": None},
            {"event": "checkpoint_failed", "step": 5, "reason": HOSTILE},
            {"event": "verdict", "step": 9, "change": HOSTILE, "message": HOSTILE},
        ],
        change=change,
    )


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))


def test_names_are_never_markup(make_run: MakeRun) -> None:
    run = hostile_run(make_run)
    page = run_page(run, summarise(run))
    assert HOSTILE in page["sentence_text"]  # the page does show them
    tags = Tags()
    tags.feed(render(page))
    assert {tag for tag, _ in tags.found} & {"img", "iframe", "object", "embed", "base", "form"} == set()
    assert not any(name.startswith("on") for _, attributes in tags.found for name in attributes)
    scripts = [attributes for tag, attributes in tags.found if tag == "script"]
    assert len(scripts) == 3 and not any("src" in attributes for attributes in scripts)


def test_numbers_in_a_script_stay_in_it() -> None:
    text = embedded_json({"a": HOSTILE, "b": float("nan"), "c": "\ud800"})
    assert not re.search("[<>&\u2028\u2029]", text)
    assert orjson.loads(text) == {"a": HOSTILE, "b": None, "c": "?"}


def test_it_asks_for_nothing_and_forbids_to_ask(make_run: MakeRun) -> None:
    run = make_run(STEPS)
    text = render(run_page(run, summarise(run)))
    policy = re.search('Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None and policy[1].split("; ")[0] == "default-src 'none'"
    assert "http" not in policy[1] and "unsafe-eval" not in policy[1]
    tags = Tags()
    tags.feed(text)
    links = [a.get("href") or a.get("src") for _, a in tags.found if "href" in a or "src" in a]
    assert all(str(link).startswith(("#", "data:")) for link in links)


def test_the_command_writes_beside_the_run_and_says_where(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(STEPS)
    report_command([run.directory], as_json=False, html=True)
    path = run.directory / "report.html"
    assert capsys.readouterr().out == f"{path}\n" and path.read_text().startswith("<!doctype html>")
    before = sorted(each.name for each in run.directory.iterdir())
    report_command([run.directory], as_json=False, html=True, out=tmp_path / "here.html")
    assert (tmp_path / "here.html").exists()
    assert sorted(each.name for each in run.directory.iterdir()) == before  # nothing is left beside it
    assert path.stat().st_size < 8_000_000


def test_a_file_that_cannot_be_written_is_one_line(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(STEPS)
    for out in (tmp_path / "absent" / "report.html", tmp_path):
        with pytest.raises(UserError, match=r"cannot write .*: choose another --out FILE"):
            report_command([run.directory], as_json=False, html=True, out=out)


def test_a_page_that_fails_leaves_the_old_one(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(STEPS)
    path = tmp_path / "report.html"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(UserError, match="No space left"):
        write_page(run_page(run, summarise(run)), path)
    assert path.read_text() == "old" and [each.name for each in tmp_path.glob("*report*")] == ["report.html"]


def test_without_a_browser_the_page_is_there(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(STEPS)
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url))
    assert run_cli(app, ["report", str(run.directory), "--html", "--open"]) == 2
    printed = capsys.readouterr()
    path = run.directory / "report.html"
    assert printed.out == f"{path}\n"
    assert printed.err == f"bireme: {path} is written, but no browser was found: open it yourself\n"
    assert opened == [(run.directory / "report.html").as_uri()] and (run.directory / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--html", "--json"], "one at a time"),
        (["--out", "x.html"], "--out belongs to the page: add --html"),
        (["--open"], "--open belongs to the page: add --html"),
    ],
)
def test_options_that_do_not_go_together(
    make_run: MakeRun, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(STEPS)
    assert run_cli(app, ["report", str(run.directory), *arguments]) == 2
    assert says in capsys.readouterr().err and not (run.directory / "report.html").exists()


def test_no_run_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run"):
        report_command([tmp_path], as_json=False, html=True)


def test_the_text_report_does_not_load_what_the_page_needs(make_run: MakeRun) -> None:
    run = make_run(STEPS)
    code = (
        "import sys; from pathlib import Path; from bireme.report import report_command; "
        "report_command([Path(sys.argv[1])], False); "
        "assert not {'plotly', 'jinja2', 'matplotlib', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(run.directory)], check=True, capture_output=True, timeout=60)
