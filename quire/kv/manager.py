"""The KV manager: who holds which blocks. The scheduler's one door to KV memory.

It deals in numbers only; the executor owns the bytes and must apply what it is told in step order. The life of a
sequence, in calls:

    match -> admit -> (grow, commit) ... -> free
                  \\-> fork: another sequence with the same blocks
                   \\-> swap_out -> swap_in -> (grow, commit) ... -> free
                                \\-> drop_swapped

Every call that takes blocks is all or nothing: None means that there was no room and that nothing has changed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from quire.errors import ConfigError
from quire.kv.blocks import BLOCK_SIZES, Block
from quire.kv.cache_log import CacheLog
from quire.kv.check import check_manager
from quire.kv.hashing import BlockHash, in_group, root_hash
from quire.kv.host_pool import HostPool
from quire.kv.matching import longest_match, match_below, slices_of
from quire.kv.pool import BlockPool
from quire.kv.prefix_cache import PrefixCache, PrefixMatch
from quire.kv.snapshot import KVSnapshot, take_snapshot
from quire.kv.stats import Counters, KVStats, RateMeter, read_stats
from quire.kv.swap import Moves, SwappedSequence, finish_swap, swap_in, swap_out
from quire.kv.table import NEVER, UNCHANGED, Allocation, BlockTable, GroupTable, TableSlices, capacity_of
from quire.kv.tiers import HostLevel, Level, Origin, Store, StoreLevel, TakeTicket, Tiers
from quire.kv.watch import KVWatch
from quire.plan import KeyedMove, Move, max_window_blocks
from quire.request import CacheOutcome

# Outcomes of a lookup that may go on below the device.
_LOOKED_UP = (CacheOutcome.COLD, CacheOutcome.PARTIAL, CacheOutcome.EVICTED)

_NOBODY = -1  # holds blocks that are fetched for later
_SENT_TOGETHER = 8  # blocks: several such pieces are sealed, sent and checked at the same time
_SLOWEST = 1e-9  # tokens/s: as if computing took for ever


class KVManager:
    """Block tables over one pool of `num_blocks` device blocks, and a host pool to swap to.

    `windows` has an entry for each KV group (see table.py): its sliding window, or None. A step computes at most
    `max_span_tokens` of one sequence: a windowed group has no more blocks than the window and such a span take. An
    encoder has no groups: its sequences take no blocks.

    `host_block_s` makes host blocks a level of the prefix cache too, and says how long a copy of one takes. `stores`
    are levels below it; plans name them by their places here.

    `watermark` is the share of blocks that an admission or a swap-in must leave free for the growth of what runs
    already; it is waived when nothing is in use, so that a sequence that needs every block can have them.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        host_block_s: float | None = None,
        stores: Sequence[Store] = (),
        windows: Sequence[int | None] = (None,),
        max_span_tokens: int = 1 << 30,
        enable_prefix_caching: bool = True,
        watermark: float = 0.01,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if block_size not in BLOCK_SIZES:
            raise ConfigError(f"block_size must be one of {', '.join(map(str, BLOCK_SIZES))}, not {block_size}")
        if num_blocks < 1:
            raise ConfigError(f"num_blocks must be at least 1, not {num_blocks}")
        if num_host_blocks < 0:
            raise ConfigError(f"num_host_blocks must be 0 or more, not {num_host_blocks}")
        if not 0 <= watermark < 1:
            raise ConfigError(f"watermark is a share of all blocks: it must be >= 0 and < 1, not {watermark}")
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
        self._cache_log: CacheLog | None = None
        self.pool = BlockPool(num_blocks, self.cache)
        self.host = HostPool(num_host_blocks, clock)
        self.tables: dict[int, BlockTable] = {}
        self.swapped: dict[int, SwappedSequence] = {}
        self.moves: dict[int, Moves] = {}  # under way, by ticket
        self.counters = Counters()
        levels: list[Level] = [] if host_block_s is None else [HostLevel(self.host, host_block_s)]
        levels += [StoreLevel(number, store) for number, store in enumerate(stores)]
        self.tiers = Tiers(levels, self.pool) if levels and enable_prefix_caching else None
        self.clock = clock
        self.rates = RateMeter(clock(), num_totals=2)
        self.watch: KVWatch | None = None  # while somebody looks at the block map

    # -- how much there is

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out: free, or cached and not pinned."""
        return self.pool.queue.num_blocks

    @property
    def num_used_blocks(self) -> int:
        return self.pool.num_used_blocks

    @property
    def num_pinned_blocks(self) -> int:
        return self.cache.num_pinned_blocks

    @property
    def num_host_free_blocks(self) -> int:
        return self.host.num_free_blocks

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

    def block_ids(self, seq_id: int) -> list[int]:
        return list(self.tables[seq_id].block_ids)

    # -- start

    def match(
        self,
        token_ids: Sequence[int],
        *,
        salt: str | None = None,
        adapter: str | None = None,
        previous: PrefixMatch | None = None,
    ) -> PrefixMatch:
        """The longest cached prefix. Changes and counts nothing.

        `previous`: an older match of the same tokens, salt and adapter, whose hashes need not be computed again (for
        a sequence that waits and is matched at each step).
        """
        if not self.enable_prefix_caching:
            return PrefixMatch.nothing(CacheOutcome.DISABLED)
        # At most n-1 tokens match: the last must run to give logits.
        num_matchable = (len(token_ids) - 1) // self.block_size
        if num_matchable <= 0:
            return PrefixMatch.nothing(CacheOutcome.TOO_SHORT)
        hashes = list(previous.hashes) if previous is not None else []
        num_matched = longest_match(self, hashes, root_hash(salt, adapter), token_ids, num_matchable)
        if num_matched == num_matchable:
            outcome = CacheOutcome.HIT
        elif self.cache.was_lost(hashes[num_matched]):
            outcome = CacheOutcome.EVICTED
        else:
            outcome = CacheOutcome.PARTIAL if num_matched else CacheOutcome.COLD
        return PrefixMatch(slices_of(self, hashes, num_matched), num_matched * self.block_size, outcome, hashes)

    def match_below(
        self,
        match: PrefixMatch,
        token_ids: Sequence[int],
        *,
        salt: str | None = None,
        adapter: str | None = None,
        prefill_tokens_per_s: float,
    ) -> PrefixMatch | None:
        """A match that is longer than what the device has, because blocks of levels below are loaded; None where there
        is none, or where computing is cheaper. Whoever admits it must also `start_loads` of it."""
        if self.tiers is None or match.outcome not in _LOOKED_UP:
            return None
        return match_below(self, self.tiers, match, root_hash(salt, adapter), token_ids, prefill_tokens_per_s)

    def admit(
        self,
        seq_id: int,
        token_ids: Sequence[int],
        match: PrefixMatch | None,
        *,
        salt: str | None = None,
        adapter: str | None = None,
        recompute: bool = False,
    ) -> TableSlices | None:
        """Blocks for all of `token_ids`: those that matched, then new ones. Returns the new tables.

        `match` is what `match()` found for the same tokens, or None to read no cache. `recompute` says that the
        sequence was preempted, so that its lookup is counted apart.
        """
        assert seq_id not in self.tables and seq_id not in self.swapped, f"sequence {seq_id} is here already"
        assert token_ids, f"sequence {seq_id} has no tokens"
        if match is None:
            match = PrefixMatch.nothing(CacheOutcome.SKIPPED if self.enable_prefix_caching else CacheOutcome.DISABLED)
        num_matched = match.num_tokens // self.block_size
        assert match.num_tokens < len(token_ids), "the match is not of these tokens"
        assert len(match.hashes) >= num_matched, "the match is not one of match()'s"
        matched: list[Block] = []
        num_idle = 0  # of the matched blocks, those that leave the free queue
        num_holes = 0  # blocks that a level below has
        for group, (first, block_ids) in enumerate(match.slices):
            for block_id, block_hash in zip(block_ids, match.hashes[first:num_matched], strict=True):
                if block_id is None:
                    num_holes += 1
                    continue
                block = self.pool.blocks[block_id]
                assert self._is_or_will_be(block, block_hash, group), f"the match is stale at block {block_id}"
                num_idle += block in self.pool.queue
                matched.append(block)
        firsts: TableSlices = [(first, []) for first, _ in match.slices]
        tables = self.new_groups(firsts, len(token_ids))
        num_new = sum(end - table.first for table, end in tables) - len(matched) - num_holes
        if not self.has_room(num_new + num_holes + num_idle):
            return None
        # Matched blocks first: once in use, they cannot be evicted to make the new ones.
        for block in matched:
            self.pool.acquire(block)
            block.num_hits += block.block_hash is not None
        new_ids = iter(self.pool.allocate(num_new + num_holes))
        for group, (table, end) in enumerate(tables):
            known = match.slices[group][1] if match.slices else []
            table.block_ids = [next(new_ids) if each is None else each for each in known]
            table.block_ids += [next(new_ids) for _ in range(end - table.end)]
        groups = [table for table, _ in tables]
        self.add_table(seq_id, root_hash(salt, adapter), groups, len(token_ids), match.hashes[:num_matched])
        counters = self.counters.recompute if recompute else self.counters.prefix
        counters.count(match.outcome, len(token_ids), match.num_tokens)
        if self.watch is not None:
            self.watch.took(seq_id, self.tables[seq_id].block_ids)
        return [(group.first, list(group.block_ids)) for group in groups]

    def _is_or_will_be(self, block: Block, block_hash: BlockHash, group: int) -> bool:
        """Whether the block holds this content, or does once a load is over."""
        if self.cache.lookup(block_hash, group) is block:
            return True
        coming = None if self.tiers is None else self.tiers.incoming.get(in_group(block_hash, group))
        return coming is not None and coming.block is block

    def start_loads(
        self, seq_id: int, match: PrefixMatch, token_ids: Sequence[int], take_ticket: TakeTicket
    ) -> list[Move | KeyedMove]:
        """The moves that fill what `match` lacks, for a sequence that was just admitted with it. It must not run before
        they, and those of `match.tickets`, are done. Their tickets are added to these."""
        assert self.tiers is not None
        table, wanted, keys = self.tables[seq_id], [], []
        for number, (first, block_ids) in enumerate(match.slices):
            for index, block_id in enumerate(block_ids, start=first):
                if block_id is None:
                    block = self.pool.blocks[table.groups[number].block_ids[index - first]]
                    parent = in_group(match.hashes[index - 1], number) if index else table.root
                    packed = self.cache.pack_tokens(token_ids, index)
                    wanted.append(Origin(block, 0, parent, index, packed))
                    keys.append(in_group(match.hashes[index], number))
        moves = self.tiers.start_loads(wanted, keys, take_ticket)
        self.tiers.counters.num_joined += len(match.tickets) > 0
        match.tickets.update(move.ticket for move in moves)
        return moves

    # -- to and from other engines

    def start_send(
        self, seq_id: int, first: int, known: Collection[BlockHash], *, to: str, take_ticket: TakeTicket
    ) -> tuple[int, list[KeyedMove]]:
        """Moves of a sequence's full blocks, from block `first` on, to another engine: as many as may be on their way
        now, without those that it is `known` to have. Returns also the block that comes next."""
        assert self.tiers is not None
        table = self.tables[seq_id]
        end = max(first, min(len(table.hashes), first + self.tiers.num_storable // len(table.groups)))
        pairs = []
        for number, group in enumerate(table.groups):
            for index in range(max(first, group.first), end):
                key = in_group(table.hashes[index], number)
                if key not in known:
                    pairs.append((group.block_ids[index - group.first], key))
        pieces = (pairs[i : i + _SENT_TOGETHER] for i in range(0, len(pairs), _SENT_TOGETHER))
        return end, [self.tiers.start_send(piece, to, take_ticket) for piece in pieces]

    def start_fetch(
        self, token_ids: Sequence[int], *, salt: str | None, adapter: str | None, take_ticket: TakeTicket
    ) -> tuple[list[Move | KeyedMove], set[int]]:
        """Moves that bring what levels below have of a prefix into the device's cache, for nobody yet, and the tickets
        after which all of it is there. None of either where there is nothing to load, or no room."""
        match = self.match(token_ids, salt=salt, adapter=adapter)
        below = self.match_below(match, token_ids, salt=salt, adapter=adapter, prefill_tokens_per_s=_SLOWEST)
        if below is None:
            return [], set()
        wanted = token_ids[: below.num_tokens + 1]
        if self.admit(_NOBODY, wanted, below, salt=salt, adapter=adapter, recompute=True) is None:
            return [], set()
        moves = self.start_loads(_NOBODY, below, wanted, take_ticket)
        self.free(_NOBODY)  # what is on its way is cached when it has come
        return moves, below.tickets

    def new_groups(self, slices: TableSlices, num_tokens: int) -> list[tuple[GroupTable, int]]:
        """Tables that begin with these slices, for a sequence of so many tokens, and where each shall end."""
        found = []
        for group, (window, most) in enumerate(zip(self.windows, self._max_blocks, strict=True)):
            first, block_ids = slices[group] if slices else (0, [])
            end = self.num_pages(num_tokens) if most is None else min(self.num_pages(num_tokens), first + most)
            found.append((GroupTable(window, first, list(block_ids)), end))
        return found

    def log_cache(self) -> CacheLog:
        """A log of what the prefix cache gains and loses from now on, at a call for each; the same one for all."""
        if self._cache_log is None:
            self._cache_log = CacheLog(self.cache)
        return self._cache_log

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

    def fork(self, seq_id: int, child_seq_id: int) -> None:
        """Another sequence with the same blocks, the partly filled one too: the first to write it copies it."""
        assert child_seq_id not in self.tables and child_seq_id not in self.swapped, f"{child_seq_id} is here already"
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
        """From the tail on, as far as nobody else uses them. Good ones that it had only found go too: they are computed
        again."""
        for block_id in reversed(block_ids):
            block = self.pool.blocks[block_id]
            if block.ref_count > 1 or block.num_pins:
                return
            if block.block_hash is not None:
                self.cache.forget(block)

    # -- swap

    def swap_out(self, seq_id: int, num_computed: int, ticket: int) -> list[tuple[int, int]] | None:
        """(device, host) pairs for the blocks that hold the `num_computed` tokens; None if the host has no room.

        The sequence gives up all its device blocks. One that nobody else uses is in transit until
        `moves_done(ticket)`; so is one whose last other user leaves before that.
        """
        return swap_out(self, seq_id, num_computed, ticket)

    def swap_in(
        self, seq_id: int, token_ids: Sequence[int], ticket: int
    ) -> tuple[list[tuple[int, int]], TableSlices] | None:
        """((device, host) pairs, new tables with room for all tokens); None if there is no room.

        The sequence must not run before `moves_done(ticket)`, when its full blocks enter the cache again as with
        `commit()`; the host blocks are in transit until then. It may be called before the swap-out is done: the
        executor moves bytes in the order of tickets.
        """
        return swap_in(self, seq_id, token_ids, ticket)

    def drop_swapped(self, seq_id: int) -> None:
        """The sequence has ended while its KV was on the host."""
        for host_id in self.swapped.pop(seq_id).host_ids:
            self.host.release(host_id)

    def moves_done(self, ticket: int, missing: Sequence[int] = ()) -> bool:
        """A move is over: every byte has arrived, but for the entries of a keyed one that are `missing`. A ticket
        without any is fine. Returns whether nothing is missing."""
        if self.tiers is not None and ticket in self.tiers.moves:
            moved = [self.pool.blocks[block_id] for block_id, _ in self.tiers.moves[ticket].pairs]
            is_complete = self.tiers.done(ticket, missing)
            if self.watch is not None:
                self.watch.touched(moved)
            return is_complete
        finish_swap(self, ticket)
        return True

    # -- pins and reset

    def pin(self, token_ids: Sequence[int], *, salt: str | None = None, adapter: str | None = None) -> int:
        """Keep the cached full blocks of this prefix from eviction. Returns how many tokens are pinned by it.

        Only what is cached by now: pin again once more has been computed. Each prefix has its own pin, so that
        unpinning it leaves blocks that another pinned prefix shares.
        """
        num_full = len(token_ids) // self.block_size
        if not num_full:
            return 0
        root = root_hash(salt, adapter)
        hashes: list[BlockHash] = []
        self.cache.extend_chain(hashes, root, token_ids, num_full)
        slices = slices_of(self, hashes, longest_match(self, hashes, root, token_ids, num_full))
        blocks = [self.pool.blocks[each] for _, block_ids in slices for each in block_ids if each is not None]
        self.pool.pin(self.cache.pin(hashes[-1], blocks))
        if self.watch is not None:
            self.watch.touched(blocks)
        return self.cache.num_pinned_by(hashes[-1]) * self.block_size

    def unpin(self, token_ids: Sequence[int], *, salt: str | None = None, adapter: str | None = None) -> int:
        """Lift the pin of this prefix. Returns how many tokens were pinned by it."""
        num_full = len(token_ids) // self.block_size
        if not num_full:
            return 0
        hashes: list[BlockHash] = []
        self.cache.extend_chain(hashes, root_hash(salt, adapter), token_ids, num_full)
        num_blocks = self.cache.num_pinned_by(hashes[-1])
        unpinned = self.cache.unpin(hashes[-1])
        self.pool.unpin(reversed(unpinned))
        if self.watch is not None:
            self.watch.touched(unpinned)
        return num_blocks * self.block_size

    def expire(self, token_ids: Sequence[int], *, salt: str | None = None, adapter: str | None = None) -> int:
        """Forget this prefix's blocks in every level, but those in use or pinned. Returns how many tokens it named."""
        hashes: list[BlockHash] = []
        self.cache.extend_chain(hashes, root_hash(salt, adapter), token_ids, len(token_ids) // self.block_size)
        for group in range(len(self.windows)):
            blocks = [self.cache.lookup(block_hash, group) for block_hash in hashes]
            self.pool.forget_cached(blocks)
            if self.watch is not None:
                self.watch.touched([block for block in blocks if block is not None])
            if self.tiers is not None:
                self.tiers.forget([in_group(block_hash, group) for block_hash in hashes])
        return len(hashes) * self.block_size

    def reset_prefix_cache(self, *, force: bool = False) -> bool:
        """Forget every cached block but the pinned ones. Refused (False) while blocks are in use or in transit.

        Forced, it is never refused and forgets pinned ones too; blocks in use or in transit stay as they are.
        """
        if not force and (self.pool.num_used_blocks or self.pool.num_in_transit_blocks):
            return False
        if self.watch is not None:
            self.watch.touched(self.cache.idle_blocks())
        self.pool.forget_idle(force=force)
        self.cache.forget_evictions()
        return True

    # -- to look at

    def open_watch(self) -> int:
        """Begin to follow the block map: the id to read it with (`watch.read_blocks`), which lasts while it is read."""
        if self.watch is None:
            self.watch = KVWatch(self)
        return self.watch.open()

    @property
    def stats(self) -> KVStats:
        """A reading of every number. Costs a look at the end of each table."""
        return read_stats(self)

    def snapshot(self) -> KVSnapshot:
        """The whole block map, for people to look at."""
        return take_snapshot(self)

    def check(self) -> None:
        """Prove every invariant; AssertionError says which one broke. Costs a look at every block."""
        check_manager(self)

    # -- inside

    def has_room(self, num_blocks: int) -> bool:
        """For an admission or a swap-in, which must leave the watermark free unless nothing is in use."""
        num_reserved = self.num_watermark_blocks if self.pool.num_used_blocks else 0
        return num_blocks + num_reserved <= self.pool.queue.num_blocks

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

    def _grow_table(self, table: BlockTable, num_tokens: int, first_written: int, lookahead: int) -> Allocation | None:
        pool, block_size = self.pool, self.block_size
        blocks = pool.blocks
        first = first_written // block_size
        wanted = self.num_pages(num_tokens + lookahead)
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
