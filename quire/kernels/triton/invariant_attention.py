# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Attention in which a token's result depends on nothing but its own sequence: not on whether it is decoded or part of
a prompt, on where the prompt was cut, or on what else is in the step.

A token's keys are taken in tiles of a fixed size, with a running maximum, and in parts of a fixed number of tiles; the
parts are put together in order. Decodes give each part to a program of its own, and the one that finishes a sequence's
last part puts them together; prompts go through all parts in one program. Both multiply tiles of 64 rows, of which a
decode fills only a few: the same instruction computes them, and memory is what a decode waits for in any case.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.interface import AttentionBatch, AttentionSpec
from quire.kernels.triton.common import compute_dtype, next_power_of_2, padded_seqs, store_narrowed
from quire.kernels.triton.configs import NUM_SMS, padded_head_dim
from quire.kernels.triton.decode import AttentionScratch, qk_scale
from quire.kernels.triton.prefill import attend, prompt_tile

_TILE_ROWS = 64  # of a decode
_PROMPT_ROWS = 128  # of a prompt: rows do not depend on each other, and twice as many share each tile of keys
_NUM_STAGES = 3
_PART_TOKENS = 1024  # that one part of a sequence has: a decode's share of a program
_ROOM = 4 * NUM_SMS  # parts that have a program of their own, at most


@triton.jit
def _merge(acc, top, weight_sum, part_acc, part_top, part_sum):
    """Put a part's result after those of the parts before it."""
    new_top = tl.maximum(top, part_top)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen nothing yet: avoid inf - inf
    before = tl.exp2(top - base)
    here = tl.exp2(part_top - base)
    # Written out, because a compiler may join either product with the sum, and not everywhere the same.
    merged = tl.fma(part_acc, tl.broadcast_to(here[:, None], part_acc.shape), acc * before[:, None])
    return merged, new_top, tl.fma(part_sum, here, weight_sum * before)


@triton.jit
def _attend_part(q, kv_ptr, table_ptr, part, first_position, last_position, kv_len, row_position, kv_head, scale,
                 softcap, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
                 BLOCK_SIZE: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_TOKENS: tl.constexpr,
                 PART_TILES: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, COMPUTE: tl.constexpr,
                 STAGES: tl.constexpr, ONE_LOOP: tl.constexpr):  # fmt: skip
    """One part of the keys of rows from first_position to last_position on. ONE_LOOP: tiles that need no mask have one,
    too, which changes no number: few rows wait longer for the first keys of another loop than a mask takes."""
    tile_begin = part * PART_TILES
    tile_end = tl.minimum(tile_begin + PART_TILES, last_position // TILE_TOKENS + 1)
    full_begin = tile_begin
    acc = tl.zeros([TILE_ROWS, DIM_PAD], tl.float32)
    top = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    weight_sum = tl.zeros([TILE_ROWS], tl.float32)
    if WINDOW > 0:
        tile_begin = tl.maximum(tile_begin, tl.maximum(first_position - WINDOW + 1, 0) // TILE_TOKENS)
        # Tiles from here on start inside the last row's window, so inside everyone's.
        inside = (tl.maximum(last_position - WINDOW + 1, 0) + TILE_TOKENS - 1) // TILE_TOKENS
        full_begin = tl.minimum(tl.maximum(inside, tile_begin), tile_end)
    # Tiles below end at or before the first row's own token.
    full_end = tl.minimum(tl.maximum((first_position + 1) // TILE_TOKENS, full_begin), tile_end)
    if ONE_LOOP:
        full_end = tile_begin
    if WINDOW > 0 and not ONE_LOOP:
        acc, top, weight_sum = attend(
            acc, top, weight_sum, q, kv_ptr, table_ptr, tile_begin, full_begin, kv_len, row_position, kv_head, scale,
            softcap, KV_HEADS, HEAD_DIM, DIM_PAD, BLOCK_SIZE, TILE_TOKENS, WINDOW, SOFTCAP, COMPUTE, True, STAGES,
        )  # fmt: skip
    if not ONE_LOOP:
        acc, top, weight_sum = attend(
            acc, top, weight_sum, q, kv_ptr, table_ptr, full_begin, full_end, kv_len, row_position, kv_head, scale,
            softcap, KV_HEADS, HEAD_DIM, DIM_PAD, BLOCK_SIZE, TILE_TOKENS, 0, SOFTCAP, COMPUTE, False, STAGES,
        )  # fmt: skip
    return attend(
        acc, top, weight_sum, q, kv_ptr, table_ptr, full_end, tile_end, kv_len, row_position, kv_head, scale,
        softcap, KV_HEADS, HEAD_DIM, DIM_PAD, BLOCK_SIZE, TILE_TOKENS, WINDOW, SOFTCAP, COMPUTE, True, STAGES,
    )  # fmt: skip


@triton.jit
def _load_entry(partial_ptr, tops_ptr, sums_ptr, entry, mask, row_exists, DIM_PAD: tl.constexpr):
    """A stored result of some parts. Bypasses L1: other multiprocessors may have written it in this launch."""
    dims = tl.arange(0, DIM_PAD)
    acc = tl.load(partial_ptr + entry[:, None] * DIM_PAD + dims[None, :], mask=mask, other=0.0, cache_modifier=".cg")
    top = tl.load(tops_ptr + entry, mask=row_exists, other=0.0, cache_modifier=".cg")
    return acc, top, tl.load(sums_ptr + entry, mask=row_exists, other=0.0, cache_modifier=".cg")


@triton.jit
def _store_entry(partial_ptr, tops_ptr, sums_ptr, entry, mask, row_exists, acc, top, weight_sum,
                 DIM_PAD: tl.constexpr):  # fmt: skip
    dims = tl.arange(0, DIM_PAD)
    tl.store(partial_ptr + entry[:, None] * DIM_PAD + dims[None, :], acc, mask=mask)
    tl.store(tops_ptr + entry, top, mask=row_exists)
    tl.store(sums_ptr + entry, weight_sum, mask=row_exists)


@triton.jit(do_not_specialize=["num_seqs", "table_stride", "room"])
def invariant_decode_kernel(q_ptr, kv_ptr, out_ptr, partial_ptr, tops_ptr, sums_ptr, arrivals_ptr, tables_ptr,
                            kv_lens_ptr, num_seqs, table_stride, room, scale, softcap, v_scale,
                            KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
                            DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_ROWS: tl.constexpr,
                            TILE_TOKENS: tl.constexpr, PART_TILES: tl.constexpr, WINDOW: tl.constexpr,
                            SOFTCAP: tl.constexpr, COMPUTE: tl.constexpr, SEQS_PAD: tl.constexpr,
                            STAGES: tl.constexpr):  # fmt: skip
    """One token of each sequence. As long as there is room for their results, parts have programs of their own; further
    sequences have one program for all their parts, which computes the same."""
    PART_TOKENS: tl.constexpr = PART_TILES * TILE_TOKENS
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    index = tl.arange(0, SEQS_PAD)
    lens = tl.load(kv_lens_ptr + index, mask=index < num_seqs, other=0)
    parts = tl.maximum((lens + PART_TOKENS - 1) // PART_TOKENS, 1)
    if WINDOW > 0:
        parts -= tl.maximum(lens - WINDOW, 0) // PART_TOKENS
    ends = tl.cumsum(tl.where(index < num_seqs, parts, 0), axis=0)
    # From the first sequence on that finds no room, each is one item.
    has_room = ends <= room
    num_apart = tl.sum(has_room.to(tl.int32), axis=0)
    parts_apart = tl.max(tl.where(has_room, ends, 0), axis=0)
    ends = tl.where(has_room, ends, parts_apart + index - num_apart + 1)
    seq = tl.sum(((ends <= item) & (index < num_seqs)).to(tl.int32), axis=0)
    if seq >= num_seqs:
        return
    first_item = tl.max(tl.where(index < seq, ends, 0), axis=0)
    num_parts = tl.sum(tl.where(index == seq, parts, 0), axis=0)
    num_items = tl.where(seq < num_apart, num_parts, 1)
    kv_len = tl.load(kv_lens_ptr + seq)
    first_part = 0
    if WINDOW > 0:
        first_part = tl.maximum(kv_len - WINDOW, 0) // PART_TOKENS
    last_part = first_part + num_parts
    if num_items > 1:
        first_part += item - first_item
        last_part = first_part + 1

    rows = tl.arange(0, TILE_ROWS)
    dims = tl.arange(0, DIM_PAD)
    row_exists = rows < GROUP
    out_row = (seq * KV_HEADS + kv_head) * GROUP + rows
    offsets = out_row[:, None] * HEAD_DIM + dims[None, :]
    mask = row_exists[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + offsets, mask=mask, other=0.0).to(COMPUTE)
    table_ptr = tables_ptr + seq.to(tl.int64) * table_stride
    row_position = tl.zeros([TILE_ROWS], tl.int32) + (kv_len - 1)
    entry = (item * KV_HEADS + kv_head) * GROUP + rows
    acc = tl.zeros([TILE_ROWS, DIM_PAD], tl.float32)
    top = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    weight_sum = tl.zeros([TILE_ROWS], tl.float32)
    for part in range(first_part, last_part):
        acc, top, weight_sum = _attend_part(
            q, kv_ptr, table_ptr, part, kv_len - 1, kv_len - 1, kv_len, row_position, kv_head, scale, softcap,
            KV_HEADS, HEAD_DIM, DIM_PAD, BLOCK_SIZE, TILE_ROWS, TILE_TOKENS, PART_TILES, WINDOW, SOFTCAP, COMPUTE,
            STAGES, True,
        )  # fmt: skip
        # What the parts before left waits in memory: registers have room for one of the two.
        if part > first_part:
            before, before_top, before_sum = _load_entry(partial_ptr, tops_ptr, sums_ptr, entry, mask, row_exists,
                                                         DIM_PAD)  # fmt: skip
            acc, top, weight_sum = _merge(before, before_top, before_sum, acc, top, weight_sum)
        if (num_items > 1) | (part + 1 < last_part):
            _store_entry(partial_ptr, tops_ptr, sums_ptr, entry, mask, row_exists, acc, top, weight_sum, DIM_PAD)
            tl.debug_barrier()  # every thread's share is stored before one announces it, or another loads it
    if num_items == 1:
        acc = acc * (v_scale / tl.where(weight_sum > 0.0, weight_sum, 1.0))[:, None]
        store_narrowed(out_ptr + offsets, acc, mask)
    else:
        arrival_ptr = arrivals_ptr + seq * KV_HEADS + kv_head
        if tl.atomic_add(arrival_ptr, 1, sem="acq_rel") == num_items - 1:
            tl.store(arrival_ptr, 0)  # ready for the next launch
            acc = tl.zeros([TILE_ROWS, DIM_PAD], tl.float32)
            top = tl.full([TILE_ROWS], float("-inf"), tl.float32)
            weight_sum = tl.zeros([TILE_ROWS], tl.float32)
            for other in range(first_item, first_item + num_items):
                entry = (other * KV_HEADS + kv_head) * GROUP + rows
                part_acc, part_top, part_sum = _load_entry(partial_ptr, tops_ptr, sums_ptr, entry, mask, row_exists,
                                                           DIM_PAD)  # fmt: skip
                acc, top, weight_sum = _merge(acc, top, weight_sum, part_acc, part_top, part_sum)
            acc = acc * (v_scale / tl.where(weight_sum > 0.0, weight_sum, 1.0))[:, None]
            store_narrowed(out_ptr + offsets, acc, mask)


@triton.jit(do_not_specialize=["first_seq", "num_seqs", "table_stride"])
def invariant_prompt_kernel(q_ptr, kv_ptr, out_ptr, query_starts_ptr, kv_lens_ptr, tables_ptr, first_seq, num_seqs,
                            table_stride, scale, softcap, v_scale, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
                            HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                            TILE_ROWS: tl.constexpr, TILE_TOKENS: tl.constexpr, PART_TILES: tl.constexpr,
                            WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, COMPUTE: tl.constexpr,
                            SEQS_PAD: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Several tokens of each sequence: tiles of rows as prefill_kernel has them."""
    kv_head = tl.program_id(0)
    seq, first_query, query_begin, query_len = prompt_tile(
        query_starts_ptr + first_seq, num_seqs, TILE_ROWS // GROUP, SEQS_PAD
    )
    if first_query >= query_len:
        return
    kv_len = tl.load(kv_lens_ptr + first_seq + seq)
    rows = tl.arange(0, TILE_ROWS)
    dims = tl.arange(0, DIM_PAD)
    QUERIES: tl.constexpr = TILE_ROWS // GROUP
    query = first_query + rows // GROUP
    row_exists = (rows < QUERIES * GROUP) & (query < query_len)
    row_position = kv_len - query_len + query
    out_row = ((query_begin + query) * KV_HEADS + kv_head).to(tl.int64) * GROUP + rows % GROUP
    offsets = out_row[:, None] * HEAD_DIM + dims[None, :]
    mask = row_exists[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + offsets, mask=mask, other=0.0).to(COMPUTE)
    table_ptr = tables_ptr + (first_seq + seq).to(tl.int64) * table_stride
    first_position = kv_len - query_len + first_query
    last_position = tl.minimum(first_position + QUERIES, kv_len) - 1
    first_part = 0
    if WINDOW > 0:
        first_part = tl.maximum(first_position - WINDOW + 1, 0) // (PART_TILES * TILE_TOKENS)
    # The first by itself, as a decode's: most prompts have only one, and both results fill more than the registers.
    acc, top, weight_sum = _attend_part(
        q, kv_ptr, table_ptr, first_part, first_position, last_position, kv_len, row_position, kv_head, scale, softcap,
        KV_HEADS, HEAD_DIM, DIM_PAD, BLOCK_SIZE, TILE_ROWS, TILE_TOKENS, PART_TILES, WINDOW, SOFTCAP, COMPUTE,
        STAGES, False,
    )  # fmt: skip
    for part in range(first_part + 1, last_position // (PART_TILES * TILE_TOKENS) + 1):
        part_acc, part_top, part_sum = _attend_part(
            q, kv_ptr, table_ptr, part, first_position, last_position, kv_len, row_position, kv_head, scale, softcap,
            KV_HEADS, HEAD_DIM, DIM_PAD, BLOCK_SIZE, TILE_ROWS, TILE_TOKENS, PART_TILES, WINDOW, SOFTCAP, COMPUTE,
            STAGES, False,
        )  # fmt: skip
        acc, top, weight_sum = _merge(acc, top, weight_sum, part_acc, part_top, part_sum)
    acc = acc * (v_scale / tl.where(weight_sum > 0.0, weight_sum, 1.0))[:, None]
    store_narrowed(out_ptr + offsets, acc, mask)


def invariant_attention(
    q: Tensor, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec, scratch: AttentionScratch
) -> Tensor:
    """q: [tokens, heads * head_dim] -> the same shape. A prefix that decodes share is read by each of them."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    group, head_dim, num_kv_heads = spec.num_heads // spec.num_kv_heads, spec.head_dim, spec.num_kv_heads
    dim_pad = padded_head_dim(head_dim)
    tile_rows = max(_TILE_ROWS, next_power_of_2(group))
    tile_tokens = 64 if dim_pad <= 128 else 32
    constants = {
        "KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "DIM_PAD": dim_pad,
        "BLOCK_SIZE": kv.shape[3],
        "TILE_ROWS": tile_rows,
        "TILE_TOKENS": tile_tokens,
        "PART_TILES": _PART_TOKENS // tile_tokens,
        "WINDOW": spec.window or 0,
        "SOFTCAP": spec.softcap is not None,
        "COMPUTE": compute_dtype(q.dtype, kv.dtype),
        "STAGES": _NUM_STAGES,
        "num_warps": tile_rows // 16 if dim_pad <= 128 else tile_rows // 8,
    }
    numbers = (qk_scale(spec), spec.softcap or 0.0, spec.v_scale)
    num_seqs, num_decodes = batch.kv_lens.shape[0], batch.num_decodes
    tables = batch.block_tables
    if num_decodes:
        visible = batch.max_kv_len if spec.window is None else min(batch.max_kv_len, spec.window + _PART_TOKENS)
        most_parts = num_decodes * -(-visible // _PART_TOKENS)
        room = min(most_parts, _ROOM)
        items = min(most_parts, room + num_decodes)
        entries = items * num_kv_heads * group
        partial = torch.empty(entries * dim_pad, dtype=torch.float32, device=q.device)
        tops, sums = (torch.empty(entries, dtype=torch.float32, device=q.device) for _ in range(2))
        assert scratch.arrivals.numel() >= num_decodes * num_kv_heads
        invariant_decode_kernel[(num_kv_heads, items)](
            q, kv, out, partial, tops, sums, scratch.arrivals, tables, batch.kv_lens, num_decodes, tables.stride(0),
            room, *numbers, SEQS_PAD=padded_seqs(num_decodes), **constants,
        )  # fmt: skip
    if num_seqs > num_decodes:
        if dim_pad <= 128 and batch.max_query_len * group > tile_rows:
            tile_rows = max(_PROMPT_ROWS, tile_rows)
            constants |= {"TILE_ROWS": tile_rows, "num_warps": tile_rows // 16}
        num_prompts, num_tokens = num_seqs - num_decodes, q.shape[0] - num_decodes
        invariant_prompt_kernel[(num_kv_heads, num_tokens // (tile_rows // group) + num_prompts)](
            q, kv, out, batch.query_starts, batch.kv_lens, tables, num_decodes, num_prompts, tables.stride(0),
            *numbers, SEQS_PAD=padded_seqs(num_prompts), **constants,
        )  # fmt: skip
    return out
