"""The studies as grids: which cells each is made of, and the key under which a cell is kept. Pure."""

import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from hashlib import blake2b
from typing import Any

from bireme.environment import UNSHAPED
from bireme.errors import UserError, nearest
from bireme.inject import Straggler
from bireme.nodes import parse_rate

WARM_UP_STEPS = 3
MAX_STEPS = 1_000_000  # of one cell
MAX_RANKS = 1024  # on all nodes

UNLIMITED = "unlimited"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One training run of a study: where it lies on every axis.

    A new axis is one more field, whose default means what all cells did before: keys leave defaults out, so cells that
    are finished keep theirs, and a study that was begun without the axis goes on.
    """

    nodes: int
    ranks_per_node: int
    cores_per_node: int
    link: str  # a rate, or "unshaped" where nodes are plain processes
    reduction: str  # "overlap" or "flat"
    straggler_delays_ms: tuple[float, ...] = ()  # they take turns step by step
    straggler_rank: int | None = None
    straggler_phase: str | None = None
    preset: str
    batch_per_rank: int  # sequences
    sequence_length: int | None = None  # None: the model's context
    steps: int  # measured ones

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def key(self) -> str:
        """The cell's name: of its run directory, and for scripts."""
        parts = []
        for each in fields(self):
            value = getattr(self, each.name)
            if each.default is MISSING or value != each.default:
                parts.append(_KEY_LABELS.get(each.name, each.name) + _key_text(value))
        name = "_".join(parts)
        safe = re.sub(r"[^A-Za-z0-9._-]", "-", name)[:100]
        if safe != name:  # two names must not become one
            safe += "-" + blake2b(name.encode(errors="replace"), digest_size=4).hexdigest()
        return safe

    def __str__(self) -> str:
        nodes = f"{self.nodes} node{'s' if self.nodes > 1 else ''}"
        ranks = f"{self.ranks_per_node} rank{'s' if self.ranks_per_node > 1 else ''}"
        link = f", {self.link}" if self.nodes > 1 else ""
        delays = f", delays {','.join(map(_number, self.straggler_delays_ms))} ms" if self.straggler_delays_ms else ""
        return f"{nodes} x {ranks}{link}, {self.reduction}{delays}"

    def as_dict(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


_KEY_LABELS = {
    "ranks_per_node": "ranks",
    "cores_per_node": "cores",
    "link": "",
    "reduction": "",
    "straggler_delays_ms": "delays",
    "straggler_rank": "slow",
    "straggler_phase": "",
    "preset": "",
    "batch_per_rank": "batch",
    "sequence_length": "length",
}


def _number(value: float) -> str:
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)


def _key_text(value: Any) -> str:
    return "-".join(map(_number, value)) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user asked for, as it was typed; None: the study's own choice."""

    nodes: int = 2
    cores_per_node: int | None = None
    link: str | None = None
    ranks: str | None = None
    links: str | None = None
    delays: str | None = None
    phase: str | None = None
    preset: str = "toy"
    batch_per_rank: int = 8
    sequence_length: int | None = None
    steps: int = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A named experiment: its cells, and what all of them have in common."""

    name: str
    base: Cell
    cells: tuple[Cell, ...]

    def settings(self) -> dict[str, Any]:
        """What must stay as it is when the study goes on. What the study varies may get more values."""
        return {name: value for name, value in self.base.as_dict().items() if name not in VARIED[self.name]}

    def unshaped(self) -> "Study":
        """The same where links cannot be limited: link rates that differ become one."""
        cells = dict.fromkeys(replace(cell, link=UNSHAPED) for cell in self.cells)
        return replace(self, cells=tuple(cells))


# Fields of Cell whose values a study compares; `nodes` of a single cell may differ as well (one node alone).
VARIED: dict[str, tuple[str, ...]] = {
    "ranks": ("ranks_per_node",),
    "straggler": ("straggler_delays_ms",),
    "links": ("link", "reduction"),
}

# Options that only some studies know.
_KNOWN_TO = {
    "link": ("ranks", "straggler"),
    "links": ("links",),
    "delays": ("straggler",),
    "phase": ("straggler",),
}


def study_of(name: str, options: Options, cores: int) -> Study:
    """The study of that name, on a machine with so many usable cores. UserError for an unknown name, an option that the
    study does not have, lists that do not parse and sizes that cannot be."""
    if name not in VARIED:
        raise UserError(f"there is no study {name!r}{nearest(name, list(VARIED))}: choose ranks, straggler or links")
    for option, studies in _KNOWN_TO.items():
        if getattr(options, option) is not None and name not in studies:
            instead = "; it has --links" if option == "link" else ""
            raise UserError(f"--{option} has no meaning in the study of {name}{instead}: leave it out")
    for option in ("nodes", "cores_per_node", "batch_per_rank", "sequence_length", "steps"):
        value = getattr(options, option)
        if value is not None and value < 1:
            raise UserError(f"--{option.replace('_', '-')} is {value}: it must be at least 1")
    base = Cell(
        nodes=options.nodes,
        ranks_per_node=1,
        # Also where one node is alone: what it computes must not change with the number of nodes.
        cores_per_node=options.cores_per_node or max(1, cores // options.nodes),
        link=parse_links(_given(options.link, "1gbit"), "--link", most=1)[0],
        reduction="overlap",
        preset=options.preset,
        batch_per_rank=options.batch_per_rank,
        sequence_length=options.sequence_length,
        steps=options.steps,
    )
    build = {"ranks": _ranks, "straggler": _straggler, "links": _links}[name]
    study = build(base, options)
    for cell in study.cells:
        if cell.steps > MAX_STEPS:
            raise UserError(f"--steps is {options.steps}: that is more than {MAX_STEPS} steps in a cell")
        if cell.ranks > MAX_RANKS:
            raise UserError(
                f"{cell.nodes} nodes x {cell.ranks_per_node} ranks are {cell.ranks} ranks: at most {MAX_RANKS} can be"
            )
    return study


def _ranks(base: Cell, options: Options) -> Study:
    cells = [replace(base, nodes=1)]
    cells += [replace(base, ranks_per_node=ranks) for ranks in parse_ranks_list(_given(options.ranks, "1,2"))]
    return Study(name="ranks", base=base, cells=tuple(dict.fromkeys(cells)))


def _straggler(base: Cell, options: Options) -> Study:
    (ranks,) = parse_ranks_list(_given(options.ranks, "1"), most=1)
    total = base.nodes * ranks
    if total < 2:
        raise UserError("the study of straggler needs two ranks: with one, nobody waits for it; give --nodes 2")
    delays, phase = parse_delays(_given(options.delays, "0,50,100,150,200"), _given(options.phase, "forward"), total)
    # One all-reduce after the backward pass: all that the others wait is in one place.
    base = replace(base, reduction="flat", ranks_per_node=ranks, straggler_rank=total - 1, straggler_phase=phase)
    cell = replace(base, straggler_delays_ms=delays, steps=base.steps * len(delays))
    return Study(name="straggler", base=base, cells=(cell,))


def _links(base: Cell, options: Options) -> Study:
    if base.nodes < 2:
        raise UserError("the study of links needs two nodes: with one, nothing crosses a link; give --nodes 2")
    (ranks,) = parse_ranks_list(_given(options.ranks, "1"), most=1)
    base = replace(base, ranks_per_node=ranks)
    cells = [replace(base, nodes=1, link=UNLIMITED)]
    for link in parse_links(_given(options.links, "100mbit,200mbit,1gbit,unlimited"), "--links"):
        cells += [replace(base, link=link, reduction=reduction) for reduction in ("overlap", "flat")]
    return Study(name="links", base=base, cells=tuple(cells))


# --- lists on the command line ------------------------------------------------------------------------------------


def _given(text: str | None, default: str) -> str:
    return default if text is None else text


def _parts(text: str, option: str, example: str, most: int | None) -> list[str]:
    parts = [part.strip().lower() for part in text.split(",")]
    if not all(parts):
        raise UserError(f"{option} {text!r} is not a list: write {example}")
    if most is not None and len(parts) > most:
        raise UserError(f"{option} {text!r} is a list: this study takes one value, as in {example.split(',')[0]}")
    return list(dict.fromkeys(parts))


def parse_links(text: str, option: str = "--links", most: int | None = None) -> list[str]:
    """`100mbit,1gbit,unlimited`: link rates, each once."""
    links: dict[int | None, str] = {}
    for link in _parts(text, option, "100mbit,1gbit,unlimited", most):
        try:
            links.setdefault(parse_rate(link), link)
        except UserError as error:
            raise UserError(f"{option}: {error}") from None
    return list(links.values())


def parse_ranks_list(text: str, most: int | None = None) -> list[int]:
    """`1,2`: numbers of ranks on each node, each once."""
    ranks = []
    for part in _parts(text, "--ranks", "1,2", most):
        if not part.isascii() or not part.isdigit() or not 1 <= int(part[:9]) <= MAX_RANKS:
            raise UserError(f"--ranks {text!r}: {part!r} is not a number of ranks from 1 to {MAX_RANKS}: write 1,2")
        ranks.append(int(part))
    return list(dict.fromkeys(ranks))


def parse_delays(text: str, phase: str, ranks: int) -> tuple[tuple[float, ...], str]:
    """(`0,50,100` as milliseconds, each once; the phase), checked as the trainer will."""
    environ: Mapping[str, str] = {"STRAGGLER_MS": text, "STRAGGLER_PHASE": phase}
    _parts(text, "--delays", "0,50,100", None)
    try:
        straggler = Straggler.from_environment(environ, ranks)
    except UserError as error:
        said = str(error).replace("STRAGGLER_MS=", "--delays ").replace("STRAGGLER_PHASE=", "--phase ")
        raise UserError(said) from None
    assert straggler is not None
    delays = tuple(dict.fromkeys(straggler.delays_ms))
    if len(delays) < 2:
        raise UserError(f"--delays {text!r}: a line needs two different delays, as in 0,100")
    return delays, straggler.phase
