import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bireme.layout import Layout
from bireme.mesh import make_mesh
from bireme.observe.collectives import process_groups

Ranks = Callable[..., list[Any]]


def a_stage_that_waits(rank: int, size: int, timeout_s: float | None, late_s: float) -> tuple[str, bool]:
    """What becomes of a receive from a stage that is late, and whether all ranks' group is used for it."""
    mesh = make_mesh(Layout(pp=2), [0, 1], rank, "cpu", tied=True, timeout_s=timeout_s)
    group = mesh.groups["pp"]
    said = "arrived"
    try:
        if rank == 0:
            time.sleep(late_s)
            dist.send(torch.ones(1), group=group, group_dst=1)
        else:
            dist.recv(torch.empty(1), group=group, group_src=0)
    except RuntimeError as error:
        said = str(error)
    return said, group is dist.group.WORLD


@pytest.mark.parametrize(("timeout_s", "late_s", "expected"), [(None, 1.5, "arrived"), (1.0, 4.0, "timed out")])
def test_a_pipeline_waits_as_long_as_it_is_told(
    ranks: Ranks, timeout_s: float | None, late_s: float, expected: str
) -> None:
    """gloo's sends and receives keep the timeout that their group was made with; that of all ranks is a short one."""
    (_, shared), (said, _) = ranks(2, a_stage_that_waits, timeout_s, late_s)
    assert not shared and expected in said.lower()


def groups_of(rank: int, size: int, layout: Layout) -> list[tuple[str, list[int]]]:
    mesh = make_mesh(layout, list(range(size)), rank, "cpu", tied=True)
    found = {**mesh.groups, "model": mesh.model, "tied": mesh.tied}
    assert all(group in process_groups() for group in found.values() if group is not None)
    return [(name, dist.get_process_group_ranks(group)) for name, group in found.items() if group is not None]


def test_every_dimension_has_its_group(ranks: Ranks) -> None:
    by_rank = ranks(4, groups_of, Layout(pp=2, dp_shard=2))
    assert by_rank[3] == [("pp", [1, 3]), ("shard", [2, 3]), ("model", [0, 1, 2, 3]), ("tied", [1, 3])]
    assert ranks(2, groups_of, Layout(dp_replicate=2))[0] == [("replicate", [0, 1])]
