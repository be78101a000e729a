"""The block hashes of a prompt, as a replica's cache names them, and those of a text where nobody knows its tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from quire.kv.hashing import HASH_BYTES, BlockHash, block_hasher, root_hash

_hasher = lru_cache(8)(block_hasher)
CHARS_PER_TOKEN = 4  # about, of English
_TEXT_FIELDS = ("model", "prompt", "system", "instructions", "tools", "messages", "input", "cache_salt")


def prompt_hashes(
    token_ids: Sequence[int], block_size: int, salt: str | None = None, adapter: str | None = None
) -> list[BlockHash]:
    """Of the full blocks that a request with these tokens could find cached: its last token always runs."""
    hash_block, parent = _hasher(block_size), root_hash(salt, adapter)
    hashes = []
    for first in range(0, len(token_ids) - block_size, block_size):
        parent = hash_block(parent, token_ids[first : first + block_size])
        hashes.append(parent)
    return hashes


def text_of(body: Mapping[str, Any]) -> str:
    """What of a request's body a prompt is made of, in the order in which templates put it."""
    return "\n".join(json.dumps(body[name]) for name in _TEXT_FIELDS if body.get(name) is not None)


def text_hashes(text: str, block_size: int) -> list[BlockHash]:
    """A chain over pieces of about a block's length: equal beginnings have equal hashes."""
    size, parent, hashes = block_size * CHARS_PER_TOKEN, b"text", []
    for first in range(0, len(text) - size, size):
        piece = text[first : first + size].encode("utf-8", "surrogatepass")
        parent = blake2b(parent + piece, digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return hashes
