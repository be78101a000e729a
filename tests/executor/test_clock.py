"""Times of a step's parts, and of the start-up."""

from __future__ import annotations

import time

import pytest

from quire.executor.clock import StepClock
from quire.executor.timeline import Timeline


def test_parts_add_up() -> None:
    clock = StepClock(on_gpu=False)
    time.sleep(0.02)
    clock.mark("prepare")
    clock.mark("forward")
    time.sleep(0.01)
    clock.mark("sample")
    timings = clock.read()
    assert timings.prepare_s >= 0.02
    assert timings.sample_s >= 0.01
    assert timings.total_s == pytest.approx(timings.prepare_s + timings.forward_s + timings.sample_s)


def test_timeline() -> None:
    timeline = Timeline()
    time.sleep(0.01)
    timeline.mark("first")
    timeline.mark("second")
    assert list(timeline.seconds) == ["first", "second"]
    assert timeline.seconds["first"] >= 0.01 > timeline.seconds["second"]
