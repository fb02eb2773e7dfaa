import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bireme.errors import UserError
from bireme.model import (
    GPT,
    PRESETS,
    FeedForward,
    ModelConfig,
    compile_blocks,
    initial_parameter,
    num_parameters,
    preset,
    rotary_tables,
    rotate,
)

torch.set_num_threads(1)

TINY: dict[str, Any] = {"vocab_size": 31, "sequence_length": 16, "num_layers": 2, "embedding_dim": 32}
TINY_GPT2 = preset("toy", **TINY, feed_forward_dim=48)
TINY_LLAMA = preset("toy-llama", **TINY, feed_forward_dim=40)
BOTH = pytest.mark.parametrize("config", [TINY_GPT2, TINY_LLAMA], ids=["gpt2", "llama"])


def random_tokens(config: ModelConfig, batch: int = 2, length: int | None = None, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (batch, length or config.sequence_length), generator=generator)


# --- shapes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
    ],
)
def test_published_shapes_have_the_published_parameter_counts(name: str, published: int) -> None:
    assert num_parameters(PRESETS[name]) == published


VARIANTS = {
    "no bias": preset("toy", bias=False),
    "bias, swiglu": preset("toy", activation="swiglu", num_kv_heads=1, tied_embedding=False),
    "rmsnorm with bias": preset("toy-llama", bias=True, tied_embedding=True),
}


@pytest.mark.parametrize("name", [*PRESETS, *VARIANTS])
def test_the_module_has_as_many_parameters_as_the_config_says(name: str) -> None:
    config = PRESETS.get(name) or VARIANTS[name]
    with torch.device("meta"):
        model = GPT(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters(config)


@pytest.mark.parametrize(
    ("name", "low", "high"), [("toy", 0.7e6, 1.1e6), ("toy-llama", 0.7e6, 1.1e6), ("small", 9e6, 12e6)]
)
def test_own_shapes_have_about_the_size_they_promise(name: str, low: float, high: float) -> None:
    assert low < num_parameters(PRESETS[name]) < high


@BOTH
def test_logits_and_loss(config: ModelConfig) -> None:
    model, tokens = GPT(config), random_tokens(config, length=9)
    logits = model(tokens)
    assert logits.shape == (2, 9, config.vocab_size)
    loss = model(tokens, tokens.roll(-1, 1))
    assert loss.shape == () and loss.dtype == torch.float32
    expected = -logits.log_softmax(-1).gather(-1, tokens.roll(-1, 1)[..., None]).mean()
    torch.testing.assert_close(loss, expected)
    assert abs(loss.item() - math.log(config.vocab_size)) < 0.2  # knows nothing yet


def test_loss_is_fp32_for_a_bf16_model() -> None:
    model = GPT(TINY_LLAMA).to(torch.bfloat16)
    tokens = random_tokens(TINY_LLAMA)
    assert model(tokens).dtype == torch.bfloat16
    assert model(tokens, tokens).dtype == torch.float32
    model.reset_buffers()
    torch.testing.assert_close(model.get_buffer("layers.1.attention.sines"), rotary_tables(TINY_LLAMA)[1])


@BOTH
def test_more_tokens_than_the_context_is_an_error(config: ModelConfig) -> None:
    with pytest.raises(ValueError, match="17 tokens do not fit the model's sequence_length 16"):
        GPT(config)(random_tokens(config, length=17))


@BOTH
def test_a_future_token_does_not_change_past_logits(config: ModelConfig) -> None:
    model, tokens = GPT(config), random_tokens(config)
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % config.vocab_size
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10], rtol=0, atol=0)
    assert ((before[:, 10:] - after[:, 10:]).abs().amax(-1) > 0).all()


def test_grouped_queries_equal_attention_with_repeated_key_and_value_heads() -> None:
    grouped = GPT(TINY_LLAMA)
    repeated = GPT(dataclasses.replace(TINY_LLAMA, num_kv_heads=TINY_LLAMA.num_heads))
    weights = grouped.state_dict()
    group = TINY_LLAMA.num_heads // TINY_LLAMA.num_kv_heads
    for name, weight in weights.items():
        if name.endswith((".wk.weight", ".wv.weight")):
            heads = weight.view(TINY_LLAMA.num_kv_heads, TINY_LLAMA.head_dim, -1)
            weights[name] = heads.repeat_interleave(group, dim=0).flatten(0, 1)
    repeated.load_state_dict(weights)
    tokens = random_tokens(TINY_LLAMA)
    torch.testing.assert_close(grouped(tokens), repeated(tokens), rtol=1e-5, atol=1e-6)


def test_gpt2_block_is_the_published_formula() -> None:
    """Written out again without modules: pre-norm, 1/sqrt(head_dim), GELU by tanh, biases."""
    model, tokens = GPT(TINY_GPT2), random_tokens(TINY_GPT2)
    # Large enough that biases and the kind of GELU take part.
    w = {name: parameter * (20 if ".w1." in name else 1) + 0.01 for name, parameter in model.state_dict().items()}
    w["output.weight"] = w["token_embedding.weight"]
    model.load_state_dict(w)
    heads, dim = TINY_GPT2.num_heads, TINY_GPT2.head_dim
    x = w["token_embedding.weight"][tokens] + w["position_embedding.weight"]
    for i in range(TINY_GPT2.num_layers):
        layer = {name.removeprefix(f"layers.{i}."): value for name, value in w.items() if f"layers.{i}." in name}

        def linear(name: str, value: Tensor, layer: dict[str, Tensor] = layer) -> Tensor:
            return value @ layer[f"{name}.weight"].T + layer[f"{name}.bias"]

        def norm(name: str, value: Tensor, layer: dict[str, Tensor] = layer) -> Tensor:
            return F.layer_norm(value, (32,), layer[f"{name}.weight"], layer[f"{name}.bias"], 1e-5)

        y = norm("attention_norm", x)
        q, k, v = (linear(f"attention.{p}", y).unflatten(-1, (heads, dim)).transpose(1, 2) for p in ("wq", "wk", "wv"))
        scores = (q @ k.mT / dim**0.5).masked_fill(torch.ones(16, 16).triu(1).bool(), -math.inf)
        x = x + linear("attention.wo", (scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        y = linear("feed_forward.w1", norm("feed_forward_norm", x))
        y = 0.5 * y * (1 + torch.tanh((2 / math.pi) ** 0.5 * (y + 0.044715 * y**3)))
        x = x + linear("feed_forward.w2", y)
    x = F.layer_norm(x, (32,), w["norm.weight"], w["norm.bias"], 1e-5)
    torch.testing.assert_close(model(tokens), x @ w["output.weight"].T, rtol=1e-4, atol=1e-5)


def test_llama_feed_forward_is_swiglu() -> None:
    feed_forward = FeedForward(TINY_LLAMA)
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    weights = feed_forward.state_dict()
    gate, up = x @ weights["w1.weight"].T, x @ weights["w3.weight"].T
    torch.testing.assert_close(feed_forward(x), (gate * torch.sigmoid(gate) * up) @ weights["w2.weight"].T)


# --- rotary positions --------------------------------------------------------------------------------------------


def test_rotary_scores_depend_on_the_distance_only() -> None:
    config = preset("toy-llama", sequence_length=64)
    cosines, sines = rotary_tables(config)
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, config.head_dim, generator=generator).expand(2, 1, 64, 1, config.head_dim)
    scores = (rotate(query, cosines, sines)[0, :, 0] @ rotate(key, cosines, sines)[0, :, 0].T).double()
    for distance in (-63, -5, 0, 1, 40):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=2e-5)
    assert (scores[0, 1:] - scores[0, :-1]).abs().min() > 1e-4  # and it does depend on it


def test_rotation_keeps_lengths_and_position_0() -> None:
    cosines, sines = rotary_tables(TINY_LLAMA)
    x = torch.randn(2, 16, 4, 8, generator=torch.Generator().manual_seed(0))
    turned = rotate(x, cosines, sines)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(turned[:, 0], x[:, 0], rtol=0, atol=0)
    angle = 3 * TINY_LLAMA.rotary_base ** (-2 / 8)  # pair 1 at position 3
    torch.testing.assert_close(turned[:, 3, :, 1], x[:, 3, :, 1] * math.cos(angle) - x[:, 3, :, 5] * math.sin(angle))


# --- weights -----------------------------------------------------------------------------------------------------


@BOTH
def test_built_on_meta_then_reset_equals_built_directly(config: ModelConfig) -> None:
    direct = GPT(config)
    direct.reset_parameters(7)
    with torch.device("meta"):
        late = GPT(config)
    late.to_empty(device="cpu")
    for tensor in (*late.parameters(), *late.buffers()):
        tensor.detach().fill_(math.nan)  # what empty memory may hold
    late.reset_parameters(7)
    tokens = random_tokens(config)
    torch.testing.assert_close(direct(tokens), late(tokens), rtol=0, atol=0)
    assert [name for name, _ in direct.named_parameters()] == [name for name, _ in late.named_parameters()]


def test_tied_head_shares_storage() -> None:
    model = GPT(TINY_GPT2)
    model.reset_parameters(3)
    assert model.output is not None and model.token_embedding is not None
    assert model.output.weight is model.token_embedding.weight
    untied = GPT(TINY_LLAMA)
    assert untied.output is not None and untied.token_embedding is not None
    assert untied.output.weight.data_ptr() != untied.token_embedding.weight.data_ptr()


def test_seed_decides_the_weights_and_the_global_generator_has_no_part() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, second, other = GPT(TINY_LLAMA), GPT(TINY_LLAMA), GPT(TINY_LLAMA)
    for model, seed in ((first, 5), (second, 5), (other, 6)):
        model.reset_parameters(seed)
    assert torch.equal(before, torch.get_rng_state())
    for (name, a), b, c in zip(first.named_parameters(), second.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c) == ("norm" in name), name


def test_a_weight_does_not_depend_on_what_else_is_there() -> None:
    small, deep = GPT(TINY_GPT2), GPT(dataclasses.replace(TINY_GPT2, num_layers=5, vocab_size=99))
    name = "layers.1.attention.wq.weight"
    assert torch.equal(small.state_dict()[name], deep.state_dict()[name])
    assert not torch.equal(small.state_dict()[name], small.state_dict()["layers.0.attention.wq.weight"])


def test_weights_are_the_same_on_every_machine_and_release() -> None:
    value = initial_parameter("layers.0.attention.wq.weight", torch.Size([8, 8]), TINY_GPT2, seed=0)
    torch.testing.assert_close(value[0, :3], torch.tensor([0.0034373, -0.0231326, -0.0133706]), rtol=1e-4, atol=1e-7)


def test_initial_distributions() -> None:
    model = GPT(preset("toy"))
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            assert (parameter == 0).all(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            std = 0.02 / 8**0.5 if name.endswith((".wo.weight", ".w2.weight")) else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.03), name
            assert abs(parameter.mean().item()) < 0.03 * std + 3 * std / parameter.numel() ** 0.5, name


# --- training ----------------------------------------------------------------------------------------------------


@BOTH
def test_activation_checkpointing_changes_neither_loss_nor_gradients(config: ModelConfig) -> None:
    tokens = random_tokens(config)
    results = []
    for mode in ("none", "full"):
        model = GPT(config, activation_checkpointing=mode)
        forwards = 0

        def count(*_: Any) -> None:
            nonlocal forwards
            forwards += 1

        model.get_submodule("layers.0.feed_forward.w1").register_forward_pre_hook(count)
        loss = model(tokens, tokens.roll(-1, 1))
        loss.backward()
        results.append((forwards, loss, [parameter.grad for parameter in model.parameters()]))
    (plain_forwards, plain_loss, plain_gradients), (full_forwards, full_loss, full_gradients) = results
    assert (plain_forwards, full_forwards) == (1, 2)
    assert torch.equal(plain_loss, full_loss)
    for a, b in zip(plain_gradients, full_gradients, strict=True):
        assert a is not None and b is not None and torch.equal(a, b)


@pytest.mark.parametrize("name", ["toy", "toy-llama"])
def test_toys_learn_at_a_learning_rate_of_1e_3(name: str) -> None:
    model = GPT(preset(name))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.frombuffer(bytearray(b"the quick brown fox jumps over the lazy dog. " * 8), dtype=torch.uint8).long()
    batch = torch.stack([text[start : start + 65] for start in range(0, 40, 10)])
    for _ in range(50):
        loss = model(batch[:, :-1], batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.7  # from 5.5; 3.0 without context


def test_compile_blocks_compiles_each_block_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    model = GPT(TINY_GPT2)
    names = list(model.state_dict())
    compiled: list[Any] = []
    monkeypatch.setattr(type(model.layers["0"]), "compile", lambda self: compiled.append(self))
    compile_blocks(model)
    assert compiled == list(model.layers.values())
    assert list(model.state_dict()) == names


# --- mistakes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ({"num_heads": 5}, "num_heads is 5: it must divide embedding_dim 128 (4 would fit)"),
        ({"num_kv_heads": 3}, "num_kv_heads is 3: it must divide num_heads 4 (2 would fit)"),
        (
            {"position": "rotary", "embedding_dim": 20},
            "embedding_dim is 20: rotary positions need an even embedding_dim / num_heads, not 5 (24 would fit)",
        ),
        ({"num_layers": 0}, "num_layers is 0: it must be a whole number of at least 1"),
        ({"vocab_size": "256"}, "vocab_size is '256': it must be a whole number of at least 1"),
        ({"sequence_length": 1.5}, "sequence_length is 1.5: it must be a whole number of at least 1"),
        ({"bias": 1}, "bias is 1: it must be true or false"),
        ({"rotary_base": 0}, "rotary_base is 0: it must be a positive number"),
        ({"norm_epsilon": math.nan}, "norm_epsilon is nan: it must be a positive number"),
        ({"norm": "layer_norm"}, "norm is 'layer_norm': it must be layernorm or rmsnorm (did you mean 'layernorm'?)"),
        ({"position": "rotery"}, "position is 'rotery': it must be learned or rotary (did you mean 'rotary'?)"),
        ({"activation": "relu"}, "activation is 'relu': it must be gelu or swiglu"),
    ],
)
def test_a_shape_that_cannot_be_built_is_one_clear_line(overrides: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as caught:
        preset("toy", **overrides)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_unknown_names() -> None:
    with pytest.raises(UserError, match=r"no model 'gpt2-xxl' \(did you mean 'gpt2-xl'\?\); known: toy, "):
        preset("gpt2-xxl")
    with pytest.raises(UserError, match=r"no 'num_layer' \(did you mean 'num_layers'\?\)"):
        preset("toy", num_layer=3)
    with pytest.raises(UserError, match="activation_checkpointing is 'ful'"):
        GPT(TINY_GPT2, activation_checkpointing="ful")


def test_overrides_leave_the_preset_alone() -> None:
    assert preset("toy", num_layers=1).num_layers == 1
    assert PRESETS["toy"].num_layers == 4
