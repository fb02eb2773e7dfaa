"""Checkpoints on disk: a folder each, with a manifest that vouches for every byte; which are whole, and which to keep.

    checkpoints/step-00000100/manifest.json          what is in it, with the size and SHA-256 of every file, and its own
    checkpoints/step-00000100/rank-00000.safetensors what rank 0 wrote
    checkpoints/latest                               the name of the newest one, for people and scripts

A checkpoint is written under a hidden name, synced and then renamed: a folder called step-... is complete, unless it
was damaged later, which the manifest shows. No torch.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson

from bireme.errors import UserError
from bireme.files import sync_folder, written_whole
from bireme.text import printable

CHECKPOINTS = "checkpoints"
LATEST = "latest"
MANIFEST = "manifest.json"
ASIDE = "passed-over-"  # before the name of a checkpoint that is not gone on from any more
TENSORS_SUFFIX = ".safetensors"
FORMAT = "bireme-checkpoint"
VERSION = 1

_NAME = re.compile(r"step-([0-9]{8,})")
_HIDDEN = re.compile(r"\.step-[0-9]{8,}\.[0-9a-f]+\.(partial|replaced|deleted)|\.latest\.[0-9a-f]+\.tmp")
_FILE = re.compile(r"rank-[0-9]{5,}" + re.escape(TENSORS_SUFFIX))  # in the checkpoint's own folder, nowhere else
_CHUNK_BYTES = 1 << 22


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step that a checkpoint's name says; None for what is no checkpoint's name."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def hidden_folder(checkpoints: Path, step: int, tag: str, state: str) -> Path:
    """The name of a checkpoint that is being written (`partial`) or taken away (`replaced`, `deleted`)."""
    return checkpoints / f".{name_of(step)}.{tag}.{state}"


# --- the manifest ------------------------------------------------------------------------------------------------


class Unusable(UserError):
    """Why a checkpoint is not to be used; fit for a terminal, as names and versions may be anybody's."""

    def __init__(self, reason: str):
        super().__init__(printable(reason)[:300])


def _sealed(manifest: dict[str, Any]) -> bytes:
    """The manifest with its own checksum: a flipped bit in a number is still valid JSON."""
    digest = sha256(orjson.dumps(manifest, option=orjson.OPT_SORT_KEYS)).hexdigest()
    options = orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE
    return orjson.dumps({"manifest": manifest, "sha256": digest}, option=options)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, with the sizes of its files checked. Unusable with the reason."""
    path = folder / MANIFEST
    try:
        sealed = orjson.loads(path.read_bytes())
        manifest, digest = sealed["manifest"], sealed["sha256"]
        found = sha256(orjson.dumps(manifest, option=orjson.OPT_SORT_KEYS)).hexdigest()
    except FileNotFoundError:
        raise Unusable(f"it has no {MANIFEST}") from None
    except OSError as error:
        raise Unusable(f"{MANIFEST} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise Unusable(f"{MANIFEST} is torn or damaged") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise Unusable(f"{MANIFEST} was not written by bireme")
    if found != digest:
        raise Unusable(f"{MANIFEST} is damaged: it does not match its own checksum")
    if manifest.get("version") != VERSION:
        raise Unusable(f"it has version {manifest.get('version')}, this bireme reads version {VERSION}")
    _check_fields(manifest)
    if step_of(folder) not in (None, manifest["step"]):
        raise Unusable(f"{MANIFEST} is of step {manifest['step']}")
    for name, file in manifest["files"].items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            raise Unusable(f"{name} is missing" if missing else f"{name}: {error.strerror}") from None
        if size != file["bytes"]:
            raise Unusable(f"{name} has {size} bytes instead of {file['bytes']}")
    # Whoever reads the tensors takes every file of the folder: none may have come from elsewhere.
    foreign = sorted({each.name for each in folder.glob(f"*{TENSORS_SUFFIX}")} - set(manifest["files"]))
    if foreign:
        raise Unusable(f"{foreign[0]} is not in its manifest")
    return manifest


def file_digest(path: Path) -> str:
    """SHA-256 of a file, read back in pieces. Raises OSError."""
    digest = sha256()
    with path.open("rb") as file:
        while piece := file.read(_CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _check_fields(manifest: dict[str, Any]) -> None:
    """Whether what is used of a manifest, which may come from anywhere, has the right types."""
    kinds = {"step": int, "samples": int, "world_size": int, "layout": str, "saved_utc": str}
    kinds |= dict.fromkeys(("config", "model", "data", "tensors", "files"), dict)
    for name, kind in kinds.items():
        if type(manifest.get(name)) is not kind:
            raise Unusable(f"{MANIFEST} has no {name}, or one of the wrong type")
    if not 1 <= manifest["step"] < 1 << 31 or not 0 <= manifest["samples"] < 1 << 53:
        raise Unusable(f"{MANIFEST} has a step or a number of samples that cannot be")
    for name, file in manifest["files"].items():
        named = _FILE.fullmatch(name) and isinstance(file, dict)
        if not named or type(file.get("bytes")) is not int or type(file.get("sha256")) is not str:
            raise Unusable(f"{MANIFEST} describes a file as no bireme does")
    for tensor in manifest["tensors"].values():
        shape = tensor.get("shape") if isinstance(tensor, dict) else None
        if type(shape) is not list or not all(type(size) is int and size >= 0 for size in shape):
            raise Unusable(f"{MANIFEST} describes a tensor as no bireme does")


def check_files(folder: Path, manifest: dict[str, Any], names: Iterable[str] | None = None) -> None:
    """Reads the files (all, or those named) and holds them against the manifest. Unusable with the reason."""
    for name in sorted(manifest["files"]) if names is None else names:
        try:
            digest = file_digest(folder / name)
        except OSError as error:
            raise Unusable(f"{name} cannot be read: {error.strerror}") from None
        if digest != manifest["files"][name]["sha256"]:
            raise Unusable(f"{name} is damaged: it does not match its checksum")


# --- the folder of all of them -----------------------------------------------------------------------------------


def candidates(checkpoints: Path) -> list[Path]:
    """Every checkpoint by its name, newest first, whole or not. Raises UserError when the folder cannot be read."""
    try:
        found = [each for each in checkpoints.iterdir() if step_of(each) is not None]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"cannot read {checkpoints}: {error.strerror}") from None
    return sorted(found, key=lambda each: step_of(each) or 0, reverse=True)


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is one checkpoint, and not that of several; it may have been renamed or copied."""
    return step_of(folder.resolve()) is not None or os.path.exists(folder / MANIFEST)  # noqa: PTH110 (never raises)


def read_latest(checkpoints: Path) -> str | None:
    """The name in `latest`; None when there is none, or it is damaged."""
    try:
        with (checkpoints / LATEST).open("rb") as file:
            name = file.read(64).decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return name if _NAME.fullmatch(name) else None


def commit(partial: Path, checkpoints: Path, step: int, manifest: dict[str, Any], tag: str) -> Path:
    """Makes the files under a hidden name a checkpoint: all of it at once. Raises OSError; then there is none."""
    with (partial / MANIFEST).open("xb") as file:
        file.write(_sealed({"format": FORMAT, "version": VERSION, "step": step, **manifest}))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(partial)
    final = checkpoints / name_of(step)
    replaced = None
    if final.exists():  # a damaged one of the same step, which was passed over when the run was resumed
        replaced = hidden_folder(checkpoints, step, tag, "replaced")
        final.rename(replaced)
    partial.rename(final)
    sync_folder(checkpoints)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)
    return final


def point(checkpoints: Path, step: int) -> None:
    """Makes `latest` name this checkpoint. Raises OSError."""
    with written_whole(checkpoints / LATEST) as file:
        file.write(f"{name_of(step)}\n".encode())
    sync_folder(checkpoints)


def set_aside(checkpoints: Path, step: int) -> list[str]:
    """Renames checkpoints newer than `step`, which a run that goes on from there has passed over: one that is whole
    after all must not be gone on from later. Returns the new names. Raises OSError."""
    renamed = []
    for folder in candidates(checkpoints):
        if (step_of(folder) or 0) > step:
            aside = folder.with_name(f"{ASIDE}{folder.name}")
            number = 1
            while aside.exists():
                number += 1
                aside = folder.with_name(f"{ASIDE}{folder.name}-{number}")
            folder.rename(aside)
            renamed.append(aside.name)
    if renamed:
        sync_folder(checkpoints)
    return renamed


def to_delete(steps: Iterable[int], keep: int, keep_every: int) -> list[int]:
    """The steps whose checkpoints are not kept: neither among the last `keep` nor a multiple of `keep_every` (pure)."""
    ordered = sorted(steps, reverse=True)
    return [step for step in ordered[keep:] if not (keep_every and step % keep_every == 0)]


def prune(checkpoints: Path, keep: int, keep_every: int, tag: str) -> list[str]:
    """Deletes what is not to be kept; torn checkpoints do not count. Returns the names of those that are gone."""
    whole = []
    for folder in candidates(checkpoints):
        with contextlib.suppress(Unusable):
            read_manifest(folder)
            whole.append(step_of(folder) or 0)
    gone = []
    for step in to_delete(whole, keep, keep_every):
        hidden = hidden_folder(checkpoints, step, tag, "deleted")
        (checkpoints / name_of(step)).rename(hidden)  # at once: half a checkpoint must not look like one
        shutil.rmtree(hidden, ignore_errors=True)
        gone.append(name_of(step))
    return gone


def leftovers(checkpoints: Path) -> list[Path]:
    """What is being written or deleted, or was when a run was killed."""
    try:
        return sorted(each for each in checkpoints.iterdir() if _HIDDEN.fullmatch(each.name))
    except OSError:
        return []


def clean(checkpoints: Path) -> None:
    """Removes what a run that was killed left half-written or half-deleted."""
    for each in leftovers(checkpoints):
        with contextlib.suppress(OSError):
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each, ignore_errors=True)
            else:
                each.unlink()
