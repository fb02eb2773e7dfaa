"""What a checkpoint holds of training, as named tensors: weights, the optimizer's moments, random number generators.

Names are those of the whole model and each tensor knows its place in it, so that nothing depends on the layout:
`model.<parameter>`, `optimizer.<parameter>.<moment>`, `random.rank-00000.cpu`.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from bireme.errors import UserError
from bireme.model import EMBEDDING, HEAD
from bireme.parallel import Parallel
from bireme.text import one_line

MOMENTS = ("exp_avg", "exp_avg_sq")
MODEL_PREFIX = "model."


def _parameters(parallel: Parallel) -> Iterator[tuple[str, Tensor]]:
    """Every parameter by the name that its values are stored under: of tied weights, also on the last stage of a
    pipeline, that is the embedding's."""
    tied = parallel.plan.model.tied_embedding
    for name, parameter in parallel.named_parameters():
        yield (EMBEDDING if tied and name == HEAD else name), parameter


def _saves(parallel: Parallel, name: str) -> bool:
    """Whether this rank is among those that store a parameter: a tied head's twin is on the first stage."""
    return name != EMBEDDING or any(part.first for part in parallel.parts)


def _random_names(rank: int) -> tuple[str, str]:
    return f"random.rank-{rank:05d}.cpu", f"random.rank-{rank:05d}.cuda"


def _random_state(rank: int, device: torch.device) -> dict[str, Tensor]:
    cpu, cuda = _random_names(rank)
    state = {cpu: torch.get_rng_state()}
    if device.type == "cuda":
        state[cuda] = torch.cuda.get_rng_state(device)
    return state


def tensors_to_save(
    parallel: Parallel, optimizer: torch.optim.Optimizer, rank: int, device: torch.device
) -> dict[str, Tensor]:
    """What this rank holds, by name; the tensors that are trained, not copies. After at least one optimizer step."""
    tensors = {}
    for name, parameter in _parameters(parallel):
        if _saves(parallel, name):
            tensors[MODEL_PREFIX + name] = parameter.detach()
            for moment in MOMENTS:
                tensors[f"optimizer.{name}.{moment}"] = optimizer.state[parameter][moment]
    return tensors | _random_state(rank, device)


def copy_to_cpu(tensors: dict[str, Tensor], into: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies that training does not touch, with the same places in the whole; `into` (earlier copies, or nothing) is
    used again where it fits. All that a step waits for."""
    copies = {}
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        old = into.get(name)
        buffer = old.to_local() if isinstance(old, DTensor) else old
        if buffer is None or buffer.shape != local.shape:
            buffer = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda)
        buffer.copy_(local, non_blocking=True)
        copies[name] = buffer
        if isinstance(tensor, DTensor):
            # Not DTensor.from_local: it would put the copy on the mesh's device, which has no room for it.
            copies[name] = DTensor(buffer, tensor._spec, requires_grad=False)
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.current_stream().synchronize()
    return copies


def tensors_to_load(
    parallel: Parallel,
    optimizer: torch.optim.Optimizer,
    step: int,
    stored: dict[str, Any],
    rank: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """The tensors that a checkpoint is read into: this rank's parameters and moments, made where they are missing, and
    buffers for the generators where the checkpoint (`stored`: its names) has this rank's."""
    tensors = {}
    for name, parameter in _parameters(parallel):
        tensors[MODEL_PREFIX + name] = parameter.detach()
        state = optimizer.state[parameter]
        # As AdamW makes them before its first step.
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        state["step"] = torch.tensor(float(step), dtype=torch.float32, device=local.device)
        for moment in MOMENTS:
            state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format, requires_grad=False)
            tensors[f"optimizer.{name}.{moment}"] = state[moment]
    generators = _random_state(rank, device).items()
    return tensors | {
        name: state for name, state in generators if name in stored and stored[name]["shape"] == list(state.shape)
    }


def restore_generators(tensors: dict[str, Tensor], rank: int, device: torch.device) -> None:
    """Sets the random number generators to what was read, where there was this rank's state."""
    cpu, cuda = _random_names(rank)
    try:
        if cpu in tensors:
            torch.set_rng_state(tensors[cpu])
        if cuda in tensors and device.type == "cuda":
            torch.cuda.set_rng_state(tensors[cuda], device)
    except RuntimeError as error:
        raise UserError(f"the checkpoint's random number generator is of no use: {one_line(error)}") from None
