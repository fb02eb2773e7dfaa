"""What a step is made of, as a reader names it: eight parts that add up to the step. Pure."""

from collections.abc import Sequence

from bireme.ledger import BLOCKED, PHASES, RUNNABLE, RUNNING, STATES, TRANSFER, WAIT

Cells = Sequence[float | None]  # phase by phase, in each the states; milliseconds, None where not known

COMPUTING = "computing"
WAITING = "wait"
TRANSFERRING = "transfer"
CONTENTION = "contention"
INPUT, CHECKPOINT, OTHER = "input", "checkpoint", "other"
STANDING = "blocked"

# Part: (the state whose colour it has, its name in a list, in a sentence with the milliseconds before it).
PARTS: dict[str, tuple[str, str, str]] = {
    COMPUTING: ("running", "computing", "computing"),
    WAITING: ("wait", "waiting for other ranks", "waiting for other ranks"),
    TRANSFERRING: ("transfer", "exposed transfer", "exposed transfer"),
    CONTENTION: ("runnable", "contention for cores", "contention for cores"),
    INPUT: ("blocked", "input", "input"),
    CHECKPOINT: ("blocked", "checkpoints", "checkpoints"),
    OTHER: ("blocked", "logging and other work outside of training", "other work outside of training"),
    STANDING: ("blocked", "blocked on something else", "blocked on something else"),
}
LOSSES = tuple(part for part in PARTS if part != COMPUTING)


def split(cells: Cells) -> dict[str, float | None]:
    """The parts of a ledger of 30 cells; they add up to its sum. None where no cell of a part is known.

    Contention, transfer and wait are those of all phases; input, checkpoint and other what else is in these phases;
    computing and blocked what else is in forward, backward and optimizer.
    """
    of_state = {RUNNABLE: CONTENTION, TRANSFER: TRANSFERRING, WAIT: WAITING}
    of_phase = {"input": INPUT, "checkpoint": CHECKPOINT, "other": OTHER}
    parts: dict[str, float | None] = dict.fromkeys(PARTS)
    for place, value in enumerate(cells):
        phase, state = PHASES[place // len(STATES)], place % len(STATES)
        part = of_state.get(state) or of_phase.get(phase) or {RUNNING: COMPUTING, BLOCKED: STANDING}[state]
        if value is not None:
            parts[part] = (parts[part] or 0.0) + value
    return parts


def total_ms(cells: Cells) -> float:
    return sum(value or 0.0 for value in cells)


def mean_cells(ledgers: Sequence[Cells]) -> list[float | None]:
    """Cell by cell; None where no ledger knows."""
    result: list[float | None] = []
    for column in zip(*ledgers, strict=True):
        known = [value for value in column if value is not None]
        result.append(sum(known) / len(known) if known else None)
    return result
