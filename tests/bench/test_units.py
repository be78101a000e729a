"""Numbers as words."""

from __future__ import annotations

import math

import pytest

from quire.bench import units as wording


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1234.5, "1,234"), (12.34, "12.3"), (0.0456, "0.0456"), (None, "–"), (math.nan, "–"), (-2.5, "-2.50")],
)
def test_number(value: float | None, text: str) -> None:
    assert wording.number(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.05, "0.05"), (200, "200"), (1500, "1,500"), (20000, "20k"), (2e6, "2M"), (3e9, "3G")]
)
def test_short(value: float, text: str) -> None:
    assert wording.short(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(200, "3 min 20 s"), (1.234, "1.23 s"), (0.0456, "45.6 ms"), (2e-5, "20.0 µs"), (None, "–")]
)
def test_duration(value: float | None, text: str) -> None:
    assert wording.duration(value) == text


def test_ratios() -> None:
    assert wording.times(2.34) == "2.3 times"
    assert wording.times(0.97) == "97 %"
    assert wording.times_the(2.34, "throughput") == "2.3 times the throughput"
    assert wording.times_the(0.97, "throughput") == "97 % of the throughput"
    assert (wording.change(1.12), wording.change(0.97), wording.change(1.001)) == ("12 % more", "3 % less", "the same")


def test_lists_and_counts() -> None:
    assert wording.listed(["a"]) == "a"
    assert wording.listed(["a", "b", "c"]) == "a, b and c"
    assert (wording.counted(1, "block"), wording.counted(2000, "block")) == ("1 block", "2,000 blocks")
    assert (wording.size(1536), wording.size(12), wording.size(None)) == ("1.50 KiB", "12 B", "–")
