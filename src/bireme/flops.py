"""FLOPs of training, peaks of devices, and their quotient: model FLOPs utilisation (MFU). No torch until measured.

Counted are the multiplications and additions of matrix products, one each, as in Chowdhery et al. 2022, "PaLM",
appendix B, but from the matrices that are there instead of the parameter count: embeddings, norms and biases are free.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from bireme.model import ModelConfig

_WINDOW_S = 0.2  # averages over several of the scheduler's slices
_ROOF_SIZE = 1024


@dataclass(frozen=True, slots=True)
class FlopsPerToken:
    """FLOPs that one token of training costs: forward and backward, the latter twice the former."""

    full: int
    """Attention counted over the whole length, as PaLM and most published MFU have it."""
    causal: int
    """Attention counted over length / 2, half the score matrix, as FlashAttention's and Megatron-LM's papers do.

    (The causal mask leaves (length + 1) / 2 tokens on average: the diagonal is rounded away by convention.)
    """
    recomputation_full: int
    """Forward FLOPs repeated by activation checkpointing, attention in full: part of HFU, never of MFU."""
    recomputation_causal: int
    """The same with attention over length / 2."""


def flops_per_token(config: "ModelConfig", length: int, activation_checkpointing: str = "none") -> FlopsPerToken:
    """The matrix FLOPs per token of a model trained on sequences of `length` tokens.

    Each block's linear layers, attention's scores and values (2 * 2 * length * embedding_dim forward), and the output
    head, tied or not. Recomputation ("full") repeats the blocks' forward up to its last saved input, that of w2:
    torch stops there, so w2 itself is not multiplied again (GPT-2: a third of the block's matrices).
    """
    embedding, feed_forward = config.embedding_dim, config.feed_forward_dim
    key_value = config.num_kv_heads * config.head_dim
    up = (2 if config.activation == "swiglu" else 1) * embedding * feed_forward
    down = embedding * feed_forward
    projections = 2 * embedding * (embedding + key_value)
    attention_full, attention_causal = 4 * length * embedding, 2 * length * embedding

    layers = config.num_layers
    linear = 2 * (layers * (projections + up + down) + embedding * config.vocab_size)
    repeated_layers = layers if activation_checkpointing == "full" else 0
    return FlopsPerToken(
        full=3 * (linear + layers * attention_full),
        causal=3 * (linear + layers * attention_causal),
        recomputation_full=repeated_layers * (2 * (projections + up) + attention_full),
        recomputation_causal=repeated_layers * (2 * (projections + up) + attention_causal),
    )


_LLAMA_LIKE = frozenset({"llama", "mistral", "qwen2"})  # gated feed-forward, no mixture of experts


def flops_of_config(config: Any, length: int) -> FlopsPerToken | None:
    """The same for a model that Bireme did not build: its ModelConfig, or a Hugging Face config of a GPT-2, Llama,
    Mistral or Qwen 2 with full attention and heads that make up the embedding. None for any other."""
    if config is None:
        return None
    if isinstance(getattr(config, "num_kv_heads", None), int) and hasattr(config, "feed_forward_dim"):
        try:
            return flops_per_token(config, length)
        except AttributeError:  # somebody else's, of the same words
            return None
    kind = getattr(config, "model_type", None)
    if kind == "gpt2":
        embedding, layers, heads = config.n_embd, config.n_layer, config.n_head
        key_value_heads, feed_forward, activation = heads, config.n_inner or 4 * embedding, "gelu"
    elif kind in _LLAMA_LIKE:
        embedding, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
        key_value_heads, feed_forward, activation = config.num_key_value_heads, config.intermediate_size, "swiglu"
        if (getattr(config, "head_dim", None) or embedding // heads) * heads != embedding:
            return None
    else:
        return None
    shape = SimpleNamespace(
        embedding_dim=embedding,
        feed_forward_dim=feed_forward,
        num_kv_heads=key_value_heads,
        head_dim=embedding // heads,
        activation=activation,
        num_layers=layers,
        vocab_size=config.vocab_size,
    )
    return flops_per_token(cast("ModelConfig", shape), length)


# --- peaks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Peak:
    """What the vendor states for one device and dtype: dense, never with structured sparsity."""

    flops_per_s: float
    source: str
    """The public document that states it."""


def _peaks(source: str, **teraflops: float) -> dict[str, Peak]:
    return {dtype: Peak(round(value * 1e12), source) for dtype, value in teraflops.items()}


_V100 = "NVIDIA V100 datasheet (2020)"
_V100_SXM2 = _peaks(_V100, float32=15.7, float16=125)
_V100_PCIE = _peaks(_V100, float32=14, float16=112)
_A100 = _peaks("NVIDIA A100 datasheet (2021)", float32=19.5, tf32=156, bfloat16=312, float16=312)
_GA102 = "NVIDIA Ampere GA102 whitepaper (2021), 16 bits with fp32 accumulate"
_ADA = "NVIDIA Ada GPU architecture whitepaper (2022), 16 bits with fp32 accumulate"
_HOPPER = "NVIDIA H100 Tensor Core GPU architecture whitepaper (2022)"
_H200 = "NVIDIA H200 datasheet (2024), halved where stated with sparsity"
_BLACKWELL = "NVIDIA Blackwell datasheet (2024), halved where stated with sparsity"

PEAKS: Mapping[str, Mapping[str, Peak]] = {
    "Tesla V100-SXM2-16GB": _V100_SXM2,
    "Tesla V100-SXM2-32GB": _V100_SXM2,
    "Tesla V100-PCIE-16GB": _V100_PCIE,
    "Tesla V100-PCIE-32GB": _V100_PCIE,
    "Tesla V100S-PCIE-32GB": _peaks(_V100, float32=16.4, float16=130),
    "Tesla T4": _peaks("NVIDIA T4 datasheet (2018)", float32=8.1, float16=65),
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "NVIDIA A10": _peaks("NVIDIA A10 datasheet (2021)", float32=31.2, tf32=62.5, bfloat16=125, float16=125),
    "NVIDIA A10G": _peaks("NVIDIA A10G datasheet for AWS (2022)", tf32=35, bfloat16=70, float16=70),
    "NVIDIA A30": _peaks("NVIDIA A30 datasheet (2021)", float32=10.3, tf32=82, bfloat16=165, float16=165),
    "NVIDIA A40": _peaks("NVIDIA A40 datasheet (2021)", float32=37.4, tf32=74.8, bfloat16=149.7, float16=149.7),
    "NVIDIA RTX A6000": _peaks(_GA102, float32=38.7, tf32=77.4, bfloat16=154.8, float16=154.8),
    "NVIDIA GeForce RTX 3090": _peaks(_GA102, float32=35.6, tf32=35.6, bfloat16=71, float16=71),
    "NVIDIA L4": _peaks(
        "NVIDIA L4 datasheet (2023), halved where stated with sparsity",
        float32=30.3,
        tf32=60,
        bfloat16=121,
        float16=121,
    ),
    "NVIDIA L40": _peaks("NVIDIA L40 datasheet (2022)", float32=90.5, tf32=90.5, bfloat16=181.05, float16=181.05),
    "NVIDIA L40S": _peaks("NVIDIA L40S datasheet (2023)", float32=91.6, tf32=183, bfloat16=362.05, float16=362.05),
    "NVIDIA GeForce RTX 4090": _peaks(_ADA, float32=82.6, tf32=82.6, bfloat16=165.2, float16=165.2),
    "NVIDIA H100 80GB HBM3": _peaks(_HOPPER, float32=66.9, tf32=494.7, bfloat16=989.4, float16=989.4),
    "NVIDIA H100 PCIe": _peaks(_HOPPER, float32=51.2, tf32=378, bfloat16=756, float16=756),
    "NVIDIA H100 NVL": _peaks(
        "NVIDIA H100 datasheet (2024), halved where stated with sparsity",
        float32=60,
        tf32=417.5,
        bfloat16=835.5,
        float16=835.5,
    ),
    "NVIDIA GH200 480GB": _peaks(
        "NVIDIA GH200 datasheet (2024), halved where stated with sparsity",
        float32=67,
        tf32=494.5,
        bfloat16=989.5,
        float16=989.5,
    ),
    "NVIDIA H200": _peaks(_H200, float32=67, tf32=494.5, bfloat16=989.5, float16=989.5),
    "NVIDIA H200 NVL": _peaks(_H200, float32=60, tf32=417.5, bfloat16=835.5, float16=835.5),
    "NVIDIA B200": _peaks(_BLACKWELL, tf32=1125, bfloat16=2250, float16=2250),
    "NVIDIA GB200": _peaks(_BLACKWELL, float32=80, tf32=1250, bfloat16=2500, float16=2500),
    "NVIDIA GeForce RTX 5090": _peaks(
        "NVIDIA RTX Blackwell GPU architecture whitepaper (2025), 16 bits with fp32 accumulate",
        float32=104.8,
        tf32=104.8,
        bfloat16=209.5,
        float16=209.5,
    ),
    # What torch calls one MI250X device is one of its two dies: half of the datasheet.
    "AMD Instinct MI250X": _peaks(
        "AMD Instinct MI250X datasheet (2021), half per die, fp32 on the matrix cores",
        float32=47.85,
        bfloat16=191.5,
        float16=191.5,
    ),
    "AMD Instinct MI300X": _peaks(
        "AMD Instinct MI300X datasheet (2023)", float32=163.4, tf32=653.7, bfloat16=1307.4, float16=1307.4
    ),
}
"""Peaks by the exact name that torch.cuda.get_device_name() prints, then by dtype.

"float32" is without TF32. A share of a device (MIG) and a model that is not listed have other peaks, and none here.
"""


def peak_flops_per_s(device_name: str, dtype: str) -> Peak | None:
    """The peak of that device for "float32", "tf32", "bfloat16" or "float16", or None where it is not known."""
    return PEAKS.get(device_name, {}).get(dtype)


def mfu(flops_per_token: float, global_tokens_per_s: float, sum_of_peak_flops_per_s: float) -> float:
    """Model FLOPs utilisation: the fraction of all ranks' peaks that the model's FLOPs make up.

    Raises ValueError above 1, which no device can do: one of the three numbers is wrong.
    """
    if not sum_of_peak_flops_per_s > 0:
        raise ValueError(f"the sum of the peaks is {sum_of_peak_flops_per_s}: it must be positive")
    fraction = flops_per_token * global_tokens_per_s / sum_of_peak_flops_per_s
    if not 0 <= fraction <= 1:
        raise ValueError(
            f"MFU would be {fraction:.1%}: the peaks of {sum_of_peak_flops_per_s:.4g} FLOP/s are not those of all ranks"
            " or of the dtype that was multiplied, or tokens were counted twice"
        )
    return fraction


def measure_matmul_roof(seconds: float = 1.0) -> float:
    """FLOP/s of an fp32 matrix product at the current number of torch threads: the roof of a CPU without a peak.

    The best of windows of 0.2 s, at least one: long enough to average over the scheduler's slices, and the best since
    other load only ever takes away.
    """
    import torch

    a, b, out = (torch.ones(_ROOF_SIZE, _ROOF_SIZE, dtype=torch.float32, device="cpu") for _ in range(3))
    with torch.inference_mode():
        torch.mm(a, b, out=out)  # the first call sets up threads and packs code paths
        best = 0.0
        end_s = perf_counter() + seconds
        while True:
            products = 0
            start_s = now_s = perf_counter()
            while now_s - start_s < _WINDOW_S:
                torch.mm(a, b, out=out)
                products += 1
                now_s = perf_counter()
            best = max(best, products * 2 * _ROOF_SIZE**3 / (now_s - start_s))
            if now_s >= end_s:
                return best
