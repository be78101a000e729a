# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""What an adapter adds to one token's product, in the launch of the product itself: see vector_kernel in skinny.py.

Launches of their own would cost as much as the products. So the product's first programs shrink (A x) and say when they
are done; every other one multiplies its rows of W, which takes as long, waits for what is left, and adds B s before it
goes on with what follows the product.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.adapters import RANK_UNIT

UNIT = tl.constexpr(RANK_UNIT)


class OneAdapter(NamedTuple):
    """The adapter of a step's one token, whichever it is: which slot has it is looked up on the device."""

    a: Tensor  # where A of slot 0 begins
    b: Tensor
    shrunk: Tensor  # [parts * max_rank] float32: A x
    tiles: Tensor  # [3, 1], of AdapterRows
    ranks: Tensor  # of all slots
    slot_values: int  # from one slot to the next
    arrivals: Tensor  # two counters of programs that have shrunk: this launch's, and the one of the launches beside it
    turn: int  # which of the two is this launch's


class OneAdapterShape(NamedTuple):
    """What of it is the same for every step."""

    width: int  # of `shrunk`
    max_rank: int
    part_rows: tuple[int, int]  # rows of the matrix's first two parts; a third has the others


@triton.jit
def load_tile(tiles_ptr, tile, num_tiles):
    """-> first and last place in the order, and the adapter's slot."""
    start = tl.load(tiles_ptr + tile)
    end = tl.load(tiles_ptr + num_tiles + tile)
    slot = tl.load(tiles_ptr + 2 * num_tiles + tile)
    return start, end, slot.to(tl.int64)


@triton.jit
def is_shrunk(low, first_row, MAX_RANK: tl.constexpr):
    """Whether these rows of A are needed. Where ranks fill one unit at most all are: to look the rank up would cost
    more than rows of zeros do."""
    if MAX_RANK > UNIT:
        _, _, slot = load_tile(low.tiles, 0, 1)
        needed = first_row % MAX_RANK < (tl.load(low.ranks + slot) + UNIT - 1) // UNIT * UNIT
    else:
        needed = first_row >= 0
    return needed


@triton.jit
def announce_shrunk(low):
    """Launches take turns with two counters: the first program puts the next launch's back to zero, which nobody reads
    any more. A counter that every program counted down would cost more than what it waits for."""
    if tl.program_id(0) == 0:
        tl.store(low.arrivals + 1 - low.turn, 0)
    tl.debug_barrier()  # every thread's share is stored before one announces it
    tl.atomic_add(low.arrivals + low.turn, 1, sem="release")


@triton.jit
def expanded(low, rows, exists, n, SHRINKING: tl.constexpr, MAX_RANK: tl.constexpr, N0: tl.constexpr,
             N1: tl.constexpr):  # fmt: skip
    """B s at these rows of the matrix."""
    start, end, slot = load_tile(low.tiles, 0, 1)
    part = (rows >= N0).to(tl.int32) + (rows >= N0 + N1).to(tl.int32)
    units = tl.arange(0, UNIT)
    mask = exists & (start < end)
    b_ptrs = low.b + slot * low.slot_values + units[:, None] * n + rows[None, :]
    s_ptrs = low.shrunk + part[None, :] * MAX_RANK + units[:, None]
    b = tl.load(b_ptrs, mask=mask[None, :], other=0.0).to(tl.float32)  # on its way while the others are waited for
    while tl.load(low.arrivals + low.turn, volatile=True) < SHRINKING:
        pass
    # Loads bypass L1: other multiprocessors wrote this in the same launch.
    total = tl.sum(tl.load(s_ptrs, mask=mask[None, :], other=0.0, cache_modifier=".cg") * b, axis=0)
    if MAX_RANK > UNIT:
        for first in tl.range(UNIT, tl.load(low.ranks + slot), UNIT):
            b = tl.load(b_ptrs + first * n, mask=mask[None, :], other=0.0).to(tl.float32)
            total += tl.sum(tl.load(s_ptrs + first, mask=mask[None, :], other=0.0, cache_modifier=".cg") * b, axis=0)
    return total
