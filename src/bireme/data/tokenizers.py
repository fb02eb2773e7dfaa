"""Tokenizers: bytes, Hugging Face's tokenizer.json, tiktoken's files of byte pairs; none is ever downloaded."""

import base64
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from bireme.data.shards import reason
from bireme.data.tokens import TOKENIZER_FILES, UNKNOWN, TokenSet
from bireme.errors import UserError, nearest
from bireme.files import written_whole

BYTES = "bytes"
HUGGING_FACE_FILE, TIKTOKEN_FILE = TOKENIZER_FILES

_ENDS_OF_TEXT = (
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<end_of_text>", "<EOS>", "[EOS]", "[SEP]"),
    "<｜end▁of▁sentence｜>",
)


class Tokenizer(Protocol):
    """Text to tokens and back. Special tokens in the text are text."""

    @property
    def description(self) -> str:
        """For the header of token files and the metadata of weights: two with the same one give the same tokens."""

    @property
    def file(self) -> Path | None: ...

    @property
    def vocab_size(self) -> int:
        """One more than the largest token."""

    @property
    def separator(self) -> int:
        """The end-of-text token."""

    def encode_batch(self, texts: list[str]) -> list[NDArray[Any]]: ...

    def decode(self, ids: Sequence[int]) -> str:
        """What is not UTF-8, or no token, shows as �."""


class ByteTokenizer:
    """One token for each byte of the text in UTF-8; 0 ends a text."""

    description = BYTES
    file = None
    vocab_size = 256
    separator = 0

    def encode_batch(self, texts: list[str]) -> list[NDArray[Any]]:
        # Bytes of a command line that are not UTF-8 come as surrogates.
        return [np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        # A vocabulary of more than 256 tokens can yield one that is no byte: 0xff is never part of UTF-8.
        return bytes(min(token, 0xFF) for token in ids).decode("utf-8", errors="replace")


class _HuggingFace:
    def __init__(self, file: Path, content: bytes):
        try:
            from tokenizers import Tokenizer as Library
        except ImportError:
            raise _missing("tokenizers", file) from None
        try:
            self._tokenizer = Library.from_buffer(content)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises nothing more precise, and panics
            raise UserError(
                f"{str(file)!r} is no tokenizer.json of the Hugging Face tokenizers library: {reason(error)}"
            ) from None
        self._tokenizer.no_truncation()  # both may be stored in the file, for other uses
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self.file = file
        self.description = f"tokenizers:{_short_hash(content)}"
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        found = [token for name in _ENDS_OF_TEXT if (token := self._tokenizer.token_to_id(name)) is not None]
        if not found:
            raise UserError(
                f"the tokenizer {str(file)!r} has no end-of-text token to put between documents; add one of "
                f"{', '.join(_ENDS_OF_TEXT[:4])} to it"
            )
        self.separator: int = found[0]

    def encode_batch(self, texts: list[str]) -> list[NDArray[Any]]:
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a word that it does not know, and no token for such words; or a panic
            raise UserError(f"the tokenizer {str(self.file)!r} cannot encode the text: {reason(error)}") from None
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


class _Pattern(NamedTuple):
    """How a family of tiktoken files splits text, and what it has besides its byte pairs."""

    split: str
    num_ranks: int  # of the published file; for one of another size the tokens below are made up: first after the ranks
    end_of_text: int
    vocab_size: int


_GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_CL100K = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_PUNCTUATION}|\s*[\r\n]+|\s+(?!\S)|\s+"
_O200K = "|".join(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{_CONTRACTION}?",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{_CONTRACTION}?",
        *(r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
    )
)
_PATTERNS = {
    "gpt2": _Pattern(_GPT2, 50256, 50256, 50257),
    "r50k_base": _Pattern(_GPT2, 50256, 50256, 50257),
    "p50k_base": _Pattern(_GPT2, 50280, 50256, 50281),
    "cl100k_base": _Pattern(_CL100K, 100256, 100257, 100277),
    "o200k_base": _Pattern(_O200K, 199998, 199999, 200019),
    "llama3": _Pattern(_CL100K, 128000, 128001, 128256),
}
PATTERNS = tuple(_PATTERNS)


class _Tiktoken:
    def __init__(self, file: Path, content: bytes, pattern: str):
        try:
            from tiktoken import Encoding
        except ImportError:
            raise _missing("tiktoken", file) from None
        ranks = _parse_ranks(file, content)
        known = _PATTERNS[pattern]
        after = max(ranks.values()) + 1
        published = len(ranks) == known.num_ranks
        self.file = file
        self.description = f"tiktoken:{pattern}:{_short_hash(content)}"
        self.separator = known.end_of_text if published else after
        self.vocab_size = known.vocab_size if published else after + 1
        self._encoding = Encoding(
            self.description,
            pat_str=known.split,
            mergeable_ranks=ranks,
            special_tokens={"<|endoftext|>": self.separator},
        )

    def encode_batch(self, texts: list[str]) -> list[NDArray[Any]]:
        return [self._encoding.encode_to_numpy(text, disallowed_special=()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self._bytes_of, ids)).decode("utf-8", errors="replace")

    def _bytes_of(self, token: int) -> bytes:
        try:
            return self._encoding.decode_single_token_bytes(token)
        except KeyError:  # of the reserved ones, or of a model with a larger vocabulary
            return "�".encode()


def _parse_ranks(file: Path, content: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    try:
        for line in content.splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
        flawed = len(set(ranks.values())) != len(ranks) or not 256 <= len(ranks) <= 1 << 24
        flawed |= not all(bytes([each]) in ranks for each in range(256)) or not min(ranks.values()) >= 0
        flawed |= max(ranks.values()) > 1 << 24
    except ValueError:
        flawed = True
    if flawed:
        raise UserError(
            f"{str(file)!r} is no tiktoken file (lines of a token in base64 and its rank) and no tokenizer.json; of a "
            "SentencePiece model take the tokenizer.json beside it"
        )
    return ranks


def load_tokenizer(choice: str, pattern: str | None = None) -> Tokenizer:
    """The tokenizer that a user named: "bytes", or the path of a tokenizer.json or of a tiktoken file.

    `pattern` says how a tiktoken file splits text; not given, the file's name does. UserError when that is unknown, the
    file is not one of these, or the library for it is not installed.
    """
    if pattern is not None and choice == BYTES:
        raise UserError("--tokenizer-pattern is for tiktoken files; bytes are not split")
    if choice == BYTES:
        return ByteTokenizer()
    file = Path(choice)
    if pattern is not None and pattern not in _PATTERNS:
        raise UserError(
            f"unknown tokenizer pattern {pattern!r}{nearest(pattern, PATTERNS)}; known are {', '.join(PATTERNS)}"
        )
    content = _content(file, f"; give {BYTES!r}, or the path of a tokenizer.json or of a tiktoken file")
    if content.lstrip()[:1] == b"{" or file.suffix == ".json":
        if pattern is not None:
            raise UserError(f"--tokenizer-pattern is for tiktoken files; {str(file)!r} says itself how it splits text")
        return _HuggingFace(file, content)
    if pattern is None:
        pattern = {"tokenizer": "llama3"}.get(file.stem, file.stem)
        if pattern not in _PATTERNS:
            _parse_ranks(file, content)  # what is no such file has no pattern either
            raise UserError(
                f"how {str(file)!r} splits text does not follow from its name; choose with --tokenizer-pattern: "
                f"{', '.join(PATTERNS)}"
            )
    return _Tiktoken(file, content, pattern)


def tokenizer_of(description: str, folder: Path) -> Tokenizer:
    """The tokenizer of a run or a prepared folder, from its description and the file kept beside.

    UserError when the file is missing or another, or the library for it is not installed.
    """
    kind, *rest = description.split(":")
    if description == BYTES:
        return ByteTokenizer()
    if description == UNKNOWN:
        raise UserError("its tokens came from .bin files, which do not say what tokenizer made them: it has no text")
    if kind == "tokenizers" and len(rest) == 1:
        file = folder / HUGGING_FACE_FILE
    elif kind == "tiktoken" and len(rest) == 2 and rest[0] in _PATTERNS:
        file = folder / TIKTOKEN_FILE
    else:
        raise UserError(f"needs the tokenizer {description!r}, which is not known; a newer Bireme may know it")
    content = _content(file, f"; put the file of the tokenizer {description!r} there")
    if _short_hash(content) != rest[-1]:
        raise UserError(f"{str(file)!r} is not the tokenizer {description!r}: it is another or was changed")
    return _HuggingFace(file, content) if kind == "tokenizers" else _Tiktoken(file, content, rest[0])


def copy_tokenizer(token_set: TokenSet, run_directory: Path) -> None:
    """Puts the tokenizer's file of a token set, if it has one, into a run directory. Raises OSError."""
    if token_set.tokenizer_file is not None:
        copy_atomic(token_set.tokenizer_file, run_directory / token_set.tokenizer_file.name)


def copy_atomic(source: Path, target: Path) -> None:
    """Copies a small file in one piece or not at all. Raises OSError."""
    with written_whole(target) as file:
        file.write(source.read_bytes())


def _content(file: Path, advice: str) -> bytes:
    try:
        return file.read_bytes()
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the tokenizer {str(file)!r}: {reason(error)}{advice}") from None


def _short_hash(content: bytes) -> str:
    return sha256(content).hexdigest()[:16]


def _missing(library: str, file: Path) -> UserError:
    return UserError(
        f"the tokenizer {str(file)!r} needs the package {library}; install it with: pip install 'bireme[tokenizers]'"
    )
