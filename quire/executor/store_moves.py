"""Keyed moves: blocks between the device and stores below it, on threads beside the steps."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from quire.executor.kv_cache import KVCache
from quire.plan import KeyedMove
from quire.tiers.sealed import SEAL_BYTES, SealedStore

# With nothing to run, how long to wait for a move before looking whether a request has come.
_WAIT_S = 0.005


class StoreMoves:
    """Begins moves in the order of plans, and collects those that are over, in any order."""

    def __init__(self, cache: KVCache, stores: Sequence[SealedStore]) -> None:
        self.stores = list(stores)
        self._cache = cache
        self._changed = threading.Condition()  # guards what follows
        self._finished: list[tuple[int, list[int]]] = []
        self._under_way: set[int] = set()

    def move(self, move: KeyedMove) -> None:
        store = self.stores[move.level]
        block_ids = [block_id for block_id, _ in move.pairs]
        keys = [key for _, key in move.pairs]
        with self._changed:
            self._under_way.add(move.ticket)

        def done(missing: list[int]) -> None:
            with self._changed:
                if move.ticket in self._under_way:
                    self._under_way.remove(move.ticket)
                    self._finished.append((move.ticket, missing))
                self._changed.notify_all()

        if move.is_load:
            store.start_load(keys, self._cache.fillers(block_ids), done)
        else:
            store.start_store(keys, self._cache.payloads(block_ids, SEAL_BYTES), done, move.to)

    def take_finished(self) -> list[tuple[int, list[int]]]:
        """(ticket, places of what did not come) of moves that are over, each told once."""
        with self._changed:
            finished, self._finished = self._finished, []
        return finished

    def wait_a_moment(self) -> None:
        """Until a move is over, where there is any, but not for long."""
        with self._changed:
            if self._under_way and not self._finished:
                self._changed.wait(_WAIT_S)

    def forget_moves(self) -> None:
        """Nobody will hear of those that were begun. Waits for them: their blocks may be given to others."""
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way)
            self._finished.clear()

    def close(self) -> None:
        """Waits for what is under way."""
        for store in self.stores:
            store.close()
