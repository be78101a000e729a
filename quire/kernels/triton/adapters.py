# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""What adapters add to a product: x is shrunk to an adapter's rank (A x), and expanded again (B s), in two launches.
In captured steps of few tokens the first runs beside the product itself, which needs the memory's time and not the
chip's; where an activation follows, that applies what the second would add.

A program takes a tile of tokens that have one adapter, and looks up on the device which one: a captured step serves any
adapters, and ranks below the largest cost less. How long a slot is, is no constant of the kernels: it depends on how
many layers there are, and kernels are compiled beforehand for fewer. The sums over a long row of x are divided among
programs; whoever expands adds the parts up, in a fixed order.

One token alone is another matter: each launch costs as much as its product. There the launch that multiplies W also
shrinks and expands: see one_adapter.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.adapters import RANK_UNIT, AdaptedLinear, LowRank
from quire.kernels.interface import AdapterRows, AttentionBatch, AttentionSpec, Norm, Normed, Rotary, Unscaled
from quire.kernels.triton.activation import ACTIVATIONS, gated
from quire.kernels.triton.configs import MAX_SKINNY_ROWS, SkinnyConfig
from quire.kernels.triton.linear import TritonLinear
from quire.kernels.triton.norm import row_factors
from quire.kernels.triton.one_adapter import UNIT, OneAdapter, OneAdapterShape, load_tile
from quire.kernels.triton.ops import TritonOps
from quire.kernels.triton.rope import rope_and_write
from quire.kernels.triton.skinny import can_rope, skinny_act, skinny_linear, skinny_rope_write

_TILE_K = 128
_TILE_N = 128
_SPLIT = 8
_SPLIT_K = 256  # what is left of a row of x is to be worth a program
_SPLIT_K_BESIDE = 1024  # the same where nobody waits for the programs: who expands has fewer parts to add up
_FEW_TOKENS = 1024
# Reading a matrix of so many numbers takes 2 us. A shorter product would not hide what another branch of a graph costs.
_MIN_BESIDE = 1 << 22


@triton.jit
def _rank(ranks_ptr, slot):
    return tl.load(ranks_ptr + slot, mask=slot >= 0, other=0)


@triton.jit
def _shrunk(ptrs, mask, part_size, SPLIT: tl.constexpr):
    """A x of some tokens, whose parts are added up in a fixed order."""
    s = tl.load(ptrs, mask=mask, other=0.0)
    for i in tl.static_range(1, SPLIT):
        s += tl.load(ptrs + i * part_size, mask=mask, other=0.0)
    return s


@triton.jit(do_not_specialize=["num_tokens"])
def shrink_kernel(x_ptr, a_ptr, shrunk_ptr, order_ptr, tiles_ptr, ranks_ptr, slot_values, num_tokens,
                  K: tl.constexpr, WIDTH: tl.constexpr, MAX_RANK: tl.constexpr, TILE: tl.constexpr,
                  TILE_K: tl.constexpr, SPLIT: tl.constexpr):  # fmt: skip
    """shrunk[part, place] is a part of the sum that A x is, of the token at this place of the order."""
    start, end, slot = load_tile(tiles_ptr, tl.program_id(0), tl.num_programs(0))
    first_row = tl.program_id(1) * UNIT  # of A
    if (start < end) & (first_row % MAX_RANK < _rank(ranks_ptr, slot)):
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
    rank = _rank(ranks_ptr, slot)
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
        exists = (place < end)[:, None]
        token = tl.load(order_ptr + place, mask=place < end, other=0).to(tl.int64)
        mask = exists & (col < last)[None, :]
        out = out_ptr + token[:, None] * N + col[None, :]
        acc = tl.load(out, mask=mask, other=0.0).to(tl.float32)
        for first_rank in tl.range(0, rank, UNIT):
            r = first_rank + tl.arange(0, UNIT)
            source = shrunk_ptr + place[:, None] * WIDTH + (part * MAX_RANK + r)[None, :]
            s = _shrunk(source, exists, num_tokens * WIDTH, SPLIT)
            b = tl.load(
                b_ptr + slot * slot_values + r[:, None] * N + col[None, :], mask=(col < last)[None, :], other=0.0
            )
            acc = tl.dot(s.to(b.dtype), b, acc, input_precision="ieee")
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def expand_act_kernel(product_ptr, out_ptr, bias_ptr, factors_ptr, shrunk_ptr, b_ptr, order_ptr, tiles_ptr, ranks_ptr,
                      slot_values, num_tokens, N: tl.constexpr, WIDTH: tl.constexpr, MAX_RANK: tl.constexpr,
                      TILE: tl.constexpr, TILE_N: tl.constexpr, SPLIT: tl.constexpr, SILU: tl.constexpr):  # fmt: skip
    """activation(gate) * up, of a product whose rows are gate (N numbers) and up, with B s added to both. Where a
    checkpoint has gate and up as one matrix, they have one s, and else each its own."""
    start, end, slot = load_tile(tiles_ptr, tl.program_id(0), tl.num_programs(0))
    if start < end:
        rank = _rank(ranks_ptr, slot)
        col = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
        place = start + tl.arange(0, TILE)
        exists = (place < end)[:, None]
        token = tl.load(order_ptr + place, mask=place < end, other=0).to(tl.int64)
        in_row = (col < N)[None, :]
        source = product_ptr + token[:, None] * (2 * N) + col[None, :]
        gate = tl.load(source, mask=exists & in_row, other=0.0).to(tl.float32)
        up = tl.load(source + N, mask=exists & in_row, other=0.0).to(tl.float32)
        for first_rank in tl.range(0, rank, UNIT):
            r = first_rank + tl.arange(0, UNIT)
            s_ptrs = shrunk_ptr + place[:, None] * WIDTH + r[None, :]
            b_ptrs = b_ptr + slot * slot_values + r[:, None] * (2 * N) + col[None, :]
            s = _shrunk(s_ptrs, exists, num_tokens * WIDTH, SPLIT)
            b = tl.load(b_ptrs, mask=in_row, other=0.0)
            gate = tl.dot(s.to(b.dtype), b, gate, input_precision="ieee")
            if WIDTH > MAX_RANK:
                s = _shrunk(s_ptrs + MAX_RANK, exists, num_tokens * WIDTH, SPLIT)
            b = tl.load(b_ptrs + N, mask=in_row, other=0.0)
            up = tl.dot(s.to(b.dtype), b, up, input_precision="ieee")
        factor = tl.load(factors_ptr + token, mask=place < end, other=0.0)[:, None]
        gate *= factor
        up *= factor
        if bias_ptr is not None:
            gate += tl.load(bias_ptr + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias_ptr + N + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
        out = out_ptr + token[:, None] * N + col[None, :]
        tl.store(out, gated(gate, up, SILU).to(out_ptr.dtype.element_ty), mask=exists & in_row)


def adapter_tile(num_tokens: int) -> int:
    """Tokens in a tile: few where every token may have another adapter, more where prompts are long."""
    return 16 if num_tokens <= _FEW_TOKENS else 64


def _expand_warps(num_tokens: int) -> int:
    """Tiles of many tokens take more registers than four warps should have."""
    return 4 if adapter_tile(num_tokens) == 16 else 8


class _Shrinking:
    """A x of a step's tokens, for one matrix."""

    def __init__(self, x: Tensor, place: LowRank, rows: AdapterRows, *, is_beside: bool) -> None:
        num_tokens, k = x.shape
        assert x.is_contiguous() and len(place.part_rows) <= 3
        self._x, self._place, self._rows = x, place, rows
        # Few tokens are cut along k, so that there are programs for every multiprocessor.
        split_k = _SPLIT_K_BESIDE if is_beside else _SPLIT_K
        self._split = min(_SPLIT, max(1, k // split_k)) if num_tokens <= _FEW_TOKENS else 1
        shape = (self._split, num_tokens, place.shrunk_width)
        self._shrunk = torch.empty(shape, dtype=torch.float32, device=x.device)

    def run(self) -> None:
        x, place = self._x, self._place
        a, _, ranks = _pointers(place)
        num_tokens, k = x.shape
        shrink_kernel[(self._rows.tiles.shape[1], place.shrunk_width // RANK_UNIT, self._split)](
            x, a, self._shrunk, self._rows.order, self._rows.tiles, ranks, place.bank.slot_values, num_tokens, K=k,
            WIDTH=place.shrunk_width, MAX_RANK=place.bank.max_rank, TILE=adapter_tile(num_tokens), TILE_K=_TILE_K,
            SPLIT=self._split, num_warps=4,
        )  # fmt: skip

    def add_to(self, out: Tensor) -> None:
        """out: [tokens, out] += B (A x), for the tokens that have an adapter."""
        place, num_tokens = self._place, len(out)
        assert out.is_contiguous()
        _, b, ranks = _pointers(place)
        tile_n = 2 * _TILE_N if num_tokens <= _FEW_TOKENS else _TILE_N
        num_columns = sum(-(-count // tile_n) for count in place.part_rows)
        n0, n1 = (*place.part_rows, 0)[:2]
        expand_kernel[(self._rows.tiles.shape[1], num_columns)](
            out, self._shrunk, b, self._rows.order, self._rows.tiles, ranks, place.bank.slot_values, num_tokens,
            N=out.shape[1], N0=n0, N1=n1, WIDTH=place.shrunk_width, MAX_RANK=place.bank.max_rank,
            TILE=adapter_tile(num_tokens), TILE_N=tile_n, SPLIT=self._split, num_warps=_expand_warps(num_tokens),
        )  # fmt: skip

    def activate(self, product: Tensor, factors: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        """activation(gate) * up, of the product with what adapters add to it; each row is multiplied by its factor."""
        place, num_tokens, width = self._place, len(product), product.shape[1] // 2
        assert product.is_contiguous() and activation in ACTIVATIONS
        assert place.part_rows in ((width, width), (2 * width,))
        _, b, ranks = _pointers(place)
        out = torch.empty((num_tokens, width), dtype=product.dtype, device=product.device)
        expand_act_kernel[(self._rows.tiles.shape[1], -(-width // _TILE_N))](
            product, out, bias, factors, self._shrunk, b, self._rows.order, self._rows.tiles, ranks,
            place.bank.slot_values, num_tokens, N=width, WIDTH=place.shrunk_width, MAX_RANK=place.bank.max_rank,
            TILE=adapter_tile(num_tokens), TILE_N=_TILE_N, SPLIT=self._split, SILU=activation == "silu",
            num_warps=_expand_warps(num_tokens),
        )  # fmt: skip
        return out


def _runs_beside(x: Tensor, place: LowRank) -> bool:
    """Whether a captured step shrinks x beside the product. Of shapes alone: kernels are compiled for it before."""
    return len(x) <= _FEW_TOKENS and place.in_features * sum(place.part_rows) >= _MIN_BESIDE


@contextmanager
def _beside(side: torch.cuda.Stream, device: torch.device, launch: Callable[[], None]) -> Iterator[None]:
    """What is launched inside runs beside `launch`, and what follows behind both. Neither may allocate what the other
    uses, since memory is handed out again in the order of one stream."""
    main = torch.cuda.current_stream(device)
    side.wait_stream(main)
    try:
        with torch.cuda.stream(side):
            launch()
        yield
    finally:  # also where the product fails: a capture ends with every stream that it reached joined
        main.wait_stream(side)


def _pointers(place: LowRank) -> tuple[Tensor, Tensor, Tensor]:
    """Where A and B of slot 0 begin, and the ranks of all slots."""
    values = place.bank.values[0]
    return values[place.a_start :], values[place.b_start :], place.bank.ranks[place.index]


class TritonAdaptedLinear(AdaptedLinear):
    """On a dense matrix. Steps with adapters run a layer's products one by one, each followed by what follows it; one
    token's adapter is added in the launch of the product."""

    __slots__ = ()

    base: TritonLinear
    ops: TritonOps

    def multiply(self, x: Normed) -> Tensor:
        if (one := self._one_adapter(x)) is not None:
            return self._multiply_one(x, one)
        if self.bank.rows is None:
            return self.base.multiply(x)
        assert isinstance(x, Tensor)
        with self._shrinking(x) as shrinking:
            product = self.base.multiply(x)
        shrinking.add_to(product)
        return product

    def multiply_add_norm(
        self, x: Normed, residual: Tensor, norm: Norm | None, branch_norm: Norm | None = None
    ) -> Normed:
        if self.bank.rows is not None and branch_norm is None:
            assert isinstance(x, Tensor)
            if len(x) > MAX_SKINNY_ROWS and (norm is None or norm.is_folded):
                with self._shrinking(x) as shrinking:
                    self.base._multiply_add_many(x, residual)
                shrinking.add_to(residual)
                return residual if norm is None else Unscaled(residual, None, norm.eps)
        return super().multiply_add_norm(x, residual, norm, branch_norm)

    def multiply_act(self, x: Normed, activation: str) -> Normed:
        if self.bank.rows is not None:
            if isinstance(x, Unscaled):
                factors = torch.empty(len(x.x), dtype=torch.float32, device=x.x.device)
                with self._shrinking(x.x, factors, x) as shrinking:
                    product = self.base._multiply_many(x.x, None)
                return shrinking.activate(product, factors, self.base.bias, activation)
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
                with self._shrinking(x.x) as shrinking:
                    product = self.base._multiply_many(x.x, None)
                shrinking.add_to(product)
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

    @contextmanager
    def _shrinking(
        self, x: Tensor, factors: Tensor | None = None, factors_of: Unscaled | None = None
    ) -> Iterator[_Shrinking]:
        """While the product is multiplied, A x is worked out, and in `factors` those of the rows."""
        rows, place = self.bank.rows, self.low_rank
        assert rows is not None and place is not None
        is_beside = _runs_beside(x, place)
        shrinking = _Shrinking(x, place, rows, is_beside=is_beside)

        def launch() -> None:
            shrinking.run()
            if factors_of is not None:
                row_factors(factors_of, out=factors)

        # The trial pass before a capture makes the stream. A step that is launched kernel by kernel may wait for the
        # host, which two events for each matrix would keep longer.
        side = self.ops.side_stream if is_beside and x.is_cuda else None
        if side is not None and torch.cuda.is_current_stream_capturing():
            with _beside(side, x.device, launch):
                yield shrinking
        else:
            launch()
            yield shrinking

    def _copied(self, weight: Tensor) -> Tensor:
        return weight if weight.is_meta else super()._copied(weight)
