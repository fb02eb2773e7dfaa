"""Files that are there whole or not at all, also after the machine has lost power; and nothing but files is opened."""

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from bireme.errors import UserError


@contextmanager
def written_whole(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that becomes `path` at the end of the block; until then, and when the block fails, `path` stays
    as it was. A symbolic link stays, and what it leads to is written. Its folder is not synced (`sync_folder`).

    Raises OSError; also where there is a device, a pipe or a folder: nothing but a regular file is ever replaced.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink()


def not_a_link(path: Path) -> Path:
    """`path`, a name that the user did not give: UserError where it is a symbolic link, which in a folder that came
    from elsewhere could lead to any file."""
    if path.is_symlink():
        raise UserError(f"{path} is a symbolic link: name the file to write with --out FILE")
    return path


def open_regular(path: Path) -> IO[bytes]:
    """Opens a file to read. A pipe, device or socket in its place, which could keep the reader waiting for ever, is a
    UserError: it is not opened. Raises OSError."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise UserError(f"{path} is no regular file")
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")  # by now it may be a pipe


def sync_folder(folder: Path) -> None:
    """A new name is on disk only when the folder that it is in is. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
