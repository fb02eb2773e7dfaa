"""`bireme watch` as it is used: in pipes, in a terminal, and in a terminal multiplexer."""

import fcntl
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bireme.errors import UserError
from bireme.record import RunWriter
from bireme.watch import command as watch_program
from bireme.watch import watch_command

if TYPE_CHECKING:
    from tests.watch.made_watched import facts, line, verdict, writer
else:
    from made_watched import facts, line, verdict, writer

PROGRAM = (
    "import sys; from pathlib import Path; from bireme.watch import watch_command; "
    "sys.exit(watch_command(Path(sys.argv[1]), float(sys.argv[2])))"
)
LEFT = b"\x1b[?1049l"  # the alternate screen
CURSOR = b"\x1b[?25h"
WITHIN_S = 30.0  # on a busy machine


def command(run: Path, every_s: float = 0.1) -> list[str]:
    return [sys.executable, "-c", PROGRAM, str(run), str(every_s)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def killed(run: Path) -> None:
    """A run whose writer was killed: it still says `running`."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    host = os.uname().nodename
    writing = writer(run, last=5, ranks=[{"rank": 0, "host": host, "pid": process.pid}])
    writing.close()


# --- not a terminal ---


def test_once_prints_the_view_as_text(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run.mkdir()
    assert watch_command(run, once=True) == 0
    assert "no run here yet: waiting for run.json" in capsys.readouterr().out
    writing = writer(run)
    writing.event("verdict", **verdict())
    writing.close()
    assert watch_command(run, once=True) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text and "step 10/100" in text and "rank 1 " in text and "verdict: rank 1 takes 50 ms" in text


def test_lines_until_the_run_has_finished(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run.mkdir()

    def train() -> None:
        time.sleep(0.2)
        writing = writer(run, last=10)
        writing.event("evaluation", step=10, loss=2.5)
        time.sleep(0.3)
        writing.steps([line(11)])
        writing.finish("finished")
        writing.close()

    thread = threading.Thread(target=train)
    thread.start()
    assert watch_command(run, every_s=0.05) == 0
    thread.join()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "no run here yet: waiting for run.json" and lines[-1] == "finished"
    assert [text.split("  ")[0] for text in lines if text.startswith("step ")][-1] == "step 11/100"
    assert sum("evaluation after step 10: loss 2.5" in text for text in lines) == 1
    assert any(text.endswith("2 ranks on 1 node | ddp | toy") for text in lines)


@pytest.mark.parametrize(
    ("how", "said", "exit_code"),
    [("finished", "finished", 0), ("failed", "failed: no memory", 1), ("interrupted", "interrupted: no memory", 1)],
)
def test_the_exit_code_says_how_it_ended(
    run: Path, capsys: pytest.CaptureFixture[str], how: str, said: str, exit_code: int
) -> None:
    writing = writer(run)
    writing.finish(how, None if how == "finished" else "no memory")
    writing.close()
    assert watch_command(run, every_s=0.05) == exit_code
    assert capsys.readouterr().out.splitlines()[-1] == said


def test_a_killed_run_ends_the_lines(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_program, "_GIVEN_UP_AFTER_S", 0.2)
    killed(run)
    assert watch_command(run, every_s=0.05) == 1
    assert re.fullmatch(
        r"killed: the process that wrote it \(pid \d+\) is gone", capsys.readouterr().out.splitlines()[-1]
    )


def test_a_killed_run_has_time_to_be_resumed_from_when_it_was_found_killed(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(run)
    os.utime(run / "steps.jsonl", (time.time() - 100,) * 2)  # its last step took long
    looks = 0

    def resumed_by_a_launcher(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            again = RunWriter(run, facts(first_step=6), resume_after=5)
            again.steps([line(6)])
            again.finish("finished")
            again.close()

    monkeypatch.setattr(watch_program.time, "sleep", resumed_by_a_launcher)
    assert watch_command(run, every_s=0.05) == 0
    said = capsys.readouterr().out.splitlines()
    assert any(text.startswith("killed: ") for text in said) and said[-1] == "finished"


def test_a_pipe_is_no_terminal_whatever_the_environment_says(run: Path) -> None:
    writing = writer(run)
    writing.finish("finished")
    writing.close()
    environment = {**os.environ, "FORCE_COLOR": "1", "TTY_COMPATIBLE": "1", "TERM": "xterm-256color"}
    watched = subprocess.run(command(run), capture_output=True, text=True, env=environment, timeout=60)
    assert watched.returncode == 0 and watched.stderr == ""
    assert watched.stdout.splitlines()[-1] == "finished" and "\x1b" not in watched.stdout


def test_a_long_history_is_not_told_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writing = writer(run, last=200)
    for step in range(60):
        writing.event("evaluation", step=step, loss=2.5)
    writing.finish("finished")
    writing.close()
    watch_command(run, every_s=0.05)
    assert len(capsys.readouterr().out.splitlines()) == 1 + 9 + 1 + 1


@pytest.mark.parametrize("every_s", [0.0, -1.0, float("nan"), 1e9])
def test_bad_input_is_one_line(run: Path, every_s: float) -> None:
    with pytest.raises(UserError, match="does not exist"):
        watch_command(run)
    run.mkdir()
    with pytest.raises(UserError, match="--every"):
        watch_command(run, every_s)


# --- a terminal ---


class Terminal:
    """A program on a terminal of its own, 80 x 24."""

    def __init__(self, run: Path):
        self.master, self.slave = pty.openpty()
        self.resize(24, 80)
        self.before = termios.tcgetattr(self.slave)
        environment = {**os.environ, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            command(run),
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0) and None,
        )
        self.output = b""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def see(self, text: bytes) -> None:
        """Waits until it has been written since the last call."""
        deadline = time.monotonic() + WITHIN_S
        while text not in self.output:
            if time.monotonic() > deadline:
                raise AssertionError(f"{text!r} did not come: {self.output[-2000:]!r}")
            self._read()
        self.output = b""

    def _read(self) -> None:
        if select.select([self.master], [], [], 0.1)[0]:
            self.output += os.read(self.master, 1 << 16)

    def end(self) -> int:
        """The exit code, once the program has ended."""
        deadline = time.monotonic() + WITHIN_S
        while self.process.poll() is None and time.monotonic() < deadline:
            self._read()
        while select.select([self.master], [], [], 0)[0]:
            self.output += os.read(self.master, 1 << 16)
        return self.process.wait(timeout=1)

    def is_as_before(self) -> bool:
        return termios.tcgetattr(self.slave) == self.before and LEFT in self.output and CURSOR in self.output

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for descriptor in (self.master, self.slave):
            if descriptor >= 0:
                os.close(descriptor)


@pytest.fixture
def terminal() -> Iterator[Callable[[Path], Terminal]]:
    opened: list[Terminal] = []

    def open_terminal(run: Path) -> Terminal:
        opened.append(Terminal(run))
        return opened[-1]

    yield open_terminal
    for each in opened:
        each.close()


ENDS: dict[str, tuple[Callable[[Terminal], Any], int]] = {
    "q": (lambda at: at.type(b"q"), 0),
    "Ctrl-C": (lambda at: at.type(b"\x03"), 130),
    "SIGTERM": (lambda at: at.process.terminate(), 143),
    "SIGHUP": (lambda at: at.process.send_signal(signal.SIGHUP), 129),
}


@pytest.mark.parametrize("how", ENDS)
def test_the_terminal_is_left_as_it_was(run: Path, terminal: Callable[[Path], Terminal], how: str) -> None:
    writer(run).close()
    at = terminal(run)
    at.see(b"step 10/100")
    assert not termios.tcgetattr(at.slave)[3] & termios.ECHO, "keys are not shown"
    end, exit_code = ENDS[how]
    end(at)
    assert at.end() == exit_code
    assert at.is_as_before()
    assert b"Traceback" not in at.output


def test_a_closed_terminal_ends_it(run: Path, terminal: Callable[[Path], Terminal]) -> None:
    writer(run).close()
    at = terminal(run)
    at.see(b"step 10/100")
    for descriptor in (at.master, at.slave):
        os.close(descriptor)
    at.master = at.slave = -1
    assert at.process.wait(timeout=WITHIN_S) != 0


def test_ctrl_z_gives_the_terminal_back_until_it_goes_on(run: Path, terminal: Callable[[Path], Terminal]) -> None:
    writer(run).close()
    at = terminal(run)
    at.see(b"step 10/100")
    at.type(b"\x1a")
    at.see(LEFT)
    deadline = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline:  # as a shell sees it
        stopped = os.waitid(os.P_PID, at.process.pid, os.WSTOPPED | os.WNOWAIT | os.WNOHANG)
        if stopped is not None:
            break
        time.sleep(0.02)
    assert stopped is not None and stopped.si_status == signal.SIGSTOP
    assert termios.tcgetattr(at.slave) == at.before
    at.process.send_signal(signal.SIGCONT)
    at.see(b"step 10/100")
    at.type(b"q")
    assert at.end() == 0 and at.is_as_before()


# --- a terminal multiplexer ---


class Tmux:
    def __init__(self, folder: Path):
        self._tmux = ["tmux", "-S", str(folder / "tmux"), "-f", "/dev/null"]
        self("new-session", "-d", "-x", "100", "-y", "30", "env", "PS1=$ ", "COLUMNS=80", "sh")

    def __call__(self, *arguments: str) -> str:
        return subprocess.run([*self._tmux, *arguments], capture_output=True, text=True, check=True).stdout

    def screen(self) -> str:
        return self("capture-pane", "-p")

    def type(self, line: str) -> None:
        self("send-keys", "-l", line)
        self("send-keys", "Enter")

    def see(self, *texts: str) -> str:
        deadline = time.monotonic() + WITHIN_S
        while time.monotonic() < deadline:
            screen = self.screen()
            if all(text in screen for text in texts):
                return screen
            time.sleep(0.05)
        raise AssertionError(f"not all of {texts} came:\n{screen}")


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[Tmux]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    tmux = Tmux(tmp_path)
    yield tmux
    tmux("kill-server")


def test_in_a_terminal_multiplexer(tmux: Tmux, tmp_path: Path) -> None:
    """A run that grows, is killed, has finished, is not there yet; on one terminal after the other has been resized."""
    program = tmp_path / "watch.sh"
    program.write_text("exec " + " ".join(f"'{word}'" for word in command(Path("RUN"))).replace("'RUN'", '"$1"'))

    def watch(run: Path) -> None:
        tmux.type(f"clear; sh {program} {run}; echo ended with $?")

    def quit_() -> None:
        tmux("send-keys", "q")
        tmux.see("ended with 0")
        tmux.type("clear; echo the terminal is $((40 + 2))")
        screen = tmux.see("the terminal is 42")
        assert "step by state" not in screen and "q quits" not in screen

    growing = tmp_path / "growing"
    growing.mkdir()
    watch(growing)
    tmux.see("no run here yet: waiting for run.json", "q quits")
    writing = writer(growing, last=3, size=4, nodes=2)
    screen = tmux.see("step 3/100", "4 ranks on 2 nodes", "running")
    assert "rank 1 on node0" in screen and "node node1" in screen and "█" in screen
    writing.steps([line(step, size=4) for step in range(4, 40)])
    writing.event("verdict", **verdict())
    tmux.see("step 39/100", "verdict: rank 1 takes 50 ms more", "loss 3.6100")
    for columns, rows in ((40, 12), (160, 50), (100, 30)):
        tmux("resize-window", "-x", str(columns), "-y", str(rows))
        screen = tmux.see("2 nodes | ddp", "q quits")
        assert max(map(len, screen.splitlines())) <= columns and len(screen.splitlines()) <= rows
    writing.finish("finished")
    writing.close()
    tmux.see("finished", "step 39/100")
    quit_()

    killed_run = tmp_path / "killed"
    killed(killed_run)
    watch(killed_run)
    tmux.see("step 5/100", "killed: the process that wrote it")
    quit_()
