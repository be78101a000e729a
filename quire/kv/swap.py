"""Sequences that are swapped to the host and back. Bytes are the executor's; here are only numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from quire.kv.hashing import BlockHash
from quire.kv.table import BlockTable, TableSlices

if TYPE_CHECKING:
    from quire.kv.manager import KVManager


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


def swap_out(kv: KVManager, seq_id: int, num_computed: int, ticket: int) -> list[tuple[int, int]] | None:
    """See `KVManager.swap_out`."""
    table = kv.tables[seq_id]
    num_kept = kv.num_pages(num_computed)
    has_blocks = all(num_kept <= group.end for group in table.groups)
    assert has_blocks, f"sequence {seq_id} has no blocks for {num_computed} tokens"
    firsts = [group.first_seen(num_computed, kv.block_size) for group in table.groups]
    kept = [
        group.block_ids[first - group.first : max(0, num_kept - group.first)]
        for group, first in zip(table.groups, firsts, strict=True)
    ]
    num_moved = sum(map(len, kept))
    if num_moved > kv.host.num_free_blocks:
        return None
    del kv.tables[seq_id]
    pairs: list[tuple[int, int]] = []
    slices: TableSlices = []
    for group, first, device_ids in zip(table.groups, firsts, kept, strict=True):
        host_ids = kv.host.allocate(len(device_ids))
        moved = list(zip(device_ids, host_ids, strict=True))
        # Tail first, the order in which the blocks will go back to the free queue.
        for device_id, host_id in reversed(moved):
            _start_move(kv, ticket, device_id, host_id)
        kv.pool.release_table(group.block_ids)
        pairs += moved
        slices.append((first, host_ids))
    hashes = table.hashes[: num_computed // kv.block_size]
    kv.swapped[seq_id] = SwappedSequence(table.root, hashes, slices, num_computed)
    kv.counters.num_swapped_out_blocks += num_moved
    if kv.watch is not None:
        kv.watch.left(seq_id, table.block_ids)
    return pairs


def swap_in(
    kv: KVManager, seq_id: int, token_ids: Sequence[int], ticket: int
) -> tuple[list[tuple[int, int]], TableSlices] | None:
    """See `KVManager.swap_in`."""
    swapped = kv.swapped[seq_id]
    num_tokens = max(len(token_ids), swapped.num_computed)
    tables = kv.new_groups([(first, []) for first, _ in swapped.slices], num_tokens)
    if not kv.has_room(sum(end - table.first for table, end in tables)):
        return None
    del kv.swapped[seq_id]
    pairs: list[tuple[int, int]] = []
    for (table, end), (first, host_ids) in zip(tables, swapped.slices, strict=True):
        table.block_ids = kv.pool.allocate(end - first)
        moved = list(zip(table.block_ids, host_ids, strict=False))
        for device_id, host_id in reversed(moved):
            _start_move(kv, ticket, device_id, host_id)
            kv.host.release(host_id)
        pairs += moved
    kv.add_table(seq_id, swapped.root, [table for table, _ in tables], num_tokens, swapped.hashes)
    if pairs:
        kv.moves[ticket].arrival = Arrival(kv.tables[seq_id], token_ids, swapped.num_computed)
    kv.counters.num_swapped_in_blocks += len(pairs)
    if kv.watch is not None:
        kv.watch.took(seq_id, kv.tables[seq_id].block_ids)
    return pairs, [(table.first, list(table.block_ids)) for table, _ in tables]


def finish_swap(kv: KVManager, ticket: int) -> None:
    """Every byte of a swap-out or swap-in has arrived. A ticket without any is fine."""
    moves = kv.moves.pop(ticket, None)
    if moves is None:
        return
    moved = [kv.pool.blocks[device_id] for device_id in moves.device_ids]
    for block in moved:
        kv.pool.transfer_finished(block)
    for host_id in moves.host_ids:
        kv.host.transfer_finished(host_id)
    if moves.arrival is not None:
        _enter_cache(kv, *moves.arrival)
    if kv.watch is not None:
        kv.watch.touched(moved)


def _enter_cache(kv: KVManager, table: BlockTable, token_ids: Sequence[int], num_computed: int) -> None:
    """A sequence is back, unless it has ended meanwhile: others may find its full blocks."""
    if kv.tables.get(table.seq_id) is not table:
        return
    for number, group in enumerate(table.groups):
        ids = group.block_ids[: max(0, len(table.hashes) - group.first)]
        blocks = [kv.pool.blocks[block_id] for block_id in ids]
        kv.cache.insert_chain(group.first, table.hashes, table.root, token_ids, blocks, number)
    kv.commit(table.seq_id, token_ids, num_computed)


def _start_move(kv: KVManager, ticket: int, device_id: int, host_id: int) -> None:
    moves = kv.moves.setdefault(ticket, Moves())
    moves.device_ids.append(device_id)
    moves.host_ids.append(host_id)
    kv.pool.blocks[device_id].num_transfers += 1
    kv.host.transfer_started(host_id)
