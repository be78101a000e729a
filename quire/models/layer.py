"""The parts of a decoder's layer. A family that differs in one has another object in its place.

A part takes what the norm before it left, adds its result to the residual stream, and returns what the norm after that
leaves for the next part. It knows which tensors of a checkpoint it is filled from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from torch import Tensor

from quire.kernels.adapters import without_adapters
from quire.kernels.interface import (
    AttentionBatch,
    AttentionSpec,
    Experts,
    LinearWeight,
    Norm,
    Normed,
    Ops,
    PlainLayer,
    Rotary,
    SharedExpert,
)
from quire.models.share import Cut
from quire.models.slots import WeightSlot, matrix_slots, norm_slots, reordered, vector_slot

if TYPE_CHECKING:
    from quire.parallel.ranks import Ranks


@dataclass(slots=True, frozen=True)
class ReadRows:
    """The tokens whose states are read after the last layer. For all others that layer only writes keys and values."""

    indices: Tensor  # [rows] int64, of the step's tokens
    batch: AttentionBatch  # of these alone, in the last layer's KV group


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
    wide_norms: tuple[Norm, Norm] | None = None  # of all of q and all of k, before they are turned (OLMo 2)
    head_order: Sequence[int] | None = None  # of a head's elements in q and k, where the file has another

    def write(self, ops: Ops, x: Normed, kv: Tensor, batch: AttentionBatch) -> Tensor:
        """Write the tokens' keys and values; -> their queries."""
        if self.wide_norms is None:
            return self.qkv.multiply_rope_write(x, self.rotary, kv, batch, self.spec)
        return ops.rope_and_write(self._normed_qkv(ops, x), self.rotary, kv, batch, self.spec)

    def _normed_qkv(self, ops: Ops, x: Normed) -> Tensor:
        assert self.wide_norms is not None
        qkv, first = self.qkv.multiply(x), 0
        for norm in self.wide_norms:
            part = qkv[:, first : first + len(norm.weight)]
            part.copy_(ops.normalize(part, norm))
            first += len(norm.weight)
        return qkv

    def fold_norm(self, norm: Norm) -> Norm:
        # Norms of all of q and of all of k take a product of rows that are normalized.
        return norm if self.wide_norms is not None else self.qkv.fold_norm(norm)

    def matrices(self) -> Iterable[tuple[LinearWeight, bool]]:
        """Each matrix, and whether its product is added to the residual stream."""
        return (self.qkv, False), (self.output, True)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        q_rows = (self.heads or Cut.whole(self.spec.num_heads)) * self.spec.head_dim
        kv_rows = (self.kv_heads or Cut.whole(self.spec.num_kv_heads)) * self.spec.head_dim
        parts = {f"{prefix}.q_proj": q_rows, f"{prefix}.k_proj": kv_rows, f"{prefix}.v_proj": kv_rows}
        for slot in matrix_slots(self.qkv, parts):
            is_turned = self.head_order is not None and not slot.name.startswith(f"{prefix}.v_proj")
            yield reordered(slot, self.head_order) if is_turned and self.head_order is not None else slot
        for name, norm in zip(("q_norm", "k_norm"), self.wide_norms or (), strict=False):
            yield from norm_slots(f"{prefix}.{name}", norm, offset=False)
        if self.spec.sinks is not None:
            heads = self.heads or Cut.whole(self.spec.num_heads)
            yield vector_slot(f"{prefix}.sinks", self.spec.sinks, heads)
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

    modules: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj")  # of that matrix
    activation: str
    gate_up: LinearWeight
    down: LinearWeight
    branch_norm: Norm | None = None
    columns: Cut | None = None  # which of the model's are here, where not all

    def activated(self, x: Normed) -> Normed:
        return self.gate_up.multiply_act(x, self.activation)

    def multiply(self, x: Normed) -> Tensor:
        """What it would add."""
        return self.down.multiply(self.activated(x))

    def run(self, x: Normed, residual: Tensor, next_norm: Norm | None) -> Normed:
        return self.down.multiply_add_norm(self.activated(x), residual, next_norm, self.branch_norm)

    def fold_norm(self, norm: Norm) -> Norm:
        return self.gate_up.fold_norm(norm)

    def matrices(self) -> Iterable[tuple[LinearWeight, bool]]:
        return (self.gate_up, False), (self.down, True)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        inner = self.columns or Cut.whole(self.down.in_features)
        yield from matrix_slots(self.gate_up, {f"{prefix}.{module}": inner for module in self.modules})
        yield from matrix_slots(self.down, {f"{prefix}.down_proj": self.down.out_features}, inner)


@dataclass(slots=True)
class PlainMlp(DenseMlp):
    """down(activation(up)): without a gate, so that up alone is in `gate_up`."""

    modules: ClassVar[tuple[str, ...]] = ("up_proj",)

    def activated(self, x: Normed) -> Normed:
        return self.gate_up.multiply_activate(x, self.activation)

    def fold_norm(self, norm: Norm) -> Norm:
        return norm


@dataclass(slots=True)
class Layer:
    """Attention and MLP of one layer. Without norms of their own they take the residual stream as it is."""

    attention_norm: Norm | None
    attention: SelfAttention
    mlp_norm: Norm | None
    mlp: Mlp
    # The MLP reads what attention reads, not what that leaves (GPT-NeoX), by the same norm if it has none (Cohere).
    is_parallel: bool = False

    def attend(
        self,
        ops: Ops,
        x: Normed,
        residual: Tensor,
        kv: Tensor,
        batches: Sequence[AttentionBatch],
        read: ReadRows | None = None,
    ) -> tuple[Normed, Tensor]:
        """-> what the MLP takes, and the residual stream; with `read`, of these rows alone."""
        attention, batch = self.attention, batches[self.attention.group]
        q = attention.write(ops, x, kv, batch)
        if read is not None:
            q, residual, batch = q[read.indices], residual[read.indices], read.batch
            if not len(q):
                return residual, residual
        parallel_norm = (self.mlp_norm or self.attention_norm) if self.is_parallel else None
        for_mlp = None if parallel_norm is None else ops.normalize(residual, parallel_norm)
        attended = ops.attention(q, kv, batch, attention.spec)
        del q  # what a name still holds cannot be used for the next tensor
        mlp_norm = self.mlp_norm if for_mlp is None else None
        x = attention.output.multiply_add_norm(attended, residual, mlp_norm, attention.branch_norm)
        return x if for_mlp is None else for_mlp, residual

    def plain(self, next_norm: Norm | None) -> PlainLayer | None:
        """The layer without adapters, as a backend may run it together with others; None where it has other parts."""
        attention, mlp, mlp_norm = self.attention, self.mlp, self.mlp_norm
        if type(mlp) is not DenseMlp or mlp_norm is None or next_norm is None or self.is_parallel:
            return None
        if attention.wide_norms is not None or attention.branch_norm is not None or mlp.branch_norm is not None:
            return None
        return PlainLayer(
            attention=attention.spec,
            group=attention.group,
            rotary=attention.rotary,
            qkv=without_adapters(attention.qkv),
            output=without_adapters(attention.output),
            mlp_norm=mlp_norm,
            gate_up=without_adapters(mlp.gate_up),
            down=without_adapters(mlp.down),
            activation=mlp.activation,
            next_norm=next_norm,
        )

    def fold_norms(self) -> None:
        """See LinearWeight.fold_norm. A branch's own norm stands between its product and the residual stream: with
        those nothing would be gained."""
        if self.attention_norm is None or self.mlp_norm is None:
            return
        if self.attention.branch_norm is None and self.mlp.branch_norm is None:
            self.attention_norm = self.attention.fold_norm(self.attention_norm)
            self.mlp_norm = self.mlp.fold_norm(self.mlp_norm)

    def slots(self, prefix: str, *, norm_offset: bool) -> Iterator[WeightSlot]:
        assert self.attention_norm is None or not self.attention_norm.is_folded, "loaded already"
        yield from self.attention.slots(f"{prefix}.self_attn")
        yield from self.mlp.slots(f"{prefix}.mlp")
        rotary, branches = self.attention.rotary, (self.attention.branch_norm, self.mlp.branch_norm)
        of_heads = [None if weight is None else Norm(weight, rotary.eps) for weight in (rotary.q_norm, rotary.k_norm)]
        norms = {
            "input_layernorm": self.attention_norm,
            # Where branches have norms, the file calls the first of them what it calls the MLP's own elsewhere.
            "post_attention_layernorm" if branches[0] is None else "pre_feedforward_layernorm": self.mlp_norm,
            "self_attn.q_norm": of_heads[0],
            "self_attn.k_norm": of_heads[1],
        }
        for name, norm in zip(("post_attention_layernorm", "post_feedforward_layernorm"), branches, strict=True):
            if norm is not None:
                norms[name] = norm
        for name, norm in norms.items():
            if norm is not None:
                yield from norm_slots(f"{prefix}.{name}", norm, offset=norm_offset)


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
        # A shared expert's gate takes rows that are normalized.
        return norm if self.shared is not None else self.experts.fold_norm(norm)

    def matrices(self) -> Iterable[tuple[LinearWeight, bool]]:
        """The matrices that are multiplied by themselves: experts are multiplied together."""
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
