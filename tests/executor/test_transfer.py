"""Streams beside the one that computes: what waits for what. The streams are stand-ins that remember it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from quire.executor import transfer
from quire.executor.transfer import Transfers

DEVICE = torch.device("cpu")


class FakeStream:
    """Work that was queued, as names: an event stands for all that is queued before it, there and on others."""

    current: FakeStream

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.behind: set[str] = set()  # what has run when this stream has come so far

    def queue(self, name: str) -> None:
        self.behind.add(name)

    def record_event(self) -> FakeEvent:
        return FakeEvent(frozenset(self.behind))

    def wait_event(self, event: FakeEvent) -> None:
        self.behind |= event.behind

    def wait_stream(self, other: FakeStream) -> None:
        self.behind |= other.behind


class FakeEvent:
    def __init__(self, behind: frozenset[str]) -> None:
        self.behind = behind
        self.is_over = False

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self.is_over = True


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[FakeStream]:
    """The one that computes, then those that the transfers make."""
    made = [FakeStream()]
    FakeStream.current = made[0]

    def new_stream(device: torch.device) -> Any:
        made.append(FakeStream())
        return made[-1]

    @contextlib.contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        before, FakeStream.current = FakeStream.current, stream
        yield
        FakeStream.current = before

    monkeypatch.setattr(transfer, "_new_stream", new_stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream.current)
    return made


def load(transfers: Transfers, ticket: int | None, hosts: set[int]) -> set[str]:
    """Queue a load on both lanes; returns what it is behind."""
    with transfers.loading(ticket, transfers.mark(), frozenset(hosts)):
        behind = []
        for lane in range(transfers.NUM_LANES):
            with transfers.lane(lane):
                behind.append(set(FakeStream.current.behind))
                FakeStream.current.queue(f"load {ticket}, lane {lane}")
    assert behind[0] == behind[1] or ticket != 1  # lanes wait for the same; their own earlier work aside
    return set.intersection(*behind)


def store(transfers: Transfers, ticket: int, hosts: set[int]) -> None:
    with transfers.storing(ticket, transfers.mark(), frozenset(hosts)):
        FakeStream.current.queue(f"store {ticket}")


def test_moves_are_behind_the_steps_before_them_and_steps_behind_what_they_are_held_for(
    streams: list[FakeStream],
) -> None:
    transfers, computing = Transfers(DEVICE), streams[0]
    computing.queue("step 1")
    assert load(transfers, 1, {5}) == {"step 1"}
    store(transfers, 2, {6})
    assert computing.behind == {"step 1"}
    transfers.hold_steps_for_loads()
    assert computing.behind == {"step 1", "load 1, lane 0", "load 1, lane 1"}
    transfers.hold_steps_for_stores()
    assert "store 2" in computing.behind


def test_a_mark_is_of_the_steps_at_its_time(streams: list[FakeStream]) -> None:
    transfers = Transfers(DEVICE)
    streams[0].queue("step 1")
    mark = transfers.mark()
    streams[0].queue("step 2")
    with transfers.outward(mark):
        assert FakeStream.current.behind == {"step 1"}


def test_a_load_waits_for_the_store_of_its_own_blocks_alone(streams: list[FakeStream]) -> None:
    transfers = Transfers(DEVICE)
    store(transfers, 1, {5, 6})
    assert load(transfers, 2, {7}) == set()
    assert load(transfers, 3, {8, 6}) >= {"store 1"}


def test_steps_are_held_for_a_load_without_a_ticket_and_nobody_is_told_of_it(streams: list[FakeStream]) -> None:
    transfers = Transfers(DEVICE)
    load(transfers, None, {5})
    transfers.hold_steps_for_loads()
    assert streams[0].behind == {"load None, lane 0", "load None, lane 1"}
    load(transfers, 2, {6})
    transfers.wait_for_one()
    assert transfers.take_finished() == []
    transfers.wait_for_one()
    assert transfers.take_finished() == [2]


def test_a_lane_follows_what_another_has_so_far(streams: list[FakeStream]) -> None:
    transfers = Transfers(DEVICE)
    with transfers.lane(0):
        FakeStream.current.queue("rows")
    transfers.follow(1, 0)
    with transfers.lane(0):
        FakeStream.current.queue("piece")
    with transfers.lane(1):
        assert FakeStream.current.behind == {"rows"}


def test_each_direction_tells_what_is_over_in_its_own_order(streams: list[FakeStream]) -> None:
    transfers = Transfers(DEVICE)
    store(transfers, 1, {5})
    load(transfers, 2, {6})
    load(transfers, 3, {7})
    assert transfers.take_finished() == []
    transfers.wait_for_one()
    assert transfers.take_finished() == [2]
    transfers.wait_for_one()
    transfers.wait_for_one()
    assert transfers.take_finished() == [3]
    transfers.wait_for_one()
    assert transfers.take_finished() == [1]
    transfers.wait_for_one()
    transfers.hold_steps_for_loads()
    assert streams[0].behind == set() and transfers.take_finished() == []
