"""Tokens to text as they come: whole characters only, and never the same work twice. Stop strings end it."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer

_MAX_UNFINISHED_BYTES = 3  # a UTF-8 character has at most four


class Detokenizer:
    """Turns one sequence's output tokens into text, piece by piece.

    The joined pieces are exactly what decoding prompt and output at once would add to the prompt's text. A piece ends
    where a character ends: bytes that may still become one are held back. A character that the prompt left unfinished
    counts as output.
    """

    __slots__ = ("_num_spaces_to_strip", "_segment_ids", "_table", "_tokenizer", "_unfinished")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._table = tokenizer.token_bytes_table(skip_special_tokens=skip_special_tokens)
        # Without spaces between special tokens, they cut the text into segments that are decoded each by itself.
        segmented = not (skip_special_tokens or spaces_between_special_tokens)
        self._segment_ids = tokenizer.special_token_ids if segmented else frozenset[int]()
        self._unfinished = b""
        self._num_spaces_to_strip = tokenizer.num_spaces_stripped
        self._read_context(prompt_token_ids)

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next tokens; returns the text that they made certain, "" while a character is incomplete."""
        if self._segment_ids and not self._segment_ids.isdisjoint(token_ids):
            return self._push_segments(token_ids)
        table = self._table
        if len(token_ids) == 1:
            data = table[token_ids[0]]
        else:
            data = b"".join([table[token_id] for token_id in token_ids])
        if self._num_spaces_to_strip:
            data = self._strip(data)
        if self._unfinished:
            data = self._unfinished + data
        piece, num_bytes = utf_8_decode(data, "replace", False)
        self._unfinished = data[num_bytes:]
        return piece

    def flush(self) -> str:
        """End the text: returns a replacement character if the last bytes never became a character."""
        piece, _ = utf_8_decode(self._unfinished, "replace", True)
        self._unfinished = b""
        return piece

    def _push_segments(self, token_ids: Sequence[int]) -> str:
        pieces: list[str] = []
        for token_id in token_ids:
            if token_id in self._segment_ids:
                pieces += self.flush(), self._table[token_id].decode("utf-8", "replace").removeprefix(" ")
                self._num_spaces_to_strip = self._tokenizer.num_spaces_stripped
            else:
                pieces.append(self.push((token_id,)))
        return "".join(pieces)

    def _strip(self, data: bytes) -> bytes:
        while self._num_spaces_to_strip and data:
            if data[0] != 0x20:
                self._num_spaces_to_strip = 0
            else:
                self._num_spaces_to_strip -= 1
                data = data[1:]
        return data

    def _read_context(self, prompt_token_ids: Sequence[int]) -> None:
        """Find whether the output is the start of the text, and whether the prompt left a character unfinished."""
        context = b""
        for token_id in reversed(prompt_token_ids):
            if token_id in self._segment_ids:
                break
            context = self._table[token_id] + context
            if len(context) >= _MAX_UNFINISHED_BYTES:
                break
        _, num_bytes = utf_8_decode(context, "replace", False)
        self._unfinished = context[num_bytes:]
        self._strip(context)


# -- stop strings: the first one to complete ends the text, and no part of it is shown before that is known


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
