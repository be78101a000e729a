"""Tiny checkpoints, written on the spot, and slots that remember what they were given."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.models.slots import WeightSlot

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB = 32, 64, 4, 2, 8, 2, 16


class Recorder:
    """Slots of given shapes; `loaded` holds copies of the tensors that came."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.loaded: dict[str, Tensor] = {}
        self.randomized: dict[str, tuple[float, int]] = {}
        self.slots = {name: self._slot(name, tuple(shape)) for name, shape in shapes.items()}

    def _slot(self, name: str, shape: tuple[int, ...]) -> WeightSlot:
        def load(tensor: Tensor) -> None:
            assert name not in self.loaded, f"{name} came twice"
            self.loaded[name] = tensor.clone()

        def randomize(std: float, seed: int) -> None:
            self.randomized[name] = (std, seed)

        return WeightSlot(name, shape, load, randomize)


@pytest.fixture
def recorder() -> type[Recorder]:
    return Recorder


@pytest.fixture
def write_safetensors(tmp_path: Path) -> Callable[..., Path]:
    """Write config.json and one file, or one shard for each of the given groups of tensors, with an index."""

    def write(*groups: Mapping[str, Tensor], config: Mapping[str, Any] | None = None) -> Path:
        directory = tmp_path / "model"
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps(config or {"architectures": ["LlamaForCausalLM"]}))
        if len(groups) == 1:
            save_file(dict(groups[0]), directory / "model.safetensors")
            return directory
        weight_map = {}
        for number, group in enumerate(groups, 1):
            shard = f"model-{number:05}-of-{len(groups):05}.safetensors"
            save_file(dict(group), directory / shard)
            weight_map |= dict.fromkeys(group, shard)
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return directory

    return write


def tiny_gguf_tensors(arch: str, *, tied: bool = True) -> dict[str, np.ndarray]:
    """Random tensors under their GGUF names."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        shapes |= {
            f"{block}.attn_norm.weight": (HIDDEN,),
            f"{block}.ffn_norm.weight": (HIDDEN,),
            f"{block}.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{block}.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{block}.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{block}.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{block}.ffn_gate.weight": (FFN, HIDDEN),
            f"{block}.ffn_up.weight": (FFN, HIDDEN),
            f"{block}.ffn_down.weight": (HIDDEN, FFN),
        }
        if arch == "qwen2":
            shapes |= {
                f"{block}.attn_q.bias": (HEADS * HEAD_DIM,),
                f"{block}.attn_k.bias": (KV_HEADS * HEAD_DIM,),
                f"{block}.attn_v.bias": (KV_HEADS * HEAD_DIM,),
            }
        if arch in ("olmo2", "olmoe"):
            shapes[f"{block}.attn_q_norm.weight"] = (HEADS * HEAD_DIM,)
            shapes[f"{block}.attn_k_norm.weight"] = (KV_HEADS * HEAD_DIM,)
        if arch in ("qwen3", "gemma3"):
            shapes |= {f"{block}.attn_q_norm.weight": (HEAD_DIM,), f"{block}.attn_k_norm.weight": (HEAD_DIM,)}
        if arch in ("gemma2", "gemma3", "olmo2"):
            shapes |= {f"{block}.post_attention_norm.weight": (HIDDEN,), f"{block}.post_ffw_norm.weight": (HIDDEN,)}
        if arch == "olmo2":
            del shapes[f"{block}.attn_norm.weight"], shapes[f"{block}.ffn_norm.weight"]
        if arch == "gpt-oss":
            del shapes[f"{block}.ffn_norm.weight"]
            biases = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM, "output": HIDDEN}
            shapes |= {f"{block}.attn_{name}.bias": (width,) for name, width in biases.items()}
            shapes |= {f"{block}.post_attention_norm.weight": (HIDDEN,), f"{block}.attn_sinks.weight": (HEADS,)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Write a tiny model of an architecture. `metadata` adds to or replaces (None: removes) the usual pairs."""

    def write(
        arch: str = "llama",
        *,
        tensors: Mapping[str, np.ndarray] | None = None,
        metadata: Mapping[str, Any] | None = None,
        quantize: Mapping[str, gguf.GGMLQuantizationType] | None = None,
        name: str = "tiny.gguf",
    ) -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, arch)
        pairs: dict[str, Any] = {
            "general.name": "Tiny",
            f"{arch}.embedding_length": HIDDEN,
            f"{arch}.feed_forward_length": FFN,
            f"{arch}.block_count": LAYERS,
            f"{arch}.context_length": 128,
            f"{arch}.attention.head_count": HEADS,
            f"{arch}.attention.head_count_kv": KV_HEADS,
            f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
            f"{arch}.rope.freq_base": 10_000.0,
            f"{arch}.attention.key_length": HEAD_DIM,
            f"{arch}.attention.value_length": HEAD_DIM,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
        }
        for key, value in (pairs | dict(metadata or {})).items():
            if value is None:
                continue
            if isinstance(value, str):
                writer.add_string(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, list):
                writer.add_array(key, value)
            else:
                writer.add_uint32(key, value)
        for tensor_name, tensor in (tensors if tensors is not None else tiny_gguf_tensors(arch)).items():
            kind = (quantize or {}).get(tensor_name)
            if kind is None:
                writer.add_tensor(tensor_name, tensor)
            else:
                writer.add_tensor(tensor_name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture
def gguf_tensors() -> Callable[..., dict[str, np.ndarray]]:
    return tiny_gguf_tensors


@pytest.fixture
def nothing_ignored() -> Callable[[str], bool]:
    return lambda name: False


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test sees, or touches, what the user has cached."""
    home = tmp_path / "home"
    monkeypatch.setenv("QUIRE_HOME", str(home))
    return home


@pytest.fixture
def small_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "model.embed_tokens.weight": torch.randn(8, 4, generator=generator),
        "model.norm.weight": torch.randn(4, generator=generator).to(torch.bfloat16),
        "lm_head.weight": torch.randn(8, 4, generator=generator).to(torch.float16),
    }
