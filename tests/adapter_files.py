"""Tiny models with weights of their own, adapters as PEFT saves them, and the same merged into the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fakes
import torch
from safetensors.torch import load_file, save_file

from quire.models.architectures import spec_from_config
from quire.models.tensors import checkpoint_tensors

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_model(path: Path, seed: int = 0, **changes: Any) -> Path:
    """Weights large enough for clear margins between tokens."""
    fakes.write_tiny_model(path, **changes)
    spec = spec_from_config(json.loads((path / "config.json").read_text()), source="tiny")
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.25
        for name, shape in checkpoint_tensors(spec).items()
    }
    save_file(tensors, path / "model.safetensors")
    return path


def write_adapter(
    path: Path, model: Path, *, rank: int = 4, seed: int = 1, modules: tuple[str, ...] = MODULES, **config: Any
) -> Path:
    """Random, on every layer. `config`: of adapter_config.json."""
    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(modules):
            out, inputs = weight.shape
            prefix = f"base_model.model.{module}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * 0.3
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(out, rank, generator=generator) * 0.3
    save_file(tensors, path / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(modules)} | config
    (path / "adapter_config.json").write_text(json.dumps(about))
    return path


def write_merged(path: Path, model: Path, adapter: Path) -> Path:
    """The model with the adapter in its weights, by PEFT's formula."""
    path.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    weights, thin = load_file(model / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    config: Mapping[str, Any] = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
    for name in weights:
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{prefix}.lora_A.weight" in thin:
            delta = thin[f"{prefix}.lora_B.weight"].double() @ thin[f"{prefix}.lora_A.weight"].double()
            weights[name] = (weights[name].double() + scale * delta).float()
    save_file(weights, path / "model.safetensors")
    return path
