# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""activation(gate) * up over the two halves of the fused projection, and the activation alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.interface import Unscaled
from quire.kernels.triton.norm import ROWS_OF_SEVERAL_PROGRAMS, row_factor, stream_arguments

ACTIVATIONS = ("silu", "gelu_tanh")
_ALONE = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3}


@triton.jit
def gated(gate, up, SILU: tl.constexpr):
    """activation(gate) * up. Kernels that must give the same bits all do it so (invariant_hopper.py in Gluon)."""
    inner = gate
    if not SILU:
        # 0.5 * (1 + tanh(u)) is sigmoid(2 * u), with u = sqrt(2 / pi) * (x + 0.044715 x^3).
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp2(inner * -1.4426950408889634)) * up


@triton.jit
def activate_kernel(x_ptr, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, TILE: tl.constexpr):
    """In place. ACTIVATION: one of _ALONE."""
    TILES: tl.constexpr = (WIDTH + TILE - 1) // TILE
    cols = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    x_ptr += (tl.program_id(0) // TILES).to(tl.int64) * WIDTH
    x = tl.load(x_ptr + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)
    if ACTIVATION == 0:
        x *= tl.sigmoid(x)
    elif ACTIVATION == 1:
        x *= tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # see gated
    elif ACTIVATION == 2:
        x *= 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        x = tl.maximum(x, 0.0)
    tl.store(x_ptr + cols, x.to(x_ptr.dtype.element_ty), mask=cols < WIDTH)


def activate(x: Tensor, activation: str) -> Tensor:
    """x: [rows, width], contiguous, changed in place."""
    assert x.is_contiguous()
    rows, width = x.shape
    activate_kernel[(rows * -(-width // 1024),)](x, WIDTH=width, ACTIVATION=_ALONE[activation], TILE=1024)
    return x


@triton.jit
def act_mul_kernel(x_ptr, out_ptr, bias_ptr, stream_ptr, eps, WIDTH: tl.constexpr, SILU: tl.constexpr,
                   TILE: tl.constexpr, TILES_EACH: tl.constexpr, STREAM: tl.constexpr,
                   STREAM_PAD: tl.constexpr):  # fmt: skip
    # The width is a constant so that the compiler sees rows that are aligned, and moves them in 16 bytes at a time.
    # A row's programs are neighbours: all of them look at its row of the stream, which is in the L2 cache by then.
    PROGRAMS: tl.constexpr = (WIDTH + TILE * TILES_EACH - 1) // (TILE * TILES_EACH)
    row = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    first = tl.program_id(0) % PROGRAMS * (TILE * TILES_EACH)
    for i in tl.static_range(TILES_EACH):
        cols = first + i * TILE + tl.arange(0, TILE)
        mask = cols < WIDTH
        gate = tl.load(x_ptr + row * (2 * WIDTH) + cols, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(x_ptr + row * (2 * WIDTH) + WIDTH + cols, mask=mask, other=0.0).to(tl.float32)
        if stream_ptr is not None:
            if i == 0:
                factor = row_factor(stream_ptr + row * STREAM, eps, STREAM, STREAM_PAD)
            gate *= factor
            up *= factor
        if bias_ptr is not None:
            gate += tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
            up += tl.load(bias_ptr + WIDTH + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * WIDTH + cols, gated(gate, up, SILU).to(out_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class ActConfig:
    tile: int
    tiles_each: int  # of one program
    num_warps: int


def act_config(rows: int, width: int, *, has_stream: bool) -> ActConfig:
    """How a step's rows are cut. Each program that uses the stream reads a whole row of it: few wide ones do less."""
    if not has_stream:
        return ActConfig(1024, 1, 4)
    if rows <= ROWS_OF_SEVERAL_PROGRAMS:
        return ActConfig(2048, 1, 8)
    return ActConfig(4096, -(-width // 4096), 8)


def act_mul(
    gate_up: Tensor,
    activation: str,
    *,
    factors_of: Unscaled | None = None,
    bias: Tensor | None = None,
    config: ActConfig | None = None,
) -> Tensor:
    """gate_up: [rows, 2 * n] -> [rows, n].

    factors_of: rows that were multiplied before they were normalised; the bias is then added here.
    """
    assert activation in ACTIVATIONS, activation
    assert gate_up.is_contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    stream, eps, stream_width, stream_pad = stream_arguments(factors_of)
    if config is None:
        config = act_config(rows, width, has_stream=stream is not None)
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    act_mul_kernel[(rows * -(-width // (config.tile * config.tiles_each)),)](
        gate_up, out, bias, stream, eps, WIDTH=width, SILU=activation == "silu", TILE=config.tile,
        TILES_EACH=config.tiles_each, STREAM=stream_width, STREAM_PAD=stream_pad, num_warps=config.num_warps,
    )  # fmt: skip
    return out
