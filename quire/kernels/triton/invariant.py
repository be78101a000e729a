"""The decoder's operations on one GPU with results that do not depend on the batch: `batch_invariant=True`.

Every operation here computes a row by itself, in an order that nothing but the model decides: products by one kernel
for any number of rows, attention in parts of a fixed size, one program for each row's norm. What follows a product
may be in its launch, where it computes what it would in one of its own. What the other backend wins by choosing a
kernel for each number of rows, by folding norms into products and by reading shared prefixes once, is left out, because
each of these sums in an order of its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.interface import AttentionBatch, AttentionSpec, Normed, Rotary
from quire.kernels.reference import DenseLinear
from quire.kernels.triton.ops import TritonOps


class InvariantLinear(DenseLinear):
    """A matrix in 16 bits. What follows a product gives the same bits in its launch and in one of its own."""

    __slots__ = ()

    ops: InvariantOps

    def __init__(self, ops: InvariantOps, out_features: int, in_features: int, *, bias: bool) -> None:
        super().__init__(ops, out_features, in_features, bias=bias, device=ops.device, dtype=ops.dtype)

    def multiply(self, x: Normed) -> Tensor:
        assert isinstance(x, Tensor)
        return self._product(x)

    def multiply_act(self, x: Normed, activation: str) -> Normed:
        from quire.kernels.triton.invariant_product import invariant_act

        assert isinstance(x, Tensor)
        return invariant_act(x, self.weight, self.bias, activation, self.ops.skinny_scratch)

    def multiply_rope_write(
        self, x: Normed, rotary: Rotary, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> Tensor:
        from quire.kernels.triton.invariant_product import can_rope, invariant_rope_write

        assert isinstance(x, Tensor)
        if not can_rope(len(x), self.out_features, self.in_features, rotary, spec):
            return super().multiply_rope_write(x, rotary, kv, batch, spec)
        return invariant_rope_write(x, self.weight, self.bias, rotary, kv, batch, spec, self.ops.skinny_scratch)

    def embed(self, token_ids: Tensor, scale: float | None = None) -> Tensor:
        rows = F.embedding(token_ids, self.weight)
        return rows if scale is None else rows * scale

    def logits(self, hidden: Tensor, softcap: float | None = None, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty((hidden.shape[0], self.out_features), dtype=torch.float32, device=hidden.device)
        logits = self._product(hidden, out)
        return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)

    def _product(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        from quire.kernels.triton.invariant_product import invariant_product

        return invariant_product(x, self.weight, self.bias, self.ops.skinny_scratch, out=out)


class InvariantOps(TritonOps):
    """For models whose matrices are dense, in bfloat16 or float16."""

    def new_linear(
        self, out_features: int, in_features: int, *, bias: bool = False, is_sensitive: bool = False
    ) -> InvariantLinear:
        return InvariantLinear(self, out_features, in_features, bias=bias)

    def rope_and_write(
        self, qkv: Tensor, rotary: Rotary, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> Tensor:
        from quire.kernels.triton.rope import RopeConfig, rope_and_write

        # One way to cut a token's heads at any number of tokens: norms of q and k are sums over a head.
        return rope_and_write(qkv, rotary, kv, batch, spec, config=RopeConfig(tile_heads=8, tiles_each=1))

    def attention(self, q: Tensor, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec) -> Tensor:
        from quire.kernels.triton.invariant_attention import invariant_attention

        return invariant_attention(q, kv, batch, spec, self.attention_scratch)
