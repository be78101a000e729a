"""What serves a step whose own shape has no graph yet. While one is captured everybody waits, so a shape that is only
passed through is not worth it: a captured one that is a little larger does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

USES_THAT_PAY = 16  # a capture takes about as long as launching so many steps one kernel at a time

Shape = TypeVar("Shape", bound=Hashable)


class StandIns(Generic[Shape]):
    """Counts how often each shape was missed."""

    def __init__(self, holds: Callable[[Shape, Shape], bool], size: Callable[[Shape], int]) -> None:
        self._holds = holds  # whether a step of the second fits into the first
        self._size = size
        self._misses: Counter[Shape] = Counter()

    def pays(self, shape: Shape) -> bool:
        """Counts a step whose shape is not captured. True: such steps have come often enough to capture it."""
        self._misses[shape] += 1
        return self._misses[shape] >= USES_THAT_PAY

    def find(self, shape: Shape, captured: Iterable[Shape]) -> Shape | None:
        """The smallest captured shape that the step fits into."""
        return min((other for other in captured if self._holds(other, shape)), key=self._size, default=None)
