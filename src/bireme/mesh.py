"""The device mesh of a layout: this rank's place in it and the process group of each dimension."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from bireme.channel import COLLECTIVE_TIMEOUT_S
from bireme.layout import DIMENSIONS, MODEL, TIED, Layout


@dataclass(slots=True)
class Mesh:
    """`device_mesh` is None for one rank. `groups`: of every dimension with several ranks; `model`: all ranks that
    together hold one replica; `tied`: the two ranks that have the embedding and the head it is tied to."""

    layout: Layout
    order: list[int]  # the rank at each position
    where: dict[str, int]  # this rank's place in every dimension
    device_mesh: DeviceMesh | None
    groups: dict[str, Any]
    model: Any = None
    tied: Any = None
    ties: bool = False  # whether there are such ranks at all

    @property
    def data_parallel_rank(self) -> int:
        return self.layout.data_parallel_rank(self.where)

    @property
    def counts_tokens(self) -> bool:
        """Whether this rank counts its samples: the others of its pipeline and tensor-parallel group see the same."""
        return self.where["pp"] == 0 and self.where["tp"] == 0

    def sub(self, *names: str) -> DeviceMesh | None:
        """The mesh of these dimensions, without those of one rank; None when nothing is left."""
        several = tuple(name for name in names if name in self.groups)
        if self.device_mesh is None or not several:
            return None
        return self.device_mesh[several] if several != self.device_mesh.mesh_dim_names else self.device_mesh


def make_mesh(
    layout: Layout, order: list[int], rank: int, device_type: str, tied: bool, timeout_s: float | None = None
) -> Mesh:
    """Collective. `tied`: whether the head is the embedding, so that the ends of a pipeline share a parameter;
    `timeout_s`: of a pipeline's sends and receives."""
    where = layout.coordinates(order.index(rank))
    if layout.size == 1:
        return Mesh(layout, order, where, None, {})
    sizes = layout.mesh_sizes
    ranks = torch.tensor(order).reshape(tuple(sizes.values()))
    device_mesh = DeviceMesh(device_type, ranks, mesh_dim_names=tuple(sizes))
    mesh = Mesh(layout, order, where, device_mesh, {name: device_mesh.get_group(name) for name in sizes})
    if layout.pp > 1:
        # A group of its own, also where that is all ranks: gloo's sends and receives keep the timeout that their group
        # was made with, and that of all ranks was made to find each other in seconds.
        mesh.groups["pp"] = _one_of(
            mesh, layout.groups("pp"), "pp", timedelta(seconds=timeout_s or COLLECTIVE_TIMEOUT_S)
        )
    split = [name for name in ("pp", "shard", "tp") if name in sizes]
    if len(split) == 1:
        mesh.model = mesh.groups[split[0]]
    elif split:
        mesh.model = _one_of(mesh, layout.groups("pp", "shard", "tp"), MODEL)
    mesh.ties = tied and layout.pp > 1
    if mesh.ties:
        mine = _one_of(mesh, layout.tied_groups(), TIED)
        mesh.tied = mine if where["pp"] in (0, layout.pp - 1) else None
    return mesh


def _one_of(mesh: Mesh, groups: list[list[int]], name: str, timeout: timedelta | None = None) -> Any:
    """Makes all these groups of positions, as every rank must; returns the one that this rank is in. The group of all
    ranks is taken where there is no timeout of its own to keep."""
    mine = None
    for group in groups:
        ranks = sorted(mesh.order[position] for position in group)
        if timeout is None and len(ranks) == mesh.layout.size:
            made: Any = dist.group.WORLD
        else:
            made = dist.new_group(ranks, timeout=timeout, group_desc=name)
        if dist.get_rank() in ranks:
            mine = made
    return mine


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_part(whole: Tensor, parameter: Tensor) -> Tensor:
    """The part of `whole` that this rank holds of `parameter`, whose whole it is.

    Worked out from the mesh alone (tensor parallelism divides first, then `fully_shard` cuts what is left along its
    first dimension as `torch.chunk` does), so that it can be held against what PyTorch did.
    """
    if not isinstance(parameter, DTensor):
        return whole
    names = parameter.device_mesh.mesh_dim_names or ()
    coordinates: Sequence[int] = parameter.device_mesh.get_coordinate() or ()
    for name in reversed(DIMENSIONS):
        if name in names:
            index = names.index(name)
            dimension = getattr(parameter.placements[index], "dim", None)
            if dimension is not None:
                parts = whole.chunk(parameter.device_mesh.size(index), dimension)
                here = coordinates[index]
                whole = parts[here] if here < len(parts) else parts[0].narrow(dimension, 0, 0)
    return whole


def replicated(parameter: Tensor, dimension: str) -> bool:
    """Whether the ranks of a mesh dimension hold the same values of a parameter."""
    if not isinstance(parameter, DTensor):
        return True
    names = parameter.device_mesh.mesh_dim_names or ()
    return dimension not in names or getattr(parameter.placements[names.index(dimension)], "dim", None) is None
