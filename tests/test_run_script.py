"""`bireme run`: a script as it is, its arguments, its exit code, and which of its optimizers makes the steps."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from bireme.after_import import after_import
from bireme.cli import _script_apart
from bireme.errors import UserError
from bireme.run_reader import read_run
from bireme.run_script import LeadingOptimizer, default_options, run_command

TRAINS = """
import os, sys
print(__name__, sys.argv[1:], os.path.basename(__file__), "torch" in sys.modules)
import beside
import torch
model = torch.nn.Linear(4, 4)
first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
for number in range(6):
    model(torch.ones(2, 4)).sum().backward()
    first.step()
    second.step()
    first.zero_grad()
"""


def bireme(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bireme", "run", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_a_script_gets_what_python_would_give_it(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "beside.py").write_text("")
    (inner / "train.py").write_text(TRAINS)
    done = bireme(tmp_path, "--run-dir", "out", "inner/train.py", "--lr", "3", "--help", "-m")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "__main__ ['--lr', '3', '--help', '-m'] train.py False\n"
    assert done.stderr == "run directory: out  (bireme report out)\n"
    run = read_run(tmp_path / "out")
    assert len(run.steps) == 5  # those of one optimizer, from its second step on
    assert run.facts["status"] == "finished" and run.facts["command"][0] == "inner/train.py"
    again = bireme(tmp_path, "--run-dir", "out", "inner/train.py")
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr == "bireme: run out exists: choose another --run-dir\n"


def test_a_script_that_fails_shows_its_own_traceback(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def deep():\n    1 / 0\n\n\ndeep()\n")
    done = bireme(tmp_path, "bad.py")
    assert done.returncode == 1
    frames = [line for line in done.stderr.splitlines() if line.startswith("  File")]
    assert len(frames) == 2 and all("bad.py" in frame for frame in frames)
    assert done.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("print('done')", 0, "no optimizer of PyTorch stepped in this process"),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('because')", 1, "because"),
    ],
)
def test_the_exit_code_is_the_scripts(
    text: str, code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "bireme.observe.monitor", raising=False)  # of other tests: no script here has one
    assert run_command([str(script)], False, default_options(tmp_path / "out")) == code
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "give a script"),
        (["nothere.py"], r"script nothere\.py does not exist"),
        (["."], "is a directory without a __main__"),
    ],
)
def test_bad_scripts_are_one_line(words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=says):
        run_command(words, False, default_options(tmp_path / "out"))


@pytest.mark.parametrize(
    ("given", "parsed"),
    [
        (["run", "a.py", "--x"], ["run", "--", "a.py", "--x"]),
        (["run", "--run-dir", "d", "a.py", "-m"], ["run", "--run-dir", "d", "--", "a.py", "-m"]),
        (["run", "--run-dir=d", "-m", "a.b", "x"], ["run", "--run-dir=d", "-m", "--", "a.b", "x"]),
        (["run", "--", "a.py"], ["run", "--", "a.py"]),
        (["run", "--help"], ["run", "--help"]),
        (["run"], ["run"]),
    ],
)
def test_what_follows_the_script_is_the_scripts(given: list[str], parsed: list[str]) -> None:
    assert _script_apart(given) == parsed


def test_the_leading_optimizer() -> None:
    first, second, third = object(), object(), object()
    lead = LeadingOptimizer()
    assert [lead.leads(each) for each in (first, second, second, first, second, first)] == [
        True,
        False,
        False,
        True,
        False,
        True,
    ]
    # The first one has finished its part of the training.
    assert [lead.leads(second) for _ in range(4)] == [False, False, True, True]
    assert [lead.leads(each) for each in (third, second, third)] == [False, True, False]


def test_after_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_later.py").write_text("value = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[int] = []

    def note(module: ModuleType) -> None:
        seen.append(module.value)

    finders = list(sys.meta_path)
    after_import("imported_later", note)
    for _ in range(2):  # who only asks whether there is one
        assert importlib.util.find_spec("imported_later") is not None
    assert seen == []
    import imported_later  # type: ignore[import-not-found]

    assert seen == [7] and imported_later.__spec__.origin == str(tmp_path / "imported_later.py")
    assert sys.meta_path == finders
    after_import("imported_later", note)
    assert seen == [7, 7]
    del sys.modules["imported_later"]
