"""PEFT's adapters: what is read, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import adapter_files
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import WeightsError
from quire.models.architectures import spec_from_config, stored_names
from quire.models.stored_names import StoredNames
from quire.models.tensors import checkpoint_tensors
from quire.weights.peft import PeftAdapter, find_adapter, read_adapter

PREFIX = "base_model.model.model.layers.0"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return adapter_files.write_model(tmp_path / "model")


def read(folder: Path, model: Path, max_rank: int = 16) -> PeftAdapter:
    config = json.loads((model / "config.json").read_text())
    spec = spec_from_config(config, source="tiny")
    shapes = {
        name.removesuffix(".weight"): shape
        for name, shape in checkpoint_tensors(spec).items()
        if name.removesuffix(".weight").endswith(adapter_files.MODULES)
    }
    return read_adapter(folder, shapes, stored_names(config), spec.head_dim, max_rank)


def change(folder: Path, **config: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))


def test_what_is_read(model: Path, tmp_path: Path) -> None:
    folder = adapter_files.write_adapter(tmp_path / "a", model, rank=4, lora_alpha=8)
    found = read(folder, model)
    assert found.rank == 4 and len(found.pairs) == 14 and found.pairs["model.layers.1.mlp.up_proj"].scale == 2.0
    change(folder, use_rslora=True, layers_to_transform=[0], init_lora_weights="gaussian")
    again = read(folder, model)
    assert again.pairs["model.layers.0.self_attn.q_proj"].scale == 4.0 and again.digest != found.digest
    change(folder, alpha_pattern={"layers.1.mlp.up_proj": 16, "k_proj": 2})
    scales = {name: pair.scale for name, pair in read(folder, model).pairs.items()}
    assert scales["model.layers.1.mlp.up_proj"] == 8.0 and scales["model.layers.0.mlp.up_proj"] == 4.0
    assert scales["model.layers.0.self_attn.k_proj"] == 1.0


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', and LORA is served"),
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias='all'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"init_lora_weights": "pissa_niter_4"}, "began with pissa_niter_4"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"lora_alpha": "much"}, "lora_alpha must be a number, got 'much'"),
        ({"r": 5}, "the rank of model.layers.0.mlp.down_proj is 5 there and 4 in"),
    ],
)
def test_configs_that_ask_for_more(model: Path, tmp_path: Path, config: dict[str, Any], words: str) -> None:
    folder = adapter_files.write_adapter(tmp_path / "a", model, **config)
    with pytest.raises(WeightsError) as refused:
        read(folder, model)
    assert words in str(refused.value) and "adapter_config.json" in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mlp.up_proj.lora_B.weight": None}, "mlp.up_proj has no lora_B.weight"),
        ({"mlp.up_proj.lora_A.weight": (4, 63)}, "lora_A.weight of shape [4, 63]"),
        ({"mlp.up_proj.lora_B.weight": (127, 4)}, "do not fit model.layers.0.mlp.up_proj, which is [128, 64]"),
        ({"mlp.up_proj.lora_B.weight": (128, 3)}, "lora_B.weight of shape [128, 3]"),
        ({"mlp.up_proj.lora_A.weight": (4,)}, "has the shape [4] in F32: expected a matrix"),
        ({"self_attn.q_proj.lora_magnitude_vector": (64,)}, "is DoRA's"),
        ({"self_attn.q_proj.bias": (64,)}, "neither a lora_A.weight nor a lora_B.weight"),
        (
            {"mlp.gate.lora_A.weight": (4, 64), "mlp.gate.lora_B.weight": (8, 4)},
            "changes model.layers.0.mlp.gate, of which this model has none that adapters can change: they can change q",
        ),
        ({"mlp.up_proj.lora_A.weight": (20, 64), "mlp.up_proj.lora_B.weight": (128, 20)}, "has rank 20"),
    ],
)
def test_tensors_that_do_not_fit(
    model: Path, tmp_path: Path, changes: dict[str, tuple[int, ...] | None], words: str
) -> None:
    folder = adapter_files.write_adapter(tmp_path / "a", model)
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, shape in changes.items():
        tensors.pop(f"{PREFIX}.{name}", None)
        if shape is not None:
            tensors[f"{PREFIX}.{name}"] = torch.zeros(shape)
    save_file(tensors, folder / "adapter_model.safetensors")
    change(folder, rank_pattern={"layers.0.mlp.up_proj": 20} if "rank 20" in words else {})
    with pytest.raises(WeightsError) as refused:
        read(folder, model)
    assert words in str(refused.value)


def test_files_that_are_broken(model: Path, tmp_path: Path) -> None:
    folder = adapter_files.write_adapter(tmp_path / "a", model)
    whole = (folder / "adapter_model.safetensors").read_bytes()
    for broken, words in ((whole[:-10], "truncated"), (b"\xff" * 100, "not a safetensors file"), (b"", "truncated")):
        (folder / "adapter_model.safetensors").write_bytes(broken)
        with pytest.raises(WeightsError, match=words):
            read(folder, model)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(WeightsError, match="only as a PyTorch pickle"):
        read(folder, model)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(WeightsError, match="not valid JSON"):
        read(folder, model)
    with pytest.raises(WeightsError, match="no such folder"):
        find_adapter(str(tmp_path / "nowhere"))
    assert find_adapter(str(folder)) == folder


def test_matrices_that_the_models_files_have_in_one(tmp_path: Path) -> None:
    """An adapter of a fused matrix has one A; its B is cut as the matrix is."""
    names = StoredNames(fused={"attn.qkv": ("attn.q", "attn.k")}, transposed=("attn.qkv",))
    a, b, module = torch.randn(2, 8), torch.randn(6, 2), "base_model.model.m.attn.qkv"
    tensors = {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    for stored in (names, StoredNames(fused=names.fused)):  # stored [inputs, outputs], or as everybody does
        found = read_adapter(tmp_path, {"m.attn.q": (4, 8), "m.attn.k": (2, 8)}, stored, 2, 16).pairs
        assert torch.equal(found["m.attn.q"].b, b[:4]) and torch.equal(found["m.attn.k"].b, b[4:])
        assert torch.equal(found["m.attn.k"].a, a)
