"""Which tile shapes each kernel runs with, on which inputs. One table per kernel; nothing is tuned at import.

The figures come from `python -m quire.bench.gpu_kernels` on one H200: run it again after a change, and write the best
rows here. A row is chosen from plain numbers (head_dim, group, dtype bytes, rows), never from data on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

NUM_SMS = 132  # of an H100 or H200; only load balance depends on it, not the result
MAX_SKINNY_ROWS = 16  # from here on cuBLAS is at its best


@dataclass(slots=True, frozen=True)
class DecodeConfig:
    """Split-KV decode: one program multiplies one KV head's query heads with a run of tiles of `tile_tokens` keys."""

    tile_tokens: int = 64
    num_warps: int = 4
    num_stages: int = 3
    programs_per_sm: int = 2  # what the splits of a small batch add up to
    busy_programs_per_sm: int = 8  # the same once whole sequences fill the chip: smaller pieces, shorter tail
    min_tiles_per_split: int = 2
    fused_merge: bool = True  # the split that finishes last merges; otherwise a second launch does


@dataclass(slots=True, frozen=True)
class PrefillConfig:
    """Tiles of `tile_rows` (query tokens x heads of a group) by `tile_tokens` keys."""

    tile_rows: int
    tile_tokens: int
    num_warps: int
    num_stages: int


@dataclass(slots=True, frozen=True)
class SkinnyConfig:
    """Products of 1..16 rows with a [n, k] matrix that is read once."""

    use_tensor_cores: bool
    tile_n: int
    tile_k: int
    num_warps: int
    num_stages: int
    split_k: int = 1
    unroll: int = 1  # of the plain multiplication's loop
    use_tma: bool = False  # the bulk copy engine brings the weights' tiles


def padded_head_dim(head_dim: int) -> int:
    """Tiles are powers of two wide, at least 16: what a tensor core multiplies."""
    width = 16
    while width < head_dim:
        width *= 2
    return width


def decode_config(head_dim: int, group: int, kv_bytes: int) -> DecodeConfig:
    """kv_bytes: of one element of the cache."""
    if padded_head_dim(head_dim) * kv_bytes >= 512:  # 256 wide in 16 bits: half the keys fill the same shared memory
        return DecodeConfig(tile_tokens=32, num_stages=3)
    if group > 16:
        return DecodeConfig(tile_tokens=64, num_stages=3, num_warps=8 if group > 32 else 4)
    return DecodeConfig()


def prefill_config(head_dim: int, group: int, kv_bytes: int, max_query_len: int) -> PrefillConfig:
    wide = padded_head_dim(head_dim) > 128
    rows = max_query_len * group
    if rows <= 16:
        return PrefillConfig(tile_rows=16, tile_tokens=32 if wide else 64, num_warps=4, num_stages=3)
    if rows <= 64 or group > 64:
        return PrefillConfig(tile_rows=64, tile_tokens=32 if wide else 64, num_warps=4, num_stages=3)
    if wide:
        return PrefillConfig(tile_rows=128, tile_tokens=64, num_warps=8, num_stages=2)
    return PrefillConfig(tile_rows=128, tile_tokens=128, num_warps=8, num_stages=2)


# (rows up to, n x k at least) -> configuration; the first row that fits is taken.
_SKINNY: tuple[tuple[int, int, SkinnyConfig], ...] = (
    (1, 64 << 20, SkinnyConfig(False, tile_n=8, tile_k=512, num_warps=4, num_stages=1, unroll=4)),
    (1, 0, SkinnyConfig(False, tile_n=4, tile_k=512, num_warps=4, num_stages=1, unroll=4)),
    (2, 0, SkinnyConfig(False, tile_n=4, tile_k=512, num_warps=4, num_stages=1, unroll=4)),
    (16, 64 << 20, SkinnyConfig(True, tile_n=64, tile_k=256, num_warps=4, num_stages=4)),
    (16, 0, SkinnyConfig(True, tile_n=32, tile_k=256, num_warps=4, num_stages=4, split_k=2)),
)


def skinny_config(rows: int, n: int, k: int) -> SkinnyConfig | None:
    """None where cuBLAS is as good or better."""
    if rows > MAX_SKINNY_ROWS or k % 16:
        return None
    for max_rows, min_elements, config in _SKINNY:
        if rows <= max_rows and n * k >= min_elements:
            return config
    return None
