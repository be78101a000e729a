"""What follows from a backend's single operations. Backends and matrices inherit it, and override what is faster."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.interface import (
    ALL,
    AttentionBatch,
    AttentionSpec,
    Experts,
    LayerStack,
    LinearWeight,
    Norm,
    Normed,
    Ops,
    PackedBatch,
    PlacedDecodes,
    PlainLayer,
    Rotary,
    SharedExpert,
)
from quire.kernels.packed import packed_attention
from quire.kernels.stored_rows import StoredRows

if TYPE_CHECKING:
    from quire.kernels.adapters import AdaptedLinear, AdapterBank


class ComposedOps:
    """For a backend whose norms leave nothing to the product after them."""

    def new_adapted(self: Ops, matrix: LinearWeight, bank: AdapterBank) -> AdaptedLinear:
        from quire.kernels.adapters import AdaptedLinear

        return AdaptedLinear(self, matrix, bank)

    def adapter_tile(self, num_tokens: int) -> int | None:
        return None

    def new_stack(self, layers: Sequence[PlainLayer]) -> LayerStack | None:
        return None

    def norm(self: Ops, residual: Tensor, norm: Norm) -> Normed:
        return self.normalize(residual, norm)

    def add_norm(self: Ops, branch: Tensor, residual: Tensor, norm: Norm | None) -> Normed:
        residual.add_(branch)
        return residual if norm is None else self.norm(residual, norm)

    def activate(self, x: Tensor, activation: str) -> Tensor:
        if activation == "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        activated: Tensor = getattr(F, activation)(x)
        return activated

    def packed_attention(self, qkv: Tensor, batch: PackedBatch, spec: AttentionSpec) -> Tensor:
        return packed_attention(qkv, batch, spec)

    def new_experts(
        self: Ops,
        num_experts: int,
        inner: int,
        hidden: int,
        *,
        top_k: int,
        normalizes: bool,
        activation: str,
        is_sensitive: bool = False,
        bias: bool = False,
    ) -> Experts:
        options = {"bias": bias, "is_sensitive": is_sensitive}
        return ComposedExperts(
            self,
            self.new_linear(num_experts, hidden, bias=bias, is_sensitive=True),
            [self.new_linear(2 * inner, hidden, **options) for _ in range(num_experts)],
            [self.new_linear(hidden, inner, **options) for _ in range(num_experts)],
            top_k=top_k,
            normalizes=normalizes,
            activation=activation,
        )

    def place_decodes(self: Ops, step: Tensor, tokens: Tensor, block_tables: Tensor, block_size: int) -> PlacedDecodes:
        rows, positions, kv_lens = step.unbind(0)
        tables = block_tables.index_select(0, rows)
        blocks = tables.gather(1, (positions // block_size)[:, None])[:, 0].to(torch.int64)
        slots = blocks * block_size + positions % block_size
        return PlacedDecodes(tokens[rows, positions], slots, kv_lens.to(torch.int32), tables)


class ComposedLinear(ABC):
    """A LinearWeight whose products are one operation after the other. A variant adds how it loads and multiplies."""

    __slots__ = ("bias", "in_features", "ops", "out_features")

    bias: Tensor | None  # [out_features], set by the variant

    def __init__(self, ops: Ops, out_features: int, in_features: int) -> None:
        self.ops = ops
        self.out_features = out_features
        self.in_features = in_features

    @property
    def keeps_quantized(self) -> bool:
        return False

    @property
    def has_bias(self) -> bool:
        return self.bias is not None

    @abstractmethod
    def multiply(self, x: Normed) -> Tensor: ...

    def load_rows(
        self, first_row: int, matrix: Tensor | StoredRows, *, rows: slice = ALL, columns: slice = ALL
    ) -> None:
        part: Tensor | StoredRows = matrix[rows, columns]
        end = first_row + part.shape[0]
        assert first_row >= 0 and end <= self.out_features, f"rows {first_row} to {end} of {self.out_features}"
        assert part.shape[1] == self.in_features, f"{part.shape[1]} columns for {self.in_features}"
        if not isinstance(part, Tensor):
            if self._load_packed(first_row, part):
                return
            unpacked = part.unpacked()
            part = unpacked if isinstance(unpacked, Tensor) else torch.from_numpy(unpacked)
        self._load(first_row, part)

    @abstractmethod
    def _load(self, first_row: int, rows: Tensor) -> None: ...

    def _load_packed(self, first_row: int, rows: StoredRows) -> bool:
        """Keep the rows as they are. False, and nothing changed, where that cannot be."""
        return False

    def load_bias(self, first_row: int, bias: Tensor) -> None:
        assert self.bias is not None, "this matrix was made without a bias"
        end = first_row + len(bias)
        assert first_row >= 0 and end <= self.out_features, f"bias {first_row} to {end} of {self.out_features}"
        self.bias[first_row:end].copy_(bias)

    def fold_norm(self, norm: Norm) -> Norm:
        return norm

    def multiply_add_norm(
        self, x: Normed, residual: Tensor, norm: Norm | None, branch_norm: Norm | None = None
    ) -> Normed:
        branch = self.multiply(x)
        if branch_norm is not None:
            branch = self.ops.normalize(branch, branch_norm)
        return self.ops.add_norm(branch, residual, norm)

    def multiply_act(self, x: Normed, activation: str) -> Normed:
        return self.ops.act_mul(self.multiply(x), activation)

    def multiply_activate(self, x: Normed, activation: str) -> Tensor:
        return self.ops.activate(self.multiply(x), activation)

    def multiply_rope_write(
        self, x: Normed, rotary: Rotary, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> Tensor:
        return self.ops.rope_and_write(self.multiply(x), rotary, kv, batch, spec)


class ComposedExperts:
    """Tokens are grouped by expert, so that each expert that any token chose is read once a step. A token's experts are
    added in their order, whatever else is in the batch."""

    def __init__(
        self,
        ops: Ops,
        router: LinearWeight,
        gate_ups: Sequence[LinearWeight],
        downs: Sequence[LinearWeight],
        *,
        top_k: int,
        normalizes: bool,
        activation: str,
    ) -> None:
        self.ops = ops
        self.router = router
        self.gate_ups = gate_ups
        self.downs = downs
        self.top_k = top_k
        self.normalizes = normalizes
        self.activation = activation

    def fold_norm(self, norm: Norm) -> Norm:
        return norm

    def multiply(self, x: Normed, shared: SharedExpert | None = None) -> Tensor:
        assert isinstance(x, Tensor), "experts take rows that are normalized already"
        weights, chosen = self._route(x)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=len(self.downs)).tolist()
        tokens = order // self.top_k
        rows, row_weights = x[tokens], weights.flatten()[order, None]
        branch, first = torch.zeros_like(x), 0
        for gate_up, down, count in zip(self.gate_ups, self.downs, counts, strict=True):
            if count:
                part = slice(first, first + count)
                products = down.multiply(gate_up.multiply_act(rows[part], self.activation))
                branch.index_add_(0, tokens[part], products.mul_(row_weights[part]))
                first += count
        if shared is not None:
            branch += shared.branch if shared.gate is None else shared.branch * shared.gate.sigmoid()
        return branch

    def multiply_add_norm(
        self, x: Normed, residual: Tensor, norm: Norm | None, shared: SharedExpert | None = None
    ) -> Normed:
        return self.ops.add_norm(self.multiply(x, shared), residual, norm)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[tokens, top_k]: the weights of each token's experts, and which they are."""
        scores = torch.softmax(self.router.multiply(x).float(), dim=-1)
        weights, chosen = scores.topk(self.top_k, dim=-1)
        if self.normalizes:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), chosen
