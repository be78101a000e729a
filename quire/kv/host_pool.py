"""Host blocks and their states: the rules of the device's pool, for memory that sequences are swapped to and that
keeps cached blocks. Bytes are the executor's; here are only numbers."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from quire.kv.hashing import BlockHash


class HostPool:
    """Host blocks: each is free, cached (known by hash, held by nobody), held by a swapped sequence or by a store that
    is still under way, or in transit (held by nobody, bytes still moving).

    A cached block that is being read for a load is in transit too: it keeps its hash, and is not evicted.
    """

    __slots__ = (
        *("_cached", "_clock", "_free", "_hashes", "_held", "_num_cached_moving", "_num_transfers", "_used_s"),
        "num_blocks",
    )

    def __init__(self, num_blocks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_blocks = num_blocks
        self._clock = clock
        self._used_s: dict[BlockHash, float] = {}  # when cached blocks were used last
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: what nobody knows has no order
        self._held = [False] * num_blocks
        self._num_transfers = [0] * num_blocks
        self._hashes: dict[int, BlockHash] = {}  # of cached blocks
        self._cached: OrderedDict[BlockHash, int] = OrderedDict()  # the least recently used first
        self._num_cached_moving = 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out: free, or cached and not being read."""
        return len(self._free) + len(self._cached) - self._num_cached_moving

    @property
    def num_cached_blocks(self) -> int:
        return len(self._cached)

    def allocate(self, num_blocks: int) -> list[int]:
        assert num_blocks <= self.num_free_blocks, f"{num_blocks} host blocks asked, {self.num_free_blocks} free"
        while len(self._free) < num_blocks:
            self._evict_oldest()
        host_ids = [self._free.pop() for _ in range(num_blocks)]
        for host_id in host_ids:
            self._held[host_id] = True
        return host_ids

    def release(self, host_id: int) -> None:
        """Nobody holds it any more. It is free at once, or when its bytes have stopped moving."""
        assert self._held[host_id], f"host block {host_id} is held by nobody"
        self._held[host_id] = False
        self._rest(host_id)

    def transfer_started(self, host_id: int) -> None:
        is_cached = host_id in self._hashes
        assert self._held[host_id] or is_cached, f"host block {host_id} is moved but held by nobody"
        if is_cached and not self._num_transfers[host_id]:
            self._num_cached_moving += 1
        self._num_transfers[host_id] += 1

    def transfer_finished(self, host_id: int) -> None:
        assert self._num_transfers[host_id], f"host block {host_id} has no transfer under way"
        self._num_transfers[host_id] -= 1
        if not self._num_transfers[host_id] and host_id in self._hashes:
            self._num_cached_moving -= 1
        self._rest(host_id)

    # -- cached blocks

    def lookup(self, block_hash: BlockHash) -> int | None:
        return self._cached.get(block_hash)

    def use(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The blocks, which are now the most recently used ones."""
        cached, now_s = self._cached, self._clock()
        for block_hash in hashes:
            cached.move_to_end(block_hash)
        self._used_s.update(dict.fromkeys(hashes, now_s))
        return [cached[block_hash] for block_hash in hashes]

    def keep(self, host_id: int, block_hash: BlockHash) -> None:
        """A held block's bytes have come: it is cached now, unless another with the same content is."""
        assert self._held[host_id] and not self._num_transfers[host_id], f"host block {host_id} cannot be cached"
        if block_hash not in self._cached:
            self._held[host_id] = False
            self._cached[block_hash] = host_id
            self._used_s[block_hash] = self._clock()
            self._hashes[host_id] = block_hash
        else:
            self.release(host_id)

    def forget(self, block_hash: BlockHash) -> None:
        host_id = self._cached.pop(block_hash, None)
        if host_id is not None:
            del self._hashes[host_id], self._used_s[block_hash]
            if self._num_transfers[host_id]:
                self._num_cached_moving -= 1
            self._rest(host_id)

    @property
    def oldest_s(self) -> float:
        """How long ago the least recently used cached block was used."""
        first = next(iter(self._cached), None)
        return 0.0 if first is None else self._clock() - self._used_s[first]

    def _evict_oldest(self) -> None:
        # Those that are being read were used last, so the first that is idle is near the front.
        self.forget(next(h for h, host_id in self._cached.items() if not self._num_transfers[host_id]))

    def _rest(self, host_id: int) -> None:
        if not (self._held[host_id] or self._num_transfers[host_id] or host_id in self._hashes):
            self._free.append(host_id)

    def check(self, held_ids: list[int], moving_ids: list[int]) -> None:
        """`held_ids`: of swapped sequences and of stores under way; `moving_ids`: of every transfer under way."""
        assert len(set(held_ids)) == len(held_ids), "two swapped sequences hold the same host block"
        assert set(held_ids) == {i for i, held in enumerate(self._held) if held}, "held host blocks do not add up"
        num_transfers = [0] * self.num_blocks
        for host_id in moving_ids:
            num_transfers[host_id] += 1
        assert num_transfers == self._num_transfers, "host blocks in transit do not add up"
        assert {h: i for i, h in self._hashes.items()} == self._cached, "cached host blocks do not add up"
        assert self._used_s.keys() == self._cached.keys(), "ages of host blocks do not add up"
        assert not self._hashes.keys() & set(held_ids), "a host block is cached and held"
        num_moving = sum(num_transfers[host_id] > 0 for host_id in self._hashes)
        assert num_moving == self._num_cached_moving, "cached host blocks that are being read do not add up"
        idle = {
            i for i in range(self.num_blocks) if not self._held[i] and not num_transfers[i] and i not in self._hashes
        }
        assert len(self._free) == len(set(self._free)) and set(self._free) == idle, "free host blocks do not add up"
