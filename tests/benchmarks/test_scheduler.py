from __future__ import annotations

import sys
from typing import Any

from benchmarks.scheduler import measure


def num_lines_run(num_seqs: int) -> int:
    """Lines of Python that planning and updating a few steps takes."""
    count = 0

    def trace(frame: Any, event: str, arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        measure(num_seqs, num_steps=4)
    finally:
        sys.settrace(before)
    return count


def test_a_step_costs_the_same_for_each_sequence_however_many_there_are() -> None:
    few, many = num_lines_run(50), num_lines_run(500)
    assert many / 500 < 1.2 * few / 50


def test_every_step_is_timed() -> None:
    measured = measure(8, 3)
    assert measured.num_seqs == 8
    assert measured.step_ms >= max(measured.schedule_ms, measured.update_ms) > 0


def test_with_drafts_a_step_brings_several_tokens_of_each_sequence() -> None:
    assert measure(8, 12, with_drafts=True).num_tokens > 16
