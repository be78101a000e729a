# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,assignment"
"""A gated MLP's first product with its activation in the same launch, for many rows on Hopper: activation(gate) * up,
of which only the result is written. cuBLAS and a launch for the activation move five times as many bytes.

As in invariant_hopper.py, one program runs on each multiprocessor; a single warp has the bulk copy engine bring tiles,
two groups of four warps multiply 64 rows of x each. A tile of w is 128 rows of gate above the same 128 of up, so that
one instruction multiplies both and each thread has a gate and its up. Results leave by the copy engine while the next
tile is multiplied.
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

from quire.kernels.interface import Unscaled
from quire.kernels.triton.configs import NUM_SMS
from quire.kernels.triton.invariant_hopper import TILE_K, locate, preceding
from quire.kernels.triton.norm import row_factors
from quire.kernels.triton.prefill_hopper import following, new_barriers, thread_barrier

_TILE_N = 128  # of gate, and of up
_TILE_ROWS = 128
_GROUP = 8
_STAGES = 4


@gluon.jit
def load_tiles(w_desc, x_desc, w_tiles, x_tiles, ready, free, num_items, num_rows, n, STEPS: gl.constexpr,
               GROUP: gl.constexpr):  # fmt: skip
    """What the copying warp does. w_tiles: [2 * stages, TILE_N, TILE_K], gate and up in turn."""
    STAGES: gl.constexpr = x_tiles.type.shape[0]
    TILE_N: gl.constexpr = w_tiles.type.shape[1]
    TILE_K: gl.constexpr = w_tiles.type.shape[2]
    TILE_ROWS: gl.constexpr = x_tiles.type.shape[1]
    BYTES: gl.constexpr = (2 * TILE_N + TILE_ROWS) * TILE_K * 2
    stage, phase = 0, 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        _tile, first_n, first_row, _part = locate(item, num_rows, n, TILE_N, TILE_ROWS, 1, GROUP)
        for step in range(STEPS):
            mbarrier.wait(free.index(stage), phase ^ 1)
            bar = ready.index(stage)
            mbarrier.expect(bar, BYTES)
            # Rows past the last become zeros, or for a gate the first ones of up, whose results are not written.
            tma.async_copy_global_to_shared(w_desc, [first_n, step * TILE_K], bar, w_tiles.index(2 * stage))
            tma.async_copy_global_to_shared(w_desc, [n + first_n, step * TILE_K], bar, w_tiles.index(2 * stage + 1))
            tma.async_copy_global_to_shared(x_desc, [first_row, step * TILE_K], bar, x_tiles.index(stage))
            stage, phase = following(stage, phase, STAGES)


@gluon.jit
def multiply(out_desc, staged, factors_ptr, bias_ptr, w_tiles, x_tiles, ready, free, num_items, num_rows, n,
             STEPS: gl.constexpr, SILU: gl.constexpr, GROUP: gl.constexpr, WHICH: gl.constexpr):  # fmt: skip
    """What a group of four warps does: 64 rows of every tile. w_tiles: [stages, 2 * TILE_N, TILE_K]."""
    STAGES: gl.constexpr = w_tiles.type.shape[0]
    TILE_N: gl.constexpr = w_tiles.type.shape[1] // 2
    TILE_ROWS: gl.constexpr = x_tiles.type.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * TILE_N, 16])
    stage, phase = 0, 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        _tile, first_n, first_row, _part = locate(item, num_rows, n, TILE_N, TILE_ROWS, 1, GROUP)
        first_row += WHICH * 64
        acc = gl.zeros([64, 2 * TILE_N], gl.float32, layout)
        for step in range(STEPS):
            mbarrier.wait(ready.index(stage), phase)
            x = x_tiles.index(stage).slice(WHICH * 64, 64)
            acc = warpgroup_mma(x, w_tiles.index(stage).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(free.index(preceding(stage, STAGES)), pred=step > 0)
            stage, phase = following(stage, phase, STAGES)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(free.index(preceding(stage, STAGES)))
        gate, up = acc.reshape([64, 2, TILE_N]).permute((0, 2, 1)).split()
        half: gl.constexpr = gate.type.layout
        if factors_ptr is not None:
            rows = first_row + gl.arange(0, 64, gl.SliceLayout(1, half))
            factors = gl.load(factors_ptr + rows, mask=rows < num_rows, other=0.0)[:, None]
            gate *= factors
            up *= factors
        if bias_ptr is not None:
            cols = first_n + gl.arange(0, TILE_N, gl.SliceLayout(0, half))
            gate += gl.load(bias_ptr + cols, mask=cols < n, other=0.0).to(gl.float32)[None, :]
            up += gl.load(bias_ptr + n + cols, mask=cols < n, other=0.0).to(gl.float32)[None, :]
        # See act_mul_kernel.
        inner = gate if SILU else 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        result = gate / (1.0 + gl.exp2(inner * -1.4426950408889634)) * up
        tma.store_wait(0)  # the tile before has left
        thread_barrier()  # only one thread knows that
        staged.store(result.to(staged.dtype))
        fence_async_shared()
        thread_barrier()
        tma.async_copy_shared_to_global(out_desc, [first_row, first_n], staged)
    tma.store_wait(0)  # shared memory outlives the copies out of it


@gluon.jit(do_not_specialize=["num_items", "num_rows", "n"])
def gated_hopper_kernel(w_desc, x_desc, out_desc, factors_ptr, bias_ptr, num_items, num_rows, n, STEPS: gl.constexpr,
                        TILE_N: gl.constexpr, TILE_ROWS: gl.constexpr, TILE_K: gl.constexpr, STAGES: gl.constexpr,
                        SILU: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    w_tiles = gl.allocate_shared_memory(w_desc.dtype, [STAGES, 2 * TILE_N, TILE_K], tile_layout)
    halves = w_tiles._reinterpret(w_desc.dtype, [2 * STAGES, TILE_N, TILE_K], tile_layout)
    x_tiles = gl.allocate_shared_memory(w_desc.dtype, [STAGES, TILE_ROWS, TILE_K], tile_layout)
    staged = gl.allocate_shared_memory(w_desc.dtype, [2, 64, TILE_N], tile_layout)
    ready = new_barriers(STAGES, 1)
    free = new_barriers(STAGES, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply, (out_desc, staged.index(0), factors_ptr, bias_ptr, w_tiles, x_tiles, ready, free, num_items,
                        num_rows, n, STEPS, SILU, GROUP, 0)),
            (multiply, (out_desc, staged.index(1), factors_ptr, bias_ptr, w_tiles, x_tiles, ready, free, num_items,
                        num_rows, n, STEPS, SILU, GROUP, 1)),
            (load_tiles, (w_desc, x_desc, halves, x_tiles, ready, free, num_items, num_rows, n, STEPS, GROUP)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[232, 40],
    )  # fmt: skip


def gated_hopper(x: Tensor | Unscaled, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """weight: [2 * n, k], gate above up. -> activation(x @ gate.T) * (x @ up.T): [rows, n]"""
    rows_of_x = x.x if isinstance(x, Unscaled) else x
    (rows, k), n = rows_of_x.shape, weight.shape[0] // 2
    assert rows_of_x.is_contiguous() and weight.is_contiguous() and k % 8 == 0 and n % 8 == 0
    factors = row_factors(x) if isinstance(x, Unscaled) else None
    out = torch.empty((rows, n), dtype=weight.dtype, device=weight.device)
    layout = gl.NVMMASharedLayout(128, 16, rank=2)
    w_desc = TensorDescriptor(weight, [2 * n, k], [k, 1], [_TILE_N, TILE_K], layout)
    x_desc = TensorDescriptor(rows_of_x, [rows, k], [k, 1], [_TILE_ROWS, TILE_K], layout)
    out_desc = TensorDescriptor(out, [rows, n], [n, 1], [64, _TILE_N], layout)
    tiles = -(-n // _TILE_N) * -(-rows // _TILE_ROWS)
    gated_hopper_kernel[(min(NUM_SMS, tiles),)](
        w_desc, x_desc, out_desc, factors, bias, tiles, rows, n, STEPS=-(-k // TILE_K), TILE_N=_TILE_N,
        TILE_ROWS=_TILE_ROWS, TILE_K=TILE_K, STAGES=_STAGES, SILU=activation == "silu", GROUP=_GROUP, num_warps=4,
    )  # fmt: skip
    return out
