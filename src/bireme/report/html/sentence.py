"""Why is this run this fast, and not faster? One sentence, the largest loss first. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from bireme.report.html.losses import COMPUTING, LOSSES, PARTS, WAITING, Cells, mean_cells, split, total_ms
from bireme.report.terminal import ms, percent
from bireme.text import listed, name_ranks
from bireme.verdict.kinds import DATA, HEALTHY, LINK, ONE_OFF, STAGE

# Of the sentence: `text`; whether it is a `number` of the step, with the `state` whose colour it has; or whether it
# comes `after` the sentence.
Piece = dict[str, Any]

_SMALL = 0.01  # of the step: what is less is not worth a word
_MOST_NAMED = 4
_HEALTHY = 0.85  # of the step: then computing is the news
_SAME_SIZE = 0.5  # of the largest culprit's share: then both are named
_TAIL = 0.05  # by which the mean exceeds the typical step: then the slow steps are worth a word
_WORTH_A_WORD = 0.02  # of the run's time
_OTHERS_WAIT = "of it the others wait"


def sentence(
    typical: Mapping[int, Cells], verdicts: Sequence[dict[str, Any]] | None, facts: dict[str, Any]
) -> list[Piece]:
    """Pieces that, joined, are the sentence (and what follows it).

    typical: by rank its ledger in a typical step. verdicts: as in `--json`, None where there are none.
    facts: `ranks`, `mean_ms`, `median_ms`, `measured` (how many steps), `first_step`, `last_step` of them,
    `verdicts_reason`, `unknown` (what could not be observed).
    """
    found = [each for each in verdicts or [] if each["kind"] != HEALTHY]
    culprits = [each for each in found if _makes_others_wait(each, facts)]
    accused = {rank for each in culprits if each["kind"] != DATA for rank in each["ranks"]}
    others = [cells for rank, cells in typical.items() if rank not in accused]
    if not others:
        culprits, others = [], list(typical.values())
    cells = mean_cells(others)
    step_ms = total_ms(cells)
    parts = split(cells)
    pieces: list[Piece] = [{"text": "A step takes "}, _number(step_ms)]
    losses = _losses(parts, step_ms, culprits, facts)
    named = [each for each in losses if each[0] >= _SMALL * step_ms][:_MOST_NAMED]
    computing = parts[COMPUTING] or 0.0
    rest = step_ms - computing - sum(value for value, _, _ in named)
    if computing >= _HEALTHY * step_ms:
        pieces += [
            {"text": ", and "},
            _number(computing, "running"),
            {"text": f" of it ({percent(computing / step_ms if step_ms else None)}) is computing"},
        ]
        if named:
            pieces.append({"text": "; the largest loss is " if len(named) == 1 else "; the largest losses are "})
            for index, (value, state, words) in enumerate(named):
                words = words.replace(_OTHERS_WAIT, "waiting")
                pieces += [{"text": ", " if index else ""}, _number(value, state), {"text": f" {words}"}]
    else:
        for index, (value, state, words) in enumerate(named):
            pieces += [{"text": "; " if index else ": "}, _number(value, state), {"text": f" {words}"}]
        if rest >= _SMALL * step_ms:
            pieces += [{"text": "; "}, _number(rest), {"text": " smaller losses"}]
        pieces.append({"text": "; the rest, " if named else ": "})
        pieces += [_number(computing, "running"), {"text": ", is computing" if named else " of it is computing"}]
    pieces.append({"text": "."})
    pieces += _afterwards(found, culprits, verdicts, step_ms, facts)
    return [{"number": False, "state": None, "after": False, **piece} for piece in pieces]


def as_text(pieces: Sequence[Piece]) -> str:
    return "".join(piece["text"] for piece in pieces)


def _number(value_ms: float, state: str | None = None) -> Piece:
    return {"text": f"{ms(value_ms)} ms", "number": True, "state": state}


def _makes_others_wait(verdict: dict[str, Any], facts: dict[str, Any]) -> bool:
    """Whether it names some of the ranks (or ranks in turn) as the cause of the others' waiting in a typical step."""
    if verdict["kind"] in (ONE_OFF, LINK):
        return False
    all_ranks = len(verdict["ranks"]) >= facts["ranks"]
    return _caused_ms(verdict, facts) > 0 and (not all_ranks or verdict["kind"] == DATA)


def _caused_ms(verdict: dict[str, Any], facts: dict[str, Any]) -> float:
    """What the others wait for it in a typical step: by its what-if, or as was seen where it lasted for most of the
    steps (of two equally slow ranks neither is worth anything alone)."""
    worth = verdict["what_if"]
    caused = facts["median_ms"] - worth["step_ms"] if worth is not None else 0.0
    seen, steps = verdict["evidence"].get("others_wait_ms"), verdict["evidence"].get("steps")
    if isinstance(seen, int | float) and isinstance(steps, int) and 2 * steps > facts["measured"]:
        caused = max(caused, float(seen))
    return max(0.0, caused)


def _losses(
    parts: dict[str, float | None], step_ms: float, culprits: Sequence[dict[str, Any]], facts: dict[str, Any]
) -> list[tuple[float, str, str]]:
    """(milliseconds, state, words), the largest first; they add up to the step less computing."""
    losses = []
    for part in LOSSES:
        value = parts[part] or 0.0
        state, _, words = PARTS[part]
        if part == WAITING and culprits:
            ordered = sorted(culprits, key=lambda each: -_caused_ms(each, facts))
            first_ms = _caused_ms(ordered[0], facts)
            together = [each for each in ordered if _caused_ms(each, facts) >= _SAME_SIZE * first_ms]
            caused = min(value, sum(_caused_ms(each, facts) for each in together))
            # Within a tenth of it the rest of the waiting is noise of the same cause.
            caused = value if caused >= 0.9 * value else caused
            if caused >= _SMALL * step_ms:
                losses.append((caused, state, f"{_OTHERS_WAIT} for {listed([_who(each) for each in together], 2)}"))
                value -= caused
                words = "other waiting"
        losses.append((value, state, words))
    return sorted((each for each in losses if each[0] > 0), key=lambda each: -each[0])


def _who(verdict: dict[str, Any]) -> str:
    """``rank 3 on node1 (stands still in backward)``."""
    node, ranks, phase = verdict["node"], verdict["ranks"], verdict["phase"]
    if verdict["kind"] == DATA:
        who = "whichever rank is slowest"
    elif verdict["kind"] == STAGE:
        who = f"a pipeline stage ({name_ranks(ranks)})"
    elif verdict["kind"] == "node" or (node and len(ranks) > 1):
        who = f"node {node}"
    else:
        who = name_ranks(ranks) + (f" on {node}" if node else "")
    cause = verdict["cause"]
    where = f" in {phase}" if phase and phase not in (cause or "") else ""
    return f"{who} ({cause}{where})" if cause else who


def _afterwards(
    found: Sequence[dict[str, Any]],
    named: Sequence[dict[str, Any]],
    verdicts: Sequence[dict[str, Any]] | None,
    step_ms: float,
    facts: dict[str, Any],
) -> list[Piece]:
    """What the typical step does not show: slow steps, other findings, or that there are none."""
    texts = [f" {unknown}." for unknown in facts["unknown"]]
    if facts["mean_ms"] > (1 + _TAIL) * step_ms:
        texts.append(f" Slower steps bring the mean to {ms(facts['mean_ms'])} ms.")
    left = [each for each in found if each not in named and each["share"] >= _WORTH_A_WORD]
    if left:
        text = left[0]["sentence"]
        texts.append(f" {text[:1].upper()}{text[1:]}.")
    elif verdicts is None:
        texts.append(f" Who is to blame is not known: {facts['verdicts_reason']}.")
    elif not found:
        one = facts["ranks"] == 1
        texts.append("" if one else " No rank, node or link stands out.")
    return [{"text": text, "after": True} for text in texts if text]
