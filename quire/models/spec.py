"""A decoder model as data: everything in which Llama, Mistral, Qwen2, Qwen3 and Gemma 3 differ."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.pooling import PoolingKind


@dataclass(slots=True, frozen=True)
class RopeSpec:
    """Rotary embedding of one kind of layer. `scaling` is the config's rope_scaling entry, already checked."""

    theta: float
    scaling: dict[str, Any] | None = None  # rope_type (see layers/rotary.py), with its numbers
    num_turned: int | None = None  # elements of a head that turn, its first; None: all


@dataclass(slots=True, frozen=True)
class ExpertsSpec:
    """A mixture of experts: each token's MLP is the sum of `top_k` out of `num_experts`, weighed by a softmax."""

    num_experts: int
    top_k: int
    intermediate_size: int  # of one expert
    normalizes: bool  # whether a token's weights are made to sum to 1 (the same as a softmax after the choice)
    has_bias: bool = False  # its router and its matrices (gpt-oss)
    shared_intermediate_size: int | None = None  # the size of an expert that every token has beside those


@dataclass(slots=True, frozen=True, kw_only=True)
class PoolerSpec:
    """What a model makes of hidden states, where it does not generate."""

    kind: PoolingKind
    normalizes: bool = True  # embeddings
    # How many numbers an embedding may be cut to: those that the model was trained for, any, or none.
    dimensions: tuple[int, ...] | None = None  # (): any
    labels: tuple[str, ...] = ()  # of the classes; empty: it embeds
    has_dense: bool = False  # a layer and a tanh before the classifier's matrix (BERT)
    has_bias: bool = False  # of that matrix
    activation: str = "softmax"  # of logits; or sigmoid or identity


@dataclass(slots=True, frozen=True)
class LayerSpec:
    """What one layer does differently from its neighbours."""

    rope: RopeSpec
    window: int | None = None
    has_experts: bool = False  # those of ModelSpec.experts, in place of the MLP
    wide_attention: bool = False  # in a checkpoint in 8-bit floats, one of its matrices is not
    wide_mlp: bool = False  # likewise


@dataclass(slots=True, frozen=True)
class CheckpointFormat:
    """A checkpoint whose matrices are in 8-bit floats, with scales beside them."""

    block: tuple[int, int] | None = None  # rows and columns that share a scale; None: a row's, or all
    wide_modules: tuple[str, ...] = ()  # of its layers that are not in 8 bits: names, ends of names, or re:patterns

    def is_wide(self, part: str, matrices: Sequence[str]) -> bool:
        """Whether any of these matrices of a part of a layer, such as model.layers.0.mlp, is not in 8 bits."""
        modules = [f"{part}.{name}" for name in matrices]
        for wide in self.wide_modules:
            if wide.startswith("re:"):
                if any(re.match(wide[3:], module) for module in modules):
                    return True
            elif any(f".{wide}." in f".{module}." for module in modules):
                return True
        return False


@dataclass(slots=True, frozen=True, kw_only=True)
class IntegerFormat:
    """A checkpoint whose matrices are in whole numbers of few bits, with scales beside them."""

    layout: str  # of its tensors: awq, gptq, pack-quantized or int-quantized
    bits: int
    group: int | None  # columns that share a scale; None: all of a row
    has_zeros: bool = False  # stored ones; otherwise the middle of the range means 0
    is_symmetric: bool = False  # stored zeros are all the middle
    zero_offset: int = 0  # what is to be added to stored zeros
    has_order: bool = False  # a tensor says which group each column is in
    rounds_inputs: bool = False  # made for inputs in 8 bits
    wide_modules: tuple[str, ...] = ()  # of its layers that are not in few bits


@dataclass(slots=True, frozen=True, kw_only=True)
class ModelSpec:
    """The whole model apart from its weights. Made by models/architectures.py from a config."""

    architecture: str  # e.g. LlamaForCausalLM
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    experts: ExpertsSpec | None = None
    activation: str = "silu"  # or gelu_tanh
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    wide_qk_norm: bool = False  # OLMo 2: one norm over all of q, and one over all of k
    norm_offset: bool = False  # Gemma: norms multiply by 1 + weight
    layer_norms: bool = False  # norms take the mean away first, and have a bias
    norm_biases: bool = True  # whether that bias is in the checkpoint; else it is 0
    embedding_norm: bool = False  # BLOOM: a norm of the words' vectors
    entry_norms: bool = True  # a norm before attention and before the MLP
    sandwich_norms: bool = False  # a norm of what each of them adds (Gemma; OLMo 2, which has no others)
    parallel_residual: bool = False  # GPT-NeoX: attention and MLP both read what came into the layer
    shared_norm: bool = False  # Cohere: and one norm of it serves both
    gated_mlp: bool = True  # activation(gate) * up, not activation(up)
    learned_positions: int | None = None  # GPT-2: so many, each with a vector that is added to the word's
    embedding_scale: float | None = None
    logit_scale: float = 1.0  # multiplies logits
    attention_scale: float = 0.0  # multiplies q·k; resolved, never 0 in a finished spec
    attention_softcap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None  # by head: logits fall by so much a token of distance
    sinks: bool = False  # gpt-oss: each head has a logit that no key has
    neighbours_turn: bool = False  # Cohere: element 2i of a head turns with 2i + 1, not i with i + head_dim / 2
    logit_softcap: float | None = None
    tie_embeddings: bool = False
    pooler: PoolerSpec | None = None  # it pools; None: it generates
    is_encoder: bool = False  # every token sees all others, and norms follow the residual sums (BERT)
    num_token_types: int = 0  # of an encoder: kinds of tokens with a vector each, such as those of a second text
    first_position: int = 0  # of an encoder: the learned position of the first token
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"  # what the checkpoint was saved in
    fp8: CheckpointFormat | None = None  # where it is in 8-bit floats
    integers: IntegerFormat | None = None  # where it is in whole numbers
    extras: dict[str, Any] = field(default_factory=dict)

    @property
    def pooling_labels(self) -> tuple[str, ...] | None:
        """The classes of a model that pools, none where it embeds; None: it generates."""
        return None if self.pooler is None else self.pooler.labels

    @property
    def ignores_key_shifts(self) -> bool:
        """Whether keys may all lose the same vector: a query's logits are all lower by one number then, which a softmax
        does not see, but a cap and a sink do."""
        return self.attention_softcap is None and not self.sinks

    @property
    def kv_values_per_layer(self) -> int:
        """Numbers that one token's K and V take in one layer."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that one token's K and V take over all layers."""
        return self.num_layers * self.kv_values_per_layer
