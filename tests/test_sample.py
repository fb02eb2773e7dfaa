import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import bireme.sample
from bireme.data.tokenizers import load_tokenizer
from bireme.errors import UserError
from bireme.model import GPT, ModelConfig, preset
from bireme.sample import generate, load_weights, sample_run, save_weights

torch.set_num_threads(1)

TINY: dict[str, Any] = {"sequence_length": 8, "num_layers": 2, "embedding_dim": 32, "feed_forward_dim": 48}
GPT2, LLAMA = preset("toy", **TINY), preset("toy-llama", **TINY)
BOTH = pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])


def model_of(config: ModelConfig, seed: int = 4) -> GPT:
    model = GPT(config)
    model.reset_parameters(seed)
    return model


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save_weights(dict(model_of(GPT2).named_parameters()), tmp_path / "model.safetensors", GPT2)
    return tmp_path


# --- weights -----------------------------------------------------------------------------------------------------


@BOTH
def test_round_trip_gives_the_same_logits(config: ModelConfig, tmp_path: Path) -> None:
    model = model_of(config)
    save_weights(dict(model.named_parameters()), tmp_path / "model.safetensors", config)
    loaded = load_weights(tmp_path / "model.safetensors")
    assert loaded.config == config
    tokens = torch.arange(16).view(2, 8)
    assert torch.equal(model(tokens), loaded(tokens))


def test_tied_weights_are_stored_once(run: Path) -> None:
    names = set(load_file(run / "model.safetensors"))
    assert "token_embedding.weight" in names and "output.weight" not in names
    loaded = load_weights(run / "model.safetensors")
    assert loaded.output is not None and loaded.token_embedding is not None
    assert loaded.output.weight is loaded.token_embedding.weight


def test_metadata_describes_the_model(run: Path) -> None:
    with safe_open(run / "model.safetensors", framework="pt") as file:
        metadata = file.metadata()
    assert metadata["tokenizer"] == "bytes"
    assert ModelConfig(**json.loads(metadata["config"])) == GPT2


def test_a_failed_save_leaves_the_old_weights_and_nothing_else(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = (run / "model.safetensors").read_bytes()

    def fail(weights: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(bireme.sample, "save_file", fail)
    with pytest.raises(OSError, match="No space"):
        save_weights(dict(model_of(GPT2, seed=5).named_parameters()), run / "model.safetensors", GPT2)
    assert [path.name for path in run.iterdir()] == ["model.safetensors"]
    assert (run / "model.safetensors").read_bytes() == old


def test_others_may_read_the_weights_where_they_may_read_any_file(run: Path) -> None:
    (run / "other").touch()
    assert (run / "model.safetensors").stat().st_mode == (run / "other").stat().st_mode


def test_saving_replaces(run: Path) -> None:
    save_weights(dict(model_of(LLAMA).named_parameters()), run / "model.safetensors", LLAMA)
    assert load_weights(run / "model.safetensors").config == LLAMA
    assert [path.name for path in run.iterdir()] == ["model.safetensors"]


def line_of(run: Path, prompt: str = "a", **arguments: Any) -> str:
    settings: dict[str, Any] = {"num_tokens": 3, "temperature": 1.0, "top_k": None, "seed": 0, **arguments}
    with pytest.raises(UserError) as caught:
        sample_run(run, prompt, **settings)
    line = str(caught.value)
    assert "\n" not in line and len(line) < 400
    return line


def test_no_weights_yet(tmp_path: Path) -> None:
    assert line_of(tmp_path).endswith("model.safetensors does not exist: this run has saved no final weights yet")
    assert "no such run is not a directory" in line_of(tmp_path / "no such run")


@pytest.mark.parametrize("size", [0, 5, 8, 100, 2000, -1])
def test_torn_weights(run: Path, size: int) -> None:
    path = run / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert "model.safetensors is torn or not a safetensors file: " in line_of(run)


def test_not_a_safetensors_file(run: Path) -> None:
    (run / "model.safetensors").write_bytes(b"PK\x03\x04 not weights" * 100)
    assert "is torn or not a safetensors file" in line_of(run)


def test_a_directory_in_place_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    assert "model.safetensors" in line_of(tmp_path)


@pytest.mark.parametrize(
    ("metadata", "line"),
    [
        (None, "was not written by Bireme: its metadata lacks"),
        ({"tokenizer": "bytes"}, "was not written by Bireme: its metadata lacks"),
        ({"config": "{}"}, "was not written by Bireme: its metadata lacks"),
        ({"config": "{", "tokenizer": "bytes"}, "describes no model in its metadata 'config': "),
        ({"config": "null", "tokenizer": "bytes"}, "describes no model in its metadata 'config': "),
        ({"config": "{}", "tokenizer": "bytes"}, "describes no model in its metadata 'config': "),
        ({"config": '{"depth": 3}', "tokenizer": "bytes"}, "describes no model in its metadata 'config': "),
    ],
)
def test_metadata_that_is_missing_or_wrong(run: Path, metadata: dict[str, str] | None, line: str) -> None:
    weights = load_file(run / "model.safetensors")
    save_file(weights, run / "model.safetensors", metadata)
    assert line in line_of(run)


def test_weights_of_another_shape(run: Path) -> None:
    save_weights(
        dict(model_of(GPT2).named_parameters()), run / "model.safetensors", preset("toy", **{**TINY, "num_layers": 3})
    )
    assert "holds other weights than its 'config' describes: " in line_of(run)
    save_weights(
        dict(model_of(GPT2).named_parameters()),
        run / "model.safetensors",
        preset("toy", **{**TINY, "feed_forward_dim": 64}),
    )
    assert "holds other weights than its 'config' describes: " in line_of(run)


# --- sampling ----------------------------------------------------------------------------------------------------


def draw(model: GPT, prompt: Tensor, num_tokens: int, temperature: float, top_k: int | None, seed: int = 0) -> Tensor:
    return generate(model, prompt, num_tokens, temperature, top_k, torch.Generator().manual_seed(seed))


@BOTH
def test_greedy_follows_the_largest_logit_of_the_cropped_context(config: ModelConfig) -> None:
    model = model_of(config)
    prompt = torch.tensor([3, 1, 4])
    expected = prompt.tolist()
    for _ in range(12):  # runs past the context of 8
        expected.append(int(model(torch.tensor([expected[-8:]]))[0, -1].argmax()))
    assert draw(model, prompt, 12, 0.0, None).tolist() == expected
    assert draw(model, prompt, 12, 1.0, 1).tolist() == expected
    assert draw(model, prompt, 12, 1e-40, None).tolist() == expected
    assert prompt.tolist() == [3, 1, 4]


def test_a_prompt_longer_than_the_context() -> None:
    model = model_of(GPT2)
    prompt = torch.arange(30)
    assert draw(model, prompt, 1, 0.0, None)[-1] == model(prompt[None, -8:])[0, -1].argmax()


def test_draws_follow_the_softmax_and_stay_within_top_k() -> None:
    model = model_of(preset("toy", **TINY, vocab_size=6))
    assert model.token_embedding is not None
    with torch.no_grad():
        model.token_embedding.weight.mul_(20)
    prompt = torch.tensor([2])
    probabilities = (model(prompt[None])[0, -1] / 0.7).softmax(-1)
    draws = torch.stack([draw(model, prompt, 1, 0.7, None, seed)[-1] for seed in range(400)])
    frequencies = draws.bincount(minlength=6) / 400
    assert (frequencies - probabilities).abs().max() < 0.1  # four standard deviations
    best = set(probabilities.topk(2).indices.tolist())
    assert {int(draw(model, prompt, 1, 5.0, 2, seed)[-1]) for seed in range(40)} == best


def test_seed_decides_the_text(run: Path) -> None:
    first = sample_run(run, "Hello", 40, 1.0, None, seed=1)
    assert first.startswith("Hello")
    assert first == sample_run(run, "Hello", 40, 1.0, None, seed=1)
    assert first != sample_run(run, "Hello", 40, 1.0, None, seed=2)
    assert sample_run(run, "Hello", 0, 1.0, None, seed=1) == "Hello"


def test_prompts_beyond_ascii(run: Path) -> None:
    assert sample_run(run, "naïve 船", 2, 1.0, None, seed=1).startswith("naïve 船")
    assert sample_run(run, "\udcff", 0, 1.0, None, seed=1) == "�"  # a byte of the command line that is not UTF-8


def test_tokens_that_are_no_bytes_are_shown_as_unknown(tmp_path: Path) -> None:
    config = preset("toy", **TINY, vocab_size=5000)
    save_weights(dict(model_of(config).named_parameters()), tmp_path / "model.safetensors", config)
    assert "�" in sample_run(tmp_path, "a", 20, 1.0, None, seed=0)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"prompt": ""}, "the prompt is empty: sampling needs at least one token to continue"),
        ({"num_tokens": -1}, "the number of tokens is -1: it must be at least 0"),
        ({"temperature": -0.5}, "temperature is -0.5: it must be 0 (always the likeliest token) or more"),
        ({"temperature": float("nan")}, "temperature is nan: it must be 0 (always the likeliest token) or more"),
        ({"top_k": 0}, "top_k is 0: it must be at least 1"),
    ],
)
def test_arguments_out_of_range(run: Path, arguments: dict[str, Any], line: str) -> None:
    assert line_of(run, **arguments) == line


def test_prompt_outside_the_vocabulary(tmp_path: Path) -> None:
    config = preset("toy", **TINY, vocab_size=100)
    save_weights(dict(model_of(config).named_parameters()), tmp_path / "model.safetensors", config)
    assert line_of(tmp_path, "xy") == "the prompt has a byte 121: the model knows 100 tokens"


# --- tokenizers --------------------------------------------------------------------------------------------------


def test_other_tokenizers(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"<|endoftext|>": 0, "one": 1, " ": 2, "two": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(" ", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    (tmp_path / "chosen.json").write_text(tokenizer.to_str())
    description = load_tokenizer(str(tmp_path / "chosen.json")).description
    config = preset("toy", **TINY, vocab_size=4)
    save_weights(dict(model_of(config).named_parameters()), tmp_path / "model.safetensors", config, description)

    assert "tokenizer.json" in line_of(tmp_path)  # missing
    (tmp_path / "chosen.json").rename(tmp_path / "tokenizer.json")
    text = sample_run(tmp_path, "one two", 10, 1.0, None, seed=1)
    assert text.startswith("one two") and re.fullmatch(r"(one|two| |<\|endoftext\|>){13}", text)
    assert text == sample_run(tmp_path, "one two", 10, 1.0, None, seed=1)

    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str().replace("two", "six"))
    assert "is not the tokenizer" in line_of(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata()["tokenizer"] == description


@pytest.mark.parametrize(("tokenizer", "line"), [("gpt2", "'gpt2', which is not known"), ("unknown", ".bin files")])
def test_a_run_whose_text_cannot_be_told(tmp_path: Path, tokenizer: str, line: str) -> None:
    save_weights(dict(model_of(GPT2).named_parameters()), tmp_path / "model.safetensors", GPT2, tokenizer)
    assert line in line_of(tmp_path)
