"""Simulated KV memory: instead of keys and values, each slot holds the fingerprint of the prefix that it belongs to.

So a read can be checked for what it should have found: wrong sharing, a missed copy, a wrong swap or a block that was
given away too early leave another fingerprint, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.plan import KeyedMove, Move


class SimMemory:
    """Device and host blocks. `None` is a slot that was never written."""

    def __init__(self, *, num_blocks: int, num_host_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.device: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.host: list[list[int | None]] = [[None] * block_size for _ in range(num_host_blocks)]

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """(from, to) device blocks, all at once: every source is read before a target is written."""
        targets = [to for _, to in pairs]
        assert len(set(targets)) == len(targets), f"copies write a block twice: {pairs}"
        contents = [list(self.device[source]) for source, _ in pairs]
        for to, content in zip(targets, contents, strict=True):
            self.device[to] = content

    def move(self, move: Move) -> None:
        for device, host in move.pairs:
            if move.is_load:
                self.device[device] = list(self.host[host])
            else:
                self.host[host] = list(self.device[device])

    def write(self, table: SimTable, fingerprints: list[int], start: int, end: int) -> None:
        for position in range(start, end):
            block = table.block_at(position // self.block_size)
            self.device[block][position % self.block_size] = fingerprints[position] + table.group

    def check_read(self, table: SimTable, fingerprints: list[int], start: int, end: int, reader: str) -> None:
        """Assert that what tokens [start, end) see holds the KV of this very prefix."""
        size = self.block_size
        first = 0 if table.window is None else max(0, start - table.window + 1)
        for index in range(first // size, -(-end // size)):
            low, high = max(first, index * size), min((index + 1) * size, end)
            expected = [fingerprint + table.group for fingerprint in fingerprints[low:high]]
            block = table.block_at(index)
            found = self.device[block][low - index * size : high - index * size]
            if found != expected:
                at = next(i for i, value in enumerate(expected) if found[i] != value)
                what = "never written" if found[at] is None else "of another prefix"
                raise AssertionError(f"{reader} reads position {low + at} in block {block}: {what}")


class SimStore:
    """A store of blocks by hash, below simulated memory. What is in `lost` is told of, and does not come."""

    def __init__(self, name: str = "store", *, block_s: float = 0.0, peers: dict[str, SimStore] | None = None) -> None:
        """peers: where blocks are sent to, by address; this store has what others sent. Else every block is kept."""
        self.name = name
        self.takes_all = peers is None
        self._peers = {} if peers is None else peers
        self.is_torn = False  # the next send fails
        self.blocks: dict[bytes, list[int | None]] = {}
        self.lost: set[bytes] = set()
        self._block_s = block_s

    def contains(self, key: bytes) -> bool:
        return key in self.blocks

    def load_s(self, num_blocks: int) -> float:
        return num_blocks * self._block_s

    def forget(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.blocks.pop(key, None)

    def expire(self, older_than_s: float, done: Callable[[int], None]) -> None:
        done(0)

    def usage(self) -> dict[str, float]:
        return {"num_blocks": len(self.blocks)}

    def move(self, move: KeyedMove, device: list[list[int | None]], *, is_useless: bool = False) -> list[int]:
        """Returns the entries of a load that did not come, or of a send that did not arrive. is_useless: of a send, the
        step that fills its blocks has failed."""
        missing: list[int] = []
        if move.to is not None:
            is_torn, self.is_torn = self.is_torn, False
            if is_torn or is_useless:  # some of it may be there, of which nothing counts
                return list(range(len(move.pairs)))
            for block, key in move.pairs:
                self._peers[move.to].blocks[key] = list(device[block])
            return []
        for i, (block, key) in enumerate(move.pairs):
            if not move.is_load:
                self.blocks[key] = list(device[block])
            elif key in self.lost or key not in self.blocks:
                self.blocks.pop(key, None)
                self.lost.discard(key)
                missing.append(i)
            else:
                device[block] = list(self.blocks[key])
        return missing


@dataclass(slots=True)
class SimTable:
    """A row's blocks in one KV group, as the executor has them. It is never told that leading ones were given back: it
    knows which ones no token sees any more."""

    group: int
    window: int | None
    first: int
    block_ids: list[int]

    def block_at(self, index: int) -> int:
        assert index >= self.first, f"block {index} of a table that begins with block {self.first}"
        return self.block_ids[index - self.first]

    @property
    def end(self) -> int:
        return self.first + len(self.block_ids)

    def readable(self, position: int, block_size: int) -> list[int]:
        """The blocks that the token at a position, or a later one, sees or writes."""
        if self.window is None:
            return self.block_ids
        return self.block_ids[max(0, (position - self.window + 1) // block_size - self.first) :]

    def copy(self) -> SimTable:
        return SimTable(self.group, self.window, self.first, list(self.block_ids))
