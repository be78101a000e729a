"""Which replica has which beginning of a prompt: by block hashes, and, where nobody knows these yet, by the text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

BlockHash = bytes


class PrefixIndex(ABC):
    """The replicas that hold each link of a chain of hashes, as the bits of one integer.

    One walk along a prompt's chain finds how much of it every replica has, however many replicas there are.
    """

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}

    @abstractmethod
    def add(self, bit: int) -> None: ...

    @abstractmethod
    def remove(self, bit: int) -> None: ...

    @abstractmethod
    def _of(self, bit: int) -> Iterable[bytes]:
        """Everything that a replica holds, some of it perhaps twice."""

    @abstractmethod
    def _has(self, bit: int, link: bytes) -> bool: ...

    def leading(self, chain: Sequence[bytes], among: int) -> dict[int, int]:
        """For each replica of the mask `among` that has the first link: how many leading ones it has."""
        found: dict[int, int] = {}
        holders = among
        for count, link in enumerate(chain):
            still = holders & self._holders.get(link, 0)
            for bit in bits_of(holders & ~still):
                if count:
                    found[bit] = count
            holders = still
            if not holders:
                return found
        found.update(dict.fromkeys(bits_of(holders), len(chain)) if chain else ())
        return found

    def check(self, bits: Iterable[int]) -> None:
        """Prove that a replica's bit is set exactly where it holds the link."""
        for link, holders in self._holders.items():
            assert holders, "a link without holders is kept"
            assert all(self._has(bit, link) for bit in bits_of(holders)), "a replica is said to hold too much"
        for bit in bits:
            assert all(self._holders.get(one, 0) >> bit & 1 for one in self._of(bit)), "a replica holds more than said"

    def _set(self, bit: int, link: bytes) -> None:
        self._holders[link] = self._holders.get(link, 0) | 1 << bit

    def _drop(self, bit: int, link: bytes) -> None:
        if not self._has(bit, link):
            self._clear(bit, link)

    def _clear(self, bit: int, link: bytes) -> None:
        left = self._holders.get(link, 0) & ~(1 << bit)
        if left:
            self._holders[link] = left
        else:
            self._holders.pop(link, None)


class BlockIndex(PrefixIndex):
    """A replica holds a block where its cache does (`fill`, `evict`: what the replica itself published), or where a
    request that is under way there will have computed it (`promise`)."""

    def __init__(self) -> None:
        super().__init__()
        self._cached: dict[int, set[BlockHash]] = {}
        self._promised: dict[int, dict[BlockHash, int]] = {}

    def add(self, bit: int) -> None:
        self._cached[bit], self._promised[bit] = set(), {}

    def remove(self, bit: int) -> None:
        for block_hash in {*self._cached.pop(bit), *self._promised.pop(bit)}:
            self._clear(bit, block_hash)

    def num_cached(self, bit: int) -> int:
        return len(self._cached[bit])

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

    def _of(self, bit: int) -> Iterable[bytes]:
        return (*self._cached[bit], *self._promised[bit])

    def _has(self, bit: int, link: bytes) -> bool:
        return link in self._cached[bit] or link in self._promised[bit]


class TextIndex(PrefixIndex):
    """What was routed to each replica lately, by pieces of text, the last `capacity` of them."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity
        self._routed: dict[int, OrderedDict[bytes, None]] = {}  # by replica, in the order in which they are forgotten

    def add(self, bit: int) -> None:
        self._routed[bit] = OrderedDict()

    def remove(self, bit: int) -> None:
        for piece in self._routed.pop(bit):
            self._clear(bit, piece)

    def route(self, bit: int, pieces: Sequence[bytes]) -> None:
        routed = self._routed[bit]
        for piece in reversed(pieces):  # a text's beginning is forgotten after its end, as in a real cache
            routed[piece] = None
            routed.move_to_end(piece)
            self._set(bit, piece)
        while len(routed) > self._capacity:
            self._clear(bit, routed.popitem(last=False)[0])

    def _of(self, bit: int) -> Iterable[bytes]:
        return self._routed[bit]

    def _has(self, bit: int, link: bytes) -> bool:
        return link in self._routed[bit]


def bits_of(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
