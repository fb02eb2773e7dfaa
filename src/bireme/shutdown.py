"""Ctrl-C and SIGTERM: a stop at the next step boundary, and an end within seconds also when a rank is stuck."""

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

STUCK_AFTER_S = 2.0  # a rank that does not reach its next step by then waits for one that has stopped
END_AFTER_S = 9.0


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop; `exit_code` is 128 + the signal, as shells expect."""

    def __init__(self, signal_number: int):
        super().__init__("Ctrl-C" if signal_number == signal.SIGINT else signal.Signals(signal_number).name)
        self.exit_code = 128 + signal_number


class StopRequest:
    """`with` block in which SIGINT and SIGTERM only ask: the loop calls `check` at each step boundary.

    The thread may be blocked inside a collective, waiting for a rank that has stopped already: no Python handler
    runs there. A watcher thread is woken by the signal itself (`set_wakeup_fd`), saves what can be saved by calling
    `on_stuck(reason)`, and ends the process. Must be entered on the main thread; elsewhere it does nothing.
    """

    def __init__(self) -> None:
        self.on_stuck: Callable[[str], None] = lambda reason: None
        self._signal = 0
        self._left = threading.Event()
        self._previous: dict[int, object] = {}
        self._previous_fd = -1
        self._pipe: tuple[int, int] | None = None
        self._watcher: threading.Thread | None = None

    def check(self) -> None:
        """Raises Interrupted when a stop was asked for."""
        if self._signal:
            raise Interrupted(self._signal)

    def _handle(self, signal_number: int, _frame: FrameType | None) -> None:
        self._signal = self._signal or signal_number

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        self._pipe = read_end, write_end
        self._previous_fd = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        self._watcher = threading.Thread(target=self._watch, args=(read_end,), name="bireme-shutdown", daemon=True)
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pipe is None:
            return
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._previous_fd)
        os.close(self._pipe[1])
        self._pipe = None
        self._left.set()
        # What `on_stuck` holds (process groups) must not go with the watcher's last breath: a thread that waits for the
        # interpreter while that ends is ended inside C++, and the process aborts.
        self.on_stuck = lambda reason: None
        if self._watcher is not None:
            self._watcher.join(END_AFTER_S)

    def _watch(self, read_end: int) -> None:
        number = 0
        while number not in (signal.SIGINT, signal.SIGTERM):
            select.select([read_end], [], [])
            woken_by = os.read(read_end, 1)
            if not woken_by:  # the block was left
                os.close(read_end)
                return
            number = woken_by[0]
        self._signal = self._signal or number
        started = time.monotonic()
        if not self._left.wait(STUCK_AFTER_S):
            # In a thread of its own: whatever becomes of it, the process ends.
            saver = threading.Thread(target=self.on_stuck, args=(str(Interrupted(number)),), daemon=True)
            saver.start()
            saver.join(max(0.0, started + END_AFTER_S - time.monotonic()))
        self._left.wait(max(0.0, started + END_AFTER_S - time.monotonic()))
        if not self._left.is_set():
            os._exit(128 + number)
        os.close(read_end)
