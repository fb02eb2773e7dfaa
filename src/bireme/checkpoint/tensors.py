"""Tensors of a sharded model to safetensors files and back, through torch.distributed.checkpoint's planning.

PyTorch's own writer of this format builds each file in memory while it holds the interpreter (1.5 ms per MB, in which
the training thread stands still) and knows no checksums; its reader is used as it is.
"""

import os
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from bireme.channel import new_side_group
from bireme.checkpoint.folder import TENSORS_SUFFIX, file_digest
from bireme.text import name_ranks, one_line

_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint8: "U8",
}
_CHUNK_BYTES = 1 << 22
_SPARE_BYTES = 1 << 24  # left free beyond what a checkpoint needs: the run's own record goes to the same disk


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """One file of a checkpoint, as its writer knows it."""

    name: str
    size_bytes: int
    sha256: str


class ShardWriter(StorageWriter):
    """Writes what the plan gives to each rank as one safetensors file in `folder`, synced and read back.

    On rank 0 `files` and `tensors` (shape and type of every whole tensor) describe what all ranks wrote; `write_s` is
    how long this rank's own writing took. before_write: called before it.
    """

    def __init__(self, folder: Path, before_write: Callable[[], None] = lambda: None):
        self.folder = folder
        self._before_write = before_write
        self.write_s = 0.0
        self.files: list[WrittenFile] = []
        self.tensors: dict[str, dict[str, Any]] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0. An error here is raised on every rank, before anything is written."""
        needed = sum(_item_bytes(item) for plan in plans for item in plan.items)
        _make(self.folder)
        free = shutil.disk_usage(self.folder).free
        if free < needed + _SPARE_BYTES:
            raise OSError(
                f"the disk is full: the checkpoint needs {needed / 1e6:.3g} MB, and {_SPARE_BYTES / 1e6:.3g} MB are "
                f"kept for the record; {free / 1e6:.3g} MB are free"
            )
        return [
            replace(plan, storage_data=f"rank-{rank:05d}{TENSORS_SUFFIX}" if plan.items else None)
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        began = time.monotonic()
        self._before_write()
        if plan.items:
            _make(self.folder)
            # Wide elements first: every tensor is then aligned.
            items = sorted(plan.items, key=lambda item: (-_element_bytes(item), item.index.fqn))
            file = _write(self.folder / plan.storage_data, items, planner)
            results = [
                WriteResult(index=item.index, size_in_bytes=_item_bytes(item), storage_data=file) for item in items
            ]
        self.write_s = time.monotonic() - began
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.files = sorted({each.storage_data for mine in results for each in mine}, key=lambda file: file.name)
        self.tensors = {
            name: {"shape": list(each.size), "dtype": _DTYPES[each.properties.dtype]}
            for name, each in metadata.state_dict_metadata.items()
            if isinstance(each, TensorStorageMetadata)
        }

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _make(folder: Path) -> None:
    """A folder in that of all checkpoints; a run directory that is gone is not made again."""
    folder.parent.mkdir(exist_ok=True)
    folder.mkdir(exist_ok=True)


def _element_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return item.tensor_data.properties.dtype.itemsize


def _item_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel() * _element_bytes(item)


def _header(items: list[WriteItem]) -> bytes:
    """The file's beginning: where each tensor lies (safetensors), and where in the whole tensor it belongs (the key
    that PyTorch's reader looks for)."""
    offset = 0
    entries: dict[str, Any] = {}
    places: dict[str, Any] = {}
    for item in items:
        assert item.tensor_data is not None
        chunk, name, end = item.tensor_data.chunk, item.index.fqn, offset + _item_bytes(item)
        dtype = _DTYPES[item.tensor_data.properties.dtype]
        entries[name] = {"dtype": dtype, "shape": list(chunk.sizes), "data_offsets": [offset, end]}
        places[name] = {"saved_offsets": list(chunk.offsets)}
        offset = end
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": orjson.dumps(places).decode()}
    text = orjson.dumps({"__metadata__": metadata, **entries})
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _pieces(tensor: Any) -> Iterator[memoryview]:
    view = memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return (view[start : start + _CHUNK_BYTES] for start in range(0, len(view), _CHUNK_BYTES))


def _write(path: Path, items: list[WriteItem], planner: SavePlanner) -> WrittenFile:
    digest = sha256()
    with path.open("xb", buffering=0) as file:
        header = _header(items)
        for piece in (memoryview(header), *(piece for item in items for piece in _pieces(planner.resolve_data(item)))):
            digest.update(piece)  # this, and writing, without holding the interpreter
            rest = piece
            while rest:
                rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
        size_bytes = file.tell()
    if file_digest(path) != digest.hexdigest():
        raise OSError(f"{path.name} does not read back as it was written")
    return WrittenFile(path.name, size_bytes, digest.hexdigest())


class SaveError(Exception):
    """Why a checkpoint was not written, by rank."""


def save(
    tensors: dict[str, Tensor], folder: Path, group: Any, before_write: Callable[[], None] = lambda: None
) -> ShardWriter:
    """Writes the tensors of all ranks of `group` to `folder`, each part once; collective. Raises SaveError on every
    rank when one of them could not."""
    writer = ShardWriter(folder, before_write)
    try:
        dcp.save(tensors, storage_writer=writer, process_group=group)
    except CheckpointException as error:
        raise SaveError(_reason(error)) from None
    except RuntimeError as error:  # a rank is gone: the backend says so in its own words
        raise SaveError(f"another rank has left: {str(error).splitlines()[0]}") from None
    return writer


def load(tensors: dict[str, Tensor], folder: Path, group: Any) -> None:
    """Fills the tensors, whatever their sharding, from a checkpoint that was checked; collective. `group`: a side group
    of all ranks; None for one process."""
    try:
        group = group or new_side_group([0])  # the group of all ranks is observed
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), process_group=group)
    except CheckpointException as error:
        raise SaveError(_reason(error)) from None


def _reason(error: CheckpointException) -> str:
    said: dict[str, list[int]] = {}
    for rank, (each, _) in sorted(error.failures.items()):
        said.setdefault(one_line(each), []).append(rank)
    return "; ".join(f"{name_ranks(ranks)}: {text}" for text, ranks in said.items())
