from __future__ import annotations

import pytest

from quire.sim import CostModel, SimClock


def decodes(count: int, context: int) -> tuple[list[int], list[int]]:
    return [1] * count, [context] * count


def test_small_steps_cost_the_weights_and_large_ones_their_tokens() -> None:
    cost = CostModel(overhead_s=0.0, kv_token_s=0.0, pair_s=0.0)
    assert cost.step_s(*decodes(1, 100)) == cost.step_s(*decodes(100, 100)) == cost.weights_s
    assert cost.step_s([4000], [0]) == pytest.approx(4000 * cost.token_s)


def test_context_costs_reads_and_chunks_cost_pairs() -> None:
    cost = CostModel(overhead_s=0.0, weights_s=0.0, token_s=0.0)
    assert cost.step_s(*decodes(10, 999)) == pytest.approx(10_000 * cost.kv_token_s)
    assert cost.step_s([100], [900]) == pytest.approx(1000 * cost.kv_token_s + 100_000 * cost.pair_s)


def test_swapped_blocks_cost_and_an_empty_step_does_not() -> None:
    cost = CostModel()
    assert cost.step_s([], []) == 0.0
    assert cost.step_s([], [], num_moved_blocks=2) == pytest.approx(2 * cost.block_copy_s)


def test_the_clock_never_goes_back() -> None:
    clock = SimClock(5.0)
    clock.advance_to(3.0)
    assert clock() == 5.0
    clock.advance_to(7.0)
    assert clock() == 7.0
