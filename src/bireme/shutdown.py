"""Ctrl-C, SIGTERM, SIGUSR1: a stop at the next step boundary, and an end within seconds also when a rank is stuck."""

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self

STUCK_AFTER_S = 2.0  # a rank that does not reach its next step by then waits for one that has stopped
SAVE_S = 7.0  # what is left for saving the record of a rank that is stuck
_TURN_S = 0.05
REQUEUE = 75  # EX_TEMPFAIL: schedulers may start the job again


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop. `exit_code` is 128 + the signal, as shells expect, unless another is given."""

    def __init__(self, signal_number: int, exit_code: int | None = None):
        super().__init__("Ctrl-C" if signal_number == signal.SIGINT else signal.Signals(signal_number).name)
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number if exit_code is None else exit_code


class StopRequest:
    """`with` block in which SIGINT and SIGTERM (or other `signals`) only ask: the loop calls `check` at each step
    boundary, or reads `signal` and calls `agreed` when it is on its way out.

    The thread may be blocked inside a collective, waiting for a rank that has stopped already: no Python handler
    runs there. A watcher thread is woken by the signal itself (`set_wakeup_fd`); after `stuck_after_s` without an end
    of the block it saves what can be saved by calling `on_stuck(reason)`, and ends the process. Time inside
    `patiently()` does not count. Must be entered on the main thread; elsewhere it does nothing.
    """

    def __init__(self, signals: tuple[signal.Signals, ...] = (signal.SIGINT, signal.SIGTERM)) -> None:
        self.on_stuck: Callable[[str], None] = lambda reason: None
        self.stuck_after_s = STUCK_AFTER_S
        self.signal = 0  # the first that came
        self._signals = signals
        self._left = threading.Event()
        self._agreed = False
        self._patient = False
        self._previous: dict[int, object] = {}
        self._previous_fd = -1
        self._pipe: tuple[int, int] | None = None
        self._watcher: threading.Thread | None = None

    def check(self) -> None:
        """Raises Interrupted when a stop was asked for."""
        if self.signal:
            raise Interrupted(self.signal)

    def agreed(self, signal_number: int) -> None:
        """The loop ends, in order, for this signal, which another rank may have got: nobody needs to watch. Who presses
        Ctrl-C once more does not want to wait."""
        self.signal = self.signal or signal_number
        self._agreed = True
        self.finishing()

    @contextmanager
    def patiently(self) -> Iterator[None]:
        """A `with` block that may take long, for a reason: nobody takes it for stuck."""
        self._patient = True
        try:
            yield
        finally:
            self._patient = False

    def finishing(self) -> None:
        """The loop has made its last step: a signal changes nothing any more, only a second Ctrl-C does."""
        self._left.set()
        if self._pipe is not None:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _handle(self, signal_number: int, _frame: FrameType | None) -> None:
        self.signal = self.signal or signal_number

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        self._pipe = read_end, write_end
        self._previous_fd = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in self._signals:
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
            if self._agreed and number != signal.SIGINT:
                handler = signal.SIG_IGN  # launchers repeat themselves, and the process is about to end
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._previous_fd)
        read_end, write_end = self._pipe
        os.close(write_end)
        self._pipe = None
        self._left.set()
        # What `on_stuck` holds (process groups) must not go with the watcher's last breath: a thread that waits for the
        # interpreter while that ends is ended inside C++, and the process aborts.
        self.on_stuck = lambda reason: None
        if self._watcher is not None:
            self._watcher.join(self.stuck_after_s + SAVE_S)
            if not self._watcher.is_alive():
                os.close(read_end)  # not sooner: a signal that is written to a pipe nobody reads is an error

    def _watch(self, read_end: int) -> None:
        number = 0
        while number not in self._signals:
            select.select([read_end], [], [])
            woken_by = os.read(read_end, 1)
            if not woken_by:  # the block was left
                return
            number = woken_by[0]
        self.signal = self.signal or number
        if not self._is_stuck():
            return
        ends = time.monotonic() + SAVE_S
        # In a thread of its own: whatever becomes of it, the process ends.
        saver = threading.Thread(target=self.on_stuck, args=(str(Interrupted(number)),), daemon=True)
        saver.start()
        saver.join(SAVE_S)
        if not self._left.wait(max(0.0, ends - time.monotonic())):
            os._exit(128 + number)

    def _is_stuck(self) -> bool:
        """Whether the block was not left in time."""
        spent_s = 0.0
        while spent_s < self.stuck_after_s:
            if self._left.wait(_TURN_S):
                return False
            spent_s += 0.0 if self._patient else _TURN_S
        return True
