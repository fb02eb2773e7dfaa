"""Text of other machines, made fit for a terminal and for a shell."""

import shlex


def printable(text: str) -> str:
    """Text without control characters: they are written as escapes. (As world.printable, which needs torch.)"""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def listed(names: list[str], most: int = 6) -> str:
    """``a, b and 3 more``."""
    shown = ", ".join(names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shell(word: str) -> str:
    """A word of another machine as one word of a command to copy."""
    return shlex.quote(word)
