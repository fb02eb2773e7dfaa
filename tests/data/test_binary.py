import struct
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from bireme.data import Corpus, open_tokens
from bireme.data.tokens import is_token_set, verify_tokens

if TYPE_CHECKING:
    from tests.data.made_tokens import failure
else:
    from made_tokens import failure

STREAM = np.arange(5000) % 1000


def nano_gpt(path: Path, tokens: np.ndarray = STREAM) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(tokens.astype("<u2").tobytes())
    return path


def llm_c(path: Path, tokens: np.ndarray = STREAM, magic: int = 20240520, version: int = 1, dtype: str = "<u2") -> Path:
    path.parent.mkdir(exist_ok=True)
    header = struct.pack("<iii", magic, version, len(tokens)).ljust(1024, b"\0")
    path.write_bytes(header + tokens.astype(dtype).tobytes())
    return path


def everything(path: Path) -> list[int]:
    tokens = open_tokens(path)
    return list(tokens.read(np.array([0]), tokens.count)[0].tolist())


def test_nano_gpt(tmp_path: Path) -> None:
    path = nano_gpt(tmp_path / "train.bin")
    tokens = open_tokens(path)
    assert everything(path) == STREAM.tolist()
    assert (tokens.vocab_size, tokens.tokenizer, tokens.tokenizer_file) == (None, "unknown", None)
    assert tokens.size_bytes == 10_000
    verify_tokens(tokens)


def test_llm_c(tmp_path: Path) -> None:
    assert everything(llm_c(tmp_path / "gpt2.bin")) == STREAM.tolist()
    large = STREAM + 100_000
    assert everything(llm_c(tmp_path / "llama.bin", large, 20240801, 7, "<u4")) == large.tolist()


@pytest.mark.parametrize("names", [("train.bin", "val.bin"), ("fineweb_train_000001.bin", "fineweb_val_000000.bin")])
def test_a_folder_with_a_part_for_validation(tmp_path: Path, names: tuple[str, str]) -> None:
    """Nothing is held out of training, and no window crosses from one part into the other."""
    folder = tmp_path / "set"
    write = nano_gpt if names[0] == "train.bin" else llm_c
    write(folder / names[0], STREAM[:4005])
    write(folder / names[1], STREAM[4005:])
    (folder / "meta.pkl").write_bytes(b"never read")
    assert is_token_set(folder)
    corpus = Corpus(open_tokens(folder), 10, 1000)
    assert corpus.token_set.count == 5000
    assert (corpus.num_train_samples, corpus.num_evaluation_samples) == (400, 99)
    assert corpus.evaluation_samples().tolist() == list(range(400, 499))
    inputs, targets = corpus.batch(np.array([399, 400, 498]))
    assert inputs[:, 0].tolist() == [STREAM[3990], STREAM[4005], STREAM[4985]]
    assert targets[:, -1].tolist() == [STREAM[4000], STREAM[4015], STREAM[4995]]


def test_the_parts_are_part_of_the_fingerprint(tmp_path: Path) -> None:
    nano_gpt(tmp_path / "a" / "train.bin")
    nano_gpt(tmp_path / "a" / "val.bin")
    nano_gpt(tmp_path / "b" / "x.bin")
    nano_gpt(tmp_path / "b" / "y.bin")
    assert open_tokens(tmp_path / "a").fingerprint != open_tokens(tmp_path / "b").fingerprint


def test_several_files_are_one_stream_in_the_order_of_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    llm_c(folder / "fineweb_train_000002.bin", STREAM[3000:])
    llm_c(folder / "fineweb_train_000001.bin", STREAM[:3000])
    assert everything(folder) == STREAM.tolist()


def test_the_fingerprint_changes_with_the_content_and_not_with_the_name(tmp_path: Path) -> None:
    large = np.arange(1_000_000) % 1000
    path = nano_gpt(tmp_path / "a.bin", large)
    before = open_tokens(path).fingerprint
    path = path.rename(tmp_path / "b.bin")
    assert open_tokens(path).fingerprint == before
    for position in (0, -1):
        changed = large.copy()
        changed[position] += 1
        assert open_tokens(nano_gpt(path, changed)).fingerprint != before
    assert open_tokens(nano_gpt(path, large[:-1])).fingerprint != before
    assert open_tokens(nano_gpt(path, large[::-1])).fingerprint != before


def test_what_is_wrong_with_a_file(tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    path.write_bytes(b"")
    assert "no .bin file" in failure(lambda: open_tokens(path))
    path.write_bytes(b"abc")
    assert "no .bin file" in failure(lambda: open_tokens(path))
    assert "multiple-choice" in failure(lambda: open_tokens(llm_c(path, magic=20240522)))
    assert "version 2" in failure(lambda: open_tokens(llm_c(path, version=2)))
    whole = llm_c(path).read_bytes()
    for damaged in (whole[:-1], whole[:1000], whole + b"\0\0"):
        path.write_bytes(damaged)
        assert "is torn" in failure(lambda: open_tokens(path))
    assert "nowhere.bin" in failure(lambda: open_tokens(tmp_path / "nowhere.bin"))


def test_what_is_wrong_with_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    nano_gpt(folder / "val.bin")
    assert "for validation" in failure(lambda: open_tokens(folder))
    llm_c(folder / "train.bin", STREAM, 20240801, 7, "<u4")
    assert "different size" in failure(lambda: open_tokens(folder))
    nano_gpt(folder / "train.bin")
    nano_gpt(folder / "val.bin", STREAM[:8])
    assert "8 tokens to evaluate on" in failure(lambda: Corpus(open_tokens(folder), 8, 1000))


def test_a_token_outside_the_model_is_named(tmp_path: Path) -> None:
    corpus = Corpus(open_tokens(nano_gpt(tmp_path / "train.bin")), 10, 999)
    corpus.batch(np.array([0]))
    message = failure(lambda: corpus.batch(np.array([0, 99])))
    assert "token 999 of" in message and "train.bin" in message and "vocab_size 999" in message
