"""Rotary tables are transformers' own, for every scaling."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from quire.errors import ConfigError
from quire.layers.rotary import ROPE_TYPES, rotary_frequencies, rotary_table
from quire.models.architectures import spec_from_config
from quire.models.rope_config import KEYS_BY_TYPE

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
CASES = {
    "default": {"rope_type": "default", "rope_theta": 500_000.0},
    "linear": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10_000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0},
    "llama3": {**LLAMA3, "rope_theta": 500_000.0, "original_max_position_embeddings": 512},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0 + i / 8 for i in range(32)],
        "long_factor": [2.0 + i for i in range(32)],
        "original_max_position_embeddings": 2048,
    },
    "yarn": {**YARN, "rope_theta": 10_000.0},
    "yarn-betas": {**YARN, "rope_theta": 1_000_000.0, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "yarn-step": {**YARN, "rope_theta": 10_000.0, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    "yarn-mscale": {**YARN, "rope_theta": 10_000.0, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn-attention-factor": {**YARN, "rope_theta": 10_000.0, "attention_factor": 1.25},
}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", CASES)
def test_table_is_that_of_transformers(name, head_dim):
    parameters = dict(CASES[name])
    for key in ("short_factor", "long_factor"):
        if key in parameters:
            parameters[key] = parameters[key] * (head_dim // 64)
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        intermediate_size=8,
        num_hidden_layers=1,
        max_position_embeddings=2048,
        rope_parameters=parameters,
        architectures=["LlamaForCausalLM"],
    )
    positions = torch.arange(2048)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    rope = spec_from_config(config.to_dict(), source="config.json").layers[0].rope
    table = rotary_table(rope.theta, rope.scaling, head_dim, 2048)
    assert table.shape == (2048, head_dim) and table.dtype == torch.float32
    half = head_dim // 2
    torch.testing.assert_close(table[:, :half], cos[0, :, :half], rtol=0, atol=1e-6)
    torch.testing.assert_close(table[:, half:], sin[0, :, :half], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("default", "dynamic")])
def test_each_scaling_changes_the_table(name):
    """Else agreement with transformers would say nothing."""
    config = _tiny_config(rope_parameters=dict(CASES[name]), max_position_embeddings=2048)
    rope = spec_from_config(config, source="config.json").layers[0].rope
    scaled, plain = rotary_table(rope.theta, rope.scaling, 64, 512), rotary_table(rope.theta, None, 64, 512)
    assert (scaled - plain).abs().max() > 0.1


def test_factors_divide_the_frequencies():
    factors = [1.0 + i for i in range(32)]
    plain, _ = rotary_frequencies(10_000.0, None, 64, 16)
    scaled, magnitude = rotary_frequencies(10_000.0, {"rope_type": "factors", "factors": factors}, 64, 16)
    assert magnitude == 1.0
    torch.testing.assert_close(scaled, plain / torch.tensor(factors))


def test_factors_can_say_what_llama3_says():
    """A GGUF file holds the quotients of plain and scaled frequencies."""
    scaling = {**LLAMA3, "original_max_position_embeddings": 512}
    plain, _ = rotary_frequencies(500_000.0, None, 64, 16)
    wanted, _ = rotary_frequencies(500_000.0, scaling, 64, 16)
    got, _ = rotary_frequencies(500_000.0, {"rope_type": "factors", "factors": (plain / wanted).tolist()}, 64, 16)
    torch.testing.assert_close(got, wanted)


def test_dynamic_ends_at_the_trained_length():
    scaling = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 100}
    torch.testing.assert_close(rotary_table(10_000.0, scaling, 64, 100), rotary_table(10_000.0, None, 64, 100))
    with pytest.raises(ConfigError, match="lower max_model_len to 100"):
        rotary_table(10_000.0, scaling, 64, 101)


def test_every_type_is_tested_here():
    assert {case["rope_type"] for case in CASES.values()} - {"default"} | {"factors"} == ROPE_TYPES.keys()
    assert KEYS_BY_TYPE.keys() == ROPE_TYPES.keys() | {"default"}


def _tiny_config(**changes):
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 10,
        "hidden_size": 64,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        **changes,
    }
