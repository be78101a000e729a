"""The decoder's operations on one NVIDIA GPU: own kernels where they win, cuBLAS for products of many rows.

Nothing here waits for the device or looks at its data, so a step may be captured in a CUDA graph. The first call of a
kernel with new constants compiles it: run each shape once before capture.
"""

from __future__ import annotations

import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.errors import install_hint
from quire.kernels.composed import ComposedOps
from quire.kernels.interface import (
    AttentionBatch,
    AttentionSpec,
    FoldedNorm,
    LinearWeight,
    PlacedDecodes,
    Unscaled,
)
from quire.kernels.reference import DenseLinear
from quire.kernels.triton.configs import MAX_SKINNY_ROWS, SkinnyConfig, skinny_config


def unavailable_reason(device: torch.device | str = "cuda") -> str | None:
    """Why this backend cannot run here, or None where it can."""
    if importlib.util.find_spec("triton") is None:
        return f"Triton is not installed: {install_hint('gpu')}"
    if torch.device(device).type != "cuda":
        return f"Triton kernels need a CUDA device, not {torch.device(device).type}"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"compute capability {major}.{minor} has no bfloat16 tensor cores: 8.0 or newer is needed"
    return None


class TritonOps(ComposedOps):
    """One object for one device and one stream: split kernels keep their arrival counters here."""

    name = "triton"

    def __init__(
        self,
        device: torch.device | str,
        dtype: torch.dtype,
        *,
        max_seqs: int = 1024,
        max_kv_heads: int = 64,
    ) -> None:
        # Kernels are imported when a device is chosen, not when Quire is: Triton alone costs most of a second.
        from quire.kernels.triton.decode import AttentionScratch
        from quire.kernels.triton.skinny import SkinnyScratch
        from quire.kernels.triton.stable_keys import settle_keys

        settle_keys()
        self.device = torch.device(device)
        self.dtype = dtype
        # Rows are then multiplied as they are in the residual stream, whose range float16 may not hold. (The planner
        # reckons with it, too: sizing.folds_norms.)
        self.folds_norms = dtype != torch.float16
        self._attention_scratch = AttentionScratch.allocate(max_seqs, max_kv_heads, self.device)
        self._skinny_scratch = SkinnyScratch.allocate(1 << 14, self.device)

    def supported_block_sizes(self, head_dim: int) -> tuple[int, ...]:
        return (4, 8, 16, 32, 64, 128)

    def new_linear(self, out_features: int, in_features: int, *, bias: bool = False) -> DenseLinear:
        return DenseLinear(out_features, in_features, bias=bias, device=self.device, dtype=self.dtype)

    def linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        from quire.kernels.triton.skinny import skinny_linear

        assert isinstance(weight, DenseLinear)
        config = self._skinny_config(x, weight)
        if config is None:
            return F.linear(x, weight.weight, weight.bias)
        return skinny_linear(x, weight.weight, weight.bias, config, self._skinny_scratch)

    def embed(self, token_ids: Tensor, weight: LinearWeight, scale: float | None = None) -> Tensor:
        assert isinstance(weight, DenseLinear)
        rows = F.embedding(token_ids, weight.weight)
        return rows if scale is None else rows * scale

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        from quire.kernels.triton.norm import rms_norm

        return rms_norm(x, weight, eps)

    def fold_norm(self, norm: Tensor, weight: LinearWeight) -> FoldedNorm:
        assert isinstance(weight, DenseLinear)
        weight.weight.mul_(norm)  # in float32, rounded once
        return FoldedNorm(norm.fill_(1.0))

    def norm(self, residual: Tensor, norm: Tensor | FoldedNorm, eps: float) -> Tensor | Unscaled:
        if not isinstance(norm, FoldedNorm):
            return self.rms_norm(residual, norm, eps)
        if len(residual) > MAX_SKINNY_ROWS:
            return Unscaled(residual, None, eps)
        return self.rms_norm(residual, norm.ones, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        from quire.kernels.triton.norm import rms_norm

        return rms_norm(x, weight, eps, residual=residual)

    def rope_and_write(
        self,
        qkv: Tensor,
        cos_sin: Tensor,
        kv: Tensor,
        batch: AttentionBatch,
        spec: AttentionSpec,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor:
        from quire.kernels.triton.rope import rope_and_write

        return rope_and_write(qkv, cos_sin, kv, batch, spec, q_norm, k_norm, eps)

    def attention(self, q: Tensor, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec) -> Tensor:
        from quire.kernels.triton.attention import attention

        return attention(q, kv, batch, spec, self._attention_scratch)

    def act_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        from quire.kernels.triton.activation import act_mul

        return act_mul(gate_up, activation)

    def place_decodes(self, step: Tensor, tokens: Tensor, block_tables: Tensor, block_size: int) -> PlacedDecodes:
        from quire.kernels.triton.placing import place_decodes

        return place_decodes(step, tokens, block_tables, block_size)

    def logits(
        self, hidden: Tensor, weight: LinearWeight, softcap: float | None = None, out: Tensor | None = None
    ) -> Tensor:
        from quire.kernels.triton.skinny import skinny_linear

        assert isinstance(weight, DenseLinear)
        config = self._skinny_config(hidden, weight)
        if out is None:
            out = torch.empty((hidden.shape[0], weight.out_features), dtype=torch.float32, device=hidden.device)
        if config is not None:
            logits = skinny_linear(hidden, weight.weight, weight.bias, config, self._skinny_scratch, out=out)
        elif hidden.is_cuda and weight.bias is None and hidden.dtype != torch.float32:
            logits = torch.mm(hidden, weight.weight.t(), out_dtype=torch.float32, out=out)
        elif weight.bias is None and hidden.dtype == out.dtype:
            logits = torch.mm(hidden, weight.weight.t(), out=out)
        else:
            logits = out.copy_(F.linear(hidden, weight.weight, weight.bias))
        return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)

    def linear_rope_write(
        self,
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
        from quire.kernels.triton.rope import rope_and_write
        from quire.kernels.triton.skinny import can_rope, skinny_linear, skinny_rope_write

        assert isinstance(weight, DenseLinear)
        config = self._pair_config(x, weight)
        if isinstance(x, Unscaled) and x.square_sums is None:
            qkv, bias = self._multiply(x.x, weight), weight.bias
            return rope_and_write(qkv, cos_sin, kv, batch, spec, q_norm, k_norm, eps, factors_of=x, bias=bias)
        if config is None:
            return super().linear_rope_write(x, weight, cos_sin, kv, batch, spec, q_norm, k_norm, eps)
        scratch = self._skinny_scratch
        if q_norm is None and k_norm is None and can_rope(spec, config):
            return skinny_rope_write(x, weight.weight, weight.bias, cos_sin, kv, batch, spec, config, scratch)
        qkv = skinny_linear(x, weight.weight, weight.bias, config, scratch)
        return self.rope_and_write(qkv, cos_sin, kv, batch, spec, q_norm, k_norm, eps)

    def linear_add_norm(
        self,
        x: Tensor,
        weight: LinearWeight,
        residual: Tensor,
        norm: Tensor | FoldedNorm | None,
        eps: float,
        branch_norm: Tensor | None = None,
    ) -> Tensor | Unscaled:
        from quire.kernels.triton.skinny import skinny_add_norm

        assert isinstance(weight, DenseLinear)
        config = self._pair_config(x, weight)
        if isinstance(norm, FoldedNorm):
            if len(x) > MAX_SKINNY_ROWS and branch_norm is None:
                self._multiply_add(x, weight, residual)
                return Unscaled(residual, None, eps)
            norm = norm.ones
        elif norm is None and branch_norm is None and not self.is_skinny(x, weight):
            self._multiply_add(x, weight, residual)
            return residual
        # The residual stream times the norm's weight has the stream's range: more than float16 is sure to hold.
        if config is None or branch_norm is not None or x.dtype == torch.float16:
            return super().linear_add_norm(x, weight, residual, norm, eps, branch_norm)
        return skinny_add_norm(x, weight.weight, weight.bias, residual, norm, eps, config, self._skinny_scratch)

    def linear_act(self, x: Tensor | Unscaled, weight: LinearWeight, activation: str) -> Tensor:
        from quire.kernels.triton.activation import act_mul
        from quire.kernels.triton.skinny import skinny_act

        assert isinstance(weight, DenseLinear)
        config = self._pair_config(x, weight)
        if isinstance(x, Unscaled) and x.square_sums is None:
            gate_up, bias = self._multiply(x.x, weight), weight.bias
            return act_mul(gate_up, activation, factors_of=x, bias=bias)
        if config is None:
            return super().linear_act(x, weight, activation)
        return skinny_act(x, weight.weight, weight.bias, activation, config, self._skinny_scratch)

    def _multiply(self, x: Tensor, weight: DenseLinear) -> Tensor:
        """The product alone: the bias is added after the rows' factors."""
        return F.linear(x, weight.weight)

    def _multiply_add(self, x: Tensor, weight: DenseLinear, residual: Tensor) -> None:
        """cuBLAS adds to what is there already: in float32, and without a launch of its own."""
        residual.addmm_(x, weight.weight.t())
        if weight.bias is not None:
            residual.add_(weight.bias)

    def is_skinny(self, x: Tensor | Unscaled, weight: LinearWeight) -> bool:
        """Whether an own kernel multiplies these."""
        assert isinstance(weight, DenseLinear)
        return self._skinny_config(x, weight) is not None

    def _pair_config(self, x: Tensor | Unscaled, weight: DenseLinear) -> SkinnyConfig | None:
        """How an own kernel multiplies these and does what follows, or None. A single row is faster without."""
        config = self._skinny_config(x, weight)
        return config if config is not None and config.use_tensor_cores else None

    def _skinny_config(self, x: Tensor | Unscaled, weight: DenseLinear) -> SkinnyConfig | None:
        """How an own kernel multiplies these, or None: then cuBLAS does."""
        plain = x.x if isinstance(x, Unscaled) else x
        if plain.shape[0] == 0 or not plain.is_contiguous():
            return None
        return skinny_config(plain.shape[0], weight.out_features, weight.in_features, weight.weight.element_size())
