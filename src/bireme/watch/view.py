"""The terminal view of `bireme watch`: figures laid out in lines of a given width. Pure."""

from collections.abc import Sequence

from rich.text import Text

from bireme.ledger import STATES
from bireme.report.colours import ACCENT, STATE_COLOURS, WAIT
from bireme.report.terminal import ms
from bireme.text import count, duration
from bireme.watch.figures import (
    FINISHED,
    KILLED,
    QUIET,
    RUNNING_WELL,
    STOPPED,
    WAITING,
    Bar,
    Figures,
    ago,
    rate,
    utilisation,
)

# Each state has a shade of its own, too: colour says nothing that the shades do not.
SHADES = dict(zip(STATES, "█▓▒░·", strict=True))
ASCII_SHADES = dict(zip(STATES, "#%+-.", strict=True))

_STATUS_STYLE = {
    WAITING: "dim",
    RUNNING_WELL: "green",
    QUIET: f"bold {WAIT}",
    KILLED: f"bold {WAIT}",
    FINISHED: "bold green",
    STOPPED: f"bold {WAIT}",
}
_VERDICT_LINES = 12
_NOTICES = 10


def compose(
    each: Figures, width: int, height: int | None = None, shades: dict[str, str] = SHADES, keys: bool = False
) -> list[Text]:
    """Lines of at most `width` columns; at most `height` of them, where one is given. `keys`: say how to leave."""
    width = max(width, 1)
    head = [
        *_words([Text(each.name, "bold"), *([Text(each.what)] if each.what else [])], width),
        *_words([Text(word, _STATUS_STYLE[each.status]) for word in each.sentence.split()], width, " "),
    ]
    if each.step is not None:
        head += _progress(each, width, shades)
        head += _words(_numbers(each), width)
    head += [line for note in each.notes for line in _words([Text(word, "dim") for word in note.split()], width, " ")]
    verdicts = [line for sentence in reversed(each.verdicts) for line in _sentence(sentence, width)]
    verdicts = verdicts[: _VERDICT_LINES if height is None else max(1, height // 8)]
    if each.overall is not None:
        verdicts = [Text(), *(verdicts or [Text("no verdict stands", "dim")])]
    foot = [Text("q quits", "dim")] if keys else []

    overall = [each.overall] if each.overall is not None else []
    rows = _Rows([*overall, *each.nodes, *each.ranks], width, shades)
    title = [Text(), Text(f"step by state, mean of the last {count(each.measured, 'measured step')}", "bold")]
    bars = [*title, *_legend(overall[0], each.unobserved, width, shades), *rows.of(overall)] if overall else []
    notices = [Text(str(notice), "yellow" if notice.event == "warning" else "") for notice in each.notices]

    left = None if height is None else max(0, height - len(head) - len(verdicts) - len(bars) - len(foot))
    node_rows, rank_rows, notice_rows = _share(left, len(each.nodes), len(each.ranks), len(notices))
    for name, of, several in (("nodes", each.nodes, node_rows), ("ranks", each.ranks, rank_rows)):
        if several:
            which = f"the slowest {several} of {len(of)} {name}" if several < len(of) else name
            bars += [Text(f"{which}, by self time", "bold"), *rows.of(of[:several])]
    shown = [Text(), *notices[-notice_rows:]] if notice_rows else []
    lines = [*head, *verdicts, *bars, *shown]
    lines = [*(lines if height is None else lines[: max(0, height - len(foot))]), *foot]
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
    return lines


def _share(left: int | None, nodes: int, ranks: int, notices: int) -> tuple[int, int, int]:
    """How many rows of nodes, ranks and events there is room for, in `left` lines. Each kind takes a line more for what
    sets it off."""
    if left is None:
        return min(nodes, 16), min(ranks, 8), min(notices, _NOTICES)

    def rows(room: int, there: int) -> int:
        return max(0, min(room - 1, there))

    events = rows(max(2, left // 4), min(notices, _NOTICES))
    left -= events + 1 if events else 0
    of_ranks = rows(left - left // 2 if nodes else left, ranks)
    of_nodes = rows(left - of_ranks - 1, nodes)
    of_ranks = rows(left - (of_nodes + 1 if of_nodes else 0), ranks)
    left -= sum(each + 1 for each in (of_nodes, of_ranks) if each)
    return of_nodes, of_ranks, min(notices, _NOTICES, events + max(0, left)) if events else 0


def _numbers(each: Figures) -> list[Text]:
    numbers = [
        f"loss {each.loss}",
        rate(each),
        utilisation(each),
        f"step {ms(each.step_ms)} ms (median)" if each.step_ms is not None else "step n/a",
    ]
    numbers += [f"last step {ago(each.since_s)} ago"] if each.since_s is not None else []
    return [Text(number) for number in numbers]


def _progress(each: Figures, width: int, shades: dict[str, str]) -> list[Text]:
    assert each.step is not None
    if each.steps is None:
        return [Text(f"step {each.step}", "bold")]
    text = f"step {each.step}/{each.steps}"
    left = f"ETA {duration(each.left_s)}" if each.left_s is not None else ""
    line = Text(text, "bold")
    room = min(40, width - len(text) - len(left) - 4)
    if room >= 8:
        done = round(room * min(1.0, max(0.0, each.step / each.steps)))
        line.append("  ").append(shades["running"] * done, ACCENT).append(shades["blocked"] * (room - done), "dim")
    return [line.append(f"  {left}" if left else "", "")]


def _legend(bar: Bar, unobserved: frozenset[str], width: int, shades: dict[str, str]) -> list[Text]:
    parts = []
    for state, value_ms in zip(STATES, bar.states_ms, strict=True):
        known = state not in unobserved and bar.step_ms > 0
        share = f"{100 * value_ms / bar.step_ms:.0f} %" if known else "n/a"
        parts.append(Text(shades[state], STATE_COLOURS[state]).append(f" {state} {share}", ""))
    return _words(parts, width)


class _Rows:
    """``rank 3 on node1  █████▓▒░░·  412 ms, self 350``: the bars of a view, all on one scale."""

    def __init__(self, bars: Sequence[Bar], width: int, shades: dict[str, str]):
        self._shades = shades
        self._scale_ms = max((bar.step_ms for bar in bars), default=0.0)
        self._label = min(max((Text(bar.label).cell_len for bar in bars), default=0), width // 3)
        self._text = "{} ms, self {}"
        self._room = self._room_for(bars, width)
        if self._room < 8:
            self._text = "{1}"
            self._room = max(0, self._room_for(bars, width))

    def _room_for(self, bars: Sequence[Bar], width: int) -> int:
        self._numbers = max((len(self._numbers_of(bar)) for bar in bars), default=0)
        return width - self._label - self._numbers - 2

    def _numbers_of(self, bar: Bar) -> str:
        return self._text.format(ms(bar.step_ms), ms(bar.self_ms))

    def of(self, bars: Sequence[Bar]) -> list[Text]:
        return [self._row(bar) for bar in bars]

    def _row(self, bar: Bar) -> Text:
        line = Text(bar.label)
        line.truncate(self._label, overflow="ellipsis", pad=True)
        line.append(" ")
        for state, cells in zip(STATES, _cells(bar.states_ms, self._scale_ms, self._room), strict=True):
            line.append(self._shades[state] * cells, STATE_COLOURS[state])
        line.truncate(self._label + 1 + self._room, pad=True)
        return line.append(f" {self._numbers_of(bar):>{self._numbers}}", "")


def _cells(values: Sequence[float], scale: float, room: int) -> list[int]:
    """Whole cells for parts of a bar: rounded at the parts' ends, so that the bar's length is right."""
    cells, end, before = [], 0.0, 0
    for value in values:
        end += value
        place = round(room * end / scale) if scale > 0 else 0
        cells.append(place - before)
        before = place
    return cells


def _sentence(sentence: str, width: int) -> list[Text]:
    return _words([Text(word, "bold yellow") for word in f"verdict: {sentence}".split()], width, " ")


def _words(parts: Sequence[Text], width: int, between: str = "   ") -> list[Text]:
    """As many parts on a line as there is room for."""
    lines: list[Text] = []
    for part in parts:
        if lines and lines[-1].cell_len + len(between) + part.cell_len <= width:
            lines[-1].append(between).append_text(part)
        else:
            lines.append(part.copy())
    return lines
