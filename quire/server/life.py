"""ServerLife: where the server stands between start and end, and what is still under way.

    starting ──ready()──▶ serving ──begin_drain()──▶ draining ──▶ exit 0
        │                    │                          │
        └────────────────────┴───────── died() ─────────┴──▶ dead ──▶ exit 1

Everything here belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from quire.server.errors import ApiError, UnavailableError


class LifeState(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    DEAD = "dead"


REASONS = {
    LifeState.STARTING: "the engine is loading the model",
    LifeState.SERVING: "",
    LifeState.DRAINING: "the server is shutting down: running requests finish, new ones are not taken",
    LifeState.DEAD: "the engine has stopped, and the server is about to exit",
}


def stopped() -> UnavailableError:
    """The error of a request that the server no longer waits for."""
    return UnavailableError("the server was stopped before this request finished: send it again", "stopped")


def not_serving(state: LifeState) -> UnavailableError:
    return UnavailableError(REASONS[state], state.value)


class ServerLife:
    """State, the number of requests under way, and a way to end those that will not end by themselves."""

    __slots__ = ("_idle", "_on_cut", "death_reason", "num_in_flight", "state")

    def __init__(self) -> None:
        self.state = LifeState.STARTING
        self.death_reason = ""  # for the log; never for a reply
        self.num_in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._on_cut: set[Callable[[ApiError], None]] = set()

    def ready(self) -> None:
        if self.state is LifeState.STARTING:
            self.state = LifeState.SERVING

    def begin_drain(self) -> None:
        if self.state is not LifeState.DEAD:
            self.state = LifeState.DRAINING

    def died(self, reason: str) -> None:
        self.state = LifeState.DEAD
        self.death_reason = reason

    @contextmanager
    def request(self) -> Iterator[None]:
        """Counts one request while it is under way."""
        self.num_in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_in_flight -= 1
            if not self.num_in_flight:
                self._idle.set()

    async def idle(self, timeout_s: float) -> bool:
        """Wait until nothing is under way. False: the time is over and something still is."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    @contextmanager
    def ends_with(self, on_cut: Callable[[ApiError], None]) -> Iterator[None]:
        """While this lasts, `cut` calls on_cut."""
        self._on_cut.add(on_cut)
        try:
            yield
        finally:
            self._on_cut.discard(on_cut)

    def cut(self, error: ApiError) -> int:
        """End every stream that still runs with this error; returns how many."""
        streams = list(self._on_cut)
        for on_cut in streams:
            on_cut(error)
        return len(streams)
