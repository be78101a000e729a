"""What the prefix cache gained and lost, numbered, for readers in other processes that want to know what it holds."""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from dataclasses import dataclass

from quire.kv.hashing import HASH_BYTES, BlockHash
from quire.kv.prefix_cache import PrefixCache

_MAX_CHANGES = 1 << 16


@dataclass(slots=True, frozen=True)
class CacheChange:
    """Everything up to number `at`. `is_snapshot`: `filled` is all that is cached, whatever the reader knew before."""

    at: int
    filled: list[BlockHash]
    evicted: list[BlockHash]
    is_snapshot: bool


class CacheLog:
    """The last changes of one cache. A reader says up to which number it knows them, and gets the sum of the rest, or,
    where it begins or was away for too long, everything.

    Only the blocks of the first KV group are named: a model's other groups keep the same tokens, or a window of them.
    """

    def __init__(self, cache: PrefixCache, *, max_changes: int = _MAX_CHANGES) -> None:
        self.epoch = secrets.token_hex(8)  # numbers of another log, before a restart, mean nothing here
        self.at = 0
        self._cache = cache
        self._changes: deque[tuple[BlockHash, bool]] = deque(maxlen=max_changes)  # (hash, whether it was filled)
        cache.log = self._note

    def _note(self, block_hash: BlockHash, is_filled: bool) -> None:
        if len(block_hash) == HASH_BYTES:
            self.at += 1
            self._changes.append((block_hash, is_filled))

    def read(self, since: int | None) -> CacheChange:
        if since is None or not self.at - len(self._changes) <= since <= self.at:
            hashes = [block.block_hash for block in self._cache.blocks()]
            filled = [block_hash for block_hash in hashes if block_hash and len(block_hash) == HASH_BYTES]
            return CacheChange(self.at, filled, [], True)
        num_new = self.at - since
        # The last word on a block counts: one that was evicted and filled again is there.
        last = dict(itertools.islice(self._changes, len(self._changes) - num_new, None))
        filled = [block_hash for block_hash, is_filled in last.items() if is_filled]
        return CacheChange(
            self.at, filled, [block_hash for block_hash, is_filled in last.items() if not is_filled], False
        )
