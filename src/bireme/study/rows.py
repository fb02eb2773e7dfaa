"""The experiments with ranks and stragglers: rows of a table, kept as one file each, and a line fitted through them.

A run gives one row for every delay it planted (a sweep plants several, step by step, in one process group). A row
that is measured again replaces the old one, so a folder of rows is always the latest word on every experiment.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from bireme.errors import UserError
from bireme.ledger import RUNNABLE, RUNNING, STATES
from bireme.record import write_json_atomic
from bireme.report.colours import STATE_COLOURS
from bireme.report.summary import Step, measured_steps, quantile, summarise
from bireme.run_reader import Run, is_number

if TYPE_CHECKING:
    from rich.console import JustifyMethod
    from rich.table import Table

FORMAT = "bireme-row"
VERSION = 1

RANK_COMMANDS = tuple(f"torchrun --nproc_per_node={ranks} multinode.py" for ranks in (1, 2, 4))
STRAGGLER_COMMAND = "STRAGGLER_MS=150 torchrun --nproc_per_node=4 multinode.py"
SWEEP_COMMAND = "STRAGGLER_MS=0,50,100,150,200 torchrun --nproc_per_node=2 multinode.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One experiment. Times are milliseconds a step, means over ranks and steps unless it says otherwise; compute,
    contention, transfer, wait and other add up to the mean step. None: not observed, or not known."""

    ranks: int
    straggler_ms: float  # 0: balanced
    straggler_rank: int | None  # set also at 0 ms when the row is a sweep's
    straggler_phase: str | None
    reduction: str  # "overlap" or "flat"; "unknown" in a loop of the user's own
    model: str  # preset
    nodes: int
    step_ms: float  # median over steps
    compute_ms: float  # running in forward, backward and optimizer
    contention_ms: float | None
    transfer_ms: float | None
    wait_ms: float | None
    communication_share: float | None
    other_ms: float  # what remains: blocked on anything else (a planted sleep is here), input, logging
    hidden_ms: float | None
    step_minus_busy_ms: float | None  # of the straggler's rank: median of (step - running - runnable)
    steps: int
    run: str

    @property
    def key(self) -> tuple[str, ...]:
        """What makes two rows the same experiment."""
        rank = "none" if self.straggler_rank is None else str(self.straggler_rank)
        delay = f"{self.straggler_ms:g}"
        return str(self.ranks), delay, rank, self.straggler_phase or "none", self.reduction, self.model


# --- rows from a run ---------------------------------------------------------------------------------------------


def rows_from_run(run: Run) -> list[Row]:
    """One row for each delay that was planted in the run's measured steps, by increasing delay; a run without any
    gives one balanced row. Raises UserError when the run has no measured step."""
    planted = next((e for e in run.events if e["event"] == "injection" and e.get("kind", "sleep") == "sleep"), {})
    rank, phase = planted.get("rank"), planted.get("phase")
    steps_of_delay: dict[float, list[Step]] = {}
    for step in measured_steps(run):
        steps_of_delay.setdefault(float(step.get("injected_ms") or 0.0), []).append(step)
    straggler_rank = None
    if any(steps_of_delay) and type(rank) is int and 0 <= rank < run.world_size:
        straggler_rank = rank
    return [
        _row(run, delay_ms, straggler_rank, phase if isinstance(phase, str) else None, steps)
        for delay_ms, steps in sorted(steps_of_delay.items())
    ]


def _row(run: Run, delay_ms: float, straggler_rank: int | None, phase: str | None, steps: list[Step]) -> Row:
    summary = summarise(run, {step["step"] for step in steps})
    communication = summary["communication_ms"]
    named = (summary["compute_ms"], summary["contention_ms"], communication["transfer"], communication["wait"])
    not_busy_ms = []
    for step in steps:
        cells_ns = None if straggler_rank is None else step["cells_ns"][straggler_rank]
        if cells_ns is not None:
            busy_ns = sum(cells_ns[RUNNING :: len(STATES)]) + sum(cells_ns[RUNNABLE :: len(STATES)])
            not_busy_ms.append((sum(cells_ns) - busy_ns) / 1e6)
    return Row(
        ranks=run.world_size,
        straggler_ms=delay_ms,
        straggler_rank=straggler_rank,
        straggler_phase=None if straggler_rank is None else phase,
        reduction=run.facts.get("reduction") or "unknown",
        model=(run.facts.get("model") or {}).get("preset") or "unknown",
        nodes=len(run.facts["nodes"]),
        step_ms=summary["step_ms"]["median"],
        compute_ms=summary["compute_ms"],
        contention_ms=summary["contention_ms"],
        transfer_ms=communication["transfer"],
        wait_ms=communication["wait"],
        communication_share=summary["communication_share"],
        other_ms=summary["step_ms"]["mean"] - sum(value or 0.0 for value in named),
        hidden_ms=communication["hidden"],
        step_minus_busy_ms=quantile(not_busy_ms, 0.5) if not_busy_ms else None,
        steps=len(steps),
        run=str(run.directory),
    )


# --- rows as files -----------------------------------------------------------------------------------------------


def save_rows(rows: Sequence[Row], directory: Path) -> None:
    """Write each row to its own file, named after its key, over the row it replaces. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    for row in rows:
        write_json_atomic(directory / _file_name(row), {"format": FORMAT, "version": VERSION, **asdict(row)})


def _file_name(row: Row) -> str:
    ranks, delay, rank, phase, reduction, model = row.key
    straggler = "balanced" if row.straggler_rank is None and not row.straggler_ms else f"{delay}ms-rank{rank}-{phase}"
    name = f"ranks{ranks}_{straggler}_{reduction}_{model}"
    safe = re.sub(r"[^A-Za-z0-9._-]", "-", name)[:100]
    if safe != name:  # two names must not become one
        safe += "-" + blake2b(name.encode(errors="replace"), digest_size=4).hexdigest()
    return safe + ".json"


def load_rows(directory: Path) -> tuple[list[Row], list[str]]:
    """The rows in a folder, sorted by key, and a note for each `.json` file there that is none."""
    import orjson

    rows, notes = [], []
    for path in sorted(directory.glob("*.json")):
        try:
            value = orjson.loads(path.read_bytes())
            if not isinstance(value, dict) or value.get("format") != FORMAT or value.get("version") != VERSION:
                raise ValueError("it is not a row of this version")
            rows.append(_row_from_json(value))
        except (OSError, ValueError) as error:
            notes.append(f"{path} was left out: {error}")
    return sorted(rows, key=lambda row: (row.ranks, row.straggler_ms, row.key)), notes


def _row_from_json(value: dict[str, Any]) -> Row:
    arguments: dict[str, Any] = {}
    for field in fields(Row):
        item = value.get(field.name)
        kinds = get_args(field.type) or (field.type,)
        if float in kinds:
            kinds += (int,)
        if type(item) not in kinds or (isinstance(item, float) and not is_number(item)):
            raise ValueError(f"field {field.name!r} is {type(item).__name__}, expected {kinds[0].__name__}")
        arguments[field.name] = item
    return Row(**arguments)


# --- the table and the line --------------------------------------------------------------------------------------


def nothing_to_show(directory: Path) -> UserError:
    """The error for a folder without rows: it says which commands make some."""
    commands = "; ".join((*RANK_COMMANDS, STRAGGLER_COMMAND, SWEEP_COMMAND))
    return UserError(f"there are no measurements in {directory}: run {commands}")


def table(rows: Sequence[Row]) -> "Table":
    """The experiments, one a line: milliseconds a step, means over ranks; the step is a median."""
    from rich.table import Table

    from bireme.report.terminal import ms, percent, safe

    result = Table(box=None, pad_edge=False, padding=(0, 0, 0, 1))
    result.caption, result.caption_justify = "ms a step, mean over ranks; step: median", "left"
    models = {row.model for row in rows}
    for name, colour in (
        ("ranks", ""),
        ("straggler", ""),
        ("reduction", ""),
        ("compute", STATE_COLOURS["running"]),
        ("contention", STATE_COLOURS["runnable"]),
        ("comm: transfer\n+ wait", STATE_COLOURS["transfer"]),
        ("comm\nshare", ""),
        ("step\n(ms)", ""),
    ):
        text = name in ("straggler", "reduction")
        justify: JustifyMethod = "left" if text else "right"
        result.add_column(name, justify=justify, header_style=f"bold {colour}".strip(), no_wrap=not text)
    for row in sorted(rows, key=lambda row: (row.model, row.ranks, row.straggler_ms, row.key)):
        communication = "n/a"
        if row.transfer_ms is not None and row.wait_ms is not None:
            communication = f"{ms(row.transfer_ms)} + {ms(row.wait_ms)}"
        result.add_row(
            str(row.ranks),
            safe(straggler(row)),
            safe(row.reduction if len(models) == 1 else f"{row.reduction}, {row.model}"),
            ms(row.compute_ms),
            ms(row.contention_ms),
            communication,
            percent(row.communication_share),
            ms(row.step_ms),
        )
    return result


def straggler(row: Row) -> str:
    """`none`, or how much is planted where."""
    if not row.straggler_ms and row.straggler_rank is None:
        return "none"
    where = "" if row.straggler_rank is None else f", rank {row.straggler_rank}"
    if row.straggler_phase not in (None, "forward"):  # where a straggler sleeps unless it is told otherwise
        where += f", {row.straggler_phase}"
    return f"{row.straggler_ms:g} ms{where}"


def fit_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float, float]:
    """Least squares: (slope, intercept, r_squared). Raises ValueError with fewer than two distinct x."""
    if len(x) != len(y) or len(set(x)) < 2:
        raise ValueError("a line needs two distinct x and as many y as x")
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    xx = sum((a - mean_x) ** 2 for a in x)
    yy = sum((b - mean_y) ** 2 for b in y)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / xx
    intercept = mean_y - slope * mean_x
    residual = sum((b - intercept - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    return slope, intercept, 1 - residual / yy if yy else 1.0


def balanced_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows without a delay, one for each number of ranks, reduction and model; a run of its own goes before the
    0 ms steps of a sweep."""
    best: dict[tuple[int, str, str], Row] = {}
    for row in sorted(rows, key=lambda row: row.straggler_rank is not None):
        if not row.straggler_ms:
            best.setdefault((row.ranks, row.reduction, row.model), row)
    return sorted(best.values(), key=lambda row: (row.model, row.ranks, row.reduction != "overlap", row.reduction))


def sweep_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows of the run with the most delays, by increasing delay; none when no run had two."""
    runs: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        runs.setdefault((row.run, *row.key[:1], *row.key[2:]), []).append(row)
    longest = max(runs.values(), key=lambda sweep: (len(sweep), sweep[0].run), default=[])
    return sorted(longest, key=lambda row: row.straggler_ms) if len(longest) > 1 else []


def straggler_pair(rows: Sequence[Row]) -> tuple[Row | None, Row | None]:
    """(balanced, straggler) on equal terms, of the most ranks and then the largest delay; (None, straggler) when
    there is no balanced run to compare with, (None, None) without a straggler. A sweep's own steps without a delay
    come before another run's: those were measured at another moment."""
    balanced = {(row.ranks, row.reduction, row.model): row for row in balanced_rows(rows)}
    delayed = sorted(
        (row for row in rows if row.straggler_ms), key=lambda row: (row.ranks, row.straggler_ms), reverse=True
    )
    for row in delayed:
        for other in rows:
            if other.run == row.run and not other.straggler_ms:
                return other, row
        if (row.ranks, row.reduction, row.model) in balanced:
            return balanced[row.ranks, row.reduction, row.model], row
    return None, delayed[0] if delayed else None
