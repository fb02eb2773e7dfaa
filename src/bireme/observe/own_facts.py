"""What a run says about a loop that is not Bireme's: versions, size of the model, FLOPs per token, peak."""

import os
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

import bireme
from bireme.channel import Channel
from bireme.device_peak import peak_of_ranks
from bireme.errors import UserError
from bireme.flops import flops_of_config

FlopsPerToken = float | Callable[[], float] | Literal["count"] | None

_PEAK_S = 0.5
_NO_PEAK = "n/a: not measured, as the model's FLOPs per token are not known either"


def versions() -> dict[str, str]:
    return {
        "bireme": bireme.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
    }


def device_of(models: Sequence[Any], optimizers: Sequence[Any]) -> torch.device:
    """Where the first model's, or optimizer's, parameters are."""
    for model in models:
        if isinstance(model, torch.nn.Module):
            for parameter in model.parameters():
                return torch.device(parameter.device)
    for optimizer in optimizers:
        for group in getattr(optimizer, "param_groups", None) or []:
            for parameter in group["params"]:
                return torch.device(parameter.device)
    return torch.device("cpu")


def own_facts(
    channel: Channel, models: Sequence[Any], flops: tuple[dict[str, float] | None, str | None], device: torch.device
) -> dict[str, Any]:
    """Fields of run.json; collective. `flops`: what `given_flops` said."""
    per_token, source = flops
    wanted = any(channel.all_gather(source is not None))
    return {
        "command": sys.argv,
        "launch_id": os.environ.get("TORCHELASTIC_RUN_ID"),
        "versions": versions(),
        "config": None,
        "network": {"link": os.environ.get("BIREME_LINK"), "delay": os.environ.get("BIREME_DELAY")},
        "model": {
            "preset": ", ".join(_name(model) for model in models) or None,
            "parameters": sum(parameter.numel() for model in models for parameter in model.parameters()) or None,
            "flops_per_token": per_token,
            "flops_source": source,
        }
        if models or source
        else None,
        "peak": peak_of_ranks(channel, device, _PEAK_S) if wanted else {"source": _NO_PEAK},
    }


def given_flops(
    models: Sequence[Any], flops: FlopsPerToken, sequence_length: int | None
) -> tuple[dict[str, float] | None, str | None]:
    """(FLOPs per token by convention, where they are from); (None, where they will come from) before they are
    counted, and (None, None) where nobody knows. UserError for FLOPs that are none."""
    if flops == "count":
        return None, "three times what the forward pass of the first step was counted to take"
    if flops is not None:
        value: Any = flops
        if callable(flops):
            try:
                value = flops()
            except Exception as error:
                raise UserError(f"flops_per_token() raised {type(error).__name__}: {error}") from error
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise UserError(
                f'flops_per_token={value!r}: give a number above 0, a function that returns one, or "count"'
            )
        return {"full": float(value)}, "given"
    if sequence_length is None:
        return None, None
    for model in models:
        known = flops_of_config(getattr(_inside(model), "config", None), sequence_length)
        if known is not None:
            return {"full": known.full, "causal": known.causal}, "the model's config"
    return None, None


def _inside(model: Any) -> Any:
    """The model that a wrapper wraps: DDP's and FSDP's module, a compiled one's original."""
    for name in ("_orig_mod", "module"):
        inner = getattr(model, name, None)
        if isinstance(inner, torch.nn.Module):
            return _inside(inner)
    return model


def _name(model: Any) -> str:
    return type(_inside(model)).__name__
