"""Rows of the executor's persistent batch, handed out and taken back."""

from __future__ import annotations

import heapq


class RowPool:
    """Rows 0..num_rows-1. The lowest free row goes out first, which keeps the executor's batch dense.

    A row that an executor has seen must be named in a plan's `released` before it is given out again: `take_back`
    notes it, and the plan being made takes the notes with `take_released`. As an executor applies `released` first, the
    row may be given out again in that same plan. Trimmed tables are noted likewise.
    """

    def __init__(self, num_rows: int) -> None:
        self._free = list(range(num_rows))
        self._released: list[int] = []
        self._trimmed: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        assert count <= len(self._free)
        return [heapq.heappop(self._free) for _ in range(count)]

    def take_back(self, row: int) -> None:
        self._released.append(row)
        self._trimmed.pop(row, None)
        heapq.heappush(self._free, row)

    def take_back_unused(self, rows: list[int]) -> None:
        """Rows that were only reserved: the executor never heard of them."""
        for row in rows:
            heapq.heappush(self._free, row)

    def note_trimmed(self, row: int, num_blocks: int) -> None:
        self._trimmed[row] = num_blocks

    def take_released(self) -> list[int]:
        released, self._released = self._released, []
        return released

    def take_trimmed(self) -> list[tuple[int, int]]:
        trimmed, self._trimmed = self._trimmed, {}
        return list(trimmed.items())
