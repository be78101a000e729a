"""BERT's family as data: encoders, in which every token sees all of its text. Their configs become ModelSpecs too."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.rope_config import DEFAULT_THETA
from quire.models.spec import LayerSpec, ModelSpec, RopeSpec
from quire.models.stored_names import StoredNames

_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
_MAX_LAYERS = 256

# Encoders, and whether their positions begin after the padding token's id, as RoBERTa's do.
_FAMILIES = {"Bert": False, "Roberta": True, "XLMRoberta": True, "Camembert": True}
_KINDS = ("Model", "ForSequenceClassification", "ForMaskedLM")
ENCODERS: dict[str, bool] = {
    f"{family}{kind}": from_padding for family, from_padding in _FAMILIES.items() for kind in _KINDS
}

ENCODER_NAMES = StoredNames(
    renames=(
        (r"^(bert|roberta|camembert)\.", ""),
        (r"\.LayerNorm\.gamma$", ".LayerNorm.weight"),
        (r"\.LayerNorm\.beta$", ".LayerNorm.bias"),
        (r"^embeddings\.word_embeddings\.", "model.embed_tokens."),
        (r"^embeddings\.position_embeddings\.", "model.embed_positions."),
        (r"^embeddings\.token_type_embeddings\.", "model.embed_types."),
        (r"^embeddings\.LayerNorm\.", "model.norm."),
        (r"^encoder\.layer\.", "model.layers."),
        (r"\.attention\.self\.query\.", ".self_attn.q_proj."),
        (r"\.attention\.self\.key\.", ".self_attn.k_proj."),
        (r"\.attention\.self\.value\.", ".self_attn.v_proj."),
        (r"\.attention\.output\.dense\.", ".self_attn.o_proj."),
        (r"\.attention\.output\.LayerNorm\.", ".post_attention_layernorm."),
        (r"\.intermediate\.dense\.", ".mlp.up_proj."),
        (r"\.output\.dense\.", ".mlp.down_proj."),
        (r"\.output\.LayerNorm\.", ".post_feedforward_layernorm."),
        # BERT's classifier is a pooler and a matrix; RoBERTa has both in one module.
        (r"^(pooler|classifier)\.dense\.", "score.dense."),
        (r"^classifier\.(out_proj\.)?", "score."),
    )
)


def encoder_spec(reader: ConfigReader, name: str, dtype: str) -> ModelSpec:
    """An encoder's config.json as a ModelSpec, whose pooler is yet to be found."""
    if reader.get("is_decoder"):
        raise reader.error("is_decoder is set: this architecture is served as an encoder")
    kind = reader.text("position_embedding_type", "absolute")
    if kind != "absolute":
        raise reader.error(f"position_embedding_type {kind!r} is not served (there is absolute)")
    activation = reader.text("hidden_act", "gelu")
    if activation not in _ACTIVATIONS:
        raise reader.error(f"hidden_act {activation!r} is not served (there are {', '.join(_ACTIVATIONS)})")
    hidden_size, num_heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    if hidden_size % num_heads:
        raise reader.error(f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}")
    head_dim, num_layers = hidden_size // num_heads, reader.integer("num_hidden_layers", at_most=_MAX_LAYERS)
    positions = reader.integer("max_position_embeddings")
    padding = reader.get("pad_token_id")
    first = (padding if type(padding) is int and padding >= 0 else 1) + 1 if ENCODERS[name] else 0
    if first >= positions:
        raise reader.error(f"max_position_embeddings is {positions}: the first token's position is {first}")
    return ModelSpec(
        architecture=name,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        max_position=positions - first,
        norm_eps=reader.number("layer_norm_eps", 1e-12),
        layers=(LayerSpec(RopeSpec(DEFAULT_THETA, num_turned=0)),) * num_layers,
        activation=_ACTIVATIONS[activation],
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        layer_norms=True,
        entry_norms=False,
        sandwich_norms=True,  # by name: these follow the sums, as is_encoder says
        gated_mlp=False,
        learned_positions=positions,
        attention_scale=head_dim**-0.5,
        tie_embeddings=True,
        dtype=dtype,
        is_encoder=True,
        num_token_types=reader.integer("type_vocab_size", 2),
        first_position=first,
    )
