"""What a KV manager says of itself, to be compared before and after."""

from __future__ import annotations

from typing import Any

from quire.kv import KVManager


def block_map(kv: KVManager) -> dict[str, Any]:
    """Every block, table and swapped sequence."""
    return {
        "blocks": [(block.state, block.ref_count, block.num_pins, block.block_hash) for block in kv.pool.blocks],
        "eviction_order": [block.block_id for block in kv.pool.queue],
        "tables": {i: (table.num_tokens, list(table.hashes), list(table.block_ids)) for i, table in kv.tables.items()},
        "swapped": {seq_id: list(swapped.host_ids) for seq_id, swapped in kv.swapped.items()},
        "num_host_free": kv.host.num_free_blocks,
    }
