"""How a config becomes a ModelSpec, by the family that it is of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeGuard

from quire.models.config_reader import MAX_INTEGER, ConfigReader, shown
from quire.models.encoders import ENCODER_NAMES, ENCODERS, encoder_spec
from quire.models.families import ARCHITECTURES, UNSERVED, Architecture, LayerTypes
from quire.models.quantization import read_quantization
from quire.models.rope_config import DEFAULT_THETA, max_position_with_scaling, read_rope, read_rope_by_layer_type
from quire.models.spec import CheckpointFormat, IntegerFormat, LayerSpec, ModelSpec, RopeSpec
from quire.models.stored_names import StoredNames
from quire.nearest import nearest

_MAX_LAYERS = 1024  # the deepest published models have some 130
_MAX_WINDOWED_POSITIONS = 1 << 20
_UNTURNED = RopeSpec(DEFAULT_THETA, num_turned=0)


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
        if architecture.learned_positions or architecture.alibi is not None:
            rope = _UNTURNED
        ropes = {"full_attention": rope, "sliding_attention": rope}
    window = reader.integer("sliding_window") if "sliding_attention" in layer_types else None
    windows = {"full_attention": None, "sliding_attention": window}

    unturned = architecture.unturned_layers(reader, layer_types) if architecture.unturned_layers is not None else ()
    experts = None if architecture.experts is None else architecture.experts(reader)
    sparse = _sparse_layers(reader, num_layers) if experts is not None else [False] * num_layers
    attention_bias = reader.flag("attention_bias", architecture.bias_by_default)
    mlp_bias = architecture.mlp_bias
    if mlp_bias is None:
        mlp_bias = architecture.has_mlp_bias and reader.flag("mlp_bias", architecture.bias_by_default)
    is_parallel = architecture.parallel_residual
    if is_parallel is None:
        is_parallel = reader.flag("use_parallel_residual", architecture.parallel_by_default)
    max_position = _max_position(reader, ropes["full_attention"], layer_types, architecture.trained_length)
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
                _UNTURNED if index in unturned else ropes[kind],
                windows[kind],
                has_experts,
                **_wide_parts(stored, f"model.layers.{index}", has_experts),
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
        norm_biases=architecture.norm_biases,
        embedding_norm=architecture.embedding_norm,
        entry_norms=architecture.entry_norms,
        sandwich_norms=architecture.is_gemma or architecture.sandwich_norms,
        parallel_residual=is_parallel,
        shared_norm=is_parallel and architecture.shared_norm,
        gated_mlp=architecture.gated_mlp,
        learned_positions=max_position if architecture.learned_positions else None,
        embedding_scale=hidden_size**0.5 if architecture.is_gemma else None,
        attention_scale=(reader.number("query_pre_attn_scalar") if architecture.is_gemma else head_dim) ** -0.5,
        attention_softcap=reader.optional_number("attn_logit_softcapping") if architecture.is_gemma else None,
        logit_softcap=reader.optional_number("final_logit_softcapping") if architecture.is_gemma else None,
        logit_scale=reader.number("logit_scale", 1.0) if architecture.has_logit_scale else 1.0,
        alibi_slopes=None if architecture.alibi is None else architecture.alibi(reader, num_heads),
        sinks=architecture.sinks,
        neighbours_turn=architecture.neighbours_turn,
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


def _max_position(reader: ConfigReader, rope: RopeSpec, layer_types: LayerTypes, default: int | None) -> int:
    """What the config claims. Where every layer has a window no cache ends a sequence, and the rotary table would be as
    long as the claim."""
    claimed = max_position_with_scaling(reader, rope, default)
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
    message = f"architecture {', '.join(map(str, names))[:200]} is not served"
    for family, reason in UNSERVED.items():
        if str(names[0]).startswith(family):
            message += f". {reason}"
    if near:
        message += f". Nearest: {' and '.join(near)}"
    raise reader.error(f"{message}. There are {served}")


def _refuse_unserved(reader: ConfigReader, architecture: Architecture) -> None:
    """Anything that changes the computation in a way that the decoder does not have."""
    if architecture.experts is None:
        for key in ("num_local_experts", "num_experts", "n_routed_experts"):
            if reader.get(key) not in (None, 0, 1):
                raise reader.error(f"{key} is {shown(reader.get(key))}: this architecture is served without experts")
    for key, served in architecture.fixed.items():
        if reader.get(key) not in (None, *served):
            raise reader.error(f"{reader.named(key)} is {shown(reader.get(key))}: this architecture is served without")
    for key in ("use_bidirectional_attention", "is_encoder_decoder"):
        if reader.get(key):
            raise reader.error(f"{key} is set: only causal decoders are served")
    if not architecture.has_mlp_bias and reader.get("mlp_bias"):
        raise reader.error("mlp_bias is set: this architecture has none")
    if architecture.output_bias is False and architecture.qkv_bias is not None and reader.get("attention_bias"):
        raise reader.error("attention_bias is set: this architecture decides itself which projections have a bias")
    if not architecture.is_gemma:
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if reader.get(key) is not None:
                raise reader.error(f"{key} is set: this architecture has none")


def _activation(reader: ConfigReader, architecture: Architecture) -> str:
    key = "hidden_activation" if architecture.is_gemma else "hidden_act"
    activation = reader.text(key, architecture.activation)
    if architecture.clamped_mlp:
        return "clamped_silu"
    served = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
    if not architecture.gated_mlp:
        served |= {"gelu_new": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
    if activation not in served:
        raise reader.error(f"{reader.named(key)} {activation!r} is not served (there are {', '.join(served)})")
    return served[activation]


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
