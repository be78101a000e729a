"""How a run's step time is divided between prompts and decodes."""

from __future__ import annotations

import pytest

from quire.bench.steps import Step, prefill_and_decode_rates
from quire.plan import StepTimings


def step(decodes: int, prefill: int, seconds: float) -> Step:
    return Step(decodes, prefill, decodes + bool(prefill), StepTimings(total_s=seconds))


def decode_s(width: int) -> float:
    return 0.010 + 0.001 * width


@pytest.mark.parametrize(
    ("steps", "prefill", "decode"),
    [
        ([step(0, 300, 0.5), step(0, 100, 0.3), step(8, 0, 0.1), step(4, 0, 0.1)], 400 / 0.8, 12 / 0.2),
        ([step(4, 0, 0.02), step(4, 50, 0.12)], 50 / 0.1, 8 / 0.04),  # one width says what any costs
        ([step(10, 90, 1.0)], 90 / 0.9, 10 / 0.1),  # without a step of decodes alone, tokens divide
        # Nothing was left for prompts: no rate is better than an infinite one.
        ([step(4, 0, 0.02), step(4, 50, 0.01)], None, 8 / 0.03),
        ([], None, None),
    ],
)
def test_step_time_is_divided(steps: list[Step], prefill: float | None, decode: float | None) -> None:
    assert prefill_and_decode_rates(steps) == (prefill and pytest.approx(prefill), decode and pytest.approx(decode))


def test_mixed_steps_charge_decodes_what_they_cost_alone() -> None:
    alone = [step(width, 0, decode_s(width)) for width in (1, 2, 4, 8)]
    mixed = [step(width, 100, decode_s(width) + 0.2) for width in (3, 6)]
    prefill, decode = prefill_and_decode_rates([*alone, *mixed])
    assert prefill == pytest.approx(200 / 0.4)
    widths = (1, 2, 4, 8, 3, 6)
    assert decode == pytest.approx(sum(widths) / sum(decode_s(w) for w in widths))
