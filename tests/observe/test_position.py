"""What is written into the shared block is what another process reads."""

import os
import random
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from bireme.observe.position import BLOCK_BYTES, MOST_GROUPS, RECENT, Position, PositionReader

PHASES = ("input", "forward", "backward")
OPERATIONS = ("all_reduce", "send")


def reader_of(position: Position) -> PositionReader:
    return PositionReader(position.descriptor, PHASES, OPERATIONS)


def test_another_process_reads_what_was_written() -> None:
    position = Position(7, groups=2)
    position.begin_step(8)
    position.enter(1)
    position.issued(1, 3, 0, 4096)
    position.waits(1, 1, 2)
    package = str(Path(sys.modules[Position.__module__].__file__ or "").parents[2])
    program = (
        f"import sys; sys.path.insert(0, {package!r})\n"
        "from bireme.observe.position import PositionReader\n"
        f"reader = PositionReader({position.descriptor}, {PHASES!r}, {OPERATIONS!r})\n"
        "read = reader.read(); del read['in_phase_s']\n"
        "print(reader.process, reader.first_step, read, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-I", "-S", "-c", program]
    said = subprocess.run(command, pass_fds=[position.descriptor], check=True, capture_output=True, text=True).stdout
    expected = {
        "step": 8,
        "phase": "forward",
        "wait": ["send", 1, 2],
        "groups": {"1": [[3, "all_reduce", 4096, False]]},
    }
    assert said.strip() == f"{os.getpid()} 7 {expected} False"
    position.close()


def test_every_kind_of_movement_is_seen() -> None:
    position = Position(1, groups=1)
    reader = reader_of(position)
    assert reader.moved() and not reader.moved()
    position.issued(0, 0, 0, 8)
    for move in (
        lambda: position.begin_step(2),
        lambda: position.enter(0),
        position.alive,
        lambda: position.issued(0, 1, 0, 8),
        lambda: position.finished(0, 0),
        lambda: position.waits(0, 0, -1),
        position.no_wait,
    ):
        move()
        assert reader.moved() and not reader.moved()


def test_before_the_first_step_there_is_no_phase() -> None:
    read = reader_of(Position(5)).read()
    assert (read["step"], read["phase"], read["wait"], read["groups"]) == (5, None, None, {})


@given(
    st.lists(st.tuples(st.integers(0, MOST_GROUPS + 3), st.booleans()), max_size=80),
    st.integers(1, MOST_GROUPS + 5),
)
def test_the_last_collectives_of_each_group_are_kept(history: list[tuple[int, bool]], groups: int) -> None:
    position = Position(1, groups)
    counts: dict[int, list[bool]] = {}
    for group, finished in history:
        number = len(counts.setdefault(group, []))
        position.issued(group, number, 0, 8 * number)
        if finished:
            position.finished(group, number)
        counts[group].append(finished)
    assert reader_of(position).read()["groups"] == {
        str(group): [[n, "all_reduce", 8 * n, each] for n, each in enumerate(done)][-RECENT:]
        for group, done in counts.items()
        if group < min(groups, MOST_GROUPS)
    }
    position.close()


@given(st.integers(0, 1 << 32))
def test_a_torn_block_is_read_without_an_error(seed: int) -> None:
    position = Position(1, MOST_GROUPS)
    reader = reader_of(position)
    os.pwrite(position.descriptor, random.Random(seed).randbytes(BLOCK_BYTES - 64), 64)
    reader.read()
    position.close()
