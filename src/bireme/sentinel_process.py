"""What the kernel says of one process, also at the moment of its death. Standard library only."""

import contextlib
import fcntl
import os
import signal
import struct
import sys
from pathlib import Path

from bireme.neighbours import out_of_memory_kills

_INFO = struct.Struct("<QQ11Ii")  # struct pidfd_info, its first version
_INFO_EXIT = 1 << 3
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11  # Linux 6.15

# Sent to end a job, by people, launchers and schedulers: no failure of the rank that gets one.
_ORDERS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2})


class WatchedProcess:
    """The parent of this process. `descriptor`: readable once it is gone; -1 where the system has no such thing."""

    def __init__(self, process: int, thread: int):
        self.process = process
        self.descriptor = -1
        self._stat = Path(f"/proc/{process}/stat")
        self._thread_stat = Path(f"/proc/{process}/task/{thread}/stat")
        self._kills_before = out_of_memory_kills()
        with contextlib.suppress(OSError, AttributeError):
            self.descriptor = os.pidfd_open(process)

    def gone(self) -> bool:
        return os.getppid() != self.process or self.letter() in ("Z", "X", "")

    def letter(self) -> str:
        """R runs, S and D sleep, T is stopped, Z is dead; empty: there is none, S where there is no /proc."""
        fields = _fields(self._stat)
        if fields:
            return fields[0]
        return "" if sys.platform == "linux" or os.getppid() != self.process else "S"

    def computes(self) -> bool:
        """Whether the thread that trains is on a core, or would be if one were free."""
        fields = _fields(self._thread_stat)
        return bool(fields) and fields[0] == "R"

    def catches(self, number: int) -> bool:
        """Whether it has a handler for a signal, which would end it otherwise."""
        try:
            status = Path(f"/proc/{self.process}/status").read_text()
        except OSError:
            return False
        caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
        return bool(int(caught, 16) >> (number - 1) & 1)

    def signal(self, number: int) -> None:
        with contextlib.suppress(OSError):
            if self.descriptor >= 0:
                signal.pidfd_send_signal(self.descriptor, number)
            elif not self.gone():
                os.kill(self.process, number)

    def end(self) -> tuple[str, bool]:
        """How it has ended, in words, empty where nobody knows any more; and whether by an order."""
        status = self._exit_status()
        if status is None:
            return "", False
        number = os.WTERMSIG(status)
        if not number:
            return f"ended with exit code {os.WEXITSTATUS(status)} without a word", False
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = "a real-time signal"
        return f"was killed by signal {number} ({name})", number in _ORDERS

    def out_of_memory(self) -> int:
        """Processes killed for lack of memory here since the start."""
        return max(0, out_of_memory_kills() - self._kills_before)

    def _exit_status(self) -> int | None:
        fields = _fields(self._stat)  # for as long as nobody has taken note of its death
        if fields and fields[0] == "Z" and len(fields) > 49:
            return int(fields[49])
        info = bytearray(_INFO.pack(_INFO_EXIT, *[0] * 12, 0))
        try:
            fcntl.ioctl(self.descriptor, _GET_INFO, info)
        except OSError:
            return None
        mask, *_, status = _INFO.unpack(info)
        return int(status) if mask & _INFO_EXIT else None


def _fields(path: Path) -> list[str]:
    try:
        return path.read_text().rpartition(")")[2].split()
    except OSError:
        return []
