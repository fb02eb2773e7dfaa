from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bireme.data import TokenSet

if TYPE_CHECKING:
    from tests.data.made_tokens import made_of
else:
    from made_tokens import made_of


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("BIREME_CACHE", str(folder))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three documents in two folders, in an order that is not the one they were made in."""
    root = tmp_path / "texts"
    (root / "b").mkdir(parents=True)
    (root / "c.txt").write_text("third")
    (root / "b" / "two.txt").write_text("zwöi")
    (root / "a.txt").write_text("first")
    return root


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], TokenSet]:
    """made(1000): a token set of so many tokens."""
    root = tmp_path_factory.mktemp("made")
    return lambda count: made_of(root, count)
