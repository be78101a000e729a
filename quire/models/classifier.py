"""A classifier's head: from a pooled hidden state to the logits of its classes, and to probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.models.slots import WeightSlot
from quire.models.spec import PoolerSpec
from quire.models.tensors import classifier_tensors


class Classifier:
    """A matrix, after a layer with a tanh where there is one. Small, and so in float32 on every device."""

    def __init__(self, pooler: PoolerSpec, hidden_size: int, *, device: torch.device) -> None:
        self._activation = pooler.activation
        self._tensors = {
            name: torch.empty(shape, device=device) for name, shape in classifier_tensors(pooler, hidden_size).items()
        }

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def logits(self, pooled: Tensor) -> Tensor:
        """pooled: [rows, hidden] float32 -> [rows, labels]"""
        tensors = self._tensors
        if "score.dense.weight" in tensors:
            pooled = torch.tanh(F.linear(pooled, tensors["score.dense.weight"], tensors["score.dense.bias"]))
        return F.linear(pooled, tensors["score.weight"], tensors.get("score.bias"))

    def activate(self, logits: Tensor) -> Tensor:
        if self._activation == "identity":
            return logits
        return logits.sigmoid() if self._activation == "sigmoid" else logits.softmax(dim=-1)

    def slots(self) -> Iterator[WeightSlot]:
        for name, tensor in self._tensors.items():
            yield WeightSlot(name, tuple(tensor.shape), partial(_load, tensor), partial(_randomize, tensor))


def _load(tensor: Tensor, stored: Tensor) -> None:
    tensor.copy_(stored)


def _randomize(tensor: Tensor, std: float, seed: int) -> None:
    tensor.normal_(0.0, std, generator=torch.Generator(tensor.device).manual_seed(seed))
