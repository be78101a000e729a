"""Every operation of the decoder in plain torch, on any device and in any float dtype.

Everything but the matrix products is computed in float32 (float64 where the activations are) and rounded once, at the
end: what the fast backends are measured against.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.composed import ComposedOps
from quire.kernels.interface import AttentionBatch, AttentionSpec, Norm, Rotary
from quire.kernels.reference.attention import attention
from quire.kernels.reference.linear import ReferenceLinear, widened


class ReferenceOps(ComposedOps):
    """`dtype` is the activations' dtype; the matrices are held in `weight_dtype`, by default the same."""

    name = "reference"

    def __init__(
        self, device: torch.device | str, dtype: torch.dtype, *, weight_dtype: torch.dtype | None = None
    ) -> None:
        self.device = torch.device(device)
        self.dtype = dtype
        self.weight_dtype = dtype if weight_dtype is None else weight_dtype
        # A CPU multiplies in float32: half-precision products may use tile instructions, which some virtual machines
        # announce and then do not allow.
        self.product_dtype = torch.promote_types(dtype, torch.float32) if self.device.type == "cpu" else dtype

    def supported_block_sizes(self, head_dim: int) -> tuple[int, ...]:
        return (4, 8, 16, 32, 64, 128)

    def new_linear(
        self, out_features: int, in_features: int, *, bias: bool = False, is_sensitive: bool = False
    ) -> ReferenceLinear:
        return ReferenceLinear(self, out_features, in_features, bias=bias, device=self.device, dtype=self.weight_dtype)

    def normalize(self, x: Tensor, norm: Norm) -> Tensor:
        if norm.bias is not None:
            wide = widened(x)
            weight, bias = norm.weight.to(wide.dtype), norm.bias.to(wide.dtype)
            return F.layer_norm(wide, x.shape[-1:], weight, bias, norm.eps).to(x.dtype)
        return _normalize(widened(x), norm.weight, norm.eps).to(x.dtype)

    def rope_and_write(
        self, qkv: Tensor, rotary: Rotary, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> Tensor:
        num_heads, num_kv_heads, head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        heads = qkv.view(-1, num_heads + 2 * num_kv_heads, head_dim)
        q, k = widened(heads[:, :num_heads]), widened(heads[:, num_heads : num_heads + num_kv_heads])
        v = heads[:, num_heads + num_kv_heads :]
        if rotary.q_norm is not None:
            q = _normalize(q, rotary.q_norm, rotary.eps)
        if rotary.k_norm is not None:
            k = _normalize(k, rotary.k_norm, rotary.eps)
        cos, sin = rotary.cos_sin[batch.positions, None].chunk(2, dim=-1)  # [tokens, 1, head_dim / 2]
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)

        block_size = kv.shape[3]
        blocks = torch.div(batch.slots, block_size, rounding_mode="floor")
        offsets = batch.slots % block_size
        if spec.k_offset is not None:
            k = k - spec.k_offset
        kv[blocks, 0, :, offsets] = (k / spec.k_scale).to(kv.dtype)
        kv[blocks, 1, :, offsets] = (widened(v) / spec.v_scale).to(kv.dtype)
        return q.to(qkv.dtype).reshape(-1, num_heads * head_dim)

    def attention(self, q: Tensor, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec) -> Tensor:
        return attention(q, kv, batch, spec)

    def act_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        gate, up = widened(gate_up).chunk(2, dim=-1)
        if activation == "silu":
            gate = F.silu(gate)
        elif activation == "clamped_silu":
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1.0
            gate = gate * torch.sigmoid(1.702 * gate)
        else:
            assert activation == "gelu_tanh", activation
            gate = F.gelu(gate, approximate="tanh")
        return (gate * up).to(gate_up.dtype)


def _normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [tokens, heads, head_dim]: element i turns with element i + head_dim / 2."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
