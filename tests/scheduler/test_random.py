"""Random workloads through the simulated executor, which checks every read and write."""

from __future__ import annotations

import random

import pytest
from scheduler.harness import Rig, alone, make_request

from quire.request import FinishReason, Request

VOCAB = 50
NUM_REQUESTS = 1000


def make_requests(count: int = NUM_REQUESTS) -> list[Request]:
    """The same ones at each call."""
    rng = random.Random(1)
    prefixes = [[rng.randrange(VOCAB) for _ in range(rng.choice([8, 16, 21]))] for _ in range(4)]
    return [random_request(rng, prefixes) for _ in range(count)]


def random_request(rng: random.Random, prefixes: list[list[int]]) -> Request:
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))]
    if rng.random() < 0.6:
        prompt = rng.choice(prefixes) + prompt[: rng.randint(1, len(prompt))]
    ends = (3, 7) if rng.random() < 0.7 else ()
    return make_request(
        prompt,
        max_tokens=rng.randint(1, 30),
        n=rng.choice([1, 1, 1, 1, 2, 3]),
        seed=rng.randrange(1000),
        ends=ends,
        eos=(3,) if ends else (),
        min_tokens=rng.choice([0, 0, 1]),
        priority=rng.choice([0, 0, 1, 5]),
        prompt_logprobs=1 if rng.random() < 0.05 else None,
        skip_prefix_cache_read=rng.random() < 0.05,
        adapter=rng.choice([None, None, None, "a"]),
        salt=rng.choice([None, None, None, "s"]),
    )


@pytest.fixture(scope="module")
def expected() -> list[list[list[int]]]:
    return [alone(request, VOCAB) for request in make_requests()]


def run_workload(rig: Rig, requests: list[Request]) -> set[str]:
    """Requests arrive in bursts, some are aborted at any moment. Returns the ids of those."""
    rng = random.Random(2)
    aborted: set[str] = set()
    num_added = 0
    rig.checking = False
    while rig.scheduler.has_work or num_added < len(requests):
        if rng.random() < 0.4:
            for request in requests[num_added : num_added + rng.randint(1, 6)]:
                request.arrival_s = rig.clock()
                rig.add(request)
                num_added += 1
        rig.submit()  # so that aborts meet a step in flight
        if rng.random() < 0.1 and num_added:
            victim = rng.choice(requests[max(0, num_added - 30) : num_added])
            if rig.abort(victim.request_id):
                aborted.add(victim.request_id)
        rig.step()
        if len(rig.history) % 7 == 0:
            rig.kv.check()
            rig.scheduler.check()
    return aborted


SETUPS = {
    "recompute": {"preemption": "recompute"},
    "recompute, depth 2": {"preemption": "recompute", "depth": 2},
    "swap": {"preemption": "swap", "num_host_blocks": 60},
    "swap, depth 2, slow transfers": {"preemption": "swap", "num_host_blocks": 60, "depth": 2, "transfer_steps": 2},
    "swap to a small host pool, depth 3, priorities": {
        "preemption": "swap",
        "num_host_blocks": 25,
        "depth": 3,
        "transfer_steps": 1,
        "policy": "priority",
        "priority_ageing_s": 0.1,
    },
    "auto, depth 2, priorities, watermark": {
        "num_blocks": 20,
        "block_size": 8,
        "num_host_blocks": 30,
        "depth": 2,
        "policy": "priority",
        "watermark": 0.05,
        "kv_bytes_per_block": 1_000_000,
        "swap_bytes_per_s": 4.5e9,
    },
    "whole prompts only, depth 2": {"preemption": "recompute", "depth": 2, "enable_chunked_prefill": False},
    "step target, no prefix cache": {
        "preemption": "swap",
        "num_host_blocks": 30,
        "depth": 2,
        "target_step_ms": 6.0,
        "enable_prefix_caching": False,
    },
    "recompute, three tenants, depth 2": {"preemption": "recompute", "depth": 2, "num_tenants": 3},
    "swap, five tenants, depth 3, slow transfers, priorities": {
        "preemption": "swap",
        "num_host_blocks": 60,
        "depth": 3,
        "transfer_steps": 2,
        "policy": "priority",
        "priority_ageing_s": 0.1,
        "num_tenants": 5,
    },
    "whole prompts of two tenants, recompute": {
        "preemption": "recompute",
        "enable_chunked_prefill": False,
        "num_tenants": 2,
    },
}


@pytest.mark.parametrize("name", SETUPS)
def test_everyone_finishes_once_with_the_tokens_of_a_run_alone(name: str, expected: list[list[list[int]]]) -> None:
    setup = {"num_blocks": 40, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 110, **SETUPS[name]}
    num_tenants = setup.pop("num_tenants", 1)
    rig = Rig(**setup, vocab_size=VOCAB)
    requests = make_requests()
    for i, request in enumerate(requests):
        request.tenant = f"tenant {i % num_tenants}"
    aborted = run_workload(rig, requests)
    rig.check_idle()
    assert len(aborted) > 20
    stats = rig.scheduler.stats
    if "recompute" in name or "auto" in name:
        assert stats.num_recompute_preemptions > 50
    if "swap" in name or "auto" in name:
        assert stats.num_swap_preemptions > 50
    if rig.kv.enable_prefix_caching:
        assert rig.kv.stats.prefix.num_hit_tokens > 300
    assert rig.kv.stats.num_copies > 50
    for request, lines in zip(requests, expected, strict=True):
        assert request.is_finished
        outputs = rig.outputs(request)
        if request.request_id in aborted:
            # Whoever was cut off had said nothing wrong until then.
            assert all(ours == theirs[: len(ours)] for ours, theirs in zip(outputs, lines, strict=False))
            continue
        assert len(request.sequences) == request.n
        assert all(s.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) for s in request.sequences)
        assert outputs == lines
        for seq in request.sequences:
            num_told = sum(len(u.prompt_logprobs or []) for u in rig.updates[seq])
            wanted = request.spec.prompt_logprobs and not seq.index
            assert num_told == (request.num_prompt_tokens - 1 if wanted else 0)
