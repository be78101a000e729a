"""A rank's end of a split model's stores: what becomes of them is told to the engine (`split.py`).

On threads of its own: a disk that hangs while it is looked at holds up neither steps nor heartbeats, and no word of
moves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from quire.plan import KeyedMove
from quire.tiers.sealed import SealedStore
from quire.tiers.split import Expire, Forget, Order, StoreNews, Told

_TELL_S = 1.0  # between two looks at stores, and the longest that a key which others wrote goes untold


@dataclass(slots=True)
class _StoreState:
    """What is yet to be told of a store."""

    keys: dict[bytes, bool] = field(default_factory=dict)  # whether it is there: the last word
    num_carried_out: int = 0


class StoreTeller:
    """Tells at once when a move is over or an order is carried out, and of keys and numbers now and then."""

    def __init__(self, rank: int, stores: Sequence[SealedStore], send: Callable[[Told], None]) -> None:
        """send: called on the thread, the first time with all keys that the stores have."""
        self._rank = rank
        self._stores = stores
        self._send = send
        self._changed = threading.Condition()  # guards what follows
        self._states = [_StoreState() for _ in stores]
        self._moved: list[tuple[int, list[int]]] = []
        self._num_resets = 0
        self._usages: list[dict[str, int | float]] | None = None  # looked at, and not told yet
        self._is_urgent = False
        self._is_over = False
        for store, state in zip(stores, self._states, strict=True):
            store.tell_keys(partial(self._note, state))
        self._thread = threading.Thread(target=self._run, name="kv-tell", daemon=True)
        self._thread.start()
        # Another thread, and nobody waits for it: one store that hangs holds up no word of the others.
        threading.Thread(target=self._look, name="kv-usage", daemon=True).start()

    # -- from any thread

    def move_over(self, move: KeyedMove, missing: list[int]) -> None:
        """A move is over. What stores tell of their keys by themselves is not relied on: a load that brings nothing is
        not to be tried again and again, and a store need not keep what it is given."""
        keys = [key for _, key in move.pairs]
        if move.is_load:
            seen = dict.fromkeys((keys[i] for i in missing), False)
        else:
            seen = {key: self._stores[move.level].contains(key) for key in keys}
        with self._changed:
            self._states[move.level].keys.update(seen)
            self._moved.append((move.ticket, missing))
            self._hurry()

    def carry_out(self, order: Order) -> None:
        store, state = self._stores[order.store], self._states[order.store]
        match order:
            case Forget(_, keys):
                store.forget(keys, lambda: self._carried_out(state, keys))
            case Expire(_, older_than_s):
                store.expire(older_than_s, lambda num_dropped: self._carried_out(state))

    def reset(self) -> None:
        """No move is under way, and nobody wants to hear of those that are over."""
        with self._changed:
            self._num_resets += 1
            self._moved.clear()

    def close(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._thread.join()

    def _note(self, state: _StoreState, key: bytes, is_held: bool) -> None:
        with self._changed:
            state.keys[key] = is_held

    def _carried_out(self, state: _StoreState, forgotten: Sequence[bytes] = ()) -> None:
        with self._changed:
            state.keys.update(dict.fromkeys(forgotten, False))
            state.num_carried_out += 1
            self._hurry()

    def _hurry(self) -> None:
        self._is_urgent = True
        self._changed.notify_all()

    # -- the threads

    def _look(self) -> None:
        """Look now and then at what the stores hold."""
        while True:
            usages: list[dict[str, int | float]] = [dict(store.usage()) for store in self._stores]
            with self._changed:
                self._usages = usages
                self._hurry()
                if self._changed.wait_for(lambda: self._is_over, _TELL_S):
                    return

    def _run(self) -> None:
        with self._changed:  # the first word has numbers too, unless they are long in coming
            self._changed.wait_for(lambda: self._is_over or self._usages is not None, _TELL_S)
        while True:
            self._send(self._take())
            with self._changed:
                self._changed.wait_for(lambda: self._is_over or self._is_urgent, _TELL_S)
                if self._is_over:
                    return

    def _take(self) -> Told:
        with self._changed:
            self._is_urgent = False
            usages, self._usages = self._usages, None
            news = []
            for i, (store, state) in enumerate(zip(self._stores, self._states, strict=True)):
                keys, state.keys = state.keys, {}
                gained = [key for key, is_held in keys.items() if is_held]
                lost = [key for key, is_held in keys.items() if not is_held]
                usage = None if usages is None else usages[i]
                news.append(StoreNews(gained, lost, state.num_carried_out, store.block_s, usage))
            moved, self._moved = self._moved, []
            return Told(self._rank, self._num_resets, news, moved)
