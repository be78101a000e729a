"""Matrices in whole numbers of 4 or 8 bits on one GPU: own kernels for few rows, with what follows them in the same
launch; for many rows cuBLAS, on a copy in 16 bits that is made for the product and forgotten after it."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.composed import ComposedLinear
from quire.kernels.interface import AttentionBatch, AttentionSpec, Norm, Normed, Quantized, Rotary, Unscaled
from quire.kernels.stored_rows import PackedLayout, StoredRows
from quire.kernels.triton.configs import MAX_SKINNY_ROWS, PackedConfig, packed_config
from quire.kernels.triton.epilogue import ADD, GATE, ROPE, STORE, Add, Rope
from quire.kernels.triton.linear import TritonLinear
from quire.kernels.triton.ops import TritonOps
from quire.kernels.triton.packed import PackedMatrix, multiply_packed, widen_matrix
from quire.kernels.triton.packed_rows import common_layout, empty_matrix, numbers_of, store, stored_numbers


class PackedLinear(ComposedLinear):
    """What it is shows when it is loaded. Rows that come in few bits stay so; those of a fused matrix are brought to
    the layout that holds all of them. If any come in 16 bits the matrix is a dense one."""

    __slots__ = ("_dense", "_matrix")

    ops: TritonOps

    def __init__(self, ops: TritonOps, out_features: int, in_features: int, *, bias: bool) -> None:
        super().__init__(ops, out_features, in_features)
        self.bias = torch.empty(out_features, dtype=ops.dtype, device=ops.device) if bias else None
        self._matrix: PackedMatrix | None = None
        self._dense: TritonLinear | None = None
        if ops.device.type == "meta":  # a dry run, which loads nothing
            self._allocate()

    @property
    def nbytes(self) -> int:
        if self._dense is not None:
            return self._dense.nbytes
        return sum(held.nbytes for held in (self._matrix, self.bias) if held is not None)

    # -- loading

    @property
    def keeps_quantized(self) -> bool:
        return True

    def _load(self, first_row: int, rows: Tensor) -> None:
        if self._dense is None:
            self._dense = self._new_dense()
            if self._matrix is not None:
                widen_matrix(self._matrix, self._dense.weight)
                self._matrix = None
        self._dense.load_rows(first_row, rows)

    def _new_dense(self) -> TritonLinear:
        dense = TritonLinear(self.ops, self.out_features, self.in_features, bias=False)
        dense.bias = self.bias
        return dense

    def _load_packed(self, first_row: int, rows: StoredRows) -> bool:
        part = None if self._dense is not None else numbers_of(rows, self.ops.device)
        if part is None:
            return False
        held = self._matrix or self._allocated(part.layout)
        if held is None or held.layout.has_order != part.layout.has_order:
            return False
        is_begun = held is self._matrix
        if is_begun and part.order is not None and held.order is not None and not torch.equal(part.order, held.order):
            return False
        if (layout := common_layout(held.layout, part.layout)) != held.layout:
            wider = self._allocated(layout)
            if wider is None:
                return False
            store(wider, 0, stored_numbers(held).to(layout))
            held = wider
        store(held, first_row, part.to(layout))
        self._matrix = held
        return True

    def randomize(self, std: float, seed: int) -> None:
        self._allocate()
        if self._matrix is None:
            assert self._dense is not None
            self._dense.randomize(std, seed)
            return
        matrix, generator = self._matrix, torch.Generator(self.ops.device).manual_seed(seed)
        matrix.numbers.random_(-128, 128, generator=generator)
        matrix.scales.fill_(std / (1 << (matrix.bits - 1)) * 3**0.5)  # numbers are drawn evenly from their range
        if matrix.offsets is not None:
            matrix.offsets.zero_()
        if matrix.order is not None:
            matrix.order.copy_(torch.randperm(self.in_features))
        if self.bias is not None:
            self.bias.normal_(0.0, std, generator=generator)

    def _allocate(self) -> None:
        """In the layout that the checkpoint's config tells of, where the matrix can have it."""
        layout = self.ops.packed
        assert layout is not None
        self._matrix = self._allocated(replace(layout, group=layout.group or self.in_features))
        if self._matrix is None:
            self._dense = self._new_dense()

    def _allocated(self, layout: PackedLayout) -> PackedMatrix | None:
        self.ops.reserve_wide(self.out_features * self.in_features)
        return empty_matrix(self.out_features, self.in_features, layout, self.ops.device)

    def fold_norm(self, norm: Norm) -> Norm:
        return norm if self._dense is None else self._dense.fold_norm(norm)

    # -- products

    def multiply(self, x: Normed) -> Tensor:
        if self._dense is not None:
            return self._dense.multiply(x)
        config = self._config(x)
        if config is None:
            assert isinstance(x, Tensor)
            return self._multiply_many(x)
        out = self._empty(x, self.out_features)
        self._launch(x, out, None, config, mode=STORE.value)
        return out

    def multiply_add_norm(
        self, x: Normed, residual: Tensor, norm: Norm | None, branch_norm: Norm | None = None
    ) -> Normed:
        if self._dense is not None:
            return self._dense.multiply_add_norm(x, residual, norm, branch_norm)
        config = self._config(x)
        # A dense matrix that follows takes rows with their squares if they are few and more than one, and the residual
        # stream times a norm's weight has the stream's range, which float16 may not hold.
        num_rows, is_half = len(residual), residual.dtype == torch.float16
        if config is None or branch_norm is not None or not 1 < num_rows <= MAX_SKINNY_ROWS or is_half:
            return super().multiply_add_norm(x, residual, norm, branch_norm)
        if norm is None:
            self._launch(x, residual, Add(residual, None, None), config, mode=ADD.value)
            return residual
        if norm.bias is not None:
            return super().multiply_add_norm(x, residual, norm)
        out = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
        tiles = -(-self.out_features // config.tile_n)
        square_sums = torch.empty((tiles, num_rows), dtype=torch.float32, device=residual.device)
        self._launch(x, out, Add(residual, norm.weight, square_sums), config, mode=ADD.value)
        return Unscaled(out, square_sums, norm.eps)

    def multiply_act(self, x: Normed, activation: str) -> Normed:
        if self._dense is not None:
            return self._dense.multiply_act(x, activation)
        config = self._config(x)
        if config is None:
            return super().multiply_act(x, activation)
        out = self._empty(x, self.out_features // 2)
        self._launch(x, out, None, config, mode=GATE.value, silu=activation == "silu")
        return out

    def multiply_rope_write(
        self, x: Normed, rotary: Rotary, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> Tensor:
        if self._dense is not None:
            return self._dense.multiply_rope_write(x, rotary, kv, batch, spec)
        config = self._config(x)
        has_norms = rotary.q_norm is not None or rotary.k_norm is not None
        if config is None or has_norms or spec.head_dim % config.tile_n:
            return super().multiply_rope_write(x, rotary, kv, batch, spec)
        out = self._empty(x, spec.num_heads * spec.head_dim)
        to = Rope.of(rotary, kv, batch, spec)
        self._launch(x, out, to, config, mode=ROPE.value, spec=spec, block_size=kv.shape[3])
        return out

    def embed(self, token_ids: Tensor, scale: float | None = None) -> Tensor:
        raise AssertionError("a vocabulary's matrix has 16 bits")

    def logits(self, hidden: Tensor, softcap: float | None = None, out: Tensor | None = None) -> Tensor:
        raise AssertionError("a vocabulary's matrix has 16 bits")

    def _launch(
        self,
        x: Normed,
        out: Tensor,
        to: Add | Rope | None,
        config: PackedConfig,
        *,
        mode: int,
        silu: bool = False,
        spec: AttentionSpec | None = None,
        block_size: int = 0,
    ) -> None:
        assert self._matrix is not None and not isinstance(x, Quantized)
        multiply_packed(
            x, self._matrix, self.bias, out, to, config, self.ops.skinny_scratch, mode=mode, silu=silu, spec=spec,
            block_size=block_size,
        )  # fmt: skip

    def _multiply_many(self, x: Tensor) -> Tensor:
        assert self._matrix is not None
        wide = self.ops.wide[: self.out_features * self.in_features].view(self.out_features, self.in_features)
        return F.linear(x, widen_matrix(self._matrix, wide), self.bias)

    def _config(self, x: Normed) -> PackedConfig | None:
        """How an own kernel multiplies these rows, or None: then cuBLAS does."""
        plain = x.x if isinstance(x, Unscaled) else x
        assert isinstance(plain, Tensor), "rows in 8 bits are for matrices in 8-bit floats"
        if not plain.is_contiguous():
            return None
        return packed_config(len(plain), self.out_features, self.in_features)

    def _empty(self, x: Normed, width: int) -> Tensor:
        assert not isinstance(x, Quantized)
        plain = x.x if isinstance(x, Unscaled) else x
        return torch.empty((len(plain), width), dtype=plain.dtype, device=plain.device)
