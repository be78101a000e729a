"""Drafts out of what was there before: which tokens, for whom, and that nothing of them stays."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import fakes
import pytest
from scheduler.harness import Rig, alone, make_request

from quire.drafting import LookupDrafter, acceptance, lookup
from quire.drafting.native import is_built
from quire.request import FinishReason, Request, Sequence, SequenceState
from quire.speculation import SpeculativeConfig
from quire.step_costs import StepCosts, StepKind

VOCAB = 4  # so few that everything has stood before


@pytest.fixture(autouse=True, params=["native", "python"])
def _lines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the native lines, and with those that run where these are not built."""
    if request.param == "python":
        monkeypatch.setattr(lookup, "is_built", lambda: False)
    elif not is_built():
        pytest.skip("the native library is not built")


def drafter_of(
    costs: StepCosts | None = None, clock: Callable[[], float] = lambda: 0.0, **fields: Any
) -> LookupDrafter:
    return LookupDrafter(SpeculativeConfig.read(fields), costs or free_drafts(), clock=clock)


def free_drafts() -> StepCosts:
    """Steps that cost the same however many drafts they verify."""
    costs = StepCosts(prefill_tokens_per_s=1e9)
    for rows in range(1, 40):
        costs.observe_step(StepKind(rows, 0), device_s=1e-2, total_s=1e-2)
    return costs


def decoding(prompt: list[int], *answer: int, **fields: Any) -> Sequence:
    request = make_request(prompt, max_tokens=1000, **fields)
    seq = Sequence(request, 0, [*prompt, *answer], state=SequenceState.RUNNING)
    seq.num_computed_tokens = len(seq.token_ids) - 1
    return seq


def step(drafter: LookupDrafter, *seqs: Sequence, most: int = 100) -> list[list[int]]:
    drafts = drafter.draft([*seqs], most)
    return [drafts.get(seq.seq_id, []) for seq in seqs]


def come(seq: Sequence, *tokens: int) -> None:
    seq.token_ids.extend(tokens)
    seq.num_computed_tokens += len(tokens)


def test_ngram_proposes_what_followed_the_longest_match(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "_FIRST_TRUST", 1.0)  # what is guessed, and not how much of it is believed
    drafter = drafter_of(method="ngram", num_speculative_tokens=3, prompt_lookup_min=2, prompt_lookup_max=4)
    seq = decoding([1, 2, 3, 40, 41, 42, 43, 9, 2, 3, 50, 51, 52, 53, 1, 2, 3])
    assert step(drafter, seq) == [[40, 41, 42]]
    come(seq, 40, 41, 42, 43)  # all were right
    assert step(drafter, seq) == [[9, 2, 3]]
    come(seq, 77)  # and now it goes its own way: the guess is that only this token was another
    assert step(drafter, seq) == [[2]]
    come(seq, 78, 2, 3)
    assert step(drafter, seq)[0][:1] in ([40], [50])


def test_suffix_lengthens_with_the_match() -> None:
    drafter = drafter_of(method="suffix", suffix_decoding_max_spec_factor=1.0)
    seq = decoding([*range(100, 140), 100, 101, 102])
    assert step(drafter, seq) == [[103, 104, 105]]
    come(seq, 103, 104, 105, 106)
    assert step(drafter, seq) == [[*range(107, 114)]]


def test_what_repeats_itself_is_guessed_past_its_own_end() -> None:
    drafter = drafter_of(method="ngram", num_speculative_tokens=8, prompt_lookup_min=2, prompt_lookup_max=20)
    assert step(drafter, decoding([7, 8, 9] * 7)) == [[7, 8, 9, 7, 8, 9, 7, 8]]


def test_earlier_answers_are_found_by_suffix_and_by_whoever_may() -> None:
    drafter = drafter_of(method="suffix")
    earlier = decoding([1, 2], 60, 61, 62, 63, 64, salt="a")
    step(drafter, earlier)
    drafter.ended(earlier)

    def asked(**fields: Any) -> list[int]:
        return step(drafter, decoding([5, 6, 7, 60, 61], **fields))[0]

    assert asked(salt="a") == [62, 63, 64]
    assert asked(salt="b") == [] and asked() == [] and asked(salt="a", adapter="x") == []
    assert asked(salt="a", skip_prefix_cache_read=True) == []
    assert step(drafter, decoding([5, 1, 2], salt="a")) == [[]]  # prompts are not kept


def test_ngram_and_a_suffix_without_a_cache_remember_nothing() -> None:
    for fields in ({"method": "ngram"}, {"method": "suffix", "suffix_decoding_max_cached_requests": 0}):
        drafter = drafter_of(**fields)
        earlier = decoding([1, 2], 60, 61, 62, 63, 64)
        step(drafter, earlier)
        drafter.ended(earlier)
        assert not drafter._opened and step(drafter, decoding([5, 60, 61])) == [[]]


def test_with_steps_in_flight_the_drafts_begin_behind_them() -> None:
    drafter = drafter_of(method="ngram", num_speculative_tokens=2, prompt_lookup_min=2, prompt_lookup_max=8)
    seq = decoding([*range(20), *range(9)])
    seq.num_pending_tokens, seq.num_computed_tokens = 1, len(seq.token_ids)
    assert step(drafter, seq) == [[10, 11]]
    seq.num_unverified_drafts = 2
    seq.num_pending_tokens, seq.num_computed_tokens = 2, len(seq.token_ids) + 1
    assert step(drafter, seq) == [[13, 14]]


def test_guesses_that_miss_stop_being_verified_without_a_step_paying_for_it() -> None:
    costs = StepCosts(prefill_tokens_per_s=1e3)
    for _ in range(20):
        costs.observe_step(StepKind(1, 0), device_s=1e-2, total_s=1e-2)
        costs.observe_step(StepKind(1, 0, 4), device_s=30e-3, total_s=30e-3)
    drafter = drafter_of(costs, method="ngram", num_speculative_tokens=4)
    rng = random.Random(1)
    seq = decoding([rng.randrange(4) for _ in range(50)])  # every pair has stood before; what follows is chance
    drafted = []
    for _ in range(400):
        drafted.append(bool(step(drafter, seq)[0]))
        come(seq, rng.randrange(4))
    assert sum(drafted[-100:]) < 10


def test_a_wide_batch_looks_nothing_up() -> None:
    costs = StepCosts(prefill_tokens_per_s=1e3)
    costs.observe_step(StepKind(30, 0), device_s=1e-2, total_s=1e-2)  # a draft costs as much as three decodes
    drafter = drafter_of(costs, method="suffix")
    assert step(drafter, *(decoding([1, 2, 3, 1, 2]) for _ in range(30))) == [[]] * 30
    assert not drafter._opened


def test_many_prompts_and_long_ones_are_entered_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "_MAX_ENTERED", 100)
    drafter = drafter_of(method="ngram")
    seqs = [decoding([*range(start, start + 60), start, start + 1]) for start in (100, 200, 300)]
    long = decoding([*range(1000, 1300), 1000, 1001])
    found = [[bool(drafts) for drafts in step(drafter, *seqs, long)] for _ in range(6)]
    assert found[0] == [True, False, False, False]
    assert found[1] == [True, True, True, False]
    assert found[-1] == [True] * 4


def test_after_a_look_in_vain_so_many_steps_rest_that_looking_stays_cheap() -> None:
    ticks = itertools.count()  # a look takes a millisecond, a step ten
    drafter = drafter_of(method="ngram", clock=lambda: 1e-3 * next(ticks))
    seq = decoding([*range(50)])
    looks = []
    for token in range(50, 200):
        before = len(drafter._opened) and drafter._opened[seq.seq_id].num_seen
        step(drafter, seq)
        looks.append(drafter._opened[seq.seq_id].num_seen > before)
        come(seq, token)
    assert 6 <= sum(looks) <= 10


def test_what_drafts_have_spared_may_be_spent_on_looking_in_vain() -> None:
    ticks = itertools.count()  # a look takes a millisecond, a step ten
    drafter = drafter_of(method="ngram", clock=lambda: 1e-3 * next(ticks))
    seq = decoding([*range(50), 0, 1])

    def num_looks() -> int:
        looks = 0
        for _ in range(20):
            come(seq, 1000 + len(seq.token_ids))
            before = drafter._opened[seq.seq_id].num_seen
            step(drafter, seq)
            looks += drafter._opened[seq.seq_id].num_seen > before
        return looks

    assert step(drafter, seq) != [[]]
    num_looks()
    assert num_looks() <= 1
    drafter.judged(seq, 5, 5)  # a tenth of five steps
    assert 5 <= num_looks() <= 6
    assert num_looks() <= 1


def test_nothing_rests_while_a_prompt_is_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "_MAX_ENTERED", 100)
    ticks = itertools.count()
    drafter = drafter_of(method="ngram", clock=lambda: next(ticks))
    seq = decoding([*range(1000), 0, 1])
    found = [bool(step(drafter, seq)[0]) for _ in range(11)]
    assert found == [False] * 10 + [True]


METHODS: list[dict[str, Any]] = [{"method": "ngram"}, {"method": "suffix"}]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("method", METHODS, ids=lambda fields: fields["method"])
def test_in_a_scheduler_every_sequence_gets_the_tokens_of_a_run_alone(method: dict[str, Any], depth: int) -> None:
    """With chunks, forks, preemption, swaps, aborts and a prefix cache around it."""
    rng = random.Random(depth)
    rig = Rig(
        num_blocks=40,
        num_host_blocks=10,
        depth=depth,
        vocab_size=VOCAB,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        max_model_len=100,
    )
    rig.scheduler.drafter = drafter = LookupDrafter(SpeculativeConfig.read(method), rig.scheduler.costs)
    fakes.draft_for_free(rig.scheduler)
    requests: list[Request] = []
    aborted = []
    for i in range(40):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))]
        requests.append(
            make_request(prompt, max_tokens=rng.randrange(1, 50), n=rng.choice([1, 1, 3]), seed=i, logprobs=1)
        )
        rig.add(requests[-1])
        for _ in range(rng.randrange(12)):
            rig.step()
        if rng.random() < 0.1:
            aborted.append(rng.choice(requests))
            rig.scheduler.abort(aborted[-1].request_id)
    rig.run()
    rig.check_idle()
    stats = rig.scheduler.stats
    assert stats.num_accepted_tokens > 5 and stats.num_preemptions > 0
    assert sum(stats.num_accepted_by_depth) == stats.num_accepted_tokens
    assert not drafter._opened
    for request in requests:
        for seq, ours, theirs in zip(request.sequences, rig.outputs(request), alone(request, VOCAB), strict=False):
            assert ours == (theirs[: len(ours)] if seq.finish_reason is FinishReason.ABORT else theirs)
            for update in rig.updates.get(seq, []):
                assert update.logprobs is None or len(update.logprobs) == len(update.new_token_ids)
