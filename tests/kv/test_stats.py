from __future__ import annotations

import pytest

from quire.kv import KVManager
from quire.kv.stats import PrefixCounters, RateMeter
from quire.request import CacheOutcome


def test_rates_are_over_the_window() -> None:
    meter = RateMeter(100.0, num_totals=2, window_s=10.0)
    assert meter.read(100.0, (0, 0)) == (0.0, 0.0)
    assert meter.read(102.0, (20, 10)) == (10.0, 5.0)
    assert meter.read(110.0, (20, 10)) == (2.0, 1.0)  # since the start: ten seconds
    assert meter.read(112.0, (40, 10)) == (2.0, 0.0)  # since 102
    assert meter.read(121.9, (40, 10)) == pytest.approx((20 / 11.9, 0.0))  # since 110
    assert meter.read(122.0, (40, 10)) == (0.0, 0.0)  # since 112


def test_frequent_reading_keeps_few_samples() -> None:
    meter = RateMeter(0.0, num_totals=1, window_s=10.0)
    for i in range(100_000):
        meter.read(i / 1000, (i,))
    assert meter.read(100.0, (100_000,)) == pytest.approx((1000.0,))
    assert len(meter._samples) <= 12


def test_rare_reading_gives_the_rate_since_the_last() -> None:
    meter = RateMeter(0.0, num_totals=1, window_s=10.0)
    meter.read(60.0, (60,))
    assert meter.read(120.0, (180,)) == (2.0,)


def test_blocks_per_second_of_a_manager() -> None:
    now_s = 0.0
    kv = KVManager(num_blocks=10, block_size=4, clock=lambda: now_s)
    kv.admit(1, list(range(20)), None)
    kv.free(1)
    kv.admit(2, list(range(4)), None)
    now_s = 2.0
    stats = kv.stats
    assert (stats.num_allocated, stats.num_freed) == (6, 5)
    assert (stats.allocated_per_s, stats.freed_per_s) == (3.0, 2.5)


def test_counters_leave_out_what_did_not_ask() -> None:
    counters = PrefixCounters()
    counters.count(CacheOutcome.SKIPPED, 100, 0)
    counters.count(CacheOutcome.DISABLED, 100, 0)
    assert (counters.num_queries, counters.num_query_tokens, counters.hit_rate) == (0, 0, 0.0)
    counters.count(CacheOutcome.PARTIAL, 100, 32)
    counters.count(CacheOutcome.COLD, 28, 0)
    assert (counters.num_queries, counters.num_hits, counters.hit_rate) == (2, 1, 0.25)
    assert {outcome: n for outcome, n in counters.outcomes.items() if n} == {
        CacheOutcome.SKIPPED: 1,
        CacheOutcome.DISABLED: 1,
        CacheOutcome.PARTIAL: 1,
        CacheOutcome.COLD: 1,
    }


def test_a_reading_does_not_change_later() -> None:
    kv = KVManager(num_blocks=10, block_size=4)
    before = kv.stats
    kv.admit(1, list(range(20)), None)
    assert before.num_used == 0
    assert before.prefix.outcomes[CacheOutcome.SKIPPED] == 0
    assert kv.stats.prefix.outcomes[CacheOutcome.SKIPPED] == 1


def test_internal_waste() -> None:
    kv = KVManager(num_blocks=10, block_size=4, watermark=0)
    assert (kv.stats.internal_waste_tokens, kv.stats.waste_percent, kv.stats.occupancy) == (0, 0.0, 0.0)
    kv.admit(1, list(range(9)), None)  # 3 blocks: 3 slots empty
    stats = kv.stats
    assert (stats.num_tokens, stats.internal_waste_tokens, stats.waste_percent) == (9, 3, 25.0)
    assert stats.occupancy == 0.3
    kv.admit(2, list(range(4)), None)
    kv.grow(2, 4, 4, lookahead=5)  # 3 blocks: 8 slots empty
    assert (kv.stats.num_tokens, kv.stats.internal_waste_tokens) == (13, 11)
    kv.fork(1, 3)  # shared slots count once
    assert (kv.stats.num_tokens, kv.stats.internal_waste_tokens) == (13, 11)
    assert kv.grow(3, 10, 9) is not None  # its own last block now, with two tokens
    assert (kv.stats.num_tokens, kv.stats.internal_waste_tokens) == (15, 13)


def test_states_add_up() -> None:
    kv = KVManager(num_blocks=10, block_size=4, num_host_blocks=4, watermark=0)
    for seq_id, first in ((1, 0), (2, 100), (3, 200)):
        tokens = list(range(first, first + 8))
        kv.admit(seq_id, tokens, kv.match(tokens))
        kv.commit(seq_id, tokens, 8)
    kv.pin(list(range(8)))
    kv.free(1)
    kv.swap_out(2, 8, ticket=0)
    stats = kv.stats
    assert (stats.num_free, stats.num_cached, stats.num_used, stats.num_in_transit) == (4, 2, 2, 2)
    assert (stats.num_pinned, stats.num_available, stats.min_available) == (2, 4, 4)
    assert (stats.num_sequences, stats.num_swapped_sequences, stats.num_host_free) == (1, 1, 2)
    assert stats.occupancy == 0.4
