"""An encoder of BERT's family: whole sequences packed one after the other, each token seeing all of its own.

Nothing is kept from one step to the next, so there are no keys and values in blocks. Norms follow the residual sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.interface import AttentionSpec, LinearWeight, Norm, Normed, Ops, PackedBatch
from quire.kernels.reference.linear import DenseLinear
from quire.models.classifier import Classifier
from quire.models.slots import WeightSlot, matrix_slots, norm_slots
from quire.models.spec import ModelSpec
from quire.models.tensors import is_ignored_tensor


@dataclass(slots=True)
class _Layer:
    qkv: LinearWeight
    output: LinearWeight
    attention_norm: Norm
    up: LinearWeight
    down: LinearWeight
    mlp_norm: Norm


class _Table(DenseLinear):
    """Rows that are looked up and never multiplied: each lies in one piece, which a backend's matrix may not do."""

    __slots__ = ()

    def multiply(self, x: Normed) -> Tensor:
        raise AssertionError("a table is only looked up")

    def embed(self, token_ids: Tensor, scale: float | None = None) -> Tensor:
        assert scale is None
        return F.embedding(token_ids, self.weight)

    def logits(self, hidden: Tensor, softcap: float | None = None, out: Tensor | None = None) -> Tensor:
        raise AssertionError("a table is only looked up")


class Encoder:
    """A model's weights and its forward pass. As with `Decoder`, weights are uninitialised until the slots are."""

    def __init__(self, spec: ModelSpec, ops: Ops, *, device: torch.device | str, dtype: torch.dtype) -> None:
        assert spec.is_encoder and spec.pooler is not None and spec.learned_positions is not None
        self.spec = spec
        self.ops = ops
        self._device = torch.device(device)
        self._norm_dtype = torch.promote_types(dtype, torch.float32)
        self._matrices: list[LinearWeight] = []
        self._norms: list[Norm] = []
        hidden = spec.hidden_size
        self._words, self._positions, self._types = (
            _Table(ops, rows, hidden, bias=False, device=self._device, dtype=dtype)
            for rows in (spec.vocab_size, spec.learned_positions, spec.num_token_types)
        )
        self._matrices += [self._words, self._positions, self._types]
        self._norm = self._new_norm()
        self._layers = [
            _Layer(
                qkv=self._new_matrix(3 * hidden, hidden),
                output=self._new_matrix(hidden, hidden),
                attention_norm=self._new_norm(),
                up=self._new_matrix(spec.intermediate_size, hidden),
                down=self._new_matrix(hidden, spec.intermediate_size),
                mlp_norm=self._new_norm(),
            )
            for _ in range(spec.num_layers)
        ]
        self._attention = AttentionSpec(spec.num_heads, spec.num_heads, spec.head_dim, spec.attention_scale)
        self.classifier = Classifier(spec.pooler, hidden, device=self._device) if spec.pooler.labels else None

    def forward(self, token_ids: Tensor, positions: Tensor, types: Tensor | None, batch: PackedBatch) -> Tensor:
        """token_ids, positions, types: [tokens] int64; without types all are of the first. -> [tokens, hidden]"""
        ops, spec = self.ops, self.spec
        x = self._words.embed(token_ids)
        x += self._positions.embed(positions + spec.first_position)
        x += self._types.embed(torch.zeros_like(token_ids[:1]) if types is None else types)
        x = ops.normalize(x, self._norm)
        for layer in self._layers:
            attended = ops.packed_attention(layer.qkv.multiply(x), batch, self._attention)
            x = _tensor(layer.output.multiply_add_norm(attended, x, layer.attention_norm))
            inner = layer.up.multiply_activate(x, spec.activation)
            x = _tensor(layer.down.multiply_add_norm(inner, x, layer.mlp_norm))
        return x

    @property
    def weight_bytes(self) -> int:
        norms = sum(norm.weight.nbytes * 2 for norm in self._norms)
        return (
            sum(matrix.nbytes for matrix in self._matrices) + norms + (self.classifier.nbytes if self.classifier else 0)
        )

    def is_ignored_weight(self, name: str) -> bool:
        """Whether a checkpoint may hold this tensor without its being needed."""
        return is_ignored_tensor(self.spec, name)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """A slot for every tensor that the checkpoint must hold, by its name there."""
        hidden, inner = self.spec.hidden_size, self.spec.intermediate_size
        slots: list[WeightSlot] = []
        for name, table in (("tokens", self._words), ("positions", self._positions), ("types", self._types)):
            slots += matrix_slots(table, {f"model.embed_{name}": table.out_features})
        slots += norm_slots("model.norm", self._norm, offset=False)
        for index, layer in enumerate(self._layers):
            prefix = f"model.layers.{index}"
            slots += matrix_slots(layer.qkv, {f"{prefix}.self_attn.{part}_proj": hidden for part in "qkv"})
            slots += matrix_slots(layer.output, {f"{prefix}.self_attn.o_proj": hidden})
            slots += norm_slots(f"{prefix}.post_attention_layernorm", layer.attention_norm, offset=False)
            slots += matrix_slots(layer.up, {f"{prefix}.mlp.up_proj": inner})
            slots += matrix_slots(layer.down, {f"{prefix}.mlp.down_proj": hidden})
            slots += norm_slots(f"{prefix}.post_feedforward_layernorm", layer.mlp_norm, offset=False)
        if self.classifier is not None:
            slots += self.classifier.slots()
        return {slot.name: slot for slot in slots}

    def _new_matrix(self, out_features: int, in_features: int) -> LinearWeight:
        self._matrices.append(self.ops.new_linear(out_features, in_features, bias=True))
        return self._matrices[-1]

    def _new_norm(self) -> Norm:
        weight, bias = (torch.empty(self.spec.hidden_size, device=self._device, dtype=self._norm_dtype) for _ in "wb")
        self._norms.append(Norm(weight, self.spec.norm_eps, bias=bias))
        return self._norms[-1]


def _tensor(normed: object) -> Tensor:
    assert isinstance(normed, Tensor), "a LayerNorm leaves nothing to the product after it"
    return normed
