"""Kernels that draw for a whole batch at once. Where a device has none, draw.py does it in torch."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class DrawKernel(Protocol):
    def __call__(self, logits: Tensor, params: Tensor, keys: Tensor | None, *, filters: bool) -> Tensor:
        """-> [2, rows] int64: tokens, in range in any case; and the same, but -1 or -2 where none can be drawn.

        -1 says that a logit is NaN or infinity, -2 that all are -inf. Nothing waits for the device.
        logits: [rows, vocab] float32; params: [rows, 4] float64: temperature, min_p, top_p, top_k; keys: [rows, 2],
        see noise.py, or None where all rows are greedy; filters: whether any row has one.
        """


def find_kernel(vocab_size: int, device: torch.device) -> DrawKernel | None:
    """The device's kernel, compiled for this vocabulary, so that no request waits for a compiler."""
    if device.type != "cuda":
        return None
    from quire.kernels.triton import unavailable_reason

    if unavailable_reason(device) is not None:
        return None
    from quire.kernels.triton.sampling_filter import draw_each_way, sample_rows

    draw_each_way(vocab_size, device)
    return sample_rows
