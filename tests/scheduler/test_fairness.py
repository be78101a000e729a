"""Tenants: shares, bounds, and that no flood keeps another waiting."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler.harness import Rig, alone, make_request, spans

from quire.request import FinishReason, Request, Sequence
from quire.scheduler import queue as fairness
from quire.scheduler.queue import FairQueue


def make_queue(max_credit: float = 100.0) -> FairQueue:
    return FairQueue(prompt_token_weight=1.0, output_token_weight=2.0, max_credit=max_credit)


def make_seq(tenant: str, at: float = 0.0, num_tokens: int = 8) -> Sequence:
    seq = Sequence(make_request(num_tokens, tenant=tenant), 0, [])
    seq.order = (at, seq.seq_id)
    return seq


def admit(queue: FairQueue, num_prompt_tokens: int = 0) -> str:
    """The head runs and is charged; whose it was."""
    seq = queue.head
    queue.on_run(seq)
    queue.drop(seq)
    queue.charge(seq, num_prompt_tokens=num_prompt_tokens)
    queue.check()
    return seq.request.tenant


# -- the queue alone


def test_the_lowest_counter_goes_first_and_equals_in_turn() -> None:
    queue = make_queue()
    for name in "aaaabbbbcccc":
        queue.add(make_seq(name))
    assert [admit(queue, 10) for _ in range(6)] == list("abcabc")
    queue.charge(make_seq("a"), num_prompt_tokens=100)
    assert [admit(queue, 10) for _ in range(4)] == list("bcbc")
    assert (len(queue), queue.num_waiting_tokens) == (2, 16)


def test_within_a_tenant_the_policy_decides() -> None:
    queue = make_queue()
    late, early = make_seq("a", at=2.0), make_seq("a", at=1.0)
    queue.add(late)
    queue.add(early)
    assert queue.head is early


def test_output_tokens_weigh_more() -> None:
    queue = make_queue()
    a, b, b2 = make_seq("a"), make_seq("b"), make_seq("b")
    for seq in (a, b, b2):
        queue.add(seq)
        queue.on_run(seq)
        queue.drop(seq)
    queue.charge(a, num_prompt_tokens=100)
    queue.charge_decodes([a, b, b2], [a, b, b2], [])
    assert (queue.counter_of(a), queue.counter_of(b)) == (102.0, 4.0)
    queue.charge_decodes([a, b], [a, b, b2], [b2])
    queue.charge_decodes([b2], [a, b, b2], [b])  # a sits this one out
    queue.charge_decodes([], [a, b, b2], [])
    assert (queue.counter_of(a), queue.counter_of(b)) == (104.0, 8.0)


def test_nobody_saves_up_while_others_wait() -> None:
    queue = make_queue()
    for _ in range(50):
        queue.add(make_seq("busy"))
    for _ in range(20):
        admit(queue, 1_000)
    queue.add(make_seq("new"))
    assert queue.tenants["new"].counter == queue.tenants["busy"].counter == 20_000
    assert [admit(queue, 1_000) for _ in range(2)] == ["busy", "new"]


def test_where_nobody_waits_credit_is_a_steps_worth() -> None:
    queue = make_queue(max_credit=100.0)
    queue.add(busy := make_seq("busy"))
    admit(queue, 50_000)
    queue.add(make_seq("new"))
    assert queue.tenants["new"].counter == 49_900
    queue.add(make_seq("busy"))
    assert queue.counter_of(busy) == 50_000  # its own is never lowered


def test_coming_back_is_no_way_to_lose_a_debt() -> None:
    queue = make_queue(max_credit=10**9)
    queue.add(greedy := make_seq("greedy"))
    queue.add(make_seq("other"))
    admit(queue, 5_000)
    queue.on_leave(greedy)  # it has ended: idle
    assert "greedy" in queue.tenants
    queue.add(make_seq("greedy"))
    assert queue.tenants["greedy"].counter == 5_000
    assert admit(queue) == "other"


def test_an_idle_tenant_that_would_be_lifted_is_forgotten() -> None:
    queue = make_queue()
    queue.add(brief := make_seq("brief"))
    queue.add(make_seq("busy"))
    assert admit(queue, 10) == "brief"
    queue.charge(make_seq("busy"), num_prompt_tokens=5_000)
    queue.on_leave(brief)
    assert queue.tenants.keys() == {"busy"}


def test_thousands_of_idle_tenants_leave_neither_memory_nor_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairness, "_MAX_IDLE_TENANTS", 16)
    queue = make_queue(max_credit=10**9)
    queue._sweep_at = 16
    for i in range(1000):
        queue.add(seq := make_seq(f"once {i}"))
        admit(queue, 100 + i)
        queue.on_leave(seq)
    queue.check()
    assert len(queue.tenants) <= 40
    assert queue.num_active_tenants == 0
    queue.add(make_seq("once 0"))
    assert queue.tenants["once 0"].counter >= 100  # what it had had when it was forgotten


# -- on a scheduler


def flood(rig: Rig, tenant: str, count: int, prompt: int, max_tokens: int, priority: int = 0) -> list[Request]:
    requests = [make_request(prompt, max_tokens=max_tokens, tenant=tenant, priority=priority) for _ in range(count)]
    rig.add(*requests)
    return requests


def steps_to_first_token(rig: Rig, request: Request, limit: int = 500) -> int:
    for step in range(1, limit + 1):
        rig.step()
        if request.sequences[0].first_token_s is not None:
            return step
    raise AssertionError(f"no token after {limit} steps")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("setup", "prompt", "max_tokens"),
    [
        ({}, 8, 150),  # all rows are held by long answers
        ({"num_blocks": 50, "preemption": "recompute"}, 20, 60),  # all blocks are
        ({"num_blocks": 50, "preemption": "swap", "num_host_blocks": 400}, 20, 60),
        # All blocks are held by long prompts, which take none as they go on: nobody would be preempted by growth.
        ({"num_blocks": 97, "max_num_batched_tokens": 8, "long_prefill_token_threshold": 4}, 190, 4),
        ({"max_num_batched_tokens": 16}, 150, 4),  # the budget goes to long prompts
        ({"policy": "priority"}, 8, 150),
    ],
    ids=["rows", "blocks", "swapped blocks", "blocks of prompts", "budget", "priorities"],
)
def test_a_flood_does_not_delay_anothers_first_token(setup: dict, prompt: int, max_tokens: int, depth: int) -> None:
    rig = Rig(**{"num_blocks": 2000, **setup}, depth=depth)
    requests = flood(rig, "flood", 60, prompt, max_tokens, priority=-5)  # which counts only within its own tenant
    for _ in range(12):
        rig.step()
    assert rig.scheduler.num_waiting > 0
    delays = []
    for _ in range(5):
        rig.add(quick := make_request(8, max_tokens=3, tenant="quick", arrival_s=rig.clock()))
        delays.append(steps_to_first_token(rig, quick))
        while not quick.is_finished:
            rig.step()
    assert max(delays) <= 4 + depth, delays
    rig.checking = False
    rig.run()
    rig.check_idle()
    assert rig.outputs(requests[-1]) == alone(requests[-1])


def test_one_tenant_never_makes_way_for_itself() -> None:
    rig = Rig(num_blocks=2000, max_num_seqs=4)
    flood(rig, "only", 20, 8, 50)
    rig.run()
    assert rig.scheduler.stats.num_preemptions == 0


def test_way_is_made_once_and_not_for_more_than_a_share() -> None:
    rig = Rig(num_blocks=2000, max_num_seqs=4)
    flood(rig, "a", 8, 8, 100)
    rig.step()
    rig.add(make_request(8, n=3, max_tokens=5, tenant="many rows"))
    for _ in range(5):
        rig.step()
    assert rig.scheduler.stats.num_yields == 0  # three of four rows are more than half
    rig = Rig(num_blocks=2000, max_num_seqs=4)
    flood(rig, "a", 8, 8, 100)
    rig.step()
    flood(rig, "b", 8, 8, 100)
    for _ in range(30):
        rig.step()
    assert rig.scheduler.stats.num_yields == 1  # b runs one: the next must wait for an end
    loads = rig.scheduler.tenant_loads
    assert [(loads[t].num_running, loads[t].num_waiting) for t in "ab"] == [(3, 5), (1, 7)]


def test_prompts_of_the_tenant_that_has_had_least_go_first() -> None:
    rig = Rig(max_num_batched_tokens=16, num_blocks=200)
    rig.add(long := make_request(100, tenant="long"))
    rig.step()
    rig.add(short := make_request(8, tenant="short"))
    rig.step()
    plan = rig.submit()
    assert plan is not None
    assert short.sequences[0].first_token_s is not None
    assert long.sequences[0].num_computed_tokens < 100
    assert [n for _, n, _ in spans(plan)] == [1, 15]
    rig.collect()


def test_recomputed_tokens_are_not_charged_again() -> None:
    rig = Rig(num_blocks=12, preemption="recompute", enable_prefix_caching=False)
    requests = [make_request(12, max_tokens=14) for _ in range(3)]
    rig.add(*requests)
    rig.run()
    assert rig.scheduler.stats.num_recomputed_tokens > 0
    num_output = sum(len(r.sequences[0].output_token_ids) for r in requests)
    # A token that was sampled before a preemption and not run yet is first run in a chunk.
    most = 36 + 2 * num_output + rig.scheduler.stats.num_preemptions
    assert 36 + 2 * num_output <= rig.scheduler._life.queue.tenants[""].counter <= most


def test_tenants_that_share_get_equal_service() -> None:
    rig = Rig(num_blocks=400, max_num_seqs=8, max_num_batched_tokens=64)
    rig.checking = False
    # One sends many short ones, the other few that are long; a third weighs in late.
    flood(rig, "short", 300, 4, 4)
    flood(rig, "long", 40, 60, 30)
    for _ in range(60):
        rig.step()
    flood(rig, "late", 80, 16, 16)
    before = served(rig)
    for _ in range(250):
        rig.step()
    assert all(load.num_waiting for load in rig.scheduler.tenant_loads.values())
    after = served(rig)
    gained = [after[name] - before.get(name, 0) for name in ("short", "long", "late")]
    assert max(gained) < 1.25 * min(gained), gained


def served(rig: Rig) -> dict[str, int]:
    """Weighted tokens by tenant, counted from outside."""
    total: dict[str, int] = {}
    for seq in rig.updates:
        tokens = seq.num_prompt_tokens + 2 * len(seq.output_token_ids)
        total[seq.request.tenant] = total.get(seq.request.tenant, 0) + tokens
    return total


def bound(rig: Rig) -> float:
    """What a backlogged tenant's counter may lag: everything that another may have running at once, or a prompt."""
    config = rig.config
    weights = config.prompt_token_weight + config.output_token_weight
    return weights * min(config.max_num_seqs * config.max_model_len, rig.kv.num_blocks * rig.kv.block_size)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_tenants=st.integers(2, 6),
    depth=st.integers(1, 2),
    policy=st.sampled_from(["fcfs", "priority"]),
    preemption=st.sampled_from(["recompute", "swap"]),
)
def test_counters_of_backlogged_tenants_stay_together(
    seed: int, num_tenants: int, depth: int, policy: str, preemption: str
) -> None:
    rng = random.Random(seed)
    rig = Rig(
        num_blocks=rng.choice([30, 60, 200]),
        num_host_blocks=60 if preemption == "swap" else 0,
        max_num_seqs=rng.choice([2, 4, 8]),
        max_num_batched_tokens=rng.choice([8, 32, 64]),
        max_model_len=100,
        depth=depth,
        policy=policy,
        preemption=preemption,
    )
    limit = bound(rig)
    shapes = {f"t{i}": (rng.randint(1, 60), rng.randint(1, 30)) for i in range(num_tenants)}
    requests: list[Request] = []
    backlogged_since: dict[str, float] = {}
    for step in range(150):
        for name, (prompt, max_tokens) in shapes.items():
            if rng.random() < 0.3:
                requests.append(
                    make_request(
                        rng.randint(1, prompt),
                        max_tokens=rng.randint(1, max_tokens),
                        n=rng.choice([1, 1, 1, 2]),
                        priority=rng.randint(0, 3),
                        tenant=name,
                        arrival_s=rig.clock(),
                    )
                )
                rig.add(requests[-1])
        if requests and rng.random() < 0.1:
            rig.abort(rng.choice(requests).request_id)
        rig.step()
        loads = {name: load for name, load in rig.scheduler.tenant_loads.items() if load.num_waiting}
        backlogged_since = {name: backlogged_since.get(name, step) for name in loads}
        # Only who both have waited long enough to be compared: a tenant's debt from before is its own.
        old = [load.counter for name, load in loads.items() if backlogged_since[name] < step]
        if len(old) > 1:
            assert max(old) - min(old) <= limit
    rig.checking = False
    rig.run()
    rig.check_idle()
    assert all(request.is_finished for request in requests)


def test_no_priority_starves_within_a_flooding_tenant() -> None:
    """Ageing lets the low one run though its tenant sends better ones all the time, and another floods beside it."""
    rig = Rig(max_num_seqs=2, policy="priority", priority_ageing_s=0.05)
    rig.checking = False
    rig.add(low := make_request(4, max_tokens=2, priority=3, tenant="a"))
    for _ in range(400):
        loads = rig.scheduler.tenant_loads
        for name in "ab":
            if name not in loads or loads[name].num_waiting < 3:
                rig.add(make_request(4, max_tokens=2, tenant=name, arrival_s=rig.clock()))
        rig.step()
        if low.is_finished:
            break
    assert low.sequences[0].finish_reason is FinishReason.LENGTH


def test_every_one_of_many_tenants_is_served() -> None:
    """More tenants than rows, one of them flooding, new ones coming all the time."""
    rig = Rig(max_num_seqs=4, num_blocks=100)
    rig.checking = False
    flood(rig, "flood", 200, 16, 16)
    small = []
    for i in range(60):
        small.append(make_request(8, max_tokens=6, tenant=f"small {i % 20}", arrival_s=rig.clock()))
        rig.add(small[-1])
        rig.step()
    for _ in range(200):
        rig.step()
    assert all(request.is_finished for request in small)
    assert rig.scheduler.num_waiting > 0  # the flood is still there


# -- what the engine reads and sets


def test_waiting_tokens_are_counted() -> None:
    rig = Rig(max_num_seqs=1)
    first, second, third = make_request(10, tenant="a"), make_request(20, tenant="b"), make_request(30, tenant="b")
    rig.add(first, second, third)
    assert rig.scheduler.num_waiting_tokens == 60
    rig.step()
    assert rig.scheduler.num_waiting_tokens == 50
    loads = rig.scheduler.tenant_loads
    assert [(loads[t].num_running, loads[t].num_waiting, loads[t].num_waiting_tokens) for t in "ab"] == [
        (1, 0, 0),
        (0, 2, 50),
    ]
    rig.abort(third.request_id)
    assert rig.scheduler.num_waiting_tokens == 20
    rig.run()
    assert rig.scheduler.num_waiting_tokens == 0
    assert rig.scheduler.tenant_loads == {}


def test_smooth_steps_take_little_of_a_prompt_beside_decodes_and_more_when_more_waits() -> None:
    rig = Rig(num_blocks=1000, max_num_batched_tokens=512, max_model_len=600)
    rig.scheduler.smooth_steps(lambda num_decodes: 33 - num_decodes)
    rig.add(make_request(200, max_tokens=60))
    assert [n for _, n, _ in spans(rig.submit())] == [200]  # nobody reads yet
    rig.collect()
    rig.add(make_request(80))
    chunks = []
    for _ in range(3):
        chunks.append([n for _, n, _ in spans(rig.submit())])
        rig.collect()
    assert chunks == [[1, 32], [1, 32], [1, 16]]
    rig.add(make_request(400), make_request(400))
    assert sum(n for _, n, _ in spans(rig.submit()) if n > 1) == 200  # a quarter of what waits
    rig.collect()
    assert sum(n for _, n, _ in spans(rig.submit()) if n > 1) == 150
    rig.collect()
    rig.run()
    rig.check_idle()


def test_prompts_that_may_not_be_split_are_not_smoothed() -> None:
    rig = Rig(num_blocks=400, max_num_batched_tokens=512, max_model_len=400, enable_chunked_prefill=False)
    rig.scheduler.smooth_steps(lambda num_decodes: 33 - num_decodes)
    rig.add(make_request(20, max_tokens=40))
    rig.submit()
    rig.collect()
    rig.add(make_request(300))
    assert [n for _, n, _ in spans(rig.submit())] == [1, 300]
    rig.collect()
    rig.run()
    rig.check_idle()


def test_a_prefill_limit_holds_in_steps_that_decode_until_it_is_lifted() -> None:
    rig = Rig(num_blocks=400, max_num_batched_tokens=64)
    rig.scheduler.set_prefill_limit(8)
    rig.add(make_request(64, max_tokens=40))
    assert [n for _, n, _ in spans(rig.submit())] == [64]  # nothing decodes
    rig.collect()
    rig.add(make_request(100), make_request(100))
    assert [n for _, n, _ in spans(rig.submit())] == [1, 8]
    rig.collect()
    rig.scheduler.set_prefill_limit(None)
    assert [n for _, n, _ in spans(rig.submit())] == [1, 63]
    rig.collect()
    rig.run()
    rig.check_idle()
