# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""What adapters add to a product: x is shrunk to an adapter's rank (A x), and expanded again (B s), in two launches.

A program takes a tile of tokens that have one adapter, and looks up on the device which one: a captured step serves any
adapters, and ranks below the largest cost less. How long a slot is, is no constant of the kernels: it depends on how
many layers there are, and kernels are compiled beforehand for fewer. The sums over a long row of x are divided among
programs; whoever expands adds the parts up, in a fixed order.

One token alone is another matter: each launch costs as much as its product. There the launch that multiplies W also
shrinks and expands: see one_adapter.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.adapters import RANK_UNIT, AdaptedLinear, LowRank
from quire.kernels.interface import AdapterRows, AttentionBatch, AttentionSpec, Norm, Normed, Rotary, Unscaled
from quire.kernels.triton.activation import act_mul
from quire.kernels.triton.configs import MAX_SKINNY_ROWS, SkinnyConfig
from quire.kernels.triton.linear import TritonLinear
from quire.kernels.triton.one_adapter import UNIT, OneAdapter, OneAdapterShape, load_tile
from quire.kernels.triton.rope import rope_and_write
from quire.kernels.triton.skinny import can_rope, skinny_act, skinny_linear, skinny_rope_write

_TILE_K = 128
_SPLIT = 8
_FEW_TOKENS = 1024


@triton.jit(do_not_specialize=["num_tokens"])
def shrink_kernel(x_ptr, a_ptr, shrunk_ptr, order_ptr, tiles_ptr, ranks_ptr, slot_values, num_tokens,
                  K: tl.constexpr, WIDTH: tl.constexpr, MAX_RANK: tl.constexpr, TILE: tl.constexpr,
                  TILE_K: tl.constexpr, SPLIT: tl.constexpr):  # fmt: skip
    """shrunk[part, place] is a part of the sum that A x is, of the token at this place of the order."""
    start, end, slot = load_tile(tiles_ptr, tl.program_id(0), tl.num_programs(0))
    first_row = tl.program_id(1) * UNIT  # of A
    if (start < end) & (first_row % MAX_RANK < tl.load(ranks_ptr + slot)):
        place = start + tl.arange(0, TILE)
        token = tl.load(order_ptr + place, mask=place < end, other=0).to(tl.int64)
        row = first_row + tl.arange(0, UNIT)
        STEPS: tl.constexpr = (K + TILE_K - 1) // TILE_K
        part = tl.program_id(2)
        acc = tl.zeros([TILE, UNIT], tl.float32)
        for step in tl.range(part * STEPS // SPLIT, (part + 1) * STEPS // SPLIT, num_stages=3):
            k = step * TILE_K + tl.arange(0, TILE_K)
            x = tl.load(x_ptr + token[:, None] * K + k[None, :], mask=(place < end)[:, None] & (k < K)[None, :],
                        other=0.0)  # fmt: skip
            a = tl.load(a_ptr + slot * slot_values + row[None, :] * K + k[:, None], mask=(k < K)[:, None], other=0.0)
            acc = tl.dot(x, a, acc, input_precision="ieee")
        out = shrunk_ptr + (part * num_tokens + place)[:, None] * WIDTH + row[None, :]
        tl.store(out, acc, mask=(place < end)[:, None])


@triton.jit(do_not_specialize=["num_tokens"])
def expand_kernel(out_ptr, shrunk_ptr, b_ptr, order_ptr, tiles_ptr, ranks_ptr, slot_values, num_tokens,
                  N: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, WIDTH: tl.constexpr, MAX_RANK: tl.constexpr,
                  TILE: tl.constexpr, TILE_N: tl.constexpr, SPLIT: tl.constexpr):  # fmt: skip
    """out += B s. N0 and N1: rows of the first two parts; a third has the others."""
    start, end, slot = load_tile(tiles_ptr, tl.program_id(0), tl.num_programs(0))
    rank = tl.load(ranks_ptr + slot)
    if (start < end) & (rank > 0):
        TILES0: tl.constexpr = (N0 + TILE_N - 1) // TILE_N
        TILES1: tl.constexpr = (N1 + TILE_N - 1) // TILE_N
        tile = tl.program_id(1)
        part = (tile >= TILES0).to(tl.int32) + (tile >= TILES0 + TILES1).to(tl.int32)
        first = tl.where(part == 0, 0, tl.where(part == 1, N0, N0 + N1))
        last = tl.where(part == 0, N0, tl.where(part == 1, N0 + N1, N))
        tile -= tl.where(part == 0, 0, tl.where(part == 1, TILES0, TILES0 + TILES1))
        col = first + tile * TILE_N + tl.arange(0, TILE_N)
        place = start + tl.arange(0, TILE)
        token = tl.load(order_ptr + place, mask=place < end, other=0).to(tl.int64)
        acc = tl.zeros([TILE, TILE_N], tl.float32)
        for first_rank in tl.range(0, rank, UNIT):
            r = first_rank + tl.arange(0, UNIT)
            s = tl.zeros([TILE, UNIT], tl.float32)
            source = shrunk_ptr + place[:, None] * WIDTH + (part * MAX_RANK + r)[None, :]
            for i in tl.static_range(SPLIT):
                s += tl.load(source + i * num_tokens * WIDTH, mask=(place < end)[:, None], other=0.0)
            b = tl.load(
                b_ptr + slot * slot_values + r[:, None] * N + col[None, :], mask=(col < last)[None, :], other=0.0
            )
            acc = tl.dot(s.to(b.dtype), b, acc, input_precision="ieee")
        out = out_ptr + token[:, None] * N + col[None, :]
        mask = (place < end)[:, None] & (col < last)[None, :]
        total = tl.load(out, mask=mask, other=0.0).to(tl.float32) + acc
        tl.store(out, total.to(out_ptr.dtype.element_ty), mask=mask)


def adapter_tile(num_tokens: int) -> int:
    """Tokens in a tile: few where every token may have another adapter, more where prompts are long."""
    return 16 if num_tokens <= _FEW_TOKENS else 64


def add_adapters(out: Tensor, x: Tensor, place: LowRank, rows: AdapterRows) -> None:
    """out: [tokens, out] += B (A x), for the tokens that have an adapter."""
    num_tokens, k = x.shape
    n, bank = out.shape[1], place.bank
    assert out.is_contiguous() and x.is_contiguous() and len(place.part_rows) <= 3
    num_tiles, width, tile = rows.tiles.shape[1], place.shrunk_width, adapter_tile(num_tokens)
    # Few tokens are cut along k, so that there are programs for every multiprocessor.
    split = min(_SPLIT, max(1, k // 256)) if num_tokens <= _FEW_TOKENS else 1
    shrunk = torch.empty((split, num_tokens, width), dtype=torch.float32, device=x.device)
    a, b, ranks = _pointers(place)
    constants = {"WIDTH": width, "MAX_RANK": bank.max_rank, "TILE": tile, "SPLIT": split}
    shrink_kernel[(num_tiles, width // RANK_UNIT, split)](
        x, a, shrunk, rows.order, rows.tiles, ranks, bank.slot_values, num_tokens, K=k, TILE_K=_TILE_K, num_warps=4,
        **constants,
    )  # fmt: skip
    tile_n = 128
    num_columns = sum(-(-count // tile_n) for count in place.part_rows)
    n0, n1 = (*place.part_rows, 0)[:2]
    expand_kernel[(num_tiles, num_columns)](
        out, shrunk, b, rows.order, rows.tiles, ranks, bank.slot_values, num_tokens, N=n, N0=n0, N1=n1, TILE_N=tile_n,
        num_warps=4, **constants,
    )  # fmt: skip


def _pointers(place: LowRank) -> tuple[Tensor, Tensor, Tensor]:
    """Where A and B of slot 0 begin, and the ranks of all slots."""
    values = place.bank.values[0]
    return values[place.a_start :], values[place.b_start :], place.bank.ranks[place.index]


class TritonAdaptedLinear(AdaptedLinear):
    """On a dense matrix. Steps with adapters run a layer's products one by one, each followed by what follows it; one
    token's adapter is added in the launch of the product."""

    __slots__ = ()

    base: TritonLinear

    def multiply(self, x: Normed) -> Tensor:
        one = self._one_adapter(x)
        return super().multiply(x) if one is None else self._multiply_one(x, one)

    def multiply_add_norm(
        self, x: Normed, residual: Tensor, norm: Norm | None, branch_norm: Norm | None = None
    ) -> Normed:
        if self.bank.rows is not None and branch_norm is None:
            assert isinstance(x, Tensor)
            if len(x) > MAX_SKINNY_ROWS and (norm is None or norm.is_folded):
                self.base._multiply_add_many(x, residual)
                self._add_adapters(residual, x)
                return residual if norm is None else Unscaled(residual, None, norm.eps)
        return super().multiply_add_norm(x, residual, norm, branch_norm)

    def multiply_act(self, x: Normed, activation: str) -> Normed:
        if self.bank.rows is not None:
            if isinstance(x, Unscaled):
                product = self.base._multiply_many(x.x, None)
                self._add_adapters(product, x.x)
                return act_mul(product, activation, factors_of=x, bias=self.base.bias)
            if (one := self._one_adapter(x)) is not None:
                base, (config, adapter) = self.base, one
                assert isinstance(x, Tensor)
                return skinny_act(
                    x, base.weight, base.bias, activation, config, base._scratch, weight_scales=base.scales,
                    adapter=adapter,
                )  # fmt: skip
        return super().multiply_act(x, activation)

    def multiply_rope_write(
        self, x: Normed, rotary: Rotary, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> Tensor:
        if self.bank.rows is not None:
            if isinstance(x, Unscaled):
                product = self.base._multiply_many(x.x, None)
                self._add_adapters(product, x.x)
                return rope_and_write(product, rotary, kv, batch, spec, factors_of=x, bias=self.base.bias)
            one = self._one_adapter(x)
            has_norms = rotary.q_norm is not None or rotary.k_norm is not None
            if one is not None and not has_norms and can_rope(spec, one[0]):
                base, (config, adapter) = self.base, one
                assert isinstance(x, Tensor)
                return skinny_rope_write(
                    x, base.weight, base.bias, rotary, kv, batch, spec, config, base._scratch,
                    weight_scales=base.scales, adapter=adapter,
                )  # fmt: skip
        return super().multiply_rope_write(x, rotary, kv, batch, spec)

    def _one_adapter(self, x: Normed) -> tuple[SkinnyConfig, tuple[OneAdapter, OneAdapterShape]] | None:
        """For one token, how it is multiplied and with what. None where there are more, or none has an adapter."""
        if self.bank.rows is None or not isinstance(x, Tensor):
            return None
        config = self.base._config(x)
        if config is None or config.use_tensor_cores:
            return None
        rows, place = self.bank.rows, self.low_rank
        assert place is not None
        width, bank = place.shrunk_width, place.bank
        shrunk = torch.empty(width, dtype=torch.float32, device=x.device)
        a, b, ranks = _pointers(place)
        n0, n1 = (*place.part_rows, 0)[:2]
        turns, turn = self.base._scratch.turns, bank.num_products % 2
        if not bank.num_products:
            turns.zero_()
        bank.num_products += 1
        adapter = OneAdapter(a, b, shrunk, rows.tiles, ranks, bank.slot_values, turns, turn)
        return config, (adapter, OneAdapterShape(width, bank.max_rank, (n0, n1)))

    def _multiply_one(self, x: Normed, one: tuple[SkinnyConfig, tuple[OneAdapter, OneAdapterShape]]) -> Tensor:
        base, (config, adapter) = self.base, one
        assert isinstance(x, Tensor)
        return skinny_linear(
            x, base.weight, base.bias, config, base._scratch, weight_scales=base.scales, adapter=adapter
        )

    def _add_adapters(self, product: Tensor, x: Tensor) -> None:
        rows, place = self.bank.rows, self.low_rank
        assert rows is not None and place is not None
        add_adapters(product, x, place, rows)

    def _copied(self, weight: Tensor) -> Tensor:
        return weight if weight.is_meta else super()._copied(weight)
