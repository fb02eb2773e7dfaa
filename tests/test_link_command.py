import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from bireme import cli
from bireme.errors import UserError
from bireme.link_command import check_writable, parse_bytes
from bireme.links import OPERATIONS, LinkTable

if TYPE_CHECKING:
    from tests.made_links import make_table
else:
    from made_links import make_table
LAUNCHER = ("MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "NODE_RANK", "NNODES", "TORCHELASTIC_", "BIREME_", "SLURM_")
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}
LINKS = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "bireme", "links"]
SETTINGS = {**CLEAN, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    ("text", "bytes"),
    [
        ("1048576", 1 << 20),
        ("8MiB", 8 << 20),
        ("64KiB", 65536),
        ("1GB", 10**9),
        ("1.5 mib", 3 << 19),
        ("2kb", 2000),
        ("3 B", 3),
        ("1TiB", 1 << 40),
    ],
)
def test_a_size_is_read(text: str, bytes: int) -> None:
    assert parse_bytes(text) == bytes


@pytest.mark.parametrize(
    "text", ["", "MiB", "-1", "1e6", "8 Mibi", "8mb/s", "nan", "inf", "٣", "9" * 400, "1,5MiB", "0x10"]
)
def test_what_is_no_size_is_said(text: str) -> None:
    with pytest.raises(UserError, match="8MiB"):
        parse_bytes(text)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """One process without a launcher, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # which the command would set for good
    for name in set(os.environ) - set(CLEAN):
        monkeypatch.delenv(name)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "at least two ranks: torchrun"),
        (["--max-bytes", "8 apples"], "'8 apples' is not understood"),
        (["--max-bytes", "100"], "below the smallest message"),
        (["--seconds", "0"], "--seconds 0"),
        (["--seconds", "-3"], "--seconds -3"),
        (["--seconds", "nan"], "--seconds nan"),
        (["--seconds", "inf"], "--seconds inf"),
        (["--device", "tpu"], "--device tpu"),
        (["--device", "cuda"], "no GPU here"),
        (["--read", "nothing.json"], "nothing.json does not exist"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], said: str, alone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(cli.app, ["links", *arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and said in lines[0]
    assert list(alone.iterdir()) == []


def test_a_saved_table_is_shown_without_torch(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    make_table().save(path)
    code = (
        "import sys; from bireme import cli; "
        f"code = cli.run(cli.app, ['links', '--read', {str(path)!r}]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "3 ranks on 2 nodes" in done.stdout
    assert [each.name for each in tmp_path.iterdir()] == ["links.json"], "reading writes nothing"


def test_a_saved_table_as_json(alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_table().save(Path("links.json"))
    assert cli.run(cli.app, ["links", "--read", "links.json", "--json"]) == 0
    assert orjson.loads(capsys.readouterr().out) == orjson.loads(Path("links.json").read_bytes())


def links(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LINKS, *arguments],
        cwd=folder,
        env={**SETTINGS, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("bireme: ")]


def test_measured_under_torchrun(tmp_path: Path) -> None:
    arguments = ("--max-bytes", "16KiB", "--seconds", "10", "--out", "here.json")
    done = links(tmp_path, *arguments, BIREME_LINK="unshaped")
    assert done.returncode == 0, done.stderr
    assert "here.json and here.png" in done.stdout and "unshaped" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    table = LinkTable.load(tmp_path / "here.json")
    assert len(table.measurements) == 3 * len(OPERATIONS) and table.link == "unshaped"
    assert (tmp_path / "here.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["here.json", "here.png"]


@pytest.mark.slow
def test_a_place_that_cannot_be_written_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    done = links(tmp_path, "--seconds", "100000", "--out", "none/links.json")
    assert done.returncode != 0
    assert said(done) == ["bireme: rank 0: cannot write --out none/links.json: No such file or directory"], done.stderr


def test_where_a_table_can_be_saved(tmp_path: Path) -> None:
    (tmp_path / "taken.json").mkdir()
    for name, what in (("taken.json", "is a directory"), ("links.png", "does not end in .json")):
        with pytest.raises(UserError, match=what):
            check_writable(tmp_path / name)
    (tmp_path / "before.json").write_text("kept")
    for name in ("before.json", "new.json"):
        check_writable(tmp_path / name)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["before.json", "taken.json"]
    assert (tmp_path / "before.json").read_text() == "kept"


def start(folder: Path) -> tuple[Any, list[int]]:
    """`bireme links` with a lot of time, and the process ids of its two ranks once they measure."""
    process = subprocess.Popen(
        [*LINKS, "--seconds", "600"],
        cwd=folder,
        env=SETTINGS,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    import psutil

    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        children = [each for each in psutil.Process(process.pid).children() if each.is_running()]
        # Connections between the ranks: those of the process group and of the side group.
        if len(children) == 2 and all(len(each.net_connections()) >= 4 for each in children):
            time.sleep(2)
            return process, [each.pid for each in children]
        time.sleep(0.2)
    process.kill()
    raise TimeoutError("the ranks did not begin")


@pytest.mark.slow
def test_a_lost_rank_ends_in_one_line(tmp_path: Path) -> None:
    process, children = start(tmp_path)
    os.kill(children[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    lines = [line for line in errors.splitlines() if line.startswith("bireme: ")]
    assert process.returncode != 0
    # torchrun may end the survivor before it has said anything.
    assert len(lines) <= 1 and all("is gone (nothing was saved)" in line for line in lines), errors
    assert "Traceback" not in errors.split("torch/distributed/elastic")[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_ctrl_c_ends_in_one_line(tmp_path: Path) -> None:
    process, _ = start(tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert "bireme: stopped by Ctrl-C; nothing was saved" in errors, errors
    assert list(tmp_path.iterdir()) == []
