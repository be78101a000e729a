# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""What a product of few rows does with its sums before it stores them: the operation that follows it, in one launch.

Rotation and gating combine two outputs, half a head or half the matrix apart. Such a product's tile is therefore two
strips of the matrix's rows: `low` and `high` here, their sums for the same columns. Everything is [strip, rows of x].
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.interface import AttentionBatch, AttentionSpec, Rotary
from quire.kernels.triton.activation import gated
from quire.kernels.triton.common import store_narrowed
from quire.kernels.triton.rope import turned

STORE = tl.constexpr(0)
ADD = tl.constexpr(1)  # to the residual stream, and prepare the next norm
GATE = tl.constexpr(2)  # activation(first half) * second half
ROPE = tl.constexpr(3)  # rotate q and k, write k and v to the cache


class Scale(NamedTuple):
    """x is to be divided by its rows' root mean square: see Unscaled."""

    square_sums: Tensor
    eps: float


class Add(NamedTuple):
    residual: Tensor
    norm: Tensor | None
    square_sums: Tensor | None  # [tiles, rows]: each tile's part


class Rope(NamedTuple):
    cos_sin: Tensor
    kv: Tensor
    positions: Tensor
    slots: Tensor
    k_inverse: float  # 1 / k_scale
    v_inverse: float
    k_offset: Tensor | None = None

    @staticmethod
    def of(rotary: Rotary, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec) -> Rope:
        return Rope(
            rotary.cos_sin, kv, batch.positions, batch.slots, 1.0 / spec.k_scale, 1.0 / spec.v_scale, spec.k_offset
        )


@triton.jit
def tile_rows_of(tile, n, MODE: tl.constexpr, TILE_N: tl.constexpr, HALF_DIM: tl.constexpr):
    """Which of the matrix's rows a tile multiplies -> (rows [TILE_N], whether they exist). See the module's head."""
    index = tl.arange(0, TILE_N)
    STRIP: tl.constexpr = TILE_N // 2
    place = tile * STRIP + index % STRIP
    if MODE == GATE:
        rows = place + index // STRIP * (n // 2)
        exists = place < n // 2
    elif MODE == ROPE:
        rows = place + place // HALF_DIM * HALF_DIM + index // STRIP * HALF_DIM
        exists = rows < n
    else:
        rows = tile * TILE_N + index
        exists = rows < n
    return rows, exists


@triton.jit
def load_square_sums(scale, m, num_rows, PARTS: tl.constexpr, PARTS_PAD: tl.constexpr):
    """The parts of the sums of squares of x's rows m. On their way while the product runs; added up after it."""
    part = tl.arange(0, PARTS_PAD)
    mask = (part < PARTS)[:, None] & (m < num_rows)[None, :]
    return tl.load(scale.square_sums + part[:, None] * num_rows + m[None, :], mask=mask, other=0.0)


@triton.jit
def store(out_ptr, sums, rows, m, n, num_rows):
    mask = (rows < n)[:, None] & (m < num_rows)[None, :]
    tl.store(out_ptr + m[None, :] * n + rows[:, None], sums.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def add(out_ptr, to, sums, rows, m, tile, n, num_rows):
    """residual += sums; out = residual * norm, whose rows' factors are left to the next product."""
    mask = (rows < n)[:, None] & (m < num_rows)[None, :]
    offsets = m[None, :] * n + rows[:, None]
    total = tl.load(to.residual + offsets, mask=mask, other=0.0).to(tl.float32) + sums
    total = total.to(to.residual.dtype.element_ty)
    tl.store(to.residual + offsets, total, mask=mask)
    if to.norm is not None:
        total = tl.where(mask, total.to(tl.float32), 0.0)  # as the next layer will read it, rounded
        norm = tl.load(to.norm + rows, mask=rows < n, other=0.0).to(tl.float32)
        tl.store(out_ptr + offsets, (total * norm[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(to.square_sums + tile * num_rows + m, tl.sum(total * total, axis=0), mask=m < num_rows)


@triton.jit
def gate(out_ptr, low, high, tile, m, n, num_rows, SILU: tl.constexpr, STRIP: tl.constexpr):
    cols = tile * STRIP + tl.arange(0, STRIP)
    mask = (cols < n // 2)[:, None] & (m < num_rows)[None, :]
    result = gated(low, high, SILU).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + m[None, :] * (n // 2) + cols[:, None], result, mask=mask)


@triton.jit
def rope(q_ptr, to, low, high, tile, m, num_rows, STRIP: tl.constexpr, HEADS: tl.constexpr,
         KV_HEADS: tl.constexpr, HALF_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr):  # fmt: skip
    """A strip lies within one half of one head."""
    head = tile * STRIP // HALF_DIM
    dims = tile * STRIP % HALF_DIM + tl.arange(0, STRIP)
    HEAD_DIM: tl.constexpr = 2 * HALF_DIM
    exists = (m < num_rows)[None, :] & (dims >= 0)[:, None]
    if head < HEADS + KV_HEADS:
        position = tl.load(to.positions + m, mask=m < num_rows, other=0)
        angles = to.cos_sin + position[None, :] * HEAD_DIM + dims[:, None]
        cos = tl.load(angles, mask=exists, other=0.0)
        sin = tl.load(angles + HALF_DIM, mask=exists, other=0.0)
        low, high = turned(low, high, cos, sin)
    if head < HEADS:
        q_out = q_ptr + m[None, :] * (HEADS * HEAD_DIM) + head * HEAD_DIM + dims[:, None]
        tl.store(q_out, low.to(q_ptr.dtype.element_ty), mask=exists)
        tl.store(q_out + HALF_DIM, high.to(q_ptr.dtype.element_ty), mask=exists)
    else:
        slot = tl.load(to.slots + m, mask=m < num_rows, other=-1)[None, :]
        inverse = to.k_inverse
        if head >= HEADS + KV_HEADS:
            inverse = to.v_inverse
        if to.k_offset is not None:
            k_offsets = to.k_offset + (head - HEADS) * HEAD_DIM + dims
            is_key = (head < HEADS + KV_HEADS) & (dims >= 0)
            low -= tl.load(k_offsets, mask=is_key, other=0.0)[:, None]
            high -= tl.load(k_offsets + HALF_DIM, mask=is_key, other=0.0)[:, None]
        target = to.kv + slot // BLOCK_SIZE * (2 * KV_HEADS * BLOCK_SIZE * HEAD_DIM) + slot % BLOCK_SIZE * HEAD_DIM
        target = target + (head - HEADS) * (BLOCK_SIZE * HEAD_DIM) + dims[:, None]
        mask = exists & (slot >= 0)  # a negative slot belongs to a row that only pads the batch
        store_narrowed(target, low * inverse, mask)
        store_narrowed(target + HALF_DIM, high * inverse, mask)


@triton.jit
def both_strips(out_ptr, to, sums, tile, m, n, num_rows, MODE: tl.constexpr, TILE_N: tl.constexpr, ROWS: tl.constexpr,
                SILU: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF_DIM: tl.constexpr,
                BLOCK_SIZE: tl.constexpr):  # fmt: skip
    """sums: [TILE_N, ROWS] of a tile of two strips: gate one by the other, or turn them and write keys and values."""
    STRIP: tl.constexpr = TILE_N // 2
    low, high = tl.split(tl.permute(tl.reshape(sums, [2, STRIP, ROWS]), [1, 2, 0]))
    if MODE == GATE:
        gate(out_ptr, low, high, tile, m, n, num_rows, SILU, STRIP)
    else:
        rope(out_ptr, to, low, high, tile, m, num_rows, STRIP, HEADS, KV_HEADS, HALF_DIM, BLOCK_SIZE)
