"""Who gives way, how, and how it comes back."""

from __future__ import annotations

import pytest
from scheduler.harness import Rig, alone, make_request, spans

from quire.request import FinishReason, Sequence, SequenceState
from quire.scheduler import PreemptionKind, SchedulerConfig, WaitReason
from quire.scheduler.preemption import choose_kind, pick_victim, pick_victim_between_tenants


def until_preempted(rig: Rig) -> None:
    for _ in range(1000):
        if rig.scheduler.stats.num_preemptions:
            return
        rig.step()
    raise AssertionError("nobody was preempted")


def test_the_latest_arrival_gives_way_and_comes_back_before_the_new() -> None:
    rig = Rig(num_blocks=12, preemption="recompute")
    requests = [make_request(12, max_tokens=14) for _ in range(3)]
    rig.add(*requests)
    until_preempted(rig)
    rig.add(newcomer := make_request(4))
    first, second, third = (r.sequences[0] for r in requests)
    assert (first.num_preemptions, second.num_preemptions, third.num_preemptions) == (0, 0, 1)
    assert (third.state, third.num_computed_tokens, third.row) == (SequenceState.PREEMPTED, 0, None)
    assert [seq.seq_id for seq in rig.scheduler._life.queue] == [third.seq_id, newcomer.sequences[0].seq_id]
    rig.run()
    rig.check_idle()
    assert [rig.outputs(r) for r in requests] == [alone(r) for r in requests]
    assert third.num_recomputed_tokens > 0
    num_recomputed = sum(r.sequences[0].num_recomputed_tokens for r in requests)
    assert num_recomputed == rig.scheduler.stats.num_recomputed_tokens


def test_the_lowest_priority_gives_way_though_it_came_first() -> None:
    rig = Rig(num_blocks=12, preemption="recompute", policy="priority")
    requests = [make_request(12, max_tokens=14, priority=p, arrival_s=float(t)) for t, p in enumerate([5, 0, 1])]
    rig.add(*requests)
    until_preempted(rig)
    assert [r.sequences[0].num_preemptions for r in requests] == [1, 0, 0]
    rig.run()
    rig.check_idle()


def test_a_prompt_half_way_gives_way_too() -> None:
    rig = Rig(num_blocks=18, max_num_batched_tokens=8, preemption="recompute")
    old, young = make_request(6, max_tokens=20), make_request(60, max_tokens=1)
    rig.add(old, young)
    until_preempted(rig)
    assert young.sequences[0].state is SequenceState.PREEMPTED
    assert not young.sequences[0].output_token_ids
    rig.run()
    assert [rig.outputs(r) for r in (old, young)] == [alone(r) for r in (old, young)]
    rig.check_idle()


def test_a_request_that_has_not_forked_comes_back_whole() -> None:
    rig = Rig(num_blocks=18, max_num_batched_tokens=8, preemption="recompute")
    old, young = make_request(6, max_tokens=20), make_request(60, n=2, max_tokens=1)
    rig.add(old, young)
    until_preempted(rig)
    assert (len(young.sequences), rig.scheduler._life.rows.num_free) == (1, 7)
    rig.run()
    assert rig.outputs(young) == alone(young)
    rig.check_idle()


def test_a_token_in_flight_survives_preemption() -> None:
    rig = Rig(num_blocks=8, depth=2, preemption="recompute")
    requests = [make_request(14, max_tokens=10) for _ in range(2)]
    rig.add(*requests)
    while not rig.scheduler.stats.num_preemptions:
        if rig.submit() is None:
            rig.collect()
    seq = requests[1].sequences[0]
    num_tokens = len(seq.token_ids)
    assert (seq.state, seq.num_pending_tokens) == (SequenceState.PREEMPTED, 1)
    rig.collect()
    assert (seq.state, seq.num_pending_tokens, len(seq.token_ids)) == (SequenceState.PREEMPTED, 0, num_tokens + 1)
    rig.run()
    assert [rig.outputs(r) for r in requests] == [alone(r) for r in requests]
    rig.check_idle()


def test_a_token_in_flight_may_end_a_preempted_sequence() -> None:
    rig = Rig(num_blocks=8, depth=2, preemption="swap", num_host_blocks=8)
    requests = [make_request(14, max_tokens=10), make_request(14, max_tokens=3)]
    rig.add(*requests)
    while not rig.scheduler.stats.num_preemptions:
        if rig.submit() is None:
            rig.collect()
    seq = requests[1].sequences[0]
    assert (seq.state, seq.num_pending_tokens) == (SequenceState.SWAPPED, 1)
    while not seq.finish_reason:
        rig.collect()
    assert (seq.finish_reason, rig.scheduler.num_swapped) == (FinishReason.LENGTH, 0)
    rig.run()
    rig.check_idle()


def test_swap_brings_the_blocks_back_and_computes_nothing_again() -> None:
    rig = Rig(num_blocks=12, num_host_blocks=12, preemption="swap")
    requests = [make_request(12, max_tokens=14) for _ in range(3)]
    rig.add(*requests)
    until_preempted(rig)
    assert (rig.scheduler.num_swapped, rig.scheduler.num_waiting) == (1, 0)
    rig.run()
    rig.check_idle()
    assert [rig.outputs(r) for r in requests] == [alone(r) for r in requests]
    stats = rig.scheduler.stats
    assert (stats.num_recompute_preemptions, stats.num_recomputed_tokens, stats.num_prefill_tokens) == (0, 0, 36)
    moves = [move for plan in rig.history for move in plan.moves]
    num_loaded = sum(len(move.pairs) for move in moves if move.is_load)
    assert num_loaded == sum(len(move.pairs) for move in moves if not move.is_load) > 0


def test_nobody_waits_for_anothers_blocks_to_come_back() -> None:
    """While a swapped sequence's blocks are on their way, those behind it in the queue are admitted and run."""
    rig = Rig(num_blocks=14, num_host_blocks=14, preemption="swap", transfer_steps=4)
    requests = [make_request(12, max_tokens=20) for _ in range(3)]
    rig.add(*requests)
    until_preempted(rig)
    late = make_request(2, max_tokens=2)
    while not rig.scheduler._life.loading:
        rig.step()
    rig.add(late)
    while not late.is_finished:
        scheduler = rig.scheduler
        assert scheduler.num_running + scheduler.num_waiting + scheduler.num_swapped == len(scheduler.requests)
        rig.step()
        assert rig.scheduler._life.loading or late.is_finished
    rig.run()
    rig.check_idle()
    assert [rig.outputs(r) for r in requests] == [alone(r) for r in requests]


def test_a_request_may_be_given_up_while_its_blocks_come_back() -> None:
    rig = Rig(num_blocks=12, num_host_blocks=12, preemption="swap", transfer_steps=3)
    rig.add(*(make_request(12, max_tokens=14) for _ in range(3)))
    until_preempted(rig)
    while not rig.scheduler._life.loading:
        rig.step()
    seq = rig.scheduler._life.loading[0].seq
    rig.abort(seq.request.request_id)
    rig.kv.check()
    rig.run()
    rig.check_idle()


def test_rows_of_its_forks_are_free_again_when_a_request_is_given_up_while_its_blocks_come_back() -> None:
    """Its prompt was not done when it was preempted, so its forks have only reserved rows."""
    rig = Rig(num_blocks=10, num_host_blocks=12, preemption="swap", transfer_steps=3, long_prefill_token_threshold=1)
    request = make_request(24, max_tokens=2, n=3)
    rig.add(make_request(7, max_tokens=20), request)
    while not rig.scheduler._life.loading:
        rig.step()
    assert rig.scheduler._life.reserved_rows
    rig.abort(request.request_id)
    rig.run()
    rig.check_idle()


def test_swap_falls_back_to_recompute_when_the_host_is_full() -> None:
    rig = Rig(num_blocks=12, num_host_blocks=2, preemption="swap")
    rig.add(*(make_request(12, max_tokens=14) for _ in range(3)))
    until_preempted(rig)
    assert (rig.scheduler.num_swapped, rig.scheduler.stats.num_recompute_preemptions) == (0, 1)
    rig.run()
    rig.check_idle()


def test_who_needs_a_block_on_its_way_to_the_host_sits_out_and_preempts_nobody_else() -> None:
    rig = Rig(num_blocks=12, num_host_blocks=12, preemption="swap", transfer_steps=3)
    requests = [make_request(12, max_tokens=14) for _ in range(3)]
    rig.add(*requests)
    until_preempted(rig)
    assert rig.scheduler.stats.num_swap_preemptions == 1
    plan = rig.submit()
    assert plan is not None and plan.is_empty  # both others wait; an empty step keeps the transfers coming
    rig.collect()
    while rig.scheduler._life.moving:
        rig.step()
    assert rig.scheduler.stats.num_swap_preemptions == 1
    assert len(spans(rig.submit())) == 2
    rig.collect()
    rig.run()
    rig.check_idle()


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    rig = Rig(num_blocks=12, preemption="recompute", policy="priority")
    rig.add(*(make_request(12, max_tokens=14) for _ in range(3)))
    while rig.kv.num_free_blocks:
        rig.step()
    rig.add(make_request(2, priority=-1))  # would fit into what the victim leaves
    while not rig.scheduler.stats.num_preemptions:
        plan = rig.submit()
        assert plan is not None and not plan.admitted
        assert rig.scheduler.waiting_by_reason.keys() == {WaitReason.BLOCKS}
        rig.collect()
    plan = rig.submit()
    assert plan is not None and [len(new.token_ids) for new in plan.admitted] == [2]


def seq_with(num_computed: int, num_cached: int = 0) -> Sequence:
    seq = Sequence(make_request(4), 0, [])
    seq.num_computed_tokens, seq.num_cached_tokens = num_computed, num_cached
    return seq


@pytest.mark.parametrize(
    ("preemption", "num_computed", "num_cached", "kind"),
    [
        # 10 blocks of 1 MB, there and back at 1 GB/s: 20 ms.
        ("auto", 160, 0, PreemptionKind.SWAP),  # 160 tokens at 4,000 a second: 40 ms
        ("auto", 160, 112, PreemptionKind.RECOMPUTE),  # 48 tokens: 12 ms
        ("recompute", 160, 0, PreemptionKind.RECOMPUTE),
        ("swap", 160, 112, PreemptionKind.SWAP),
        ("swap", 0, 0, PreemptionKind.RECOMPUTE),  # nothing to save
    ],
)
def test_the_cheaper_way_is_taken(preemption: str, num_computed: int, num_cached: int, kind: PreemptionKind) -> None:
    config = SchedulerConfig(
        max_num_seqs=1,
        max_num_batched_tokens=16,
        max_model_len=200,
        preemption=preemption,
        kv_bytes_per_block=1_000_000,
        swap_bytes_per_s=1e9,
    )
    assert choose_kind(seq_with(num_computed, num_cached), config, 16, 4_000.0) is kind


def test_the_victim_is_the_last_that_this_step_does_not_run() -> None:
    a, b, c = (seq_with(1) for _ in range(3))
    assert pick_victim([a, b, c], lambda seq: False) is c
    assert pick_victim([a, b, c], lambda seq: seq is c) is b
    assert pick_victim([a], lambda seq: True) is None


def test_between_tenants_the_victim_is_the_last_of_the_one_that_has_had_most() -> None:
    a, b, c, d = (seq_with(1) for _ in range(4))
    had = {a: 5.0, b: 9.0, c: 9.0, d: 5.0}  # two tenants, two sequences each
    running = [a, b, c, d]

    def victim_for(asking: Sequence, *scheduled: Sequence) -> Sequence:
        return pick_victim_between_tenants(running, asking, set(scheduled), had.__getitem__)

    assert victim_for(a) is c
    assert victim_for(a, c) is b
    assert victim_for(c, a, b) is c  # rather its own than of a tenant that has had less
    assert victim_for(d, a, b, c) is d  # nobody before it
    had.update({a: 9.0, d: 9.0})
    assert victim_for(a) is d  # all equal: the last, as with one tenant


def test_blocks_are_taken_from_the_tenant_that_has_had_most() -> None:
    rig = Rig(num_blocks=24, preemption="recompute", max_num_batched_tokens=200)
    old = [make_request(12, max_tokens=40, tenant="greedy", arrival_s=0.0) for _ in range(4)]
    rig.add(*old)
    for _ in range(6):
        rig.step()
    rig.add(late := make_request(8, max_tokens=12, tenant="modest", arrival_s=1.0))
    rig.run()
    assert sum(r.sequences[0].num_preemptions for r in old) > 0
    assert late.sequences[0].num_preemptions == 0  # though it came last
    assert rig.scheduler.stats.num_yields == 0
    assert [rig.outputs(r) for r in [*old, late]] == [alone(r) for r in [*old, late]]
    rig.check_idle()
