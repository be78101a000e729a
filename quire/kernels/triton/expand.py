# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""What a kernel that takes a product of one token adds to it first, where that token has an adapter: adapters.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.adapters import RANK_UNIT

UNIT = tl.constexpr(RANK_UNIT)


class Expand(NamedTuple):
    """B s is to be added to a product."""

    shrunk: Tensor  # s: [parts * max_rank] float32
    b: Tensor
    tiles: Tensor  # [3, 1], of AdapterRows
    ranks: Tensor
    slot_values: int
    max_rank: int


class ExpandPointers(NamedTuple):
    """Those of its members that are no constants."""

    shrunk: Tensor
    b: Tensor
    tiles: Tensor
    ranks: Tensor
    slot_values: int


def expand_arguments(expand: Expand | None) -> dict[str, Any]:
    """For kernels that call `expand_one`."""
    if expand is None:
        return {"expand": None, "MAX_RANK": 0}
    return {"expand": ExpandPointers(*expand[:5]), "MAX_RANK": expand.max_rank}


@triton.jit
def load_tile(tiles_ptr, tile, num_tiles):
    """-> first and last place in the order, and the adapter's slot."""
    start = tl.load(tiles_ptr + tile)
    end = tl.load(tiles_ptr + num_tiles + tile)
    slot = tl.load(tiles_ptr + 2 * num_tiles + tile)
    return start, end, slot.to(tl.int64)


@triton.jit
def expand_one(expand, part, cols, mask, N: tl.constexpr, MAX_RANK: tl.constexpr):
    """B s at these columns. part: that each of them belongs to, or all of them."""
    start, end, slot = load_tile(expand.tiles, 0, 1)
    b_ptr = expand.b + slot * expand.slot_values + cols
    s_ptr = expand.shrunk + part * MAX_RANK
    acc = tl.zeros_like(cols).to(tl.float32)
    if MAX_RANK == UNIT:
        # Rows of B past an adapter's rank are zero. To look the rank up would cost more than they do: a load that the
        # others wait for.
        for i in tl.static_range(UNIT):
            b = tl.load(b_ptr + i * N, mask=mask & (start < end), other=0.0)
            acc += tl.load(s_ptr + i) * b.to(tl.float32)
    else:
        rank = tl.where(start < end, tl.load(expand.ranks + slot), 0)
        for first in tl.range(0, rank, UNIT):
            for i in tl.static_range(UNIT):
                b = tl.load(b_ptr + (first + i) * N, mask=mask, other=0.0)
                acc += tl.load(s_ptr + first + i) * b.to(tl.float32)
    return acc
