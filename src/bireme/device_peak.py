"""What the devices of all ranks could do at most: a datasheet's peak for a known GPU, a measured roof for a CPU."""

from typing import Any

import torch

from bireme.channel import Channel
from bireme.flops import measure_matmul_roof, peak_flops_per_s


def peak_of_ranks(channel: Channel, device: torch.device, seconds: float) -> dict[str, Any]:
    """`peak` of run.json; collective. On a CPU a matrix product is measured for `seconds`, 0: not at all."""
    per_rank: float | None = None
    source = "n/a: not measured"
    if device.type == "cuda":
        known = peak_flops_per_s(torch.cuda.get_device_name(device), "bfloat16")
        if known is not None:
            per_rank, source = known.flops_per_s, known.source
        else:
            source = "n/a: the device is not in the table of peaks"
    channel.all_gather(None)  # all at once: ranks that share cores share the roof
    if device.type != "cuda" and seconds:
        per_rank = measure_matmul_roof(seconds)
        source = f"measured fp32 matrix multiplication, {torch.get_num_threads()} threads per rank"
    gathered = channel.all_gather(per_rank)
    known_everywhere = all(each is not None for each in gathered)
    return {
        "flops_per_s": sum(gathered) if known_everywhere else None,
        "per_rank_flops_per_s": gathered,
        "source": source,
    }
