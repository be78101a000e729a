# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,operator"
"""x @ w.T where w is whole numbers of 4 or 8 bits, and each group of a row's columns has a scale and perhaps an offset:
w = number * scale + offset.

Few rows of x are multiplied by the numbers themselves, which 16-bit floats hold exactly, and each group's sum by its
scale in float32: no weight is ever rounded. That reads a quarter or half of what 16-bit weights take. For many rows the
matrix is written out in 16 bits, once for the product, and a library multiplies it.

Numbers are in two's complement, row after row. Of 4 bits, a byte has two columns: in each piece of 2 * RUN of them,
byte j holds column j in its low half and column RUN + j in its high one. RUN columns have one scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.interface import AttentionSpec, Unscaled
from quire.kernels.stored_rows import PackedLayout
from quire.kernels.triton import epilogue
from quire.kernels.triton.common import IS_INTERPRETED, next_power_of_2
from quire.kernels.triton.configs import PackedConfig
from quire.kernels.triton.epilogue import GATE, ROPE, Add, Rope, Scale
from quire.kernels.triton.skinny import SkinnyScratch, _finish

# A number t of 4 bits in two's complement is (t ^ 8) - 8. In bfloat16 128 + (t ^ 8) is t ^ 8 in the last bits, so that
# 136 less is the number; 4 bytes give 4 numbers at a time.
_HALF = "prmt.b32 t, $2, 0, SELECTED; SHIFT lop3.b32 t, t, 0x000f000f, 0x43084308, 0x6a; fma.rn.bf16x2 OUT, t, o, m; "
_HALVES = (
    "{ .reg .b32 t, o, m; mov.b32 o, 0x3f803f80; mov.b32 m, 0xc308c308; "
    + _HALF.replace("SELECTED", "0x4140").replace("OUT", "$0")
    + _HALF.replace("SELECTED", "0x4342").replace("OUT", "$1")
    + "}"
)
LOW_HALVES = tl.constexpr(_HALVES.replace("SHIFT", ""))
HIGH_HALVES = tl.constexpr(_HALVES.replace("SHIFT", "shr.b32 t, t, 4;"))


@dataclass(slots=True)
class PackedMatrix:
    """[n, k] as the kernels read it."""

    numbers: Tensor  # [n, k * bits / 8] int8
    scales: Tensor  # [k / group, n] float32
    offsets: Tensor | None  # likewise
    order: Tensor | None  # [k] int32: which column of x each of the matrix's columns is multiplied with
    bits: int
    group: int
    run: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.numbers.shape[0], self.numbers.shape[1] * 8 // self.bits

    @property
    def layout(self) -> PackedLayout:
        return PackedLayout(self.bits, self.group, self.offsets is not None, self.order is not None)

    @property
    def nbytes(self) -> int:
        held = (self.numbers, self.scales, self.offsets, self.order)
        return sum(tensor.nbytes for tensor in held if tensor is not None)


def fitting_run(columns: int, group: int, bits: int) -> int | None:
    """The longest run that pieces of a matrix can be made of; None where there is none."""
    planes = 8 // bits
    return next((run for run in (64, 32, 16) if group % run == 0 and columns % (planes * run) == 0), None)


@triton.jit
def _halves(w, TYPE: tl.constexpr):
    """Bytes -> the numbers in their low halves, and those in their high ones."""
    if tl.bfloat16 == TYPE and not IS_INTERPRETED:
        low = tl.inline_asm_elementwise(LOW_HALVES, "=r,=r,r", [w], tl.bfloat16, is_pure=True, pack=4)
        high = tl.inline_asm_elementwise(HIGH_HALVES, "=r,=r,r", [w], tl.bfloat16, is_pure=True, pack=4)
    else:
        low = ((w << 4) >> 4).to(TYPE)
        high = (w >> 4).to(TYPE)
    return low, high


@triton.jit
def _load_rows(x_ptr, order_ptr, k, m, num_rows, K: tl.constexpr):
    """[rows of x, some columns]"""
    if order_ptr is not None:
        k = tl.load(order_ptr + k)
    return tl.load(x_ptr + m[:, None] * K + k[None, :], mask=(m < num_rows)[:, None], other=0.0)


@triton.jit
def _add_scaled(acc, sums, x_sums, scales_ptr, offsets_ptr, group, rows, exists, n):
    scales = tl.load(scales_ptr + group * n + rows, mask=exists, other=0.0)
    acc += sums * scales[None, :]
    if offsets_ptr is not None:
        offsets = tl.load(offsets_ptr + group * n + rows, mask=exists, other=0.0)
        acc += x_sums[:, None] * offsets[None, :]
    return acc


@triton.jit(do_not_specialize=["n", "num_rows"])
def packed_kernel(x_ptr, w_ptr, scales_ptr, offsets_ptr, order_ptr, out_ptr, bias_ptr, scale, to, partial_ptr,
                  arrivals_ptr, n, num_rows, K: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
                  RUN: tl.constexpr, ROWS_PAD: tl.constexpr, TILE_N: tl.constexpr, SPLIT_K: tl.constexpr,
                  STAGES: tl.constexpr, PARTS: tl.constexpr, PARTS_PAD: tl.constexpr, MODE: tl.constexpr,
                  SILU: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF_DIM: tl.constexpr,
                  BLOCK_SIZE: tl.constexpr):  # fmt: skip
    """Few rows of x. See skinny.tile_kernel, whose epilogues these are."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    rows, exists = epilogue.tile_rows_of(tile, n, MODE, TILE_N, HALF_DIM)
    m = tl.arange(0, ROWS_PAD)
    cols = tl.arange(0, RUN)
    PIECE: tl.constexpr = RUN * 8 // BITS
    first = part * (K // PIECE) // SPLIT_K
    last = (part + 1) * (K // PIECE) // SPLIT_K
    squares = None
    if scale is not None:
        squares = epilogue.load_square_sums(scale, m, num_rows, PARTS, PARTS_PAD)
    acc = tl.zeros([ROWS_PAD, TILE_N], tl.float32)
    w_ptrs = w_ptr + rows[:, None].to(tl.int64) * (K * BITS // 8) + cols[None, :]
    for piece in tl.range(first, last, num_stages=STAGES):
        w = tl.load(w_ptrs + piece * RUN, mask=exists[:, None], other=0, eviction_policy="evict_first")
        k = piece * PIECE + cols
        x = _load_rows(x_ptr, order_ptr, k, m, num_rows, K)
        x_sums = None
        if offsets_ptr is not None:
            x_sums = tl.sum(x.to(tl.float32), axis=1)
        if BITS == 8:
            sums = tl.dot(x, tl.trans(w.to(x.dtype)), input_precision="ieee")
            acc = _add_scaled(acc, sums, x_sums, scales_ptr, offsets_ptr, piece * PIECE // GROUP, rows, exists, n)
        else:
            low, high = _halves(w, x.dtype)
            sums = tl.dot(x, tl.trans(low), input_precision="ieee")
            x_high = _load_rows(x_ptr, order_ptr, k + RUN, m, num_rows, K)
            high_sums = None
            if offsets_ptr is not None:
                high_sums = tl.sum(x_high.to(tl.float32), axis=1)
            if GROUP % PIECE == 0:
                sums = tl.dot(x_high, tl.trans(high), sums, input_precision="ieee")
                if offsets_ptr is not None:
                    x_sums = x_sums + high_sums
                acc = _add_scaled(acc, sums, x_sums, scales_ptr, offsets_ptr, piece * PIECE // GROUP, rows, exists, n)
            else:
                acc = _add_scaled(acc, sums, x_sums, scales_ptr, offsets_ptr, piece * PIECE // GROUP, rows, exists, n)
                sums = tl.dot(x_high, tl.trans(high), input_precision="ieee")
                acc = _add_scaled(acc, sums, high_sums, scales_ptr, offsets_ptr, (piece * PIECE + RUN) // GROUP, rows,
                                  exists, n)  # fmt: skip
    total = tl.trans(acc)
    if SPLIT_K == 1:
        _finish(total, rows, exists, out_ptr, None, bias_ptr, scale, to, tile, m, n, num_rows, squares, K, MODE,
                ROWS_PAD, TILE_N, SILU, HEADS, KV_HEADS, HALF_DIM, BLOCK_SIZE)  # fmt: skip
    else:
        offsets = m[None, :] * n + rows[:, None]
        mask = (m < num_rows)[None, :] & exists[:, None]
        tl.store(partial_ptr + part * num_rows * n + offsets, total, mask=mask)
        tl.debug_barrier()  # every thread's part is stored before one thread announces it
        if tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") == SPLIT_K - 1:
            tl.store(arrivals_ptr + tile, 0)  # ready for the next launch
            total = tl.zeros([TILE_N, ROWS_PAD], tl.float32)
            for other_part in range(SPLIT_K):  # not unrolled: registers would run out
                # Bypasses L1: other multiprocessors wrote it in this launch.
                other = partial_ptr + other_part * num_rows * n + offsets
                total += tl.load(other, mask=mask, other=0.0, cache_modifier=".cg")
            _finish(total, rows, exists, out_ptr, None, bias_ptr, scale, to, tile, m, n, num_rows, squares, K, MODE,
                    ROWS_PAD, TILE_N, SILU, HEADS, KV_HEADS, HALF_DIM, BLOCK_SIZE)  # fmt: skip


@triton.jit
def _store_widened(out_ptr, numbers, scales_ptr, offsets_ptr, order_ptr, group, rows, k, mask, n, K: tl.constexpr):
    values = numbers.to(tl.float32) * tl.load(scales_ptr + group * n + rows, mask=rows < n, other=0.0)[:, None]
    if offsets_ptr is not None:
        values += tl.load(offsets_ptr + group * n + rows, mask=rows < n, other=0.0)[:, None]
    if order_ptr is not None:
        k = tl.load(order_ptr + k)
    out = out_ptr + rows[:, None].to(tl.int64) * K + k[None, :]
    tl.store(out, values.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n"])
def widen_matrix_kernel(w_ptr, scales_ptr, offsets_ptr, order_ptr, out_ptr, n, K: tl.constexpr, BITS: tl.constexpr,
                        GROUP: tl.constexpr, RUN: tl.constexpr, TILE_N: tl.constexpr,
                        PIECES: tl.constexpr):  # fmt: skip
    """The matrix in 16 bits: TILE_N rows of so many pieces a program."""
    rows = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    cols = tl.arange(0, RUN)
    PIECE: tl.constexpr = RUN * 8 // BITS
    for index in tl.static_range(PIECES):
        piece = tl.program_id(1) * PIECES + index
        mask = (rows < n)[:, None] & (cols < RUN)[None, :] & (piece < K // PIECE)
        w = tl.load(w_ptr + rows[:, None].to(tl.int64) * (K * BITS // 8) + piece * RUN + cols[None, :], mask=mask,
                    other=0)  # fmt: skip
        k = tl.minimum(piece, K // PIECE - 1) * PIECE + cols
        group = tl.minimum(piece, K // PIECE - 1) * PIECE // GROUP
        if BITS == 8:
            _store_widened(out_ptr, w, scales_ptr, offsets_ptr, order_ptr, group, rows, k, mask, n, K)
        else:
            last = (tl.minimum(piece, K // PIECE - 1) * PIECE + RUN) // GROUP
            low, high = _halves(w, tl.bfloat16)
            _store_widened(out_ptr, low, scales_ptr, offsets_ptr, order_ptr, group, rows, k, mask, n, K)
            _store_widened(out_ptr, high, scales_ptr, offsets_ptr, order_ptr, last, rows, k + RUN, mask, n, K)


def widen_matrix(w: PackedMatrix, out: Tensor) -> Tensor:
    """-> out: [n, k] of a 16-bit type, contiguous."""
    n, k = w.shape
    pieces = k * w.bits // (8 * w.run)
    widen_matrix_kernel[(-(-n // 32), -(-pieces // 4))](
        w.numbers, w.scales, w.offsets, w.order, out, n, K=k, BITS=w.bits, GROUP=w.group, RUN=w.run, TILE_N=32,
        PIECES=4, num_warps=4,
    )  # fmt: skip
    return out


def multiply_packed(
    x: Tensor | Unscaled,  # [rows, k], contiguous
    w: PackedMatrix,
    bias: Tensor | None,
    out: Tensor,
    to: Add | Rope | None,
    config: PackedConfig,
    scratch: SkinnyScratch,
    *,
    mode: int,
    silu: bool = False,
    spec: AttentionSpec | None = None,
    block_size: int = 0,
) -> None:
    """One launch: the product, and what `mode` of epilogue.py says, into out."""
    scale, parts = None, 0
    if isinstance(x, Unscaled):
        assert x.square_sums is not None, "only products of many rows take the residual stream as it is"
        scale, parts, x = Scale(x.square_sums, x.eps), x.square_sums.shape[0], x.x
    rows, (n, k) = x.shape[0], w.shape
    strips = 2 if mode in (GATE.value, ROPE.value) else 1
    tiles = -(-n // strips // (config.tile_n // strips))
    partial = None
    if config.split_k > 1:
        partial = torch.empty(config.split_k * rows * n, dtype=torch.float32, device=x.device)
        assert tiles <= scratch.arrivals.numel()
    packed_kernel[(tiles, config.split_k)](
        x, w.numbers, w.scales, w.offsets, w.order, out, bias, scale, to, partial, scratch.arrivals, n, rows, K=k,
        BITS=w.bits, GROUP=w.group, RUN=w.run, ROWS_PAD=max(16, next_power_of_2(rows)), TILE_N=config.tile_n,
        SPLIT_K=config.split_k, STAGES=config.num_stages, PARTS=parts, PARTS_PAD=next_power_of_2(parts), MODE=mode,
        SILU=silu, HEADS=spec.num_heads if spec else 0, KV_HEADS=spec.num_kv_heads if spec else 0,
        HALF_DIM=spec.head_dim // 2 if spec else 1, BLOCK_SIZE=block_size, num_warps=config.num_warps,
    )  # fmt: skip
