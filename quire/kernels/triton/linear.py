"""Dense matrices on one GPU: own kernels for up to 32 rows, with what follows them in the same launch; cuBLAS for more.

One row's product leaves only the norm to a launch of its own. With more than 32 rows a norm whose weight is folded is
none: cuBLAS adds the product to the residual stream, multiplies the stream as it is, and the kernel after
that works out the rows' factors.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime import driver

from quire.kernels.interface import AttentionBatch, AttentionSpec, Norm, Normed, Quantized, Rotary, Unscaled
from quire.kernels.reference import DenseLinear
from quire.kernels.triton.activation import act_mul
from quire.kernels.triton.common import HAS_GLUON, INTERPRETED
from quire.kernels.triton.configs import MAX_SKINNY_ROWS, SkinnyConfig, skinny_config
from quire.kernels.triton.ops import TritonOps
from quire.kernels.triton.rope import rope_and_write
from quire.kernels.triton.skinny import can_rope, skinny_act, skinny_add_norm, skinny_linear, skinny_rope_write

_MIN_GATED_ROWS = 1024  # from which the product that applies the activation itself is the faster one


class TritonLinear(DenseLinear):
    __slots__ = ("_scratch", "scales")

    scales: Tensor | None  # [out_features] float32: what the rows are to be multiplied by, in a narrow format

    def __init__(
        self, ops: TritonOps, out_features: int, in_features: int, *, bias: bool, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(
            ops,
            out_features,
            in_features,
            bias=bias,
            device=ops.device,
            dtype=dtype or ops.dtype,
            bias_dtype=ops.dtype,
        )
        self.scales = None
        self._scratch = ops.skinny_scratch

    def fold_norm(self, norm: Norm) -> Norm:
        # Rows are then multiplied as they are in the residual stream, whose range float16 may not hold. (The planner
        # reckons with it, too: sizing.folds_norms.) A LayerNorm takes the rows' means away first.
        if self.weight.dtype == torch.float16 or norm.bias is not None:
            return norm
        assert not norm.is_folded, "folded twice"
        self.weight.mul_(norm.weight)  # in float32, rounded once
        return Norm(norm.weight.fill_(1.0), norm.eps, is_folded=True)

    def multiply(self, x: Normed) -> Tensor:
        config = self._config(x)
        if config is not None:
            assert not isinstance(x, Quantized)
            return skinny_linear(x, self.weight, self.bias, config, self._scratch, weight_scales=self.scales)
        assert isinstance(x, Tensor)
        return self._multiply_many(x, self.bias)

    def multiply_add_norm(
        self, x: Normed, residual: Tensor, norm: Norm | None, branch_norm: Norm | None = None
    ) -> Normed:
        assert isinstance(x, Tensor)
        config = self._config(x)
        if branch_norm is None:
            if norm is None and config is None:
                self._multiply_add_many(x, residual)
                return residual
            if norm is not None and norm.is_folded and len(x) > MAX_SKINNY_ROWS:
                self._multiply_add_many(x, residual)
                return Unscaled(residual, None, norm.eps)
            # The residual stream times the norm's weight has the stream's range: more than float16 is sure to hold.
            is_rms = norm is None or norm.bias is None
            if config is not None and config.use_tensor_cores and x.dtype != torch.float16 and is_rms:
                return skinny_add_norm(
                    x, self.weight, self.bias, residual, norm, config, self._scratch, weight_scales=self.scales
                )
        return super().multiply_add_norm(x, residual, norm, branch_norm)

    def multiply_act(self, x: Normed, activation: str) -> Normed:
        if isinstance(x, Unscaled) and x.square_sums is None:
            if len(x.x) >= _MIN_GATED_ROWS and self.scales is None and _multiplies_gated(self.weight):
                from quire.kernels.triton.gated_hopper import gated_hopper

                return gated_hopper(x, self.weight, self.bias, activation)
            return act_mul(self._multiply_many(x.x, None), activation, factors_of=x, bias=self.bias)
        config = self._config(x)
        if config is None:
            return super().multiply_act(x, activation)
        assert not isinstance(x, Quantized)
        return skinny_act(x, self.weight, self.bias, activation, config, self._scratch, weight_scales=self.scales)

    def multiply_rope_write(
        self, x: Normed, rotary: Rotary, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> Tensor:
        if isinstance(x, Unscaled) and x.square_sums is None:
            qkv = self._multiply_many(x.x, None)
            return rope_and_write(qkv, rotary, kv, batch, spec, factors_of=x, bias=self.bias)
        config = self._config(x)
        has_norms = rotary.q_norm is not None or rotary.k_norm is not None
        if config is None or has_norms or not can_rope(spec, config):
            return super().multiply_rope_write(x, rotary, kv, batch, spec)
        assert not isinstance(x, Quantized)
        return skinny_rope_write(
            x, self.weight, self.bias, rotary, kv, batch, spec, config, self._scratch, weight_scales=self.scales
        )

    def embed(self, token_ids: Tensor, scale: float | None = None) -> Tensor:
        rows = F.embedding(token_ids, self.weight)
        return rows if scale is None else rows * scale

    def logits(self, hidden: Tensor, softcap: float | None = None, out: Tensor | None = None) -> Tensor:
        config = self._config(hidden)
        if out is None:
            out = torch.empty((hidden.shape[0], self.out_features), dtype=torch.float32, device=hidden.device)
        if config is not None:
            logits = skinny_linear(hidden, self.weight, self.bias, config, self._scratch, out=out)
        elif hidden.is_cuda and self.bias is None and hidden.dtype != torch.float32:
            logits = torch.mm(hidden, self.weight.t(), out_dtype=torch.float32, out=out)
        elif self.bias is None and hidden.dtype == out.dtype:
            logits = torch.mm(hidden, self.weight.t(), out=out)
        else:
            logits = out.copy_(F.linear(hidden, self.weight, self.bias))
        return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)

    def _multiply_many(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.weight, bias)

    def _multiply_add_many(self, x: Tensor, residual: Tensor) -> None:
        """cuBLAS adds to what is there already: in float32, and without a launch of its own."""
        residual.addmm_(x, self.weight.t())
        if self.bias is not None:
            residual.add_(self.bias)

    def _config(self, x: Normed) -> SkinnyConfig | None:
        """How an own kernel multiplies these rows, or None: then cuBLAS does."""
        plain = x.x if isinstance(x, Unscaled) else x
        if isinstance(plain, Quantized) or plain.shape[0] == 0 or not plain.is_contiguous():
            return None
        return skinny_config(plain.shape[0], self.out_features, self.in_features, self.weight.element_size())


def _multiplies_gated(weight: Tensor) -> bool:
    """Whether gated_hopper takes such a matrix, gate above up."""
    out_features, in_features = weight.shape
    return out_features % 16 == 0 and in_features % 8 == 0 and weight.dtype == torch.bfloat16 and _has_hopper_kernels()


@cache
def _has_hopper_kernels() -> bool:
    """Asked once: the device does not change."""
    return HAS_GLUON and not INTERPRETED and driver.active.get_current_target().arch == 90
