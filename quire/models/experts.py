"""A mixture of experts in place of a layer's MLP: a router sends each token to a few of many small MLPs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.kernels.interface import LinearWeight, Norm, Normed, Ops
from quire.models.layer import DenseMlp
from quire.models.slots import WeightSlot, matrix_slots
from quire.models.spec import ExpertsSpec

if TYPE_CHECKING:
    from quire.parallel.ranks import Ranks


@dataclass(slots=True)
class ExpertsMlp:
    """The sum of a token's experts, each times its weight, and of a shared expert where there is one.

    Tokens are grouped by expert, so that each expert that any token chose is read once a step. A token's experts are
    added in their order, whatever else is in the batch. With several ranks each has some columns of every expert, and
    the sums are summed once.
    """

    ops: Ops
    spec: ExpertsSpec
    router: LinearWeight
    experts: list[DenseMlp]
    shared: DenseMlp | None = None
    shared_gate: LinearWeight | None = None  # one output: its sigmoid weighs the shared expert
    ranks: Ranks | None = None
    branch_norm: Norm | None = None

    def run(self, x: Normed, residual: Tensor, next_norm: Norm | None) -> Normed:
        assert isinstance(x, Tensor), "experts take rows that are normalized already"
        branch = self._mixture(x)
        if self.shared is not None:
            shared = self.shared.multiply(x)
            if self.shared_gate is not None:
                shared *= self.shared_gate.multiply(x).sigmoid()
            branch += shared
        if self.ranks is not None:
            branch = self.ranks.sum(branch)
        if self.branch_norm is not None:
            branch = self.ops.normalize(branch, self.branch_norm)
        return self.ops.add_norm(branch, residual, next_norm)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[tokens, top_k]: the weights of each token's experts, and which they are."""
        scores = torch.softmax(self.router.multiply(x).float(), dim=-1)
        weights, chosen = scores.topk(self.spec.top_k, dim=-1)
        if self.spec.normalizes:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), chosen

    def _mixture(self, x: Tensor) -> Tensor:
        weights, chosen = self.route(x)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        tokens = order // self.spec.top_k
        rows, row_weights = x[tokens], weights.flatten()[order, None]
        branch, first = torch.zeros_like(x), 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                part = slice(first, first + count)
                branch.index_add_(0, tokens[part], expert.multiply(rows[part]).mul_(row_weights[part]))
                first += count
        return branch

    def fold_norm(self, norm: Norm) -> Norm:
        return norm

    def matrices(self) -> Iterable[tuple[LinearWeight, bool]]:
        yield self.router, False
        for mlp in (*self.experts, *([] if self.shared is None else [self.shared])):
            yield from ((matrix, False) for matrix, _ in mlp.matrices())

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from matrix_slots(self.router, {f"{prefix}.gate": self.router.out_features})
        for number, expert in enumerate(self.experts):
            yield from expert.slots(f"{prefix}.experts.{number}")
        if self.shared is not None:
            yield from self.shared.slots(f"{prefix}.shared_expert")
        if self.shared_gate is not None:
            yield from matrix_slots(self.shared_gate, {f"{prefix}.shared_expert_gate": 1})
