# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Attention of several new tokens per sequence: whole prompts, and chunks that follow a cached prefix.

One program takes one KV head and TILE_ROWS rows: consecutive query tokens times the query heads that share the KV head.
It walks the keys in tiles: those that every row sees without a mask, those at the diagonal (and at a window's edge)
with one. Tiles after the diagonal and before the window are never touched.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.interface import AttentionSpec
from quire.kernels.triton.common import (
    add_sink,
    compute_dtype,
    load_slopes,
    padded_seqs,
    scaled_scores,
    store_narrowed,
    tile_blocks,
    tile_rows,
)
from quire.kernels.triton.configs import PrefillConfig, padded_head_dim
from quire.kernels.triton.decode import qk_scale


@triton.jit
def attend(acc, top, weight_sum, q, kv_ptr, table_ptr, tile_begin, tile_end, kv_len, row_position, kv_head, scale,
           softcap, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
           TILE_TOKENS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, COMPUTE: tl.constexpr,
           MASKED: tl.constexpr, STAGES: tl.constexpr, slopes=None):  # fmt: skip
    """Online softmax over tiles tile_begin .. tile_end - 1, with or without a mask. slopes: of each row, or None."""
    dims = tl.arange(0, DIM_PAD)
    steps = tl.arange(0, TILE_TOKENS)
    in_head = (dims < HEAD_DIM)[None, :]
    ids = tile_blocks(table_ptr, tile_begin * TILE_TOKENS, kv_len, TILE_TOKENS, BLOCK_SIZE)
    for tile in tl.range(tile_begin, tile_end, num_stages=STAGES):
        first = tile * TILE_TOKENS
        rows = tile_rows(ids, first, kv_head, KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE_TOKENS)
        ids = tile_blocks(table_ptr, first + TILE_TOKENS, kv_len, TILE_TOKENS, BLOCK_SIZE)
        offsets = rows[:, None] + dims[None, :]
        exists = first + steps < kv_len
        if WINDOW > 0:  # blocks before every row's window are another sequence's by now
            exists = exists & (first + steps > tl.min(row_position, axis=0) - WINDOW)
        exists = exists[:, None] & in_head
        if MASKED:
            k = tl.load(kv_ptr + offsets, mask=exists, other=0.0)
        elif DIM_PAD != HEAD_DIM:
            k = tl.load(kv_ptr + offsets, mask=in_head, other=0.0)
        else:
            k = tl.load(kv_ptr + offsets)
        s = tl.dot(q, tl.trans(k.to(COMPUTE)), input_precision="ieee")
        # Uncapped scores are scaled where the exponent needs them: one multiply-add for each, and scale is positive.
        factor = scale
        if SOFTCAP:
            s = scaled_scores(s, scale, softcap, SOFTCAP)
            factor = 1.0
        key = (first + steps)[None, :]
        if slopes is not None:
            s = s * factor + slopes[:, None] * (key - row_position[:, None])
            factor = 1.0
        if MASKED:
            seen = key <= row_position[:, None]
            if WINDOW > 0:
                seen = seen & (key > row_position[:, None] - WINDOW)
            s = tl.where(seen, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, axis=1) * factor)
        if MASKED:
            # A row may see nothing of a tile at the window's edge or at the diagonal, and then no top may stand yet:
            # avoid inf - inf.
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
        else:
            base = new_top
        p = tl.exp2(s * factor - base[:, None])
        rescale = tl.exp2(top - base)
        weight_sum = weight_sum * rescale + tl.sum(p, axis=1)
        v_offsets = offsets + KV_HEADS * BLOCK_SIZE * HEAD_DIM
        if MASKED:
            v = tl.load(kv_ptr + v_offsets, mask=exists, other=0.0)
        elif DIM_PAD != HEAD_DIM:
            v = tl.load(kv_ptr + v_offsets, mask=in_head, other=0.0)
        else:
            v = tl.load(kv_ptr + v_offsets)
        acc = tl.dot(p.to(COMPUTE), v.to(COMPUTE), acc * rescale[:, None], input_precision="ieee")
        top = new_top
    return acc, top, weight_sum


@triton.jit
def prompt_tile(query_starts_ptr, num_seqs, QUERIES: tl.constexpr, SEQS_PAD: tl.constexpr):
    """Which tile of QUERIES query tokens this program has: its sequence, its first token there, and where the
    sequence's tokens begin and how many there are. Programs past a sequence's last tile begin behind its end."""
    item = tl.num_programs(1) - 1 - tl.program_id(1)  # a prompt's last tiles have most keys: start them first
    index = tl.arange(0, SEQS_PAD)
    base = tl.load(query_starts_ptr)
    starts = tl.load(query_starts_ptr + index, mask=index < num_seqs, other=0)
    # Sequence i's tiles start at item (tokens before it) // QUERIES + i: room for everyone's partly filled last tile.
    first_items = (starts - base) // QUERIES + index
    seq = tl.sum(((first_items <= item) & (index < num_seqs)).to(tl.int32), axis=0) - 1
    query_begin = tl.load(query_starts_ptr + seq)
    query_len = tl.load(query_starts_ptr + seq + 1) - query_begin
    return seq, (item - (query_begin - base) // QUERIES - seq) * QUERIES, query_begin, query_len


@triton.jit(do_not_specialize=["first_seq", "num_seqs", "table_stride"])
def prefill_kernel(q_ptr, kv_ptr, out_ptr, query_starts_ptr, kv_lens_ptr, tables_ptr, slopes_ptr, sinks_ptr,
                   first_seq, num_seqs, table_stride, scale, softcap, v_scale,
                   KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
                   BLOCK_SIZE: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_TOKENS: tl.constexpr,
                   WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, COMPUTE: tl.constexpr, SEQS_PAD: tl.constexpr,
                   STAGES: tl.constexpr):  # fmt: skip
    QUERIES: tl.constexpr = TILE_ROWS // GROUP  # query tokens of a tile; rows past QUERIES * GROUP stay empty
    kv_head = tl.program_id(0)
    seq, first_query, query_begin, query_len = prompt_tile(query_starts_ptr + first_seq, num_seqs, QUERIES, SEQS_PAD)
    if first_query >= query_len:
        return
    kv_len = tl.load(kv_lens_ptr + first_seq + seq)
    context_len = kv_len - query_len

    rows = tl.arange(0, TILE_ROWS)
    dims = tl.arange(0, DIM_PAD)
    query = first_query + rows // GROUP
    row_exists = (rows < QUERIES * GROUP) & (query < query_len)
    row_position = context_len + query
    out_row = ((query_begin + query) * KV_HEADS + kv_head).to(tl.int64) * GROUP + rows % GROUP
    offsets = out_row[:, None] * HEAD_DIM + dims[None, :]
    mask = row_exists[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + offsets, mask=mask, other=0.0).to(COMPUTE)
    table_ptr = tables_ptr + (first_seq + seq).to(tl.int64) * table_stride
    head = kv_head * GROUP + rows % GROUP
    slopes = None
    if slopes_ptr is not None:
        slopes = load_slopes(slopes_ptr, head, row_exists)

    first_position = context_len + first_query
    last_position = tl.minimum(first_position + QUERIES, kv_len) - 1
    tile_end = last_position // TILE_TOKENS + 1
    full_end = (first_position + 1) // TILE_TOKENS  # tiles below end at or before the first row's own token
    top = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    weight_sum = tl.zeros([TILE_ROWS], tl.float32)
    acc = tl.zeros([TILE_ROWS, DIM_PAD], tl.float32)
    full_begin = 0
    if WINDOW > 0:
        tile_begin = tl.maximum(first_position - WINDOW + 1, 0) // TILE_TOKENS
        # Tiles from here on start inside the last row's window, so inside everyone's.
        full_begin = (tl.maximum(last_position - WINDOW + 1, 0) + TILE_TOKENS - 1) // TILE_TOKENS
        full_end = tl.maximum(full_end, tile_begin)
        full_begin = tl.minimum(full_begin, full_end)
        acc, top, weight_sum = attend(
            acc, top, weight_sum, q, kv_ptr, table_ptr, tile_begin, full_begin, kv_len, row_position, kv_head, scale,
            softcap, KV_HEADS, HEAD_DIM, DIM_PAD, BLOCK_SIZE, TILE_TOKENS, WINDOW, SOFTCAP, COMPUTE, True, STAGES,
            slopes,
        )  # fmt: skip
    acc, top, weight_sum = attend(
        acc, top, weight_sum, q, kv_ptr, table_ptr, full_begin, full_end, kv_len, row_position, kv_head, scale,
        softcap, KV_HEADS, HEAD_DIM, DIM_PAD, BLOCK_SIZE, TILE_TOKENS, 0, SOFTCAP, COMPUTE, False, STAGES, slopes,
    )  # fmt: skip
    acc, top, weight_sum = attend(
        acc, top, weight_sum, q, kv_ptr, table_ptr, full_end, tile_end, kv_len, row_position, kv_head, scale,
        softcap, KV_HEADS, HEAD_DIM, DIM_PAD, BLOCK_SIZE, TILE_TOKENS, WINDOW, SOFTCAP, COMPUTE, True, STAGES,
        slopes,
    )  # fmt: skip
    if sinks_ptr is not None:
        acc, top, weight_sum = add_sink(acc, top, weight_sum, sinks_ptr, head, row_exists)
    acc = acc * (v_scale / tl.where(weight_sum > 0.0, weight_sum, 1.0))[:, None]
    store_narrowed(out_ptr + offsets, acc, mask)


def prefill_attention(
    q: Tensor,  # [tokens, heads * head_dim]
    kv: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    kv_lens: Tensor,
    out: Tensor,  # like q
    spec: AttentionSpec,
    config: PrefillConfig,
    *,
    first_seq: int,
    num_seqs: int,
    num_tokens: int,
) -> None:
    """Causal attention of the num_tokens rows of sequences first_seq .. first_seq + num_seqs - 1."""
    group = spec.num_heads // spec.num_kv_heads
    assert group <= config.tile_rows, f"{group} query heads share a KV head, but a tile has {config.tile_rows} rows"
    max_items = num_tokens // (config.tile_rows // group) + num_seqs
    prefill_kernel[(spec.num_kv_heads, max_items)](
        q, kv, out, query_starts, kv_lens, block_tables, spec.slopes, spec.sinks, first_seq, num_seqs,
        block_tables.stride(0), qk_scale(spec), spec.softcap or 0.0, spec.v_scale,
        KV_HEADS=spec.num_kv_heads, GROUP=group, HEAD_DIM=spec.head_dim, DIM_PAD=padded_head_dim(spec.head_dim),
        BLOCK_SIZE=kv.shape[3], TILE_ROWS=config.tile_rows, TILE_TOKENS=config.tile_tokens, WINDOW=spec.window or 0,
        SOFTCAP=spec.softcap is not None, COMPUTE=compute_dtype(q.dtype, kv.dtype), SEQS_PAD=padded_seqs(num_seqs),
        STAGES=config.num_stages, num_warps=config.num_warps,
    )  # fmt: skip
