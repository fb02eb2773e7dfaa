"""What is to be made slow, or to fail, on purpose: the text of `--inject`, and when it acts on whom; pure."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bireme.errors import UserError, nearest
from bireme.ledger import PHASES
from bireme.text import short

_WORKING = ("input", "forward", "backward", "optimizer")
_COMMON = ("kind", "rank", "node", "steps", "every", "prob", "seed")
_FORM = "kind=sleep,rank=1,phase=forward,ms=150,steps=10:40,every=4"
_MOST_STEPS = 2**31 - 1
_DRIFT_STEPS = 200


@dataclass(frozen=True, slots=True)
class Kind:
    """What may be said of one kind of injection. `needs`: of each of these groups of keys at least one."""

    example: str
    needs: tuple[tuple[str, ...], ...] = ()
    may: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    phase: str | None = None  # if none is given
    everyone: bool = False  # all ranks, if none is given; else the last
    failure: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        own = tuple(key for group in self.needs for key in group) + self.may
        # A failure happens once; a stage or a link says who is meant.
        common = [key for key in _COMMON if not (self.failure and key in ("every", "prob", "seed"))]
        without = ("rank", "node") if "stage" in own else ("rank",) if "rate" in own else ()
        phase = ("phase",) if self.phases else ()
        return tuple(dict.fromkeys((*(key for key in common if key not in without), *phase, *own)))


def _failure(kind: str, may: tuple[str, ...] = (), phases: tuple[str, ...] = PHASES) -> Kind:
    phase = "forward" if phases else None
    return Kind(f"kind={kind},rank=1,steps=20", (("steps",),), may, phases, phase, failure=True)


KINDS = {
    "sleep": Kind("kind=sleep,rank=1,phase=forward,ms=150", (("ms",),), phases=PHASES, phase="forward"),
    "compute": Kind(
        "kind=compute,rank=1,phase=forward,factor=2", (("ms", "factor"),), phases=_WORKING, phase="forward"
    ),
    "contention": Kind("kind=contention,rank=1,processes=1", may=("processes",)),
    "pause": Kind("kind=pause,rank=1,ms=30,period_ms=100", (("ms",),), ("period_ms",)),
    "input": Kind("kind=input,rank=1,ms=150", (("ms",),), phase="input"),
    "gc": Kind(
        "kind=gc,rank=all,every=5,objects=1000000",
        may=("objects",),
        phases=(*_WORKING, "other"),
        phase="forward",
        everyone=True,
    ),
    "checkpoint": Kind("kind=checkpoint,rank=1,ms=2000", (("ms",),), phase="checkpoint"),
    "link": Kind("kind=link,node=1,rate=50mbit", (("node",), ("rate", "delay"))),
    "jitter": Kind("kind=jitter,ms=3", (("ms",),), phases=PHASES, phase="forward", everyone=True),
    "imbalance": Kind("kind=imbalance,ms=60", (("ms",),), phase="forward", everyone=True),
    "stage": Kind("kind=stage,stage=1,factor=1.5", (("stage",), ("ms", "factor"))),
    "drift": Kind("kind=drift,rank=1,ms=60,steps=20:,over=100", (("ms",),), ("over",), phase="forward"),
    "exit": _failure("exit", ("code",)),
    "kill": _failure("kill"),
    "stop": _failure("stop"),
    "raise": _failure("raise"),
    "hang": _failure("hang"),
    "mismatch": _failure("mismatch"),
    "leave": _failure("leave", phases=()),
}
WORK = ("compute", "imbalance", "stage", "drift")  # kinds that are real work


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """One thing that is made slow, or fails. `ranks` and `nodes` are whom it acts on, once they are resolved; `step`
    counts from 1, `first` and `last` are within the window."""

    text: str
    kind: str
    ranks: tuple[int, ...] = ()  # empty: the kind's own choice
    all_ranks: bool = False
    node: str | None = None
    nodes: tuple[str, ...] = ()
    phase: str | None = None
    first: int = 1
    last: int | None = None
    every: int = 1
    prob: float = 1.0
    seed: int = 0
    ms: float | None = None
    factor: float | None = None
    stage: int | None = None
    processes: int | None = None
    cores: tuple[int, ...] | None = None  # of contention, for each of `ranks`
    period_ms: float | None = None
    objects: int | None = None
    rate: str | None = None
    delay: str | None = None
    over: int | None = None
    code: int | None = None

    @property
    def failure(self) -> bool:
        return KINDS[self.kind].failure

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases of the training thread in which it acts."""
        if self.kind == "stage":
            return ("forward", "backward")
        return (self.phase,) if self.phase is not None else ()

    @property
    def over_steps(self) -> int:
        """Of a drift: in how many steps it reaches all of its milliseconds."""
        window = _DRIFT_STEPS if self.last is None else max(1, self.last - self.first)
        return self.over if self.over is not None else window

    def active(self, step: int, rank: int | None = None) -> bool:
        """Whether it acts in this step, on this rank (None: on any). The same answer on every rank: a draw by `prob`
        is one for the step, not one for each rank."""
        if step < self.first or (self.last is not None and step > self.last):
            return False
        if self.failure:
            return step == self.first and (rank is None or rank in self.ranks)
        if rank is not None and rank not in self.ranks:
            return False
        if self.every > 1:
            counts = [step - self.first]
            if self.kind == "gc" and len(self.ranks) > 1:
                # Collections that Python starts by itself come at other steps on every rank.
                counts = [step + each for each in (self.ranks if rank is None else (rank,))]
            if all(count % self.every for count in counts):
                return False
        if self.prob < 1.0 and random.Random(f"{self.seed} step {step}").random() >= self.prob:
            return False
        return self.kind != "imbalance" or rank is None or rank == self.turn(step)

    def ends_before(self, step: int) -> bool:
        """Whether it does nothing any more in a run that goes on with this step."""
        last = self.first if self.failure else self.last
        return last is not None and last < step

    def turn(self, step: int) -> int:
        """Of an imbalance: whose turn it is. Every rank has one before any has its next."""
        cycle, place = divmod((step - self.first) // self.every, len(self.ranks))
        order = list(self.ranks)
        random.Random(f"{self.seed} cycle {cycle}").shuffle(order)
        return order[place]

    def planted_ms(self, step: int, rank: int) -> float:
        """The milliseconds of this step that are planted on this rank; 0 for what is not said in milliseconds."""
        if self.ms is None or not self.active(step, rank):
            return 0.0
        if self.kind == "jitter":
            return abs(random.Random(f"{self.seed} rank {rank} step {step}").gauss(0.0, self.ms))
        if self.kind == "drift":
            return self.ms * min(1.0, (step - self.first) / self.over_steps)
        return self.ms

    def truth(self) -> dict[str, Any]:
        """The fields of the event that tells a reader of the run what was planted."""
        names = ("ms", "factor", "stage", "processes", "period_ms", "objects", "rate", "delay", "code")
        own = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.kind == "drift":
            own["over"] = self.over_steps
        if self.cores is not None:
            own["cores"] = {str(rank): core for rank, core in zip(self.ranks, self.cores, strict=True)}
        chance = {} if self.failure else {"every": self.every, "prob": self.prob, "seed": self.seed}
        return {
            "kind": self.kind,
            "phase": self.phase,
            "ranks": list(self.ranks),
            "nodes": list(self.nodes),
            **own,
            "first_step": self.first,
            "last_step": self.first if self.failure else self.last,
            **chance,
            "text": self.text,
        }


# --- reading -----------------------------------------------------------------------------------------------------


def parse(texts: Sequence[str]) -> tuple[Injection, ...]:
    """The injections that are written so, not yet held against a run. UserError for what cannot be understood."""
    return tuple(_parse(text) for text in texts)


def mistake(text: str, what: str, example: str | None = None) -> UserError:
    """With an example of the kind that the text is about, if none is given."""
    if example is None:
        kind = re.search(r"(?:^|,)\s*kind\s*=\s*(\w+)", text)
        example = KINDS[kind[1]].example if kind is not None and kind[1] in KINDS else _FORM
    shown = text if len(text) <= 90 else text[:87] + "..."
    return UserError(f"--inject {shown!r}: {what}; write it as in {example} (docs/injection.md)")


def _parse(text: str) -> Injection:
    values: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = (each.strip() for each in part.partition("="))
        if not equals or not key or not value:
            raise mistake(text, f"{part.strip()[:40]!r} is not key=value")
        if key in values:
            raise mistake(text, f"{key[:40]!r} is there twice")
        values[key] = value
    name = values.get("kind")
    if name is None:
        raise mistake(text, f"it has no kind: the kinds are {', '.join(KINDS)}")
    if name not in KINDS:
        raise mistake(text, f"kind {name[:40]!r} is none of {', '.join(KINDS)}{nearest(name[:40], list(KINDS))}")
    kind = KINDS[name]
    for key in values:
        if key not in kind.keys:
            known = f"{nearest(key[:40], kind.keys)}: {', '.join(kind.keys)} may be said"
            raise mistake(text, f"{name} has no {key[:40]!r}{known}", kind.example)
    for group in kind.needs:
        given = [key for key in group if key in values]
        if not given:
            raise mistake(text, f"{name} needs {' or '.join(f'{key}=' for key in group)}", kind.example)
        if len(given) > 1 and given == ["ms", "factor"]:
            raise mistake(text, "ms and factor exclude each other", kind.example)
    fields: dict[str, Any] = {"phase": kind.phase}
    for key, value in values.items():
        fields |= _READERS[key](text, key, value)
    if "rank" in values and "node" in values:
        raise mistake(text, "rank and node exclude each other", kind.example)
    if fields["phase"] is not None and kind.phases and fields["phase"] not in kind.phases:
        phase = str(fields["phase"])
        raise mistake(
            text,
            f"{name} knows no phase {phase[:40]!r}{nearest(phase[:40], kind.phases)}: {', '.join(kind.phases)}",
            kind.example,
        )
    if name == "contention":
        fields.setdefault("processes", 1)
    if name == "gc":
        fields.setdefault("objects", 1_000_000)
    if name == "exit":
        fields.setdefault("code", 3)
    if name == "pause":
        period_ms = fields.setdefault("period_ms", 100.0)
        if fields["ms"] >= period_ms:
            raise mistake(text, f"ms must be below period_ms, which is {short(period_ms)}", kind.example)
    return Injection(text=text, **fields)


def _kind(text: str, key: str, value: str) -> dict[str, Any]:
    return {"kind": value}


def _words(text: str, key: str, value: str) -> dict[str, Any]:
    if not value.isprintable():
        raise mistake(text, f"{key} has unprintable characters")
    return {key: value}


def _ranks(text: str, key: str, value: str) -> dict[str, Any]:
    if value == "all":
        return {"all_ranks": True}
    ranks = [_whole(text, key, each, 0, 1_000_000) for each in value.split("+")]
    if len(set(ranks)) < len(ranks):
        raise mistake(text, f"rank {value[:40]!r} names a rank twice")
    return {"ranks": tuple(sorted(ranks))}


def _steps(text: str, key: str, value: str) -> dict[str, Any]:
    first, colon, last = value.partition(":")
    for each in (first, last):
        if each and not (each.isascii() and each.isdigit()):
            raise mistake(text, f"steps {value[:40]!r} is not understood: 7, 10:40 (both ends count), 10: or :40")
    if not first and not last:
        raise mistake(text, f"steps {value[:40]!r} says no step: 7, 10:40 (both ends count), 10: or :40")
    begin = _whole(text, key, first, 1, _MOST_STEPS) if first else 1
    end = (_whole(text, key, last, 1, _MOST_STEPS) if last else None) if colon else begin
    if end is not None and end < begin:
        raise mistake(text, f"steps {value[:40]!r} ends before it begins")
    return {"first": begin, "last": end}


def _whole(text: str, key: str, value: str, low: int, high: int) -> int:
    if not (value.isascii() and value.isdigit() and len(value) <= 12 and low <= int(value) <= high):
        raise mistake(text, f"{key}={value[:40]!r} is not a whole number from {low} to {high}")
    return int(value)


def _number(text: str, key: str, value: str, above: float, most: float) -> float:
    plain = re.fullmatch(r"(\d{1,15}(\.\d{0,15})?|\.\d{1,15})(e[+-]?\d{1,2})?", value, re.IGNORECASE | re.ASCII)
    number = float(value) if plain else 0.0
    if not above < number <= most:
        raise mistake(text, f"{key}={value[:40]!r} is not a number above {short(above)} and up to {short(most)}")
    return number


def _integer(low: int, high: int) -> Any:
    return lambda text, key, value: {key: _whole(text, key, value, low, high)}


def _real(above: float, most: float) -> Any:
    return lambda text, key, value: {key: _number(text, key, value, above, most)}


_READERS: dict[str, Any] = {
    "kind": _kind,
    "rank": _ranks,
    "node": _words,
    "phase": _words,
    "steps": _steps,
    "every": _integer(1, 1_000_000),
    "prob": _real(0.0, 1.0),
    "seed": _integer(0, _MOST_STEPS),
    "ms": _real(0.0, 3_600_000.0),
    "factor": _real(1.0, 100.0),
    "stage": _integer(0, 1_000_000),
    "processes": _integer(1, 64),
    "period_ms": _real(1.0, 3_600_000.0),
    "objects": _integer(1, 100_000_000),
    "rate": _words,
    "delay": _words,
    "over": _integer(1, 1_000_000),
    "code": _integer(0, 255),
}
