"""Levels below the device: which blocks go down, which come back, and what is on its way. Numbers and hashes only.

A level is asked four things: whether it has a block, how long loading would take, and to start a load or a store.
The host level's blocks are numbers of the host pool. A store level's are hashes: what it has, only it knows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

from quire.kv.blocks import Block
from quire.kv.hashing import BlockHash
from quire.kv.host_pool import HostPool
from quire.kv.pool import BlockPool
from quire.plan import KeyedMove, Move

TakeTicket = Callable[[], int]
Pairs = list[tuple[int, BlockHash]]  # (device block, its hash in its group)
# A block that shall come, and what it will hold: the device block, its hash, its place in the chain of its prefix, and
# the hash before it. A tuple: a long prefix has hundreds, which are made before their bytes can begin to move.
Wanted = tuple[int, BlockHash, int, BlockHash]

_MAX_STORING_BLOCKS = 64  # on their way down at once: these cannot be evicted
_STORING_SHARE = 8  # and no more than one in so many of all
_HOST_LATENCY_S = 0.2e-3
_LOADED_TOGETHER = 32  # blocks of a store
_FETCHED_TOGETHER = 8  # blocks that another engine sent: they are in memory, and more threads copy them


class _Holder(Protocol):
    """What is asked of a store and of a level alike. None of these may wait."""

    @property
    def name(self) -> str: ...

    @property
    def takes_all(self) -> bool:
        """Whether every full block is written to it; else only what is sent on purpose."""
        ...

    def contains(self, key: BlockHash) -> bool: ...

    def load_s(self, num_blocks: int) -> float:
        """About how long a load of so many would take, with what is queued before it."""
        ...

    def forget(self, keys: Sequence[BlockHash]) -> None:
        """Forget these blocks, and those that are on their way to it."""
        ...

    def usage(self) -> dict[str, float]:
        """What it holds, as numbers by name."""
        ...


class Store(_Holder, Protocol):
    """What the scheduler's side asks of a store."""

    def expire(self, older_than_s: float, done: Callable[[int], None]) -> None:
        """Drop what was not used for so long. `done` hears how many blocks went, maybe on another thread."""
        ...


class Level(_Holder, Protocol):
    """A level below the device."""

    def start_load(self, ticket: int, pairs: Pairs) -> Move | KeyedMove: ...

    def start_store(self, ticket: int, pairs: Pairs) -> Move | KeyedMove | None:
        """Returns None where there is no room for any of them."""
        ...

    def done(self, ticket: int) -> None:
        """A load or store is over."""
        ...


@dataclass(slots=True)
class _HostMove:
    host_ids: list[int]
    keys: list[BlockHash] | None  # of a store: what they will hold; None: a load


class HostLevel:
    """Cached blocks in host memory. The pool is shared with swap, whose sequences come first."""

    name = "host"
    takes_all = True

    def __init__(self, pool: HostPool, block_s: float) -> None:
        self.pool = pool
        self._block_s = block_s
        self.moves: dict[int, _HostMove] = {}
        self._forgotten: set[BlockHash] = set()  # while a store of them is under way

    def contains(self, key: BlockHash) -> bool:
        return self.pool.lookup(key) is not None

    def load_s(self, num_blocks: int) -> float:
        return _HOST_LATENCY_S + num_blocks * self._block_s

    def start_load(self, ticket: int, pairs: Pairs) -> Move:
        host_ids = self.pool.use([key for _, key in pairs])
        self._start(ticket, _HostMove(host_ids, None))
        return Move(ticket, True, list(zip([block_id for block_id, _ in pairs], host_ids, strict=True)))

    def start_store(self, ticket: int, pairs: Pairs) -> Move | None:
        pairs = pairs[: self.pool.num_free_blocks]
        if not pairs:
            return None
        host_ids = self.pool.allocate(len(pairs))
        self._start(ticket, _HostMove(host_ids, [key for _, key in pairs]))
        return Move(ticket, False, list(zip([block_id for block_id, _ in pairs], host_ids, strict=True)))

    def _start(self, ticket: int, move: _HostMove) -> None:
        self.moves[ticket] = move
        for host_id in move.host_ids:
            self.pool.transfer_started(host_id)

    def done(self, ticket: int) -> None:
        move = self.moves.pop(ticket)
        for host_id in move.host_ids:
            self.pool.transfer_finished(host_id)
        for host_id, key in zip(move.host_ids, move.keys or (), strict=False):
            if key in self._forgotten:
                self._forgotten.discard(key)
                self.pool.release(host_id)
            else:
                self.pool.keep(host_id, key)

    def forget(self, keys: Sequence[BlockHash]) -> None:
        storing = {key for move in self.moves.values() for key in move.keys or ()}
        for key in keys:
            self.pool.forget(key)
            if key in storing:
                self._forgotten.add(key)

    def usage(self) -> dict[str, float]:
        pool = self.pool
        return {
            "num_blocks": pool.num_cached_blocks,
            "max_blocks": pool.num_blocks,
            "load_block_s": self._block_s,
            "oldest_s": pool.oldest_s,
        }

    @property
    def held_ids(self) -> list[int]:
        """Host blocks that stores under way hold."""
        return [host_id for move in self.moves.values() if move.keys is not None for host_id in move.host_ids]

    @property
    def moving_ids(self) -> list[int]:
        return [host_id for move in self.moves.values() for host_id in move.host_ids]


class StoreLevel:
    """A store that the executor writes to and reads from by hash: disk, or somebody's own."""

    def __init__(self, number: int, store: Store) -> None:
        self._number = number  # by which plans name it
        self.store = store

    @property
    def name(self) -> str:
        return self.store.name

    @property
    def takes_all(self) -> bool:
        return self.store.takes_all

    def contains(self, key: BlockHash) -> bool:
        return self.store.contains(key)

    def load_s(self, num_blocks: int) -> float:
        return self.store.load_s(num_blocks)

    def start_load(self, ticket: int, pairs: Pairs) -> KeyedMove:
        return KeyedMove(ticket, self._number, True, pairs)

    def start_store(self, ticket: int, pairs: Pairs) -> KeyedMove:
        return KeyedMove(ticket, self._number, False, pairs)

    def start_send(self, ticket: int, pairs: Pairs, to: str, filled_group: int | None) -> KeyedMove:
        return KeyedMove(ticket, self._number, False, pairs, to, filled_group)

    def done(self, ticket: int) -> None:
        pass

    def forget(self, keys: Sequence[BlockHash]) -> None:
        self.store.forget(keys)

    def usage(self) -> dict[str, float]:
        return self.store.usage()


@dataclass(slots=True)
class TierMove:
    """The blocks that move under one ticket."""

    level: Level
    is_load: bool
    pairs: Pairs
    wanted: Sequence[Wanted] = ()  # of a load: the same blocks, and what they will hold
    token_ids: Sequence[int] = ()  # of the whole prefix that they belong to
    is_limited: bool = True  # of a store: whether it counts among those that may be on their way at once


@dataclass(slots=True)
class LevelCounters:
    """Totals since the start, in blocks."""

    num_stored: int = 0
    num_loaded: int = 0
    num_missing: int = 0  # that a load did not bring


@dataclass(slots=True)
class TierCounters:
    num_queries: int = 0  # tokens of admitted prompts that the device did not have
    num_hits: int = 0  # of these, tokens that came from below
    num_lost: int = 0  # blocks that were evicted before they were written down
    num_joined: int = 0  # blocks that a sequence waited for because another was loading them
    levels: dict[str, LevelCounters] = field(default_factory=dict)


class Tiers:
    """The levels in the order in which they are asked, blocks on their way, and blocks that wait to go down.

    Invariants, proved by `check()`: a block that is being loaded has no hash and is known by the one that it will get;
    the tickets here move exactly the blocks that they say.
    """

    def __init__(self, levels: Sequence[Level], pool: BlockPool) -> None:
        self.levels = list(levels)
        self.moves: dict[int, TierMove] = {}
        self.incoming: dict[BlockHash, tuple[int, int]] = {}  # what is on its way up: the device block, the ticket
        self.counters = TierCounters(levels={level.name: LevelCounters() for level in levels})
        self._pool = pool
        self._cache = pool.cache
        self._fresh: OrderedDict[BlockHash, Block] = OrderedDict()  # cached and not looked at yet, the oldest first
        self._max_storing = max(1, min(_MAX_STORING_BLOCKS, len(pool.blocks) // _STORING_SHARE))
        self._num_storing = 0
        self._writable = [number for number, level in enumerate(levels) if level.takes_all]
        if self._writable:
            self._cache.on_insert = self._note_fresh

    @property
    def has_stores_waiting(self) -> bool:
        return bool(self._fresh)

    @property
    def host(self) -> HostLevel | None:
        return next((level for level in self.levels if isinstance(level, HostLevel)), None)

    def has(self, key: BlockHash) -> bool:
        """Whether it is below, or on its way up."""
        return key in self.incoming or any(level.contains(key) for level in self.levels)

    # -- up

    def start_loads(
        self,
        wanted: Sequence[Wanted],
        token_ids: Sequence[int],
        sources: Mapping[BlockHash, int],
        take_ticket: TakeTicket,
    ) -> list[Move | KeyedMove]:
        """Moves that bring these blocks of one prefix, each from the level that was found to have it. One that is gone
        since then, because others write to that level too, will be told missing."""
        # A store's in several moves, which as many threads load. Host blocks cross the link one after the other anyway.
        by_level: dict[int, list[Wanted]] = {}
        for each in wanted:
            by_level.setdefault(sources[each[1]], []).append(each)
        moves = []
        for number, of_level in by_level.items():
            level = self.levels[number]
            size = len(of_level)
            if isinstance(level, StoreLevel):
                size = _LOADED_TOGETHER if level.takes_all else _FETCHED_TOGETHER
            for first in range(0, len(of_level), size):
                ticket, chosen = take_ticket(), of_level[first : first + size]
                pairs = [each[:2] for each in chosen]
                moves.append(level.start_load(ticket, pairs))
                self._start(ticket, TierMove(level, True, pairs, chosen, token_ids))
                self.incoming.update({key: (block_id, ticket) for block_id, key in pairs})
        return moves

    # -- down

    def _note_fresh(self, block: Block) -> None:
        assert block.block_hash is not None
        self._fresh[block.block_hash] = block
        if len(self._fresh) > len(self._pool.blocks):  # some have been evicted meanwhile: the oldest, as a rule
            self._fresh.popitem(last=False)
            self.counters.num_lost += 1

    def start_stores(self, take_ticket: TakeTicket) -> list[Move | KeyedMove]:
        """Moves that write blocks down. Everything that was noted must have been computed by the steps before the one
        whose plan these go into."""
        by_level: dict[int, Pairs] = {}
        room = self.num_storable
        while self._fresh and room > 0:
            key, block = self._fresh.popitem(last=False)
            if block.block_hash != key:
                self.counters.num_lost += not self.has(key)
                continue
            lacking = [number for number in self._writable if not self.levels[number].contains(key)]
            for number in lacking:
                by_level.setdefault(number, []).append((block.block_id, key))
            room -= bool(lacking)
        moves = []
        for number, pairs in by_level.items():
            ticket, level = take_ticket(), self.levels[number]
            move = level.start_store(ticket, pairs)
            if move is not None:
                moves.append(move)
                self._start(ticket, TierMove(level, False, pairs[: len(move.pairs)]))
                self._num_storing += len(move.pairs)
        return moves

    def give_up_stores(self) -> None:
        """What waits to be written down is not."""
        self.counters.num_lost += len(self._fresh)
        self._fresh.clear()

    @property
    def peers(self) -> StoreLevel | None:
        """The level of blocks from other engines, and of those that are sent to them."""
        of_peers = (level for level in self.levels if isinstance(level, StoreLevel) and not level.takes_all)
        return next(of_peers, None)

    @property
    def num_storable(self) -> int:
        """Blocks that may begin to go down or out now."""
        return max(0, self._max_storing - self._num_storing)

    def start_send(self, pairs: Pairs, to: str, take_ticket: TakeTicket, filled_group: int | None = None) -> KeyedMove:
        """A move that gives blocks to another engine: what earlier steps have computed, or what the step in the making
        fills of a KV group. Of the latter there is no limit: a sequence that runs holds them anyway."""
        assert self.peers is not None, "this engine has no peers"
        ticket, is_limited = take_ticket(), filled_group is None
        self._start(ticket, TierMove(self.peers, False, pairs, is_limited=is_limited))
        self._num_storing += len(pairs) if is_limited else 0
        return self.peers.start_send(ticket, pairs, to, filled_group)

    def _start(self, ticket: int, move: TierMove) -> None:
        self.moves[ticket] = move
        for block_id, _ in move.pairs:
            self._pool.transfer_started(self._pool.blocks[block_id])

    # -- done

    def done(self, ticket: int, missing: Iterable[int]) -> bool:
        """A move is over. `missing`: the entries of a load that did not come. Returns whether all came."""
        move = self.moves.pop(ticket)
        lost = set(missing)
        counters = self.counters.levels[move.level.name]
        # The tail first: the order in which blocks go back to the free queue.
        for i, (block_id, key) in reversed(list(enumerate(move.pairs))):
            block = self._pool.blocks[block_id]
            if move.is_load:
                del self.incoming[key]
                if i not in lost and self._cache.insert(key, block):
                    _, _, block.chain_index, block.parent_hash = move.wanted[i]
                    block.packed_tokens = self._cache.pack_tokens(move.token_ids, block.chain_index)
                    if self._writable:
                        self._note_fresh(block)  # levels above the one it came from may want it
            self._pool.transfer_finished(block)
        move.level.done(ticket)
        if move.is_load:
            counters.num_loaded += len(move.pairs) - len(lost)
            counters.num_missing += len(lost)
        else:
            counters.num_stored += len(move.pairs) - len(lost)
            self._num_storing -= len(move.pairs) if move.is_limited else 0
        return not lost

    def forget(self, keys: Sequence[BlockHash]) -> None:
        for level in self.levels:
            level.forget(keys)

    def usage(self) -> list[dict[str, float | str]]:
        """Each level's numbers by name, the nearest first."""
        return [
            {"level": level.name, **asdict(self.counters.levels[level.name]), **level.usage()} for level in self.levels
        ]

    def check(self) -> None:
        loads = {ticket: move for ticket, move in self.moves.items() if move.is_load}
        coming = {key: (block_id, ticket) for ticket, move in loads.items() for block_id, key in move.pairs}
        assert coming == self.incoming, "blocks on their way up do not add up"
        for move in loads.values():
            assert [each[:2] for each in move.wanted] == move.pairs, "a load brings other blocks than are wanted"
        for block_id, _ in coming.values():
            assert self._pool.blocks[block_id].block_hash is None, f"block {block_id} has a hash before its bytes"
        num_storing = sum(len(move.pairs) for move in self.moves.values() if not move.is_load and move.is_limited)
        assert num_storing == self._num_storing, f"{num_storing} blocks go down, counted {self._num_storing}"
