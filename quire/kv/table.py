"""Sequences' block tables, one for each KV group: how they grow, are shared, and are given back.

A KV group is a set of layers that keep the same positions: all of them, or those of a sliding window. A block holds
`block_size` tokens of one group's layers. Most models have one group, and their sequences one table.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.kv.hashing import BlockHash, in_group
from quire.kv.pool import BlockPool
from quire.kv.prefix_cache import PrefixCache
from quire.kv.stats import Counters
from quire.plan import max_window_blocks

if TYPE_CHECKING:
    from quire.kv.tiers import Tiers
    from quire.kv.watch import KVWatch

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


class BlockTables:
    """The tables of running sequences over one pool of device blocks."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        windows: Sequence[int | None],
        max_span_tokens: int,
        enable_prefix_caching: bool,
        watermark: float,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.windows = tuple(windows)
        # Blocks that a windowed group's table has at most: those that a span sees, and those that it writes.
        self._max_blocks = [
            None if window is None else max_window_blocks(window, block_size, max_span_tokens)
            for window in self.windows
        ]
        self.num_watermark_blocks = int(watermark * num_blocks)
        self.enable_prefix_caching = enable_prefix_caching
        self.cache = PrefixCache(block_size, max_evicted=min(65_536, max(1_024, num_blocks)))
        self.pool = BlockPool(num_blocks, self.cache)
        self.tables: dict[int, BlockTable] = {}
        self.counters = Counters()
        self.tiers: Tiers | None = None
        self.watch: KVWatch | None = None  # while somebody looks at the block map

    # -- how much there is

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out: free, or cached and not pinned."""
        return self.pool.queue.num_blocks

    @property
    def num_used_blocks(self) -> int:
        return self.pool.num_used_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of so many tokens has at most, over all groups."""
        num = self.num_pages(num_tokens)
        return sum(num if most is None else min(num, most) for most in self._max_blocks)

    def num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether the pool could hold them with nothing else in it. Pins are not considered: they can be lifted."""
        return self.num_blocks_for(num_tokens) <= self.num_blocks

    def num_blocks_for_beams(self, num_prompt_tokens: int, num_tokens: int, width: int) -> int:
        """Blocks that so many sequences of one prompt hold at most, and the watermark, which those that come back after
        a preemption must leave. They share the prompt's full blocks where they can be found again."""
        num_shared = num_prompt_tokens // self.block_size if self.enable_prefix_caching else 0
        num_shared *= self.windows.count(None)
        num_own = self.num_blocks_for(num_tokens) - num_shared
        return num_shared + width * num_own + self.num_watermark_blocks

    def num_blocks_to_write(self, seq_ids: Sequence[int], position: int) -> int:
        """Blocks that these sequences take together when each writes its token at a position: new ones, and copies of
        those that are shared, of which the last to write keeps the original."""
        index, num_blocks = position // self.block_size, 0
        writers: Counter[int] = Counter()
        for seq_id in seq_ids:
            for group in self.tables[seq_id].groups:
                if index < group.end:
                    writers[group.block_ids[index - group.first]] += 1
                else:
                    num_blocks += 1
        for block_id, count in writers.items():
            block = self.pool.blocks[block_id]
            num_blocks += count - (block.ref_count == count and block.block_hash is None)
        return num_blocks

    def has_room(self, num_blocks: int) -> bool:
        """For an admission or a swap-in, which must leave the watermark free unless nothing is in use."""
        num_reserved = self.num_watermark_blocks if self.pool.num_used_blocks else 0
        return num_blocks + num_reserved <= self.pool.queue.num_blocks

    def block_ids(self, seq_id: int) -> list[int]:
        return list(self.tables[seq_id].block_ids)

    # -- begin

    def new_groups(self, slices: TableSlices, num_tokens: int) -> list[tuple[GroupTable, int]]:
        """Tables that begin with these slices, for a sequence of so many tokens, and where each shall end."""
        found = []
        for group, (window, most) in enumerate(zip(self.windows, self._max_blocks, strict=True)):
            first, block_ids = slices[group] if slices else (0, [])
            end = self.num_pages(num_tokens) if most is None else min(self.num_pages(num_tokens), first + most)
            found.append((GroupTable(window, first, list(block_ids)), end))
        return found

    def add_table(
        self, seq_id: int, root: BlockHash, groups: list[GroupTable], num_tokens: int, hashes: list[BlockHash]
    ) -> None:
        block_size = self.block_size
        num_committed = len(hashes) * block_size
        self.tables[seq_id] = BlockTable(
            seq_id=seq_id,
            root=root,
            groups=groups,
            num_tokens=num_tokens,
            capacity=capacity_of(groups, block_size),
            writable_from=num_committed,
            next_commit=num_committed + block_size if self.enable_prefix_caching else NEVER,
            hashes=hashes,
        )

    def fork(self, seq_id: int, child_seq_id: int) -> None:
        """Another sequence with the same blocks, the partly filled one too: the first to write it copies it."""
        assert child_seq_id not in self.tables, f"sequence {child_seq_id} is here already"
        table = self.tables[seq_id]
        blocks = self.pool.blocks
        for block_id in table.block_ids:
            self.pool.acquire(blocks[block_id])
        table.writable_from = max(group.end for group in table.groups) * self.block_size  # nothing is its own now
        groups = [GroupTable(each.window, each.first, list(each.block_ids)) for each in table.groups]
        self.add_table(child_seq_id, table.root, groups, table.num_tokens, list(table.hashes))
        self.tables[child_seq_id].writable_from = table.writable_from
        self.counters.num_forks += 1
        if self.watch is not None:
            self.watch.took(child_seq_id, table.block_ids)

    # -- go on

    def grow(self, seq_id: int, num_tokens: int, first_written: int, lookahead: int = 0) -> Allocation | None:
        """Room for tokens [0, num_tokens) and for `lookahead` drafts after them. Positions from `first_written` on may
        be written: shared or cached blocks there are replaced by own ones (copy-on-write).

        Returns the shared constant `UNCHANGED` when the room is there already, which needs two comparisons: call it
        for every sequence of every step.
        """
        table = self.tables[seq_id]
        if num_tokens + lookahead <= table.capacity and first_written >= table.writable_from:
            table.num_tokens = num_tokens
            return UNCHANGED
        return self._grow_table(table, num_tokens, first_written, lookahead)

    def _grow_table(self, table: BlockTable, num_tokens: int, first_written: int, lookahead: int) -> Allocation | None:
        pool, block_size = self.pool, self.block_size
        wanted = self.num_pages(num_tokens + lookahead)
        if first_written >= table.writable_from and self.windows == (None,):
            return self._append_blocks(table, num_tokens, wanted)
        blocks = pool.blocks
        first = first_written // block_size
        changes = []
        num_taken = num_given = 0
        for group, most in zip(table.groups, self._max_blocks, strict=True):
            seen = group.first_seen(first_written, block_size)
            dropped = group.block_ids[: seen - group.first]
            replaced = [
                index
                for index in range(max(first, seen), group.end)
                if (block := blocks[group.block_ids[index - group.first]]).ref_count > 1 or block.block_hash is not None
            ]
            num_appended = max(0, (wanted if most is None else min(wanted, seen + most)) - group.end)
            num_taken += len(replaced) + num_appended
            num_given += sum(blocks[block_id].is_last_user for block_id in dropped)
            changes.append((group, seen, dropped, replaced, num_appended))
        if num_taken > pool.num_free_blocks + num_given:
            self.counters.num_allocation_failures += 1
            return None
        table.num_tokens = num_tokens
        table.writable_from = min(table.writable_from, first * block_size)
        if len(table.hashes) > first:  # committed tokens are written again: what the hashes said is no longer so
            del table.hashes[first:]
            table.next_commit = (first + 1) * block_size
        for group, seen, dropped, _, _ in changes:
            if dropped:
                del group.block_ids[: len(dropped)]
                group.first = seen
                pool.release_table(dropped)
                if self.watch is not None:
                    self.watch.left(table.seq_id, dropped)
        if not num_taken:
            return UNCHANGED
        change = Allocation()
        for number, (group, _, _, replaced, num_appended) in enumerate(changes):
            own_ids = pool.allocate(len(replaced) + num_appended)
            block_ids = group.block_ids
            replaced_ids = [block_ids[index - group.first] for index in replaced]
            for index, old_id, own_id in zip(replaced, replaced_ids, own_ids, strict=False):
                if index * block_size < first_written:  # else no token in it is kept, so no byte either
                    change.copies.append((old_id, own_id))
                block_ids[index - group.first] = own_id
                change.remapped.append((number, index, own_id))
                pool.release(blocks[old_id])
            if num_appended:
                change.appended.append((number, own_ids[len(replaced) :]))
                block_ids.extend(own_ids[len(replaced) :])
            if self.watch is not None:
                self.watch.remapped(table.seq_id, replaced_ids, own_ids)
        table.capacity = capacity_of(table.groups, block_size)
        self.counters.num_copies += len(change.copies)
        return change

    def _append_blocks(self, table: BlockTable, num_tokens: int, wanted: int) -> Allocation | None:
        """What nearly always happens when a sequence grows: one group that sees everything, and nothing to replace."""
        group = table.groups[0]
        num_appended = wanted - group.end
        if num_appended > self.pool.num_free_blocks:
            self.counters.num_allocation_failures += 1
            return None
        own_ids = self.pool.allocate(num_appended)
        group.block_ids += own_ids
        table.num_tokens, table.capacity = num_tokens, wanted * self.block_size
        if self.watch is not None:
            self.watch.remapped(table.seq_id, [], own_ids)
        return Allocation([(0, own_ids)])

    def trim(self, seq_id: int, num_tokens: int) -> int | None:
        """Give back the blocks past tokens [0, num_tokens): drafts that were not accepted have no use for them.

        Returns how many blocks the table keeps; None where nothing changed.
        """
        table = self.tables[seq_id]
        num_kept = self.num_pages(num_tokens)
        if num_kept * self.block_size >= table.capacity:
            return None
        assert len(table.hashes) <= num_kept, f"sequence {seq_id}: committed tokens are trimmed"
        for group in table.groups:
            surplus = group.block_ids[max(0, num_kept - group.first) :]
            del group.block_ids[len(group.block_ids) - len(surplus) :]
            self.pool.release_table(surplus)
            if self.watch is not None:
                self.watch.left(seq_id, surplus)
        table.capacity = num_kept * self.block_size
        table.num_tokens = min(table.num_tokens, num_tokens)
        table.writable_from = min(table.writable_from, table.capacity)
        return num_kept

    def commit(self, seq_id: int, token_ids: Sequence[int], num_computed: int) -> None:
        """Tokens [0, num_computed) have KV, or will once the submitted steps have run: full blocks enter the cache.

        Others may match these blocks from now on, so commit only what a plan that will be submitted computes. Tokens
        that the host does not know yet (num_computed > len(token_ids)) are hashed by a later commit.
        """
        table = self.tables[seq_id]
        if num_computed >= table.next_commit:
            self._commit_table(table, token_ids, num_computed)

    def _commit_table(self, table: BlockTable, token_ids: Sequence[int], num_computed: int) -> None:
        block_size, cache, hashes = self.block_size, self.cache, table.hashes
        num_full = min(num_computed, len(token_ids)) // block_size
        has_room = num_full * block_size <= table.capacity
        assert has_room, f"sequence {table.seq_id} has no blocks for {num_computed} tokens"
        first = len(hashes)
        cache.extend_chain(hashes, table.root, token_ids, num_full)
        for number, group in enumerate(table.groups):
            begin = max(first, group.first)
            ids = group.block_ids[begin - group.first : max(0, num_full - group.first)]
            blocks = [self.pool.blocks[block_id] for block_id in ids]
            cache.insert_chain(begin, hashes, table.root, token_ids, blocks, number)
        num_committed = len(hashes) * block_size
        table.next_commit = num_committed + block_size
        if table.writable_from < num_committed:
            table.writable_from = num_committed

    # -- end

    def free(self, seq_id: int, *, distrust: bool = False) -> None:
        """The sequence has ended, or is preempted to be computed again. `distrust`: what it computed may be bad, and
        nobody shall find it in the cache."""
        table = self.tables.pop(seq_id)
        for number, group in enumerate(table.groups):
            if distrust:
                self._forget_own(group.block_ids)
            self.pool.release_table(group.block_ids)
            if distrust:
                self.pool.forget_cached(self.cache.lookup(each, number) for each in table.hashes[: group.first])
                if self.tiers is not None:
                    keys = [in_group(each, number) for each in table.hashes]
                    self.tiers.forget([key for key in keys if self.cache.lookup(key) is None])
        if self.watch is not None:
            self.watch.left(seq_id, table.block_ids)

    def _forget_own(self, block_ids: list[int]) -> None:
        """Forget blocks from the tail on, as far as nobody else uses them. Good ones that it had only found go too:
        they are computed again."""
        for block_id in reversed(block_ids):
            block = self.pool.blocks[block_id]
            if block.ref_count > 1 or block.num_pins:
                return
            if block.block_hash is not None:
                self.cache.forget(block)
