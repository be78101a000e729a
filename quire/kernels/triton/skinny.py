# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""x @ w.T for 1..16 rows of x: the weights are read once, and that read is the whole cost.

One or two rows multiply in plain float32, a few rows of w to a program, so that even a small matrix fills the chip.
More rows use the tensor cores: w's tile is their left operand, x's rows their right one, and where n is small the
programs divide k among them; the one that finishes last adds up the parts, in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.triton.common import begin, next_power_of_2, wait_for_inputs
from quire.kernels.triton.configs import SkinnyConfig


@triton.jit
def _load_weights(w_ptr, rows, cols, n, K: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
                  EVEN_N: tl.constexpr):  # fmt: skip
    pointers = w_ptr + rows[:, None].to(tl.int64) * K + cols[None, :]
    if EVEN_N and K % TILE_K == 0:
        w = tl.load(pointers, eviction_policy="evict_first")
    else:
        mask = (rows < n)[:, None] & (cols < K)[None, :]
        w = tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first")
    return w


@triton.jit(do_not_specialize=["n"])
def vector_kernel(x_ptr, w_ptr, bias_ptr, out_ptr, n, K: tl.constexpr, ROWS: tl.constexpr, TILE_N: tl.constexpr,
                  TILE_K: tl.constexpr, EVEN_N: tl.constexpr, HAS_BIAS: tl.constexpr, STAGES: tl.constexpr,
                  UNROLL: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """ROWS is 1 or 2."""
    begin(PDL)
    rows = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    cols = tl.arange(0, TILE_K)
    w = _load_weights(w_ptr, rows, cols, n, K, TILE_N, TILE_K, EVEN_N).to(tl.float32)  # needs no earlier kernel
    wait_for_inputs(PDL)
    # x is loaded once for each row of the tile, from L1: in w's own layout, so that no thread waits for another.
    x_ptrs = x_ptr + cols[None, :] + tl.zeros([TILE_N, 1], tl.int32)
    x = tl.load(x_ptrs, mask=cols[None, :] < K, other=0.0).to(tl.float32)
    acc0 = w * x
    if ROWS == 2:
        x = tl.load(x_ptrs + K, mask=cols[None, :] < K, other=0.0).to(tl.float32)
        acc1 = w * x
    for start in tl.range(TILE_K, K, TILE_K, num_stages=STAGES, loop_unroll_factor=UNROLL):
        w = _load_weights(w_ptr, rows, start + cols, n, K, TILE_N, TILE_K, EVEN_N).to(tl.float32)
        x = tl.load(x_ptrs + start, mask=start + cols[None, :] < K, other=0.0).to(tl.float32)
        acc0 += w * x
        if ROWS == 2:
            x = tl.load(x_ptrs + K + start, mask=start + cols[None, :] < K, other=0.0).to(tl.float32)
            acc1 += w * x
    bias = tl.zeros([TILE_N], tl.float32)
    if HAS_BIAS:
        bias += tl.load(bias_ptr + rows, mask=rows < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows, (tl.sum(acc0, axis=1) + bias).to(out_ptr.dtype.element_ty), mask=rows < n)
    if ROWS == 2:
        tl.store(out_ptr + n + rows, (tl.sum(acc1, axis=1) + bias).to(out_ptr.dtype.element_ty), mask=rows < n)


@triton.jit(do_not_specialize=["n"])
def tile_kernel(x_ptr, w_ptr, bias_ptr, out_ptr, partial_ptr, arrivals_ptr, n, K: tl.constexpr, ROWS: tl.constexpr,
                ROWS_PAD: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, SPLIT_K: tl.constexpr,
                EVEN_N: tl.constexpr, HAS_BIAS: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
                PDL: tl.constexpr):  # fmt: skip
    """w_ptr is a tensor descriptor where TMA."""
    begin(PDL)
    tile = tl.program_id(0)
    part = tl.program_id(1)
    rows = tile * TILE_N + tl.arange(0, TILE_N)
    m = tl.arange(0, ROWS_PAD)
    cols = tl.arange(0, TILE_K)
    STEPS: tl.constexpr = (K + TILE_K - 1) // TILE_K
    first = part * STEPS // SPLIT_K
    last = (part + 1) * STEPS // SPLIT_K
    wait_for_inputs(PDL)
    acc = tl.zeros([TILE_N, ROWS_PAD], tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        k = step * TILE_K + cols
        if TMA:
            w = w_ptr.load([tile * TILE_N, step * TILE_K])
        else:
            w = _load_weights(w_ptr, rows, k, n, K, TILE_N, TILE_K, EVEN_N)
        # Rows past ROWS are masked, so they cost no traffic.
        x = tl.load(x_ptr + m[None, :] * K + k[:, None], mask=(m < ROWS)[None, :] & (k < K)[:, None], other=0.0)
        acc = tl.dot(w, x, acc)
    bias = tl.zeros([TILE_N], tl.float32)
    if HAS_BIAS:
        bias += tl.load(bias_ptr + rows, mask=rows < n, other=0.0).to(tl.float32)
    offsets = m[None, :] * n + rows[:, None]
    mask = (m < ROWS)[None, :] & (rows < n)[:, None]
    if SPLIT_K == 1:
        tl.store(out_ptr + offsets, (acc + bias[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(partial_ptr + part * ROWS * n + offsets, acc, mask=mask)
        tl.debug_barrier()  # every thread's part is stored before one thread announces it
        if tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") == SPLIT_K - 1:
            tl.store(arrivals_ptr + tile, 0)  # ready for the next launch
            acc = tl.zeros([TILE_N, ROWS_PAD], tl.float32) + bias[:, None]
            for other_part in tl.static_range(SPLIT_K):
                # Bypasses L1: other multiprocessors wrote it in this launch.
                other = partial_ptr + other_part * ROWS * n + offsets
                acc += tl.load(other, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=mask)


@dataclass(slots=True)
class SkinnyScratch:
    """Arrival counters of divided products: zero between launches. Launches that share them must share a stream."""

    arrivals: Tensor  # [tiles] int32

    @staticmethod
    def allocate(max_tiles: int, device: torch.device) -> SkinnyScratch:
        return SkinnyScratch(torch.zeros(max_tiles, dtype=torch.int32, device=device))


def skinny_linear(
    x: Tensor,  # [rows, k], contiguous
    weight: Tensor,  # [n, k], contiguous
    bias: Tensor | None,
    config: SkinnyConfig,
    scratch: SkinnyScratch,
    *,
    out_dtype: torch.dtype | None = None,
    pdl: bool = False,
) -> Tensor:
    """x @ weight.T + bias -> [rows, n], summed in float32."""
    rows, k = x.shape
    n = weight.shape[0]
    out = torch.empty((rows, n), dtype=out_dtype or x.dtype, device=x.device)
    tiles = -(-n // config.tile_n)
    shared = {
        "K": k,
        "ROWS": rows,
        "TILE_N": config.tile_n,
        "TILE_K": config.tile_k,
        "EVEN_N": n % config.tile_n == 0,
        "HAS_BIAS": bias is not None,
        "STAGES": config.num_stages,
        "PDL": pdl,
        "num_warps": config.num_warps,
    }
    if pdl:
        shared["launch_pdl"] = True
    if not config.use_tensor_cores:
        assert rows <= 2, "plain multiplication is written for one or two rows"
        vector_kernel[(tiles,)](x, weight, bias, out, n, UNROLL=config.unroll, **shared)
        return out
    rows_pad = max(16, next_power_of_2(rows))
    partial = out
    if config.split_k > 1:
        partial = torch.empty(config.split_k * rows * n, dtype=torch.float32, device=x.device)
        assert tiles <= scratch.arrivals.numel()
    source = TensorDescriptor.from_tensor(weight, [config.tile_n, config.tile_k]) if config.use_tma else weight
    tile_kernel[(tiles, config.split_k)](
        x, source, bias, out, partial, scratch.arrivals, n, ROWS_PAD=rows_pad, SPLIT_K=config.split_k,
        TMA=config.use_tma, **shared,
    )  # fmt: skip
    return out
