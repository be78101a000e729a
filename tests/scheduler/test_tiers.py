"""Levels below the device through the real scheduler and the simulated executor, which checks every read and write."""

from __future__ import annotations

import random

import pytest
from scheduler.harness import Rig, alone, make_request
from sim_memory import SimStore

from quire.kv.tiers import HostLevel
from quire.request import CacheOutcome, FinishReason, SequenceState

VOCAB = 50


def rig_with(*stores: SimStore, **settings: object) -> Rig:
    return Rig(**({"num_blocks": 24, "vocab_size": VOCAB, "stores": stores, "prefill_tokens_per_s": 1e3} | settings))


def serve(rig: Rig, prompt: list[int], **fields: object) -> tuple[list[int], int, CacheOutcome | None]:
    """What it gets, how many of its tokens were found, and how."""
    request = make_request(prompt, max_tokens=4, **fields)
    rig.add(request)
    rig.run()
    [seq] = request.sequences
    return rig.outputs(request)[0], seq.num_cached_tokens, seq.cache_outcome


def fill(rig: Rig, num: int = 3) -> None:
    """Other prompts, until nothing of earlier ones is left on the device."""
    for _ in range(num):
        serve(rig, make_request(60).prompt_token_ids)


PROMPT = list(range(41))


@pytest.mark.parametrize("windows", [(None,), (None, 8), (12,), (None, 8, None)])
@pytest.mark.parametrize("level", ["host", "store"])
def test_an_evicted_prefix_comes_back_from_below(level: str, windows: tuple[int | None, ...]) -> None:
    # Stores finish two steps later, and their blocks cannot be evicted meanwhile.
    settings = {"num_blocks": 80, "windows": windows, "depth": 2, "transfer_steps": 2}
    if level == "host":
        rig = rig_with(num_host_blocks=600, host_block_s=1e-5, **settings)
    else:
        rig = rig_with(SimStore(), **settings)
    expected = alone(make_request(PROMPT, max_tokens=4), VOCAB)
    assert serve(rig, PROMPT)[0] == expected[0]
    fill(rig, 8)
    assert rig.kv.match(PROMPT).num_tokens < 40
    assert serve(rig, PROMPT) == (expected[0], 40, CacheOutcome.HIT)
    assert rig.kv.tiers is not None
    [counters] = rig.kv.tiers.counters.levels.values()
    assert counters.num_loaded > 0 and not counters.num_missing
    rig.kv.check()


def test_a_prefix_stored_by_one_engine_is_loaded_by_the_next() -> None:
    store = SimStore()
    first = serve(rig_with(store), PROMPT)
    again = serve(rig_with(store), PROMPT)
    assert again == (first[0], 40, CacheOutcome.HIT)


def test_salts_and_adapters_have_blocks_of_their_own() -> None:
    store = SimStore()
    serve(rig_with(store), PROMPT, salt="one", adapter="a")
    for fields in ({"salt": "two", "adapter": "a"}, {"salt": "one"}, {}):
        assert serve(rig_with(store), PROMPT, **fields)[1] == 0
    assert serve(rig_with(store), PROMPT, salt="one", adapter="a")[1] == 40


def test_others_run_while_one_loads_and_those_who_want_the_same_load_it_once() -> None:
    store = SimStore()
    expected = serve(rig_with(store), PROMPT)[0]
    rig = rig_with(store, num_blocks=60, transfer_steps=6)
    wanting = [make_request(PROMPT, max_tokens=4) for _ in range(3)]
    other = make_request(8, max_tokens=5)
    rig.add(*wanting, other)
    rig.step()
    assert [r.sequences[0].state for r in wanting] == [SequenceState.LOADING] * 3
    assert other.sequences[0].state is SequenceState.RUNNING
    loads = [move for plan in rig.history for move in plan.keyed_moves if move.is_load]
    assert [len(move.pairs) for move in loads] == [10]
    while not other.is_finished:
        rig.step()
    assert [r.sequences[0].state for r in wanting] == [SequenceState.LOADING] * 3
    rig.run()
    assert all(rig.outputs(request) == [expected] for request in wanting)
    assert sum(move.is_load for plan in rig.history for move in plan.keyed_moves) == 1
    rig.check_idle()


def rig_with_evicted_prefix(*stores: SimStore, **settings: object) -> Rig:
    """PROMPT is below the device, and nothing is under way."""
    settings = {"num_blocks": 80, "num_host_blocks": 600, "host_block_s": 1e-5, "depth": 2} | settings
    rig = rig_with(*stores, **settings)
    serve(rig, PROMPT)
    fill(rig, 8)
    rig.history.clear()
    return rig


def test_a_lone_request_runs_in_the_step_that_loads_its_prefix() -> None:
    expected = alone(make_request(PROMPT, max_tokens=4), VOCAB)[0]
    rig = rig_with_evicted_prefix(transfer_steps=3)
    assert serve(rig, PROMPT) == (expected, 40, CacheOutcome.HIT)
    first = rig.history[0]
    assert first.awaits_loads and first.spans.num_tokens == [1]
    assert not any(plan.awaits_loads for plan in rig.history[1:])
    assert rig.kv.match(PROMPT).num_tokens == 40
    assert rig.kv.tiers is not None and rig.kv.tiers.counters.num_hits == 40
    rig.check_idle()


@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_step_awaits_counts_as_loaded_once_it_is_submitted(depth: int) -> None:
    """By the time that another step is planned, and at the latest when its own result is there."""
    rig = rig_with_evicted_prefix(depth=depth)
    rig.add(make_request(PROMPT, max_tokens=1))
    plan = rig.submit()
    assert plan is not None and plan.awaits_loads
    assert rig.kv.match(PROMPT).num_tokens < 40  # it was planned before it was submitted
    rig.kv.check()
    if depth > 1:
        assert rig.submit() is None
        assert rig.kv.match(PROMPT).num_tokens == 40
        rig.kv.check()
    rig.step()
    assert rig.kv.match(PROMPT).num_tokens == 40
    rig.run()
    rig.check_idle()


def test_an_abort_in_the_step_that_waits_for_its_load_is_clean() -> None:
    rig = rig_with_evicted_prefix()
    request = make_request(PROMPT, max_tokens=4)
    rig.add(request)
    plan = rig.submit()
    assert plan is not None and plan.awaits_loads
    rig.abort(request.request_id)
    rig.kv.check()
    rig.run()
    rig.check_idle()
    assert rig.kv.match(PROMPT).num_tokens == 40  # what came is kept


@pytest.mark.parametrize("why", ["another runs", "another waits", "the load is long", "some of it is in a store"])
def test_nobody_waits_for_the_loads_of_others_nor_for_long(why: str) -> None:
    settings: dict[str, object] = {"host_block_s": 1.0, "prefill_tokens_per_s": 1e-3} if "long" in why else {}
    stores = (SimStore(),) if "store" in why else ()
    rig = rig_with_evicted_prefix(*stores, **settings)
    if stores:
        key = next(iter(stores[0].blocks))
        assert rig.kv.tiers is not None and rig.kv.tiers.host is not None
        rig.kv.tiers.host.forget([key])
    other = make_request(8, max_tokens=9)
    if why == "another runs":
        rig.add(other)
        rig.step()
    wanting = make_request(PROMPT, max_tokens=4)
    rig.add(wanting, *([other] if why == "another waits" else []))
    rig.run()
    loads = [move for plan in rig.history for move in plan.all_moves() if move.is_load]
    assert loads and not any(plan.awaits_loads for plan in rig.history)
    assert rig.outputs(wanting) == alone(make_request(PROMPT, max_tokens=4), VOCAB)
    rig.check_idle()


@pytest.mark.parametrize("leaves", [[0], [1], [0, 1]])
def test_an_abort_while_loading_is_clean_and_what_comes_is_kept(leaves: list[int]) -> None:
    store = SimStore()
    expected = serve(rig_with(store), PROMPT)[0]
    rig = rig_with(store, transfer_steps=4)
    requests = [make_request(PROMPT, max_tokens=4) for _ in range(2)]
    rig.add(*requests)
    rig.step()
    for i in leaves:
        [update] = rig.abort(requests[i].request_id)
        assert update.seq.finish_reason is FinishReason.ABORT
        rig.kv.check()
        rig.scheduler.check()
    rig.run()
    rig.check_idle()
    for i, request in enumerate(requests):
        assert i in leaves or rig.outputs(request) == [expected]
    assert rig.kv.match(PROMPT).num_tokens == 40


@pytest.mark.parametrize("windows", [(None,), (None, 8)])
def test_what_does_not_come_is_computed(windows: tuple[int | None, ...]) -> None:
    store = SimStore()
    expected = serve(rig_with(store, num_blocks=60, windows=windows), PROMPT)[0]
    keys = list(store.blocks)
    store.lost = {keys[5]}
    rig = rig_with(store, num_blocks=60, windows=windows, transfer_steps=2)
    requests = [make_request(PROMPT, max_tokens=4, n=2) for _ in range(2)]
    rig.add(*requests)
    rig.run()
    assert [rig.outputs(request)[0] for request in requests] == [expected] * 2
    assert rig.kv.tiers is not None and rig.kv.tiers.counters.levels["store"].num_missing == 1
    rig.check_idle()
    assert keys[5] in store.blocks  # computed again, and stored again


def test_loading_ends_where_computing_is_cheaper() -> None:
    near, far = SimStore("near", block_s=1e-6), SimStore("far", block_s=1.0)
    serve(rig_with(near), PROMPT)
    for key in list(near.blocks)[6:]:
        far.blocks[key] = near.blocks.pop(key)
    rig = rig_with(near, far)
    assert serve(rig, PROMPT)[1:] == (24, CacheOutcome.PARTIAL)
    slow = SimStore(block_s=1.0)
    slow.blocks = dict(far.blocks)
    assert serve(rig_with(slow), PROMPT)[1:] == (0, CacheOutcome.COLD)


def test_what_a_failed_sequence_computed_is_forgotten_below() -> None:
    store = SimStore()
    prompt = PROMPT[:20]
    rig = rig_with(store, fault=lambda tokens: "not a number" if len(tokens) > 28 else None)
    request = make_request(prompt, max_tokens=40)
    rig.add(request)
    rig.run()
    assert request.sequences[0].finish_reason is FinishReason.ERROR
    assert not store.blocks and rig.kv.match(prompt).num_tokens == 0


def test_swap_takes_host_blocks_from_the_tier() -> None:
    rig = rig_with(num_host_blocks=20, host_block_s=1e-6, preemption="swap", num_blocks=20, max_num_batched_tokens=80)
    fill(rig, 2)
    assert rig.kv.host.num_cached_blocks > 10
    requests = [make_request(20, max_tokens=30) for _ in range(4)]
    rig.add(*requests)
    rig.run()
    assert rig.scheduler.stats.num_swap_preemptions > 0
    rig.check_idle()
    level = rig.kv.tiers.levels[0] if rig.kv.tiers else None
    assert isinstance(level, HostLevel) and not level.moves


SETUPS = {
    "store": {"stores": 1, "num_blocks": 30},
    "host": {"num_host_blocks": 40, "host_block_s": 1e-6, "num_blocks": 24},
    "host and store, swap, depth 2": {
        "stores": 1,
        "num_blocks": 24,
        "num_host_blocks": 25,
        "host_block_s": 1e-6,
        "preemption": "swap",
        "depth": 2,
        "transfer_steps": 2,
    },
    "two stores, windows, depth 3, slow": {"stores": 2, "windows": (None, 8), "depth": 3, "transfer_steps": 5},
    "host and store, window, tenants": {
        "stores": 1,
        "num_host_blocks": 30,
        "host_block_s": 1e-6,
        "windows": (12,),
        "depth": 2,
        "transfer_steps": 1,
        "num_tenants": 3,
    },
}


@pytest.mark.parametrize("setup", SETUPS)
def test_ten_thousand_random_operations(setup: str) -> None:
    """Requests of prompts that share prefixes, aborts, stores that lose blocks, and engines that stop at any moment and
    are followed by another with the same stores. Each gets what it gets alone."""
    settings = dict(SETUPS[setup])
    rng = random.Random(setup)
    stores = [SimStore(f"store {i}", block_s=1e-6 * (i + 1)) for i in range(int(settings.pop("stores", 0)))]
    num_tenants = int(settings.pop("num_tenants", 1))
    heads = [[rng.randrange(VOCAB) for _ in range(length)] for length in (12, 20, 33, 41, 29, 38, 17, 40)]
    known: dict[tuple[int, ...], list[int]] = {}
    num_operations = num_requests = num_loaded = num_missing = num_awaited = 0
    while num_operations < 2000:
        rig = rig_with(*stores, max_num_seqs=6, max_num_batched_tokens=24, **{"num_blocks": 60, **settings})
        rig.checking = False
        waiting: list[object] = []
        for _ in range(rng.randrange(100, 500)):  # then it is gone, whatever was under way
            num_operations += 1
            chance = rng.random()
            if chance < 0.25:
                head = rng.choice(heads)
                prompt = head[: rng.randrange(4, len(head))] + [rng.randrange(VOCAB) for _ in range(rng.randrange(6))]
                request = make_request(
                    prompt, max_tokens=rng.randrange(1, 8), tenant=f"t{rng.randrange(num_tenants)}" * (num_tenants > 1)
                )
                num_requests += 1
                rig.add(request)
                waiting.append(request)
            elif chance < 0.28 and rig.scheduler.requests:
                rig.abort(rng.choice(list(rig.scheduler.requests)))
            elif chance < 0.31 and any(store.blocks for store in stores):
                store = rng.choice([store for store in stores if store.blocks])
                key = rng.choice(list(store.blocks))
                if rng.random() < 0.5:
                    store.lost.add(key)  # corrupt: found out when it is loaded
                else:
                    del store.blocks[key]  # evicted by another engine
            elif chance < 0.34:
                rig.run()  # so that now and then a request comes alone
            else:
                rig.step()
                rig.kv.check()
                rig.scheduler.check()
        if rng.random() < 0.5:
            rig.run()
            rig.check_idle()
        for request in waiting:
            for seq in request.sequences:  # type: ignore[attr-defined]
                line = seq.output_token_ids
                prompt = tuple(request.prompt_token_ids)  # type: ignore[attr-defined]
                if len(line) > len(known.get(prompt, ())):
                    known[prompt] = alone(make_request(list(prompt), max_tokens=8), VOCAB)[0]
                assert line == known.get(prompt, [])[: len(line)]
        assert rig.kv.tiers is not None
        for counters in rig.kv.tiers.counters.levels.values():
            num_loaded += counters.num_loaded
            num_missing += counters.num_missing
        num_awaited += sum(plan.awaits_loads for plan in rig.history)
    assert num_awaited > 0 or int(settings.get("num_host_blocks", 0)) < int(settings.get("num_blocks", 60))
    assert num_requests > 300 and num_loaded > 100 and (num_missing > 0 or not stores)
