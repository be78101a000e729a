"""One decoder for every served architecture: what they differ in comes as data, in a ModelSpec.

The residual stream is one tensor, changed in place. Each of a layer's four products is called together with what
follows it, so that a matrix may make one launch of the two: a layer is five operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.kernels.adapters import AdaptedLinear, AdapterBank, AdapterSite
from quire.kernels.interface import AttentionBatch, AttentionSpec, LayerStack, LinearWeight, Norm, Normed, Ops, Rotary
from quire.layers.rotary import pairs_order, rotary_table
from quire.models.classifier import Classifier
from quire.models.kv_layout import KVLayout, kv_layout
from quire.models.layer import DenseMlp, ExpertsMlp, Layer, Mlp, PlainMlp, ReadRows, SelfAttention
from quire.models.share import Cut, ModelShare
from quire.models.slots import WeightSlot, matrix_slots, norm_slots
from quire.models.spec import ModelSpec, RopeSpec
from quire.models.tensors import checkpoint_tensors, is_ignored_tensor
from quire.parallel.linear import SummedLinear

if TYPE_CHECKING:
    from quire.parallel.ranks import Ranks


# Up to so many tokens, layers run in one call. What lies between calls is much of a step of few tokens, and little of
# one of many, which would only be deaf to interrupts for longer.
_STACKED_TOKENS = 64


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
        share: ModelShare | None = None,
        ranks: Ranks | None = None,
        adapters: AdapterBank | None = None,
    ) -> None:
        """layout: of the layers that are here; share: what is here, where the model is split, and `ranks` then reaches
        the others; adapters: where those lie that steps may use."""
        self.spec = spec
        self.adapters = adapters
        self.share = share or ModelShare.whole(spec)
        self._ranks = ranks
        self.layout = layout or kv_layout(spec, max_position)
        self.max_position = max_position
        self.kv_offsets: Tensor | None = None
        self.ops = ops
        self._device = torch.device(device)
        self.dtype = dtype
        self._norm_dtype = torch.promote_types(dtype, torch.float32)
        self._matrices: list[LinearWeight] = []
        self._norms: list[Tensor] = []
        self._rope_tables: list[tuple[RopeSpec, Tensor]] = []
        words = len(self.share.words)
        self._embedding = self._new_matrix(words, spec.hidden_size, is_sensitive=True) if self.share.is_first else None
        self._positions = None
        if spec.learned_positions is not None and self.share.is_first:
            self._positions = self._new_matrix(spec.learned_positions, spec.hidden_size, is_sensitive=True)
        self._embedding_norm = self._new_norm(spec.hidden_size) if spec.embedding_norm and self.share.is_first else None
        self._head = self._final_norm = self.classifier = None
        if self.share.is_last and spec.pooler is not None:
            self._final_norm = self._new_norm(spec.hidden_size)
            if spec.pooler.labels:
                self.classifier = Classifier(spec.pooler, spec.hidden_size, device=self._device)
        elif self.share.is_last:
            is_tied = spec.tie_embeddings and self._embedding is not None
            self._head = self._embedding if is_tied else self._new_matrix(words, spec.hidden_size, is_sensitive=True)
            self._final_norm = self._new_norm(spec.hidden_size)
        self._slopes = None
        if spec.alibi_slopes is not None:
            slopes = spec.alibi_slopes[self.share.heads.slice]
            self._slopes = torch.empty(len(slopes), device=self._device, dtype=self._norm_dtype)
            self._slopes.copy_(torch.tensor(slopes))
            self._norms.append(self._slopes)
        first = self.share.layers.start
        self._layers = [self._new_layer(first + index, group) for index, group in enumerate(self.layout.groups)]
        # All layers but the last, without adapters, where the backend has them in one call.
        self.stack: LayerStack | None = None
        # Gemma multiplies by the factor as rounded to the activations' dtype, and was trained so.
        scale = spec.embedding_scale
        self._embedding_scale = None if scale is None else torch.tensor(scale, dtype=dtype).item()

    def forward(
        self,
        token_ids: Tensor,
        batches: Sequence[AttentionBatch],
        kv: Sequence[Tensor],
        read: ReadRows | None = None,
        on_written: Callable[[int], None] | None = None,
    ) -> Tensor:
        """token_ids: [tokens] int64, placed by `batches`, one for each KV group; kv: each layer's cache.
        -> [tokens, hidden], before the final norm, which only the tokens that give logits need; with `read`, of these
        alone. Where there are stages, they come from the one before and go to the one after.

        on_written: called with each layer's index when the launches that write its keys and values are submitted, which
        on a CPU is when they are written. Not for layers that run in one call, nor for the last."""
        ops, layers = self.ops, self._layers
        for batch in batches if read is None else (*batches, read.batch):
            batch.decode_pieces.clear()  # an earlier pass may have had other lengths
        if self.adapters is not None:
            self.adapters.rows = batches[0].adapters
        residual = self._enter(token_ids)
        if self._positions is not None:
            residual.add_(self._positions.embed(batches[0].positions))
        if self._embedding_norm is not None:
            residual = ops.normalize(residual, self._embedding_norm)
        x = self._first_norm(residual)
        if self.stack is not None and len(residual) <= _STACKED_TOKENS and batches[0].adapters is None:
            x = self.stack.run(x, residual, kv, batches)
        else:
            for index, (layer, following) in enumerate(pairwise(layers)):
                x, residual = layer.attend(ops, x, residual, kv[index], batches)
                if on_written is not None:
                    on_written(index)
                x = layer.mlp.run(x, residual, following.attention_norm)
        x, residual = layers[-1].attend(ops, x, residual, kv[-1], batches, read)
        if len(residual):
            layers[-1].mlp.run(x, residual, None)
        if not self.share.is_last:
            assert self._ranks is not None
            self._ranks.send_hidden(residual)
        return residual

    def _first_norm(self, residual: Tensor) -> Normed:
        norm = self._layers[0].attention_norm
        return residual if norm is None else self.ops.norm(residual, norm)

    def _enter(self, token_ids: Tensor) -> Tensor:
        if self._embedding is None:
            assert self._ranks is not None
            shape = (len(token_ids), self.spec.hidden_size)
            return self._ranks.receive_hidden(torch.empty(shape, dtype=self.dtype, device=self._device))
        words = self.share.words
        if words.is_whole:
            return self._embedding.embed(token_ids, self._embedding_scale)
        # Each word is on one rank; the others add zeros to it.
        assert self._ranks is not None
        elsewhere = (token_ids < words.start) | (token_ids >= words.stop)
        rows = self._embedding.embed((token_ids - words.start).masked_fill(elsewhere, 0), self._embedding_scale)
        return self._ranks.sum(rows.masked_fill_(elsewhere[:, None], 0.0))

    def excerpt(self) -> tuple[Decoder, list[int]]:
        """The same model with the fewest layers that do all that it does, and which ones: each kind of layer, and the
        last, after which no norm comes. For what only depends on shapes, at a fraction of the time."""
        kinds = self.spec.layers[self.share.layers.start : self.share.layers.stop]
        kept = sorted({kinds.index(kind) for kind in kinds} | {len(kinds) - 1})
        excerpt = copy(self)
        excerpt._layers, excerpt.stack = [self._layers[index] for index in kept], None
        return excerpt, kept

    def logits(self, hidden: Tensor, indices: Tensor | None, out: Tensor | None = None) -> Tensor:
        """hidden: [tokens, hidden] from `forward`; indices: [rows] of the tokens wanted, or None for all.
        -> float32 [rows, vocab], in `out` where given."""
        assert self._head is not None and self._final_norm is not None
        if indices is not None:
            hidden = hidden[indices]
        x = self.ops.normalize(hidden, self._final_norm)
        return self._head.logits(x, self.spec.logit_softcap, out)

    def normalized(self, hidden: Tensor) -> Tensor:
        """hidden: [tokens, hidden] from `forward` -> the states that a model which pools makes its vectors of."""
        assert self._final_norm is not None
        return self.ops.normalize(hidden, self._final_norm)

    def gathered_logits(self, hidden: Tensor, indices: Tensor | None, out: Tensor | None = None) -> Tensor | None:
        """Logits like those of `logits`, over the whole vocabulary, on the rank that samples; None on the others."""
        if not self.share.is_last:
            return None
        if self.share.words.is_whole or self._ranks is None:
            return self.logits(hidden, indices, out)
        return self._ranks.gather(self.logits(hidden, indices), out)

    @property
    def samples(self) -> bool:
        """Whether this rank is the one that has all logits."""
        return self._ranks is None or self._ranks.samples

    @property
    def weight_bytes(self) -> int:
        """Everything that the model keeps on its device: matrices, norms and rotary tables."""
        held: list[Tensor | LinearWeight | Classifier] = [*self._matrices, *self._norms]
        held += [table for _, table in self._rope_tables]
        held += [self.classifier] if self.classifier is not None else []
        return sum(part.nbytes for part in held)

    def is_ignored_weight(self, name: str) -> bool:
        """Whether a checkpoint may hold this tensor without its being needed."""
        return is_ignored_tensor(self.spec, name) or (
            not self.share.layers.is_whole and name in checkpoint_tensors(self.spec)
        )

    def finish_loading(self) -> None:
        """Prepare the weights for steps, once the last of them is loaded."""
        if self.adapters is not None:
            self.adapters.allocate(self._adapter_sites())
        for layer in self._layers:
            layer.fold_norms()
        plain = [layer.plain(following.attention_norm) for layer, following in pairwise(self._layers)]
        if plain and None not in plain:
            self.stack = self.ops.new_stack([layer for layer in plain if layer is not None])

    def multiply_once(self, num_tokens: int) -> None:
        """Multiply once by each of a layer's matrices, for what a library does when it is first called: in the way of
        the steps, as it has other code for products that are added to something."""
        layer = self._layers[0]
        num_tokens = max(num_tokens, 64)  # few rows are multiplied by kernels that may not be compiled yet
        residual = torch.zeros((num_tokens, self.spec.hidden_size), dtype=self.dtype, device=self._device)
        for matrix, is_added in (*layer.attention.matrices(), *layer.mlp.matrices()):
            rows = torch.zeros((num_tokens, matrix.in_features), dtype=self.dtype, device=self._device)
            norm = layer.mlp_norm
            if is_added and norm is not None and (norm.is_folded or norm.quantizes):
                matrix.multiply_add_norm(rows, residual, None)
            else:
                matrix.multiply(rows)

    def set_kv_scales(self, scales: Sequence[tuple[float, float]]) -> None:
        """(k_scale, v_scale) of each layer, for an 8-bit cache. Before the first step: captured steps keep them."""
        for layer, (k_scale, v_scale) in zip(self._layers, scales, strict=True):
            layer.attention.spec = replace(layer.attention.spec, k_scale=k_scale, v_scale=v_scale)

    @property
    def kv_scales(self) -> list[tuple[float, float]]:
        """(k_scale, v_scale) of each layer."""
        return [(layer.attention.spec.k_scale, layer.attention.spec.v_scale) for layer in self._layers]

    def set_kv_offsets(self, offsets: Tensor | None) -> None:
        """[layers, kv_heads, head_dim] float32: what each layer's keys lose before they go into an 8-bit cache. None:
        nothing. Before the first step, too."""
        assert offsets is None or self.spec.ignores_key_shifts
        self.kv_offsets = offsets
        for index, layer in enumerate(self._layers):
            offset = None if offsets is None else offsets[index]
            layer.attention.spec = replace(layer.attention.spec, k_offset=offset)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """A slot for every tensor that the checkpoint must hold, by its name there."""
        spec, words = self.spec, self.share.words
        slots: list[WeightSlot] = []
        if self._embedding is not None:
            slots += matrix_slots(self._embedding, {"model.embed_tokens": words})
        if self._head is not None and self._head is not self._embedding:
            slots += matrix_slots(self._head, {"model.embed_tokens" if spec.tie_embeddings else "lm_head": words})
        if self._positions is not None:
            slots += matrix_slots(self._positions, {"model.embed_positions": self._positions.out_features})
        if self._embedding_norm is not None:
            slots += norm_slots("model.embed_norm", self._embedding_norm, offset=False)
        if self._final_norm is not None:
            slots += norm_slots("model.norm", self._final_norm, offset=spec.norm_offset, scale=spec.logit_scale)
        if self.classifier is not None:
            slots += self.classifier.slots()
        for index, layer in enumerate(self._layers, self.share.layers.start):
            slots += layer.slots(f"model.layers.{index}", norm_offset=spec.norm_offset)
        return {slot.name: slot for slot in slots}

    def _adapter_sites(self) -> Iterator[AdapterSite]:
        """The matrices of `adaptable_matrices` that this rank holds."""
        for slot in self.weight_slots().values():
            matrix = slot.matrix.part if isinstance(slot.matrix, SummedLinear) else slot.matrix
            if isinstance(matrix, AdaptedLinear):
                module = slot.name.removesuffix(".weight")
                yield AdapterSite(module, matrix, slot.first_row, slot.part, slot.head_order)

    def _new_layer(self, index: int, group: int) -> Layer:
        spec, share, kind = self.spec, self.share, self.spec.layers[index]
        hidden, head_dim = spec.hidden_size, spec.head_dim
        q_width, kv_width = len(share.heads) * head_dim, len(share.kv_heads) * head_dim
        turned = head_dim if kind.rope.num_turned is None else kind.rope.num_turned
        head_order = pairs_order(head_dim, turned, neighbours=spec.neighbours_turn) if turned else None
        if head_order == list(range(head_dim)):
            head_order = None
        sinks = None
        if spec.sinks:
            sinks = torch.empty(len(share.heads), device=self._device, dtype=self._norm_dtype)
            self._norms.append(sinks)
        attention = SelfAttention(
            AttentionSpec(
                num_heads=len(share.heads),
                num_kv_heads=len(share.kv_heads),
                head_dim=head_dim,
                scale=spec.attention_scale,
                window=kind.window,
                softcap=spec.attention_softcap,
                leaves_wide=kind.wide_attention,
                slopes=self._slopes,
                sinks=sinks,
            ),
            group,
            Rotary(
                self._rope_table(kind.rope),
                q_norm=self._new_norm(head_dim).weight if spec.qk_norm else None,
                k_norm=self._new_norm(head_dim).weight if spec.qk_norm else None,
                eps=spec.norm_eps,
            ),
            qkv=self._adapted(
                self._new_matrix(q_width + 2 * kv_width, hidden, bias=spec.qkv_bias, is_sensitive=kind.wide_attention)
            ),
            output=self._new_summed_matrix(hidden, q_width, bias=spec.output_bias, is_sensitive=kind.wide_attention),
            branch_norm=self._new_norm(hidden) if spec.sandwich_norms else None,
            heads=share.heads,
            kv_heads=share.kv_heads,
            wide_norms=(self._new_norm(q_width), self._new_norm(kv_width)) if spec.wide_qk_norm else None,
            head_order=head_order,
        )
        is_wide = kind.wide_mlp
        mlp: Mlp = self._new_experts(is_wide) if kind.has_experts else self._new_mlp(share.columns, is_wide)
        mlp.branch_norm = self._new_norm(hidden) if spec.sandwich_norms else None
        attention_norm = self._new_norm(hidden) if spec.entry_norms else None
        mlp_norm = self._new_norm(hidden) if spec.entry_norms and not spec.shared_norm else None
        return Layer(attention_norm, attention, mlp_norm, mlp, spec.parallel_residual)

    def _new_mlp(self, columns: Cut, is_wide: bool, *, is_summed: bool = True) -> DenseMlp:
        """is_summed: over ranks, by itself; else it is an expert."""
        hidden, inner, bias = self.spec.hidden_size, len(columns), self.spec.mlp_bias
        kind = DenseMlp if self.spec.gated_mlp else PlainMlp
        new_down = self._new_summed_matrix if is_summed else self._new_matrix
        gate_up = self._new_matrix(len(kind.modules) * inner, hidden, bias=bias, is_sensitive=is_wide)
        down = new_down(hidden, inner, bias=bias, is_sensitive=is_wide)
        if is_summed:
            gate_up = self._adapted(gate_up)
        return kind(self.spec.activation, gate_up=gate_up, down=down, columns=columns)

    def _new_experts(self, is_wide: bool) -> ExpertsMlp:
        spec, share = self.spec.experts, self.share
        assert spec is not None and share.expert_columns is not None
        experts = self.ops.new_experts(
            spec.num_experts,
            len(share.expert_columns),
            self.spec.hidden_size,
            top_k=spec.top_k,
            normalizes=spec.normalizes,
            activation=self.spec.activation,
            is_sensitive=is_wide,
            bias=spec.has_bias,
        )
        self._matrices += [experts.router, *experts.gate_ups, *experts.downs]
        shared = share.shared_expert_columns
        return ExpertsMlp(
            self.ops,
            experts,
            share.expert_columns,
            shared=None if shared is None else self._new_mlp(shared, is_wide, is_summed=False),
            shared_gate=None if shared is None else self._new_matrix(1, self.spec.hidden_size, is_sensitive=True),
            ranks=None if share.tensor_size == 1 else self._ranks,
        )

    def _new_matrix(
        self, out_features: int, in_features: int, *, bias: bool = False, is_sensitive: bool = False
    ) -> LinearWeight:
        self._matrices.append(self.ops.new_linear(out_features, in_features, bias=bias, is_sensitive=is_sensitive))
        return self._matrices[-1]

    def _new_summed_matrix(
        self, out_features: int, in_features: int, *, bias: bool, is_sensitive: bool
    ) -> LinearWeight:
        """A matrix whose inputs are split among ranks, so that its products are parts of a sum, with what adapters add
        to them."""
        matrix = self._adapted(self._new_matrix(out_features, in_features, bias=bias, is_sensitive=is_sensitive))
        if self.share.tensor_size == 1:
            return matrix
        assert self._ranks is not None
        return SummedLinear(matrix, self.ops, self._ranks, adds_bias=self.share.tensor_rank == 0)

    def _adapted(self, matrix: LinearWeight) -> LinearWeight:
        """The matrix with adapters on top, where there may be any."""
        return matrix if self.adapters is None else self.ops.new_adapted(matrix, self.adapters)

    def _new_norm(self, width: int) -> Norm:
        parts = [
            torch.empty(width, device=self._device, dtype=self._norm_dtype) for _ in range(1 + self.spec.layer_norms)
        ]
        self._norms += parts
        if not self.spec.layer_norms:
            return Norm(parts[0], self.spec.norm_eps)
        if not self.spec.norm_biases:
            parts[1].zero_()
        return Norm(parts[0], self.spec.norm_eps, bias=parts[1], is_biased=self.spec.norm_biases)

    def _rope_table(self, rope: RopeSpec) -> Tensor:
        """One table for all layers that turn alike."""
        for known, table in self._rope_tables:
            if known == rope:
                return table
        table = rotary_table(
            rope.theta, rope.scaling, self.spec.head_dim, self.max_position, self._device, num_turned=rope.num_turned
        )
        self._rope_tables.append((rope, table))
        return table
