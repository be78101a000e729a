"""check() finds what it is there to find: each test breaks one thing behind the manager's back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire.kv import UNCHANGED, KVManager
from quire.kv.blocks import Block


def busy_manager() -> KVManager:
    """Blocks in every state: sequence 1 and its fork 2 in use, 3 cached, 4 swapped, some pinned, some free."""
    kv = KVManager(num_blocks=16, block_size=4, num_host_blocks=6, watermark=0)
    for seq_id, first in ((1, 0), (3, 100), (4, 200)):
        tokens = list(range(first, first + 9))
        kv.admit(seq_id, tokens, kv.match(tokens))
        kv.commit(seq_id, tokens, 9)
    kv.fork(1, 2)
    kv.grow(2, 10, 9)
    kv.free(3)
    kv.pin(list(range(4)))
    kv.swap_out(4, 9, ticket=7)
    kv.check()
    return kv


def in_use(kv: KVManager) -> Block:
    return kv.pool.blocks[kv.tables[1].block_ids[0]]


def break_ref_count(kv: KVManager) -> None:
    in_use(kv).ref_count += 1


def break_table_twice(kv: KVManager) -> None:
    kv.tables[1].block_ids[1] = kv.tables[1].block_ids[0]


def break_table_key(kv: KVManager) -> None:
    kv.tables[1].seq_id = 5


def break_capacity(kv: KVManager) -> None:
    kv.tables[1].capacity += 4


def break_num_tokens(kv: KVManager) -> None:
    kv.tables[1].num_tokens = 13


def break_next_commit(kv: KVManager) -> None:
    kv.tables[1].next_commit -= 4


def break_table_hash(kv: KVManager) -> None:
    kv.tables[1].hashes[1] = b"0" * 16


def break_writable_from(kv: KVManager) -> None:
    kv.tables[1].writable_from = 0


def break_cache_key(kv: KVManager) -> None:
    in_use(kv).block_hash = b"0" * 16


def break_cache_entry(kv: KVManager) -> None:
    kv.cache._blocks.popitem()


def break_pins(kv: KVManager) -> None:
    in_use(kv).num_pins = 0


def break_pinned_count(kv: KVManager) -> None:
    kv.cache.num_pinned_blocks += 1


def break_queue_membership(kv: KVManager) -> None:
    kv.pool.queue.take(1)


def break_queue_with_used(kv: KVManager) -> None:
    kv.pool.queue.push_back(in_use(kv))


def break_queue_order(kv: KVManager) -> None:
    kv.pool.queue.push_back(*kv.pool.queue.take(1))


def break_used_count(kv: KVManager) -> None:
    kv.pool.num_freed_blocks += 1


def break_cached_count(kv: KVManager) -> None:
    kv.pool.num_cached_blocks += 1


def break_transit_count(kv: KVManager) -> None:
    kv.pool.num_in_transit_blocks -= 1


def break_minimum(kv: KVManager) -> None:
    kv.pool.min_free_blocks = 16


def break_transfers(kv: KVManager) -> None:
    kv.moves[7].device_ids.pop()


def break_lost_transfers(kv: KVManager) -> None:
    del kv.moves[7]


def break_host_held(kv: KVManager) -> None:
    kv.swapped[4].slices[0][1][0] = 5


def break_host_count(kv: KVManager) -> None:
    kv.swapped[4].slices[0][1].pop()


def break_host_free(kv: KVManager) -> None:
    kv.host._free.pop()


def break_two_homes(kv: KVManager) -> None:
    kv.swapped[1] = kv.swapped[4]


CASES: list[tuple[Callable[[KVManager], None], str]] = [
    (break_ref_count, "says 3 users, 2 tables"),
    (break_table_twice, "holds a block twice"),
    (break_table_key, "kept under 1"),
    (break_capacity, "capacity 16, its blocks hold 12"),
    (break_num_tokens, "13 tokens, room for 12"),
    (break_next_commit, "next commit at 8, should be 12"),
    (break_table_hash, "cached under another hash"),
    (break_writable_from, "counts as writable"),
    (break_cache_key, "not its own"),
    (break_cache_entry, "the cache knows"),
    (break_pins, "says 0 pins, 1 hold it"),
    (break_pinned_count, "pinned, counted"),
    (break_queue_membership, "not in the free queue"),
    (break_queue_with_used, "is in_use, has 1 pins and is in the free queue"),
    (break_queue_order, "stands behind a cached block"),
    (break_used_count, "blocks are in_use, counted"),
    (break_cached_count, "blocks are cached, counted"),
    (break_transit_count, "blocks are in_transit, counted"),
    (break_minimum, "minimum is above"),
    (break_transfers, "do not pair up"),
    (break_lost_transfers, "says 1 transfers, 0 move it"),
    (break_host_held, "held host blocks"),
    (break_host_count, "2 host blocks from block 0 on"),
    (break_host_free, "free host blocks"),
    (break_two_homes, "is swapped and has a table"),
]


@pytest.mark.parametrize(("damage", "message"), CASES, ids=[damage.__name__ for damage, _ in CASES])
def test_check_finds(damage: Callable[[KVManager], None], message: str) -> None:
    kv = busy_manager()
    damage(kv)
    with pytest.raises(AssertionError, match=message):
        kv.check()


def test_check_finds_a_written_constant() -> None:
    kv = busy_manager()
    UNCHANGED.appended.append((0, [1]))
    try:
        with pytest.raises(AssertionError, match="UNCHANGED"):
            kv.check()
    finally:
        UNCHANGED.appended.clear()
