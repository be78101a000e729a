"""Coroutines in virtual time: nobody sleeps, the clock jumps to whatever is due next."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class _Jumps(selectors.SelectSelector):
    """Where a loop would wait for sockets, time passes at once. There are no sockets in virtual time."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "every coroutine waits, and nothing is due"
        self.now_s += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        return self._jumps.now_s


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """Like asyncio.run, from time 0 and in no time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
