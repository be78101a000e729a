from __future__ import annotations

import itertools

import pytest

from quire.kv.blocks import BLOCK_SIZES
from quire.kv.hashing import HASH_BYTES, block_hasher, root_hash


def test_roots_differ_by_salt_and_adapter() -> None:
    parts = [None, "", "-", "a", "ab", "abc", "b", "bc", "c", "1:a", "+1:a", "\ud800"]
    roots = [root_hash(salt, adapter) for salt, adapter in itertools.product(parts, parts)]
    assert len(set(roots)) == len(roots)
    assert root_hash("a", "b") == root_hash("a", "b")
    assert root_hash() == root_hash(None, None)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_every_token_and_the_parent_matter(block_size: int) -> None:
    hash_block = block_hasher(block_size)
    tokens = list(range(block_size))
    first = hash_block(root_hash(), tokens)
    assert len(first) == HASH_BYTES
    assert first == hash_block(root_hash(), tuple(tokens))
    hashes = {first, hash_block(first, tokens), hash_block(root_hash("salt"), tokens)}
    for position in range(block_size):
        changed = list(tokens)
        changed[position] += 1
        hashes.add(hash_block(root_hash(), changed))
    assert len(hashes) == 3 + block_size


def test_tokens_are_not_confused_by_their_digits() -> None:
    hash_block = block_hasher(4)
    assert hash_block(root_hash(), [1, 256, 0, 0]) != hash_block(root_hash(), [1, 0, 1, 0])
    assert hash_block(root_hash(), [2**31 - 1] * 4) != hash_block(root_hash(), [0] * 4)
