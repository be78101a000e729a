"""Moves that are over, as threads tell of them, until the engine's loop takes them."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

_WAIT_S = 0.005  # with nothing to run, how long to wait for a move before looking whether a request has come


class CollectedMoves(ABC):
    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards what follows, and what a subclass says
        self._finished: list[tuple[int, list[int]]] = []

    @abstractmethod
    def _has_moves(self) -> bool:
        """Whether any are under way. Called with the lock held."""

    def take_finished(self) -> list[tuple[int, list[int]]]:
        """(ticket, places of what did not come) of moves that are over, each told once."""
        with self._changed:
            finished, self._finished = self._finished, []
        return finished

    def wait_a_moment(self) -> None:
        """Wait until a move is over, where there is any, but not for long."""
        with self._changed:
            if self._has_moves():
                self._changed.wait_for(lambda: bool(self._finished), _WAIT_S)
