"""The block hashes of a prompt, as a replica's cache names them; those of a text where nobody knows its tokens; and
what a router remembers of texts whose tokens somebody told."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from quire.kv.hashing import HASH_BYTES, BlockHash, hash_blocks, root_hash

CHARS_PER_TOKEN = 4  # about, of English
_SHORT_PIECE = 16  # characters
_ENDS = [0]  # of pieces, as far as they were needed
_MAX_PIECES = 400_000  # of all remembered texts: about 100 MB
_TEXT_FIELDS = ("model", "prompt", "system", "instructions", "tools", "messages", "input", "cache_salt")


def prompt_hashes(
    token_ids: Sequence[int], block_size: int, salt: str | None = None, adapter: str | None = None
) -> list[BlockHash]:
    """The hashes of the full blocks that a request with these tokens could find cached: its last token always runs."""
    num_blocks = max(0, len(token_ids) - 1) // block_size
    return hash_blocks(root_hash(salt, adapter), token_ids[: num_blocks * block_size], block_size)


def text_of(body: Mapping[str, Any]) -> str:
    """What of a request's body a prompt is made of, in the order in which templates put it."""
    return "\n".join(json.dumps(body[name]) for name in _TEXT_FIELDS if body.get(name) is not None)


def text_pieces(text: str, scope: str = "") -> list[bytes]:
    """A chain of hashes over the text's beginnings up to each of `piece_ends`: equal beginnings have equal ones.
    `scope`: whatever else makes the same text another prompt, such as whose it is."""
    parent, start, pieces = blake2b(scope.encode("utf-8", "surrogatepass")).digest(), 0, []
    for end in piece_ends(len(text)):
        parent = blake2b(parent + text[start:end].encode("utf-8", "surrogatepass"), digest_size=HASH_BYTES).digest()
        pieces.append(parent)
        start = end
    return pieces


def piece_ends(length: int) -> list[int]:
    """Where the pieces of a text of so many characters end. They are short at first and grow with the distance from the
    beginning, to a sixty-fourth of it: so long texts have hundreds of pieces and not thousands."""
    while _ENDS[-1] < length:
        _ENDS.append(_ENDS[-1] + max(_SHORT_PIECE, 1 << _ENDS[-1].bit_length() >> 7))
    return _ENDS[1 : bisect_left(_ENDS, length)]


class KnownTexts:
    """Which blocks the beginnings of texts make, as far as a server has told it of texts that began alike.

    A server tells how many tokens a whole text has, not where each one stands, so a piece's blocks are reckoned as if
    all tokens were of one length; where two texts part sooner than that says, their hashes show it. A block too many or
    too few is no harm: it shifts an estimate by a block's time.
    """

    def __init__(self, max_pieces: int = _MAX_PIECES) -> None:
        self._max_pieces = max_pieces
        self._blocks: OrderedDict[bytes, tuple[Sequence[BlockHash], int]] = OrderedDict()  # by piece; how many of them
        self.tokens_per_char: float | None = None  # of the last text that was told

    def find(self, pieces: Sequence[bytes]) -> tuple[int, Sequence[BlockHash]]:
        """How many of the leading pieces are known, and the blocks that these make."""
        num_known, found = 0, None
        for piece in pieces:
            blocks = self._blocks.get(piece)
            if blocks is None:
                break
            self._blocks.move_to_end(piece)
            num_known, found = num_known + 1, blocks
        return num_known, () if found is None else found[0][: found[1]]

    def learn(
        self, pieces: Sequence[bytes], text: str, num_tokens: int, hashes: Sequence[BlockHash], size: int
    ) -> None:
        """What a server told of a text: its tokens, and the hashes of its blocks of `size` tokens."""
        self.tokens_per_char = tokens_per_char = num_tokens / max(1, len(text))
        for piece, end in zip(pieces, piece_ends(len(text)), strict=True):
            num_blocks = min(len(hashes), int(end * tokens_per_char) // size)
            if (before := self._blocks.get(piece)) is not None:
                pairs = zip(before[0][:num_blocks], hashes[:num_blocks], strict=False)
                parted = next((i for i, (old, new) in enumerate(pairs) if old != new), num_blocks)
                num_blocks = min(num_blocks, parted)
            self._blocks[piece] = hashes, num_blocks
            self._blocks.move_to_end(piece)
        while len(self._blocks) > self._max_pieces:
            self._blocks.popitem(last=False)
