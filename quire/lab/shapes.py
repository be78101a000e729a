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

_SMOLLM = LLAMA_8B | {"rope_theta": 100000.0, "bos_token_id": 1, "eos_token_id": 2}
_MISTRAL = _SMOLLM | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "rope_theta": 1000000.0}
_MISTRAL |= {"sliding_window": None}
_QWEN = LLAMA_8B | {"rope_theta": 1000000.0, "bos_token_id": 151643, "eos_token_id": 151645}
_QWEN2 = _QWEN | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
_QWEN3 = _QWEN | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
_COLUMNS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings", "tie_word_embeddings"),
)
# By name: what its family has in common, and a value for each of _COLUMNS.
_MODELS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "smollm2": (_SMOLLM, (576, 1536, 30, 9, 3, 64, 49152, 8192, True)),
    "llama-3.1-8b": (LLAMA_8B, (4096, 14336, 32, 32, 8, 128, 128256, 131072, False)),
    "llama-3.1-70b": (LLAMA_8B, (8192, 28672, 80, 64, 8, 128, 128256, 131072, False)),
    "llama-3.2-1b": (LLAMA_8B, (2048, 8192, 16, 32, 8, 64, 128256, 131072, True)),
    "llama-3.2-3b": (LLAMA_8B, (3072, 8192, 28, 24, 8, 128, 128256, 131072, True)),
    "mistral-7b": (_MISTRAL, (4096, 14336, 32, 32, 8, 128, 32768, 32768, False)),
    "qwen2.5-7b": (_QWEN2, (3584, 18944, 28, 28, 4, 128, 152064, 32768, False)),
    "qwen3-0.6b": (_QWEN3, (1024, 3072, 28, 16, 8, 128, 151936, 40960, True)),
    "qwen3-8b": (_QWEN3, (4096, 12288, 36, 32, 8, 128, 151936, 40960, False)),
}


@dataclass(slots=True, frozen=True)
class Shape:
    """A model by its config alone. `hub_id` is what the engine would be told to load."""

    hub_id: str
    config: dict[str, Any]


SHAPES: dict[str, Shape] = {
    name: Shape(
        HUB_ALIASES[name].repo if name in HUB_ALIASES else name, family | dict(zip(_COLUMNS, values, strict=True))
    )
    for name, (family, values) in _MODELS.items()
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
    """The spec of a shape's short name, a path, or a hub id, whose config alone is fetched. No weights are read."""
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
