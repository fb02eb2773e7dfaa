"""The page of a study."""

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from bireme.errors import UserError
from bireme.report import report_command
from bireme.report.html.study_numbers import is_study, study_page
from bireme.report.html.write import embedded_json, render

if TYPE_CHECKING:
    from tests.report.study_folder import make_study
else:
    from study_folder import make_study


def page_of(directory: Path) -> dict[str, Any]:
    page = study_page(directory)
    orjson.loads(embedded_json(page))
    assert render(page).startswith("<!doctype html>")
    return page


def test_links_against_their_bound(tmp_path: Path) -> None:
    results = make_study("links", tmp_path / "s", links="100mbit,1gbit")
    page = page_of(tmp_path / "s")
    held = [bar for bar in page["bars"] if bar["bound_ms"] is not None]
    assert len(held) == 4 and held[0]["bound_ms"] == pytest.approx(results["cells"][1]["bound_ms"])
    assert held[0]["detail"].endswith("x its bound") and "times their bound" in page["answer"]
    assert [table["title"] for table in page["tables"]] == ["The cells", "Traffic and bound"]
    assert sum(page["bars"][1]["parts"]) == pytest.approx(page["bars"][1]["mean_ms"], rel=0.01)


def test_ranks_and_their_efficiency(tmp_path: Path) -> None:
    make_study("ranks", tmp_path / "s", ranks="1,2")
    page = page_of(tmp_path / "s")
    assert re.fullmatch(
        r"4 ranks train \d\.\d\d times as fast as one alone: \d+ % of what they could\.", page["answer"]
    )
    assert [row["mark"] for row in page["values"][0]["rows"]] == [1.0, 1.0, 1.0]


def test_a_straggler_sweep(tmp_path: Path) -> None:
    make_study("straggler", tmp_path / "s", delays="0,50,100")
    page = page_of(tmp_path / "s")
    assert "takes 1.00 ms longer; the ledger finds 100.0 of 100 ms planted in forward/blocked" in page["answer"]
    assert page["sweep"]["x"] == [0, 50, 100] and page["sweep"]["lines"][0]["fit"][0] == pytest.approx(1.0)


def test_layouts_and_their_bytes(tmp_path: Path) -> None:
    make_study("layouts", tmp_path / "s", layouts="ddp,fsdp", ranks="1", links="1gbit")
    page = page_of(tmp_path / "s")
    assert page["answer"].startswith("The fastest: ddp with 2 x 1")
    traffic = page["values"][0]["rows"]
    assert traffic[0]["value"] == pytest.approx(1.06 * traffic[0]["mark"], rel=0.01)


def test_runs_are_linked_where_there_is_a_page(tmp_path: Path) -> None:
    results = make_study("links", tmp_path / "s", links="1gbit", failed=2)
    first = tmp_path / "s" / results["cells"][0]["run"]
    report_command([first], as_json=False, html=True)
    cells = page_of(tmp_path / "s")["cells"]
    assert cells[0]["link"] == f"{results['cells'][0]['run']}/report.html"
    assert cells[1]["link"] is None and cells[1]["command"].endswith(" --html")
    assert (cells[2]["status"], cells[2]["reason"]) == ("failed", "it <failed>")
    assert "it &lt;failed&gt;" in render(study_page(tmp_path / "s"))


def test_the_command_can_be_copied(tmp_path: Path) -> None:
    results = make_study("links", tmp_path / "my study; $(x)", links="1gbit")
    command = page_of(tmp_path / "my study; $(x)")["cells"][0]["command"]
    run = str(tmp_path / "my study; $(x)" / results["cells"][0]["run"])
    assert shlex.split(command) == ["bireme", "report", run, "--html"] and f"'{run}'" in command


def test_a_link_leaves_no_study(tmp_path: Path) -> None:
    results = make_study("links", tmp_path / "s", links="1gbit")
    for run in ("javascript:alert(1)", "../../etc", "cells/../../x", 3, None):
        results["cells"][0]["run"] = run
        (tmp_path / "s" / "study.json").write_bytes(orjson.dumps(results))
        cell = page_of(tmp_path / "s")["cells"][0]
        assert cell["link"] is None and cell["command"] == ""


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "damaged"),
        (b"{}", "is not a study of bireme"),
        (b'{"format": "bireme-study", "version": 9}', "install a newer bireme"),
        (b'{"format": "bireme-study", "version": 1, "name": "x"}', "does not know"),
        (b'{"format": "bireme-study", "version": 1, "name": "links"}', "field 'cells' is absent"),
        (b'{"format": "bireme-study", "version": 1, "name": "links", "cells": [3]}', "a field has another type"),
        (b'{"format": "bireme-study", "version": 1, "name": "links", "cells": []}', "no finished cell yet"),
    ],
)
def test_a_damaged_study_is_one_line(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "study.json").write_bytes(content)
    assert is_study(tmp_path)
    with pytest.raises(UserError, match=says) as error:
        report_command([tmp_path], as_json=False, html=True)
    assert "\n" not in str(error.value) and not (tmp_path / "report.html").exists()


def test_a_study_stands_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_study("ranks", tmp_path / "s", ranks="1")
    report_command([tmp_path / "s"], as_json=False, html=True)
    assert capsys.readouterr().out == f"{tmp_path / 's' / 'report.html'}\n"
    with pytest.raises(UserError, match="is shown by itself"):
        report_command([tmp_path / "s", tmp_path / "s"], as_json=False, html=True)
