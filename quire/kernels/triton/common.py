# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""What several kernels share: the launch options, softmax pieces and the walk over a block table."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels run as numpy on the host, to be tested there
# Gluon comes with Triton but is not yet part of what Triton promises to keep: another version's may differ.
HAS_GLUON = triton.__version__.startswith(("3.6.", "3.7."))
LOG2E = 1.4426950408889634
FP8_MAX = tl.constexpr(448.0)  # of float8_e4m3fn: past it the format has only NaN

IS_INTERPRETED = tl.constexpr(INTERPRETED)
_WIDEN = "{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $1, 0, SELECTED; mov.b32 {a, b}, t; cvt.rn.f16x2.e4m3x2 $0, a; }"
WIDEN_LOW = tl.constexpr(_WIDEN.replace("SELECTED", "0x4420"))  # bytes 0 and 2 of four
WIDEN_HIGH = tl.constexpr(_WIDEN.replace("SELECTED", "0x4431"))

# Exponent and mantissa move to where bfloat16 has them; its exponent counts from 127 where e4m3's counts from 7, which
# a product with 2 ** 120 mends, subnormal numbers too.
_WIDEN_TWO = (
    "prmt.b32 t, $2, 0, SELECTED; shr.b32 s, t, 4; and.b32 s, s, 0x07f007f0; "
    "lop3.b32 t, t, 0x80008000, s, 0xea; mul.rn.bf16x2 OUT, t, m; "
)
WIDEN_BF16 = tl.constexpr(
    "{ .reg .b32 t, s, m; mov.b32 m, 0x7b807b80; "
    + _WIDEN_TWO.replace("SELECTED", "0x1404").replace("OUT", "$0")
    + _WIDEN_TWO.replace("SELECTED", "0x3424").replace("OUT", "$1")
    + "}"
)


def next_power_of_2(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def padded_seqs(num_seqs: int) -> int:
    """Few classes, so that few variants are compiled: each program holds one vector of all lengths."""
    for size in (16, 128, 256, 1024):
        if num_seqs <= size:
            return size
    return next_power_of_2(num_seqs)


def compute_dtype(activations: torch.dtype, cache: torch.dtype) -> tl.dtype:
    """What tiles are multiplied in. 8-bit caches widen to float16: one instruction gives two, bfloat16 takes more."""
    if cache == torch.float8_e4m3fn:
        return tl.float16
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[activations]


@triton.jit
def store_narrowed(pointers, values, mask):
    if pointers.dtype.element_ty == tl.float8e4nv:
        values = tl.minimum(tl.maximum(values, -FP8_MAX), FP8_MAX)
    tl.store(pointers, values.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def widened(x, TYPE: tl.constexpr):
    """x in TYPE, exactly: an e4m3 number becomes bfloat16 by moving its bits, where a conversion takes five steps."""
    if x.dtype == tl.float8e4nv and tl.bfloat16 == TYPE and not IS_INTERPRETED:
        wide = tl.inline_asm_elementwise(WIDEN_BF16, "=r,=r,r", [x], tl.bfloat16, is_pure=True, pack=4)
    else:
        wide = x.to(TYPE)
    return wide


@triton.jit
def widened_pairs(pairs):
    """int16 -> two tensors of float16: the e4m3 numbers in the low bytes, and those in the high ones.

    Neighbours in memory are loaded as one 16-bit number, because tensor cores' operands are fetched from shared memory
    in units of 16 bits: tiles of bytes would be fetched byte by byte where they have to be transposed.
    """
    if IS_INTERPRETED:
        low = (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        high = ((pairs >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        low = tl.inline_asm_elementwise(WIDEN_LOW, "=r,r", [pairs], tl.float16, is_pure=True, pack=2)
        high = tl.inline_asm_elementwise(WIDEN_HIGH, "=r,r", [pairs], tl.float16, is_pure=True, pack=2)
    return low, high


@triton.jit
def scaled_scores(s, qk_scale, softcap, SOFTCAP: tl.constexpr):
    """Scores in units of log 2, so that the softmax needs exp2 only. qk_scale has log2(e) in it unless capped."""
    s = s * qk_scale
    if SOFTCAP:
        # softcap * tanh(s); tanh by exp2, which saturates correctly at both ends. 2.885... is 2 * log2(e).
        s = (1.0 - 2.0 / (tl.exp2(s * 2.8853900817779268) + 1.0)) * (softcap * 1.4426950408889634)
    return s


@triton.jit
def add_sink(acc, top, weight_sum, sinks_ptr, head, exists):
    """One more logit of each head in a softmax's state, with a value of zeros."""
    sink = tl.load(sinks_ptr + head, mask=exists, other=0.0) * 1.4426950408889634
    new_top = tl.maximum(top, sink)
    rescale = tl.exp2(top - new_top)
    return acc * rescale[:, None], new_top, weight_sum * rescale + tl.exp2(sink - new_top)


@triton.jit
def load_slopes(slopes_ptr, head, exists):
    """What heads' scores, in units of log 2, fall by with each token of distance."""
    return tl.load(slopes_ptr + head, mask=exists, other=0.0) * 1.4426950408889634


@triton.jit
def tile_blocks(table_ptr, first, kv_len, TILE_TOKENS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Block ids of the tile of keys from `first` on: one for each token, or a single one where a block spans the tile.

    Entries of a table past a sequence's length are arbitrary: they are not followed, block 0 stands for them. Kernels
    ask for a tile's ids one step before its keys, so that the keys' loads never wait for them.
    """
    if BLOCK_SIZE >= TILE_TOKENS:
        ids = tl.load(table_ptr + first // BLOCK_SIZE, mask=first < kv_len, other=0)
    else:
        positions = first + tl.arange(0, TILE_TOKENS)
        ids = tl.load(table_ptr + positions // BLOCK_SIZE, mask=positions < kv_len, other=0)
    return ids


@triton.jit
def tile_rows(ids, first, kv_head, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
              TILE_TOKENS: tl.constexpr):  # fmt: skip
    """Element offsets of the tile's K rows in the cache; V's lie KV_HEADS * BLOCK_SIZE * HEAD_DIM further."""
    steps = tl.arange(0, TILE_TOKENS)
    if BLOCK_SIZE >= TILE_TOKENS:
        within = (first % BLOCK_SIZE + steps) * HEAD_DIM
    else:
        within = (steps % BLOCK_SIZE) * HEAD_DIM  # a tile starts where a block does
    base = ids.to(tl.int64) * (2 * KV_HEADS * BLOCK_SIZE * HEAD_DIM) + kv_head * (BLOCK_SIZE * HEAD_DIM)
    return base + within
