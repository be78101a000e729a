"""The parts of a decoder's layer. A family that differs in one has another object in its place.

A part takes what the norm before it left, adds its result to the residual stream, and returns what the norm after that
leaves for the next part. It knows which tensors of a checkpoint it is filled from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from quire.kernels.interface import AttentionBatch, AttentionSpec, LinearWeight, Norm, Normed, Ops, Rotary
from quire.models.share import Cut
from quire.models.slots import WeightSlot, matrix_slots, norm_slot


@dataclass(slots=True)
class SelfAttention:
    """q, k and v are one matrix."""

    spec: AttentionSpec
    group: int  # KV group, through whose block tables it reads and writes
    rotary: Rotary
    qkv: LinearWeight
    output: LinearWeight
    branch_norm: Norm | None = None  # of its result, before that is added (Gemma 3)
    heads: Cut | None = None  # which of the model's are here, where not all
    kv_heads: Cut | None = None

    def run(
        self, ops: Ops, x: Normed, residual: Tensor, next_norm: Norm, kv: Tensor, batches: Sequence[AttentionBatch]
    ) -> Normed:
        batch = batches[self.group]
        q = self.qkv.multiply_rope_write(x, self.rotary, kv, batch, self.spec)
        attended = ops.attention(q, kv, batch, self.spec)
        del q  # what a name still holds cannot be used for the next tensor
        return self.output.multiply_add_norm(attended, residual, next_norm, self.branch_norm)

    def fold_norm(self, norm: Norm) -> Norm:
        return self.qkv.fold_norm(norm)

    def matrices(self) -> Iterable[tuple[LinearWeight, bool]]:
        """Each matrix, and whether its product is added to the residual stream."""
        return (self.qkv, False), (self.output, True)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        q_rows = (self.heads or Cut.whole(self.spec.num_heads)) * self.spec.head_dim
        kv_rows = (self.kv_heads or Cut.whole(self.spec.num_kv_heads)) * self.spec.head_dim
        yield from matrix_slots(
            self.qkv, {f"{prefix}.q_proj": q_rows, f"{prefix}.k_proj": kv_rows, f"{prefix}.v_proj": kv_rows}
        )
        yield from matrix_slots(self.output, {f"{prefix}.o_proj": self.output.out_features}, q_rows)


class Mlp(Protocol):
    """What follows attention in a layer."""

    branch_norm: Norm | None  # of its result, before that is added

    def run(self, x: Normed, residual: Tensor, next_norm: Norm | None) -> Normed: ...

    def fold_norm(self, norm: Norm) -> Norm:
        """See LinearWeight.fold_norm, of all that multiplies what comes in."""

    def matrices(self) -> Iterable[tuple[LinearWeight, bool]]:
        """See SelfAttention."""

    def slots(self, prefix: str) -> Iterator[WeightSlot]: ...


@dataclass(slots=True)
class DenseMlp:
    """down(activation(gate) * up), with gate and up in one matrix."""

    activation: str
    gate_up: LinearWeight
    down: LinearWeight
    branch_norm: Norm | None = None
    columns: Cut | None = None  # which of the model's are here, where not all

    def multiply(self, x: Normed) -> Tensor:
        """What it would add."""
        return self.down.multiply(self.gate_up.multiply_act(x, self.activation))

    def run(self, x: Normed, residual: Tensor, next_norm: Norm | None) -> Normed:
        gated = self.gate_up.multiply_act(x, self.activation)
        return self.down.multiply_add_norm(gated, residual, next_norm, self.branch_norm)

    def fold_norm(self, norm: Norm) -> Norm:
        return self.gate_up.fold_norm(norm)

    def matrices(self) -> Iterable[tuple[LinearWeight, bool]]:
        return (self.gate_up, False), (self.down, True)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        inner = self.columns or Cut.whole(self.down.in_features)
        yield from matrix_slots(self.gate_up, {f"{prefix}.gate_proj": inner, f"{prefix}.up_proj": inner})
        yield from matrix_slots(self.down, {f"{prefix}.down_proj": self.down.out_features}, inner)


@dataclass(slots=True)
class Layer:
    attention_norm: Norm
    attention: SelfAttention
    mlp_norm: Norm
    mlp: Mlp

    def fold_norms(self) -> None:
        """See LinearWeight.fold_norm. A branch's own norm stands between its product and the residual stream: with
        those nothing would be gained."""
        if self.attention.branch_norm is None and self.mlp.branch_norm is None:
            self.attention_norm = self.attention.fold_norm(self.attention_norm)
            self.mlp_norm = self.mlp.fold_norm(self.mlp_norm)

    def slots(self, prefix: str, *, norm_offset: bool) -> Iterator[WeightSlot]:
        assert not self.attention_norm.is_folded, "loaded already"
        yield from self.attention.slots(f"{prefix}.self_attn")
        yield from self.mlp.slots(f"{prefix}.mlp")
        rotary, branches = self.attention.rotary, (self.attention.branch_norm, self.mlp.branch_norm)
        norms = {
            "input_layernorm": self.attention_norm.weight,
            # Where branches have norms, the file calls the first of them what it calls the MLP's own elsewhere.
            "post_attention_layernorm" if branches[0] is None else "pre_feedforward_layernorm": self.mlp_norm.weight,
            "self_attn.q_norm": rotary.q_norm,
            "self_attn.k_norm": rotary.k_norm,
        }
        for name, norm in zip(("post_attention_layernorm", "post_feedforward_layernorm"), branches, strict=True):
            if norm is not None:
                norms[name] = norm.weight
        for name, weight in norms.items():
            if weight is not None:
                yield norm_slot(f"{prefix}.{name}.weight", weight, offset=norm_offset)
