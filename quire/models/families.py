"""The families of decoders that are served, as a table of their differences from Llama."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from quire.models.config_reader import ConfigReader, shown
from quire.models.spec import ExpertsSpec
from quire.models.stored_names import Stacked, StoredNames

LayerTypes = tuple[str, ...]  # full_attention or sliding_attention, by layer
_MAX_EXPERTS = 4096


@dataclass(slots=True, frozen=True, kw_only=True)
class Architecture:
    """How one architecture differs from Llama. None: the config's own key says."""

    layer_types: Callable[[ConfigReader, int], LayerTypes]
    qkv_bias: bool | None = None  # attention_bias
    output_bias: bool | None = None  # attention_bias
    has_mlp_bias: bool = False  # whether mlp_bias is one of its keys
    qk_norm: bool = False
    is_gemma: bool = False  # 1 + weight in norms, sandwich norms, scaled embedding, tanh GELU, two rotary bases
    head_dim_from_hidden: bool = True  # where head_dim is missing: hidden_size / num_attention_heads
    tied_by_default: bool = False
    experts: Callable[[ConfigReader], ExpertsSpec] | None = None
    names: StoredNames = field(default_factory=StoredNames)
    keys: Mapping[str, str] = field(default_factory=dict)  # what its configs call the usual keys
    activation: str = "silu"  # where the config names none
    mlp_bias: bool | None = None  # None: see has_mlp_bias
    bias_by_default: bool = False  # attention_bias and mlp_bias, where they are missing
    trained_length: int | None = None  # max_position_embeddings, where that is missing
    inner_ratio: int | None = None  # intermediate_size / hidden_size, where that is missing
    wide_qk_norm: bool = False
    layer_norms: bool = False
    entry_norms: bool = True
    sandwich_norms: bool = False
    gated_mlp: bool = True
    norm_biases: bool = True  # of LayerNorms
    embedding_norm: bool = False
    parallel_residual: bool | None = False  # None: use_parallel_residual
    parallel_by_default: bool = False
    shared_norm: bool = False
    alibi: Callable[[ConfigReader, int], tuple[float, ...]] | None = None  # slopes of so many heads
    sinks: bool = False
    clamped_mlp: bool = False
    neighbours_turn: bool = False
    has_logit_scale: bool = False  # whether logit_scale is one of its keys
    unturned_layers: Callable[[ConfigReader, LayerTypes], frozenset[int]] | None = None  # without rotary embedding
    fixed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)  # keys, and the values that are served
    partial_rotary: bool = False  # whether partial_rotary_factor is one of its keys
    learned_positions: bool = False
    local_rope: bool = False  # Gemma 3: layers with a window turn at another base
    is_granite: bool = False  # multipliers of embedding, attention, residual branches and logits


def _mixtral_experts(reader: ConfigReader) -> ExpertsSpec:
    """All of the MLP is experts; a softmax over the chosen."""
    return _experts(reader, "num_local_experts", "intermediate_size", normalizes=True)


def _qwen_experts(reader: ConfigReader) -> ExpertsSpec:
    """transformers 5 writes num_experts as num_local_experts. Qwen2 has a shared expert beside them."""
    count = "num_experts" if reader.get("num_experts") is not None else "num_local_experts"
    experts = _experts(reader, count, "moe_intermediate_size", normalizes=reader.flag("norm_topk_prob", False))
    if not reader.get(shared := "shared_expert_intermediate_size"):
        return experts
    return replace(experts, shared_intermediate_size=reader.integer(shared))


def _gpt_oss_experts(reader: ConfigReader) -> ExpertsSpec:
    """A softmax over the chosen, and biases everywhere."""
    return replace(_experts(reader, "num_local_experts", "intermediate_size", normalizes=True), has_bias=True)


def _olmoe_experts(reader: ConfigReader) -> ExpertsSpec:
    count = "num_experts" if reader.get("num_experts") is not None else "num_local_experts"
    return _experts(reader, count, "intermediate_size", normalizes=reader.flag("norm_topk_prob", False))


def _bloom_slopes(reader: ConfigReader, num_heads: int) -> tuple[float, ...]:
    """A geometric series for the largest power of two, and for the heads past it every second of the next one's."""
    power = 1 << (num_heads.bit_length() - 1)
    series = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    return tuple(series + [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(num_heads - power)])


def _mpt_slopes(reader: ConfigReader, num_heads: int) -> tuple[float, ...]:
    attention = reader.part("attn_config") or ConfigReader({}, reader.source)
    if not attention.flag("alibi", True):
        raise attention.error("alibi is false: this architecture is served with ALiBi, not with learned positions")
    for key, served in {"clip_qkv": (None,), "qk_ln": (None, False), "softmax_scale": (None,)}.items():
        if attention.get(key) not in served:
            raise attention.error(f"{key} is {shown(attention.get(key))}: this architecture is served without")
    steepest = attention.number("alibi_bias_max", 8)
    power = 1 << (num_heads - 1).bit_length()
    series = [2.0 ** (-steepest * (i + 1) / power) for i in range(power)]
    return tuple(series if power == num_heads else (series[1::2] + series[::2])[:num_heads])


def _experts(reader: ConfigReader, count: str, size: str, *, normalizes: bool) -> ExpertsSpec:
    num_experts, top_k = reader.integer(count, at_most=_MAX_EXPERTS), reader.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise reader.error(f"num_experts_per_tok is {top_k:,}: more than the {num_experts:,} experts ({count})")
    return ExpertsSpec(num_experts, top_k, reader.integer(size), normalizes)


def _all_full(reader: ConfigReader, num_layers: int) -> LayerTypes:
    """Llama: no windows."""
    return _agreeing(reader, ("full_attention",) * num_layers)


def _all_alike(reader: ConfigReader, num_layers: int) -> LayerTypes:
    """Mistral: every layer has the window, where there is one. Null is none; a missing key is ambiguous."""
    if "sliding_window" not in reader.values:
        raise reader.error("sliding_window is missing: expected a number of tokens, or null for none")
    kind = "full_attention" if reader.get("sliding_window") is None else "sliding_attention"
    return _agreeing(reader, (kind,) * num_layers)


def _late_windows(reader: ConfigReader, num_layers: int) -> LayerTypes:
    """Qwen: windows, if at all, from layer max_window_layers on."""
    if not reader.flag("use_sliding_window", False) or reader.get("sliding_window") is None:
        return _agreeing(reader, ("full_attention",) * num_layers)
    listed = _listed_layer_types(reader, num_layers)
    if listed is not None:
        return listed
    if reader.get("max_window_layers") != 0:
        num_full = min(reader.integer("max_window_layers"), num_layers)
    else:
        num_full = 0
    return ("full_attention",) * num_full + ("sliding_attention",) * (num_layers - num_full)


def _alternating(reader: ConfigReader, num_layers: int, *, default_pattern: int) -> LayerTypes:
    """Gemma: every sliding_window_pattern-th layer sees everything."""
    listed = _listed_layer_types(reader, num_layers)
    if listed is not None:
        return listed
    pattern = reader.integer("sliding_window_pattern", default_pattern)
    return tuple("sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers))


def _every_nth_unturned(reader: ConfigReader, layer_types: LayerTypes) -> frozenset[int]:
    """SmolLM3: where no_rope_layers says 0, else every fourth layer."""
    listed = reader.get("no_rope_layers")
    if listed is None:
        step = reader.integer("no_rope_layer_interval", 4)
        listed = [(index + 1) % step for index in range(len(layer_types))]
    if not isinstance(listed, list | tuple) or len(listed) != len(layer_types):
        raise reader.error(f"no_rope_layers must list {len(layer_types)} layers, as many as num_hidden_layers")
    return frozenset(index for index, turns in enumerate(listed) if not turns)


def _full_unturned(reader: ConfigReader, layer_types: LayerTypes) -> frozenset[int]:
    """Cohere 2: layers that see everything do not turn."""
    return frozenset(index for index, kind in enumerate(layer_types) if kind == "full_attention")


def _agreeing(reader: ConfigReader, layer_types: LayerTypes) -> LayerTypes:
    """layer_types, unless the config lists others."""
    listed = _listed_layer_types(reader, len(layer_types))
    if listed is not None and listed != layer_types:
        raise reader.error("layer_types contradicts what sliding_window says for this architecture")
    return layer_types


def _listed_layer_types(reader: ConfigReader, num_layers: int) -> LayerTypes | None:
    listed = reader.get("layer_types")
    if listed is None:
        return None
    if not isinstance(listed, list | tuple) or len(listed) != num_layers:
        raise reader.error(f"layer_types must list {num_layers} layers, as many as num_hidden_layers")
    for kind in listed:
        if kind not in ("full_attention", "sliding_attention"):
            raise reader.error(f"layer type {shown(kind)} is not served (there are full_attention, sliding_attention)")
    return tuple(listed)


# Families that are refused, by how their architectures' names begin, and what they have that no layer here does.
UNSERVED = {
    "Gemma3ForConditionalGeneration": (
        "It takes images too: use a text-only Gemma 3 (Gemma3ForCausalLM), such as google/gemma-3-1b-it, or a "
        "text-only export of this one"
    ),
    "Gemma3n": "Its layers have embeddings of their own and four residual streams: use Gemma3ForCausalLM",
    "Deepseek": "Its keys and values are one compressed vector (MLA): use Qwen3MoeForCausalLM, or a distilled model",
    "Kimi": "Its keys and values are one compressed vector (MLA): use Qwen3MoeForCausalLM",
    "Llama4": "It has chunked attention and sigmoid routing: use LlamaForCausalLM or Qwen3MoeForCausalLM",
    "Qwen3Next": "Most of its layers are linear attention: use Qwen3MoeForCausalLM",
    "Qwen3_5": "Most of its layers are linear attention: use Qwen3MoeForCausalLM",
    "Mamba": "It has states instead of keys and values: use a decoder with attention",
    "Falcon": "Use a GPTNeoXForCausalLM or LlamaForCausalLM model of its size",
    "GraniteMoeHybrid": "Most of its layers are Mamba: use GraniteForCausalLM or GraniteMoeForCausalLM",
}

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_COHERE: dict[str, Any] = {
    "layer_norms": True,
    "norm_biases": False,
    "parallel_residual": True,
    "shared_norm": True,
    "neighbours_turn": True,
    "has_logit_scale": True,
    "tied_by_default": True,
    "fixed": {"use_qk_norm": (False,)},
    "keys": {"rms_norm_eps": "layer_norm_eps"},
}
ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(layer_types=_all_full, has_mlp_bias=True),
    "MistralForCausalLM": Architecture(layer_types=_all_alike, qkv_bias=False, output_bias=False),
    "Qwen2ForCausalLM": Architecture(layer_types=_late_windows, qkv_bias=True, output_bias=False),
    "Qwen3ForCausalLM": Architecture(layer_types=_late_windows, qk_norm=True, head_dim_from_hidden=False),
    "MixtralForCausalLM": Architecture(
        layer_types=_all_alike,
        qkv_bias=False,
        output_bias=False,
        experts=_mixtral_experts,
        names=StoredNames(
            renames=(
                (r"\.block_sparse_moe\.", ".mlp."),
                (r"\.w1\.weight$", ".gate_proj.weight"),
                (r"\.w3\.weight$", ".up_proj.weight"),
                (r"\.w2\.weight$", ".down_proj.weight"),
            )
        ),
    ),
    "Qwen2MoeForCausalLM": Architecture(
        layer_types=_late_windows, qkv_bias=True, output_bias=False, experts=_qwen_experts
    ),
    "Qwen3MoeForCausalLM": Architecture(
        layer_types=_late_windows, qk_norm=True, head_dim_from_hidden=False, experts=_qwen_experts
    ),
    "Gemma2ForCausalLM": Architecture(
        layer_types=partial(_alternating, default_pattern=2),
        is_gemma=True,
        activation="gelu_pytorch_tanh",
        head_dim_from_hidden=False,
        tied_by_default=True,
    ),
    "Gemma3ForCausalLM": Architecture(
        layer_types=partial(_alternating, default_pattern=6),
        qk_norm=True,
        is_gemma=True,
        local_rope=True,
        activation="gelu_pytorch_tanh",
        head_dim_from_hidden=False,
        tied_by_default=True,
    ),
    "Phi3ForCausalLM": Architecture(
        layer_types=_all_alike,
        qkv_bias=False,
        output_bias=False,
        partial_rotary=True,
        names=StoredNames(fused={"self_attn.qkv_proj": _QKV, "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}),
    ),
    "Olmo2ForCausalLM": Architecture(layer_types=_all_full, wide_qk_norm=True, entry_norms=False, sandwich_norms=True),
    "GraniteForCausalLM": Architecture(layer_types=_all_full, has_mlp_bias=True, is_granite=True),
    "Starcoder2ForCausalLM": Architecture(
        layer_types=_all_alike,
        has_mlp_bias=True,
        bias_by_default=True,
        layer_norms=True,
        gated_mlp=False,
        activation="gelu_pytorch_tanh",
        tied_by_default=True,
        keys={"rms_norm_eps": "norm_epsilon", "attention_bias": "use_bias", "mlp_bias": "use_bias"},
        names=StoredNames(renames=((r"\.mlp\.c_fc\.", ".mlp.up_proj."), (r"\.mlp\.c_proj\.", ".mlp.down_proj."))),
    ),
    "GPT2LMHeadModel": Architecture(
        layer_types=_all_full,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        layer_norms=True,
        gated_mlp=False,
        learned_positions=True,
        activation="gelu_new",
        inner_ratio=4,
        tied_by_default=True,
        keys={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "num_key_value_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "intermediate_size": "n_inner",
            "rms_norm_eps": "layer_norm_epsilon",
            "hidden_act": "activation_function",
        },
        names=StoredNames(
            renames=(
                (r"^(transformer\.)?wte\.", "model.embed_tokens."),
                (r"^(transformer\.)?wpe\.", "model.embed_positions."),
                (r"^(transformer\.)?ln_f\.", "model.norm."),
                (r"^(transformer\.)?h\.", "model.layers."),
                (r"\.ln_1\.", ".input_layernorm."),
                (r"\.ln_2\.", ".post_attention_layernorm."),
                (r"\.attn\.c_proj\.", ".self_attn.o_proj."),
                (r"\.mlp\.c_fc\.", ".mlp.up_proj."),
                (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
            ),
            fused={"attn.c_attn": _QKV},
            transposed=("attn.c_attn", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"),
        ),
    ),
    "GPTNeoXForCausalLM": Architecture(
        layer_types=_all_full,
        bias_by_default=True,
        mlp_bias=True,
        layer_norms=True,
        gated_mlp=False,
        partial_rotary=True,
        activation="gelu",
        keys={
            "num_key_value_heads": "num_attention_heads",
            "rms_norm_eps": "layer_norm_eps",
            "partial_rotary_factor": "rotary_pct",
            "rope_theta": "rotary_emb_base",
        },
        names=StoredNames(
            renames=(
                (r"^gpt_neox\.embed_in\.", "model.embed_tokens."),
                (r"^gpt_neox\.final_layer_norm\.", "model.norm."),
                (r"^gpt_neox\.layers\.", "model.layers."),
                (r"^embed_out\.", "lm_head."),
                (r"\.attention\.dense\.", ".self_attn.o_proj."),
                (r"\.mlp\.dense_h_to_4h\.", ".mlp.up_proj."),
                (r"\.mlp\.dense_4h_to_h\.", ".mlp.down_proj."),
            ),
            fused={"attention.query_key_value": _QKV},
            by_head=True,
        ),
        parallel_residual=None,
        parallel_by_default=True,
    ),
    "BloomForCausalLM": Architecture(
        layer_types=_all_full,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        layer_norms=True,
        embedding_norm=True,
        gated_mlp=False,
        alibi=_bloom_slopes,
        activation="gelu_pytorch_tanh",
        inner_ratio=4,
        tied_by_default=True,
        fixed={"apply_residual_connection_post_layernorm": (False,)},
        keys={
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "num_key_value_heads": "n_head",
            "max_position_embeddings": "seq_length",
            "intermediate_size": "n_inner",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        trained_length=2048,
        names=StoredNames(
            renames=(
                (r"^(transformer\.)?word_embeddings\.", "model.embed_tokens."),
                (r"^(transformer\.)?word_embeddings_layernorm\.", "model.embed_norm."),
                (r"^(transformer\.)?ln_f\.", "model.norm."),
                (r"^(transformer\.)?h\.", "model.layers."),
                (r"\.self_attention\.dense\.", ".self_attn.o_proj."),
                (r"\.mlp\.dense_h_to_4h\.", ".mlp.up_proj."),
                (r"\.mlp\.dense_4h_to_h\.", ".mlp.down_proj."),
            ),
            fused={"self_attention.query_key_value": _QKV},
            by_head=True,
        ),
    ),
    "MptForCausalLM": Architecture(
        layer_types=_all_full,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        layer_norms=True,
        norm_biases=False,
        gated_mlp=False,
        alibi=_mpt_slopes,
        activation="gelu",
        inner_ratio=4,
        tied_by_default=True,
        fixed={"no_bias": (True,), "expansion_ratio": (4,), "logit_scale": (), "embedding_fraction": (1, 1.0)},
        keys={
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "num_key_value_heads": "n_heads",
            "max_position_embeddings": "max_seq_len",
            "intermediate_size": "ffn_hidden_size",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        names=StoredNames(
            renames=(
                (r"^(transformer\.)?wte\.", "model.embed_tokens."),
                (r"^(transformer\.)?norm_f\.", "model.norm."),
                (r"^(transformer\.)?blocks\.", "model.layers."),
                (r"\.norm_1\.", ".input_layernorm."),
                (r"\.norm_2\.", ".post_attention_layernorm."),
                (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
                (r"\.ffn\.", ".mlp."),
            ),
            fused={"attn.Wqkv": _QKV},
        ),
    ),
    "SmolLM3ForCausalLM": Architecture(
        layer_types=_late_windows, has_mlp_bias=True, tied_by_default=True, unturned_layers=_every_nth_unturned
    ),
    "OlmoeForCausalLM": Architecture(
        layer_types=_all_full, wide_qk_norm=True, experts=_olmoe_experts, fixed={"clip_qkv": ()}
    ),
    "Olmo3ForCausalLM": Architecture(
        layer_types=partial(_alternating, default_pattern=4),
        wide_qk_norm=True,
        entry_norms=False,
        sandwich_norms=True,
        local_rope=True,
    ),
    "GraniteMoeForCausalLM": Architecture(
        layer_types=_all_full,
        is_granite=True,
        experts=_mixtral_experts,
        names=StoredNames(
            renames=(
                (r"\.block_sparse_moe\.router\.layer\.", ".mlp.gate."),
                (r"\.block_sparse_moe\.", ".mlp.experts."),
            ),
            stacked={
                "input_linear.weight": Stacked(("gate_proj", "up_proj")),
                "output_linear.weight": Stacked(("down_proj",)),
            },
        ),
    ),
    "GptOssForCausalLM": Architecture(
        layer_types=partial(_alternating, default_pattern=2),
        bias_by_default=True,
        head_dim_from_hidden=False,
        experts=_gpt_oss_experts,
        sinks=True,
        clamped_mlp=True,
        fixed={"swiglu_limit": (7, 7.0), "swiglu_alpha": (1.702,)},
        names=StoredNames(
            renames=((r"\.mlp\.router\.", ".mlp.gate."),),
            stacked={
                "gate_up_proj": Stacked(("gate_proj", "up_proj"), is_interleaved=True, is_transposed=True),
                "gate_up_proj_bias": Stacked(("gate_proj", "up_proj"), "bias", is_interleaved=True),
                "down_proj": Stacked(("down_proj",), is_transposed=True),
                "down_proj_bias": Stacked(("down_proj",), "bias"),
                "gate_up_proj_blocks": Stacked(("gate_proj", "up_proj"), is_interleaved=True, is_packed=True),
                "down_proj_blocks": Stacked(("down_proj",), is_packed=True),
            },
        ),
    ),
    "StableLmForCausalLM": Architecture(
        layer_types=_all_full,
        output_bias=False,
        layer_norms=True,
        partial_rotary=True,
        parallel_residual=None,
        shared_norm=True,
        fixed={"qk_layernorm": (False,)},
        keys={"rms_norm_eps": "layer_norm_eps", "attention_bias": "use_qkv_bias"},
    ),
    "CohereForCausalLM": Architecture(layer_types=_all_full, **_COHERE),
    "Cohere2ForCausalLM": Architecture(
        layer_types=partial(_alternating, default_pattern=4), unturned_layers=_full_unturned, **_COHERE
    ),
}
