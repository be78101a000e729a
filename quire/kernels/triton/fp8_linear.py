"""Matrices in 8-bit floats (e4m3), each row with a scale of its own.

Up to 16 rows of activations are multiplied as they are: the weights are widened on their way to the tensor cores
(skinny.py), and half as many bytes are read. More are multiplied in 8 bits by cuBLAS, without any scales: the kernel
after the product applies those, and leaves its own result in 8 bits for the next product (quantize.py).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.kernels.composed import ComposedLinear
from quire.kernels.interface import AttentionBatch, AttentionSpec, Norm, Normed, Quantized, Rotary, Unscaled
from quire.kernels.stored_rows import Float8Rows, StoredRows
from quire.kernels.triton.configs import MAX_FP8_SKINNY_ROWS, MAX_SKINNY_ROWS, SkinnyConfig, skinny_config
from quire.kernels.triton.linear import TritonLinear
from quire.kernels.triton.ops import TritonOps
from quire.kernels.triton.quantize import Product, act_quantized, add_norm_quantized, quantize_rows, scaled_product
from quire.kernels.triton.rope import rope_and_write

FP8_MAX = 448.0
# From so many rows on, products with more outputs than inputs are faster with scales than their scaling afterwards is.
_MANY_ROWS = 1024


class Fp8Linear(TritonLinear):
    """Filled from wider rows, which are rounded here, or from a checkpoint's own 8-bit rows, which are kept where each
    of them has one scale. Rows whose scales change along the columns are rounded again."""

    __slots__ = ("_one",)

    ops: TritonOps
    scales: Tensor

    def __init__(self, ops: TritonOps, out_features: int, in_features: int, *, bias: bool) -> None:
        if out_features % 16 or in_features % 16:
            raise ConfigError(
                f"a matrix of {out_features} x {in_features} cannot be in FP8: both must be multiples of 16. "
                "Use 16 bits, or split the model among fewer GPUs"
            )
        super().__init__(ops, out_features, in_features, bias=bias, dtype=torch.float8_e4m3fn)
        self.scales = torch.empty(out_features, dtype=torch.float32, device=ops.device)
        self._one = ops.one

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.scales.nbytes

    def _load(self, first_row: int, rows: Tensor) -> None:
        wide = rows.to(self.weight.device).float()
        scales = wide.abs().amax(dim=1).clamp_(min=1e-12) / FP8_MAX
        end = first_row + len(rows)
        self.weight[first_row:end] = (wide / scales[:, None]).clamp_(-FP8_MAX, FP8_MAX).to(self.weight.dtype)
        self.scales[first_row:end] = scales

    def _load_packed(self, first_row: int, rows: StoredRows) -> bool:
        if not isinstance(rows, Float8Rows) or rows.scales.shape[1] != 1:
            return False
        end = first_row + rows.shape[0]
        self.weight[first_row:end] = rows.values.to(self.weight.device)
        self.scales[first_row:end] = rows.row_scales.to(self.scales.device)
        return True

    def randomize(self, std: float, seed: int) -> None:
        generator = torch.Generator(self.weight.device).manual_seed(seed)
        shape, dtype = self.weight.shape, self.ops.dtype
        self._load(0, torch.empty(shape, dtype=dtype, device=self.weight.device).normal_(0.0, std, generator=generator))
        if self.bias is not None:
            self.bias.normal_(0.0, std, generator=generator)

    def fold_norm(self, norm: Norm) -> Norm:
        return replace(norm, quantizes=True) if norm.bias is None else norm

    def multiply(self, x: Normed) -> Tensor:
        if self._config(x) is not None:
            return super().multiply(x)
        return scaled_product(self._product(x), self.ops.dtype)

    def multiply_add_norm(
        self, x: Normed, residual: Tensor, norm: Norm | None, branch_norm: Norm | None = None
    ) -> Normed:
        if self._config(x) is None:
            if branch_norm is None and (norm is None or norm.bias is None):
                if norm is not None and norm.quantizes and not self.ops.narrows(len(residual)):
                    norm = replace(norm, quantizes=False)
                return add_norm_quantized(residual, norm, product=self._product(x))
            return ComposedLinear.multiply_add_norm(self, x, residual, norm, branch_norm)
        return super().multiply_add_norm(x, residual, norm, branch_norm)

    def multiply_act(self, x: Normed, activation: str) -> Normed:
        if self._config(x) is None:
            if not self.ops.narrows(len(x.x if isinstance(x, Quantized | Unscaled) else x)):
                return ComposedLinear.multiply_act(self, x, activation)
            return act_quantized(self._product(x), activation)
        return super().multiply_act(x, activation)

    def multiply_rope_write(
        self, x: Normed, rotary: Rotary, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> Tensor:
        if self._config(x) is not None:
            return super().multiply_rope_write(x, rotary, kv, batch, spec)
        product = self._product(x)
        return rope_and_write(
            product.raw, rotary, kv, batch, spec, bias=self.bias, row_scales=product.row_scales,
            row_scale=product.row_factor, column_scales=product.column_scales, out_dtype=self.ops.dtype,
        )  # fmt: skip

    def _multiply_add_many(self, x: Tensor, residual: Tensor) -> None:
        add_norm_quantized(residual, None, product=self._product(x))

    def _config(self, x: Normed) -> SkinnyConfig | None:
        if isinstance(x, Unscaled):  # by a matrix in 16 bits, of up to 32 rows: those are few enough
            assert x.square_sums is not None and len(x.x) <= MAX_SKINNY_ROWS
            return skinny_config(min(len(x.x), MAX_FP8_SKINNY_ROWS), self.out_features, self.in_features, 1)
        return super()._config(x)

    def _product(self, x: Normed) -> Product:
        if isinstance(x, Tensor):
            x = quantize_rows(x)
        assert isinstance(x, Quantized)
        if x.scales is not None and len(x.x) >= _MANY_ROWS and self.out_features > self.in_features:
            return Product(self._multiply_narrow(x.x, x.scales), None, 1.0, None, self.bias)
        return Product(self._multiply_narrow(x.x, None), x.scales, x.factor, self.scales, self.bias)

    def _multiply_narrow(self, x: Tensor, row_scales: Tensor | None) -> Tensor:
        """x: [rows, in] e4m3; with its scales the product is scaled, without them not: the largest sum that there can
        be is far from the end of bfloat16's range."""
        scale_a, scale_b = self._one, self._one
        if row_scales is not None:
            scale_a, scale_b = row_scales[:, None], self.scales[None, :]
        if not x.is_cuda:  # where kernels are interpreted
            return (x.float() @ self.weight.float().T * scale_a * scale_b).bfloat16()
        return torch._scaled_mm(
            x, self.weight.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=True
        )
