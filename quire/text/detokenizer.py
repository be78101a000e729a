"""Tokens to text as they come: whole characters only, and never the same work twice."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer

_MAX_UNFINISHED_BYTES = 3  # of a UTF-8 character, which has at most four


class Detokenizer:
    """Turns one sequence's output tokens into text, piece by piece.

    The joined pieces are exactly what decoding prompt and output at once would add to the prompt's text. A piece ends
    where a character ends: bytes that may still become one are held back. A character that the prompt left unfinished
    counts as output.
    """

    __slots__ = ("_num_spaces_to_strip", "_pieces", "_segment_ids", "_table", "_tokenizer", "_unfinished")

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
        self._pieces: list[str] = []
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
        if piece:
            self._pieces.append(piece)
        return piece

    def flush(self) -> str:
        """What is left at the end: a replacement character if the last bytes never became a character."""
        piece, _ = utf_8_decode(self._unfinished, "replace", True)
        self._unfinished = b""
        if piece:
            self._pieces.append(piece)
        return piece

    @property
    def text(self) -> str:
        """All pieces so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def _push_segments(self, token_ids: Sequence[int]) -> str:
        pieces: list[str] = []
        for token_id in token_ids:
            if token_id in self._segment_ids:
                special = self._table[token_id].decode("utf-8", "replace").removeprefix(" ")
                pieces += self.flush(), special
                self._pieces.append(special)
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
        """Is the output the start of the text, and did the prompt leave a character unfinished?"""
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
