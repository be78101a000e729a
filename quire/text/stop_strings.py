"""Stop strings in streamed text: the first one to complete ends it, and no part of it is shown before that is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    text: str  # what may be shown now
    stop: str | None  # the stop string that completed, if one did; what follows it is dropped


class StopStrings:
    """Looks for stop strings across any split of the text.

    The match that completes first wins, whatever the order of `stops`; of two that complete on the same character the
    longer wins. Invariant: between pushes `_tail` is the longest end of the text that begins some stop string. It is
    held back, unless the stop string is to be part of the output: then all of it may be shown either way.
    """

    __slots__ = ("_include_in_output", "_is_stopped", "_stops", "_tail")

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        assert not isinstance(stops, str) and all(stops), "stop strings are a list of non-empty strings"
        self._stops = tuple(dict.fromkeys(stops))
        self._include_in_output = include_in_output
        self._tail = ""
        self._is_stopped = False

    def push(self, new_text: str, may_stop: bool = True) -> StopMatch:
        """Takes the next text. With `may_stop` false it, and all before it, can be no part of a stop string."""
        assert not self._is_stopped, "text after the stop"
        if not may_stop:
            return StopMatch(self.flush() + new_text, None)
        if not new_text:
            return StopMatch("", None)
        num_shown = len(self._tail) if self._include_in_output else 0
        text = self._tail + new_text
        found = self._first_to_complete(text)
        if found is not None:
            start, stop = found
            self._is_stopped = True
            self._tail = ""
            return StopMatch(text[num_shown : start + len(stop) if self._include_in_output else start], stop)
        num_certain = self._start_of_tail(text)
        self._tail = text[num_certain:]
        return StopMatch(new_text if self._include_in_output else text[:num_certain], None)

    def flush(self) -> str:
        """The text held back, once it is known that no more will come."""
        held = "" if self._include_in_output else self._tail
        self._tail = ""
        return held

    def _first_to_complete(self, text: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            # A match that would end later than the best one cannot win, so the search ends there.
            start = text.find(stop) if best is None else text.find(stop, 0, best[0])
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else best[1:]

    def _start_of_tail(self, text: str) -> int:
        start_of_tail = len(text)
        for stop in self._stops:
            first = stop[0]
            start = text.find(first, max(0, len(text) - len(stop) + 1), start_of_tail)
            while start >= 0:
                if stop.startswith(text[start:]):
                    start_of_tail = start
                    break
                start = text.find(first, start + 1, start_of_tail)
        return start_of_tail
