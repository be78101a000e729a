"""Hearing of a client that closes its connection without a task that waits for it: every request would have one."""

from __future__ import annotations

from collections.abc import Callable

HANG_UP = "hang_up"  # a key of an ASGI scope's "state", where our own HTTP server runs the application


class HangUp:
    """Whether a connection's client is gone, and who wants to hear of it."""

    __slots__ = ("_callbacks", "_has_happened")

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], None]] = []
        self._has_happened = False

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` once when the client hangs up, now if it has. Returns a function that ends the watch."""
        if self._has_happened:
            callback()
        else:
            self._callbacks.append(callback)

        def end() -> None:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

        return end

    def happened(self) -> None:
        self._has_happened = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
