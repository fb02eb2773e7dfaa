"""Faults planted for tests and demonstrations: BIREME_DOCTOR_PRETEND=clock=+3s,torch=2.13.0."""

import re
from dataclasses import dataclass, field

from bireme.doctor.facts import Facts
from bireme.errors import UserError

VARIABLE = "BIREME_DOCTOR_PRETEND"
_VERSIONS = ("python", "torch", "bireme")


@dataclass(frozen=True, slots=True)
class Pretence:
    """What this node pretends; the report says so."""

    clock_ns: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    node: int | None = None  # only there; None: wherever the variable is set

    def on(self, index: int) -> "Pretence":
        """What node `index` pretends."""
        return self if self.node in (None, index) else Pretence()

    @classmethod
    def parse(cls, text: str) -> "Pretence":
        """UserError for anything but clock=[+-]SECONDSs, python=, torch=, bireme=VERSION and node=N, with commas."""
        clock_ns, versions, words, node = 0, {}, [], None
        for word in filter(None, (each.strip() for each in text.split(","))):
            name, _, value = word.partition("=")
            if name == "clock" and re.fullmatch(r"[+-]?\d{1,6}(\.\d{1,9})?s", value, re.ASCII):
                clock_ns = round(float(value[:-1]) * 1e9)
            elif name == "node" and re.fullmatch(r"\d{1,5}", value, re.ASCII):
                node = int(value)
                continue
            elif name in _VERSIONS and re.fullmatch(r"[\w.+-]{1,40}", value, re.ASCII):
                versions[name] = value
            else:
                raise UserError(
                    f"{VARIABLE}: {word!r} is not understood: use clock=+3s, python=, torch=, "
                    "bireme=VERSION and node=1, separated by commas"
                )
            words.append(word)
        return cls(clock_ns, versions, tuple(words), node)

    def apply(self, facts: Facts) -> None:
        facts.versions.update(self.versions)
        facts.pretended = list(self.words)
