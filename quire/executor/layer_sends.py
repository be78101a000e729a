"""Blocks on their way to another engine, a few layers at a time.

    layers of a step that fills them    0 1 2 | 3 4 5 6 | 7 8 9 10 | ... | 27 28 29 30 | 31
                                              each run of layers leaves when its last is written
    the step has ended well                                              the last layer leaves, behind all others

The other engine uses no block before it has the last layer. So whatever becomes of the step, nothing counts there that
would not count here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from quire.executor.kv_cache import KVCache
from quire.models.kv_layout import KVLayout
from quire.plan import KeyedMove
from quire.tiers.peers import Piece, new_send_id
from quire.tiers.sealed import SealedStore

# Before the last layer, which is alone so that as little as possible is left when a step ends. Each piece costs the
# host a message, its answer and a turn of a thread, while it launches the step: layer by layer that would be much of
# what short steps take, and the link is as busy with a few.
_RUNS = 8


@dataclass(slots=True, frozen=True)
class LayerRun:
    """Neighbouring slots of a block, complete when this layer is written."""

    slots: range
    last_layer: int


def layer_runs(layout: KVLayout, group: int) -> list[LayerRun]:
    """The slots of a KV group's blocks, in the order in which a step writes them. Slots that belong to no layer go with
    the last."""
    layers = [layer for layer, each in enumerate(layout.groups) if each == group]
    last = len(layers) - 1
    size = max(1, -(-last // _RUNS))
    ends = [*range(last, 0, -size)][::-1]
    starts = [0, *ends]
    runs = [LayerRun(range(start, end), layers[end - 1]) for start, end in zip(starts, ends, strict=False)]
    return [*runs, LayerRun(range(starts[-1], layout.num_slots), layers[last])]


class BlockSend:
    """One move of blocks to another engine. Its runs are begun on one thread and arrive on others."""

    def __init__(
        self, move: KeyedMove, store: SealedStore, cache: KVCache, runs: list[LayerRun], done: Callable[[bool], None]
    ) -> None:
        """done: hears once whether all of it has arrived; then the blocks are no longer read."""
        assert move.to is not None
        self._to = move.to
        self._block_ids = [block_id for block_id, _ in move.pairs]
        self._keys = [key for _, key in move.pairs]
        self._is_filled = move.filled_group is not None
        self._store = store
        self._cache = cache
        self._slot_bytes = cache.block_bytes // runs[-1].slots.stop
        self._runs = runs
        self._done = done
        self._send_id = new_send_id()
        self._lock = threading.Lock()  # guards what follows
        self._num_begun = 0  # runs
        self._num_under_way = 0
        self._num_arrived_bytes = 0
        self._has_failed = False
        self._may_end: bool | None = None  # whether the last run may leave; None: that is not known yet
        self._is_ending = False

    def begin(self, through_layer: int) -> None:
        """Runs up to this layer are written. They leave, but for the last."""
        with self._lock:
            first = end = self._num_begun
            while end < len(self._runs) - 1 and self._runs[end].last_layer <= through_layer:
                end += 1
            if self._has_failed or self._may_end is False:
                return
            self._num_begun = end
            self._num_under_way += end - first
        for run in self._runs[first:end]:
            self._start(run, partial(self._on_arrived, len(run.slots)))

    def end(self, *, is_good: bool) -> None:
        """All is written and good, so that the last run may leave when the others have arrived; or it never will, and
        what has arrived is of no use."""
        with self._lock:
            self._may_end = is_good
            if self._is_filled:
                num_bytes = len(self._keys) * self._cache.block_bytes
                self._store.counters.num_bytes_beside += self._num_arrived_bytes
                self._store.counters.num_bytes_behind += num_bytes - self._num_arrived_bytes
        self._end_if_due()

    def _on_arrived(self, num_slots: int, is_taken: bool) -> None:
        with self._lock:
            self._num_under_way -= 1
            self._num_arrived_bytes += is_taken * num_slots * self._slot_bytes * len(self._keys)
            self._has_failed |= not is_taken
        self._end_if_due()

    def _end_if_due(self) -> None:
        with self._lock:
            is_lost = self._has_failed or self._may_end is False
            has_begun = self._num_begun == len(self._runs) - 1
            if self._may_end is None or self._num_under_way or self._is_ending or not (has_begun or is_lost):
                return
            self._is_ending = True
        if is_lost:
            self._done(False)
        else:
            self._start(self._runs[-1], self._done)

    def _start(self, run: LayerRun, done: Callable[[bool], None]) -> None:
        slots, size = run.slots, self._slot_bytes
        piece = Piece(self._send_id, self._keys, slots.start * size, slots.stop * size)
        self._store.start_send(self._to, piece, partial(self._cache.read_slots, self._block_ids, slots), done)
