"""The bytes that each token stands for.

Text is the UTF-8 of the tokens' bytes in a row, so a stream of tokens can be decoded without ever decoding one twice.
That holds for every decoder that language models ship: byte-level BPE, SentencePiece pieces with byte fallback, and
plain words. Other decoders are refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from quire.errors import TokenizerError

if TYPE_CHECKING:
    import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes(dict[int, bytes]):
    """Token id to bytes, filled as tokens are met; `hidden` ids and ids that no token has are empty."""

    __slots__ = ("_hidden", "_num_ids", "_to_bytes", "_token")

    def __init__(
        self,
        token: Callable[[int], str | None],
        to_bytes: Callable[[str], bytes],
        num_ids: int,
        hidden: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__()
        self._token = token
        self._to_bytes = to_bytes
        self._num_ids = num_ids
        self._hidden = hidden

    def __missing__(self, token_id: int) -> bytes:
        # Only ids of the vocabulary are kept: a caller's made-up ids must not fill the memory.
        if not 0 <= token_id < self._num_ids:
            return b""
        token = None if token_id in self._hidden else self._token(token_id)
        data = self[token_id] = b"" if token is None else self._to_bytes(token)
        return data


@dataclass(slots=True, frozen=True)
class DecodeRule:
    """How a tokenizer's decoder turns one token into bytes, and how many spaces it strips from the text's start."""

    to_bytes: Callable[[str], bytes]
    num_spaces_stripped: int = 0


def decode_rule(backend: tokenizers.Tokenizer, source: str) -> DecodeRule:
    """Reads the rule off a tokenizer's decoder."""
    if backend.decoder is None:  # tokens are words, joined by spaces
        return DecodeRule(lambda token: b" " + token.encode(), 1)
    config: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = config["decoders"] if config["type"] == "Sequence" else [config]
    kinds = [step["type"] for step in steps if step["type"] != "Fuse"]
    if kinds == ["ByteLevel"]:
        return DecodeRule(_byte_level)
    if kinds == ["WordPiece"]:
        prefix = steps[0]["prefix"]
        return DecodeRule(
            lambda token: token.removeprefix(prefix).encode() if token.startswith(prefix) else b" " + token.encode(), 1
        )
    replacements: list[tuple[str, str]] = []
    has_bytes = False
    num_spaces_stripped = 0
    for i, step in enumerate(steps):
        match step:
            case {"type": "Fuse"}:
                pass
            case {"type": "ByteFallback"}:
                has_bytes = True
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if len(old) == 1:
                replacements.append((old, new))
            case {"type": "Metaspace", "replacement": str(old)}:
                replacements.append((old, " "))
                num_spaces_stripped = 0 if step.get("prepend_scheme") == "never" else 1
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if {"type": "Fuse"} in steps[:i]:
                num_spaces_stripped = start
            case _:
                raise TokenizerError(
                    f"{source}: the decoder {step['type']} in {'+'.join(s['type'] for s in steps)} is not supported: "
                    "Quire decodes byte-level and SentencePiece tokenizers"
                )
    return DecodeRule(_piece(tuple(replacements), has_bytes), num_spaces_stripped)


def _piece(replacements: tuple[tuple[str, str], ...], has_bytes: bool) -> Callable[[str], bytes]:
    def to_bytes(token: str) -> bytes:
        if has_bytes and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode()

    return to_bytes


@cache
def byte_of_char() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 and up in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


def _byte_level(token: str) -> bytes:
    alphabet = byte_of_char()
    try:
        return bytes([alphabet[c] for c in token])
    except KeyError:  # an added token: its text is itself
        return token.encode()
