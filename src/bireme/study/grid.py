"""The studies as grids: which cells each is made of, and the key under which a cell is kept. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from hashlib import blake2b
from typing import Any

from bireme.environment import UNSHAPED
from bireme.errors import UserError, nearest
from bireme.inject import Straggler
from bireme.layout import (
    LAYOUTS,
    Layout,
    Shape,
    check_layout_text,
    check_model,
    parse_layout,
    stages_per_rank,
)
from bireme.nodes import parse_rate
from bireme.text import count

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
    layout: str = "ddp"
    straggler_delays_ms: tuple[float, ...] = ()  # they take turns step by step
    straggler_rank: int | None = None
    straggler_phase: str | None = None
    preset: str
    batch_per_rank: int  # sequences
    sequence_length: int | None = None  # None: the model's context
    steps: int  # measured ones
    model: str = ""  # sizes that differ from the preset's, as in num_layers=8,embedding_dim=256

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def place(self) -> str:
        """`2 nodes x 1 rank`."""
        return f"{count(self.nodes, 'node')} x {count(self.ranks_per_node, 'rank')}"

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
        link = f", {self.link}" if self.nodes > 1 else ""
        how = f"ddp {self.reduction}" if self.layout == "ddp" else self.layout
        delays = f", delays {','.join(map(_number, self.straggler_delays_ms))} ms" if self.straggler_delays_ms else ""
        return f"{self.place}{link}, {how}{delays}"

    def as_dict(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


_KEY_LABELS = {
    "ranks_per_node": "ranks",
    "cores_per_node": "cores",
    "link": "",
    "reduction": "",
    "layout": "",
    "straggler_delays_ms": "delays",
    "straggler_rank": "slow",
    "straggler_phase": "",
    "preset": "",
    "batch_per_rank": "batch",
    "sequence_length": "length",
    "model": "",
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
    layouts: str | None = None
    preset: str | None = None
    model: str | None = None
    batch_per_rank: int | None = None
    sequence_length: int | None = None
    steps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A layout that was asked for, and that cannot be on so many ranks."""

    layout: str
    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.layout} is left out at {self.place}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A named experiment: its cells, and what all of them have in common."""

    name: str
    base: Cell
    cells: tuple[Cell, ...]
    left_out: tuple[LeftOut, ...] = ()

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
    "layouts": ("ranks_per_node", "link", "layout"),
}

# Options that only some studies know.
_KNOWN_TO = {
    "link": ("ranks", "straggler"),
    "links": ("links", "layouts"),
    "layouts": ("layouts",),
    "delays": ("straggler",),
    "phase": ("straggler",),
}

# What is trained where the user does not say.
_TRAINING: dict[str, Any] = {"preset": "toy", "model": "", "batch_per_rank": 8, "sequence_length": None, "steps": 20}
_OF_LAYOUTS: dict[str, Any] = {
    # 6.4 M parameters, so that memory shows who holds what, in layers and heads that divide over four ranks; and few
    # tokens, so that a tensor-parallel step does not take a minute on a slow link.
    "preset": "toy",
    "model": "num_layers=8,embedding_dim=256,feed_forward_dim=1024",
    "batch_per_rank": 2,
    "sequence_length": 64,
    "steps": 6,
}


def study_of(name: str, options: Options, cores: int) -> Study:
    """The study of that name, on a machine with so many usable cores. UserError for an unknown name, an option that the
    study does not have, lists that do not parse and sizes that cannot be."""
    if name not in VARIED:
        raise UserError(f"there is no study {name!r}{nearest(name, list(VARIED))}: choose {', '.join(VARIED)}")
    for option, studies in _KNOWN_TO.items():
        if getattr(options, option) is not None and name not in studies:
            instead = "; it has --links" if option == "link" else ""
            raise UserError(f"--{option} has no meaning in the study of {name}{instead}: leave it out")
    for option in ("nodes", "cores_per_node", "batch_per_rank", "sequence_length", "steps"):
        value = getattr(options, option)
        if value is not None and value < 1:
            raise UserError(f"--{option.replace('_', '-')} is {value}: it must be at least 1")
    training = dict(_OF_LAYOUTS if name == "layouts" else _TRAINING)
    if options.preset is not None:
        training["model"] = ""  # those sizes were another preset's
    training |= {each: value for each in training if (value := getattr(options, each)) is not None}
    training["model"] = ",".join(f"{each}={size}" for each, size in parse_model(training["model"]).items())
    base = Cell(
        nodes=options.nodes,
        ranks_per_node=1,
        # Also where one node is alone: what it computes must not change with the number of nodes.
        cores_per_node=options.cores_per_node or max(1, cores // options.nodes),
        link=parse_links(_given(options.link, "1gbit"), "--link", most=1)[0],
        reduction="overlap",
        **training,
    )
    build = {"ranks": _ranks, "straggler": _straggler, "links": _links, "layouts": _layouts}[name]
    study = build(base, options)
    for cell in study.cells:
        if cell.steps > MAX_STEPS:
            raise UserError(f"--steps is {options.steps}: that is more than {MAX_STEPS} steps in a cell")
        _check_ranks(cell)
    return study


def _check_ranks(cell: Cell) -> None:
    if cell.ranks > MAX_RANKS:
        raise UserError(
            f"{cell.nodes} nodes x {cell.ranks_per_node} ranks are {cell.ranks} ranks: at most {MAX_RANKS} can be"
        )


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


def _check_two_nodes(base: Cell, name: str) -> None:
    if base.nodes < 2:
        raise UserError(f"the study of {name} needs two nodes: with one, nothing crosses a link; give --nodes 2")


def _links(base: Cell, options: Options) -> Study:
    _check_two_nodes(base, "links")
    (ranks,) = parse_ranks_list(_given(options.ranks, "1"), most=1)
    base = replace(base, ranks_per_node=ranks)
    cells = [replace(base, nodes=1, link=UNLIMITED)]
    for link in parse_links(_given(options.links, "100mbit,200mbit,1gbit,unlimited"), "--links"):
        cells += [replace(base, link=link, reduction=reduction) for reduction in ("overlap", "flat")]
    return Study(name="links", base=base, cells=tuple(cells))


def _layouts(base: Cell, options: Options) -> Study:
    _check_two_nodes(base, "layouts")
    wanted = parse_layouts(_given(options.layouts, ",".join(LAYOUTS)))
    links = parse_links(_given(options.links, "200mbit,1gbit"))
    cells: dict[Cell, None] = {}
    left_out: list[LeftOut] = []
    for ranks in parse_ranks_list(_given(options.ranks, "1,2")):
        there = replace(base, ranks_per_node=ranks)
        _check_ranks(there)
        fitting = []
        for text in wanted:
            try:
                fitting.append(layout_name(text, there))
            except UserError as error:
                left_out.append(LeftOut(layout=text, place=there.place, reason=str(error)))
        cells |= dict.fromkeys(replace(there, link=link, layout=name) for link in links for name in fitting)
    return _some_left(Study(name="layouts", base=base, cells=tuple(cells), left_out=tuple(left_out)))


def _nodes_of(cell: Cell) -> list[range]:
    return [range(first, first + cell.ranks_per_node) for first in range(0, cell.ranks, cell.ranks_per_node)]


def layout_name(text: str, cell: Cell) -> str:
    """The layout's one name on the nodes of this cell: `fsdp` for `shard=4`. UserError when it cannot be there."""
    nodes = _nodes_of(cell)
    layout = parse_layout(text, nodes)
    names = {_layout_or_none(name, nodes): name for name in reversed(LAYOUTS)}
    return names.get(layout) or ",".join(f"{name}={size}" for name, size in layout.mesh_sizes.items())


def _layout_or_none(name: str, nodes: Sequence[range]) -> Layout | None:
    try:
        return parse_layout(name, nodes)
    except UserError:
        return None


def fitting_model(study: Study, model: Shape, length: int) -> Study:
    """The study without the layouts over which a model of this shape does not divide (`length`: tokens of a sequence).
    UserError when none is left."""
    cells, left_out = [], dict.fromkeys(study.left_out)
    for cell in study.cells:
        layout = parse_layout(cell.layout, _nodes_of(cell))
        try:
            check_model(layout, model, length)
            stages_per_rank(layout, "1f1b", None, model.num_layers)
            cells.append(cell)
        except UserError as error:
            left_out[LeftOut(layout=cell.layout, place=cell.place, reason=str(error))] = None
    return _some_left(replace(study, cells=tuple(cells), left_out=tuple(left_out)))


def _some_left(study: Study) -> Study:
    if not study.cells:
        raise UserError(f"none of the --layouts fits: {study.left_out[0]}")
    return study


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


def parse_layouts(text: str) -> list[str]:
    """`ddp,fsdp`, and with sizes `ddp,fsdp;pp=2,shard=2;tp=4`: layouts, each once. Commas part names; a layout that is
    written as sizes has commas of its own, so it stands between semicolons."""
    layouts: list[str] = []
    for part in text.split(";"):
        names = _parts(part, "--layouts", "ddp,fsdp;pp=2,shard=2", None)
        sizes = ["=" in name for name in names]
        if any(sizes) and not all(sizes):
            raise UserError(
                f"--layouts {text!r}: put semicolons around a layout that is written as sizes, as in "
                "'ddp,fsdp;pp=2,shard=2'"
            )
        try:
            layouts += map(check_layout_text, [part] if any(sizes) else names)
        except UserError as error:
            raise UserError(f"--layouts: {error}") from None
    return list(dict.fromkeys(layouts))


def parse_model(text: str) -> dict[str, int]:
    """`num_layers=8,embedding_dim=256`: sizes of a model's shape, by field. Whether there is such a field is the
    model's to say."""
    sizes = {}
    for part in _parts(text, "--model", "num_layers=8,embedding_dim=256", None) if text else ():
        name, _, size = part.partition("=")
        name = name.strip().replace("-", "_")
        size = size.strip()
        if not name.isidentifier() or not size.isascii() or not size.isdigit() or len(size) > 10:
            raise UserError(f"--model {text!r}: {part!r} is no size of a model: write num_layers=8,embedding_dim=256")
        if name in sizes:
            raise UserError(f"--model {text!r}: {name} is there twice")
        sizes[name] = int(size)
    return sizes
