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
