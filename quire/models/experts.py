"""A mixture of experts in place of a layer's MLP: a router sends each token to a few of many small MLPs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from quire.kernels.interface import Experts, LinearWeight, Norm, Normed, Ops, SharedExpert
from quire.models.layer import DenseMlp
from quire.models.share import Cut
from quire.models.slots import WeightSlot, matrix_slots

if TYPE_CHECKING:
    from quire.parallel.ranks import Ranks


@dataclass(slots=True)
class ExpertsMlp:
    """The sum of a token's experts, each times its weight, and of a shared expert where there is one.

    With several ranks each has some columns of every expert, and the sums are summed once.
    """

    ops: Ops
    experts: Experts
    columns: Cut  # of each expert: which of the model's are here
    shared: DenseMlp | None = None
    shared_gate: LinearWeight | None = None  # one output: its sigmoid weighs the shared expert
    ranks: Ranks | None = None
    branch_norm: Norm | None = None

    def run(self, x: Normed, residual: Tensor, next_norm: Norm | None) -> Normed:
        shared = None
        if self.shared is not None:
            gate = None if self.shared_gate is None else self.shared_gate.multiply(x)
            shared = SharedExpert(self.shared.multiply(x), gate)
        if self.ranks is None and self.branch_norm is None:
            return self.experts.multiply_add_norm(x, residual, next_norm, shared)
        branch = self.experts.multiply(x, shared)
        if self.ranks is not None:
            branch = self.ranks.sum(branch)
        if self.branch_norm is not None:
            branch = self.ops.normalize(branch, self.branch_norm)
        return self.ops.add_norm(branch, residual, next_norm)

    def fold_norm(self, norm: Norm) -> Norm:
        return norm

    def matrices(self) -> Iterable[tuple[LinearWeight, bool]]:
        """Those that are multiplied by themselves: experts are multiplied together."""
        if self.shared is not None:
            yield from ((matrix, False) for matrix, _ in self.shared.matrices())

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        router, activation = self.experts.router, ""  # loading needs none
        yield from matrix_slots(router, {f"{prefix}.gate": router.out_features})
        for number, (gate_up, down) in enumerate(zip(self.experts.gate_ups, self.experts.downs, strict=True)):
            yield from DenseMlp(activation, gate_up, down, columns=self.columns).slots(f"{prefix}.experts.{number}")
        if self.shared is not None:
            yield from self.shared.slots(f"{prefix}.shared_expert")
        if self.shared_gate is not None:
            yield from matrix_slots(self.shared_gate, {f"{prefix}.shared_expert_gate": 1})
