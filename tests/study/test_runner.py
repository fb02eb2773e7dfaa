import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from bireme.config import load_config
from bireme.errors import UserError
from bireme.inject import Straggler
from bireme.nodes import EmulatedCluster
from bireme.study import runner
from bireme.study.grid import Cell
from bireme.study.runner import CellFailed, run_cell, trainer_arguments, trainer_environment

CELL = Cell(
    nodes=2, ranks_per_node=2, cores_per_node=1, link="1gbit", reduction="flat", preset="toy", batch_per_rank=3, steps=5
)


def test_the_trainer_is_told_the_whole_cell(tmp_path: Path) -> None:
    words = trainer_arguments(replace(CELL, sequence_length=64), tmp_path)
    assert words[:5] == ["-m", "bireme", "train", "--run-dir", str(tmp_path)]
    assert "--no-overlap" in words and "--overlap" in trainer_arguments(replace(CELL, reduction="overlap"), tmp_path)
    options = dict(itertools.pairwise(words))
    assert options["--global-batch-size"] == "12" and options["--steps"] == "8" and options["--skip-steps"] == "3"
    assert options["--sequence-length"] == "64" and options["--threads"] == "1" and options["--evaluate-every"] == "0"
    assert options["--layout"] == "ddp" and "--model" not in " ".join(words)
    other = trainer_arguments(replace(CELL, layout="pp=2,shard=2", model="num_layers=8,embedding_dim=256"), tmp_path)
    options = dict(itertools.pairwise(other))
    assert options["--layout"] == "pp=2,shard=2" and options["--exchange-every"] == "2"
    assert "--exchange-every" not in trainer_arguments(replace(CELL, steps=20), tmp_path)
    assert (options["--model.num-layers"], options["--model.embedding-dim"]) == ("8", "256")
    load_config(None, {"global_batch_size": 12, "steps": 8, "skip_steps": 3}).batch_shape(CELL.ranks)


def test_a_straggler_of_the_user_s_shell_stays_out() -> None:
    none = trainer_environment(CELL)
    assert Straggler.from_environment(none, CELL.ranks) is None and none["STRAGGLER_MS"] == ""
    slow = replace(CELL, straggler_delays_ms=(0.0, 12.5), straggler_rank=3, straggler_phase="input")
    straggler = Straggler.from_environment(trainer_environment(slow), CELL.ranks)
    assert straggler == Straggler((0.0, 12.5), 3, "input")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ""),
        ("noise\nbireme: there is no model 'x'\nbireme: second\nRuntimeError: later", ": there is no model 'x'"),
        ("bireme: rank 0 on node0 stopped: another rank has left\nbireme: disk full", ": disk full"),
        ("Traceback\n[rank0]: RuntimeError: broken\nbanner\nChildFailedError: ", ": [rank0]: RuntimeError: broken"),
    ],
)
def test_the_reason_of_a_failure_is_the_trainer_s_own_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "log").write_text(text)
    assert runner._reason(tmp_path / "log", "node1 ended with exit code 2") == f"node1 ended with exit code 2{said}"
    assert runner._reason(tmp_path / "absent", "x") == "x"


def link_here() -> str:
    return "1gbit" if runner.why_unshaped() is None else "unshaped"


def one_node(command: str) -> Cell:
    return replace(CELL, nodes=1, ranks_per_node=1, link=link_here(), preset=command)


def test_a_node_that_fails_fails_the_cell_and_leaves_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "torchrun_command", lambda *_: ["sh", "-c", "echo 'bireme: this is wrong' >&2; exit 3"])
    with pytest.raises(CellFailed, match="node0 ended with exit code 3: this is wrong"):
        run_cell(one_node("x"), tmp_path / "run", tmp_path / "log", lambda _: None)
    assert "this is wrong" in (tmp_path / "log").read_text()


def test_a_run_that_is_not_there_fails_the_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "torchrun_command", lambda *_: ["true"])
    with pytest.raises(CellFailed, match="left no usable run"):
        run_cell(one_node("x"), tmp_path / "run", tmp_path / "log", lambda _: None)


def test_when_one_node_fails_the_others_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_OTHERS_MAY_GO_ON_S", 0.5)
    command = ["sh", "-c", "[ $NODE_RANK = 1 ] && exit 4; trap '' TERM; while :; do sleep 0.1; done"]
    monkeypatch.setattr(runner, "torchrun_command", lambda *_: command)
    with pytest.raises(CellFailed, match="node1 ended with exit code 4"):
        run_cell(replace(one_node("x"), nodes=2), tmp_path / "run", tmp_path / "log", lambda _: None)


def test_ctrl_c_asks_the_ranks_to_stop_and_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"trap 'echo stopped > {tmp_path}/said; exit 0' INT; echo > {tmp_path}/up; while :; do sleep 0.1; done"
    monkeypatch.setattr(runner, "torchrun_command", lambda *_: ["sh", "-c", script])

    def interrupt(_: str) -> None:
        if (tmp_path / "up").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_cell(one_node("x"), tmp_path / "run", tmp_path / "log", interrupt)
    assert (tmp_path / "said").read_text() == "stopped\n"


def test_a_cluster_that_cannot_be_made_is_the_user_s_to_know() -> None:
    with pytest.raises(UserError, match="cores"):
        run_cell(replace(one_node("x"), cores_per_node=100_000), Path("run"), Path("log"), lambda _: None)


def test_conditions_that_changed_are_said(tmp_path: Path) -> None:
    with EmulatedCluster(nodes=1) as cluster:
        shaped = cluster.shaped
    cell = replace(CELL, nodes=1, link="unshaped" if shaped else "1gbit")
    with pytest.raises(CellFailed):
        run_cell(cell, tmp_path / "run", tmp_path / "log", lambda _: None)
