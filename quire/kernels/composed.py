"""The paired operations of `Ops` as what they are: two operations, one after the other. Backends inherit them."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.interface import (
    AttentionBatch,
    AttentionSpec,
    FoldedNorm,
    LinearWeight,
    Ops,
    PlacedDecodes,
    Unscaled,
)


class ComposedOps:
    """For classes that offer the single operations of `Ops`. No FoldedNorm or Unscaled is made here: none arrives."""

    folds_norms = False

    def fold_norm(self, norm: Tensor, weight: LinearWeight) -> FoldedNorm:
        raise AssertionError("only asked of backends whose folds_norms is true")

    def norm(self: Ops, residual: Tensor, norm: Tensor | FoldedNorm, eps: float) -> Tensor | Unscaled:
        assert not isinstance(norm, FoldedNorm)
        return self.rms_norm(residual, norm, eps)

    def place_decodes(self: Ops, step: Tensor, tokens: Tensor, block_tables: Tensor, block_size: int) -> PlacedDecodes:
        rows, positions, kv_lens = step.unbind(0)
        tables = block_tables.index_select(0, rows)
        blocks = tables.gather(1, (positions // block_size)[:, None])[:, 0].to(torch.int64)
        slots = blocks * block_size + positions % block_size
        return PlacedDecodes(tokens[rows, positions], slots, kv_lens.to(torch.int32), tables)

    def linear_rope_write(
        self: Ops,
        x: Tensor | Unscaled,
        weight: LinearWeight,
        cos_sin: Tensor,
        kv: Tensor,
        batch: AttentionBatch,
        spec: AttentionSpec,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor:
        assert isinstance(x, Tensor)
        return self.rope_and_write(self.linear(x, weight), cos_sin, kv, batch, spec, q_norm, k_norm, eps)

    def linear_add_norm(
        self: Ops,
        x: Tensor,
        weight: LinearWeight,
        residual: Tensor,
        norm: Tensor | FoldedNorm | None,
        eps: float,
        branch_norm: Tensor | None = None,
    ) -> Tensor | Unscaled:
        assert not isinstance(norm, FoldedNorm)
        branch = self.linear(x, weight)
        if branch_norm is not None:
            branch = self.rms_norm(branch, branch_norm, eps)
        if norm is None:
            return residual.add_(branch)
        return self.add_rms_norm(branch, residual, norm, eps)

    def linear_act(self: Ops, x: Tensor | Unscaled, weight: LinearWeight, activation: str) -> Tensor:
        assert isinstance(x, Tensor)
        return self.act_mul(self.linear(x, weight), activation)
