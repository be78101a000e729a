"""The device's blocks and their changes of state.

allocate           FREE, CACHED (evicted first)  ->  IN_USE
acquire            CACHED, IN_TRANSIT            ->  IN_USE, or one more user
release            IN_USE  ->  one user fewer; the last: FREE, CACHED, or IN_TRANSIT while its bytes move
transfer_started   CACHED                        ->  IN_TRANSIT; IN_USE and IN_TRANSIT stay what they are
transfer_finished  IN_TRANSIT                    ->  FREE, CACHED
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.kv.blocks import Block, BlockState, FreeQueue
from quire.kv.prefix_cache import PrefixCache


class BlockPool:
    """Every device block, the queue of those that may be handed out, and the counts.

    Invariant, proved by `check()`: the queue holds exactly the blocks that are free or cached, and not pinned.
    """

    __slots__ = (
        "blocks",
        "cache",
        "min_free_blocks",
        "num_allocated_blocks",
        "num_cached_blocks",
        "num_freed_blocks",
        "num_in_transit_blocks",
        "queue",
    )

    def __init__(self, num_blocks: int, cache: PrefixCache) -> None:
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.queue = FreeQueue(self.blocks)
        self.cache = cache
        self.num_cached_blocks = 0
        self.num_in_transit_blocks = 0
        # Totals of blocks that came into use and that left it: their difference is what is in use now.
        self.num_allocated_blocks = 0
        self.num_freed_blocks = 0
        self.min_free_blocks = num_blocks  # the fewest that were ever left

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out: free ones, and cached ones that are not pinned."""
        return self.queue.num_blocks

    @property
    def num_used_blocks(self) -> int:
        return self.num_allocated_blocks - self.num_freed_blocks

    def allocate(self, num_blocks: int) -> list[int]:
        """Ids of blocks for one new user each. The caller has made sure that there are enough."""
        queue = self.queue
        block_ids = []
        for block in queue.take(num_blocks):
            if block.block_hash is not None:
                self.cache.evict(block)
                self.num_cached_blocks -= 1
            block.ref_count = 1
            block_ids.append(block.block_id)
        self.num_allocated_blocks += num_blocks
        if queue.num_blocks < self.min_free_blocks:
            self.min_free_blocks = queue.num_blocks
        return block_ids

    def acquire(self, block: Block) -> None:
        """Add a user to a block that is in use, cached, or in transit: one that goes out is only read, and one that
        comes in is not read before it is there."""
        if not block.ref_count:
            if block.num_transfers:
                self.num_in_transit_blocks -= 1
            else:
                self._take_cached(block)
            self.num_allocated_blocks += 1
        block.ref_count += 1

    def release(self, block: Block) -> None:
        """Take a user from a block."""
        assert block.ref_count, f"block {block.block_id} has no user to release it"
        block.ref_count -= 1
        if not block.ref_count:
            self.num_freed_blocks += 1
            if block.num_transfers:
                self.num_in_transit_blocks += 1
            else:
                self._rest(block)

    def release_table(self, block_ids: list[int]) -> None:
        """Take a user from each block, the tail first: see `FreeQueue`."""
        blocks = self.blocks
        for block_id in reversed(block_ids):
            self.release(blocks[block_id])

    def _take_cached(self, block: Block) -> None:
        assert block.block_hash is not None, f"block {block.block_id} holds nothing"
        if not block.num_pins:
            self.queue.remove(block)
            if self.queue.num_blocks < self.min_free_blocks:
                self.min_free_blocks = self.queue.num_blocks
        self.num_cached_blocks -= 1

    def transfer_started(self, block: Block) -> None:
        if block.is_idle:
            self._take_cached(block)
            self.num_in_transit_blocks += 1
        block.num_transfers += 1

    def transfer_finished(self, block: Block) -> None:
        assert block.num_transfers, f"block {block.block_id} has no transfer under way"
        block.num_transfers -= 1
        if block.is_idle:
            self.num_in_transit_blocks -= 1
            self._rest(block)

    def pin(self, newly_pinned: Iterable[Block]) -> None:
        """Keep blocks that the cache has just pinned from eviction."""
        for block in newly_pinned:
            if block.is_idle:
                self.queue.remove(block)
        if self.queue.num_blocks < self.min_free_blocks:
            self.min_free_blocks = self.queue.num_blocks

    def unpin(self, unpinned: Iterable[Block]) -> None:
        """Give blocks that no pin holds any more back to the queue, as if just used."""
        for block in unpinned:
            if block.is_idle:
                self.queue.push_back(block)

    def forget_idle(self, *, force: bool) -> None:
        """Make cached blocks free ones; pinned ones only when forced."""
        if force:
            self.unpin(self.cache.unpin_idle())
        for block in self.cache.idle_blocks():
            if not block.num_pins:
                self.cache.forget(block)
                self.num_cached_blocks -= 1

    def forget_cached(self, blocks: Iterable[Block | None]) -> None:
        """Make those of them free ones that nobody uses or pins."""
        for block in blocks:
            if block is not None and block in self.queue:
                self.cache.forget(block)
                self.num_cached_blocks -= 1
                self.queue.remove(block)
                self.queue.push_front(block)

    def _rest(self, block: Block) -> None:
        """Put an idle block where it waits: the queue's back if cached, else its front."""
        if block.block_hash is None:
            self.queue.push_front(block)
        else:
            self.num_cached_blocks += 1
            if not block.num_pins:
                self.queue.push_back(block)

    def check(self) -> None:
        self.queue.check()
        self.cache.check(self.blocks)
        states = dict.fromkeys(BlockState, 0)
        for block in self.blocks:
            state = block.state
            states[state] += 1
            may_be_handed_out = state in (BlockState.FREE, BlockState.CACHED) and not block.num_pins
            assert (block in self.queue) == may_be_handed_out, (
                f"block {block.block_id} is {state}, has {block.num_pins} pins and is "
                f"{'in' if block in self.queue else 'not in'} the free queue"
            )
        counted = {
            BlockState.IN_USE: self.num_used_blocks,
            BlockState.CACHED: self.num_cached_blocks,
            BlockState.IN_TRANSIT: self.num_in_transit_blocks,
        }
        for state, num_blocks in counted.items():
            assert num_blocks == states[state], f"{states[state]} blocks are {state}, counted {num_blocks}"
        assert self.min_free_blocks <= self.queue.num_blocks, "the free queue's minimum is above what it holds now"
