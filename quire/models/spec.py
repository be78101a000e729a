"""A decoder model as data: everything in which Llama, Mistral, Qwen2, Qwen3 and Gemma 3 differ."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, frozen=True)
class RopeSpec:
    """Rotary embedding of one kind of layer. `scaling` is the config's rope_scaling entry, already checked."""

    theta: float
    scaling: dict[str, Any] | None = None  # rope_type (see layers/rotary.py), with its numbers


@dataclass(slots=True, frozen=True)
class ExpertsSpec:
    """A mixture of experts: each token's MLP is the sum of `top_k` out of `num_experts`, weighed by a softmax."""

    num_experts: int
    top_k: int
    intermediate_size: int  # of one expert
    normalizes: bool  # whether a token's weights are made to sum to 1 (the same as a softmax after the choice)
    shared_intermediate_size: int | None = None  # of an expert that every token has beside those, weighed by a sigmoid


@dataclass(slots=True, frozen=True)
class LayerSpec:
    """What one layer does differently from its neighbours."""

    rope: RopeSpec
    window: int | None = None
    has_experts: bool = False  # those of ModelSpec.experts, in place of the MLP


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
    norm_offset: bool = False  # Gemma: norms multiply by 1 + weight
    sandwich_norms: bool = False  # Gemma: a norm after attention and after the MLP too
    embedding_scale: float | None = None
    attention_scale: float = 0.0  # multiplies q·k; resolved, never 0 in a finished spec
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    tie_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"  # what the checkpoint was saved in
    extras: dict[str, Any] = field(default_factory=dict)

    @property
    def kv_values_per_layer(self) -> int:
        """Numbers that one token's K and V take in one layer."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that one token's K and V take over all layers."""
        return self.num_layers * self.kv_values_per_layer
