"""How long the parts of a step took, on the side where it matters: the host's clock for a CPU, the GPU's for a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from quire.plan import StepTimings


class StepClock:
    """Marks the end of each part of a step. On a GPU marks are events in the stream, read once the step is over."""

    def __init__(self, *, on_gpu: bool, host_clock: Callable[[], float] = time.perf_counter) -> None:
        """host_clock: what a CPU's steps are timed by."""
        self._on_gpu = on_gpu
        self._host_clock = host_clock
        self._marks: list[tuple[str, float | torch.cuda.Event]] = [("", self._now())]

    def restart(self) -> None:
        self._marks = [("", self._now())]

    def mark(self, part: str) -> None:
        self._marks.append((part, self._now()))

    def _now(self) -> float | torch.cuda.Event:
        if not self._on_gpu:
            return self._host_clock()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def is_over(self) -> bool:
        """Whether the step has come to its last mark."""
        last = self._marks[-1][1]
        return not isinstance(last, torch.cuda.Event) or bool(last.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        last = self._marks[-1][1]
        if isinstance(last, torch.cuda.Event):
            last.synchronize()

    def read(self) -> StepTimings:
        """Call it when the step is over."""
        last = self._marks[-1][1]
        timings = StepTimings()
        for (_, start), (part, end) in zip(self._marks, self._marks[1:], strict=False):
            setattr(timings, f"{part}_s", _seconds(start, end))
        timings.total_s = _seconds(self._marks[0][1], last)
        return timings


def _seconds(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return float(start.elapsed_time(end)) / 1e3
    assert isinstance(start, float) and isinstance(end, float)
    return end - start
