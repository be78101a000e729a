# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""What stands between the fused projection and attention, in one pass: per-head norm, rotation, and the KV write."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.interface import AttentionBatch, AttentionSpec, Rotary, Unscaled
from quire.kernels.triton.common import next_power_of_2, store_narrowed
from quire.kernels.triton.norm import ROWS_OF_SEVERAL_PROGRAMS, row_factor, stream_arguments


@triton.jit
def turned(low, high, cos, sin):
    """Both halves of heads, rotated. Written out, because a compiler may join either product with the sum, and not
    everywhere the same."""
    cos = tl.broadcast_to(cos, low.shape)
    return tl.fma(low, cos, -(high * sin)), tl.fma(high, cos, low * sin)


@triton.jit
def rope_kernel(qkv_ptr, cos_sin_ptr, kv_ptr, q_out_ptr, positions_ptr, slots_ptr, q_norm_ptr, k_norm_ptr,
                bias_ptr, stream_ptr, stream_eps, row_scales_ptr, row_scale, column_scales_ptr, eps, k_offset_ptr,
                k_inverse, v_inverse, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
                HALF_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_HEADS: tl.constexpr, TILES_EACH: tl.constexpr,
                Q_NORM: tl.constexpr, K_NORM: tl.constexpr, STREAM: tl.constexpr,
                STREAM_PAD: tl.constexpr):  # fmt: skip
    HALF: tl.constexpr = HEAD_DIM // 2
    # A token's programs are neighbours: all of them look at its row of the stream, which is in the L2 cache by then.
    HEADS_EACH: tl.constexpr = TILE_HEADS * TILES_EACH
    PROGRAMS: tl.constexpr = (HEADS + 2 * KV_HEADS + HEADS_EACH - 1) // HEADS_EACH
    token = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    first = tl.program_id(0) % PROGRAMS * HEADS_EACH
    dims = tl.arange(0, HALF_PAD)
    in_half = (dims < HALF)[None, :]
    position = tl.load(positions_ptr + token)
    slot = tl.load(slots_ptr + token)
    cos = tl.load(cos_sin_ptr + position * HEAD_DIM + dims, mask=dims < HALF, other=0.0)[None, :]
    sin = tl.load(cos_sin_ptr + position * HEAD_DIM + HALF + dims, mask=dims < HALF, other=0.0)[None, :]
    if row_scales_ptr is not None:
        row_scale *= tl.load(row_scales_ptr + token)
    for i in tl.static_range(TILES_EACH):
        head = first + i * TILE_HEADS + tl.arange(0, TILE_HEADS)  # q's heads, then k's, then v's
        is_q = head < HEADS
        is_v = head >= HEADS + KV_HEADS
        mask = (head < HEADS + 2 * KV_HEADS)[:, None] & in_half
        source = qkv_ptr + token * ((HEADS + 2 * KV_HEADS) * HEAD_DIM) + head[:, None] * HEAD_DIM + dims[None, :]
        low = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
        if stream_ptr is not None:
            if i == 0:
                factor = row_factor(stream_ptr + token * STREAM, stream_eps, STREAM, STREAM_PAD)
            low *= factor
            high *= factor
        if column_scales_ptr is not None:
            scales = column_scales_ptr + head[:, None] * HEAD_DIM + dims[None, :]
            low *= row_scale * tl.load(scales, mask=mask, other=0.0)
            high *= row_scale * tl.load(scales + HALF, mask=mask, other=0.0)
        if bias_ptr is not None:
            bias = bias_ptr + head[:, None] * HEAD_DIM + dims[None, :]
            low += tl.load(bias, mask=mask, other=0.0).to(tl.float32)
            high += tl.load(bias + HALF, mask=mask, other=0.0).to(tl.float32)
        if Q_NORM or K_NORM:
            rms = tl.rsqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / HEAD_DIM + eps)[:, None]
        n_low, n_high = low, high
        if Q_NORM:
            w_low = tl.load(q_norm_ptr + dims, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
            w_high = tl.load(q_norm_ptr + HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
            n_low = tl.where(is_q[:, None], low * rms * w_low, n_low)
            n_high = tl.where(is_q[:, None], high * rms * w_high, n_high)
        if K_NORM:
            w_low = tl.load(k_norm_ptr + dims, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
            w_high = tl.load(k_norm_ptr + HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
            n_low = tl.where(is_q[:, None], n_low, low * rms * w_low)
            n_high = tl.where(is_q[:, None], n_high, high * rms * w_high)
        r_low, r_high = turned(n_low, n_high, cos, sin)

        q_out = q_out_ptr + token * (HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + dims[None, :]
        q_mask = is_q[:, None] & in_half
        tl.store(q_out, r_low.to(q_out_ptr.dtype.element_ty), mask=q_mask)
        tl.store(q_out + HALF, r_high.to(q_out_ptr.dtype.element_ty), mask=q_mask)

        if k_offset_ptr is not None:
            of_keys = ((head >= HEADS) & (head < HEADS + KV_HEADS))[:, None] & in_half
            k_offsets = k_offset_ptr + (head - HEADS)[:, None] * HEAD_DIM + dims[None, :]
            r_low -= tl.load(k_offsets, mask=of_keys, other=0.0)
            r_high -= tl.load(k_offsets + HALF, mask=of_keys, other=0.0)
        # A negative slot belongs to a row that only pads the batch.
        kv_mask = mask & (head >= HEADS)[:, None] & (slot >= 0)
        kv_head = head - HEADS  # k's heads, then v's: as they lie in a block
        block = slot // BLOCK_SIZE
        target = kv_ptr + block * (2 * KV_HEADS * BLOCK_SIZE * HEAD_DIM) + (slot % BLOCK_SIZE) * HEAD_DIM
        target = target + kv_head[:, None] * (BLOCK_SIZE * HEAD_DIM) + dims[None, :]
        inverse = tl.where(is_v, v_inverse, k_inverse)[:, None]
        store_narrowed(target, tl.where(is_v[:, None], low, r_low) * inverse, kv_mask)
        store_narrowed(target + HALF, tl.where(is_v[:, None], high, r_high) * inverse, kv_mask)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    tile_heads: int
    tiles_each: int  # of one program
    num_warps: int = 4


def rope_config(tokens: int, total_heads: int, *, has_stream: bool) -> RopeConfig:
    """How a step's rows are cut. Each program that uses the stream reads a whole row of it: few wide ones do less."""
    if not has_stream:
        return RopeConfig(4 if tokens <= 64 else 16, 1)  # few tokens: more programs; many: fewer, fuller ones
    if tokens <= ROWS_OF_SEVERAL_PROGRAMS:
        return RopeConfig(16, 1)
    return RopeConfig(16, -(-total_heads // 16), num_warps=8)


def rope_and_write(
    qkv: Tensor,
    rotary: Rotary,
    kv: Tensor,
    batch: AttentionBatch,
    spec: AttentionSpec,
    *,
    factors_of: Unscaled | None = None,
    bias: Tensor | None = None,
    row_scales: Tensor | None = None,
    row_scale: float = 1.0,
    column_scales: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: RopeConfig | None = None,
) -> Tensor:
    """See Ops.rope_and_write. Rows with a negative slot write no KV.

    factors_of: rows that were multiplied before they were normalised; the bias is then added here.
    column_scales: what a product of 8-bit numbers is yet to be multiplied by, beside its rows' scales.
    """
    assert qkv.is_contiguous() and kv.is_contiguous() and rotary.cos_sin.is_contiguous() and spec.head_dim % 2 == 0
    tokens = qkv.shape[0]
    total_heads = spec.num_heads + 2 * spec.num_kv_heads
    q_out = torch.empty((tokens, spec.num_heads * spec.head_dim), dtype=out_dtype or qkv.dtype, device=qkv.device)
    stream, stream_eps, stream_width, stream_pad = stream_arguments(factors_of)
    config = config or rope_config(tokens, total_heads, has_stream=stream is not None)
    rope_kernel[(tokens * -(-total_heads // (config.tile_heads * config.tiles_each)),)](
        qkv, rotary.cos_sin, kv, q_out, batch.positions, batch.slots, rotary.q_norm, rotary.k_norm,
        bias, stream, stream_eps, row_scales, row_scale, column_scales, rotary.eps, spec.k_offset,
        1.0 / spec.k_scale, 1.0 / spec.v_scale,
        HEADS=spec.num_heads, KV_HEADS=spec.num_kv_heads, HEAD_DIM=spec.head_dim,
        HALF_PAD=next_power_of_2(spec.head_dim // 2), BLOCK_SIZE=kv.shape[3],
        TILE_HEADS=config.tile_heads, TILES_EACH=config.tiles_each,
        Q_NORM=rotary.q_norm is not None, K_NORM=rotary.k_norm is not None, STREAM=stream_width, STREAM_PAD=stream_pad,
        num_warps=config.num_warps,
    )  # fmt: skip
    return q_out
