"""KV groups: layers with a sliding window have tables of their own, and give blocks back behind the window."""

from __future__ import annotations

import random

import pytest
from scheduler.harness import alone
from scheduler.test_drafts import rig_with_drafts
from scheduler.test_random import SETUPS, VOCAB, make_requests, run_workload

from quire.kv import KVManager
from quire.request import CacheOutcome

FIVE_OF_SIX = (None, 512, 512, 512, 512, 512)


def prefill(kv: KVManager, seq_id: int, tokens: list[int], chunk: int) -> None:
    match = kv.match(tokens)
    assert kv.admit(seq_id, tokens, match) is not None
    for start in range(match.num_tokens, len(tokens), chunk):
        assert kv.grow(seq_id, len(tokens), start) is not None
        kv.commit(seq_id, tokens, min(start + chunk, len(tokens)))
        kv.check()


def test_a_long_sequence_of_mostly_windowed_layers_holds_a_fifth_of_the_blocks() -> None:
    tokens = list(range(32_768))
    whole = KVManager(num_blocks=13_000, block_size=16, windows=(None,) * 6, max_span_tokens=2048)
    assert whole.admit(1, tokens, None) is not None
    grouped = KVManager(num_blocks=13_000, block_size=16, windows=FIVE_OF_SIX, max_span_tokens=2048)
    prefill(grouped, 1, tokens, 2048)
    for position in range(len(tokens), len(tokens) + 64):
        assert grouped.grow(1, position + 1, position) is not None
    grouped.check()
    assert whole.num_used_blocks == 12_288
    assert grouped.num_used_blocks < whole.num_used_blocks / 4
    assert grouped.num_used_blocks <= (32_768 + 64) // 16 + 5 * (512 // 16 + 2)


def test_a_prompt_is_admitted_with_the_blocks_of_a_window_and_a_step() -> None:
    kv = KVManager(num_blocks=2500, block_size=16, windows=FIVE_OF_SIX, max_span_tokens=512)
    assert kv.can_ever_fit(32_768)
    prefill(kv, 1, list(range(32_768)), 512)
    kv.free(1)
    kv.check()
    assert kv.num_free_blocks == 2500


def test_a_prefix_is_found_if_the_window_before_its_end_is_cached() -> None:
    kv = KVManager(num_blocks=60, block_size=4, windows=(None, 8), max_span_tokens=8)
    tokens = list(range(40))
    prefill(kv, 1, tokens, 8)
    kv.free(1)
    assert kv.match([*tokens, 99]).num_tokens == 40
    slices = kv.match([*tokens, 99]).slices
    assert [(first, len(blocks)) for first, blocks in slices] == [(0, 10), (8, 2)]
    # A shorter prefix whose window's blocks were evicted is not, though the other group has all of its blocks.
    evict = [block for block in kv.cache.blocks() if block.chain_index == 4 and len(block.block_hash or b"") > 16]
    for block in evict:
        kv.cache.forget(block)
        kv.pool.num_cached_blocks -= 1
        kv.pool.queue.remove(block)
        kv.pool.queue.push_front(block)
    kv.check()
    match = kv.match([*tokens[:24], 99])
    assert (match.num_tokens, match.outcome) == (16, CacheOutcome.EVICTED)


def test_all_layers_windowed() -> None:
    kv = KVManager(num_blocks=20, block_size=4, windows=(8,), max_span_tokens=8)
    tokens = list(range(200))
    prefill(kv, 1, tokens, 8)
    assert kv.num_used_blocks <= 5
    kv.free(1)
    match = kv.match([*tokens, 1])
    assert match.num_tokens == 200 and len(match.block_ids) == 2


def test_what_a_failed_sequence_left_behind_its_window_is_found_by_nobody() -> None:
    kv = KVManager(num_blocks=40, block_size=4, windows=(8,), max_span_tokens=8)
    tokens = list(range(60))
    prefill(kv, 1, tokens, 8)
    assert kv.match(tokens[:30]).num_tokens == 28
    kv.free(1, distrust=True)
    kv.check()
    assert kv.match(tokens[:30]).num_tokens == kv.match(tokens).num_tokens == 0


def test_swapped_windows_come_back() -> None:
    kv = KVManager(num_blocks=40, block_size=4, windows=(None, 8), max_span_tokens=8, num_host_blocks=20)
    tokens = list(range(30))
    prefill(kv, 1, tokens, 8)
    pairs = kv.swap_out(1, 30, ticket=1)
    assert pairs is not None and len(pairs) == 8 + 3  # the window's two blocks, and the one it stands in
    kv.check()
    kv.moves_done(1)
    swapped = kv.swap_in(1, tokens, ticket=2)
    assert swapped is not None and [first for first, _ in swapped[1]] == [0, 5]
    kv.check()
    kv.moves_done(2)
    kv.free(1)
    kv.check()


@pytest.fixture(scope="module")
def expected() -> list[list[list[int]]]:
    return [alone(request, VOCAB) for request in make_requests(300)]


@pytest.mark.parametrize(("windows", "num_blocks"), [((None, 8), 70), ((5,), 16), ((None, 16, 3), 90)], ids=str)
@pytest.mark.parametrize("name", ["recompute, depth 2", "swap, depth 2, slow transfers"])
def test_random_work_reads_only_what_is_its_own(
    windows: tuple[int | None, ...], num_blocks: int, name: str, expected: list[list[list[int]]]
) -> None:
    setup = {**SETUPS[name], "max_num_batched_tokens": 24, "num_blocks": num_blocks, "windows": windows}
    rig = rig_with_drafts(1, 0.5, **setup)
    requests = make_requests(300)
    aborted = run_workload(rig, requests)
    rig.check_idle()
    assert rig.scheduler.stats.num_preemptions > 0
    for request, lines in zip(requests, expected, strict=True):
        if request.request_id not in aborted:
            assert rig.outputs(request) == lines


def test_random_operations_against_the_invariants() -> None:
    rng = random.Random(4)
    kv = KVManager(num_blocks=90, block_size=4, windows=(None, 8, 13), max_span_tokens=16, num_host_blocks=60)
    lines: dict[int, tuple[list[int], int]] = {}  # tokens, and how many are computed
    swapped: dict[int, tuple[list[int], int]] = {}
    for step in range(4000):
        action = rng.random()
        if action < 0.25 and len(lines) < 6:
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 60))]
            match = kv.match(tokens)
            if kv.admit(step, tokens, match) is not None:
                lines[step] = (tokens, match.num_tokens)
        elif action < 0.7 and lines:
            seq_id = rng.choice(list(lines))
            tokens, computed = lines[seq_id]
            if computed == len(tokens):
                tokens = [*tokens, rng.randrange(2)]
            size = min(len(tokens) - computed, rng.randint(1, 16))
            if kv.grow(seq_id, len(tokens), computed, rng.choice([0, 0, 5])) is not None:
                kv.commit(seq_id, tokens, computed + size)
                lines[seq_id] = (tokens, computed + size)
        elif action < 0.75 and lines:
            seq_id = rng.choice(list(lines))
            tokens, computed = lines[seq_id]
            if computed == len(tokens):
                kv.trim(seq_id, computed + 1)
        elif action < 0.8 and lines:
            seq_id = rng.choice(list(lines))
            kv.fork(seq_id, step)
            lines[step] = lines[seq_id]
        elif action < 0.86 and lines:
            seq_id = rng.choice(list(lines))
            if lines[seq_id][1] and kv.swap_out(seq_id, lines[seq_id][1], step) is not None:
                swapped[seq_id] = lines.pop(seq_id)
                kv.moves_done(step)
        elif action < 0.92 and swapped:
            seq_id = rng.choice(list(swapped))
            if kv.swap_in(seq_id, swapped[seq_id][0], step) is not None:
                lines[seq_id] = swapped.pop(seq_id)
                kv.moves_done(step)
        elif lines:
            seq_id = rng.choice(list(lines))
            del lines[seq_id]
            kv.free(seq_id)
        kv.check()
