"""A layer's products at each number of rows that a step may have: where more rows would take less time, steps are
better padded. cuBLAS chooses a kernel for each number, and not always well: see `is_slow` in executor/sizing.py."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_measure import Report, time_us
from benchmarks.gpu_products import new_layers
from quire.kernels.triton import TritonOps
from quire.kernels.triton.linear import TritonLinear

ROWS = (*range(40, 1048, 8), *range(1152, 4224, 128))
_SLOW = 1.02  # times what some larger number takes


def run_rows(report: Report) -> None:
    ops = TritonOps("cuda", torch.bfloat16)
    layers = new_layers(ops, 2)  # too many for the L2 cache
    times = {rows: time_us([partial(_multiply, layer, *_inputs(rows)) for layer in layers]) for rows in ROWS}
    for rows, us in times.items():
        best = min((other for other in ROWS if other >= rows), key=times.__getitem__)
        is_slow = us > _SLOW * times[best]
        if is_slow or rows % 64 == 0:
            note = f"{best} rows take {times[best]:8.2f} us: x{us / times[best]:.3f}" if is_slow else ""
            report.add("rows", f"layer's products, {rows}", us, note, best_rows=best)


def _multiply(layer: dict[str, TritonLinear], x: Tensor, wide: Tensor, residual: Tensor) -> None:
    """As the steps do."""
    layer["qkv"].multiply(x)
    layer["o"].multiply_add_norm(x, residual, None)
    layer["gate_up"].multiply(x)
    layer["down"].multiply_add_norm(wide, residual, None)


def _inputs(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    x, wide = (torch.randn(rows, width, device="cuda").bfloat16() for width in (4096, 14336))
    return x, wide, torch.zeros_like(x)
