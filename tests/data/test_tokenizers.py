import base64
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from bireme.data import cuts, open_tokens
from bireme.data.cuts import pieces
from bireme.data.tokenizers import (
    PATTERNS,
    TIKTOKEN_FILE,
    Tokenizer,
    copy_tokenizer,
    load_tokenizer,
    tokenizer_of,
)

if TYPE_CHECKING:
    from tests.data.made_tokens import failure, make_tiktoken, make_tokenizer_json, write_folder
else:
    from made_tokens import failure, make_tiktoken, make_tokenizer_json, write_folder

TEXT = "Hello  wörld,\tit's 12345 一二三;\n\n  def f(x):\n    return x // 2\r\n<|endoftext|> 🚣 "
CODE = Path(json.__file__).with_name("decoder.py").read_text() + "naïve 船\n\n\n  x ;\n/a/\n1234\n"


def each_kind(tmp_path: Path) -> list[Tokenizer]:
    files = [make_tokenizer_json(tmp_path / "tokenizer.json"), make_tiktoken(tmp_path / "cl100k_base.tiktoken")]
    return [load_tokenizer("bytes"), *(load_tokenizer(str(each)) for each in files)]


def test_text_and_back(tmp_path: Path) -> None:
    for tokenizer in each_kind(tmp_path):
        first, second, empty = tokenizer.encode_batch([TEXT, CODE, ""])
        assert tokenizer.decode(first.tolist()) == TEXT
        assert tokenizer.decode(second.tolist()) == CODE
        assert len(empty) == 0
        assert max(second.tolist()) < tokenizer.vocab_size
        # What looks like the end of text in the text is text.
        assert tokenizer.separator not in first.tolist() and tokenizer.separator < tokenizer.vocab_size
        if tokenizer.description != "bytes":
            assert len(second) < 0.8 * len(CODE)


def test_bytes_take_what_is_not_utf_8_and_show_it_as_unknown() -> None:
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode_batch(["\udcff"])[0].tolist() == [255]
    assert tokenizer.decode([65, 255, 5000]) == "A��"


@pytest.mark.parametrize("pattern", PATTERNS)
def test_long_text_has_the_same_tokens_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str) -> None:
    monkeypatch.setattr(cuts, "PIECE_BYTES", 300)
    monkeypatch.setattr(cuts, "WINDOW_BYTES", 600)
    tokenizers = [load_tokenizer(str(make_tiktoken(tmp_path / "a.tiktoken")), pattern)]
    if pattern == PATTERNS[0]:
        tokenizers.append(load_tokenizer(str(make_tokenizer_json(tmp_path / "tokenizer.json"))))
    for tokenizer in tokenizers:
        parts = [part.decode() for part in pieces(io.BytesIO(CODE.encode()).read)]
        assert len(parts) > 10
        whole = tokenizer.encode_batch([CODE])[0]
        assert np.concatenate(tokenizer.encode_batch(parts)).tolist() == whole.tolist()


def test_the_splits_of_tiktoken_are_those_of_the_library() -> None:
    """Two ways to write one pattern: each splits a text that has everything alike."""
    public = pytest.importorskip("tiktoken_ext.openai_public")
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {bytes([each]): each for each in range(256)}
    # Byte pairs that are never merged show nothing: merge whatever stands side by side within a piece.
    for first in range(256):
        for second in (10, 13, 32, 47, 97, 110, 115, 116, 195):
            ranks[bytes([first, second])] = len(ranks)
    gathered = {}

    def gather(url: str, expected_hash: str | None = None) -> dict[bytes, int]:
        return ranks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(public, "load_tiktoken_bpe", gather)
        for name in ("r50k_base", "cl100k_base", "o200k_base"):
            gathered[name] = getattr(public, name)()["pat_str"]
    from bireme.data import tokenizers as ours

    for name, split in gathered.items():
        theirs, mine = (
            tiktoken.Encoding("x", pat_str=each, mergeable_ranks=ranks, special_tokens={})
            for each in (split, ours._PATTERNS[name].split)
        )
        for text in (TEXT, CODE):
            assert mine.encode_ordinary(text) == theirs.encode_ordinary(text)


def test_descriptions_tell_tokenizers_apart(tmp_path: Path) -> None:
    file = make_tiktoken(tmp_path / "a.tiktoken")
    descriptions = [load_tokenizer(str(file), pattern).description for pattern in PATTERNS]
    assert len(set(descriptions)) == len(PATTERNS)
    assert descriptions[0].startswith("tiktoken:gpt2:")
    other = make_tiktoken(tmp_path / "b.tiktoken", merges=3)
    assert load_tokenizer(str(other), "gpt2").description not in descriptions


def test_the_name_of_a_tiktoken_file_says_how_it_splits(tmp_path: Path) -> None:
    make_tiktoken(tmp_path / "x.tiktoken")
    for name, pattern in (("o200k_base.tiktoken", "o200k_base"), ("tokenizer.model", "llama3")):
        make_tiktoken(tmp_path / name)
        assert load_tokenizer(str(tmp_path / name)).description.startswith(f"tiktoken:{pattern}:")
    assert "--tokenizer-pattern" in failure(lambda: load_tokenizer(str(tmp_path / "x.tiktoken")))
    assert "did you mean 'llama3'" in failure(lambda: load_tokenizer(str(tmp_path / "x.tiktoken"), "lama3"))


def test_published_files_have_their_own_end_of_text(tmp_path: Path) -> None:
    """The ranks of p50k_base go on after its end of text; those of cl100k_base leave one number out."""
    pytest.importorskip("tiktoken")
    singles = [bytes([each]) for each in range(256)]
    made_up = [f"<{each}>".encode() for each in range(60_000)]
    ranks = [*range(50256), *range(50257, 50281)]
    lines = [
        b"%b %d" % (base64.b64encode(token), rank)
        for token, rank in zip([*singles, *made_up][: len(ranks)], ranks, strict=True)
    ]
    (tmp_path / "p50k_base.tiktoken").write_bytes(b"\n".join(lines))
    tokenizer = load_tokenizer(str(tmp_path / "p50k_base.tiktoken"))
    assert (tokenizer.separator, tokenizer.vocab_size) == (50256, 50281)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", b"{", "no tokenizer.json"),
        ("tokenizer.json", b"[]", "no tokenizer.json"),
        ("tokenizer.json", b'{"model": {"type": "BPE"}}', "no tokenizer.json"),
        ("a.tiktoken", b"", "no tiktoken file"),
        ("a.tiktoken", b"not base64 at all", "no tiktoken file"),
        ("a.tiktoken", b"IQ== 0\nIg== 0\n", "no tiktoken file"),
        ("a.tiktoken", b"IQ== 0\nIg== 1\n", "no tiktoken file"),  # not every byte
        ("tokenizer.model", b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02", "SentencePiece"),
    ],
)
def test_files_that_do_not_parse(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    pytest.importorskip("tokenizers")
    pytest.importorskip("tiktoken")
    (tmp_path / name).write_bytes(content)
    message = failure(lambda: load_tokenizer(str(tmp_path / name)))
    assert words in message and name in message


def test_choices_that_make_no_sense(tmp_path: Path) -> None:
    assert "nowhere" in failure(lambda: load_tokenizer("nowhere.json"))
    assert "'bytes'" in failure(lambda: load_tokenizer("byte"))
    assert "tiktoken" in failure(lambda: load_tokenizer("bytes", "gpt2"))
    file = make_tokenizer_json(tmp_path / "tokenizer.json")
    assert "says itself" in failure(lambda: load_tokenizer(str(file), "gpt2"))
    content = json.loads(file.read_text())
    content["added_tokens"] = []
    content["model"]["vocab"].pop("<|endoftext|>")
    content["model"]["vocab"]["other"] = 0
    file.write_text(json.dumps(content))
    assert "no end-of-text token" in failure(lambda: load_tokenizer(str(file)))


@pytest.mark.parametrize(("library", "make"), [("tokenizers", "make_tokenizer_json"), ("tiktoken", "make_tiktoken")])
def test_a_library_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, make: str
) -> None:
    makers: dict[str, Callable[[Path], Path]] = {
        "make_tokenizer_json": make_tokenizer_json,
        "make_tiktoken": make_tiktoken,
    }
    file = makers[make](tmp_path / "cl100k_base.tiktoken")
    monkeypatch.setitem(sys.modules, library, None)
    message = failure(lambda: load_tokenizer(str(file)))
    assert f"needs the package {library}" in message and "pip install 'bireme[tokenizers]'" in message


def test_a_truncating_tokenizer_is_not_allowed_to(tmp_path: Path) -> None:
    file = make_tokenizer_json(tmp_path / "tokenizer.json")
    content = json.loads(file.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps(content))
    assert load_tokenizer(str(file)).decode(load_tokenizer(str(file)).encode_batch([TEXT])[0].tolist()) == TEXT


# --- the tokenizer of a run --------------------------------------------------------------------------------------


def test_a_tokenizer_is_found_again_beside_the_run(tmp_path: Path) -> None:
    assert tokenizer_of("bytes", tmp_path).description == "bytes"
    tokenizer = load_tokenizer(str(make_tiktoken(tmp_path / "gpt2.tiktoken")))
    run = tmp_path / "run"
    run.mkdir()
    assert TIKTOKEN_FILE in failure(lambda: tokenizer_of(tokenizer.description, run))
    (run / TIKTOKEN_FILE).write_bytes((tmp_path / "gpt2.tiktoken").read_bytes())
    assert tokenizer_of(tokenizer.description, run).encode_batch([TEXT])[0].tolist() == (
        tokenizer.encode_batch([TEXT])[0].tolist()
    )
    make_tiktoken(run / TIKTOKEN_FILE, merges=3)
    assert "is not the tokenizer" in failure(lambda: tokenizer_of(tokenizer.description, run))
    assert ".bin" in failure(lambda: tokenizer_of("unknown", run))
    for odd in ("gpt2", "tiktoken:gpt3:00", "tiktoken:gpt2", "tokenizers", "bytes:1", ""):
        assert "is not known" in failure(lambda odd=odd: tokenizer_of(odd, run))  # type: ignore[misc]


def test_a_run_gets_a_copy_of_the_file(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "set", [np.arange(100)])
    run = tmp_path / "run"
    run.mkdir()
    copy_tokenizer(open_tokens(folder), run)
    assert list(run.iterdir()) == []  # bytes need none
    tokens = open_tokens(folder)
    tokens.tokenizer_file = make_tiktoken(folder / TIKTOKEN_FILE)
    copy_tokenizer(tokens, run)
    assert [each.name for each in run.iterdir()] == [TIKTOKEN_FILE]
    assert (run / TIKTOKEN_FILE).read_bytes() == (folder / TIKTOKEN_FILE).read_bytes()
