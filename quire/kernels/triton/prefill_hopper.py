# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,assignment"
"""Attention of prompts on a Hopper GPU: the same function as prefill.py, written in Gluon for the chip's own units.

One program runs on each multiprocessor and takes items one after another: one KV head and the query tokens that fill
two tiles of 64 rows (a row is a query token and one of the heads that share the KV head). Four groups of warps work
at the same time. Two single warps have the bulk copy engine bring tiles of keys and of values, block by block, into
rings in shared memory; they run ahead into the next item. Two groups of four warps have one tile of rows each: while
one of them does its softmax, the other one's products keep the tensor cores busy; and within a group the values of one
tile are multiplied while the next tile's scores become weights.

Keys are walked from the diagonal backwards, so that masked tiles come first and the long loop has no mask.
"""

from __future__ import annotations

import math

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.interface import AttentionSpec
from quire.kernels.triton.common import padded_seqs
from quire.kernels.triton.configs import NUM_SMS, HopperPrefillConfig
from quire.kernels.triton.decode import AttentionScratch, qk_scale

TILE_ROWS = 64  # of one group of warps: what one wgmma multiplies
SLOTS = gl.constexpr(2)  # items that are announced at a time
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # Triton 3.7 has another name for it
TURN = gl.constexpr(14)  # two of the chip's 16 named barriers, the last, since Triton counts from 0


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def locate(item, query_starts_ptr, kv_lens_ptr, num_seqs, KV_HEADS: gl.constexpr, HEADS_AT_ONCE: gl.constexpr,
           QUERIES: gl.constexpr, SEQS_PAD: gl.constexpr):  # fmt: skip
    """How many items there are; and of this one: sequence, KV head, row of the first query token, tokens from there
    on (none where there is no such item), that token's position, and the length of the sequence."""
    layout: gl.constexpr = gl.BlockedLayout([max(SEQS_PAD // 32, 1)], [32], [1], [0])
    index = gl.arange(0, SEQS_PAD, layout)
    exists = index < num_seqs
    begins = gl.load(query_starts_ptr + index, mask=exists, other=0)
    ends = gl.load(query_starts_ptr + index + 1, mask=exists, other=0)
    tile_ends = gl.associative_scan((ends - begins + QUERIES - 1) // QUERIES, 0, add)
    num_tiles = gl.max(tile_ends, axis=0)
    per_round = gl.maximum(num_tiles * HEADS_AT_ONCE, 1)
    within = item % per_round
    kv_head = item // per_round * HEADS_AT_ONCE + within % HEADS_AT_ONCE
    tile = gl.maximum(num_tiles - 1 - within // HEADS_AT_ONCE, 0)  # the last tiles have most keys: start them first
    before = tile_ends <= tile
    seq = gl.minimum(gl.sum(before.to(gl.int32), axis=0), num_seqs - 1)
    first_row = gl.load(query_starts_ptr + seq) + (tile - gl.max(gl.where(before, tile_ends, 0), axis=0)) * QUERIES
    kv_len = gl.load(kv_lens_ptr + seq)
    num_left = gl.load(query_starts_ptr + seq + 1) - first_row
    num_items = num_tiles * KV_HEADS
    return num_items, seq, kv_head, first_row, gl.where(item < num_items, num_left, 0), kv_len - num_left, kv_len


@gluon.jit
def announce(slot, seq, kv_head, first_row, num_left, first_position, kv_len):
    i = gl.arange(0, 8, gl.BlockedLayout([8], [32], [gl.num_warps()], [0]))
    fields = gl.where(i == 0, seq, gl.where(i == 1, kv_head, gl.where(i == 2, first_row, gl.where(i == 3, num_left,
                      gl.where(i == 4, first_position, kv_len)))))  # fmt: skip
    slot.store(fields)


@gluon.jit
def field(fields, which: gl.constexpr):
    i = gl.arange(0, 8, fields.type.layout)
    value = gl.sum(gl.where(i == which, fields, 0), axis=0)
    # Lane 0's for all: ptxas then knows that loops up to here are the same for all lanes, and keeps the addresses of
    # tiles in uniform registers, where wgmma wants them.
    return gl.inline_asm_elementwise("shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [value], gl.int32, is_pure=True,
                                     pack=1)  # fmt: skip


@gluon.jit
def read_item(count, items, item_ready, item_free):
    """What `announce` wrote, as soon as it is there."""
    slot = count & (SLOTS - 1)
    mbarrier.wait(item_ready.index(slot), (count >> 1) & 1)
    fields = items.index(slot).load(gl.BlockedLayout([8], [32], [gl.num_warps()], [0]))
    mbarrier.arrive(item_free.index(slot))
    return (field(fields, 0), field(fields, 1), field(fields, 2), field(fields, 3), field(fields, 4),
            field(fields, 5))  # fmt: skip


@gluon.jit
def following(stage, phase, STAGES: gl.constexpr):
    """The next place in a ring, and the phase of its barriers."""
    is_last = stage == STAGES - 1
    return gl.where(is_last, 0, stage + 1), phase ^ is_last.to(gl.int32)


@gluon.jit
def load_tiles(stage, phase, seq, kv_head, num_left, first_position, kv_len, kv_desc, tables_ptr, table_stride,
               tiles, ready, free, IS_V: gl.constexpr, KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
               QUERIES: gl.constexpr):  # fmt: skip
    """An item's keys, or values, as places in the ring become free."""
    STAGES: gl.constexpr = tiles.type.shape[0]
    TILE_TOKENS: gl.constexpr = tiles.type.shape[1]
    BLOCKS: gl.constexpr = TILE_TOKENS // BLOCK_SIZE
    TILE_BYTES: gl.constexpr = TILE_TOKENS * tiles.type.shape[2] * 2
    table_ptr = tables_ptr + seq.to(gl.int64) * table_stride
    last_block = (kv_len - 1) // BLOCK_SIZE
    first_kv_row = (kv_head + IS_V * KV_HEADS) * BLOCK_SIZE
    tile = (first_position + gl.minimum(num_left, QUERIES) - 1) // TILE_TOKENS
    while tile >= 0:
        # Entries of a table past a sequence's length are arbitrary and not followed: its last block is read again.
        ids = ()
        for i in gl.static_range(BLOCKS):
            ids += (gl.load(table_ptr + gl.minimum(tile * BLOCKS + i, last_block)),)
        mbarrier.wait(free.index(stage), phase ^ 1)
        mbarrier.expect(ready.index(stage), TILE_BYTES)
        for i in gl.static_range(BLOCKS):
            kv_row = ids[i] * (2 * KV_HEADS * BLOCK_SIZE) + first_kv_row
            rows = tiles.index(stage).slice(i * BLOCK_SIZE, BLOCK_SIZE)
            tma.async_copy_global_to_shared(kv_desc, [kv_row, 0], ready.index(stage), rows)
        stage, phase = following(stage, phase, STAGES)
        tile -= 1
    return stage, phase


@gluon.jit
def load_keys(kv_desc, tables_ptr, table_stride, query_starts_ptr, kv_lens_ptr, num_seqs, next_item_ptr, tiles, ready,
              free, items, item_ready, item_free, KV_HEADS: gl.constexpr, HEADS_AT_ONCE: gl.constexpr,
              BLOCK_SIZE: gl.constexpr, QUERIES: gl.constexpr, SEQS_PAD: gl.constexpr):  # fmt: skip
    """What the first copying warp does: it takes items, announces them to the others, and brings their keys."""
    item = gl.program_id(0)
    stage, phase = 0, 0
    item_count = 0
    goes_on = True
    while goes_on:
        num_items, seq, kv_head, first_row, num_left, first_position, kv_len = locate(
            item, query_starts_ptr, kv_lens_ptr, num_seqs, KV_HEADS, HEADS_AT_ONCE, QUERIES, SEQS_PAD)  # fmt: skip
        slot = item_count & (SLOTS - 1)
        mbarrier.wait(item_free.index(slot), ((item_count >> 1) & 1) ^ 1)
        announce(items.index(slot), seq, kv_head, first_row, num_left, first_position, kv_len)
        mbarrier.arrive(item_ready.index(slot))
        item_count += 1
        goes_on = num_left > 0
        if goes_on:
            # Every program's first item is its own; the others go to whoever is free. The last to ask puts the counter
            # back to where the next launch wants it.
            taken = gl.atomic_add(next_item_ptr, 1, sem="relaxed")
            if taken == num_items - 1:
                gl.store(next_item_ptr, 0)
            item = taken + gl.num_programs(0)
            stage, phase = load_tiles(stage, phase, seq, kv_head, num_left, first_position, kv_len, kv_desc,
                                      tables_ptr, table_stride, tiles, ready, free, 0, KV_HEADS, BLOCK_SIZE,
                                      QUERIES)  # fmt: skip


@gluon.jit
def load_values(kv_desc, tables_ptr, table_stride, tiles, ready, free, items, item_ready, item_free,
                KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, QUERIES: gl.constexpr):  # fmt: skip
    stage, phase = 0, 0
    item_count = 1
    seq, kv_head, _first_row, num_left, first_position, kv_len = read_item(0, items, item_ready, item_free)
    while num_left > 0:
        stage, phase = load_tiles(stage, phase, seq, kv_head, num_left, first_position, kv_len, kv_desc, tables_ptr,
                                  table_stride, tiles, ready, free, 1, KV_HEADS, BLOCK_SIZE, QUERIES)  # fmt: skip
        seq, kv_head, _first_row, num_left, first_position, kv_len = read_item(item_count, items, item_ready, item_free)
        item_count += 1


@gluon.jit
def barrier_sync(name):
    """Wait for both groups at a named barrier of the chip."""
    gl.inline_asm_elementwise("bar.sync $1, 256; mov.u32 $0, $1;", "=r,r", [name], gl.int32, is_pure=False, pack=1)


@gluon.jit
def barrier_arrive(name):
    gl.inline_asm_elementwise("bar.arrive $1, 256; mov.u32 $0, $1;", "=r,r", [name], gl.int32, is_pure=False, pack=1)


@gluon.jit
def copy_queries(q_ptr, q_tile, kv_head, first_row, num_left, KV_HEADS: gl.constexpr, GROUP: gl.constexpr):
    """Start the copy of a group's rows to shared memory; rows that do not exist become zeros."""
    TILE_ROWS: gl.constexpr = q_tile.type.shape[0]
    HEAD_DIM: gl.constexpr = q_tile.type.shape[1]
    VECTORS: gl.constexpr = HEAD_DIM // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // VECTORS, VECTORS], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, TILE_ROWS, gl.SliceLayout(1, layout))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    exists = (rows < TILE_ROWS // GROUP * GROUP) & (rows // GROUP < num_left)
    row = ((first_row + rows // GROUP) * KV_HEADS + kv_head) * GROUP + rows % GROUP
    pointers = q_ptr + (row.to(gl.int64) * HEAD_DIM)[:, None] + dims[None, :]
    async_copy.async_copy_global_to_shared(q_tile, pointers, mask=exists[:, None])
    async_copy.commit_group()


@gluon.jit
def clear_values(v_tile, num_valid):
    """Zeros for the values from num_valid on: whatever lies there, NaN too, has weight 0 and would still count."""
    VECTORS: gl.constexpr = v_tile.type.shape[1] // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // VECTORS, VECTORS], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, 16, gl.SliceLayout(1, layout))
    TILE_TOKENS: gl.constexpr = v_tile.type.shape[0]
    for first in gl.static_range(0, TILE_TOKENS, 16):
        if first + 16 > num_valid:
            part = v_tile.slice(first, 16)
            values = part.load(layout)
            part.store(gl.where((first + rows < num_valid)[:, None], values, 0.0))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def halves(x):
    return gl.split(x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute([0, 2, 1]))


@gluon.jit
def row_max(s):
    """As a tree: a thread's own scores in five rounds instead of one after another."""
    layout: gl.constexpr = s.type.layout
    for _ in gl.static_range(4):
        a, b = halves(s)
        s = gl.maximum(a, b)
    return gl.convert_layout(gl.max(s, axis=1), gl.SliceLayout(1, layout), assert_trivial=True)


@gluon.jit
def part_sums(p):
    """[rows, keys] -> [rows, 4]: what each of the four threads that share a row has. They are added at the end."""
    for _ in gl.static_range(4):
        a, b = halves(p)
        p = a + b
    a, b = gl.split(p.reshape([p.shape[0], 4, 2]))
    return a + b


@gluon.jit
def per_row(x, like):
    """A vector over rows, to be multiplied with a matrix."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout), assert_trivial=True)[:, None]


@gluon.jit
def pack(weights, dtype: gl.constexpr):
    """Two 16-bit numbers in each 32-bit register, which is how wgmma wants them: 16-bit ones would be carried through
    the loop in a register each."""
    low, high = gl.split(weights.reshape([weights.shape[0], weights.shape[1] // 2, 2]))
    CONVERT: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(CONVERT, "=r,r,r", [low, high], gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpack(packed, dtype: gl.constexpr, layout: gl.constexpr):
    low, high = gl.inline_asm_elementwise("mov.b32 {$0, $1}, $2;", "=h,=h,r", [packed], (gl.int16, gl.int16),
                                          is_pure=True, pack=1)  # fmt: skip
    joined = gl.join(low, high).reshape([packed.shape[0], packed.shape[1] * 2]).to(dtype, bitcast=True)
    return gl.convert_layout(joined, layout, assert_trivial=True)


@gluon.jit
def new_base(s, top, scale, MAY_BE_EMPTY: gl.constexpr):
    """The rows' new top scores; the same scaled; and what to multiply earlier sums by."""
    new_top = gl.maximum(top, row_max(s))
    base = new_top * scale
    if MAY_BE_EMPTY:  # a row that sees nothing yet: avoid inf - inf
        base = gl.where(new_top == float("-inf"), 0.0, base)
    return new_top, base, gl.exp2(top * scale - base)


@gluon.jit
def attend_tiles(acc, packed, top, sums, k_stage, k_phase, v_stage, v_phase, tile, tile_end, row_position, q_tile,
                 k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, scale, MASKED: gl.constexpr,
                 WHICH: gl.constexpr):  # fmt: skip
    """Tiles tile, tile - 1, ... tile_end: each one's scores, and the values of the tile before it in this order."""
    TILE_ROWS: gl.constexpr = q_tile.type.shape[0]
    TILE_TOKENS: gl.constexpr = k_tiles.type.shape[1]
    K_STAGES: gl.constexpr = k_tiles.type.shape[0]
    V_STAGES: gl.constexpr = v_tiles.type.shape[0]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_TOKENS, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    no_scores = gl.zeros([TILE_ROWS, TILE_TOKENS], gl.float32, s_layout)
    while tile >= tile_end:
        barrier_sync(TURN + WHICH)
        s = warpgroup_mma(q_tile, k_tiles.index(k_stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
        mbarrier.wait(v_ready.index(v_stage), v_phase)
        p = unpack(packed, q_tile.dtype, p_layout)
        acc = warpgroup_mma(p, v_tiles.index(v_stage), acc, is_async=True)
        barrier_arrive(TURN + 1 - WHICH)
        s = warpgroup_mma_wait(1, deps=[s])
        if MASKED:
            key = tile * TILE_TOKENS + gl.arange(0, TILE_TOKENS, gl.SliceLayout(0, s_layout))
            s = gl.where(key[None, :] <= row_position[:, None], s, float("-inf"))
        top, base, rescale = new_base(s, top, scale, MASKED)
        weights = gl.exp2(s * scale - base[:, None])
        # The next tile's keys are needed in the next round only. To wait for them here ends a basic block: ptxas would
        # otherwise do the softmax after the wait for the values' product, instead of meanwhile.
        next_stage, k_phase = following(k_stage, k_phase, K_STAGES)
        mbarrier.wait(k_ready.index(next_stage), k_phase, pred=tile > 0)
        acc, weights, sums = warpgroup_mma_wait(0, deps=[acc, weights, sums])
        mbarrier.arrive(k_free.index(k_stage))
        mbarrier.arrive(v_free.index(v_stage))
        k_stage = next_stage
        v_stage, v_phase = following(v_stage, v_phase, V_STAGES)
        acc = acc * per_row(rescale, acc)
        sums = sums * per_row(rescale, sums) + part_sums(weights)
        packed = pack(weights, q_tile.dtype)
        tile -= 1
    return acc, packed, top, sums, k_stage, k_phase, v_stage, v_phase, tile


@gluon.jit
def attend_rows(q_ptr, out_ptr, scale, q_tile, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, items, item_ready,
                item_free, WHICH: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    """What a group of four warps does: tile WHICH of every item's rows."""
    TILE_ROWS: gl.constexpr = q_tile.type.shape[0]
    HEAD_DIM: gl.constexpr = q_tile.type.shape[1]
    TILE_TOKENS: gl.constexpr = k_tiles.type.shape[1]
    K_STAGES: gl.constexpr = k_tiles.type.shape[0]
    V_STAGES: gl.constexpr = v_tiles.type.shape[0]
    OWN: gl.constexpr = TILE_ROWS // GROUP  # query tokens
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_TOKENS, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    VECTORS: gl.constexpr = HEAD_DIM // 8
    out_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // VECTORS, VECTORS], [4, 1], [1, 0])
    no_scores = gl.zeros([TILE_ROWS, TILE_TOKENS], gl.float32, s_layout)
    s_rows = gl.arange(0, TILE_ROWS, gl.SliceLayout(1, s_layout))
    keys = gl.arange(0, TILE_TOKENS, gl.SliceLayout(0, s_layout))
    if WHICH == 1:
        barrier_arrive(TURN)
    k_stage, k_phase, v_stage, v_phase = 0, 0, 0, 0
    item_count = 1
    _seq, kv_head, first_row, num_left, first_position, kv_len = read_item(0, items, item_ready, item_free)
    copy_queries(q_ptr, q_tile, kv_head, first_row + WHICH * OWN, num_left - WHICH * OWN, KV_HEADS, GROUP)
    while num_left > 0:
        own_position = first_position + WHICH * OWN
        row_position = own_position + s_rows // GROUP
        tile = (first_position + gl.minimum(num_left, 2 * OWN) - 1) // TILE_TOKENS
        async_copy.wait_group(0)
        fence_async_shared()
        mbarrier.wait(k_ready.index(k_stage), k_phase)
        thread_barrier()
        s = warpgroup_mma(q_tile, k_tiles.index(k_stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_free.index(k_stage))
        s = gl.where((tile * TILE_TOKENS + keys)[None, :] <= row_position[:, None], s, float("-inf"))
        top = gl.full([TILE_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
        top, base, _rescale = new_base(s, top, scale, True)
        weights = gl.exp2(s * scale - base[:, None])
        sums = part_sums(weights)
        packed = pack(weights, q_tile.dtype)
        acc = gl.zeros([TILE_ROWS, HEAD_DIM], gl.float32, acc_layout)
        if (tile + 1) * TILE_TOKENS > kv_len:
            mbarrier.wait(v_ready.index(v_stage), v_phase)
            clear_values(v_tiles.index(v_stage), kv_len - tile * TILE_TOKENS)
        k_stage, k_phase = following(k_stage, k_phase, K_STAGES)
        mbarrier.wait(k_ready.index(k_stage), k_phase, pred=tile > 0)
        full_end = (own_position + 1) // TILE_TOKENS  # tiles below end at or before the first row's own token
        acc, packed, top, sums, k_stage, k_phase, v_stage, v_phase, tile = attend_tiles(
            acc, packed, top, sums, k_stage, k_phase, v_stage, v_phase, tile - 1, full_end, row_position, q_tile,
            k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, scale, True, WHICH)  # fmt: skip
        acc, packed, top, sums, k_stage, k_phase, v_stage, v_phase, tile = attend_tiles(
            acc, packed, top, sums, k_stage, k_phase, v_stage, v_phase, tile, 0, row_position, q_tile, k_tiles,
            v_tiles, k_ready, k_free, v_ready, v_free, scale, False, WHICH)  # fmt: skip
        # The last tile's values; meanwhile the next item's queries come.
        mbarrier.wait(v_ready.index(v_stage), v_phase)
        acc = warpgroup_mma(unpack(packed, q_tile.dtype, p_layout), v_tiles.index(v_stage), acc, is_async=True)
        out_row, out_left, out_head = first_row + WHICH * OWN, num_left - WHICH * OWN, kv_head
        _seq, kv_head, first_row, num_left, first_position, kv_len = read_item(
            item_count, items, item_ready, item_free)  # fmt: skip
        item_count += 1
        thread_barrier()
        copy_queries(q_ptr, q_tile, kv_head, first_row + WHICH * OWN, num_left - WHICH * OWN, KV_HEADS, GROUP)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_free.index(v_stage))
        v_stage, v_phase = following(v_stage, v_phase, V_STAGES)
        total = gl.convert_layout(gl.sum(sums, axis=1), gl.SliceLayout(1, acc_layout))
        out = gl.convert_layout((acc * (1.0 / total)[:, None]).to(q_tile.dtype), out_layout)
        rows = gl.arange(0, TILE_ROWS, gl.SliceLayout(1, out_layout))
        dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, out_layout))
        exists = (rows < OWN * GROUP) & (rows // GROUP < out_left)
        row = ((out_row + rows // GROUP) * KV_HEADS + out_head) * GROUP + rows % GROUP
        gl.store(out_ptr + (row.to(gl.int64) * HEAD_DIM)[:, None] + dims[None, :], out, mask=exists[:, None])
    async_copy.wait_group(0)
    if WHICH == 0:
        barrier_sync(TURN)  # the other group's last turn was for nobody: leave no arrival behind


@gluon.jit
def new_barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit(do_not_specialize=["first_seq", "num_seqs", "table_stride"])
def prefill_hopper_kernel(q_ptr, kv_desc, out_ptr, query_starts_ptr, kv_lens_ptr, tables_ptr, next_item_ptr, first_seq,
                          num_seqs, table_stride, scale, KV_HEADS: gl.constexpr, HEADS_AT_ONCE: gl.constexpr,
                          GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
                          TILE_ROWS: gl.constexpr, TILE_TOKENS: gl.constexpr, K_STAGES: gl.constexpr,
                          V_STAGES: gl.constexpr, SEQS_PAD: gl.constexpr):  # fmt: skip
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    dtype: gl.constexpr = kv_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [2, TILE_ROWS, HEAD_DIM], tile_layout)
    k_tiles = gl.allocate_shared_memory(dtype, [K_STAGES, TILE_TOKENS, HEAD_DIM], tile_layout)
    v_tiles = gl.allocate_shared_memory(dtype, [V_STAGES, TILE_TOKENS, HEAD_DIM], tile_layout)
    items = gl.allocate_shared_memory(gl.int32, [SLOTS, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_ready = new_barriers(K_STAGES, 1)
    v_ready = new_barriers(V_STAGES, 1)
    item_ready = new_barriers(SLOTS, 1)
    k_free = new_barriers(K_STAGES, 2)
    v_free = new_barriers(V_STAGES, 2)
    item_free = new_barriers(SLOTS, 3)
    fence_async_shared()
    query_starts_ptr += first_seq
    kv_lens_ptr += first_seq
    tables_ptr += first_seq.to(gl.int64) * table_stride
    QUERIES: gl.constexpr = 2 * (TILE_ROWS // GROUP)
    gl.warp_specialize(
        [
            (attend_rows, (q_ptr, out_ptr, scale, q_tiles.index(0), k_tiles, v_tiles, k_ready, k_free, v_ready, v_free,
                           items, item_ready, item_free, 0, KV_HEADS, GROUP)),
            (attend_rows, (q_ptr, out_ptr, scale, q_tiles.index(1), k_tiles, v_tiles, k_ready, k_free, v_ready, v_free,
                           items, item_ready, item_free, 1, KV_HEADS, GROUP)),
            (load_keys, (kv_desc, tables_ptr, table_stride, query_starts_ptr, kv_lens_ptr, num_seqs, next_item_ptr,
                         k_tiles, k_ready, k_free, items, item_ready, item_free, KV_HEADS, HEADS_AT_ONCE, BLOCK_SIZE,
                         QUERIES, SEQS_PAD)),
            (load_values, (kv_desc, tables_ptr, table_stride, v_tiles, v_ready, v_free, items, item_ready, item_free,
                           KV_HEADS, BLOCK_SIZE, QUERIES)),
        ],
        worker_num_warps=[4, 1, 1],
        worker_num_regs=[232, 40, 40],
    )  # fmt: skip


def prefill_attention_hopper(
    q: Tensor,  # [tokens, heads * head_dim]
    kv: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    kv_lens: Tensor,
    out: Tensor,  # like q
    spec: AttentionSpec,
    config: HopperPrefillConfig,
    scratch: AttentionScratch,
    *,
    first_seq: int,
    num_seqs: int,
    num_tokens: int,
) -> None:
    """Causal attention of the num_tokens rows of sequences first_seq .. first_seq + num_seqs - 1."""
    group = spec.num_heads // spec.num_kv_heads
    block_size, head_dim = kv.shape[3], kv.shape[4]
    kv_rows = kv.view(-1, head_dim)
    kv_desc = TensorDescriptor(
        kv_rows, list(kv_rows.shape), [head_dim, 1], [block_size, head_dim], gl.NVMMASharedLayout(128, 16, rank=2)
    )
    heads_at_once = math.gcd(config.heads_at_once, spec.num_kv_heads)
    max_items = (num_tokens // (2 * (TILE_ROWS // group)) + num_seqs) * spec.num_kv_heads
    prefill_hopper_kernel[(min(NUM_SMS, max_items),)](
        q, kv_desc, out, query_starts, kv_lens, block_tables, scratch.next_item, first_seq, num_seqs,
        block_tables.stride(0), qk_scale(spec), KV_HEADS=spec.num_kv_heads, HEADS_AT_ONCE=heads_at_once, GROUP=group,
        HEAD_DIM=head_dim, BLOCK_SIZE=block_size, TILE_ROWS=TILE_ROWS, TILE_TOKENS=config.tile_tokens,
        K_STAGES=config.k_stages, V_STAGES=config.v_stages, SEQS_PAD=padded_seqs(num_seqs), num_warps=4,
    )  # fmt: skip
