# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""activation(gate) * up over the two halves of the fused projection."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ACTIVATIONS = ("silu", "gelu_tanh")


@triton.jit(do_not_specialize=["width"])
def act_mul_kernel(x_ptr, out_ptr, width, SILU: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = cols < width
    gate = tl.load(x_ptr + row * 2 * width + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + cols, mask=mask, other=0.0).to(tl.float32)
    if SILU:
        gate = gate * tl.sigmoid(gate)
    else:
        # 0.5 * (1 + tanh(u)) is sigmoid(2 * u), with u = sqrt(2 / pi) * (x + 0.044715 x^3).
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    tl.store(out_ptr + row * width + cols, (gate * up).to(out_ptr.dtype.element_ty), mask=mask)


def act_mul(gate_up: Tensor, activation: str, *, tile: int = 1024, num_warps: int = 4) -> Tensor:
    """gate_up: [rows, 2 * n] -> [rows, n]."""
    assert activation in ACTIVATIONS, activation
    assert gate_up.is_contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    act_mul_kernel[(rows, -(-width // tile))](
        gate_up, out, width, SILU=activation == "silu", TILE=tile, num_warps=num_warps
    )
    return out
