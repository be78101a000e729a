"""The log of the prefix cache: whoever follows it knows what is cached, whenever it begins and whatever it misses."""

from __future__ import annotations

import random

import pytest

from quire.kv import KVManager


def cached(kv: KVManager) -> set[bytes]:
    return {block.block_hash for block in kv.cache.blocks() if block.block_hash is not None}


@pytest.mark.parametrize("max_changes", [8, 1 << 16])
def test_a_reader_that_looks_now_and_then_knows_every_block(max_changes: int) -> None:
    from quire.kv.cache_log import CacheLog

    rng = random.Random(max_changes)
    kv = KVManager(num_blocks=24, block_size=4)
    log = CacheLog(kv.cache, max_changes=max_changes)
    known: set[bytes] = set()
    at: int | None = None
    num_snapshots = 0
    for seq_id in range(1, 200):
        tokens = [rng.randrange(3)] * 4 * rng.randrange(1, 4) + [rng.randrange(50) for _ in range(rng.randrange(1, 20))]
        match = kv.match(tokens)
        if kv.admit(seq_id, tokens, match) is not None:
            kv.commit(seq_id, tokens, len(tokens))
            kv.free(seq_id)
        if rng.random() < 0.4:
            change = log.read(at)
            known = set(change.filled) if change.is_snapshot else (known - set(change.evicted)) | set(change.filled)
            at, num_snapshots = change.at, num_snapshots + change.is_snapshot
            assert known == cached(kv)
    assert kv.cache.num_evictions > 0
    assert (num_snapshots > 1) == (max_changes == 8)  # the first look is one
    assert log.read(log.at).is_snapshot is False and log.read(10_000).is_snapshot


def test_a_manager_has_one_log() -> None:
    kv = KVManager(num_blocks=8, block_size=4)
    assert kv.log_cache() is kv.log_cache()
