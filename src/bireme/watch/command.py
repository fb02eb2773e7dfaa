"""`bireme watch`: the loop, the keys and the signals."""

import errno
import math
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from rich.console import Console, ConsoleDimensions, Group
from rich.live import Live

from bireme.errors import UserError
from bireme.watch.figures import FINISHED, KILLED, RUNNING_WELL, STOPPED, WAITING, figures, window_line
from bireme.watch.follow import Follower
from bireme.watch.view import ASCII_SHADES, SHADES, compose

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP, signal.SIGWINCH)
_PAST_NOTICES = 10  # of a run that has gone on for long
_GIVEN_UP_AFTER_S = 10.0  # a killed run that nobody has resumed by then has ended


def watch(run: Path, every_s: float, once: bool) -> int:
    """Exit code: of the view 0, or 128 + the signal that ended it; of plain lines 0 for a run that has finished, and 1
    for one that failed, was interrupted or killed."""
    if not (math.isfinite(every_s) and 0.05 <= every_s <= 3600):
        raise UserError(f"--every {every_s:g}: give the seconds between two looks, from 0.05 to 3600")
    follower = Follower(run)
    console = Console(highlight=False, markup=False, emoji=False)
    if once:
        return _print_once(follower, console)
    if not _is_terminal(console):
        return _print_lines(follower, every_s)
    return _show(follower, console, every_s)


def _is_terminal(console: Console) -> bool:
    """Whether there is a screen to draw on. With FORCE_COLOR in the environment rich would say so of a pipe, too."""
    try:
        drawn_on = os.isatty(console.file.fileno())
    except (OSError, ValueError):  # in memory, or closed
        return False
    return drawn_on and console.is_terminal and not console.is_dumb_terminal


def _shades(console: Console) -> dict[str, str]:
    return SHADES if console.encoding.lower().startswith("utf") else ASCII_SHADES


# --- plain text ---


def _print_once(follower: Follower, console: Console) -> int:
    while follower.look().more:
        pass
    for line in compose(figures(follower.seen, time.time()), console.width, shades=_shades(console)):
        print(_encodable(line.plain.rstrip()))
    return 0


def _print_lines(follower: Follower, every_s: float) -> int:
    """A line for each window of steps and for each event, until the run ends."""
    said, last_step = "", 0
    gone_since_s: float | None = None  # of the first look that found the writer gone
    while True:
        news = follower.look()
        now = figures(follower.seen, time.time())
        if said in ("", WAITING) and now.status != WAITING:
            _say(f"{now.name}: {now.what}")
        for notice in news.notices if said else news.notices[-_PAST_NOTICES:]:
            if notice.event != "status":  # it is said below
                _say(str(notice))
        new_steps = [step for step in news.steps if step.step != last_step]  # else a copy was read again
        if new_steps:
            last_step = new_steps[-1].step
            _say(window_line(now, len(new_steps)))
        if news.more:
            said = said or RUNNING_WELL
            continue
        if now.status not in (said, RUNNING_WELL):
            _say(now.sentence)
        said = now.status
        if now.status != KILLED:
            gone_since_s = None
        elif gone_since_s is None:  # a launcher may have yet to start the next attempt
            gone_since_s = time.monotonic()
        given_up = gone_since_s is not None and time.monotonic() - gone_since_s >= _GIVEN_UP_AFTER_S
        if given_up or now.status in (FINISHED, STOPPED):
            return 0 if now.status == FINISHED else 1
        time.sleep(every_s)


def _say(text: str) -> None:
    print(_encodable(text), flush=True)


def _encodable(text: str) -> str:
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # no output at all where the caller closed it
    return text.encode(encoding, "replace").decode(encoding)


# --- the view ---


def _show(follower: Follower, console: Console, every_s: float) -> int:
    """Until a key or a signal ends it. Ctrl-Z gives the terminal back for as long as the program is stopped."""
    keys = sys.stdin.fileno() if sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty() else None
    with _signals() as inbox:
        while True:
            try:
                with _keys_at_once(keys):
                    ended_by = _until_ended(follower, console, every_s, keys, inbox)
            except (OSError, termios.error) as error:
                if error.args[0] not in (errno.EIO, errno.EPIPE, errno.EBADF, errno.ENXIO):
                    raise
                return 128 + signal.SIGHUP  # the terminal is gone
            if ended_by != signal.SIGTSTP:
                return 0 if ended_by is None else 128 + ended_by
            os.kill(os.getpid(), signal.SIGSTOP)


def _until_ended(
    follower: Follower, console: Console, every_s: float, keys: int | None, inbox: int
) -> signal.Signals | None:
    """Shows the run until a signal comes; None: a key asks to quit."""
    shades = _shades(console)
    with Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        while True:
            more = follower.look().more
            width, height = _size(console)
            lines = compose(figures(follower.seen, time.time()), width, height, shades, keys is not None)
            live.update(Group(*lines), refresh=True)
            sources = [inbox] if keys is None else [inbox, keys]
            ready, _, _ = select.select(sources, [], [], 0 if more else every_s)
            if inbox in ready:
                for number in os.read(inbox, 64):
                    if number != signal.SIGWINCH:
                        return signal.Signals(number)
            if keys is not None and keys in ready:
                pressed = os.read(keys, 64)
                if not pressed or b"q" in pressed.lower():  # nothing: the terminal is gone
                    return None


def _size(console: Console) -> tuple[int, int]:
    """Columns and rows as they are now. COLUMNS in the environment, which rich would rather believe, does not follow a
    terminal that is resized."""
    width, height = os.get_terminal_size(console.file.fileno())
    if width > 0 and height > 0:
        console.size = ConsoleDimensions(width, height)
    return console.size


@contextmanager
def _signals() -> Iterator[int]:
    """A descriptor from which to read the numbers of signals that came, none of which does anything else."""
    reader, writer = os.pipe()
    for descriptor in (reader, writer):
        os.set_blocking(descriptor, False)
    before = {number: signal.signal(number, _ignored) for number in _SIGNALS}
    woken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(woken)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)


def _ignored(number: int, frame: FrameType | None) -> None:
    """Python writes the number where `set_wakeup_fd` says; that is all."""


@contextmanager
def _keys_at_once(keys: int | None) -> Iterator[None]:
    """Keys come one by one and are not shown."""
    if keys is None:
        yield
        return
    before = termios.tcgetattr(keys)
    tty.setcbreak(keys, termios.TCSANOW)
    try:
        yield
    finally:
        with suppress(termios.error):
            termios.tcsetattr(keys, termios.TCSANOW, before)
