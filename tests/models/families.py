"""Random tiny models of the families whose checkpoints name or fuse tensors in their own way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models_harness as harness
import torch
from torch import Tensor

from quire.models.spec import ModelSpec
from quire.weights import open_checkpoint

EXPERTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-window": (
        "MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 8}
    ),
    "qwen2-moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {
            "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "qwen2-moe-dense-layer": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32, "norm_topk_prob": True, "mlp_only_layers": [0],
        },
    ),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {
            "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "qwen3-moe-sparse-step": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {
            "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
            "decoder_sparse_step": 2,
        },
    ),
    "olmoe": (
        "OlmoeForCausalLM", "OlmoeConfig", {"num_experts": 6, "num_experts_per_tok": 2, "pad_token_id": 0}
    ),
    "granite-moe": (
        "GraniteMoeForCausalLM", "GraniteMoeConfig",
        {
            "num_local_experts": 5, "num_experts_per_tok": 2, "embedding_multiplier": 6.0,
            "residual_multiplier": 0.22, "attention_multiplier": 0.1, "logits_scaling": 0.5, "pad_token_id": 0,
        },
    ),
    "gpt-oss": (
        "GptOssForCausalLM", "GptOssConfig",
        {
            "head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 8,
            "num_hidden_layers": 2, "attention_bias": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
                "truncate": False, "original_max_position_embeddings": 64,
            },
            "attn_implementation": "eager",
        },
    ),
}  # fmt: skip


_GEMMA2 = {
    "head_dim": 32, "query_pre_attn_scalar": 48, "sliding_window": 8, "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 5.0, "attn_implementation": "eager", "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
_PHI3 = {"sliding_window": None, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0 + i / 8 for i in range(16)],
    "long_factor": [2.0 + i for i in range(16)], "original_max_position_embeddings": 256,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", _GEMMA2),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", _PHI3),
    "phi3-partial-window": (
        "Phi3ForCausalLM",
        "Phi3Config",
        _PHI3
        | {
            "sliding_window": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.75},
        },
    ),
    "phi3-longrope": (
        "Phi3ForCausalLM",
        "Phi3Config",
        _PHI3
        | {
            "rope_parameters": _LONGROPE, "max_position_embeddings": 1024, "original_max_position_embeddings": 256,
        },
    ),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", {"pad_token_id": 0}),
    "granite": (
        "GraniteForCausalLM",
        "GraniteConfig",
        {
            "embedding_multiplier": 6.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1,
            "logits_scaling": 0.5, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True,
        },
    ),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", {"sliding_window": 8, "bos_token_id": 1}),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 256, "n_inner": 96, "bos_token_id": 1},
    ),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {"num_key_value_heads": 4}),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"seq_length": 256, "bos_token_id": 1, "layer_norm_epsilon": 1e-5},
    ),
    "bloom-six-heads": (
        "BloomForCausalLM", "BloomConfig", {"hidden_size": 192, "num_attention_heads": 6, "seq_length": 256}
    ),
    "mpt": (
        "MptForCausalLM", "MptConfig",
        {"hidden_size": 192, "num_attention_heads": 6, "max_seq_len": 256, "bos_token_id": 1},
    ),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", {"num_hidden_layers": 4, "pad_token_id": 0, "bos_token_id": 1}),
    "olmo3": (
        "Olmo3ForCausalLM", "Olmo3Config", {"num_hidden_layers": 4, "sliding_window": 8, "pad_token_id": 0}
    ),
    "stablelm": (
        "StableLmForCausalLM", "StableLmConfig",
        {
            "use_qkv_bias": True, "layer_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        },
    ),
    "stablelm-parallel": (
        "StableLmForCausalLM", "StableLmConfig",
        {
            "use_parallel_residual": True, "layer_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "cohere": ("CohereForCausalLM", "CohereConfig", {"pad_token_id": 0, "bos_token_id": 1, "logit_scale": 0.25}),
    "cohere2": (
        "Cohere2ForCausalLM", "Cohere2Config",
        {
            "num_hidden_layers": 4, "sliding_window": 8, "pad_token_id": 0, "bos_token_id": 1, "logit_scale": 0.25,
        },
    ),
    "gpt-neox-serial": (
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {
            "use_parallel_residual": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
}  # fmt: skip


def tiny_model(entry: tuple[str, str, dict[str, Any]]) -> Any:
    """Weights as the harness makes them, with routers that decide."""
    harness.TINY_MODELS["here"] = entry
    try:
        model = harness.tiny_model("here")
    finally:
        del harness.TINY_MODELS["here"]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(0.0, 1.0)
            elif name.endswith(
                ("mlp.gate.weight", "shared_expert_gate.weight", "router.weight", "router.layer.weight")
            ):
                parameter.normal_(0.0, 0.3)
            elif "experts" in name:
                parameter.normal_(0.0, 0.15)
            elif parameter.dim() == 1 and ("ln_" in name or "norm" in name.lower()):
                parameter.normal_(0.0 if name.endswith("bias") or "Gemma" in entry[0] else 1.0, 0.3)
            elif parameter.dim() == 2 and entry[0] in (
                "BloomForCausalLM",
                "GPT2LMHeadModel",
                "GPTNeoXForCausalLM",
                "MptForCausalLM",
                "Starcoder2ForCausalLM",
            ):
                parameter.normal_(0.0, 0.08)
    return model


def saved(model: Any, path: Path) -> tuple[ModelSpec, dict[str, Tensor]]:
    """The spec and the decoder's tensors, by way of the files that transformers writes."""
    from safetensors.torch import load_file

    model.save_pretrained(path)
    checkpoint = open_checkpoint(path)
    stored = load_file(path / "model.safetensors")
    entries = checkpoint.tensors()
    assert entries is not None
    spec = harness.spec_from_config(checkpoint.config, source="config.json")
    checkpoint.check(spec)
    return spec, {entry.name: entry.of(stored[entry.stored_name]) for entry in entries}
