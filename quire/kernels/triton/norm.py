# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""A norm, alone or with the residual addition before it. One program a row; the row stays in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.interface import Norm, Unscaled
from quire.kernels.triton.common import next_power_of_2

# For kernels that call `row_factor`: up to so many rows each is cut among several programs, or the chip would not be
# full. More have one program each, which looks at its row of the stream once.
ROWS_OF_SEVERAL_PROGRAMS = 128


@triton.jit
def row_factor(row_ptr, eps, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr):
    """1 / root mean square of a row. For kernels that use a product of rows that are not normalised yet."""
    tl.debug_barrier()  # the caller's loads are under way before this one is waited for
    cols = tl.arange(0, WIDTH_PAD)
    x = tl.load(row_ptr + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)


@triton.jit
def norm_kernel(x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, eps, x_stride,
                WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, ADD: tl.constexpr):  # fmt: skip
    """An RMS norm, or with a bias a LayerNorm."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, WIDTH_PAD)
    mask = cols < WIDTH
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        residual = tl.load(residual_ptr + row * WIDTH + cols, mask=mask, other=0.0).to(tl.float32)
        total = (x + residual).to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * WIDTH + cols, total, mask=mask)
        x = total.to(tl.float32)  # what the next layer will read back, rounded
    if bias_ptr is not None:
        x = tl.where(mask, x - tl.sum(x, axis=0) / WIDTH, 0.0)
    x *= tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps) * weight
    if bias_ptr is not None:
        x += tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + cols, x.to(out_ptr.dtype.element_ty), mask=mask)


def stream_arguments(rows: Unscaled | None) -> tuple[Tensor | None, float, int, int]:
    """For a kernel that calls `row_factor`: the stream, its eps, width and padded width; None where nothing is left to
    do."""
    if rows is None:
        return None, 0.0, 1, 1
    width = rows.x.shape[1]
    return rows.x, rows.eps, width, next_power_of_2(width)


@triton.jit
def row_factors_kernel(stream_ptr, factors_ptr, eps, STREAM: tl.constexpr, STREAM_PAD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tl.store(factors_ptr + row, row_factor(stream_ptr + row * STREAM, eps, STREAM, STREAM_PAD))


def row_factors(rows: Unscaled, out: Tensor | None = None) -> Tensor:
    """[rows] float32: what each row of a product of them is to be multiplied by."""
    stream, eps, width, width_pad = stream_arguments(rows)
    assert stream is not None
    if out is None:
        out = torch.empty(len(stream), dtype=torch.float32, device=stream.device)
    row_factors_kernel[(len(stream),)](stream, out, eps, STREAM=width, STREAM_PAD=width_pad, num_warps=4)
    return out


def norm_rows(
    x: Tensor,
    norm: Norm,
    *,
    residual: Tensor | None = None,
    num_warps: int | None = None,
) -> Tensor:
    """x: [rows, width]. With a residual: residual += x in place, and the norm is of the sum."""
    rows, width = x.shape
    assert x.stride(1) == 1 and norm.weight.is_contiguous() and (residual is None or residual.is_contiguous())
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    width_pad = next_power_of_2(width)
    if num_warps is None:
        num_warps = min(max(width_pad // 512, 1), 16)  # 16 elements a thread
    norm_kernel[(rows,)](
        x, residual, norm.weight, norm.bias, out, norm.eps, x.stride(0), WIDTH=width, WIDTH_PAD=width_pad,
        ADD=residual is not None, num_warps=num_warps,
    )  # fmt: skip
    return out
