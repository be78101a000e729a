# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,assignment"
"""The product of invariant_product.py for many rows, written in Gluon for Hopper's own units: the same numbers, sooner.

One program runs on each multiprocessor and takes tiles of the result one after another. A single warp has the bulk copy
engine bring tiles of w and of x into a ring in shared memory, and runs ahead into the next tile. Two or three groups of
four warps multiply: each has 64 of a tile's 128 or 192 rows of x, or where there are only 64 rows, half of its rows of
w. 192 rows lie in three pieces, since a tensor's sizes are powers of two.

x is the left operand here and w the right one, so that results lie as they are stored. A tensor core adds the same
products in the same order either way.

With GATE the matrix is a gated MLP's first, gate above up, and only activation(gate) * up is written. Each group's
columns are then rows of gate and the same ones of up, so that a thread has both.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.triton.configs import NUM_SMS
from quire.kernels.triton.prefill_hopper import following, new_barriers, thread_barrier

TILE_K = 64  # 128 bytes: what a swizzled row in shared memory has
_GROUP = 8  # tiles of w that are taken with all rows of x before the next ones
_STRIP = 32  # rows of x that are copied at once where a tile has fewer than its own


@gluon.jit
def locate(item, num_rows, n, TILE_N: gl.constexpr, TILE_ROWS: gl.constexpr, PARTS: gl.constexpr,
           GROUP: gl.constexpr):  # fmt: skip
    """Which tile of w, which tile of x, and which part of k an item is. Neighbours share tiles, which then come out of
    the L2 cache."""
    tile = item // PARTS
    row_tiles = (num_rows + TILE_ROWS - 1) // TILE_ROWS
    n_tiles = (n + TILE_N - 1) // TILE_N
    group = tile // (GROUP * row_tiles)
    size = gl.minimum(n_tiles - group * GROUP, GROUP)
    within = tile % (GROUP * row_tiles)
    return tile, (group * GROUP + within % size) * TILE_N, within // size * TILE_ROWS, item % PARTS


@gluon.jit
def load_tiles(w_desc, x_desc, strip_desc, w_tiles, x_tiles, ready, free, num_items, num_rows, n, STEPS: gl.constexpr,
               APART: gl.constexpr, PART_STEPS: gl.constexpr, STRIP: gl.constexpr, GROUP: gl.constexpr,
               GATE: gl.constexpr, PIECES: gl.constexpr):  # fmt: skip
    """What the copying warp does. The copy engine takes its time over rows that do not exist: of the last tile they
    come in strips, and strips past the end are copies of the first one, whose results are not written."""
    STAGES: gl.constexpr = w_tiles.type.shape[0]
    TILE_N: gl.constexpr = w_tiles.type.shape[1]
    TILE_K: gl.constexpr = w_tiles.type.shape[2]
    PIECE: gl.constexpr = x_tiles.type.shape[1]
    TILE_ROWS: gl.constexpr = PIECES * PIECE
    BYTES: gl.constexpr = (TILE_N + TILE_ROWS) * TILE_K * 2
    stage, phase = 0, 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        _tile, first_n, first_row, part = locate(item, num_rows, n, TILE_N, TILE_ROWS, APART, GROUP)
        for step in range(part * PART_STEPS, gl.minimum((part + 1) * PART_STEPS, STEPS)):
            mbarrier.wait(free.index(stage), phase ^ 1)
            mbarrier.expect(ready.index(stage), BYTES)
            bar = ready.index(stage)
            # Rows of w past the last become zeros, or for a gate the first ones of up: their results are not written.
            if GATE == 0:
                tma.async_copy_global_to_shared(w_desc, [first_n, step * TILE_K], bar, w_tiles.index(stage))
            else:
                HALF: gl.constexpr = TILE_N // 2 if TILE_ROWS > 64 else TILE_N // 4
                for i in gl.static_range(TILE_N // HALF):
                    row = first_n // 2 + i // 2 * HALF + i % 2 * (n // 2)
                    tma.async_copy_global_to_shared(
                        w_desc, [row, step * TILE_K], bar, w_tiles.index(stage).slice(i * HALF, HALF)
                    )
            if first_row + TILE_ROWS <= num_rows:
                for i in gl.static_range(PIECES):
                    tma.async_copy_global_to_shared(
                        x_desc, [first_row + i * PIECE, step * TILE_K], bar, x_tiles.index(stage * PIECES + i)
                    )
            else:
                for i in gl.static_range(TILE_ROWS // STRIP):
                    row = first_row + i * STRIP
                    row = gl.where(row < num_rows, row, 0)
                    piece = x_tiles.index(stage * PIECES + i * STRIP // PIECE)
                    tma.async_copy_global_to_shared(
                        strip_desc, [row, step * TILE_K], bar, piece.slice(i * STRIP % PIECE, STRIP)
                    )
            stage, phase = following(stage, phase, STAGES)


@gluon.jit
def preceding(stage, STAGES: gl.constexpr):
    """The place before in a ring."""
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def sum_part(w_tiles, x_tiles, ready, free, stage, phase, num_steps, layout: gl.constexpr, COLUMNS: gl.constexpr,
             PIECES: gl.constexpr, WHICH: gl.constexpr):  # fmt: skip
    """[64, COLUMNS]: so many tiles of k, in order."""
    STAGES: gl.constexpr = w_tiles.type.shape[0]
    acc = gl.zeros([64, COLUMNS], gl.float32, layout)
    for step in range(num_steps):
        mbarrier.wait(ready.index(stage), phase)
        w = w_tiles.index(stage)
        if PIECES > 1:
            x = x_tiles.index(stage * PIECES + WHICH)
        elif x_tiles.type.shape[1] > 64:
            x = x_tiles.index(stage).slice(WHICH * 64, 64)
        else:
            x = x_tiles.index(stage)
            w = w.slice(WHICH * COLUMNS, COLUMNS)
        acc = warpgroup_mma(x, w.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(free.index(preceding(stage, STAGES)), pred=step > 0)
        stage, phase = following(stage, phase, STAGES)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(free.index(preceding(stage, STAGES)))
    return acc, stage, phase


@gluon.jit
def store(out_ptr, out_desc, bias_ptr, sums, staged, first_row, first_n, num_rows, n, GATE: gl.constexpr):
    """By the copy engine, out of shared memory, while the next tile is multiplied; without a descriptor by the threads
    themselves."""
    if GATE == 0:
        width = n
        cols = first_n + gl.arange(0, sums.shape[1], gl.SliceLayout(0, sums.type.layout))
        if bias_ptr is not None:
            sums += gl.load(bias_ptr + cols, mask=cols < n, other=0.0).to(gl.float32)[None, :]
        narrow = sums.to(out_ptr.dtype.element_ty)
    else:
        width = n // 2
        first_n = first_n // 2
        gate, up = sums.reshape([sums.shape[0], 2, sums.shape[1] // 2]).permute((0, 2, 1)).split()
        cols = first_n + gl.arange(0, gate.shape[1], gl.SliceLayout(0, gate.type.layout))
        if bias_ptr is not None:
            gate += gl.load(bias_ptr + cols, mask=cols < width, other=0.0).to(gl.float32)[None, :]
            up += gl.load(bias_ptr + width + cols, mask=cols < width, other=0.0).to(gl.float32)[None, :]
        # As act_mul would read them, and by its operations (`gated` in activation.py).
        gate = gate.to(out_ptr.dtype.element_ty).to(gl.float32)
        up = up.to(out_ptr.dtype.element_ty).to(gl.float32)
        inner = gate if GATE == 1 else 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        narrow = (gate / (1.0 + gl.exp2(inner * -1.4426950408889634)) * up).to(out_ptr.dtype.element_ty)
    if out_desc is not None:
        tma.store_wait(0)  # the tile before has left
        thread_barrier()  # only one thread knows that
        staged.store(narrow)
        fence_async_shared()
        thread_barrier()
        # Rows and columns past the last are not written.
        tma.async_copy_shared_to_global(out_desc, [first_row, first_n], staged)
    else:
        rows = first_row + gl.arange(0, narrow.shape[0], gl.SliceLayout(1, narrow.type.layout))
        pointers = out_ptr + (rows.to(gl.int64) * width)[:, None] + cols[None, :]
        gl.store(pointers, narrow, mask=(rows < num_rows)[:, None] & (cols < width)[None, :])


@gluon.jit
def multiply(out_ptr, out_desc, staged, bias_ptr, partial_ptr, arrivals_ptr, w_tiles, x_tiles, ready, free, num_items,
             num_rows, n, STEPS: gl.constexpr, PARTS: gl.constexpr, APART: gl.constexpr,
             PART_STEPS: gl.constexpr, GROUP: gl.constexpr, GATE: gl.constexpr, PIECES: gl.constexpr,
             WHICH: gl.constexpr):  # fmt: skip
    """What a group of four warps does: its share of every tile."""
    TILE_N: gl.constexpr = w_tiles.type.shape[1]
    TILE_ROWS: gl.constexpr = PIECES * x_tiles.type.shape[1]
    SHARES: gl.constexpr = 2 if PIECES == 1 else PIECES
    COLUMNS: gl.constexpr = TILE_N if TILE_ROWS > 64 else TILE_N // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    stage, phase = 0, 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        tile, first_n, first_row, part = locate(item, num_rows, n, TILE_N, TILE_ROWS, APART, GROUP)
        if TILE_ROWS > 64:
            first_row += WHICH * 64
        else:
            first_n += WHICH * COLUMNS
        if APART > 1:
            num_steps = gl.minimum((part + 1) * PART_STEPS, STEPS) - part * PART_STEPS
            acc, stage, phase = sum_part(w_tiles, x_tiles, ready, free, stage, phase, num_steps, layout, COLUMNS,
                                         PIECES, WHICH)  # fmt: skip
            # [PARTS, 64, COLUMNS] for each share of a tile, as the threads have it: each reads back what it wrote.
            SIZE: gl.constexpr = 64 * COLUMNS
            places = (gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None] * COLUMNS
                      + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :])  # fmt: skip
            share_ptr = partial_ptr + (SHARES * tile + WHICH).to(gl.int64) * (PARTS * SIZE)
            gl.store(share_ptr + part * SIZE + places, acc)
            thread_barrier()  # every thread's share is stored before one announces it
            if gl.atomic_add(arrivals_ptr + SHARES * tile + WHICH, 1, sem="acq_rel") == PARTS - 1:
                gl.store(arrivals_ptr + SHARES * tile + WHICH, 0)  # ready for the next launch
                total = gl.zeros([64, COLUMNS], gl.float32, layout)
                for other in range(PARTS):
                    # Bypasses L1: other multiprocessors wrote it in this launch.
                    total += gl.load(share_ptr + other * SIZE + places, cache_modifier=".cg")
                store(out_ptr, out_desc, bias_ptr, total, staged, first_row, first_n, num_rows, n, GATE)
        elif PARTS == 1:
            acc, stage, phase = sum_part(w_tiles, x_tiles, ready, free, stage, phase, STEPS, layout, COLUMNS, PIECES,
                                         WHICH)  # fmt: skip
            # As if added to zeros, which every other path does.
            store(out_ptr, out_desc, bias_ptr, acc + 0.0, staged, first_row, first_n, num_rows, n, GATE)
        else:
            total = gl.zeros([64, COLUMNS], gl.float32, layout)
            for here in range(PARTS):
                num_steps = gl.minimum((here + 1) * PART_STEPS, STEPS) - here * PART_STEPS
                acc, stage, phase = sum_part(w_tiles, x_tiles, ready, free, stage, phase, num_steps, layout, COLUMNS,
                                             PIECES, WHICH)  # fmt: skip
                total += acc
            store(out_ptr, out_desc, bias_ptr, total, staged, first_row, first_n, num_rows, n, GATE)
    if out_desc is not None:
        tma.store_wait(0)  # shared memory outlives the copies out of it


@gluon.jit(do_not_specialize=["num_items", "num_rows", "n"])
def product_hopper_kernel(w_desc, x_desc, strip_desc, out_desc, bias_ptr, out_ptr, partial_ptr, arrivals_ptr, num_items,
                          num_rows, n, STEPS: gl.constexpr, TILE_N: gl.constexpr, TILE_ROWS: gl.constexpr,
                          TILE_K: gl.constexpr, PARTS: gl.constexpr, APART: gl.constexpr, PART_STEPS: gl.constexpr,
                          STAGES: gl.constexpr, STRIP: gl.constexpr, GROUP: gl.constexpr,
                          GATE: gl.constexpr, PIECES: gl.constexpr):  # fmt: skip
    """APART: how many parts of k are items of their own, all of them or one. PART_STEPS: tiles of k in a part, or in
    all of k where parts are no items. GATE: 0 for none, 1 for silu, 2 for gelu. PIECES: of a tile's rows of x, one or
    three."""
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    w_tiles = gl.allocate_shared_memory(w_desc.dtype, [STAGES, TILE_N, TILE_K], tile_layout)
    x_tiles = gl.allocate_shared_memory(w_desc.dtype, [STAGES * PIECES, TILE_ROWS // PIECES, TILE_K], tile_layout)
    COLUMNS: gl.constexpr = (TILE_N if TILE_ROWS > 64 else TILE_N // 2) // (1 if GATE == 0 else 2)
    SHARES: gl.constexpr = 2 if PIECES == 1 else PIECES
    staged_layout: gl.constexpr = gl.NVMMASharedLayout(64 if COLUMNS < 64 else 128, 16, rank=2)
    staged = gl.allocate_shared_memory(w_desc.dtype, [SHARES, 64, COLUMNS], staged_layout)
    ready = new_barriers(STAGES, 1)
    free = new_barriers(STAGES, SHARES)
    fence_async_shared()
    LOAD_STEPS: gl.constexpr = PART_STEPS if APART > 1 else STEPS
    if PIECES == 1:
        gl.warp_specialize(
            [
                (multiply, (out_ptr, out_desc, staged.index(0), bias_ptr, partial_ptr, arrivals_ptr, w_tiles,
                            x_tiles, ready, free, num_items, num_rows, n, STEPS, PARTS, APART, PART_STEPS, GROUP,
                            GATE, PIECES, 0)),
                (multiply, (out_ptr, out_desc, staged.index(1), bias_ptr, partial_ptr, arrivals_ptr, w_tiles,
                            x_tiles, ready, free, num_items, num_rows, n, STEPS, PARTS, APART, PART_STEPS, GROUP,
                            GATE, PIECES, 1)),
                (load_tiles, (w_desc, x_desc, strip_desc, w_tiles, x_tiles, ready, free, num_items, num_rows, n, STEPS,
                              APART, LOAD_STEPS, STRIP, GROUP, GATE, PIECES)),
            ],
            worker_num_warps=[4, 1],
            worker_num_regs=[232, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (multiply, (out_ptr, out_desc, staged.index(0), bias_ptr, partial_ptr, arrivals_ptr, w_tiles,
                            x_tiles, ready, free, num_items, num_rows, n, STEPS, PARTS, APART, PART_STEPS, GROUP,
                            GATE, PIECES, 0)),
                (multiply, (out_ptr, out_desc, staged.index(1), bias_ptr, partial_ptr, arrivals_ptr, w_tiles,
                            x_tiles, ready, free, num_items, num_rows, n, STEPS, PARTS, APART, PART_STEPS, GROUP,
                            GATE, PIECES, 1)),
                (multiply, (out_ptr, out_desc, staged.index(2), bias_ptr, partial_ptr, arrivals_ptr, w_tiles,
                            x_tiles, ready, free, num_items, num_rows, n, STEPS, PARTS, APART, PART_STEPS, GROUP,
                            GATE, PIECES, 2)),
                (load_tiles, (w_desc, x_desc, strip_desc, w_tiles, x_tiles, ready, free, num_items, num_rows, n, STEPS,
                              APART, LOAD_STEPS, STRIP, GROUP, GATE, PIECES)),
            ],
            worker_num_warps=[4, 4, 1],
            worker_num_regs=[152, 152, 40],
        )  # fmt: skip


def product_hopper(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    arrivals: Tensor,
    *,
    parts: int,
    part_k: int,
    tile_n: int,
    tile_rows: int,
    num_stages: int,
    parts_apart: bool,
    gates: bool = False,
    silu: bool = False,
) -> None:
    """x: [rows, k] @ weight.T -> out: [rows, n], or gated [rows, n / 2]. See invariant_product for the others."""
    (rows, k), n = x.shape, weight.shape[0]
    layout = gl.NVMMASharedLayout(128, 16, rank=2)
    columns = tile_n if tile_rows > 64 else tile_n // 2  # of a group of warps
    w_desc = TensorDescriptor(weight, [n, k], [k, 1], [columns // 2 if gates else tile_n, TILE_K], layout)
    pieces = 3 if tile_rows == 192 else 1
    x_desc = TensorDescriptor(x, [rows, k], [k, 1], [tile_rows // pieces, TILE_K], layout)
    strip_desc = TensorDescriptor(x, [rows, k], [k, 1], [_STRIP, TILE_K], layout)
    out_desc, width = None, out.shape[1]
    if out.dtype == x.dtype and width % 8 == 0:
        out_columns = columns // 2 if gates else columns
        out_layout = gl.NVMMASharedLayout(64 if out_columns < 64 else 128, 16, rank=2)
        out_desc = TensorDescriptor(out, [rows, width], [width, 1], [64, out_columns], out_layout)
    tiles = -(-n // tile_n) * -(-rows // tile_rows)
    apart = parts if parts_apart else 1
    num_partial = tiles * parts * tile_n * tile_rows if apart > 1 else 0
    partial = torch.empty(num_partial, dtype=torch.float32, device=x.device)
    assert apart == 1 or 3 * tiles <= arrivals.numel()
    product_hopper_kernel[(min(NUM_SMS, tiles * apart),)](
        w_desc, x_desc, strip_desc, out_desc, bias, out, partial, arrivals, tiles * apart, rows, n,
        STEPS=-(-k // TILE_K), TILE_N=tile_n, TILE_ROWS=tile_rows, TILE_K=TILE_K, PARTS=parts, APART=apart,
        PART_STEPS=part_k // TILE_K, STAGES=num_stages, STRIP=_STRIP, GROUP=_GROUP,
        GATE=(1 if silu else 2) if gates else 0, PIECES=pieces, num_warps=4,
    )  # fmt: skip
