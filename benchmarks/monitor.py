"""What the Monitor costs a loop that knows nothing of it: plain DDP with and without, in blocks that take turns.

    python benchmarks/monitor.py

Phases are found by hooks, as in anybody's script (`bireme.Monitor(directory, model=..., optimizer=...)`). Each block
makes its model anew from the same seed: the losses must be the same, bit for bit. `planted` is `on` plus 4 ms of work a
step: what the benchmark must be able to see.
"""

import gc
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import bireme
from bireme.world import World

if TYPE_CHECKING:
    from benchmarks import common
    from benchmarks.overhead import Arms, ratios, work
else:
    import common
    from overhead import Arms, ratios, work

STEPS, SETTLED_AFTER = 14, 2  # DDP settles its buckets in the second step
BATCH, WIDTH, LAYERS = 528, 768, 6
PLANTED_NS = 4_000_000


def block(monitor: bireme.Monitor | None, parts: "Parts", planted_ns: int) -> tuple[list[float], list[float]]:
    """Wall time of each step after the first two, in nanoseconds, and all losses."""
    walls_ns, losses = [], []
    ended_ns = time.perf_counter_ns()
    loader = parts.loader
    for batch, target in monitor.batches(loader) if monitor else loader:
        if monitor is None:
            losses.append(parts.step(batch, target, planted_ns))
        else:
            with monitor.step(tokens=len(batch)):
                losses.append(parts.step(batch, target, planted_ns))
        now_ns = time.perf_counter_ns()
        walls_ns.append(now_ns - ended_ns)
        ended_ns = now_ns
    return [float(each) for each in walls_ns[SETTLED_AFTER:]], [float(each) for each in losses]


class Parts:
    """A model, its optimizer and its data, the same each time."""

    def __init__(self, rank: int):
        torch.manual_seed(0)
        layers = [each for _ in range(LAYERS) for each in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        self.model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=4)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        data = torch.randn(STEPS * BATCH, WIDTH, generator=torch.Generator().manual_seed(rank))
        self.loader = DataLoader(TensorDataset(data, data.roll(1, 0)), batch_size=BATCH)

    def step(self, batch: torch.Tensor, target: torch.Tensor, planted_ns: int) -> Any:
        loss = (self.model(batch) - target).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        work(planted_ns)
        return loss.detach()


def measure(world: World, pairs: int, scratch: Path) -> int:
    arms = Arms(world, scratch, "monitor")
    losses: dict[str, list[list[float]]] = {}
    block(None, Parts(world.rank), 0)  # what is set up once
    for number, arm in enumerate(arms.turns(pairs)):
        parts = Parts(world.rank)
        monitor = None
        if arm != "off":
            monitor = bireme.Monitor(arms.scratch / str(number), model=parts.model, optimizer=parts.optimizer)
        gc.collect()
        dist.barrier()
        walls_ns, seen = block(monitor, parts, PLANTED_NS if arm == "planted" else 0)
        if monitor is not None:
            monitor.close()
        arms.costs[arm].append(statistics.median(walls_ns))
        losses.setdefault(arm, []).append(seen)
    steps_ns = arms.mean(arms.costs)
    every = [each for blocks in losses.values() for each in blocks]
    same = all(world.channel.all_gather(all(each == every[0] for each in every)))
    if world.rank:
        return 0
    step_ms = statistics.median(steps_ns["off"]) / 1e6
    planted_ms = [(p - o) / 1e6 for p, o in zip(steps_ns["planted"], steps_ns["on"], strict=True)]
    results = [
        common.Result("step: wall time on / off", "", common.spread(ratios(steps_ns, "on", "off")), 4, most=1.01),
        common.Result("  4 ms planted: planted - on", "ms", common.spread(planted_ms), 2),
        common.Result("losses of all blocks are the same", "", common.spread([float(same)] * 3), 0, note=str(same)),
    ]
    return common.conclude(
        "monitor",
        f"What the Monitor costs a plain DDP loop: {world.size} ranks, a step takes {step_ms:.0f} ms",
        results,
        {"steps_per_block": STEPS - SETTLED_AFTER, "wall_ns_per_step": steps_ns},
        ok=same,
    )


if __name__ == "__main__":
    raise SystemExit(common.main("What the Monitor costs a plain DDP loop.", pairs=16, quick_pairs=2, measure=measure))
