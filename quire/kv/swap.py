"""Bookkeeping for blocks that move between device and host. Bytes are the executor's; here are only numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.kv.hashing import BlockHash
from quire.kv.table import BlockTable, TableSlices


@dataclass(slots=True, eq=False)
class SwappedSequence:
    """A sequence whose KV is on the host. It has no device blocks."""

    root: BlockHash
    hashes: list[BlockHash]  # of its full blocks, so that they need not be hashed again
    slices: TableSlices  # of host blocks
    num_computed: int

    @property
    def host_ids(self) -> list[int]:
        return [host_id for _, host_ids in self.slices for host_id in host_ids]


class Arrival(NamedTuple):
    """A sequence whose blocks are coming back, and how many of its tokens they hold."""

    table: BlockTable
    token_ids: Sequence[int]
    num_computed: int


@dataclass(slots=True)
class Moves:
    """The blocks that go out or come in under one ticket, until the executor reports them done."""

    device_ids: list[int] = field(default_factory=list)
    host_ids: list[int] = field(default_factory=list)
    arrival: Arrival | None = None


class HostPool:
    """Host blocks: each is free, held by a swapped sequence, or in transit (held by nobody, bytes still moving)."""

    __slots__ = ("_free", "_held", "_num_transfers", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: nothing is cached here, so order does not matter
        self._held = [False] * num_blocks
        self._num_transfers = [0] * num_blocks

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_held_blocks(self) -> int:
        return sum(self._held)

    def allocate(self, num_blocks: int) -> list[int]:
        assert num_blocks <= len(self._free), f"{num_blocks} host blocks asked, {len(self._free)} free"
        host_ids = [self._free.pop() for _ in range(num_blocks)]
        for host_id in host_ids:
            self._held[host_id] = True
        return host_ids

    def release(self, host_id: int) -> None:
        """Nobody holds it any more. It is free at once, or when its bytes have stopped moving."""
        assert self._held[host_id], f"host block {host_id} is held by nobody"
        self._held[host_id] = False
        if not self._num_transfers[host_id]:
            self._free.append(host_id)

    def transfer_started(self, host_id: int) -> None:
        assert self._held[host_id], f"host block {host_id} is moved but held by nobody"
        self._num_transfers[host_id] += 1

    def transfer_finished(self, host_id: int) -> None:
        assert self._num_transfers[host_id], f"host block {host_id} has no transfer under way"
        self._num_transfers[host_id] -= 1
        if not self._num_transfers[host_id] and not self._held[host_id]:
            self._free.append(host_id)

    def check(self, held_ids: list[int], moving_ids: list[int]) -> None:
        """`held_ids`: of every swapped sequence; `moving_ids`: of every transfer under way."""
        assert len(set(held_ids)) == len(held_ids), "two swapped sequences hold the same host block"
        assert set(held_ids) == {i for i, held in enumerate(self._held) if held}, "held host blocks do not add up"
        num_transfers = [0] * self.num_blocks
        for host_id in moving_ids:
            num_transfers[host_id] += 1
        assert num_transfers == self._num_transfers, "host blocks in transit do not add up"
        idle = {i for i in range(self.num_blocks) if not self._held[i] and not num_transfers[i]}
        assert len(self._free) == len(set(self._free)) and set(self._free) == idle, "free host blocks do not add up"
