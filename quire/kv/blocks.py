"""A block as a number with a life, and the queue of blocks that may be handed out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

BLOCK_SIZES = (4, 8, 16, 32, 64, 128)


class BlockState(StrEnum):
    """A block is exactly one of these. Pinned is a mark besides."""

    FREE = "free"  # nothing in it is known
    CACHED = "cached"  # its hash is known, no sequence uses it
    IN_USE = "in_use"  # in at least one block table
    IN_TRANSIT = "in_transit"  # no sequence uses it, but its bytes are still moving from or to the host


# Looking a member up on its enum costs more than the rest of `Block.state`, which a snapshot reads for every block.
_FREE, _CACHED, _IN_USE, _IN_TRANSIT = BlockState


@dataclass(slots=True, eq=False)
class Block:
    """One block of the device's KV memory. Only `BlockPool` and `PrefixCache` change it."""

    block_id: int
    ref_count: int = 0  # block tables that hold it
    num_pins: int = 0  # pinned prefixes that hold it
    num_transfers: int = 0  # transfers from or to the host that have not been reported done
    block_hash: bytes | None = None  # set while the prefix cache knows the block
    # Of a block with a hash, for people to look at: what it holds, where in its prefix, and what it was good for.
    parent_hash: bytes | None = field(default=None, repr=False)
    chain_index: int = 0  # it is the prefix's block number so-and-so
    packed_tokens: bytes = field(default=b"", repr=False)  # int32; lists of ints would take six times the memory
    num_hits: int = 0  # admissions that found it in the cache
    # Neighbours in the free queue; None when not in it.
    prev: Block | None = field(default=None, repr=False)
    next: Block | None = field(default=None, repr=False)

    @property
    def state(self) -> BlockState:
        if self.ref_count:
            return _IN_USE
        if self.num_transfers:
            return _IN_TRANSIT
        return _FREE if self.block_hash is None else _CACHED

    @property
    def is_last_user(self) -> bool:
        """Whether it can be handed out once its one user lets it go."""
        return self.ref_count == 1 and not self.num_transfers and not self.num_pins

    @property
    def is_idle(self) -> bool:
        """Nobody uses it and no bytes move: free or cached."""
        return not self.ref_count and not self.num_transfers


class FreeQueue:
    """Every block that may be handed out, in the order in which that happens: a doubly linked list through the blocks.

    Order: first blocks without a hash, then cached blocks from the least to the most recently used; of one sequence
    the tail stands before the head. Why: an unhashed block loses nothing when reused; among cached ones the oldest is
    the least likely to be hit again, and a prefix's head serves more futures than its tail.

    Who maintains it: `BlockPool`. It puts unhashed blocks at the front and cached ones at the back, and gives a
    sequence back tail first. A block leaves from the front when it is handed out, and from the middle when it is hit
    or pinned. Each of these is O(1), which is why this is no deque.
    """

    __slots__ = ("_ends", "num_blocks")

    def __init__(self, blocks: list[Block]) -> None:
        # One sentinel closes the list to a ring, so that no operation has a special case for either end.
        self._ends = Block(block_id=len(blocks))
        self._ends.prev = self._ends.next = self._ends
        self.num_blocks = 0
        for block in blocks:
            self.push_back(block)

    def __len__(self) -> int:
        return self.num_blocks

    def __iter__(self) -> Iterator[Block]:
        """From the next to be handed out to the last. For tests, `check()` and the rare sweep."""
        block = self._ends.next
        while block is not self._ends:
            assert block is not None, "the free queue is torn"
            following = block.next
            yield block
            block = following

    def __contains__(self, block: Block) -> bool:
        return block.next is not None

    def push_front(self, block: Block) -> None:
        self._insert_after(self._ends, block)

    def push_back(self, block: Block) -> None:
        last = self._ends.prev
        assert last is not None
        self._insert_after(last, block)

    def take(self, num_blocks: int) -> list[Block]:
        """The first so many, which leave the queue."""
        assert num_blocks <= self.num_blocks, f"{num_blocks} blocks asked, {self.num_blocks} free"
        block, taken = self._ends.next, []
        for _ in range(num_blocks):
            assert block is not None, "the free queue is torn"
            taken.append(block)
            following = block.next
            block.prev = block.next = None
            block = following
        assert block is not None, "the free queue is torn"
        self._ends.next, block.prev = block, self._ends
        self.num_blocks -= num_blocks
        return taken

    def remove(self, block: Block) -> None:
        before, after = block.prev, block.next
        assert before is not None and after is not None, f"block {block.block_id} is not in the free queue"
        before.next = after
        after.prev = before
        block.prev = block.next = None
        self.num_blocks -= 1

    def _insert_after(self, before: Block, block: Block) -> None:
        assert block.next is None, f"block {block.block_id} is in the free queue already"
        after = before.next
        assert after is not None
        before.next = after.prev = block
        block.prev = before
        block.next = after
        self.num_blocks += 1

    def check(self) -> None:
        """Both directions tell the same story, and unhashed blocks come before cached ones."""
        num_blocks = 0
        seen_cached = False
        before = self._ends
        for block in self:
            num_blocks += 1
            assert num_blocks <= self.num_blocks, f"the free queue says {self.num_blocks} blocks and holds more"
            assert block.prev is before, f"block {block.block_id}: prev does not match the queue's order"
            assert not (seen_cached and block.block_hash is None), (
                f"block {block.block_id} has no hash but stands behind a cached block"
            )
            seen_cached = seen_cached or block.block_hash is not None
            before = block
        assert self._ends.prev is before, "the free queue's end is not its last block"
        assert num_blocks == self.num_blocks, f"the free queue says {self.num_blocks} blocks and holds {num_blocks}"
