"""Where a start-up's time goes. No torch: it measures how long that takes to import, too."""

from __future__ import annotations

import time


class Timeline:
    """Seconds between marks, by name: where the start-up went."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def mark(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = now - self._last
        self._last = now
