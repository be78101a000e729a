from __future__ import annotations

import json
from dataclasses import asdict

from quire.kv import BlockState, KVManager


def test_the_block_map() -> None:
    kv = KVManager(num_blocks=6, block_size=4, num_host_blocks=3, watermark=0)
    tokens = list(range(9))
    kv.admit(1, tokens, kv.match(tokens))
    kv.commit(1, tokens, 9)
    kv.fork(1, 2)
    kv.pin(tokens[:4])
    snapshot = kv.snapshot()
    assert snapshot.states == [BlockState.IN_USE] * 3 + [BlockState.FREE] * 3
    assert snapshot.ref_counts == [2, 2, 2, 0, 0, 0]
    assert snapshot.is_pinned == [True] + [False] * 5
    assert [prefix is not None for prefix in snapshot.hash_prefixes] == [True, True, False, False, False, False]
    assert len({prefix for prefix in snapshot.hash_prefixes if prefix}) == 2
    assert snapshot.seq_ids() == {0: [1, 2], 1: [1, 2], 2: [1, 2]}
    assert snapshot.eviction_order == [3, 4, 5]
    assert snapshot.tables[2].block_ids == [0, 1, 2]
    assert (snapshot.tables[1].num_tokens, snapshot.tables[1].num_committed_blocks) == (9, 2)

    kv.free(1)
    pairs = kv.swap_out(2, 9, ticket=0)
    assert pairs is not None
    snapshot = kv.snapshot()
    assert snapshot.states[:3] == [BlockState.IN_TRANSIT] * 3
    assert snapshot.swapped == {2: [host for _, host in pairs]}
    assert (snapshot.num_host_blocks, snapshot.num_host_free) == (3, 0)
    kv.moves_done(0)
    assert kv.snapshot().states[:3] == [BlockState.CACHED, BlockState.CACHED, BlockState.FREE]


def test_it_is_plain_data() -> None:
    kv = KVManager(num_blocks=4, block_size=4)
    tokens = list(range(9))
    kv.admit(1, tokens, None)
    kv.commit(1, tokens, 9)
    data = json.loads(json.dumps(asdict(kv.snapshot())))
    assert data["states"] == ["in_use", "in_use", "in_use", "free"]
    assert data["tables"]["1"]["block_ids"] == [0, 1, 2]


def test_it_does_not_follow_later_changes() -> None:
    kv = KVManager(num_blocks=4, block_size=4)
    kv.admit(1, [1, 2, 3, 4], None)
    snapshot = kv.snapshot()
    kv.grow(1, 5, 4)
    assert snapshot.tables[1].block_ids == [0]
