"""A sequence's block table, and what a growth changed in it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from quire.kv.hashing import BlockHash

NEVER = sys.maxsize


@dataclass(slots=True, frozen=True)
class Allocation:
    """What `grow()` changed in a table. Read it only: the empty one is shared (`UNCHANGED`)."""

    new_block_ids: list[int] = field(default_factory=list)  # appended to the table
    remapped: list[tuple[int, int]] = field(default_factory=list)  # (index in the table, its own block now)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (from, to) blocks whose bytes must be copied first


UNCHANGED = Allocation()


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one running sequence: token p lives in block_ids[p // block_size].

    Layout:  | committed: full, hashed | computed or to be computed | lookahead |
             0            next_commit - block_size        num_tokens     capacity

    Two numbers make `grow()` and `commit()` cheap in their common case:
      writable_from  every block at or after this position is in no other table and has no hash: it may be written
      next_commit    the number of computed tokens at which the next block is full (NEVER without a prefix cache)
    """

    seq_id: int
    root: BlockHash  # parent of the first block's hash
    block_ids: list[int]
    num_tokens: int  # that have or will have a slot, lookahead not counted
    capacity: int  # len(block_ids) * block_size
    writable_from: int
    next_commit: int
    hashes: list[BlockHash] = field(default_factory=list)  # of the committed blocks
