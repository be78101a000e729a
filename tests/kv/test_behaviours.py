"""What users of paged engines rely on: the cache's behaviours, end to end through the manager."""

from __future__ import annotations

from kv_fakes import block_map

from quire.kv import KVManager
from quire.request import CacheOutcome

BS = 16


def make(num_blocks: int = 11, **options: float) -> KVManager:
    return KVManager(num_blocks=num_blocks, block_size=BS, **{"watermark": 0, **options})


def run(kv: KVManager, seq_id: int, tokens: list[int], *, salt: str | None = None) -> list[int]:
    assert kv.admit(seq_id, tokens, kv.match(tokens, salt=salt), salt=salt) is not None
    kv.commit(seq_id, tokens, len(tokens))
    return kv.block_ids(seq_id)


def refs(kv: KVManager, block_ids: list[int]) -> list[int]:
    return [kv.pool.blocks[block_id].ref_count for block_id in block_ids]


def queue_of(kv: KVManager) -> list[int]:
    return [block.block_id for block in kv.pool.queue]


COMMON = [token for block in range(3) for token in [block] * BS]


def test_1_full_blocks_are_hashed_and_a_hit_raises_the_reference_count() -> None:
    kv = make()
    first = [*COMMON, *[3] * 7]
    assert kv.match(first).block_ids == []
    table = run(kv, 0, first)
    assert table == [0, 1, 2, 3]
    hashed = [kv.pool.blocks[block_id].block_hash is not None for block_id in table]
    assert hashed == [True, True, True, False]

    second = [*COMMON, *[4] * 5]
    assert kv.match(second).num_tokens == 3 * BS
    assert run(kv, 1, second) == [0, 1, 2, 4]
    assert refs(kv, [0, 1, 2, 3, 4]) == [2, 2, 2, 1, 1]

    kv.free(0)
    kv.free(1)
    # Unhashed blocks first (4 and 3 just left, the others were never used), then the cached ones tail to head.
    assert queue_of(kv) == [4, 3, 5, 6, 7, 8, 9, 10, 2, 1, 0]
    kv.check()


def test_2_eviction_is_least_recently_used_and_touched_blocks_leave_the_queue() -> None:
    kv = make(num_blocks=10)
    first = list(range(5 * BS))
    second = list(range(1000, 1000 + 3 * BS))
    run(kv, 0, first)
    run(kv, 1, second)
    kv.free(0)
    kv.free(1)
    assert queue_of(kv) == [8, 9, 4, 3, 2, 1, 0, 7, 6, 5]
    # A hit on the first two blocks of the older one takes them out of the queue; new blocks come from its front.
    third = [*first[: 2 * BS], *[7] * BS]
    assert run(kv, 2, third) == [0, 1, 8]
    assert queue_of(kv) == [9, 4, 3, 2, 7, 6, 5]
    kv.free(2)
    assert queue_of(kv) == [9, 4, 3, 2, 7, 6, 5, 8, 1, 0]  # and puts them back as the most recent
    kv.check()


def test_3_a_recycled_block_loses_its_hash() -> None:
    kv = make(num_blocks=2)
    first = list(range(BS + 1))
    run(kv, 0, first)
    kv.free(0)
    assert kv.admit(1, list(range(500, 500 + BS + 1)), None) is not None
    table = kv.block_ids(1)
    assert set(table) == {0, 1}
    assert [kv.pool.blocks[block_id].block_hash for block_id in table] == [None, None]
    kv.free(1)
    assert kv.match(first).num_tokens == 0
    assert kv.stats.num_evictions == 1
    kv.check()


def test_4_a_request_never_evicts_what_it_hit_and_the_last_block_is_computed_again() -> None:
    kv = make(num_blocks=4)
    tokens = list(range(2 * BS))
    run(kv, 0, tokens)
    run(kv, 1, list(range(500, 500 + 2 * BS)))
    kv.free(0)
    kv.free(1)
    assert queue_of(kv) == [1, 0, 3, 2]
    # The whole prompt is cached, and the last token must run: only the first block is a hit.
    match = kv.match(tokens)
    assert (match.block_ids, match.outcome) == ([0], CacheOutcome.HIT)
    longer = [*tokens, *range(900, 900 + 2 * BS)]  # needs every block: hits 0 and 1, and evicts the two others
    table = run(kv, 2, longer)
    assert table[:2] == [0, 1]
    assert sorted(table) == [0, 1, 2, 3]
    kv.check()
    kv.free(2)
    assert run(kv, 3, tokens)[0] == 0


def test_5_a_failed_admission_leaves_everything_untouched() -> None:
    kv = make(num_blocks=6)
    run(kv, 0, COMMON)
    run(kv, 1, list(range(500, 500 + BS)))
    kv.free(0)
    tokens = [*COMMON, *range(900, 900 + 3 * BS)]  # hits 3 that are idle, needs 3 more, 2 are free
    match = kv.match(tokens)
    assert match.num_tokens == 3 * BS
    before = kv.stats, block_map(kv)
    assert kv.admit(2, tokens, match) is None
    assert (kv.stats, block_map(kv)) == before
    assert refs(kv, match.block_ids) == [0, 0, 0]
    kv.check()


def test_6_salts_do_not_share() -> None:
    kv = make()
    tokens = [*COMMON, 9]
    run(kv, 0, tokens, salt="alice")
    assert kv.match(tokens, salt="alice").num_tokens == 3 * BS
    for salt in (None, "", "bob"):
        assert kv.match(tokens, salt=salt).num_tokens == 0
    assert kv.match(tokens, salt="alice", adapter="x").num_tokens == 0
    table = run(kv, 1, tokens, salt="bob")
    assert not set(table) & set(kv.block_ids(0))
    kv.check()


def test_7_reset_is_refused_while_blocks_are_in_use() -> None:
    kv = make()
    tokens = [*COMMON, 9]
    run(kv, 0, tokens)
    assert not kv.reset_prefix_cache()
    assert kv.match(tokens).num_tokens == 3 * BS
    kv.free(0)
    assert kv.reset_prefix_cache()
    assert kv.match(tokens).outcome is CacheOutcome.COLD
    assert kv.stats.num_cached == 0
    assert len(queue_of(kv)) == 11
    kv.check()


def test_8_a_request_may_need_every_block_and_not_one_more() -> None:
    kv = make(num_blocks=4, watermark=0.5)
    assert kv.can_ever_fit(4 * BS)
    assert not kv.can_ever_fit(4 * BS + 1)
    assert kv.admit(0, list(range(4 * BS + 1)), None) is None
    assert kv.admit(0, list(range(4 * BS)), None) is not None
    assert kv.num_free_blocks == 0
    assert kv.grow(0, 4 * BS + 1, 4 * BS) is None
    kv.free(0)
    assert kv.num_free_blocks == 4
    kv.check()


def test_14_a_hit_counts_once_and_lookups_after_preemption_count_apart() -> None:
    kv = make(num_blocks=6)
    tokens = [*COMMON, 9]
    run(kv, 0, tokens)
    first = kv.stats.prefix
    assert (first.num_queries, first.num_hits, first.num_hit_tokens) == (1, 0, 0)
    assert kv.admit(1, list(range(700, 700 + 2 * BS)), None) is not None
    for _ in range(5):  # waits, and is looked up each time, without room
        assert kv.admit(2, tokens, kv.match(tokens)) is None
    kv.free(1)
    assert kv.admit(2, tokens, kv.match(tokens)) is not None
    counted = kv.stats.prefix
    assert (counted.num_queries, counted.num_hits) == (2, 1)
    assert (counted.num_query_tokens, counted.num_hit_tokens) == (2 * len(tokens), 3 * BS)
    assert (counted.outcomes[CacheOutcome.COLD], counted.outcomes[CacheOutcome.HIT]) == (1, 1)

    kv.free(2)  # preempted
    assert kv.admit(2, tokens, kv.match(tokens), recompute=True) is not None
    assert kv.stats.prefix == counted
    again = kv.stats.recompute
    assert (again.num_queries, again.num_hits, again.num_hit_tokens) == (1, 1, 3 * BS)
    kv.check()


def test_identical_prompts_in_one_step_share_all_but_the_last_block() -> None:
    """What a plan will compute is committed when planned, so the next sequence of the same plan can hit it."""
    kv = make()
    tokens = [*COMMON, 9]
    first = run(kv, 0, tokens)
    second = run(kv, 1, tokens)
    assert second[:3] == first[:3]
    assert second[3] != first[3]
    assert refs(kv, first) == [2, 2, 2, 1]
    kv.check()


def test_the_next_turn_hits_generated_blocks() -> None:
    kv = make()
    tokens = list(range(BS - 2))
    run(kv, 0, tokens)
    for token in range(100, 100 + BS + 2):  # decodes over a block border
        assert kv.grow(0, len(tokens) + 1, len(tokens)) is not None
        tokens.append(token)
        kv.commit(0, tokens, len(tokens))
    kv.free(0)
    turn = [*tokens, 7, 8, 9]
    assert kv.match(turn).num_tokens == 2 * BS
    kv.check()
