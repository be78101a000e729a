# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""x @ w.T for any number of rows, in which a row's result does not depend on the other rows.

A result is summed over k in an order that the matrix's shape alone decides. Within a part of k, tensor cores add 16
products at a time in order, whatever the tile; the parts are added in order, too. Few rows give one part to a program,
so that a small matrix fills the chip, and the program that finishes last adds the parts up; where there are many, one
program does all parts of its tile. How many rows and columns a tile has, and how much of k is fetched at once, is free.

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

from quire.kernels.triton.common import HAS_GLUON, INTERPRETED
from quire.kernels.triton.configs import NUM_SMS
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
_WIDE = _Tile(256, 128, 3, us=2.5, step_us=0.655, parts_us=20.0)


@cache
def product_config(rows: int, n: int, k: int) -> ProductConfig:
    """What is fastest on an H200, by what was measured there for the matrices of Llama-3.1-8B."""
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
        choices = [(tile, apart) for tile in (_NARROW, _SQUARE, _WIDE) for apart in (False, True)]
        tile, apart = min(choices, key=lambda choice: choice[0].cost_us(rows, n, k, parts if choice[1] else 1))
    return ProductConfig(tile.n, tile.rows, 64, 8, tile.num_stages, apart, uses_bulk_copies=True)


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
def _add_parts(partial_ptr, out_ptr, bias_ptr, n, w_rows, num_rows, TILE_N: tl.constexpr, TILE_ROWS: tl.constexpr,
               PARTS: tl.constexpr, STRIP: tl.constexpr):  # fmt: skip
    """A tile's parts, a strip of rows at a time, so that they need few registers."""
    for first in range(0, TILE_ROWS, STRIP):
        rows = first + tl.arange(0, STRIP)
        if first < num_rows:
            places = rows[:, None] * TILE_N + tl.arange(0, TILE_N)[None, :]
            sums = tl.zeros([STRIP, TILE_N], tl.float32)
            for part in tl.static_range(PARTS):
                # Bypasses L1: other multiprocessors wrote it in this launch.
                sums += tl.load(partial_ptr + part * (TILE_N * TILE_ROWS) + places, cache_modifier=".cg")
            _store(out_ptr, bias_ptr, sums, n, w_rows, rows, num_rows)


@triton.jit(do_not_specialize=["n", "num_rows"])
def product_kernel(x_ptr, w_ptr, bias_ptr, out_ptr, partial_ptr, arrivals_ptr, n, num_rows, K: tl.constexpr,
                   TILE_N: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_K: tl.constexpr, PARTS: tl.constexpr,
                   PART_K: tl.constexpr, APART: tl.constexpr, EVEN_N: tl.constexpr, STAGES: tl.constexpr,
                   GROUP: tl.constexpr):  # fmt: skip
    tile = tl.program_id(0)
    # Neighbours share rows of w and of x, which then come out of the L2 cache: GROUP tiles of w with all rows of x.
    row_tiles = (num_rows + TILE_ROWS - 1) // TILE_ROWS
    n_tiles = (n + TILE_N - 1) // TILE_N
    group = tile // (GROUP * row_tiles)
    size = tl.minimum(n_tiles - group * GROUP, GROUP)
    within = tile % (GROUP * row_tiles)
    w_rows = (group * GROUP + within % size) * TILE_N + tl.arange(0, TILE_N)
    first_row = within // size * TILE_ROWS
    x_rows = first_row + tl.arange(0, TILE_ROWS)
    w_exists = w_rows < n
    x_exists = x_rows < num_rows
    out_ptr += first_row.to(tl.int64) * n
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
            _add_parts(partial_ptr, out_ptr, bias_ptr, n, w_rows, num_rows - first_row, TILE_N, TILE_ROWS, PARTS,
                       STRIP)  # fmt: skip
    else:
        acc = tl.zeros([TILE_N, TILE_ROWS], tl.float32)
        for part in range(PARTS):
            acc += _sum_part(x_ptr, w_ptr, w_rows, x_rows, w_exists, x_exists, part * PART_K,
                             tl.minimum((part + 1) * PART_K, K), K, TILE_N, TILE_ROWS, TILE_K, EVEN_N,
                             STAGES)  # fmt: skip
        _store(out_ptr, bias_ptr, tl.trans(acc), n, w_rows, tl.arange(0, TILE_ROWS), num_rows - first_row)


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
    assert x.is_contiguous() and weight.is_contiguous() and x.dtype == weight.dtype
    rows, k = x.shape
    n = weight.shape[0]
    if out is None:
        out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    config = config or product_config(rows, n, k)
    assert _PART_UNIT % config.tile_k == 0
    parts = num_parts(n, k)
    part_k = -(-k // parts // _PART_UNIT) * _PART_UNIT
    if config.uses_bulk_copies:
        from quire.kernels.triton.invariant_hopper import product_hopper

        product_hopper(
            x, weight, bias, out, scratch.arrivals, parts=parts, part_k=part_k, tile_n=config.tile_n,
            tile_rows=config.tile_rows, num_stages=config.num_stages, parts_apart=config.parts_apart,
        )  # fmt: skip
        return out
    tiles = -(-n // config.tile_n) * -(-rows // config.tile_rows)
    apart = parts > 1 and config.parts_apart
    num_partial = tiles * parts * config.tile_n * config.tile_rows if apart else 0
    partial = torch.empty(num_partial, dtype=torch.float32, device=x.device) if apart else None
    assert not apart or tiles <= scratch.arrivals.numel()
    product_kernel[(tiles, parts if apart else 1)](
        x, weight, bias, out, partial, scratch.arrivals, n, rows, K=k, TILE_N=config.tile_n,
        TILE_ROWS=config.tile_rows, TILE_K=config.tile_k, PARTS=parts, PART_K=part_k, APART=apart,
        EVEN_N=n % config.tile_n == 0, STAGES=config.num_stages, GROUP=8, num_warps=config.num_warps,
    )  # fmt: skip
    return out
