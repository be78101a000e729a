from __future__ import annotations

from pathlib import Path

from quire.weights.dummy import DummyCheckpoint


def randomized(recorder, names, seed):
    recorded = recorder(dict.fromkeys(names, (2,)))
    DummyCheckpoint(Path("x"), {}).load_into(recorded.slots, lambda name: False, seed=seed)
    return recorded.randomized


def test_each_slot_has_its_own_seed_whatever_the_order(recorder):
    first = randomized(recorder, ["a", "b"], 0)
    assert first == randomized(recorder, ["b", "a"], 0)
    assert first["a"] != first["b"]
    assert first != randomized(recorder, ["a", "b"], 1)
    assert {std for std, _ in first.values()} == {0.02}


def test_progress(recorder):
    recorded = recorder({"a": (1,), "b": (1,)})
    calls = []
    checkpoint = DummyCheckpoint(Path("x"), {})
    checkpoint.load_into(recorded.slots, lambda name: False, progress=lambda *args: calls.append(args))
    assert calls == [(1, 2), (2, 2)]
