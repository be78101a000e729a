from __future__ import annotations

import pytest
from kv_fakes import block_map

from quire.errors import ConfigError
from quire.kv import BLOCK_SIZES, KVManager, PrefixMatch
from quire.request import CacheOutcome


def make(num_blocks: int = 10, **options: float) -> KVManager:
    return KVManager(num_blocks=num_blocks, block_size=4, **{"watermark": 0, **options})


def run(kv: KVManager, seq_id: int, tokens: list[int], *, salt: str | None = None) -> list[int]:
    """Admit and compute all of it."""
    assert kv.admit(seq_id, tokens, kv.match(tokens, salt=salt), salt=salt) is not None
    kv.commit(seq_id, tokens, len(tokens))
    return kv.block_ids(seq_id)


@pytest.mark.parametrize("block_size", [0, 1, 2, 3, 5, 12, 24, 256, -16])
def test_other_block_sizes_are_refused(block_size: int) -> None:
    with pytest.raises(ConfigError, match="4, 8, 16, 32, 64, 128"):
        KVManager(num_blocks=10, block_size=block_size)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_blocks": 0}, "num_blocks"),
        ({"num_host_blocks": -1}, "num_host_blocks"),
        ({"watermark": 1.0}, "watermark"),
        ({"watermark": -0.1}, "watermark"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        KVManager(**{"num_blocks": 10, "block_size": 16, **options})


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_every_block_size_works(block_size: int) -> None:
    kv = KVManager(num_blocks=8, block_size=block_size)
    tokens = list(range(2 * block_size + 1))
    table = run(kv, 1, tokens)
    assert len(table) == 3
    assert kv.match(tokens).block_ids == table[:2]
    assert (kv.num_blocks_for(0), kv.num_blocks_for(1), kv.num_blocks_for(block_size + 1)) == (0, 1, 2)
    kv.free(1)
    kv.check()


def test_outcomes() -> None:
    kv = make(num_blocks=4)
    tokens = list(range(9))
    assert kv.match([1, 2, 3, 4]).outcome is CacheOutcome.TOO_SHORT
    assert kv.match(tokens).outcome is CacheOutcome.COLD
    run(kv, 1, tokens)
    assert kv.match(tokens).outcome is CacheOutcome.HIT
    other_tail = [*range(4), 50, 51, 52, 53, 54]
    assert kv.match(other_tail).outcome is CacheOutcome.PARTIAL
    assert kv.match(tokens, salt="s").outcome is CacheOutcome.COLD
    assert kv.match(tokens, adapter="a").outcome is CacheOutcome.COLD
    kv.free(1)
    run(kv, 2, list(range(100, 109)))  # evicts the second of the two cached blocks
    match = kv.match(tokens)
    assert (match.num_tokens, match.outcome) == (4, CacheOutcome.EVICTED)
    off = make(enable_prefix_caching=False)
    assert off.match(tokens) == PrefixMatch([], 0, CacheOutcome.DISABLED)


def test_match_is_pure() -> None:
    kv = make()
    tokens = list(range(9))
    run(kv, 1, tokens)
    kv.free(1)
    before = kv.stats, block_map(kv)
    for _ in range(3):
        kv.match(tokens)
    assert (kv.stats, block_map(kv)) == before


def test_a_previous_match_saves_the_hashing() -> None:
    kv = make()
    tokens = list(range(12))
    early = kv.match(tokens)
    assert (early.num_tokens, len(early.hashes)) == (0, 1)
    run(kv, 1, tokens)
    later = kv.match(tokens, previous=early)
    assert later == kv.match(tokens)
    assert (later.num_tokens, len(early.hashes)) == (8, 1)  # the older one is left alone
    assert kv.match([-1] * 12, previous=later) == later  # shows that the tokens were not looked at again


def test_a_stale_match_is_refused() -> None:
    kv = make(num_blocks=3)
    tokens = list(range(9))
    run(kv, 1, tokens)
    kv.free(1)
    match = kv.match(tokens)
    run(kv, 2, list(range(50, 60)))
    kv.free(2)
    with pytest.raises(AssertionError, match="stale"):
        kv.admit(3, tokens, match)


def test_a_match_of_other_tokens_is_refused() -> None:
    kv = make()
    tokens = list(range(9))
    run(kv, 1, tokens)
    with pytest.raises(AssertionError, match="not of these tokens"):
        kv.admit(2, [1, 2, 3], kv.match(tokens))
    with pytest.raises(AssertionError, match=r"not one of match\(\)'s"):
        kv.admit(2, tokens, PrefixMatch([(0, [0])], 4, CacheOutcome.HIT))


def test_one_table_per_sequence() -> None:
    kv = make(num_host_blocks=4)
    run(kv, 1, [1, 2])
    with pytest.raises(AssertionError, match="here already"):
        kv.admit(1, [1, 2], None)
    kv.swap_out(1, 2, ticket=0)
    with pytest.raises(AssertionError, match="here already"):
        kv.admit(1, [1, 2], None)


def test_layout_of_an_admission() -> None:
    kv = make()
    run(kv, 1, list(range(9)))
    kv.free(1)
    tokens = [*range(8), 50, 51]
    # matched | new
    assert kv.admit(2, tokens, kv.match(tokens)) == [(0, [0, 1, 2])]
    assert kv.block_ids(2) == [0, 1, 2]
    kv.check()


def test_skipped_reads_no_cache_and_is_counted_as_such() -> None:
    kv = make()
    tokens = list(range(9))
    first = run(kv, 1, tokens)
    assert kv.admit(2, tokens, None) is not None
    assert not set(first) & set(kv.block_ids(2))
    stats = kv.stats
    assert stats.prefix.outcomes[CacheOutcome.SKIPPED] == 1
    assert stats.prefix.num_queries == 1


def test_watermark() -> None:
    kv = make(num_blocks=10, watermark=0.25)  # 2 blocks
    assert kv.num_watermark_blocks == 2
    assert kv.admit(1, list(range(36)), None) is not None  # nothing else is in use: waived
    kv.free(1)
    run(kv, 2, [1])
    assert kv.admit(3, list(range(29)), None) is None
    assert kv.admit(3, list(range(28)), None) is not None
    assert kv.num_free_blocks == 2
    kv.check()


def test_matched_idle_blocks_count_against_the_watermark() -> None:
    kv = make(num_blocks=10, watermark=0.2)
    tokens = list(range(25))
    run(kv, 1, tokens)
    kv.free(1)
    run(kv, 2, [100, 101])
    assert kv.num_free_blocks == 9
    long = [*tokens[:24], *range(200, 208)]  # 6 matched blocks that are idle, 2 new ones: one too many
    assert kv.admit(3, long, kv.match(long)) is None
    assert kv.admit(3, long[:28], kv.match(long[:28])) is not None
    kv.check()


def test_pinned_blocks_are_not_evicted() -> None:
    kv = make(num_blocks=6)
    tokens = list(range(9))
    run(kv, 1, tokens)
    assert kv.pin(tokens) == 8
    assert kv.pin(tokens) == 8
    kv.free(1)
    assert (kv.num_pinned_blocks, kv.num_free_blocks) == (2, 4)
    run(kv, 2, list(range(100, 116)))
    assert kv.match(tokens).num_tokens == 8
    assert kv.admit(3, [1], None) is None
    assert kv.admit(4, tokens, kv.match(tokens)) is None  # its last block has no room
    kv.free(2)
    assert kv.admit(4, tokens, kv.match(tokens)) is not None
    kv.check()
    kv.free(4)
    assert kv.unpin(tokens) == 8
    assert kv.unpin(tokens) == 0
    assert kv.num_free_blocks == 6
    kv.check()


def test_unpinning_leaves_what_another_pin_shares() -> None:
    kv = make()
    long, short = list(range(12)), list(range(8))
    run(kv, 1, long)
    assert (kv.pin(long), kv.pin(short)) == (12, 8)
    assert kv.unpin(long) == 12
    assert kv.num_pinned_blocks == 2
    assert kv.unpin(short) == 8
    assert kv.num_pinned_blocks == 0
    kv.check()


def test_a_pin_covers_what_is_cached_and_grows_when_asked_again() -> None:
    kv = make()
    tokens = list(range(12))
    assert kv.pin(tokens) == 0
    assert kv.pin([1, 2]) == 0
    kv.admit(1, tokens, None)
    kv.commit(1, tokens, 4)
    assert kv.pin(tokens) == 4
    kv.commit(1, tokens, 12)
    assert kv.num_pinned_blocks == 1
    assert kv.pin(tokens) == 12
    kv.free(1)
    kv.check()
    assert kv.unpin(tokens) == 12
    assert [block.block_id for block in kv.pool.queue][-3:] == [2, 1, 0]  # tail before head
    kv.check()


def test_pins_belong_to_salt_and_adapter() -> None:
    kv = make()
    tokens = list(range(8))
    run(kv, 1, tokens, salt="s")
    assert kv.pin(tokens) == 0
    assert kv.pin(tokens, salt="s", adapter="a") == 0
    assert kv.pin(tokens, salt="s") == 8
    assert kv.unpin(tokens) == 0
    assert kv.unpin(tokens, salt="s") == 8


def test_nobody_finds_what_a_failed_sequence_left() -> None:
    kv = make()
    tokens = list(range(12))
    run(kv, 1, tokens)
    run(kv, 2, [*tokens[:8], 50, 51, 52, 53])
    kv.free(2, distrust=True)
    assert kv.match([*tokens[:8], 50, 51, 52, 53, 1]).num_tokens == 8  # what the first one uses and computed
    kv.check()
    kv.pin(tokens[:4])
    kv.free(1, distrust=True)
    assert kv.match([*tokens, 1]).num_tokens == 4  # pinned: somebody vouched for it
    assert kv.num_used_blocks == 0
    kv.check()
    run(kv, 3, tokens)
    assert kv.match([*tokens, 1]).num_tokens == 12
    kv.check()


def test_reset_spares_pinned_blocks_unless_forced() -> None:
    kv = make()
    pinned, other = list(range(9)), list(range(100, 109))
    run(kv, 1, pinned)
    run(kv, 2, other)
    kv.pin(pinned)
    kv.free(1)
    kv.free(2)
    assert kv.reset_prefix_cache()
    assert kv.match(pinned).outcome is CacheOutcome.HIT
    assert kv.match(other).outcome is CacheOutcome.COLD
    kv.check()
    assert kv.reset_prefix_cache(force=True)
    assert kv.match(pinned).outcome is CacheOutcome.COLD
    assert (kv.num_pinned_blocks, kv.num_free_blocks) == (0, 10)
    kv.check()


def test_forced_reset_leaves_blocks_in_use() -> None:
    kv = make()
    live, idle = list(range(9)), list(range(100, 109))
    table = run(kv, 1, live)
    kv.pin(live)
    run(kv, 2, idle)
    kv.free(2)
    assert not kv.reset_prefix_cache()
    assert kv.match(idle).num_tokens == 8
    assert kv.reset_prefix_cache(force=True)
    assert kv.match(idle).num_tokens == 0
    assert kv.match(live).block_ids == table[:2]
    assert kv.num_pinned_blocks == 2
    kv.check()


def test_reset_is_refused_while_bytes_move() -> None:
    kv = make(num_host_blocks=4)
    run(kv, 1, list(range(8)))
    kv.swap_out(1, 8, ticket=0)
    assert not kv.reset_prefix_cache()
    kv.moves_done(0)
    assert kv.reset_prefix_cache()
    kv.check()
