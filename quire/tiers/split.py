"""Stores of a model that is split among ranks, as the engine sees them.

    engine  SplitStores ── plans with moves, Forget, Expire ──▶ every rank  SealedStore on its part of a block
                        ◀── Told: keys, moves that are over ── every rank  StoreTeller, on a thread of its own

Each rank keeps its part of every block in a store of its own, under the same key. They gain and lose keys each in its
own time: a disk is full, a segment is evicted, a record is damaged. A block is there while every rank has said that it
has its part, and a move is over when every rank has said so.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.plan import KeyedMove
from quire.tiers.collected import CollectedMoves
from quire.tiers.sealed import LATENCY_S

# That a level is known to have: with 16 tokens in each, 67 million tokens, in some 500 MB. The oldest go first. A store
# that does not tell what it drops would have ever more of them.
_MAX_KEYS = 2**22


@dataclass(slots=True, frozen=True)
class Forget:
    """To all ranks: forget these blocks, behind the stores of earlier plans."""

    store: int
    keys: list[bytes]


@dataclass(slots=True, frozen=True)
class Expire:
    """To all ranks: drop what was not used for so long."""

    store: int
    older_than_s: float


Order = Forget | Expire


@dataclass(slots=True, frozen=True)
class StoreNews:
    """What has become of one store of a rank since that was told last."""

    gained: list[bytes]
    lost: list[bytes]
    num_carried_out: int  # orders, since the start
    block_s: float  # that its part of a block takes to load
    usage: dict[str, int | float] | None  # None: not looked at


@dataclass(slots=True, frozen=True)
class Told:
    """From a rank. The keys are as they were when the moves were over, or later."""

    rank: int
    num_resets: int  # of the rank so far: tickets before the last one mean nothing any more
    stores: list[StoreNews]
    moved: list[tuple[int, list[int]]]  # tickets, and the places of what did not come, or was not stored


@dataclass(slots=True, frozen=True)
class _Pending:
    """An order that some rank has yet to carry out."""

    number: int
    keys: Sequence[bytes] = ()  # to forget
    num_lost: int = 0  # whole blocks, when it was given
    expired: Callable[[int], None] = lambda num_dropped: None


class SplitStore:
    """One level. `contains`, `load_s`, `forget`, `usage` and `expire` are the scheduler's; what ranks tell comes from
    another thread.

    Invariants, proved by `check()`: `num_whole` blocks are held by all ranks; a key is among the forgotten exactly
    while an order to forget it is pending, and does not count.
    """

    takes_all = True

    def __init__(
        self, name: str, number: int, num_ranks: int, tell: Callable[[Order], None], lock: threading.Condition
    ) -> None:
        self.name = name
        self._number = number  # by which ranks know it
        self._tell = tell
        self._lock = lock
        self._all = (1 << num_ranks) - 1
        self._holders: dict[bytes, int] = {}  # by key: a bit for each rank that has its part
        self._num_whole = 0
        self._num_lost = 0  # whole blocks that are whole no more, since the start
        self._forgotten: dict[bytes, int] = {}  # by key: the last order that forgets it
        self._orders: deque[_Pending] = deque()
        self._num_orders = 0
        self._num_carried_out = [0] * num_ranks
        self._block_s = [0.0] * num_ranks
        self._usage: list[dict[str, int | float]] = [{} for _ in range(num_ranks)]
        self.num_queued = 0  # blocks whose loads are under way

    # -- the scheduler's side: nothing here waits

    def contains(self, key: bytes) -> bool:
        return self._holders.get(key) == self._all and key not in self._forgotten

    def load_s(self, num_blocks: int) -> float:
        """Seconds that the slowest rank takes."""
        return LATENCY_S + (self.num_queued + num_blocks) * max(self._block_s)

    def forget(self, keys: Sequence[bytes]) -> None:
        """`contains` says no at once. Until every rank has carried the order out, what ranks tell of these keys may be
        older than the order, and does not count."""
        if not keys:
            return
        with self._lock:
            order = self._add_order(_Pending(self._num_orders + 1, tuple(keys)))
            self._forgotten.update(dict.fromkeys(order.keys, order.number))
        self._tell(Forget(self._number, list(keys)))

    def expire(self, older_than_s: float, done: Callable[[int], None]) -> None:
        """`done` hears how many blocks were whole and are so no more, once every rank has carried it out."""
        with self._lock:
            self._add_order(_Pending(self._num_orders + 1, num_lost=self._num_lost, expired=done))
        self._tell(Expire(self._number, older_than_s))

    def _add_order(self, order: _Pending) -> _Pending:
        self._orders.append(order)
        self._num_orders = order.number
        return order

    def usage(self) -> dict[str, float]:
        """Blocks are counted once, where all ranks have them; bytes, files and troubles are those of all ranks."""
        with self._lock:
            names = dict.fromkeys(name for usage in self._usage for name in usage)
            values = {name: [usage[name] for usage in self._usage if name in usage] for name in names}
            found: dict[str, float] = {
                name: max(each) if name == "oldest_s" else sum(each) for name, each in values.items()
            }
            return found | {
                "num_blocks": self._num_whole,
                "num_partial_blocks": len(self._holders) - self._num_whole,
                "load_block_s": max(self._block_s),
            }

    # -- what ranks tell

    def hear(self, rank: int, news: StoreNews) -> None:
        """Take in what a rank tells. Called with the lock held."""
        bit = 1 << rank
        for key in news.gained:
            before = self._holders.get(key, 0)
            self._holders[key] = before | bit
            self._num_whole += before != self._all and before | bit == self._all
        if len(self._holders) > _MAX_KEYS:
            self._drop_oldest_keys()
        for key in news.lost:
            before = self._holders.pop(key, 0)
            if before & ~bit:
                self._holders[key] = before & ~bit
            if before == self._all:
                self._num_whole -= 1
                self._num_lost += 1
        self._block_s[rank] = news.block_s
        if news.usage is not None:
            self._usage[rank] = news.usage
        self._num_carried_out[rank] = news.num_carried_out
        while self._orders and self._orders[0].number <= min(self._num_carried_out):
            order = self._orders.popleft()
            for key in order.keys:
                if self._forgotten.get(key) == order.number:
                    del self._forgotten[key]
            order.expired(self._num_lost - order.num_lost)

    def _drop_oldest_keys(self) -> None:
        """Some at once: to find the first in a dict takes as long as many have gone before it."""
        for key in list(itertools.islice(self._holders, len(self._holders) - _MAX_KEYS * 63 // 64)):
            self._num_whole -= self._holders.pop(key) == self._all

    def check(self) -> None:
        with self._lock:
            num_whole = sum(holders == self._all for holders in self._holders.values())
            assert num_whole == self._num_whole, f"{num_whole} blocks are whole, counted {self._num_whole}"
            assert all(self._holders.values()), "a key that no rank has"
            last = {key: order.number for order in self._orders for key in order.keys}
            assert last == self._forgotten, "forgotten keys and pending orders differ"


@dataclass(slots=True)
class _SplitMove:
    store: SplitStore
    num_loading: int  # blocks; 0: it stores
    ranks: set[int]  # that have yet to say that it is over
    missing: set[int] = field(default_factory=set)


class SplitStores(CollectedMoves):
    """All levels of a split model's stores, and the moves to and from them. A move is complete where no rank misses
    anything: a block of which one rank's part did not come has not come."""

    def __init__(self, names: Sequence[str], num_ranks: int, tell: Callable[[Order], None]) -> None:
        """tell: gives an order to all ranks, in order with plans."""
        super().__init__()
        self._ranks = range(num_ranks)
        self.stores = [SplitStore(name, i, num_ranks, tell, self._changed) for i, name in enumerate(names)]
        self._moves: dict[int, _SplitMove] = {}
        self._num_resets = 0
        self._silent = set(self._ranks) if names else set()  # ranks that have told nothing yet

    def begin(self, moves: Sequence[KeyedMove]) -> None:
        """Note the moves of a plan before the ranks are given it."""
        if not moves:
            return
        with self._changed:
            for move in moves:
                store, num_loading = self.stores[move.level], len(move.pairs) if move.is_load else 0
                store.num_queued += num_loading
                self._moves[move.ticket] = _SplitMove(store, num_loading, set(self._ranks))

    def hear(self, told: Told) -> None:
        """Take in what a rank tells. Called from any thread, for each rank in the order in which it told."""
        with self._changed:
            self._silent.discard(told.rank)
            for store, news in zip(self.stores, told.stores, strict=True):
                store.hear(told.rank, news)
            for ticket, missing in told.moved if told.num_resets == self._num_resets else ():
                self._over(told.rank, ticket, missing)
            self._changed.notify_all()

    def _over(self, rank: int, ticket: int, missing: list[int]) -> None:
        move = self._moves[ticket]
        move.ranks.remove(rank)
        move.missing.update(missing)
        if not move.ranks:
            del self._moves[ticket]
            move.store.num_queued -= move.num_loading
            self._finished.append((ticket, sorted(move.missing)))

    def _has_moves(self) -> bool:
        return bool(self._moves)

    def wait_for_all(self, within_s: float) -> bool:
        """Whether every rank has told what it has, if need be within this time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._silent, within_s)

    def reset(self) -> None:
        """Ranks are told to forget their moves; what they tell of those before does not count."""
        with self._changed:
            self._num_resets += 1
            self._moves.clear()
            self._finished.clear()
            for store in self.stores:
                store.num_queued = 0

    def check(self) -> None:
        with self._changed:
            for store in self.stores:
                store.check()
                num_loading = sum(move.num_loading for move in self._moves.values() if move.store is store)
                assert num_loading == store.num_queued, f"{num_loading} blocks load, counted {store.num_queued}"
            assert all(move.ranks for move in self._moves.values()), "a move that is over is still waited for"
