"""EngineConfig: what a user asked of the engine, checked once. Frozen; a derived config is a new one.

`None` means "choose for me": the executor's start-up turns it into a number, from the device and the model, and the
ledger shows what was chosen.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.errors import ConfigError

BLOCK_SIZES = (4, 8, 16, 32, 64, 128)
GIB = 1 << 30

_DTYPES = {
    "auto": "auto",
    "float32": "float32",
    "fp32": "float32",
    "float": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
}
_KV_DTYPES = _DTYPES | {"fp8": "fp8", "fp8_e4m3": "fp8"}
_LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
_POLICIES = ("fcfs", "priority")
_PREEMPTIONS = ("auto", "recompute", "swap")

# vLLM's spelling -> ours.
_SPELLINGS = {
    "swap_space": "swap_space_gb",
    "max_seq_len": "max_model_len",
    "preemption_mode": "preemption",
}

# Arguments that vLLM's users write and that Quire serves with one value only: (that value, what to say otherwise).
_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "trust_remote_code": ((False, None), "Quire runs no code out of a model repository"),
    "tensor_parallel_size": ((1, None), "Quire runs on one device for now"),
    "pipeline_parallel_size": ((1, None), "Quire runs on one device for now"),
    "data_parallel_size": ((1, None), "Quire runs one replica for now"),
    "cpu_offload_gb": ((0, None), "Quire does not offload weights"),
    "tokenizer_mode": (("auto", None), "Quire has one tokenizer implementation"),
    "tokenizer_revision": ((None,), "the tokenizer comes with the model's revision"),
    "enable_lora": ((False, None), "Quire has no LoRA yet"),
    "compilation_config": ((None,), "Quire compiles nothing on start"),
    "attention_config": ((None,), "the backend is chosen by device"),
    "structured_outputs_config": ((None,), "Quire has no structured output yet"),
    "logits_processors": ((None,), "Quire has no custom logits processors yet"),
    "speculative_config": ((None,), "Quire has no speculative decoding yet"),
    "spec_method": ((None,), "Quire has no speculative decoding yet"),
    "spec_model": ((None,), "Quire has no speculative decoding yet"),
    "spec_tokens": ((None,), "Quire has no speculative decoding yet"),
    "kv_transfer_config": ((None,), "Quire has no KV transfer yet"),
    "disable_log_stats": ((True, False, None), "statistics are always on and cost nothing"),
}


@dataclass(slots=True, frozen=True, kw_only=True)
class EngineConfig:
    """Everything the engine can be told. Use `EngineConfig.from_kwargs` for arguments that a user wrote."""

    # The model
    model: str = "smollm2"
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    revision: str | None = None
    load_format: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    hf_overrides: Mapping[str, Any] | None = None
    chat_template: str | None = None
    max_model_len: int | None = None  # None: the longest that model and cache serve
    seed: int = 0
    # Where and how it runs
    device: str = "auto"
    num_threads: int | None = None
    enforce_eager: bool = False
    # The cache
    block_size: int = 16
    enable_prefix_caching: bool = True
    kv_cache_dtype: str = "auto"
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.92
    swap_space_gb: float = 0.0
    pinned_prefixes: tuple[str | tuple[int, ...], ...] = ()
    watermark: float = 0.01
    # The scheduler
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int | None = None
    target_step_ms: float | None = None
    smooth_prefill_tokens: int | None = None
    scheduling_policy: str = "fcfs"
    priority_ageing_s: float = 10.0
    preemption: str = "auto"

    # What the user wrote, for messages; not part of the meaning.
    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineConfig:
        """Check arguments that a user wrote: other spellings are understood, unknown ones are refused by name."""
        for name, (allowed, why) in _ONLY.items():
            if name in kwargs and kwargs.pop(name) not in allowed:
                raise ConfigError(f"{name} is not supported: {why}. Remove it, or set it to {allowed[0]!r}")
        for theirs, ours in _SPELLINGS.items():
            if theirs in kwargs:
                if ours in kwargs:
                    raise ConfigError(f"{theirs} and {ours} are the same thing: give one of them")
                kwargs[ours] = kwargs.pop(theirs)
        known = {f.name for f in dataclasses.fields(cls)} - {"given"}
        for name in kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, known | set(_SPELLINGS), n=1)
                hint = f" Did you mean {near[0]}?" if near else ""
                raise ConfigError(f"unknown argument {name!r}.{hint}")
        given = frozenset(kwargs)
        values = {k: v for k, v in kwargs.items() if v is not None}
        if values.get("max_model_len") in (-1, "auto"):
            del values["max_model_len"]
        if "pinned_prefixes" in values:
            values["pinned_prefixes"] = _prefixes(values["pinned_prefixes"])
        return cls(**values, given=given)

    def __post_init__(self) -> None:
        if self.hf_overrides is not None and not isinstance(self.hf_overrides, Mapping):
            raise ConfigError(f"hf_overrides must map names of config.json to values, got {self.hf_overrides!r}")
        self._set("dtype", _choice(_dtype_name(self.dtype), "dtype", _DTYPES))
        self._set("kv_cache_dtype", _choice(_dtype_name(self.kv_cache_dtype), "kv_cache_dtype", _KV_DTYPES))
        _one_of(self.load_format, "load_format", _LOAD_FORMATS)
        _one_of(self.scheduling_policy, "scheduling_policy", _POLICIES)
        _one_of(self.preemption, "preemption", _PREEMPTIONS)
        if self.quantization is not None:
            _one_of(self.quantization, "quantization", ("int8",))
            if self.dtype not in ("auto", "float32"):
                raise ConfigError(
                    f"quantization={self.quantization!r} and dtype={self.dtype!r} contradict each other: give one"
                )
        if self.block_size not in BLOCK_SIZES:
            raise ConfigError(f"block_size must be one of {', '.join(map(str, BLOCK_SIZES))}, got {self.block_size!r}")
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model must be an alias, a path or a hub id, got {self.model!r}")
        self._check_numbers()
        if self.preemption == "swap" and not self.swap_space_gb:
            raise ConfigError("preemption='swap' needs a host pool: set swap_space_gb to its size, e.g. 4")
        if self.pinned_prefixes and not self.enable_prefix_caching:
            raise ConfigError("pinned_prefixes need enable_prefix_caching=True")

    def _check_numbers(self) -> None:
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "num_threads",
            "long_prefill_token_threshold",
            "kv_cache_memory_bytes",
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"{name} must be a whole number >= 1, got {value!r}")
        smooth = self.smooth_prefill_tokens
        if smooth is not None and (not isinstance(smooth, int) or isinstance(smooth, bool) or smooth < 0):
            raise ConfigError(f"smooth_prefill_tokens must be a whole number >= 1, or 0 for no limit, got {smooth!r}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ConfigError(f"seed must be a whole number, got {self.seed!r}")
        _between(self.gpu_memory_utilization, "gpu_memory_utilization", 0.0, 1.0, open_low=True)
        _between(self.swap_space_gb, "swap_space_gb", 0.0, 1 << 20)
        _between(self.watermark, "watermark", 0.0, 0.5)
        _between(self.priority_ageing_s, "priority_ageing_s", 0.0, 1e9, open_low=True)
        if self.target_step_ms is not None:
            _between(self.target_step_ms, "target_step_ms", 0.0, 1e9, open_low=True)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # only from __post_init__: canonical spellings

    def replace(self, **changes: Any) -> EngineConfig:
        return dataclasses.replace(self, **changes)


def _prefixes(value: Any) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(value, str):
        value = [value]
    prefixes: list[str | tuple[int, ...]] = []
    for entry in value:
        if isinstance(entry, str) and entry:
            prefixes.append(entry)
        elif isinstance(entry, Sequence) and entry and all(isinstance(t, int) for t in entry):
            prefixes.append(tuple(entry))
        else:
            raise ConfigError("pinned_prefixes must be texts or lists of token ids, none of them empty")
    return tuple(prefixes)


def _dtype_name(value: Any) -> str:
    """Accepts torch.float16 as well as "float16", without importing torch."""
    return str(value).removeprefix("torch.")


def _choice(value: str, name: str, table: Mapping[str, str]) -> str:
    if value not in table:
        raise ConfigError(f"{name} must be one of {', '.join(sorted(set(table.values())))}, got {value!r}")
    return table[value]


def _one_of(value: Any, name: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def _between(value: Any, name: str, low: float, high: float, *, open_low: bool = False) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name} must be between {low:g} and {high:g}, got {value!r}")
    if open_low and value == low:
        raise ConfigError(f"{name} must be more than {low:g}")
