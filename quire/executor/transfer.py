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
    """Streams beside the one that computes, and the moves that are under way on them.

    Blocks come in by two lanes in turn: while the bytes of one are spread over the layers, those of the other cross the
    link. They go out by a stream of their own, at the same time. What belongs to the same blocks is kept in order: the
    scheduler gives out no block whose bytes move, but it may fetch what a move before this one takes out.
    """

    NUM_LANES = 2

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lanes = [_new_stream(device) for _ in range(self.NUM_LANES)]
        self._out = _new_stream(device)
        self._loads: deque[tuple[int | None, torch.cuda.Event]] = deque()
        self._stores: deque[tuple[int, torch.cuda.Event, frozenset[int]]] = deque()  # with the host blocks they write

    def mark(self) -> torch.cuda.Event:
        """The steps submitted so far. Moves wait for them: they may still write what goes out, and read what is to be
        overwritten."""
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    @contextlib.contextmanager
    def outward(self, after: torch.cuda.Event) -> Iterator[None]:
        """What is queued meanwhile goes out, behind the steps of a mark."""
        self._out.wait_event(after)
        with torch.cuda.stream(self._out):
            yield

    @contextlib.contextmanager
    def storing(self, ticket: int, after: torch.cuda.Event, host_ids: frozenset[int]) -> Iterator[None]:
        """What is queued meanwhile goes out to these host blocks, behind the steps of a mark."""
        with self.outward(after):
            yield
        self._stores.append((ticket, self._out.record_event(), host_ids))

    @contextlib.contextmanager
    def loading(self, ticket: int | None, after: torch.cuda.Event, host_ids: frozenset[int]) -> Iterator[None]:
        """What is queued meanwhile on the lanes comes in from these host blocks, behind the steps of a mark. Without a
        ticket nobody is told when it is over."""
        written = [event for _, event, others in self._stores if not host_ids.isdisjoint(others)]
        for lane in self._lanes:
            for event in (after, *written):
                lane.wait_event(event)
        yield
        first, *others = self._lanes
        for lane in others:
            first.wait_stream(lane)
        self._loads.append((ticket, first.record_event()))

    def lane(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Queue on one of the lanes."""
        return torch.cuda.stream(self._lanes[number])

    def follow(self, number: int, other: int) -> None:
        """What is queued on a lane from now on runs behind what another has so far."""
        self._lanes[number].wait_stream(self._lanes[other])

    def hold_steps_for_loads(self) -> None:
        """Steps submitted from now on run behind all loads so far. The host does not wait."""
        if self._loads:
            torch.cuda.current_stream(self._device).wait_event(self._loads[-1][1])

    def hold_steps_for_stores(self) -> None:
        if self._stores:
            torch.cuda.current_stream(self._device).wait_event(self._stores[-1][1])

    def wait_for_one(self) -> None:
        """Wait until the oldest load is over; where there is none, the oldest store."""
        if oldest := [events[0][1] for events in (self._loads, self._stores) if events]:
            oldest[0].synchronize()

    def take_finished(self) -> list[int]:
        """Tickets of moves that are over, each told once."""
        finished = []
        for moves in (self._loads, self._stores):
            while moves and moves[0][1].query():  # type: ignore[no-untyped-call]
                finished.append(moves.popleft()[0])
        return [ticket for ticket in finished if ticket is not None]


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
