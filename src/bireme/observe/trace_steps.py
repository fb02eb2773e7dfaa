"""Which steps are traced: the text that chooses them, and how much a run may trace. Pure; no torch."""

import re

from bireme.errors import UserError
from bireme.text import count

MOST_STEPS = 64
MOST_BYTES = 64_000_000  # of trace.jsonl that one attempt of a run may add
ESTIMATED_BYTES = 8_000  # of one rank and step: about 80 collectives and their waits

_FORM = "20, 20:22 (both ends count) or 5,20:22"


def parse_steps(text: str, option: str = "--trace-steps") -> list[int]:
    """The steps that a text such as ``5,20:22`` chooses, sorted; none for an empty one. UserError for what is no such
    text, begins before step 1, or ends before it begins."""
    chosen: set[int] = set()
    for part in text.split(",") if text.strip() else []:
        match = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", part.strip())
        if match is None:
            raise UserError(f"{option} {part.strip()[:40]!r} is not understood: {_FORM}")
        first, last = int(match[1]), int(match[2] or match[1])
        if first < 1:
            raise UserError(f"{option} {part.strip()!r}: the first step is 1")
        if last < first:
            raise UserError(f"{option} {part.strip()!r} ends before it begins")
        if last - first >= 1_000_000:  # not one of which could be traced
            raise UserError(f"{option} {part.strip()!r} chooses {last - first + 1} steps: {_FORM}")
        chosen.update(range(first, last + 1))
    return sorted(chosen)


def check_amount(steps: list[int], ranks: int, option: str = "--trace-steps") -> None:
    """UserError where so many steps of so many ranks are more than a trace may hold, or a viewer would open."""
    step_bytes = ESTIMATED_BYTES * ranks
    most = max(1, min(MOST_STEPS, MOST_BYTES // step_bytes))
    if len(steps) > most:
        raise UserError(
            f"{option} chooses {count(len(steps), 'step')} of {count(ranks, 'rank')}, an estimated "
            f"{len(steps) * step_bytes / 1e6:.3g} MB: choose at most {count(most, 'step')}"
        )


def stretches(steps: list[int]) -> list[tuple[int, int]]:
    """First and last step of each stretch without a gap. `steps` are sorted."""
    found: list[tuple[int, int]] = []
    for step in steps:
        if found and step == found[-1][1] + 1:
            found[-1] = (found[-1][0], step)
        else:
            found.append((step, step))
    return found
