"""`bireme links`: measures and saves, or shows what was measured before; only measuring imports torch."""

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from rich.console import Console

from bireme.environment import Launch
from bireme.errors import SharedError, UserError
from bireme.links import SMALLEST_BYTES, LinkTable
from bireme.report.link_tables import draw, render, render_brief

if TYPE_CHECKING:
    from bireme.world import World

# Without a sign of life for so long, or for so much of all the time, a link is taken for dead.
_SILENT_S, _SILENT_SHARE = 20.0, 1.5

_UNITS: dict[str, int] = {"": 1, "b": 1} | {
    prefix + suffix: size**power
    for suffix, size in (("b", 1000), ("ib", 1024))
    for power, prefix in enumerate("kmgt", start=1)
}


def parse_bytes(text: str) -> int:
    """`8MiB`, `64KiB`, `1GB` or a plain number of bytes. UserError for anything else."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([a-z]*)", text.strip().lower(), re.ASCII)
    if not match or match[2] not in _UNITS:
        raise UserError(f"size {text!r} is not understood: write bytes as in 8MiB, 64KiB, 1GB or 1048576")
    return round(float(match[1]) * _UNITS[match[2]])


def links_command(
    max_bytes: str, seconds: float, out: Path, read: Path | None, json: bool, device: str, brief: bool = False
) -> None:
    """Measure on every rank and save on rank 0; with `read`, show a saved table."""
    show = _print_json if json else _print_brief if brief else _print
    if read is not None:
        show(LinkTable.load(read))
        return
    largest = 0
    problem: str | None = None
    try:
        largest = parse_bytes(max_bytes)
        if largest < SMALLEST_BYTES:
            raise UserError(f"--max-bytes {max_bytes} is below the smallest message: give {SMALLEST_BYTES} or more")
        if not 0 < seconds < 1e6:
            raise UserError(f"--seconds {seconds:g} is no time to measure in: give a number above 0")
        if device not in ("auto", "cpu", "cuda"):
            raise UserError(f"--device {device} is unknown: auto, cpu or cuda")
    except UserError as error:
        problem = str(error)
        if Launch.from_environment(os.environ).size == 1:
            raise
    table = _measure(problem, largest, seconds, out, device)
    if table is not None:
        _save(table, out)
        show(table)
        if not json:
            print(f"{out} and {out.with_suffix('.png')}  (bireme links --read {out})")


def _measure(problem: str | None, max_bytes: int, seconds: float, out: Path, device: str) -> LinkTable | None:
    """The table, on rank 0; None on the others."""
    import torch

    from bireme.shutdown import Interrupted, StopRequest
    from bireme.world import join, peer_lost_in_one_line

    cuda = problem is None and device != "cpu" and torch.cuda.is_available()
    if device == "cuda" and not cuda and problem is None:
        problem = "--device cuda, but PyTorch sees no GPU here: use --device cpu"
    world = join("cuda" if cuda else "cpu")
    said: list[str] = []

    def say_stopped(reason: str) -> None:
        if world.rank == 0 and not said:
            said.append(reason)
            print(f"bireme: stopped by {reason}; nothing was saved", file=sys.stderr, flush=True)

    try:
        with StopRequest() as stop, peer_lost_in_one_line(world, stop.check, "nothing was saved"):
            if world.size == 1:
                raise UserError(
                    problem
                    or "links are between at least two ranks: torchrun --nproc-per-node 2 -m bireme links, "
                    "or bireme nodes --nodes 2 --link 1gbit -- bireme links"
                )
            stop.on_stuck = say_stopped
            world.raise_together(problem)
            world.agree({"max_bytes": max_bytes, "seconds": seconds})
            world.set_timeout(max(_SILENT_S, _SILENT_SHARE * seconds))
            with world.together():
                _check_memory(max_bytes, world.local_size)
                if world.rank == 0:
                    check_writable(out)
            with _progress(world.rank, seconds) as progress:
                return _table(world, max_bytes, seconds, stop.check, progress, out)
    except Interrupted as stopped:
        say_stopped(str(stopped))
        raise
    finally:
        world.leave()


def _table(
    world: "World",
    max_bytes: int,
    seconds: float,
    check: Callable[[], None],
    progress: Callable[[float, str], None],
    out: Path,
) -> LinkTable | None:
    import torch
    import torch.distributed as dist

    import bireme
    from bireme.link_probe import Probe
    from bireme.record import utc_now

    probe = Probe(world, max_bytes, seconds, check, progress)
    pairs, measurements = probe.run()
    if world.rank != 0:
        return None
    facts = {
        "bireme": bireme.__version__,
        "torch": torch.__version__,
        "backend": str(dist.get_backend()),
        "device": world.device.type,
        "link": os.environ.get("BIREME_LINK"),
        "measured_utc": utc_now(),
        "seconds": seconds,
        "max_bytes": max_bytes,
        "elapsed_s": probe.elapsed_s,
    }
    table = LinkTable(facts, world.nodes, world.ranks, probe.groups, measurements, pairs)
    return replace(table, pairs=_with_previous(table, out))


def _with_previous(table: LinkTable, out: Path) -> list[Any]:
    """The pairs, each with the rate of the measurement that is about to be replaced, if it was of the same nodes."""
    try:
        previous = LinkTable.load(out)
    except UserError:
        return table.pairs
    if previous.nodes != table.nodes or previous.facts["device"] != table.facts["device"]:
        return table.pairs
    rates = {(pair.source, pair.target): pair.rate_bit_per_s for pair in previous.pairs}
    return [replace(pair, previous_bit_per_s=rates.get((pair.source, pair.target))) for pair in table.pairs]


def _check_memory(max_bytes: int, local_size: int) -> None:
    import psutil

    needed, available = 2 * max_bytes * local_size, psutil.virtual_memory().available
    if needed > available:
        raise UserError(
            f"messages of {max_bytes:,} bytes need {needed / 1e9:.3g} GB for the ranks of a node, "
            f"{available / 1e9:.3g} GB are free: choose a smaller --max-bytes"
        )


def check_writable(out: Path) -> None:
    """UserError where the table could not be saved: said before anything is measured."""
    if out.suffix != ".json":
        raise UserError(f"--out {out} does not end in .json: the picture is written beside it, with .png")
    if out.is_dir():
        raise UserError(f"--out {out} is a directory: give a file in it")
    try:
        with tempfile.NamedTemporaryFile(dir=out.parent, prefix=f".{out.name}."):
            pass
    except OSError as error:
        raise UserError(f"cannot write --out {out}: {error.strerror or error}") from None


@contextmanager
def _progress(rank: int, seconds: float) -> Iterator[Callable[[float, str], None]]:
    """A bar on rank 0's standard error, where that is a terminal."""
    console = Console(stderr=True)
    if rank != 0 or not console.is_terminal:
        yield lambda elapsed_s, text: None
        return
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=seconds)
        yield lambda elapsed_s, text: bar.update(task, completed=elapsed_s, description=text)


def _save(table: LinkTable, out: Path) -> None:
    try:
        table.save(out)
        draw(table, out.with_suffix(".png"))
    except OSError as error:
        raise SharedError(f"cannot write {error.filename or out}: {error.strerror or error}") from None


def _print_json(table: LinkTable) -> None:
    sys.stdout.write(orjson.dumps(table.as_dict(), option=orjson.OPT_INDENT_2).decode() + "\n")


def _print_brief(table: LinkTable) -> None:
    render_brief(table, Console())


def _print(table: LinkTable) -> None:
    render(table, Console())
