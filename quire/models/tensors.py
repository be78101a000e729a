"""The tensors that a model's checkpoint holds, by Hugging Face's names: known from its spec, before any is made."""

from __future__ import annotations

from quire.models.quantization import KV_SCALES, SCALE_SUFFIXES, UNUSED_SCALES
from quire.models.spec import ModelSpec, PoolerSpec


def checkpoint_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that the decoder needs. Its slots are the same (a test compares)."""
    hidden = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        **_norm_shapes(spec, "model.norm", hidden),
    }
    if spec.embedding_norm:
        shapes |= _norm_shapes(spec, "model.embed_norm", hidden)
    if spec.learned_positions is not None:
        shapes["model.embed_positions.weight"] = (spec.learned_positions, hidden)
    if not spec.tie_embeddings and spec.pooler is None:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    if spec.num_token_types:
        shapes["model.embed_types.weight"] = (spec.num_token_types, hidden)
    if spec.pooler is not None:
        shapes |= classifier_tensors(spec.pooler, hidden)
    for index, layer in enumerate(spec.layers):
        matrices = _attention_matrices(spec) | (_experts_matrices(spec) if layer.has_experts else _mlp_matrices(spec))
        for name, (rows, columns, has_bias) in matrices.items():
            shapes[f"model.layers.{index}.{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"model.layers.{index}.{name}.bias"] = (rows,)
        if spec.sinks:
            shapes[f"model.layers.{index}.self_attn.sinks"] = (spec.num_heads,)
        for name, width in _norms(spec).items():
            shapes |= _norm_shapes(spec, f"model.layers.{index}.{name}", width)
    return shapes


def adaptable_matrices(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The shapes of the matrices that adapters may change, by module: all of a layer's but those of experts, whose rows
    are not a step's tokens."""
    return {
        f"model.layers.{index}.{name}": (rows, columns)
        for index, layer in enumerate(spec.layers)
        for name, (rows, columns, _) in (
            _attention_matrices(spec) | ({} if layer.has_experts else _mlp_matrices(spec))
        ).items()
    }


def classifier_tensors(pooler: PoolerSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a classifier's head; none for a model that embeds."""
    if not pooler.labels:
        return {}
    shapes: dict[str, tuple[int, ...]] = {"score.weight": (len(pooler.labels), hidden)}
    if pooler.has_bias:
        shapes["score.bias"] = (len(pooler.labels),)
    if pooler.has_dense:
        shapes |= {"score.dense.weight": (hidden, hidden), "score.dense.bias": (hidden,)}
    return shapes


def _norm_shapes(spec: ModelSpec, module: str, width: int) -> dict[str, tuple[int, ...]]:
    names = ("weight", "bias") if spec.layer_norms and spec.norm_biases else ("weight",)
    return {f"{module}.{name}": (width,) for name in names}


_Matrices = dict[str, tuple[int, int, bool]]  # module in a layer -> rows, columns, whether it has a bias


def _attention_matrices(spec: ModelSpec) -> _Matrices:
    hidden, q_rows, kv_rows = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return {
        "self_attn.q_proj": (q_rows, hidden, spec.qkv_bias),
        "self_attn.k_proj": (kv_rows, hidden, spec.qkv_bias),
        "self_attn.v_proj": (kv_rows, hidden, spec.qkv_bias),
        "self_attn.o_proj": (hidden, q_rows, spec.output_bias),
    }


def _mlp_matrices(spec: ModelSpec, module: str = "mlp", inner: int | None = None, bias: bool = False) -> _Matrices:
    hidden, inner, bias = spec.hidden_size, inner or spec.intermediate_size, bias or spec.mlp_bias
    return {
        **({f"{module}.gate_proj": (inner, hidden, bias)} if spec.gated_mlp else {}),
        f"{module}.up_proj": (inner, hidden, bias),
        f"{module}.down_proj": (hidden, inner, bias),
    }


def _experts_matrices(spec: ModelSpec) -> _Matrices:
    experts = spec.experts
    assert experts is not None
    matrices: _Matrices = {"mlp.gate": (experts.num_experts, spec.hidden_size, experts.has_bias)}
    for number in range(experts.num_experts):
        matrices |= _mlp_matrices(spec, f"mlp.experts.{number}", experts.intermediate_size, experts.has_bias)
    if experts.shared_intermediate_size is not None:
        matrices |= _mlp_matrices(spec, "mlp.shared_expert", experts.shared_intermediate_size)
        matrices["mlp.shared_expert_gate"] = (1, spec.hidden_size, False)
    return matrices


def _norms(spec: ModelSpec) -> dict[str, int]:
    names = ["input_layernorm", "post_attention_layernorm"] if spec.entry_norms else ["post_attention_layernorm"]
    if spec.shared_norm:
        names = ["input_layernorm"]
    if spec.sandwich_norms:
        names += ["pre_feedforward_layernorm"] * spec.entry_norms + ["post_feedforward_layernorm"]
    norms = dict.fromkeys(names, spec.hidden_size)
    if spec.wide_qk_norm:
        norms |= {
            "self_attn.q_norm": spec.num_heads * spec.head_dim,
            "self_attn.k_norm": spec.num_kv_heads * spec.head_dim,
        }
    if spec.qk_norm:
        norms |= {"self_attn.q_norm": spec.head_dim, "self_attn.k_norm": spec.head_dim}
    return norms


def is_ignored_tensor(spec: ModelSpec, name: str) -> bool:
    """Whether a checkpoint may hold this tensor without its being needed."""
    unused = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")
    if spec.fp8 is not None and name.endswith((*UNUSED_SCALES, *(f".weight{suffix}" for suffix in SCALE_SUFFIXES))):
        return True
    if spec.integers is not None and name.endswith((*UNUSED_SCALES, "_proj.bias")):
        return True  # biases of zeros: weights/safetensors_checkpoint.py looks
    if spec.sinks and name.endswith("_proj_scales"):
        return True  # of experts in MXFP4, read with their blocks
    if spec.pooler is not None and (name.startswith(("lm_head.", "score.", "cls.")) or name.endswith(".position_ids")):
        return True  # of heads that are not asked for
    return name.endswith((*unused, *KV_SCALES)) or (spec.tie_embeddings and name == "lm_head.weight")
