# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""The logarithm of each row's total weight. One program for a row, so that it is summed in one order in any batch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def log_totals_kernel(logits_ptr, out_ptr, stride, VOCAB: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, TILE)
    largest = tl.full([TILE], float("-inf"), tl.float32)
    for first in range(0, VOCAB, TILE):
        x = tl.load(logits_ptr + row * stride + first + cols, mask=first + cols < VOCAB, other=float("-inf"))
        largest = tl.maximum(largest, x)
    top = tl.max(largest, axis=0)
    total = tl.zeros([TILE], tl.float32)
    for first in range(0, VOCAB, TILE):
        x = tl.load(logits_ptr + row * stride + first + cols, mask=first + cols < VOCAB, other=float("-inf"))
        total += tl.exp(x - top)
    tl.store(out_ptr + row, tl.log(tl.sum(total, axis=0)) + top)


def row_log_totals(logits: Tensor) -> Tensor:
    """logits: [rows, vocab] float32 -> [rows, 1]: the logarithm of the sum of exp(logit) over each row."""
    assert logits.stride(1) == 1 and logits.dtype == torch.float32
    out = torch.empty((logits.shape[0], 1), dtype=torch.float32, device=logits.device)
    if len(logits):
        log_totals_kernel[(logits.shape[0],)](
            logits, out, logits.stride(0), VOCAB=logits.shape[1], TILE=4096, num_warps=16
        )
    return out
