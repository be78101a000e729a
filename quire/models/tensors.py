"""The tensors that a model's checkpoint holds, by Hugging Face's names: known from its spec, before any is made."""

from __future__ import annotations

from dataclasses import dataclass

from quire.models.quantization import KV_SCALES, SCALE_SUFFIXES, UNUSED_SCALES
from quire.models.spec import LayerSpec, ModelSpec, PoolerSpec

_EXPERTS = "mlp.experts."  # and the expert's number: in a layer's names


@dataclass(slots=True, frozen=True)
class TensorKind:
    """Tensors of one shape that stand in the same place of equal layers, or of their experts."""

    name: str  # without the layer, and of the first expert
    shape: tuple[int, ...]
    count: int
    layer: LayerSpec | None = None  # one that they are in; None: they are in none


def checkpoint_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that the decoder needs. Its slots are the same (a test compares)."""
    shapes = _tensors_beside_layers(spec)
    for index, layer in enumerate(spec.layers):
        for name, shape in _layer_tensors(spec, layer, num_experts(spec)).items():
            shapes[f"model.layers.{index}.{name}"] = shape
    return shapes


def tensor_kinds(spec: ModelSpec) -> list[TensorKind]:
    """The same tensors, counted: a mixture of experts has tens of thousands, of a few kinds."""
    kinds = [TensorKind(name, shape, 1) for name, shape in _tensors_beside_layers(spec).items()]
    layers: dict[tuple[bool, bool, bool], list[LayerSpec]] = {}
    for layer in spec.layers:
        layers.setdefault((layer.has_experts, layer.wide_attention, layer.wide_mlp), []).append(layer)
    for alike in layers.values():
        for name, shape in _layer_tensors(spec, alike[0], 1).items():
            count = len(alike) * (num_experts(spec) if name.startswith(_EXPERTS) else 1)
            kinds.append(TensorKind(name, shape, count, alike[0]))
    return kinds


def num_experts(spec: ModelSpec) -> int:
    return 0 if spec.experts is None else spec.experts.num_experts


def _tensors_beside_layers(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
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
    return shapes


def _layer_tensors(spec: ModelSpec, layer: LayerSpec, num_experts: int) -> dict[str, tuple[int, ...]]:
    """By their names in the layer. num_experts: of its first ones, where it has any."""
    mlp = _experts_matrices(spec, num_experts) if layer.has_experts else _mlp_matrices(spec)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns, has_bias) in (_attention_matrices(spec) | mlp).items():
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)
    if spec.sinks:
        shapes["self_attn.sinks"] = (spec.num_heads,)
    for name, width in _norms(spec).items():
        shapes |= _norm_shapes(spec, name, width)
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


def _experts_matrices(spec: ModelSpec, num_experts: int) -> _Matrices:
    experts = spec.experts
    assert experts is not None
    matrices: _Matrices = {"mlp.gate": (experts.num_experts, spec.hidden_size, experts.has_bias)}
    for number in range(num_experts):
        matrices |= _mlp_matrices(spec, f"{_EXPERTS}{number}", experts.intermediate_size, experts.has_bias)
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
