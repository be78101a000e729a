from __future__ import annotations

from quire.bench.scheduler import measure


def test_a_step_costs_the_same_for_each_sequence_however_many_there_are() -> None:
    few, many = measure(100, 40), measure(1000, 40)
    assert many.step_ms / 1000 < 3 * few.step_ms / 100
