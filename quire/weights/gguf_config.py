"""A GGUF file's metadata as a Hugging Face config, so that one code path builds every model.

What llama.cpp leaves unsaid because it is hard-coded there (Gemma 3's local rotary base, its pattern of windows) is
said here.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from quire.errors import UnsupportedModelError, WeightsError
from quire.models.config_reader import ConfigReader, shown
from quire.weights.checkpoint import TensorEntry
from quire.weights.gguf_file import GGUFFile

# general.architecture -> (architectures[0], model_type). Mistral's files say llama too.
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3"),
    "granite": ("GraniteForCausalLM", "granite"),
    "olmo2": ("Olmo2ForCausalLM", "olmo2"),
    "qwen2moe": ("Qwen2MoeForCausalLM", "qwen2_moe"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "granitemoe": ("GraniteMoeForCausalLM", "granitemoe"),
    "olmoe": ("OlmoeForCausalLM", "olmoe"),
    "gpt-oss": ("GptOssForCausalLM", "gpt_oss"),
}
_WITH_EXPERTS = ("llama", "qwen2moe", "qwen3moe", "granitemoe", "olmoe", "gpt-oss")
ROPE_FACTORS = "rope_freqs.weight"
# general.sampling.* -> generation_config.json
_SAMPLING = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}

_GEMMA3_LOCAL_ROPE_THETA = 10_000.0
_GEMMA3_WINDOW_PATTERN = 6  # every sixth layer sees everything
_GEMMA_27B_LAYERS = {"gemma3": 62, "gemma2": 46}


def config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """The config.json that the model would have as safetensors."""
    return _ConfigBuilder(file).build()


def generation_config_from_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Every token that ends a generation (the end of a text, of a turn, of a message), and how to sample where the file
    says it."""
    config: dict[str, Any] = {
        name: metadata[f"general.sampling.{key}"]
        for key, name in _SAMPLING.items()
        if isinstance(metadata.get(f"general.sampling.{key}"), int | float)
    }
    kinds = ("eos", "eot", "eom")
    ids = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in kinds]
    unique = sorted({i for i in ids if type(i) is int})
    return config | ({"eos_token_id": unique} if unique else {})


class _ConfigBuilder:
    __slots__ = ("_arch", "_file", "_metadata", "_tensors")

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._metadata = file.metadata
        self._tensors: dict[str, TensorEntry] = {t.stored_name: t for t in file.tensors}
        arch = self._metadata.get("general.architecture")
        if not isinstance(arch, str) or arch not in ARCHITECTURES:
            named = "no general.architecture" if arch is None else f"architecture {str(arch)[:80]!r}"
            raise UnsupportedModelError(
                f"{file.path}: a GGUF file of {named}; Quire runs {', '.join(ARCHITECTURES)}: use a model of these"
            )
        self._arch = arch
        if self._get("expert_count", 0) and arch not in _WITH_EXPERTS:
            raise UnsupportedModelError(
                f"{file.path}: a mixture of experts of architecture {arch}; Quire runs those of "
                f"{', '.join(_WITH_EXPERTS)}"
            )

    def build(self) -> dict[str, Any]:
        name, model_type = ARCHITECTURES[self._arch]
        hidden_size = self._integer("embedding_length")
        num_heads = self._integer("attention.head_count")
        head_dim = self._integer("attention.key_length", hidden_size // num_heads)
        rotary_dim = self._integer("rope.dimension_count", head_dim)
        value_dim = self._integer("attention.value_length", head_dim)
        if rotary_dim != head_dim or value_dim != head_dim:
            raise UnsupportedModelError(
                f"{self._file.path}: keys of {head_dim}, values of {value_dim} and rotary embedding of {rotary_dim} "
                "numbers a head: Quire runs models where the three are equal"
            )
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None:
            raise WeightsError(f"{self._file.path}: has no tensor token_embd.weight: not a whole model, fetch it again")
        config = {
            "architectures": [name],
            "model_type": model_type,
            "name": self._metadata.get("general.name"),
            "vocab_size": embedding.shape[0],
            "hidden_size": hidden_size,
            "intermediate_size": self._integer("feed_forward_length"),
            "num_hidden_layers": self._num_layers(),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._integer("attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "max_position_embeddings": self._integer("context_length"),
            "rms_norm_eps": float(f"{self._number('attention.layer_norm_rms_epsilon'):.6g}"),  # 1e-5, not 9.99...e-6
            "hidden_act": "silu",
            "rope_theta": self._get("rope.freq_base", 10_000.0),
            "rope_scaling": self._rope_scaling(head_dim),
            "sliding_window": self._get("attention.sliding_window", 0) or None,
            # Qwen2 always has biases, on q, k and v alone; this entry means all four projections.
            "attention_bias": self._arch not in ("qwen2", "qwen2moe") and "blk.0.attn_q.bias" in self._tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in self._tensors,
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "bos_token_id": self._metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._metadata.get("tokenizer.ggml.eos_token_id"),
            "torch_dtype": self._dtype(),
        }
        if self._arch in _GEMMA_27B_LAYERS:
            config |= self._gemma(config)
        if self._arch == "gemma3":
            config |= self._gemma3_windows(config["num_hidden_layers"])
        if self._arch in ("granite", "granitemoe"):
            config |= self._granite()
        if self._get("expert_count"):
            config |= self._experts(config)
        elif self._arch == "llama" and config["sliding_window"]:
            config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
        return config

    def _granite(self) -> dict[str, Any]:
        keys = {
            "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
        }  # fmt: skip
        return {name: self._get(key, 1.0) for name, key in keys.items()}

    def _gemma(self, config: Mapping[str, Any]) -> dict[str, Any]:
        scale_dim = config["head_dim"]
        if config["num_hidden_layers"] == _GEMMA_27B_LAYERS[self._arch]:
            # The one size that scales by the width a head, not by the head.
            scale_dim = config["hidden_size"] // config["num_attention_heads"]
        return {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": scale_dim,
            "final_logit_softcapping": self._get("final_logit_softcapping"),
            "attn_logit_softcapping": self._get("attn_logit_softcapping"),
        }

    def _gemma3_windows(self, num_layers: int) -> dict[str, Any]:
        pattern = self._get("attention.sliding_window_pattern", _GEMMA3_WINDOW_PATTERN)
        if isinstance(pattern, list):  # one flag a layer: whether it has a window
            windowed = [bool(flag) for flag in pattern]
        else:
            pattern = self._integer("attention.sliding_window_pattern", _GEMMA3_WINDOW_PATTERN)
            windowed = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
        return {
            "hidden_act": "gelu_pytorch_tanh",
            "rope_local_base_freq": self._get("rope.freq_base_swa", _GEMMA3_LOCAL_ROPE_THETA),
            "rope_theta": self._get("rope.freq_base", 1_000_000.0),
            "layer_types": ["sliding_attention" if flag else "full_attention" for flag in windowed],
        }

    def _experts(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """llama.cpp says llama for Mixtral too, and knows by the architecture whether weights are normalized."""
        count = self._integer("expert_count")
        experts = {"num_experts_per_tok": self._integer("expert_used_count")}
        if self._arch == "llama":
            return experts | {
                "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": count
            }  # fmt: skip
        size = self._get("expert_feed_forward_length", config["intermediate_size"])
        if self._arch in ("granitemoe", "gpt-oss"):
            return experts | {"num_local_experts": count, "intermediate_size": size}
        if self._arch == "olmoe":
            return experts | {"num_experts": count, "intermediate_size": size, "norm_topk_prob": False}
        experts |= {"num_experts": count, "norm_topk_prob": self._arch == "qwen3moe"}
        gate = self._tensors.get("blk.0.ffn_gate_exps.weight")
        size = self._get("expert_feed_forward_length", gate.shape[1] if gate is not None else None)
        shared = self._tensors.get("blk.0.ffn_gate_shexp.weight")
        return experts | {
            "moe_intermediate_size": size,
            "shared_expert_intermediate_size": None if shared is None else shared.shape[0],
        }

    def _num_layers(self) -> int:
        """block_count, held against the tensors: what follows takes its word for it."""
        num_layers = self._integer("block_count")
        present = {name.split(".", 2)[1] for name in self._tensors if name.startswith("blk.")}
        if num_layers > len(present):
            raise WeightsError(
                f"{self._file.path}: {self._arch}.block_count is {num_layers:,}, and the file has the tensors of "
                f"{len(present):,} layers: fetch it again"
            )
        return num_layers

    def _rope_scaling(self, head_dim: int) -> dict[str, Any] | None:
        factors = self._tensors.get(ROPE_FACTORS)
        if factors is not None:  # Llama 3.1's scaling, worked out: inv_freq is divided by these
            count = factors.num_bytes // 4
            if factors.dtype != "F32" or count != head_dim // 2:
                raise WeightsError(
                    f"{self._file.path}: {ROPE_FACTORS} has {count:,} values of type {factors.dtype}, expected "
                    f"{head_dim // 2} of F32: fetch it again"
                )
            values = struct.unpack_from(f"<{count}f", self._file.data, factors.offset)
            return {"rope_type": "factors", "factors": list(values)}
        kind = self._get("rope.scaling.type", "linear" if self._get("rope.scale_linear") else "none")
        factor = self._get("rope.scaling.factor", self._get("rope.scale_linear", 1.0))
        if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
            return None
        scaling = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            original = self._get("rope.scaling.original_context_length")
            if original:
                scaling["original_max_position_embeddings"] = original
            if self._arch == "gpt-oss":
                scaling["truncate"] = False
            for key in ("beta_fast", "beta_slow"):
                if (value := self._get(f"rope.scaling.yarn_{key}")) is not None:
                    scaling[key] = value
        return scaling  # a kind that Quire lacks is refused by name where the spec is made

    def _dtype(self) -> str:
        """The type to compute in, as far as the file knows: quantized ones widen to float32."""
        num_bytes: dict[str, int] = {}
        for tensor in self._file.tensors:
            num_bytes[tensor.dtype] = num_bytes.get(tensor.dtype, 0) + tensor.num_bytes
        most = max(num_bytes, key=lambda dtype: num_bytes[dtype])
        return {"F16": "float16", "BF16": "bfloat16"}.get(most, "float32")

    def _get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"{self._arch}.{key}", default)

    def _require(self, key: str) -> Any:
        value = self._get(key)
        if value is None:
            raise WeightsError(f"{self._file.path}: lacks the metadata {self._arch}.{key}: convert the model again")
        return value

    def _number(self, key: str) -> float:
        return ConfigReader({key: self._require(key)}, f"{self._file.path}: {self._arch}").number(key)

    def _integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if value is None:
            value = self._require(key)
        if isinstance(value, list) and value and len(set(value)) == 1:
            value = value[0]  # given for each layer, and the same in all
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise UnsupportedModelError(
                f"{self._file.path}: {self._arch}.{key} is {shown(value)}; Quire runs models with one positive number "
                "here"
            )
        return value
