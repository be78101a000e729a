"""A sequence's block tables, one for each KV group, and what a growth changed in them.

A KV group is a set of layers that keep the same positions: all of them, or those of a sliding window. A block holds
`block_size` tokens of one group's layers. Most models have one group, and their sequences one table.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from quire.kv.hashing import BlockHash

NEVER = sys.maxsize

# By group: the index of the first block that the table has, and the blocks from there on.
TableSlices = list[tuple[int, list[int]]]


@dataclass(slots=True, frozen=True)
class Allocation:
    """What `grow()` changed in a sequence's tables. Read it only: the empty one is shared (`UNCHANGED`)."""

    appended: list[tuple[int, list[int]]] = field(default_factory=list)  # (group, blocks)
    remapped: list[tuple[int, int, int]] = field(default_factory=list)  # (group, index in its table, its own block now)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (from, to) blocks whose bytes must be copied first


UNCHANGED = Allocation()


def first_seen_block(position: int, window: int, block_size: int) -> int:
    """The index of the first block that the token at a position sees through a window."""
    return max(0, position - window + 1) // block_size


@dataclass(slots=True, eq=False)
class GroupTable:
    """The blocks of one sequence in one group: token p lives in block_ids[p // block_size - first].

    Blocks before `first` were given back: no token that is still to come sees them.
    """

    window: int | None  # a token sees itself and the window - 1 before it; None: everything
    first: int
    block_ids: list[int]

    @property
    def end(self) -> int:
        """The index after the last block's."""
        return self.first + len(self.block_ids)

    def first_seen(self, position: int, block_size: int) -> int:
        """The index of the first block that the token at a position, or a later one, sees."""
        if self.window is None:
            return self.first
        return max(self.first, first_seen_block(position, self.window, block_size))


def capacity_of(groups: list[GroupTable], block_size: int) -> int:
    """Tokens that all groups have room for. A model without KV has no groups, and its tables room for everything."""
    return min(group.end for group in groups) * block_size if groups else NEVER


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one running sequence.

    Layout:  | committed: full, hashed | computed or to be computed | drafts |
             0            next_commit - block_size        num_tokens   capacity

    Two numbers make `grow()` and `commit()` cheap in their common case:
      writable_from  every block at or after this position is in no other table and has no hash: it may be written
      next_commit    the number of computed tokens at which the next block is full (NEVER without a prefix cache)
    """

    seq_id: int
    root: BlockHash  # parent of the first block's hash
    groups: list[GroupTable]
    num_tokens: int  # that have or will have a slot, drafts not counted
    capacity: int  # tokens that every group has room for
    writable_from: int
    next_commit: int
    hashes: list[BlockHash] = field(default_factory=list)  # of the committed blocks

    @property
    def block_ids(self) -> list[int]:
        """All of them, group after group."""
        if len(self.groups) == 1:
            return self.groups[0].block_ids
        return [block_id for group in self.groups for block_id in group.block_ids]

    def index_of(self, block_id: int) -> int:
        """Which part of the sequence a block holds: tokens index * block_size and on."""
        for group in self.groups:
            if block_id in group.block_ids:
                return group.first + group.block_ids.index(block_id)
        raise ValueError(f"sequence {self.seq_id} does not hold block {block_id}")
