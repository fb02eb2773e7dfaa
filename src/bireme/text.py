"""Words for people: counts and lists, and text of other machines made fit for a terminal and a shell."""

import shlex
from collections.abc import Sequence


def printable(text: str) -> str:
    """Text without control characters: they are written as escapes."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def listed(names: list[str], most: int = 6) -> str:
    """``a, b and 3 more``."""
    shown = ", ".join(names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def rank_list(ranks: Sequence[int]) -> str:
    """``0-3,8``: stretches of ranks, shortened."""
    stretches: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if stretches and rank == stretches[-1][1] + 1:
            stretches[-1][1] = rank
        else:
            stretches.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in stretches)


def name_ranks(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 0-2, 5``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {rank_list(ranks).replace(',', ', ')}"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def short(value: float) -> str:
    """A number in about three digits, never with an exponent: `0.52`, `12.3`, `157`, `1234`."""
    text = f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def duration(seconds: float) -> str:
    """``1:02:03`` or ``2:03``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def one_line(error: BaseException, most: int = 200) -> str:
    """What an error says, and of which file, without line ends."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return " ".join(printable(" ".join(text.split()) or type(error).__name__).split())[:most]


def shell(word: str) -> str:
    """A word of another machine as one word of a command to copy."""
    return shlex.quote(word)
