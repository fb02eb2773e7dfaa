"""One file from many shards: the trained model bit for bit, or a refusal that names what is wrong."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import orjson
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

import bireme.checkpoint.export
from bireme.checkpoint.export import assemble, export
from bireme.checkpoint.folder import CHECKPOINTS, name_of, read_manifest
from bireme.config import TrainConfig
from bireme.data.tokenizers import HUGGING_FACE_FILE
from bireme.errors import UserError
from bireme.model import ModelConfig, preset
from bireme.sample import WEIGHTS_FILE, load_weights, sample_run
from bireme.train import train
from bireme.world import here

if TYPE_CHECKING:
    from tests.checkpoint.made_checkpoints import TINY, Part, made, model_of, rows
    from tests.pool import RankPool
else:
    from made_checkpoints import TINY, Part, made, model_of, rows

    from pool import RankPool

torch.set_num_threads(1)

LLAMA = preset("toy-llama", num_layers=1, embedding_dim=16, feed_forward_dim=12, sequence_length=4)
EMBEDDING = "model.token_embedding.weight"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """examples/load_exported.py"""
    path = Path(__file__).parents[2] / "examples" / "load_exported.py"
    spec = importlib.util.spec_from_file_location("load_exported", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def exported(folder: Path, out: Path) -> Path:
    export(folder, read_manifest(folder), out)
    return out


# --- what ranks have trained -------------------------------------------------------------------------------------

TRAINED: dict[str, Any] = {
    "model": {"num_layers": 2, "embedding_dim": 32, "feed_forward_dim": 48, "sequence_length": 16},
    "global_batch_size": 4,
    "steps": 2,
    "lr": 3e-3,
    "lr_warmup_steps": 1,
    "threads": 1,
    "evaluate_every": 0,
    "peak_seconds": 0.0,
    "checkpoint_every": 2,
}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {"preset": "toy"}),
    "fsdp": (2, {"layout": "fsdp", "preset": "toy-llama"}),
    "pp": (2, {"layout": "pp", "preset": "toy"}),  # the tied head is on another rank
    "tp": (2, {"layout": "tp", "preset": "toy-llama"}),
}


def run_trainer(rank: int, size: int, folder: Path, cases: dict[str, dict[str, Any]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BIREME_CACHE", str(folder / "cache"))
        for name, fields in cases.items():
            config = TrainConfig(**TRAINED, **fields, data=str(folder / "text.txt"), run=str(folder / name))
            train(config, here(rank, torch.device("cpu")), Console(quiet=True))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, ranks: RankPool) -> Path:
    """A folder with the run of every case."""
    folder = tmp_path_factory.mktemp("exported")
    (folder / "text.txt").write_text("".join(f"{n} squared is {n * n};\n" for n in range(500)))
    for size in (1, 2):
        ranks(size, run_trainer, folder, {name: fields for name, (count, fields) in CASES.items() if count == size})
    return folder


@pytest.mark.parametrize("name", CASES)
def test_a_plain_script_gets_the_logits_of_the_trained_model(
    name: str, runs: Path, example: ModuleType, tmp_path: Path
) -> None:
    """Bit for bit, whoever trained it."""
    folder = runs / name / CHECKPOINTS / name_of(2)
    assert len(read_manifest(folder)["files"]) == CASES[name][0], "every rank has written a part"
    out = exported(folder, tmp_path / "exported" / WEIGHTS_FILE)
    trained = load_weights(runs / name / WEIGHTS_FILE)
    model, tokenizer = example.load(out)
    tokens = torch.arange(32).view(2, 16)
    assert torch.equal(model(tokens), trained(tokens)) and tokenizer == "bytes"
    config = trained.config
    assert not torch.equal(model(tokens), model_of(config)(tokens)), "nothing was trained"
    assert ModelConfig(**orjson.loads(out.with_suffix(".json").read_bytes())["config"]) == config
    assert (model.output.weight is model.token_embedding.weight) == config.tied_embedding
    assert sample_run(out.parent, "1 squared", 4, 0.8, None, 0) == sample_run(runs / name, "1 squared", 4, 0.8, None, 0)


def test_the_example_prints_a_loss_and_the_next_tokens(
    runs: Path, example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = exported(runs / "one rank" / CHECKPOINTS / name_of(2), tmp_path / "model.safetensors")
    text = b"2 squared is 4"
    tokens = torch.tensor([list(text)])
    loss = load_weights(out)(tokens[:, :-1], tokens[:, 1:]).item()
    for arguments in (["--text", text.decode()], ["--tokens", ",".join(map(str, text))]):
        monkeypatch.setattr(sys, "argv", ["load_exported.py", str(out), *arguments, "--next", "20"])
        example.main()
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"loss {loss:.6f}"
        assert len(orjson.loads(lines[1].removeprefix("next "))) == 20 and lines[2].startswith("text ")


# --- how it is divided does not matter ---------------------------------------------------------------------------


@pytest.mark.parametrize("config", [TINY, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("ranks", [1, 3, 20])
def test_any_number_of_shards(config: ModelConfig, ranks: int, tmp_path: Path) -> None:
    """Also more of them than there are rows: the rest are empty."""
    model = model_of(config, seed=3)
    folder = made(tmp_path, 5, rows(model, ranks), config)
    weights = assemble(folder, read_manifest(folder), config)
    expected = dict(model.named_parameters())
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_boxes_of_any_kind(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Cut along both dimensions, in any order; with one box missing, or doubled, it is refused by its name."""
    model = model_of(TINY, seed=1)
    assert model.token_embedding is not None
    whole = model.token_embedding.weight.detach()
    cuts = [
        [0, *sorted(data.draw(st.sets(st.integers(1, size - 1), max_size=2))), size]
        for size in (whole.shape[0], whole.shape[1])
    ]
    boxes: list[Part] = [
        (EMBEDDING, (top, left), whole[top:bottom, left:right].clone())
        for top, bottom in zip(cuts[0], cuts[0][1:], strict=False)
        for left, right in zip(cuts[1], cuts[1][1:], strict=False)
    ]
    boxes = data.draw(st.permutations(boxes))
    rest = [part for part in rows(model, 1)[0] if part[0] != EMBEDDING]
    folder = made(tmp_path_factory.mktemp("boxes"), 5, [[*rest, boxes[0]], *([box] for box in boxes[1:])])
    assert torch.equal(assemble(folder, read_manifest(folder), TINY)["token_embedding.weight"], whole)
    wrong, said = (boxes[1:], "is not whole") if data.draw(st.booleans()) else ([*boxes, boxes[0]], "overlaps")
    folder = made(folder.parent, 6, [rest, *([box] for box in wrong)])
    with pytest.raises(UserError, match=f"token_embedding.weight .*{said}"):
        assemble(folder, read_manifest(folder), TINY)


def test_tensors_of_the_optimizer_are_left_out(tmp_path: Path) -> None:
    (parts,) = rows(model_of(), 1)
    others = [("optimizer.norm.weight.exp_avg", (0,), torch.ones(8)), ("random.rank-00000.cpu", (0,), torch.ones(3))]
    folder = made(tmp_path, 5, [[*parts, *others]])
    assert sorted(assemble(folder, read_manifest(folder), TINY)) == sorted(dict(model_of().named_parameters()))


# --- what cannot be exported -------------------------------------------------------------------------------------


def refused(folder: Path, out: Path) -> str:
    before = sorted(out.parent.iterdir())
    with pytest.raises(UserError) as caught:
        export(folder, read_manifest(folder), out)
    assert sorted(out.parent.iterdir()) == before, "something was left"
    line = str(caught.value)
    assert line.isprintable()
    return line


def test_parts_that_are_not_the_model(tmp_path: Path) -> None:
    (parts,) = rows(model_of(), 1)
    out = tmp_path / "model.safetensors"
    name, _, values = parts[0]
    assert name == EMBEDDING
    shifted = [(name, (1, 0), values), *parts[1:]]
    assert "token_embedding.weight in rank-00000.safetensors goes beyond its shape" in refused(
        made(tmp_path / "a", 5, [shifted]), out
    )
    negative = [(name, (-1, 0), values), *parts[1:]]
    assert "does not say where its tensors belong" in refused(made(tmp_path / "b", 5, [negative]), out)
    flat = [(name, (0,), values), *parts[1:]]
    assert "does not say where its model.token_embedding.weight belongs" in refused(
        made(tmp_path / "c", 5, [flat], tensors={}), out
    )
    missing = parts[1:]
    line = refused(made(tmp_path / "d", 5, [[*missing, ("model.filling", (0,), torch.zeros(9999))]]), out)
    assert line.endswith(
        f"token_embedding.weight is not whole, {values.numel()} of {values.numel()} elements are missing"
    )
    turned = [(name, (0, 0), values.t()), *parts[1:]]
    assert "goes beyond its shape" in refused(made(tmp_path / "e", 5, [turned]), out)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": {}}, "describes no model: "),
        ({"model": {"depth": 3}}, "describes no model: "),
        ({"model": {**dict.fromkeys(ModelConfig.__slots__, 1), "norm": "\x1b"}}, "describes no model: "),
        ({"tokenizer": None}, "does not say what tokenizer"),
    ],
)
def test_manifests_that_lack_something(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    assert said in refused(made(tmp_path / "a", 5, **fields), tmp_path / "model.safetensors")


def test_a_described_model_of_absurd_size_costs_nothing(tmp_path: Path) -> None:
    model = {name: getattr(TINY, name) for name in ModelConfig.__slots__} | {"num_layers": 2**31 - 1}
    line = refused(made(tmp_path / "a", 5, model=model), tmp_path / "model.safetensors")
    assert "is smaller than the model that it describes" in line


def test_a_file_that_is_no_safetensors_file(tmp_path: Path) -> None:
    folder = made(tmp_path / "a", 5)
    manifest = read_manifest(folder)
    (folder / "rank-00001.safetensors").write_bytes(b"PK\x03\x04 not weights" * 100)  # after it was checked
    with pytest.raises(UserError, match="cannot be read"):
        export(folder, manifest, tmp_path / "model.safetensors")
    (folder / "rank-00001.safetensors").unlink()  # by a run that goes on
    with pytest.raises(UserError, match="cannot be read"):
        export(folder, manifest, tmp_path / "model.safetensors")
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("function", ["save_weights", "write_json_atomic"])
def test_a_full_disk_leaves_nothing(tmp_path: Path, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bireme.checkpoint.export, function, fail)
    assert refused(made(tmp_path / "a", 5), tmp_path / "m.safetensors").endswith(
        "m.safetensors: No space left on device"
    )


def test_the_tokenizers_file_comes_along(tmp_path: Path) -> None:
    folder = made(tmp_path / "run" / CHECKPOINTS, 5, tokenizer="tokenizers:0123")
    (tmp_path / "run" / HUGGING_FACE_FILE).write_text("{}")
    out = tmp_path / "exported" / "model.safetensors"
    assert export(folder, read_manifest(folder), out) == [out, out.with_suffix(".json"), out.parent / HUGGING_FACE_FILE]
    assert (out.parent / HUGGING_FACE_FILE).read_text() == "{}"
