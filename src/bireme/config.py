"""The trainer's configuration: one dataclass, filled from a TOML file and command-line overrides."""

import math
import sys
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from bireme.errors import UserError, nearest
from bireme.layout import check_layout_text


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Every field is a key of the TOML file (`global_batch_size = 32`) and an option (`--global-batch-size 32`)."""

    run: str | None = None
    """Run directory; default: runs/<UTC time>-<id>. One that holds a run already is refused, unless --resume."""

    preset: str = "toy"
    """Model shape by name: toy, toy-llama, small, gpt2, gpt2-medium, gpt2-large, gpt2-xl, llama3-8b, llama3-70b."""

    model: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's shape that differ from the preset: a [model] table, or --model.num-layers 6."""

    layout: str = "ddp"
    """How the model is spread over the ranks: ddp, fsdp, hsdp, tp, pp, or sizes as in pp=2,replicate=2,shard=2,tp=2."""

    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    """Order of a pipeline's forward and backward passes; the interleaved one has several stages on each rank."""

    pipeline_stages_per_rank: int | None = None
    """Stages on each rank of a pipeline; default: 1, or 2 with the interleaved schedule."""

    reshard_after_forward: bool = True
    """With a sharded model, drop a block's gathered weights after its forward pass; backward gathers them again."""

    overlap: bool = True
    """Reduce gradients in buckets during the backward pass (DDP); otherwise in one flat all-reduce after it."""

    bucket_mb: float | None = None
    """Size of DDP's buckets in MiB; default: about eight buckets, none under 0.25 MiB."""

    data: str = "stdlib"
    """Text as it is (a file or folder), or tokens from `bireme data prepare`; default: Python's library sources."""

    steps: int = 200
    """Optimizer steps."""

    seed: int = 0
    """Seed of the initial weights and of the order of the samples."""

    global_batch_size: int = 16
    """Sequences per optimizer step, over all ranks."""

    micro_batch_size: int | None = None
    """Sequences per forward pass on one rank; default: a rank's whole share. A smaller one accumulates gradients."""

    sequence_length: int | None = None
    """Tokens per sequence; default: the model's context."""

    lr: float = 1e-3
    """Peak learning rate."""

    lr_warmup_steps: int = 10
    """Steps over which the learning rate rises from 0; after that it falls along a cosine."""

    lr_min_ratio: float = 0.1
    """Last learning rate / peak learning rate."""

    weight_decay: float = 0.1
    """AdamW's weight decay, on matrices only."""

    beta1: float = 0.9
    """AdamW's decay of the gradient's mean."""

    beta2: float = 0.95
    """AdamW's decay of the squared gradient's mean."""

    gradient_clip_norm: float = 1.0
    """Largest norm of the gradient; 0: no clipping."""

    evaluate_every: int = 100
    """Evaluate after every so many steps; 0: never."""

    evaluation_samples: int = 64
    """Held-out sequences per evaluation, over all ranks."""

    activation_checkpointing: Literal["none", "full"] = "none"
    """Recompute each block's activations in the backward pass (full) or keep them (none)."""

    compile: bool = False
    """Compile each block with torch.compile."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto: a GPU where there is one."""

    threads: int | None = None
    """CPU threads of each rank; default: the node's usable cores shared out evenly."""

    skip_steps: int = 3
    """First steps that are kept out of averages, while buckets and allocators settle."""

    exchange_every: int = 10
    """Ranks exchange what they measured every so many steps (in the background), or every two seconds."""

    checkpoint_every: int = 0
    """Save a checkpoint after every so many steps, and after the last; 0: only when the run is asked to stop."""

    checkpoint_keep: int = 3
    """How many of the newest checkpoints stay."""

    checkpoint_keep_every: int = 0
    """Checkpoints of every step that this divides stay, too; 0: none."""

    resume: bool = False
    """Go on with the run in --run, from its last good checkpoint and with its settings where no others are given."""

    resume_from: str | None = None
    """Go on from another run's last good checkpoint, or from this checkpoint, in a run directory of its own."""

    log_samples: bool = False
    """Write the ids of every step's samples to samples.jsonl."""

    workers: int = 0
    """Processes of each rank that read data ahead; 0: a thread."""

    inject: list[str] = field(default_factory=list)
    """Make something slow, or fail, on purpose: kind=sleep,rank=1,ms=150 (docs/injection.md); may be repeated."""

    gc_every: int = 0
    """Collect Python's garbage on all ranks after every so many steps, and never else; 0: whenever Python does."""

    stall_after: float = 30.0
    """Seconds without movement of a rank after which the run says who is waited for, and where."""

    abort_after: float = 600.0
    """Seconds without movement after which all ranks end (not in the first step); 0: never."""

    trace_steps: str = ""
    """Steps to keep every span of, for `bireme export trace`, as in 20:22 or 5,20:22."""

    metrics_port: int | None = None
    """Port on which rank 0 serves Prometheus metrics; none: nowhere."""

    metrics_address: str = "127.0.0.1"
    """Address that they are served on."""

    peak_seconds: float = 1.0
    """How long to measure what a matrix multiplication reaches on this CPU, for MFU; 0: no MFU on a CPU."""

    def __post_init__(self) -> None:
        positive = ("steps", "global_batch_size", "lr", "exchange_every", "checkpoint_keep", "stall_after")
        optional = ("micro_batch_size", "sequence_length", "threads", "bucket_mb", "pipeline_stages_per_rank")
        for name in (*positive, *optional):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"{name} is {value}: it must be positive")
        not_negative = ("lr_warmup_steps", "weight_decay", "gradient_clip_norm", "evaluate_every", "skip_steps")
        counts = ("checkpoint_every", "checkpoint_keep_every", "workers", "seed", "evaluation_samples", "gc_every")
        for name in (*not_negative, *counts, "peak_seconds", "abort_after"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} is {getattr(self, name)}: it must not be negative")
        if 0 < self.abort_after < self.stall_after:
            raise UserError(
                f"abort_after is {self.abort_after:g}, below stall_after {self.stall_after:g}: a run ends after it has "
                "said whom it waits for; 0 is never"
            )
        if not 0 <= self.lr_min_ratio <= 1:
            raise UserError(f"lr_min_ratio is {self.lr_min_ratio}: it must be from 0 to 1")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: it must be from 0 to below 1")
        for name in ("run", "data", "resume_from"):
            if not str(getattr(self, name)).isprintable():
                raise UserError(f"{name} is {getattr(self, name)!r}: write it with printable characters only")
        if self.resume and self.resume_from is not None:
            raise UserError("resume and resume_from exclude each other: go on in the run itself, or in a new one")
        check_layout_text(self.layout)
        limits = {"global_batch_size": 10_000_000, "threads": 1024, "bucket_mb": 1e6, "peak_seconds": 600.0}
        limits["workers"] = 128
        for each in fields(self):
            value, most = getattr(self, each.name), limits.get(each.name, 2**31 - 1)
            if isinstance(value, (int, float)) and value > most and each.name not in ("lr", "weight_decay"):
                raise UserError(f"{each.name} is {str(value)[:20]}: it must be at most {most:g}")
        if self.evaluate_every and not self.evaluation_samples:
            raise UserError(
                "evaluation_samples is 0 but evaluate_every is not: set evaluate_every to 0 to evaluate never"
            )

    def batch_shape(self, data_parallel_size: int, pipeline_size: int = 1) -> tuple[int, int]:
        """(micro-batch size, micro-batches per step) of each rank; UserError with what would fit.

        Without `micro_batch_size` a pipeline takes at least twice as many micro-batches as it has ranks, where the
        batch is large enough: with m micro-batches over p ranks, (p - 1) / (m + p - 1) of the time is its bubble.
        """
        share, rest = divmod(self.global_batch_size, data_parallel_size)
        if rest:
            below = share * data_parallel_size
            fitting = [str(size) for size in (below, below + data_parallel_size) if size]
            raise UserError(
                f"global_batch_size {self.global_batch_size} does not divide over {data_parallel_size} "
                f"{'data-parallel ' if pipeline_size > 1 else ''}ranks: "
                f"{' or '.join(fitting)} would"
            )
        micro = self.micro_batch_size or share // _pipeline_micro_batches(share, pipeline_size)
        if share % micro:
            fitting = [str(size) for size in range(1, share + 1) if share % size == 0]
            raise UserError(
                f"micro_batch_size {micro} does not divide a rank's {share} sequences per step: "
                f"{', '.join(fitting[-8:])} would"
            )
        return micro, share // micro

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine from `lr` down to `lr * lr_min_ratio` at the last step (steps count from 1)."""
        if step <= self.lr_warmup_steps:
            return self.lr * step / self.lr_warmup_steps
        progress = (step - self.lr_warmup_steps) / max(1, self.steps - self.lr_warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return self.lr * (self.lr_min_ratio + (1 - self.lr_min_ratio) * cosine)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _pipeline_micro_batches(share: int, pipeline_size: int) -> int:
    if pipeline_size == 1:
        return 1
    divisors = [number for number in range(1, share + 1) if share % number == 0]
    whole = [number for number in divisors if number % pipeline_size == 0]  # which every schedule can order
    return next((number for number in whole if number >= 2 * pipeline_size), (whole or divisors)[-1])


# What belongs to one start of the program, and not to the run that is continued.
OF_A_START = (
    "run",
    "resume",
    "resume_from",
    "device",
    "inject",
    "stall_after",
    "abort_after",
    "trace_steps",
    "metrics_port",
    "metrics_address",
)


def load_config(path: Path | None, overrides: Mapping[str, Any], base: Mapping[str, Any] | None = None) -> TrainConfig:
    """The configuration from a TOML file (or none) with overrides on top; `base`, that of a run to continue, is below.

    UserError names the file and field of whatever is wrong: unreadable file, TOML that does not parse, an unknown
    field (with the nearest name), a value of the wrong type.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            document = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{path} is not valid TOML: {error}") from None
        for name, value in document.items():
            values[name.replace("-", "_")] = value
    try:
        below = {name: value for name, value in (base or {}).items() if name not in OF_A_START}
        tables = (below.get("model", {}), values.get("model", {}), overrides.get("model", {}))
        model = {name: value for table in tables for name, value in _table(table).items()}
        values = {**below, **values, **overrides}
        if model:
            values["model"] = model
        return TrainConfig(**_checked(values))
    except UserError as error:
        raise UserError(f"{path}: {error}" if path is not None else str(error)) from None


def _table(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError("model is a table of fields: write [model] in the file")
    return {name.replace("-", "_"): each for name, each in value.items()}


def _checked(values: Mapping[str, Any]) -> dict[str, Any]:
    known = {each.name: each for each in fields(TrainConfig)}
    types_of = typing.get_type_hints(TrainConfig)
    checked = {}
    for name, value in values.items():
        if name not in known:
            raise UserError(f"unknown field {name!r}{nearest(name, list(known))}")
        checked[name] = _converted(name, value, types_of[name])
    return checked


def _converted(name: str, value: Any, wanted: Any) -> Any:
    choices = typing.get_args(wanted) if isinstance(wanted, types.UnionType) else (wanted,)
    for choice in choices:
        if choice is types.NoneType and value is None:
            return None
        if typing.get_origin(choice) is Literal:
            options = list(typing.get_args(choice))
            if value in options:
                return value
            raise UserError(f"{name} is {value!r}: choose {' or '.join(options)}{nearest(str(value), options)}")
        if typing.get_origin(choice) is dict and isinstance(value, dict):
            return value
        is_list = typing.get_origin(choice) is list and isinstance(value, (list, tuple))
        if is_list and all(isinstance(each, str) for each in value):
            return list(value)
        if choice is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            if not abs(value) <= sys.float_info.max:  # also not for NaN, and for whole numbers beyond every float
                raise UserError(f"{name} is {str(value)[:20]}: it must be finite")
            return float(value)
        if choice is int and isinstance(value, int) and not isinstance(value, bool):
            return value
        if choice in (str, bool) and isinstance(value, choice):
            return value
    names = {str: "text", bool: "true or false", int: "a whole number", float: "a number", dict: "a table"}
    names[list] = "a list of texts"
    expected = next(text for kind, text in names.items() if kind in choices or typing.get_origin(choices[0]) is kind)
    raise UserError(f"{name} is {value!r}: it must be {expected}")
