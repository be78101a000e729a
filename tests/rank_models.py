"""A tiny model with real files and weights that make it talk: for tests that compare tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fakes
import torch
from safetensors.torch import save_file

from quire.models.architectures import spec_from_config
from quire.models.tensors import checkpoint_tensors

# Degree 3 divides these heads and 2 does not, as in SmolLM2.
LIVELY: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 160}


def write_lively_model(path: Path, **changes: Any) -> Path:
    """Dummy weights repeat one token. These give every token a chance, and different ones to different texts."""
    fakes.write_tiny_model(path, **(LIVELY | changes))
    spec = spec_from_config(json.loads((path / "config.json").read_text()), source="test")
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, shape in checkpoint_tensors(spec).items():
        if len(shape) == 1:
            tensors[name] = torch.ones(shape)
        else:
            scale = 1.0 if "embed" in name else 1.5 * shape[1] ** -0.5
            tensors[name] = torch.randn(shape, generator=generator) * scale
    save_file(tensors, path / "model.safetensors")
    return path
