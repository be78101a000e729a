"""Published shapes of models, for benchmarks with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.weights import quire_home

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}


def write_llama_8b() -> Path:
    """A directory with Llama-3.1-8B's config and a word-level tokenizer of its size; no weights."""
    return write_shape("llama-8b-shape", LLAMA_8B)


def write_shape(name: str, config: dict[str, Any]) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = quire_home() / name  # not a temporary folder: there, another user could have put one first
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if not (path / "tokenizer.json").exists():
        tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(config["vocab_size"])}, unk_token="t0"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.save(str(path / "tokenizer.json"))
        names = {"bos_token": f"t{config['bos_token_id']}", "eos_token": f"t{config['eos_token_id']}"}
        (path / "tokenizer_config.json").write_text(json.dumps(names))
    return path
