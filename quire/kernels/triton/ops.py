"""The decoder's operations on one NVIDIA GPU; linear.py has its products.

Nothing here waits for the device or looks at its data, so a step may be captured in a CUDA graph. The first call of a
kernel with new constants compiles it: run each shape once before capture.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.errors import install_hint
from quire.kernels.composed import ComposedOps
from quire.kernels.interface import (
    AttentionBatch,
    AttentionSpec,
    LinearWeight,
    Norm,
    Normed,
    PlacedDecodes,
    Quantized,
    Rotary,
    Unscaled,
)
from quire.kernels.stored_rows import PackedLayout
from quire.kernels.triton.configs import MAX_FP8_SKINNY_ROWS, MAX_SKINNY_ROWS

if TYPE_CHECKING:
    from quire.kernels.adapters import AdaptedLinear, AdapterBank
    from quire.kernels.triton.experts import TritonExperts
    from quire.kernels.triton.linear import TritonLinear
    from quire.kernels.triton.routing import RoutingScratch


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
        quantization: str | None = None,
        packed: PackedLayout | None = None,
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
        self.is_fp8 = quantization == "fp8"  # the layers' matrices
        self.packed = packed  # likewise: how the checkpoint's config says that they are
        self.wide = torch.empty(0, dtype=dtype, device=self.device)  # for one packed matrix at a time, in 16 bits
        self.attention_scratch = AttentionScratch.allocate(max_seqs, max_kv_heads, self.device)
        self.one = torch.ones(1, dtype=torch.float32, device=self.device)  # a scale that changes nothing
        self.skinny_scratch = SkinnyScratch.allocate(1 << 14, self.device)
        self._routing_scratches: dict[int, RoutingScratch] = {}
        self._bank: AdapterBank | None = None

    @cached_property
    def side_stream(self) -> torch.cuda.Stream:
        """For what captured steps run beside their kernels. Each engine asks for one, since another in this process may
        capture a step at the same time; but torch hands out 32 streams of a device in turn, so somebody else may have
        the same one. What they launch on it during a capture becomes part of the graph, and the capture fails if they
        wait for it. Streams of another priority have a pool of their own, but captured kernels keep the priority of
        their stream: those on this one would be placed before the product's."""
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def supported_block_sizes(self, head_dim: int) -> tuple[int, ...]:
        return (4, 8, 16, 32, 64, 128)

    def new_linear(
        self, out_features: int, in_features: int, *, bias: bool = False, is_sensitive: bool = False
    ) -> LinearWeight:
        from quire.kernels.triton.packed_linear import PackedLinear

        if self.packed is not None and not is_sensitive:
            return PackedLinear(self, out_features, in_features, bias=bias)
        return self.new_float_linear(out_features, in_features, bias=bias, is_sensitive=is_sensitive)

    def new_float_linear(
        self, out_features: int, in_features: int, *, bias: bool = False, is_sensitive: bool = False
    ) -> TritonLinear:
        from quire.kernels.triton.fp8_linear import Fp8Linear
        from quire.kernels.triton.linear import TritonLinear

        if self.is_fp8 and not is_sensitive:
            return Fp8Linear(self, out_features, in_features, bias=bias)
        return TritonLinear(self, out_features, in_features, bias=bias)

    def reserve_wide(self, num_values: int) -> None:
        """Room for a packed matrix of so many numbers. While matrices are loaded: captured steps keep the address."""
        if self.wide.numel() < num_values:
            self.wide = torch.empty(num_values, dtype=self.dtype, device=self.device)

    def new_adapted(self, matrix: LinearWeight, bank: AdapterBank) -> AdaptedLinear:
        from quire.kernels.triton.adapters import TritonAdaptedLinear
        from quire.kernels.triton.linear import TritonLinear

        assert isinstance(matrix, TritonLinear)
        self._bank = bank
        return TritonAdaptedLinear(self, matrix, bank)

    def narrows(self, num_rows: int) -> bool:
        """Whether a step of so many rows hands them to matrices in 8 bits. Adapters read them as they are."""
        return num_rows > MAX_FP8_SKINNY_ROWS and (self._bank is None or self._bank.rows is None)

    def adapter_tile(self, num_tokens: int) -> int:
        from quire.kernels.triton.adapters import adapter_tile

        return adapter_tile(num_tokens)

    def new_experts(
        self,
        num_experts: int,
        inner: int,
        hidden: int,
        *,
        top_k: int,
        normalizes: bool,
        activation: str,
        is_sensitive: bool = False,
        bias: bool = False,
    ) -> TritonExperts:
        from quire.kernels.triton.experts import TritonExperts

        return TritonExperts(
            self,
            num_experts,
            inner,
            hidden,
            top_k=top_k,
            normalizes=normalizes,
            activation=activation,
            is_fp8=self.is_fp8 and not is_sensitive,
            bias=bias,
        )

    def routing_scratch(self, num_experts: int) -> RoutingScratch:
        """One for all layers with so many experts: they run one after the other."""
        from quire.kernels.triton.routing import RoutingScratch

        if num_experts not in self._routing_scratches:
            self._routing_scratches[num_experts] = RoutingScratch.allocate(1 << 14, num_experts, self.device)
        return self._routing_scratches[num_experts]

    def normalize(self, x: Tensor, norm: Norm) -> Tensor:
        from quire.kernels.triton.norm import norm_rows

        return norm_rows(x, norm)

    def norm(self, residual: Tensor, norm: Norm) -> Normed:
        if norm.quantizes and self.narrows(len(residual)):
            from quire.kernels.triton.quantize import add_norm_quantized

            return add_norm_quantized(residual, norm)
        if norm.is_folded and len(residual) > MAX_SKINNY_ROWS:
            return Unscaled(residual, None, norm.eps)
        return self.normalize(residual, norm)

    def add_norm(self, branch: Tensor, residual: Tensor, norm: Norm | None) -> Normed:
        from quire.kernels.triton.norm import norm_rows

        if norm is not None and norm.quantizes and self.narrows(len(residual)):
            from quire.kernels.triton.quantize import add_norm_quantized

            return add_norm_quantized(residual, norm, branch=branch)
        if norm is None or (norm.is_folded and len(residual) > MAX_SKINNY_ROWS):
            return super().add_norm(branch, residual, norm)
        return norm_rows(branch, norm, residual=residual)

    def act_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        from quire.kernels.triton.activation import act_mul

        return act_mul(gate_up, activation)

    def activate(self, x: Tensor, activation: str) -> Tensor:
        from quire.kernels.triton.activation import activate

        return activate(x, activation)

    def rope_and_write(
        self, qkv: Tensor, rotary: Rotary, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> Tensor:
        from quire.kernels.triton.rope import rope_and_write

        return rope_and_write(qkv, rotary, kv, batch, spec)

    def attention(self, q: Tensor, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec) -> Normed:
        from quire.kernels.triton.attention import attention, widens_prompts

        narrows = self.is_fp8 and not spec.leaves_wide and kv.dtype == torch.float8_e4m3fn and self.narrows(len(q))
        if narrows and not widens_prompts(q, kv, batch, spec):
            # A mean of values is in the range of the values: it fits their format at their scale.
            out = torch.empty(q.shape, dtype=kv.dtype, device=q.device)
            unscaled = replace(spec, v_scale=1.0)
            return Quantized(attention(q, kv, batch, unscaled, self.attention_scratch, out=out), None, spec.v_scale)
        return attention(q, kv, batch, spec, self.attention_scratch)

    def place_decodes(self, step: Tensor, tokens: Tensor, block_tables: Tensor, block_size: int) -> PlacedDecodes:
        from quire.kernels.triton.placing import place_decodes

        return place_decodes(step, tokens, block_tables, block_size)
