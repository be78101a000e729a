"""The block map as plain data: what the live page draws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.kv.blocks import BlockState

if TYPE_CHECKING:
    from quire.kv.manager import KVManager

HASH_PREFIX_CHARS = 8


@dataclass(slots=True, frozen=True)
class TableView:
    num_tokens: int
    num_committed_blocks: int
    block_ids: list[int]


@dataclass(slots=True, frozen=True)
class KVSnapshot:
    """In columns, entry i for block i, because a GPU has tens of thousands of blocks."""

    block_size: int
    states: list[BlockState]
    ref_counts: list[int]
    is_pinned: list[bool]
    hash_prefixes: list[str | None]  # enough of the hash to tell blocks apart by eye
    eviction_order: list[int]  # blocks that can be handed out, the next one first
    tables: dict[int, TableView]  # by sequence
    swapped: dict[int, list[int]]  # host blocks by swapped sequence
    num_host_blocks: int
    num_host_free: int

    def seq_ids(self) -> dict[int, list[int]]:
        """By block in use: the sequences that hold it. Worked out by the reader, so that the engine need not."""
        seq_ids: dict[int, list[int]] = {}
        for seq_id, table in self.tables.items():
            for block_id in table.block_ids:
                seq_ids.setdefault(block_id, []).append(seq_id)
        return seq_ids


def take_snapshot(kv: KVManager) -> KVSnapshot:
    blocks = kv.pool.blocks
    return KVSnapshot(
        block_size=kv.block_size,
        states=[block.state for block in blocks],
        ref_counts=[block.ref_count for block in blocks],
        is_pinned=[block.num_pins > 0 for block in blocks],
        hash_prefixes=[
            None if block.block_hash is None else block.block_hash[: HASH_PREFIX_CHARS // 2].hex() for block in blocks
        ],
        eviction_order=[block.block_id for block in kv.pool.queue],
        tables={
            seq_id: TableView(table.num_tokens, len(table.hashes), list(table.block_ids))
            for seq_id, table in kv.tables.items()
        },
        swapped={seq_id: list(swapped.host_ids) for seq_id, swapped in kv.swapped.items()},
        num_host_blocks=kv.host.num_blocks,
        num_host_free=kv.host.num_free_blocks,
    )
