"""Events in one line each, for people who look on."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bireme.report.terminal import scaled
from bireme.run_reader import RESUMED, is_number
from bireme.text import name_ranks, printable
from bireme.watch.standing import ranks_of

_MOST_NOTICES = 100
_LONGEST = 300


@dataclass(slots=True)
class Notice:
    """What an event says. A warning that came again, or from more ranks, is one notice."""

    time: str  # of the day, UTC
    event: str
    text: str
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        where = f" ({name_ranks(self.ranks)})" if self.ranks else ""
        return f"{self.time}  " + (f"warning{where}: " if self.event == "warning" else "") + self.text


class Notices:
    """The last events that are worth a line; each warning once, with all ranks that it came from."""

    def __init__(self) -> None:
        self._by_key: dict[object, Notice] = {}  # the newest last

    def add(self, event: Mapping[str, Any]) -> Notice | None:
        """The notice of this event where it says anything new."""
        text = _text(event)
        if not text:
            return None
        kind = str(event["event"])
        ranks = ranks_of(event) if kind == "warning" else ()
        key: object = (kind, text) if kind == "warning" else object()
        before = self._by_key.pop(key, None)
        known = before.ranks if before is not None else ()
        notice = Notice(_time(event), kind, text, tuple(sorted({*known, *ranks})))
        self._by_key[key] = notice
        while len(self._by_key) > _MOST_NOTICES:
            del self._by_key[next(iter(self._by_key))]
        return notice if before is None or notice.ranks != known else None

    def newest(self, most: int) -> list[Notice]:
        """At most so many, in the order of time."""
        return list(self._by_key.values())[-most:] if most > 0 else []


def one_line(value: Any) -> str:
    """Text from a file on one line, without control characters."""
    return printable(" ".join(str(value).split()))[:_LONGEST]


def _time(event: Mapping[str, Any]) -> str:
    stamp = event.get("time_utc")
    return printable(stamp[11:19]) if isinstance(stamp, str) and len(stamp) >= 19 else "--:--:--"


def _text(event: Mapping[str, Any]) -> str:
    """Empty for what would only distract: pauses, quotas, traffic."""
    step, reason = event.get("step"), event.get("reason")
    why = f": {reason}" if reason else ""
    match event.get("event"):
        case "evaluation":
            loss = event.get("loss")
            text = f"evaluation after step {step}: loss {f'{loss:.4f}' if is_number(loss) else loss}"
        case "checkpoint":
            size, seconds = event.get("bytes"), event.get("seconds")
            text = f"checkpoint of step {step}"
            text += f", {scaled(size)}" if is_number(size) and size is not None else ""
            text += f", written in {seconds:.1f} s" if is_number(seconds) else ""
        case "checkpoint_failed":
            text = f"checkpoint of step {step} failed{why}"
        case "preempted":
            text = f"stopped after step {step} by {event.get('signal')}"
            text += "" if event.get("saved") else "; there is no checkpoint of it"
        case kind if kind == RESUMED:
            text = f"resumed after step {step} (attempt {event.get('attempt')})"
        case "status":
            text = f"{event.get('status')}{why}"
        case "injection":
            text = f"injected: {event.get('text') or event.get('kind')}"
        case "hang":
            text = f"hang: {event.get('message')}"
        case "verdict":
            text = f"verdict after step {step}: {event.get('message')}"
        case "warning":
            text = str(event.get("message"))
        case _:
            return ""
    return one_line(text)
