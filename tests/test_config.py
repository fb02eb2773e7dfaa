import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bireme.config import TrainConfig, load_config
from bireme.errors import UserError


@pytest.fixture
def toml(tmp_path: Path) -> Any:
    """Writes a configuration file."""

    def write(text: str) -> Path:
        path = tmp_path / "config.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def error_of(path: Path | None, overrides: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- reading -----------------------------------------------------------------------------------------------------


def test_without_a_file_and_overrides_everything_is_default() -> None:
    assert load_config(None, {}) == TrainConfig()


def test_a_file(toml: Any) -> None:
    config = load_config(
        toml(
            """
            run = "runs/mine"
            steps = 50
            lr = 2              # a whole number is a number
            overlap = false
            micro-batch-size = 4
            bucket_mb = 0.5
            device = "cpu"

            [model]
            num-layers = 6
            """
        ),
        {},
    )
    assert config == TrainConfig(
        run="runs/mine",
        steps=50,
        lr=2.0,
        overlap=False,
        micro_batch_size=4,
        bucket_mb=0.5,
        device="cpu",
        model={"num_layers": 6},
    )
    assert type(config.lr) is float


def test_overrides_win_over_the_file_and_the_file_over_defaults(toml: Any) -> None:
    config = load_config(toml("steps = 50\nseed = 3\nmicro_batch_size = 4"), {"steps": 7, "micro_batch_size": None})
    assert (config.steps, config.seed, config.micro_batch_size, config.preset) == (7, 3, None, "toy")


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("", {}, {}),
        ("[model]\nnum-layers = 6\nhidden_size = 64", {}, {"num_layers": 6, "hidden_size": 64}),
        ("", {"model": {"num-layers": 2}}, {"num_layers": 2}),
        (
            "[model]\nnum_layers = 6\nhidden-size = 64",
            {"model": {"num-layers": 2, "context": 9}},
            {"num_layers": 2, "hidden_size": 64, "context": 9},
        ),
        ("[model]\nnum_layers = 6", {"model": {}}, {"num_layers": 6}),
    ],
)
def test_the_model_table_is_merged_field_by_field(
    text: str, overrides: dict[str, Any], expected: dict[str, Any], toml: Any
) -> None:
    assert load_config(toml(text), overrides).model == expected


def test_what_was_loaded_can_be_loaded_again() -> None:
    config = load_config(None, {"steps": 9, "model": {"num_layers": 2}})
    assert set(config.as_dict()) == {each.name for each in fields(TrainConfig)}
    assert load_config(None, config.as_dict()) == config


# --- what is wrong -----------------------------------------------------------------------------------------------


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "no.toml"
    assert error_of(path, {}) == f"cannot read {path}: No such file or directory"


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    assert error_of(tmp_path, {}) == f"cannot read {tmp_path}: Is a directory"


def test_invalid_toml_says_where(toml: Any) -> None:
    path = toml("steps = 3\nlr = = 4")
    message = error_of(path, {})
    assert message.startswith(f"{path} is not valid TOML: ")
    assert "line 2" in message


def test_text_that_is_not_utf_8_is_not_toml(tmp_path: Path) -> None:
    path = tmp_path / "latin.toml"
    path.write_bytes('data = "caf\xe9"'.encode("latin-1"))
    assert error_of(path, {}).startswith(f"{path} is not valid TOML: ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stpes = 3", "unknown field 'stpes' (did you mean 'steps'?)"),
        ("global-batchsize = 3", "unknown field 'global_batchsize' (did you mean 'global_batch_size'?)"),
        ("zzzz = 3", "unknown field 'zzzz'"),
        ("[optimiser]\nlr = 3", "unknown field 'optimiser'"),
        ("steps = 3.0", "steps is 3.0: it must be a whole number"),
        ("steps = true", "steps is True: it must be a whole number"),
        ('steps = "3"', "steps is '3': it must be a whole number"),
        ("steps = 1979-05-27", "it must be a whole number"),
        ("threads = false", "threads is False: it must be a whole number"),
        ("lr = true", "lr is True: it must be a number"),
        ('bucket_mb = "big"', "bucket_mb is 'big': it must be a number"),
        ("lr = nan", "lr is nan: it must be finite"),
        ("lr = inf", "lr is inf: it must be finite"),
        ("weight_decay = -inf", "weight_decay is -inf: it must be finite"),
        ("beta1 = nan", "beta1 is nan: it must be finite"),
        ("bucket_mb = nan", "bucket_mb is nan: it must be finite"),
        ("overlap = 1", "overlap is 1: it must be true or false"),
        ('compile = "yes"', "compile is 'yes': it must be true or false"),
        ("run = 7", "run is 7: it must be text"),
        ("preset = []", "preset is []: it must be text"),
        ("model = 3", "model is a table of fields"),
        ('device = "gpu"', "device is 'gpu': choose auto or cpu or cuda (did you mean 'cpu'?)"),
        ("device = 1", "device is 1: choose auto or cpu or cuda"),
        ('activation_checkpointing = "ful"', "choose none or full (did you mean 'full'?)"),
        ("steps = 0", "steps is 0: it must be positive"),
        ("lr = 0.0", "lr is 0.0: it must be positive"),
        ("micro_batch_size = 0", "micro_batch_size is 0: it must be positive"),
        ("threads = -1", "threads is -1: it must be positive"),
        ("seed = -1", "seed is -1: it must not be negative"),
        ("lr_warmup_steps = -1", "lr_warmup_steps is -1: it must not be negative"),
        ("lr_min_ratio = 1.5", "lr_min_ratio is 1.5: it must be from 0 to 1"),
        ("beta2 = -0.1", "beta2 is -0.1: it must be from 0 to below 1"),
        ("evaluation_samples = 0", "evaluation_samples is 0 but evaluate_every is not"),
    ],
)
def test_an_error_names_the_file_the_field_and_what_it_should_be(text: str, said: str, toml: Any) -> None:
    path = toml(text)
    message = error_of(path, {})
    assert message.startswith(f"{path}: ")
    assert said in message


def test_an_unknown_field_that_is_like_nothing_gets_no_suggestion() -> None:
    assert error_of(None, {"zzzz": 3}) == "unknown field 'zzzz'"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"steps": True}, "steps is True: it must be a whole number"),
        ({"lr": math.nan}, "lr is nan: it must be finite"),
        ({"lr": None}, "lr is None: it must be a number"),
        ({"model": 3}, "model is a table of fields: write [model] in the file"),
        ({"stpes": 3}, "unknown field 'stpes' (did you mean 'steps'?)"),
    ],
)
def test_an_error_in_an_override_is_said_the_same_way(overrides: dict[str, Any], said: str) -> None:
    assert error_of(None, overrides) == said


def test_a_whole_number_beyond_every_float_is_an_error_of_the_user(toml: Any) -> None:
    assert "lr" in error_of(toml(f"lr = 1{'0' * 400}"), {})


def test_zero_means_never_where_that_makes_sense() -> None:
    config = load_config(
        None, {"evaluate_every": 0, "evaluation_samples": 0, "gradient_clip_norm": 0, "lr_warmup_steps": 0}
    )
    assert config.evaluate_every == config.gradient_clip_norm == 0


# --- batches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("global_batch_size", "micro_batch_size", "ranks", "expected"),
    [(16, None, 1, (16, 1)), (16, None, 4, (4, 1)), (16, 2, 4, (2, 2)), (12, 1, 3, (1, 4)), (8, 8, 1, (8, 1))],
)
def test_batch_shape(
    global_batch_size: int, micro_batch_size: int | None, ranks: int, expected: tuple[int, int]
) -> None:
    config = TrainConfig(global_batch_size=global_batch_size, micro_batch_size=micro_batch_size)
    assert config.batch_shape(ranks) == expected


@pytest.mark.parametrize(
    ("global_batch_size", "micro_batch_size", "ranks", "said"),
    [
        (16, None, 3, "global_batch_size 16 does not divide over 3 ranks: 15 or 18 would"),
        (2, None, 4, "global_batch_size 2 does not divide over 4 ranks: 4 would"),
        (16, 3, 2, "micro_batch_size 3 does not divide a rank's 8 sequences per step: 1, 2, 4, 8 would"),
        (8, 16, 2, "micro_batch_size 16 does not divide a rank's 4 sequences per step: 1, 2, 4 would"),
        (60, 7, 1, "a rank's 60 sequences per step: 5, 6, 10, 12, 15, 20, 30, 60 would"),
    ],
)
def test_a_batch_that_does_not_fit_says_which_would(
    global_batch_size: int, micro_batch_size: int | None, ranks: int, said: str
) -> None:
    config = TrainConfig(global_batch_size=global_batch_size, micro_batch_size=micro_batch_size)
    with pytest.raises(UserError) as caught:
        config.batch_shape(ranks)
    assert str(caught.value).endswith(said)


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 200), st.none() | st.integers(1, 40), st.integers(1, 16))
def test_a_batch_shape_uses_every_sequence_and_suggestions_fit(size: int, micro: int | None, ranks: int) -> None:
    config = TrainConfig(global_batch_size=size, micro_batch_size=micro)
    try:
        each, times = config.batch_shape(ranks)
        assert each * times * ranks == size
        assert micro in (None, each)
    except UserError as error:
        suggested = [int(word) for word in str(error).split(": ")[-1].replace(",", "").split() if word.isdigit()]
        assert suggested
        for fitting in suggested:
            if "global" in str(error):
                TrainConfig(global_batch_size=fitting).batch_shape(ranks)
            else:
                TrainConfig(global_batch_size=size, micro_batch_size=fitting).batch_shape(ranks)


# --- the learning rate -------------------------------------------------------------------------------------------


def test_the_learning_rate_rises_to_its_peak_and_falls_to_its_last() -> None:
    config = TrainConfig(steps=110, lr=2e-3, lr_warmup_steps=10, lr_min_ratio=0.1)
    assert config.learning_rate(1) == pytest.approx(2e-4)
    assert config.learning_rate(5) == pytest.approx(1e-3)
    assert config.learning_rate(10) == 2e-3
    assert config.learning_rate(60) == pytest.approx(2e-3 * (0.1 + 0.9 / 2))  # half of the cosine
    assert config.learning_rate(110) == pytest.approx(2e-4)
    rates = [config.learning_rate(step) for step in range(1, 111)]
    assert rates[:10] == sorted(rates[:10])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert config.learning_rate(500) == pytest.approx(2e-4)  # a longer run stays at the end


def test_without_a_warm_up_the_first_step_is_nearly_the_peak() -> None:
    config = TrainConfig(steps=100, lr=1e-3, lr_warmup_steps=0, lr_min_ratio=0.0)
    assert 0.999e-3 < config.learning_rate(1) < 1e-3
    assert config.learning_rate(100) == pytest.approx(0.0, abs=1e-12)
    assert TrainConfig(steps=1, lr_warmup_steps=0).learning_rate(1) == pytest.approx(1e-4)


@pytest.mark.parametrize("warmup", [5, 50])
def test_a_warm_up_as_long_as_the_run_or_longer_only_rises(warmup: int) -> None:
    config = TrainConfig(steps=5, lr=1e-3, lr_warmup_steps=warmup)
    assert [config.learning_rate(step) for step in range(1, 6)] == pytest.approx(
        [1e-3 * step / warmup for step in range(1, 6)]
    )


def test_a_min_ratio_of_one_stays_at_the_peak() -> None:
    config = TrainConfig(steps=20, lr=1e-3, lr_warmup_steps=3, lr_min_ratio=1.0)
    assert {config.learning_rate(step) for step in range(3, 21)} == {1e-3}


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 300), st.integers(0, 300), st.floats(0, 1))
def test_the_learning_rate_is_positive_and_never_above_its_peak(steps: int, warmup: int, ratio: float) -> None:
    config = TrainConfig(steps=steps, lr=1e-3, lr_warmup_steps=warmup, lr_min_ratio=ratio)
    rates = [config.learning_rate(step) for step in range(1, steps + 1)]
    assert all(0 <= rate <= 1e-3 * (1 + 1e-12) for rate in rates)
    if warmup < steps:
        assert rates[-1] == pytest.approx(1e-3 * ratio)
