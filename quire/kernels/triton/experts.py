"""A mixture of experts on one GPU: four launches for any number of tokens, with nothing that waits for the device.

Experts in 8-bit floats are widened on their way to the tensor cores, and rows are multiplied as they are: half the
bytes are read, which is what most steps' time goes to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.composed import ComposedExperts, ComposedLinear
from quire.kernels.interface import Norm, Normed, Quantized, SharedExpert, Unscaled
from quire.kernels.triton.configs import MAX_SKINNY_ROWS, GroupedConfig, PickedConfig, experts_config
from quire.kernels.triton.fp8_linear import Fp8Linear
from quire.kernels.triton.grouped import combine, multiply_picks
from quire.kernels.triton.linear import TritonLinear
from quire.kernels.triton.ops import TritonOps
from quire.kernels.triton.routing import Router


class _ExpertMatrix(TritonLinear):
    """One expert's part of a tensor that holds those of all. It is loaded by itself, and multiplied with the others."""

    __slots__ = ()

    def __init__(self, ops: TritonOps, weight: Tensor, bias: Tensor | None) -> None:
        ComposedLinear.__init__(self, ops, weight.shape[0], weight.shape[1])
        self.weight, self.bias, self._scratch = weight, bias, ops.skinny_scratch


class _Fp8ExpertMatrix(Fp8Linear):
    """Likewise in 8-bit floats."""

    __slots__ = ()

    def __init__(self, ops: TritonOps, weight: Tensor, bias: Tensor | None, scales: Tensor) -> None:
        ComposedLinear.__init__(self, ops, weight.shape[0], weight.shape[1])
        self.weight, self.scales, self.bias, self._scratch = weight, scales, bias, ops.skinny_scratch


@dataclass(slots=True, frozen=True)
class _Stacked:
    """One matrix of every expert."""

    weight: Tensor  # [experts, rows, columns]
    scales: Tensor | None  # [experts, rows] float32: of one in 8-bit floats
    bias: Tensor | None  # [experts, rows]

    @staticmethod
    def empty(ops: TritonOps, experts: int, rows: int, columns: int, *, is_fp8: bool, has_bias: bool) -> _Stacked:
        dtype = torch.float8_e4m3fn if is_fp8 else ops.dtype
        return _Stacked(
            torch.empty((experts, rows, columns), dtype=dtype, device=ops.device),
            torch.empty((experts, rows), dtype=torch.float32, device=ops.device) if is_fp8 else None,
            torch.empty((experts, rows), dtype=ops.dtype, device=ops.device) if has_bias else None,
        )

    def matrices(self, ops: TritonOps) -> list[TritonLinear]:
        made: list[TritonLinear] = []
        for index, weight in enumerate(self.weight):
            bias = None if self.bias is None else self.bias[index]
            if self.scales is None:
                made.append(_ExpertMatrix(ops, weight, bias))
            else:
                made.append(_Fp8ExpertMatrix(ops, weight, bias, self.scales[index]))
        return made


def _rows_of(x: Normed) -> Tensor:
    assert not isinstance(x, Quantized), "a router takes rows as they are"
    return x.x if isinstance(x, Unscaled) else x


class TritonExperts(ComposedExperts):
    def __init__(
        self,
        ops: TritonOps,
        num_experts: int,
        inner: int,
        hidden: int,
        *,
        top_k: int,
        normalizes: bool,
        activation: str,
        is_fp8: bool = False,
        bias: bool = False,
    ) -> None:
        self._gate_up, self._down = (
            _Stacked.empty(ops, num_experts, rows, columns, is_fp8=is_fp8, has_bias=bias)
            for rows, columns in ((2 * inner, hidden), (hidden, inner))
        )
        self._scratch = ops.routing_scratch(num_experts)
        router = ops.new_linear(num_experts, hidden, bias=bias, is_sensitive=True)
        assert isinstance(router, TritonLinear)
        self._router = router
        super().__init__(
            ops,
            self._router,
            self._gate_up.matrices(ops),
            self._down.matrices(ops),
            top_k=top_k,
            normalizes=normalizes,
            activation=activation,
        )

    def fold_norm(self, norm: Norm) -> Norm:
        left = norm
        if self._gate_up.scales is None and norm.bias is None and self._gate_up.weight.dtype != torch.float16:
            self._gate_up.weight.mul_(norm.weight)  # in float32, rounded once
            left = self._router.fold_norm(norm)
        return left

    def multiply(self, x: Normed, shared: SharedExpert | None = None) -> Tensor:
        plain = _rows_of(x)
        out = torch.empty(plain.shape, dtype=plain.dtype, device=plain.device)
        self._run(x, shared, None, None, out)
        return out

    def multiply_add_norm(
        self, x: Normed, residual: Tensor, norm: Norm | None, shared: SharedExpert | None = None
    ) -> Normed:
        if norm is None or (norm.is_folded and len(residual) > MAX_SKINNY_ROWS):
            self._run(x, shared, residual, None, None)
            return residual if norm is None else Unscaled(residual, None, norm.eps)
        if norm.quantizes or norm.bias is not None:
            self._run(x, shared, residual, None, None)
            return self.ops.norm(residual, norm)
        out = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
        self._run(x, shared, residual, norm, out)
        return out

    def _run(
        self, x: Normed, shared: SharedExpert | None, residual: Tensor | None, norm: Norm | None, out: Tensor | None
    ) -> None:
        plain = _rows_of(x)
        num_experts, hidden, inner = self._down.weight.shape
        picks = plain.shape[0] * self.top_k
        if not picks:
            return
        gate_up_config, down_config = (
            experts_config(picks, num_experts, n, k, self._down.weight.element_size(), is_gated=is_gated)
            for n, k, is_gated in ((inner, hidden, True), (hidden, inner, False))
        )
        is_grouped = isinstance(gate_up_config, GroupedConfig)
        # All memory is asked for before the first launch: what fails here leaves the counts at zero.
        router = Router(
            x if isinstance(x, Unscaled) else plain,
            self._router.weight,
            self._scratch,
            bias=self._router.bias,
            top_k=self.top_k,
            normalizes=self.normalizes,
            is_grouped=is_grouped,
        )
        inside, parts = (
            torch.empty((picks, width), dtype=plain.dtype, device=plain.device) for width in (inner, hidden)
        )
        router.launch()
        self._multiply(plain, self._gate_up, inside, router, gate_up_config, self.activation)
        self._multiply(inside, self._down, parts, router, down_config, None)
        combine(
            parts,
            self._scratch.counts if is_grouped else None,
            top_k=self.top_k,
            shared=None if shared is None else shared.branch,
            gate=None if shared is None else shared.gate,
            residual=residual,
            norm=norm,
            out=out,
        )

    def _multiply(
        self,
        x: Tensor,
        matrices: _Stacked,
        out: Tensor,
        router: Router,
        config: GroupedConfig | PickedConfig,
        activation: str | None,
    ) -> None:
        multiply_picks(
            x, matrices.weight, out, router.routing, self._scratch.counts, config, top_k=self.top_k,
            activation=activation, weight_scales=matrices.scales, bias=matrices.bias,
        )  # fmt: skip
