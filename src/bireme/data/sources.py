"""The files that a corpus is made of: found, in order, without reading them."""

import os
import platform
import re
import stat
import sysconfig
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from bireme.data.shards import reason
from bireme.errors import UserError, nearest

STDLIB = "stdlib"

# Not part of the "stdlib" corpus: what is not the library, or differs between two builds of the same Python.
_NOT_STDLIB_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_NOT_STDLIB = re.compile(r"config-|_sysconfigdata|(site|user)customize\.py")


@dataclass(slots=True)
class Found:
    """The files that make up a corpus, as they were found."""

    name: str  # short, fit for the name of a file
    source: str  # for people
    files: dict[str, tuple[Path, os.stat_result]] = field(default_factory=dict)  # by sorted relative path
    named: bool = False  # the user named this one file: when it cannot be used, that is an error
    skipped: Counter[str] = field(default_factory=Counter)  # by reason

    def fingerprint(self, salt: str) -> str:
        """Changes when the files do. They are not read."""
        digest = blake2b(salt.encode(), digest_size=16)
        for relative, (_, status) in self.files.items():
            digest.update(b"\0%b\0%d %d" % (os.fsencode(relative), status.st_size, status.st_mtime_ns))
        return digest.hexdigest()


def listed_counts(counts: Counter[str]) -> str:
    """For example ``"2 binary, 1 hidden"``."""
    return ", ".join(f"{count:,} {what}" for what, count in sorted(counts.items()) if count)


def find(name_or_path: str, excluded: Path) -> Found:
    """The files of a corpus, in order, but for what is below the folder `excluded`. They are not read yet."""
    if name_or_path == STDLIB:
        found = Found(STDLIB, f"the standard library of Python {platform.python_version()}")
        _walk(found, Path(sysconfig.get_path("stdlib")), excluded, _in_stdlib)
        found.skipped.clear()  # not wanted, rather than skipped
        if not found.files:
            raise UserError(f"no sources of {found.source} are installed; give a text file or a folder as the corpus")
        return found
    try:
        status = os.stat(name_or_path)  # noqa: PTH116 (Path("") is the current folder, which was not meant)
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot read the corpus {name_or_path!r}: {reason(error)}{nearest(name_or_path, [STDLIB])}; "
            f'give "{STDLIB}", a text file, a folder, or prepared tokens'
        ) from error
    path = Path(os.path.realpath(name_or_path))
    found = Found(re.sub(r"[^A-Za-z0-9._-]", "_", path.name)[:40].lstrip(".") or "corpus", str(path))
    if stat.S_ISDIR(status.st_mode):
        _walk(found, path, excluded, _not_hidden)
    elif stat.S_ISREG(status.st_mode):
        found.files[path.name] = (path, status)
        found.named = True
    else:  # a pipe would be read without end
        raise UserError(f"the corpus {name_or_path!r} is neither a file nor a folder; save the text to a file first")
    return found


def _walk(found: Found, root: Path, excluded: Path, wanted: Callable[[str, bool], bool]) -> None:
    """Finds the wanted regular files under `root`. `wanted(name, whether it is a folder)`.

    Links to files are followed; links to folders are not, they could lead round in circles or anywhere.
    """

    def unreadable(error: OSError) -> None:
        if error.filename == str(root):
            raise UserError(f"cannot read the folder {str(root)!r}: {reason(error)}") from error
        found.skipped["unreadable"] += 1

    files: dict[str, tuple[Path, os.stat_result]] = {}
    for folder, folders, names in os.walk(root, onerror=unreadable):
        here = Path(folder)
        for name in names:
            path = here / name
            if not wanted(name, False):
                found.skipped["hidden"] += 1
                continue
            try:
                status = path.stat()
            except OSError:  # a dangling link, or removed in this moment
                found.skipped["unreadable"] += 1
                continue
            if stat.S_ISREG(status.st_mode):
                files[path.relative_to(root).as_posix()] = (path, status)
            else:
                found.skipped["not a file"] += 1
        shown = [name for name in folders if wanted(name, True)]
        found.skipped["hidden"] += len(folders) - len(shown)
        found.skipped["linked folder"] += sum((here / name).is_symlink() for name in shown)
        folders[:] = [name for name in shown if here / name != excluded]  # os.walk descends into these
    found.files = dict(sorted(files.items()))


def _not_hidden(name: str, folder: bool) -> bool:
    return not name.startswith(".")


def _in_stdlib(name: str, folder: bool) -> bool:
    if _NOT_STDLIB.match(name):
        return False
    return name not in _NOT_STDLIB_FOLDERS if folder else name.endswith(".py")
