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
from collections.abc import Callable, Collection, Sequence

from quire.errors import ConfigError
from quire.kv.blocks import BLOCK_SIZES, Block
from quire.kv.cache_log import CacheLog
from quire.kv.check import check_manager
from quire.kv.hashing import BlockHash, in_group, root_hash
from quire.kv.host_pool import HostPool
from quire.kv.matching import longest_match, match_below, slices_of
from quire.kv.prefix_cache import PrefixMatch
from quire.kv.stats import KVStats, RateMeter, read_stats
from quire.kv.swap import Moves, SwappedSequence, finish_swap, swap_in, swap_out
from quire.kv.table import BlockTable, BlockTables, TableSlices
from quire.kv.tiers import HostLevel, Level, Store, StoreLevel, TakeTicket, Tiers, Wanted
from quire.kv.watch import KVWatch
from quire.plan import KeyedMove, Move
from quire.request import CacheOutcome

# Outcomes of a lookup that may go on below the device.
_LOOKED_UP = (CacheOutcome.COLD, CacheOutcome.PARTIAL, CacheOutcome.EVICTED)

_NOBODY = -1  # holds blocks that are fetched for later
_SENT_TOGETHER = 8  # blocks: several such moves are sealed, sent and checked at the same time
# Tokens whose blocks travel a few layers at a time: in blocks of 16, as many bytes in a message as of whole ones.
_FILLED_TOGETHER = 1024
_SLOWEST = 1e-9  # tokens/s: as if computing took for ever


class KVManager(BlockTables):
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
        super().__init__(num_blocks, block_size, windows, max_span_tokens, enable_prefix_caching, watermark)
        self._cache_log: CacheLog | None = None
        self.host = HostPool(num_host_blocks, clock)
        self.swapped: dict[int, SwappedSequence] = {}
        self.moves: dict[int, Moves] = {}  # under way, by ticket
        levels: list[Level] = [] if host_block_s is None else [HostLevel(self.host, host_block_s)]
        levels += [StoreLevel(number, store) for number, store in enumerate(stores)]
        self.tiers = Tiers(levels, self.pool) if levels and enable_prefix_caching else None
        self.clock = clock
        self.rates = RateMeter(clock(), num_totals=2)

    # -- how much there is

    @property
    def num_pinned_blocks(self) -> int:
        return self.cache.num_pinned_blocks

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
        return coming is not None and coming[0] == block.block_id

    def start_loads(
        self, seq_id: int, match: PrefixMatch, token_ids: Sequence[int], take_ticket: TakeTicket
    ) -> list[Move | KeyedMove]:
        """The moves that fill what `match` lacks, for a sequence that was just admitted with it. It must not run before
        they, and those of `match.tickets`, are done. Their tickets are added to these."""
        assert self.tiers is not None
        table = self.tables[seq_id]
        wanted: list[Wanted] = []
        for number, (first, block_ids) in enumerate(match.slices):
            keys = [in_group(each, number) for each in match.hashes] if number else match.hashes
            own_ids, parents = table.groups[number].block_ids, [table.root, *keys]
            wanted += [
                (own_ids[index - first], keys[index], index, parents[index])
                for index, block_id in enumerate(block_ids, start=first)
                if block_id is None
            ]
        moves = self.tiers.start_loads(wanted, token_ids, match.sources, take_ticket)
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
        pairs = [pair for number in range(len(table.groups)) for pair in _unsent(table, number, first, end, known)]
        parts = (pairs[i : i + _SENT_TOGETHER] for i in range(0, len(pairs), _SENT_TOGETHER))
        return end, [self.tiers.start_send(part, to, take_ticket) for part in parts]

    def start_send_filled(
        self, seq_id: int, first: int, known: Collection[BlockHash], *, to: str, take_ticket: TakeTicket
    ) -> tuple[int, list[KeyedMove]]:
        """Likewise of the blocks, from `first` on, that the step in the making fills. They go out while it runs: what
        it will leave in them is known by its hash already, since `commit` was told of a prompt's tokens."""
        assert self.tiers is not None
        table = self.tables[seq_id]
        moves, size = [], _FILLED_TOGETHER // self.block_size
        for number in range(len(table.groups)):
            pairs = _unsent(table, number, first, len(table.hashes), known)
            for i in range(0, len(pairs), size):
                moves.append(self.tiers.start_send(pairs[i : i + size], to, take_ticket, number))
        return max(first, len(table.hashes)), moves

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

    def log_cache(self) -> CacheLog:
        """A log of what the prefix cache gains and loses from now on, at a call for each; the same one for all."""
        if self._cache_log is None:
            self._cache_log = CacheLog(self.cache)
        return self._cache_log

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

    def check(self) -> None:
        """Prove every invariant; AssertionError says which one broke. Costs a look at every block."""
        check_manager(self)


def _unsent(
    table: BlockTable, number: int, first: int, end: int, known: Collection[BlockHash]
) -> list[tuple[int, BlockHash]]:
    """Device block and hash of a sequence's blocks [first, end) in a group, without those `known` to be there."""
    group, pairs = table.groups[number], []
    for index in range(max(first, group.first), end):
        key = in_group(table.hashes[index], number)
        if key not in known:
            pairs.append((group.block_ids[index - group.first], key))
    return pairs
