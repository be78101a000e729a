"""A matrix whose inputs are split among ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.kernels.composed import ComposedLinear
from quire.kernels.interface import ALL, LinearWeight, Normed, Ops
from quire.kernels.stored_rows import StoredRows

if TYPE_CHECKING:
    from quire.parallel.ranks import Ranks


class SummedLinear(ComposedLinear):
    """Some columns of a matrix. Each rank multiplies its part of x with its own, and the products are summed; they are
    added to the residual stream after that."""

    __slots__ = ("_adds_bias", "_ranks", "part")

    def __init__(self, part: LinearWeight, ops: Ops, ranks: Ranks, *, adds_bias: bool) -> None:
        """adds_bias: of the ranks, one; it would be summed too."""
        super().__init__(ops, part.out_features, part.in_features)
        self.part = part
        self._ranks = ranks
        self._adds_bias = adds_bias

    @property
    def has_bias(self) -> bool:
        return self.part.has_bias

    @property
    def nbytes(self) -> int:
        return self.part.nbytes

    @property
    def keeps_quantized(self) -> bool:
        return self.part.keeps_quantized

    def load_rows(
        self, first_row: int, matrix: Tensor | StoredRows, *, rows: slice = ALL, columns: slice = ALL
    ) -> None:
        self.part.load_rows(first_row, matrix, rows=rows, columns=columns)

    def load_bias(self, first_row: int, bias: Tensor) -> None:
        self.part.load_bias(first_row, bias if self._adds_bias else torch.zeros_like(bias))

    def randomize(self, std: float, seed: int) -> None:
        raise AssertionError("a part of a matrix is drawn with the whole: models/slots.py does it")

    def multiply(self, x: Normed) -> Tensor:
        return self._ranks.sum(self.part.multiply(x))

    def embed(self, token_ids: Tensor, scale: float | None = None) -> Tensor:
        raise AssertionError("a vocabulary is split by words")

    def logits(self, hidden: Tensor, softcap: float | None = None, out: Tensor | None = None) -> Tensor:
        raise AssertionError("a vocabulary is split by words")

    def _load(self, first_row: int, rows: Tensor) -> None:
        raise AssertionError("load_rows hands everything on")
