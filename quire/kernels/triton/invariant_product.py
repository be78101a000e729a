# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""x @ w.T for any number of rows, in which a row's result does not depend on the other rows.

A result is summed over k in an order that the matrix's shape alone decides. Within a part of k, tensor cores add 16
products at a time in order, whatever the tile; the parts are added in order, too. Few rows give one part to a program,
so that a small matrix fills the chip, and the program that finishes last adds the parts up; where there are many, one
program does all parts of its tile. How many rows and columns a tile has, and how much of k is fetched at once, is free.
So is whether what follows a product in a layer has a launch of its own: in the product's, it takes the sums rounded as
they would be stored, and computes the same.

w's tile is the left operand and x's rows the right one at every size, so that the instruction is always the same:
Hopper's wgmma on 64 rows of w, which takes 8 to 256 columns at no difference to any of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.interface import AttentionBatch, AttentionSpec, Rotary
from quire.kernels.triton import epilogue
from quire.kernels.triton.activation import ACTIVATIONS
from quire.kernels.triton.common import HAS_GLUON, INTERPRETED
from quire.kernels.triton.configs import NUM_SMS
from quire.kernels.triton.epilogue import GATE, ROPE, STORE, Rope
from quire.kernels.triton.skinny import SkinnyScratch

_PART_UNIT = 128  # parts of k are multiples of this


@dataclass(slots=True, frozen=True)
class ProductConfig:
    """Any of these gives the same numbers, as long as `tile_k` divides _PART_UNIT."""

    tile_n: int  # rows of w
    tile_rows: int  # of x
    tile_k: int
    num_warps: int
    num_stages: int
    parts_apart: bool  # each in a program of its own
    uses_bulk_copies: bool = False  # by invariant_hopper.py, whose tile_k is its own


@cache
def num_parts(n: int, k: int) -> int:
    """Into how many parts k is cut. It decides the order of summation, so it depends on nothing but the matrix: few
    tiles of 64 rows are cut into parts that fill the chip together, each of at least 1,024 inputs."""
    return max(1, min(NUM_SMS // -(-n // 64), 8, k // 1024))


# By the most rows that each is for.
_FEW_ROWS = {
    16: ProductConfig(64, 16, 128, num_warps=4, num_stages=6, parts_apart=True),
    32: ProductConfig(64, 32, 128, num_warps=4, num_stages=4, parts_apart=True),
    64: ProductConfig(64, 64, 128, num_warps=4, num_stages=3, parts_apart=True),
}


@dataclass(slots=True, frozen=True)
class _Tile:
    """A tile of the bulk copies' kernel, whose stages fill shared memory, and what it takes on an H200, in µs."""

    n: int
    rows: int
    num_stages: int
    us: float  # for itself
    step_us: float  # for each 64 of k
    parts_us: float  # to add up parts of k that were summed apart

    def cost_us(self, rows: int, n: int, k: int, parts: int) -> float:
        """parts: that are summed apart. One program at a time runs on each multiprocessor."""
        waves = -(-self.count(rows, n) * parts // NUM_SMS)
        return waves * (self.us + self.step_us * -(-k // 64) / parts) + (self.parts_us if parts > 1 else 0.0)

    def count(self, rows: int, n: int) -> int:
        return -(-n // self.n) * -(-rows // self.rows)


_NARROW = _Tile(128, 64, 8, us=3.5, step_us=0.205, parts_us=5.0)
_SQUARE = _Tile(128, 128, 6, us=6.5, step_us=0.284, parts_us=8.0)
_TALL = _Tile(128, 192, 4, us=6.5, step_us=0.43, parts_us=12.0)
_WIDE = _Tile(256, 128, 3, us=2.5, step_us=0.655, parts_us=20.0)


@cache
def product_config(rows: int, n: int, k: int, *, gates: bool = False) -> ProductConfig:
    """What is fastest on an H200, by what was measured there for the matrices of Llama-3.1-8B. gates: an activation
    halves what is written, which leaves room for a stage."""
    uses_bulk_copies = HAS_GLUON and not INTERPRETED and k % 8 == 0
    if rows <= 16 and -(-n // 64) > NUM_SMS:
        return replace(_FEW_ROWS[16], num_stages=4)  # two programs on a multiprocessor
    for most, config in _FEW_ROWS.items():
        if rows <= most and not (rows > 32 and uses_bulk_copies):
            return config
    parts = num_parts(n, k)
    if not uses_bulk_copies:
        tile_rows = 128 if rows <= 128 or parts > 1 else 256  # parts' sums take registers, too
        apart = -(-n // 128) * -(-rows // tile_rows) < NUM_SMS
        return ProductConfig(
            128, tile_rows, 64, num_warps=8, num_stages=3 if tile_rows == 128 else 4, parts_apart=apart
        )
    if rows > 1024:  # for so many tiles, how often they come out of the L2 cache counts
        tile, apart = _WIDE if max(n, k) > 8192 else _SQUARE, False
    else:
        choices = [(tile, apart) for tile in (_NARROW, _SQUARE, _TALL, _WIDE) for apart in (False, True)]
        tile, apart = min(choices, key=lambda choice: choice[0].cost_us(rows, n, k, parts if choice[1] else 1))
    num_stages = tile.num_stages + (gates and tile in (_TALL, _WIDE))
    return ProductConfig(tile.n, tile.rows, 64, 8, num_stages, apart, uses_bulk_copies=True)


@triton.jit
def _sum_part(x_ptr, w_ptr, w_rows, x_rows, w_exists, x_exists, first, last, K: tl.constexpr, TILE_N: tl.constexpr,
              TILE_ROWS: tl.constexpr, TILE_K: tl.constexpr, EVEN_N: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """[TILE_N, TILE_ROWS]: the products' sum over k from first to before last, in order."""
    cols = tl.arange(0, TILE_K)
    w_ptrs = w_ptr + w_rows[:, None].to(tl.int64) * K + cols[None, :]
    x_ptrs = x_ptr + x_rows[:, None].to(tl.int64) * K + cols[None, :]
    acc = tl.zeros([TILE_N, TILE_ROWS], tl.float32)
    for k in tl.range(first, last, TILE_K, num_stages=STAGES):
        # Rows past the last are masked, so they cost no traffic.
        if K % TILE_K == 0:
            x = tl.load(x_ptrs + k, mask=x_exists[:, None], other=0.0)
        else:
            x = tl.load(x_ptrs + k, mask=x_exists[:, None] & (k + cols < K)[None, :], other=0.0)
        if EVEN_N and K % TILE_K == 0:
            w = tl.load(w_ptrs + k)
        else:
            w = tl.load(w_ptrs + k, mask=w_exists[:, None] & (k + cols < K)[None, :], other=0.0)
        acc = tl.dot(w, tl.trans(x), acc)
    return acc


@triton.jit
def _store(out_ptr, bias_ptr, sums, n, w_rows, rows, num_rows):
    """sums: [rows, w_rows]; out_ptr: where the tile's first row begins, and `rows` count from there: small offsets take
    half the registers."""
    w_exists = w_rows < n
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + w_rows, mask=w_exists, other=0.0).to(tl.float32)[None, :]
    mask = (rows < num_rows)[:, None] & w_exists[None, :]
    tl.store(out_ptr + rows[:, None] * n + w_rows[None, :], sums.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _finish(out_ptr, bias_ptr, to, sums, tile, n, w_rows, w_exists, rows, num_rows, MODE: tl.constexpr,
            TILE_N: tl.constexpr, ROWS: tl.constexpr, SILU: tl.constexpr, HEADS: tl.constexpr,
            KV_HEADS: tl.constexpr, HALF_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr):  # fmt: skip
    """sums: [w_rows, rows] of a tile of two strips, see epilogue.py. `rows` are all of x's that the tile has."""
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + w_rows, mask=w_exists, other=0.0).to(tl.float32)[:, None]
    sums = sums.to(out_ptr.dtype.element_ty).to(tl.float32)
    epilogue.both_strips(out_ptr, to, sums, tile, rows, n, num_rows, MODE, TILE_N, ROWS, SILU, HEADS, KV_HEADS,
                         HALF_DIM, BLOCK_SIZE)  # fmt: skip


@triton.jit
def _add_parts(partial_ptr, out_ptr, bias_ptr, to, tile, n, w_rows, w_exists, first_row, num_rows, MODE: tl.constexpr,
               TILE_N: tl.constexpr, TILE_ROWS: tl.constexpr, PARTS: tl.constexpr, STRIP: tl.constexpr,
               SILU: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF_DIM: tl.constexpr,
               BLOCK_SIZE: tl.constexpr):  # fmt: skip
    """A tile's parts, a strip of rows at a time, so that they need few registers."""
    for first in range(0, TILE_ROWS, STRIP):
        rows = first + tl.arange(0, STRIP)
        if first_row + first < num_rows:
            places = rows[:, None] * TILE_N + tl.arange(0, TILE_N)[None, :]
            sums = tl.zeros([STRIP, TILE_N], tl.float32)
            for part in tl.static_range(PARTS):
                # Bypasses L1: other multiprocessors wrote it in this launch.
                sums += tl.load(partial_ptr + part * (TILE_N * TILE_ROWS) + places, cache_modifier=".cg")
            if MODE == STORE:
                out = out_ptr + first_row.to(tl.int64) * n
                _store(out, bias_ptr, sums, n, w_rows, rows, num_rows - first_row)
            else:
                _finish(out_ptr, bias_ptr, to, tl.trans(sums), tile, n, w_rows, w_exists, first_row + rows, num_rows,
                        MODE, TILE_N, STRIP, SILU, HEADS, KV_HEADS, HALF_DIM, BLOCK_SIZE)  # fmt: skip


@triton.jit(do_not_specialize=["n", "num_rows"])
def product_kernel(x_ptr, w_ptr, bias_ptr, out_ptr, to, partial_ptr, arrivals_ptr, n, num_rows, K: tl.constexpr,
                   TILE_N: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_K: tl.constexpr, PARTS: tl.constexpr,
                   PART_K: tl.constexpr, APART: tl.constexpr, EVEN_N: tl.constexpr, STAGES: tl.constexpr,
                   GROUP: tl.constexpr, MODE: tl.constexpr, SILU: tl.constexpr, HEADS: tl.constexpr,
                   KV_HEADS: tl.constexpr, HALF_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr):  # fmt: skip
    """MODE: what is done with the sums, and `to` with what: see epilogue.py."""
    tile = tl.program_id(0)
    # Neighbours share rows of w and of x, which then come out of the L2 cache: GROUP tiles of w with all rows of x.
    row_tiles = (num_rows + TILE_ROWS - 1) // TILE_ROWS
    n_tiles = (n + TILE_N - 1) // TILE_N
    group = tile // (GROUP * row_tiles)
    size = tl.minimum(n_tiles - group * GROUP, GROUP)
    within = tile % (GROUP * row_tiles)
    n_tile = group * GROUP + within % size
    w_rows, w_exists = epilogue.tile_rows_of(n_tile, n, MODE, TILE_N, HALF_DIM)
    first_row = within // size * TILE_ROWS
    x_rows = first_row + tl.arange(0, TILE_ROWS)
    x_exists = x_rows < num_rows
    if APART:
        part = tl.program_id(1)
        acc = _sum_part(x_ptr, w_ptr, w_rows, x_rows, w_exists, x_exists, part * PART_K,
                        tl.minimum((part + 1) * PART_K, K), K, TILE_N, TILE_ROWS, TILE_K, EVEN_N, STAGES)  # fmt: skip
        partial_ptr += tile.to(tl.int64) * (PARTS * TILE_N * TILE_ROWS)
        places = tl.arange(0, TILE_ROWS)[None, :] * TILE_N + tl.arange(0, TILE_N)[:, None]
        tl.store(partial_ptr + part * (TILE_N * TILE_ROWS) + places, acc, mask=x_exists[None, :])
        tl.debug_barrier()  # every thread's share is stored before one thread announces it
        if tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") == PARTS - 1:
            tl.store(arrivals_ptr + tile, 0)  # ready for the next launch
            STRIP: tl.constexpr = 16 if TILE_ROWS > 16 else TILE_ROWS
            _add_parts(partial_ptr, out_ptr, bias_ptr, to, n_tile, n, w_rows, w_exists, first_row, num_rows, MODE,
                       TILE_N, TILE_ROWS, PARTS, STRIP, SILU, HEADS, KV_HEADS, HALF_DIM, BLOCK_SIZE)  # fmt: skip
    else:
        acc = tl.zeros([TILE_N, TILE_ROWS], tl.float32)
        for part in range(PARTS):
            acc += _sum_part(x_ptr, w_ptr, w_rows, x_rows, w_exists, x_exists, part * PART_K,
                             tl.minimum((part + 1) * PART_K, K), K, TILE_N, TILE_ROWS, TILE_K, EVEN_N,
                             STAGES)  # fmt: skip
        if MODE == STORE:
            out_ptr += first_row.to(tl.int64) * n
            _store(out_ptr, bias_ptr, tl.trans(acc), n, w_rows, tl.arange(0, TILE_ROWS), num_rows - first_row)
        else:
            _finish(out_ptr, bias_ptr, to, acc, n_tile, n, w_rows, w_exists, x_rows, num_rows, MODE, TILE_N, TILE_ROWS,
                    SILU, HEADS, KV_HEADS, HALF_DIM, BLOCK_SIZE)  # fmt: skip


def invariant_product(
    x: Tensor,  # [rows, k], contiguous
    weight: Tensor,  # [n, k], contiguous
    bias: Tensor | None,
    scratch: SkinnyScratch,
    *,
    out: Tensor | None = None,  # [rows, n], contiguous, of any float type
    config: ProductConfig | None = None,
) -> Tensor:
    """x @ weight.T + bias -> [rows, n], summed in float32."""
    if out is None:
        out = torch.empty((len(x), len(weight)), dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, out, None, config, scratch, mode=STORE.value)
    return out


def invariant_act(
    x: Tensor,
    weight: Tensor,  # [2 * n, k]
    bias: Tensor | None,
    activation: str,
    scratch: SkinnyScratch,
    *,
    config: ProductConfig | None = None,
) -> Tensor:
    """activation(first half of x @ weight.T + bias) * second half -> [rows, n], bitwise as act_mul of the product."""
    assert activation in ACTIVATIONS, activation
    out = torch.empty((len(x), len(weight) // 2), dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, out, None, config, scratch, mode=GATE.value, silu=activation == "silu")
    return out


def invariant_rope_write(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rotary: Rotary,
    kv: Tensor,
    batch: AttentionBatch,
    spec: AttentionSpec,
    scratch: SkinnyScratch,
    *,
    config: ProductConfig | None = None,
) -> Tensor:
    """See LinearWeight.multiply_rope_write; bitwise as rope_and_write of the product."""
    out = torch.empty((len(x), spec.num_heads * spec.head_dim), dtype=x.dtype, device=x.device)
    to = Rope.of(rotary, kv, batch, spec)
    _launch(x, weight, bias, out, to, config, scratch, mode=ROPE.value, spec=spec, block_size=kv.shape[3])
    return out


def can_rope(rows: int, n: int, k: int, rotary: Rotary, spec: AttentionSpec) -> bool:
    """Whether invariant_rope_write takes such rows: norms need whole heads, and a tile's strips lie within half a one.
    The copy engine's kernel has no rotation."""
    config = product_config(rows, n, k)
    has_norms = rotary.q_norm is not None or rotary.k_norm is not None
    return not (has_norms or config.uses_bulk_copies) and spec.head_dim % config.tile_n == 0


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    to: Rope | None,
    config: ProductConfig | None,
    scratch: SkinnyScratch,
    *,
    mode: int,
    silu: bool = False,
    spec: AttentionSpec | None = None,
    block_size: int = 0,
) -> None:
    assert x.is_contiguous() and weight.is_contiguous() and x.dtype == weight.dtype
    (rows, k), n = x.shape, len(weight)
    if not rows:
        return
    config = config or product_config(rows, n, k, gates=mode == GATE.value)
    assert _PART_UNIT % config.tile_k == 0
    parts = num_parts(n, k)
    part_k = -(-k // parts // _PART_UNIT) * _PART_UNIT
    if config.uses_bulk_copies:
        from quire.kernels.triton.invariant_hopper import product_hopper

        assert mode != ROPE.value
        product_hopper(
            x, weight, bias, out, scratch.arrivals, parts=parts, part_k=part_k, tile_n=config.tile_n,
            tile_rows=config.tile_rows, num_stages=config.num_stages, parts_apart=config.parts_apart,
            gates=mode == GATE.value, silu=silu,
        )  # fmt: skip
        return
    tiles = -(-n // config.tile_n) * -(-rows // config.tile_rows)
    apart = parts > 1 and config.parts_apart
    num_partial = tiles * parts * config.tile_n * config.tile_rows if apart else 0
    partial = torch.empty(num_partial, dtype=torch.float32, device=x.device) if apart else None
    assert not apart or tiles <= scratch.arrivals.numel()
    product_kernel[(tiles, parts if apart else 1)](
        x, weight, bias, out, to, partial, scratch.arrivals, n, rows, K=k, TILE_N=config.tile_n,
        TILE_ROWS=config.tile_rows, TILE_K=config.tile_k, PARTS=parts, PART_K=part_k, APART=apart,
        EVEN_N=n % config.tile_n == 0, STAGES=config.num_stages, GROUP=8, MODE=mode, SILU=silu,
        HEADS=spec.num_heads if spec is not None else 0, KV_HEADS=spec.num_kv_heads if spec is not None else 0,
        HALF_DIM=spec.head_dim // 2 if spec is not None else 1, BLOCK_SIZE=block_size, num_warps=config.num_warps,
    )  # fmt: skip
