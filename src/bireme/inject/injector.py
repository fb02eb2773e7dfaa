"""Does on this rank what was planted there: it is told where the training thread is, and acts in the planted places."""

import contextlib
import gc
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from bireme.environment import UNSHAPED
from bireme.inject.failures import failure
from bireme.inject.grammar import KINDS, WORK, Injection, mistake
from bireme.inject.helpers import BUSY, PAUSE, Helper, Pin
from bireme.inject.setting import MEASURED_STEPS
from bireme.inject.straggler import Straggler
from bireme.namespaces import INTERFACE, NoNetem, shape
from bireme.nodes import parse_delay, parse_rate

PhaseOf = Callable[[str], AbstractContextManager[Any]]

_SLEEPS = ("sleep", "jitter")
# How much longer than usual a step may take for each time that a factor makes it longer.
_SILENT_MS = 20_000.0


@dataclass(slots=True)
class _Due:
    """What happens in a phase of this step: at so many entries of the phase still."""

    act: Callable[[], None]
    entries: int = 1


class Injector:
    """Told by the trainer of every step (`begin`) and of every entry of a phase (`enter`); each costs one comparison
    where nothing is planted on this rank.

    entries: how often a step enters forward, and backward; extra work is spread over them. `prepare` comes before the
    first step, `close` after the last: between them there may be processes beside the rank, and a slowed link.
    """

    def __init__(
        self,
        injections: Sequence[Injection] = (),
        straggler: Straggler | None = None,
        rank: int = 0,
        entries: int = 1,
        device: Any = None,
    ):
        self._rank = rank
        self._straggler = straggler if straggler is not None and straggler.rank == rank else None
        self._mine = [each for each in injections if rank in each.ranks]
        self._plants = [each for each in self._mine if each.kind in (*_SLEEPS, *WORK, "gc") or each.failure]
        self._entries = entries
        self._device = device
        self._work: Any = None
        self._due: dict[str, list[_Due]] = {}
        self.idle = self._straggler is None and not self._mine
        self._measures = any(each.factor is not None for each in self._mine)
        self._begun = 0
        self._cpu_ns: dict[str, int] = {}
        self._heap: list[Any] = []
        self._besides: list[_Beside] = []

    def prepare(self) -> None:
        """What takes time, or may not be possible here; before the first step. UserError says what is not."""
        if any(each.kind in WORK for each in self._plants):
            import torch

            from bireme.inject.work import Work

            self._work = Work(self._device or torch.device("cpu"))
        objects = sum(each.objects or 0 for each in self._mine if each.kind == "gc")
        if objects:
            self._heap = _containers(objects)
        for each in self._mine:
            makers: dict[str, Callable[[Injection, int], _Beside]]
            makers = {"contention": _Contention, "pause": _Pause, "link": _Link}
            if each.kind in makers and (each.kind != "link" or self._rank == each.ranks[0]):
                try:
                    self._besides.append(makers[each.kind](each, self._rank))
                except OSError as error:
                    what = f"it is not possible here: {error.strerror or error}"
                    raise mistake(each.text, what, KINDS[each.kind].example) from None

    # --- where the training thread is ---

    def begin(self, step: int) -> None:
        if self.idle:
            return
        self._begun += 1
        self._due = {}
        straggler = self._straggler
        if straggler is not None and (delay_ms := straggler.delay_ms(step)):
            self._plan(straggler.phase, _sleeper(delay_ms))
        for each in self._plants:
            if each.active(step, self._rank):
                self._plan_injection(each, step)
        for beside in self._besides:
            beside.turn(beside.injection.active(step))

    def enter(self, phase: str) -> None:
        """Called inside each phase of the step, once or more; acts where something is due there."""
        if self._due:
            for due in self._due.get(phase, ()):
                if due.entries:
                    due.entries -= 1
                    due.act()

    def phases(self, phase_of: PhaseOf) -> PhaseOf:
        """The `with` blocks of the phases: the given ones themselves, but for the steps in which a factor measures
        what the phases take by themselves."""
        if not self._measures or self._begun not in MEASURED_STEPS:
            return phase_of

        @contextlib.contextmanager
        def measured(name: str) -> Iterator[None]:
            with phase_of(name):
                began_ns = time.thread_time_ns()
                yield
                self._cpu_ns[name] = self._cpu_ns.get(name, 0) + time.thread_time_ns() - began_ns

        return measured

    def plant_in_backward(self, module: Any) -> None:
        """What is planted in backward happens inside the backward pass, where `module`'s gradient arrives."""
        planted = [phase for each in self._plants for phase in each.phases]
        if self._straggler is not None:
            planted.append(self._straggler.phase)
        if "backward" not in planted:
            return

        def arrived(gradient: Any) -> None:
            self.enter("backward")

        def watch(_module: Any, _inputs: Any, output: Any) -> None:
            if output.requires_grad:
                output.register_hook(arrived)

        module.register_forward_hook(watch)

    @property
    def slow_reads(self) -> "SlowReads | None":
        """For the loader: what reading a step's batch waits for first."""
        mine = tuple(each for each in self._mine if each.kind == "input")
        return SlowReads(mine, self._rank) if mine else None

    def before_write(self, step: int) -> None:
        """For the saver, in its thread: slow storage."""
        for each in self._mine:
            if each.kind == "checkpoint" and (slow_ms := each.planted_ms(step, self._rank)):
                time.sleep(slow_ms / 1e3)

    def leaves(self, step: int) -> bool:
        """Whether this rank leaves the loop instead of making this step."""
        return not self.idle and any(each.kind == "leave" and step >= each.first for each in self._mine)

    def close(self) -> None:
        """Everything beside the rank ends, and is as it was. Never raises."""
        self._due, self._heap = {}, []
        while self._besides:
            with contextlib.suppress(Exception):
                self._besides.pop().close()

    # --- what is due in a step ---

    def _plan(self, phase: str, act: Callable[[], None], entries: int = 1) -> None:
        self._due.setdefault(phase, []).append(_Due(act, entries))

    def _plan_injection(self, injection: Injection, step: int) -> None:
        if injection.kind == "leave":
            return
        for phase in injection.phases:
            if injection.failure:
                self._plan(phase, failure(injection, self._device))
            elif injection.kind == "gc":
                self._plan(phase, _collect)
            elif injection.kind in _SLEEPS:
                self._plan(phase, _sleeper(injection.planted_ms(step, self._rank)))
            elif work_ms := self._work_ms(injection, phase, step):
                # Spread as the work of training is: a stage with more of it is slower with every micro-batch.
                entries = self._entries if phase in ("forward", "backward") else 1
                self._plan(phase, _worker(self._work, work_ms / entries), entries)

    def _work_ms(self, injection: Injection, phase: str, step: int) -> float:
        if injection.factor is None:
            return injection.planted_ms(step, self._rank)
        if self._begun <= MEASURED_STEPS[-1]:
            return 0.0
        return (injection.factor - 1) * self._cpu_ns.get(phase, 0) / 1e6 / len(MEASURED_STEPS)


def longest_delay_ms(injections: Sequence[Injection], straggler: Straggler | None) -> float:
    """By how much what is planted may make a rank's answer later, at most."""
    planted = [max(straggler.delays_ms)] if straggler is not None else []
    for each in injections:
        if each.kind == "pause" and each.ms is not None and each.period_ms is not None:
            planted.append(_SILENT_MS * each.ms / (each.period_ms - each.ms))
        elif each.kind == "jitter":
            planted.append(6 * (each.ms or 0.0))
        elif each.kind == "contention":
            planted.append(_SILENT_MS * (each.processes or 1))
        else:
            times = len(each.phases) if each.kind == "stage" else 1
            planted.append(times * (each.ms or 0.0) + _SILENT_MS * ((each.factor or 1.0) - 1.0))
    return sum(planted)


def slowed_link(environ: Mapping[str, str], injections: Sequence[Injection]) -> Mapping[str, str]:
    """The environment with the slowest rate that the node's link will have."""
    rates = [each.rate for each in injections if each.rate is not None and parse_rate(each.rate) is not None]
    link = environ.get("BIREME_LINK", UNSHAPED)
    if not rates or link == UNSHAPED:
        return environ
    if parse_rate(link) is not None:
        rates.append(link)
    return {**environ, "BIREME_LINK": min(rates, key=lambda rate: parse_rate(rate) or 0)}


@dataclass(frozen=True, slots=True)
class SlowReads:
    """Called in the loader's thread or processes before it reads a step's batch. Picklable."""

    injections: tuple[Injection, ...]
    rank: int

    def __call__(self, step: int) -> None:
        slow_ms = sum(each.planted_ms(step, self.rank) for each in self.injections)
        if slow_ms:
            time.sleep(slow_ms / 1e3)


# --- acts --------------------------------------------------------------------------------------------------------


def _sleeper(ms: float) -> Callable[[], None]:
    return lambda: time.sleep(ms / 1e3)


def _worker(work: Any, ms: float) -> Callable[[], None]:
    return lambda: work.ms(ms)


def _collect() -> None:
    """As Python's own collector would: not where it is turned off."""
    if gc.isenabled():
        gc.collect()


def _containers(number: int) -> list[Any]:
    """So many objects that a collection has to look at."""
    enabled = gc.isenabled()
    gc.disable()  # making them must not take a collection for every few hundred
    try:
        return [[] for _ in range(number)]
    finally:
        if enabled:
            gc.enable()


# --- what is beside the rank -------------------------------------------------------------------------------------


class _Beside(ABC):
    """Something that is on for as long as its injection is active."""

    def __init__(self, injection: Injection):
        self.injection = injection
        self._on = False

    def turn(self, on: bool) -> None:
        if on != self._on:
            self._on = on
            self._set(on)

    def close(self) -> None:
        self.turn(False)

    @abstractmethod
    def _set(self, on: bool) -> None: ...


class _Contention(_Beside):
    """Busy processes on the one core that the rank is kept on meanwhile."""

    def __init__(self, injection: Injection, rank: int):
        super().__init__(injection)
        assert injection.cores is not None
        core = injection.cores[injection.ranks.index(rank)]
        self._pin = Pin(core)
        self._helpers = [Helper(BUSY, str(core)) for _ in range(injection.processes or 1)]

    def _set(self, on: bool) -> None:
        if on:
            self._pin.set()
        else:
            self._pin.release()
        for helper in self._helpers:
            helper.turn(on)

    def close(self) -> None:
        super().close()
        for helper in self._helpers:
            helper.close()


class _Pause(_Beside):
    def __init__(self, injection: Injection, rank: int):
        super().__init__(injection)
        seconds = [(injection.ms or 0.0) / 1e3, (injection.period_ms or 0.0) / 1e3]
        self._helper = Helper(PAUSE, str(os.getpid()), *map(str, seconds))

    def _set(self, on: bool) -> None:
        self._helper.turn(on)

    def close(self) -> None:
        super().close()
        self._helper.close()


class _Link(_Beside):
    """The node's own network card, of which the emulated cluster says how it was shaped."""

    def __init__(self, injection: Injection, rank: int):
        super().__init__(injection)
        as_it_is = os.environ.get("BIREME_LINK", UNSHAPED), os.environ.get("BIREME_DELAY")
        self._before = parse_rate(as_it_is[0]), parse_delay(as_it_is[1])
        self._slow = (
            parse_rate(injection.rate) if injection.rate is not None else self._before[0],
            parse_delay(injection.delay) if injection.delay is not None else self._before[1],
        )
        # Tried before training: what the kernel cannot do is said now.
        try:
            shape(INTERFACE, *self._slow)
        except NoNetem as error:
            raise mistake(injection.text, f"{error}: say rate only", KINDS["link"].example) from None
        except Exception as error:
            what = f"the node's network card cannot be shaped: {error}"
            raise mistake(injection.text, what, KINDS["link"].example) from None
        finally:
            with contextlib.suppress(Exception):
                shape(INTERFACE, *self._before)

    def _set(self, on: bool) -> None:
        shape(INTERFACE, *(self._slow if on else self._before))
