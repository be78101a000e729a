"""The architectures that are served, as a table of their differences, and how a config becomes a ModelSpec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeGuard

from quire.models.config_reader import MAX_INTEGER, ConfigReader, shown
from quire.models.encoders import ENCODER_NAMES, ENCODERS, encoder_spec
from quire.models.quantization import read_quantization
from quire.models.rope_config import DEFAULT_THETA, max_position_with_scaling, read_rope, read_rope_by_layer_type
from quire.models.spec import CheckpointFormat, ExpertsSpec, IntegerFormat, LayerSpec, ModelSpec, RopeSpec
from quire.models.stored_names import StoredNames
from quire.nearest import nearest

LayerTypes = tuple[str, ...]  # full_attention or sliding_attention, by layer
_MAX_EXPERTS = 4096
_MAX_LAYERS = 1024  # the deepest published models have some 130
_MAX_WINDOWED_POSITIONS = 1 << 20


@dataclass(slots=True, frozen=True, kw_only=True)
class Architecture:
    """In what one architecture differs from Llama. None: the config's own key says."""

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
    inner_ratio: int | None = None  # intermediate_size / hidden_size, where that is missing
    wide_qk_norm: bool = False
    layer_norms: bool = False
    entry_norms: bool = True
    sandwich_norms: bool = False
    gated_mlp: bool = True
    partial_rotary: bool = False  # whether partial_rotary_factor is one of its keys
    learned_positions: bool = False
    local_rope: bool = False  # Gemma 3: layers with a window turn at another base
    is_granite: bool = False  # multipliers of embedding, attention, residual branches and logits


def spec_from_config(config: Mapping[str, Any], *, source: str) -> ModelSpec:
    """A Hugging Face config.json's content as a ModelSpec. `source` is its file, for messages."""
    name = _architecture_name(ConfigReader(config, source))
    if name in ENCODERS:
        reader = ConfigReader(config, source)
        return encoder_spec(reader, name, _dtype(reader))
    base = _base_name(name)
    assert base is not None
    architecture = ARCHITECTURES[base]
    reader = ConfigReader(config, source, architecture.keys)
    _refuse_unserved(reader, architecture)

    hidden_size = reader.integer("hidden_size")
    num_layers = reader.integer("num_hidden_layers", at_most=_MAX_LAYERS)
    num_heads = reader.integer("num_attention_heads")
    num_kv_heads = reader.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise reader.error(f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
    head_dim = reader.integer("head_dim", hidden_size // num_heads if architecture.head_dim_from_hidden else None)
    if head_dim % 2:
        raise reader.error(f"head_dim {head_dim} is odd: rotary embedding turns pairs")

    layer_types = architecture.layer_types(reader, num_layers)
    if architecture.local_rope:
        ropes = read_rope_by_layer_type(reader, head_dim)
    else:
        rope = read_rope(reader, head_dim, has_parts=architecture.partial_rotary)
        if architecture.learned_positions:
            rope = RopeSpec(DEFAULT_THETA, num_turned=0)
        ropes = {"full_attention": rope, "sliding_attention": rope}
    window = reader.integer("sliding_window") if "sliding_attention" in layer_types else None
    windows = {"full_attention": None, "sliding_attention": window}

    experts = None if architecture.experts is None else architecture.experts(reader)
    sparse = _sparse_layers(reader, num_layers) if experts is not None else [False] * num_layers
    attention_bias = reader.flag("attention_bias", architecture.bias_by_default)
    mlp_bias = architecture.mlp_bias
    if mlp_bias is None:
        mlp_bias = architecture.has_mlp_bias and reader.flag("mlp_bias", architecture.bias_by_default)
    max_position = _max_position(reader, ropes["full_attention"], layer_types)
    norm_eps = reader.number("rms_norm_eps")
    inner = None if architecture.inner_ratio is None else architecture.inner_ratio * hidden_size
    stored = read_quantization(reader)
    spec = ModelSpec(
        architecture=name,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.integer("intermediate_size", inner),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        norm_eps=norm_eps,
        layers=tuple(
            LayerSpec(
                ropes[kind], windows[kind], has_experts, **_wide_parts(stored, f"model.layers.{index}", has_experts)
            )
            for index, (kind, has_experts) in enumerate(zip(layer_types, sparse, strict=True))
        ),
        experts=experts,
        activation=_activation(reader, architecture),
        qkv_bias=attention_bias if architecture.qkv_bias is None else architecture.qkv_bias,
        output_bias=attention_bias if architecture.output_bias is None else architecture.output_bias,
        mlp_bias=mlp_bias,
        qk_norm=architecture.qk_norm,
        wide_qk_norm=architecture.wide_qk_norm,
        norm_offset=architecture.is_gemma,
        layer_norms=architecture.layer_norms,
        entry_norms=architecture.entry_norms,
        sandwich_norms=architecture.is_gemma or architecture.sandwich_norms,
        parallel_residual=reader.flag("use_parallel_residual", True) if base == "GPTNeoXForCausalLM" else False,
        gated_mlp=architecture.gated_mlp,
        learned_positions=max_position if architecture.learned_positions else None,
        embedding_scale=hidden_size**0.5 if architecture.is_gemma else None,
        attention_scale=(reader.number("query_pre_attn_scalar") if architecture.is_gemma else head_dim) ** -0.5,
        attention_softcap=reader.optional_number("attn_logit_softcapping") if architecture.is_gemma else None,
        logit_softcap=reader.optional_number("final_logit_softcapping") if architecture.is_gemma else None,
        tie_embeddings=reader.flag("tie_word_embeddings", architecture.tied_by_default),
        bos_token_id=_bos_token_id(reader),
        eos_token_ids=_eos_token_ids(reader),
        dtype=_dtype(reader),
        fp8=stored if isinstance(stored, CheckpointFormat) else None,
        integers=stored if isinstance(stored, IntegerFormat) else None,
    )
    return _with_multipliers(reader, spec) if architecture.is_granite else spec


def _wide_parts(stored: CheckpointFormat | IntegerFormat | None, layer: str, has_experts: bool) -> dict[str, bool]:
    """Attention and MLP are each held in one format: products leave the next one's rows as it takes them."""
    if not isinstance(stored, CheckpointFormat) or not stored.wide_modules:
        return {}
    mlp = ["gate_proj", "up_proj", "down_proj", "gate_up_proj"]
    if has_experts:
        mlp = [f"{module}.{name}" for module in ("experts.0", "shared_expert") for name in mlp]
    return {
        "wide_attention": stored.is_wide(f"{layer}.self_attn", ["q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"]),
        "wide_mlp": stored.is_wide(f"{layer}.mlp", mlp),
    }


def _with_multipliers(reader: ConfigReader, spec: ModelSpec) -> ModelSpec:
    """Granite adds branches times m to the residual stream. The stream is kept divided by m instead: the embedding is,
    and norms do not see it, but for their epsilon."""
    residual = reader.number("residual_multiplier", 1.0)
    return replace(
        spec,
        embedding_scale=reader.number("embedding_multiplier", 1.0) / residual,
        norm_eps=spec.norm_eps / residual**2,
        attention_scale=reader.number("attention_multiplier", 1.0),
        logit_scale=1.0 / reader.number("logits_scaling", 1.0),
    )


def stored_names(config: Mapping[str, Any]) -> StoredNames:
    """How a checkpoint with this config.json names its tensors."""
    names = config.get("architectures")
    for name in names if isinstance(names, list | tuple) else ():
        if name in ENCODERS:
            return ENCODER_NAMES
        if (base := _base_name(name)) is not None:
            return ARCHITECTURES[base].names
    return StoredNames()


def _base_name(name: Any) -> str | None:
    """The architecture that a model is one of: itself, or that with another head on the same layers, or none."""
    if not isinstance(name, str) or name in ARCHITECTURES:
        return name if isinstance(name, str) else None
    for head in ("ForSequenceClassification", "Model"):
        if name.endswith(head):
            stem = name.removesuffix(head)
            return next((each for each in (f"{stem}ForCausalLM", f"{stem}LMHeadModel") if each in ARCHITECTURES), None)
    return None


def _max_position(reader: ConfigReader, rope: RopeSpec, layer_types: LayerTypes) -> int:
    """What the config claims. Where every layer has a window no cache ends a sequence, and the rotary table would be as
    long as the claim."""
    claimed = max_position_with_scaling(reader, rope)
    return claimed if "full_attention" in layer_types else min(claimed, _MAX_WINDOWED_POSITIONS)


def _architecture_name(reader: ConfigReader) -> str:
    names = reader.get("architectures")
    served = ", ".join(ARCHITECTURES)
    if not isinstance(names, list | tuple) or not names:
        raise reader.error(f"architectures is missing: expected a list with one of {served}")
    for name in names:
        if isinstance(name, str) and (name in ENCODERS or _base_name(name) is not None):
            return name
    near = nearest(names[0], [*ARCHITECTURES, *ENCODERS], n=2)
    message = f"architecture {', '.join(map(str, names))[:200]} is not served (there are {served})"
    if near:
        message += f". Nearest: {' and '.join(near)}"
    if "Gemma3ForConditionalGeneration" in names:
        message += (
            ". It takes images too: use a text-only Gemma 3 (Gemma3ForCausalLM), such as google/gemma-3-1b-it, or a "
            "text-only export of this one"
        )
    raise reader.error(message)


def _refuse_unserved(reader: ConfigReader, architecture: Architecture) -> None:
    """Anything that changes the computation in a way that the decoder does not have."""
    if architecture.experts is None:
        for key in ("num_local_experts", "num_experts", "n_routed_experts"):
            if reader.get(key) not in (None, 0, 1):
                raise reader.error(f"{key} is {shown(reader.get(key))}: this architecture is served without experts")
    for key in ("use_bidirectional_attention", "is_encoder_decoder"):
        if reader.get(key):
            raise reader.error(f"{key} is set: only causal decoders are served")
    if not architecture.has_mlp_bias and reader.get("mlp_bias"):
        raise reader.error("mlp_bias is set: this architecture has none")
    if architecture.output_bias is False and reader.get("attention_bias"):
        raise reader.error("attention_bias is set: this architecture decides itself which projections have a bias")
    if not architecture.is_gemma:
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if reader.get(key) is not None:
                raise reader.error(f"{key} is set: this architecture has none")


def _activation(reader: ConfigReader, architecture: Architecture) -> str:
    key = "hidden_activation" if architecture.is_gemma else "hidden_act"
    activation = reader.text(key, architecture.activation)
    served = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
    if not architecture.gated_mlp:
        served |= {"gelu_new": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
    if activation not in served:
        raise reader.error(f"{reader.named(key)} {activation!r} is not served (there are {', '.join(served)})")
    return served[activation]


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


def _experts(reader: ConfigReader, count: str, size: str, *, normalizes: bool) -> ExpertsSpec:
    num_experts, top_k = reader.integer(count, at_most=_MAX_EXPERTS), reader.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise reader.error(f"num_experts_per_tok is {top_k:,}: more than the {num_experts:,} experts ({count})")
    return ExpertsSpec(num_experts, top_k, reader.integer(size), normalizes)


def _sparse_layers(reader: ConfigReader, num_layers: int) -> list[bool]:
    """Which layers have experts: every decoder_sparse_step-th, but for those in mlp_only_layers."""
    step, dense = reader.integer("decoder_sparse_step", 1), reader.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple) or not all(isinstance(index, int) for index in dense):
        raise reader.error(f"mlp_only_layers is {shown(dense)}: expected a list of layers")
    return [index not in dense and (index + 1) % step == 0 for index in range(num_layers)]


def _bos_token_id(reader: ConfigReader) -> int | None:
    token = reader.get("bos_token_id")
    if token is None or _is_token_id(token):
        return token
    raise reader.error(f"bos_token_id is {shown(token)}: expected a token id")


def _eos_token_ids(reader: ConfigReader) -> tuple[int, ...]:
    tokens = reader.get("eos_token_id")
    if tokens is None:
        return ()
    listed = tuple(tokens) if isinstance(tokens, list | tuple) else (tokens,)
    if not all(map(_is_token_id, listed)):
        raise reader.error(f"eos_token_id is {shown(tokens)}: expected a token id or a list of them")
    return listed


def _is_token_id(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and 0 <= value <= MAX_INTEGER


def _dtype(reader: ConfigReader) -> str:
    """`dtype` to transformers 5, `torch_dtype` before."""
    name = reader.text("dtype", reader.get("torch_dtype") or "float32").removeprefix("torch.")
    served = ("float32", "bfloat16", "float16")
    if name not in served:
        raise reader.error(f"dtype {name!r} is not served (there are {', '.join(served)})")
    return name


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


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
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
        names=StoredNames(
            fused={
                "self_attn.qkv_proj": _QKV,
                "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
            }
        ),
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
    ),
}
