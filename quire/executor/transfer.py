"""Bytes on their way between host and device, without either waiting for the other."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


class StagingRing:
    """Pinned buffers taken in turn, so that the host may fill one while copies from the others are still queued."""

    def __init__(self, num_values: int, depth: int = 4) -> None:
        self._buffers = [torch.empty(num_values, dtype=torch.int64, pin_memory=True) for _ in range(depth)]
        self._events: list[torch.cuda.Event | None] = [None] * depth
        self._next = 0

    def copy_to(self, array: npt.NDArray[Any], target: Tensor) -> None:
        index, self._next = self._next, (self._next + 1) % len(self._buffers)
        event = self._events[index]
        if event is not None:
            event.synchronize()  # only after `depth` copies without a step being collected: never in the loop
        staged = self._buffers[index][: array.size].view(array.shape)
        staged.copy_(torch.from_numpy(array))
        target.copy_(staged, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        self._events[index] = done


class Transfers:
    """A stream beside the one that computes, and the moves that are still under way on it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._spread_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._spread: list[torch.cuda.Event | None] = [None, None]
        self._under_way: deque[tuple[int, torch.cuda.Event]] = deque()

    @contextlib.contextmanager
    def after_computing(self) -> Iterator[None]:
        """Queue moves behind the steps submitted so far: they may still write what goes out, and read what is freed."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def before_computing(self) -> None:
        """Steps submitted from now on run behind all moves so far."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def await_spread(self, *halves: int) -> None:
        """What comes next on this stream waits until these halves of the staging buffer have been read."""
        for half in halves:
            if (event := self._spread[half]) is not None:
                torch.cuda.current_stream(self._device).wait_event(event)

    @contextlib.contextmanager
    def spreading(self, half: int) -> Iterator[None]:
        """Queue the reading of a half behind what has come into it, on a stream of its own."""
        self._spread_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._spread_stream):
            yield
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._spread_stream)
        self._spread[half] = event

    def track(self, ticket: int) -> None:
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(self._stream)
        self._under_way.append((ticket, done))

    def wait_for_oldest(self) -> None:
        if self._under_way:
            self._under_way[0][1].synchronize()

    def take_finished(self) -> list[int]:
        """Tickets of moves that are over, each told once."""
        finished = []
        while self._under_way and self._under_way[0][1].query():  # type: ignore[no-untyped-call]
            finished.append(self._under_way.popleft()[0])
        return finished
