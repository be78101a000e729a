# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Split-KV attention of one query token per sequence.

One program takes one KV head of one piece of one sequence. The query heads that share the KV head are the rows of one
tensor-core tile, so K and V are read once. Pieces are cut on the device, from the lengths that stand there: the tokens
of all sequences, divided by the number of programs that fill the chip, give the length of a piece. So the grid depends
on the batch size only (a CUDA graph may capture it) and work is balanced by tokens, not by sequences. They are cut once
a step, for all layers alike (`pieces_kernel`). Programs without a piece leave at once. A sequence in one piece is
written directly; the others' pieces are merged by their log-sum-exp, by the program that finishes last.

Where sequences share a prefix, `prefix.py` has attended to it before: a sequence's first piece starts from what it
found, and the pieces cover only the tokens after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.interface import AttentionBatch, AttentionSpec
from quire.kernels.triton.common import (
    LOG2E,
    add_sink,
    compute_dtype,
    load_slopes,
    next_power_of_2,
    padded_seqs,
    scaled_scores,
    store_narrowed,
    tile_blocks,
    tile_rows,
    widened_pairs,
)
from quire.kernels.triton.configs import NUM_SMS, DecodeConfig, padded_head_dim


class PrefixResults(NamedTuple):
    """What attention to shared prefixes leaves for the sequences' first pieces. See prefix.py."""

    seq_lens: Tensor  # [seqs] int32: tokens of the prefix, 0 for a sequence without one
    found: Tensor  # [seqs, 3] int32: first of the prefix's parts, their number, and the sequence's first row in each
    partial: Tensor  # [parts, kv_heads, tile_rows, dim_pad] float32
    lse: Tensor  # [parts, kv_heads, tile_rows] float32, in units of log 2


_PIECE_INTS = tl.constexpr(8)
_PIECES_EACH = 16  # that a program writes, of up to 1,024 sequences: it compares all of these with all of those


@triton.jit(do_not_specialize=["num_seqs", "wanted_pieces", "long_pieces", "most_pieces"])
def pieces_kernel(pieces_ptr, kv_lens_ptr, prefix_lens_ptr, num_seqs, wanted_pieces, long_pieces, most_pieces,
                  MIN_TILES: tl.constexpr, LONG_TILES: tl.constexpr, WINDOW: tl.constexpr, TILE_TOKENS: tl.constexpr,
                  SEQS_PAD: tl.constexpr, EACH: tl.constexpr):  # fmt: skip
    """Cut the sequences into pieces. Each program comes to the same answer, and writes some of them."""
    index = tl.arange(0, SEQS_PAD)
    is_seq = index < num_seqs
    lens = tl.load(kv_lens_ptr + index, mask=is_seq, other=0)
    tiles = (lens + TILE_TOKENS - 1) // TILE_TOKENS
    if WINDOW > 0:
        tiles -= tl.maximum(lens - WINDOW, 0) // TILE_TOKENS
    if prefix_lens_ptr is not None:
        tiles -= tl.load(prefix_lens_ptr + index, mask=is_seq, other=0) // TILE_TOKENS
    total = tl.sum(tiles, axis=0)
    # Long pieces are worth more programs: one on a multiprocessor does not ask for memory as fast as that delivers.
    wanted_pieces = tl.where(total > LONG_TILES * wanted_pieces, long_pieces, wanted_pieces)
    tiles_per_piece = tl.maximum((total + wanted_pieces - 1) // wanted_pieces, MIN_TILES)
    counts = tl.where(is_seq, tl.maximum((tiles + tiles_per_piece - 1) // tiles_per_piece, 1), 0)
    ends = tl.cumsum(counts, axis=0)

    piece = tl.program_id(0) * EACH + tl.arange(0, EACH)
    is_before = (ends[None, :] <= piece[:, None]) & is_seq[None, :]
    seq = tl.sum(is_before.to(tl.int32), axis=1)
    first = tl.max(tl.where(is_before, ends[None, :], 0), axis=1)
    count = tl.sum(tl.where(index[None, :] == seq[:, None], counts[None, :], 0), axis=1)
    exists = seq < num_seqs
    count = tl.where(exists, count, 1)
    kv_len = tl.load(kv_lens_ptr + seq, mask=exists, other=0)
    low = tl.zeros([EACH], tl.int32)
    if WINDOW > 0:
        low = tl.maximum(kv_len - WINDOW, 0)
    if prefix_lens_ptr is not None:
        low = tl.load(prefix_lens_ptr + seq, mask=exists, other=0)  # a multiple of TILE_TOKENS
    first_tile = low // TILE_TOKENS
    num_tiles = (kv_len + TILE_TOKENS - 1) // TILE_TOKENS - first_tile
    out = pieces_ptr + piece * _PIECE_INTS
    is_place = piece < most_pieces
    tl.store(out, tl.where(exists, seq, -1), mask=is_place)
    tl.store(out + 1, kv_len, mask=is_place)
    tl.store(out + 2, low, mask=is_place)
    tl.store(out + 3, first_tile + (piece - first) * num_tiles // count, mask=is_place)
    tl.store(out + 4, first_tile + (piece - first + 1) * num_tiles // count, mask=is_place)
    tl.store(out + 5, first, mask=is_place)
    tl.store(out + 6, count, mask=is_place)


@triton.jit
def _start_from_prefix(prefix, seq, kv_head, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
                       DIM_PAD: tl.constexpr, PREFIX_ROWS: tl.constexpr):  # fmt: skip
    """The softmax's state after the prefix: the prefix's parts, weighed by exp2(lse)."""
    heads = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, DIM_PAD)
    first_part = tl.load(prefix.found + seq * 3)
    num_parts = tl.load(prefix.found + seq * 3 + 1)
    first_row = tl.load(prefix.found + seq * 3 + 2)
    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    weight_sum = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for part in range(first_part, first_part + num_parts):
        entry = (part * KV_HEADS + kv_head) * PREFIX_ROWS + first_row + heads
        lse = tl.load(prefix.lse + entry, mask=heads < GROUP, other=0.0)
        values = tl.load(
            prefix.partial + entry[:, None] * DIM_PAD + dims[None, :], mask=(heads < GROUP)[:, None], other=0.0
        )
        new_top = tl.maximum(top, lse)
        rescale = tl.exp2(top - new_top)
        weight = tl.exp2(lse - new_top)
        weight_sum = weight_sum * rescale + weight
        acc = acc * rescale[:, None] + values * weight[:, None]
        top = new_top
    return top, weight_sum, acc


@triton.jit
def _split_pairs(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Even columns, odd columns."""
    return tl.split(tl.reshape(x, [ROWS, WIDTH // 2, 2]))


@triton.jit
def _merge(partial_ptr, lse_ptr, out_ptr, first_item, num_pieces, kv_head, out_row, KV_HEADS: tl.constexpr,
           GROUP: tl.constexpr, GROUP_LOW: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr):  # fmt: skip
    """Weigh the pieces' results by exp2(lse). Loads bypass L1: other multiprocessors wrote them in this launch."""
    heads = tl.arange(0, GROUP_LOW)
    dims = tl.arange(0, DIM_PAD)
    # Several loads on their way at once, within the registers: 64 a thread.
    PIECES_STEP: tl.constexpr = (8192 // DIM_PAD) // GROUP_LOW if (8192 // DIM_PAD) // GROUP_LOW > 0 else 1
    steps = tl.arange(0, PIECES_STEP)
    top = tl.full([GROUP_LOW], float("-inf"), tl.float32)
    weight_sum = tl.zeros([GROUP_LOW], tl.float32)
    acc = tl.zeros([GROUP_LOW, DIM_PAD], tl.float32)
    for start in range(0, num_pieces, PIECES_STEP):
        item = first_item + start + steps
        entry = (item[:, None] * KV_HEADS + kv_head) * GROUP_LOW + heads[None, :]
        exists = (start + steps < num_pieces)[:, None] & (heads < GROUP)[None, :]
        # Heads that only pad have weight too, or they would give inf - inf.
        outside = tl.where(heads < GROUP, float("-inf"), 0.0)[None, :]
        lse = tl.load(lse_ptr + entry, mask=exists, other=0.0, cache_modifier=".cg")
        lse = tl.where(exists, lse, outside)
        part = tl.load(
            partial_ptr + entry[:, :, None] * DIM_PAD + dims[None, None, :],
            mask=exists[:, :, None] & (dims < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_top = tl.maximum(top, tl.max(lse, axis=0))
        rescale = tl.exp2(top - new_top)
        weight = tl.exp2(lse - new_top[None, :])
        weight_sum = weight_sum * rescale + tl.sum(weight, axis=0)
        acc = acc * rescale[:, None] + tl.sum(part * weight[:, :, None], axis=0)
        top = new_top
    acc = acc / weight_sum[:, None]
    row = (out_row * KV_HEADS + kv_head) * GROUP + heads
    mask = (heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    store_narrowed(out_ptr + row[:, None] * HEAD_DIM + dims[None, :], acc, mask)


@triton.jit(do_not_specialize=["table_stride"])
def decode_kernel(q_ptr, kv_ptr, out_ptr, partial_ptr, lse_ptr, arrivals_ptr, tables_ptr, pieces_ptr, prefix,
                  slopes_ptr, sinks_ptr, table_stride, qk_scale, softcap, v_scale,
                  KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_LOW: tl.constexpr, GROUP_PAD: tl.constexpr,
                  HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_TOKENS: tl.constexpr,
                  WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, COMPUTE: tl.constexpr, PREFIX_ROWS: tl.constexpr,
                  STAGES: tl.constexpr):  # fmt: skip
    """prefix: a PrefixResults, or None."""
    PAIRED: tl.constexpr = kv_ptr.dtype.element_ty == tl.float8e4nv and DIM_PAD >= 32  # see widened_pairs
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    pieces_ptr += item * _PIECE_INTS
    seq = tl.load(pieces_ptr)
    kv_len = tl.load(pieces_ptr + 1)
    low = tl.load(pieces_ptr + 2)
    tile_begin = tl.load(pieces_ptr + 3)
    tile_end = tl.load(pieces_ptr + 4)
    first_item = tl.load(pieces_ptr + 5)
    num_pieces = tl.load(pieces_ptr + 6)
    if seq < 0:
        return
    piece = item - first_item

    heads = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, DIM_PAD)
    steps = tl.arange(0, TILE_TOKENS)
    in_head = (dims < HEAD_DIM)[None, :]
    row = (seq * KV_HEADS + kv_head) * GROUP + heads
    head_mask = (heads < GROUP)[:, None] & in_head
    q = tl.load(q_ptr + row[:, None] * HEAD_DIM + dims[None, :], mask=head_mask, other=0.0).to(COMPUTE)

    slopes = None
    if slopes_ptr is not None:
        slopes = load_slopes(slopes_ptr, kv_head * GROUP + heads, heads < GROUP)
    table_ptr = tables_ptr + seq.to(tl.int64) * table_stride
    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    weight_sum = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    if prefix is not None:  # noqa: SIM102 - decided when the kernel is compiled, the inner one when it runs
        if (piece == 0) & (low > 0):
            top, weight_sum, acc = _start_from_prefix(prefix, seq, kv_head, KV_HEADS, GROUP, GROUP_PAD, DIM_PAD,
                                                      PREFIX_ROWS)  # fmt: skip
    if PAIRED:
        pairs_ptr = kv_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
        pair_dims = tl.arange(0, DIM_PAD // 2)
        q_low, q_high = _split_pairs(q, GROUP_PAD, DIM_PAD)
        acc_low, acc_high = _split_pairs(acc, GROUP_PAD, DIM_PAD)
    ids = tile_blocks(table_ptr, tile_begin * TILE_TOKENS, kv_len, TILE_TOKENS, BLOCK_SIZE)
    for tile in tl.range(tile_begin, tile_end, num_stages=STAGES):
        first = tile * TILE_TOKENS
        rows = tile_rows(ids, first, kv_head, KV_HEADS, HEAD_DIM, BLOCK_SIZE, TILE_TOKENS)
        ids = tile_blocks(table_ptr, first + TILE_TOKENS, kv_len, TILE_TOKENS, BLOCK_SIZE)
        # Rows past the end and before the window hold anything, NaN too: zeros instead, since 0 * NaN would reach the
        # sum.
        seen = first + steps < kv_len
        if WINDOW > 0:
            seen = seen & (first + steps >= low)
        if PAIRED:
            pair_ptrs = pairs_ptr + (rows // 2)[:, None] + pair_dims[None, :]
            pair_mask = seen[:, None] & (pair_dims < HEAD_DIM // 2)[None, :]
            k_low, k_high = widened_pairs(tl.load(pair_ptrs, mask=pair_mask, other=0))
            s = tl.dot(q_high, tl.trans(k_high), tl.dot(q_low, tl.trans(k_low)))
        else:
            offsets = rows[:, None] + dims[None, :]
            k = tl.load(kv_ptr + offsets, mask=seen[:, None] & in_head, other=0.0).to(COMPUTE)
            s = tl.dot(q, tl.trans(k), input_precision="ieee")
        s = scaled_scores(s, qk_scale, softcap, SOFTCAP)
        if slopes is not None:
            s += slopes[:, None] * (first + steps - kv_len + 1)[None, :]
        s = tl.where(seen[None, :], s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, axis=1))
        p = tl.exp2(s - new_top[:, None])
        rescale = tl.exp2(top - new_top)
        weight_sum = weight_sum * rescale + tl.sum(p, axis=1)
        V_OFFSET: tl.constexpr = KV_HEADS * BLOCK_SIZE * HEAD_DIM
        if PAIRED:
            v_low, v_high = widened_pairs(tl.load(pair_ptrs + V_OFFSET // 2, mask=pair_mask, other=0))
            p = p.to(COMPUTE)
            acc_low = tl.dot(p, v_low, acc_low * rescale[:, None])
            acc_high = tl.dot(p, v_high, acc_high * rescale[:, None])
        else:
            v = tl.load(kv_ptr + offsets + V_OFFSET, mask=seen[:, None] & in_head, other=0.0).to(COMPUTE)
            acc = tl.dot(p.to(COMPUTE), v, acc * rescale[:, None], input_precision="ieee")
        top = new_top
    if PAIRED:
        acc = tl.reshape(tl.join(acc_low, acc_high), [GROUP_PAD, DIM_PAD])
    if sinks_ptr is not None:  # noqa: SIM102 - decided when the kernel is compiled
        if piece == 0:  # once for all pieces
            acc, top, weight_sum = add_sink(acc, top, weight_sum, sinks_ptr, kv_head * GROUP + heads, heads < GROUP)
    # Each tile of a piece holds a visible token, so weight_sum is 0 only where there was no tile at all.
    acc = acc * (v_scale / tl.where(weight_sum > 0.0, weight_sum, 1.0))[:, None]

    if num_pieces == 1:
        store_narrowed(out_ptr + row[:, None] * HEAD_DIM + dims[None, :], acc, head_mask)
    else:
        entry = (item * KV_HEADS + kv_head) * GROUP_LOW + heads
        tl.store(partial_ptr + entry[:, None] * DIM_PAD + dims[None, :], acc, mask=head_mask)
        tl.store(lse_ptr + entry, tl.log2(weight_sum) + top, mask=heads < GROUP)
        tl.debug_barrier()  # every thread's part is stored before one thread announces it
        arrival_ptr = arrivals_ptr + seq * KV_HEADS + kv_head
        if tl.atomic_add(arrival_ptr, 1, sem="acq_rel") == num_pieces - 1:
            tl.store(arrival_ptr, 0)  # ready for the next launch
            _merge(partial_ptr, lse_ptr, out_ptr, first_item, num_pieces, kv_head, seq, KV_HEADS, GROUP, GROUP_LOW,
                   HEAD_DIM, DIM_PAD)  # fmt: skip


@dataclass(slots=True)
class AttentionScratch:
    """Counters that are zero between launches. Launches that share them must share a stream."""

    arrivals: Tensor  # [seqs * kv_heads] int32: parts of split sequences that are done
    next_item: Tensor  # [1] int32: how far a launch over prompts is

    @staticmethod
    def allocate(max_seqs: int, num_kv_heads: int, device: torch.device) -> AttentionScratch:
        return AttentionScratch(
            torch.zeros(max_seqs * num_kv_heads, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
        )


def decode_attention(
    q: Tensor,  # [seqs, heads * head_dim]: the first rows of a step
    kv: Tensor,  # [num_blocks, 2, kv_heads, block_size, head_dim]
    batch: AttentionBatch,
    out: Tensor,  # like q
    spec: AttentionSpec,
    config: DecodeConfig,
    scratch: AttentionScratch,
    *,
    prefix: PrefixResults | None = None,
) -> None:
    """Attention of row i of q over sequence i's blocks, for each decode; a prefix's blocks are those of `prefix`."""
    num_seqs, max_kv_len = batch.num_decodes, batch.max_kv_len
    group = spec.num_heads // spec.num_kv_heads
    group_low = next_power_of_2(group)
    group_pad = max(16, group_low)
    assert group_pad <= 128, f"{group} query heads share a KV head: a decode tile holds 128"
    assert prefix is None or can_share(spec)
    dim_pad = padded_head_dim(spec.head_dim)
    visible = max_kv_len if spec.window is None else min(max_kv_len, spec.window + config.tile_tokens)
    max_tiles = -(-visible // config.tile_tokens)
    busy = num_seqs * spec.num_kv_heads >= config.programs_per_sm * NUM_SMS
    few, many = (
        max(1, programs * NUM_SMS // spec.num_kv_heads)
        for programs in (config.programs_per_sm, config.long_programs_per_sm)
    )
    if busy:
        many = max(1, config.busy_programs_per_sm * NUM_SMS // spec.num_kv_heads)
        few = many = max(many, int(config.busy_pieces_per_seq * num_seqs))
    # Cutting at whole pieces leaves at most one short one for each sequence beside the wanted whole ones.
    max_items = min(num_seqs + max(few, many), num_seqs * max(1, -(-max_tiles // config.min_tiles_per_split)))
    pieces = _cut(batch, spec, config, few, many, max_items, prefix)
    entries = max_items * spec.num_kv_heads * group_low
    partial = torch.empty(entries * dim_pad, dtype=torch.float32, device=q.device)
    lse = torch.empty(entries, dtype=torch.float32, device=q.device)
    assert scratch.arrivals.numel() >= num_seqs * spec.num_kv_heads
    decode_kernel[(spec.num_kv_heads, max_items)](
        q, kv, out, partial, lse, scratch.arrivals, batch.block_tables, pieces, prefix, spec.slopes, spec.sinks,
        batch.block_tables.stride(0), qk_scale(spec), spec.softcap or 0.0, spec.v_scale,
        KV_HEADS=spec.num_kv_heads, GROUP=group, GROUP_LOW=group_low, GROUP_PAD=group_pad, HEAD_DIM=spec.head_dim,
        DIM_PAD=dim_pad, BLOCK_SIZE=kv.shape[3], TILE_TOKENS=config.tile_tokens, WINDOW=spec.window or 0,
        SOFTCAP=spec.softcap is not None, COMPUTE=compute_dtype(q.dtype, kv.dtype),
        PREFIX_ROWS=0 if prefix is None else prefix.lse.shape[2], STAGES=config.num_stages, num_warps=config.num_warps,
    )  # fmt: skip


def _cut(
    batch: AttentionBatch,
    spec: AttentionSpec,
    config: DecodeConfig,
    few: int,
    many: int,
    max_items: int,
    prefix: PrefixResults | None,
) -> Tensor:
    """[items, 8] int32. Layers that are alike share them: to cut sequences takes a program longer than to read
    what it is to do."""
    key = (config, spec.num_kv_heads, spec.window, prefix is not None, max_items)
    pieces = batch.decode_pieces.get(key)
    if pieces is None:
        pieces = torch.empty((max_items, _PIECE_INTS.value), dtype=torch.int32, device=batch.kv_lens.device)
        seqs_pad = padded_seqs(batch.num_decodes)
        each = max(1, min(_PIECES_EACH, _PIECES_EACH * 1024 // seqs_pad))  # within the registers
        pieces_kernel[(-(-max_items // each),)](
            pieces, batch.kv_lens, None if prefix is None else prefix.seq_lens, batch.num_decodes, few, many, max_items,
            MIN_TILES=config.min_tiles_per_split, LONG_TILES=config.long_tiles, WINDOW=spec.window or 0,
            TILE_TOKENS=config.tile_tokens, SEQS_PAD=seqs_pad, EACH=each, num_warps=4,
        )  # fmt: skip
        batch.decode_pieces[key] = pieces
    return pieces


def can_share(spec: AttentionSpec) -> bool:
    """Whether prefix.py takes what decodes share. A window moves away from a prefix, and slopes make a prefix's scores
    differ with the sequences' lengths."""
    return spec.window is None and spec.slopes is None


def qk_scale(spec: AttentionSpec) -> float:
    """What scores are multiplied by: in units of log 2, or of the cap where there is one."""
    scale = spec.scale * spec.k_scale
    return scale / spec.softcap if spec.softcap is not None else scale * LOG2E
