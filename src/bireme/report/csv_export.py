"""The ledger as CSV, one row per step and rank, for spreadsheets and data frames (its columns: docs/metrics.md)."""

import csv
import io
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import orjson

from bireme.errors import UserError
from bireme.files import open_regular, written_whole
from bireme.ledger import PHASES, STATES, unobserved_states
from bireme.run_reader import RUN_FILE, STEPS_FILE, earlier_run_file, is_number, is_step, number_of, read_facts
from bireme.text import count

_NOT_FINITE = ("nan", "inf", "-inf")
_OWN_COLUMNS = ("step", "skipped", "rank", "node", "local_rank", "wall_ms", "loss_global", "tokens_global")
_LAST_COLUMNS = ("hidden_ms", "hidden_transfer_ms", "gc_ms", "overhead_training_thread_ms", "overhead_background_ms")

COLUMNS = (*_OWN_COLUMNS, *(f"{phase}_{state}_ms" for phase in PHASES for state in STATES), *_LAST_COLUMNS)


def csv_command(run: Path, out: Path | None) -> None:
    """`bireme export csv RUN [--out FILE]`: the newest attempt's ledger, to standard output or to a file that is there
    whole or not at all. The record is read line by line: its size does not matter.

    Raises UserError for what is no run or has no step, and for a file that cannot be written.
    """
    if out is None and sys.stdout is None:
        raise UserError("standard output is closed: name the file to write with --out FILE")
    earlier = map(earlier_run_file, range(number_of(read_facts(run), "attempt") - 1, 0, -1))
    for name in chain([RUN_FILE], earlier):  # resumed, and no step made since: the attempt before
        facts = read_facts(run, name)
        steps = _Steps(run, facts)
        first = next(steps, None)
        if first is not None:
            break
    else:
        damaged = f" ({count(steps.damaged, 'damaged line')})" if steps.damaged else ""
        raise UserError(f"run {run} has no step yet{damaged}")
    _write_to(out, facts, first, steps)
    if steps.damaged:
        print(f"bireme: {count(steps.damaged, 'damaged line')} of {run / STEPS_FILE} left out", file=sys.stderr)


def write_rows(facts: dict[str, Any], steps: Iterable[dict[str, Any]], out: TextIO) -> None:
    """Write the header, and a row for each rank of each of `steps` (lines of steps.jsonl that were checked). Open a
    file for it with `newline=""`."""
    writer = csv.writer(out)  # RFC 4180
    writer.writerow(COLUMNS)
    node_of = {rank: node["name"] for node in facts["nodes"] for rank in node["ranks"]}
    local_rank_of = {
        rank: each.get("local_rank")
        for rank, each in enumerate(facts.get("ranks") or [])
        if isinstance(each, dict) and type(each.get("local_rank")) is int
    }
    names = [(_text(node_of[rank]), local_rank_of.get(rank, "")) for rank in range(facts["world_size"])]
    missing = facts.get("missing") or {}
    unseen = [STATES.index(state) for state in unobserved_states(missing)]
    cells_unseen = [phase * len(STATES) + state for phase in range(len(PHASES)) for state in unseen]
    no_collectives = "collectives" in missing
    for step in steps:
        skipped, loss = _text(step["skipped"]), _loss(step)
        tokens = "" if step["tokens"] is None else step["tokens"]
        gc_ns = step.get("gc_ns") or [None] * len(names)
        rows = []
        for rank, (node, local_rank) in enumerate(names):
            first: list[Any] = [step["step"], skipped, rank, node, local_rank]
            start_ns = step["start_ns"][rank]
            if start_ns is None:
                rows.append([*first, "", loss, tokens, *[""] * (len(COLUMNS) - len(_OWN_COLUMNS))])
                continue
            cells = [_ms(cell_ns) for cell_ns in step["cells_ns"][rank]]
            for index in cells_unseen:
                cells[index] = ""
            hidden = (step["hidden_ns"][rank], step["hidden_transfer_ns"][rank])
            rows.append(
                [
                    *first,
                    _ms(step["end_ns"][rank] - start_ns),
                    loss,
                    tokens,
                    *cells,
                    *(("", "") if no_collectives else map(_ms, hidden)),
                    "" if gc_ns[rank] is None else _ms(gc_ns[rank]),
                    *map(_ms, step["overhead_ns"][rank]),
                ]
            )
        writer.writerows(rows)


class _Steps(Iterator[dict[str, Any]]):
    """The steps of one attempt, read line by line; `damaged` counts lines that cannot be used."""

    def __init__(self, run: Path, facts: dict[str, Any]):
        self.damaged = 0
        self._facts = facts
        resumed = type(facts.get("attempt")) is int and facts["attempt"] > 1
        self._first_step = facts["first_step"] if resumed and type(facts.get("first_step")) is int else None
        try:
            self._file = open_regular(run / STEPS_FILE)
        except FileNotFoundError:
            raise UserError(f"{run} has no {STEPS_FILE} beside its {RUN_FILE}: is it still being copied?") from None
        except OSError as error:
            raise UserError(f"cannot read {run / STEPS_FILE}: {error.strerror}") from None

    def __next__(self) -> dict[str, Any]:
        for text in self._file:
            try:
                line = orjson.loads(text)
            except orjson.JSONDecodeError:
                self.damaged += text.endswith(b"\n") and not text.isspace()  # else it is still being written
                continue
            number = line.get("step") if isinstance(line, dict) else None
            if self._first_step is not None and type(number) is int and number < self._first_step:
                continue
            if is_step(line, self._facts["world_size"], sys.maxsize):  # groups are not needed, and may be newer
                return dict(line)
            self.damaged += 1
        self._file.close()
        raise StopIteration


def _write_to(out: Path | None, facts: dict[str, Any], first: dict[str, Any], rest: Iterable[dict[str, Any]]) -> None:
    def steps() -> Iterator[dict[str, Any]]:
        yield first
        yield from rest

    if out is None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8", newline="")
        write_rows(facts, steps(), sys.stdout)
        sys.stdout.flush()
        return
    try:
        with written_whole(out) as file:
            text = io.TextIOWrapper(file, encoding="utf-8", newline="")
            write_rows(facts, steps(), text)
            text.detach()
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}") from None


def _ms(value_ns: int) -> str:
    """Nanoseconds as exact decimal milliseconds."""
    whole, rest = divmod(abs(value_ns), 1_000_000)
    return f"{'-' if value_ns < 0 else ''}{whole}.{rest:06d}"


def _loss(step: dict[str, Any]) -> str:
    if is_number(step["loss"]):
        return repr(step["loss"])
    return step["loss_reason"] if step.get("loss_reason") in _NOT_FINITE else ""


def _text(value: str | None) -> str:
    """Text that a spreadsheet would take for a formula gets an apostrophe before it: it may come from anywhere."""
    text = value or ""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) else text
