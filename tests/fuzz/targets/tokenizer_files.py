"""A model's tokenizer.json and tokenizer_config.json, with a zero byte between them."""

from __future__ import annotations

import tempfile
from pathlib import Path

import fakes

from fuzz.harness import Target
from quire.errors import BadRequestError, TokenizerError
from quire.text import Tokenizer

_FOLDER = tempfile.TemporaryDirectory(prefix="fuzz-tokenizer")
_FILES = ("tokenizer.json", "tokenizer_config.json")


def _seeds() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        path = fakes.write_tiny_model(Path(folder))
        return [b"\0".join((path / name).read_bytes() if (path / name).exists() else b"{}" for name in _FILES)]


def parse(data: bytes) -> None:
    path = Path(_FOLDER.name)
    for name, part in zip(_FILES, [*data.split(b"\0", 1), b"{}"], strict=False):
        (path / name).write_bytes(part)
    tokenizer = Tokenizer.from_directory(path)
    token_ids = tokenizer.encode("Hello <|end|>\n 123 é" * 3, at_most=1_000)
    tokenizer.decode(token_ids)
    tokenizer.encode("a " * 3_000, at_most=10_000)
    tokenizer.ids_for_phrase("bad word")
    assert tokenizer.control_tokens.marks is not None


TARGET = Target(
    name="tokenizer_files",
    parse=parse,
    refusals=(BadRequestError, TokenizerError),
    seeds=_seeds,
    words=(
        *(b'"type":', b'"BPE"', b'"WordLevel"', b'"Unigram"', b'"WordPiece"', b'"unk_token"', b'"vocab"', b'"merges"'),
        *(b'"normalizer":', b'"pre_tokenizer":', b'"decoder":', b'"Metaspace"', b'"ByteLevel"', b'"Split"', b'"Regex"'),
        *(b'"(a+)+$"', b'"added_tokens"', b'"special": true', b'"content": ""', b"null", b"{}", b"[]", b"true", b"-1"),
    ),
    max_cpu_s=3.0,
)
