"""One decoder-only transformer, in two published shapes: GPT-2's and Llama 3's.

GPT-2 (Radford et al. 2019): LayerNorm, learned positions, GELU (tanh), biases, tied head. Llama 3 (Grattafiori et al.
2024): RMSNorm, rotary positions, SwiGLU, grouped queries, no biases, untied head. Both normalise before each sublayer.
"""

import dataclasses
import math
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bireme.errors import UserError, nearest

NORMS = ("layernorm", "rmsnorm")
POSITIONS = ("learned", "rotary")
ACTIVATIONS = ("gelu", "swiglu")
ACTIVATION_CHECKPOINTING = ("none", "full")

INITIAL_STD = 0.02  # GPT-2
EMBEDDING, HEAD = "token_embedding.weight", "output.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The shape of a model. Raises UserError for one that cannot be built."""

    vocab_size: int
    """Number of token ids; 256 for bytes."""
    sequence_length: int
    """Longest context, in tokens."""
    num_layers: int
    """Number of transformer blocks."""
    num_heads: int
    """Number of query heads; divides embedding_dim."""
    num_kv_heads: int
    """Number of key and value heads, each shared by num_heads / num_kv_heads query heads (GQA)."""
    embedding_dim: int
    """Width of the residual stream."""
    feed_forward_dim: int
    """Width of the feed-forward network inside a block."""
    norm: str
    """"layernorm" or "rmsnorm"."""
    position: str
    """"learned" (one vector per position, added to the embedding) or "rotary" (queries and keys are rotated)."""
    activation: str
    """"gelu" (tanh approximation) or "swiglu" (a third matrix gates the first)."""
    bias: bool
    """Biases in the linear layers and in LayerNorm; the output head never has one."""
    tied_embedding: bool
    """The output head is the transposed token embedding."""
    rotary_base: float = 10_000.0
    """Base of the rotary frequencies; without effect on learned positions."""
    norm_epsilon: float = 1e-5
    """Added to the variance before the square root."""

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "sequence_length",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "embedding_dim",
            "feed_forward_dim",
        ):
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise UserError(f"{name} is {size!r}: it must be a whole number of at least 1")
            if size > 2**31 - 1:
                raise UserError(f"{name} is {str(size)[:20]}: it must be at most {2**31 - 1}")
        for name in ("bias", "tied_embedding"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name} is {getattr(self, name)!r}: it must be true or false")
        for name in ("rotary_base", "norm_epsilon"):
            number = getattr(self, name)
            if not isinstance(number, int | float) or not 0 < number < math.inf:
                raise UserError(f"{name} is {number!r}: it must be a positive number")
        _check_choice("norm", self.norm, NORMS)
        _check_choice("position", self.position, POSITIONS)
        _check_choice("activation", self.activation, ACTIVATIONS)
        if self.embedding_dim % self.num_heads:
            raise UserError(
                f"num_heads is {self.num_heads}: it must divide embedding_dim {self.embedding_dim}"
                f" ({_nearest_divisor(self.embedding_dim, self.num_heads)} would fit)"
            )
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_kv_heads is {self.num_kv_heads}: it must divide num_heads {self.num_heads}"
                f" ({_nearest_divisor(self.num_heads, self.num_kv_heads)} would fit)"
            )
        if self.position == "rotary" and self.head_dim % 2:
            raise UserError(
                f"embedding_dim is {self.embedding_dim}: rotary positions need an even embedding_dim / num_heads, not"
                f" {self.head_dim} ({self.num_heads * (self.head_dim + 1)} would fit)"
            )

    @property
    def head_dim(self) -> int:
        return self.embedding_dim // self.num_heads


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"{name} is {value!r}: it must be {' or '.join(choices)}{nearest(str(value), choices)}")


def _nearest_divisor(whole: int, wish: int) -> int:
    return min((d for d in range(1, whole + 1) if whole % d == 0), key=lambda d: abs(d - wish))


def _gpt2(num_layers: int, num_heads: int, embedding_dim: int, vocab_size: int, sequence_length: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab_size,
        sequence_length=sequence_length,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        embedding_dim=embedding_dim,
        feed_forward_dim=4 * embedding_dim,
        norm="layernorm",
        position="learned",
        activation="gelu",
        bias=True,
        tied_embedding=True,
    )


_LLAMA3_8B = ModelConfig(
    vocab_size=128_256,
    sequence_length=8192,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    embedding_dim=4096,
    feed_forward_dim=14_336,
    norm="rmsnorm",
    position="rotary",
    activation="swiglu",
    bias=False,
    tied_embedding=False,
    rotary_base=500_000.0,
)

PRESETS: dict[str, ModelConfig] = {
    "toy": _gpt2(4, 4, 128, vocab_size=256, sequence_length=128),  # 0.8 M parameters
    "toy-llama": dataclasses.replace(
        _LLAMA3_8B,
        vocab_size=256,
        sequence_length=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        embedding_dim=128,
        feed_forward_dim=384,  # makes a block as large as toy's: 12 * embedding_dim**2
    ),
    "small": _gpt2(6, 6, 384, vocab_size=256, sequence_length=256),  # 10.8 M parameters
    "gpt2": _gpt2(12, 12, 768, vocab_size=50_257, sequence_length=1024),
    "gpt2-medium": _gpt2(24, 16, 1024, vocab_size=50_257, sequence_length=1024),
    "gpt2-large": _gpt2(36, 20, 1280, vocab_size=50_257, sequence_length=1024),
    "gpt2-xl": _gpt2(48, 25, 1600, vocab_size=50_257, sequence_length=1024),
    "llama3-8b": _LLAMA3_8B,
    "llama3-70b": dataclasses.replace(
        _LLAMA3_8B, num_layers=80, num_heads=64, embedding_dim=8192, feed_forward_dim=28_672
    ),
}
"""Shapes by name. The published ones have the published parameter counts."""


def preset(name: str, **overrides: Any) -> ModelConfig:
    """The preset of that name, with the given fields changed. Raises UserError for an unknown name or field."""
    if name not in PRESETS:
        raise UserError(f"there is no model {name!r}{nearest(name, list(PRESETS))}; known: {', '.join(PRESETS)}")
    fields = [field.name for field in dataclasses.fields(ModelConfig)]
    for field in overrides:
        if field not in fields:
            raise UserError(f"a model has no {field!r}{nearest(field, fields)}; known: {', '.join(fields)}")
    return dataclasses.replace(PRESETS[name], **overrides)


def num_parameters(config: ModelConfig) -> int:
    """Number of parameters of the model; a tied head counts once."""
    embedding, feed_forward = config.embedding_dim, config.feed_forward_dim
    key_value = config.num_kv_heads * config.head_dim
    up_matrices = 2 if config.activation == "swiglu" else 1
    norm = embedding * (2 if config.norm == "layernorm" and config.bias else 1)
    layer = (
        2 * embedding * (embedding + key_value)  # wq, wo and wk, wv
        + (up_matrices + 1) * embedding * feed_forward
        + 2 * norm
    )
    if config.bias:
        layer += 2 * (embedding + key_value) + up_matrices * feed_forward + embedding
    return (
        config.vocab_size * embedding * (1 if config.tied_embedding else 2)
        + (config.sequence_length * embedding if config.position == "learned" else 0)
        + config.num_layers * layer
        + norm
    )


def initial_parameter(name: str, shape: torch.Size, config: ModelConfig, seed: int) -> Tensor:
    """The initial value (fp32, CPU) of the parameter called `name` in the whole model.

    It depends on the seed and the name only, so every layout of the same model starts from the same weights. Norms
    are 1, biases 0, the rest is normal with standard deviation 0.02, divided by sqrt(2 num_layers) for the two
    matrices of a block that write to the residual stream (GPT-2). A tied head has the embedding's values, also where
    the two are on different ranks.
    """
    if config.tied_embedding and name == HEAD:
        name = EMBEDDING
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if "norm" in name.split(".")[-2]:
        return torch.ones(shape)
    std = INITIAL_STD
    if name.endswith((".wo.weight", ".w2.weight")):
        std /= math.sqrt(2 * config.num_layers)
    digest = blake2b(f"{seed}|{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)  # 63 bits: a signed seed in torch
    return torch.empty(shape).normal_(0.0, std, generator=generator)


# --- modules -----------------------------------------------------------------------------------------------------


def _make_norm(config: ModelConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.embedding_dim, eps=config.norm_epsilon)
    return nn.LayerNorm(config.embedding_dim, eps=config.norm_epsilon, bias=config.bias)


def rotary_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position's rotation angles, each (sequence_length, head_dim / 2), fp32.

    Angle = position * base ** (-2 i / head_dim), as in Su et al. 2021, "RoFormer".
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
    positions = torch.arange(config.sequence_length, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, config.rotary_base**-exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turns the heads of x (batch, length, heads, head_dim) by the tables' first `length` rows, computing in fp32.

    Element i is paired with element i + head_dim / 2. (The Llama paper pairs neighbours: the same model, with the rows
    of wq and wk in another order.)
    """
    length = x.shape[1]
    cosines, sines = cosines[:length, None], sines[:length, None]
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cosines - second * sines, first * sines + second * cosines), dim=-1)
    return turned.type_as(x)


class Attention(nn.Module):
    """Causal self-attention with grouped queries. Works on any share of the heads that wq, wk and wv yield."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, config: ModelConfig):
        super().__init__()
        key_value_dim = config.num_kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.embedding_dim, config.embedding_dim, bias=config.bias)
        self.wk = nn.Linear(config.embedding_dim, key_value_dim, bias=config.bias)
        self.wv = nn.Linear(config.embedding_dim, key_value_dim, bias=config.bias)
        self.wo = nn.Linear(config.embedding_dim, config.embedding_dim, bias=config.bias)
        # The tables belong to each layer, so that a layer needs nothing but its input wherever it is placed;
        # GPT.reset_buffers lets the layers of one device share them.
        self.rotary = config.position == "rotary"
        if self.rotary:
            table_shape = (config.sequence_length, config.head_dim // 2)
            for table in ("cosines", "sines"):
                self.register_buffer(table, torch.empty(table_shape, dtype=torch.float32), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, embedding_dim) to the same."""
        batch, length, _ = x.shape
        query, key, value = (
            projection(x).view(batch, length, -1, self.head_dim) for projection in (self.wq, self.wk, self.wv)
        )
        if self.rotary:
            query, key = rotate(query, self.cosines, self.sines), rotate(key, self.cosines, self.sines)
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        output: Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return output


class FeedForward(nn.Module):
    """w2 gelu(w1 x), or SwiGLU (Shazeer 2020): w2 (silu(w1 x) * w3 x)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.w1 = nn.Linear(config.embedding_dim, config.feed_forward_dim, bias=config.bias)
        self.w2 = nn.Linear(config.feed_forward_dim, config.embedding_dim, bias=config.bias)
        self.w3 = (
            nn.Linear(config.embedding_dim, config.feed_forward_dim, bias=config.bias)
            if config.activation == "swiglu"
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, embedding_dim) to the same."""
        if self.w3 is None:
            hidden = F.gelu(self.w1(x), approximate="tanh")
        else:
            hidden = F.silu(self.w1(x)) * self.w3(x)
        output: Tensor = self.w2(hidden)
        return output


class Layer(nn.Module):
    """One transformer block: attention and feed-forward, each on the normalised residual stream and added to it."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.attention_norm = _make_norm(config)
        self.attention = Attention(config)
        self.feed_forward_norm = _make_norm(config)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, embedding_dim) to the same."""
        x = x + self.attention(self.attention_norm(x))
        output: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return output


class GPT(nn.Module):
    """The transformer, or the part of it that has the given `layers`: the first layer's part has the embeddings, the
    last layer's the head; parameters keep the names that they have in the whole model. With
    `activation_checkpointing="full"`, backward recomputes each block from its input.

    Starts from the weights of seed 0. One built on the meta device has none: `to_empty`, then `reset_parameters`.
    Its buffers are constants, so DDP need not broadcast them (`broadcast_buffers=False`).
    """

    def __init__(self, config: ModelConfig, activation_checkpointing: str = "none", layers: range | None = None):
        super().__init__()
        _check_choice("activation_checkpointing", activation_checkpointing, ACTIVATION_CHECKPOINTING)
        layers = range(config.num_layers) if layers is None else layers
        self.config = config
        self.activation_checkpointing = activation_checkpointing
        self.first, self.last = layers.start == 0, layers.stop == config.num_layers
        # nn.Linear and nn.Embedding would fill their weights first, from the global generator: built empty instead.
        device = torch.get_default_device()
        with torch.device("meta"):
            self.token_embedding = nn.Embedding(config.vocab_size, config.embedding_dim) if self.first else None
            self.position_embedding = (
                nn.Embedding(config.sequence_length, config.embedding_dim)
                if self.first and config.position == "learned"
                else None
            )
            self.layers = nn.ModuleDict({str(index): Layer(config) for index in layers})
            self.norm = _make_norm(config) if self.last else None
            self.output = nn.Linear(config.embedding_dim, config.vocab_size, bias=False) if self.last else None
        self.tie()
        if device.type != "meta":
            self.to_empty(device=device)
            self.reset_parameters(seed=0)

    def tie(self) -> None:
        """Makes a tied head the embedding's parameter, where this part has both; `to_empty` unties them."""
        if self.config.tied_embedding and self.token_embedding is not None and self.output is not None:
            self.output.weight = self.token_embedding.weight

    def reset_buffers(self) -> None:
        """Recomputes the rotary tables (fp32) and ties the head again.

        `to_empty` loses both, and a cast of the whole model rounds the tables.
        """
        self.tie()
        if self.config.position == "rotary":
            device = next(self.parameters()).device
            cosines, sines = rotary_tables(self.config)
            share_tables(self, cosines.to(device), sines.to(device))

    def reset_parameters(self, seed: int) -> None:
        """Sets every parameter to its initial value for this seed (see `initial_parameter`), and the buffers."""
        self.reset_buffers()
        initialise(self, "", self.config, seed)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """The logits (batch, length, vocab_size), or with `targets` the mean cross-entropy in nats (fp32 scalar).

        `x`: tokens, int64 (batch, length), or in a part without the first layer what the part before it returned; a
        part without the last layer returns (batch, length, embedding_dim). `targets` are int64, (batch, length).
        Raises ValueError when length exceeds sequence_length.
        """
        length = x.shape[1]
        if length > self.config.sequence_length:
            raise ValueError(f"{length} tokens do not fit the model's sequence_length {self.config.sequence_length}")
        if self.token_embedding is not None:
            positions = torch.arange(length, device=x.device)
            x = self.token_embedding(x)
            if self.position_embedding is not None:
                x = x + self.position_embedding(positions)
        recompute = self.activation_checkpointing == "full" and torch.is_grad_enabled()
        for layer in self.layers.values():
            # No random number is drawn in a layer: there is no generator state to restore.
            x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False) if recompute else layer(x)
        if self.norm is None or self.output is None:
            return x
        logits: Tensor = self.output(self.norm(x))
        return logits if targets is None else token_loss(logits, targets)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy in nats (fp32 scalar); logits (batch, length, vocab_size), targets (batch, length)."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def share_tables(module: nn.Module, cosines: Tensor, sines: Tensor) -> None:
    """Makes these the rotary tables of every attention inside."""
    for each in module.modules():
        if isinstance(each, Attention):
            each.cosines, each.sines = cosines, sines


@torch.no_grad()
def initialise(module: nn.Module, prefix: str, config: ModelConfig, seed: int) -> None:
    """Sets the parameters of `module`, whose names in the whole model begin with `prefix`, to their initial values."""
    for name, parameter in module.named_parameters(prefix.removesuffix(".")):
        parameter.copy_(initial_parameter(name, parameter.shape, config, seed))


def compile_blocks(model: GPT) -> None:
    """Compiles each block in place; equal blocks share one compilation, so it costs the same for any depth."""
    for layer in model.layers.values():
        layer.compile()
