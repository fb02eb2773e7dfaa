"""The one exception that means "the user can fix this": shown as a single line, never as a traceback."""


class UserError(Exception):
    """What is wrong, which field, file or rank it concerns, and what to do about it; in one line."""

    exit_code = 2


class SharedError(UserError):
    """A UserError that every rank raises at the same time: rank 0 alone shows it."""

    shown_by_rank_0 = True


def nearest(word: str, known: list[str] | tuple[str, ...]) -> str:
    """``" (did you mean 'x'?)"`` for the closest known word, or an empty string when nothing is close."""
    from difflib import get_close_matches  # imported late: only a mistake needs it

    matches = get_close_matches(word, known, n=1, cutoff=0.5)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
