"""Keyed moves: blocks between the device and stores below it, or other engines, on threads beside the steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from quire.executor.kv_cache import KVCache
from quire.executor.layer_sends import BlockSend, LayerRun, layer_runs
from quire.models.kv_layout import KVLayout
from quire.plan import KeyedMove
from quire.tiers.collected import CollectedMoves
from quire.tiers.sealed import SEAL_BYTES, SealedStore


class StoreMoves(CollectedMoves):
    """Begins moves in the order of plans, and collects those that are over, in any order."""

    def __init__(self, cache: KVCache, stores: Sequence[SealedStore], layout: KVLayout) -> None:
        super().__init__()
        self.stores = list(stores)
        self._cache = cache
        self._whole = [LayerRun(range(layout.num_slots), len(layout.groups) - 1)]
        self._runs = [layer_runs(layout, group) for group in range(len(layout.windows))] if stores else []
        self._waiting = ThreadPoolExecutor(1, "kv-written")  # for a GPU, which writes layers in the order of submission
        self._awaited = {run.last_layer for runs in self._runs for run in runs[:-1]}  # layers
        self._filled: dict[int, list[BlockSend]] = {}  # by step: of the blocks that it fills, until it is over
        self._under_way: set[int] = set()  # tickets
        # Called at once, on another thread, with loads and stores that are over; None: they are kept to be taken.
        self.on_over: Callable[[KeyedMove, list[int]], None] | None = None

    def move(self, move: KeyedMove, step: int) -> None:
        """step: of the plan that it belongs to."""
        store = self.stores[move.level]
        block_ids = [block_id for block_id, _ in move.pairs]
        keys = [key for _, key in move.pairs]
        with self._changed:
            self._under_way.add(move.ticket)

        def done(missing: list[int]) -> None:
            if self.on_over is not None:
                self.on_over(move, missing)
            with self._changed:
                if move.ticket in self._under_way:
                    self._under_way.remove(move.ticket)
                    if self.on_over is None:
                        self._finished.append((move.ticket, missing))
                self._changed.notify_all()

        if move.is_load:
            store.start_load(keys, self._cache.fillers(block_ids), done)
        elif move.to is None:
            store.start_store(keys, self._cache.payloads(block_ids, SEAL_BYTES), done)
        else:

            def arrived(is_taken: bool) -> None:
                """Count the blocks as one: the other engine has all of them, or none may be relied on."""
                done([] if is_taken else list(range(len(keys))))

            runs = self._whole if move.filled_group is None else self._runs[move.filled_group]
            send = BlockSend(move, store, self._cache, runs, arrived)
            if move.filled_group is None:
                self._when_written(lambda: send.end(is_good=True))
            else:
                self._filled.setdefault(step, []).append(send)

    # -- sends of blocks that a step fills: layers are written, the forward pass is submitted, the step is over

    def layer_hook(self, step: int) -> Callable[[int], None] | None:
        """What a forward pass calls with each layer that it has written. None: nobody waits for any."""
        sends = self._filled.get(step)
        if sends is None:
            return None

        def on_written(layer: int) -> None:
            if layer in self._awaited:
                self._begin(sends, layer)

        return on_written

    def on_pass(self, step: int) -> None:
        """All layers are submitted. A pass without a hook, captured or in one call, tells of all of them here."""
        if step in self._filled:
            self._begin(self._filled[step], len(self._cache.layers) - 1)

    def _begin(self, sends: list[BlockSend], through_layer: int) -> None:
        def begin() -> None:
            for send in sends:
                send.begin(through_layer)

        self._when_written(begin)

    def _when_written(self, call: Callable[[], None]) -> None:
        """Call it once the device has done all that was submitted so far; neither it nor the steps wait for that. One
        thread does, so that those which send are free for what can be sent."""
        mark = self._cache.mark()
        if mark is None:
            call()
        else:
            self._waiting.submit(_wait_and_call, mark, call)

    def on_step(self, step: int, *, is_good: bool) -> None:
        """A step is over. What one that failed has left in its blocks must not count anywhere."""
        for send in self._filled.pop(step, ()):
            send.end(is_good=is_good)

    # -- moves that are over

    def _has_moves(self) -> bool:
        return bool(self._under_way)

    def forget_moves(self) -> None:
        """Nobody will hear of those that were begun. Waits for them: their blocks may be given to others."""
        self._give_up_filled()
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way)
            self._finished.clear()

    def _give_up_filled(self) -> None:
        """Drop the sends of steps whose results nobody will take: their last layers never leave."""
        for step in list(self._filled):
            self.on_step(step, is_good=False)

    def close(self) -> None:
        """Waits for what is under way."""
        self._give_up_filled()
        self._waiting.shutdown(wait=True)
        for store in self.stores:
            store.close()


def _wait_and_call(mark: torch.cuda.Event, call: Callable[[], None]) -> None:
    mark.synchronize()
    call()
