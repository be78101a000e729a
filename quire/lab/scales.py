"""Axes: where a value stands in the picture, and which values are written beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Scale:
    """Values from `low` to `high` laid out from pixel `start` to pixel `end`, evenly or by their logarithm."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = math.log(max(value, self.low * 1e-3)), math.log(low), math.log(high)
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self, wanted: int = 5) -> list[float]:
        return log_ticks(self.low, self.high) if self.is_log else linear_ticks(self.low, self.high, wanted)


def linear_scale(values: Iterable[float], start: float, end: float, *, from_zero: bool, wanted: int = 5) -> Scale:
    """Its ends are ticks, so that nothing sticks out of the grid."""
    found = list(values)
    low, high = min(found, default=0.0), max(found, default=1.0)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        low, high = (0.0, 1.0) if low == 0 else (min(low, 0.0), max(low, 0.0))
    step = _nice_step(high - low, wanted)
    return Scale(math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step, start, end)


def log_scale(values: Iterable[float], start: float, end: float, *, tight: bool) -> Scale:
    """`tight` ends at the values themselves, a little beyond them: for x. Else at 1, 2, 5 of a power of ten."""
    found = [value for value in values if value > 0]
    low, high = min(found, default=1.0), max(found, default=10.0)
    if low == high:
        low, high = low / 2, high * 2
    if tight:
        margin = (high / low) ** 0.03
        return Scale(low / margin, high * margin, start, end, is_log=True)
    return Scale(_round_log(low, up=False), _round_log(high, up=True), start, end, is_log=True)


def linear_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    step = _nice_step(high - low, wanted)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 of every power of ten, or the powers alone where there are many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 5), (1, 3), (1,)):
        found = [d * 10.0**p for p in powers for d in digits if low * 0.999 <= d * 10.0**p <= high * 1.001]
        if len(found) <= 9:
            return found
    return found[:: math.ceil(len(found) / 9)]


def _nice_step(span: float, wanted: int) -> float:
    rough = span / max(wanted, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    return next(digit * power for digit in (1, 2, 2.5, 5, 10) if rough <= digit * power * (1 + 1e-9))


def _round_log(value: float, *, up: bool) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    digits = (1, 2, 5, 10)
    if up:
        return next(d * power for d in digits if value <= d * power * (1 + 1e-9))
    return next(d * power for d in reversed(digits) if d * power <= value * (1 + 1e-9))
