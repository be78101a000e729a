"""One decoder for every served architecture: what they differ in comes as data, in a ModelSpec.

q, k and v are one matrix, gate and up another. The residual stream is one tensor, changed in place. Each of a layer's
four products is called together with what follows it, so that a backend may make one launch of the two: a layer is
five operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.kernels.interface import AttentionBatch, AttentionSpec, FoldedNorm, LinearWeight, Ops
from quire.layers.rotary import rotary_table
from quire.models.kv_layout import KVLayout, kv_layout
from quire.models.slots import WeightSlot, matrix_slots, norm_slot
from quire.models.spec import ModelSpec, RopeSpec
from quire.models.tensors import is_ignored_tensor


@dataclass(slots=True)
class _Layer:
    attention: AttentionSpec
    group: int  # KV group, whose block tables it reads and writes through
    cos_sin: Tensor  # [max_position, head_dim]
    qkv: LinearWeight
    output: LinearWeight
    gate_up: LinearWeight
    down: LinearWeight
    attention_norm: Tensor | FoldedNorm
    mlp_norm: Tensor | FoldedNorm
    q_norm: Tensor | None
    k_norm: Tensor | None
    after_attention_norm: Tensor | None  # with sandwich norms only
    after_mlp_norm: Tensor | None


class Decoder:
    """A model's weights and its forward pass.

    `dtype` is the activations' dtype; how the matrices are held is up to `ops`. Norm weights stay in float32.
    Weights are uninitialised until each of `weight_slots()` is loaded or randomized, and `finish_loading()` was called.
    """

    def __init__(
        self,
        spec: ModelSpec,
        ops: Ops,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        max_position: int,
        layout: KVLayout | None = None,
    ) -> None:
        self.spec = spec
        self.layout = layout or kv_layout(spec, max_position)
        self.max_position = max_position
        self.ops = ops
        self._device = torch.device(device)
        self.dtype = dtype
        self._norm_dtype = torch.promote_types(dtype, torch.float32)
        self._matrices: list[LinearWeight] = []
        self._norms: list[Tensor] = []
        self._rope_tables: list[tuple[RopeSpec, Tensor]] = []
        self._embedding = self._new_matrix(spec.vocab_size, spec.hidden_size)
        self._head = self._embedding if spec.tie_embeddings else self._new_matrix(spec.vocab_size, spec.hidden_size)
        self._final_norm = self._new_norm(spec.hidden_size)
        self._layers = [self._new_layer(index) for index in range(spec.num_layers)]
        # Gemma multiplies by the factor as rounded to the activations' dtype, and was trained so.
        scale = spec.embedding_scale
        self._embedding_scale = None if scale is None else torch.tensor(scale, dtype=dtype).item()

    def forward(self, token_ids: Tensor, batches: Sequence[AttentionBatch], kv: Sequence[Tensor]) -> Tensor:
        """token_ids: [tokens] int64, placed by `batches`, one for each KV group; kv: each layer's cache.
        -> [tokens, hidden], before the final norm, which only the tokens that give logits need."""
        ops, eps, activation, layers = self.ops, self.spec.norm_eps, self.spec.activation, self._layers

        residual = ops.embed(token_ids, self._embedding, self._embedding_scale)
        x = ops.norm(residual, layers[0].attention_norm, eps)
        # What a name still holds cannot be used for the next tensor: each is let go before the widest ones are made.
        for index, (layer, layer_kv) in enumerate(zip(layers, kv, strict=True)):
            batch = batches[layer.group]
            q = ops.linear_rope_write(
                x, layer.qkv, layer.cos_sin, layer_kv, batch, layer.attention, layer.q_norm, layer.k_norm, eps
            )
            attended = ops.attention(q, layer_kv, batch, layer.attention)
            del q
            x = ops.linear_add_norm(
                attended, layer.output, residual, layer.mlp_norm, eps, branch_norm=layer.after_attention_norm
            )
            del attended
            gated = ops.linear_act(x, layer.gate_up, activation)
            next_norm = layers[index + 1].attention_norm if index + 1 < len(layers) else None
            x = ops.linear_add_norm(gated, layer.down, residual, next_norm, eps, branch_norm=layer.after_mlp_norm)
            del gated
        return residual

    def excerpt(self) -> tuple[Decoder, list[int]]:
        """The same model with the fewest layers that do all that it does, and which ones: each kind of layer, and the
        last, after which no norm comes. For what only depends on shapes, at a fraction of the time."""
        kinds = self.spec.layers
        kept = sorted({kinds.index(kind) for kind in kinds} | {len(kinds) - 1})
        excerpt = copy(self)
        excerpt._layers = [self._layers[index] for index in kept]
        return excerpt, kept

    def logits(self, hidden: Tensor, indices: Tensor | None, out: Tensor | None = None) -> Tensor:
        """hidden: [tokens, hidden] from `forward`; indices: [rows] of the tokens wanted, or None for all.
        -> float32 [rows, vocab], in `out` where given."""
        if indices is not None:
            hidden = hidden[indices]
        x = self.ops.rms_norm(hidden, self._final_norm, self.spec.norm_eps)
        return self.ops.logits(x, self._head, self.spec.logit_softcap, out)

    @property
    def weight_bytes(self) -> int:
        """Everything that the model keeps on its device: matrices, norms and rotary tables."""
        held: list[Tensor | LinearWeight] = [*self._matrices, *self._norms, *(table for _, table in self._rope_tables)]
        return sum(part.nbytes for part in held)

    def is_ignored_weight(self, name: str) -> bool:
        """Whether a checkpoint may hold this tensor without its being needed."""
        return is_ignored_tensor(self.spec, name)

    def finish_loading(self) -> None:
        """After the last weight, before the first step."""
        # A branch's own norm stands between its product and the residual stream: nothing would be gained.
        if not self.ops.folds_norms or self.spec.sandwich_norms:
            return
        for layer in self._layers:
            assert isinstance(layer.attention_norm, Tensor) and isinstance(layer.mlp_norm, Tensor), "loaded twice"
            layer.attention_norm = self.ops.fold_norm(layer.attention_norm, layer.qkv)
            layer.mlp_norm = self.ops.fold_norm(layer.mlp_norm, layer.gate_up)

    def multiply_once(self, num_tokens: int) -> None:
        """With each of a layer's matrices, for what a library does when it is first called: in the way of the steps, as
        it has other code for products that are added to something."""
        layer = self._layers[0]
        num_tokens = max(num_tokens, 64)  # few rows are multiplied by kernels that may not be compiled yet
        residual = torch.zeros((num_tokens, self.spec.hidden_size), dtype=self.dtype, device=self._device)
        adds = isinstance(layer.mlp_norm, FoldedNorm)
        for matrix, is_added in ((layer.qkv, False), (layer.output, adds), (layer.gate_up, False), (layer.down, adds)):
            rows = torch.zeros((num_tokens, matrix.in_features), dtype=self.dtype, device=self._device)
            if is_added:
                self.ops.linear_add_norm(rows, matrix, residual, None, self.spec.norm_eps)
            else:
                self.ops.linear(rows, matrix)

    def set_kv_scales(self, scales: Sequence[tuple[float, float]]) -> None:
        """(k_scale, v_scale) of each layer, for an 8-bit cache. Before the first step: captured steps keep them."""
        for layer, (k_scale, v_scale) in zip(self._layers, scales, strict=True):
            layer.attention = replace(layer.attention, k_scale=k_scale, v_scale=v_scale)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """A slot for every tensor that the checkpoint must hold, by its name there."""
        spec, device = self.spec, self._device
        q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim

        slots = list(matrix_slots(self._embedding, {"model.embed_tokens": spec.vocab_size}, bias=False, device=device))
        if not spec.tie_embeddings:
            slots += matrix_slots(self._head, {"lm_head": spec.vocab_size}, bias=False, device=device)
        norms: dict[str, Tensor | None] = {"model.norm": self._final_norm}
        for index, layer in enumerate(self._layers):
            prefix = f"model.layers.{index}"
            attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
            qkv = {f"{attention}.q_proj": q_rows, f"{attention}.k_proj": kv_rows, f"{attention}.v_proj": kv_rows}
            gate_up = {f"{mlp}.gate_proj": spec.intermediate_size, f"{mlp}.up_proj": spec.intermediate_size}
            output, down = {f"{attention}.o_proj": spec.hidden_size}, {f"{mlp}.down_proj": spec.hidden_size}
            slots += matrix_slots(layer.qkv, qkv, bias=spec.qkv_bias, device=device)
            slots += matrix_slots(layer.output, output, bias=spec.output_bias, device=device)
            slots += matrix_slots(layer.gate_up, gate_up, bias=spec.mlp_bias, device=device)
            slots += matrix_slots(layer.down, down, bias=spec.mlp_bias, device=device)
            assert isinstance(layer.attention_norm, Tensor) and isinstance(layer.mlp_norm, Tensor), "loaded already"
            norms |= {
                f"{prefix}.input_layernorm": layer.attention_norm,
                f"{attention}.q_norm": layer.q_norm,
                f"{attention}.k_norm": layer.k_norm,
            }
            if spec.sandwich_norms:
                norms |= {
                    f"{prefix}.post_attention_layernorm": layer.after_attention_norm,
                    f"{prefix}.pre_feedforward_layernorm": layer.mlp_norm,
                    f"{prefix}.post_feedforward_layernorm": layer.after_mlp_norm,
                }
            else:
                norms[f"{prefix}.post_attention_layernorm"] = layer.mlp_norm
        for name, norm in norms.items():
            if norm is not None:
                slots.append(norm_slot(f"{name}.weight", norm, offset=spec.norm_offset))
        return {slot.name: slot for slot in slots}

    def _new_layer(self, index: int) -> _Layer:
        spec = self.spec
        layer_spec = spec.layers[index]
        hidden, q_width = spec.hidden_size, spec.num_heads * spec.head_dim
        qkv_width = q_width + 2 * spec.num_kv_heads * spec.head_dim
        return _Layer(
            attention=AttentionSpec(
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                scale=spec.attention_scale,
                window=layer_spec.window,
                softcap=spec.attention_softcap,
            ),
            group=self.layout.groups[index],
            cos_sin=self._rope_table(layer_spec.rope),
            qkv=self._new_matrix(qkv_width, hidden, bias=spec.qkv_bias),
            output=self._new_matrix(hidden, q_width, bias=spec.output_bias),
            gate_up=self._new_matrix(2 * spec.intermediate_size, hidden, bias=spec.mlp_bias),
            down=self._new_matrix(hidden, spec.intermediate_size, bias=spec.mlp_bias),
            attention_norm=self._new_norm(hidden),
            mlp_norm=self._new_norm(hidden),
            q_norm=self._new_norm(spec.head_dim) if spec.qk_norm else None,
            k_norm=self._new_norm(spec.head_dim) if spec.qk_norm else None,
            after_attention_norm=self._new_norm(hidden) if spec.sandwich_norms else None,
            after_mlp_norm=self._new_norm(hidden) if spec.sandwich_norms else None,
        )

    def _new_matrix(self, out_features: int, in_features: int, *, bias: bool = False) -> LinearWeight:
        self._matrices.append(self.ops.new_linear(out_features, in_features, bias=bias))
        return self._matrices[-1]

    def _new_norm(self, width: int) -> Tensor:
        self._norms.append(torch.empty(width, device=self._device, dtype=self._norm_dtype))
        return self._norms[-1]

    def _rope_table(self, rope: RopeSpec) -> Tensor:
        """One table for all layers that turn alike."""
        for known, table in self._rope_tables:
            if known == rope:
                return table
        table = rotary_table(rope.theta, rope.scaling, self.spec.head_dim, self.max_position, self._device)
        self._rope_tables.append((rope, table))
        return table
