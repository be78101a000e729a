"""Drafts: the scheduler plans with bounds, and whatever is accepted, every sequence gets the tokens of a run alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler.harness import Proposer, Rig, alone, make_request
from scheduler.test_random import SETUPS, VOCAB, make_requests, run_workload
from sim_language import ToyLanguage

from quire.kv import KVManager
from quire.request import FinishReason, Request, Sequence


class Guesser(Proposer):
    """Drafts of random length, each token right with a given probability. Both kinds: ids from the host where it knows
    the last token, and numbers for the executor's own drafter."""

    def __init__(self, seed: int, accuracy: float, most: int = 5) -> None:
        self._rng = random.Random(seed)
        self._accuracy = accuracy
        self._most = most
        self._language = ToyLanguage(VOCAB)

    def propose(self, seq: Sequence) -> list[int] | int:
        size = self._rng.randrange(self._most + 1)
        if seq.num_pending_tokens or self._rng.random() < 0.5:
            return size
        spec = seq.request.spec_of(seq.index)
        return self.guess(seq.token_ids, size, lambda f, n: self._language.next_token(f, spec, n), seq.request.adapter)

    def own(self, token_ids: list[int], most: int) -> list[int]:
        return self.guess(token_ids, self._rng.randrange(most + 1), lambda fingerprint, _: fingerprint % VOCAB, None)

    def guess(self, token_ids: list[int], size: int, next_token: object, adapter: str | None) -> list[int]:
        fingerprints: list[int] = []
        tokens = list(token_ids)
        root = self._language.root(adapter)
        for _ in range(size):
            self._language.extend(fingerprints, root, tokens)
            right = next_token(fingerprints[-1], len(tokens))  # type: ignore[operator]
            tokens.append(right if self._rng.random() < self._accuracy else self._rng.randrange(VOCAB))
        return tokens[len(token_ids) :]


def rig_with_drafts(seed: int, accuracy: float, **setup: object) -> Rig:
    guesser = Guesser(seed, accuracy)
    rig = Rig(**{"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 110, **setup}, vocab_size=VOCAB)
    rig.scheduler.drafter = guesser
    rig.executor._drafter = guesser.own
    return rig


@pytest.fixture(scope="module")
def expected() -> list[list[list[int]]]:
    return [alone(request, VOCAB) for request in make_requests(300)]


@pytest.mark.parametrize("name", [name for name in SETUPS if "depth 2" not in name])
def test_everyone_gets_the_tokens_of_a_run_without_drafts(name: str, expected: list[list[list[int]]]) -> None:
    setup = {"num_blocks": 40, **SETUPS[name]}
    num_tenants = setup.pop("num_tenants", 1)
    rig = rig_with_drafts(1, 0.7, **setup)
    requests = make_requests(300)
    for i, request in enumerate(requests):
        request.tenant = f"tenant {i % num_tenants}"
    aborted = run_workload(rig, requests)
    rig.check_idle()
    stats = rig.scheduler.stats
    assert stats.num_drafts > 200
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    for request, lines in zip(requests, expected, strict=True):
        assert request.is_finished
        outputs = rig.outputs(request)
        if request.request_id in aborted:
            assert all(ours == theirs[: len(ours)] for ours, theirs in zip(outputs, lines, strict=False))
            continue
        assert all(s.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) for s in request.sequences)
        assert outputs == lines


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    accuracy=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    depth=st.integers(1, 3),
    block_size=st.sampled_from([4, 8, 16, 128]),
    windows=st.sampled_from([(None,), (None, 8), (5,), (None, 16, 3), (None, None, 40), (1,)]),
    preemption=st.sampled_from(["recompute", "swap"]),
    prefix_caching=st.booleans(),
    fails=st.booleans(),
)
def test_blocks_and_sequences_hold_after_every_step(
    seed: int,
    accuracy: float,
    depth: int,
    block_size: int,
    windows: tuple[int | None, ...],
    preemption: str,
    prefix_caching: bool,
    fails: bool,
) -> None:
    """With aborts, of those whose blocks are coming back above all, pins that come and go, and sequences that fail."""
    rng = random.Random(seed)
    longest = KVManager(num_blocks=1, block_size=block_size, windows=windows, max_span_tokens=16).num_blocks_for(60)
    rig = rig_with_drafts(
        seed,
        accuracy,
        depth=depth,
        block_size=block_size,
        num_blocks=rng.randint(longest, 2 * longest),
        windows=windows,
        preemption=preemption,
        num_host_blocks=rng.choice([4, 40]),
        transfer_steps=rng.randrange(4),
        enable_prefix_caching=prefix_caching,
        max_num_batched_tokens=16,
        max_model_len=60,
        fault=(lambda token_ids: "bad" if sum(token_ids) % 41 == 0 else None) if fails else None,
    )
    head = [rng.randrange(4) for _ in range(24)]
    requests = [
        make_request(
            head[: rng.randint(0, 24)] + [rng.randrange(4) for _ in range(rng.randint(1, 15))],
            max_tokens=rng.randint(4, 20),
            n=rng.choice([1, 1, 2, 3]),
            seed=rng.randrange(9),
            ends=(3,),
            min_tokens=rng.choice([0, 4]),
            logprobs=rng.choice([None, 2]),
            prompt_logprobs=rng.choice([None, None, 1]),
        )
        for _ in range(12)
    ]
    rig.add(*requests)
    life, aborted = rig.scheduler._life, set()
    while rig.scheduler.has_work:
        if rng.random() < 0.1:
            loading = [entry.seq.request for entry in (*life.loading, *life.loaded)]
            victim = rng.choice(loading or requests)
            aborted.update(update.seq.request for update in rig.abort(victim.request_id))
        if rng.random() < 0.1:
            prefix = head[: rng.randrange(4, 24)]
            num_pinned = rig.kv.pin(prefix)
            assert num_pinned <= len(prefix)
            assert rng.random() < 0.5 or rig.kv.unpin(prefix) == num_pinned
        if rng.random() < 0.1:
            rig.kv.reset_prefix_cache(force=True)
        rig.step()  # checks blocks and sequences
    rig.kv.reset_prefix_cache(force=True)
    rig.check_idle()
    for request in requests:
        for seq, ours, theirs in zip(request.sequences, rig.outputs(request), alone(request, VOCAB), strict=False):
            has_failed = seq.finish_reason is FinishReason.ERROR
            assert ours == (theirs[: len(ours)] if has_failed or request in aborted else theirs)
            for update in rig.updates[seq]:
                assert update.logprobs is None or len(update.logprobs) == len(update.new_token_ids)


@pytest.mark.parametrize("num_blocks", [7, 100])
def test_blocks_of_rejected_drafts_are_given_back_where_they_are_short_and_the_executor_is_told(
    num_blocks: int,
) -> None:
    rig = rig_with_drafts(0, 0.0, block_size=4, num_blocks=num_blocks)
    proposals = iter([[VOCAB + 1] * 9, [], [VOCAB + 1] * 2])
    rig.scheduler.drafter = type("Fixed", (Proposer,), {"propose": lambda self, seq: next(proposals, [])})()
    request = make_request(4, max_tokens=20)
    rig.add(request)
    rig.step()
    plan = rig.submit()
    assert plan is not None and plan.spans.drafts == {0: [VOCAB + 1] * 9} and plan.spans.num_tokens == [10]
    assert rig.kv.num_used_blocks == 4  # for 4 tokens, one more, and the drafts
    rig.collect()
    are_short = num_blocks == 7
    assert rig.kv.num_used_blocks == (2 if are_short else 4)
    rig.kv.check()
    plan = rig.submit()
    assert plan is not None and plan.trimmed == ([(0, 2)] if are_short else []) and not plan.appended
    rig.collect()
    rig.run()
    rig.check_idle()
    assert (rig.scheduler.stats.num_drafts, rig.scheduler.stats.num_accepted_tokens) == (2, 0)


def test_drafts_never_reach_past_the_last_token() -> None:
    rig = rig_with_drafts(0, 1.0, depth=3)
    request = make_request(4, max_tokens=9, seed=3)
    rig.add(request)
    rig.run()
    assert [len(line) for line in rig.outputs(request)] == [9]
    assert all(sum(plan.spans.num_tokens) <= 4 + 9 for plan in rig.history)


def test_a_guess_preempts_nobody() -> None:
    """Two sequences fill the pool: drafts would need another block, so there are none."""
    rig = rig_with_drafts(0, 1.0, num_blocks=4, block_size=4)
    rig.scheduler.drafter = type("Greedy", (Proposer,), {"propose": lambda self, seq: [1] * 4})()
    requests = [make_request(6, max_tokens=2) for _ in range(2)]
    rig.add(*requests)
    rig.run()
    assert rig.scheduler.stats.num_preemptions == 0
    assert all(isinstance(request, Request) and request.is_finished for request in requests)


class Drafts(Proposer):
    """Proposes these once, and nothing after."""

    def __init__(self, *proposals: list[int]) -> None:
        self._proposals = list(proposals)

    def propose(self, seq: Sequence) -> list[int] | int:
        return self._proposals.pop(0) if self._proposals else []


@pytest.mark.parametrize(("ends_first", "reason"), [(False, FinishReason.ERROR), (True, FinishReason.STOP)])
def test_a_failure_behind_accepted_drafts_takes_none_of_their_tokens(ends_first: bool, reason: FinishReason) -> None:
    line = alone(make_request([1, 2, 3], max_tokens=6, seed=5), VOCAB)[0]
    rig = Rig(vocab_size=VOCAB, fault=lambda token_ids: "bad" if len(token_ids) == 7 else None)
    rig.scheduler.drafter = Drafts(line[1:5])
    request = make_request([1, 2, 3], max_tokens=6, seed=5, ends=(line[2],) if ends_first else (), logprobs=1)
    rig.add(request)
    rig.run()
    rig.check_idle()
    seq = request.sequences[0]
    assert seq.finish_reason is reason
    assert rig.outputs(request) == [line[: 3 if ends_first else 4]]
    assert all(len(update.logprobs or []) == len(update.new_token_ids) for update in rig.updates[seq])
