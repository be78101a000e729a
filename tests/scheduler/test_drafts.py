"""Drafts: the scheduler plans with bounds, and whatever is accepted, every sequence gets the tokens of a run alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler.harness import Rig, alone, make_request
from scheduler.test_random import SETUPS, VOCAB, make_requests, run_workload

from quire.request import FinishReason, Request, Sequence
from quire.sim import ToyLanguage


class Guesser:
    """Drafts of random length, each token right with a given probability. Both kinds: ids from the host where it knows
    the last token, and numbers for the executor's own drafter."""

    def __init__(self, seed: int, accuracy: float, most: int = 5) -> None:
        self._rng = random.Random(seed)
        self._accuracy = accuracy
        self._most = most
        self._language = ToyLanguage(VOCAB)

    def propose(self, seq: Sequence, most: int) -> list[int] | int:
        size = min(most, self._rng.randrange(self._most + 1))
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
    block_size=st.sampled_from([4, 8, 16]),
    num_blocks=st.integers(14, 40),
    preemption=st.sampled_from(["recompute", "swap"]),
    prefix_caching=st.booleans(),
)
def test_blocks_and_sequences_hold_after_every_step(
    seed: int, accuracy: float, depth: int, block_size: int, num_blocks: int, preemption: str, prefix_caching: bool
) -> None:
    rng = random.Random(seed)
    rig = rig_with_drafts(
        seed,
        accuracy,
        depth=depth,
        block_size=block_size,
        num_blocks=num_blocks,
        preemption=preemption,
        num_host_blocks=30,
        transfer_steps=rng.randrange(3),
        enable_prefix_caching=prefix_caching,
    )
    requests = [
        make_request(
            [rng.randrange(4) for _ in range(rng.randint(1, 24))],
            max_tokens=rng.randint(4, 20),
            n=rng.choice([1, 1, 2]),
            seed=rng.randrange(9),
            ends=(3,),
            min_tokens=rng.choice([0, 4]),
            logprobs=rng.choice([None, 2]),
        )
        for _ in range(8)
    ]
    rig.add(*requests)
    rig.run()  # checks blocks and sequences after every step
    rig.check_idle()
    for request in requests:
        assert rig.outputs(request) == alone(request, VOCAB)
        for seq in request.sequences:
            for update in rig.updates[seq]:
                assert update.logprobs is None or len(update.logprobs) == len(update.new_token_ids)


def test_blocks_of_rejected_drafts_are_given_back_and_the_executor_is_told() -> None:
    rig = rig_with_drafts(0, 0.0, block_size=4, num_blocks=100)
    proposals = iter([[VOCAB + 1] * 9, [], [VOCAB + 1] * 2])
    rig.scheduler.drafter = type("Fixed", (), {"propose": lambda self, seq, most: next(proposals, [])})()
    request = make_request(4, max_tokens=20)
    rig.add(request)
    rig.step()
    plan = rig.submit()
    assert plan is not None and plan.spans.drafts == {0: [VOCAB + 1] * 9} and plan.spans.num_tokens == [10]
    assert rig.kv.num_used_blocks == 4  # for 4 tokens, one more, and the drafts
    rig.collect()
    assert rig.kv.num_used_blocks == 2
    rig.kv.check()
    plan = rig.submit()
    assert plan is not None and plan.trimmed == [(0, 2)]
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
    rig.scheduler.drafter = type("Greedy", (), {"propose": lambda self, seq, most: [1] * min(most, 4)})()
    requests = [make_request(6, max_tokens=2) for _ in range(2)]
    rig.add(*requests)
    rig.run()
    assert rig.scheduler.stats.num_preemptions == 0
    assert all(isinstance(request, Request) and request.is_finished for request in requests)
