from __future__ import annotations

import numpy as np
import pytest

from quire.errors import UnsupportedModelError, WeightsError
from quire.models.architectures import spec_from_config
from quire.weights.gguf_config import config_from_gguf, generation_config_from_gguf
from quire.weights.gguf_file import read_gguf


def config_of(path):
    return config_from_gguf(read_gguf(path))


def test_llama(write_gguf):
    config = config_of(write_gguf())
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "name": "Tiny",
        "vocab_size": 16,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 10_000.0,
        "rope_scaling": None,
        "sliding_window": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }


@pytest.mark.parametrize(
    ("arch", "name"),
    [
        ("llama", "LlamaForCausalLM"),
        ("qwen2", "Qwen2ForCausalLM"),
        ("qwen3", "Qwen3ForCausalLM"),
        ("gemma3", "Gemma3ForCausalLM"),
    ],
)
def test_every_architecture_makes_a_spec(write_gguf, arch, name):
    metadata = {"gemma3.attention.sliding_window": 64} if arch == "gemma3" else {}
    config = config_of(write_gguf(arch, metadata=metadata))
    spec = spec_from_config(config, source="tiny.gguf")
    assert spec.architecture == name
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (2, 4, 2, 8)
    assert spec.norm_eps == 1e-5
    assert spec.tie_embeddings
    assert spec.qkv_bias == (arch == "qwen2")
    assert spec.qk_norm == (arch in ("qwen3", "gemma3"))


def test_mistral_is_a_llama_with_a_window(write_gguf):
    config = config_of(write_gguf(metadata={"llama.attention.sliding_window": 64}))
    assert config["architectures"] == ["MistralForCausalLM"]
    assert all(layer.window == 64 for layer in spec_from_config(config, source="x").layers)


def test_gemma3_says_what_llama_cpp_leaves_unsaid(write_gguf):
    metadata = {
        "gemma3.attention.sliding_window": 64,
        "gemma3.rope.freq_base": 1e6,
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
    }
    config = config_of(write_gguf("gemma3", metadata=metadata))
    assert config["hidden_activation"] == "gelu_pytorch_tanh"
    assert config["rope_local_base_freq"] == 10_000.0
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert config["layer_types"] == ["sliding_attention"] * 2
    assert config["query_pre_attn_scalar"] == 8
    local, same = spec_from_config(config, source="x").layers
    assert local == same
    assert (local.rope.theta, local.rope.scaling, local.window) == (10_000.0, None, 64)


@pytest.mark.parametrize("pattern", [2, [True, False]])
def test_gemma3_pattern_from_the_file(write_gguf, pattern):
    metadata = {"gemma3.attention.sliding_window": 64, "gemma3.attention.sliding_window_pattern": pattern}
    config = config_of(write_gguf("gemma3", metadata=metadata))
    assert config["layer_types"] == ["sliding_attention", "full_attention"]


def test_separate_head_and_biases(write_gguf, gguf_tensors):
    tensors = gguf_tensors("llama", tied=False) | {"blk.0.attn_q.bias": np.zeros(32, np.float32)}
    config = config_of(write_gguf(tensors=tensors))
    assert not config["tie_word_embeddings"]
    assert config["attention_bias"]


@pytest.mark.parametrize(("dtype", "expected"), [(np.float16, "float16"), (np.float32, "float32")])
def test_dtype_is_that_of_most_bytes(write_gguf, gguf_tensors, dtype, expected):
    tensors = {n: t.astype(dtype) if t.ndim == 2 else t for n, t in gguf_tensors("llama").items()}
    assert config_of(write_gguf(tensors=tensors))["torch_dtype"] == expected


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({"llama.rope.scaling.type": "none"}, None),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1.0}, None),
        ({"llama.rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
                "llama.rope.scaling.yarn_beta_fast": 16.0,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0},
        ),
    ],
)
def test_rope_scaling(write_gguf, metadata, scaling):
    config = config_of(write_gguf(metadata=metadata))
    assert config["rope_scaling"] == scaling
    spec_from_config(config, source="x")


def test_rope_factors_come_from_their_tensor(write_gguf, gguf_tensors):
    factors = np.array([1, 2, 4, 8], np.float32)
    config = config_of(write_gguf(tensors=gguf_tensors("llama") | {"rope_freqs.weight": factors}))
    assert config["rope_scaling"] == {"rope_type": "factors", "factors": [1.0, 2.0, 4.0, 8.0]}
    spec = spec_from_config(config, source="x")
    assert list(spec.layers[0].rope.scaling["factors"]) == [1.0, 2.0, 4.0, 8.0]


def test_equal_numbers_for_each_layer_are_one_number(write_gguf):
    config = config_of(write_gguf(metadata={"llama.attention.head_count_kv": [2, 2]}))
    assert config["num_key_value_heads"] == 2
    with pytest.raises(UnsupportedModelError, match="head_count_kv is \\[2, 4\\]"):
        config_of(write_gguf(metadata={"llama.attention.head_count_kv": [2, 4]}))


@pytest.mark.parametrize(
    ("arch", "metadata", "error", "says"),
    [
        ("mamba", {}, UnsupportedModelError, "architecture 'mamba'; Quire runs llama, qwen2, qwen3, gemma3"),
        ("qwen3", {"qwen3.expert_count": 8}, UnsupportedModelError, "mixture of experts"),
        ("llama", {"llama.rope.dimension_count": 4}, UnsupportedModelError, "rotary embedding of 4"),
        ("llama", {"llama.attention.value_length": 4}, UnsupportedModelError, "values of 4"),
        ("llama", {"llama.embedding_length": None}, WeightsError, "lacks the metadata llama.embedding_length"),
        ("llama", {"llama.block_count": 0}, UnsupportedModelError, "block_count is 0"),
    ],
)
def test_refusals(write_gguf, arch, metadata, error, says):
    with pytest.raises(error, match=says) as caught:
        config_of(write_gguf(arch, metadata=metadata))
    assert "tiny.gguf" in str(caught.value)


def test_a_file_without_an_embedding_is_no_model(write_gguf, gguf_tensors):
    tensors = gguf_tensors("llama")
    del tensors["token_embd.weight"]
    with pytest.raises(WeightsError, match=r"no tensor token_embd.weight"):
        config_of(write_gguf(tensors=tensors))


def test_generation_ends_at_every_kind_of_end():
    metadata = {"tokenizer.ggml.eos_token_id": 9, "tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 9}
    assert generation_config_from_gguf(metadata) == {"eos_token_id": [5, 9]}
    assert generation_config_from_gguf({}) == {}


def test_how_to_sample_where_the_file_says_it():
    metadata = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20, "general.sampling.penalty_repeat": 1.1}
    expected = {"temperature": 0.5, "top_k": 20, "repetition_penalty": 1.1}
    assert generation_config_from_gguf(metadata | {"general.sampling.top_p": "0.9"}) == expected
