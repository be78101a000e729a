"""Requests that wait for an adapter, and others that do not."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from quire.engine import adapters as module
from quire.engine.adapters import AdapterGate
from quire.request import Request


class FakeSlots:
    """Adapters that are read when the test says so."""

    def __init__(self, num_slots: int, max_kept: int) -> None:
        self.max_kept = max_kept
        self.resident: list[str] = []
        self.kept: set[str] = set()
        self.reading: dict[str, Future[Any]] = {}
        self._num_slots = num_slots

    def is_at_hand(self, key: str) -> bool:
        return key in self.resident or key in self.kept

    def place(self, key: str, in_use: set[str]) -> bool:
        if key not in self.resident:
            if len(self.resident) == self._num_slots:
                free = next((one for one in self.resident if one not in in_use), None)
                if free is None:
                    return False
                self.resident.remove(free)
            self.resident.append(key)
        return True

    def start_reading_again(self, key: str, path: str) -> Future[Any]:
        assert path == f"/{key}"
        self.reading[key] = Future()
        return self.reading[key]

    def end(self, key: str, error: Exception | None = None) -> None:
        future = self.reading.pop(key)
        if error is not None:
            future.set_exception(error)
        else:
            self.kept.add(key)
            future.set_result(None)


def request(name: str, key: str) -> Request:
    where = {"adapter": key, "adapter_path": f"/{key}"}
    return Request(request_id=name, prompt_token_ids=[1], max_tokens=1, end_token_ids=frozenset(), **where)


def ids(ready: list[tuple[Request, str | None]]) -> list[str]:
    return [one.request_id for one, _ in ready]


def test_requests_wait_for_reading_and_for_a_slot() -> None:
    slots = FakeSlots(num_slots=1, max_kept=2)
    gate = AdapterGate(slots)  # type: ignore[arg-type]
    first, second, third = request("1", "a"), request("2", "a"), request("3", "b")
    assert not gate.enter(first) and not gate.enter(second) and not gate.enter(third)
    assert len(gate) == 3 and "2" in gate and not gate.take_ready()
    assert set(slots.reading) == {"a", "b"}
    slots.end("b")
    assert ids(gate.take_ready()) == ["3"]  # nobody waits behind one that is still being read
    slots.end("a")
    assert not gate.take_ready()  # b has the only slot
    assert gate.enter(request("4", "b"))
    third.is_finished = True
    assert not gate.take_ready() and gate.leave("2") is second
    gate._entered["b"][-1].is_finished = True
    assert ids(gate.take_ready()) == ["1"] and slots.resident == ["a"] and not gate


def test_one_that_cannot_be_read_fails_alone() -> None:
    slots = FakeSlots(num_slots=2, max_kept=2)
    gate = AdapterGate(slots)  # type: ignore[arg-type]
    gate.enter(request("1", "a"))
    gate.enter(request("2", "b"))
    gate.take_ready()
    slots.end("a", ValueError("gone"))
    slots.end("b")
    assert [(one.request_id, failure) for one, failure in gate.take_ready()] == [("1", "gone"), ("2", None)]


def test_no_more_are_read_than_are_kept() -> None:
    slots = FakeSlots(num_slots=1, max_kept=2)
    gate = AdapterGate(slots)  # type: ignore[arg-type]
    for number, key in enumerate("abc"):
        gate.enter(request(str(number), key))
    gate.take_ready()
    assert set(slots.reading) == {"a", "b"}


def test_who_waits_for_long_gets_the_slot_of_one_that_would_never_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s[0])
    slots = FakeSlots(num_slots=1, max_kept=2)
    slots.kept = {"a", "b"}
    gate = AdapterGate(slots)  # type: ignore[arg-type]
    busy = request("1", "a")
    assert gate.enter(busy) and not gate.enter(request("2", "b"))
    assert gate.enter(request("3", "a")) and not gate.take_ready()
    now_s[0] = 2.0
    assert not gate.take_ready()
    assert not gate.enter(request("4", "a"))  # no new ones, until b had its turn
    for one in gate._entered["a"]:
        one.is_finished = True
    assert ids(gate.take_ready()) == ["2"]
    gate._entered["b"][0].is_finished = True
    assert ids(gate.take_ready()) == ["4"]
