"""Configs in every spelling become the right spec; what is not served is refused by name."""

from __future__ import annotations

import pytest

from quire.errors import UnsupportedModelError
from quire.models.architectures import ARCHITECTURES, spec_from_config
from quire.models.spec import RopeSpec

SOURCE = "some/model/config.json"


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _config(architecture="LlamaForCausalLM", **changes):
    config = {
        "architectures": [architecture],
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    own = {
        "MistralForCausalLM": {"sliding_window": None},
        "Qwen3ForCausalLM": {"head_dim": 32},
        "MixtralForCausalLM": {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2},
        "Qwen2MoeForCausalLM": _EXPERTS,
        "Qwen3MoeForCausalLM": _EXPERTS | {"head_dim": 32},
        "Phi3ForCausalLM": {"sliding_window": None},
        "Starcoder2ForCausalLM": {"sliding_window": None},
        "Gemma2ForCausalLM": {"head_dim": 32, "query_pre_attn_scalar": 100, "sliding_window": 16},
        "Gemma3ForCausalLM": {"head_dim": 32, "query_pre_attn_scalar": 100, "sliding_window": 16},
        "OlmoeForCausalLM": _EXPERTS,
        "Olmo3ForCausalLM": {"sliding_window": 16},
        "GraniteMoeForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
        "GptOssForCausalLM": {
            "head_dim": 32, "sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2
        },
        "Cohere2ForCausalLM": {"sliding_window": 16},
    }  # fmt: skip
    keys = ARCHITECTURES[architecture].keys if architecture in ARCHITECTURES else {}
    without = {"num_key_value_heads"} if "num_key_value_heads" in keys else set()
    config = {keys.get(key, key): value for key, value in config.items() if key not in without}
    return {**config, **own.get(architecture, {}), **changes}


def _spec(architecture="LlamaForCausalLM", **changes):
    return spec_from_config(_config(architecture, **changes), source=SOURCE)


def _windows(spec):
    return [layer.window for layer in spec.layers]


def test_llama():
    spec = _spec()
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 2, 16)
    assert spec.attention_scale == 16**-0.5
    assert spec.layers[0].rope == RopeSpec(10_000.0)
    assert _windows(spec) == [None] * 4
    assert spec.eos_token_ids == (2,) and spec.bos_token_id == 1
    assert not (spec.qkv_bias or spec.output_bias or spec.mlp_bias or spec.qk_norm or spec.tie_embeddings)
    assert spec.dtype == "float32" and spec.activation == "silu"


def test_llama_details():
    spec = _spec(
        attention_bias=True, mlp_bias=True, head_dim=8, tie_word_embeddings=True, eos_token_id=[2, 9], bos_token_id=None
    )
    assert spec.qkv_bias and spec.output_bias and spec.mlp_bias and spec.tie_embeddings
    assert spec.head_dim == 8 and spec.eos_token_ids == (2, 9) and spec.bos_token_id is None
    assert _spec(num_key_value_heads=None).num_kv_heads == 4
    assert _spec(eos_token_id=None).eos_token_ids == ()


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_in_both_spellings(key):
    assert _spec(**{key: "bfloat16"}).dtype == "bfloat16"
    assert _spec(**{key: "torch.float16"}).dtype == "float16"


def test_rope_in_both_spellings():
    numbers = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = _spec(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **numbers})
    older = _spec(rope_theta=5e5, rope_scaling={"type": "llama3", **numbers})
    new = _spec(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **numbers})
    assert old == older == new
    assert new.layers[0].rope == RopeSpec(5e5, {"rope_type": "llama3", **numbers})
    plain = _spec(rope_theta=5e5, rope_scaling=None)
    assert plain == _spec(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert plain.layers[0].rope == RopeSpec(5e5)


def test_rope_defaults_to_the_trained_length():
    spec = _spec(rope_scaling={"type": "yarn", "factor": 4})
    assert spec.layers[0].rope.scaling["original_max_position_embeddings"] == 512
    assert spec.max_position == 2048


def test_yarn_lengthens_only_where_the_config_does_not():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert _spec(rope_scaling=yarn, max_position_embeddings=600).max_position == 2048
    assert _spec(rope_scaling=yarn, max_position_embeddings=4096).max_position == 4096
    assert _spec(rope_scaling={"rope_type": "linear", "factor": 4.0}).max_position == 512


def test_factors():
    spec = _spec(rope_scaling={"rope_type": "factors", "factors": [1, 2, 3, 4, 5, 6, 7, 8]})
    assert spec.layers[0].rope.scaling == {"rope_type": "factors", "factors": [1.0, 2, 3, 4, 5, 6, 7, 8]}


def test_mistral():
    assert _windows(_spec("MistralForCausalLM", sliding_window=None)) == [None] * 4
    assert _windows(_spec("MistralForCausalLM", sliding_window=7)) == [7] * 4


def test_qwen2():
    spec = _spec("Qwen2ForCausalLM", sliding_window=8, max_window_layers=3, use_sliding_window=False)
    assert spec.qkv_bias and not spec.output_bias
    assert _windows(spec) == [None] * 4
    for first, windows in ((3, [None, None, None, 8]), (0, [8] * 4), (28, [None] * 4)):
        spec = _spec("Qwen2ForCausalLM", sliding_window=8, max_window_layers=first, use_sliding_window=True)
        assert _windows(spec) == windows
    kinds = ["sliding_attention", "full_attention"] * 2
    spec = _spec("Qwen2ForCausalLM", sliding_window=8, layer_types=kinds, use_sliding_window=True)
    assert _windows(spec) == [8, None, 8, None]


def test_qwen3():
    spec = _spec("Qwen3ForCausalLM")
    assert spec.qk_norm and spec.head_dim == 32 and not spec.qkv_bias
    assert _spec("Qwen3ForCausalLM", attention_bias=True).output_bias


def test_gemma3():
    spec = _spec("Gemma3ForCausalLM", sliding_window_pattern=3, rope_theta=1e6, rope_local_base_freq=1e4)
    assert _windows(spec) == [16, 16, None, 16]
    assert [layer.rope.theta for layer in spec.layers] == [1e4, 1e4, 1e6, 1e4]
    assert spec.norm_offset and spec.sandwich_norms and spec.qk_norm and spec.tie_embeddings
    assert spec.embedding_scale == 8.0 and spec.attention_scale == 0.1
    assert spec.activation == "gelu_tanh"
    assert spec.logit_softcap is None
    assert _spec("Gemma3ForCausalLM", final_logit_softcapping=30.0, attn_logit_softcapping=50).logit_softcap == 30.0
    assert _spec("Gemma3ForCausalLM", attn_logit_softcapping=50).attention_softcap == 50.0


def test_gemma3_in_both_spellings():
    linear = {"rope_type": "linear", "factor": 8.0}
    old = _spec("Gemma3ForCausalLM", rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=linear)
    new = _spec(
        "Gemma3ForCausalLM",
        layer_types=["sliding_attention"] * 4,
        rope_parameters={
            "full_attention": {**linear, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    assert old.layers == new.layers
    listed = _spec("Gemma3ForCausalLM", layer_types=["full_attention"] * 4, rope_theta=1e6, rope_scaling=linear)
    assert listed.layers[0].rope == RopeSpec(1e6, linear)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "DeepseekV3ForCausalLM is not served.*LlamaForCausalLM"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "takes images too.*google/gemma-3-1b-it"),
        ({"architectures": None}, "architectures is missing"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config: hqq"),
        ({"num_local_experts": 8}, "num_local_experts is 8: this architecture is served without experts"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not served"),
        ({"rope_scaling": {"rope_type": "proportional"}}, "rope_scaling: rope_type 'proportional' is not served"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling: short_factor must be 8 positive numbers"),
        ({"rope_parameters": {"type": "mrope"}}, "rope_parameters: rope_type 'mrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2, "zeta": 1}}, "zeta is not served"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear': expected an object"),
        ({"rope_scaling": {"rope_type": "factors", "factors": [1.0]}}, "factors must be 8 positive numbers"),
        ({"rope_scaling": {"rope_type": "factors"}}, "factors must be 8"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 1}},
            "high_freq_factor must be greater",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not 1"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is not served"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"hidden_size": "64"}, "hidden_size is '64': expected a positive whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1: expected a positive number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes': expected true or false"),
        ({"dtype": "float8"}, "dtype 'float8' is not served"),
        ({"layer_types": ["full_attention"]}, "layer_types must list 4 layers"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer type 'chunked_attention' is not served"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types contradicts"),
        ({"use_bidirectional_attention": True}, "only causal decoders"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is set"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"bos_token_id": [1]}, "bos_token_id is"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(UnsupportedModelError, match=f"^{SOURCE}: .*{message}"):
        _spec(**changes)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("MistralForCausalLM", {"attention_bias": True}, "attention_bias is set"),
        ("MistralForCausalLM", {"mlp_bias": True}, "mlp_bias is set"),
        ("MistralForCausalLM", {"sliding_window": 0}, "sliding_window is 0"),
        ("Qwen3ForCausalLM", {"head_dim": None}, "head_dim is missing"),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": None},
            "max_window_layers is missing",
        ),
        ("Gemma3ForCausalLM", {"query_pre_attn_scalar": None}, "query_pre_attn_scalar is missing"),
        ("Gemma3ForCausalLM", {"sliding_window": None}, "sliding_window is missing"),
    ],
)
def test_refusals_of_one_architecture(architecture, changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        _spec(architecture, **changes)


def test_a_mistral_config_must_say_whether_it_has_a_window():
    config = _config("MistralForCausalLM")
    del config["sliding_window"]
    with pytest.raises(UnsupportedModelError, match="sliding_window is missing"):
        spec_from_config(config, source=SOURCE)


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "rms_norm_eps",
    ],
)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_missing_key_is_named_with_its_file(architecture, key):
    config, described = _config(architecture), ARCHITECTURES[architecture]
    if key == "intermediate_size" and described.inner_ratio is not None:
        return
    if key == "max_position_embeddings" and described.trained_length is not None:
        return
    key = described.keys.get(key, key)
    del config[key]
    with pytest.raises(UnsupportedModelError, match=f"^{SOURCE}: {key} is missing$"):
        spec_from_config(config, source=SOURCE)


def test_pretraining_tp_changes_nothing():
    """It only splits the products that some trainings ran in parts; their sum is the same."""
    assert _spec(pretraining_tp=2) == _spec()
