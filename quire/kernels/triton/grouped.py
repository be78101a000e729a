# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Products of a step's picks with their experts' matrices, and the sum of each token's.

Few picks are multiplied one by one, in plain float32: hardly any two have the same expert. More are grouped: a program
has a tile of one expert's matrix, as the tensor cores' left operand, and up to TILE_M of the expert's picks as the
right one. Which expert a program has follows from the counts on the device. The grid is as large as picks need that
fall on experts by chance; a routing that needs more blocks has the first programs come back for them. (A grid for any
routing is half as large again in steps of decodes: programs that only find out that they have nothing to do would take
some 4 us of each product.) Blocks of one expert are neighbours: the second finds the matrix in the L2 cache.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.interface import Norm
from quire.kernels.triton.common import next_power_of_2, widened
from quire.kernels.triton.configs import GroupedConfig, PickedConfig
from quire.kernels.triton.routing import Routing

_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "clamped_silu": 2}


@triton.jit
def _gated(gate, up, ACTIVATION: tl.constexpr):
    """ACTIVATION: one of _ACTIVATIONS."""
    if ACTIVATION == 0:
        gate = gate * tl.sigmoid(gate)
    elif ACTIVATION == 1:
        # 0.5 * (1 + tanh(u)) is sigmoid(2 * u), with u = sqrt(2 / pi) * (x + 0.044715 x^3).
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        gate = tl.minimum(gate, 7.0)
        gate = gate * tl.sigmoid(1.702 * gate)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0
    return gate * up


@triton.jit
def _of_rows(pointer, expert, rows, first, N: tl.constexpr, GATED: tl.constexpr):
    """What rows `first + rows` of an expert's matrix have one number each of: scales in 8-bit floats, or biases. The
    matrix has N rows, or GATED twice as many."""
    NUM_ROWS: tl.constexpr = 2 * N if GATED else N
    return tl.load(pointer + expert * NUM_ROWS + first + rows, mask=rows < N, other=0.0).to(tl.float32)


@triton.jit
def picked_kernel(x_ptr, w_ptr, w_scales_ptr, bias_ptr, out_ptr, factors_ptr, weights_ptr, chosen_ptr,
                  N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr,
                  ACTIVATION: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
                  UNROLL: tl.constexpr):  # fmt: skip
    """One pick with TILE_N rows of its expert's matrix; GATED: with those of gate and those of up."""
    pick = tl.program_id(1)
    rows = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    cols = tl.arange(0, TILE_K)
    expert = tl.load(chosen_ptr + pick).to(tl.int64)
    row = pick
    if GATED:
        row = pick // TOP_K
        w_ptr += expert * (2 * N * K)
    else:
        w_ptr += expert * (N * K)
    # x is loaded once for each row of the tile, from L1: in w's own layout, so that no thread waits for another.
    x_ptrs = x_ptr + row.to(tl.int64) * K + cols[None, :] + tl.zeros([TILE_N, 1], tl.int32)
    w_ptrs = w_ptr + rows[:, None] * K + cols[None, :]
    acc = tl.zeros([TILE_N, TILE_K], tl.float32)
    up = tl.zeros([TILE_N, TILE_K], tl.float32)
    for start in tl.range(0, K, TILE_K, loop_unroll_factor=UNROLL):
        mask = (rows < N)[:, None] & (start + cols < K)[None, :]
        x = tl.load(x_ptrs + start, mask=mask, other=0.0).to(tl.float32)
        acc += x * tl.load(w_ptrs + start, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if GATED:
            up += x * tl.load(w_ptrs + N * K + start, mask=mask, other=0.0, eviction_policy="evict_first").to(
                tl.float32
            )
    sums = tl.sum(acc, axis=1)
    if w_scales_ptr is not None:
        sums *= _of_rows(w_scales_ptr, expert, rows, 0, N, GATED)
    if GATED:
        up_sums = tl.sum(up, axis=1)
        if w_scales_ptr is not None:
            up_sums *= _of_rows(w_scales_ptr, expert, rows, N, N, GATED)
        if factors_ptr is not None:
            factor = tl.load(factors_ptr + row)
            sums *= factor
            up_sums *= factor
        if bias_ptr is not None:
            sums += _of_rows(bias_ptr, expert, rows, 0, N, GATED)
            up_sums += _of_rows(bias_ptr, expert, rows, N, N, GATED)
        sums = _gated(sums, up_sums, ACTIVATION)
    else:
        if bias_ptr is not None:
            sums += _of_rows(bias_ptr, expert, rows, 0, N, GATED)
        sums *= tl.load(weights_ptr + pick).to(tl.float32)
    tl.store(out_ptr + pick.to(tl.int64) * N + rows, sums.to(out_ptr.dtype.element_ty), mask=rows < N)


@triton.jit
def _load_tile(w_ptr, rows, k, N: tl.constexpr, K: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
               STREAMS: tl.constexpr):  # fmt: skip
    pointers = w_ptr + rows[:, None] * K + k[None, :]
    policy: tl.constexpr = "evict_first" if STREAMS else ""
    if N % TILE_N == 0 and K % TILE_K == 0:
        w = tl.load(pointers, eviction_policy=policy)
    else:
        w = tl.load(pointers, mask=(rows < N)[:, None] & (k < K)[None, :], other=0.0, eviction_policy=policy)
    return w


@triton.jit(do_not_specialize=["num_tokens"])
def grouped_kernel(x_ptr, w_ptr, w_scales_ptr, bias_ptr, out_ptr, factors_ptr, weights_ptr, members_ptr, counts_ptr,
                   num_tokens, N: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr,
                   TOP_K: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, TILE_M: tl.constexpr,
                   TILE_N: tl.constexpr, TILE_K: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Blocks of one expert's picks with TILE_N rows of its matrix; GATED: with those of gate and those of up."""
    TILES: tl.constexpr = (N + TILE_N - 1) // TILE_N
    tile = tl.program_id(0) % TILES
    experts = tl.arange(0, EXPERTS_PAD)
    counts = tl.load(counts_ptr + experts, mask=experts < EXPERTS, other=0)
    blocks = (counts + TILE_M - 1) // TILE_M
    ends = tl.cumsum(blocks, axis=0)
    num_blocks = tl.sum(blocks, axis=0)
    for block in tl.range(tl.program_id(0) // TILES, num_blocks, tl.num_programs(0) // TILES, num_stages=1):
        expert = tl.sum((ends <= block).to(tl.int32), axis=0)
        is_mine = experts == expert
        first = (block - tl.sum(tl.where(is_mine, ends - blocks, 0), axis=0)) * TILE_M
        m = first + tl.arange(0, TILE_M)
        exists = m < tl.sum(tl.where(is_mine, counts, 0), axis=0)
        picks = tl.load(members_ptr + expert * num_tokens + m, mask=exists, other=0)
        rows = tile * TILE_N + tl.arange(0, TILE_N)
        cols = tl.arange(0, TILE_K)
        STREAMS: tl.constexpr = TILE_M <= 32
        if GATED:
            sources = picks // TOP_K
            matrix_ptr = w_ptr + expert.to(tl.int64) * (2 * N * K)
        else:
            sources = picks
            matrix_ptr = w_ptr + expert.to(tl.int64) * (N * K)
        x_ptrs = x_ptr + sources[None, :].to(tl.int64) * K
        acc = tl.zeros([TILE_N, TILE_M], tl.float32)
        up = tl.zeros([TILE_N, TILE_M], tl.float32)
        for start in tl.range(0, K, TILE_K, num_stages=STAGES):
            k = start + cols
            w = _load_tile(matrix_ptr, rows, k, N, K, TILE_N, TILE_K, STREAMS)
            # Rows past the last are masked, so they cost no traffic.
            x = tl.load(x_ptrs + k[:, None], mask=exists[None, :] & (k < K)[:, None], other=0.0)
            acc = tl.dot(widened(w, x.dtype), x, acc, input_precision="ieee")
            if GATED:
                w = _load_tile(matrix_ptr + N * K, rows, k, N, K, TILE_N, TILE_K, STREAMS)
                up = tl.dot(widened(w, x.dtype), x, up, input_precision="ieee")
        if w_scales_ptr is not None:
            acc *= _of_rows(w_scales_ptr, expert, rows, 0, N, GATED)[:, None]
            if GATED:
                up *= _of_rows(w_scales_ptr, expert, rows, N, N, GATED)[:, None]
        if GATED:
            if factors_ptr is not None:
                factors = tl.load(factors_ptr + sources, mask=exists, other=0.0)[None, :]
                acc *= factors
                up *= factors
            if bias_ptr is not None:
                acc += _of_rows(bias_ptr, expert, rows, 0, N, GATED)[:, None]
                up += _of_rows(bias_ptr, expert, rows, N, N, GATED)[:, None]
            acc = _gated(acc, up, ACTIVATION)
        else:
            if bias_ptr is not None:
                acc += _of_rows(bias_ptr, expert, rows, 0, N, GATED)[:, None]
            acc *= tl.load(weights_ptr + picks, mask=exists, other=0.0).to(tl.float32)[None, :]
        target = out_ptr + picks[None, :].to(tl.int64) * N + rows[:, None]
        tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=exists[None, :] & (rows < N)[:, None])


@triton.jit
def combine_kernel(parts_ptr, shared_ptr, gate_ptr, residual_ptr, norm_ptr, out_ptr, counts_ptr, eps,
                   WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr,
                   EXPERTS_PAD: tl.constexpr):  # fmt: skip
    """A token's picks in their order, its shared expert, and what a layer does with a branch."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, WIDTH_PAD)
    mask = cols < WIDTH
    total = tl.zeros([WIDTH_PAD], tl.float32)
    for i in tl.static_range(TOP_K):
        total += tl.load(parts_ptr + (row * TOP_K + i) * WIDTH + cols, mask=mask, other=0.0).to(tl.float32)
    if shared_ptr is not None:
        shared = tl.load(shared_ptr + row * WIDTH + cols, mask=mask, other=0.0).to(tl.float32)
        if gate_ptr is not None:
            shared *= tl.sigmoid(tl.load(gate_ptr + row).to(tl.float32))
        total += shared
    if residual_ptr is not None:
        total += tl.load(residual_ptr + row * WIDTH + cols, mask=mask, other=0.0).to(tl.float32)
        rounded = total.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * WIDTH + cols, rounded, mask=mask)
        total = rounded.to(tl.float32)  # what the next layer will read back
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        total = total * tl.rsqrt(tl.sum(total * total, axis=0) / WIDTH + eps) * norm
    if out_ptr is not None:
        tl.store(out_ptr + row * WIDTH + cols, total.to(out_ptr.dtype.element_ty), mask=mask)
    if counts_ptr is not None:  # ready for the next layer
        experts = tl.arange(0, EXPERTS_PAD)
        mask = (experts < EXPERTS) & (row == 0)
        tl.store(counts_ptr + experts, tl.zeros([EXPERTS_PAD], tl.int32), mask=mask)


def multiply_picks(
    x: Tensor,  # [tokens, k] for gate and up, [picks, k] for down; contiguous
    weight: Tensor,  # [experts, 2 * n or n, k], contiguous
    out: Tensor,  # [picks, n]
    routing: Routing,
    counts: Tensor,  # [experts] int32, where tokens are grouped
    config: GroupedConfig | PickedConfig,
    *,
    top_k: int,
    activation: str | None,  # of gate and up; None for down, which multiplies by the picks' weights instead
    weight_scales: Tensor | None = None,  # [experts, 2 * n or n] float32: what the matrices' rows are multiplied by
    bias: Tensor | None = None,  # [experts, 2 * n or n]
) -> None:
    (picks, n), k, experts = out.shape, x.shape[1], weight.shape[0]
    tokens = picks // top_k
    constants = {
        "N": n,
        "K": k,
        "TOP_K": top_k,
        "GATED": activation is not None,
        "ACTIVATION": 0 if activation is None else _ACTIVATIONS[activation],
        "TILE_N": config.tile_n,
        "TILE_K": config.tile_k,
        "num_warps": config.num_warps,
    }
    factors, weights = (routing.factors, None) if activation is not None else (None, routing.weights)
    tiles = -(-n // config.tile_n)
    if isinstance(config, PickedConfig):
        picked_kernel[(tiles, picks)](
            x, weight, weight_scales, bias, out, factors, weights, routing.chosen, UNROLL=config.unroll, **constants
        )
        return
    grouped_kernel[(tiles * config.num_blocks(picks, tokens, experts),)](
        x, weight, weight_scales, bias, out, factors, weights, routing.members, counts, tokens, EXPERTS=experts,
        EXPERTS_PAD=next_power_of_2(experts), TILE_M=config.tile_m, STAGES=config.num_stages, **constants,
    )  # fmt: skip


def combine(
    parts: Tensor,  # [tokens * top_k, width]: each pick's product, weighed
    counts: Tensor | None,  # to be zeroed
    *,
    top_k: int,
    shared: Tensor | None,  # [tokens, width]
    gate: Tensor | None,  # [tokens, 1]
    residual: Tensor | None,  # [tokens, width], changed in place
    norm: Norm | None,
    out: Tensor | None,  # what the norm leaves of the residual, or the branch
) -> None:
    picks, width = parts.shape
    width_pad = next_power_of_2(width)
    experts = 1 if counts is None else counts.numel()
    combine_kernel[(picks // top_k,)](
        parts, shared, gate, residual, None if norm is None else norm.weight, out, counts,
        0.0 if norm is None else norm.eps, WIDTH=width, WIDTH_PAD=width_pad, TOP_K=top_k, EXPERTS=experts,
        EXPERTS_PAD=next_power_of_2(experts), num_warps=min(max(width_pad // 512, 1), 16),
    )  # fmt: skip
