"""The step-time target, against the simulated executor's cost model."""

from __future__ import annotations

import itertools

import pytest
from scheduler.harness import Rig, make_request

from quire.engine.build import CPU_READERS_STEP_S
from quire.kv import KVManager
from quire.scheduler import SchedulerConfig
from quire.sim import CostModel, SimRun, poisson_arrivals


def decoding_rig(target_step_ms: float | None, *, depth: int = 1, cost: CostModel | None = None) -> Rig:
    """Eight sequences that decode, and two long prompts that arrive."""
    rig = Rig(
        num_blocks=4000,
        block_size=16,
        max_num_seqs=16,
        max_num_batched_tokens=4096,
        max_model_len=32_000,
        target_step_ms=target_step_ms,
        depth=depth,
        cost=cost,
        verify=False,
    )
    rig.checking = False
    rig.add(*(make_request(32, max_tokens=500) for _ in range(8)))
    for _ in range(10):
        rig.step()
    rig.add(make_request(12_000, max_tokens=2), make_request(12_000, max_tokens=2))
    return rig


def mixed_steps_ms(rig: Rig) -> list[float]:
    """Times of the steps that held decodes and chunks, of the two prompts."""
    while rig.scheduler.num_running + rig.scheduler.num_waiting > 8:
        rig.step()
    pairs = zip(rig.history, rig.results, strict=False)
    return [
        r.timings.total_s * 1e3 for p, r in pairs if max(p.spans.num_tokens, default=0) > 1 and 1 in p.spans.num_tokens
    ]


def test_without_a_target_decodes_stall_behind_prompts() -> None:
    assert max(mixed_steps_ms(decoding_rig(None))) > 90


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("target_ms", [8.0, 15.0, 40.0])
def test_steps_with_decodes_stay_near_the_target(target_ms: float, depth: int) -> None:
    times = mixed_steps_ms(decoding_rig(target_ms, depth=depth))
    settled = times[5:-2]  # it learns first; at the end less is left than would fit
    assert len(settled) > 10
    assert max(settled) < 1.2 * target_ms
    assert sum(settled) / len(settled) == pytest.approx(target_ms, rel=0.1)


def test_prompts_advance_a_block_a_step_even_under_an_impossible_target() -> None:
    rig = decoding_rig(1.0)
    for _ in range(30):
        rig.step()
    chunks = [max(plan.spans.num_tokens) for plan in rig.history[-10:]]
    assert chunks == [16] * 10


def test_a_slower_machine_than_told_is_noticed() -> None:
    slow = CostModel(token_s=240e-6, pair_s=0.0)
    times = mixed_steps_ms(decoding_rig(40.0, cost=slow))
    assert max(times[5:-2]) < 48


SMALL_MODEL = CostModel(overhead_s=1e-3, weights_s=5.6e-3, token_s=1e-3, kv_token_s=3e-6, pair_s=1e-7)
# Of a model whose weights take longer to read than a step should last.
LARGE_MODEL = CostModel(overhead_s=1e-3, weights_s=150e-3, token_s=2e-3, kv_token_s=3e-6, pair_s=1e-7)


def read_along(
    target_s: float | None, cost: CostModel = SMALL_MODEL, rate_per_s: float = 3.0, num_requests: int = 60
) -> tuple[float, float]:
    """256-token prompts at nearly all that two CPU cores can do: the slowest percent of the waits between two tokens
    that a reader sees, and when the last request ended."""
    config = SchedulerConfig(
        max_num_seqs=64, max_num_batched_tokens=512, max_model_len=2048, prefill_tokens_per_s=0.5 / cost.token_s
    )
    run = SimRun.build(KVManager(num_blocks=1456, block_size=16), config, cost=cost)
    if target_s is not None:
        run.scheduler.set_target_step(target_s)
    steps: list[tuple[float, int]] = []  # when each began, and for how many readers
    run.run(
        poisson_arrivals([(256, 64)] * num_requests, rate_per_s=rate_per_s, seed=0),
        on_step=lambda step: steps.append((step.start_s, step.plan.spans.num_tokens.count(1))),
    )
    waits = sorted(
        after - before for (before, readers), (after, _) in itertools.pairwise(steps) for _ in range(readers)
    )
    return waits[int(0.99 * len(waits))], run.clock.now_s


def test_readers_on_a_cpu_do_not_wait_for_whole_prompts_and_throughput_stays() -> None:
    stalled_s, rough_end_s = read_along(None)
    wait_s, end_s = read_along(CPU_READERS_STEP_S)
    assert stalled_s > 0.5
    assert wait_s < 1.1 * CPU_READERS_STEP_S
    assert end_s < 1.02 * rough_end_s


def test_a_large_models_prompts_get_as_long_as_its_decodes() -> None:
    stalled_s, rough_end_s = read_along(None, LARGE_MODEL, rate_per_s=1.0, num_requests=30)
    wait_s, end_s = read_along(CPU_READERS_STEP_S, LARGE_MODEL, rate_per_s=1.0, num_requests=30)
    assert wait_s < stalled_s
    assert end_s < 1.05 * rough_end_s  # a block of each prompt at a time, it would be 1.7 times as long
