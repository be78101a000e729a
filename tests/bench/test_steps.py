"""How a run's step time is divided between prompts and decodes."""

from __future__ import annotations

import pytest

from quire.bench.steps import Step, prefill_and_decode_rates
from quire.plan import StepTimings


def step(decodes: int, prefill: int, seconds: float) -> Step:
    return Step(decodes, prefill, decodes + bool(prefill), StepTimings(total_s=seconds))


def decode_s(width: int) -> float:
    return 0.010 + 0.001 * width


def test_steps_of_one_kind() -> None:
    prefill, decode = prefill_and_decode_rates([step(0, 300, 0.5), step(0, 100, 0.3), step(8, 0, 0.1), step(4, 0, 0.1)])
    assert prefill == pytest.approx(400 / 0.8)
    assert decode == pytest.approx(12 / 0.2)


def test_mixed_steps_charge_decodes_what_they_cost_alone() -> None:
    alone = [step(width, 0, decode_s(width)) for width in (1, 2, 4, 8)]
    mixed = [step(width, 100, decode_s(width) + 0.2) for width in (3, 6)]
    prefill, decode = prefill_and_decode_rates([*alone, *mixed])
    assert prefill == pytest.approx(200 / 0.4)
    widths = (1, 2, 4, 8, 3, 6)
    assert decode == pytest.approx(sum(widths) / sum(decode_s(w) for w in widths))


def test_one_width_says_what_any_costs() -> None:
    prefill, decode = prefill_and_decode_rates([step(4, 0, 0.02), step(4, 50, 0.12)])
    assert prefill == pytest.approx(50 / 0.1)
    assert decode == pytest.approx(8 / 0.04)


def test_without_a_step_of_decodes_alone_tokens_divide() -> None:
    prefill, decode = prefill_and_decode_rates([step(10, 90, 1.0)])
    assert prefill == pytest.approx(90 / 0.9)
    assert decode == pytest.approx(10 / 0.1)


def test_a_fast_mixed_step_leaves_nothing_below_zero() -> None:
    prefill, decode = prefill_and_decode_rates([step(4, 0, 0.02), step(4, 50, 0.01)])
    assert prefill is None  # nothing was left for prompts: no rate is better than an infinite one
    assert decode == pytest.approx(8 / 0.03)


def test_nothing() -> None:
    assert prefill_and_decode_rates([]) == (None, None)
