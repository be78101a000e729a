"""A weight matrix as one dense tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.interface import QuantizedRows


class DenseLinear:
    """[out_features, in_features] in one dtype on one device, filled in place."""

    __slots__ = ("bias", "weight")

    def __init__(
        self, out_features: int, in_features: int, *, bias: bool, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.weight = torch.empty(out_features, in_features, device=device, dtype=dtype)
        self.bias = torch.empty(out_features, device=device, dtype=dtype) if bias else None

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (self.bias.nbytes if self.bias is not None else 0)

    @property
    def keeps_quantized(self) -> bool:
        return False

    def load_rows(self, first_row: int, rows: Tensor) -> None:
        end = first_row + rows.shape[0]
        assert end <= self.out_features, f"rows {first_row} to {end} of {self.out_features}"
        self.weight[first_row:end].copy_(rows)

    def load_quantized(self, first_row: int, rows: QuantizedRows) -> bool:
        return False

    def load_bias(self, first_row: int, bias: Tensor) -> None:
        assert self.bias is not None, "this matrix was made without a bias"
        end = first_row + bias.shape[0]
        assert end <= self.out_features, f"bias {first_row} to {end} of {self.out_features}"
        self.bias[first_row:end].copy_(bias)

    def randomize(self, std: float, seed: int) -> None:
        generator = torch.Generator(self.weight.device).manual_seed(seed)
        self.weight.normal_(0.0, std, generator=generator)
        if self.bias is not None:
            self.bias.normal_(0.0, std, generator=generator)
