"""Published shapes of models, for arithmetic that needs no download."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.bench.model_shapes import LLAMA_8B
from quire.errors import ConfigError, DownloadError
from quire.models.architectures import spec_from_config
from quire.models.spec import ModelSpec
from quire.nearest import nearest
from quire.weights import open_checkpoint, resolve_model
from quire.weights.aliases import ALIASES, HUB_ALIASES

_SMOLLM2 = LLAMA_8B | {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA_1B = LLAMA_8B | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
_LLAMA_3B = LLAMA_8B | {
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "tie_word_embeddings": True,
}
_LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
_MISTRAL_7B = LLAMA_8B | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "vocab_size": 32768,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN = LLAMA_8B | {"rope_theta": 1000000.0, "bos_token_id": 151643, "eos_token_id": 151645}
_QWEN2_7B = _QWEN | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
}
_QWEN3_8B = _QWEN | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
_QWEN3_06B = _QWEN3_8B | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}


@dataclass(slots=True, frozen=True)
class Shape:
    """A model by its config alone. `hub_id` is what the engine would be told to load."""

    hub_id: str
    config: dict[str, Any]


SHAPES: dict[str, Shape] = {
    name: Shape(HUB_ALIASES[name].repo if name in HUB_ALIASES else name, config)
    for name, config in {
        "smollm2": _SMOLLM2,
        "llama-3.1-8b": LLAMA_8B,
        "llama-3.1-70b": _LLAMA_70B,
        "llama-3.2-1b": _LLAMA_1B,
        "llama-3.2-3b": _LLAMA_3B,
        "mistral-7b": _MISTRAL_7B,
        "qwen2.5-7b": _QWEN2_7B,
        "qwen3-0.6b": _QWEN3_06B,
        "qwen3-8b": _QWEN3_8B,
    }.items()
}


def gguf_file_bytes(model: str) -> int | None:
    """The size of the file where the model is one GGUF file; None for every other."""
    if model in ALIASES:
        return ALIASES[model].member_bytes
    if model in SHAPES:
        return None
    path = resolve_model(model, load_format="dummy")
    return path.stat().st_size if path.suffix == ".gguf" else None


def read_model_spec(model: str) -> ModelSpec:
    """From a shape's short name, a path, or a hub id, of which only the config is fetched. No weights are read."""
    if model in SHAPES:
        return spec_from_config(SHAPES[model].config, source=model)
    try:
        path = resolve_model(model, load_format="dummy")
    except DownloadError as error:
        near = nearest(model.lower(), SHAPES, cutoff=0.5)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise DownloadError(f"{error}. Shapes known without a network: {', '.join(SHAPES)}.{hint}") from error
    spec = spec_from_config(open_checkpoint(path, load_format="dummy").config, source=str(path))
    if spec.is_encoder:
        raise ConfigError(f"{model}: {spec.architecture} is an encoder, which keeps no KV: there is nothing to plan")
    return spec
