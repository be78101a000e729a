# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""x @ w.T for 1..32 rows of x: the weights are read once, and that read is the whole cost.

One row multiplies in plain float32, a few rows of w to a program, so that even a small matrix fills the chip. More
rows use the tensor cores: w's tile is their left operand, x's rows their right one, and where n is small the programs
divide k among them; the one that finishes last adds up the parts, in a fixed order. What follows a product in a
layer is done here, too: see epilogue.py. One row's norm is not, since its programs are too many to add up squares.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.interface import AttentionBatch, AttentionSpec, Norm, Rotary, Unscaled
from quire.kernels.triton import epilogue
from quire.kernels.triton.common import next_power_of_2, widened
from quire.kernels.triton.configs import SkinnyConfig
from quire.kernels.triton.epilogue import ADD, GATE, ROPE, STORE, Add, Rope, Scale
from quire.kernels.triton.one_adapter import (
    OneAdapter,
    OneAdapterShape,
    announce_shrunk,
    expanded,
    is_shrunk,
    load_tile,
)

_SHRINK_N = 2  # rows of an adapter's A that a program multiplies


@triton.jit
def _load_weights(w_ptr, rows, exists, cols, K: tl.constexpr, TILE_K: tl.constexpr, EVEN_N: tl.constexpr):
    pointers = w_ptr + rows[:, None].to(tl.int64) * K + cols[None, :]
    if EVEN_N and K % TILE_K == 0:
        w = tl.load(pointers, eviction_policy="evict_first")
    else:
        w = tl.load(pointers, mask=exists[:, None] & (cols < K)[None, :], other=0.0, eviction_policy="evict_first")
    return w


@triton.jit
def _finish(sums, rows, exists, out_ptr, w_scales_ptr, bias_ptr, scale, to, tile, m, n, num_rows, squares,
            K: tl.constexpr, MODE: tl.constexpr, ROWS_PAD: tl.constexpr, TILE_N: tl.constexpr, SILU: tl.constexpr,
            HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF_DIM: tl.constexpr,
            BLOCK_SIZE: tl.constexpr):  # fmt: skip
    """sums: [TILE_N, ROWS_PAD]. Scale, add the bias, and do what MODE says."""
    if scale is not None:
        sums = sums * tl.rsqrt(tl.sum(squares, axis=0) / K + scale.eps)[None, :]
    if w_scales_ptr is not None:
        sums = sums * tl.load(w_scales_ptr + rows, mask=exists, other=0.0)[:, None]
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + rows, mask=exists, other=0.0).to(tl.float32)[:, None]
    if MODE == STORE:
        epilogue.store(out_ptr, sums, rows, m, n, num_rows)
    elif MODE == ADD:
        epilogue.add(out_ptr, to, sums, rows, m, tile, n, num_rows)
    else:
        epilogue.both_strips(out_ptr, to, sums, tile, m, n, num_rows, MODE, TILE_N, ROWS_PAD, SILU, HEADS, KV_HEADS,
                             HALF_DIM, BLOCK_SIZE)  # fmt: skip


@triton.jit
def multiply_vector(x_ptr, w_ptr, rows, exists, K: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
                    EVEN_N: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr):  # fmt: skip
    """One row of x with rows of w -> [TILE_N] float32."""
    cols = tl.arange(0, TILE_K)
    w = _load_weights(w_ptr, rows, exists, cols, K, TILE_K, EVEN_N).to(tl.float32)
    # x is loaded once for each row of the tile, from L1: in w's own layout, so that no thread waits for another.
    x_ptrs = x_ptr + cols[None, :] + tl.zeros([TILE_N, 1], tl.int32)
    acc = w * tl.load(x_ptrs, mask=cols[None, :] < K, other=0.0).to(tl.float32)
    for start in tl.range(TILE_K, K, TILE_K, num_stages=STAGES, loop_unroll_factor=UNROLL):
        w = _load_weights(w_ptr, rows, exists, start + cols, K, TILE_K, EVEN_N).to(tl.float32)
        acc += w * tl.load(x_ptrs + start, mask=start + cols[None, :] < K, other=0.0).to(tl.float32)
    return tl.sum(acc, axis=1)


@triton.jit(do_not_specialize=["n"])
def vector_kernel(x_ptr, w_ptr, w_scales_ptr, out_ptr, bias_ptr, to, low, n, K: tl.constexpr, TILE_N: tl.constexpr,
                  TILE_K: tl.constexpr, EVEN_N: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr,
                  MODE: tl.constexpr, SILU: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
                  HALF_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, SHRINK_N: tl.constexpr, SHRINK_K: tl.constexpr,
                  WIDTH: tl.constexpr, MAX_RANK: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr):  # fmt: skip
    """One row of x. low: a OneAdapter, whose A has programs of its own, the first; or None. They have fewer and longer
    rows than the others, so that they are done in time though they look the adapter up first."""
    tile = tl.program_id(0)
    SHRINKING: tl.constexpr = WIDTH // SHRINK_N
    if low is not None:
        if tile < SHRINKING:
            a_rows = tile * SHRINK_N + tl.arange(0, SHRINK_N)
            if is_shrunk(low, tile * SHRINK_N, MAX_RANK):
                _, _, slot = load_tile(low.tiles, 0, 1)
                a_ptr = low.a + slot * low.slot_values
                shrunk = multiply_vector(
                    x_ptr, a_ptr, a_rows, a_rows < WIDTH, K, SHRINK_N, SHRINK_K, True, STAGES, UNROLL
                )
                tl.store(low.shrunk + a_rows, shrunk)
            announce_shrunk(low)
            return
        tile -= SHRINKING
    rows, exists = epilogue.tile_rows_of(tile, n, MODE, TILE_N, HALF_DIM)
    sums = multiply_vector(x_ptr, w_ptr, rows, exists, K, TILE_N, TILE_K, EVEN_N, STAGES, UNROLL)
    if w_scales_ptr is not None:
        sums = sums * tl.load(w_scales_ptr + rows, mask=exists, other=0.0)
    if low is not None:
        sums += expanded(low, rows, exists, n, SHRINKING, MAX_RANK, N0, N1)
    _finish(sums[:, None], rows, exists, out_ptr, None, bias_ptr, None, to, tile, tl.arange(0, 1), n, 1, None, K, MODE,
            1, TILE_N, SILU, HEADS, KV_HEADS, HALF_DIM, BLOCK_SIZE)  # fmt: skip


@triton.jit(do_not_specialize=["n", "num_rows"])
def tile_kernel(x_ptr, w_ptr, w_scales_ptr, out_ptr, bias_ptr, scale, to, partial_ptr, arrivals_ptr, n, num_rows,
                K: tl.constexpr, ROWS_PAD: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
                SPLIT_K: tl.constexpr, EVEN_N: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr,
                PARTS_PAD: tl.constexpr, MODE: tl.constexpr, SILU: tl.constexpr, HEADS: tl.constexpr,
                KV_HEADS: tl.constexpr, HALF_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr):  # fmt: skip
    tile = tl.program_id(0)
    part = tl.program_id(1)
    rows, exists = epilogue.tile_rows_of(tile, n, MODE, TILE_N, HALF_DIM)
    m = tl.arange(0, ROWS_PAD)
    cols = tl.arange(0, TILE_K)
    STEPS: tl.constexpr = (K + TILE_K - 1) // TILE_K
    first = part * STEPS // SPLIT_K
    last = (part + 1) * STEPS // SPLIT_K
    squares = None
    if scale is not None:
        squares = epilogue.load_square_sums(scale, m, num_rows, PARTS, PARTS_PAD)
    # 8-bit weights are widened in registers. As the right operand each thread's bytes are neighbours then.
    W_RIGHT: tl.constexpr = w_ptr.dtype.element_ty == tl.float8e4nv
    acc = tl.zeros([ROWS_PAD, TILE_N] if W_RIGHT else [TILE_N, ROWS_PAD], tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        k = step * TILE_K + cols
        w = _load_weights(w_ptr, rows, exists, k, K, TILE_K, EVEN_N)
        # Rows past the last are masked, so they cost no traffic.
        x = tl.load(x_ptr + m[None, :] * K + k[:, None], mask=(m < num_rows)[None, :] & (k < K)[:, None], other=0.0)
        if W_RIGHT:
            acc = tl.dot(tl.trans(x), tl.trans(widened(w, x.dtype)), acc, input_precision="ieee")
        else:
            acc = tl.dot(w, x, acc, input_precision="ieee")
    if W_RIGHT:
        acc = tl.trans(acc)
    if SPLIT_K == 1:
        _finish(acc, rows, exists, out_ptr, w_scales_ptr, bias_ptr, scale, to, tile, m, n, num_rows, squares, K, MODE,
                ROWS_PAD, TILE_N, SILU, HEADS, KV_HEADS, HALF_DIM, BLOCK_SIZE)  # fmt: skip
    else:
        offsets = m[None, :] * n + rows[:, None]
        mask = (m < num_rows)[None, :] & exists[:, None]
        tl.store(partial_ptr + part * num_rows * n + offsets, acc, mask=mask)
        tl.debug_barrier()  # every thread's part is stored before one thread announces it
        if tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") == SPLIT_K - 1:
            tl.store(arrivals_ptr + tile, 0)  # ready for the next launch
            acc = tl.zeros([TILE_N, ROWS_PAD], tl.float32)
            for other_part in tl.static_range(SPLIT_K):
                # Bypasses L1: other multiprocessors wrote it in this launch.
                other = partial_ptr + other_part * num_rows * n + offsets
                acc += tl.load(other, mask=mask, other=0.0, cache_modifier=".cg")
            _finish(acc, rows, exists, out_ptr, w_scales_ptr, bias_ptr, scale, to, tile, m, n, num_rows, squares, K,
                    MODE, ROWS_PAD, TILE_N, SILU, HEADS, KV_HEADS, HALF_DIM, BLOCK_SIZE)  # fmt: skip


@dataclass(slots=True)
class SkinnyScratch:
    """Counters of programs that wait for each other. Launches that share them must share a stream."""

    arrivals: Tensor  # [tiles] int32, of divided products: zero between launches
    turns: Tensor  # [2] int32, of a token's adapters: see one_adapter.py

    @staticmethod
    def allocate(max_tiles: int, device: torch.device) -> SkinnyScratch:
        counters = (torch.zeros(size, dtype=torch.int32, device=device) for size in (max_tiles, 2))
        return SkinnyScratch(*counters)


def skinny_linear(
    x: Tensor | Unscaled,  # [rows, k], contiguous
    weight: Tensor,  # [n, k], contiguous
    bias: Tensor | None,
    config: SkinnyConfig,
    scratch: SkinnyScratch,
    *,
    out: Tensor | None = None,  # [rows, n], contiguous, of any float type
    weight_scales: Tensor | None = None,  # [n] float32: what the matrix's rows are to be multiplied by
    adapter: tuple[OneAdapter, OneAdapterShape] | None = None,  # of a single row
) -> Tensor:
    """x @ weight.T + bias -> [rows, n], summed in float32."""
    plain = x.x if isinstance(x, Unscaled) else x
    if out is None:
        out = torch.empty((plain.shape[0], weight.shape[0]), dtype=plain.dtype, device=plain.device)
    _launch(x, weight, bias, out, None, config, scratch, mode=STORE.value, weight_scales=weight_scales,
            adapter=adapter)  # fmt: skip
    return out


def skinny_add_norm(
    x: Tensor | Unscaled,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,  # [rows, n], changed in place
    norm: Norm | None,
    config: SkinnyConfig,
    scratch: SkinnyScratch,
    *,
    weight_scales: Tensor | None = None,
) -> Tensor | Unscaled:
    """residual += x @ weight.T + bias; -> what the next product takes as its normalised input, or the residual."""
    if norm is None:
        _launch(x, weight, bias, residual, Add(residual, None, None), config, scratch, mode=ADD.value,
                weight_scales=weight_scales)  # fmt: skip
        return residual
    tiles = -(-weight.shape[0] // config.tile_n)
    out = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    square_sums = torch.empty((tiles, residual.shape[0]), dtype=torch.float32, device=residual.device)
    _launch(x, weight, bias, out, Add(residual, norm.weight, square_sums), config, scratch, mode=ADD.value,
            weight_scales=weight_scales)  # fmt: skip
    return Unscaled(out, square_sums, norm.eps)


def skinny_act(
    x: Tensor | Unscaled,
    weight: Tensor,  # [2 * n, k]
    bias: Tensor | None,
    activation: str,
    config: SkinnyConfig,
    scratch: SkinnyScratch,
    *,
    weight_scales: Tensor | None = None,
    adapter: tuple[OneAdapter, OneAdapterShape] | None = None,
) -> Tensor:
    """activation(first half of x @ weight.T + bias) * second half -> [rows, n]."""
    plain = x.x if isinstance(x, Unscaled) else x
    out = torch.empty((plain.shape[0], weight.shape[0] // 2), dtype=plain.dtype, device=plain.device)
    _launch(x, weight, bias, out, None, config, scratch, mode=GATE.value, silu=activation == "silu",
            weight_scales=weight_scales, adapter=adapter)  # fmt: skip
    return out


def skinny_rope_write(
    x: Tensor | Unscaled,
    weight: Tensor,
    bias: Tensor | None,
    rotary: Rotary,
    kv: Tensor,
    batch: AttentionBatch,
    spec: AttentionSpec,
    config: SkinnyConfig,
    scratch: SkinnyScratch,
    *,
    weight_scales: Tensor | None = None,
    adapter: tuple[OneAdapter, OneAdapterShape] | None = None,
) -> Tensor:
    """See LinearWeight.multiply_rope_write; without norms of q and k, which need whole heads."""
    assert can_rope(spec, config)
    plain = x.x if isinstance(x, Unscaled) else x
    out = torch.empty((plain.shape[0], spec.num_heads * spec.head_dim), dtype=plain.dtype, device=plain.device)
    to = Rope.of(rotary, kv, batch, spec)
    _launch(x, weight, bias, out, to, config, scratch, mode=ROPE.value, spec=spec, block_size=kv.shape[3],
            weight_scales=weight_scales, adapter=adapter)  # fmt: skip
    return out


def can_rope(spec: AttentionSpec, config: SkinnyConfig) -> bool:
    """Whether a tile's strips lie within one half of one head."""
    return spec.head_dim % config.tile_n == 0


def _launch(
    x: Tensor | Unscaled,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    to: Add | Rope | None,
    config: SkinnyConfig,
    scratch: SkinnyScratch,
    *,
    mode: int,
    weight_scales: Tensor | None,
    silu: bool = False,
    spec: AttentionSpec | None = None,
    block_size: int = 0,
    adapter: tuple[OneAdapter, OneAdapterShape] | None = None,
) -> None:
    scale, parts = None, 0
    if isinstance(x, Unscaled):
        assert x.square_sums is not None, "only products of many rows take the residual stream as it is"
        scale, parts, x = Scale(x.square_sums, x.eps), x.square_sums.shape[0], x.x
    rows, k = x.shape
    n = weight.shape[0]
    strips = 2 if mode in (GATE.value, ROPE.value) else 1
    tiles = -(-n // strips // (config.tile_n // strips))
    constants = {
        "K": k,
        "TILE_N": config.tile_n,
        "TILE_K": config.tile_k,
        "EVEN_N": n % config.tile_n == 0,
        "STAGES": config.num_stages,
        "MODE": mode,
        "SILU": silu,
        "HEADS": spec.num_heads if spec is not None else 0,
        "KV_HEADS": spec.num_kv_heads if spec is not None else 0,
        "HALF_DIM": spec.head_dim // 2 if spec is not None else 1,
        "BLOCK_SIZE": block_size,
        "num_warps": config.num_warps,
    }
    if not config.use_tensor_cores:
        assert rows == 1 and scale is None and mode != ADD.value, "plain multiplication is written for one plain row"
        low, shape = adapter or (None, OneAdapterShape(0, 0, (0, 0)))
        vector_kernel[(shape.width // _SHRINK_N + tiles,)](
            x, weight, weight_scales, out, bias, to, low, n, UNROLL=config.unroll, SHRINK_N=_SHRINK_N,
            SHRINK_K=config.tile_k * config.tile_n // _SHRINK_N, WIDTH=shape.width, MAX_RANK=shape.max_rank,
            N0=shape.part_rows[0], N1=shape.part_rows[1], **constants,
        )  # fmt: skip
        return
    assert adapter is None
    partial = None
    if config.split_k > 1:
        partial = torch.empty(config.split_k * rows * n, dtype=torch.float32, device=x.device)
        assert tiles <= scratch.arrivals.numel()
    tile_kernel[(tiles, config.split_k)](
        x, weight, weight_scales, out, bias, scale, to, partial, scratch.arrivals, n, rows,
        ROWS_PAD=max(16, next_power_of_2(rows)), SPLIT_K=config.split_k, PARTS=parts,
        PARTS_PAD=next_power_of_2(parts), **constants,
    )  # fmt: skip
