"""`bireme checkpoint list`, `verify` and `export`: what the user sees of them."""

import contextlib
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bireme.checkpoint.folder import (
    ASIDE,
    CHECKPOINTS,
    Unusable,
    candidates,
    check_files,
    is_checkpoint,
    leftovers,
    name_of,
    read_latest,
    read_manifest,
    step_of,
)
from bireme.errors import UserError
from bireme.run_reader import RUN_FILE
from bireme.text import count, listed, printable

_COLUMNS = ("step", "saved (UTC)", "size", "ranks", "layout", "samples", "")


def list_command(given: Path, json: bool) -> None:
    found, folder = _find(given)
    latest = read_latest(folder)
    rows = [_describe(each, latest) for each in found]
    left = [] if is_checkpoint(given) else leftovers(folder)
    aside = [] if is_checkpoint(given) else sorted(folder.glob(f"{ASIDE}*"))
    if json:
        _print_json(
            {
                "folder": str(folder),
                "latest": latest,
                "checkpoints": rows,
                "passed_over": [{"name": each.name, "bytes": _size_bytes(each)} for each in aside],
                "leftovers": [{"name": each.name, "bytes": _size_bytes(each)} for each in left],
            }
        )
        return
    console = Console()
    if rows:
        console.print(_table(rows))
    else:
        _say(console, _none_in(given))
    for row in rows:
        if not row["whole"]:
            _say(console, f"{row['name']} is not whole: {row['reason']}")
    if latest is not None and latest not in [row["name"] for row in rows] and not is_checkpoint(given):
        _say(console, f"latest names {latest}, which is not there")
    for each in aside:
        _say(console, f"{each.name} ({_megabytes(_size_bytes(each))}): not gone on from any more; delete it by hand")
    for each in left:
        _say(
            console, f"{each.name} ({_megabytes(_size_bytes(each))}): being written or deleted, or left by a killed run"
        )


def verify_command(given: Path, json: bool) -> int:
    found, _ = _find(given)
    if not found:
        raise UserError(_none_in(given))
    console = Console()
    results = []
    for folder in found:
        result = _verify(folder)
        results.append(result)
        if not json:
            size = f"{count(result['files'], 'file')}, {_megabytes(result['bytes'])}"
            _say(console, f"{result['name']}: " + ("; ".join(result["flaws"]) if result["flaws"] else f"good, {size}"))
    bad = sum(bool(result["flaws"]) for result in results)
    if json:
        _print_json({"bad": bad, "checkpoints": results})
    elif bad and len(results) > 1:
        _say(console, f"{bad} of {len(results)} checkpoints bad: they are passed over when the run goes on")
    return 1 if bad else 0


def export_command(given: Path, out: Path, step: int | None) -> None:
    from bireme.checkpoint.export import description_file, export  # torch

    description_file(out)  # before gigabytes are read
    found, folder = _find(given)
    if step is not None:
        if is_checkpoint(given):
            raise UserError(f"--step chooses among the checkpoints of a run, but {given} is a single checkpoint")
        steps = [name_of(step_of(each) or 0) for each in found]
        found = [each for each in found if step_of(each) == step]
        if steps and not found:
            raise UserError(f"{folder} has no checkpoint of step {step}; it has {listed(steps)}")
    if not found:
        raise UserError(_none_in(given))
    console = Console()
    chosen, manifest, skipped = newest_whole(found)
    for each in skipped:
        _say(console, f"{each}; passed over")
    written = export(chosen, manifest, out)
    size = _megabytes(out.stat().st_size)
    _say(console, f"step {manifest['step']} ({count(manifest['samples'], 'sample')}) of {chosen}: {size}")
    _say(console, f"exported: {', '.join(map(str, written))}")


def newest_whole(found: list[Path]) -> tuple[Path, dict[str, Any], list[str]]:
    """Of checkpoints, newest first, the first that is whole, its manifest, and those passed over with the reason. Every
    file is read. UserError when none is whole."""
    skipped: list[str] = []
    for folder in found:
        try:
            manifest = read_manifest(folder)
            check_files(folder, manifest)
            return folder, manifest, skipped
        except Unusable as error:
            skipped.append(f"{folder}: {error}")
    raise UserError(f"no usable checkpoint: {'; '.join(skipped)}")


def _find(given: Path) -> tuple[list[Path], Path]:
    """The checkpoints that a run, its folder of checkpoints or one of them stands for, newest first, and the folder
    that they are in."""
    if not given.is_dir():
        raise UserError(f"{given} is not a directory: give a run's, or a checkpoint's")
    if is_checkpoint(given):
        return [given], given.parent
    inside = given / CHECKPOINTS
    folder = inside if inside.is_dir() or (given / RUN_FILE).exists() else given
    return candidates(folder), folder


def _none_in(given: Path) -> str:
    return f"{given} holds no checkpoint (bireme train --checkpoint-every N saves them)"


def _describe(folder: Path, latest: str | None) -> dict[str, Any]:
    """What a checkpoint's manifest and the sizes of its files say; it is not read."""
    row: dict[str, Any] = {"name": folder.name, "step": step_of(folder)}
    manifest: dict[str, Any] = {}
    reason = None
    try:
        manifest = read_manifest(folder)
        row["step"] = manifest["step"]
    except Unusable as error:
        reason = str(error)
    row |= {name: manifest.get(name) for name in ("saved_utc", "world_size", "layout", "samples")}
    row |= {"bytes": _size_bytes(folder), "whole": reason is None, "reason": reason, "latest": folder.name == latest}
    return row


def _verify(folder: Path) -> dict[str, Any]:
    """Every file of a checkpoint against its checksum."""
    result: dict[str, Any] = {"name": folder.name, "path": str(folder), "files": 0, "bytes": 0, "flaws": []}
    try:
        manifest = read_manifest(folder)
    except Unusable as error:
        result["flaws"].append(str(error))
        return result
    for name, file in sorted(manifest["files"].items()):
        result["files"] += 1
        result["bytes"] += file["bytes"]
        try:
            check_files(folder, manifest, [name])
        except Unusable as error:
            result["flaws"].append(str(error))
    return result


def _size_bytes(path: Path) -> int:
    """Of a file, or of all in a folder that somebody may be deleting."""
    size_bytes = 0
    with contextlib.suppress(OSError):
        for each in [path, *path.iterdir()] if path.is_dir() else [path]:
            with contextlib.suppress(OSError):
                size_bytes += each.lstat().st_size if each.is_file() else 0
    return size_bytes


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for name in _COLUMNS:
        table.add_column(name, justify="right" if name in ("step", "size", "ranks", "samples") else "left")
    for row in rows:
        state = "whole" if row["whole"] else "not whole"
        cells = (
            row["step"],
            (row["saved_utc"] or "")[:19].replace("T", " "),
            _megabytes(row["bytes"]),
            row["world_size"],
            row["layout"],
            row["samples"],
            f"{state}, latest" if row["latest"] else state,
        )
        table.add_row(*(Text(printable("" if cell is None else str(cell))) for cell in cells))
    return table


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.3g} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.3g} MB"


def _say(console: Console, line: str) -> None:
    console.print(Text(printable(line)), soft_wrap=True)


def _print_json(value: dict[str, Any]) -> None:
    print(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode())
