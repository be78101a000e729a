"""The block map as a film: which blocks changed since a reader last looked.

Kept only while somebody looks. Without a reader `KVManager.watch` is None, and each operation pays for one look at it.
A reader first gets every block, a piece at a time, then only those that changed; no read costs more than its limit,
so that a pool of 100,000 blocks can be watched without holding up a step.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from quire.kv.blocks import Block

if TYPE_CHECKING:
    from quire.kv.manager import KVManager

WATCH_EXPIRES_S = 10.0  # after a reader's last read
MAX_READERS = 8
MAX_REF_COUNT = 255  # as shown: one byte


class BlockCode(IntEnum):
    """A block's state in one byte. PINNED is a mark: it is added to one of the others."""

    FREE = 0
    CACHED = 1
    IN_USE = 2  # by one sequence
    SHARED = 3  # by several
    IN_TRANSIT = 4
    PINNED = 8


_FREE, _CACHED, _IN_USE, _SHARED, _IN_TRANSIT, _PINNED = map(int, BlockCode)


@dataclass(slots=True, frozen=True)
class BlockChanges:
    """In columns, first of blocks [first, first + num_scanned), then of `block_ids`. Integers are little-endian."""

    first: int
    num_scanned: int
    block_ids: bytes  # uint32
    codes: bytes  # uint8
    ref_counts: bytes  # uint8, no more than MAX_REF_COUNT
    seq_ids: bytes  # uint32: who uses it, where it is just one; else 0
    num_left: int  # blocks that a next read would bring at once


@dataclass(slots=True)
class _Reader:
    last_read_s: float
    num_scanned: int = 0  # blocks [0, num_scanned) have been shown once
    changed: set[int] = field(default_factory=set)  # of those
    tables: set[int] = field(default_factory=set)  # sequences whose block table changed
    last_table: int = 0  # the sequence whose table was read last


class KVWatch:
    """Readers of one manager, and who holds each block.

    `_holder_sums[b]` is the sum of the ids of the sequences that hold block b. With one holder, the sum is its id:
    enough to colour a block by its user, exact, and O(1) to keep. Tables that existed when watching began are entered
    bit by bit: until then they are in `_unentered`, and their blocks have no holder yet.
    """

    def __init__(self, kv: KVManager) -> None:
        self._kv = kv
        self._readers: dict[int, _Reader] = {}
        self._holder_sums = [0] * kv.num_blocks
        self._unentered = set(kv.tables)
        self._expires_s = kv.clock() + WATCH_EXPIRES_S

    # -- what the manager tells

    def took(self, seq_id: int, block_ids: Sequence[int]) -> None:
        """The sequence's table holds these blocks now."""
        if self._is_expired():
            return
        if seq_id not in self._unentered:
            sums = self._holder_sums
            for block_id in block_ids:
                sums[block_id] += seq_id
        for reader in self._readers.values():
            reader.changed.update(block_ids)
            reader.tables.add(seq_id)

    def left(self, seq_id: int, block_ids: Sequence[int]) -> None:
        """The sequence's table does not hold these blocks any more."""
        if self._is_expired():
            return
        if seq_id not in self._unentered:
            sums = self._holder_sums
            for block_id in block_ids:
                sums[block_id] -= seq_id
        elif seq_id not in self._kv.tables:
            self._unentered.discard(seq_id)
        for reader in self._readers.values():
            reader.changed.update(block_ids)
            reader.tables.add(seq_id)

    def remapped(self, seq_id: int, old_block_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        """The sequence's table holds these blocks instead of, or besides, the old ones."""
        self.left(seq_id, old_block_ids)
        self.took(seq_id, block_ids)

    def touched(self, blocks: Iterable[Block]) -> None:
        """Something else about these blocks changed."""
        if self._is_expired():
            return
        block_ids = [block.block_id for block in blocks]
        for reader in self._readers.values():
            reader.changed.update(block_ids)

    # -- what a reader asks

    def open(self) -> int:
        """A new reader's id, from 1. Where there are too many, the one that has not read for longest is dropped."""
        if len(self._readers) >= MAX_READERS:
            del self._readers[min(self._readers, key=lambda one: self._readers[one].last_read_s)]
        reader_id = next(_next_reader_id)
        self._readers[reader_id] = _Reader(self._kv.clock(), tables=set(self._kv.tables))
        self._renew()
        return reader_id

    def has(self, reader_id: int) -> bool:
        """Whether the reader is still known. One that did not read for WATCH_EXPIRES_S has to begin again."""
        return reader_id in self._readers

    def read_blocks(self, reader_id: int, limit: int) -> BlockChanges:
        """Up to `limit` blocks that the reader has not seen as they are now."""
        reader = self._readers[reader_id]
        reader.last_read_s = self._kv.clock()
        self._renew()
        if self._unentered:
            self._enter_tables(limit)
        num_blocks = self._kv.num_blocks
        first = reader.num_scanned
        reader.num_scanned = after = min(num_blocks, first + limit)
        changed = reader.changed
        if first < num_blocks:
            # Every block once; what changes meanwhile comes after that.
            changed.difference_update(range(first, after))
            block_ids = []
        else:
            block_ids = list(itertools.islice(changed, limit))
        if len(block_ids) == len(changed):
            reader.changed = set()  # not cleared: a set that was large stays slow to walk
        else:
            changed.difference_update(block_ids)
        blocks = self._kv.pool.blocks
        shown = blocks[first:after]
        shown += [blocks[block_id] for block_id in block_ids]
        codes, ref_counts, seq_ids = self._encode(shown)
        return BlockChanges(
            first=first,
            num_scanned=after - first,
            block_ids=struct.pack(f"<{len(block_ids)}I", *block_ids),
            codes=codes,
            ref_counts=ref_counts,
            seq_ids=seq_ids,
            num_left=num_blocks - after + len(reader.changed),
        )

    def read_tables(self, reader_id: int, seq_ids: Iterable[int], limit: int) -> dict[int, list[int]]:
        """Tables of these sequences that changed, as runs: [first block, number of blocks, first block, ...].

        Stops after the table with which `limit` blocks are reached; the others stay for the next read.
        """
        reader = self._readers[reader_id]
        dirty = reader.tables
        if not dirty:
            return {}
        asked = [seq_id for seq_id in seq_ids if seq_id in dirty]
        # Go on after the one that was read last, so that those which change all the time do not starve the others.
        asked.sort(key=lambda seq_id: (seq_id <= reader.last_table, seq_id))
        found: dict[int, list[int]] = {}
        for seq_id in asked:
            if limit <= 0:
                break
            table = self._kv.tables.get(seq_id)
            found[seq_id] = as_runs(table.block_ids) if table else []
            limit -= len(table.block_ids) if table else 1
            reader.last_table = seq_id
        dirty.difference_update(found)
        if len(dirty) > 2 * len(self._kv.tables) + 64:  # of sequences that nobody asks for, most have ended
            dirty.intersection_update(self._kv.tables)
        return found

    # -- inside

    def _encode(self, blocks: list[Block]) -> tuple[bytes, bytes, bytes]:
        sums = self._holder_sums
        codes, ref_counts, seq_ids = bytearray(), bytearray(), []
        for block in blocks:
            ref_count = block.ref_count
            seq_id = 0
            if ref_count == 1:
                code = _IN_USE
                seq_id = sums[block.block_id]
            elif ref_count:
                code = _SHARED
                if ref_count > MAX_REF_COUNT:
                    ref_count = MAX_REF_COUNT
            elif block.num_transfers:
                code = _IN_TRANSIT
            else:
                code = _FREE if block.block_hash is None else _CACHED
            if block.num_pins:
                code += _PINNED
            codes.append(code)
            ref_counts.append(ref_count)
            seq_ids.append(seq_id)
        return bytes(codes), bytes(ref_counts), struct.pack(f"<{len(seq_ids)}I", *seq_ids)

    def _enter_tables(self, limit: int) -> None:
        """Enter tables that are older than the watch, until `limit` blocks are in."""
        sums, tables = self._holder_sums, self._kv.tables
        while self._unentered and limit > 0:
            seq_id = self._unentered.pop()
            block_ids = tables[seq_id].block_ids
            for block_id in block_ids:
                sums[block_id] += seq_id
            for reader in self._readers.values():
                reader.changed.update(block_id for block_id in block_ids if block_id < reader.num_scanned)
            limit -= len(block_ids)

    def _renew(self) -> None:
        """Drop readers that stopped reading; the watch itself ends when the last of them has."""
        now_s = self._kv.clock()
        self._expires_s = max((one.last_read_s for one in self._readers.values()), default=now_s) + WATCH_EXPIRES_S
        for reader_id, reader in list(self._readers.items()):
            if now_s - reader.last_read_s > WATCH_EXPIRES_S:
                del self._readers[reader_id]

    def _is_expired(self) -> bool:
        """Nobody reads any more: let go, so that operations cost nothing again."""
        if self._kv.clock() <= self._expires_s:
            return False
        self._kv.watch = None
        return True


_next_reader_id = itertools.count(1)


def as_runs(block_ids: Sequence[int]) -> list[int]:
    """[4, 5, 6, 9] -> [4, 3, 9, 1]: first block and number of blocks of each run."""
    runs: list[int] = []
    start = expected = -1
    for block_id in block_ids:
        if block_id != expected:
            if runs:
                runs[-1] = expected - start
            runs += (block_id, 0)
            start = block_id
        expected = block_id + 1
    if runs:
        runs[-1] = expected - start
    return runs
