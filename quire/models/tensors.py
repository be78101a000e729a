"""The tensors that a model's checkpoint holds, by Hugging Face's names: known from its spec, before any is made."""

from __future__ import annotations

from quire.models.spec import ModelSpec


def checkpoint_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that the decoder needs. Its slots are the same (a test compares)."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    # module in a layer -> rows, columns, whether it has a bias
    matrices = {
        "self_attn.q_proj": (q_rows, hidden, spec.qkv_bias),
        "self_attn.k_proj": (kv_rows, hidden, spec.qkv_bias),
        "self_attn.v_proj": (kv_rows, hidden, spec.qkv_bias),
        "self_attn.o_proj": (hidden, q_rows, spec.output_bias),
        "mlp.gate_proj": (inner, hidden, spec.mlp_bias),
        "mlp.up_proj": (inner, hidden, spec.mlp_bias),
        "mlp.down_proj": (hidden, inner, spec.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if spec.sandwich_norms:
        norms |= {"pre_feedforward_layernorm": hidden, "post_feedforward_layernorm": hidden}
    if spec.qk_norm:
        norms |= {"self_attn.q_norm": spec.head_dim, "self_attn.k_norm": spec.head_dim}
    layer: dict[str, tuple[int, ...]] = {f"{name}.weight": (width,) for name, width in norms.items()}
    for name, (rows, columns, has_bias) in matrices.items():
        layer[f"{name}.weight"] = (rows, columns)
        if has_bias:
            layer[f"{name}.bias"] = (rows,)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not spec.tie_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    for index in range(spec.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def is_ignored_tensor(spec: ModelSpec, name: str) -> bool:
    """Whether a checkpoint may hold this tensor without its being needed."""
    return name.endswith("rotary_emb.inv_freq") or (spec.tie_embeddings and name == "lm_head.weight")
