"""Scheduling, step by step: budget, order, overlap, stops, forks, failures."""

from __future__ import annotations

import pytest
from scheduler.harness import Rig, alone, make_request, spans

from quire.errors import BadRequestError
from quire.plan import StepResult, StepTimings
from quire.request import CacheOutcome, FinishReason, SequenceState
from quire.scheduler import WaitReason

# -- budget and order


def test_chunks_share_the_budget_under_the_threshold_then_decodes_join() -> None:
    rig = Rig(
        num_blocks=200, block_size=16, max_num_batched_tokens=1024, max_model_len=1000, long_prefill_token_threshold=400
    )
    rig.add(*(make_request(800) for _ in range(3)))
    assert [n for _, n, _ in spans(rig.submit())] == [400, 400, 224]
    rig.collect()
    assert spans(rig.submit()) == [(0, 400, True), (1, 400, True), (2, 224, False)]
    rig.collect()
    assert spans(rig.submit()) == [(0, 1, True), (1, 1, True), (2, 352, True)]
    rig.collect()
    assert [n for _, n, _ in spans(rig.submit())] == [1, 1, 1]
    rig.collect()
    rig.run()
    rig.check_idle()


def test_decodes_come_first_even_if_they_are_younger() -> None:
    rig = Rig(max_num_batched_tokens=16, max_num_seqs=4, long_prefill_token_threshold=12)
    slow, quick = make_request(60), make_request(3)
    rig.add(slow, quick)
    assert spans(rig.submit()) == [(0, 12, False), (1, 3, True)]
    rig.collect()
    assert spans(rig.submit()) == [(1, 1, True), (0, 12, False)]


def test_nobody_overtakes_when_prompts_are_not_split() -> None:
    rig = Rig(num_blocks=100, max_num_batched_tokens=64, enable_chunked_prefill=False)
    first, big, small = make_request(40), make_request(40), make_request(10)
    rig.add(first, big, small)
    assert [n for _, n, _ in spans(rig.submit())] == [40]
    assert rig.scheduler.waiting_by_reason == {WaitReason.BUDGET: 2}
    rig.collect()
    assert [n for _, n, _ in spans(rig.submit())] == [1, 40, 10]


def test_nobody_overtakes_a_head_that_lacks_blocks() -> None:
    rig = Rig(num_blocks=20)
    rig.add(make_request(40), make_request(60), make_request(4))
    rig.step()
    assert (rig.scheduler.num_running, rig.scheduler.num_waiting) == (1, 2)
    assert rig.scheduler.waiting_by_reason == {WaitReason.BLOCKS: 2}
    rig.run()
    rig.check_idle()


def test_whoever_outgrew_the_budget_comes_back_in_chunks_though_prompts_are_not_split() -> None:
    rig = Rig(
        num_blocks=14,
        max_num_batched_tokens=16,
        enable_chunked_prefill=False,
        preemption="recompute",
        enable_prefix_caching=False,
    )
    requests = [make_request(14, max_tokens=30) for _ in range(2)]
    rig.add(*requests)
    rig.run()
    rig.check_idle()
    assert requests[1].sequences[0].num_preemptions
    assert [rig.outputs(r) for r in requests] == [alone(r) for r in requests]


def test_a_waiting_head_is_admitted_as_soon_as_blocks_it_can_share_are_there() -> None:
    prompt = [5] * 60
    rig = Rig(num_blocks=20, long_prefill_token_threshold=16)
    rig.add(make_request(list(prompt)), make_request(list(prompt)))
    for _ in range(2):
        rig.step()
        assert rig.scheduler.waiting_by_reason == {WaitReason.BLOCKS: 1}
    rig.step()
    assert rig.scheduler.num_running == 2  # 48 of the first's 60 tokens are there: it needs three blocks
    rig.run()
    rig.check_idle()


# -- refusals


@pytest.mark.parametrize(
    ("prompt", "fields", "config", "numbers", "param"),
    [
        (0, {}, {}, ["empty"], "prompt"),
        (50, {}, {"max_model_len": 50}, ["length is 50", "prompt has 50"], "prompt"),
        (8, {"n": 9}, {}, ["9", "max_num_seqs=8"], "n"),
        (65, {}, {"enable_chunked_prefill": False}, ["65", "max_num_batched_tokens=64"], "prompt"),
        (41, {}, {"num_blocks": 10}, ["41", "12 blocks of 4", "has 10"], "prompt"),
        (20, {"max_tokens": 22}, {"num_blocks": 10}, ["20", "max_tokens=22", "11 blocks", "has 10"], "max_tokens"),
    ],
)
def test_what_never_fits_is_refused_with_the_numbers(prompt, fields, config, numbers, param) -> None:
    rig = Rig(**config)
    with pytest.raises(BadRequestError) as error:
        rig.add(make_request(prompt, **fields))
    assert all(number in str(error.value) for number in numbers), str(error.value)
    assert error.value.param == param
    rig.check_idle()


def test_what_just_fits_is_served() -> None:
    rig = Rig(num_blocks=10, max_model_len=41)
    request = make_request(20, max_tokens=21)  # the last token needs no KV: 40 tokens, 10 blocks
    rig.add(request)
    rig.run()
    rig.check_idle()
    assert rig.outputs(request) == alone(request)


def test_a_request_id_is_refused_while_it_is_in_use() -> None:
    rig = Rig()
    rig.add(make_request(request_id="a"))
    with pytest.raises(BadRequestError, match="'a' is in use"):
        rig.add(make_request(request_id="a"))
    rig.run()
    rig.add(make_request(request_id="a"))


def test_a_head_that_pins_keep_out_fails_instead_of_hanging() -> None:
    rig = Rig(num_blocks=10)
    pinned = make_request([1] * 16, max_tokens=1)
    rig.add(pinned)
    rig.run()
    assert rig.kv.pin([1] * 16) == 16
    doomed, fine = make_request(30), make_request(8)
    rig.add(doomed, fine)
    rig.run()
    seq = doomed.sequences[0]
    assert (seq.finish_reason, rig.outputs(fine)) == (FinishReason.ERROR, alone(fine))
    [update] = rig.updates[seq]
    assert "need 8 blocks, but only 6 of 10" in (update.error or "")
    rig.check_idle()


def test_a_failed_head_is_told_even_if_nothing_else_runs() -> None:
    rig = Rig(num_blocks=10)
    rig.add(make_request([1] * 16, max_tokens=1))
    rig.run()
    rig.kv.pin([1] * 16)
    rig.add(make_request(30))
    assert rig.submit() is None
    assert rig.scheduler.has_work
    [update] = rig.step()
    assert update.finished
    rig.check_idle()


# -- overlap


def test_a_second_plan_is_made_while_the_first_runs() -> None:
    rig = Rig(depth=2)
    request = make_request(6, max_tokens=3)
    rig.add(request)
    assert spans(rig.submit()) == [(0, 6, True)]
    assert spans(rig.submit()) == [(0, 1, True)]
    assert rig.submit() is None  # two are in flight
    rig.collect()
    assert spans(rig.submit()) == [(0, 1, True)]
    rig.collect()
    assert rig.submit() is None  # its third and last token is in flight: nothing is run past max_tokens
    rig.collect()
    assert rig.outputs(request) == alone(request)
    rig.check_idle()


def test_a_stop_learnt_late_drops_what_is_in_flight() -> None:
    request = make_request(6, max_tokens=20)
    stop = alone(request)[0][4]
    rig = Rig(depth=3)
    request = make_request(request.prompt_token_ids, max_tokens=20, ends=(stop,))
    rig.add(request)
    rig.run()
    seq = request.sequences[0]
    assert (seq.finish_reason, seq.stop_reason) == (FinishReason.STOP, stop)
    assert rig.outputs(request) == [alone(request)[0][:5]]
    assert sum(len(plan.sampled_rows()) for plan in rig.history) == 7  # two more had been sampled
    rig.check_idle()


def test_a_row_is_released_and_given_out_again_in_one_plan() -> None:
    rig = Rig(max_num_seqs=1, max_num_batched_tokens=64)
    first, second = make_request(4, max_tokens=2), make_request(4, max_tokens=2)
    rig.add(first, second)
    rig.step()
    rig.step()
    assert first.is_finished
    plan = rig.submit()
    assert plan is not None and plan.released == [0]
    assert [a.row for a in plan.admitted] == [0]


def test_results_must_come_in_order() -> None:
    rig = Rig(depth=2)
    rig.add(make_request())
    rig.submit()
    rig.submit()
    with pytest.raises(AssertionError, match="that of 0 is due"):
        rig.scheduler.update(StepResult(step=1, tokens=[[1]]))


# -- stops, for tokens as an executor might bring them


def feed(rig: Rig, *tokens: int, seconds: float = 0.001) -> None:
    """Answer the plan of one running sequence with tokens of our choice."""
    plan = rig.scheduler.schedule()
    assert plan is not None
    result = StepResult(step=plan.step, tokens=[list(tokens)], timings=StepTimings(total_s=seconds))
    rig.note(rig.scheduler.update(result))


@pytest.mark.parametrize(
    ("fields", "tokens", "kept", "reason", "stop_reason"),
    [
        ({"ends": (2,), "eos": (2,)}, [9, 2, 9], [9, 2], FinishReason.STOP, None),
        ({"ends": (2, 5), "eos": (2,)}, [9, 9, 5, 2], [9, 9, 5], FinishReason.STOP, 5),
        ({"max_tokens": 2}, [9, 9, 9], [9, 9], FinishReason.LENGTH, None),
        ({"max_tokens": 2, "ends": (2,), "eos": (2,)}, [9, 2, 9], [9, 2], FinishReason.STOP, None),
        ({"ends": (2,), "eos": (2,), "min_tokens": 2}, [2, 2, 2, 9], [2, 2, 2], FinishReason.STOP, None),
        ({}, [9, 2, 9], [9, 2, 9], None, None),  # ignore_eos: no end tokens
    ],
)
def test_several_tokens_at_once_are_cut_at_the_stop(fields, tokens, kept, reason, stop_reason) -> None:
    rig = Rig()
    request = make_request(4, **fields)
    rig.add(request)
    feed(rig, *tokens)
    seq = request.sequences[0]
    assert (seq.output_token_ids, seq.finish_reason, seq.stop_reason) == (kept, reason, stop_reason)
    assert rig.outputs(request) == [kept]
    if reason:
        rig.check_idle()
    else:
        assert spans(rig.scheduler.schedule()) == [(0, 3, True)]  # the three catch up and sample the next


def test_max_model_len_ends_a_sequence() -> None:
    rig = Rig(max_model_len=10)
    request = make_request(6, max_tokens=100)
    rig.add(request)
    rig.run()
    seq = request.sequences[0]
    assert (len(seq.token_ids), seq.finish_reason) == (10, FinishReason.LENGTH)


def test_the_engine_ends_one_sequence_of_several() -> None:
    rig = Rig(depth=2)
    request = make_request(6, n=2, max_tokens=10)
    rig.add(request)
    rig.step()
    rig.step()
    first, second = request.sequences
    assert rig.scheduler.finish(first, FinishReason.STOP, "\n")
    assert not rig.scheduler.finish(first, FinishReason.ABORT)
    rig.scheduler.check()
    rig.run()
    assert (first.finish_reason, first.stop_reason) == (FinishReason.STOP, "\n")
    assert (second.finish_reason, second.output_token_ids) == (FinishReason.LENGTH, alone(request)[1])
    rig.check_idle()


def test_a_failing_sequence_ends_alone() -> None:
    sick, healthy = make_request([13] * 6), make_request(6)
    rig = Rig(fault=lambda tokens: "not a number" if tokens[0] == 13 and len(tokens) == 8 else None)
    rig.add(sick, healthy)
    rig.run()
    [seq] = sick.sequences
    assert (seq.finish_reason, rig.updates[seq][-1].error) == (FinishReason.ERROR, "not a number")
    assert rig.outputs(healthy) == alone(healthy)
    assert rig.kv.match([*seq.token_ids, 1]).num_tokens == 0  # who knows what is in its blocks
    rig.check_idle()


# -- aborts


@pytest.mark.parametrize("depth", [1, 2])
def test_abort_at_every_moment(depth: int) -> None:
    for moment in range(12):
        rig = Rig(depth=depth, max_num_batched_tokens=8, max_num_seqs=4)
        request, other = make_request(20, n=2, max_tokens=4), make_request(9, max_tokens=4)
        rig.add(request, other)
        for _ in range(moment):
            rig.submit()
            if len(rig.tickets) == depth:
                rig.collect()
        num_open = sum(not seq.finish_reason for seq in request.sequences)
        updates = rig.abort(request.request_id)
        assert [u.seq.finish_reason for u in updates] == [FinishReason.ABORT] * num_open
        rig.scheduler.check()
        rig.kv.check()
        assert rig.abort(request.request_id) == []
        rig.run()
        assert rig.outputs(other) == alone(other)
        rig.check_idle()


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_abort_of_whoever_lost_its_blocks(preemption: str) -> None:
    rig = Rig(num_blocks=10, num_host_blocks=10, preemption=preemption)
    requests = [make_request(14, max_tokens=20) for _ in range(2)]
    rig.add(*requests)
    while not rig.scheduler.stats.num_preemptions:
        rig.step()
    lost = requests[1].sequences[0]
    assert lost.state is (SequenceState.SWAPPED if preemption == "swap" else SequenceState.PREEMPTED)
    assert rig.scheduler.num_swapped == (preemption == "swap")
    rig.abort(requests[1].request_id)
    assert (lost.finish_reason, rig.scheduler.num_swapped) == (FinishReason.ABORT, 0)
    rig.run()
    rig.check_idle()


def test_unknown_ids_are_nobodys() -> None:
    assert Rig().abort("nobody") == []


# -- forks


def test_the_prompt_runs_once_for_all_n() -> None:
    rig = Rig(max_num_batched_tokens=8)
    request = make_request(10, n=3, max_tokens=5)
    rig.add(request)
    rig.step()
    assert (len(request.sequences), rig.scheduler._life.rows.num_free) == (1, 5)  # three rows are reserved
    plan = rig.submit()
    assert spans(plan) == [(0, 2, True)]
    assert plan is not None and [(f.source_row, f.row) for f in plan.forks] == [(0, 1), (0, 2)]
    assert plan.sampled_rows() == [0, 1, 2]
    rig.collect()
    plan = rig.submit()
    assert plan is not None and len(plan.copies) == 2  # the third may keep the block that they shared
    rig.collect()
    rig.run()
    outputs = rig.outputs(request)
    assert outputs == alone(request)
    assert len({tuple(line) for line in outputs}) == 3
    rig.check_idle()


def test_a_prompt_whose_last_token_is_left_over_forks_too() -> None:
    rig = Rig(max_num_batched_tokens=8)
    request = make_request(9, n=2)
    rig.add(request)
    rig.run()
    assert len(request.sequences) == 2
    assert rig.outputs(request) == alone(request)


def test_n_waits_for_n_rows() -> None:
    rig = Rig(max_num_seqs=3)
    rig.add(make_request(4, max_tokens=3), make_request(4, max_tokens=3), make_request(4, n=2), make_request(4))
    rig.step()
    assert (rig.scheduler.num_running, rig.scheduler.waiting_by_reason) == (2, {WaitReason.ROWS: 2})
    rig.run()
    rig.check_idle()


# -- the prefix cache, as requests see it


def test_identical_prompts_of_one_step_share_all_but_the_last_block() -> None:
    rig = Rig()
    prompt = list(range(20))
    requests = [make_request(list(prompt), seed=i) for i in range(3)]
    rig.add(*requests)
    plan = rig.submit()
    assert sorted(n for _, n, _ in spans(plan)) == [4, 4, 20]
    assert [r.sequences[0].num_cached_tokens for r in requests] == [0, 16, 16]
    rig.collect()
    rig.run()
    assert [rig.outputs(r) for r in requests] == [alone(r) for r in requests]


@pytest.mark.parametrize("depth", [1, 2])
def test_the_next_turn_hits_generated_blocks(depth: int) -> None:
    rig = Rig(depth=depth)
    first = make_request(10, max_tokens=11)
    rig.add(first)
    rig.run()
    told = first.prompt_token_ids + rig.outputs(first)[0]
    second = make_request([*told, 1, 2, 3])
    rig.add(second)
    rig.run()
    seq = second.sequences[0]
    assert (seq.num_cached_tokens, seq.cache_outcome) == (20, CacheOutcome.HIT)  # 21 tokens, the last without KV


def test_other_salts_share_nothing() -> None:
    rig = Rig()
    prompt = list(range(20))
    requests = [make_request(list(prompt), salt=salt) for salt in (None, "a", "b", "a")]
    rig.add(*requests)
    rig.run()
    assert [r.sequences[0].num_cached_tokens for r in requests] == [0, 0, 0, 16]


@pytest.mark.parametrize("fields", [{"skip_prefix_cache_read": True}, {"prompt_logprobs": 0}])
def test_some_requests_read_no_cache(fields: dict[str, object]) -> None:
    rig = Rig()
    rig.add(make_request([1] * 20), request := make_request([1] * 20, **fields))
    rig.run()
    seq = request.sequences[0]
    assert (seq.num_cached_tokens, seq.cache_outcome) == (0, CacheOutcome.SKIPPED)


def test_lookups_are_counted_once_and_those_after_a_preemption_apart() -> None:
    rig = Rig(num_blocks=12, preemption="recompute")
    warm = make_request([1] * 16, max_tokens=1)
    rig.add(warm)
    rig.run()
    before = rig.kv.stats.prefix.num_queries
    hog, hit = make_request(24, max_tokens=16), make_request([1] * 12 + [2] * 20, max_tokens=14)
    rig.add(hog, hit)
    rig.step()
    rig.step()
    assert hit.sequences[0].state is SequenceState.WAITING  # rejected at least once with its hit
    rig.run()
    assert rig.kv.stats.prefix.num_queries == before + 2
    late = [make_request(14, max_tokens=20) for _ in range(2)]
    rig.add(*late)
    rig.run()
    assert late[1].sequences[0].num_preemptions
    assert rig.kv.stats.prefix.num_queries == before + 4
    assert rig.kv.stats.recompute.num_queries == rig.scheduler.stats.num_recompute_preemptions
    rig.check_idle()


# -- logprobs and times


def test_logprobs_come_with_their_tokens_and_prompt_logprobs_in_pieces() -> None:
    rig = Rig(max_num_batched_tokens=8)
    request = make_request(20, max_tokens=3, logprobs=2, prompt_logprobs=1)
    rig.add(request)
    rig.run()
    updates = rig.updates[request.sequences[0]]
    assert [len(u.prompt_logprobs or []) for u in updates] == [8, 8, 3, 0, 0]
    pieces = [entry.token_id for u in updates for entry in u.prompt_logprobs or []]
    assert pieces == request.prompt_token_ids[1:]
    told = [[entry.token_id for entry in u.logprobs or []] for u in updates]
    assert told == [[], []] + [u.new_token_ids for u in updates[2:]]


def test_times_of_a_sequence() -> None:
    rig = Rig(max_num_seqs=1)
    first, second = make_request(4, max_tokens=3), make_request(4, max_tokens=3)
    rig.add(first, second)
    rig.run()
    one, two = first.sequences[0], second.sequences[0]
    ends = []
    now = 0.0
    for result in rig.results:
        now += result.timings.total_s
        ends.append(now)
    assert (one.first_scheduled_s, one.first_token_s, one.last_token_s) == pytest.approx((0.0, ends[0], ends[2]))
    assert (one.finished_s, two.first_scheduled_s) == pytest.approx((ends[2], ends[2]))


def test_counters() -> None:
    rig = Rig()
    rig.add(make_request(10, max_tokens=4), make_request(6, max_tokens=4))
    rig.run()
    stats = rig.scheduler.stats
    assert (stats.num_steps, stats.num_prefill_tokens, stats.num_decode_tokens) == (4, 16, 6)
    assert (stats.num_preemptions, stats.num_recomputed_tokens) == (0, 0)
