"""Which replica has which block: one map from block hashes to replicas, for exact caches and for guessed ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

BlockHash = bytes


class BlockIndex:
    """The replicas that hold each block, as the bits of one integer.

    A replica holds a block where its cache does (`fill`, `evict`: what the replica itself published), where a request
    that is under way there will have computed it (`promise`), or where it was routed there before and nobody knows
    better (`guess`, the last `capacity` blocks of a replica). One walk along a prompt's blocks finds how much of it
    every replica has, however many replicas there are.
    """

    def __init__(self) -> None:
        self._holders: dict[BlockHash, int] = {}
        self._cached: dict[int, set[BlockHash]] = {}
        self._promised: dict[int, dict[BlockHash, int]] = {}
        self._guessed: dict[int, OrderedDict[BlockHash, None]] = {}

    def add(self, bit: int) -> None:
        self._cached[bit], self._promised[bit], self._guessed[bit] = set(), {}, OrderedDict()

    def remove(self, bit: int) -> None:
        everything = {*self._cached.pop(bit), *self._promised.pop(bit), *self._guessed.pop(bit)}
        for block_hash in everything:
            self._clear(bit, block_hash)

    def num_cached(self, bit: int) -> int:
        return len(self._cached[bit]) + len(self._guessed[bit])

    def fill(self, bit: int, hashes: Iterable[BlockHash]) -> None:
        for block_hash in hashes:
            self._cached[bit].add(block_hash)
            self._set(bit, block_hash)

    def evict(self, bit: int, hashes: Iterable[BlockHash]) -> None:
        for block_hash in hashes:
            self._cached[bit].discard(block_hash)
            self._drop(bit, block_hash)

    def replace(self, bit: int, hashes: Iterable[BlockHash]) -> None:
        """All that the replica has: for a reader who begins, or missed something."""
        new = set(hashes)
        self.evict(bit, self._cached[bit] - new)
        self.fill(bit, new)

    def promise(self, bit: int, hashes: Iterable[BlockHash]) -> None:
        promised = self._promised[bit]
        for block_hash in hashes:
            promised[block_hash] = promised.get(block_hash, 0) + 1
            self._set(bit, block_hash)

    def withdraw(self, bit: int, hashes: Iterable[BlockHash]) -> None:
        """The request of a promise has ended; the replica's own word counts from now on."""
        promised = self._promised[bit]
        for block_hash in hashes:
            promised[block_hash] -= 1
            if not promised[block_hash]:
                del promised[block_hash]
                self._drop(bit, block_hash)

    def guess(self, bit: int, hashes: Sequence[BlockHash], capacity: int) -> None:
        guessed = self._guessed[bit]
        for block_hash in reversed(hashes):  # a prefix's head is evicted after its tail, as in a real cache
            guessed[block_hash] = None
            guessed.move_to_end(block_hash)
            self._set(bit, block_hash)
        while len(guessed) > capacity:
            self._drop(bit, guessed.popitem(last=False)[0])

    def leading(self, hashes: Sequence[BlockHash], among: int) -> dict[int, int]:
        """For each replica of the mask `among` that has the first block: how many leading blocks it has."""
        found: dict[int, int] = {}
        holders = among
        for count, block_hash in enumerate(hashes):
            still = holders & self._holders.get(block_hash, 0)
            for bit in bits_of(holders & ~still):
                if count:
                    found[bit] = count
            holders = still
            if not holders:
                return found
        found.update(dict.fromkeys(bits_of(holders), len(hashes)) if hashes else ())
        return found

    def check(self) -> None:
        """Prove that a replica's bit is set exactly where one of its three memories has the block."""
        for block_hash, holders in self._holders.items():
            assert holders, "a block without holders is kept"
            assert all(self._has(bit, block_hash) for bit in bits_of(holders)), "a replica is said to hold too much"
        for bit in self._cached:
            for block_hash in (*self._cached[bit], *self._promised[bit], *self._guessed[bit]):
                assert self._holders.get(block_hash, 0) >> bit & 1, "a replica is said to hold too little"

    def _has(self, bit: int, block_hash: BlockHash) -> bool:
        return block_hash in self._cached[bit] or block_hash in self._promised[bit] or block_hash in self._guessed[bit]

    def _set(self, bit: int, block_hash: BlockHash) -> None:
        self._holders[block_hash] = self._holders.get(block_hash, 0) | 1 << bit

    def _drop(self, bit: int, block_hash: BlockHash) -> None:
        if not self._has(bit, block_hash):
            self._clear(bit, block_hash)

    def _clear(self, bit: int, block_hash: BlockHash) -> None:
        left = self._holders.get(block_hash, 0) & ~(1 << bit)
        if left:
            self._holders[block_hash] = left
        else:
            self._holders.pop(block_hash, None)


def bits_of(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
