import subprocess
import sys
from time import perf_counter
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bireme.flops import PEAKS, flops_per_token, measure_matmul_roof, mfu, peak_flops_per_s
from bireme.model import GPT, preset

torch.set_num_threads(1)

TINY: dict[str, Any] = {"vocab_size": 60, "sequence_length": 32, "num_layers": 2, "embedding_dim": 32}
SHAPES = {
    "gpt2": preset("toy", **TINY, feed_forward_dim=128),
    "gpt2 untied": preset("toy", **TINY, feed_forward_dim=128, tied_embedding=False),
    "gpt2 grouped": preset("toy", **TINY, feed_forward_dim=128, num_kv_heads=1),
    "llama": preset("toy-llama", **TINY, feed_forward_dim=80),
    "llama tied": preset("toy-llama", **TINY, feed_forward_dim=80, tied_embedding=True),
    "llama ungrouped": preset("toy-llama", **TINY, feed_forward_dim=80, num_kv_heads=4),
}


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", [32, 11])
def test_torch_counts_the_same(shape: str, checkpointing: str, length: int) -> None:
    config = SHAPES[shape]
    model = GPT(config, activation_checkpointing=checkpointing)
    tokens = torch.zeros(3, length, dtype=torch.int64)
    # The fused CPU kernel is not counted, and fused backwards recompute the scores: plain products are what is meant.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, tokens).backward()
    expected = flops_per_token(config, length, checkpointing)
    assert counter.get_total_flops() == tokens.numel() * (expected.full + expected.recomputation_full)


def test_gpt2_at_1024_tokens() -> None:
    flops = flops_per_token(preset("gpt2"), 1024)
    # 6 * (12 layers * 12 * 768**2 + head 768 * 50257) + 12 layers * 12 * 768 * 1024
    assert flops.full == 854_438_400
    assert flops.full - flops.causal == 12 * 6 * 768 * 1024
    assert flops.recomputation_full == flops.recomputation_causal == 0


def test_causal_halves_attention_in_the_recomputation_too() -> None:
    flops = flops_per_token(preset("gpt2"), 1024, "full")
    assert flops.recomputation_full - flops.recomputation_causal == 12 * 2 * 768 * 1024
    assert flops.recomputation_full == 12 * (2 * 8 * 768**2 + 4 * 768 * 1024)
    assert flops.full == 854_438_400  # the model's FLOPs are not more for being computed twice


# --- peaks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("NVIDIA A100-SXM4-40GB", "bfloat16", 312),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
        ("NVIDIA A100-SXM4-80GB", "float32", 19.5),
        ("NVIDIA A100 80GB PCIe", "tf32", 156),
        ("NVIDIA A10", "bfloat16", 125),
        ("NVIDIA A10G", "bfloat16", 70),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA H100 NVL", "bfloat16", 835.5),
        ("NVIDIA H200", "bfloat16", 989.5),
        ("NVIDIA B200", "bfloat16", 2250),
        ("NVIDIA GB200", "bfloat16", 2500),
        ("NVIDIA L4", "bfloat16", 121),
        ("NVIDIA L40", "bfloat16", 181.05),
        ("NVIDIA L40S", "bfloat16", 362.05),
        ("Tesla V100-SXM2-16GB", "float16", 125),
        ("Tesla V100-PCIE-32GB", "float16", 112),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2),
        ("AMD Instinct MI300X", "bfloat16", 1307.4),
        ("AMD Instinct MI250X", "bfloat16", 191.5),
    ],
)
def test_known_peaks(name: str, dtype: str, teraflops: float) -> None:
    peak = peak_flops_per_s(name, dtype)
    assert peak is not None
    assert peak.flops_per_s == pytest.approx(teraflops * 1e12, rel=1e-9)
    assert peak.source


@pytest.mark.parametrize(
    "name",
    [
        "",
        "cpu",
        "A100",
        "H100",
        "NVIDIA",
        "NVIDIA A100",
        "NVIDIA A1",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "nvidia a100-sxm4-80gb",
        "NVIDIA A100-SXM4-80GB ",
        " NVIDIA A100-SXM4-80GB",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA A100X",
        "NVIDIA A10M",
        "NVIDIA H100",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA H100 80GB HBM2e",
        "NVIDIA H20",
        "NVIDIA H2000",
        "NVIDIA GB300",
        "NVIDIA B300",
        "NVIDIA B20",
        "NVIDIA GB10",
        "NVIDIA L40G",
        "NVIDIA L4000",
        "Tesla T40",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 5090 Laptop GPU",
        "AMD Instinct MI300A",
        "AMD Instinct MI300X VF",
        "AMD Instinct MI250",
        "Apple M3 Max",
    ],
)
def test_a_device_that_is_not_listed_has_no_peak(name: str) -> None:
    for dtype in ("float32", "tf32", "bfloat16", "float16"):
        assert peak_flops_per_s(name, dtype) is None


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("Tesla V100-SXM2-16GB", "bfloat16"),  # not in hardware
        ("Tesla T4", "tf32"),
        ("NVIDIA A100-SXM4-80GB", "bf16"),
        ("NVIDIA A100-SXM4-80GB", "torch.bfloat16"),
        ("NVIDIA A100-SXM4-80GB", "float8"),
    ],
)
def test_a_dtype_that_is_not_listed_has_no_peak(name: str, dtype: str) -> None:
    assert peak_flops_per_s(name, dtype) is None


def test_no_peak_is_a_sparse_one() -> None:
    """fp32 is the slowest, 16 bits are alike, and twice TF32, which is where a doubled number would show."""
    for name, peaks in PEAKS.items():
        rates = {dtype: peak.flops_per_s for dtype, peak in peaks.items()}
        assert min(rates.values()) == rates.get("float32", min(rates.values())), name
        if "bfloat16" in rates:
            assert rates["bfloat16"] == rates["float16"], name
        if "tf32" in rates:
            assert rates["bfloat16"] / rates["tf32"] == pytest.approx(2, rel=0.02), name


# --- MFU ---------------------------------------------------------------------------------------------------------


def test_mfu_of_16_equal_ranks_is_that_of_one() -> None:
    flops = flops_per_token(preset("gpt2"), 1024).full
    one = mfu(flops, 150_000, 312e12)
    assert one == pytest.approx(854_438_400 * 150_000 / 312e12)
    assert mfu(flops, 16 * 150_000, 16 * 312e12) == pytest.approx(one)


def test_mfu_above_1_is_an_error_with_its_likely_cause() -> None:
    assert mfu(1e9, 312_000, 312e12) == 1
    with pytest.raises(ValueError, match=r"MFU would be 1600.0%: the peaks of 3.12e\+14 FLOP/s are not those of all"):
        mfu(1e9, 16 * 312_000, 312e12)
    for peaks in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="must be positive"):
            mfu(1e9, 1.0, peaks)
    with pytest.raises(ValueError, match="MFU would be"):
        mfu(1e9, float("nan"), 1e12)


def test_roof_is_what_products_reach_at_this_number_of_threads() -> None:
    roof = measure_matmul_roof(seconds=0.4)
    a = torch.ones(1024, 1024)
    out = torch.empty_like(a)
    seconds = []
    for _ in range(6):
        start = perf_counter()
        torch.mm(a, a, out=out)
        seconds.append(perf_counter() - start)
    once = 2 * 1024**3 / min(seconds)
    assert once / 50 < roof < once * 50  # other load on the machine moves both
    assert torch.get_num_threads() == 1


def test_no_torch_until_measured() -> None:
    command = "import sys, bireme.flops; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", command], check=True)
