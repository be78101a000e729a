# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""The kernels between products of 8-bit floats (e4m3). Each takes a product as the library leaves it, without its
scales, and leaves the next product's rows in 8 bits: each row with the scale that brings its largest number to the
format's own. One program has a whole row, so that none of it costs a launch of its own."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.interface import Norm, Quantized
from quire.kernels.triton.activation import ACTIVATIONS
from quire.kernels.triton.common import FP8_MAX, next_power_of_2, store_narrowed


class Product(NamedTuple):
    """x @ w.T of 8-bit numbers, yet to be multiplied by what scales there are."""

    raw: Tensor  # [rows, n]
    row_scales: Tensor | None  # [rows] float32
    row_factor: float  # of all rows
    column_scales: Tensor | None  # [n] float32; without them there are no others either
    bias: Tensor | None  # [n]


@triton.jit
def product_columns(product, row, row_scale, cols, mask, WIDTH: tl.constexpr):
    """Some columns of a row of a Product, scaled."""
    x = tl.load(product.raw + row * WIDTH + cols, mask=mask, other=0.0).to(tl.float32)
    if product.column_scales is not None:
        x *= row_scale * tl.load(product.column_scales + cols, mask=mask, other=0.0)
    if product.bias is not None:
        x += tl.load(product.bias + cols, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def product_row_scale(product, row):
    scale = product.row_factor
    if product.row_scales is not None:
        scale = scale * tl.load(product.row_scales + row)
    return scale


@triton.jit
def store_quantized(x, scale_factor, out_ptr, scales_ptr, row, cols, mask, WIDTH: tl.constexpr):
    """x: a row, zero where masked; what is meant is x * scale_factor."""
    largest = tl.maximum(tl.max(tl.abs(x), axis=0), 1e-30)
    store_narrowed(out_ptr + row * WIDTH + cols, x * (FP8_MAX / largest), mask)
    tl.store(scales_ptr + row, largest * scale_factor / FP8_MAX)


@triton.jit
def quantize_kernel(x_ptr, out_ptr, scales_ptr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, WIDTH_PAD)
    mask = cols < WIDTH
    x = tl.load(x_ptr + row * WIDTH + cols, mask=mask, other=0.0).to(tl.float32)
    store_quantized(x, 1.0, out_ptr, scales_ptr, row, cols, mask, WIDTH)


@triton.jit
def add_norm_kernel(branch_ptr, product, residual_ptr, weight_ptr, out_ptr, scales_ptr, eps, WIDTH: tl.constexpr,
                    WIDTH_PAD: tl.constexpr, HAS_PRODUCT: tl.constexpr):  # fmt: skip
    """residual += the branch or the product, where there is one; then the norm, where there is a weight."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, WIDTH_PAD)
    mask = cols < WIDTH
    x = tl.load(residual_ptr + row * WIDTH + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_PRODUCT:
        x += product_columns(product, row, product_row_scale(product, row), cols, mask, WIDTH)
    if branch_ptr is not None:
        x += tl.load(branch_ptr + row * WIDTH + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_PRODUCT or branch_ptr is not None:
        total = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * WIDTH + cols, total, mask=mask)
        x = total.to(tl.float32)  # as the next layer will read it, rounded
    if weight_ptr is not None:
        rms = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
        x *= tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        if scales_ptr is not None:
            store_quantized(x, rms, out_ptr, scales_ptr, row, cols, mask, WIDTH)
        else:
            tl.store(out_ptr + row * WIDTH + cols, (x * rms).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def scale_kernel(product, out_ptr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    TILES: tl.constexpr = (WIDTH + TILE - 1) // TILE
    row = (tl.program_id(0) // TILES).to(tl.int64)
    cols = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    x = product_columns(product, row, product_row_scale(product, row), cols, cols < WIDTH, WIDTH)
    tl.store(out_ptr + row * WIDTH + cols, x.to(out_ptr.dtype.element_ty), mask=cols < WIDTH)


@triton.jit
def act_kernel(product, out_ptr, scales_ptr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, SILU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, WIDTH_PAD)
    mask = cols < WIDTH
    row_scale = product_row_scale(product, row)
    gate = product_columns(product, row, row_scale, cols, mask, 2 * WIDTH)
    up = product_columns(product, row, row_scale, WIDTH + cols, mask, 2 * WIDTH)
    if SILU:
        gate = gate * tl.sigmoid(gate)
    else:
        # 0.5 * (1 + tanh(u)) is sigmoid(2 * u), with u = sqrt(2 / pi) * (x + 0.044715 x^3).
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    store_quantized(gate * up, 1.0, out_ptr, scales_ptr, row, cols, mask, WIDTH)


def _new_quantized(rows: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    x = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=device)
    return x, torch.empty(rows, dtype=torch.float32, device=device)


def _num_warps(width_pad: int) -> int:
    return min(max(width_pad // 512, 1), 16)  # 16 elements a thread, or as many as it takes


def quantize_rows(x: Tensor) -> Quantized:
    """x: [rows, width], contiguous."""
    assert x.is_contiguous()
    rows, width = x.shape
    out, scales = _new_quantized(rows, width, x.device)
    pad = next_power_of_2(width)
    quantize_kernel[(rows,)](x, out, scales, WIDTH=width, WIDTH_PAD=pad, num_warps=_num_warps(pad))
    return Quantized(out, scales)


def add_norm_quantized(
    residual: Tensor, norm: Norm | None, *, branch: Tensor | None = None, product: Product | None = None
) -> Tensor | Quantized:
    """residual += branch or product, in place; -> norm(residual), in 8 bits where the norm says so, or residual."""
    rows, width = residual.shape
    assert residual.is_contiguous() and (branch is None or branch.is_contiguous())
    out = scales = None
    if norm is not None and norm.quantizes:
        out, scales = _new_quantized(rows, width, residual.device)
    elif norm is not None:
        out = torch.empty((rows, width), dtype=residual.dtype, device=residual.device)
    pad = next_power_of_2(width)
    add_norm_kernel[(rows,)](
        branch, product, residual, None if norm is None else norm.weight, out, scales,
        0.0 if norm is None else norm.eps, WIDTH=width, WIDTH_PAD=pad,
        HAS_PRODUCT=product is not None, num_warps=_num_warps(pad),
    )  # fmt: skip
    if out is None:
        return residual
    return out if scales is None else Quantized(out, scales)


def scaled_product(product: Product, dtype: torch.dtype) -> Tensor:
    """The product itself, for what takes it as it is."""
    rows, width = product.raw.shape
    out = torch.empty((rows, width), dtype=dtype, device=product.raw.device)
    scale_kernel[(rows * -(-width // 1024),)](product, out, WIDTH=width, TILE=1024)
    return out


def act_quantized(product: Product, activation: str) -> Quantized:
    """A product [rows, 2 * n] -> activation(first half) * second half."""
    assert activation in ACTIVATIONS, activation
    rows, width = product.raw.shape[0], product.raw.shape[1] // 2
    out, scales = _new_quantized(rows, width, product.raw.device)
    pad = next_power_of_2(width)
    act_kernel[(rows,)](
        product, out, scales, WIDTH=width, WIDTH_PAD=pad, SILU=activation == "silu", num_warps=_num_warps(pad)
    )
    return Quantized(out, scales)
