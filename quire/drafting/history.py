"""Where a run of tokens has stood before: hash chains over a text, as compressors of the LZ77 family have.

A token is entered once, when it comes, and nothing is ever scanned again. `native/drafting.c` does the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

_MIN_HEADS = 256
MAX_CANDIDATES, MAX_WALKED = 8, 32  # matches that one lookup compares, and places that it looks at; the latest first
END_OF_ANSWER = -1


class Match(NamedTuple):
    """The last `length` tokens of a line stood in `text` just before `position`."""

    text: Text
    position: int
    length: int
    is_unanimous: bool  # all the places that were compared go on with the same token


class Text:
    """Tokens that only grow in number, and their index.

    Invariant: for every end e in [gram, num_indexed], the chain that starts at _heads[hash(tokens[e - gram : e])] and
    goes on through _previous passes e. Others of the same hash may stand in it: whoever reads compares tokens.
    """

    __slots__ = ("_heads", "_previous", "gram", "num_indexed", "tokens")

    def __init__(self, gram: int) -> None:
        self.gram = gram
        self.tokens: list[int] = []
        self.num_indexed = 0  # ends up to here are in the chains
        self._previous = array("i")
        self._heads = array("i")

    def append(self, tokens: Sequence[int]) -> None:
        """Ends are entered when they have a token after them: what follows the last one nobody knows yet."""
        self.tokens.extend(tokens)
        last = len(self.tokens) - 1
        if last > self.num_indexed:
            if last > len(self._heads):
                num_heads = max(_MIN_HEADS, 1 << (last + last // 4 - 1).bit_length())
                self._heads = array("i", bytes(4 * num_heads))  # 0: no end, since an end has a gram before it
                self._previous = array("i")
            self._enter(len(self._previous) + 1, last)
            self.num_indexed = last

    def _enter(self, first: int, last: int) -> None:
        heads, previous, mask = self._heads, self._previous, len(self._heads) - 1
        for end in range(first, last + 1):
            if end < self.gram:
                previous.append(0)
                continue
            place = self._hash(self.tokens, end) & mask
            previous.append(heads[place])
            heads[place] = end

    def _hash(self, tokens: Sequence[int], end: int) -> int:
        value = 0
        for token in tokens[end - self.gram : end]:
            value = (value ^ token) * 0x9E3779B1 & 0xFFFFFFFF
        return value ^ value >> 15

    def find(self, context: list[int], depth: int) -> Match | None:
        """The longest run, of at most `depth` tokens, that ends `context` and stood here before; of equal ones the
        latest. None where not even a gram did."""
        gram, tokens, size = self.gram, self.tokens, len(context)
        if size < gram or not self._heads:
            return None
        end = self._heads[self._hash(context, size) & (len(self._heads) - 1)]
        best = best_length = 0
        num_found, following, is_unanimous = 0, 0, True
        for _ in range(MAX_WALKED):
            if not end or num_found == MAX_CANDIDATES:
                break
            length, most = 0, min(depth, end, size)
            while length < most and tokens[end - 1 - length] == context[-1 - length]:
                length += 1
            if length >= gram:
                following = following if num_found else tokens[end]
                num_found += 1
                is_unanimous &= tokens[end] == following
                if length > best_length:
                    best, best_length = end, length
            end = self._previous[end - 1]
        return Match(self, best, best_length, is_unanimous) if best else None
