from __future__ import annotations

import pytest

from quire.kv.blocks import Block
from quire.kv.hashing import root_hash
from quire.kv.prefix_cache import PrefixCache

ROOT = root_hash()
TOKENS = list(range(16))


def filled(num_blocks: int = 4, max_evicted: int = 8) -> tuple[PrefixCache, list[Block], list[bytes]]:
    cache = PrefixCache(4, max_evicted=max_evicted)
    blocks = [Block(block_id, ref_count=1) for block_id in range(num_blocks)]
    hashes: list[bytes] = []
    cache.extend_chain(hashes, ROOT, TOKENS, num_blocks)
    cache.insert_chain(0, hashes, ROOT, TOKENS, blocks)
    cache.check(blocks)
    return cache, blocks, hashes


def test_a_prefix_is_counted_to_the_first_miss_and_hashed_no_further() -> None:
    cache, blocks, all_hashes = filled()
    cache.forget(blocks[2])
    hashes: list[bytes] = []
    assert cache.count_prefix(hashes, ROOT, TOKENS, 4) == 2
    assert len(hashes) == 3
    assert cache.count_prefix(hashes, ROOT, TOKENS, 4, below=lambda key: key == all_hashes[2]) == 4
    assert cache.runs(all_hashes, 0) == [1, 2, 0, 1]
    assert cache.runs(all_hashes, 0, below=lambda key: key == all_hashes[2]) == [1, 2, 3, 4]


def test_known_hashes_are_not_computed_again() -> None:
    cache, _, hashes = filled()
    nonsense = [-1] * 16
    assert cache.count_prefix(list(hashes), ROOT, nonsense, 4) == 4


def test_the_first_block_keeps_a_hash() -> None:
    cache, blocks, hashes = filled()
    twin = Block(9, ref_count=1)
    cache.insert(hashes[0], twin)
    assert twin.block_hash is None
    assert cache.lookup(hashes[0]) is blocks[0]
    cache.insert(hashes[0], blocks[0])  # again, by a fork: nothing changes
    with pytest.raises(AssertionError, match="disagree"):
        cache.insert(b"other", blocks[0])


def test_evictions_are_remembered_up_to_a_bound() -> None:
    cache, blocks, hashes = filled(max_evicted=2)
    for block in blocks[:2]:
        cache.evict(block)
    cache.insert(hashes[0], blocks[0])
    cache.evict(blocks[0])  # again: it is the latest now
    cache.evict(blocks[2])
    assert [cache.was_lost(block_hash) for block_hash in hashes[:3]] == [True, False, True]
    assert cache.num_evictions == 4
    cache.forget_evictions()
    assert not cache.was_lost(hashes[0])


def test_a_forgotten_block_is_not_an_eviction() -> None:
    cache, blocks, hashes = filled()
    cache.forget(blocks[3])
    assert cache.num_evictions == 0
    assert not cache.was_lost(hashes[3])


def test_pins_are_counted_per_prefix() -> None:
    cache, blocks, hashes = filled()
    assert cache.pin(hashes[1], blocks[:2]) == blocks[:2]
    assert cache.pin(hashes[1], blocks[:2]) == []
    assert cache.pin(hashes[2], blocks[:3]) == blocks[2:3]
    assert (cache.num_pinned_by(hashes[1]), cache.num_pinned_by(hashes[2]), cache.num_pinned_blocks) == (2, 3, 3)
    cache.check(blocks)
    assert cache.unpin(hashes[1]) == []
    assert cache.unpin(hashes[1]) == [] and cache.num_pinned_by(hashes[1]) == 0
    assert cache.unpin(hashes[2]) == blocks[:3]
    assert cache.num_pinned_blocks == 0
    cache.check(blocks)


def test_pinning_nothing_leaves_no_pin() -> None:
    cache, blocks, hashes = filled()
    assert cache.pin(hashes[0], []) == []
    cache.check(blocks)


def test_a_pinned_block_cannot_be_evicted() -> None:
    cache, blocks, hashes = filled()
    cache.pin(hashes[0], blocks[:1])
    with pytest.raises(AssertionError, match="pinned"):
        cache.evict(blocks[0])


def test_unpin_idle_spares_blocks_in_use_and_in_transit() -> None:
    cache, blocks, hashes = filled()
    cache.pin(hashes[3], blocks)
    blocks[1].ref_count = blocks[2].ref_count = 0
    blocks[2].num_transfers = 1
    assert cache.idle_blocks() == [blocks[1]]
    assert cache.unpin_idle() == [blocks[1]]
    assert cache.num_pinned_by(hashes[3]) == 4
    cache.check(blocks)


def test_a_named_block_remembers_what_it_holds() -> None:
    from quire.kv import KVManager
    from quire.kv.hashing import unpack_tokens

    kv = KVManager(num_blocks=8, block_size=4, watermark=0)
    tokens = list(range(100, 110))
    kv.admit(1, tokens, kv.match(tokens))
    kv.commit(1, tokens, 10)
    kv.admit(2, tokens, kv.match(tokens))
    first, second, third = (kv.pool.blocks[block_id] for block_id in kv.block_ids(1))
    assert unpack_tokens(first.packed_tokens) + unpack_tokens(second.packed_tokens) == tokens[:8]
    assert second.parent_hash == first.block_hash and (first.chain_index, second.chain_index) == (0, 1)
    assert (first.num_hits, second.num_hits, third.num_hits) == (1, 1, 0)
    assert third.packed_tokens == b""
    kv.free(1)
    kv.free(2)
    assert unpack_tokens(first.packed_tokens) == tokens[:4]  # cached: still known
    kv.reset_prefix_cache()
    assert first.packed_tokens == b"" and first.parent_hash is None and first.num_hits == 0
    kv.check()
