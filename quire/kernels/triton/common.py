# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""What several kernels share: the launch options, softmax pieces and the walk over a block table."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels run as numpy on the host, to be tested there
# Gluon comes with Triton but is not yet part of what Triton promises to keep: another version's may differ.
HAS_GLUON = triton.__version__.startswith("3.6.")
LOG2E = 1.4426950408889634


def next_power_of_2(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def padded_seqs(num_seqs: int) -> int:
    """Few classes, so that few variants are compiled: each program holds one vector of all lengths."""
    for size in (16, 128, 1024):
        if num_seqs <= size:
            return size
    return next_power_of_2(num_seqs)


def compute_dtype(activations: torch.dtype, cache: torch.dtype) -> tl.dtype:
    """What tiles are multiplied in. 8-bit caches widen to float16: one instruction gives two, bfloat16 takes more."""
    if cache == torch.float8_e4m3fn:
        return tl.float16
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[activations]


@triton.jit
def scaled_scores(s, qk_scale, softcap, SOFTCAP: tl.constexpr):
    """Scores in units of log 2, so that the softmax needs exp2 only. qk_scale has log2(e) in it unless capped."""
    s = s * qk_scale
    if SOFTCAP:
        # softcap * tanh(s); tanh by exp2, which saturates correctly at both ends. 2.885... is 2 * log2(e).
        s = (1.0 - 2.0 / (tl.exp2(s * 2.8853900817779268) + 1.0)) * (softcap * 1.4426950408889634)
    return s


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
