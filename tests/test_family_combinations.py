"""docs/combinations.md for packed weights, experts and LayerNorm: whatever the engine does, tokens stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fakes
import gguf
import numpy as np
import pytest

from quire import LLM
from tests.test_combinations import ENGINES, ask, check

NAMES = ("prompts in chunks", "few blocks, computed again", "few blocks, swapped", "drafts by n-gram")
EXPERTS = {
    "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "num_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
}  # fmt: skip
LAYER_NORMS = {
    "architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2", "norm_epsilon": 1e-5, "use_bias": True,
    "sliding_window": 32, "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip


def write_packed(path: Path) -> None:
    """TINY_LLAMA as a GGUF file of several types, with the spread that dummy weights have."""
    config, kinds = fakes.TINY_LLAMA, gguf.GGMLQuantizationType
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_rows, kv_rows = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {
        "embedding_length": hidden, "feed_forward_length": inner, "block_count": 2, "context_length": 256,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": head_dim,
        "attention.value_length": head_dim,
    }.items():  # fmt: skip
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 257)
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (config["vocab_size"], hidden, kinds.Q8_0)}
    for layer in range(2):
        of_layer = {
            "attn_q": (q_rows, hidden, kinds.Q4_0), "attn_k": (kv_rows, hidden, kinds.Q4_1),
            "attn_v": (kv_rows, hidden, kinds.Q8_0), "attn_output": (hidden, q_rows, kinds.Q5_0),
            "ffn_gate": (inner, hidden, kinds.Q5_1), "ffn_up": (inner, hidden, kinds.Q4_0),
            "ffn_down": (hidden, inner, kinds.Q8_0),
        }  # fmt: skip
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in of_layer.items()}
    for name, (rows, columns, kind) in shapes.items():
        values = rng.normal(0, 0.3, (rows, columns)).astype(np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name in ("output_norm", *(f"blk.{layer}.{norm}" for layer in range(2) for norm in ("attn_norm", "ffn_norm"))):
        writer.add_tensor(f"{name}.weight", np.ones(hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What makes an LLM of each kind."""
    folder = tmp_path_factory.mktemp("kinds")
    tokenizer = fakes.write_tiny_model(folder / "tokenizer")
    write_packed(folder / "packed.gguf")
    kinds: dict[str, dict[str, Any]] = {"packed": {"model": str(folder / "packed.gguf"), "tokenizer": str(tokenizer)}}
    for name, changes in {"experts": EXPERTS, "layer norms": LAYER_NORMS}.items():
        model = fakes.write_tiny_model(folder / name.replace(" ", "-"), **changes)
        kinds[name] = {"model": str(model), "load_format": "dummy", "dtype": "float32"}
    return kinds


@pytest.mark.parametrize("kind", ["packed", "experts", "layer norms"])
def test_every_request_on_these_engines(kind: str, models: dict[str, dict[str, Any]]) -> None:
    common = models[kind] | {"max_model_len": 256, "device": "cpu", "num_threads": 1}
    expected = ask(LLM(**common))
    for engine in NAMES:
        llm = LLM(**common, **ENGINES[engine])
        for name, output in ask(llm).items():
            check(name, output, expected[name])
