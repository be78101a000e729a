"""What steps cost: estimates that follow, when to plan, and how many prompt tokens fit into a time."""

from __future__ import annotations

import pytest

from quire.step_costs import Estimate, StepCosts, StepKind


def test_an_estimate_follows_and_grows_wary_of_what_strays() -> None:
    steady = Estimate.first(5e-3)
    assert steady.at_least_s == 0  # a first step may have waited for a compiler
    for _ in range(40):
        steady.observe(4e-3)
    assert steady.mean_s == pytest.approx(4e-3, rel=0.02) and steady.at_least_s == pytest.approx(4e-3, rel=0.05)
    before_s = steady.at_least_s
    steady.observe(40e-3)  # something else had the machine: the next step is not taken to be longer for it
    assert steady.at_least_s < before_s


def test_similar_steps_are_one_kind() -> None:
    assert StepKind(9, 100).rounded() == StepKind(16, 128) == StepKind(16, 128).rounded()


def test_one_slow_plan_does_not_make_the_next_ones_early() -> None:
    costs, kind = StepCosts(prefill_tokens_per_s=1000.0), StepKind(1, 0)
    for _ in range(40):
        costs.observe_step(kind, device_s=10e-3, total_s=10e-3)
        costs.observe_planning(0.5e-3, has_prompts=False)
    usual_s = costs.free_s(kind, has_prompts=False)
    costs.observe_planning(100e-3, has_prompts=False)  # a graph was captured
    assert costs.free_s(kind, has_prompts=False) > usual_s - 3e-3
    for _ in range(5):
        costs.observe_planning(0.5e-3, has_prompts=False)
    assert costs.free_s(kind, has_prompts=False) > usual_s - 1e-3
    for _ in range(40):
        costs.observe_planning(4e-3, has_prompts=False)  # it really takes longer now
    assert costs.free_s(kind, has_prompts=False) < 6e-3


def test_what_is_unknown_is_not_waited_for() -> None:
    costs = StepCosts(prefill_tokens_per_s=1000.0)
    decodes, mixed = StepKind(1, 0), StepKind(1, 3)
    assert costs.free_s(decodes, has_prompts=False) == 0
    for _ in range(30):
        costs.observe_step(decodes, device_s=10e-3, total_s=10e-3)
    assert costs.free_s(decodes, has_prompts=False) == 0  # how long planning takes is not known
    for _ in range(30):
        costs.observe_planning(1e-3, has_prompts=False)
    assert 8e-3 < costs.free_s(decodes, has_prompts=False) < 9e-3
    assert costs.free_s(mixed, has_prompts=False) == costs.free_s(decodes, has_prompts=False)  # it takes no less
    for _ in range(30):
        costs.observe_step(mixed, device_s=20e-3, total_s=20e-3)
    assert 18e-3 < costs.free_s(mixed, has_prompts=False) < 19e-3
    assert costs.free_s(StepKind(20, 0), has_prompts=False) == 0
    for _ in range(30):
        costs.observe_planning(30e-3, has_prompts=False)
    assert costs.free_s(mixed, has_prompts=False) == 0


def test_a_step_with_prompts_is_planned_earlier_if_that_takes_longer() -> None:
    costs, kind = StepCosts(prefill_tokens_per_s=1000.0), StepKind(8, 0)
    for _ in range(40):
        costs.observe_step(kind, device_s=10e-3, total_s=10e-3)
        costs.observe_planning(1e-3, has_prompts=False)
    assert costs.free_s(kind, has_prompts=True) == 0  # nobody knows how long that takes
    for _ in range(40):
        costs.observe_planning(3e-3, has_prompts=True)
    assert 8e-3 < costs.free_s(kind, has_prompts=False) < 9e-3
    assert 6e-3 < costs.free_s(kind, has_prompts=True) < 7e-3


def observe(costs: StepCosts, num_decodes: int, num_prompt_tokens: int, total_s: float) -> None:
    costs.observe_step(StepKind(num_decodes, num_prompt_tokens), device_s=total_s, total_s=total_s)


def test_any_baseline_settles_at_the_time_asked_for() -> None:
    for baseline_ms in (None, 1.0, 9.0):
        costs = StepCosts(prefill_tokens_per_s=1000.0)
        if baseline_ms is not None:
            observe(costs, 8, 0, baseline_ms / 1e3)
        for _ in range(60):
            allowed = max(16, costs.prompt_tokens_within(10e-3))
            observe(costs, 8, allowed, 2e-3 + 20e-6 * allowed)
        assert 2.0 + 0.02 * allowed == pytest.approx(10.0, rel=0.05)


def test_a_step_that_only_waits_for_blocks_teaches_nothing() -> None:
    costs = StepCosts(prefill_tokens_per_s=1000.0)
    costs.observe_step(StepKind(8, 0), device_s=0.01, total_s=0.01)
    before = costs.prompt_tokens_within(0.1)
    costs.observe_step(StepKind(0, 0), device_s=1e-6, total_s=1e-6)
    assert costs.prompt_tokens_within(0.1) == before


def test_the_prefill_rate_is_measured() -> None:
    costs = StepCosts(prefill_tokens_per_s=1000.0)
    assert costs.step_s(StepKind(0, 4000)) == 0.0  # nothing is known
    observe(costs, 0, 32, 1.0)  # too few tokens to say anything
    assert costs.prefill_tokens_per_s == 1000.0
    observe(costs, 0, 4000, 0.2)
    assert costs.prefill_tokens_per_s == 20_000.0
    assert costs.step_s(StepKind(0, 10_000)) == 0.5
    observe(costs, 0, 4000, 0.4)
    assert 10_000.0 < costs.prefill_tokens_per_s < 20_000.0
