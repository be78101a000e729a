from __future__ import annotations

import pytest
from kv_fakes import block_map

from quire.kv import KVManager
from quire.kv.host_pool import HostPool
from quire.request import CacheOutcome


def make(num_blocks: int = 8, num_host_blocks: int = 4, **options: float) -> KVManager:
    return KVManager(num_blocks=num_blocks, block_size=4, num_host_blocks=num_host_blocks, watermark=0, **options)


def start(kv: KVManager, seq_id: int, tokens: list[int]) -> list[int]:
    assert kv.admit(seq_id, tokens, kv.match(tokens)) is not None
    kv.commit(seq_id, tokens, len(tokens))
    return kv.block_ids(seq_id)


def test_host_blocks_are_free_held_or_in_transit() -> None:
    host = HostPool(3)
    first, second = host.allocate(2)
    assert host.num_free_blocks == 1
    host.transfer_started(first)
    host.release(first)
    host.release(second)
    assert host.num_free_blocks == 2
    host.check([], [first])
    host.transfer_finished(first)
    assert host.num_free_blocks == 3
    host.check([], [])
    with pytest.raises(AssertionError, match="4 host blocks asked"):
        host.allocate(4)
    with pytest.raises(AssertionError, match="held by nobody"):
        host.release(first)


def test_own_blocks_are_in_transit_until_the_step_is_done() -> None:
    kv = make()
    tokens = list(range(10))
    table = start(kv, 1, tokens)
    pairs = kv.swap_out(1, 9, ticket=5)
    assert pairs is not None
    assert [device for device, _ in pairs] == table
    assert len({host for _, host in pairs}) == 3
    assert (kv.stats.num_in_transit, kv.num_free_blocks, kv.host.num_free_blocks) == (3, 5, 1)
    kv.check()
    kv.moves_done(4)
    assert kv.stats.num_in_transit == 3
    kv.moves_done(5)
    # Two were full and cached, and can be hit again; the third was not.
    assert (kv.stats.num_in_transit, kv.num_free_blocks, kv.stats.num_cached) == (0, 8, 2)
    assert kv.match(tokens).block_ids == table[:2]
    kv.check()


def test_only_blocks_with_computed_tokens_are_moved() -> None:
    kv = make()
    assert kv.admit(1, list(range(14)), None) is not None
    table = kv.block_ids(1)
    pairs = kv.swap_out(1, 5, ticket=0)
    assert pairs is not None and [device for device, _ in pairs] == table[:2]
    assert kv.num_free_blocks == 6  # the others are free at once
    answer = kv.swap_in(1, list(range(14)), ticket=1)
    assert answer is not None
    assert (len(answer[0]), len(kv.block_ids(1))) == (2, 4)
    kv.check()


def test_a_sequence_without_computed_tokens_moves_nothing() -> None:
    kv = make()
    kv.admit(1, [1, 2, 3], None)
    assert kv.swap_out(1, 0, ticket=0) == []
    assert kv.num_free_blocks == 8
    answer = kv.swap_in(1, [1, 2, 3], ticket=1)
    assert answer is not None and answer[0] == []
    kv.check()


def test_a_host_pool_too_small_changes_nothing() -> None:
    kv = make(num_host_blocks=2)
    start(kv, 1, list(range(10)))
    before = kv.stats, block_map(kv)
    assert kv.swap_out(1, 10, ticket=0) is None
    assert (kv.stats, block_map(kv)) == before
    assert kv.swap_out(1, 8, ticket=0) is not None


def test_shared_blocks_are_dereferenced_but_copied_and_kept_until_done() -> None:
    kv = make()
    tokens = list(range(6))
    table = start(kv, 1, tokens)
    kv.fork(1, 2)
    pairs = kv.swap_out(1, 6, ticket=0)
    assert pairs is not None and [device for device, _ in pairs] == table
    assert kv.stats.num_in_transit == 0
    assert [kv.pool.blocks[block_id].ref_count for block_id in table] == [1, 1]
    kv.free(2)  # the last user leaves while the bytes are still read
    assert (kv.stats.num_in_transit, kv.num_free_blocks) == (2, 6)
    kv.check()
    kv.moves_done(0)
    assert kv.num_free_blocks == 8
    kv.check()


def test_blocks_on_their_way_out_are_shared_all_the_same() -> None:
    kv = make()
    tokens = list(range(9))
    start(kv, 1, tokens)
    kv.swap_out(1, 9, ticket=0)
    match = kv.match(tokens)
    assert (match.num_tokens, match.outcome) == (8, CacheOutcome.HIT)
    assert kv.admit(2, tokens, match) is not None
    kv.check()
    kv.moves_done(0)
    kv.check()
    kv.free(2)
    kv.check()


def test_swap_in_brings_hashes_back() -> None:
    kv = make(num_blocks=4)
    tokens = list(range(9))
    start(kv, 1, tokens)
    out = kv.swap_out(1, 9, ticket=0)
    kv.moves_done(0)
    assert kv.admit(2, list(range(100, 116)), None) is not None  # takes every block
    assert kv.match(tokens).outcome is CacheOutcome.EVICTED
    assert kv.swap_in(1, tokens, ticket=1) is None
    kv.check()
    kv.free(2)
    answer = kv.swap_in(1, tokens, ticket=2)
    assert answer is not None and out is not None
    pairs, [(_, table)] = answer
    assert pairs == [(device, host) for (_, host), device in zip(out, table, strict=True)]
    assert kv.match(tokens).block_ids == []  # nobody may read them yet
    assert kv.host.num_free_blocks == 1
    kv.check()
    kv.moves_done(2)
    assert kv.match(tokens).block_ids == table[:2]
    assert kv.host.num_free_blocks == 4
    assert (kv.stats.num_swapped_out_blocks, kv.stats.num_swapped_in_blocks) == (3, 3)
    kv.check()


def test_swap_in_hashes_blocks_that_were_computed_but_not_committed() -> None:
    kv = make()
    tokens = list(range(9))
    kv.admit(1, tokens, None)
    kv.swap_out(1, 8, ticket=0)
    kv.moves_done(0)
    assert kv.match(tokens).num_tokens == 0
    kv.swap_in(1, tokens, ticket=1)
    assert kv.match(tokens).num_tokens == 0
    kv.moves_done(1)
    assert kv.match(tokens).num_tokens == 8
    kv.check()


def test_a_sequence_freed_while_its_bytes_arrive_leaves_blocks_in_transit() -> None:
    kv = make()
    start(kv, 1, list(range(5)))
    kv.swap_out(1, 5, ticket=0)
    kv.moves_done(0)
    kv.swap_in(1, list(range(5)), ticket=1)
    kv.free(1)
    assert kv.stats.num_in_transit == 2
    kv.check()
    kv.moves_done(1)
    assert kv.num_free_blocks == 8


def test_dropped_host_blocks_wait_for_their_bytes() -> None:
    kv = make()
    start(kv, 1, list(range(5)))
    kv.swap_out(1, 5, ticket=0)
    kv.drop_swapped(1)
    assert kv.host.num_free_blocks == 2
    kv.check()
    kv.moves_done(0)
    assert kv.host.num_free_blocks == 4
    kv.check()


def test_out_and_in_again_before_anything_is_done() -> None:
    kv = make()
    start(kv, 1, list(range(5)))
    kv.swap_out(1, 5, ticket=0)
    kv.swap_in(1, list(range(5)), ticket=1)
    kv.check()
    kv.moves_done(0)
    assert kv.host.num_free_blocks == 2  # still read by step 1
    kv.moves_done(1)
    assert (kv.host.num_free_blocks, kv.num_free_blocks) == (4, 6)
    kv.check()


def test_swap_in_respects_the_watermark() -> None:
    kv = KVManager(num_blocks=10, block_size=4, num_host_blocks=8, watermark=0.2)
    start(kv, 1, list(range(16)))
    kv.swap_out(1, 16, ticket=0)
    kv.moves_done(0)
    kv.admit(2, list(range(50, 70)), None)
    assert kv.num_free_blocks == 5
    assert kv.swap_in(1, list(range(16)), ticket=1) is None
    kv.free(2)
    assert kv.swap_in(1, list(range(16)), ticket=1) is not None
