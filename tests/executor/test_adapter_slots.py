"""What is kept on the host and what is in a slot, and what a store is told of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from quire.errors import WeightsError
from quire.executor.adapter_slots import AdapterInfo, AdapterSlots


class FakeStore:
    """Adapters whose digests are their paths."""

    def __init__(self) -> None:
        self.kept: set[str] = set()
        self.places: dict[int, str] = {}

    def read(self, name: str, path: str) -> AdapterInfo:
        if path == "bad":
            raise WeightsError("bad")
        self.kept.add(f"{name}@{path}")
        return AdapterInfo(f"{name}@{path}", name, path, 4)

    def keep(self, keys: Sequence[str]) -> None:
        assert self.kept >= set(keys)
        self.kept = set(keys)

    def place(self, key: str, slot: int) -> None:
        assert key in self.kept
        self.places[slot] = key


def test_the_least_recently_used_leave_the_host_and_the_slots() -> None:
    store = FakeStore()
    slots = AdapterSlots(store, num_slots=2, max_kept=2)
    for name in "ab":
        key = slots.read(name, "1").key
        assert slots.is_at_hand(key) and slots.place(key, set())
    assert store.places == {0: "a@1", 1: "b@1"} and slots.kept == ["a@1", "b@1"]
    slots.read("c", "1")
    assert slots.kept == ["b@1", "c@1"] and store.kept == {"b@1", "c@1"}
    assert slots.is_at_hand("a@1") and slots.place("a@1", set())  # it is in its slot
    assert not slots.place("c@1", {"a@1", "b@1"}) and slots.resident == ["b@1", "a@1"]
    assert slots.place("c@1", {"a@1"}) and store.places == {0: "a@1", 1: "c@1"}
    slots.read("d", "1")
    assert not slots.is_at_hand("b@1")
    assert not slots.place("b@1", set()) and slots.resident == ["a@1", "c@1"]  # dropped since it was looked for
    assert slots.start_reading_again("b@1", "1").result().key == "b@1" and slots.is_at_hand("b@1")


def test_one_that_cannot_be_read_changes_nothing() -> None:
    store = FakeStore()
    slots = AdapterSlots(store, num_slots=1, max_kept=1)
    slots.read("a", "1")
    store.kept.add("half@read")
    with pytest.raises(WeightsError, match="bad"):
        slots.read("b", "bad")
    assert slots.kept == ["a@1"] and store.kept == {"a@1"}
    with pytest.raises(WeightsError, match="'a' has changed since it was loaded"):
        slots.start_reading_again("a@0", "1").result()
