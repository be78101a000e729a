"""What serves a step whose own shape has no graph yet. While one is captured everybody waits, so a shape that is only
passed through is not worth it: a captured one that is a little larger does. Until its steps have cost as much as the
capture does: whatever comes then, at most twice the least possible is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

# In rows of padding, each of which takes a GPU some 10 us in a step of a hundred or more.
CAPTURE_COST = 2048
COST_WITHOUT_GRAPH = 128  # of launching a step one kernel at a time
COST_WITHOUT_SHARING = 512  # of reading a common prefix for each sequence again

Shape = TypeVar("Shape", bound=Hashable)


class StandIns(Generic[Shape]):
    """Adds up what it costs that a shape has no graph."""

    def __init__(
        self,
        holds: Callable[[Shape, Shape], bool],
        size: Callable[[Shape], int],
        cost: Callable[[Shape], int] = lambda shape: 0,
    ) -> None:
        self._holds = holds  # whether a step of the second fits into the first
        self._size = size
        self._cost = cost  # of any other shape in place of this one, beside padding
        self._costs: Counter[Shape] = Counter()

    def pays(self, shape: Shape, stand_in: Shape | None) -> bool:
        """For each step of a shape that is not captured, with what serves it. True: they have cost as much as a capture
        does."""
        padding = COST_WITHOUT_GRAPH if stand_in is None else self._size(stand_in) - self._size(shape)
        self._costs[shape] += padding + self._cost(shape)
        return self._costs[shape] >= CAPTURE_COST

    def find(self, shape: Shape, captured: Iterable[Shape]) -> Shape | None:
        """The smallest captured shape that the step fits into."""
        return min((other for other in captured if self._holds(other, shape)), key=self._size, default=None)
