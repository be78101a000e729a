from __future__ import annotations

import itertools

import pytest

from quire.kv.blocks import BLOCK_SIZES
from quire.kv.hashing import HASH_BYTES, hash_blocks, root_hash


def test_roots_differ_by_salt_and_adapter() -> None:
    parts = [None, "", "-", "a", "ab", "abc", "b", "bc", "c", "1:a", "+1:a", "\ud800"]
    roots = [root_hash(salt, adapter) for salt, adapter in itertools.product(parts, parts)]
    assert len(set(roots)) == len(roots)
    assert root_hash("a", "b") == root_hash("a", "b")
    assert root_hash() == root_hash(None, None)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_every_token_and_the_parent_matter(block_size: int) -> None:
    tokens = list(range(block_size))
    [first] = hash_blocks(root_hash(), tokens, block_size)
    assert len(first) == HASH_BYTES
    assert [first] == hash_blocks(root_hash(), tuple(tokens), block_size)
    hashes = {first, *hash_blocks(first, tokens, block_size), *hash_blocks(root_hash("salt"), tokens, block_size)}
    for position in range(block_size):
        changed = list(tokens)
        changed[position] += 1
        hashes.update(hash_blocks(root_hash(), changed, block_size))
    assert len(hashes) == 3 + block_size


def test_blocks_hashed_together_and_one_by_one_have_the_same_names() -> None:
    tokens, parent, one_by_one = list(range(40)), root_hash(), []
    for first in range(0, 40, 8):
        [parent] = hash_blocks(parent, tokens[first : first + 8], 8)
        one_by_one.append(parent)
    assert hash_blocks(root_hash(), tokens, 8) == one_by_one
    assert hash_blocks(root_hash(), [], 8) == []


def test_tokens_are_not_confused_by_their_digits() -> None:
    assert hash_blocks(root_hash(), [1, 256, 0, 0], 4) != hash_blocks(root_hash(), [1, 0, 1, 0], 4)
    assert hash_blocks(root_hash(), [2**31 - 1] * 4, 4) != hash_blocks(root_hash(), [0] * 4, 4)
