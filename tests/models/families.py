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
}  # fmt: skip


def tiny_model(entry: tuple[str, str, dict[str, Any]]) -> Any:
    """As the harness makes them, with routers that decide."""
    harness.TINY_MODELS["here"] = entry
    try:
        model = harness.tiny_model("here")
    finally:
        del harness.TINY_MODELS["here"]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("mlp.gate.weight", "shared_expert_gate.weight")):
                parameter.normal_(0.0, 0.3)
            elif "experts" in name:
                parameter.normal_(0.0, 0.15)
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
