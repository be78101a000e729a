from __future__ import annotations

from pathlib import Path

import pytest

from quire.errors import WeightsError
from quire.weights.checkpoint import TensorEntry, match_slots

FILE = Path("model.safetensors")


def entry(name, shape=(2,), file=FILE):
    return TensorEntry(name, name, shape, "F32", file, 0, 8)


def match(entries, slots, ignored=()):
    return match_slots(entries, slots, lambda name: name in ignored, source=FILE)


def test_keeps_the_order_and_drops_what_is_ignored(recorder):
    slots = recorder({"a": (2,), "b": (2,)}).slots
    entries = [entry("b"), entry("rotary"), entry("a")]
    assert [e.name for e in match(entries, slots, ignored={"rotary"})] == ["b", "a"]


def test_missing_unexpected_twice_misshapen(recorder):
    slots = recorder({"a": (2,), "b": (2,)}).slots
    with pytest.raises(WeightsError, match="1 tensor of the model missing: b"):
        match([entry("a")], slots)
    with pytest.raises(WeightsError, match="1 tensor that the model has no place for: c"):
        match([entry("a"), entry("b"), entry("c")], slots)
    with pytest.raises(WeightsError, match=r"tensor a stands in both model.safetensors and other.safetensors"):
        match([entry("a"), entry("a", file=Path("other.safetensors")), entry("b")], slots)
    with pytest.raises(WeightsError, match=r"tensor b has shape \[3\], the model's config asks for \[2\]"):
        match([entry("a"), entry("b", (3,))], slots)


def test_long_lists_are_cut(recorder):
    slots = recorder({f"t{i}": (2,) for i in range(9)}).slots
    with pytest.raises(WeightsError, match="9 tensors of the model missing: t0, t1, t2, t3, t4 and 4 more"):
        match([], slots)
