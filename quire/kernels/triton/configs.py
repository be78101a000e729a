"""Which tile shapes each kernel runs with, on which inputs. Nothing is tuned at import.

The figures come from `python -m benchmarks.gpu_kernels` on one H200: run it again after a change, and write the best
rows here. A row is chosen from plain numbers (head_dim, group, dtype bytes, rows), never from data on the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

NUM_SMS = 132  # of an H100 or H200; only load balance depends on it, not the result
MAX_SKINNY_ROWS = 32  # from here on cuBLAS is at its best
MAX_FP8_SKINNY_ROWS = 16  # with 8-bit weights: more are rounded to 8 bits themselves
# With weights in 4 or 8 bits. Reading 16-bit ones takes as long as multiplying 160 rows by them at the rate of cuBLAS.
# An own kernel at half that rate, which reads a quarter, is ahead of those up to 80 rows; a copy in 16 bits costs 2.5
# bytes a weight more than they do, which from 64 to 200 rows is half as much again and at 8,192 rows 3 %.
MAX_PACKED_ROWS = 64


@dataclass(slots=True, frozen=True)
class DecodeConfig:
    """Split-KV decode: one program multiplies one KV head's query heads with a run of tiles of `tile_tokens` keys."""

    tile_tokens: int = 64
    num_warps: int = 4
    num_stages: int = 3
    programs_per_sm: int = 1  # what the splits of a small batch add up to
    long_programs_per_sm: int = 2  # the same where that would make pieces longer than long_tiles
    long_tiles: int = 64
    busy_programs_per_sm: int = 4  # the same once whole sequences fill the chip: smaller pieces, shorter tail
    # Then so many times the sequences, where that is more: whole ones would leave a long tail. More would mean more
    # programs that find nothing to do in steps of short sequences.
    busy_pieces_per_seq: float = 1.5
    min_tiles_per_split: int = 4


@dataclass(slots=True, frozen=True)
class PrefixConfig:
    """A prefix that decodes share: tiles of `tile_rows` (sequences x heads of a group) by `tile_tokens` keys."""

    tile_rows: int = 64
    tile_tokens: int = 64
    num_warps: int = 4
    num_stages: int = 3
    programs_per_sm: int = 2
    min_tiles_per_split: int = 4


@dataclass(slots=True, frozen=True)
class PrefillConfig:
    """Tiles of `tile_rows` (query tokens x heads of a group) by `tile_tokens` keys."""

    tile_rows: int
    tile_tokens: int
    num_warps: int
    num_stages: int


@dataclass(slots=True, frozen=True)
class HopperPrefillConfig:
    """Two tiles of 64 rows at a time, by `tile_tokens` keys; so many tiles of keys and of values in shared memory."""

    tile_tokens: int = 128
    k_stages: int = 3
    v_stages: int = 2
    heads_at_once: int = 2  # KV heads whose items alternate, before the next ones' begin


@dataclass(slots=True, frozen=True)
class SkinnyConfig:
    """Products of 1..32 rows with a [n, k] matrix that is read once."""

    use_tensor_cores: bool  # without them: one row
    tile_n: int
    tile_k: int
    num_warps: int
    num_stages: int
    split_k: int = 1  # of the tensor cores' kernel
    unroll: int = 1  # of the plain multiplication's loop


@dataclass(slots=True, frozen=True)
class PackedConfig:
    """Products of up to MAX_PACKED_ROWS rows with a matrix in 4 or 8 bits."""

    tile_n: int
    num_warps: int
    num_stages: int
    split_k: int


@dataclass(slots=True, frozen=True)
class PickedConfig:
    """Products of single rows, each with its own expert's matrix."""

    tile_n: int
    tile_k: int
    num_warps: int
    unroll: int


@dataclass(slots=True, frozen=True)
class GroupedConfig:
    """Products of up to tile_m of an expert's rows with tile_n of its matrix's; of gate and of up so many each."""

    tile_m: int
    tile_n: int
    tile_k: int
    num_warps: int
    num_stages: int

    def num_blocks(self, picks: int, tokens: int, experts: int) -> int:
        """How many blocks of tile_m picks of one expert a product's grid has: with what chance adds to those that are
        expected, and never more than any routing needs, where every expert used may leave one that is not full. A
        token has an expert at most once."""
        used = min(picks, experts)
        most = min(used + (picks - used) // self.tile_m, used * -(-tokens // self.tile_m))
        _, expected = _expected_blocks(picks, experts, self.tile_m)
        return max(1, min(most, math.ceil(1.02 * expected) + 2))


def padded_head_dim(head_dim: int) -> int:
    """Tiles are powers of two wide, at least 16: what a tensor core multiplies."""
    width = 16
    while width < head_dim:
        width *= 2
    return width


def decode_config(head_dim: int, group: int, kv_bytes: int) -> DecodeConfig:
    """kv_bytes: of one element of the cache."""
    wide = padded_head_dim(head_dim) > 128
    if kv_bytes == 4:  # multiplied without tensor cores: small tiles, or registers run out
        return DecodeConfig(tile_tokens=16 if wide or group > 16 else 32, num_warps=8, num_stages=2)
    if wide and kv_bytes == 2:  # half the keys fill the same shared memory
        return DecodeConfig(tile_tokens=32)
    if not wide and kv_bytes == 1 and group <= 16:  # half the bytes: more, smaller programs
        return DecodeConfig(num_warps=2)
    return DecodeConfig(num_warps=8 if group > 32 else 4)


def prefix_config(head_dim: int, group: int, kv_bytes: int) -> PrefixConfig:
    wide = padded_head_dim(head_dim) > 128
    tile_rows = 128 if group > 64 else 64
    if kv_bytes == 4:
        return PrefixConfig(tile_rows=_rows_in_32_bits(wide, group), tile_tokens=16, num_warps=8, num_stages=2)
    return PrefixConfig(tile_rows=tile_rows, tile_tokens=32 if wide else 64, num_warps=tile_rows // 16)


def prefill_config(head_dim: int, group: int, kv_bytes: int, max_query_len: int) -> PrefillConfig:
    wide = padded_head_dim(head_dim) > 128
    rows = max_query_len * group
    if kv_bytes == 4:
        return PrefillConfig(tile_rows=_rows_in_32_bits(wide, group), tile_tokens=16, num_warps=8, num_stages=2)
    if rows <= 16:
        return PrefillConfig(tile_rows=16, tile_tokens=32 if wide else 64, num_warps=4, num_stages=3)
    if rows <= 64:
        return PrefillConfig(tile_rows=64, tile_tokens=32 if wide else 64, num_warps=4, num_stages=3)
    return PrefillConfig(tile_rows=128, tile_tokens=64, num_warps=8, num_stages=2 if wide else 3)


def _rows_in_32_bits(wide: bool, group: int) -> int:
    """Tensor cores would round: rows are few, so that a thread's share of the tile fits its registers."""
    return max(16 if wide else 32, 1 << (group - 1).bit_length())


def skinny_config(rows: int, n: int, k: int, weight_bytes: int = 2) -> SkinnyConfig | None:
    """None where cuBLAS is as good or better, or exact where tensor cores are not: float32 of several rows."""
    if rows > MAX_SKINNY_ROWS or k % 16:
        return None
    if weight_bytes == 1:
        return _fp8_skinny_config(rows, n, k)
    if rows == 1:
        if k > 8192:
            return SkinnyConfig(False, tile_n=4, tile_k=1024, num_warps=4, num_stages=1, unroll=4)
        return SkinnyConfig(False, tile_n=8, tile_k=512, num_warps=4, num_stages=1, unroll=4)
    if weight_bytes > 2:
        return None
    # 96 tiles are enough programs for the chip; of fewer, each is cut along k into parts of at least 8 steps.
    tiles = -(-n // 64)
    split_k = 1 if tiles >= 96 else max(1, min(256 // tiles, 8, k // 1024))
    return SkinnyConfig(True, tile_n=64, tile_k=128, num_warps=4, num_stages=4, split_k=split_k)


def _fp8_skinny_config(rows: int, n: int, k: int) -> SkinnyConfig | None:
    if rows > MAX_FP8_SKINNY_ROWS:
        return None
    if rows == 1:
        tile_n, unroll = (2, 4) if max(n, k) <= 8192 else (4, 2)
        return SkinnyConfig(False, tile_n, tile_k=2048, num_warps=4, num_stages=1, unroll=unroll)
    tiles = -(-n // 64)
    split_k = 1 if tiles >= 192 else max(1, min(384 // tiles, 4, k // 1024))
    return SkinnyConfig(True, tile_n=64, tile_k=256, num_warps=4, num_stages=3, split_k=split_k)


def packed_config(rows: int, n: int, k: int) -> PackedConfig | None:
    """None where the matrix is to be widened and cuBLAS to multiply it. Not measured yet."""
    if not 0 < rows <= MAX_PACKED_ROWS:
        return None
    tiles = -(-n // 64)
    split_k = 1 if tiles >= 256 else max(1, min(512 // tiles, 8, k // 512))
    return PackedConfig(tile_n=64, num_warps=4, num_stages=4, split_k=split_k)


# Bytes a second out of memory and out of the L2 cache, and what tiles of so many rows multiply a second, on one H200.
_MEMORY_RATE, _CACHE_RATE = 4.3e12, 6e12
_TILE_RATES = {16: 1e14, 32: 2e14, 64: 4.1e14, 128: 5.5e14}
_FEW_PICKS = 16  # hardly any two of which have the same expert, where there are several times as many


@cache
def experts_config(
    picks: int, experts: int, n: int, k: int, weight_bytes: int, *, is_gated: bool
) -> PickedConfig | GroupedConfig:
    """How the products of a step's picks (tokens times experts a token) are cut. n: columns of what comes out.

    Of tiles with 16 to 128 rows those are taken that need least time if the picks fall on experts by chance: a matrix
    is read once from memory and again from the cache for each further block of its rows, and whole tiles are
    multiplied, full or not.
    """
    if weight_bytes > 2:  # exact, without tensor cores: small tiles, or registers run out
        return GroupedConfig(tile_m=16, tile_n=32, tile_k=32, num_warps=4, num_stages=2)
    if picks <= min(_FEW_PICKS, experts // 4):
        if is_gated:
            return PickedConfig(tile_n=8, tile_k=512, num_warps=4, unroll=4)
        return PickedConfig(tile_n=4, tile_k=256, num_warps=4, unroll=8)
    values = (2 if is_gated else 1) * n * k

    def seconds(tile_m: int) -> float:
        used, blocks = _expected_blocks(picks, experts, tile_m)
        from_memory, from_cache = used * values * weight_bytes, blocks * values * weight_bytes
        work = 2 * blocks * tile_m * values
        return max(from_memory / _MEMORY_RATE, from_cache / _CACHE_RATE, work / _TILE_RATES[tile_m])

    tile_m = min(_TILE_RATES, key=lambda rows: (seconds(rows), rows))
    shapes = {
        16: ((64, 128, 4, 3), (128, 128, 8, 3)),
        32: ((128, 128, 8, 3), (64, 64, 4, 4)),
        64: ((64, 64, 4, 4), (128, 64, 8, 4)),
        128: ((128, 64, 8, 3), (256, 64, 8, 3)),
    }
    tile_n, tile_k, num_warps, num_stages = shapes[tile_m][0 if is_gated else 1]
    return GroupedConfig(tile_m, tile_n, tile_k, num_warps, num_stages)


@cache
def _expected_blocks(picks: int, experts: int, tile_m: int) -> tuple[float, float]:
    """How many experts are used, and how many blocks of tile_m rows they have, where each pick falls on any expert:
    rows of an expert then have a Poisson distribution."""
    mean = picks / experts
    if mean > 300:
        return experts, experts * (mean / tile_m + 0.5)
    probability, blocks = math.exp(-mean), 0.0
    used = experts * (1 - probability)
    for rows in range(1, int(mean + 10 * math.sqrt(mean) + 10)):
        probability *= mean / rows
        blocks += probability * -(-rows // tile_m)
    return used, experts * blocks
