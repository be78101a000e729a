# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Which experts each token has, and which tokens each expert: one launch, and nobody on the host looks at the answer.

A tile's product with the router is divided along its inputs among programs; the one that finishes last adds up the
parts in a fixed order and chooses. Each choice takes the next place in its expert's list by an atomic addition. The
order within a list is therefore arbitrary, and shows nowhere: a row's products do not depend on its place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.interface import Unscaled
from quire.kernels.triton import epilogue
from quire.kernels.triton.common import next_power_of_2
from quire.kernels.triton.epilogue import Scale

_MANY_TOKENS = 1024  # more fill the chip without dividing the router, and tiles are taller, so that it is read less


@triton.jit(do_not_specialize=["num_tokens"])
def route_kernel(x_ptr, router_ptr, bias_ptr, scale, chosen_ptr, weights_ptr, factors_ptr, members_ptr, counts_ptr,
                 partial_ptr, arrivals_ptr, num_tokens, K: tl.constexpr, EXPERTS: tl.constexpr,
                 EXPERTS_PAD: tl.constexpr, TOP_K: tl.constexpr, TOP_K_PAD: tl.constexpr, NORMALIZES: tl.constexpr,
                 TILE_M: tl.constexpr, TILE_K: tl.constexpr, SPLIT_K: tl.constexpr, STAGES: tl.constexpr,
                 PARTS: tl.constexpr, PARTS_PAD: tl.constexpr):  # fmt: skip
    """PARTS: of the sums of squares that are known; 0 where each program is to add up its part of the row."""
    SQUARES: tl.constexpr = scale is not None and PARTS == 0
    tile = tl.program_id(0)
    part = tl.program_id(1)
    m = tile * TILE_M + tl.arange(0, TILE_M)
    exists = m < num_tokens
    experts = tl.arange(0, EXPERTS_PAD)
    cols = tl.arange(0, TILE_K)
    STEPS: tl.constexpr = (K + TILE_K - 1) // TILE_K
    first = part * STEPS // SPLIT_K
    last = (part + 1) * STEPS // SPLIT_K
    acc = tl.zeros([TILE_M, EXPERTS_PAD], tl.float32)
    squares = tl.zeros([TILE_M], tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        k = step * TILE_K + cols
        x = tl.load(
            x_ptr + m[:, None].to(tl.int64) * K + k[None, :], mask=exists[:, None] & (k < K)[None, :], other=0.0
        )
        w_mask = (experts < EXPERTS)[None, :] & (k < K)[:, None]
        w = tl.load(router_ptr + experts[None, :] * K + k[:, None], mask=w_mask, other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
        if SQUARES:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
    offsets = m[:, None] * EXPERTS_PAD + experts[None, :]
    part_size = num_tokens * EXPERTS_PAD
    tl.store(partial_ptr + part * part_size + offsets, acc, mask=exists[:, None])
    if SQUARES:
        tl.store(scale.square_sums + part * num_tokens + m, squares, mask=exists)
    tl.debug_barrier()  # every thread's part is stored before one thread announces it
    if tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") == SPLIT_K - 1:
        tl.store(arrivals_ptr + tile, 0)  # ready for the next launch
        logits = tl.zeros([TILE_M, EXPERTS_PAD], tl.float32)
        for other in tl.static_range(SPLIT_K):
            # Bypasses L1: other multiprocessors wrote it in this launch.
            other_part = partial_ptr + other * part_size + offsets
            logits += tl.load(other_part, mask=exists[:, None], other=0.0, cache_modifier=".cg")
        if scale is not None:
            if SQUARES:
                squares = tl.zeros([TILE_M], tl.float32)
                for other in tl.static_range(SPLIT_K):
                    other_squares = scale.square_sums + other * num_tokens + m
                    squares += tl.load(other_squares, mask=exists, other=0.0, cache_modifier=".cg")
            else:
                squares = tl.sum(epilogue.load_square_sums(scale, m, num_tokens, PARTS, PARTS_PAD), axis=0)
            factors = tl.rsqrt(squares / K + scale.eps)
            logits = logits * factors[:, None]
            tl.store(factors_ptr + m, factors, mask=exists)
        if bias_ptr is not None:
            logits += tl.load(bias_ptr + experts, mask=experts < EXPERTS, other=0.0).to(tl.float32)[None, :]
        logits = logits.to(x_ptr.dtype.element_ty).to(tl.float32)  # as a product of its own would leave them
        # What is not a number loses against everything, but is not chosen twice: no list gets more than all tokens.
        logits = tl.where(logits > -1e30, logits, -1e30)
        left = tl.where((experts < EXPERTS)[None, :], logits, float("-inf"))
        top = tl.max(left, axis=1)
        total = tl.sum(tl.exp(left - top[:, None]), axis=1)
        slots = tl.arange(0, TOP_K_PAD)
        chosen = tl.zeros([TILE_M, TOP_K_PAD], tl.int32)
        weights = tl.zeros([TILE_M, TOP_K_PAD], tl.float32)
        for i in range(TOP_K):  # a loop: eight copies of it are more code than instruction caches like
            best, index = tl.max(left, axis=1, return_indices=True)
            chosen = tl.where(slots[None, :] == i, index[:, None], chosen)
            weights = tl.where(slots[None, :] == i, tl.exp(best - top)[:, None], weights)
            left = tl.where(experts[None, :] == index[:, None], float("-inf"), left)
        if NORMALIZES:
            total = tl.sum(weights, axis=1)
        weights = weights / total[:, None]
        picks = m[:, None] * TOP_K + slots[None, :]
        mask = exists[:, None] & (slots < TOP_K)[None, :]
        tl.store(weights_ptr + picks, weights.to(weights_ptr.dtype.element_ty), mask=mask)
        if counts_ptr is None:
            tl.store(chosen_ptr + picks, chosen, mask=mask)
        else:
            place = tl.atomic_add(counts_ptr + chosen, 1, mask=mask, sem="relaxed")
            tl.store(members_ptr + chosen * num_tokens + place, picks, mask=mask)


@dataclass(slots=True)
class RoutingScratch:
    """Zero between layers. Layers that share it must share a stream."""

    arrivals: Tensor  # [tiles] int32
    counts: Tensor  # [experts] int32: how many tokens each expert has

    @staticmethod
    def allocate(max_tiles: int, num_experts: int, device: torch.device) -> RoutingScratch:
        arrivals, counts = (torch.zeros(size, dtype=torch.int32, device=device) for size in (max_tiles, num_experts))
        return RoutingScratch(arrivals, counts)


@dataclass(slots=True, frozen=True)
class Routing:
    """A step's picks: token t's i-th expert is pick t * top_k + i."""

    weights: Tensor  # [picks], in the activations' dtype
    factors: Tensor | None  # [tokens] float32: what x is still to be multiplied by
    chosen: Tensor | None  # [picks] int32: each pick's expert; or, where tokens are grouped,
    members: Tensor | None  # [experts, tokens] int32: each expert's picks, in any order, `scratch.counts` of them


def route_tiles(tokens: int, is_wide: bool) -> tuple[int, int, int]:
    """Tokens of a tile, parts of its product, and warps of a program."""
    return (16, 8, 4) if tokens <= _MANY_TOKENS else (16 if is_wide else 32, 1, 4)


class Router:
    """Allocates before it launches, so that what runs out of memory leaves the scratch as it was."""

    __slots__ = ("_args", "_constants", "_grid", "routing")

    def __init__(
        self,
        x: Tensor | Unscaled,  # [tokens, k], contiguous
        router: Tensor,  # [experts, k], contiguous
        scratch: RoutingScratch,
        *,
        bias: Tensor | None = None,  # [experts]
        top_k: int,
        normalizes: bool,
        is_grouped: bool,
    ) -> None:
        unscaled, x = (x, x.x) if isinstance(x, Unscaled) else (None, x)
        tokens, k = x.shape
        experts = router.shape[0]
        picks = tokens * top_k
        experts_pad = max(16, next_power_of_2(experts))
        chosen = members = None
        if is_grouped:
            members = torch.empty((experts, tokens), dtype=torch.int32, device=x.device)
        else:
            chosen = torch.empty(picks, dtype=torch.int32, device=x.device)
        weights = torch.empty(picks, dtype=x.dtype, device=x.device)
        is_wide = x.element_size() == 4 or experts_pad > 256
        tile_m, split_k, num_warps = route_tiles(tokens, is_wide)
        scale, parts, factors = None, 0, None
        if unscaled is not None:
            factors = torch.empty(tokens, dtype=torch.float32, device=x.device)
            square_sums = unscaled.square_sums
            if square_sums is None:
                square_sums = torch.empty((split_k, tokens), dtype=torch.float32, device=x.device)
            else:
                parts = square_sums.shape[0]
            scale = Scale(square_sums, unscaled.eps)
        self.routing = Routing(weights, factors, chosen, members)
        tiles = -(-tokens // tile_m)
        assert tiles <= scratch.arrivals.numel()
        partial = torch.empty(split_k * tokens * experts_pad, dtype=torch.float32, device=x.device)
        self._grid = (tiles, split_k)
        self._args = (
            x, router, bias, scale, chosen, weights, factors, members, scratch.counts if is_grouped else None, partial,
            scratch.arrivals, tokens,
        )  # fmt: skip
        self._constants = {
            "K": k,
            "EXPERTS": experts,
            "EXPERTS_PAD": experts_pad,
            "TOP_K": top_k,
            "TOP_K_PAD": next_power_of_2(top_k),
            "NORMALIZES": normalizes,
            "TILE_M": tile_m,
            "TILE_K": 32 if is_wide else 128,
            "SPLIT_K": split_k,
            "STAGES": 3,
            "PARTS": parts,
            "PARTS_PAD": next_power_of_2(parts),
            "num_warps": num_warps,
        }

    def launch(self) -> None:
        route_kernel[self._grid](*self._args, **self._constants)
