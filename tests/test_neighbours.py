"""Who of a node's ranks is gone, and that it was for lack of memory where the kernel says so."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bireme import neighbours
from bireme.neighbours import Neighbours

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def ranks(*pids: tuple[str, int]) -> list[dict[str, Any]]:
    return [{"rank": rank, "node": node, "pid": pid} for rank, (node, pid) in enumerate(pids)]


def test_a_killed_rank_is_named_and_others_are_not(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "_WITHIN_S", 0.1)
    me = os.getpid()
    known = Neighbours(ranks(("a", me), ("a", process.pid), ("b", 1), ("a", os.getppid())), 0)
    assert known.gone() is None
    process.kill()  # not waited for: dead, but not yet buried
    assert known.gone() == f"rank 1 on a (pid {process.pid}) is gone"
    process.wait()
    assert known.gone() == f"rank 1 on a (pid {process.pid}) is gone"


def test_what_is_not_visible_from_here_is_not_called_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "_WITHIN_S", 0.0)
    assert Neighbours(ranks(("a", os.getpid()), ("a", 2**22 + 1)), 0).gone() is None


@pytest.mark.parametrize("where", ["vmstat", "memory.events"])
def test_lack_of_memory_is_said(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    """B18: exit code -9 means nothing to a user."""
    counter = tmp_path / where
    counter.write_text("nr_free_pages 1000\noom_kill 4\n")
    if where == "vmstat":
        monkeypatch.setattr(neighbours, "_counter", lambda path, name, real=neighbours._counter: real(counter, name))
    else:
        monkeypatch.setattr(neighbours, "_cgroup_events", lambda: [counter])
    known = Neighbours(ranks(("a", os.getpid()), ("a", process.pid)), 0)
    before = neighbours.out_of_memory_kills()
    process.kill()
    process.wait()
    counter.write_text(f"nr_free_pages 10\noom_kill {max(before, 4) + 1}\n")
    said = known.gone()
    assert said is not None and f"rank 1 on a (pid {process.pid}) is gone" in said
    assert "killed for lack of memory: the kernel has killed 1 process for that" in said
