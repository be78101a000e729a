"""Tables as they grow: copy-on-write, lookahead, and the two shortcuts."""

from __future__ import annotations

import pytest
from kv_fakes import block_map

from quire.kv import UNCHANGED, Allocation, KVManager
from quire.kv.table import NEVER


def make(num_blocks: int = 12, **options: bool) -> KVManager:
    return KVManager(num_blocks=num_blocks, block_size=4, watermark=0, **options)


def start(kv: KVManager, seq_id: int, num_tokens: int, lookahead: int = 0) -> list[int]:
    tokens = list(range(num_tokens))
    assert kv.admit(seq_id, tokens, None) is not None
    kv.commit(seq_id, tokens, num_tokens)
    assert kv.grow(seq_id, num_tokens, num_tokens, lookahead) is not None
    return kv.block_ids(seq_id)


def test_room_that_is_there_changes_nothing() -> None:
    kv = make()
    start(kv, 1, 6)
    assert kv.grow(1, 7, 6) is UNCHANGED
    assert kv.grow(1, 8, 7) is UNCHANGED
    assert kv.tables[1].num_tokens == 8


def test_growth_appends_blocks() -> None:
    kv = make()
    table = start(kv, 1, 8)
    change = kv.grow(1, 9, 8)
    assert change == Allocation(appended=[(0, [2])])
    assert kv.block_ids(1) == [*table, 2]
    assert kv.grow(1, 9, 8, lookahead=8) == Allocation(appended=[(0, [3, 4])])
    assert kv.grow(1, 17, 16) is UNCHANGED  # the lookahead's blocks serve
    kv.check()


def test_growth_without_room_changes_nothing() -> None:
    kv = make(num_blocks=3)
    start(kv, 1, 8)
    before = block_map(kv)
    assert kv.grow(1, 13, 8) is None
    assert block_map(kv) == before
    assert kv.stats.num_allocation_failures == 1
    assert kv.grow(1, 12, 8) is not None
    kv.check()


def test_growth_may_use_what_the_watermark_keeps() -> None:
    kv = KVManager(num_blocks=10, block_size=4, watermark=0.5)
    start(kv, 1, 20)
    assert kv.admit(2, [1], None) is None
    assert kv.grow(1, 40, 20) is not None
    assert kv.num_free_blocks == 0


def test_fork_shares_the_partly_filled_block_and_the_first_writer_copies_it() -> None:
    kv = make()
    table = start(kv, 1, 6)
    kv.fork(1, 2)
    kv.fork(1, 3)
    assert kv.block_ids(2) == kv.block_ids(3) == table
    assert [kv.pool.blocks[block_id].ref_count for block_id in table] == [3, 3]
    assert kv.grow(2, 7, 6) == Allocation(remapped=[(0, 1, 2)], copies=[(1, 2)])
    assert kv.grow(1, 7, 6) == Allocation(remapped=[(0, 1, 3)], copies=[(1, 3)])
    assert kv.grow(3, 7, 6) is UNCHANGED  # the last one has it for itself
    assert [kv.block_ids(seq_id) for seq_id in (1, 2, 3)] == [[0, 3], [0, 2], [0, 1]]
    assert kv.grow(2, 8, 7) is UNCHANGED
    assert (kv.stats.num_forks, kv.stats.num_copies) == (2, 2)
    kv.check()


def test_a_fork_at_a_block_border_copies_nothing() -> None:
    kv = make()
    start(kv, 1, 8)
    kv.fork(1, 2)
    assert kv.grow(1, 9, 8) == Allocation(appended=[(0, [2])])
    assert kv.grow(2, 9, 8) == Allocation(appended=[(0, [3])])
    kv.check()


def test_shared_blocks_without_tokens_are_replaced_but_not_copied() -> None:
    kv = make()
    start(kv, 1, 6, lookahead=8)  # 4 blocks; the last two are empty
    kv.fork(1, 2)
    change = kv.grow(2, 7, 6)
    assert change == Allocation(remapped=[(0, 1, 4), (0, 2, 5), (0, 3, 6)], copies=[(1, 4)])
    kv.check()


def test_copy_on_write_and_growth_are_one_allocation() -> None:
    kv = make(num_blocks=3)
    start(kv, 1, 6)
    kv.fork(1, 2)
    assert kv.grow(2, 9, 6) is None  # needs a copy and a new block, one is free
    assert kv.block_ids(2) == [0, 1]
    kv.check()
    assert kv.grow(2, 8, 6) == Allocation(remapped=[(0, 1, 2)], copies=[(1, 2)])
    kv.check()


def test_a_fork_that_lost_its_siblings_writes_in_place() -> None:
    kv = make()
    table = start(kv, 1, 6)
    kv.fork(1, 2)
    kv.free(1)
    assert kv.grow(2, 7, 6) is UNCHANGED
    assert kv.block_ids(2) == table
    assert kv.tables[2].writable_from == 4
    kv.check()


def test_a_forks_commit_serves_both() -> None:
    kv = make()
    tokens = list(range(9))
    assert kv.admit(1, tokens, None) is not None
    table = kv.block_ids(1)
    kv.fork(1, 2)
    kv.commit(2, tokens, 8)
    kv.check()
    kv.commit(1, tokens, 8)
    assert kv.match(tokens).block_ids == table[:2]
    kv.check()


def test_a_cached_block_is_never_overwritten() -> None:
    kv = make()
    tokens = list(range(8))
    table = start(kv, 1, 8)
    change = kv.grow(1, 8, 5)  # tokens 5.. are written again, into a block that is cached
    assert change == Allocation(remapped=[(0, 1, 2)], copies=[(1, 2)])
    assert kv.match([*tokens, 0]).block_ids == table  # what was cached still is
    kv.check()
    other = [*tokens[:5], 50, 60, 70]
    kv.commit(1, other, 8)
    assert kv.match([*other, 0]).block_ids == [0, 2]
    kv.check()


def test_commit_names_full_blocks_only_once_tokens_are_known() -> None:
    kv = make()
    tokens = list(range(6))
    kv.admit(1, tokens, None)
    kv.grow(1, 6, 6, lookahead=4)
    kv.commit(1, tokens, 9)  # three tokens are still on the device
    assert kv.match([*tokens, 0, 0, 0]).num_tokens == 4
    tokens += [6, 7]
    kv.commit(1, tokens, 9)
    assert kv.match([*tokens, 0]).num_tokens == 8
    kv.check()


def test_an_equal_block_stays_unhashed() -> None:
    kv = make()
    tokens = list(range(5))
    first = start(kv, 1, 5)
    second = start(kv, 2, 5)
    assert first != second
    assert kv.match(tokens).block_ids == first[:1]
    assert kv.pool.blocks[second[0]].block_hash is None
    kv.free(1)
    assert kv.match(tokens).block_ids == first[:1]
    kv.check()


def test_without_a_prefix_cache_nothing_is_committed() -> None:
    kv = make(enable_prefix_caching=False)
    start(kv, 1, 8)
    assert kv.tables[1].next_commit == NEVER
    assert kv.tables[1].hashes == []
    kv.free(1)
    assert kv.stats.num_cached == 0
    kv.check()


def test_answers_are_copies() -> None:
    kv = make()
    table = start(kv, 1, 4)
    table.append(99)
    kv.block_ids(1).append(99)
    change = kv.grow(1, 5, 4)
    assert change is not None
    change.appended[0][1].append(99)
    kv.check()
    assert kv.block_ids(1) == [0, 1]


def test_blocks_asked_for_must_exist_to_be_committed_or_moved() -> None:
    kv = make()
    start(kv, 1, 4)
    with pytest.raises(AssertionError, match="no blocks for 8 tokens"):
        kv.commit(1, list(range(8)), 8)
    with pytest.raises(AssertionError, match="no blocks for 8 tokens"):
        kv.swap_out(1, 8, ticket=0)
