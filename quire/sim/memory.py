"""Simulated KV memory: instead of keys and values, each slot holds the fingerprint of the prefix that it belongs to.

So a read can be checked for what it should have found: wrong sharing, a missed copy, a wrong swap or a block that was
given away too early leave another fingerprint, or none.
"""

from __future__ import annotations


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

    def swap_out(self, pairs: list[tuple[int, int]]) -> None:
        for device, host in pairs:
            self.host[host] = list(self.device[device])

    def swap_in(self, pairs: list[tuple[int, int]]) -> None:
        for host, device in pairs:
            self.device[device] = list(self.host[host])

    def write(self, table: list[int], fingerprints: list[int], start: int, end: int) -> None:
        for position in range(start, end):
            self.device[table[position // self.block_size]][position % self.block_size] = fingerprints[position]

    def check_read(self, table: list[int], fingerprints: list[int], end: int, reader: str) -> None:
        """Assert that positions [0, end) hold the KV of this very prefix."""
        size = self.block_size
        for index in range(-(-end // size)):
            expected = fingerprints[index * size : min((index + 1) * size, end)]
            found = self.device[table[index]]
            if found[: len(expected)] != expected:
                at = next(i for i, value in enumerate(expected) if found[i] != value)
                what = "never written" if found[at] is None else "of another prefix"
                raise AssertionError(f"{reader} reads position {index * size + at} in block {table[index]}: {what}")
