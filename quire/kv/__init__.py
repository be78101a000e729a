"""KV memory as numbers: the block pool, block tables, prefix cache and swap bookkeeping. No tensors, no torch."""

from __future__ import annotations

from quire.kv.blocks import BLOCK_SIZES, BlockState
from quire.kv.manager import KVManager
from quire.kv.prefix_cache import PrefixMatch
from quire.kv.stats import KVStats, PrefixCounters
from quire.kv.table import UNCHANGED, Allocation, TableSlices

__all__ = [
    "BLOCK_SIZES",
    "UNCHANGED",
    "Allocation",
    "BlockState",
    "KVManager",
    "KVStats",
    "PrefixCounters",
    "PrefixMatch",
    "TableSlices",
]
