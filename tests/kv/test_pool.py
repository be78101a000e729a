from __future__ import annotations

import pytest

from quire.kv.blocks import BlockState
from quire.kv.pool import BlockPool
from quire.kv.prefix_cache import PrefixCache


def make_pool(num_blocks: int = 6) -> BlockPool:
    return BlockPool(num_blocks, PrefixCache(4, max_evicted=16))


def queue_of(pool: BlockPool) -> list[int]:
    return [block.block_id for block in pool.queue]


def name(pool: BlockPool, *block_ids: int) -> None:
    for block_id in block_ids:
        pool.cache.insert(b"%d" % block_id, pool.blocks[block_id])


def test_allocate_and_release() -> None:
    pool = make_pool()
    assert pool.allocate(4) == [0, 1, 2, 3]
    assert (pool.num_free_blocks, pool.num_used_blocks, pool.min_free_blocks) == (2, 4, 2)
    pool.release_table([0, 1, 2, 3])
    assert (pool.num_free_blocks, pool.num_used_blocks, pool.min_free_blocks) == (6, 0, 2)
    assert (pool.num_allocated_blocks, pool.num_freed_blocks) == (4, 4)
    pool.check()
    with pytest.raises(AssertionError, match="7 blocks asked, 6 free"):
        pool.allocate(7)


def test_unhashed_blocks_go_first_then_cached_ones_tail_to_head() -> None:
    pool = make_pool()
    pool.allocate(5)
    name(pool, 0, 1, 2)
    pool.release_table([0, 1, 2, 3, 4])
    assert queue_of(pool) == [3, 4, 5, 2, 1, 0]
    assert pool.num_cached_blocks == 3
    pool.check()
    assert pool.allocate(4) == [3, 4, 5, 2]
    assert (pool.cache.num_evictions, pool.num_cached_blocks, pool.blocks[2].block_hash) == (1, 2, None)
    pool.check()


def test_acquire_takes_a_cached_block_out_of_the_queue() -> None:
    pool = make_pool()
    pool.allocate(2)
    name(pool, 0, 1)
    pool.acquire(pool.blocks[0])
    pool.release_table([0, 1])
    assert queue_of(pool) == [2, 3, 4, 5, 1]
    pool.acquire(pool.blocks[1])
    assert queue_of(pool) == [2, 3, 4, 5]
    assert [pool.blocks[i].ref_count for i in (0, 1)] == [1, 1]
    with pytest.raises(AssertionError, match="holds nothing"):
        pool.acquire(pool.blocks[5])  # nothing is known of it


def test_a_block_whose_bytes_move_waits_for_the_last_transfer() -> None:
    pool = make_pool(2)
    pool.allocate(1)
    pool.blocks[0].num_transfers = 2
    pool.release(pool.blocks[0])
    assert pool.blocks[0].state is BlockState.IN_TRANSIT
    assert (pool.num_in_transit_blocks, queue_of(pool)) == (1, [1])
    pool.transfer_finished(pool.blocks[0])
    assert queue_of(pool) == [1]
    pool.transfer_finished(pool.blocks[0])
    assert (pool.num_in_transit_blocks, queue_of(pool)) == (0, [0, 1])
    pool.check()


def test_a_cached_block_whose_bytes_are_read_is_not_evicted_and_can_be_shared() -> None:
    pool = make_pool(3)
    pool.allocate(2)
    name(pool, 0, 1)
    pool.release_table([0, 1])
    pool.transfer_started(pool.blocks[0])
    assert pool.blocks[0].state is BlockState.IN_TRANSIT
    assert (queue_of(pool), pool.num_cached_blocks, pool.num_in_transit_blocks) == ([2, 1], 1, 1)
    pool.check()
    pool.acquire(pool.blocks[0])
    assert (pool.blocks[0].state, pool.num_in_transit_blocks) == (BlockState.IN_USE, 0)
    pool.transfer_finished(pool.blocks[0])
    pool.release(pool.blocks[0])
    assert queue_of(pool) == [2, 1, 0]
    pool.check()


def test_pinned_blocks_stay_out_of_the_queue() -> None:
    pool = make_pool(3)
    pool.allocate(2)
    name(pool, 0, 1)
    pool.release(pool.blocks[0])
    pool.pin(pool.cache.pin(b"1", pool.blocks[:2]))
    pool.release(pool.blocks[1])
    assert queue_of(pool) == [2]
    assert (pool.num_cached_blocks, pool.min_free_blocks) == (2, 1)
    pool.check()
    pool.acquire(pool.blocks[0])
    pool.release(pool.blocks[0])
    assert queue_of(pool) == [2]
    pool.forget_idle(force=False)
    assert pool.num_cached_blocks == 2
    pool.unpin(pool.cache.unpin(b"1"))
    assert queue_of(pool) == [2, 0, 1]
    pool.check()


def test_forced_forgetting_takes_idle_pinned_blocks_too() -> None:
    pool = make_pool(3)
    pool.allocate(2)
    name(pool, 0, 1)
    pool.pin(pool.cache.pin(b"1", pool.blocks[:2]))
    pool.release(pool.blocks[1])
    pool.forget_idle(force=True)
    assert queue_of(pool) == [2, 1]
    assert (pool.num_cached_blocks, pool.cache.num_pinned_blocks) == (0, 1)
    assert pool.blocks[0].block_hash is not None
    pool.check()


def test_releasing_twice_is_a_bug() -> None:
    pool = make_pool()
    pool.allocate(1)
    pool.release(pool.blocks[0])
    with pytest.raises(AssertionError, match="no user"):
        pool.release(pool.blocks[0])
