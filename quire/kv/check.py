"""Proof that a KV manager is consistent. Slow and complete: for tests, and for an engine that is idle or in doubt."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from quire.kv.hashing import in_group
from quire.kv.table import NEVER, UNCHANGED, BlockTable, capacity_of

if TYPE_CHECKING:
    from quire.kv.manager import KVManager


def check_manager(kv: KVManager) -> None:
    """Raise AssertionError, saying what is wrong, unless every invariant holds."""
    _check_references(kv)
    kv.pool.check()
    for seq_id, table in kv.tables.items():
        assert table.seq_id == seq_id, f"the table of sequence {table.seq_id} is kept under {seq_id}"
        _check_table(kv, table)
    _check_transfers(kv)
    assert not (UNCHANGED.appended or UNCHANGED.remapped or UNCHANGED.copies), "someone wrote to UNCHANGED"


def _check_references(kv: KVManager) -> None:
    """A block's reference count is the number of tables that hold it."""
    num_users: Counter[int] = Counter()
    for table in kv.tables.values():
        assert len(set(table.block_ids)) == len(table.block_ids), f"sequence {table.seq_id} holds a block twice"
        num_users.update(table.block_ids)
    for block in kv.pool.blocks:
        assert block.ref_count == num_users[block.block_id], (
            f"block {block.block_id} says {block.ref_count} users, {num_users[block.block_id]} tables hold it"
        )


def _check_table(kv: KVManager, table: BlockTable) -> None:
    name, block_size = f"sequence {table.seq_id}", kv.block_size
    assert tuple(group.window for group in table.groups) == kv.windows, f"{name}: tables of other groups"
    capacity = capacity_of(table.groups, block_size)
    assert table.capacity == capacity, f"{name}: capacity {table.capacity}, its blocks hold {capacity}"
    for group in table.groups:  # a windowed one has room for the next span alone
        room = group.end * block_size
        assert group.window or table.num_tokens <= room, f"{name}: {table.num_tokens} tokens, room for {room}"
    num_committed = len(table.hashes)
    assert num_committed * block_size <= capacity, f"{name}: {num_committed} blocks committed, room for {capacity}"
    expected = (num_committed + 1) * block_size if kv.enable_prefix_caching else NEVER
    assert table.next_commit == expected, f"{name}: next commit at {table.next_commit}, should be {expected}"
    assert kv.enable_prefix_caching or not table.hashes, f"{name}: hashes without a prefix cache"
    for number, group in enumerate(table.groups):
        assert group.window is not None or not group.first, f"{name}: blocks are missing from the front"
        for index, block_id in enumerate(group.block_ids, start=group.first):
            block = kv.pool.blocks[block_id]
            known = in_group(table.hashes[index], number) if index < num_committed else None
            # A committed block may be unhashed: then an equal one was cached first. A block that this sequence has not
            # committed may be hashed: then a fork of it that shares the block has.
            if block.block_hash is not None and known is not None:
                assert block.block_hash == known, f"{name}: block {block_id} at {index} is cached under another hash"
            if index * block_size >= table.writable_from:
                assert block.ref_count == 1 and block.block_hash is None, (
                    f"{name}: block {block_id} at {index} counts as writable but is shared or cached"
                )


def _check_transfers(kv: KVManager) -> None:
    """Blocks in transit are those of transfers under way, and host blocks belong to swapped sequences."""
    assert not kv.tables.keys() & kv.swapped.keys(), "a sequence is swapped and has a table"
    moving_device_ids: Counter[int] = Counter()
    moving_host_ids: list[int] = []
    for ticket, moves in kv.moves.items():
        assert len(moves.device_ids) == len(moves.host_ids) > 0, f"move {ticket}: blocks do not pair up"
        moving_device_ids.update(moves.device_ids)
        moving_host_ids.extend(moves.host_ids)
    tiers = kv.tiers
    if tiers is not None:
        tiers.check()
        moving_device_ids.update(block_id for move in tiers.moves.values() for block_id, _ in move.pairs)
    for block in kv.pool.blocks:
        assert block.num_transfers == moving_device_ids[block.block_id], (
            f"block {block.block_id} says {block.num_transfers} transfers, {moving_device_ids[block.block_id]} move it"
        )
    for seq_id, swapped in kv.swapped.items():
        for first, host_ids in swapped.slices:
            assert (
                (first + len(host_ids) - 1) * kv.block_size
                < swapped.num_computed
                <= (first + len(host_ids)) * kv.block_size
            ), f"swapped sequence {seq_id}: {len(host_ids)} host blocks from block {first} on"
    held_ids = [host_id for swapped in kv.swapped.values() for host_id in swapped.host_ids]
    if tiers is not None and tiers.host is not None:
        held_ids += tiers.host.held_ids
        moving_host_ids += tiers.host.moving_ids
    kv.host.check(held_ids, moving_host_ids)
