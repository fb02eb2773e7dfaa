import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from bireme.errors import UserError
from bireme.observe.collectives import hooks_missing
from bireme.report import study_plot
from bireme.study import runner
from bireme.study.command import study_command
from bireme.study.grid import Cell, Options
from bireme.study.runner import CellFailed

WriteRun = Callable[..., dict[str, Any]]


class FakeNodes:
    """Stands for the emulated nodes: cells are synthesised; `fails` and `stops_at` by the cell's key."""

    def __init__(self, write_run: WriteRun) -> None:
        self.ran: list[str] = []
        self.fails = ""
        self.stops_at = ""
        self.refused: str | None = None
        self.probes = 0
        self._write_run = write_run

    def run_cell(
        self, cell: Cell, run_directory: Path, log: Path, show: Callable[[str], None], **_: Any
    ) -> dict[str, Any]:
        show("starting")
        log.write_text("output of the trainer")
        self.ran.append(cell.key)
        if self.stops_at and self.stops_at in cell.key:
            run_directory.mkdir()
            raise KeyboardInterrupt
        if self.fails and self.fails in cell.key:
            raise CellFailed("node1 ended with exit code 1: no reason")
        show("step 1/7")
        return self._write_run(cell, run_directory)

    def why_unshaped(self) -> str | None:
        self.probes += 1
        return self.refused


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch, write_run: WriteRun) -> FakeNodes:
    nodes = FakeNodes(write_run)
    monkeypatch.setattr(runner, "run_cell", nodes.run_cell)
    monkeypatch.setattr(runner, "why_unshaped", nodes.why_unshaped)
    # Drawing takes a second: tests/report/test_study_plot.py does it, and the study that runs for real.
    monkeypatch.setattr(study_plot, "plot_study", lambda results, path: path.write_bytes(b"\x89PNG"))
    return nodes


def links(out: Path, json: bool = False, links: str = "100mbit,1gbit") -> int:
    return study_command("links", Options(links=links, steps=4, cores_per_node=1), out, json)


def test_a_study_runs_each_cell_once(tmp_path: Path, nodes: FakeNodes, capsys: pytest.CaptureFixture[str]) -> None:
    assert links(tmp_path / "a") == 0
    first = capsys.readouterr()
    assert len(nodes.ran) == 5 and nodes.probes == 1
    assert (tmp_path / "a" / "study.png").read_bytes().startswith(b"\x89PNG")
    assert "[2/5] 2 nodes x 1 rank, 100mbit, ddp overlap: starting" in first.err
    assert "[2/5] 2 nodes x 1 rank, 100mbit, ddp overlap: step 100 ms (median), took 1 s" in first.err
    assert "100mbit" in first.out and "picture: " in first.out

    assert links(tmp_path / "a") == 0
    assert len(nodes.ran) == 5 and nodes.probes == 1  # nothing to run, nothing to ask for
    second = capsys.readouterr()
    assert second.out == first.out and second.err.count("finished before") == 5

    assert links(tmp_path / "a", links="100mbit,1gbit,10mbit") == 0  # one more link: its cells only
    assert [key for key in nodes.ran[5:] if "_10mbit_" in key] == nodes.ran[5:] and len(nodes.ran) == 7


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path: Path, nodes: FakeNodes) -> None:
    links(tmp_path / "a")
    (tmp_path / "a" / "study.png").unlink()
    (tmp_path / "a" / "study.png").mkdir()
    with pytest.raises(UserError, match=r"cannot write .*study\.png: Is a directory"):
        links(tmp_path / "a")
    assert (tmp_path / "a" / "study.json").is_file()


def test_json_is_one_object_and_the_file(tmp_path: Path, nodes: FakeNodes, capsys: pytest.CaptureFixture[str]) -> None:
    assert links(tmp_path / "a", json=True) == 0
    printed = orjson.loads(capsys.readouterr().out)
    assert printed == orjson.loads((tmp_path / "a" / "study.json").read_bytes())
    assert (printed["format"], printed["version"], printed["name"]) == ("bireme-study", 1, "links")
    assert printed["status"] == "finished" and len(printed["cells"]) == 5
    assert printed["settings"]["steps"] == 4 and "link" not in printed["settings"]
    for cell in printed["cells"]:
        assert (tmp_path / "a" / cell["run"] / "run.json").exists()


def test_a_cell_that_fails_does_not_stop_the_others(
    tmp_path: Path, nodes: FakeNodes, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes.fails = "100mbit_flat"
    assert links(tmp_path / "a") == 1
    output = capsys.readouterr()
    (line,) = [line for line in output.err.splitlines() if "FAILED" in line]
    assert "100mbit, ddp flat: FAILED: node1 ended with exit code 1: no reason" in line and ".log" in line
    assert len(nodes.ran) == 5 and "1gbit" in output.out
    results = orjson.loads((tmp_path / "a" / "study.json").read_bytes())
    assert [cell["status"] for cell in results["cells"]].count("failed") == 1 and results["status"] == "failed"

    nodes.fails = ""
    assert links(tmp_path / "a") == 0 and nodes.ran[5:] == [key for key in nodes.ran[:5] if "100mbit_flat" in key]


def test_a_cluster_that_cannot_be_made_fails_its_cell(
    tmp_path: Path, nodes: FakeNodes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise UserError("the emulated nodes were not ready in 30 s")

    monkeypatch.setattr(runner, "run_cell", refuse)
    assert links(tmp_path / "a") == 1
    assert capsys.readouterr().err.count("FAILED: the emulated nodes were not ready") == 5


def test_when_all_cells_fail_there_is_no_table(
    tmp_path: Path, nodes: FakeNodes, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes.fails = "toy"
    assert links(tmp_path / "a") == 1
    assert capsys.readouterr().out == "" and not (tmp_path / "a" / "study.png").exists()


def test_ctrl_c_keeps_what_is_finished(
    tmp_path: Path, nodes: FakeNodes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bireme", "study", "links", "--out", "a b"])
    nodes.stops_at = "100mbit_flat"
    assert links(tmp_path / "a") == 130
    output = capsys.readouterr()
    assert "stopped: 2 of 5 cells are finished; to go on: bireme study links --out 'a b'" in output.err
    assert output.out == ""
    results = orjson.loads((tmp_path / "a" / "study.json").read_bytes())
    assert results["status"] == "interrupted"
    assert [cell["status"] for cell in results["cells"]] == ["finished"] * 2 + ["not run"] * 3

    nodes.stops_at = ""
    assert links(tmp_path / "a") == 0 and len(nodes.ran) == 6


def test_where_links_cannot_be_limited_it_is_said_once_and_in_every_row(
    tmp_path: Path, nodes: FakeNodes, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes.refused = "network namespaces are not permitted here"
    assert links(tmp_path / "a") == 0
    output = capsys.readouterr()
    (said,) = [line for line in output.err.splitlines() if "not permitted" in line]
    assert "no link rates are compared" in said
    assert len(nodes.ran) == 3 and all("unshaped" in key for key in nodes.ran)
    assert output.out.count("unshaped") >= 5 and "mbit" not in output.out.lower().replace("mbit/s", "")
    results = orjson.loads((tmp_path / "a" / "study.json").read_bytes())
    assert all(cell["link"] == "unshaped" and cell["shaped"] is False for cell in results["cells"])

    assert links(tmp_path / "a") == 0 and len(nodes.ran) == 3  # they are finished
    nodes.refused = None
    assert links(tmp_path / "a") == 0 and len(nodes.ran) == 8  # what ran without links does not count


def test_what_is_left_out_is_said(tmp_path: Path, nodes: FakeNodes, capsys: pytest.CaptureFixture[str]) -> None:
    options = Options(layouts="hsdp,tp", preset="small", links="1gbit", steps=2, cores_per_node=1)
    assert study_command("layouts", options, tmp_path / "a") == 0
    output = capsys.readouterr()
    said = [line for line in output.err.splitlines() if "left out" in line]
    assert [line.partition(":")[2].partition(":")[0] for line in said] == [
        " hsdp is left out at 2 nodes x 1 rank",
        " tp is left out at 2 nodes x 2 ranks",
    ]
    assert "num_heads 6 does not divide" in said[1]
    assert [key.split("_")[5] for key in nodes.ran] == ["tp", "hsdp"]
    results = orjson.loads((tmp_path / "a" / "study.json").read_bytes())
    assert [each["layout"] for each in results["left_out"]] == ["hsdp", "tp"]
    assert results["cells"][1]["axes"]["layout"] == "hsdp" and results["settings"]["preset"] == "small"


def test_the_study_of_layouts_without_limited_links(
    tmp_path: Path, nodes: FakeNodes, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes.refused = "network namespaces are not permitted here"
    assert study_command("layouts", Options(steps=2, cores_per_node=1), tmp_path / "a") == 0
    output = capsys.readouterr()
    assert "no link rates are compared" in output.err and len(nodes.ran) == 9
    assert "2 nodes, 1 core a node, all unshaped" in output.out


@pytest.mark.parametrize("name", ["ranks", "straggler", "links", "layouts"])
def test_the_tables_fit_80_columns(
    name: str, tmp_path: Path, nodes: FakeNodes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    study_command(name, Options(steps=4, cores_per_node=1), tmp_path / "a")
    tables = capsys.readouterr().out.rpartition("picture:")[0]
    assert all(len(line) <= 80 for line in tables.splitlines()) and "…" not in tables
    told = {
        "ranks": "2 x 2",
        "straggler": "found in forward/blocked of rank 1: 200.0 of the 200 ms planted",
        "links": "200mbit    overlap",
        "layouts": "hsdp / fsdp at 2 x 2, 1gbit: bytes 0.250 (formula 0.250), step 0.57",
    }
    assert told[name] in tables


def test_what_every_cell_would_refuse_is_refused_first(tmp_path: Path, nodes: FakeNodes) -> None:
    for options, said in (
        (Options(preset="toi"), "did you mean 'toy'"),
        (Options(sequence_length=100_000), "--sequence-length 100000 is longer than the context of toy"),
        (Options(model="num_leyers=2"), "did you mean 'num_layers'"),
        (Options(cores_per_node=100_000), "cores_per_node is 100000"),
    ):
        with pytest.raises(UserError, match=said):
            study_command("ranks", options, tmp_path / "a")
    assert nodes.ran == [] and not (tmp_path / "a").exists()


# --- for real ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_study_on_emulated_nodes_goes_on_after_ctrl_c(tmp_path: Path) -> None:
    out = tmp_path / "study"
    command = [
        sys.executable,
        "-m",
        "bireme",
        "study",
        "ranks",
        "--ranks",
        "1",
        "--steps",
        "2",
        "--batch-per-rank",
        "1",
    ]
    command += ["--out", str(out), "--json"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    first = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    cells = out / "cells"
    deadline = time.monotonic() + 150
    while not (list(cells.glob("nodes1_*.json")) and list(cells.glob("nodes2_*.log"))):
        assert first.poll() is None and time.monotonic() < deadline, first.communicate()
        time.sleep(0.2)
    first.send_signal(signal.SIGINT)
    stdout, stderr = first.communicate(timeout=60)
    assert first.returncode == 130 and stdout == "" and "stopped: 1 of 2 cells are finished" in stderr
    (one_rank,) = cells.glob("nodes1_*.json")
    before = one_rank.stat().st_mtime_ns

    second = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert second.returncode == 0, second.stderr
    assert one_rank.stat().st_mtime_ns == before and second.stderr.count("finished before") == 1
    results = orjson.loads(second.stdout)
    alone, two = results["cells"]
    assert alone["efficiency"] == pytest.approx(1) and two["efficiency"] > 0
    assert two["link"] in ("1gbit", "unshaped") and two["shaped"] == (two["link"] == "1gbit")
    if hooks_missing() is None:
        assert two["link_bytes"] > 1_000_000
    else:
        assert two["link_bytes"] is None and two["link_bytes_reason"]
    run = orjson.loads((out / two["run"] / "run.json").read_bytes())
    assert [node["name"] for node in run["nodes"]] == ["node0", "node1"]
    assert (out / "study.png").stat().st_size > 10_000
