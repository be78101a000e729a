"""A weight matrix as one dense tensor, multiplied by torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.composed import ComposedLinear
from quire.kernels.interface import Normed, Ops

if TYPE_CHECKING:
    from quire.kernels.reference.ops import ReferenceOps


class DenseLinear(ComposedLinear):
    """[out_features, in_features] in one dtype on one device, filled in place. How it multiplies is a subclass's."""

    __slots__ = ("weight",)

    def __init__(
        self,
        ops: Ops,
        out_features: int,
        in_features: int,
        *,
        bias: bool,
        device: torch.device,
        dtype: torch.dtype,
        bias_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(ops, out_features, in_features)
        self.weight = torch.empty(out_features, in_features, device=device, dtype=dtype)
        self.bias = torch.empty(out_features, device=device, dtype=bias_dtype or dtype) if bias else None

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (self.bias.nbytes if self.bias is not None else 0)

    def _load(self, first_row: int, rows: Tensor) -> None:
        self.weight[first_row : first_row + len(rows)].copy_(rows)

    def randomize(self, std: float, seed: int) -> None:
        generator = torch.Generator(self.weight.device).manual_seed(seed)
        self.weight.normal_(0.0, std, generator=generator)
        if self.bias is not None:
            self.bias.normal_(0.0, std, generator=generator)


class ReferenceLinear(DenseLinear):
    """Multiplied in `ops.product_dtype`: a matrix that is held in another is converted first, exactly and slowly."""

    __slots__ = ()

    ops: ReferenceOps

    def multiply(self, x: Normed) -> Tensor:
        assert isinstance(x, Tensor)
        return self._product(x).to(x.dtype)

    def embed(self, token_ids: Tensor, scale: float | None = None) -> Tensor:
        rows = F.embedding(token_ids, self.weight).to(self.ops.dtype)
        return rows if scale is None else rows * scale

    def logits(self, hidden: Tensor, softcap: float | None = None, out: Tensor | None = None) -> Tensor:
        """float32; float64 where the activations are, so that an oracle keeps its digits."""
        logits = widened(self._product(hidden))
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return logits if out is None else out.copy_(logits)

    def _product(self, x: Tensor) -> Tensor:
        dtype = self.ops.product_dtype
        return F.linear(x.to(dtype), self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype))


def widened(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
